"""/v1/responses through OpenAI's own client: objects, the event stream, what is stored."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from mlxserve.server.faults import NotFound
from mlxserve.server.responses_store import ResponseStore
from tests.server.stub import RunningServer, StubEngine, running
from tests.server.wire import events_of


@pytest.fixture(scope="module")
def client(_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{_server.url}/v1", api_key="none", max_retries=0)


def post(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/responses", json={"model": "stub", "input": "hi", **body})


def prompt_text(stub: StubEngine) -> str:
    return stub.tokenizer.decode(stub.seen[-1].prompt, skip_special_tokens=False)


def test_whole(client: openai.OpenAI, stub: StubEngine) -> None:
    response = client.responses.create(model="stub", input="hi", instructions="Be kind.")
    assert response.output_text == "Hello there."
    assert response.status == "completed"
    assert response.usage.input_tokens == len(stub.seen[0].prompt)
    assert response.usage.output_tokens == len("Hello there.")
    assert prompt_text(stub).startswith("<|im_start|>system\nBe kind.<|im_end|>")


def test_events_in_their_order(http: httpx.Client, stub: StubEngine) -> None:
    events = events_of(post(http, stream=True))
    assert [name for name, _ in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    item = events[-2][1]["item"]
    assert item["content"][0]["text"] == "Hello there."
    assert events[-1][1]["response"]["output"] == [item]
    assert {data["item_id"] for _, data in events if "item_id" in data} == {item["id"]}


def test_stream_through_the_client(client: openai.OpenAI, stub: StubEngine) -> None:
    with client.responses.stream(model="stub", input="hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "Hello there."


def test_cut_by_the_limit(client: openai.OpenAI, http: httpx.Client, stub: StubEngine) -> None:
    response = client.responses.create(model="stub", input="hi", max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    events = events_of(post(http, max_output_tokens=3, stream=True))
    assert events[-1][0] == "response.incomplete"


def test_previous_response(client: openai.OpenAI, stub: StubEngine) -> None:
    first = client.responses.create(model="stub", input="one", instructions="Be kind.")
    second = client.responses.create(model="stub", input="two", previous_response_id=first.id)
    assert prompt_text(stub) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nHello there.<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )
    third = client.responses.create(model="stub", input="three", previous_response_id=second.id)
    assert prompt_text(stub).count("Hello there.") == 2
    with client.responses.stream(model="stub", input="four", previous_response_id=third.id) as stream:
        streamed = stream.get_final_response()
    assert client.responses.retrieve(streamed.id).output_text == "Hello there."


def test_stored_and_deleted(client: openai.OpenAI, stub: StubEngine) -> None:
    kept = client.responses.create(model="stub", input="keep me")
    assert client.responses.retrieve(kept.id).output_text == "Hello there."
    (item,) = client.responses.input_items.list(kept.id).data
    assert item.content == "keep me"
    assert client.responses.retrieve(kept.id, extra_query={"stream": "false"}).id == kept.id
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)
    gone = client.responses.create(model="stub", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)
    with pytest.raises(openai.NotFoundError, match="resp_nothing"):
        client.responses.create(model="stub", input="hi", previous_response_id="resp_nothing")


def test_items(client: openai.OpenAI, stub: StubEngine) -> None:
    client.responses.create(
        model="stub",
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "2+3?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "easy"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'},
            {"type": "function_call_output", "call_id": "c1", "output": "5"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "It is 5."}],
            },
            {"role": "user", "content": "thanks"},
        ],
        tools=[{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}],
    )
    text = prompt_text(stub)
    assert text.startswith("<|im_start|>system\nBe brief.")
    call = '<think>\neasy\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert call in text
    assert text.index("<tool_response>\n5\n") < text.index("It is 5.") < text.index("thanks")


def test_schema(client: openai.OpenAI, stub: StubEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    text_format = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    client.responses.create(model="stub", input="hi", text={"format": text_format})
    assert stub.seen[0].params.schema == schema


def test_logprobs(client: openai.OpenAI, stub: StubEngine) -> None:
    response = client.responses.create(model="stub", input="hi", include=["message.output_text.logprobs"])
    entries = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == "Hello there."
    with client.responses.stream(model="stub", input="hi", top_logprobs=1) as stream:
        assert len(stream.get_final_response().output[0].content[0].logprobs) == len("Hello there.")


def test_truncation_drops_the_oldest_turns(client: openai.OpenAI, stub: StubEngine) -> None:
    turns = [{"role": "user", "content": f"{i}" * 1500} for i in range(4)]
    with pytest.raises(openai.BadRequestError, match="4096"):
        client.responses.create(model="stub", input=turns)
    client.responses.create(model="stub", input=turns, instructions="Stay.", truncation="auto")
    text = prompt_text(stub)
    assert "Stay." in text
    assert [str(i) * 1500 in text for i in range(4)] == [False, False, True, True]


def test_a_broken_stream_ends_with_failed(http: httpx.Client, stub: StubEngine) -> None:
    stub.script = ["Hel", RuntimeError("boom")]
    name, data = events_of(post(http, stream=True))[-1]
    assert name == "response.failed"
    assert data["response"]["status"] == "failed"
    assert "boom" not in data["response"]["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"surprise": 1}, "surprise"),
        ({"include": ["code_interpreter_call.outputs"]}, "include[0]"),
    ],
)
def test_case_20_bad_fields(http: httpx.Client, stub: StubEngine, body: dict[str, Any], param: str) -> None:
    response = post(http, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param), response.text
    assert stub.seen == []


def test_the_store_is_bounded() -> None:
    store = ResponseStore(max_count=3, max_bytes=1000)
    for i in range(5):
        store.put({"id": f"r{i}"}, [])
    assert len(store) == 3
    with pytest.raises(NotFound):
        store.get("r1")
    store.get("r2")  # used now, so that r3 is the oldest
    store.put({"id": "r5"}, [])
    assert store.get("r2").response == {"id": "r2"}
    with pytest.raises(NotFound):
        store.get("r3")
    store.put({"id": "big"}, [{"text": "x" * 900}])
    assert store.size_bytes <= 1000
    store.put({"id": "too big"}, [{"text": "x" * 2000}])
    with pytest.raises(NotFound):
        store.get("too big")
    for name in ("big",):
        store.drop(name)
    assert store.size_bytes == sum(entry.size_bytes for entry in store._kept.values())


def test_a_small_store_on_a_server() -> None:
    with (
        running(StubEngine(), stored_responses=1) as server,
        httpx.Client(base_url=server.url, timeout=60, verify=False) as http,
    ):
        first, second = (post(http).json()["id"] for _ in range(2))
        assert http.get(f"/v1/responses/{first}").status_code == 404
        assert http.get(f"/v1/responses/{second}").status_code == 200
        assert http.post(f"/v1/responses/{second}/cancel").status_code == 400


def test_pages_of_input_items(client: openai.OpenAI, http: httpx.Client, stub: StubEngine) -> None:
    turns: Any = [{"role": "user", "content": str(i)} for i in range(5)]
    kept = client.responses.create(model="stub", input=turns)
    listed = [item.content for item in client.responses.input_items.list(kept.id, limit=2)]
    assert listed == ["4", "3", "2", "1", "0"]
    oldest = client.responses.input_items.list(kept.id, limit=2, order="asc")
    assert [item.content for item in oldest.data] == ["0", "1"]
    assert oldest.has_more


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=true", "stream"),
        ("?include=reasoning.encrypted_content", "include"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?include=x", "include"),
    ],
)
def test_queries_are_not_ignored(http: httpx.Client, stub: StubEngine, path: str, param: str) -> None:
    answer = http.get(f"/v1/responses/{post(http).json()['id']}{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
