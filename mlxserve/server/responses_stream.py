"""The Responses API's event stream: items and their parts, opened, filled and closed in order.

Knows: the names, order and numbering of events. Does not know how a response begins or ends.

    output_item.added   [content_part.added  output_text.delta… output_text.done  content_part.done]
    output_item.done    and the same shape for reasoning; function_call_arguments.delta… .done for calls
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

from mlxserve.request import FinishReason, TokenLogprob
from mlxserve.server.dialogue import Dialogue, Event, Reasoning, Text, ToolArguments, ToolEnd, ToolStart
from mlxserve.server.generation import Block, Kind, Reply, Step
from mlxserve.server.openai_chat import logprob_object
from mlxserve.server.responses_items import new_id, sealed
from mlxserve.server.responses_types import ResponseBody
from mlxserve.server.sse import event_frame


def item_object(
    block: Block, reply: Reply, body: ResponseBody, dialogue: Dialogue, make_id: Callable[[str], str]
) -> dict[str, Any]:
    """One finished output item."""
    last = block is reply.blocks[-1]
    status = "incomplete" if last and reply.finish is FinishReason.LENGTH else "completed"
    match block.kind:
        case Kind.TEXT:
            logprobs = [logprob_object(entry, dialogue) for entry in block.logprobs]
            return message_item(make_id("msg"), status, [text_part(block.text, logprobs)])
        case Kind.THOUGHT:
            return reasoning_item(make_id("rs"), block.text, body)
        case Kind.CALL:
            return call_item(make_id("fc"), block.id, block.name, block.text, status)


def message_item(id_: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": id_, "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def call_item(id_: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": id_,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def reasoning_item(id_: str, thought: str, body: ResponseBody) -> dict[str, Any]:
    """Reasoning, under `summary` where a summary was asked for, else under `content`."""
    item: dict[str, Any] = {"id": id_, "type": "reasoning", "summary": [], "status": "completed"}
    if wants_summary(body):
        item["summary"] = [{"type": "summary_text", "text": thought}] if thought else []
    else:
        item["content"] = [{"type": "reasoning_text", "text": thought}] if thought else []
    if thought and "reasoning.encrypted_content" in (body.include or ()):
        item["encrypted_content"] = sealed(thought)
    return item


def wants_summary(body: ResponseBody) -> bool:
    return body.reasoning is not None and bool(body.reasoning.summary or body.reasoning.generate_summary)


class ItemStream:
    """Writes one response's items; `items` are the finished ones. `event` numbers whatever is sent."""

    def __init__(self, body: ResponseBody, dialogue: Dialogue) -> None:
        self._body, self._dialogue = body, dialogue
        self._number = 0
        self.items: list[dict[str, Any]] = []
        self._open: Block | None = None
        self._id = ""
        self._blank = ""
        self._logprobs: list[dict[str, Any]] = []
        self._waiting: list[TokenLogprob] = []

    def event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event_frame(kind, data)

    def add(self, step: Step) -> Iterator[bytes]:
        self._waiting.extend(step.delta.logprobs)
        for event in step.events:
            yield from self._add(event)

    def _add(self, event: Event) -> Iterator[bytes]:
        match event:
            case Text(text):
                yield from self._text(text)
            case Reasoning(text):
                yield from self._reason(text)
            case ToolStart(id=id_, name=name):
                yield from self._begin(Block(Kind.CALL, id=id_, name=name), "fc")
                item = call_item(self._id, id_, name, "", "in_progress")
                yield self._here("response.output_item.added", item=item)
            case ToolArguments(delta=text):
                assert self._open is not None
                self._open.text += text
                yield self._of_item("response.function_call_arguments.delta", delta=text)
            case ToolEnd():
                yield from self.close()

    # -- one item ---------------------------------------------------------------------------------

    def _begin(self, block: Block, prefix: str) -> Iterator[bytes]:
        yield from self.close()
        self._open, self._id, self._blank, self._logprobs = block, new_id(prefix), "", []

    def _here(self, kind: str, **fields: Any) -> bytes:
        return self.event(kind, output_index=len(self.items), **fields)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._here(kind, item_id=self._id, **fields)

    def _text(self, text: str) -> Iterator[bytes]:
        if self._open is None or self._open.kind is not Kind.TEXT:
            text = self._blank + text
            if not text.strip():  # white space that may turn out to stand alone
                self._blank = text
                return
            yield from self._begin(Block(Kind.TEXT), "msg")
            yield self._here("response.output_item.added", item=message_item(self._id, "in_progress", []))
            yield self._of_item("response.content_part.added", content_index=0, part=text_part("", []))
        assert self._open is not None
        self._open.text += text
        shown = self._take_logprobs()
        yield self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=shown)

    def _take_logprobs(self) -> list[dict[str, Any]]:
        """Log-probabilities since the last piece of text, also of tokens whose text was held back."""
        shown = [logprob_object(entry, self._dialogue) for entry in self._waiting]
        self._waiting.clear()
        self._logprobs += shown
        return shown

    def _reason(self, text: str) -> Iterator[bytes]:
        if self._open is None or self._open.kind is not Kind.THOUGHT:
            yield from self._begin(Block(Kind.THOUGHT), "rs")
            yield self._here("response.output_item.added", item=reasoning_item(self._id, "", self._body))
            yield self._of_item(f"response.{self._part_name}.added", **self._part(""))
        assert self._open is not None
        self._open.text += text
        yield self._of_item(f"response.{self._text_name}.delta", delta=text, **self._index)

    @property
    def _index(self) -> dict[str, int]:
        return {"summary_index": 0} if wants_summary(self._body) else {"content_index": 0}

    @property
    def _part_name(self) -> str:
        return "reasoning_summary_part" if wants_summary(self._body) else "content_part"

    @property
    def _text_name(self) -> str:
        return "reasoning_summary_text" if wants_summary(self._body) else "reasoning_text"

    def _part(self, text: str) -> dict[str, Any]:
        kind = "summary_text" if wants_summary(self._body) else "reasoning_text"
        return {**self._index, "part": {"type": kind, "text": text}}

    def close(self, *, cut: bool = False) -> Iterator[bytes]:
        """Ends the open item; `cut` where the length limit did."""
        block, self._open = self._open, None
        if block is None:
            return
        status = "incomplete" if cut else "completed"
        match block.kind:
            case Kind.TEXT:
                item = yield from self._end_text(block, status)
            case Kind.THOUGHT:
                item = yield from self._end_reasoning(block)
            case Kind.CALL:
                item = call_item(self._id, block.id, block.name, block.text, status)
                yield self._of_item(
                    "response.function_call_arguments.done", arguments=block.text, name=block.name
                )
        yield self._here("response.output_item.done", item=item)
        self.items.append(item)

    def _end_text(self, block: Block, status: str) -> Generator[bytes, None, dict[str, Any]]:
        self._take_logprobs()
        part = text_part(block.text, self._logprobs)
        yield self._of_item(
            "response.output_text.done", content_index=0, text=block.text, logprobs=self._logprobs
        )
        yield self._of_item("response.content_part.done", content_index=0, part=part)
        return message_item(self._id, status, [part])

    def _end_reasoning(self, block: Block) -> Generator[bytes, None, dict[str, Any]]:
        yield self._of_item(f"response.{self._text_name}.done", text=block.text, **self._index)
        yield self._of_item(f"response.{self._part_name}.done", **self._part(block.text))
        return reasoning_item(self._id, block.text, self._body)
