"""POST /api/chat and /api/generate.

Knows: Ollama's objects and newline-delimited streams,
https://github.com/ollama/ollama/blob/main/docs/api.md. Does not know how text is made or parsed.

Both stream unless told otherwise. An empty call loads a model (or unloads it with keep_alive 0). Durations
are nanoseconds.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlxserve.errors import MlxServeError, Unsupported, UsageError
from mlxserve.request import SEED_LIMIT, FinishReason, SamplingParams, TokenLogprob
from mlxserve.server.answer import Call, answer, client_of, json_response, read_json, service_of
from mlxserve.server.constraints import Tools
from mlxserve.server.dialogue import Dialogue, PlainParser, Prompt, Reasoning, ReplyPlan, Text, ToolEnd
from mlxserve.server.faults import ollama_error
from mlxserve.server.fields import convert, given, require
from mlxserve.server.generation import Block, Reply, Run, Step, gather
from mlxserve.server.models import Loaded
from mlxserve.server.ollama_types import ChatRequest, GenerateRequest, Generating, OllamaMessage, Options
from mlxserve.server.openai_chat import stop_strings
from mlxserve.server.openai_completions import fill_ends
from mlxserve.server.planning import Wish, make_run
from mlxserve.server.sse import line_frame, unless_gone
from mlxserve.text.messages import arguments_object

NDJSON = "application/x-ndjson"
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def keep_alive_s(value: str | float | int | None) -> float | None:
    """Ollama's keep_alive in seconds: a number, or Go's '5m', '1h30m'; negative is for ever.

    Raises UsageError for anything else.
    """
    if value is None:
        return None
    if isinstance(value, str):
        value = _duration_s(value)
    if math.isnan(value):
        raise UsageError("keep_alive must be a number of seconds or a duration.", param="keep_alive")
    return math.inf if value < 0 else float(value)


def _duration_s(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    if re.fullmatch(r"-?(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+", text) is None:
        raise UsageError(f"keep_alive '{text}' is no duration such as '5m'.", param="keep_alive")
    parts = re.findall(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)", text)
    total = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    return -total if text.startswith("-") else total


async def chat(request: HttpRequest) -> Response:
    body = await read_json(request, ChatRequest)
    options = read_options(body.options)
    if not body.messages:
        return await _load_only(request, body, {"message": {"role": "assistant", "content": ""}})
    tools = Tools(tuple({"type": "function", "function": tool.function} for tool in body.tools or ()))
    for i, tool in enumerate(tools.offered):
        named = isinstance(tool["function"].get("name"), str) and tool["function"]["name"]
        require(bool(named), f"tools[{i}].function.name is required.", f"tools[{i}].function.name")
    params = sampling(body, options)
    conversation = [message_dict(message, i) for i, message in enumerate(body.messages)]
    renderer = OllamaRenderer(body, chat=True)

    async def plan(entry: Loaded) -> Run:
        dialogue = entry.dialogue
        prompt = await dialogue.prompt(conversation, tools=tools, variables=think_variables(body, dialogue))
        reply = dialogue.plan_reply(prompt, params, tools)
        limit = context_limit(options, entry)
        wish = Wish(reply.params, reply.parser, client=client_of(request), limit=limit)
        return renderer.started(make_run(service_of(request), entry, [reply.prompt], wish))

    return await _answer(request, body, plan, renderer)


async def generate(request: HttpRequest) -> Response:
    body = await read_json(request, GenerateRequest)
    options = read_options(body.options)
    require(not body.images, "images: this model reads text only.", "images")
    if not body.prompt and not body.suffix:
        return await _load_only(request, body, {"response": ""})
    params = sampling(body, options)
    renderer = OllamaRenderer(body, chat=False)

    async def plan(entry: Loaded) -> Run:
        prompt, templated = await _generate_prompt(entry, body)
        held = replace(params, stop_token_ids=fill_ends(entry.dialogue) if body.suffix else ())
        reply = ReplyPlan(prompt.ids, held, PlainParser)
        if templated:
            reply = entry.dialogue.plan_reply(prompt, params, Tools())
        limit = context_limit(options, entry)
        client = client_of(request)
        wish = Wish(reply.params, reply.parser, client=client, limit=limit, continues=not templated)
        return renderer.started(make_run(service_of(request), entry, [reply.prompt], wish))

    return await _answer(request, body, plan, renderer)


async def _answer(request: HttpRequest, body: Generating, plan: Any, renderer: OllamaRenderer) -> Response:
    alive_s = keep_alive_s(body.keep_alive)
    stream = body.stream is not False
    return await answer(
        request, Call(body.model, plan, renderer, stream, alive_s, _field_names(renderer.chat))
    )


def _field_names(chat: bool) -> dict[str, str]:
    """What the engine's names for fields are here. A grammar stands for a format, or for strict tools."""
    return {
        "prompt": "messages" if chat else "prompt",
        "schema": "format",
        "json_object": "format",
        "grammar": "tools" if chat else "format",
        "stop": "options.stop",
    }


async def _load_only(request: HttpRequest, body: Generating, empty: dict[str, Any]) -> Response:
    """An empty call: the model is loaded, or unloaded with keep_alive 0."""
    alive_s = keep_alive_s(body.keep_alive)
    request.state.model = body.model
    await unless_gone(request.receive, _touch(request, body.model, alive_s))
    reason = "unload" if alive_s == 0 else "load"
    value = {"model": body.model, "created_at": now_text(), **empty, "done": True, "done_reason": reason}
    if body.stream is False:
        return json_response(value)
    return Response(line_frame(value), media_type=NDJSON)


async def _touch(request: HttpRequest, model: str, alive_s: float | None) -> None:
    models = service_of(request).models
    if alive_s == 0:
        await models.card(model)
        await models.unload(model)
        return
    async with service_of(request).lend(model, keep_alive_s=alive_s):
        pass


async def _generate_prompt(entry: Loaded, body: GenerateRequest) -> tuple[Prompt, bool]:
    """The prompt, and whether the chat template made it."""
    dialogue, text = entry.dialogue, body.prompt or ""
    earlier = dialogue.check_ids(body.context, "context") if body.context else []
    if body.suffix:
        require(not body.system and not earlier, "suffix stands alone with prompt.", "suffix")
        return Prompt(await dialogue.fill(text, body.suffix)), False
    if body.raw or not dialogue.can_chat:
        require(not body.system, "system needs a chat template, and this prompt has none.", "system")
        return Prompt([*earlier, *await dialogue.encode(text)]), False
    turns = [{"role": "user", "content": text}]
    if body.system:
        turns.insert(0, {"role": "system", "content": body.system})
    prompt = await dialogue.prompt(turns, tools=Tools(), variables=think_variables(body, dialogue))
    return prompt.after(earlier), True


def read_options(raw: dict[str, Any] | None) -> Options:
    """Raises UsageError that names options.FIELD."""
    try:
        return convert(raw or {}, Options)
    except UsageError as error:
        name = error.param or ""
        error.param = f"options.{name}"
        error.message = error.message.replace(name, error.param, 1)
        raise


def sampling(body: Generating, options: Options) -> SamplingParams:
    """SamplingParams of a body and its options."""
    require(bool(body.logprobs) or not body.top_logprobs, "top_logprobs needs logprobs.", "top_logprobs")
    predict = options.num_predict
    require(predict != 0, "options.num_predict must not be 0.", "options.num_predict")
    schema = body.format if isinstance(body.format, dict) else None
    return SamplingParams(
        **given(
            max_tokens=predict if predict is not None and predict > 0 else None,
            temperature=options.temperature,
            top_k=None if options.top_k is None else max(options.top_k, 0),
            # 0 keeps the likeliest token only, as a very small share does.
            top_p=None if options.top_p is None else max(options.top_p, 1e-9),
            min_p=options.min_p,
            repetition_penalty=options.repeat_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            seed=None if options.seed is None else options.seed % SEED_LIMIT,
            stop=stop_strings(options.stop),
            schema=schema,
            json_object=True if body.format == "json" else None,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
    )


def context_limit(options: Options, entry: Loaded) -> int | None:
    """num_ctx. Raises UsageError, with both numbers, where the model was loaded with less."""
    wanted, context = options.num_ctx, entry.engine.context
    if wanted is not None and wanted > context:
        raise UsageError(
            f"options.num_ctx is {wanted}; {entry.card.name} was loaded with {context}.",
            param="options.num_ctx",
        )
    return wanted


def think_variables(body: Generating, dialogue: Dialogue) -> dict[str, Any]:
    """`think` as the variables that this template reads; absent means the template's default."""
    if body.think is None:
        return {}
    if isinstance(body.think, bool):
        if body.think and not dialogue.can_reason:
            raise Unsupported(f"'{body.model}' does not support thinking.", param="think")
        return dialogue.thinking(body.think)
    return dialogue.effort(body.think)


def message_dict(message: OllamaMessage, index: int) -> dict[str, Any]:
    """A turn as templates expect it."""
    if message.images:
        where = f"messages[{index}].images"
        raise Unsupported(f"{where}: this model reads text only, not images.", param=where)
    made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        made["reasoning_content"] = message.thinking
    if message.tool_name:
        made["name"] = message.tool_name
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id or f"call_{index}_{i}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments or {}},
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return made


def now_text() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(slots=True)
class OllamaRenderer:
    """One answer of /api/chat or /api/generate, whole or as lines."""

    body: Generating
    chat: bool
    load_s: float = 0.0
    begun: float = field(default_factory=time.perf_counter)
    media_type: str = NDJSON

    def started(self, run: Run) -> Run:
        """Remembers how long the model took to load, where this call loaded it."""
        self.load_s = run.started - self.begun
        return run

    async def whole(self, run: Run) -> dict[str, Any]:
        (reply,) = await gather(run)
        body = self._body(reply.text, reply.thought, [_call_object(call) for call in reply.calls])
        logprobs = self._logprobs(reply.logprobs, run.dialogue)
        return {**self._head(), **body, **logprobs, **self._end(reply, run)}

    def _head(self) -> dict[str, Any]:
        return {"model": self.body.model, "created_at": now_text()}

    def _body(self, text: str, thought: str, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        shown = thought if self.body.think is not False else ""
        extra = {"thinking": shown} if shown else {}
        if not self.chat:
            return {"response": text, **extra}
        message = {"role": "assistant", "content": text, **extra}
        return {"message": {**message, "tool_calls": list(calls)} if calls else message}

    def _logprobs(self, entries: Sequence[TokenLogprob], dialogue: Dialogue) -> dict[str, Any]:
        if not self.body.logprobs:
            return {}
        return {"logprobs": [_logprob_object(entry, dialogue) for entry in entries]}

    def _end(self, reply: Reply, run: Run) -> dict[str, Any]:
        """What the last line adds."""
        now = time.perf_counter()
        first_s = run.first_token_s if run.first_token_s is not None else now - run.started
        reason = "length" if reply.finish is FinishReason.LENGTH else "stop"
        end: dict[str, Any] = {"done": True, "done_reason": reason}
        if not self.chat:
            end["context"] = [*run.requests[0].prompt, *reply.token_ids]
        return {
            **end,
            "total_duration": _ns(now - self.begun),
            "load_duration": _ns(self.load_s),
            "prompt_eval_count": run.usage.prompt_tokens,
            "prompt_eval_duration": _ns(first_s),
            "eval_count": run.usage.completion_tokens,
            "eval_duration": _ns(now - run.started - first_s),
        }

    # -- the stream -------------------------------------------------------------------------------

    async def frames(self, run: Run) -> AsyncGenerator[bytes, None]:
        reply = Reply()
        sent: set[int] = set()
        async with aclosing(run.steps()) as steps:
            async for step in steps:
                reply.add(step)
                if line := self._line(step, run):
                    yield line
                for event in step.events:
                    if isinstance(event, ToolEnd):
                        sent.add(event.index)
                        yield self._call_line(reply.calls[event.index])
        for index, call in enumerate(reply.calls):
            if index not in sent:  # cut off by the length limit
                yield self._call_line(call)
        yield line_frame({**self._head(), **self._body("", ""), **self._end(reply, run)})

    def _call_line(self, call: Block) -> bytes:
        return line_frame({**self._head(), **self._body("", "", [_call_object(call)]), "done": False})

    def _line(self, step: Step, run: Run) -> bytes | None:
        """The text of one step. Calls come whole, on lines of their own: there are no pieces of arguments."""
        text = "".join(event.text for event in step.events if isinstance(event, Text))
        thought = "".join(event.text for event in step.events if isinstance(event, Reasoning))
        if self.body.think is False:
            thought = ""
        logprobs = self._logprobs(step.delta.logprobs, run.dialogue)
        if not text and not thought and not logprobs.get("logprobs"):
            return None
        return line_frame({**self._head(), **self._body(text, thought), **logprobs, "done": False})

    def failure(self, error: MlxServeError) -> bytes:
        return line_frame(ollama_error(error))

    def heartbeat(self) -> bytes:
        return line_frame({**self._head(), **self._body("", ""), "done": False})


def _call_object(call: Block) -> dict[str, Any]:
    return {"id": call.id, "function": {"name": call.name, "arguments": arguments_object(call.text)}}


def _logprob_object(entry: TokenLogprob, dialogue: Dialogue) -> dict[str, Any]:
    made = _token_object(entry.token_id, entry.logprob, dialogue)
    if entry.top:
        made["top_logprobs"] = [_token_object(token, value, dialogue) for token, value in entry.top]
    return made


def _token_object(token: int, logprob: float, dialogue: Dialogue) -> dict[str, Any]:
    raw = dialogue.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
