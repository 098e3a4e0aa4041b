"""Adapters at a launched server: chosen by requests, loaded and dropped while it runs, there after a fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mlxserve import LLM, SamplingParams
from tests import tiny
from tests.adapters import write_adapter
from tests.distributed.processes import WAIT_S, Marked, until
from tests.distributed.served import CONTEXT, Server, launched, truth

NAMES = ("one", "two")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    model = tiny.build("llama", max_position_embeddings=CONTEXT)
    write_adapter(folder / "one", model, 1)
    write_adapter(
        folder / "two", model, 2, endings=("layers.0.mlp.up_proj", "o_proj"), form="peft", dora=True
    )
    return tiny.write(folder / "llama", "llama", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[LLM]:
    with LLM(str(model), adapters={name: model.parent / name for name in NAMES}) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """On two ranks by tensors, with one adapter from the start."""
    started = ["--adapter", f"one={model.parent / 'one'}"]
    with launched(tmp_path_factory.mktemp("served"), model, serve=started) as made:
        yield made


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def adapters_at(server: Server) -> dict[str, bool]:
    listed = httpx.get(f"{server.url}/v1/adapters", timeout=WAIT_S).json()["data"]
    return {each["name"]: each["loaded"] for each in listed}


def test_two_adapters_and_the_base_at_once(server: Server, alone: LLM, model: Path) -> None:
    assert (
        "Divided over 2 ranks: tensor:2.\n" in server.said
        and "llama: 1,024 tokens of context\n" in server.said
    )
    assert any("llama@one: lora of rank 4 on 9 layers" in line for line in server.said)
    body = {"name": "two", "path": str(model.parent / "two")}
    added = httpx.post(f"{server.url}/v1/adapters", json=body, timeout=WAIT_S).json()
    assert (added["id"], added["rank"], added["layers"]) == ("llama@two", 4, 4)
    assert adapters_at(server) == {"one": True, "two": True}
    named = [None, "one", "two", "one"]
    with ThreadPoolExecutor(4) as pool:
        ask = lambda name: text_of(server.ask("Hello there.", 30, f"llama@{name}" if name else "llama"))
        found = list(pool.map(ask, named))
    assert found == [truth(alone, "Hello there.", 30, name) for name in named]
    assert len(set(found)) == 3


def test_prefixes_are_known_under_their_adapter_alone(server: Server) -> None:
    long = "A beginning that is long enough to fill a few pages of the cache, "

    def cached(name: str) -> int:
        return server.ask(
            long + name, model="llama@one" if name else "llama"
        ).usage.prompt_tokens_details.cached_tokens

    assert cached("") <= 16, "the template's own words at most"
    assert cached("again") <= 16
    assert cached("and again") >= 48


def test_a_dropped_adapter_is_gone(server: Server, model: Path) -> None:
    body = {"name": "brief", "path": str(model.parent / "two")}
    httpx.post(f"{server.url}/v1/adapters", json=body, timeout=WAIT_S).raise_for_status()
    gone = httpx.delete(f"{server.url}/v1/adapters/brief", timeout=WAIT_S).json()
    assert gone["deleted"] and gone["in_use"] == 0
    with pytest.raises(openai.NotFoundError, match="no adapter 'brief'"):
        server.ask("Hello?", model="llama@brief")
    assert "brief" not in adapters_at(server)


def test_what_does_not_fit_is_refused_and_the_server_goes_on(server: Server, alone: LLM, model: Path) -> None:
    other = tiny.build("llama", num_hidden_layers=4)
    folder = write_adapter(server.marked.folder / "deep", other, 1)
    answer = httpx.post(
        f"{server.url}/v1/adapters", json={"name": "deep", "path": str(folder)}, timeout=WAIT_S
    )
    assert answer.status_code in (400, 422) and "model.layers.3." in answer.json()["error"]["message"]
    (folder / "adapter_config.json").unlink()
    answer = httpx.post(
        f"{server.url}/v1/adapters", json={"name": "deep", "path": str(folder)}, timeout=WAIT_S
    )
    assert f"{folder}/adapter_config.json cannot be read" in answer.json()["error"]["message"]
    assert text_of(server.ask("Still?", model="llama@one")) == truth(alone, "Still?", adapter="one")


def test_adapters_survive_a_killed_rank(server: Server, alone: LLM) -> None:
    """A whole answer of an adapter's goes on where it was, and both adapters are on the ranks that are new."""
    with ThreadPoolExecutor(1) as pool:
        stream = iter(server.ask("Count.", CONTEXT - 100, "llama@two", stream=True))
        whole = pool.submit(server.ask, "Tell me all.", 60, "llama@one")
        assert [next(stream) for _ in range(3)]
        os.kill(server.rank(1), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="was killed by SIGKILL"):
            list(stream)
        assert text_of(whole.result(WAIT_S)) == truth(alone, "Tell me all.", 60, "one")
    assert adapters_at(server) == {"one": True, "two": True}
    for name in (*NAMES, None):
        asked = f"llama@{name}" if name else "llama"
        assert text_of(server.ask("And now?", model=asked)) == truth(alone, "And now?", adapter=name)


def test_a_chat_answers_through_an_adapter(model: Path, alone: LLM, tmp_path: Path) -> None:
    """In a pipeline, whose ranks have whole layers; two turns, typed here."""
    marked = Marked(tmp_path)
    try:
        ask = ["chat", "--model", str(model), "--max-tokens", "6", "--temperature", "0"]
        adapter = ["--adapter", str(model.parent / "one")]
        launch = ["launch", "-n", "2", "--split", "pipeline:2", "--"]
        done = marked.run(*launch, *ask, *adapter, input="Hello\n/reset\nAnd now?\n")
        assert done.returncode == 0, done.stderr
        params = SamplingParams(max_tokens=6, temperature=0)
        for said in ("Hello", "And now?"):
            (answer,) = alone.chat([{"role": "user", "content": said}], params, adapter="one")
            assert answer.text.strip() and answer.text in done.stdout
        until(lambda: not marked.alive())
    finally:
        marked.clean()
