"""Page tables for people, on a tiny model: what a row says is what the books say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxserve.engine.llm import LLM
from mlxserve.engine.pageview import PageTables, Row
from mlxserve.models.progress import count_bar
from mlxserve.request import SamplingParams
from tests.test_display import Reader

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PREFIX = list(range(32, 32 + 40))


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama)) as opened:
        yield opened


def test_running_sequences_and_what_they_share(llm: LLM) -> None:
    llm.generate([PREFIX], SamplingParams(max_tokens=1))
    streams = [llm.stream([*PREFIX, 100 + n], LONG) for n in range(2)]
    for stream in streams:
        next(stream)
    tables = llm.page_tables()
    for stream in streams:
        stream.close()
    size = tables.page_size
    assert len(tables.rows) == 2
    for row in tables.rows:
        assert row.tokens > len(PREFIX)
        assert len(row.pages) >= -(-row.tokens // size)
    # 40 tokens fill two pages of 16, and half a third one, which each sequence has to itself.
    assert len(tables.shared) == 40 // size
    assert tables.rows[0].pages[: 40 // size] == tables.rows[1].pages[: 40 // size]
    used = {page for row in tables.rows for page in row.pages}
    assert tables.total - tables.free - tables.cached == len(used)


def test_nothing_runs(llm: LLM) -> None:
    llm.generate([PREFIX], SamplingParams(max_tokens=1))
    tables = llm.page_tables()
    assert tables.rows == () and tables.cached > 0 and tables.shared == frozenset()


def test_in_words_and_in_a_notebook() -> None:
    tables = PageTables(16, 100, 90, 4, (Row("<a>", 40, (7, 3, -1)), Row("b", 20, (7, 5))))
    assert str(tables).split("\n") == [
        "<a>     40 tokens  [7] 3 ·",
        "b     20 tokens  [7] 5",
        "6 pages of 16 tokens in use, 4 kept for prefixes, 90 free of 100",
    ]
    read = Reader(tables._repr_html_())
    assert "<a>" in read.words and "a" not in read.tags
    assert read.words.count("7") >= 2


def test_a_model_shows_itself(llm: LLM) -> None:
    words = Reader(llm._repr_html_()).words
    assert llm.name in words and f"{llm.context:,} tokens" in words


def test_a_bar_counts_answers(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drawn where a terminal or a notebook watches, and nowhere else."""
    few = SamplingParams(max_tokens=2, temperature=0)
    prompts = [PREFIX, PREFIX[:5]]
    with count_bar("answers", 2) as bar:
        llm.generate(prompts, few, progress=bar)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with count_bar("answers", 2) as bar:
        llm.generate(prompts, few, progress=bar)
    assert "2/2" in capsys.readouterr().err
