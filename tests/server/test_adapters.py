"""Adapters through the server: `base@name` in every API, loaded and dropped while it runs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from click.testing import CliRunner

from mlxserve.cli.main import cli
from mlxserve.cli.serve import Plan
from mlxserve.config import EngineConfig, LoadConfig, ServerConfig
from mlxserve.errors import UsageError
from mlxserve.server.adapters import allowed_folder
from mlxserve.server.faults import Forbidden
from mlxserve.server.local import LocalLoader
from tests import tiny
from tests.adapters import write_adapter
from tests.server.stub import RunningServer, StubEngine, running

HI = [{"role": "user", "content": "Say hi"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("adapters")
    tiny.write(place / "base", "llama", max_position_embeddings=1024)
    model = tiny.build("llama")
    for seed, name in enumerate(("pirate", "poet", "late"), 1):
        write_adapter(place / name, model, seed)
    return place


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[RunningServer]:
    engine = EngineConfig(max_sequences=16, cache_bytes=8 << 20, check=True)
    loader = LocalLoader([str(place / "base")], LoadConfig(), engine, on_cpu=True)
    server = RunningServer(loader, ServerConfig(keep_alive_s=None), budget_bytes=1 << 30)
    for name in ("pirate", "poet"):
        server.call(lambda name=name: server.models.load_adapter("base", name, place / name))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def _said(client: openai.OpenAI, model: str, **settings: Any) -> str:
    answer = client.chat.completions.create(model=model, messages=HI, **{**GREEDY, **settings})
    return answer.choices[0].message.content or ""


def test_every_api_takes_base_at_name(server: RunningServer, client: openai.OpenAI) -> None:
    base, pirate = _said(client, "base"), _said(client, "base@pirate")
    assert base != pirate != _said(client, "base@poet")
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    message = claude.messages.create(
        model="base@pirate", messages=HI, max_tokens=12, extra_body={"temperature": 0}
    )
    assert message.content[0].text == pirate  # type: ignore[union-attr]
    local = ollama.Client(host=server.url)
    for name in ("base@pirate", "base@pirate:latest"):
        chat = local.chat(name, HI, options={"temperature": 0, "num_predict": 12})
        assert chat.message.content == pirate
    response = client.responses.create(
        model="base@pirate", input="Say hi", temperature=0, max_output_tokens=12
    )
    assert response.output_text == pirate
    vectors = [
        client.embeddings.create(model=m, input="abc").data[0].embedding for m in ("base", "base@poet")
    ]
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-3)


def test_two_adapters_and_the_base_side_by_side(server: RunningServer, client: openai.OpenAI) -> None:
    names = ["base", "base@pirate", "base@poet"] * 3
    alone = {name: _said(client, name) for name in names[:3]}

    async def together() -> list[str]:
        many = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answers = await asyncio.gather(
            *(many.chat.completions.create(model=name, messages=HI, **GREEDY) for name in names)
        )
        return [answer.choices[0].message.content or "" for answer in answers]

    assert asyncio.run(together()) == [alone[name] for name in names]


def test_lists_name_them(server: RunningServer, client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list().data}
    assert {"base", "base@pirate", "base@poet"} <= listed.keys()
    assert listed["base@pirate"].model_dump()["parent"] == "base"
    assert client.models.retrieve("base@poet").id == "base@poet"
    tags = {model.model: model for model in ollama.Client(host=server.url).list().models}
    assert tags["base@pirate"].details.parent_model == "base"  # type: ignore[union-attr]
    abilities = httpx.get(f"{server.url}/v1/capabilities").json()
    assert abilities["models"]["base"]["adapters"] == ["base@pirate", "base@poet"]


def test_an_unknown_adapter_is_a_404_that_names_what_is_there(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="base has no adapter 'x'; there are: pirate, poet"):
            list(client.chat.completions.create(model="base@x", messages=HI, stream=stream))
    with pytest.raises(openai.NotFoundError, match="no model 'nothing'"):
        client.chat.completions.create(model="nothing@pirate", messages=HI)  # type: ignore[arg-type]


def test_loaded_and_dropped_while_a_stream_runs(
    server: RunningServer, client: openai.OpenAI, place: Path
) -> None:
    http = httpx.Client(base_url=server.url, timeout=60)
    long: dict[str, Any] = {"max_tokens": 150, "extra_body": {"ignore_eos": True}}
    whole = _said(client, "base", **long)
    pieces: list[str] = []
    started = threading.Event()

    def read() -> None:
        settings = {**GREEDY, **long}
        for chunk in client.chat.completions.create(model="base", messages=HI, stream=True, **settings):
            pieces.append(chunk.choices[0].delta.content or "")
            started.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(60)
    made = http.post("/v1/adapters", json={"name": "late", "path": str(place / "late")}).json()
    assert (made["id"], made["loaded"], made["rank"]) == ("base@late", True, 4)
    late = _said(client, "base@late")
    gone = http.delete("/v1/adapters/late").json()
    assert gone == {"id": "base@late", "object": "adapter", "deleted": True, "in_use": 0}
    with pytest.raises(openai.NotFoundError):
        _said(client, "base@late")
    http.post("/v1/adapters", json={"name": "late", "path": str(place / "late"), "model": "base"})
    assert _said(client, "base@late") == late
    reader.join()
    assert "".join(pieces) == whole
    assert http.get("/v1/adapters/base@late").json()["created"] > 0
    assert [a["name"] for a in http.get("/v1/adapters").json()["data"]] == ["pirate", "poet", "late"]
    assert http.delete("/v1/adapters/base@late").status_code == 200


def test_what_does_not_fit_is_a_400(server: RunningServer, tmp_path: Path) -> None:
    other = tiny.build("llama", hidden_size=32, intermediate_size=48)
    wrong = write_adapter(tmp_path / "wrong", other, 1)
    http = httpx.Client(base_url=server.url, timeout=60)
    before = http.get("/v1/adapters").json()
    bodies: list[tuple[dict[str, str], str | None]] = [
        ({"path": str(wrong)}, "path"),
        ({"path": str(tmp_path)}, "path"),
        ({"path": "/" + "y" * 300}, "path"),
        ({"name": "a@b"}, "name"),
        ({"model": "base@pirate"}, "path"),  # on base; that folder is wrong all the same
    ]
    for changes, param in bodies:
        body = {"name": "w", "path": str(wrong), **changes}
        response = http.post("/v1/adapters", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param, response.text
    assert http.delete("/v1/adapters/nothing").status_code == 404
    assert http.get("/v1/adapters").json() == before


def test_an_unloaded_base_takes_its_adapters_up_again() -> None:
    engine = StubEngine()
    with running(engine) as server:
        http = httpx.Client(base_url=server.url, timeout=60)
        assert http.post("/v1/adapters", json={"name": "a", "path": "/x/a"}).status_code == 400  # none loaded
        made = http.post("/v1/adapters", json={"name": "a", "path": "/x/a", "model": "stub"})
        assert made.status_code == 200, made.text
        assert server.call(lambda: server.models.unload("stub")) is True
        engine.loaded_adapters.clear()
        assert http.get("/v1/adapters/a").json()["loaded"] is False
        answer = http.post("/v1/chat/completions", json={"model": "stub@a", "messages": HI})
        assert answer.status_code == 200 and engine.seen[-1].adapter == "a"
        assert http.get("/v1/adapters/a").json()["loaded"] is True


def test_whose_folders_a_caller_may_name(tmp_path: Path) -> None:
    (tmp_path / "in" / "a").mkdir(parents=True)
    inside = ServerConfig(adapter_dirs=(tmp_path / "in",), host="0.0.0.0")
    assert allowed_folder("a", inside) == allowed_folder(str(tmp_path / "in" / "a"), inside)
    for path in ("../out", str(tmp_path), "/etc"):
        with pytest.raises(Forbidden):
            allowed_folder(path, inside)
    assert allowed_folder("/etc", ServerConfig()) == Path("/etc")
    for path in ("~nobody-of-this-name/x", "a\0b", "/" + "y" * 300):
        with pytest.raises(UsageError, match="no folder's name"):
            allowed_folder(path, ServerConfig())
    with pytest.raises(Forbidden, match="--adapter-dir"):
        allowed_folder("/etc", ServerConfig(host="0.0.0.0"))


def _plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Plan:
    plans: list[Plan] = []
    monkeypatch.setattr("mlxserve.cli.serve._start", plans.append)
    CliRunner().invoke(cli, ["serve", *arguments], catch_exceptions=False, standalone_mode=False)
    return plans[0]


def test_flags_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = _plan(monkeypatch, *("-m", "a", "-m", "b", "--adapter", "x=./x", "--adapter", "b@y=/y=z"))
    assert [choice.adapters for choice in plan.models] == [{"x": "./x"}, {"y": "/y=z"}]
    file = tmp_path / "serve.yaml"
    file.write_text("models: [{name: a, adapters: {x: ./x}}]\nserver: {adapter_dirs: [~/adapters]}")
    plan = _plan(monkeypatch, "--config", str(file), "--adapter", "y=./y")
    assert plan.models[0].adapters == {"x": "./x", "y": "./y"}
    assert plan.server.adapter_dirs == (Path("~/adapters").expanduser(),)
    for wrong in ("x", "=x", "x=", "c@x=y"):
        with pytest.raises(UsageError, match="--adapter"):
            _plan(monkeypatch, "-m", "a", "--adapter", wrong)
    with pytest.raises(UsageError, match="two adapters"):
        _plan(monkeypatch, "-m", "a", "--adapter", "x=a", "--adapter", "x=b")


def test_generate_through_an_adapter(place: Path) -> None:
    def made(*extra: str) -> dict[str, Any]:
        arguments = ["generate", "-m", str(place / "base"), "-p", "Say hi", "--json", "-q", *extra]
        arguments += ["--temperature", "0", "--max-tokens", "8"]
        result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    assert made()["token_ids"] != made("--adapter", str(place / "pirate"))["token_ids"]
