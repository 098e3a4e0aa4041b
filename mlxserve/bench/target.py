"""Who answers: the questions, what a client sees of an answer, and the protocol between them.

Knows plain values only. `inprocess` and `endpoint` implement `Target`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, Any]
Heard = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a conversation, tokens of the answer at most, and a JSON schema for it or None."""

    messages: Sequence[Message]
    max_tokens: int
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """What the answering side says of itself at the end; None for what it does not tell."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class Trace:
    """What a client saw of one request. Times in seconds: `began_s` from the scenario's start, `pieces_s` and
    `total_s` from the request's own start. `chunks` are pieces that carried something."""

    began_s: float
    pieces_s: list[float] = field(default_factory=list)
    chunks: int = 0
    text: str = ""
    total_s: float = 0.0
    totals: Totals = field(default_factory=Totals)
    failed: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the answer, as the other side counts them; its chunks where it does not."""
        told = self.totals.completion_tokens
        return self.chunks if told is None else told

    @property
    def first_s(self) -> float | None:
        """Time to the first token, in seconds."""
        return self.pieces_s[0] if self.pieces_s else None

    @property
    def per_token_s(self) -> float | None:
        """Seconds a token after the first one."""
        if self.tokens < 2 or not self.pieces_s:
            return None
        return (self.pieces_s[-1] - self.pieces_s[0]) / (self.tokens - 1)


class Target(Protocol):
    """Something that answers. `kind` and `name` are for the report; `context` is in tokens, None if unknown."""

    kind: str
    name: str
    context: int | None

    async def ask(self, question: Ask, heard: Heard) -> Totals:
        """Answer, calling heard(text, tokens) for each piece as it comes (tokens: 1 a chunk if unknown).

        Raises MlxServeError if the request fails.
        """
        ...

    async def peak_bytes(self) -> int | None:
        """The most memory that was held, in bytes; None where nobody can tell."""
        ...

    async def close(self) -> None: ...
