"""Figures of traces that were made up by hand, against NumPy's or a validator's word."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.bench.figures import conforms, figures, quantile
from mlxserve.bench.measure import Seen
from mlxserve.bench.scenarios import SCHEMA, Job, Load
from mlxserve.bench.target import Ask, Totals, Trace

ASK = Ask([{"role": "user", "content": "hi"}], 8)


def trace(began_s: float, pieces_s: list[float], tokens: int | None = None, **fields: object) -> Trace:
    """A trace whose last piece is its end."""
    totals = Totals(100, tokens, fields.pop("cached", None), "length")  # type: ignore[arg-type]
    return Trace(began_s, pieces_s, len(pieces_s), total_s=pieces_s[-1], totals=totals, **fields)  # type: ignore[arg-type]


def seen(name: str, *pairs: tuple[str, Trace], total_s: float = 10.0, schema: object = None) -> Seen:
    jobs = [Job(Ask(ASK.messages, 8, schema if role == "held" else None), 0, role) for role, _ in pairs]
    load = Load(name, (tuple(jobs),))
    return Seen(load, jobs, [t for _, t in pairs], [total_s])


def values(one: Seen) -> dict[str, float | None]:
    return {figure.key: figure.value for figure in figures(one)}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.95, 1.0]))
def test_quantile_is_numpys_nearest_rank(numbers: list[float], share: float) -> None:
    assert quantile(numbers, share) == np.quantile(numbers, share, method="inverted_cdf")


def test_latency() -> None:
    found = values(seen("latency", ("", trace(0, [0.5, 0.7, 0.9], 5)), ("", trace(1, [0.3, 1.1], 5))))
    assert found["first_s"] == pytest.approx(0.4)
    assert found["first_95_s"] == 0.5
    # (0.9 - 0.5) / 4 and (1.1 - 0.3) / 4
    assert found["per_token_s"] == pytest.approx(0.15)
    assert found["tokens_per_s"] == pytest.approx((10 + 5) / 2)


def test_throughput_counts_usage_else_chunks_and_leaves_out_what_failed() -> None:
    failed = Trace(0.0, failed="It is refused.")
    one = seen("throughput", ("", trace(0, [1, 2], 30)), ("", trace(0, [1, 2, 3])), ("", failed))
    found = values(one)
    assert found["tokens_per_s"] == pytest.approx((30 + 3) / 10)
    assert found["requests_per_s"] == pytest.approx(0.2)
    assert found["failed"] == 1


def test_prefix() -> None:
    one = seen(
        "prefix",
        ("first", trace(0, [4.0, 5.0], 2, cached=0)),
        ("behind it", trace(5, [1.0, 2.0], 2, cached=90)),
        ("behind it", trace(5, [3.0, 4.0], 2, cached=70)),
    )
    found = values(one)
    assert (found["cold_s"], found["warm_s"], found["warm_to_cold"]) == (4.0, 2.0, 0.5)
    assert found["cached"] == pytest.approx(0.8)


def test_a_prefix_nobody_tells_about_is_unknown() -> None:
    one = seen("prefix", ("first", trace(0, [1.0], 1)), ("behind it", trace(1, [1.0], 1)))
    assert values(one)["cached"] is None


def test_the_slowest_gap_is_that_during_the_long_prompt() -> None:
    # It is read from 2.0 to 5.0. The gap 6 → 9 of the first stream is slower, but after it.
    one = seen(
        "long-prompt",
        ("stream", trace(0, [1.0, 1.5, 2.5, 4.5, 6.0, 9.0], 6)),
        ("stream", trace(0, [0.5, 1.0, 1.5, 3.0, 5.5], 5)),
        ("long prompt", trace(2, [3.0, 3.1], 2)),
    )
    found = values(one)
    assert found["gap_during_s"] == 2.5  # 3.0 → 5.5, over its end
    assert found["gap_before_s"] == 0.5
    assert (found["long_first_s"], found["long_tokens"]) == (3.0, 100)


def test_a_long_prompt_that_failed_has_no_gap() -> None:
    one = seen("long-prompt", ("stream", trace(0, [1.0, 2.0], 2)), ("long prompt", Trace(1.0, failed="No.")))
    assert values(one) == {"gap_during_s": None, "failed": 1}


def test_structured_counts_refusals_as_not_conforming() -> None:
    good = '{"colour": "red", "count": 3, "ripe": true}'
    one = seen(
        "structured",
        ("free", trace(0, [1.0, 1.1], 2)),
        ("held", trace(0, [1.0, 1.3], 2, text=good)),
        ("held", trace(0, [1.0, 1.3], 2, text="A red fruit.")),
        ("held", Trace(0.0, failed="400")),
        ("held", trace(0, [1.0, 1.3], 2, text=good + " and more")),
        schema=SCHEMA,
    )
    found = values(one)
    assert found["conforming"] == 0.25
    assert found["to_free"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"colour": "red", "count": 3, "ripe": true}', True),
        ('{"colour": "pink", "count": 3, "ripe": true}', False),
        ('{"colour": "red", "count": 3}', False),
        ('{"colour": "red", "count": 3, "ripe": true', False),
        ("", False),
    ],
)
def test_conforms(text: str, right: bool) -> None:
    assert conforms(text, SCHEMA) is right


@pytest.mark.parametrize("name", ["latency", "throughput", "prefix", "structured"])
def test_nothing_answered_is_nothing_measured(name: str) -> None:
    found = values(seen(name, ("", Trace(0.0, failed="No.")), ("", Trace(0.0, failed="No."))))
    assert found.pop("failed") == 2
    assert not any(found.values())
