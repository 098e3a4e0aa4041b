"""POST /v1/responses, and what is kept of responses.

Knows: the Responses API's objects, https://platform.openai.com/docs/api-reference/responses. Does not know
how text is made or parsed; the event stream is in responses_stream.py.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlxserve.errors import MlxServeError, PromptTooLong, Unsupported, UsageError
from mlxserve.request import FinishReason, Priority, SamplingParams
from mlxserve.server.answer import Call, Service, answer, client_of, json_response, read_json, service_of
from mlxserve.server.constraints import Tools
from mlxserve.server.dialogue import Dialogue, Prompt
from mlxserve.server.fields import given, require
from mlxserve.server.files import ascending, page_of, refuse_unknown
from mlxserve.server.generation import Reply, Run, Usage, gather
from mlxserve.server.models import Loaded
from mlxserve.server.planning import Wish, make_run, room_for_answer
from mlxserve.server.responses_items import input_items as read_input
from mlxserve.server.responses_items import messages_of, new_id, offered_tools
from mlxserve.server.responses_store import ResponseStore
from mlxserve.server.responses_stream import ItemStream, item_object
from mlxserve.server.responses_types import ObjectFormat, ResponseBody, SchemaFormat
from mlxserve.server.sse import COMMENT, event_frame


def store_of(request: HttpRequest) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


async def create(request: HttpRequest) -> Response:
    body = await read_json(request, ResponseBody)
    service, store = service_of(request), store_of(request)
    items = read_input(body)
    if body.previous_response_id is not None:
        earlier = store.get(body.previous_response_id, "previous_response_id")
        items = [*earlier.items, *earlier.response["output"], *items]
    tools = offered_tools(body)
    params = response_params(body, tools)
    client = client_of(request, body.user)

    async def plan(entry: Loaded) -> Run:
        return await _plan(service, entry, body, items, tools, params, client)

    stream = bool(body.stream)
    require(stream or body.stream_options is None, "stream_options needs stream: true.", "stream_options")
    renderer = ResponseRenderer(body, items, store)
    grammar = "text.format" if params.constrained and not tools.forced else "tools"
    names = {"prompt": "input", "schema": "text.format", "json_object": "text.format", "grammar": grammar}
    return await answer(request, Call(body.model, plan, renderer, stream, fields=names))


async def _plan(
    service: Service,
    entry: Loaded,
    body: ResponseBody,
    items: list[dict[str, Any]],
    tools: Tools,
    params: SamplingParams,
    client: str,
) -> Run:
    dialogue = entry.dialogue
    prompt = await _prompt(entry, body, items, tools)
    reply = dialogue.plan_reply(prompt, params, tools)
    wish = Wish(
        reply.params,
        reply.parser,
        client=client,
        priority=Priority.BATCH if body.service_tier == "flex" else Priority.INTERACTIVE,
        parallel_calls=body.parallel_tool_calls is not False,
    )
    return make_run(service, entry, [reply.prompt], wish)


async def _prompt(entry: Loaded, body: ResponseBody, items: list[dict[str, Any]], tools: Tools) -> Prompt:
    """The prompt; with truncation 'auto' the oldest turns are left out until it fits."""
    lead = [{"role": "system", "content": body.instructions}] if body.instructions else []
    turns = messages_of(items)
    variables = _variables(body, entry.dialogue)
    while True:
        prompt = await entry.dialogue.prompt([*lead, *turns], tools=tools, variables=variables)
        try:
            room_for_answer(len(prompt.ids), entry.engine.context, entry.card.name)
        except PromptTooLong:
            if body.truncation != "auto" or len(turns) < 2:
                raise
            turns = _without_oldest(turns)
        else:
            return prompt


def _without_oldest(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Less the first turn that is no system turn, and the tool results that hung on it."""
    first = next((i for i, turn in enumerate(turns) if turn["role"] not in ("system", "developer")), 0)
    rest = turns[first + 1 :]
    while len(rest) > 1 and rest[0]["role"] == "tool":
        rest = rest[1:]
    return [*turns[:first], *rest]


def _variables(body: ResponseBody, dialogue: Dialogue) -> dict[str, Any]:
    if body.reasoning is None or body.reasoning.effort is None:
        return {}
    try:
        return dialogue.effort(body.reasoning.effort)
    except Unsupported as error:
        error.param = "reasoning.effort"
        raise


def response_params(body: ResponseBody, tools: Tools) -> SamplingParams:
    """SamplingParams of a body. Raises UsageError that names a field."""
    chosen = body.text.format if body.text else None
    form: dict[str, Any] = {}
    match chosen:
        case ObjectFormat():
            form = {"json_object": True}
        case SchemaFormat(schema=schema):
            form = {"schema": schema}
    return SamplingParams(
        **form,
        **given(
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            logprobs=(body.top_logprobs or 0) if wants_logprobs(body) else None,
        ),
    )


def wants_logprobs(body: ResponseBody) -> bool:
    return bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ())


@dataclass(slots=True)
class ResponseRenderer:
    """One response, whole or as events; kept in the store at its end unless store is false."""

    body: ResponseBody
    items: list[dict[str, Any]]
    store: ResponseStore
    id: str = field(default_factory=lambda: new_id("resp"))
    created: float = field(default_factory=time.time)
    media_type: str = "text/event-stream"
    _stream: ItemStream | None = None
    _sampling: SamplingParams | None = None

    async def whole(self, run: Run) -> dict[str, Any]:
        self._sampling = run.requests[0].params
        (reply,) = await gather(run)
        output = [
            item_object(block, reply, self.body, run.dialogue, new_id)
            for block in reply.blocks
            if block.text.strip() or block.name
        ]
        return self._keep(self._finished(reply, run.usage, output))

    def _keep(self, response: dict[str, Any]) -> dict[str, Any]:
        if self.body.store is not False:
            self.store.put(response, self.items)
        return response

    def _finished(self, reply: Reply, usage: Usage, output: list[dict[str, Any]]) -> dict[str, Any]:
        cut = reply.finish is FinishReason.LENGTH
        return {
            **self._object("incomplete" if cut else "completed", output),
            "completed_at": None if cut else time.time(),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": usage_object(usage),
        }

    def _object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, sampling = self.body, self._sampling
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": body.reasoning.summary if body.reasoning else None,
            },
            "service_tier": "flex" if body.service_tier == "flex" else "default",
            "store": body.store is not False,
            "temperature": sampling.temperature if sampling else body.temperature,
            "text": {"format": _format_object(body)},
            "tool_choice": msgspec.to_builtins(body.tool_choice) or "auto",
            "tools": msgspec.to_builtins(body.tools or []),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p if sampling else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        }

    # -- the stream -------------------------------------------------------------------------------

    async def frames(self, run: Run) -> AsyncGenerator[bytes, None]:
        self._sampling = run.requests[0].params
        stream = ItemStream(self.body, run.dialogue)
        reply = Reply()
        async with aclosing(run.steps()) as steps:
            async for step in steps:
                if self._stream is None:
                    self._stream = stream
                    for kind in ("response.created", "response.in_progress"):
                        yield stream.event(kind, response=self._object("in_progress", []))
                reply.add(step)
                for frame in stream.add(step):
                    yield frame
        for frame in stream.close(cut=reply.finish is FinishReason.LENGTH):
            yield frame
        response = self._keep(self._finished(reply, run.usage, stream.items))
        yield stream.event(f"response.{response['status']}", response=response)

    def failure(self, error: MlxServeError) -> bytes:
        """The API's terminal event for a response that broke."""
        if self._stream is None:
            fault = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
            return event_frame("error", {**fault, "sequence_number": 0})
        failed = self._object("failed", self._stream.items)
        failed["error"] = {"code": "server_error", "message": str(error)}
        return self._stream.event("response.failed", response=failed)

    def heartbeat(self) -> bytes:
        return COMMENT


def _format_object(body: ResponseBody) -> dict[str, Any]:
    chosen = body.text.format if body.text else None
    made: dict[str, Any] = msgspec.to_builtins(chosen) if chosen else {"type": "text"}
    return made


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


async def retrieve(request: HttpRequest) -> Response:
    query = request.query_params
    if query.get("stream", "false") != "false":
        raise Unsupported("A stored response cannot be streamed again.", param="stream")
    refuse_unknown(query, ("stream",))
    return json_response(store_of(request).get(request.path_params["id"]).response)


async def input_items(request: HttpRequest) -> Response:
    items, query = store_of(request).get(request.path_params["id"]).items, request.query_params
    data = items if ascending(query) else items[::-1]
    return json_response(page_of(data, {"limit": "20", **query}, also=("order",)))


async def delete(request: HttpRequest) -> Response:
    id_ = request.path_params["id"]
    store_of(request).drop(id_)
    return json_response({"id": id_, "object": "response", "deleted": True})


async def cancel(request: HttpRequest) -> Response:
    store_of(request).get(request.path_params["id"])
    raise UsageError("Only background responses can be cancelled; close the connection instead.")
