"""Placeholder
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    index: int
    text: str


Event = Text | Reasoning | ToolStart | ToolArguments


class ReplyParser(Protocol):
    thinking: bool

    def feed(self, text: str) -> Sequence[Event]: ...
    def finish(self) -> Sequence[Event]: ...
