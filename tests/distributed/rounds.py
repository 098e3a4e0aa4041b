"""Requests as plain data, run through any engine: the same for one process and for several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxserve.engine.engine import Engine
from mlxserve.request import Request, SamplingParams
from tests.engine.harness import Answer, finish


def report(
    engine: Engine, rounds: Sequence[Sequence[dict[str, Any]]], adapters: Mapping[str, str]
) -> dict[str, Any]:
    """Load adapters, run each round to its end, drop them; what was answered, as JSON's own types."""
    answers: list[Any] = []
    for name, folder in adapters.items():
        engine.adapters.load(name, Path(folder))
    for number, asked in enumerate(rounds):
        texts = [each for each in asked if "embed" in each]
        if texts:
            vectors = [engine.embed([each["embed"]], each.get("adapter"))[0] for each in texts]
            answers.append([{"vector": vector} for vector in vectors])
            continue
        listening = [Answer() for _ in asked]
        for place, (each, answer) in enumerate(zip(asked, listening)):
            engine.add(request(f"{number}.{place}", each), answer)
        finish(engine)
        answers.append([_plain(answer) for answer in listening])
    for name in adapters:
        engine.adapters.drop(name)
    return {"rounds": answers, "preemptions": engine.scheduler.preemptions, "way": engine.way}


def request(name: str, asked: dict[str, Any]) -> Request:
    """{"prompt": ids, "adapter": name, any of SamplingParams' fields}; greedy, eight tokens, no end of turn."""
    settings = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, **asked}
    prompt, adapter = settings.pop("prompt"), settings.pop("adapter", None)
    if "logit_bias" in settings:
        settings["logit_bias"] = {int(token): bias for token, bias in settings["logit_bias"].items()}
    return Request(name, prompt, SamplingParams(**settings).resolved(), adapter=adapter)


def _plain(answer: Answer) -> dict[str, Any]:
    assert answer.error is None, answer.error
    metrics = answer.deltas[-1].metrics
    assert metrics is not None
    return {
        "tokens": answer.tokens,
        "text": answer.text,
        "reason": str(answer.reason),
        "cached": metrics.cached_tokens,
        "logprobs": [
            [found.token_id, found.logprob, [list(pair) for pair in found.top]]
            for delta in answer.deltas
            for found in delta.logprobs
        ],
    }
