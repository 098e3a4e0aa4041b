"""What is asked: five loads, made of plain words, the same for everyone who answers.

Knows: how prompts are made and when each request starts. Pure: no clock, no model, no network.

    latency      one request after another
    throughput   several clients at once, each its requests one after another
    prefix       one request behind a long system prompt, then several more behind the same one
    long-prompt  running streams, and a long prompt that arrives among them
    structured   several clients at once, answers free, and then held to a JSON schema

Every prompt begins with a number of its own, so that no server can answer from what it cached of another.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxserve.bench.target import Ask, Message

NAMES = ("latency", "throughput", "prefix", "long-prompt", "structured")
# Of the long-prompt load: after this share of its pieces a stream is under way.
UNDER_WAY = 0.25
COLOURS = ("red", "green", "blue", "yellow")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": list(COLOURS)},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "ripe": {"type": "boolean"},
    },
    "required": ["colour", "count", "ripe"],
    "additionalProperties": False,
}
SCHEMA_TOKENS = 96  # enough for the object above, one byte a token, with some white space
_WORDS = ("river", "stone", "light", "window", "garden", "letter", "music", "winter", "bread", "paper")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the loads are; lengths in tokens of the model (words times `tokens_per_word`).

    own: conversations to ask instead of made-up ones, in latency and throughput.
    """

    clients: int = 8
    requests: int = 16
    tokens: int = 64
    prompt_tokens: int = 100
    prefix_tokens: int = 1000
    long_tokens: int = 2000
    tokens_per_word: float = 1.3
    seed: int = 0
    own: Sequence[Sequence[Message]] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A request, the client who asks it (a client asks one after another), and what it stands for.

    after_pieces: it starts when every job of the role "stream" has heard so many pieces; 0 at once.
    """

    ask: Ask
    client: int
    role: str = ""
    after_pieces: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Phases run one after another; the jobs of a phase at the same time, by client."""

    name: str
    phases: tuple[tuple[Job, ...], ...]


@dataclass(slots=True)
class Words:
    """Prompts of so many tokens, each beginning unlike all others."""

    sizes: Sizes
    draw: random.Random = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.sizes.seed)

    def text(self, tokens: int) -> str:
        """About `tokens` tokens of words, after a number that no other text has."""
        self.count += 1
        words = max(1, round(tokens / self.sizes.tokens_per_word) - 1)
        return f"{self.draw.getrandbits(40)}-{self.count} " + " ".join(self.draw.choices(_WORDS, k=words))


def make(name: str, sizes: Sizes) -> Load:
    """The load of that name. Raises KeyError for a name that is none of NAMES."""
    return Load(name, _MAKERS[name](sizes, Words(sizes)))


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _plain(sizes: Sizes, words: Words) -> list[Ask]:
    """`requests` prompts: the person's own, in turn, or made-up ones."""
    if sizes.own:
        return [Ask(sizes.own[i % len(sizes.own)], sizes.tokens) for i in range(sizes.requests)]
    return [Ask([_user(words.text(sizes.prompt_tokens))], sizes.tokens) for _ in range(sizes.requests)]


def _latency(sizes: Sizes, words: Words) -> tuple[tuple[Job, ...], ...]:
    asks = _plain(sizes, words)[: max(2, sizes.requests // sizes.clients)]
    return (tuple(Job(ask, 0) for ask in asks),)


def _throughput(sizes: Sizes, words: Words) -> tuple[tuple[Job, ...], ...]:
    return (tuple(Job(ask, i % sizes.clients) for i, ask in enumerate(_plain(sizes, words))),)


def _prefix(sizes: Sizes, words: Words) -> tuple[tuple[Job, ...], ...]:
    system = {"role": "system", "content": words.text(sizes.prefix_tokens)}

    def job(client: int, role: str) -> Job:
        short = words.text(min(sizes.prompt_tokens, 30))
        return Job(Ask([system, _user(short)], max(2, sizes.tokens // 4)), client, role)

    return (job(0, "first"),), tuple(job(i, "behind it") for i in range(sizes.clients))


def _long_prompt(sizes: Sizes, words: Words) -> tuple[tuple[Job, ...], ...]:
    streams = [Job(Ask([_user(words.text(30))], sizes.tokens * 2), i, "stream") for i in range(sizes.clients)]
    late = max(1, round(sizes.tokens * 2 * UNDER_WAY))
    long = Job(Ask([_user(words.text(sizes.long_tokens))], 4), sizes.clients, "long prompt", late)
    return ((*streams, long),)


def _structured(sizes: Sizes, words: Words) -> tuple[tuple[Job, ...], ...]:
    def job(client: int, schema: dict[str, Any] | None) -> Job:
        said = f"{words.text(20)}. Describe a fruit as JSON with its colour, a count from 0 to 9 and ripe."
        tokens = SCHEMA_TOKENS if schema else SCHEMA_TOKENS // 4
        return Job(Ask([_user(said)], tokens, schema), client, "held" if schema else "free")

    return tuple(tuple(job(i, schema) for i in range(sizes.clients)) for schema in (None, SCHEMA))


_MAKERS: dict[str, Callable[[Sizes, Words], tuple[tuple[Job, ...], ...]]] = {
    "latency": _latency,
    "throughput": _throughput,
    "prefix": _prefix,
    "long-prompt": _long_prompt,
    "structured": _structured,
}
