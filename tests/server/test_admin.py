"""Health, numbers, abilities, the API document, the log, and editors' end points."""

from __future__ import annotations

import json
import logging
import shlex
from datetime import datetime
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlxserve.errors import Busy, EngineFailed
from mlxserve.server.logs import JsonLines
from tests.conftest import package_folder, require
from tests.server.stub import RunningServer, StubEngine, running

CHAT = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}


def samples(http: httpx.Client) -> dict[tuple[str, ...], float]:
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found[(sample.name, *(sample.labels[k] for k in sorted(sample.labels) if k != "le"))] = (
                sample.value
            )
    return found


def test_metrics() -> None:
    engine = StubEngine()
    with running(engine) as server, httpx.Client(base_url=server.url, timeout=60, verify=False) as http:
        engine.cached_tokens = 4
        http.post("/v1/chat/completions", json=CHAT)
        http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        http.post("/v1/chat/completions", json={**CHAT, "temperature": "hot"})
        found = samples(http)
    route = "/v1/chat/completions"
    assert found["mlxserve_requests_total", route, "200"] == 2
    assert found["mlxserve_requests_total", route, "400"] == 1
    assert found["mlxserve_errors_total", "invalid_value"] == 1
    assert found["mlxserve_time_to_first_token_seconds_count", "stub"] == 2
    assert found["mlxserve_time_between_tokens_seconds_count", "stub"] == 4  # three pieces each
    assert found["mlxserve_tokens_total", "completion", "stub"] == 2 * len("Hello there.")
    assert found["mlxserve_tokens_total", "prompt", "stub"] == 2 * len(engine.seen[0].prompt)
    assert found["mlxserve_tokens_total", "cached", "stub"] == 8
    assert found["mlxserve_engine_pages_free", "stub"] == 100
    assert (found["mlxserve_loaded_models",], found["mlxserve_models_bytes",]) == (1, 100)
    assert found["mlxserve_models_budget_bytes",] == 1000


def test_numbers_of_what_broke_off() -> None:
    """Errors in mid-stream and of strangers count, and so do the tokens of answers that nobody finished."""
    engine = StubEngine()
    with running(engine) as server, httpx.Client(base_url=server.url, timeout=60, verify=False) as http:
        engine.script = ["half", EngineFailed("A step failed.")]
        assert http.post("/v1/chat/completions", json={**CHAT, "stream": True}).status_code == 200
        http.get("/v1/models", headers={"Host": "evil.example"})
        engine.script = [Busy("Full.")]
        http.post("/v1/chat/completions", json=CHAT)
        found = samples(http)
    assert found["mlxserve_errors_total", "engine_failed"] == 1
    assert found["mlxserve_errors_total", "forbidden"] == 1
    assert found["mlxserve_errors_total", "queue_full"] == 1
    assert found["mlxserve_tokens_total", "completion", "stub"] == len("half")
    assert found["mlxserve_tokens_total", "prompt", "stub"] == len(engine.seen[0].prompt)


def test_capabilities(http: httpx.Client, stub: StubEngine) -> None:
    http.post("/v1/chat/completions", json=CHAT)
    found = http.get("/v1/capabilities").json()
    model = found["models"]["stub"]
    assert (model["chat"], model["tools"], model["fill_in_the_middle"]) == (True, "template", True)
    assert "enable_thinking" in model["template_variables"]
    assert model["context"] == stub.context
    assert {"top_k", "min_p", "regex"} <= set(found["sampling"])


def test_the_document_describes_every_path(
    server: RunningServer, http: httpx.Client, stub: StubEngine
) -> None:
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    chat = document["components"]["schemas"]["ChatBody"]
    assert chat["additionalProperties"] is False
    assert {"model", "messages"} == set(chat["required"])
    assert chat["properties"]["temperature"]["anyOf"][0]["maximum"] == 5
    assert "without effect" in chat["properties"]["metadata"]["description"]
    told = {(m.upper(), path) for path, methods in document["paths"].items() for m in methods}
    for people in ("/", "/static/{name}", "/favicon.ico", "/openapi.json"):
        told.add(("GET", people))
    routes = [(route.methods - {"HEAD"}, route.path.replace(":path}", "}")) for route in server.app.routes]
    assert told == {(method, path) for methods, path in routes for method in methods}


def logged(caplog: pytest.LogCaptureFixture, answer: httpx.Response) -> str:
    """The one line about this answer; strangers may call the same port and be logged beside it."""
    lines = [record.getMessage() for record in caplog.records if record.name == "mlxserve.access"]
    (line,) = [line for line in lines if answer.headers["x-request-id"] in line]
    return line


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_log_has_facts_and_no_prompts(form: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxserve.access")
    secret = {**CHAT, "messages": [{"role": "user", "content": "a secret"}]}
    with running(log_format=form) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=secret, timeout=60)
    line = logged(caplog, answer)
    assert "secret" not in line
    assert "Hello" not in line
    if form == "json":
        facts = json.loads(line)
        assert (facts["status"], facts["model"], facts["completion_tokens"]) == (200, "stub", 12)
        assert facts["request"].startswith("req_")
    else:
        assert "POST /v1/chat/completions 200" in line
        assert "completion_tokens=12" in line


def test_prompts_are_logged_where_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxserve.access")
    with running(log_format="json", log_prompts=True) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
    assert json.loads(json.loads(logged(caplog, answer))["body"]) == CHAT


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_caller_writes_lines_or_facts_into_the_log(form: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxserve.access")
    forged = "x status=200\n12:00:00 GET /admin 200"
    with running(log_format=form) as server:
        by_model = httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, "model": forged}, timeout=60)
        by_path = httpx.get(f"{server.url}/v1/models/{quote(forged)}", timeout=60)
    for answer in (by_model, by_path):
        line = logged(caplog, answer)
        assert "\n" not in line
        if form == "text":
            words = shlex.split(line)
            assert words[2] == "404"
            assert not {"status", "12:00:00"} & {word.partition("=")[0] for word in words[3:]}


def test_every_line_is_json_where_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxserve")
    engine = StubEngine()
    engine.script = [RuntimeError("first line\nsecond line")]
    with running(engine, log_format="json") as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
    request_id = answer.headers["x-request-id"]
    (access,) = [json.loads(JsonLines().format(r)) for r in caplog.records if request_id in r.getMessage()]
    (line,) = [JsonLines().format(r) for r in caplog.records if r.exc_info]
    assert "\n" not in line
    broken = json.loads(line)
    assert (broken["level"], access["level"]) == ("error", "warning")
    assert "second line" in broken["traceback"]
    assert (access["status"], access["error"]) == (answer.status_code, "internal_error")
    assert datetime.fromisoformat(access["time"]).tzinfo is not None


def test_every_answer_has_an_id(http: httpx.Client, stub: StubEngine) -> None:
    first, second = (http.get("/health").headers["x-request-id"] for _ in range(2))
    assert first != second


def test_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    require(package_folder("opentelemetry.sdk") is not None, "opentelemetry-sdk is not installed")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    caller = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    with running() as server:
        httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=caller, timeout=60)
    (span,) = [each for each in exporter.get_finished_spans() if each.name == "POST /v1/chat/completions"]
    assert span.context is not None and f"{span.context.trace_id:032x}" == "ab" * 16
    assert span.attributes is not None
    assert span.attributes["gen_ai.request.model"] == "stub"
    assert span.attributes["gen_ai.usage.output_tokens"] == 12


# -- editors ----------------------------------------------------------------------------------------


def test_tokenize_and_back(http: httpx.Client, stub: StubEngine) -> None:
    ids = http.post("/tokenize", json={"content": "hé<|im_end|>", "model": "stub"}).json()["tokens"]
    assert ids == [104, 195, 169, 259]
    assert http.post("/detokenize", json={"tokens": ids, "model": "stub"}).json() == {
        "content": "hé<|im_end|>"
    }
    pieces = http.post("/tokenize", json={"content": "hé", "with_pieces": True}).json()["tokens"]
    assert pieces[0] == {"id": 104, "piece": "h"}
    assert pieces[1] == {"id": 195, "piece": [195]}
    assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400


def test_apply_template(http: httpx.Client, stub: StubEngine) -> None:
    body = {"messages": CHAT["messages"], "model": "stub"}
    whole = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert http.post("/apply-template", json=body).json() == {"prompt": whole}
    closed = http.post("/apply-template", json={**body, "chat_template_kwargs": {"enable_thinking": False}})
    assert closed.json()["prompt"].endswith("</think>\n\n")


def test_infill(http: httpx.Client, stub: StubEngine) -> None:
    body: dict[str, Any] = {
        "model": "stub",
        "input_prefix": "def f(",
        "input_suffix": ")",
        "input_extra": [{"filename": "a.py", "text": "import b"}],
        "prompt": "x",
        "n_predict": 5,
        "samplers": ["top_k"],
        "cache_prompt": True,
    }
    answer = http.post("/infill", json=body).json()
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("Hello", True, "limit")
    text = stub.tokenizer.decode(stub.seen[0].prompt, skip_special_tokens=False)
    assert text == "<|file_sep|>a.py\nimport b\n<|fim_prefix|>def f(x<|fim_suffix|>)<|fim_middle|>"
    lines = [
        json.loads(line.removeprefix("data: "))
        for line in http.post("/infill", json={**body, "stream": True}).text.split("\n\n")
        if line
    ]
    assert "".join(line["content"] for line in lines) == "Hello"
    assert [line["stop"] for line in lines] == [False, True]


def test_infill_stops_in_time(http: httpx.Client, stub: StubEngine) -> None:
    stub.script = ["line one\n", 0.05, "line two\n", 0.05, "line three\n"]
    body = {"model": "stub", "input_prefix": "a", "t_max_predict_ms": 1}
    answer = http.post("/infill", json=body).json()
    assert answer["content"].startswith("line one\n")
    assert "three" not in answer["content"]
    assert stub.running == 0
