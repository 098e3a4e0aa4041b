"""POST /v1/completions: text in, text on, without a chat template.

Knows: OpenAI's completion objects, https://platform.openai.com/docs/api-reference/completions.
Does not know how text is made.

A prompt is a string, token ids, or a list of either; `suffix` fills in the middle where the tokenizer has
tokens for it; `echo` puts the prompt before the text. max_tokens is 16 unless said, as the API says.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlxserve.errors import MlxServeError, UsageError
from mlxserve.request import FinishReason, SamplingParams, TokenLogprob
from mlxserve.server.answer import Call, answer, client_of, failure_event, read_json, service_of
from mlxserve.server.constraints import OUTPUT_FIELDS, from_outputs
from mlxserve.server.dialogue import Dialogue, PlainParser, Text
from mlxserve.server.faults import openai_error
from mlxserve.server.fields import given, require
from mlxserve.server.generation import Reply, Run, Step, gather
from mlxserve.server.models import Loaded
from mlxserve.server.openai_chat import shared_params, usage_object
from mlxserve.server.openai_types import CompletionBody
from mlxserve.server.planning import Wish, make_run
from mlxserve.server.sse import COMMENT, DONE, data_frame

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256

Prompt = str | list[int]


async def completions(request: HttpRequest) -> Response:
    body = await read_json(request, CompletionBody)
    service = service_of(request)
    prompts = split_prompts(body.prompt, "prompt")
    _check(body)
    params = SamplingParams(
        **shared_params(body),
        **from_outputs(body.structured_outputs),
        **given(logprobs=body.logprobs, max_tokens=body.max_tokens or DEFAULT_MAX_TOKENS),
    )
    client = client_of(request, body.user)
    renderer = CompletionRenderer(body)

    async def plan(entry: Loaded) -> Run:
        ids = [await _ids(entry, prompt, body.suffix) for prompt in prompts]
        if body.echo:
            renderer.echoes = [p if isinstance(p, str) else entry.dialogue.decode(p) for p in prompts]
        ends = fill_ends(entry.dialogue) if body.suffix else ()
        held = replace(params, stop_token_ids=[*params.stop_token_ids, *ends])
        wish = Wish(held, PlainParser, choices=body.n or 1, client=client, continues=True)
        return make_run(service, entry, ids, wish)

    names = {name: f"structured_outputs.{theirs}" for name, theirs in OUTPUT_FIELDS.items()}
    return await answer(request, Call(body.model, plan, renderer, bool(body.stream), fields=names))


def fill_ends(dialogue: Dialogue) -> tuple[int, ...]:
    """Tokens that end a filled middle, beside the end of the text."""
    return dialogue.filling.ends if dialogue.filling else ()


def split_prompts(given_prompt: str | list[Any], param: str) -> list[Prompt]:
    """The prompts in a field that may hold one or several, as text or as token ids."""
    if isinstance(given_prompt, str):
        return [given_prompt]
    require(bool(given_prompt), f"{param} must not be an empty list.", param)
    if all(isinstance(item, int) for item in given_prompt):
        return [given_prompt]
    mixed = any(isinstance(item, int) for item in given_prompt)
    require(not mixed, f"{param} mixes token ids with other kinds.", param)
    require(len(given_prompt) <= MAX_PROMPTS, f"{param} holds more than {MAX_PROMPTS} prompts.", param)
    for i, item in enumerate(given_prompt):
        require(bool(item), f"{param}[{i}] is empty.", f"{param}[{i}]")
    return given_prompt


def _check(body: CompletionBody) -> None:
    require(body.best_of in (None, body.n or 1), "best_of must equal n: every choice is returned.", "best_of")
    require(
        not (body.echo and body.logprobs is not None), "echo gives no logprobs of the prompt.", "logprobs"
    )
    require(not (body.echo and body.suffix), "echo and suffix cannot hold at once.", "echo")
    stream = bool(body.stream)
    require(stream or body.stream_options is None, "stream_options needs stream: true.", "stream_options")


async def _ids(entry: Loaded, prompt: Prompt, suffix: str | None) -> list[int]:
    if isinstance(prompt, str):
        if suffix:
            return await entry.dialogue.fill(prompt, suffix)
        ids = await entry.dialogue.encode(prompt)
        if not ids:
            raise UsageError(
                "prompt is empty, and this tokenizer has no token to begin with.", param="prompt"
            )
        return ids
    if suffix:
        raise UsageError("suffix needs a prompt that is text.", param="suffix")
    return entry.dialogue.check_ids(prompt, "prompt")


@dataclass(slots=True)
class CompletionRenderer:
    """One text completion, whole or as chunks. `echoes` are the prompts' texts where echo is wanted."""

    body: CompletionBody
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    echoes: list[str] = field(default_factory=list)
    media_type: str = "text/event-stream"

    async def whole(self, run: Run) -> dict[str, Any]:
        replies = await gather(run)
        choices = [self._choice(i, reply, run.dialogue) for i, reply in enumerate(replies)]
        return {**self._head(), "choices": choices, "usage": usage_object(run.usage)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.body.model,
            "system_fingerprint": None,
        }

    def _echo(self, choice: int) -> str:
        return self.echoes[choice // (self.body.n or 1)] if self.echoes else ""

    def _choice(self, index: int, reply: Reply, dialogue: Dialogue) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = logprobs_object(reply.logprobs, dialogue, 0)
        text = self._echo(index) + reply.text
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reply.finish.value}

    async def frames(self, run: Run) -> AsyncGenerator[bytes, None]:
        offsets: dict[int, int] = {}
        async with aclosing(run.steps()) as steps:
            async for step in steps:
                if step.choice not in offsets:
                    offsets[step.choice] = 0
                    if echo := self._echo(step.choice):
                        yield self._chunk(step.choice, echo)
                for frame in self._step(step, offsets, run.dialogue):
                    yield frame
        if self._wants_usage:
            yield data_frame({**self._head(), "choices": [], "usage": usage_object(run.usage)})
        yield DONE

    def _step(self, step: Step, offsets: dict[int, int], dialogue: Dialogue) -> list[bytes]:
        text = "".join(event.text for event in step.events if isinstance(event, Text))
        logprobs = None
        if self.body.logprobs is not None and step.delta.logprobs:
            logprobs = logprobs_object(step.delta.logprobs, dialogue, offsets[step.choice])
            offsets[step.choice] += sum(len(token) for token in logprobs["tokens"])
        if not text and logprobs is None and step.finish is None:
            return []
        return [self._chunk(step.choice, text, step.finish, logprobs)]

    def _chunk(
        self,
        choice: int,
        text: str,
        finish: FinishReason | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        reason = finish.value if finish else None
        chunk = self._head()
        chunk["choices"] = [{"text": text, "index": choice, "logprobs": logprobs, "finish_reason": reason}]
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


def logprobs_object(
    entries: list[TokenLogprob] | tuple[TokenLogprob, ...], dialogue: Dialogue, offset: int
) -> dict[str, Any]:
    """The API's four parallel lists; `offset` is the first token's place in the text."""
    made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        token = dialogue.token_text(entry.token_id)
        made["tokens"].append(token)
        made["token_logprobs"].append(max(entry.logprob, -9999.0))
        top = {dialogue.token_text(other): max(logprob, -9999.0) for other, logprob in entry.top}
        made["top_logprobs"].append(top)
        made["text_offset"].append(offset)
        offset += len(token)
    return made
