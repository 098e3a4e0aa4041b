"""Several processes answer as one does: the same tokens, whatever the split, the model and the requests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.engine.engine import Engine
from mlxserve.models.linear import is_linear
from mlxserve.models.load import load_folder
from mlxserve.text.tokenizer import load_tokenizer
from tests import tiny
from tests.adapters import write_adapter
from tests.distributed.crew import Case, serve
from tests.distributed.rounds import report
from tests.engine.harness import prompts

BIASED = {"attention_bias": True, "mlp_bias": True}
SETTINGS: dict[str, Any] = {"page_size": 8, "step_tokens": 32, "check": True}


def rounds() -> list[list[dict[str, Any]]]:
    """Ragged and chunked; again with prefixes that are known; drawn with seeds; bound to forms; embeddings."""
    first = prompts(5, seed=3, longest=70)
    ragged = [{"prompt": prompt, "max_tokens": 4 + n} for n, prompt in enumerate(first)]
    again = [{"prompt": [*prompt, 7, n], "max_tokens": 6} for n, prompt in enumerate(first)]
    drawn = [
        {"prompt": first[0], "temperature": 0.9, "seed": 2**64 - 1, "logprobs": 3},
        {"prompt": first[1], "temperature": 1.3, "seed": 5, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"prompt": first[2], "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"prompt": first[3], "temperature": 0.7, "seed": 9, "logit_bias": {"65": 30.0, "66": 29.5}},
        {"prompt": first[4], "logprobs": 0, "ignore_eos": False},
    ]
    bound = [
        {"prompt": first[0], "regex": "[a-c]{3}-[0-9]{2,4}", "max_tokens": 12},
        {"prompt": first[1]},
        {"prompt": first[2], "choices": ["yes indeed", "yes of course"], "max_tokens": 20},
        {"prompt": first[3], "temperature": 1.0, "seed": 4, "regex": "(ab|cd)*", "max_tokens": 9},
    ]
    embedded = [{"embed": prompt} for prompt in first[:3]]
    return [ragged, again, drawn, bound, embedded]


def crowd() -> list[dict[str, Any]]:
    """Short prompts with long answers: more than a small cache holds at once."""
    return [{"prompt": prompt[:6], "max_tokens": 30} for prompt in prompts(5, seed=8)]


def adapted() -> list[list[dict[str, Any]]]:
    """Two adapters and the base in one batch, twice, so that prefixes could be mistaken; and embeddings."""
    names = [None, "one", "two", "one", None]
    asked = [{"prompt": prompt, "adapter": name} for prompt, name in zip(prompts(5, seed=6), names)]
    same = [{"prompt": prompts(1, seed=6)[0], "adapter": name} for name in ("two", None, "one")]
    return [asked, same, [{"embed": [4, 5, 6], "adapter": name} for name in ("one", None)]]


def case(
    folder: Path, kind: str, asked: Sequence[Any], model: dict[str, Any] | None = None, **more: Any
) -> Case:
    """A case on a tiny model of `kind`."""
    names = ("micro_batches", "gathered_bytes", "adapters")
    apart = {name: more.pop(name) for name in names if name in more}
    written = tiny.write(folder / f"{kind}-{len(list(folder.iterdir()))}", kind, **(model or {}))
    return Case(str(written), asked, {**SETTINGS, **more}, **apart)


def two_adapters(folder: Path) -> dict[str, str]:
    """One on most layers; one, in PEFT's form, on the first layer alone: the other stage has nothing of it."""
    model = tiny.build("llama")
    write_adapter(folder / "adapters" / "one", model, 1)
    write_adapter(folder / "adapters" / "two", model, 2, endings=("layers.0.mlp.up_proj",), form="peft")
    return {name: str(folder / "adapters" / name) for name in ("one", "two")}


def scaled_adapters(folder: Path, kind: str, overrides: dict[str, Any] | None = None) -> dict[str, str]:
    """A DoRA on every linear layer, divided by outputs, by inputs, in place or not at all; a LoRA on some."""
    model, place = tiny.build(kind, **(overrides or {})), folder / "scaled" / kind
    every = {
        "." + path.partition("layers.")[2].partition(".")[2]
        for path, layer in model.named_modules()
        if "layers." in path and is_linear(layer)
    }
    write_adapter(place / "one", model, 3, endings=tuple(every), dora=True)
    write_adapter(place / "two", model, 4, endings=(".o_proj", ".mlp.down_proj"))
    return {name: str(place / name) for name in ("one", "two")}


def alone(asked: Case) -> dict[str, Any]:
    """The same case in this process."""
    folder = Path(asked.folder)
    loaded = load_folder(folder, LoadConfig())
    return report(
        Engine(loaded, load_tokenizer(folder), EngineConfig(**asked.settings)), asked.rounds, asked.adapters
    )


def same_answers(found: Sequence[dict[str, Any]], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Assert that several processes answered what one does; what one process said, case by case."""
    expected = [alone(asked) for asked in cases]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["way"] == theirs["way"]
        for one, other in zip(
            itertools.chain(*mine["rounds"]), itertools.chain(*theirs["rounds"]), strict=True
        ):
            if "vector" in one:
                assert one["vector"] == pytest.approx(other["vector"], abs=2e-5)
                continue
            for name in ("tokens", "text", "reason"):
                assert one[name] == other[name]
            assert [row[0] for row in one["logprobs"]] == [row[0] for row in other["logprobs"]]
            for (_, got, top), (_, wanted, expected_top) in zip(one["logprobs"], other["logprobs"]):
                assert got == pytest.approx(wanted, abs=1e-4)
                assert [pair[0] for pair in top] == [pair[0] for pair in expected_top]
    return expected


def test_two_ranks_by_tensors(tmp_path: Path) -> None:
    """Everything on a llama; adapters; a sliding window; experts with packed keys and values; too few pages."""
    full = rounds()
    cases = [
        case(tmp_path, "llama", full, gathered_bytes=1 << 20),
        case(tmp_path, "llama", adapted(), adapters=two_adapters(tmp_path)),
        case(tmp_path, "llama", adapted(), BIASED, adapters=scaled_adapters(tmp_path, "llama", BIASED)),
        case(tmp_path, "deepseek_v3", adapted(), adapters=scaled_adapters(tmp_path, "deepseek_v3")),
        case(tmp_path, "gpt_oss", full[1:2]),
        case(tmp_path, "qwen3_moe", full[:1], {"head_dim": 32}, kv_bits=8),
        case(tmp_path, "qwen3", [crowd()], cache_bytes=40_000, overlap=False, gathered_bytes=0),
    ]
    found = serve("tensor:2", cases)
    expected = same_answers(found, cases)
    assert [answer["cached"] for answer in found[0]["rounds"][1]] == [
        answer["cached"] for answer in expected[0]["rounds"][1]
    ]
    assert sum(answer["cached"] for answer in found[0]["rounds"][1]) > 50
    assert found[6]["preemptions"] > 0


def test_four_ranks_by_tensors(tmp_path: Path) -> None:
    model = {"num_key_value_heads": 4}
    cases = [case(tmp_path, "llama", rounds()[:4], model, gathered_bytes=n) for n in (2048, None)]
    cases.append(case(tmp_path, "llama", adapted(), model, adapters=two_adapters(tmp_path)))
    same_answers(serve("tensor:4", cases), cases)


def test_two_stages(tmp_path: Path) -> None:
    """Everything on a llama; adapters; recurrent state; a sliding window with packed keys and values; too few pages."""
    full = rounds()
    cases = [
        case(tmp_path, "llama", full),
        case(tmp_path, "llama", adapted(), adapters=two_adapters(tmp_path)),
        case(tmp_path, "lfm2", full[:2]),
        case(tmp_path, "gemma3_text", full[:1], {"head_dim": 32}, kv_bits=8),
        case(tmp_path, "qwen3", [crowd()], cache_bytes=40_000),
    ]
    found = serve("pipeline:2", cases)
    same_answers(found, cases)
    assert sum(answer["cached"] for answer in found[0]["rounds"][1]) > 50
    assert found[4]["preemptions"] > 0


def test_four_stages(tmp_path: Path) -> None:
    cases = [case(tmp_path, "llama", rounds(), {"num_hidden_layers": 5})]
    same_answers(serve("pipeline:4", cases), cases)
