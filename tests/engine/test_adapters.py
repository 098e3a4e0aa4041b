"""Adapters in the engine: equal to fused models, prefixes apart, loaded and dropped beside running answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve import LLM, SamplingParams
from mlxserve.config import EngineConfig
from mlxserve.engine.engine import Engine
from mlxserve.errors import ModelInvalid, ModelNotFound, UsageError
from mlxserve.models.layout import plain_caches
from mlxserve.request import FinishReason, Request
from tests import tiny
from tests.adapters import fuse, write_adapter
from tests.engine import harness

NAMES: list[str | None] = [None, "one", "two", "three"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model, place = tiny.build("llama"), tmp_path_factory.mktemp("adapters")
    return {
        "one": write_adapter(place / "one", model, 1, form="peft"),
        "two": write_adapter(place / "two", model, 2, rank=6, endings=("q_proj", "v_proj", "gate_proj")),
        "three": write_adapter(place / "three", model, 3, rank=3, dora=True, base="org/tiny-other"),
    }


def _truth(folders: dict[str, Path], tmp_path: Path, kind: str = "llama") -> dict[str | None, Any]:
    """A model with each adapter in its own weights; a PEFT folder is written again in mlx-lm's form."""
    model = tiny.build("llama")
    plain = {**folders, "one": write_adapter(tmp_path / "one-again", model, 1)}
    return {None: model, **{name: fuse(tiny.build("llama"), folder) for name, folder in plain.items()}}


@pytest.fixture(scope="module")
def fused(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Any]:
    return _truth(folders, tmp_path_factory.mktemp("again"))


@pytest.fixture
def engine(folders: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = harness.engine("llama", **getattr(request, "param", {}))
    for name, folder in folders.items():
        made.adapters.load(name, folder)
    yield made
    for info in made.adapters.listed:
        made.adapters.drop(info.name)
    assert made.adapters.stack.nbytes == 0


def _solo(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    caches, ids, tokens = plain_caches(model), mx.array(list(prompt))[None], []
    for _ in range(count):
        tokens.append(int(mx.argmax(model(ids, cache=caches)[0, -1])))
        ids = mx.array([[tokens[-1]]])
    return tokens


def _asked(prompt: Sequence[int], adapter: str | None, count: int = 8, **settings: Any) -> Request:
    return replace(harness.request(prompt, count, **settings), adapter=adapter)


@pytest.mark.parametrize(
    "engine", [{}, {"step_tokens": 16, "overlap": False}, {"kv_bits": 16}], indirect=True
)
def test_three_adapters_and_the_base_in_one_batch(engine: Engine, fused: dict[str | None, Any]) -> None:
    prompts = harness.prompts(8, seed=4, longest=40)
    asked = [_asked(prompt, NAMES[i % 4]) for i, prompt in enumerate(prompts)]
    answers = harness.run(engine, asked)
    for request, answer in zip(asked, answers):
        assert answer.tokens == _solo(fused[request.adapter], request.prompt, 8), request.adapter
    alone = [harness.run(engine, [_asked(r.prompt, r.adapter)])[0].tokens for r in asked[:4]]
    assert alone == [answer.tokens for answer in answers[:4]]


def test_logits_equal_the_fused_models(engine: Engine, fused: dict[str | None, Any]) -> None:
    """Log-probabilities in float32, four adapters' rows in one step."""
    prompt = harness.prompts(1, seed=5, longest=30)[0]
    asked = [_asked(prompt, name, 4, logprobs=5) for name in NAMES]
    for request, answer in zip(asked, harness.run(engine, asked)):
        tokens = [*prompt, *answer.tokens]
        model = fused[request.adapter]
        logits = np.array(model(mx.array(tokens)[None])[0], np.float64)
        shifted = logits - logits.max(-1, keepdims=True)
        truth = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        entries = [entry for delta in answer.deltas for entry in delta.logprobs]
        for place, entry in enumerate(entries, len(prompt) - 1):
            assert entry.logprob == pytest.approx(truth[place, entry.token_id], abs=2e-3)


@pytest.mark.parametrize("kind", ["gemma2", "mamba2", "lfm2", "deepseek_v2"])
def test_other_ways_of_running(kind: str, tmp_path: Path) -> None:
    """Sequences, grouped masks, recurrent state: the same rows, the same adapters."""
    made = harness.engine(kind)
    model = made.loaded.model
    endings = [p for p, m in model.named_modules() if p.endswith(("o_proj", "out_proj", "down_proj"))]
    endings = [p for p in endings if "switch" not in p]
    folders = {n: write_adapter(tmp_path / n, model, s, endings=endings) for s, n in enumerate("ab")}
    truth = {n: fuse(tiny.build(kind), folder) for n, folder in folders.items()}
    prompts = harness.prompts(3, seed=1, longest=30)
    for name, folder in folders.items():
        made.adapters.load(name, folder)
    asked = [_asked(prompts[0], "a", 5), _asked(prompts[1], "b", 5), _asked(prompts[2], None, 5)]
    answers = harness.run(made, asked)
    assert [a.tokens for a in answers[:2]] == [_solo(truth[n], p, 5) for n, p in zip("ab", prompts)]
    assert answers[2].tokens == harness.solo_tokens(kind, prompts[2], 5)
    for name in folders:
        made.adapters.drop(name)


def test_prefixes_are_never_shared_across_adapters(engine: Engine, fused: dict[str | None, Any]) -> None:
    prompt = list(range(40, 104))
    for round_ in range(2):
        for name in NAMES:
            (answer,) = harness.run(engine, [_asked(prompt, name)])
            metrics = answer.deltas[-1].metrics
            assert metrics is not None and metrics.cached_tokens == (0 if round_ == 0 else len(prompt) - 1)
            assert answer.tokens == _solo(fused[name], prompt, 8)


def test_a_name_with_new_contents_finds_no_old_prefix(
    folders: dict[str, Path], fused: dict[str | None, Any], tmp_path: Path
) -> None:
    """Also on disk: the same name, first one adapter and then another."""
    prompt = list(range(30, 30 + 80))
    answers = {}
    for name in ("two", "three", "two"):
        made = harness.engine("llama", cache_dir=tmp_path / "kv", page_size=4)
        made.adapters.load("mine", folders[name])
        (answer,) = harness.run(made, [_asked(prompt, "mine")])
        assert answer.tokens == _solo(fused[name], prompt, 8)
        answers[name] = answer.deltas[-1].metrics.cached_tokens  # type: ignore[union-attr]
        made.close()
        made.adapters.drop("mine")
    assert answers["three"] == 0 and answers["two"] > 0  # the third engine found the first one's blocks


def test_preempted_answers_keep_their_adapter(folders: dict[str, Path], fused: dict[str | None, Any]) -> None:
    made = harness.engine("llama", cache_bytes=150_000, max_sequences=6)
    for name, folder in folders.items():
        made.adapters.load(name, folder)
    prompts = harness.prompts(6, seed=8, longest=20)
    asked = [_asked(prompt, NAMES[i % 4], 40) for i, prompt in enumerate(prompts)]
    answers = harness.run(made, asked)
    assert made.scheduler.preemptions > 0
    for request, answer in zip(asked, answers):
        assert answer.tokens == _solo(fused[request.adapter], request.prompt, 40)
    for name in folders:
        made.adapters.drop(name)


def test_loading_and_dropping_beside_running_answers(
    folders: dict[str, Path], fused: dict[str | None, Any]
) -> None:
    made = harness.engine("llama")
    made.adapters.load("one", folders["one"])
    prompts = harness.prompts(3, seed=6, longest=20)
    first, base, second = (harness.Answer() for _ in range(3))
    made.add(_asked(prompts[0], "one", 30), first)
    made.add(_asked(prompts[1], None, 30), base)
    for _ in range(5):
        made.step()
    made.adapters.load("two", folders["two"])
    made.add(_asked(prompts[2], "two", 20), second)
    made.step()
    assert made.adapters.drop("one") == 1  # still answering: its factors stay to the end
    with pytest.raises(ModelNotFound, match="no adapter 'one'; there are two"):
        made.add(_asked(prompts[0], "one"), harness.Answer())
    harness.finish(made)
    assert first.tokens == _solo(fused["one"], prompts[0], 30)
    assert base.tokens == harness.solo_tokens("llama", prompts[1], 30)
    assert second.tokens == _solo(fused["two"], prompts[2], 20)
    assert len(made.adapters.listed) == 1
    held = made.adapters.stack.nbytes
    assert made.adapters.drop("two") == 0
    assert made.adapters.stack.nbytes == 0 < held


def test_names(folders: dict[str, Path], engine: Engine, tmp_path: Path) -> None:
    assert engine.adapters.load("one", folders["one"]).name == "one"  # the same once more is no mistake
    with pytest.raises(UsageError, match="'one' is already loaded"):
        engine.adapters.load("one", folders["two"])
    for name in ("", "a@b", "a:b", "a/b", "../x"):
        with pytest.raises(UsageError, match="no name for an adapter"):
            engine.adapters.load(name, folders["one"])
    with pytest.raises(ModelNotFound, match="no adapter folder"):
        engine.adapters.load("four", tmp_path / "nothing")
    notes = {info.name: info.note for info in engine.adapters.listed}
    assert notes["one"] == "" and "names org/tiny-other as its base; it is served on" in notes["three"]
    assert engine.adapters.load("alias", folders["two"]).rank == 6
    assert engine.adapters.digest("alias") == engine.adapters.digest("two")


def test_a_cancelled_answer_lets_go_of_its_adapter(folders: dict[str, Path]) -> None:
    made = harness.engine("llama")
    made.adapters.load("one", folders["one"])
    asked, answer = _asked([1, 2, 3], "one", 100), harness.Answer()
    made.add(asked, answer)
    made.step()
    made.adapters.drop("one")
    assert made.adapters.stack.nbytes > 0
    made.cancel(asked.id)
    harness.finish(made)
    assert answer.reason is FinishReason.CANCELLED and made.adapters.stack.nbytes == 0


def test_llm_with_adapters(tiny_llama: Path, folders: dict[str, Path]) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(str(tiny_llama), engine=EngineConfig(page_size=8), adapters={"one": folders["one"]}) as llm:
        assert [info.name for info in llm.adapters] == ["one"]
        mixed = llm.generate(["hello"] * 2, greedy, adapter=[None, "one"])
        assert mixed[0].token_ids != mixed[1].token_ids
        assert llm.generate("hello", greedy, adapter="one")[0].token_ids == mixed[1].token_ids
        text = "".join(delta.text for delta in llm.stream("hello", greedy, adapter="one"))
        assert text == mixed[1].text
        talk = [{"role": "user", "content": "hi"}]
        assert llm.chat(talk, greedy, adapter="one")[0].text != llm.chat(talk, greedy)[0].text
        llm.load_adapter("two", folders["two"])
        assert llm.drop_adapter("two") == 0
        with pytest.raises(ModelNotFound, match="no adapter 'two'"):
            llm.generate("hello", greedy, adapter="two")
        with pytest.raises(UsageError, match="1 adapters were given for 2"):
            llm.generate(["a", "b"], greedy, adapter=["one"])
    with pytest.raises(ModelNotFound):
        LLM(str(tiny_llama), adapters={"one": "/no/such/adapter"})


def test_an_adapter_for_another_model_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    other = tiny.build("llama", hidden_size=32, intermediate_size=48)
    wrong = write_adapter(tmp_path / "wrong", other, 1, base="org/other")
    made = harness.engine("llama")
    with pytest.raises(ModelInvalid, match="has shape"):
        made.adapters.load("wrong", wrong)
    assert made.adapters.listed == [] and made.adapters.stack.nbytes == 0
