"""/v1/chat/completions through OpenAI's own client, streamed and not."""

from __future__ import annotations

import re
from typing import Any

import httpx
import openai
import pytest

from mlxserve.errors import Unsupported
from tests.server.stub import RunningServer, StubEngine
from tests.server.wire import data_of

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{_server.url}/v1", api_key="none", max_retries=0)


def post(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"model": "stub", "messages": HI, **body})


def test_whole(client: openai.OpenAI, stub: StubEngine) -> None:
    answer = client.chat.completions.create(model="stub", messages=HI)
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(stub.seen[0].prompt)
    assert answer.usage.completion_tokens == len("Hello there.")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_equals_whole(client: openai.OpenAI, stub: StubEngine) -> None:
    pieces = []
    for chunk in client.chat.completions.create(model="stub", messages=HI, stream=True):
        pieces.append(chunk.choices[0].delta.content or "")
    assert "".join(pieces) == "Hello there."
    assert [p for p in pieces if p] == ["Hello", " there", "."]


def test_prompt_is_the_template_with_one_generation_prompt(client: openai.OpenAI, stub: StubEngine) -> None:
    client.chat.completions.create(model="stub", messages=HI)
    text = stub.tokenizer.decode(stub.seen[0].prompt, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("limit", [None, 3])
def test_case_1_one_finish_reason(http: httpx.Client, stub: StubEngine, limit: int | None) -> None:
    whole = post(http, max_tokens=limit).json()
    events = data_of(post(http, max_tokens=limit, stream=True))
    assert events[-1] == "[DONE]"
    reasons = [c["finish_reason"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
    assert reasons == [whole["choices"][0]["finish_reason"]] == ["length" if limit else "stop"]


@pytest.mark.parametrize("wanted", [True, False, None])
def test_case_2_usage_chunk(http: httpx.Client, stub: StubEngine, wanted: bool | None) -> None:
    options = {} if wanted is None else {"stream_options": {"include_usage": wanted}}
    events = data_of(post(http, stream=True, **options))[:-1]
    with_usage = [event for event in events if event.get("usage")]
    if not wanted:
        assert with_usage == []
        return
    assert with_usage == [events[-1]]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == post(http).json()["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_case_3_stop_strings(http: httpx.Client, stub: StubEngine, stream: bool) -> None:
    def text(**body: Any) -> tuple[str, str]:
        if not stream:
            choice = post(http, **body).json()["choices"][0]
            return choice["message"]["content"], choice["finish_reason"]
        chunks = [e["choices"][0] for e in data_of(post(http, stream=True, **body))[:-1]]
        return "".join(c["delta"].get("content") or "" for c in chunks), chunks[-1]["finish_reason"]

    stub.script = ["alpha b", "eta gam", "ma delta"]
    assert text(stop="beta gamma") == ("alpha ", "stop")
    assert text(stop=["delta", "gamma"]) == ("alpha beta ", "stop")
    assert text(stop=["delta epsilon"]) == ("alpha beta gamma delta", "stop")


def test_case_13_logprobs(client: openai.OpenAI, stub: StubEngine) -> None:
    stub.script = ["a", "🙂"]
    answer = client.chat.completions.create(model="stub", messages=HI, logprobs=True)
    entries = answer.choices[0].logprobs.content
    assert [bytes(entry.bytes) for entry in entries] == [b"a", b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert all(entry.top_logprobs == [] for entry in entries)

    answer = client.chat.completions.create(model="stub", messages=HI, logprobs=True, top_logprobs=2)
    assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [2] * 5

    streamed = client.chat.completions.create(
        model="stub", messages=HI, logprobs=True, top_logprobs=2, stream=True
    )
    found = [e for c in streamed for e in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])]
    assert found == answer.choices[0].logprobs.content


def test_case_14_n_and_limit(client: openai.OpenAI, stub: StubEngine) -> None:
    stub.script = lambda request: [f"choice {request.params.seed}"]
    answer = client.chat.completions.create(model="stub", messages=HI, n=3, temperature=0.8, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [c.message.content for c in answer.choices] == ["choice 7", "choice 8", "choice 9"]
    assert {request.params.temperature for request in stub.seen} == {0.8}
    assert answer.usage.prompt_tokens == len(stub.seen[0].prompt)

    texts = {0: "", 1: "", 2: ""}
    reasons: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for chunk in client.chat.completions.create(model="stub", messages=HI, n=3, seed=7, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == {0: "choice 7", 1: "choice 8", 2: "choice 9"}
    assert reasons == {0: ["stop"], 1: ["stop"], 2: ["stop"]}

    stub.script = ["many words in this answer"]
    answer = client.chat.completions.create(model="stub", messages=HI, max_completion_tokens=5)
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"


def test_case_15_settings_are_the_requests_own_or_the_models(http: httpx.Client, stub: StubEngine) -> None:
    stub.generation_defaults = {"temperature": 0.6, "top_k": 20}
    post(http)
    post(http, top_k=1, seed=5, temperature=1.5, min_p=0.1, repetition_penalty=1.1, logit_bias={"65": 3})
    silent, loud = (request.params for request in stub.seen)
    assert (silent.temperature, silent.top_k, silent.seed) == (0.6, 20, None)
    assert (loud.temperature, loud.top_k, loud.seed, loud.min_p) == (1.5, 1, 5, 0.1)
    assert loud.logit_bias == {65: 3.0}


def test_without_a_limit_the_answer_may_fill_the_context(http: httpx.Client, stub: StubEngine) -> None:
    post(http)
    request = stub.seen[0]
    assert request.params.max_tokens == stub.context - len(request.prompt)


def test_case_21_prompt_too_long(client: openai.OpenAI, stub: StubEngine) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="stub", messages=[{"role": "user", "content": "x" * 8192}])
    assert caught.value.code == "context_length_exceeded"
    assert "4096" in str(caught.value)
    assert re.search(r"\b82\d\d tokens", str(caught.value))
    assert stub.seen == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 9}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"messages": {}}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": [1]}, "stop[0]"),
        ({"top_p": 0}, "top_p"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"nonsense": 1}, "nonsense"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"messages": [{"role": "user", "content": "x", "mood": "bad"}]}, "messages[0].mood"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": []}, "functions"),
        ({"store": True}, "store"),
        ({"seed": 1.5}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        (
            {
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
                "structured_outputs": {"json": {"type": "object"}},
            },
            "structured_outputs",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_case_20_bad_fields(
    http: httpx.Client, stub: StubEngine, body: dict[str, Any], param: str, stream: bool
) -> None:
    if "stream" not in body and "stream_options" not in body:
        body = {**body, "stream": stream}
    response = post(http, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param), error
    assert stub.seen == []


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b"null", b"\xff", b'"\\ud800"', b"[" * 100_000])
def test_case_20_bad_json(http: httpx.Client, stub: StubEngine, body: bytes) -> None:
    response = http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


def test_case_20_unknown_model(client: openai.OpenAI, stub: StubEngine) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=HI)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    "field",
    [
        {"user": "u"},
        {"metadata": {"a": "b"}},
        {"store": False},
        {"prompt_cache_key": "k"},
        {"modalities": ["text"]},
    ],
)
def test_harmless_fields_are_taken(http: httpx.Client, stub: StubEngine, field: dict[str, Any]) -> None:
    assert post(http, **field).status_code == 200


def test_null_is_absent(http: httpx.Client, stub: StubEngine) -> None:
    nulls = dict.fromkeys(
        ["temperature", "stop", "tools", "tool_choice", "response_format", "n", "seed", "logit_bias", "audio"]
    )
    assert post(http, **nulls).status_code == 200


@pytest.mark.parametrize(
    ("form", "engines_name", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
            "schema",
            "response_format",
        ),
        ({"structured_outputs": {"json": {}}}, "schema", "structured_outputs.json"),
        ({"structured_outputs": {"choice": ["a"]}}, "choices", "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "x"}}, "grammar", "structured_outputs.grammar"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_case_59_what_cannot_be_enforced_is_refused_by_the_callers_name(
    http: httpx.Client, stub: StubEngine, form: dict[str, Any], engines_name: str, param: str, stream: bool
) -> None:
    stub.script = [Unsupported("It cannot be enforced.", param=engines_name)]
    response = post(http, **form, stream=stream)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_tier_is_told_where_one_was_named(client: openai.OpenAI, stub: StubEngine) -> None:
    for asked, told in (("flex", "flex"), ("priority", "default"), ("auto", "default")):
        assert (
            client.chat.completions.create(model="stub", messages=HI, service_tier=asked).service_tier == told
        )
    assert [request.priority for request in stub.seen] == ["batch", "interactive", "interactive"]
