"""The bar of a download: standard error alone."""

from __future__ import annotations

import pytest

from mlxserve.models.progress import download_bar


def test_without_a_terminal_a_line_says_what_is_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    with download_bar("org/model") as progress:
        progress(1, 2)
    assert capsys.readouterr() == ("", "Downloading org/model …\n")


def test_at_a_terminal_a_bar_moves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with download_bar("org/model") as progress:
        progress(500_000, 2_000_000)
        progress(2_000_000, 2_000_000)
    said = capsys.readouterr()
    assert said.out == "" and "org/model" in said.err and "2.0/2.0 MB" in said.err
