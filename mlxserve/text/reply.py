"""A reply's text, taken apart while it streams: answer, reasoning, tool calls.

Knows: a model's reply format and the request's tools. Knows nothing of tokens, of APIs or of the engine. The
events do not depend on how the text is cut into pieces.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mlxserve.text.events import Event, Reasoning, Text
from mlxserve.text.formats import ReplyFormat
from mlxserve.text.harmony import HarmonyParser
from mlxserve.text.stop import Markers
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.text.tool_turns import check_tools
from mlxserve.text.tools import Call, call_events, read_calls

_PROMPT_TAIL = 64  # tokens of a prompt in which reasoning may have been opened


def new_call_id() -> str:
    """A fresh id in the form that OpenAI's clients know."""
    return f"call_{secrets.token_hex(12)}"


class Parser(Protocol):
    """What takes one family's text apart."""

    @property
    def thinking(self) -> bool:
        """True while the text is inside reasoning."""
        ...

    def feed(self, text: str, *, final: bool = False) -> list[Event]:
        """The events that the text so far makes certain; all the rest, once it is `final`."""
        ...


class ReplyParser:
    """Takes one reply apart. Not thread-safe; never raises on what a model writes.

        parser = ReplyParser(tokenizer, tools, prompt_ids=prompt)
        for piece in pieces:
            handle(parser.push(piece))
        handle(parser.finish())

    tools: the request's definitions; without any, calls are plain text. prompt_ids: the prompt, whose end
    tells whether the template has opened the reasoning already. new_id makes ids for calls that have none.

    A call is told when it is complete and well-formed: then ToolStart, its arguments and ToolEnd come at
    once. What turns out malformed comes as text, markers included. White space around calls and reasoning
    is dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        prompt_ids: Sequence[int] = (),
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        reply, known = tokenizer.reply_format, check_tools(tools) or []
        self._parser: Parser
        if reply.harmony:
            self._parser = HarmonyParser(known, new_id)
        else:
            tail = tokenizer.decode(prompt_ids[-_PROMPT_TAIL:], skip_special_tokens=False).rstrip()
            opened = reply.reasoning is not None and tail.endswith(reply.reasoning.start)
            self._parser = MarkedParser(reply, known, new_id, reasoning_opened=opened)

    @property
    def thinking(self) -> bool:
        """True while the reply is inside reasoning."""
        return self._parser.thinking

    def push(self, text: str) -> list[Event]:
        """The events that this piece makes certain; often none."""
        return self._parser.feed(text)

    def finish(self) -> list[Event]:
        """What was still held back. No `push` may follow."""
        return self._parser.feed("", final=True)


class MarkedParser:
    """Text with marked stretches in it, which all families but gpt-oss write.

    `_mode` is the method that takes the next stretch off `_rest`; it returns None when it needs more text.
    """

    def __init__(
        self,
        reply: ReplyFormat,
        tools: Sequence[Mapping[str, Any]],
        new_id: Callable[[], str],
        *,
        reasoning_opened: bool,
    ) -> None:
        self._reasoning = reply.reasoning
        self._dialects = {dialect.start: dialect for dialect in reversed(reply.dialects)} if tools else {}
        self._dialect = reply.dialects[0]  # of the call that is being read
        self._dropped = frozenset(reply.dropped)
        self._tools, self._new_id = tools, new_id
        self._in_text = Markers(
            [
                *([reply.reasoning.start] if reply.reasoning else []),
                *self._dialects,
                *reply.dropped,
            ]
        )
        self._in_reasoning = Markers([reply.reasoning.end] if reply.reasoning else [])
        self._in_call = {d.start: Markers([d.end or d.start]) for d in self._dialects.values()}
        self._rest = ""
        self._payload: list[str] = []
        self._head = ""  # of a reply that may be a bare call
        self._space = ""  # white space that is text only if more text follows
        self._fresh = True  # nothing but reasoning and calls so far
        self._trimming = False  # white space after a marked stretch is dropped
        self._calls = 0
        self._mode: Callable[[bool], list[Event] | None] = self._text
        self._bare = any(dialect.bare for dialect in self._dialects.values())
        if reasoning_opened:
            self._mode, self._trimming = self._reason, True

    @property
    def thinking(self) -> bool:
        return self._mode == self._reason

    def feed(self, text: str, *, final: bool = False) -> list[Event]:
        self._rest += text
        events: list[Event] = []
        while (more := self._mode(final)) is not None:
            events += more
        return events + self._end() if final else events

    def _take(self, markers: Markers, final: bool) -> tuple[str, str | None]:
        """Text up to the next mark, and the mark, off `_rest`; all that is certain, where there is none."""
        certain, mark = markers.find(self._rest, final=final)
        text = self._rest[:certain]
        self._rest = self._rest[certain + len(mark or "") :]
        return text, mark

    # The modes.

    def _text(self, final: bool) -> list[Event] | None:
        if self._bare and self._fresh and self._rest.strip():
            if self._rest.lstrip()[0] == "{":
                self._mode = self._bare_call
                return []
            self._bare = False
        if not self._rest or (self._bare and self._fresh and not final):
            return None
        text, mark = self._take(self._in_text, final)
        events = self._say(text)
        if mark is None:
            return events or None
        if mark in self._dropped:
            return events
        if self._reasoning and mark == self._reasoning.start:
            if not self._fresh:
                return events + self._say(mark)
            self._mode, self._trimming = self._reason, True
        else:
            self._mode, self._dialect = self._call, self._dialects[mark]
        return events

    def _reason(self, final: bool) -> list[Event] | None:
        if not self._rest:
            return None
        text, mark = self._take(self._in_reasoning, final)
        events: list[Event] = [Reasoning(shown) for shown in self._trimmed(text)]
        if mark is None:
            return events or None
        self._mode, self._space, self._trimming = self._text, "", True
        return events

    def _call(self, final: bool) -> list[Event] | None:
        if not self._rest:
            return None
        text, mark = self._take(self._in_call[self._dialect.start], final)
        self._payload.append(text)
        if mark is None:
            return None
        events = self._called(mark if mark == self._dialect.end else "")
        self._mode = self._call if mark == self._dialect.start else self._text
        return events

    def _bare_call(self, final: bool) -> list[Event] | None:
        """The whole reply, as long as it may be a JSON object that calls a function."""
        self._payload.append(self._rest)
        self._rest = ""
        if len(self._head) < _BARE_HEAD:
            self._head = "".join(self._payload).lstrip()[:_BARE_HEAD]
        may_call = _MAY_CALL.fullmatch(self._head) is not None
        if may_call and not final:
            return None
        payload = "".join(self._payload)
        self._payload.clear()
        self._mode, self._bare = self._text, False
        found = read_calls(self._dialect, payload, self._tools) if may_call else [payload]
        if all(isinstance(item, Call) for item in found):
            return self._tell(found)
        self._rest = payload
        return []

    # What comes out.

    def _called(self, end: str) -> list[Event]:
        """The events of a complete payload; its text as it was, if there is no call in it."""
        payload = "".join(self._payload)
        self._payload.clear()
        found = read_calls(self._dialect, payload, self._tools)
        if not any(isinstance(item, Call) for item in found):
            return self._say(self._dialect.start + payload + end)
        return self._tell(found)

    def _tell(self, found: Sequence[Call | str]) -> list[Event]:
        events: list[Event] = []
        for item in found:
            if isinstance(item, str):
                events += self._say(item)
            else:
                events += call_events(self._calls, item, self._new_id)
                self._calls += 1
                self._space, self._trimming, self._fresh = "", True, True
        return events

    def _say(self, text: str) -> list[Event]:
        shown: list[Event] = [Text(piece) for piece in self._trimmed(text)]
        if shown:
            self._fresh = False
        return shown

    def _trimmed(self, text: str) -> list[str]:
        """The text without leading white space after a mark; trailing white space waits for what follows."""
        text = self._space + text
        if self._trimming:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._trimming = False
        return [body] if body else []

    def _end(self) -> list[Event]:
        """An unfinished call is read if it can be; trailing white space shows in a reply of text only."""
        events = self._called("") if self._mode == self._call else []
        plain = self._calls == 0 and self._mode != self._reason and not self._trimming
        space, self._space = self._space, ""
        return [*events, Text(space)] if plain and space else events


_BARE_HEAD = 40  # characters by which a bare call has named its first key
_KEYS = ("name", "type", "function", "parameters")


def _beginnings(word: str) -> str:
    """A pattern of the word and of each of its beginnings."""
    pattern = ""
    for char in reversed(word):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return pattern


_MAY_CALL = re.compile(
    r"\{\s*(?:$|\"(?:" + "|".join(f'(?:{_beginnings(key)}$|{key}"[\\s\\S]*)' for key in _KEYS) + "))"
)
