"""/v1/messages through Anthropic's own client, streamed and not, and its events in their order."""

from __future__ import annotations

import re
from typing import Any

import anthropic
import httpx
import pytest

from mlxserve.errors import UsageError
from tests.server.stub import RunningServer, StubEngine, running
from tests.server.wire import events_of

HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "name": "add",
    "description": "Adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}


@pytest.fixture(scope="module")
def client(_server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=_server.url, api_key="none", max_retries=0)


def post(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/messages", json={"model": "stub", "max_tokens": 100, "messages": HI, **body})


def prompt_text(stub: StubEngine, index: int = -1) -> str:
    return stub.tokenizer.decode(stub.seen[index].prompt, skip_special_tokens=False)


def test_whole(client: anthropic.Anthropic, stub: StubEngine) -> None:
    stub.cached_tokens = 5
    message = client.messages.create(model="stub", max_tokens=100, messages=HI, system="Be kind.")
    assert message.content[0].text == "Hello there."
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len("Hello there.")
    assert message.usage.cache_read_input_tokens == 5
    assert message.usage.input_tokens == len(stub.seen[0].prompt) - 5
    assert "<|im_start|>system\nBe kind.<|im_end|>" in prompt_text(stub)


def test_stream(client: anthropic.Anthropic, stub: StubEngine) -> None:
    with client.messages.stream(model="stub", max_tokens=100, messages=HI) as stream:
        assert "".join(stream.text_stream) == "Hello there."
        final = stream.get_final_message()
    whole = client.messages.create(model="stub", max_tokens=100, messages=HI)
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_events_in_their_order(http: httpx.Client, stub: StubEngine) -> None:
    events = events_of(post(http, stream=True))
    assert [name for name, _ in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0][1]["message"]
    assert start["content"] == []
    assert start["stop_reason"] is None
    assert start["usage"]["output_tokens"] == 0
    assert {data["index"] for name, data in events if name.startswith("content_block")} == {0}
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_stop_reasons(client: anthropic.Anthropic, stub: StubEngine) -> None:
    cut = client.messages.create(model="stub", max_tokens=3, messages=HI)
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "Hel")
    stopped = client.messages.create(model="stub", max_tokens=99, messages=HI, stop_sequences=["x", " the"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " the")
    assert stopped.content[0].text == "Hello"


def test_an_assistant_turn_at_the_end_is_the_beginning_of_the_answer(
    client: anthropic.Anthropic, stub: StubEngine
) -> None:
    turns = [*HI, {"role": "assistant", "content": "{"}]
    client.messages.create(model="stub", max_tokens=9, messages=turns)
    assert prompt_text(stub).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n{")


def test_tool_turns(client: anthropic.Anthropic, stub: StubEngine) -> None:
    turns = [
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "easy", "signature": "s"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "5"}]},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    client.messages.create(model="stub", max_tokens=9, messages=turns, tools=[TOOL])
    text = prompt_text(stub)
    assert "easy" in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>' in text
    assert text.index("<tool_response>\n5\n</tool_response>") < text.index("And now?")
    assert '"name": "add"' in text.split("<|im_end|>")[0]


def test_an_error_result_says_so(http: httpx.Client, stub: StubEngine) -> None:
    turns = [
        *HI,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "no such file", "is_error": True}
            ],
        },
    ]
    assert post(http, messages=turns, tools=[TOOL]).status_code == 200
    assert "Error: no such file" in prompt_text(stub)


def test_count_tokens(client: anthropic.Anthropic, stub: StubEngine) -> None:
    count = client.messages.count_tokens(model="stub", messages=HI, system="Be kind.", tools=[TOOL])
    client.messages.create(model="stub", max_tokens=9, messages=HI, system="Be kind.", tools=[TOOL])
    assert count.input_tokens == len(stub.seen[0].prompt)


def test_no_thinking_unless_asked(client: anthropic.Anthropic, stub: StubEngine) -> None:
    client.messages.create(model="stub", max_tokens=9, messages=HI)
    assert "<think>" in prompt_text(stub)  # the template's way to close the thinking at once
    client.messages.create(
        model="stub", max_tokens=2000, messages=HI, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert "<think>" not in prompt_text(stub)


CITED = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "abc"},
    "citations": {"enabled": True},
}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "content[0].type"),
        ({"temperature": 2}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "tool", "name": "nope"}, "tools": [TOOL]}, "nope"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"surprise": 1}, "surprise"),
        ({"thinking": {"type": "enabled", "budget_tokens": 500}}, "budget_tokens"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [CITED]}]}, "messages[0].content[0].citations.enabled"),
        (
            {"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]},
            "tools[0].allowed_callers[0]",
        ),
        ({"metadata": {"user": "x"}}, "metadata.user"),
        ({"context_management": {"edit": []}}, "context_management.edit"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_case_20_bad_fields(
    http: httpx.Client, stub: StubEngine, body: dict[str, Any], word: str, stream: bool
) -> None:
    response = post(http, **body, stream=stream)
    assert response.status_code == 400, response.text
    answer = response.json()
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert word in answer["error"]["message"]
    assert stub.seen == []


def test_errors_are_the_clients_own(client: anthropic.Anthropic, stub: StubEngine) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", max_tokens=5, messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="4096"):
        client.messages.create(model="stub", max_tokens=5, messages=[{"role": "user", "content": "x" * 9000}])


def test_what_agents_send_beside(http: httpx.Client, stub: StubEngine) -> None:
    response = http.post(
        "/v1/messages?beta=true",
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x-2025-01-01", "x-api-key": "k"},
        json={
            "model": "stub",
            "max_tokens": 32000,
            "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
                }
            ],
            "tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}],
            "metadata": {"user_id": "u"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
            "temperature": 1,
            "stream": True,
        },
    )
    assert response.status_code == 200, response.text
    assert response.headers["request-id"]
    assert events_of(response)[-1][0] == "message_stop"


def test_models_in_anthropics_shape(client: anthropic.Anthropic, stub: StubEngine) -> None:
    assert [model.id for model in client.models.list()] == ["stub"]
    assert client.models.retrieve("stub").display_name == "stub"


def test_a_users_id_counts_for_fairness(client: anthropic.Anthropic, stub: StubEngine) -> None:
    client.messages.create(model="stub", max_tokens=9, messages=HI, metadata={"user_id": "anna"})
    client.messages.create(model="stub", max_tokens=9, messages=HI)
    assert [request.client for request in stub.seen] == ["127.0.0.1/anna", "127.0.0.1"]


def test_a_tools_examples_are_shown(client: anthropic.Anthropic, stub: StubEngine) -> None:
    tool: Any = {**TOOL, "input_examples": [{"path": "a/b.txt"}]}
    client.messages.create(model="stub", max_tokens=9, messages=HI, tools=[tool])
    assert '"examples": [{"path": "a/b.txt"}]' in prompt_text(stub)


def test_what_is_not_edited_is_said(http: httpx.Client, stub: StubEngine) -> None:
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    none_made = {"applied_edits": []}
    assert post(http, context_management=edits).json()["context_management"] == none_made
    events = events_of(post(http, context_management=edits, stream=True))
    assert [data for name, data in events if name == "message_delta"][0]["context_management"] == none_made
    assert "context_management" not in post(http).json()


def test_errors_name_the_callers_own_field(http: httpx.Client, stub: StubEngine) -> None:
    """There is no other place for the name in Anthropic's error object."""
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    stub.script = [UsageError("schema cannot be enforced: x.", param="schema")]
    told = post(http, output_config=form).json()["error"]["message"]
    assert told == "output_config.format: schema cannot be enforced: x."


def test_agents_see_that_a_prompt_is_too_long(client: anthropic.Anthropic, stub: StubEngine) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(
            model="stub", max_tokens=9, messages=[{"role": "user", "content": "x" * 2 * stub.context}]
        )
    assert re.search(rf"prompt is too long: \d+ tokens > {stub.context} maximum", str(caught.value))


def test_pages_of_models() -> None:
    engines = [StubEngine(name) for name in "abcde"]
    with running(*engines) as server, anthropic.Anthropic(base_url=server.url, api_key="x") as client:
        assert [model.id for model in client.models.list(limit=2)] == list("abcde")
        back = client.models.list(limit=2, before_id="d")
        assert ([model.id for model in back.data], back.has_more) == (["b", "c"], True)
        for wrong in ({"after_id": "z"}, {"limit": 0}):
            with pytest.raises(anthropic.BadRequestError):
                client.models.list(**wrong)
