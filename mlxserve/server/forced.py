"""Grammars for tool calls: one that must come, those that may come but must conform, or else a form.

Knows: JSON and Lark grammars as llguidance reads them, and a dialect's marks. Does not know how a grammar is
kept to.

A call that must come is {"name": "NAME", "arguments": OBJECT}, OBJECT conforming to the tool's schema, or OBJECT
alone where only one tool is allowed: held to this form any model makes a call, trained to or not. Calls that may
come stand in free text, between the marks that the model was trained on.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxserve.config import WHITE_SPACE
from mlxserve.server.constraints import Tools
from mlxserve.text.events import Event, ToolArguments, ToolEnd, ToolStart
from mlxserve.text.formats import Dialect, ReplyFormat


def call_grammar(tools: Tools) -> str:
    """The Lark grammar of one call. Each schema is a root of its own, so its $refs stay right."""
    schemas = [tool["function"] for tool in tools.offered]
    if tools.only is not None:
        return f"start: %json {_schema(schemas[0])}\n"
    heads = [_literal(_head(schema)) for schema in schemas]
    options = " | ".join(f'{head} args_{i} "}}"' for i, head in enumerate(heads))
    rules = "".join(f"args_{i}: %json {_schema(schema)}\n" for i, schema in enumerate(schemas))
    return f"start: {options}\n{rules}"


# As JSON's writers do it; a model that pads with white space would use up its tokens.
_COMPACT = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
_PADDED = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE}


def strict_grammar(tools: Tools, reply: ReplyFormat, added: Mapping[str, int]) -> str | None:
    """The Lark grammar of free text in which a call, once begun, must be one of `tools` and conform.

    None for dialects that write calls in another way than as JSON between two marks.
    """
    dialect = reply.dialects[0]
    if reply.harmony or not _between_marks(dialect):
        return None
    bodies, rules = _bodies(tools)
    begin = f"TEXT {_mark(dialect.start, added)}" if dialect.start in added else "begin"
    if begin == "begin":  # a mark of ordinary text: the shortest text that ends with it
        rules.append(f"begin[lazy]: TEXT {_literal(dialect.start)}")
    # Other marks made of added tokens may stand in the text: reasoning begins and ends with them.
    reasoning = (reply.reasoning.start, reply.reasoning.end) if reply.reasoning else ()
    marks = [_mark(text, added) for text in (*reasoning, *reply.dropped) if text in added]
    free = "".join(f" | TEXT {mark}" for mark in marks)
    return "\n".join(
        [
            "%llguidance {}",
            f"start: (call{free})* TEXT",
            f'call: {begin} "\\n" ({bodies}) "\\n" {_mark(dialect.end, added)}',
            "TEXT: /(.|\\n)*/",
            *rules,
            "",
        ]
    )


def form_or_calls_grammar(
    schema: Mapping[str, Any] | bool, tools: Tools, reply: ReplyFormat, added: Mapping[str, int]
) -> str | None:
    """The Lark grammar of an answer of the form `schema`, or else of calls, one a line.

    Calls are written as the first dialect does that writes JSON between two marks; None where none does.
    """
    dialect = None if reply.harmony else next(filter(_between_marks, reply.dialects), None)
    if dialect is None:
        return None
    bodies, rules = _bodies(tools)
    form = json.dumps({**(schema if isinstance(schema, Mapping) else {}), "x-guidance": _PADDED})
    return "\n".join(
        [
            "%llguidance {}",
            'start: form | call ("\\n" call)*',
            f'call: {_mark(dialect.start, added)} "\\n" ({bodies}) "\\n" {_mark(dialect.end, added)}',
            f"form: %json {form}",
            *rules,
            "",
        ]
    )


def _between_marks(dialect: Dialect) -> bool:
    return dialect.payload == "json" and not dialect.each and bool(dialect.start and dialect.end)


def _bodies(tools: Tools) -> tuple[str, list[str]]:
    """What may stand between the marks of a call, and the rules that it names."""
    functions = [tool["function"] for tool in tools.offered]
    bodies = " | ".join(f'{_literal(_head(function))} args_{i} "}}"' for i, function in enumerate(functions))
    return bodies, [f"args_{i}: %json {_schema(function)}" for i, function in enumerate(functions)]


def _mark(text: str, added: Mapping[str, int]) -> str:
    """A mark as the grammar names it: by its id, if it is a token of its own."""
    return f"<[{added[text]}]>" if text in added else _literal(text)


def _head(function: Mapping[str, Any]) -> str:
    return f'{{"name": {json.dumps(function["name"])}, "arguments": '


def _schema(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    return json.dumps({"type": "object", **parameters, "x-guidance": _COMPACT})


def _literal(text: str) -> str:
    return json.dumps(text)


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*', re.DOTALL)


class ForcedCallParser:
    """Reads what `call_grammar` allows. `only`: the one tool, whose arguments are the whole text."""

    thinking = False

    def __init__(self, only: str | None) -> None:
        self._name = only
        self._id = f"call_{uuid.uuid4().hex[:24]}"
        self._held = ""
        self._started = False
        self._json = _ObjectEnd()

    def feed(self, text: str) -> Sequence[Event]:
        return list(self._feed(text))

    def _feed(self, text: str) -> Iterator[Event]:
        if not text:
            return
        if not self._started:
            self._held += text
            if not self._begin():
                return
            text = self._held
            assert self._name is not None
            yield ToolStart(0, self._id, self._name)
        inside = self._json.take(text)
        if inside:
            yield ToolArguments(0, inside)

    def _begin(self) -> bool:
        if self._name is None:
            head = _HEAD.match(self._held)
            if head is None:
                return False
            self._name = json.loads(head[1])
            self._held = self._held[head.end() :]
        self._started = True
        return True

    def finish(self) -> Sequence[Event]:
        return [ToolEnd(0)] if self._started and self._json.complete else []


class _ObjectEnd:
    """Passes text on up to the end of the first JSON value in it."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.complete = False

    def take(self, text: str) -> str:
        """The part of `text` that belongs to the value."""
        for i, char in enumerate(text):
            if self.complete:
                return text[:i]
            self._step(char)
        return text

    def _step(self, char: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.complete = self._depth == 0
