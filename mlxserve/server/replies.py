"""How one reply is begun, held to a form, and read: decided from the prompt, the settings and the tools.

Knows: this model's marks of reasoning and calls. Does not know engines or APIs.

    a call must come       the grammar of that call, read as such             (forced.py)
    a format holds         the answer alone, reasoning closed; all text is text
    a format, and tools    the answer in that form or calls that conform, reasoning closed   (forced.py)
    tools are strict       free text, but a call that begins must conform     (forced.py, and checked again)
    else                   the text room's parser
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jsonschema import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for

from mlxserve.errors import Unsupported, UsageError
from mlxserve.request import SamplingParams
from mlxserve.server.constraints import Tools
from mlxserve.server.forced import ForcedCallParser, call_grammar, form_or_calls_grammar, strict_grammar
from mlxserve.text.events import Event, Reasoning, Text, ToolArguments, ToolEnd, ToolStart
from mlxserve.text.reply import ReplyParser as TextParser
from mlxserve.text.tokenizer import Tokenizer

_TAIL_TOKENS = 64  # of a prompt, in which reasoning may have been begun
# gpt-oss answers in channels; this opens the one that a person reads.
_FINAL_CHANNEL = "<|channel|>final<|message|>"


class ReplyParser(Protocol):
    """Reads one reply as it comes. `thinking` is True inside reasoning. Never raises on a model's text."""

    @property
    def thinking(self) -> bool: ...
    def feed(self, text: str) -> Sequence[Event]: ...
    def finish(self) -> Sequence[Event]: ...


class PlainParser:
    """All text is text."""

    thinking = False

    def feed(self, text: str) -> Sequence[Event]:
        return (Text(text),) if text else ()

    def finish(self) -> Sequence[Event]:
        return ()


class TrackedParser:
    """The text room's parser for this model, and whether the reply is inside reasoning just now."""

    def __init__(self, tokenizer: Tokenizer, tools: Tools, prompt: Sequence[int]) -> None:
        self._parser = TextParser(tokenizer, list(tools.offered), prompt_ids=prompt)
        self.thinking = opens_reasoning(tokenizer, prompt)

    def feed(self, text: str) -> Sequence[Event]:
        events = self._parser.push(text)
        if events:
            self.thinking = isinstance(events[-1], Reasoning)
        return events

    def finish(self) -> Sequence[Event]:
        return self._parser.finish()


class ConformingParser:
    """Another parser's events, less the calls whose arguments do not conform: these are text."""

    def __init__(self, parser: ReplyParser, checks: Mapping[str, Validator]) -> None:
        self._parser, self._checks = parser, checks
        self._kept = 0
        self._call: list[Event] = []

    @property
    def thinking(self) -> bool:
        return self._parser.thinking

    def feed(self, text: str) -> Sequence[Event]:
        return [made for event in self._parser.feed(text) for made in self._sift(event)]

    def finish(self) -> Sequence[Event]:
        return [made for event in self._parser.finish() for made in self._sift(event)]

    def _sift(self, event: Event) -> list[Event]:
        if not isinstance(event, ToolStart | ToolArguments | ToolEnd):
            return [event]
        self._call.append(event)
        if not isinstance(event, ToolEnd):
            return []
        call, self._call = self._call, []
        start = call[0]
        assert isinstance(start, ToolStart)
        arguments = "".join(piece.delta for piece in call if isinstance(piece, ToolArguments))
        check = self._checks.get(start.name)
        if check is not None and not _conforms(check, arguments):
            return [Text(f'{{"name": {json.dumps(start.name)}, "arguments": {arguments}}}')]
        number, self._kept = self._kept, self._kept + 1
        return [ToolStart(number, start.id, start.name), ToolArguments(number, arguments), ToolEnd(number)]


def _conforms(check: Validator, arguments: str) -> bool:
    try:
        return bool(check.is_valid(json.loads(arguments)))
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """What goes to the engine, and a maker of parsers for what comes back."""

    prompt: list[int]
    params: SamplingParams
    parser: Callable[[], ReplyParser]


def plan_reply(tokenizer: Tokenizer, prompt: list[int], params: SamplingParams, tools: Tools) -> ReplyPlan:
    """Raises UsageError that names a tool whose strict schema is none, Unsupported for a form beside tools."""
    if tools.forced:
        held = _held_to(call_grammar(tools), params)
        return ReplyPlan(_answering(tokenizer, prompt), held, lambda: ForcedCallParser(tools.only))
    if params.constrained and tools.offered:
        held = _held_to(_form_or_calls(tokenizer, params, tools), params)
        answering = _answering(tokenizer, prompt)
        return ReplyPlan(answering, held, lambda: TrackedParser(tokenizer, tools, answering))
    if params.constrained:
        return ReplyPlan(_answering(tokenizer, prompt), params, PlainParser)
    checks = _strict_checks(tools)

    def tracked() -> ReplyParser:
        return TrackedParser(tokenizer, tools, prompt)

    if not checks:
        return ReplyPlan(prompt, params, tracked)
    grammar = strict_grammar(tools, tokenizer.reply_format, tokenizer.added_tokens)
    held = replace(params, grammar=grammar) if grammar is not None else params
    return ReplyPlan(prompt, held, lambda: ConformingParser(tracked(), checks))


def _held_to(grammar: str, params: SamplingParams) -> SamplingParams:
    """The settings with this grammar in place of any form."""
    return replace(params, schema=None, regex=None, choices=None, json_object=False, grammar=grammar)


def _form_or_calls(tokenizer: Tokenizer, params: SamplingParams, tools: Tools) -> str:
    schema = {"type": "object"} if params.json_object else params.schema
    grammar = None
    if schema is not None:
        reply = tokenizer.reply_format
        grammar = form_or_calls_grammar(schema, tools, reply, tokenizer.added_tokens)
    if grammar is None:
        fields = ("schema", "json_object", "regex", "choices", "grammar")
        raise Unsupported(
            "Tools and this form cannot hold at once with this model; send tool_choice: 'none' or leave one out.",
            param=next(name for name in fields if getattr(params, name) not in (None, False)),
        )
    return grammar


def _strict_checks(tools: Tools) -> dict[str, Validator]:
    checks = {}
    for i, tool in enumerate(tools.offered):
        function = tool["function"]
        if function.get("strict"):
            checks[function["name"]] = _validator(function.get("parameters") or {}, i)
    return checks


def _validator(schema: Mapping[str, Any], index: int) -> Validator:
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        where = f"tools[{index}].function.parameters"
        raise UsageError(f"{where} is no JSON schema: {error.message}.", param=where) from None
    return kind(schema)


def opens_reasoning(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """True where the template has begun the reasoning already."""
    reasoning = tokenizer.reply_format.reasoning
    if reasoning is None:
        return False
    tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)
    return tail.rstrip().endswith(reasoning.start)


def _answering(tokenizer: Tokenizer, prompt: list[int]) -> list[int]:
    """The prompt with what opens the answer itself: a form can only hold there, not inside reasoning."""
    if tokenizer.reply_format.harmony:
        return [*prompt, *tokenizer.encode(_FINAL_CHANNEL, add_special_tokens=False)]
    if opens_reasoning(tokenizer, prompt):
        return [*prompt, *closing(tokenizer)[1]]
    return prompt


def closing(tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """What ends reasoning, as text and as ids; there must be reasoning in this model's format."""
    reasoning = tokenizer.reply_format.reasoning
    assert reasoning is not None
    text = f"\n{reasoning.end}\n\n"
    return text, tokenizer.encode(text, add_special_tokens=False)
