"""The client of other people's servers: what it sends, what it counts, and what it says when one fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlxserve.bench.endpoint import Endpoint, base_url
from mlxserve.bench.scenarios import SCHEMA
from mlxserve.bench.target import Ask, Totals
from mlxserve.errors import MlxServeError, UsageError
from tests.bench.fakes import piece, scripted

LISTED = {"object": "list", "data": [{"id": "first", "context_length": 512}, {"id": "second"}]}
QUESTION = Ask([{"role": "user", "content": "hi"}], 8)
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}},
}
DONE = "data: [DONE]\n\n"


def asked(url: str, question: Ask = QUESTION, **settings: Any) -> tuple[list[tuple[str, int]], Totals]:
    async def go() -> tuple[list[tuple[str, int]], Totals]:
        heard: list[tuple[str, int]] = []
        target = await Endpoint.open(url, **settings)
        try:
            return heard, await target.ask(question, lambda text, tokens: heard.append((text, tokens)))
        finally:
            await target.close()

    return asyncio.run(go())


def test_pieces_and_usage() -> None:
    frames = [piece(""), ": ping\n\n", piece("Hel"), piece("lo"), piece("", "length"), USAGE, DONE]
    with scripted(lambda body: (200, frames), LISTED) as (url, seen):
        heard, totals = asked(url, api_key="secret")
    assert heard == [("Hel", 1), ("lo", 1)]
    assert totals == Totals(9, 5, 4, "length")
    (body,) = seen
    assert (body["path"], body["key"], body["model"]) == ("/v1/chat/completions", "Bearer secret", "first")
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["temperature"]) == (8, 0)
    assert "response_format" not in body


def test_without_usage_the_count_is_left_open() -> None:
    with scripted(lambda body: (200, [piece("a"), piece("b", "stop"), DONE]), LISTED) as (url, _):
        assert asked(url)[1] == Totals(None, None, None, "stop")


def test_reasoning_counts_as_text() -> None:
    frames = [piece("", reasoning_content="hm"), piece("", reasoning="hm"), piece("so"), DONE]
    with scripted(lambda body: (200, frames), LISTED) as (url, _):
        assert [text for text, _ in asked(url)[0]] == ["hm", "hm", "so"]


def test_a_schema_goes_out_as_response_format_and_extra_fields_with_it() -> None:
    with scripted(lambda body: (200, [piece("{}"), DONE]), LISTED) as (url, seen):
        asked(url, Ask(QUESTION.messages, 8, SCHEMA), model="mine", extra={"top_k": 3, "temperature": 1})
    (body,) = seen
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    assert (body["model"], body["top_k"], body["temperature"]) == ("mine", 3, 1)


@pytest.mark.parametrize(
    ("status", "frames", "words"),
    [
        (400, ['{"error": {"message": "max_tokens is wrong"}}'], "answers 400: max_tokens is wrong"),
        (500, ["<html>Oh\nno</html>"], "answers 500: <html>Oh no</html>"),
        (200, [piece("a"), {"error": {"message": "gone"}}], "broke off: gone"),
        (200, ["data: {half\n\n"], "no JSON: {half"),
    ],
)
def test_a_failure_is_one_sentence(status: int, frames: list[Any], words: str) -> None:
    with scripted(lambda body: (status, frames), LISTED) as (url, _), pytest.raises(MlxServeError) as caught:
        asked(url)
    assert words in caught.value.message


def test_the_context_is_known_where_it_is_told() -> None:
    async def contexts(url: str) -> list[int | None]:
        opened = [await Endpoint.open(url, name) for name in (None, "second", "unlisted")]
        for target in opened:
            await target.close()
        return [target.context for target in opened]

    with scripted(lambda body: (200, []), LISTED) as (url, _):
        assert asyncio.run(contexts(url)) == [512, None, None]


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (None, "name one with --model"),
        ({"data": []}, "name one with --model"),
        ([1, 2], "name one with --model"),
        (401, "--api-key"),
    ],
)
def test_a_list_that_does_not_help(models: Any, words: str) -> None:
    with scripted(lambda body: (200, []), models) as (url, _), pytest.raises(UsageError) as caught:
        asked(url)
    assert words in caught.value.message


def test_nobody_there() -> None:
    with pytest.raises(UsageError, match="No server answers at http://127.0.0.1:9/v1"):
        asked("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://a:1", "http://a:1/v1"),
        ("http://a:1/", "http://a:1/v1"),
        ("http://a:1/v1", "http://a:1/v1"),
        ("https://a/openai/v1/", "https://a/openai/v1"),
    ],
)
def test_addresses(given: str, base: str) -> None:
    assert base_url(given) == base


@pytest.mark.parametrize("given", ["127.0.0.1:8080", "ftp://a", "http://", "http://a:port"])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(UsageError, match="--url"):
        base_url(given)
