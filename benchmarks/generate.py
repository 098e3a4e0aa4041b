"""`generate` against mlx-lm: the same float32 folder, the same BLAS, each measurement in a process of its own.

    python benchmarks/generate.py [--model FOLDER] [--runs 3]

Decode of one stream; eight prompts of mixed lengths at once, against mlx-lm one after another and in its
padded batch_generate; time from the start of the process to the first token; peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

LENGTHS = (4, 16, 40, 90, 160, 270, 400, 540)
NEW_TOKENS = 40
PROMPT = "Write a short story about a lighthouse keeper."


def prompts(vocabulary: int) -> list[list[int]]:
    """Token ids of the mixed lengths, the same for every side."""
    import random

    draw = random.Random(0)
    return [[draw.randrange(300, min(vocabulary, 40000)) for _ in range(length)] for length in LENGTHS]


# -- one measurement, run in a process of its own -----------------------------------------------------------------


def measure(side: str, what: str, model: str) -> dict[str, float]:
    began_s = process_start_s()
    result = MEASUREMENTS[side, what](model)
    if "first_token_at" in result:
        result["first_token_s"] = result.pop("first_token_at") - began_s
    import mlx.core as mx

    result["mlx_peak_bytes"] = mx.get_peak_memory()
    result["process_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return result


def process_start_s() -> float:
    """When this process began, in seconds of the epoch; handed down by the parent."""
    return float(os.environ["BENCHMARK_STARTED"])


def ours_single(model: str) -> dict[str, float]:
    from mlxserve import LLM, SamplingParams

    llm = LLM(model)
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    times = []
    for delta in llm.stream(PROMPT, params):
        times += [time.time()] * len(delta.token_ids)
    llm.close()
    return {"first_token_at": times[0], "decode_tokens_per_s": (len(times) - 1) / (times[-1] - times[0])}


def theirs_single(model: str) -> dict[str, float]:
    load_openblas()
    from mlx_lm import load, stream_generate

    loaded, tokenizer = load(model)[:2]
    tokenizer._eos_token_ids = set()
    times = [time.time() for _ in stream_generate(loaded, tokenizer, PROMPT, max_tokens=100)]
    return {"first_token_at": times[0], "decode_tokens_per_s": (len(times) - 1) / (times[-1] - times[0])}


def ours_many(model: str) -> dict[str, float]:
    from mlxserve import LLM, SamplingParams

    llm = LLM(model)
    ids = prompts(llm.tokenizer.vocab_size)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    llm.generate([ids[0]], params)
    began = time.perf_counter()
    outputs = llm.generate(ids, params)
    elapsed = time.perf_counter() - began
    assert all(len(output.token_ids) == NEW_TOKENS for output in outputs)
    llm.close()
    return {"elapsed_s": elapsed}


def theirs_in_turn(model: str) -> dict[str, float]:
    load_openblas()
    from mlx_lm import load, stream_generate

    loaded, tokenizer = load(model)[:2]
    tokenizer._eos_token_ids = set()
    ids = prompts(tokenizer.vocab_size)
    for _ in stream_generate(loaded, tokenizer, ids[0], max_tokens=NEW_TOKENS):
        pass
    began = time.perf_counter()
    for prompt in ids:
        count = sum(1 for _ in stream_generate(loaded, tokenizer, prompt, max_tokens=NEW_TOKENS))
        assert count == NEW_TOKENS
    return {"elapsed_s": time.perf_counter() - began}


def theirs_padded(model: str) -> dict[str, float]:
    load_openblas()
    from mlx_lm import batch_generate, load

    loaded, tokenizer = load(model)[:2]
    tokenizer._eos_token_ids = set()
    ids = prompts(tokenizer.vocab_size)
    batch_generate(loaded, tokenizer, ids[:1], max_tokens=NEW_TOKENS)
    began = time.perf_counter()
    batch_generate(loaded, tokenizer, ids, max_tokens=NEW_TOKENS)
    return {"elapsed_s": time.perf_counter() - began}


def load_openblas() -> None:
    """The same BLAS for mlx-lm: OpenBLAS must be in before MLX loads."""
    from mlxserve import blas

    blas.preload()


MEASUREMENTS: dict[tuple[str, str], Any] = {
    ("ours", "single"): ours_single,
    ("theirs", "single"): theirs_single,
    ("ours", "many"): ours_many,
    ("theirs", "in turn"): theirs_in_turn,
    ("theirs", "padded"): theirs_padded,
}


# -- the comparison --------------------------------------------------------------------------------------------------


def in_process(side: str, what: str, model: str) -> dict[str, float]:
    """One measurement in a new process."""
    command = [sys.executable, "-m", "benchmarks.generate", "--measure", side, what, "--model", model]
    environment = {**os.environ, "BENCHMARK_STARTED": str(time.time())}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def pairs(runs: int, model: str, ours: str, theirs: str) -> list[tuple[dict[str, float], dict[str, float]]]:
    return [(in_process("ours", ours, model), in_process("theirs", theirs, model)) for _ in range(runs)]


def ratio(measured: list[tuple[dict[str, float], dict[str, float]]], figure: str) -> str:
    each = sorted(a[figure] / b[figure] for a, b in measured)
    return f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure, args.model)))
        return
    from benchmarks.models import smollm2_folder
    from benchmarks.table import Table

    model = args.model or str(smollm2_folder())
    table = Table("measure", "wanted", "ratio to mlx-lm, median (range)")
    single = pairs(args.runs, model, "single", "single")
    table.add("decode, one stream, tokens a second", "≥ 1.0", ratio(single, "decode_tokens_per_s"))
    in_turn = pairs(args.runs, model, "many", "in turn")
    table.add("8 mixed prompts, against one after another", "≤ 0.7", ratio(in_turn, "elapsed_s"))
    padded = pairs(args.runs, model, "many", "padded")
    table.add("8 mixed prompts, against batch_generate", "≤ 0.7", ratio(padded, "elapsed_s"))
    table.add("process start to first token", "≤ 0.6", ratio(single, "first_token_s"))
    table.add("peak memory, MLX's own count", "≤ 1.05", ratio(single, "mlx_peak_bytes"))
    table.add("peak memory, the process's", "≤ 1.05", ratio(single, "process_peak_bytes"))
    table.print(f"Generate, SmolLM2-135M float32, {args.runs} runs a side")


if __name__ == "__main__":
    main()
