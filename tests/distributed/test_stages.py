"""A pipeline of stages run one after the other, bit for bit against the same definition undivided."""

from __future__ import annotations

from collections import deque
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxserve.distributed.split import Split
from mlxserve.distributed.stages import Stage, make_stage
from mlxserve.errors import ModelUnsupported
from mlxserve.models.check import choose_way
from mlxserve.models.layout import read_layout
from mlxserve.models.load import build
from mlxserve.models.paged import PagedModel
from mlxserve.models.step import Step
from tests import tiny

KINDS = [
    "llama",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "cohere2",
    "lfm2",
    "mamba2",
]
KINDS += ["deepseek_v3", "qwen3_5", "granitemoehybrid"]
PAGE, PAGES_EACH = 4, 6
# Steps of (sequence, start, stop): a whole prompt, chunks among single tokens, single tokens only.
STEPS = [
    ((0, 0, 9),),
    ((0, 9, 10), (1, 0, 5)),
    ((1, 5, 6), (0, 10, 13), (2, 0, 3)),
    ((0, 13, 14), (1, 6, 7), (2, 3, 4)),
]


class Calls:
    """Stands for a staged model: takes each call's hidden states from a queue, leaves its own in another."""

    def __init__(self, model: Any, stage: Stage, taken: deque[list[mx.array]]) -> None:
        self.model, self.stage, self.taken = model, stage, taken
        self.given: deque[list[mx.array]] = deque()

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        if not self.stage.first:
            self.stage.hand_in(self.taken.popleft())
        logits = self.model(ids, cache=cache)
        if not self.stage.last:
            self.given.append(self.stage.hand_out())
            mx.eval(self.given[-1])
        return logits


def paged(model: Any, way: str) -> PagedModel:
    groups = [3 * PAGES_EACH] * len(read_layout(model).windows)
    return PagedModel(model, way, page_size=PAGE, group_pages=groups, state_slots=3)


def step_of(parts: tuple[tuple[int, int, int], ...], groups: int) -> Step:
    sequences, starts, stops = np.array(parts).T
    tables = np.random.default_rng(1).permutation(3 * PAGES_EACH).reshape(3, PAGES_EACH)[sequences]
    wanted = np.minimum(stops - starts, 2)
    return Step(starts, stops - starts, wanted, [tables] * groups, sequences.astype(np.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_bit_equal_to_one_process(kind: str) -> None:
    settings = tiny.config(kind)
    way, _ = choose_way(settings)
    total = settings["num_hidden_layers"]
    plain = paged(tiny.build(kind), way)
    pipelines = [pipeline(kind, way, Split.parse(f"pipeline:{size}", total)) for size in (2, 3)]
    prompts = np.random.default_rng(0).integers(0, tiny.VOCAB, (3, 16))
    for parts in STEPS:
        ids = mx.array(np.concatenate([prompts[s][a:b] for s, a, b in parts]))
        expected = plain.forward(ids, step_of(parts, len(plain.windows)))
        mx.eval(expected, plain.arrays())
        for stages in pipelines:
            for stage in stages:
                logits = stage.forward(ids, step_of(parts, len(stage.windows)))
                mx.eval(stage.arrays())
            np.testing.assert_array_equal(np.array(logits), np.array(expected))
    for stages in pipelines:  # keys, values and states only of own layers, each layer's once
        assert sum(stage.nbytes for stage in stages) == plain.nbytes
        assert all(0 < stage.nbytes < plain.nbytes for stage in stages)


def pipeline(kind: str, way: str, split: Split) -> list[PagedModel]:
    stages, taken = [], deque[list[mx.array]]()
    for rank in range(split.size):
        model = tiny.build(kind)
        stage = make_stage(model, split.layers_of(rank), split.bounds[-1])
        part = paged(model, way)
        calls = Calls(model, stage, taken)
        taken, part.model = calls.given, calls  # type: ignore[assignment]
        stages.append(part)
    return stages


@pytest.mark.parametrize(
    ("kind", "tied", "first", "last"),
    [
        ("llama", True, {"model.embed_tokens.weight"}, {"model.embed_tokens.weight", "model.norm.weight"}),
        ("llama", False, {"model.embed_tokens.weight"}, {"lm_head.weight", "model.norm.weight"}),
        (
            "mamba2",
            True,
            {"backbone.embeddings.weight"},
            {"backbone.embeddings.weight", "backbone.norm_f.weight"},
        ),
    ],
)
def test_which_parameters_a_stage_needs(kind: str, tied: bool, first: set[str], last: set[str]) -> None:
    needs = []
    for layers in (range(1), range(1, 2), range(2, 3)):
        model = tiny.build(kind, tie_word_embeddings=tied)
        names = {name for name, _ in tree_flatten(model.parameters())}
        stage = make_stage(model, layers, 3)
        own = {name for name in names if f".layers.{layers[0]}." in name}
        assert own <= stage.needs
        needs.append(stage.needs - own)
    assert needs == [first, set(), last]


MORE = {
    "rwkv7": {
        "model_type": "rwkv7",
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "norm_eps": 1e-5,
        "head_dim": 32,
        "num_hidden_layers": 4,
        **dict.fromkeys(("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 16),
        "tie_word_embeddings": False,
    },
    "hunyuan": {
        **tiny.config("llama", model_type="hunyuan", num_hidden_layers=4, vocab_size=64),
        "attention_bias": False,
        "moe_topk": 1,
        "num_experts": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": False,
        "use_qk_norm": False,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    },
}


@pytest.mark.parametrize("kind", MORE)
def test_layers_that_give_more_than_hidden_states(kind: str) -> None:
    """rwkv7 hands on the first layer's values as well, hunyuan keys and values that two layers share."""
    ids = mx.array([[1, 2, 3]])
    expected = _seeded(MORE[kind])(ids)
    handed: list[mx.array] = []
    for layers in (range(3), range(3, 4)):
        model = _seeded(MORE[kind])
        stage = make_stage(model, layers, 4)
        if not stage.first:
            stage.hand_in(handed)
        logits = model(ids)
        handed = [] if stage.last else stage.hand_out()
        assert stage.last or len(handed) > 1
    np.testing.assert_array_equal(np.array(logits), np.array(expected))


def _seeded(settings: dict[str, Any]) -> Any:
    mx.random.seed(3)
    return build(settings)


class Skipping(nn.Module):
    """A model whose third layer also reads what the first one gave."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()

    @property
    def layers(self) -> list[nn.Module]:
        return self.trunk.layers

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        return self.trunk(ids)


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = [nn.Linear(4, 4) for _ in range(4)]

    def __call__(self, ids: mx.array) -> mx.array:
        given = [self.embed(ids)]
        for number, layer in enumerate(self.layers):
            given.append(layer(given[-1] + given[1] if number == 2 else given[-1]))
        return given[-1]


@pytest.mark.parametrize(
    ("layers", "allowed"), [(range(1, 4), True), (range(2, 4), False), (range(3, 4), True)]
)
def test_a_cut_between_layers_that_share_something(layers: range, allowed: bool) -> None:
    if allowed:
        assert not make_stage(Skipping(), layers, 4).first
        return
    with pytest.raises(ModelUnsupported, match="Layers 2 to 3 use results of layer 0"):
        make_stage(Skipping(), layers, 4)


def test_stages_are_made_without_computing() -> None:
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    large = {**tiny.config("llama"), "hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 6}
    stage = make_stage(build(large), range(2, 6), 6)
    assert stage.last and mx.get_peak_memory() - before < 1 << 20


@pytest.mark.parametrize("layers", [range(2, 5), range(1, 1)])
def test_a_stage_of_layers_that_are_not_there(layers: range) -> None:
    with pytest.raises(ModelUnsupported, match="has 3 layers"):
        make_stage(tiny.build("llama"), layers, 4)
