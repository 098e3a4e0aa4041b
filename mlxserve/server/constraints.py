"""What the answer must conform to: formats and forced tool calls as SamplingParams fields.

Knows: OpenAI's response_format, vLLM's structured_outputs, tool_choice. Does not know how a constraint is
kept (the engine's grammar does that, and refuses a schema it cannot enforce).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mlxserve.errors import UsageError
from mlxserve.server import openai_types as wire


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one call.

    offered: definitions that the prompt shows. forced: a call must come. `only` names the one that must.
    """

    offered: tuple[dict[str, Any], ...] = ()
    forced: bool = False
    only: str | None = None

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.offered]


# SamplingParams' names for what structured_outputs holds.
OUTPUT_FIELDS = {
    "schema": "json",
    "regex": "regex",
    "choices": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}


def from_format(chosen: wire.ResponseFormat | None) -> dict[str, Any]:
    """SamplingParams fields of a response_format."""
    match chosen:
        case wire.JsonFormat():
            return {"json_object": True}
        case wire.SchemaFormat(json_schema=spec):
            return {"schema": True if spec.schema is None else spec.schema}
        case _:
            return {}


def from_outputs(chosen: wire.StructuredOutputs | None) -> dict[str, Any]:
    """SamplingParams fields of a structured_outputs object; exactly one constraint in it."""
    if chosen is None:
        return {}
    fields = {
        "schema": _schema(chosen.json),
        "regex": chosen.regex,
        "choices": chosen.choice,
        "grammar": chosen.grammar,
        "json_object": chosen.json_object or None,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if len(given) != 1:
        raise UsageError(
            "structured_outputs must hold exactly one of json, regex, choice, grammar and json_object.",
            param="structured_outputs",
        )
    if chosen.choice is not None and not all(chosen.choice or [""]):
        raise UsageError(
            "structured_outputs.choice must be non-empty strings.", param="structured_outputs.choice"
        )
    return given


def _schema(value: dict[str, Any] | str | None) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"structured_outputs.json is not valid JSON: {error}.", param="structured_outputs.json"
        ) from None


def choose_tools(tools: Sequence[wire.ChatTool] | None, choice: wire.ToolChoice | None) -> Tools:
    """Which tools are shown, and whether one must be called. No tools and `[]` are the same."""
    offered = tuple(definition(tool) for tool in tools or ())
    _no_doubles(offered)
    match choice:
        case None | "auto":
            return Tools(offered)
        case "none":
            return Tools()
        case "required":
            return _needing(Tools(offered, forced=True))
        case wire.NamedChoice(function=function):
            return _needing(Tools(_subset(offered, [function.name]), True, function.name))
        case wire.AllowedChoice(allowed_tools=allowed):
            names = [tool.function.name for tool in allowed.tools]
            return _needing(Tools(_subset(offered, names), allowed.mode == "required"))


def definition(tool: wire.ChatTool) -> dict[str, Any]:
    """The tool as templates expect it, without null fields."""
    function = {
        "name": tool.function.name,
        "description": tool.function.description,
        "parameters": tool.function.parameters,
        "strict": tool.function.strict,
    }
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _no_doubles(offered: Sequence[Mapping[str, Any]]) -> None:
    seen = set()
    for i, tool in enumerate(offered):
        name = tool["function"]["name"]
        if name in seen:
            raise UsageError(f"Two tools are named '{name}'.", param=f"tools[{i}].function.name")
        seen.add(name)


def _needing(tools: Tools) -> Tools:
    if not tools.offered:
        raise UsageError("tool_choice asks for a tool, but there are no tools.", param="tool_choice")
    return tools


def _subset(offered: Sequence[dict[str, Any]], names: Sequence[str]) -> tuple[dict[str, Any], ...]:
    known = {tool["function"]["name"]: tool for tool in offered}
    for name in names:
        if name not in known:
            raise UsageError(
                f"tool_choice names '{name}', which is not among the tools.", param="tool_choice"
            )
    return tuple(known[name] for name in names)
