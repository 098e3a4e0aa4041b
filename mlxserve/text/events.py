"""What a reply is made of, as it streams: the one vocabulary between parsers and APIs.

Knows: nothing but these shapes. A reply is a sequence of events; calls are numbered from 0 in their order,
each is one ToolStart, any number of ToolArguments whose deltas together are one JSON object, and one ToolEnd.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's thinking, without its markers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A call begins. `id` is unique: the model's own where it gives one."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of the JSON object that holds the call's arguments."""

    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """The call is complete."""

    index: int


Event = Text | Reasoning | ToolStart | ToolArguments | ToolEnd


def merged(events: Iterable[Event]) -> list[Event]:
    """The same reply with neighbouring pieces of one kind joined: how a reply that is not streamed looks."""
    made: list[Event] = []
    for event in events:
        last = made[-1] if made else None
        if isinstance(event, Text) and isinstance(last, Text):
            made[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            made[-1] = Reasoning(last.text + event.text)
        elif (
            isinstance(event, ToolArguments) and isinstance(last, ToolArguments) and last.index == event.index
        ):
            made[-1] = ToolArguments(event.index, last.delta + event.delta)
        else:
            made.append(event)
    return made
