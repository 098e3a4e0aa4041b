"""Every architecture that is named as supported runs on pages, ragged, with mlx-lm's own logits.

The independent truth is mlx-lm's plain forward of the same weights with its own caches. The tiny models
here have random float32 weights; windows, chunks and thresholds lie inside the 64 tokens compared.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.models.check import LENGTHS, TOLERANCE, choose_way, disagreement, plain_logits, random_model
from mlxserve.models.step import EACH, GROUPED, ROWS, SEQUENCES, SOLO
from tests import tiny

SEQUENTIAL = ["deepseek_v3", "granitemoehybrid", "lfm2", "mamba2", "qwen3_5", "qwen3_next"]
WAYS = {**dict.fromkeys(tiny.kinds(), ROWS), **dict.fromkeys(SEQUENTIAL, SEQUENCES), "gemma2": GROUPED}


@pytest.mark.parametrize("kind", tiny.kinds())
def test_the_check_finds_the_way(kind: str) -> None:
    way, reason = choose_way(tiny.config(kind), remember=False)
    assert way == WAYS[kind], reason


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3", "gemma2"])
def test_each_sequence_alone_agrees_too(kind: str) -> None:
    model = random_model(tiny.config(kind))
    prompts = [np.random.default_rng(1).integers(0, tiny.VOCAB, length) for length in LENGTHS]
    expected = [plain_logits(model, prompt) for prompt in prompts]
    assert disagreement(model, EACH, prompts, expected) <= TOLERANCE


def test_a_wrong_way_is_noticed() -> None:
    """gemma2 has its own attention, which never reads pages as rows: the check must not pass it."""
    model = random_model(tiny.config("gemma2"))
    prompts = [np.random.default_rng(1).integers(0, tiny.VOCAB, length) for length in LENGTHS]
    expected = [plain_logits(model, prompt) for prompt in prompts]
    mx.eval(expected)
    assert disagreement(model, ROWS, prompts, expected) > 100 * TOLERANCE


def test_a_cache_with_no_place_in_pages_is_served_alone() -> None:
    text = tiny.config("llama4_text", attention_chunk_size=16, interleave_moe_layer_step=1)
    text.update(num_local_experts=2, num_experts_per_tok=1, rope_scaling=None, attention_bias=False)
    way, reason = choose_way({"model_type": "llama4", "text_config": text}, remember=False)
    assert way == SOLO and reason


def test_the_answer_is_remembered(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = choose_way(tiny.config("llama"))
    monkeypatch.setattr("mlxserve.models.check._try_out", lambda config: pytest.fail("tried out twice"))
    assert choose_way(tiny.config("llama")) == first


def test_a_damaged_memory_is_tried_out_again(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choose_way(tiny.config("llama"))
    (file,) = (tmp_path / "mlxserve" / "ways").iterdir()
    file.write_text("{")
    assert choose_way(tiny.config("llama"))[0] == ROWS
