"""QLoRA of a real model on real rows: SmolLM2 in 4 bits learns the form of WikiSQL's answers, and is served.

Minutes long, so `make soak` runs it; the trainer's small tests are in the files beside this one.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest

from mlxserve import LLM, SamplingParams
from mlxserve.config import LoadConfig
from mlxserve.lora.api import prepare, run
from mlxserve.lora.config import from_dict
from mlxserve.lora.layers import OnDemandLinear, adapted_layers, base_only
from mlxserve.lora.train import Trainer

# ` SELECT Notes FROM 1-1000181-1 WHERE Current slogan = 'SOUTH AUSTRALIA'`
FORM = re.compile(r"\s*SELECT .+ FROM \d+-\d+-\d+( WHERE .+)?")


@pytest.mark.real_model
@pytest.mark.skipif("MLXSERVE_SOAK" not in os.environ, reason="minutes of training; make soak runs it")
def test_qlora_of_smollm2_learns_wikisql(data: Path, smollm2: Path, tmp_path: Path) -> None:
    prepared = prepare(from_dict(_settings(smollm2, data / "wikisql", tmp_path / "run")))
    assert prepared.valid is not None
    prepared.valid.items = prepared.valid.items[:12]
    result = run(prepared)
    trainer = Trainer(result.model, prepared.config, prepared.train, vocabulary=49_152)
    with base_only(result.model):
        before = trainer.evaluate(prepared.valid)
    layers = adapted_layers(result.model).values()
    assert layers and all(isinstance(x.linear, OnDemandLinear | nn.QuantizedLinear) for x in layers)
    after = result.outcome.best_loss
    print(f"held-out loss {before:.3f} -> {after:.3f}")
    assert after is not None and after < before - 0.7
    _answers_in_form(smollm2, result.adapter, _prompts(data / "wikisql" / "test.jsonl"))


def _answers_in_form(model: Path, adapter: Path, prompts: list[str]) -> None:
    """Through the engine, in one batch: the adapter answers as it was taught, and the base does not."""
    params = SamplingParams(temperature=0, max_tokens=48, stop=("\n",))
    with LLM(str(model), load=LoadConfig(quantize_bits=4), adapters={"sql": adapter}) as llm:
        outputs = llm.generate(prompts * 2, params, adapter=["sql"] * len(prompts) + [None] * len(prompts))
    texts = [output.text for output in outputs]
    print(json.dumps(texts, indent=1))
    tuned, base = texts[: len(prompts)], texts[len(prompts) :]
    assert sum(bool(FORM.match(text)) for text in tuned) >= len(prompts) - 1
    assert not any(FORM.match(text) for text in base)


def _prompts(rows: Path) -> list[str]:
    """Tables and questions that were not trained on, up to where the answer begins."""
    texts = [json.loads(line)["text"] for line in rows.read_text().splitlines()]
    return [text[: text.index("\nA:") + 3] for text in texts[:60:15]]


def _settings(model: Path, data: Path, run_folder: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "quantize": 4,
        "data": {"train": str(data), "loss_on": "all"},
        "lora": {"rank": 8, "alpha": 16},
        "train": {"steps": 24, "tokens_per_batch": 384, "lr": 1e-3, "warmup": 2, "max_seq": 160},
        "save": {"dir": str(run_folder), "every": 0},
        "eval": {"every": 0},
    }
