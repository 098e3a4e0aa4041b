"""A real GGUF file whose layers run on its own blocks says what its dequantised weights say."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxserve.config import LoadConfig
from mlxserve.kernels_metal.layers import GGUFEmbedding, GGUFLinear, use_blocks
from mlxserve.models.gguf import open_gguf
from mlxserve.models.load import build, load_gguf, place
from mlxserve.text.gguf_vocab import tokenizer_from_gguf

PROMPT = "The capital of France is"
TOKENS = 6  # each takes as long as unpacking 135 million weights


def load_blocks(path: Path) -> nn.Module:
    """The file's definition with its blocks untouched, in float32."""
    file = open_gguf(path)
    config, weights = file.config(), file.weights(mode="blocks")
    model = build(config)
    use_blocks(model, weights.blocks, mx.float32)
    place(model, config, weights.arrays, source=str(path))
    return model


def greedy(model: nn.Module, prompt: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """`count` most likely tokens, and the logits [V] after the prompt."""
    cache = make_prompt_cache(model)
    logits = model(mx.array([prompt]), cache=cache)[0, -1]
    first, tokens = np.array(logits), [int(logits.argmax().item())]
    while len(tokens) < count:
        tokens.append(int(model(mx.array([tokens[-1:]]), cache=cache)[0, -1].argmax().item()))
    return tokens, first


@pytest.mark.real_model
def test_native_blocks_give_the_text_of_the_dequantised_model(smollm2: Path) -> None:
    plain = load_gguf(smollm2, LoadConfig(dtype="float32"))
    blocks = load_blocks(smollm2)
    tokenizer = tokenizer_from_gguf(plain.metadata)
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False)
    ours, our_logits = greedy(blocks, prompt, TOKENS)
    right, right_logits = greedy(plain.model, prompt, TOKENS)
    np.testing.assert_allclose(our_logits, right_logits, atol=1e-3)
    assert tokenizer.decode(ours) == tokenizer.decode(right)
    assert "Paris" in tokenizer.decode(ours)


@pytest.mark.real_model
def test_native_blocks_take_the_files_own_size(smollm2: Path) -> None:
    model = load_blocks(smollm2)
    held = [module for _, module in model.named_modules() if isinstance(module, (GGUFLinear, GGUFEmbedding))]
    stored = [tensor for tensor in open_gguf(smollm2).tensors.values() if tensor.type.name.startswith("Q")]
    assert len(held) == len(stored)
    assert sum(module.weight.nbytes for module in held) == sum(tensor.data.nbytes for tensor in stored)
