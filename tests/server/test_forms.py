"""Answers held to a form by the real engine: schemas, patterns, choices, tools, and forms beside tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests import tiny
from tests.server.real import HI, chat, client_of, text_of
from tests.server.stub import RunningServer


@pytest.fixture(scope="module")
def http(real: RunningServer) -> Iterator[httpx.Client]:
    with client_of(real) as client:
        yield client


SCHEMAS: dict[str, dict[str, Any]] = {
    "animal": {
        "type": "object",
        "properties": {"animal": {"type": "string", "maxLength": 6}},
        "required": ["animal"],
        "additionalProperties": False,
    },
    "closed with branches": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}},
        "additionalProperties": False,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "patterns": {
        "type": "object",
        "properties": {"k": {"type": "boolean"}},
        "patternProperties": {"^x[0-9]$": {"type": "null"}},
        "additionalProperties": False,
        "required": ["k"],
    },
    "reference": {
        "type": "object",
        "properties": {"c": {"$ref": "#/$defs/colour"}},
        "required": ["c"],
        "additionalProperties": False,
        "$defs": {"colour": {"enum": ["red", "green", "blue"]}},
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"enum": [1, 2]},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cases_59_and_63_what_conforms_or_a_400(http: httpx.Client, name: str, seed: int) -> None:
    schema = SCHEMAS[name]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    body = {"model": "tiny-chat", "messages": HI, "response_format": form, "seed": seed, "max_tokens": 250}
    response = http.post("/v1/chat/completions", json=body)
    if response.status_code == 400:
        assert response.json()["error"]["param"] == "response_format"
        return
    assert response.status_code == 200
    choice = response.json()["choices"][0]
    if choice["finish_reason"] == "length":
        assert choice["message"]["content"].lstrip().startswith("{")
        return
    jsonschema.validate(json.loads(choice["message"]["content"]), schema)


def test_case_59_a_bad_pattern_is_a_400(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}, "required": ["a"]}
    for path, body in [
        ("/v1/chat/completions", {"messages": HI, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}),
        ("/v1/responses", {"input": "x", "text": {"format": {
            "type": "json_schema", "name": "x", "schema": schema}}}),
        ("/v1/messages", {"messages": HI, "max_tokens": 50, "output_config": {"format": {
            "type": "json_schema", "schema": schema}}}),
        ("/api/chat", {"messages": HI, "format": schema}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": schema}}),
    ]:  # fmt: skip
        for stream in (False, True):
            response = http.post(path, json={"model": "tiny-chat", **body, "stream": stream})
            assert response.status_code == 400, (path, response.text)


def test_other_constraints(http: httpx.Client) -> None:
    def made(**outputs: Any) -> str:
        return text_of(chat(http, structured_outputs=outputs, max_tokens=40, temperature=1, seed=3))

    assert made(choice=["yes", "no"]) in ("yes", "no")
    assert made(regex="[ab]{3}c").strip("ab") == "c"
    assert made(grammar='start: "x" ("y" | "z")') in ("xy", "xz")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set"}}])
def test_a_tool_that_must_be_called(http: httpx.Client, choice: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name in ("set", "unset")
    ]
    answer = chat(http, tools=tools, tool_choice=choice, max_tokens=200, temperature=1, seed=1)["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] in ("set", "unset")
    jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_strict_tools_conform_even_where_the_model_is_free(
    http: httpx.Client, strict: bool, seed: int
) -> None:
    parameters = {
        "type": "object",
        "properties": {"level": {"enum": ["low", "high"]}, "on": {"type": "boolean"}},
        "required": ["level", "on"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "set", "parameters": parameters, "strict": strict}}
    opening = tiny.VOCAB - 32 + 4  # <tool_call>
    assert tiny.BYTE_SPECIALS[4] == "<tool_call>"
    answer = chat(
        http, tools=[tool], logit_bias={str(opening): 30}, max_tokens=150, temperature=1, seed=seed
    )["choices"][0]
    calls = answer["message"].get("tool_calls", [])
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)
    if strict:  # the opening mark was all but certain, and then the grammar held
        assert calls


FORM = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
SWITCH = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("wanted", ["{", "<tool_call>"])
def test_a_form_and_tools_hold_at_once(http: httpx.Client, wanted: str) -> None:
    """Whichever the model begins: the whole reply is an answer in that form, or calls that conform."""
    opening = tiny.VOCAB - 32 + 4 if wanted == "<tool_call>" else ord(wanted)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": SWITCH}} for name in ("set", "unset")
    ]
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
    with client.chat.completions.stream(
        model="tiny-chat",
        messages=HI,
        tools=tools,
        parallel_tool_calls=False,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}},
        logit_bias={
            str(opening): 50,
            **({str(10): -100, str(32): -100, str(9): -100} if wanted == "{" else {}),
        },
        max_tokens=120,
        seed=1,
        temperature=1,
    ) as events:
        choice = events.get_final_completion().choices[0]
    if wanted == "{":
        assert not choice.message.tool_calls and choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), FORM)
    else:
        (call,) = choice.message.tool_calls
        assert call.function.name in ("set", "unset") and choice.finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), SWITCH)


def test_a_form_and_tools_on_the_other_ways_in(http: httpx.Client) -> None:
    flat = {"type": "function", "name": "set", "parameters": SWITCH}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {
            "input": "x",
            "tools": [flat],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": FORM}},
        },
        "/v1/messages": {
            "messages": HI,
            "max_tokens": 90,
            "tools": [{"name": "set", "input_schema": SWITCH}],
            "output_config": {"format": {"type": "json_schema", "schema": FORM}},
        },
        "/api/chat": {
            "messages": HI,
            "tools": [{"type": "function", "function": {"name": "set", "parameters": SWITCH}}],
            "format": FORM,
            "options": {"num_predict": 90},
            "stream": False,
        },
    }
    for path, body in bodies.items():
        answer = http.post(path, json={"model": "tiny-chat", **body})
        assert answer.status_code == 200, (path, answer.text)


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "object", "properties": {"a": {"pattern": "("}}}}}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ],
)  # fmt: skip
def test_a_form_that_cannot_hold_beside_tools_is_named(
    http: httpx.Client, form: dict[str, Any], param: str
) -> None:
    tools = [{"type": "function", "function": {"name": "set", "parameters": SWITCH}}]
    answer = http.post(
        "/v1/chat/completions", json={"model": "tiny-chat", "messages": HI, "tools": tools, **form}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
