"""What a notebook shows: everything a model or a file says is escaped."""

from __future__ import annotations

from html.parser import HTMLParser

from mlxserve import display
from mlxserve.request import FinishReason, Metrics, Output

EVIL = "<script>alert('x')</script> & \"more\""


class Reader(HTMLParser):
    """The tags, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words += data


def test_words_are_shown_as_they_are() -> None:
    for html in (
        display.text(EVIL),
        display.small([EVIL]),
        display.box(EVIL, display.BLUE),
        display.facts([(EVIL, EVIL)], EVIL),
    ):
        read = Reader(html)
        assert "script" not in read.tags
        assert EVIL in read.words


def test_an_output() -> None:
    metrics = Metrics(12, 8, 5, 0.5, 2.5)
    read = Reader(Output(EVIL, [1], FinishReason.STOP, metrics=metrics)._repr_html_())
    assert EVIL in read.words and "script" not in read.tags
    for part in ("12 tokens in (8 cached)", "5 out", "first after 0.50 s", "2.0 tokens/s", "ended: stop"):
        assert part in read.words


def test_an_output_that_has_no_figures() -> None:
    assert Reader(Output("hi", [], None)._repr_html_()).words == "hi0 tokens in, 0 out"
