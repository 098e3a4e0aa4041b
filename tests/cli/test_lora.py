"""`mlxserve lora` from rows to a fused model, with tiny models; every recipe runs."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import pytest

from mlxserve.cli.main import main
from mlxserve.lora.base import open_base, write_model
from mlxserve.lora.config import RunConfig, to_dict
from tests.conftest import ROOT

RECIPES = sorted(path.stem for path in (ROOT / "lora" / "recipes").glob("*.yaml"))
ROWS = {
    "lora-text": {"text": "table: a\nQ: b\nA: SELECT b FROM a"},
    "gsm8k": {"question": "1+1?", "answer": "two\n#### 2"},
    "dpo": {"prompt": "q", "chosen": "good", "rejected": "bad one"},
    "orpo": {"prompt": "q", "chosen": "good", "rejected": "bad one"},
}
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return _write(tmp_path, {"prompt": "1+1?", "completion": "#### 2"})


def _write(folder: Path, row: dict[str, object]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(6)))
    return path


def _settings(tiny_llama: Path, rows: Path, run: Path, *more: str) -> list[str]:
    values = [
        f"model={tiny_llama}",
        f"data.train={rows}",
        "data.valid=0.2",
        f"save.dir={run}",
        "train.steps=2",
        "train.tokens_per_batch=64",
        "train.max_seq=128",
        *more,
    ]
    return [part for value in values for part in ("--set", value)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs(tiny_llama: Path, tmp_path: Path, recipe: str) -> None:
    rows = _write(tmp_path, ROWS.get(recipe, CHAT))
    run = tmp_path / "run"
    assert main(["lora", "train", "-c", recipe, *_settings(tiny_llama, rows, run)]) == 0
    names = {path.name for path in run.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "loss.svg", "best", "final", "checkpoints"}


def test_from_rows_to_a_fused_model(
    tiny_llama: Path, tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = _settings(tiny_llama, rows, run, "save.every=1", "log.every=1", "lora.rank=2")
    assert main(["lora", "plan", *settings, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["fits_machine"] and planned["trainable_parameters"] > 0
    assert main(["lora", "check", *settings]) == 0
    assert "#### 2" in capsys.readouterr().out
    assert main(["lora", "train", *settings]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == str(run / "final") and "step 2/2: loss" in shown.err
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2]
    assert main(["lora", "train", *settings]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["lora", "resume", str(run)]) == 0
    assert main(["lora", "info", str(run / "final"), "--json"]) == 0
    capsys.readouterr()
    tests = [*settings, "--set", f"data.test={rows}", "--match", "#### (.*)", "--max-tokens", "4", "--json"]
    assert main(["lora", "eval", str(run / "final"), *tests]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["adapter"]["loss"] < facts["base"]["loss"]
    assert main(["lora", "export", str(run / "final"), "-o", str(tmp_path / "peft")]) == 0
    back = ["lora", "import", str(tmp_path / "peft"), "-o", str(tmp_path / "back"), "-m", str(tiny_llama)]
    assert main(back) == 0
    assert main(["lora", "fuse", str(tmp_path / "back"), "-o", str(tmp_path / "fused")]) == 0
    assert (tmp_path / "fused" / "tokenizer.json").is_file()


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_eval_of_chats_and_of_preferences(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """The base is the one that the adapter names; before a preference training both answers are equally likely."""
    pairs = _write(tmp_path, ROWS["dpo"])
    dpo = ("--set", "train.objective=dpo")
    settings = _settings(tiny_llama, pairs, tmp_path / "run", "train.lr=0.1", f"lora.type={kind}")
    assert main(["lora", "train", *settings, *dpo]) == 0
    capsys.readouterr()
    assert (
        main(["lora", "eval", str(tmp_path / "run" / "final"), *dpo, "--set", f"data.test={pairs}", "--json"])
        == 0
    )
    facts = json.loads(capsys.readouterr().out)
    assert facts["base"] == {"loss": pytest.approx(math.log(2), abs=1e-5)}
    assert facts["adapter"]["loss"] < facts["base"]["loss"]
    chats = _write(tmp_path, CHAT)
    more = ["--set", f"data.test={chats}", "--match", "(a)", "--max-tokens", "2", "--json"]
    assert main(["lora", "eval", str(tmp_path / "run" / "final"), *more]) == 0
    assert set(json.loads(capsys.readouterr().out)["base"]) == {"loss", "perplexity", "exact_match"}


@pytest.mark.parametrize("command", ["fuse", "export"])
def test_what_cannot_be_written_leaves_nothing(
    tiny_llama: Path, tmp_path: Path, rows: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = _settings(tiny_llama, rows, tmp_path / "run", "lora.type=full", "train.steps=1")
    assert main(["lora", "train", *settings]) == 0
    before = sorted(tmp_path.iterdir())
    target = rows / "out" if command == "fuse" else tmp_path / "out"
    assert main(["lora", command, str(tmp_path / "run" / "final"), "-o", str(target)]) == 2
    words = "no folder to write to" if command == "fuse" else "has no PEFT form"
    assert words in capsys.readouterr().err and sorted(tmp_path.iterdir()) == before


def test_one_warning_tells_what_fusing_has_lost(
    tiny_llama: Path, tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = _settings(
        tiny_llama, rows, tmp_path / "run", "train.steps=1", "train.lr=1e-5", "lora.layers=1"
    )
    assert main(["lora", "train", *settings]) == 0
    base = tmp_path / "packed"
    opened = open_base(str(tiny_llama), quantize=4)
    write_model(base, opened, opened.model)
    run = [
        str(tmp_path / "run" / "final"),
        "-m",
        str(base),
        "-o",
        str(tmp_path / "fused"),
        "--keep",
        "packed",
    ]
    assert main(["lora", "fuse", *run]) == 0
    said = capsys.readouterr().err
    assert said.count("Warning") == 1
    assert re.search(r"Warning: 7 of 7 layers keep less than half .* in 4 bits, is off by \d+% of it", said)


def test_what_is_said_before_training(
    tiny_llama: Path, tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = _settings(tiny_llama, rows, tmp_path / "run", "lora.rank=4", "lora.alpha=8")
    assert main(["lora", "train", "--dry-run", *settings]) == 0
    said = capsys.readouterr().err
    for words in (
        "train: 5 of 5 rows (5 completion); dropped: none",
        "valid: 1 of 1 rows",
        "⟦#### 2<|im_end|>⟧",
        "lora of rank 4, scale 2",
        "2 steps of 1 × up to 64 tokens",
        "of the machine's",
    ):
        assert words in said
    assert not (tmp_path / "run").exists()
    assert main(["lora", "plan", *settings]) == 0
    assert "tokens in 2 steps: at least" in capsys.readouterr().out


def test_samples_are_written_while_training(tiny_llama: Path, tmp_path: Path, rows: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one?\n\ntwo?\n")
    more = ("eval.every=1", f"eval.samples={tmp_path / 'prompts.txt'}", "eval.sample_tokens=3")
    assert main(["lora", "train", *_settings(tiny_llama, rows, tmp_path / "run", *more)]) == 0
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [
        (1, "one?"),
        (1, "two?"),
        (2, "one?"),
        (2, "two?"),
    ]


def test_the_bar_shows_figures_and_what_happens_between() -> None:
    from rich.console import Console

    from mlxserve.cli.lora_show import Bar

    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    bar = Bar(console)
    step = {"kind": "step", "step": 3, "steps": 9, "loss": 1.5, "lr": 1e-4, "grad_norm": 0.5}
    step |= {"tokens_per_s": 200.0, "padding": 0.02, "active_bytes": 2**30, "peak_bytes": 2**31}
    bar(step)
    bar({"kind": "eval", "step": 3, "loss": 1.25, "best": True})
    bar.close()
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for words in ("3/9", "loss 1.5000", "held-out loss 1.2500 (best)", "peak 2.0 GiB", "padding 2%"):
        assert words in shown


def test_recipes_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lora", "recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in RECIPES)
    for name in RECIPES:
        assert main(["lora", "recipes", name]) == 0
        assert "save: {dir: runs/" in capsys.readouterr().out


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lora", "train", "--set", "lora.ranc=3"]) == 2
    assert "did you mean 'rank'" in capsys.readouterr().err
    assert main(["lora", "train", "-c", "nothing.yaml"]) == 2
    assert "qlora-chat" in capsys.readouterr().err
    assert main(["lora", "plan"]) == 2
    assert "No model is named" in capsys.readouterr().err
    assert main(["lora", "info", str(tmp_path / "no")]) == 3
    assert "no adapter folder" in capsys.readouterr().err


def test_eval_packs_the_base_as_it_was_in_training(
    tiny_llama: Path, tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = _settings(tiny_llama, rows, tmp_path / "run", "quantize=4", "train.steps=1")
    assert main(["lora", "train", *settings]) == 0

    def loss(*more: str) -> float:
        capsys.readouterr()
        test = ["--set", f"data.test={rows}", "--json"]
        assert main(["lora", "eval", str(tmp_path / "run" / "final"), *test, *more]) == 0
        return float(json.loads(capsys.readouterr().out)["base"]["loss"])

    named = ("--set", f"model={tiny_llama}")
    assert loss() == loss(*named, "--set", "quantize=4") != loss(*named)


def test_every_setting_is_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    values = to_dict(RunConfig())
    sections = {name: value for name, value in values.items() if isinstance(value, dict)}
    assert main(["lora", "settings"]) == 0
    shown = capsys.readouterr().out.split()
    for section, keys in sections.items():
        assert {f"{section}.{key}" for key in keys} <= set(shown)
        assert main(["lora", "settings", section]) == 0
        about, _, listed = capsys.readouterr().out.partition("TAKES")
        assert "model" not in listed.split()
        for key in keys:
            assert re.search(rf"\b{key}\b", about), f"{section}.{key} is not explained"
    assert main(["lora", "settings", "nothing"]) == 2
    assert "there are data, lora" in capsys.readouterr().err
