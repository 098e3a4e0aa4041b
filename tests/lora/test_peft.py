"""PEFT's own forward pass as the truth: an adapter from here runs there with equal logits, and the reverse.

Heavy (PyTorch): runs with `make test-peft`, and is skipped elsewhere.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.lora import adapters
from mlxserve.lora.api import finetune
from mlxserve.lora.base import open_base
from tests import tiny
from tests.conftest import require

IDS = [[5, 6, 7, 8, 9, 200, 31]]
KINDS = ["llama", "qwen3"]  # as mlx-lm and transformers both name their layers


@pytest.fixture(autouse=True)
def _installed() -> None:
    present = all(importlib.util.find_spec(name) for name in ("torch", "peft", "transformers"))
    require(present, "PEFT is not installed (pip install mlxserve[test-peft])", "MLXSERVE_REQUIRE_PEFT")


def _theirs(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def _their_logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor(IDS)).logits.numpy()


def _our_logits(folder: Path, adapter: Path) -> np.ndarray:
    model = open_base(str(folder)).model
    adapters.attach(model, adapters.read(adapter))
    model.eval()
    return np.array(model(mx.array(IDS)))


def _base(folder: Path, kind: str) -> Path:
    return tiny.write(folder, kind, head_dim=16, architectures=[_class(kind)])


def _class(kind: str) -> str:
    return {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [{}, {"type": "dora"}, {"rslora": True, "targets": "attention"}])
def test_an_adapter_trained_here_runs_in_peft(tmp_path: Path, kind: str, lora: dict[str, Any]) -> None:
    from peft import PeftModel

    base = _base(tmp_path / "base", kind)
    (tmp_path / "rows.jsonl").write_text('{"text": "abcabcabc"}\n' * 8)
    trained = finetune(
        {
            "model": str(base),
            "data": {"train": str(tmp_path / "rows.jsonl"), "loss_on": "all"},
            "lora": {"rank": 4, **lora},
            "train": {"lr": 0.01, "epochs": 3, "tokens_per_batch": 64, "max_seq": 32},
            "save": {"dir": str(tmp_path / "run")},
        }
    )
    (tmp_path / "peft").mkdir()
    adapters.export_peft(tmp_path / "peft", adapters.read(trained.adapter))
    expected = _their_logits(PeftModel.from_pretrained(_theirs(base), str(tmp_path / "peft")))
    ours = _our_logits(base, trained.adapter)
    np.testing.assert_allclose(ours, expected, atol=2e-3, rtol=1e-3)
    assert np.abs(expected - _their_logits(_theirs(base))).max() > 0.1  # it did change something


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "lora_alpha": 12},
        {"r": 4, "use_dora": True},
        {"r": 8, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_made_by_peft_runs_here(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    base = _base(tmp_path / "base", kind)
    config = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj", "up_proj", "down_proj"], **settings
    )
    model = get_peft_model(_theirs(base), config)
    torch.manual_seed(1)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            value.data.normal_(std=0.05)
        elif "magnitude" in name:
            value.data.mul_(1.1)
    model.save_pretrained(tmp_path / "adapter")
    ours = _our_logits(base, tmp_path / "adapter")
    np.testing.assert_allclose(ours, _their_logits(model), atol=2e-3, rtol=1e-3)
