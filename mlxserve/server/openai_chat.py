"""POST /v1/chat/completions.

Knows: OpenAI's chat objects, https://platform.openai.com/docs/api-reference/chat. Does not know how text is
made or parsed.

A stream is, for each choice: one chunk with the role, chunks with content, reasoning_content or tool_calls,
one chunk with finish_reason; then, if asked for, one chunk with usage and no choices; then [DONE].
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlxserve.errors import MlxServeError
from mlxserve.request import SEED_LIMIT, FinishReason, Priority, SamplingParams, TokenLogprob
from mlxserve.server.answer import Call, Service, answer, client_of, failure_event, read_json, service_of
from mlxserve.server.constraints import OUTPUT_FIELDS, Tools, choose_tools, from_format, from_outputs
from mlxserve.server.dialogue import Dialogue, Event, Reasoning, Text, ToolArguments, ToolEnd, ToolStart
from mlxserve.server.faults import openai_error
from mlxserve.server.fields import given, require
from mlxserve.server.generation import Reply, Run, Step, Usage, gather
from mlxserve.server.models import Loaded
from mlxserve.server.openai_types import ChatBody, Sampled
from mlxserve.server.planning import Wish, make_run
from mlxserve.server.sse import COMMENT, DONE, data_frame


async def chat_completions(request: HttpRequest) -> Response:
    body = await read_json(request, ChatBody)
    service = service_of(request)
    tools = choose_tools(body.tools, body.tool_choice)
    params = chat_params(body, tools)
    client = client_of(request, body.user)

    async def plan(entry: Loaded) -> Run:
        return await _plan(service, entry, body, tools, params, client)

    stream = bool(body.stream)
    require(stream or body.stream_options is None, "stream_options needs stream: true.", "stream_options")
    call = Call(body.model, plan, ChatRenderer(body), stream, fields=_field_names(body, tools))
    return await answer(request, call)


def _field_names(body: ChatBody, tools: Tools) -> dict[str, str]:
    """What the engine's names for fields are here."""
    outputs = {name: f"structured_outputs.{theirs}" for name, theirs in OUTPUT_FIELDS.items()}
    formed = "response_format" if body.response_format else "structured_outputs"
    free = tools.forced or not (body.response_format or body.structured_outputs)
    forced = {"grammar": "tools" if free else formed} if tools.offered else {}
    form = {"schema": "response_format", "json_object": "response_format"} if body.response_format else {}
    return {"prompt": "messages", **outputs, **forced, **form}


async def _plan(
    service: Service, entry: Loaded, body: ChatBody, tools: Tools, params: SamplingParams, client: str
) -> Run:
    dialogue = entry.dialogue
    prompt = await dialogue.prompt(
        [message_dict(message) for message in body.messages],
        tools=tools,
        variables=template_variables(body, dialogue),
        continue_last=bool(body.continue_final_message),
    )
    reply = dialogue.plan_reply(prompt, params, tools)
    wish = Wish(
        reply.params,
        reply.parser,
        choices=body.n or 1,
        client=client,
        priority=Priority.BATCH if body.service_tier == "flex" else Priority.INTERACTIVE,
        parallel_calls=body.parallel_tool_calls is not False,
        continues=bool(body.continue_final_message),
    )
    return make_run(service, entry, [reply.prompt], wish)


def message_dict(message: Any) -> dict[str, Any]:
    """A turn as templates expect it: null fields left out, but not the content, for which a refusal stands in."""
    made = msgspec.to_builtins(message)
    refusal = made.pop("refusal", None)
    if made["content"] is None:
        made["content"] = refusal
    return {key: value for key, value in made.items() if value is not None or key == "content"}


def template_variables(body: ChatBody, dialogue: Dialogue) -> dict[str, Any]:
    """chat_template_kwargs, and reasoning_effort as the variables that this template reads."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        for name, value in dialogue.effort(body.reasoning_effort).items():
            variables.setdefault(name, value)
    return variables


def chat_params(body: ChatBody, tools: Tools) -> SamplingParams:
    """SamplingParams of a chat body. Raises UsageError that names a field."""
    wanted = bool(body.logprobs)
    require(wanted or not body.top_logprobs, "top_logprobs needs logprobs: true.", "top_logprobs")
    require(
        body.max_tokens is None or body.max_completion_tokens in (None, body.max_tokens),
        "max_tokens and max_completion_tokens are the same limit; send one of them.",
        "max_completion_tokens",
    )
    wanted_form, more = from_format(body.response_format), from_outputs(body.structured_outputs)
    require(not (wanted_form and more), "Send response_format or structured_outputs.", "structured_outputs")
    form = wanted_form or more
    return SamplingParams(
        **shared_params(body),
        **form,
        **given(
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if wanted else None,
        ),
    )


def shared_params(body: Sampled) -> dict[str, Any]:
    """SamplingParams fields that chat and text completions have in common."""
    return given(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        seed=None if body.seed is None else body.seed % SEED_LIMIT,
        stop=stop_strings(body.stop),
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
    )


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    return (stop,) if isinstance(stop, str) else tuple(stop)


@dataclass(slots=True)
class ChatRenderer:
    """One chat completion, whole or as chunks."""

    body: ChatBody
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    media_type: str = "text/event-stream"

    async def whole(self, run: Run) -> dict[str, Any]:
        replies = await gather(run)
        choices = [self._choice(i, reply, run.dialogue) for i, reply in enumerate(replies)]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage_object(run.usage)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.body.model,
            "system_fingerprint": None,
            **self._tier,
        }

    @property
    def _tier(self) -> dict[str, str]:
        """Which of the two tiers it was, where the caller named one; "priority" is the usual one here."""
        asked = self.body.service_tier
        return {} if asked is None else {"service_tier": "flex" if asked == "flex" else "default"}

    def _choice(self, index: int, reply: Reply, dialogue: Dialogue) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.text or (None if reply.calls else ""),
            "refusal": None,
        }
        if reply.thought:
            message["reasoning_content"] = reply.thought
        if reply.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.text},
                }
                for call in reply.calls
            ]
        logprobs = self._logprobs(reply.logprobs, dialogue) if self.body.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reply.finish.value}

    def _logprobs(self, entries: Sequence[TokenLogprob], dialogue: Dialogue) -> dict[str, Any]:
        return {"content": [logprob_object(entry, dialogue) for entry in entries], "refusal": None}

    # -- the stream -------------------------------------------------------------------------------

    async def frames(self, run: Run) -> AsyncGenerator[bytes, None]:
        # Per choice: the log-probabilities of text that is held back, for the next chunk.
        held: dict[int, list[TokenLogprob]] = {}
        async with aclosing(run.steps()) as steps:
            async for step in steps:
                if step.choice not in held:
                    held[step.choice] = []
                    yield self._chunk(step.choice, {"role": "assistant", "content": ""})
                held[step.choice].extend(step.delta.logprobs)
                for frame in self._step(step, held[step.choice], run):
                    yield frame
        if self._wants_usage:
            head = self._head("chat.completion.chunk")
            yield data_frame({**head, "choices": [], "usage": usage_object(run.usage)})
        yield DONE

    def _step(self, step: Step, held: list[TokenLogprob], run: Run) -> list[bytes]:
        frames = [
            self._chunk(step.choice, delta, logprobs=self._take(held, run))
            for event in step.events
            if (delta := delta_object(event)) is not None
        ]
        if step.finish is not None:
            frames.append(self._chunk(step.choice, {}, step.finish, logprobs=self._take(held, run)))
        return frames

    def _take(self, held: list[TokenLogprob], run: Run) -> dict[str, Any] | None:
        if not self.body.logprobs or not held:
            return None
        taken = self._logprobs(held, run.dialogue)
        held.clear()
        return taken

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        finish: FinishReason | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        chunk = self._head("chat.completion.chunk")
        chunk["choices"] = [
            {
                "index": choice,
                "delta": delta,
                "logprobs": logprobs,
                "finish_reason": finish.value if finish else None,
            }
        ]
        if self._wants_usage:
            chunk["usage"] = None
        return data_frame(chunk)

    @property
    def _wants_usage(self) -> bool:
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    def failure(self, error: MlxServeError) -> bytes:
        return failure_event(openai_error, error)

    def heartbeat(self) -> bytes:
        return COMMENT


def delta_object(event: Event) -> dict[str, Any] | None:
    """One event as the `delta` of a chunk; None where the API has no word for it."""
    match event:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolStart(index=index, id=id_, name=name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id_, "type": "function", "function": function}]}
        case ToolArguments(index=index, delta=text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case ToolEnd():
            return None


def logprob_object(entry: TokenLogprob, dialogue: Dialogue) -> dict[str, Any]:
    """One token with its bytes and the most likely ones instead of it (none unless asked for)."""
    top = [_token_object(token, logprob, dialogue) for token, logprob in entry.top]
    return {**_token_object(entry.token_id, entry.logprob, dialogue), "top_logprobs": top}


def _token_object(token: int, logprob: float, dialogue: Dialogue) -> dict[str, Any]:
    raw = dialogue.token_bytes(token)
    # JSON has no infinity; the API's own stand-in for "never" is -9999.
    shown = max(logprob, -9999.0)
    return {"token": raw.decode("utf-8", "replace"), "logprob": shown, "bytes": list(raw)}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens, "audio_tokens": 0},
    }
