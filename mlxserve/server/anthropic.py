"""POST /v1/messages and /v1/messages/count_tokens.

Knows: Anthropic's message objects and events, https://docs.anthropic.com/en/api/messages-streaming. Does not
know how text is made or parsed.

A stream is: message_start, ping; for each block content_block_start, content_block_delta…,
content_block_stop; then message_delta with stop_reason and usage; message_stop. Reasoning is shown only where
the caller asked for thinking; without that the template is asked not to think.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlxserve.errors import MlxServeError, Unsupported
from mlxserve.request import FinishReason, SamplingParams
from mlxserve.server.answer import Call, Service, answer, client_of, json_response, read_json, service_of
from mlxserve.server.anthropic_messages import conversation, offered_tools
from mlxserve.server.anthropic_types import (
    Conversation,
    CountBody,
    MessageBody,
    ThinkingAdaptive,
    ThinkingBetween,
    ThinkingEnabled,
)
from mlxserve.server.constraints import Tools
from mlxserve.server.dialogue import (
    Dialogue,
    Event,
    Prompt,
    Reasoning,
    Text,
    ToolArguments,
    ToolEnd,
    ToolStart,
)
from mlxserve.server.faults import anthropic_error
from mlxserve.server.fields import given
from mlxserve.server.generation import Block, Kind, Reply, Run, Usage, gather
from mlxserve.server.models import Loaded
from mlxserve.server.planning import Wish, make_run
from mlxserve.server.sse import event_frame, unless_gone
from mlxserve.text.messages import arguments_object

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


async def messages(request: HttpRequest) -> Response:
    body = await read_json(request, MessageBody)
    service = service_of(request)
    tools = offered_tools(body)
    params = message_params(body, tools)
    client = client_of(request, body.metadata.user_id if body.metadata else None)

    async def plan(entry: Loaded) -> Run:
        return await _plan(service, entry, body, tools, params, client)

    call = Call(
        body.model, plan, MessageRenderer(body), bool(body.stream), fields=_field_names(params, tools)
    )
    return await answer(request, call)


def _field_names(params: SamplingParams, tools: Tools) -> dict[str, str]:
    """What the engine's names for fields are here."""
    form = "output_config.format"
    grammar = form if params.constrained and not tools.forced else "tools"
    return {"prompt": "messages", "schema": form, "stop": "stop_sequences", "grammar": grammar}


async def count_tokens(request: HttpRequest) -> Response:
    body = await read_json(request, CountBody)
    work = _count(request, body)
    return json_response(await unless_gone(request.receive, work))


async def _count(request: HttpRequest, body: CountBody) -> dict[str, int]:
    request.state.model = body.model
    async with service_of(request).lend(body.model) as entry:
        prompt = await _prompt(entry.dialogue, body, offered_tools(body))
    return {"input_tokens": len(prompt.ids)}


async def _plan(
    service: Service, entry: Loaded, body: MessageBody, tools: Tools, params: SamplingParams, client: str
) -> Run:
    dialogue = entry.dialogue
    prompt = await _prompt(dialogue, body, tools)
    reply = dialogue.plan_reply(prompt, params, tools)
    wish = Wish(
        reply.params,
        reply.parser,
        client=client,
        parallel_calls=not getattr(body.tool_choice, "disable_parallel_tool_use", None),
        thinking_budget=thinking_budget(body),
        continues=_prefilled(body),
    )
    return make_run(service, entry, [reply.prompt], wish)


async def _prompt(dialogue: Dialogue, body: Conversation, tools: Tools) -> Prompt:
    """An assistant turn at the end is the beginning of the answer, as the API has it."""
    return await dialogue.prompt(
        conversation(body),
        tools=tools,
        variables=_thinking_variables(body, dialogue),
        continue_last=_prefilled(body),
    )


def _prefilled(body: Conversation) -> bool:
    return body.messages[-1].role == "assistant"


def _thinking_variables(body: Conversation, dialogue: Dialogue) -> dict[str, Any]:
    effort = body.output_config.effort if body.output_config else None
    variables = dialogue.thinking(wants_thinking(body))
    if effort is not None:
        variables = {**dialogue.effort("high" if effort == "max" else effort, strict=False), **variables}
    return variables


def wants_thinking(body: Conversation) -> bool:
    return isinstance(body.thinking, ThinkingEnabled | ThinkingAdaptive | ThinkingBetween)


def thinking_budget(body: Conversation) -> int | None:
    return body.thinking.budget_tokens if isinstance(body.thinking, ThinkingEnabled) else None


def message_params(body: MessageBody, tools: Tools) -> SamplingParams:
    """SamplingParams of a message body. Raises UsageError that names a field."""
    form = body.output_config.format if body.output_config else None
    thinking = body.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= body.max_tokens:
        raise Unsupported(
            f"thinking.budget_tokens ({thinking.budget_tokens}) must be less than max_tokens "
            f"({body.max_tokens}).",
            param="thinking.budget_tokens",
        )
    return SamplingParams(
        **given(
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=tuple(body.stop_sequences) if body.stop_sequences else None,
            schema=form.schema if form else None,
        )
    )


@dataclass(slots=True)
class MessageRenderer:
    """One message, whole or as events."""

    body: MessageBody
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex[:24]}")
    media_type: str = "text/event-stream"

    async def whole(self, run: Run) -> dict[str, Any]:
        (reply,) = await gather(run)
        content = [made for block in reply.blocks if (made := self._block(block)) is not None]
        return {
            **self._message(content),
            **stop_object(reply.finish, reply.stopped_by),
            "usage": usage_object(run.usage),
            **self._edits,
        }

    @property
    def _edits(self) -> dict[str, Any]:
        """Which of the edits of the history that were asked for were made: none."""
        return {"context_management": {"applied_edits": []}} if self.body.context_management else {}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _block(self, block: Block) -> dict[str, Any] | None:
        """One content block; None for what the caller does not see."""
        match block.kind:
            case Kind.TEXT:
                return {"type": "text", "text": block.text} if block.text.strip() else None
            case Kind.THOUGHT:
                return thinking_block(self._shown(block.text), block.text) if self._thinks else None
            case Kind.CALL:
                return {
                    "type": "tool_use",
                    "id": block.id,
                    "name": block.name,
                    "input": arguments_object(block.text),
                }

    @property
    def _thinks(self) -> bool:
        return wants_thinking(self.body)

    def _shown(self, thought: str) -> str:
        return "" if getattr(self.body.thinking, "display", None) == "omitted" else thought

    # -- the stream -------------------------------------------------------------------------------

    async def frames(self, run: Run) -> AsyncGenerator[bytes, None]:
        blocks = _BlockStream(self)
        reply = Reply()
        started = False
        async with aclosing(run.steps()) as steps:
            async for step in steps:
                if not started:
                    started = True
                    yield self._start(run.usage)
                    yield PING
                reply.add(step)
                for event in step.events:
                    for frame in blocks.add(event):
                        yield frame
        for frame in blocks.close():
            yield frame
        yield event_frame(
            "message_delta",
            {
                "type": "message_delta",
                "delta": stop_object(reply.finish, reply.stopped_by),
                "usage": usage_object(run.usage),
                **self._edits,
            },
        )
        yield event_frame("message_stop", {"type": "message_stop"})

    def _start(self, usage: Usage) -> bytes:
        first = Usage(usage.prompt_tokens, usage.cached_tokens)
        message = {**self._message([]), "usage": usage_object(first)}
        return event_frame("message_start", {"type": "message_start", "message": message})

    def failure(self, error: MlxServeError) -> bytes:
        return event_frame("error", anthropic_error(error))

    def heartbeat(self) -> bytes:
        return PING


PING = event_frame("ping", {"type": "ping"})


class _BlockStream:
    """Turns events into block events: one block open at a time, closed before the next begins."""

    def __init__(self, renderer: MessageRenderer) -> None:
        self._renderer = renderer
        self._index = -1
        self._open: Kind | None = None
        self._thought = ""
        self._blank = ""  # white space that may turn out to stand alone

    def add(self, event: Event) -> Iterator[bytes]:
        match event:
            case Text(text):
                yield from self._text(text)
            case Reasoning(text) if self._renderer._thinks:
                yield from self._think(text)
            case Reasoning():
                self._blank = ""
            case ToolStart(id=id_, name=name):
                yield from self._begin(Kind.CALL, {"type": "tool_use", "id": id_, "name": name, "input": {}})
            case ToolArguments(delta=text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case ToolEnd():
                yield from self.close()

    def _text(self, text: str) -> Iterator[bytes]:
        if self._open is not Kind.TEXT:
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
            yield from self._begin(Kind.TEXT, {"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def _think(self, text: str) -> Iterator[bytes]:
        if self._open is not Kind.THOUGHT:
            yield from self._begin(Kind.THOUGHT, thinking_block("", ""))
        self._thought += text
        if shown := self._renderer._shown(text):
            yield self._delta({"type": "thinking_delta", "thinking": shown})

    def _begin(self, kind: Kind, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self.close()
        self._index += 1
        self._open = kind
        self._blank = ""
        data = {"type": "content_block_start", "index": self._index, "content_block": block}
        yield event_frame("content_block_start", data)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        data = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return event_frame("content_block_delta", data)

    def close(self) -> Iterator[bytes]:
        if self._open is Kind.THOUGHT:
            yield self._delta({"type": "signature_delta", "signature": signature(self._thought)})
            self._thought = ""
        if self._open is not None:
            yield event_frame("content_block_stop", {"type": "content_block_stop", "index": self._index})
        self._open = None


def thinking_block(shown: str, thought: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": shown, "signature": signature(thought) if thought else ""}


def signature(thought: str) -> str:
    """Clients send a signature back with the block; ours is the text's digest, and nobody checks it."""
    return hashlib.sha256(thought.encode()).hexdigest()


def stop_object(finish: FinishReason, stopped_by: str | None) -> dict[str, Any]:
    if finish is FinishReason.STOP and stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    return {"stop_reason": _STOP_REASONS.get(finish, "end_turn"), "stop_sequence": None}


def usage_object(usage: Usage) -> dict[str, Any]:
    """input_tokens are those that had to be computed; the cached ones are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
