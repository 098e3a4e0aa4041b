"""Files and fine-tuning jobs through OpenAI's own client: trained beside live traffic, served at the end."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mlxserve.cli.trainer import JobTrainer
from mlxserve.config import EngineConfig, LoadConfig, ServerConfig
from mlxserve.server.local import LocalLoader
from tests import tiny
from tests.server.stub import RunningServer, running

HI = [{"role": "user", "content": "Say hi"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
ROWS = [{"messages": [*HI, {"role": "assistant", "content": "yo!"}]}] * 8
PATIENCE_S = 120


def _lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finetuning")
    tiny.write(place / "base", "llama", max_position_embeddings=1024)
    return place


FREE = [1 << 40]  # what the trainer believes the machine has left


def _start(place: Path) -> RunningServer:
    engine = EngineConfig(max_sequences=8, cache_bytes=8 << 20, check=True)
    loader = LocalLoader([str(place / "base")], LoadConfig(), engine, on_cpu=True)
    config = ServerConfig(keep_alive_s=None, data_dir=place / "data", max_file_bytes=100_000)
    server = RunningServer(loader, config, budget_bytes=1 << 30, trainer=JobTrainer(lambda: FREE[0]))
    server.call(lambda: server.models.preload("base"))
    return server


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[RunningServer]:
    server = _start(place)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def _said(client: openai.OpenAI, model: str, **settings: Any) -> str:
    answer = client.chat.completions.create(model=model, messages=HI, **{**GREEDY, **settings})
    return answer.choices[0].message.content or ""


def _upload(client: openai.OpenAI, rows: list[Any]) -> str:
    return client.files.create(file=("rows.jsonl", _lines(rows)), purpose="fine-tune").id


def _wait(client: openai.OpenAI, job_id: str, good: Callable[[Any], bool]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not good(job := client.fine_tuning.jobs.retrieve(job_id)):
        assert time.monotonic() < end, job
        assert job.status not in ("failed", "cancelled") or good(job), job
        time.sleep(0.05)
    return job


def _teach(client: openai.OpenAI, **settings: Any) -> Any:
    hyper = {"n_epochs": 12, "batch_size": 4, "learning_rate_multiplier": 200}
    values: dict[str, Any] = {
        "model": "base",
        "training_file": _upload(client, ROWS),
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyper}},
        "seed": 3,
        **settings,
    }
    return client.fine_tuning.jobs.create(**values)


def test_files_come_and_go(client: openai.OpenAI) -> None:
    content = _lines(ROWS)
    made = client.files.create(file=("rows.jsonl", content), purpose="fine-tune")
    assert (made.filename, made.bytes, made.purpose, made.status) == (
        "rows.jsonl",
        len(content),
        "fine-tune",
        "processed",
    )
    assert made.id in [file.id for file in client.files.list(purpose="fine-tune")]
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == content
    assert client.files.delete(made.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    for wrong in ("../../etc/passwd", "file-..", "x"):
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(wrong)


def test_what_no_file_may_be(client: openai.OpenAI, server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose must be 'fine-tune'"):
        client.files.create(file=("a.jsonl", b"{}"), purpose="assistants")
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.files.create(file=("a.jsonl", b""), purpose="fine-tune")
    with pytest.raises(openai.APIStatusError, match="longer than the limit of 100000 bytes") as caught:
        client.files.create(file=("a.jsonl", io.BytesIO(b"x" * 300_000)), purpose="fine-tune")
    assert caught.value.status_code == 413
    http = httpx.Client(base_url=server.url, timeout=60)
    for request in (
        {"json": {"file": "x"}},
        {"files": {"other": b"x"}, "data": {"purpose": "fine-tune"}},
        {"files": {"file": b"x"}, "data": {"purpose": "fine-tune", "expires_after[seconds]": "5"}},
        {"content": b"nonsense", "headers": {"content-type": "multipart/form-data; boundary=x"}},
    ):
        response = http.post("/v1/files", **request)  # type: ignore[arg-type]
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]
    assert http.get("/v1/files?limit=x").status_code == 400


def test_a_job_whose_adapter_answers(client: openai.OpenAI, server: RunningServer) -> None:
    """Trained while a stream runs, which says what it says without; then served under the name it reports."""
    long: dict[str, Any] = {"max_tokens": 60, "extra_body": {"ignore_eos": True}}
    alone = _said(client, "base", **long)
    assert "yo!" not in _said(client, "base")
    job = _teach(client, suffix="greeting", validation_file=_upload(client, ROWS[:2]))
    assert job.object == "fine_tuning.job" and job.fine_tuned_model is None
    _wait(client, job.id, lambda job: job.status != "validating_files")
    beside = [_said(client, "base", **long)]
    stream = client.chat.completions.create(model="base", messages=HI, stream=True, **{**GREEDY, **long})
    beside.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
    assert beside == [alone] * 2
    job = _wait(client, job.id, lambda job: job.status == "succeeded")
    assert job.fine_tuned_model.startswith("base@ft-greeting-") and job.trained_tokens > 0
    assert job.hyperparameters.n_epochs == 12 and job.finished_at >= job.created_at and job.error is None
    assert _said(client, job.fine_tuned_model) == "yo!"
    assert _said(client, "base", **long) == alone
    assert job.fine_tuned_model in [model.id for model in client.models.list()]
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=100))
    losses = [event.data["train_loss"] for event in events if event.data and "train_loss" in event.data]
    assert len(losses) == 24 and losses[0] < 0.1 * losses[-1]  # the newest first
    assert any("valid_loss" in (event.data or {}) for event in events)
    first = list(client.fine_tuning.jobs.list_events(job.id, limit=3).data)
    assert [event.id for event in first] == [event.id for event in events[:3]]
    csv = client.files.content(job.result_files[0]).text.splitlines()
    assert csv[0] == "step,train_loss,valid_loss" and len(csv) > 24
    checkpoints = client.fine_tuning.jobs.checkpoints.list(job.id).data
    assert [c.step_number for c in checkpoints] == [24, 22, 20]
    assert _said(client, checkpoints[0].fine_tuned_model_checkpoint) == "yo!"


def test_a_cancelled_job(client: openai.OpenAI, server: RunningServer) -> None:
    hyper = {"n_epochs": 1000, "batch_size": 1}
    job = _teach(client, method=openai.NOT_GIVEN, hyperparameters=hyper)
    waiting = _teach(client, method=openai.NOT_GIVEN, hyperparameters=hyper)
    _wait(client, job.id, lambda job: job.status == "running" and (job.trained_tokens or 0) > 0)
    assert client.fine_tuning.jobs.cancel(waiting.id).status == "cancelled"
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="has cancelled already|cancelled"):
        client.fine_tuning.jobs.cancel(job.id)
    assert _said(client, "base")
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert job.status == "cancelled" and job.fine_tuned_model is None and job.estimated_finish is None
    assert not [m.id for m in client.models.list() if job.id[-8:] in m.id]
    listed = client.fine_tuning.jobs.list(limit=2)
    assert [j.id for j in listed.data] == [waiting.id, job.id] and listed.has_more


def test_a_job_that_fails_says_where(client: openai.OpenAI) -> None:
    file_id = _upload(client, [*ROWS, {"messages": "none"}])
    job = client.fine_tuning.jobs.create(model="base", training_file=file_id)
    job = _wait(client, job.id, lambda job: job.status == "failed")
    assert f"{file_id}.jsonl:9" in job.error.message and job.error.code == "invalid_value"
    (last,) = client.fine_tuning.jobs.list_events(job.id, limit=1).data
    assert last.level == "error" and last.message == job.error.message


def test_a_job_waits_while_memory_is_short(client: openai.OpenAI) -> None:
    FREE[0] = 0
    hyper = {"n_epochs": 1, "batch_size": 4}
    job = _teach(client, method=openai.NOT_GIVEN, hyperparameters=hyper)
    try:
        end = time.monotonic() + PATIENCE_S
        while not any("Paused" in e.message for e in client.fine_tuning.jobs.list_events(job.id).data):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert _said(client, "base")
    finally:
        FREE[0] = 1 << 40
    assert _wait(client, job.id, lambda job: job.status == "succeeded").trained_tokens > 0


def test_what_no_job_may_ask(client: openai.OpenAI) -> None:
    file_id = _upload(client, ROWS)
    good: dict[str, Any] = {"model": "base", "training_file": file_id}
    with pytest.raises(openai.NotFoundError, match="no file 'file-x'"):
        client.fine_tuning.jobs.create(**{**good, "training_file": "file-x"})
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4o'"):
        client.fine_tuning.jobs.create(**{**good, "model": "gpt-4o"})
    for changes, words in (
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "integrations"),
        ({"method": {"type": "dpo"}}, "only 'supervised'"),
        ({"method": {"type": "supervised", "dpo": {"hyperparameters": {"beta": 0.1}}}}, "method.dpo"),
        ({"method": {"type": "supervised", "supervised": {"hyperparameters": {"beta": 1}}}}, "beta"),
        ({"suffix": "a@b"}, "suffix"),
        ({"hyperparameters": {"n_epochs": 0}}, "n_epochs"),
        ({"extra_body": {"lora": {"rank": 0}}}, "lora.rank"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            client.fine_tuning.jobs.create(**good, **changes)
    with pytest.raises(openai.NotFoundError):
        client.fine_tuning.jobs.retrieve("ftjob-x")


def test_another_start_serves_what_was_trained(place: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny.write(other / "base", "llama", max_position_embeddings=1024)
    first = _start(other)
    client = openai.OpenAI(base_url=f"{first.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    done = _wait(client, _teach(client).id, lambda job: job.status == "succeeded")
    hyper = {"n_epochs": 1000, "batch_size": 1}
    unfinished = _teach(client, method=openai.NOT_GIVEN, hyperparameters=hyper)
    _wait(client, unfinished.id, lambda job: job.status == "running")
    first.stop()
    second = _start(other)
    try:
        client = openai.OpenAI(base_url=f"{second.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        assert _said(client, done.fine_tuned_model) == "yo!"
        job = client.fine_tuning.jobs.retrieve(unfinished.id)
        assert job.status == "failed" and job.error is not None and job.error.code == "server_stopped"
        assert len(client.files.list().data) == 3  # two of rows, one of figures
        assert client.models.delete(done.fine_tuned_model).deleted
        with pytest.raises(openai.NotFoundError):
            _said(client, done.fine_tuned_model)
        with pytest.raises(openai.BadRequestError, match="only adapters are deleted"):
            client.models.delete("base")
    finally:
        second.stop()


def test_a_server_without_a_folder_says_so() -> None:
    with running() as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="--data-dir"):
            client.files.create(file=("a.jsonl", b"{}"), purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="--data-dir"):
            client.fine_tuning.jobs.create(model="stub", training_file="x")
