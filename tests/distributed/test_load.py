"""A rank's part from files, against loading the whole model with models/load.py and dividing that."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import pytest

from mlxserve.config import LoadConfig
from mlxserve.distributed import digest
from mlxserve.distributed.digest import (
    config_digest,
    differences,
    rank_digests,
    reference_digests,
    tokenizer_digest,
)
from mlxserve.distributed.load import ShardLoaded, blueprint, files_of, load_shard
from mlxserve.distributed.sharding import shard_model
from mlxserve.distributed.split import Split
from mlxserve.distributed.stages import make_stage
from mlxserve.distributed.trace import FakeGroup
from mlxserve.errors import ModelInvalid, ModelUnsupported, UsageError
from mlxserve.models.load import LoadedModel, load_folder
from mlxserve.models.resolve import ModelFiles
from tests import tiny
from tests.distributed import shards

KINDS = ["llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "mixtral"]
TWO = Split.tensor(2)


def whole(files: ModelFiles, settings: LoadConfig | None = None) -> LoadedModel:
    return load_folder(files.path, settings or LoadConfig())


def stored_bytes(files: ModelFiles) -> int:
    return sum(len(file.read_bytes()) for file in files.path.glob("*.safetensors"))


@pytest.mark.parametrize("packed", [False, True], ids=["float32", "4bit"])
@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallel_equals_dividing_the_whole(tmp_path: Path, kind: str, packed: bool) -> None:
    files = shards.write(tmp_path / kind, kind, packed=packed)
    for rank in range(2):
        expected = whole(files)
        shard_model(expected.model, FakeGroup(rank, 2), kind)
        got = load_shard(files, LoadConfig(), TWO, rank)
        theirs = shards.parameters(expected.model)
        assert shards.differing(shards.parameters(got.loaded.model), theirs) == []
        assert got.bytes_read == got.bytes_planned < 0.66 * stored_bytes(files)
        assert got.loaded.weight_bytes == expected.weight_bytes and got.loaded.notes == []
        assert (got.loaded.dtype, got.loaded.context) == (expected.dtype, expected.context)


@pytest.mark.parametrize("packed", [False, True], ids=["float32", "4bit"])
@pytest.mark.parametrize("kind", [*KINDS, "gemma3_text", "qwen3_5", "mamba2", "gpt2"])
def test_pipeline_equals_staging_the_whole(tmp_path: Path, kind: str, packed: bool) -> None:
    files = shards.write(tmp_path / kind, kind, packed=packed)
    total = tiny.config(kind).get("num_hidden_layers", 3)
    split = Split.parse("pipeline:2", total)
    read = 0
    for rank in range(2):
        expected = whole(files)
        stage = make_stage(expected.model, split.layers_of(rank), total)
        got = load_shard(files, LoadConfig(), split, rank)
        assert got.stage is not None and (got.stage.first, got.stage.last) == (rank == 0, rank == 1)
        mine, theirs = shards.parameters(got.loaded.model), shards.parameters(expected.model)
        needed = {name: theirs[name] for name in stage.needs}
        assert shards.differing({name: mine[name] for name in needed}, needed) == []
        assert got.bytes_read == got.bytes_planned
        assert got.loaded.weight_bytes == sum(value.nbytes for value in needed.values())
        read += got.bytes_read
    assert read < 1.4 * stored_bytes(files)  # each layer once; a tied embedding on both


def test_checkpoints_in_their_makers_names(tmp_path: Path) -> None:
    """Experts lie apart in the published files, and the definition stacks them."""
    settings = shards.config("mixtral")
    weights = {}
    for name, value in shards.parameters(tiny.build("mixtral")).items():
        if "switch_mlp" in name:
            stem, _, rest = name.partition("switch_mlp.")
            number = {"gate_proj": 1, "down_proj": 2, "up_proj": 3}[rest.split(".")[0]]
            for expert in range(value.shape[0]):
                weights[f"{stem}experts.{expert}.w{number}.weight"] = value[expert]
        else:
            weights[name] = value
    files = shards.write_weights(tmp_path / "mixtral", settings, {"model.safetensors": weights})
    expected = whole(files)
    shard_model(expected.model, FakeGroup(1, 2), "mixtral")
    got = load_shard(files, LoadConfig(), TWO, 1)
    assert shards.differing(shards.parameters(got.loaded.model), shards.parameters(expected.model)) == []
    assert got.loaded.notes == [] and got.bytes_read < 0.55 * stored_bytes(files)


def test_packed_by_its_maker_gpt_oss(tmp_path: Path) -> None:
    """gpt_oss comes in MXFP4 blocks with gate and up rows taking turns."""
    settings = {**tiny.config("gpt_oss"), "hidden_size": 128, "intermediate_size": 128}
    model = shards.parameters(tiny.build("gpt_oss", hidden_size=128, intermediate_size=128))
    weights = {name: value for name, value in model.items() if "experts" not in name}
    for layer in range(3):
        stem = f"model.layers.{layer}.mlp.experts"
        blocks = {"gate_up_proj": (4, 256, 4, 16), "down_proj": (4, 128, 4, 16)}
        for name, shape in blocks.items():
            weights[f"{stem}.{name}_blocks"] = mx.random.randint(0, 256, shape).astype(mx.uint8)
            weights[f"{stem}.{name}_scales"] = mx.random.randint(120, 130, shape[:3]).astype(mx.uint8)
            weights[f"{stem}.{name}_bias"] = mx.random.normal(shape[:2])
    settings["quantization_config"] = {"quant_method": "mxfp4"}
    files = shards.write_weights(tmp_path / "oss", settings, {"model.safetensors": weights})
    for rank in range(2):
        expected = whole(files)
        shard_model(expected.model, FakeGroup(rank, 2), "gpt_oss")
        got = load_shard(files, LoadConfig(), TWO, rank)
        assert shards.differing(shards.parameters(got.loaded.model), shards.parameters(expected.model)) == []
        assert got.bytes_read < 0.7 * stored_bytes(files)  # embedding and head are a third of it


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_quantised_while_loading(tmp_path: Path, kind: str) -> None:
    files = shards.write(tmp_path / kind, kind, **shards.WIDE)
    settings = LoadConfig(quantize_bits=8, quantize_group_size=32)
    expected = whole(files, settings)
    shard_model(expected.model, FakeGroup(1, 2), kind)
    got = load_shard(files, settings, TWO, 1)
    assert shards.differing(shards.parameters(got.loaded.model), shards.parameters(expected.model)) == []


def test_sixteen_bits_and_scalars(tmp_path: Path) -> None:
    files = shards.write(tmp_path / "llama", "llama")
    half = {
        name: value.astype(mx.bfloat16)
        for name, value in mx.load(str(files.path / "model.safetensors")).items()
    }
    shards.write_weights(files.path, shards.config("llama"), {"model.safetensors": half})
    settings = LoadConfig(dtype="bfloat16")
    expected = whole(files, settings)
    shard_model(expected.model, FakeGroup(0, 2), "llama")
    got = load_shard(files, settings, TWO, 0)
    assert got.loaded.dtype == mx.bfloat16
    assert shards.differing(shards.parameters(got.loaded.model), shards.parameters(expected.model)) == []


# -- only the files it needs ----------------------------------------------------------------------------


@pytest.fixture
def by_layer(tmp_path: Path) -> ModelFiles:
    """A llama whose layers lie in files of their own."""
    files: dict[str, dict[str, mx.array]] = {}
    for name, value in shards.parameters(tiny.build("llama", tie_word_embeddings=False)).items():
        part = name.split(".")[2] if "layers" in name else "head" if "embed" not in name else "embed"
        files.setdefault(f"model-{part}.safetensors", {})[name] = value
    return shards.write_weights(
        tmp_path / "parts", shards.config("llama") | {"tie_word_embeddings": False}, files
    )


def needed_files(files: ModelFiles, split: Split, rank: int) -> list[str]:
    return files_of(blueprint(files, LoadConfig(), split, rank))


def test_a_pipeline_needs_only_the_files_of_its_layers(by_layer: ModelFiles) -> None:
    split = Split.parse("pipeline:2,1", 3)
    needed = needed_files(by_layer, split, 1)
    assert needed == ["model-2.safetensors", "model-head.safetensors"]
    assert needed_files(by_layer, split, 0) == [f"model-{part}.safetensors" for part in ("0", "1", "embed")]
    assert len(needed_files(by_layer, TWO, 0)) == 5
    before = load_shard(by_layer, LoadConfig(), split, 1)
    for file in by_layer.path.glob("model-*.safetensors"):
        if file.name not in needed:
            file.unlink()
    after = load_shard(by_layer, LoadConfig(), split, 1)
    assert after.digests == before.digests and after.bytes_read == before.bytes_read
    mine, theirs = shards.parameters(after.loaded.model), shards.parameters(before.loaded.model)
    assert shards.differing(mine, theirs) == []


def test_a_file_of_its_own_that_is_absent_is_named(by_layer: ModelFiles) -> None:
    (by_layer.path / "model-1.safetensors").unlink()
    with pytest.raises(ModelInvalid, match=r"lacks the tensor model\.layers\.1\..*, which rank 0 holds"):
        load_shard(by_layer, LoadConfig(), Split.parse("pipeline:2,1", 3), 0)
    with pytest.raises(ModelInvalid, match="model-1.safetensors is missing"):
        load_shard(by_layer, LoadConfig(), TWO, 0)


# -- digests ----------------------------------------------------------------------------------------------


def changed(files: ModelFiles, folder: Path, tensor: str) -> ModelFiles:
    """A copy of a model with the last number of one tensor changed."""
    weights = dict(mx.load(str(files.path / "model.safetensors")))
    flat = weights[tensor].flatten()
    flat[-1] += 1e-6
    weights[tensor] = flat.reshape(weights[tensor].shape)
    settings = json.loads((files.path / "config.json").read_text())
    return shards.write_weights(folder, settings, {"model.safetensors": weights})


@pytest.mark.parametrize(
    ("split", "tensor", "named"),
    [
        (TWO, "model.embed_tokens.weight", "model.embed_tokens.weight"),
        (TWO, "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight[64:128,0:64]"),
        (
            Split.pipeline([1, 2]),
            "model.layers.2.self_attn.k_proj.weight",
            "model.layers.2.self_attn.k_proj.weight",
        ),
    ],
)
def test_one_changed_tensor_is_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: Split, tensor: str, named: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mine = shards.write(tmp_path / "mine", "llama")
    theirs = changed(mine, tmp_path / "theirs", tensor)
    for _ in range(2):  # worked out, then remembered
        leader = {**rank_digests(mine, split, 0), **reference_digests(mine, split)}
        assert differences([leader, load_shard(mine, LoadConfig(), split, 1).digests]) == []
        assert differences([leader, load_shard(theirs, LoadConfig(), split, 1).digests]) == [(1, named)]


def test_ranks_that_are_connected_refuse_another_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mine = shards.write(tmp_path / "mine", "llama")
    theirs = changed(mine, tmp_path / "theirs", "model.layers.1.mlp.up_proj.weight")
    loaded = load_shard(mine, LoadConfig(), TWO, 0)
    for other, refused in ((mine, False), (theirs, True)):
        report = {"config.json": config_digest(other.path), **rank_digests(other, TWO, 1)}
        monkeypatch.setattr(digest, "exchange", lambda _, own, report=report: [own, report])
        with (
            pytest.raises(ModelInvalid, match="Rank 1 has another model.layers.1.mlp.up_proj.weight")
            if (refused)
            else nullcontext()
        ):
            digest.refuse_differences(FakeGroup(0, 2), loaded, mine)  # type: ignore[arg-type]


def test_the_reference_reads_only_what_rank_0_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = shards.write(tmp_path / "model", "llama")
    own, others = rank_digests(files, TWO, 0), reference_digests(files, TWO)
    assert not own.keys() & others.keys() and all("[" in name for name in others)
    os.utime(files.path / "model.safetensors")  # another time of change: not remembered
    assert reference_digests(files, TWO) == others
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 2


def test_digests_of_configuration_and_tokenizer(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "a", "llama")
    before = config_digest(folder), tokenizer_digest(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert (config_digest(folder), tokenizer_digest(folder)) == before
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 1e6}))
    tiny.write_tokenizer(folder, "{{ messages }}")
    assert config_digest(folder) != before[0] and tokenizer_digest(folder) != before[1]


# -- refused ------------------------------------------------------------------------------------------------


def refused(files: ModelFiles, split: Split, rank: int = 0) -> ShardLoaded:
    return load_shard(files, LoadConfig(), split, rank)


def test_refusals(tmp_path: Path, smollm2: Path) -> None:
    with pytest.raises(ModelUnsupported, match="GGUF file"):
        refused(ModelFiles("gguf", smollm2, "smollm2", "path"), TWO)
    with pytest.raises(ModelUnsupported, match=r"'gemma2' cannot be divided by tensors.*pipeline:2"):
        refused(shards.write(tmp_path / "gemma2", "gemma2"), TWO)
    llama = shards.write(tmp_path / "llama", "llama")
    with pytest.raises(UsageError, match=r"over 4 ranks \(.*kv_heads is 2\)"):
        refused(llama, Split.tensor(4))
    with pytest.raises(UsageError, match="over 3 ranks"):
        refused(llama, Split.tensor(3))
    with pytest.raises(ModelUnsupported, match="has 3 layers"):
        refused(llama, Split.pipeline([2, 3]), 1)
    awq = json.loads((llama.path / "config.json").read_text())
    awq["quantization_config"] = {"quant_method": "awq"}
    (llama.path / "config.json").write_text(json.dumps(awq))
    with pytest.raises(ModelUnsupported, match="quantised with awq"):
        refused(llama, TWO)
