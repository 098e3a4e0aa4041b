"""The main job on a real model: what the README promises, and logits against mlx-lm's plain forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxserve import LLM, SamplingParams
from mlxserve.config import LoadConfig
from mlxserve.models.layout import plain_caches
from mlxserve.models.load import LoadedModel, load_gguf
from mlxserve.models.paged import PagedModel
from mlxserve.models.step import ROWS, Step

QUESTION = "What is the capital of France? Answer in one sentence."
PAGE = 16

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> Iterator[LoadedModel]:
    yield load_gguf(smollm2, LoadConfig())


def test_the_capital_of_france(smollm2: Path) -> None:
    with LLM(str(smollm2)) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=40)
        (answer,) = llm.chat([{"role": "user", "content": QUESTION}], greedy)
        assert answer.text == "The capital of France is Paris."
        bare = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        alone, _ = llm.generate([llm.tokenizer.encode(bare), "Once upon a time"], greedy)
        assert alone.text == "The capital of France is Paris."


def test_logits_equal_the_plain_forward(loaded: LoadedModel) -> None:
    """Alone, in a mixed batch, and in chunks: within 1e-3 of mlx-lm's forward of the same weights."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 49152, length) for length in (4, 37, 21)]
    expected = [loaded.model(mx.array(p)[None], cache=plain_caches(loaded.model))[0, -1] for p in prompts]
    tables = np.arange(12).reshape(3, 4)[::-1]
    paged = PagedModel(loaded.model, ROWS, page_size=PAGE, group_pages=[12])

    def run(*chunks: tuple[int, int, int]) -> list[mx.array]:
        which, starts, stops = (np.array(column) for column in zip(*chunks))
        ids = np.concatenate([prompts[s][a:b] for s, a, b in chunks])
        wanted = np.ones(len(chunks), np.int64)
        step = Step(starts, stops - starts, wanted, [tables[which]])
        logits = paged.forward(mx.array(ids), step)
        mx.eval(logits, paged.arrays())
        return list(logits)

    (alone,) = run((1, 0, 37))
    mixed = run((0, 0, 4), (1, 0, 37), (2, 0, 21))
    run((1, 0, 10), (2, 0, 20))
    in_chunks = run((2, 20, 21), (1, 10, 37))
    for got, want in [
        (alone, expected[1]),
        *zip(mixed, expected),
        (in_chunks[0], expected[2]),
        (in_chunks[1], expected[1]),
    ]:
        assert float(mx.abs(got - want).max()) < 1e-3
