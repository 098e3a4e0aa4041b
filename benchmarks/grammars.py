"""What structured output costs: eight streams under a grammar against the same eight without one.

    python benchmarks/grammars.py [--streams 8] [--tokens 48] [--runs 3]

SmolLM2-135M in float32. Both sides generate the same number of tokens from the same prompts. The grammar is a
long text of letters, so that the model chooses every token and none is forced or the last: what is left is
the masks, and that a row's mask waits for its last token. Measured again with a JSON schema, whose forced
tokens need no pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks.table import Table  # first: it puts OpenBLAS in before MLX loads
from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.engine.engine import Engine
from mlxserve.engine.llm import tokenizer_of
from mlxserve.models.load import load
from mlxserve.models.resolve import resolve
from mlxserve.request import Request, SamplingParams

WORDS = {"regex": r"[a-zA-Z ,.]{900,1000}"}
SCHEMA = {
    "schema": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 30, "maxLength": 300},
            "tags": {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 8},
            "score": {"type": "number"},
        },
        "required": ["name", "tags", "score"],
        "additionalProperties": False,
    }
}


def run(engine: Engine, prompts: list[list[int]], tokens: int, settings: dict[str, Any]) -> tuple[int, float]:
    """(tokens that came, seconds from the first token of all to the last)."""
    came, failed = [0] * len(prompts), []

    def sink_of(number: int) -> Any:
        def sink(news: Any) -> None:
            if isinstance(news, Exception):
                failed.append(news)
            else:
                came[number] += len(news.token_ids)

        return sink

    ignore = {} if settings else {"ignore_eos": True}
    params = SamplingParams(max_tokens=tokens, temperature=0.0, **settings, **ignore).resolved()
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, params), sink_of(number))
    while not all(came) and not failed:
        engine.step()
    before, began = sum(came), time.perf_counter()
    while engine.has_work and not failed:
        engine.step()
    if failed:
        raise failed[0]
    return sum(came) - before, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    files = resolve("smollm2")
    loaded = load(files, LoadConfig(dtype="float32"))
    tokenizer = tokenizer_of(files, loaded)
    engine = Engine(loaded, tokenizer, EngineConfig(prefix_cache=False))
    prompts = [tokenizer.encode_user(f"Write about the number {n}: ") for n in range(args.streams)]
    table = Table("grammar", "wanted", "tokens a second, of those without one: median (range)", "tokens")
    for settings in ({}, WORDS, SCHEMA):
        run(engine, prompts, 4, settings)  # compile and warm
    for name, settings in (("words, nothing forced", WORDS), ("JSON schema", SCHEMA)):
        ratios, tokens = [], 0
        for _ in range(args.runs):
            free, free_s = run(engine, prompts, args.tokens, {})
            tokens, bound_s = run(engine, prompts, args.tokens, settings)
            ratios.append((tokens / bound_s) / (free / free_s))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        table.add(name, "≥ 0.95", spread, tokens)
    table.print(f"Grammars at {args.streams} streams, SmolLM2-135M, float32, {args.runs} runs a side")


if __name__ == "__main__":
    main()
