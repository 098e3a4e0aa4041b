"""Tool calls and reasoning through every API: streamed and not, the same reply."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from mlxserve.server.constraints import Tools
from mlxserve.server.forced import ForcedCallParser, call_grammar
from mlxserve.text.events import ToolArguments, ToolEnd, ToolStart
from tests.server.stub import RunningServer, StubEngine, make_tokenizer, running
from tests.server.wire import data_of, events_of

ASK = [{"role": "user", "content": "Read a.txt"}]
PARAMETERS = {"type": "object", "properties": {"filePath": {"type": "string"}}, "required": ["filePath"]}
READ = {"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "read", "parameters": PARAMETERS, "strict": False}
ANTHROPIC = {"name": "read", "input_schema": PARAMETERS}
CALL = '{"name": "read", "arguments": {"filePath": "a.txt"}}'
TEMPLATE_THAT_THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    "{# </think> ends it #}"
)
# Prose, then a call whose opening tag is split over pieces.
PROSE_AND_CALL = ["I will ", "look.\n", "<tool", "_ca", "ll>\n", CALL[:20], CALL[20:], "\n</tool_c", "all>"]
TWO_CALLS = [
    f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n",
    '{"name": "add", "arguments": {}}',
    "\n</tool_call>",
]
THINKING = ["<think>\n", "Let me ", "see.\n", "</th", "ink>\n\n", "The answer ", "is 5."]


@pytest.fixture(scope="module")
def client(_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{_server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(_server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=_server.url, api_key="none", max_retries=0)


def assembled(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """A streamed chat completion put together as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    response = http.post(
        "/v1/chat/completions", json={"model": "stub", "messages": ASK, **body, "stream": True}
    )
    for event in data_of(response)[:-1]:
        (choice,) = event["choices"]
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"id": call["id"], **call["function"]})
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


def whole(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json={"model": "stub", "messages": ASK, **body})
    choice = response.json()["choices"][0]
    calls = choice["message"].get("tool_calls", [])
    return {
        "content": choice["message"]["content"] or "",
        "reasoning_content": choice["message"].get("reasoning_content", ""),
        "tool_calls": [{"id": call["id"], **call["function"]} for call in calls],
        "finish_reason": choice["finish_reason"],
    }


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    assert all(call["id"] for call in message["tool_calls"])
    return {**message, "tool_calls": [{**call, "id": None} for call in message["tool_calls"]]}


@pytest.mark.parametrize("script", [PROSE_AND_CALL, TWO_CALLS, THINKING, ["plain"], [*THINKING, *TWO_CALLS]])
def test_case_4_the_stream_is_the_unstreamed_reply(
    http: httpx.Client, stub: StubEngine, script: list[str]
) -> None:
    stub.script = script
    streamed, unstreamed = (f(http, tools=[READ, ADD]) for f in (assembled, whole))
    assert without_ids(streamed) == without_ids(unstreamed)


def test_case_4_no_tag_leaks(http: httpx.Client, stub: StubEngine) -> None:
    stub.script = PROSE_AND_CALL
    reply = whole(http, tools=[READ])
    assert reply["content"] == "I will look."
    (call,) = reply["tool_calls"]
    assert call["name"] == "read"
    assert json.loads(call["arguments"]) == {"filePath": "a.txt"}
    assert reply["finish_reason"] == "tool_calls"


def test_case_1_a_call_ends_with_tool_calls(http: httpx.Client, stub: StubEngine) -> None:
    stub.script = PROSE_AND_CALL
    response = http.post(
        "/v1/chat/completions", json={"model": "stub", "messages": ASK, "tools": [READ], "stream": True}
    )
    reasons = [e["choices"][0]["finish_reason"] for e in data_of(response)[:-1]]
    assert [reason for reason in reasons if reason] == ["tool_calls"]
    assert reasons[-1] == "tool_calls"


@pytest.mark.parametrize(
    "payload",
    ['{"name": "read", "arguments": {"filePath": "a\\d"}}', '{"name": "read", "arguments": ', "[]", "]]"],
)
def test_case_6_what_a_model_writes_wrongly_never_breaks_the_answer(
    http: httpx.Client, stub: StubEngine, payload: str
) -> None:
    good = f"<tool_call>\n{CALL}\n</tool_call>"
    stub.script = [f"<tool_call>\n{payload}\n</tool_call>\n", good]
    for reply in (assembled(http, tools=[READ]), whole(http, tools=[READ])):
        assert [json.loads(c["arguments"]) for c in reply["tool_calls"]][-1] == {"filePath": "a.txt"}


def test_parallel_calls(client: openai.OpenAI, http: httpx.Client, stub: StubEngine) -> None:
    stub.script = TWO_CALLS
    message = client.chat.completions.create(model="stub", messages=ASK, tools=[READ, ADD]).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["read", "add"]
    assert len({call.id for call in message.tool_calls}) == 2
    for body in ({"stream": False}, {"stream": True}):
        one = (assembled if body["stream"] else whole)(http, tools=[READ, ADD], parallel_tool_calls=False)
        assert [call["name"] for call in one["tool_calls"]] == ["read"]
        assert one["finish_reason"] == "tool_calls"
    assert stub.running == 0


def test_no_tools_no_parsing(http: httpx.Client, stub: StubEngine) -> None:
    stub.script = PROSE_AND_CALL
    assert "<tool_call>" in whole(http)["content"]
    reply = whole(http, tools=[READ], tool_choice="none")
    assert reply["tool_calls"] == []
    assert '"read"' not in stub.tokenizer.decode(stub.seen[-1].prompt)  # nor are they shown


def test_reasoning(client: openai.OpenAI, http: httpx.Client, stub: StubEngine) -> None:
    stub.script = THINKING
    answer = client.chat.completions.create(model="stub", messages=ASK)
    assert answer.choices[0].message.content == "The answer is 5."
    assert answer.choices[0].message.reasoning_content == "Let me see."
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    assert assembled(http) == whole(http)


def test_anthropic_tools(claude: anthropic.Anthropic, http: httpx.Client, stub: StubEngine) -> None:
    stub.script = PROSE_AND_CALL
    settings: dict[str, Any] = {"model": "stub", "max_tokens": 999, "messages": ASK, "tools": [ANTHROPIC]}
    message = claude.messages.create(**settings)
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.content[0].text == "I will look."
    assert message.content[1].input == {"filePath": "a.txt"}
    assert message.stop_reason == "tool_use"
    with claude.messages.stream(**settings) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"]
    assert final.content[1].input == {"filePath": "a.txt"}
    assert final.stop_reason == "tool_use"
    events = events_of(http.post("/v1/messages", json={**settings, "stream": True}))
    kinds = [name for name, _ in events if name not in ("ping", "content_block_delta")]
    assert kinds == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    assert [data["index"] for name, data in events if name == "content_block_start"] == [0, 1]


def test_anthropic_thinking(claude: anthropic.Anthropic, http: httpx.Client, stub: StubEngine) -> None:
    stub.script = THINKING
    settings: dict[str, Any] = {"model": "stub", "max_tokens": 3000, "messages": ASK}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = claude.messages.create(**settings, thinking=thinking)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "Let me see."
    with claude.messages.stream(**settings, thinking=thinking) as stream:
        final = stream.get_final_message()
    assert final.content[0].thinking == "Let me see."
    assert final.content[0].signature == message.content[0].signature != ""
    assert final.content[1].text == "The answer is 5."
    # Not asked for, not shown.
    assert [block.type for block in claude.messages.create(**settings).content] == ["text"]
    # Sent back, it reaches the prompt.
    turns = [*ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": "more"}]
    claude.messages.create(**{**settings, "messages": turns})
    assert "Let me see." in stub.tokenizer.decode(stub.seen[-1].prompt)


def test_ollama_tools_and_thinking(_server: RunningServer, stub: StubEngine) -> None:
    client = ollama.Client(host=_server.url)
    stub.script = PROSE_AND_CALL
    answer = client.chat(model="stub", messages=ASK, tools=[READ])
    assert answer.message.content == "I will look."
    assert answer.message.tool_calls[0].function.arguments == {"filePath": "a.txt"}
    parts = list(client.chat(model="stub", messages=ASK, tools=[READ], stream=True))
    (call,) = [call for part in parts for call in part.message.tool_calls or []]
    assert call.function.arguments == {"filePath": "a.txt"}
    assert "".join(part.message.content for part in parts) == "I will look."
    stub.script = THINKING
    answer = client.chat(model="stub", messages=ASK, think=True)
    assert (answer.message.thinking, answer.message.content) == ("Let me see.", "The answer is 5.")
    parts = list(client.generate(model="stub", prompt="x", think=True, stream=True))
    assert "".join(part.thinking or "" for part in parts) == "Let me see."
    assert "".join(part.response for part in parts) == "The answer is 5."


def test_responses_tools(client: openai.OpenAI, http: httpx.Client, stub: StubEngine) -> None:
    stub.script = [*THINKING, "\n", f"<tool_call>\n{CALL}\n</tool_call>"]
    response = client.responses.create(model="stub", input="Read", tools=[FLAT])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output[0].content[0].text == "Let me see."
    assert json.loads(response.output[2].arguments) == {"filePath": "a.txt"}
    with client.responses.stream(model="stub", input="Read", tools=[FLAT]) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[2].arguments == response.output[2].arguments
    follow = client.responses.create(
        model="stub",
        previous_response_id=response.id,
        input=[
            {"type": "function_call_output", "call_id": response.output[2].call_id, "output": "text of a"}
        ],
        tools=[FLAT],
    )
    assert follow.status == "completed"
    prompt = stub.tokenizer.decode(stub.seen[-1].prompt, skip_special_tokens=False)
    assert f"<tool_call>\n{CALL}\n</tool_call>" in prompt
    assert "<tool_response>\ntext of a\n</tool_response>" in prompt
    assert "Let me see." in prompt


def test_responses_logprobs_stand_beside_their_own_text(client: openai.OpenAI, stub: StubEngine) -> None:
    stub.script = ["Look: ", f"<tool_call>\n{CALL}\n</tool_call>", "\nDone", "."]
    settings: dict[str, Any] = {"model": "stub", "input": "Read", "tools": [FLAT], "top_logprobs": 1}
    whole = client.responses.create(**settings).output
    with client.responses.stream(**settings) as stream:
        streamed = stream.get_final_response().output
    assert [item.type for item in whole] == ["message", "function_call", "message"]
    for item in (0, 2):
        one, other = whole[item].content[0], streamed[item].content[0]
        assert one.text == other.text
        assert [entry.token for entry in one.logprobs] == [entry.token for entry in other.logprobs]
        tokens = "".join(entry.token for entry in one.logprobs)
        assert one.text.strip() in tokens
    assert "Done" not in "".join(entry.token for entry in whole[0].content[0].logprobs)


def test_responses_reasoning_as_summary_and_sealed(client: openai.OpenAI, stub: StubEngine) -> None:
    stub.script = THINKING
    settings: dict[str, Any] = {
        "model": "stub",
        "input": "x",
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
    }
    response = client.responses.create(**settings)
    item = response.output[0]
    assert item.summary[0].text == "Let me see."
    assert item.encrypted_content
    with client.responses.stream(**settings) as stream:
        kinds = [event.type for event in stream]
    assert "response.reasoning_summary_text.delta" in kinds
    sent_back = {
        "type": "reasoning",
        "id": item.id,
        "summary": [],
        "encrypted_content": item.encrypted_content,
    }
    turns = [{"role": "user", "content": "x"}, sent_back, {"role": "assistant", "content": "5."}]
    client.responses.create(model="stub", input=[*turns, {"role": "user", "content": "y"}])
    assert "Let me see." in stub.tokenizer.decode(stub.seen[-1].prompt)
    foreign = {**sent_back, "encrypted_content": "gAAAA"}
    client.responses.create(model="stub", input=[turns[0], foreign, turns[2]])


def test_strict_calls_that_do_not_conform_are_text(http: httpx.Client, stub: StubEngine) -> None:
    strict = {"type": "function", "function": {**READ["function"], "strict": True}}
    bad = '{"name": "read", "arguments": {"path": 5}}'
    stub.script = [f"<tool_call>\n{bad}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"]
    for reply in (f(http, tools=[strict, ADD]) for f in (whole, assembled)):
        (call,) = reply["tool_calls"]
        assert json.loads(call["arguments"]) == {"filePath": "a.txt"}
        assert json.loads(reply["content"]) == {"name": "read", "arguments": {"path": 5}}
    assert "<[260]>" in stub.seen[0].params.grammar
    assert len(whole(http, tools=[READ, ADD])["tool_calls"]) == 2  # not strict, not judged
    assert stub.seen[-1].params.grammar is None
    broken = {"type": "function", "function": {"name": "x", "parameters": {"type": 5}, "strict": True}}
    body = {"model": "stub", "messages": ASK, "tools": [broken]}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[0].function.parameters"


def test_a_form_holds_outside_reasoning(_server: RunningServer) -> None:
    """Where the template begins to reason by itself, the reasoning is closed before the form begins."""
    thinker = StubEngine("thinker", make_tokenizer(TEMPLATE_THAT_THINKS))
    thinker.script = ['{"a": "<think>"}']
    with running(thinker) as server, httpx.Client(base_url=server.url, timeout=60, verify=False) as http:
        body = {"model": "thinker", "messages": ASK, "response_format": {"type": "json_object"}}
        message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert message["content"] == '{"a": "<think>"}'
        assert "reasoning_content" not in message
        prompt = thinker.tokenizer.decode(thinker.seen[0].prompt, skip_special_tokens=False)
        assert prompt.endswith("<think>\n\n</think>\n\n")
        free = {"model": "thinker", "messages": ASK}
        thinker.script = ["so\n</think>\n\nyes"]
        message = http.post("/v1/chat/completions", json=free).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("so", "yes")


# -- calls that must come ---------------------------------------------------------------------------


def test_a_named_tool(http: httpx.Client, stub: StubEngine) -> None:
    stub.script = ['{"file', 'Path": "b}', '.txt"}']
    choice = {"type": "function", "function": {"name": "read"}}
    for reply in (f(http, tools=[READ, ADD], tool_choice=choice) for f in (whole, assembled)):
        (call,) = reply["tool_calls"]
        assert (call["name"], json.loads(call["arguments"])) == ("read", {"filePath": "b}.txt"})
        assert reply["finish_reason"] == "tool_calls"
        assert reply["content"] == ""
    assert "filePath" in stub.seen[0].params.grammar


def test_some_tool(http: httpx.Client, stub: StubEngine) -> None:
    stub.script = ['{"name"', ': "ad', 'd", "arguments": {"a": ', "[1, {}]}", "}"]
    for reply in (f(http, tools=[READ, ADD], tool_choice="required") for f in (whole, assembled)):
        (call,) = reply["tool_calls"]
        assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": [1, {}]})
        assert reply["finish_reason"] == "tool_calls"


def test_cut_by_the_limit_it_says_so(http: httpx.Client, stub: StubEngine) -> None:
    stub.script = ['{"filePath": "b.txt"}']
    choice = {"type": "function", "function": {"name": "read"}}
    reply = whole(http, tools=[READ], tool_choice=choice, max_tokens=5)
    assert reply["finish_reason"] == "length"
    assert reply["tool_calls"][0]["arguments"] == '{"fil'


def test_allowed_tools(http: httpx.Client, stub: StubEngine) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [READ]}}
    allowed["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "read"}}]
    stub.script = PROSE_AND_CALL
    assert whole(http, tools=[READ, ADD], tool_choice=allowed)["tool_calls"][0]["name"] == "read"
    assert '"add"' not in stub.tokenizer.decode(stub.seen[-1].prompt)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_forced_calls_do_not_depend_on_the_pieces(cut: int) -> None:
    text = ' {"name" : "add", "arguments": {"a": "x\\"}{", "b": [{}]}}  '
    parser = ForcedCallParser(None)
    events = [*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.finish()]
    assert isinstance(events[0], ToolStart)
    assert events[0].name == "add"
    assert isinstance(events[-1], ToolEnd)
    arguments = "".join(event.delta for event in events if isinstance(event, ToolArguments))
    assert json.loads(arguments) == {"a": 'x"}{', "b": [{}]}


def test_the_grammar_of_forced_calls_is_what_llguidance_reads() -> None:
    import llguidance

    deep = {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"enum": ["x"]}}}
    tools = ({"type": "function", "function": {"name": 'odd"name', "parameters": deep}}, ADD)
    for chosen in (Tools(tools, True), Tools(tools[:1], True, 'odd"name')):
        grammar = llguidance.LLMatcher.grammar_from_lark(call_grammar(chosen))
        assert llguidance.LLMatcher.validate_grammar(grammar) == ""


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_ends_with_its_budget(http: httpx.Client, stub: StubEngine, stream: bool) -> None:
    def script(request: Any) -> list[str]:
        if request.id.endswith("-answer"):
            return ["Five."]
        return ["<think>", *["hm "] * 500]

    stub.script = script
    body = {
        "model": "stub",
        "max_tokens": 2000,
        "messages": ASK,
        "thinking": {"type": "enabled", "budget_tokens": 30},
        "stream": stream,
    }
    response = http.post("/v1/messages", json=body)
    first, second = stub.seen
    text = stub.tokenizer.decode(second.prompt, skip_special_tokens=False)
    assert text.endswith("<think>" + "hm " * 10 + "\n</think>\n\n")
    assert list(second.prompt)[: len(first.prompt)] == list(first.prompt)
    made = len(second.prompt) - len(first.prompt)
    assert second.params.max_tokens == 2000 - made
    assert stub.cancelled == [first.id]
    if stream:
        events = events_of(response)
        thought = "".join(d["delta"].get("thinking", "") for n, d in events if n == "content_block_delta")
        answer = "".join(d["delta"].get("text", "") for n, d in events if n == "content_block_delta")
        usage, reason = events[-2][1]["usage"], events[-2][1]["delta"]["stop_reason"]
    else:
        message = response.json()
        thought, answer = message["content"][0]["thinking"], message["content"][1]["text"]
        usage, reason = message["usage"], message["stop_reason"]
    assert (thought, answer, reason) == (("hm " * 10).strip(), "Five.", "end_turn")
    assert usage["output_tokens"] == made + len("Five.")
