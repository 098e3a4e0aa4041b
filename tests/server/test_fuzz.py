"""Bodies that nobody would send: never a 5xx, never a hang, and never a stream without an end.

One kind comes from the served OpenAPI document (schemathesis: conforming ones and broken ones), one from
hypothesis alone: valid bodies with one thing exchanged for any JSON value.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from mlxserve.server.openapi import BODIES, make_document
from tests.server.stub import RunningServer, StubEngine

TIMEOUT_S = 60
QUICK = settings(
    max_examples=12,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
SCHEMA = schemathesis.openapi.from_dict(make_document())
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SEEDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "5"},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "temperature": 1,
        "stop": ["a"],
        "logit_bias": {"5": 1},
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
        "n": 2,
    },
    "/v1/completions": {"prompt": ["a", "b"], "suffix": "c", "stop": "x", "logprobs": 2, "seed": 5},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "5"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
    },
    "/v1/embeddings": {"input": ["a"], "dimensions": 2, "encoding_format": "float"},
    "/v1/messages": {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "5"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "disabled"},
    },
    "/api/chat": {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [TOOL],
        "options": {"temperature": 1, "stop": ["a"], "num_ctx": 512},
        "format": "json",
        "keep_alive": "5m",
        "think": True,
    },
    "/api/generate": {"prompt": "x", "system": "s", "context": [1, 2], "options": {"seed": 1}, "raw": False},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c"}], "n_predict": 3},
    "/apply-template": {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]},
}  # fmt: skip
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["<|im_end|>", "\ud800", "\x00", "auto", "function", -1, 2**63, 1e308, "{", "stub"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def check(http: httpx.Client, path: str, content: bytes) -> None:
    response = http.post(
        path, content=content, headers={"content-type": "application/json"}, timeout=TIMEOUT_S
    )
    assert response.status_code < 500, (content[:500], response.text[:500])
    assert response.status_code != 499
    if response.status_code >= 400:
        assert "error" in response.json()


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/api/pull"])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_bodies_from_the_document(
    http: httpx.Client, stub: StubEngine, path: str, mode: GenerationMode
) -> None:
    cases = SCHEMA[path]["POST"].as_strategy(generation_mode=mode)

    @QUICK
    @given(case=cases, known=st.booleans())
    def run(case: schemathesis.Case, known: bool) -> None:
        body = case.body
        if known and isinstance(body, dict):
            body = {**body, "model": "stub"}
        check(http, path, body if isinstance(body, bytes) else encoded(body))

    run()


def encoded(body: Any) -> bytes:
    """JSON, also of what JSON has no word for (NaN, lone surrogates)."""
    try:
        return json.dumps(body).encode()
    except (TypeError, ValueError):
        return b"\xff" + repr(type(body)).encode()


@st.composite
def spoiled(draw: st.DrawFn, value: Any) -> Any:
    """`value` with one place exchanged for any JSON value."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: draw(spoiled(value[key]))}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], draw(spoiled(value[at])), *value[at + 1 :]]
    return draw(JSON)


@pytest.mark.parametrize("path", SEEDS)
def test_valid_bodies_with_one_thing_spoiled(http: httpx.Client, stub: StubEngine, path: str) -> None:
    seed = {"model": "stub", **SEEDS[path]}
    check(http, path, encoded(seed))

    @settings(QUICK, max_examples=50)
    @given(body=spoiled(seed))
    def run(body: Any) -> None:
        check(http, path, encoded(body))

    run()


@QUICK
@given(content=st.binary(max_size=200))
def test_any_bytes(content: bytes) -> None:
    from mlxserve.errors import UsageError
    from mlxserve.server.fields import read
    from mlxserve.server.openai_types import ChatBody

    with pytest.raises(UsageError):
        read(content, ChatBody)


def test_the_server_is_well_afterwards(server: RunningServer, http: httpx.Client, stub: StubEngine) -> None:
    body = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "Hello there."
    assert stub.running == 0
