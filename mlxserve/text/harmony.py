"""gpt-oss' reply format: messages with channels, one after another.

Knows: headers (channel, recipient), bodies and the markers around them. Knows nothing of tokens. The package
openai-harmony is not used: it works on its own vocabulary, which it downloads when it starts.

Source: the format's description, cookbook.openai.com, "OpenAI Harmony response format".

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxserve.text.events import Event, Reasoning, Text
from mlxserve.text.stop import Markers
from mlxserve.text.tools import Malformed, call_events, call_of, tool_names

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_APART = "\n\n"  # between messages of one kind


class HarmonyParser:
    """Takes one reply apart; the prompt has ended with `<|start|>assistant`. See reply.Parser.

    Analysis is reasoning; final, commentary without a recipient and text without any header are the answer.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], new_id: Callable[[], str]) -> None:
        self._names, self._new_id = tool_names(tools), new_id
        self._to_body = Markers(["<|message|>", *_ENDS])
        self._to_end = Markers(_ENDS)
        self._rest = ""
        self._header: list[str] = []
        self._first = True  # no marker has been seen
        self._in_body = False
        self._kind: type[Text] | type[Reasoning] = Text
        self._told: set[type] = set()
        self._joiner = ""
        self._function: str | None = None
        self._arguments: list[str] = []
        self._calls = 0

    @property
    def thinking(self) -> bool:
        return self._in_body and self._function is None and self._kind is Reasoning

    def feed(self, text: str, *, final: bool = False) -> list[Event]:
        self._rest += text
        events: list[Event] = []
        mark: str | None = ""
        while mark is not None:
            markers = self._to_end if self._in_body else self._to_body
            certain, mark = markers.find(self._rest, final=final)
            piece = self._rest[:certain]
            self._rest = self._rest[certain + len(mark or "") :]
            events += self._piece(piece)
            if mark is not None:
                events += self._marked(mark)
        return events + self._end() if final else events

    def _piece(self, text: str) -> list[Event]:
        """Text inside a header or a body."""
        if not text:
            return []
        if not self._in_body:
            self._header.append(text)
            return []
        if self._function is not None:
            self._arguments.append(text)
            return []
        joiner, self._joiner = self._joiner, ""
        self._told.add(self._kind)
        return [self._kind(joiner + text)]

    def _marked(self, mark: str) -> list[Event]:
        self._first = False
        if mark == "<|message|>":
            self._open("".join(self._header))
            events: list[Event] = []
        else:
            events = self._close()
        self._header.clear()
        return events

    def _open(self, header: str) -> None:
        """A header is complete: what its body will be."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1].removeprefix("functions.") if recipient else None
        self._function = name if name in self._names else None
        self._kind = Reasoning if channel is not None and channel[1] == "analysis" else Text
        self._joiner = _APART if self._kind in self._told else ""
        self._in_body = True

    def _close(self) -> list[Event]:
        """A body is complete. Arguments that are no JSON object are text."""
        name, self._function = self._function, None
        arguments = "".join(self._arguments)
        self._arguments.clear()
        if name is None or not self._in_body:
            self._in_body = False
            return []
        try:
            call = call_of(name, arguments)
        except Malformed:
            events = self._piece(arguments)
        else:
            events = call_events(self._calls, call, self._new_id)
            self._calls += 1
        self._in_body = False
        return events

    def _end(self) -> list[Event]:
        """The text ended where a marker that the engine acts on was, or it was cut off."""
        if self._first and self._header and not _CHANNEL.search("".join(self._header)):
            self._in_body = True
            return self._piece("".join(self._header))
        return self._close()
