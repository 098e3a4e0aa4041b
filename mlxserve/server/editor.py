"""What editors ask beside chat: /tokenize, /detokenize, /apply-template, /infill.

Knows: the shapes that llama.cpp's server gave these paths, which editors' plug-ins expect. Does not know how
text is made. `model` may be left out: the first model then answers.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlxserve.errors import MlxServeError
from mlxserve.request import SEED_LIMIT, FinishReason, SamplingParams
from mlxserve.server.answer import (
    Call,
    answer,
    client_of,
    failure_event,
    json_response,
    read_json,
    service_of,
)
from mlxserve.server.constraints import choose_tools
from mlxserve.server.dialogue import PlainParser
from mlxserve.server.faults import openai_error
from mlxserve.server.fields import (
    Body,
    MinP,
    Name,
    Part,
    Penalty,
    Repetition,
    Seed,
    Stop,
    Temperature,
    TokenId,
    TopK,
    TopP,
    given,
)
from mlxserve.server.generation import Reply, Run
from mlxserve.server.models import Loaded
from mlxserve.server.openai_chat import message_dict, stop_strings
from mlxserve.server.openai_completions import fill_ends
from mlxserve.server.openai_types import ChatMessage, ChatTool
from mlxserve.server.planning import Wish, make_run
from mlxserve.server.sse import COMMENT, data_frame, unless_gone

DEFAULT_PREDICT = 128


class TokenizeBody(Body):
    content: str
    model: Name | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None

    REFUSED = {"parse_special": "control tokens in 'content' always count."}
    NEUTRAL = {"parse_special": (True,)}


class DetokenizeBody(Body):
    tokens: list[TokenId]
    model: Name | None = None


class TemplateBody(Body):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: Name | None = None
    tools: list[ChatTool] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ExtraFile(Part):
    text: str
    filename: str = ""
    time: Any = None


class InfillBody(Body):
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] | None = None
    prompt: str | None = None
    model: Name | None = None
    stream: bool | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    t_max_predict_ms: Annotated[float, Meta(ge=0)] | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    repeat_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    HARMLESS = {
        "cache_prompt": "Prefixes are shared by themselves.",
        "id_slot": "There are no slots.",
        "n_indent": "A hint that the caller's own trimming uses.",
        "response_fields": "All fields are sent.",
        "samplers": "The order of samplers is fixed.",
        "t_max_prompt_ms": "Prompts are read in chunks beside other work.",
    }


def model_name(request: HttpRequest, named: str | None) -> str:
    return named or service_of(request).models.first


async def tokenize(request: HttpRequest) -> Response:
    body = await read_json(request, TokenizeBody)
    return json_response(await unless_gone(request.receive, _tokenize(request, body)))


async def _tokenize(request: HttpRequest, body: TokenizeBody) -> dict[str, Any]:
    async with service_of(request).lend(model_name(request, body.model)) as entry:
        dialogue = entry.dialogue
        ids = await dialogue.encode(body.content, add_special_tokens=bool(body.add_special))
        if not body.with_pieces:
            return {"tokens": ids}
        return {"tokens": [{"id": token, "piece": _piece(dialogue.token_bytes(token))} for token in ids]}


def _piece(raw: bytes) -> str | list[int]:
    """Text, or the bytes of a token that is no whole text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


async def detokenize(request: HttpRequest) -> Response:
    body = await read_json(request, DetokenizeBody)
    return json_response(await unless_gone(request.receive, _detokenize(request, body)))


async def _detokenize(request: HttpRequest, body: DetokenizeBody) -> dict[str, str]:
    async with service_of(request).lend(model_name(request, body.model)) as entry:
        return {"content": entry.dialogue.decode(entry.dialogue.check_ids(body.tokens, "tokens"))}


async def apply_template(request: HttpRequest) -> Response:
    body = await read_json(request, TemplateBody)
    return json_response(await unless_gone(request.receive, _apply(request, body)))


async def _apply(request: HttpRequest, body: TemplateBody) -> dict[str, str]:
    async with service_of(request).lend(model_name(request, body.model)) as entry:
        text = await entry.dialogue.render(
            [message_dict(message) for message in body.messages],
            tools=choose_tools(body.tools, None),
            variables=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt is not False,
        )
    return {"prompt": text}


async def infill(request: HttpRequest) -> Response:
    body = await read_json(request, InfillBody)
    service = service_of(request)
    params = infill_params(body)

    async def plan(entry: Loaded) -> Run:
        extra = [(file.filename, file.text) for file in body.input_extra or ()]
        prefix = body.input_prefix + (body.prompt or "")
        ids = await entry.dialogue.fill(prefix, body.input_suffix, extra)
        held = replace(params, stop_token_ids=fill_ends(entry.dialogue))
        wish = Wish(held, PlainParser, client=client_of(request), continues=True)
        return make_run(service, entry, [ids], wish)

    name = model_name(request, body.model)
    return await answer(request, Call(name, plan, InfillRenderer(body, name), bool(body.stream)))


def infill_params(body: InfillBody) -> SamplingParams:
    predict = DEFAULT_PREDICT if body.n_predict is None else body.n_predict
    return SamplingParams(
        **given(
            max_tokens=predict if predict > 0 else None,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            seed=None if body.seed is None else body.seed % SEED_LIMIT,
            stop=stop_strings(body.stop),
            repetition_penalty=body.repeat_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
        )
    )


@dataclass(slots=True)
class InfillRenderer:
    """One filled middle, whole or in pieces. It ends at a line's end once t_max_predict_ms have passed."""

    body: InfillBody
    model: str
    media_type: str = "text/event-stream"

    async def whole(self, run: Run) -> dict[str, Any]:
        reply = Reply()
        async with aclosing(self._pieces(run, reply)) as pieces:
            async for _ in pieces:
                pass
        return self._last(reply, run, reply.text)

    async def frames(self, run: Run) -> AsyncGenerator[bytes, None]:
        reply = Reply()
        async with aclosing(self._pieces(run, reply)) as pieces:
            async for text in pieces:
                yield data_frame({"content": text, "stop": False})
        yield data_frame(self._last(reply, run, ""))

    async def _pieces(self, run: Run, reply: Reply) -> AsyncGenerator[str, None]:
        limit_s = (self.body.t_max_predict_ms or 0) / 1000
        async with aclosing(run.steps()) as steps:
            async for step in steps:
                before = len(reply.text)
                reply.add(step)
                if len(reply.text) > before:
                    yield reply.text[before:]
                if limit_s and "\n" in reply.text and time.perf_counter() - run.started > limit_s:
                    reply.finish = FinishReason.LENGTH
                    return

    def _last(self, reply: Reply, run: Run, text: str) -> dict[str, Any]:
        kind = "limit" if reply.finish is FinishReason.LENGTH else "word" if reply.stopped_by else "eos"
        return {
            "content": text,
            "stop": True,
            "stop_type": kind,
            "stopping_word": reply.stopped_by or "",
            "truncated": False,
            "model": self.model,
            "tokens_predicted": run.usage.completion_tokens,
            "tokens_evaluated": run.usage.prompt_tokens,
            "tokens_cached": run.usage.cached_tokens,
        }

    def failure(self, error: MlxServeError) -> bytes:
        return failure_event(openai_error, error)

    def heartbeat(self) -> bytes:
        return COMMENT
