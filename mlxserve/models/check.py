"""Decides which way a definition runs on pages, by trying it on a tiny random model of its own kind.

The model has the same configuration with sizes cut down (models/shrink.py). It runs plain (mlx-lm's own
caches, one sequence at a time), then in each paged way: ragged, in chunks, on shuffled pages. The
first way whose logits agree is taken; where neither does, requests are served one at a time. The answer
is remembered per configuration and versions.

Knows: definitions and ways. Does not know architectures by name: tomorrow's is judged like today's.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.models.layout import plain_caches
from mlxserve.models.load import build
from mlxserve.models.paged import PagedModel
from mlxserve.models.shrink import CHECK_TOKENS, shrunk
from mlxserve.models.step import PAGED_WAYS, SOLO, Step

TOLERANCE = 1e-4
PAGE_SIZE = 4
LENGTHS = (CHECK_TOKENS, 23, 9)
# Steps of (sequence, start, stop): chunks, ragged mixtures of prompt and decode, single tokens.
SCHEDULE: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((0, 0, 21),),
    ((0, 21, 22), (1, 0, 5)),
    ((0, 22, 40), (1, 5, 21), (2, 0, 7)),
    ((1, 21, 22), (2, 7, 8), (0, 40, 62)),
    ((2, 8, 9), (0, 62, 63), (1, 22, 23)),
    ((0, 63, 64),),
)
_ERRORS = (TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError, RuntimeError)


def choose_way(config: Mapping[str, Any], *, remember: bool = True) -> tuple[str, str]:
    """(way, reason) for a configuration: one of PAGED_WAYS, or SOLO; the reason is for people.

    Reads and writes the memory of earlier answers unless told not to.
    """
    key = _key(config)
    known = _recall(key) if remember else None
    if known is not None:
        return known
    answer = _try_out(config)
    if remember:
        _remember(key, answer)
    return answer


def _try_out(config: Mapping[str, Any]) -> tuple[str, str]:
    reason = "no cut-down model of this configuration could be built"
    for small in shrunk(config):
        try:
            model = random_model(small)
            prompts = _prompts(int(_vocabulary(small)))
            expected = [plain_logits(model, prompt) for prompt in prompts]
            mx.eval(expected)
        except (ModelInvalid, *_ERRORS) as error:
            reason = f"the cut-down model does not run: {error}"
            continue
        return _compare(model, prompts, expected)
    return SOLO, reason


def _compare(model: nn.Module, prompts: list[np.ndarray], expected: list[mx.array]) -> tuple[str, str]:
    said = []
    for way in PAGED_WAYS:
        try:
            error = disagreement(model, way, prompts, expected)
        except (ModelUnsupported, *_ERRORS) as problem:
            said.append(f"{way}: {type(problem).__name__}: {problem}")
            continue
        if error <= TOLERANCE:
            return way, f"agrees with the plain forward within {error:.1e}"
        said.append(f"{way}: off by {error:.1e}")
    return SOLO, "; ".join(said)[:500]


def random_model(config: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """A definition with random float32 weights; vectors that start as ones or zeros are stirred too."""
    mx.random.seed(seed)
    model = build(config)
    stirred = [
        (name, (value + 0.1 * mx.random.normal(value.shape)).astype(mx.float32))
        for name, value in tree_flatten(model.parameters())
        if mx.issubdtype(value.dtype, mx.floating)
    ]
    model.update(tree_unflatten(stirred))
    model.eval()
    mx.eval(model.parameters())
    return model


def plain_logits(model: nn.Module, prompt: np.ndarray) -> mx.array:
    """(L, V) logits of one sequence through mlx-lm's own caches, in one pass."""
    return model(mx.array(prompt)[None], cache=plain_caches(model))[0]


def disagreement(model: nn.Module, way: str, prompts: list[np.ndarray], expected: list[mx.array]) -> float:
    """The largest difference of logits, relative to the largest logit where that is above 1."""
    pages_each = -(-max(LENGTHS) // PAGE_SIZE)
    total = pages_each * len(prompts)
    paged = _paged(model, way, total, len(prompts))
    shuffled = np.random.default_rng(0).permutation(total).reshape(len(prompts), pages_each)
    got: list[list[mx.array]] = [[] for _ in prompts]
    for chunks in SCHEDULE:
        step = _step(chunks, shuffled, len(paged.windows))
        ids = mx.array(np.concatenate([prompts[s][a:b] for s, a, b in chunks]))
        logits = paged.forward(ids, step)
        mx.eval(logits, paged.arrays())
        first = 0
        for sequence, start, stop in chunks:
            got[sequence].append(logits[first : first + stop - start])
            first += stop - start
    return max(_difference(mx.concatenate(mine), theirs) for mine, theirs in zip(got, expected))


def _paged(model: nn.Module, way: str, pages: int, slots: int) -> PagedModel:
    from mlxserve.models.layout import read_layout

    groups = [pages] * len(read_layout(model).windows)
    return PagedModel(model, way, page_size=PAGE_SIZE, group_pages=groups, state_slots=slots)


def _step(chunks: tuple[tuple[int, int, int], ...], tables: np.ndarray, groups: int) -> Step:
    sequences = np.array([s for s, _, _ in chunks])
    starts = np.array([a for _, a, _ in chunks])
    counts = np.array([b - a for _, a, b in chunks])
    return Step(starts, counts, counts, [tables[sequences]] * groups, sequences.astype(np.int32))


def _difference(mine: mx.array, theirs: mx.array) -> float:
    scale = max(1.0, float(mx.abs(theirs).max()))
    worst = float(mx.abs(mine - theirs).max()) / scale
    return worst if np.isfinite(worst) else float("inf")


def _prompts(vocabulary: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, vocabulary, length) for length in LENGTHS]


def _vocabulary(config: Mapping[str, Any]) -> int:
    return config.get("vocab_size") or config["text_config"]["vocab_size"]


def _key(config: Mapping[str, Any]) -> str:
    versions = [version("mlx"), version("mlx-lm"), version("mlxserve")]
    text = json.dumps([config, versions, SCHEDULE, TOLERANCE], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _memory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mlxserve" / "ways"


def _recall(key: str) -> tuple[str, str] | None:
    try:
        way, reason = json.loads((_memory() / f"{key}.json").read_text())
    except (OSError, ValueError):
        return None
    return (way, reason) if way in (*PAGED_WAYS, SOLO) else None


def _remember(key: str, answer: tuple[str, str]) -> None:
    """One small file an answer, written whole or not at all; a read-only home is no error."""
    folder = _memory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            json.dump(answer, file)
        os.replace(file.name, folder / f"{key}.json")
    except OSError:
        return
