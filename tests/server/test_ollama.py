"""Ollama's end points through its own client, streamed and not."""

from __future__ import annotations

from typing import Any

import httpx
import ollama
import pytest

from mlxserve.errors import UsageError
from mlxserve.server.ollama import keep_alive_s
from tests.server.stub import RunningServer, StubEngine, bag_of_bytes
from tests.server.wire import lines_of

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(_server: RunningServer) -> ollama.Client:
    return ollama.Client(host=_server.url)


def prompt_text(stub: StubEngine) -> str:
    return stub.tokenizer.decode(stub.seen[-1].prompt, skip_special_tokens=False)


def test_chat(client: ollama.Client, stub: StubEngine) -> None:
    answer = client.chat(model="stub", messages=HI)
    assert answer.message.content == "Hello there."
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.eval_count == len("Hello there.")
    assert answer.prompt_eval_count == len(stub.seen[0].prompt)
    assert answer.total_duration >= answer.eval_duration >= 0


def test_chat_stream(client: ollama.Client, http: httpx.Client, stub: StubEngine) -> None:
    parts = list(client.chat(model="stub", messages=HI, stream=True))
    assert "".join(part.message.content for part in parts) == "Hello there."
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    raw = http.post("/api/chat", json={"model": "stub", "messages": HI})  # streams unless told otherwise
    assert raw.headers["content-type"] == "application/x-ndjson"
    assert lines_of(raw)[-1]["done_reason"] == "stop"


def test_generate(client: ollama.Client, stub: StubEngine) -> None:
    answer = client.generate(model="stub", prompt="hi", system="Be kind.")
    assert answer.response == "Hello there."
    assert prompt_text(stub).startswith("<|im_start|>system\nBe kind.")
    assert list(answer.context)[: len(stub.seen[0].prompt)] == list(stub.seen[0].prompt)

    client.generate(model="stub", prompt="more", context=answer.context)
    assert list(stub.seen[1].prompt)[: len(answer.context)] == list(answer.context)

    client.generate(model="stub", prompt="raw text", raw=True)
    assert prompt_text(stub) == "raw text"
    client.generate(model="stub", prompt="def f(", suffix=")")
    assert prompt_text(stub).endswith("<|fim_middle|>")
    parts = list(client.generate(model="stub", prompt="hi", stream=True))
    assert "".join(part.response for part in parts) == "Hello there."


def test_options(client: ollama.Client, stub: StubEngine) -> None:
    options = {
        "num_predict": 3,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "seed": 42,
        "stop": ["x"],
        "repeat_penalty": 1.2,
        "num_ctx": 2048,
        "num_thread": 4,
        "mirostat": 0,
    }
    answer = client.chat(model="stub", messages=HI, options=options)
    assert (answer.message.content, answer.done_reason) == ("Hel", "length")
    params = stub.seen[0].params
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.5, 5, 0.9, 42)
    assert (params.stop, params.repetition_penalty) == (("x",), 1.2)
    client.chat(model="stub", messages=HI, options={"num_ctx": 1000, "num_predict": -1})
    assert stub.seen[1].params.max_tokens == 1000 - len(stub.seen[1].prompt)


def test_format(client: ollama.Client, stub: StubEngine) -> None:
    client.chat(model="stub", messages=HI, format="json")
    client.chat(model="stub", messages=HI, format={"type": "object"})
    assert stub.seen[0].params.json_object
    assert stub.seen[1].params.schema == {"type": "object"}


def test_logprobs(client: ollama.Client, stub: StubEngine) -> None:
    answer = client.chat(model="stub", messages=HI, logprobs=True, top_logprobs=2)
    assert "".join(entry.token for entry in answer.logprobs) == "Hello there."
    assert {len(entry.top_logprobs) for entry in answer.logprobs} == {2}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"num_ctx": 100_000}}, "100000"),
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"surprise": 2}}, "surprise"),
        ({"messages": {}}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
        ({"format": "xml"}, "format"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"surprise": 1}, "surprise"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
        ({"keep_alive": "nan"}, "keep_alive"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_case_20_bad_fields(
    http: httpx.Client, stub: StubEngine, body: dict[str, Any], word: str, stream: bool
) -> None:
    response = http.post("/api/chat", json={"model": "stub", "messages": HI, **body, "stream": stream})
    assert response.status_code == 400, response.text
    assert word.split(".")[-1] in response.json()["error"]
    assert stub.seen == []


def test_unknown_model(client: ollama.Client, stub: StubEngine) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(model="nobody", messages=HI)
    assert caught.value.status_code == 404


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("90s", 90), ("250ms", 0.25), ("10", 10), (0, 0), (-1, float("inf")),
     ("-1m", float("inf")), (None, None), (2.5, 2.5)],
)  # fmt: skip
def test_keep_alive(value: Any, seconds: float | None) -> None:
    assert keep_alive_s(value) == seconds


@pytest.mark.parametrize("value", ["", "m", "5 minutes", "5x", "nan"])
def test_bad_keep_alive(value: str) -> None:
    with pytest.raises(UsageError):
        keep_alive_s(value)


def test_load_and_unload(client: ollama.Client, server: RunningServer, stub: StubEngine) -> None:
    client.generate(model="stub")
    assert [model.model for model in client.ps().models] == ["stub"]
    answer = client.generate(model="stub", keep_alive=0)
    assert answer.done_reason == "unload"
    assert client.ps().models == []
    client.chat(model="stub", messages=HI, keep_alive="10m")
    (running,) = client.ps().models
    assert running.context_length == stub.context


def test_any_keep_alive_can_be_shown(client: ollama.Client, stub: StubEngine) -> None:
    for value in (1e300, -1, "1e300"):
        client.chat(model="stub", messages=HI, keep_alive=value)
        (running,) = client.ps().models
        assert running.expires_at is not None
        assert running.expires_at.year > 2100
    client.generate(model="stub", keep_alive="10m")


def test_errors_name_the_callers_own_field(client: ollama.Client, stub: StubEngine) -> None:
    """There is no other place for the name in Ollama's error object."""
    stub.script = [UsageError("schema cannot be enforced: x.", param="schema")]
    with pytest.raises(ollama.ResponseError, match="format: schema cannot be enforced"):
        client.chat(model="stub", messages=HI, format={"type": "object"})
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature: expected"):
        client.chat(model="stub", messages=HI, options={"temperature": "hot"})
    with pytest.raises(ollama.ResponseError, match=r"'options\.surprise'"):
        client.chat(model="stub", messages=HI, options={"surprise": 1})


def test_show_takes_no_overrides(http: httpx.Client, stub: StubEngine) -> None:
    assert http.post("/api/show", json={"model": "stub", "system": "", "verbose": True}).status_code == 200
    refused = http.post("/api/show", json={"model": "stub", "system": "Be kind."})
    assert (refused.status_code, "'system'" in refused.json()["error"]) == (400, True)


def test_an_empty_call_is_read_too(http: httpx.Client, stub: StubEngine) -> None:
    empty = {"model": "stub", "prompt": ""}
    for path, body, word in [
        ("/api/generate", {**empty, "images": ["aGk="]}, "images"),
        ("/api/generate", {**empty, "options": {"surprise": 1}}, "options.surprise"),
        ("/api/chat", {"model": "stub", "messages": [], "options": {"surprise": 1}}, "options.surprise"),
    ]:
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        assert word in answer.json()["error"]


def test_tags_show_version(client: ollama.Client, http: httpx.Client, stub: StubEngine) -> None:
    (model,) = client.list().models
    assert model.model == "stub"
    assert model.details.parameter_size == "134.5M"
    client.generate(model="stub")
    shown = client.show("stub")
    assert shown.modelinfo["llama.context_length"] == stub.context
    assert set(shown.capabilities) == {"completion", "tools", "thinking", "insert"}
    assert http.get("/api/version").json()["version"]


def test_pull(client: ollama.Client, http: httpx.Client, stub: StubEngine) -> None:
    steps = list(client.pull("some/model", stream=True))
    assert [step.status for step in steps] == ["pulling manifest", *["downloading"] * 3, "success"]
    assert (steps[1].total, steps[1].completed) == (40, 10)
    assert client.pull("some/model").status == "success"
    with pytest.raises(ollama.ResponseError) as caught:
        client.pull("missing")
    assert caught.value.status_code == 404


def test_delete(client: ollama.Client, server: RunningServer, stub: StubEngine) -> None:
    assert client.delete("stub").status == "success"
    assert server.loader.removed == ["stub"]


def test_embed(client: ollama.Client, stub: StubEngine) -> None:
    expected = bag_of_bytes(stub.tokenizer.encode("abc"))
    answer = client.embed(model="stub", input=["abc", "x"])
    assert answer.embeddings[0] == pytest.approx(expected)
    assert len(client.embed(model="stub", input="y" * 9000).embeddings) == 1  # cut, as the API does
    with pytest.raises(ollama.ResponseError):
        client.embed(model="stub", input="y" * 9000, truncate=False)
    assert client.embeddings(model="stub", prompt="abc").embedding == pytest.approx(expected)
    assert client.embed(model="stub", input="abc", dimensions=2).embeddings[0][0] > 0
    short = client.embed(model="stub", input="abcdef", options={"num_ctx": 3})
    assert (short.embeddings[0], short.prompt_eval_count) == (pytest.approx(expected), 3)
    with pytest.raises(ollama.ResponseError, match="num_ctx"):
        client.embed(model="stub", input="abc", options={"num_ctx": stub.context + 1})
