"""`mlxserve bench`: on a tiny model here, against real servers (ours and mlx-lm's), and its mistakes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from mlxserve.bench.scenarios import NAMES
from tests.bench.fakes import piece, scripted
from tests.cli.conftest import Run
from tests.conftest import ROOT

SMALL = (
    *("--clients", "2", "--requests", "4", "--tokens", "8", "--prompt-tokens", "20"),
    *("--prefix-tokens", "80", "--long-tokens", "120", "--seed", "7"),
)
MLX_LM = "import mlxserve, runpy; runpy.run_module('mlx_lm.server', run_name='__main__', alter_sys=True)"


def test_a_model_here(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    found, drawing = tmp_path / "a.json", tmp_path / "a.svg"
    said = run("bench", "-m", str(tiny_llama), *SMALL, "--json", str(found), "--svg", str(drawing))
    assert said.code == 0, said.err
    assert all(f"{name}  " in said.out for name in NAMES)
    report = json.loads(found.read_text())
    assert (report["counted_by"], report["sizes"]["seed"]) == ("usage", 7)
    by_name = {one["name"]: one for one in report["scenarios"]}
    assert not any(one["failures"] for one in report["scenarios"])
    assert all(r["tokens"] == 8 for r in by_name["throughput"]["requests"])
    # What was asked behind the shared system prompt came from the cache.
    assert by_name["prefix"]["figures"]["cached"]["value"] > 0.5
    # The byte tokenizer makes several tokens of a word; prompts are as long as they were asked for anyway.
    lengths = [r["prompt_tokens"] for r in by_name["throughput"]["requests"]]
    assert all(20 <= length <= 60 for length in lengths)
    assert drawing.read_text().startswith("<svg")
    again = run("bench", "-m", str(tiny_llama), *SMALL, "-s", "latency", "--against", str(found))
    assert "ratio to the other" in again.out and "prefix" not in again.out


def _free_port() -> int:
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return int(line.getsockname()[1])


@contextmanager
def server(*command: str) -> Iterator[str]:
    """A server as a child process, once it answers."""
    port = _free_port()
    settings = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, *command, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=settings,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert child.poll() is None, "the server has ended"
            try:
                if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield url
    finally:
        child.terminate()
        child.wait(30)


def test_our_own_server(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    """It tells its context and its usage; --body makes answers as long as asked for."""
    found = tmp_path / "a.json"
    with server("-m", "mlxserve", "serve", "--model", str(tiny_llama)) as url:
        said = run("bench", "--url", url, *SMALL, "--body", '{"ignore_eos": true}', "--json", str(found))
    assert said.code == 0, said.err
    assert "tokens counted by usage" in said.err
    report = json.loads(found.read_text())
    assert report["target"]["name"] == "llama" and not any(one["failures"] for one in report["scenarios"])
    assert all(r["tokens"] == 8 for r in report["scenarios"][1]["requests"])


def test_mlx_lms_server_gives_its_table(run: Run, tiny_llama: Path) -> None:
    with server("-c", MLX_LM, "--model", str(tiny_llama)) as url:
        said = run("bench", "--url", url, "-m", "default_model", *SMALL)
    assert said.code == 0, said.err
    assert all(f"{name}  " in said.out for name in NAMES)
    rows = {line.split("  ")[0]: line for line in said.out.splitlines()}
    assert "tokens/s" in said.out and "requests that failed" not in said.out
    assert len(rows) == 1 + len(NAMES)


def test_chunks_are_counted_where_no_usage_comes(run: Run) -> None:
    frames = [piece("a"), piece("b"), piece("c", "stop"), "data: [DONE]\n\n"]
    with scripted(lambda body: (200, frames), {"data": [{"id": "m"}]}) as (url, seen):
        said = run("bench", "--url", url, *SMALL, "-s", "throughput", "--api-key", "k")
    assert said.code == 0
    assert "tokens counted by chunks" in said.err
    assert {body["key"] for body in seen} == {"Bearer k"}


def test_own_prompts(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    talk = {"messages": [{"role": "user", "content": "mine too"}]}
    prompts.write_text(json.dumps({"prompt": "mine"}) + "\n" + json.dumps(talk) + "\n")
    with scripted(lambda body: (200, [piece("a"), piece("b")]), {"data": [{"id": "m"}]}) as (url, seen):
        said = run("bench", "--url", url, *SMALL, "-s", "throughput", "--prompts", str(prompts))
    assert said.code == 0
    asked = [body["messages"][0]["content"] for body in seen]
    assert asked.count("mine") == asked.count("mine too") == 2


def test_a_server_that_refuses_is_said_and_is_an_error(run: Run) -> None:
    def reply(body: dict) -> tuple[int, list]:
        warm = body["max_tokens"] == 4
        return (200, [piece("a")]) if warm else (400, ['{"error": {"message": "no such model"}}'])

    with scripted(reply, {"data": [{"id": "m"}]}) as (url, _):
        said = run("bench", "--url", url, *SMALL, "-s", "latency")
    assert said.code == 1
    assert "requests that failed" in said.out
    assert "No request was answered" in said.err and "no such model" in said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--url", "nowhere"), "--url must be like"),
        (("--url", "http://127.0.0.1:9"), "No server answers"),
        (("--body", "{}"), "--body is for --url"),
        (("--url", "http://a", "--body", "[1]"), "--body must be a JSON object"),
        (("--url", "http://a", "--quantize", "4"), "--quantize says how a model is loaded here"),
        (("--json", "/no/such/folder/a.json"), "no folder /no/such/folder"),
        (("--against", "/no/such.json"), "/no/such.json cannot be read"),
        (("--prompts", "/no/such.jsonl"), "/no/such.jsonl cannot be read"),
        (("--clients", "1"), "--clients"),
        (("-s", "speed"), "speed"),
    ],
)
def test_mistakes_are_one_sentence(run: Run, arguments: tuple[str, ...], words: str) -> None:
    said = run("bench", *arguments)
    assert said.code == 2
    assert words in said.err and "Traceback" not in said.err and said.out == ""
