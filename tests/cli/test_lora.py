"""`mlxserve lora` from rows to a fused model, with tiny models; every recipe runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxserve.cli.main import main
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


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lora", "train", "--set", "lora.ranc=3"]) == 2
    assert "did you mean 'rank'" in capsys.readouterr().err
    assert main(["lora", "train", "-c", "nothing.yaml"]) == 2
    assert "qlora-chat" in capsys.readouterr().err
    assert main(["lora", "info", str(tmp_path / "no")]) == 3
    assert "no adapter folder" in capsys.readouterr().err
