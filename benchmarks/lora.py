"""Fine-tuning beside mlx_lm.lora: the same model folder, rows, rank, targets, rate and BLAS, in one run.

Each side trains in a process of its own, so that peaks do not mix, without MLX's compiler, which on a CPU
would call a C++ compiler for each new width. Prints ratios, ours over theirs: tokens that were trained a
second, and peak memory plus cache with checkpointing on.

    python benchmarks/lora.py [--loads gsm8k,wikisql,equal,memory] [--runs 3] [--quick]

--model: a folder in Hugging Face or MLX layout; without it SmolLM2-135M in float32. --data (MLXSERVE_DATA):
holds wikisql/train.jsonl and gsm8k/train.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.models import cache_folder, smollm2_folder
from benchmarks.table import Table  # first: it puts OpenBLAS in before MLX loads

import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten, tree_unflatten  # isort: skip

RANK, SCALE, RATE, BATCH = 8, 2.0, 1e-4, 4
EQUAL = 128  # tokens of each row of the load "equal"
ROOT = Path(__file__).resolve().parents[1]
Rows = list[dict[str, Any]]


def wikisql(folder: Path, count: int) -> Rows:
    return _rows(folder / "wikisql" / "train.jsonl", count)


def gsm8k(folder: Path, count: int) -> Rows:
    rows = _rows(folder / "gsm8k" / "train.jsonl", count)
    return [{"prompt": row["question"], "completion": row["answer"]} for row in rows]


def equal(folder: Path, count: int, characters: int = 1000) -> Rows:
    """One text again and again, cut at EQUAL tokens: where mlx-lm pads nothing and is right, and every batch
    is the same."""
    rows = _rows(folder / "gsm8k" / "train.jsonl", 40)
    return [{"text": " ".join(row["answer"] for row in rows)[:characters]}] * count


def long(folder: Path, count: int) -> Rows:
    """More than 1,024 tokens a row; both sides cut it there."""
    return equal(folder, count, 4000)


def _rows(path: Path, count: int) -> Rows:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(count))]


# name: (title, rows, how many, prompts masked, our tokens a batch, checkpointing)
LOADS: dict[str, tuple[str, Callable[[Path, int], Rows], int, bool, int, bool]] = {
    "gsm8k": ("GSM8K, prompts masked", gsm8k, 12, True, 1024, False),
    "wikisql": ("WikiSQL, all tokens", wikisql, 20, False, 512, False),
    "equal": ("rows of equal length", equal, 12, False, 0, False),
    "memory": (
        "6 random layers of its widths, 1,024 tokens, batch 4, checkpointing",
        long,
        BATCH,
        False,
        0,
        True,
    ),
}


def ours(job: dict[str, Any]) -> dict[str, Any]:
    """Train with mlxserve; returns trained tokens, seconds, bytes and losses."""
    from mlxserve.lora.api import finetune

    settings = {
        "model": job["model"],
        "data": {
            "train": job["file"],
            "loss_on": "assistant" if job["masked"] else "all",
            "too_long": "truncate",
        },
        "lora": {"rank": RANK, "alpha": RANK * SCALE},
        "train": {
            "epochs": 1,
            "max_seq": job["max_seq"],
            "tokens_per_batch": job["budget"] or BATCH * job["max_seq"],
            "rows_per_batch": None if job["budget"] else BATCH,
            "lr": RATE,
            "schedule": "constant",
            "warmup": 0,
            "clip": 0,
            "checkpointing": job["checkpointing"],
        },
        "save": {"dir": job["out"], "every": 0},
        "eval": {"keep": "last"},
    }
    result = finetune(settings)
    steps = result.history
    warm = steps[min(1, len(steps) - 1) :]
    return {
        "tokens": sum(event["targets"] for event in warm),
        "seconds": sum(event["seconds"] for event in warm),
        "bytes": mx.get_peak_memory() + mx.get_cache_memory(),
        "losses": [event["loss"] for event in steps],
        "parameters": sum(value.size for _, value in tree_flatten(result.model.trainable_parameters())),
    }


def theirs(job: dict[str, Any]) -> dict[str, Any]:
    """Train with mlx_lm.lora's own functions. Only targets that are real count as trained."""
    import mlx.optimizers as optim
    from mlx_lm.tuner.datasets import CacheDataset, CompletionsDataset, TextDataset
    from mlx_lm.tuner.trainer import TrainingArgs, train
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load

    mx.disable_compile()
    model, tokenizer = load(job["model"])
    starts = _our_start(model)
    model.freeze()
    linear_to_lora_layers(model, -1, {"rank": RANK, "scale": SCALE, "dropout": 0.0})
    model.update(tree_unflatten(list(starts.items())))
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
    pads = job["max_seq"] != EQUAL  # it trains one padding token of each row that is not cut
    padding = BATCH * (len(reports) - 1) if pads else 0
    tokens = reports[-1]["trained_tokens"] - reports[0]["trained_tokens"] - padding
    return {
        "tokens": tokens,
        "seconds": seconds,
        "bytes": mx.get_peak_memory() + mx.get_cache_memory(),
        "losses": [report["train_loss"] for report in reports],
        "parameters": sum(value.size for _, value in tree_flatten(model.trainable_parameters())),
    }


def _our_start(model: Any) -> dict[str, mx.array]:
    """The factors that our side begins with, by name: so that both curves can be compared."""
    from mlxserve.lora.config import LoraConfig
    from mlxserve.lora.layers import find_targets, linear_shape

    modules = dict(model.named_modules())
    mx.random.seed(0)
    starts = {}
    for path in find_targets(model, LoraConfig()):
        width = linear_shape(modules[path])[0]
        starts[f"{path}.lora_a"] = mx.random.uniform(-(width**-0.5), width**-0.5, (width, RANK))
    return starts


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
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    return json.loads(done.stdout.splitlines()[-1])


def _ratio(ours_: list[float], theirs_: list[float]) -> str:
    each = sorted(a / b for a, b in zip(ours_, theirs_))
    middle = f"{statistics.median(each):.2f}"
    return middle if len(each) == 1 else f"{middle} ({each[0]:.2f} to {each[-1]:.2f})"


def six_layers() -> str:
    """A random model of SmolLM2's widths and vocabulary, 6 layers deep, so that long rows take seconds."""
    from tests import tiny

    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "head_dim": 64}
    folder = cache_folder() / "llama-6-layers-49152"
    if not (folder / "tokenizer.json").is_file():
        more = {"num_key_value_heads": 3, "num_hidden_layers": 6, "vocab_size": 49_152}
        tiny.write(folder, "llama", **shape, **more)
    return str(folder)


def compare(model: str, data: Path, loads: list[str], runs: int, most: int | None = None) -> Table:
    """most: of each load's rows."""
    table = Table("load", "measure", "wanted", "ratio to mlx-lm")
    for name in loads:
        title, make, count, masked, budget, checkpointing = LOADS[name]
        trained = six_layers() if name == "memory" else model
        job = {"model": trained, "rows": make(data, min(count, most or count)), "masked": masked}
        job |= {"max_seq": EQUAL if name == "equal" else 1024}
        mine, other = _both({**job, "budget": budget, "checkpointing": checkpointing}, runs)
        assert mine[0]["parameters"] == other[0]["parameters"]
        if name == "memory":
            sizes = [[float(run["bytes"]) for run in side] for side in (mine, other)]
            table.add(title, "peak memory plus cache", "≤ 0.5", _ratio(*sizes))
            continue
        speeds = [[run["tokens"] / run["seconds"] for run in side] for side in (mine, other)]
        wanted = {"gsm8k": "≥ 1.5", "wikisql": "≥ 1.3", "equal": "≥ 1.0"}[name]
        table.add(title, "trained tokens a second", wanted, _ratio(*speeds))
        if name == "equal":
            gap = max(abs(a - b) for a, b in zip(mine[0]["losses"], other[0]["losses"]))
            table.add(title, "largest difference of the loss curves", "≈ 0", f"{gap:.4f}")
    return table


def _both(job: dict[str, Any], runs: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    mine, other = [], []
    for _ in range(runs):
        for side, runs_ in (("ours", mine), ("theirs", other)):
            runs_.append(in_process(side, job))
            shown = {name: runs_[-1][name] for name in ("tokens", "seconds", "bytes", "losses")}
            print(side, shown, file=sys.stderr, flush=True)
    return mine, other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = os.environ.get("MLXSERVE_DATA", ROOT.parent / "shared" / "data")
    parser.add_argument("--model")
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few rows, one run, to see that it works")
    parser.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        job = json.loads(args.job.read_text(encoding="utf-8"))
        print(json.dumps((ours if args.side == "ours" else theirs)(job)))
        return
    model = args.model or str(smollm2_folder())
    loads = args.loads.split(",")
    table = compare(model, args.data, loads, *((1, 8) if args.quick else (args.runs, None)))
    name = args.model or "SmolLM2-135M in float32"
    table.print(f"Fine-tuning {name}, LoRA of rank {RANK} on all linear layers")


if __name__ == "__main__":
    main()
