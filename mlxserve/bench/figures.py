"""What was seen, as numbers: medians, percentiles, rates, and which answers kept to the schema.

Knows: how each figure is defined, in which unit, and whether more or less of it is better. Pure.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxserve.bench.measure import Seen
from mlxserve.bench.target import Trace


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its unit: "s", "tokens/s", "requests/s", "share" (0 to 1), "ratio" or "" for a count.

    value is None where nothing could be measured. more_is_better: None where neither is.
    """

    key: str
    words: str
    value: float | None
    unit: str
    more_is_better: bool | None = False


def figures(seen: Seen) -> list[Figure]:
    """The figures of one load, requests that failed among them."""
    found = _MAKERS[seen.load.name](seen)
    failed = len(seen.failures)
    return [*found, Figure("failed", "requests that failed", failed, "", False)] if failed else found


def quantile(values: Iterable[float], share: float) -> float | None:
    """The nearest-rank quantile; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.median(listed) if listed else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _first(traces: Sequence[Trace]) -> list[float]:
    return _known(trace.first_s for trace in traces)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _latency(seen: Seen) -> list[Figure]:
    done = seen.answered
    each = _known(trace.per_token_s for trace in done)
    return [
        Figure("first_s", "time to first token, median", median(_first(done)), "s"),
        Figure("first_95_s", "time to first token, 95th percentile", quantile(_first(done), 0.95), "s"),
        Figure("per_token_s", "time a token after it, median", median(each), "s"),
        Figure(
            "tokens_per_s",
            "tokens a second of one stream, median",
            median(1 / s for s in each if s),
            "tokens/s",
            True,
        ),
    ]


def _throughput(seen: Seen) -> list[Figure]:
    done, total_s = seen.answered, sum(seen.phases_s)
    tokens = sum(trace.tokens for trace in done)
    return [
        Figure("tokens_per_s", "tokens a second of all clients", _ratio(tokens, total_s), "tokens/s", True),
        Figure(
            "requests_per_s",
            "requests a second",
            _ratio(len(done) or None, total_s),
            "requests/s",
            True,
        ),
        Figure("first_s", "time to first token, median", median(_first(done)), "s"),
        Figure("first_95_s", "time to first token, 95th percentile", quantile(_first(done), 0.95), "s"),
        Figure("gap_95_s", "time between pieces, 95th percentile", quantile(_gaps(done), 0.95), "s"),
    ]


def _prefix(seen: Seen) -> list[Figure]:
    cold, warm = median(_first(seen.of("first"))), median(_first(seen.of("behind it")))
    behind = [trace.totals for trace in seen.of("behind it")]
    told = [t for t in behind if t.cached_tokens is not None and t.prompt_tokens]
    cached = _ratio(sum(t.cached_tokens or 0 for t in told), sum(t.prompt_tokens or 0 for t in told))
    return [
        Figure("cold_s", "time to first token, first request", cold, "s"),
        Figure("warm_s", "time to first token behind its prefix, median", warm, "s"),
        Figure("warm_to_cold", "the latter over the former", _ratio(warm, cold), "ratio"),
        Figure("cached", "prompt tokens taken from the cache", cached, "share", True),
    ]


def _long_prompt(seen: Seen) -> list[Figure]:
    """Gaps between pieces of the running streams before the long prompt came, and while it was read."""
    arrivals = [t for job, t in zip(seen.jobs, seen.traces) if job.role == "long prompt" and not t.failed]
    if not arrivals or arrivals[0].first_s is None:
        return [Figure("gap_during_s", "slowest gap while the prompt is read", None, "s")]
    arrival, first_s = arrivals[0], arrivals[0].first_s
    read_from, read_to = arrival.began_s, arrival.began_s + first_s
    before, during = [], []
    for trace in seen.of("stream"):
        times = [trace.began_s + s for s in trace.pieces_s]
        for earlier, later in zip(times, times[1:]):
            if later > read_from and earlier < read_to:
                during.append(later - earlier)
            elif later <= read_from:
                before.append(later - earlier)
    return [
        Figure("gap_before_s", "time between pieces before it, median", median(before), "s"),
        Figure("gap_during_s", "slowest gap while the prompt is read", max(during, default=None), "s"),
        Figure("long_first_s", "the long prompt's time to first token", first_s, "s"),
        Figure("long_tokens", "tokens of the long prompt", arrival.totals.prompt_tokens, "", None),
    ]


def _structured(seen: Seen) -> list[Figure]:
    schemas = [job.ask.schema for job in seen.jobs if job.role == "held"]
    held = [trace for job, trace in zip(seen.jobs, seen.traces) if job.role == "held"]
    fitting = sum(conforms(trace.text, schema) for trace, schema in zip(held, schemas))
    bound = median(_known(trace.per_token_s for trace in seen.of("held")))
    free = median(_known(trace.per_token_s for trace in seen.of("free")))
    return [
        Figure("conforming", "answers that keep to the schema", _ratio(fitting, len(held)), "share", True),
        Figure("per_token_s", "time a token, median", bound, "s"),
        Figure("to_free", "the same over free text's", _ratio(bound, free), "ratio"),
    ]


def conforms(text: str, schema: Any) -> bool:
    """True if `text` is JSON that keeps to the schema (checked with jsonschema)."""
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _gaps(traces: Sequence[Trace]) -> list[float]:
    return [later - earlier for t in traces for earlier, later in zip(t.pieces_s, t.pieces_s[1:])]


_MAKERS: dict[str, Callable[[Seen], list[Figure]]] = {
    "latency": _latency,
    "throughput": _throughput,
    "prefix": _prefix,
    "long-prompt": _long_prompt,
    "structured": _structured,
}
