"""Fine-tuning beside mlx_lm.lora: the same model folder, rows, rank, targets, rate and BLAS, in one run.

Each side trains in a process of its own, so that peaks do not mix. Prints ratios, ours over theirs: tokens
that were trained a second, and peak memory plus cache with checkpointing on.

    python -m benchmarks.lora --model FOLDER --data FOLDER [--quick]

--model: a folder in Hugging Face or MLX layout; without it a random 12M-parameter llama with a vocabulary of
49,152. --data: holds wikisql/train.jsonl and gsm8k/train.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.table import Table  # first: it puts OpenBLAS in before MLX loads

import mlx.core as mx  # isort: skip

RANK, SCALE, RATE, BATCH = 8, 2.0, 1e-4, 4
SHAPE = {
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "vocab_size": 49_152,
}


def wikisql(folder: Path, count: int) -> tuple[list[dict[str, Any]], bool]:
    return _rows(folder / "wikisql" / "train.jsonl", count), False


def gsm8k(folder: Path, count: int) -> tuple[list[dict[str, Any]], bool]:
    rows = _rows(folder / "gsm8k" / "train.jsonl", count)
    return [{"prompt": row["question"], "completion": row["answer"]} for row in rows], True


def equal(_: Path, count: int, length: int = 256) -> tuple[list[dict[str, Any]], bool]:
    """Rows of one length, nothing masked: where mlx-lm wastes nothing and is right. One token less than a
    multiple of 32 is what both sides pad to; the end token makes it whole."""
    return [{"text": chr(97 + i % 26) * length} for i in range(count)], False


def _rows(path: Path, count: int) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(count))]


LOADS: dict[str, tuple[Callable[[Path, int], tuple[list[dict[str, Any]], bool]], str]] = {
    "GSM8K, prompts masked": (gsm8k, "≥ 1.5"),
    "WikiSQL": (wikisql, "≥ 1.3"),
    "rows of equal length": (equal, "≥ 1.0"),
}


def ours(job: dict[str, Any]) -> dict[str, Any]:
    """Train with mlxserve; returns trained tokens, seconds, bytes and losses."""
    from mlxserve.lora.api import finetune

    rows = job["rows"]
    settings = {
        "model": job["model"],
        "data": {"train": job["file"], "loss_on": "assistant" if job["masked"] else "all"},
        "lora": {"rank": RANK, "alpha": RANK * SCALE},
        "train": {
            "epochs": 1,
            "max_seq": job["max_seq"],
            "tokens_per_batch": BATCH * job["max_seq"] if job["fixed"] else BATCH * job["typical"],
            "rows_per_batch": BATCH if job["fixed"] else None,
            "lr": RATE,
            "schedule": "constant",
            "warmup": 0,
            "clip": 0,
            "checkpointing": job["checkpointing"],
        },
        "save": {"dir": job["out"], "every": 0},
    }
    result = finetune(settings)
    steps = result.history
    warm = steps[min(1, len(steps) - 1) :]
    return {
        "tokens": sum(event["targets"] for event in warm),
        "seconds": sum(event["seconds"] for event in warm),
        "bytes": mx.get_peak_memory() + mx.get_cache_memory(),
        "losses": [event["loss"] for event in steps],
        "rows": len(rows),
    }


def theirs(job: dict[str, Any]) -> dict[str, Any]:
    """Train with mlx_lm.lora's own functions. Only targets that are real count as trained."""
    import mlx.optimizers as optim
    from mlx_lm.tuner.datasets import CacheDataset, CompletionsDataset, TextDataset
    from mlx_lm.tuner.trainer import TrainingArgs, train
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load

    model, tokenizer = load(job["model"])
    model.freeze()
    linear_to_lora_layers(model, -1, {"rank": RANK, "scale": SCALE, "dropout": 0.0})
    rows = job["rows"]
    if job["masked"]:
        data = CompletionsDataset(rows, tokenizer, "prompt", "completion", True)
    else:
        data = TextDataset(rows, tokenizer)
    cached = CacheDataset(data)
    reports: list[dict[str, Any]] = []

    class Watch:
        def on_train_loss_report(self, info: dict[str, Any]) -> None:
            reports.append({**info, "at": time.perf_counter()})

        def on_val_loss_report(self, info: dict[str, Any]) -> None:
            """Nothing is held out here."""

    settings = TrainingArgs(
        batch_size=BATCH,
        iters=len(rows) // BATCH,
        steps_per_report=1,
        steps_per_eval=10**9,
        steps_per_save=10**9,
        max_seq_length=job["max_seq"],
        adapter_file=str(Path(job["out"]) / "adapters.safetensors"),
        grad_checkpoint=job["checkpointing"],
    )
    Path(job["out"]).mkdir(parents=True, exist_ok=True)
    train(model, optim.Adam(RATE, bias_correction=True), cached, args=settings, training_callback=Watch())
    seconds = reports[-1]["at"] - reports[0]["at"]
    padding = BATCH * (len(reports) - 1)  # it trains one padding token a row
    tokens = reports[-1]["trained_tokens"] - reports[0]["trained_tokens"] - padding
    return {
        "tokens": tokens,
        "seconds": seconds,
        "bytes": mx.get_peak_memory() + mx.get_cache_memory(),
        "losses": [report["train_loss"] for report in reports],
        "rows": len(rows),
    }


def in_process(side: str, job: dict[str, Any]) -> dict[str, Any]:
    """One training in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in job["rows"]), encoding="utf-8")
        whole = {**job, "file": str(file), "out": str(Path(scratch) / "run")}
        (Path(scratch) / "job.json").write_text(json.dumps(whole), encoding="utf-8")
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.lora",
                "--side",
                side,
                "--job",
                str(Path(scratch) / "job.json"),
            ],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def _ratio(ours_: list[float], theirs_: list[float]) -> str:
    each = sorted(a / b for a, b in zip(ours_, theirs_))
    return f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})"


def compare(model: str, data: Path, runs: int, quick: bool) -> Table:
    table = Table("load", "measure", "wanted", "ratio to mlx-lm, median (range)")
    count = 16 if quick else 200
    for name, (make, wanted) in LOADS.items():
        rows, masked = make(data, count)
        job = {"model": model, "rows": rows, "masked": masked, "max_seq": 1024, "checkpointing": False}
        job |= {"fixed": name == "rows of equal length", "typical": 256}
        mine, other = _both(job, runs)
        speeds = [[run["tokens"] / run["seconds"] for run in side] for side in (mine, other)]
        table.add(name, "trained tokens a second", wanted, _ratio(*speeds))
        if job["fixed"]:
            gap = abs(statistics.mean(mine[0]["losses"]) - statistics.mean(other[0]["losses"]))
            table.add(name, "difference of mean losses", "≈ 0", f"{gap:.4f}")
    rows, masked = equal(data, 2 * BATCH, 1000)
    job = {"model": model, "rows": rows, "masked": masked, "max_seq": 1024, "checkpointing": True}
    mine, other = _both({**job, "fixed": True, "typical": 1024}, 1)
    sizes = [[float(run["bytes"]) for run in side] for side in (mine, other)]
    table.add("length 1,024, batch 4", "peak memory plus cache", "≤ 0.5", _ratio(*sizes))
    return table


def _both(job: dict[str, Any], runs: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    mine, other = [], []
    for _ in range(runs):
        mine.append(in_process("ours", job))
        other.append(in_process("theirs", job))
    return mine, other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few rows, one run, to see that it works")
    parser.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        job = json.loads(args.job.read_text(encoding="utf-8"))
        print(json.dumps((ours if args.side == "ours" else theirs)(job)))
        return
    model = args.model or str(_random_model())
    table = compare(model, args.data, 1 if args.quick else args.runs, args.quick)
    table.print(
        f"Fine-tuning, rank {RANK}, batch {BATCH}, {model if args.model else 'random llama, V 49,152'}"
    )


def _random_model() -> Path:
    from tests import tiny

    return tiny.write(Path(tempfile.mkdtemp()) / "llama", "llama", **SHAPE)


if __name__ == "__main__":
    main()
