"""Stop strings over text: pieces never matter, the earliest start wins, nothing of a stop gets out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.text.stop import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        text, hit = matcher.feed(piece)
        shown += text
        if hit is not None:
            return shown, hit
    text, hit = matcher.flush()
    return shown + text, hit


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """The whole text at once: earliest start, then shortest."""
    hits = [(text.index(stop), len(stop), stop) for stop in stops if stop in text]
    return (text[: min(hits)[0]], min(hits)[2]) if hits else (text, None)


def test_case_3_stop_over_text() -> None:
    assert run(["beta gamma"], ["alpha be", "ta ga", "mma delta"]) == ("alpha ", "beta gamma")
    assert run(["gamma delta", "beta"], ["alpha beta ga", "mma delta"]) == ("alpha ", "beta")
    assert run(["beta gamma"], ["alpha beta", " ga"]) == ("alpha beta ga", None)


def test_text_is_held_only_as_long_as_it_may_be_a_stop() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.feed("a<e") == ("a", None)
    assert matcher.feed("x<") == ("<ex", None)
    assert matcher.flush() == ("<", None)


def test_a_later_stop_waits_for_an_earlier_one_that_is_unfinished() -> None:
    assert run(["abc", "b"], ["xab", "c"]) == ("x", "abc")
    assert run(["abc", "b"], ["xab", "d"]) == ("xa", "b")
    assert run(["abc", "b"], ["xab"]) == ("xa", "b")


def test_without_stops_everything_passes() -> None:
    assert StopMatcher([]).feed("anything") == ("anything", None)


@settings(max_examples=400, deadline=None)
@given(
    stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("ab\u00e9", max_size=4), max_size=12),
)
def test_any_split_equals_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == naive(stops, "".join(pieces))
