"""Engines on tiny models, and the independent truth: mlx-lm's own loop, one sequence alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.engine.engine import Engine
from mlxserve.errors import MlxServeError
from mlxserve.models.layout import plain_caches
from mlxserve.models.load import LoadedModel, load_folder
from mlxserve.request import Delta, FinishReason, Request, SamplingParams
from mlxserve.text.tokenizer import Tokenizer, load_tokenizer
from tests import tiny

_ids = itertools.count()


@functools.cache
def tiny_model(kind: str, overrides: tuple[tuple[str, Any], ...] = ()) -> tuple[LoadedModel, Tokenizer]:
    """A tiny random model of `kind`, loaded from a folder once, and its byte tokenizer."""
    folder = tiny.write(Path(mkdtemp()) / kind, kind, **dict(overrides))
    return load_folder(folder, LoadConfig()), load_tokenizer(folder)


def engine(kind: str = "llama", *, model: dict[str, Any] | None = None, **settings: Any) -> Engine:
    """A new engine on the tiny model of `kind`; its books are checked whenever it is idle."""
    loaded, tokenizer = tiny_model(kind, tuple((model or {}).items()))
    defaults: dict[str, Any] = {"check": True, "step_tokens": 64, "page_size": 8}
    return Engine(loaded, tokenizer, EngineConfig(**{**defaults, **settings}))


def request(prompt: Sequence[int], max_tokens: int = 8, **settings: Any) -> Request:
    """A greedy request that end-of-turn ids do not stop, unless told otherwise."""
    about = {key: settings.pop(key) for key in ("priority", "client", "deadline_s") if key in settings}
    params = {"temperature": 0.0, "ignore_eos": True, **settings}
    return Request(
        f"r{next(_ids)}", list(prompt), SamplingParams(max_tokens=max_tokens, **params).resolved(), **about
    )


class Answer:
    """Collects what one request is sent."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.error: MlxServeError | None = None

    def __call__(self, news: Delta | MlxServeError) -> None:
        if isinstance(news, MlxServeError):
            assert self.error is None and self.reason is None, "news after the end"
            self.error = news
        else:
            assert self.reason is None, "news after the end"
            self.deltas.append(news)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def reason(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason if self.deltas else None


def run(engine: Engine, requests: Sequence[Request], *, steps: int = 5000) -> list[Answer]:
    """All requests at once, to their ends."""
    answers = [Answer() for _ in requests]
    for asked, answer in zip(requests, answers):
        engine.add(asked, answer)
    finish(engine, steps)
    return answers


def finish(engine: Engine, steps: int = 5000) -> None:
    """Step until nothing is left to do; the bound turns a hang into a failure."""
    for _ in range(steps):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError(f"still busy after {steps} steps")


def solo_tokens(kind: str, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of mlx-lm's definition on its own caches: prompt in one pass, then one at a time."""
    return list(_solo(kind, tuple(prompt), count))


@functools.lru_cache(maxsize=4096)
def _solo(kind: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    model = tiny_model(kind)[0].model
    caches = plain_caches(model)
    ids, tokens = mx.array(prompt)[None], []
    for _ in range(count):
        token = int(mx.argmax(model(ids, cache=caches)[0, -1]))
        tokens.append(token)
        ids = mx.array([[token]])
    return tuple(tokens)


def solo_logprobs(kind: str, tokens: Sequence[int]) -> np.ndarray:
    """(L, V) natural log-probabilities of mlx-lm's plain forward over all tokens."""
    model = tiny_model(kind)[0].model
    logits = np.array(model(mx.array(list(tokens))[None], cache=plain_caches(model))[0], np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    """Random byte prompts of 1 to `longest` tokens."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 256, int(draw.integers(1, longest + 1))).tolist() for _ in range(count)]
