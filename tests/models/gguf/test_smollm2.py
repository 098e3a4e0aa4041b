"""The whole way on a real file: SmolLM2's Q4_1 GGUF answers a question, as floats."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxserve.models.definitions import import_definition
from mlxserve.models.gguf import open_gguf
from mlxserve.text.gguf_vocab import tokenizer_from_gguf
from tests.models.gguf import writing

PROMPT = (
    "<|im_start|>user\nWhat is the capital of France? Answer in one sentence.<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.mark.real_model
def test_smollm2_answers(smollm2: Path) -> None:
    file = open_gguf(smollm2)
    config = file.config()
    assert config["num_hidden_layers"] == 30 and config["tie_word_embeddings"]
    weights = file.weights()
    assert set(weights.report.values()) == {"dequantised", "float"}
    model = writing.load(config, weights.arrays)
    tokenizer = tokenizer_from_gguf(file.metadata)
    cache = [import_definition("cache").KVCache() for _ in model.layers]
    tokens, answer = tokenizer.encode(PROMPT), []
    for _ in range(12):
        logits = model(mx.array([tokens]), cache=cache)[0, -1]
        tokens = [int(mx.argmax(logits))]
        if tokens[0] in tokenizer.eos_token_ids:
            break
        answer += tokens
    assert tokenizer.decode(answer) == "The capital of France is Paris."
