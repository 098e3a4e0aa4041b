"""/v1/completions, /v1/embeddings and /v1/models through OpenAI's own client."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import httpx
import openai
import pytest

from tests.server.stub import FILL, RunningServer, StubEngine, bag_of_bytes, make_tokenizer, running
from tests.server.wire import data_of


@pytest.fixture(scope="module")
def client(_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{_server.url}/v1", api_key="none", max_retries=0)


def text_of(stub: StubEngine, index: int = 0) -> str:
    return stub.tokenizer.decode(stub.seen[index].prompt, skip_special_tokens=False)


def test_whole_and_stream(client: openai.OpenAI, stub: StubEngine) -> None:
    answer = client.completions.create(model="stub", prompt="Once")
    assert answer.choices[0].text == "Hello there."
    assert answer.choices[0].finish_reason == "stop"
    assert text_of(stub) == "Once"
    chunks = list(client.completions.create(model="stub", prompt="Once", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello there."
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]


def test_sixteen_tokens_unless_said(client: openai.OpenAI, stub: StubEngine) -> None:
    stub.script = ["x" * 100]
    answer = client.completions.create(model="stub", prompt="a")
    assert answer.choices[0].text == "x" * 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
def test_kinds_of_prompt(client: openai.OpenAI, stub: StubEngine, prompt: Any, texts: list[str]) -> None:
    stub.script = lambda request: [stub.tokenizer.decode(request.prompt).upper()]
    answer = client.completions.create(model="stub", prompt=prompt, n=2)
    assert [choice.text for choice in answer.choices] == [t.upper() for t in texts for _ in range(2)]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(texts)))
    assert answer.usage.prompt_tokens == sum(map(len, texts))


def test_echo(client: openai.OpenAI, stub: StubEngine) -> None:
    answer = client.completions.create(model="stub", prompt=["one ", "two "], echo=True)
    assert [choice.text for choice in answer.choices] == ["one Hello there.", "two Hello there."]
    chunks = client.completions.create(model="stub", prompt="one ", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one Hello there."


def test_fill_in_the_middle(client: openai.OpenAI, stub: StubEngine) -> None:
    client.completions.create(model="stub", prompt="def f(<|fim_suffix|>", suffix="return x")
    ids = stub.seen[0].prompt
    marks = [stub.tokenizer.added_tokens[name] for name in FILL[:3]]
    assert [i for i in ids if i >= 256] == marks  # the caller's text made none of its own
    assert text_of(stub) == "<|fim_prefix|>def f(<|fim_suffix|><|fim_suffix|>return x<|fim_middle|>"
    assert set(stub.seen[0].params.stop_token_ids) == {stub.tokenizer.added_tokens[n] for n in FILL[3:]}


def test_what_goes_on_from_its_prompt(client: openai.OpenAI, http: httpx.Client, stub: StubEngine) -> None:
    """There a space that the answer begins with is part of it; a reply in a chat begins a text."""
    client.completions.create(model="stub", prompt="Once")
    client.completions.create(model="stub", prompt="a", suffix="b")
    http.post("/infill", json={"model": "stub", "input_prefix": "a", "input_suffix": "b"})
    for raw in (True, False):
        http.post("/api/generate", json={"model": "stub", "prompt": "Once", "raw": raw, "stream": False})
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once"}]
    chat = {"model": "stub", "max_tokens": 9, "messages": turns}
    http.post("/v1/chat/completions", json=chat)
    http.post("/v1/chat/completions", json={**chat, "continue_final_message": True})
    http.post("/v1/messages", json=chat)
    http.post("/v1/messages", json={**chat, "messages": turns[:1]})
    assert [asked.continues for asked in stub.seen] == [
        True,
        True,
        True,
        True,
        False,
        False,
        True,
        True,
        False,
    ]


def test_suffix_without_such_tokens() -> None:
    with running(StubEngine("plain", make_tokenizer(fill=False))) as server:
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"model": "plain", "prompt": "a", "suffix": "b"}, timeout=60
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "suffix"


def test_logprobs(client: openai.OpenAI, stub: StubEngine) -> None:
    stub.script = ["ab", "c"]
    logprobs = client.completions.create(model="stub", prompt="x", logprobs=2).choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.text_offset == [0, 1, 2]
    assert [len(top) for top in logprobs.top_logprobs] == [2, 2, 2]
    chunks = client.completions.create(model="stub", prompt="x", logprobs=0, stream=True)
    found = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [token for entry in found for token in entry.tokens] == ["a", "b", "c"]
    assert [offset for entry in found for offset in entry.text_offset] == [0, 1, 2]


def test_case_2_usage_chunk(http: httpx.Client, stub: StubEngine) -> None:
    body = {"model": "stub", "prompt": "hi", "stream": True}
    assert not any(e.get("usage") for e in data_of(http.post("/v1/completions", json=body))[:-1])
    body["stream_options"] = {"include_usage": True}
    events = data_of(http.post("/v1/completions", json=body))
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == len("Hello there.")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [999_999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
)
def test_case_20_bad_fields(http: httpx.Client, stub: StubEngine, body: dict[str, Any], param: str) -> None:
    response = http.post("/v1/completions", json={"model": "stub", **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)
    assert stub.seen == []


def test_structured_outputs_reach_the_engine(http: httpx.Client, stub: StubEngine) -> None:
    for given, name, value in [
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["a", "b"]}, "choices", ["a", "b"]),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"json": {"type": "object"}}, "schema", {"type": "object"}),
        ({"json_object": True}, "json_object", True),
    ]:
        body = {"model": "stub", "prompt": "x", "structured_outputs": given}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert getattr(stub.seen[-1].params, name) == value
    for wrong in ({}, {"regex": "a", "json_object": True}, {"choice": []}, {"json": "{"}):
        body = {"model": "stub", "prompt": "x", "structured_outputs": wrong}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("structured_outputs")


def test_embeddings(client: openai.OpenAI, http: httpx.Client, stub: StubEngine) -> None:
    # The client asks for base64 and decodes it by itself.
    answer = client.embeddings.create(model="stub", input=["abc", "xyz"])
    expected = [bag_of_bytes(stub.tokenizer.encode(text)) for text in ("abc", "xyz")]
    for entry, vector in zip(answer.data, expected):
        assert entry.embedding == pytest.approx(vector, abs=1e-6)
    assert answer.usage.prompt_tokens == 6
    plain = client.embeddings.create(model="stub", input=[97, 98, 99], encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(expected[0])
    raw = http.post("/v1/embeddings", json={"model": "stub", "input": "abc", "encoding_format": "base64"})
    packed = base64.b64decode(raw.json()["data"][0]["embedding"])
    assert struct.unpack("<8f", packed) == pytest.approx(expected[0], abs=1e-6)


def test_embedding_dimensions(client: openai.OpenAI, stub: StubEngine) -> None:
    vector = client.embeddings.create(model="stub", input="abc", dimensions=3).data[0].embedding
    assert len(vector) == 3
    assert math.hypot(*vector) == pytest.approx(1, abs=1e-6)
    full = bag_of_bytes(stub.tokenizer.encode("abc"))
    assert vector[0] / vector[1] == pytest.approx(full[0] / full[1], rel=1e-5)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="stub", input="abc", dimensions=9)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [""]}, "input[0]"),
        ({"input": "x" * 5000}, "prompt"),
        ({}, "input"),
    ],
)
def test_embedding_errors(http: httpx.Client, stub: StubEngine, body: dict[str, Any], param: str) -> None:
    response = http.post("/v1/embeddings", json={"model": "stub", **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_models(client: openai.OpenAI, stub: StubEngine) -> None:
    assert [model.id for model in client.models.list()] == ["stub"]
    assert client.models.retrieve("stub").created == 1_700_000_000
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/nobody")
