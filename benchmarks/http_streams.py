"""mlxserve's server against `mlx_lm.server`: the same model folder, the same streaming clients, in one run.

    python benchmarks/http_streams.py [--model FOLDER] [--clients 16 64] [--tokens 64] [--runs 1]

mlx_lm.server's --decode-concurrency and --prompt-concurrency are raised to the number of clients. Every client
sends one chat after the other over its own connection and reads the stream; what is measured is what it sees:
tokens a second of all together, and the time to its first token. Without --model the float32 SmolLM2 is used.
A last row holds our server against our engine alone (AsyncLLM in this process) on the same requests.

(Not called http.py: run as a script, that would hide Python's own `http` from everything in this folder.)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.table import Table  # first: it puts OpenBLAS in before MLX loads

import httpx  # isort: skip

from benchmarks.models import smollm2_folder

WORDS = [
    "river",
    "stone",
    "light",
    "window",
    "garden",
    "letter",
    "music",
    "winter",
    "bread",
    "mountain",
    "paper",
    "silver",
]
START_S = 300.0


@dataclass
class Seen:
    """What the clients saw. first_s: a request's time to its first token. failed: requests without an answer."""

    tokens: int = 0
    total_s: float = 0.0
    first_s: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s

    @property
    def median_first_s(self) -> float:
        return statistics.median(self.first_s)

    @property
    def late_first_s(self) -> float:
        """The 95th percentile."""
        ordered = sorted(self.first_s)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def prompt_of(client: int, turn: int) -> str:
    """A prompt of its own for every request, 20 to 60 words long."""
    start = (client * 7 + turn * 5) % len(WORDS)
    words = [WORDS[(start + i * (client + 1)) % len(WORDS)] for i in range(20 + (client * 13) % 40)]
    return f"Story {client}-{turn}. Write on: {' '.join(words)}"


def body_of(model: str, client: int, turn: int, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt_of(client, turn)}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def drive(url: str, model: str, clients: int, turns: int, tokens: int) -> Seen:
    """All clients at once, each its turns one after the other."""
    seen = Seen()
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=1800, limits=limits) as http:

        async def client(number: int) -> None:
            for turn in range(turns):
                await _ask(http, body_of(model, number, turn, tokens), seen)

        begun = time.perf_counter()
        await asyncio.gather(*(client(number) for number in range(clients)))
        seen.total_s = time.perf_counter() - begun
    return seen


async def _ask(http: httpx.AsyncClient, body: dict[str, Any], seen: Seen) -> None:
    begun = time.perf_counter()
    first, counted = None, 0
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if chunk.get("usage"):
                    counted = chunk["usage"]["completion_tokens"]
                if first is None and any(c["delta"].get("content") for c in chunk["choices"]):
                    first = time.perf_counter() - begun
    except httpx.HTTPError:
        seen.failed += 1
        return
    if first is None or not counted:
        seen.failed += 1
        return
    seen.first_s.append(first)
    seen.tokens += counted


@contextlib.contextmanager
def server(command: list[str], port: int) -> Iterator[str]:
    """A server as a child process, from its first sign of life to its end."""
    url = f"http://127.0.0.1:{port}"
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_S
        while True:
            if child.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{' '.join(command[:4])} did not start")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5).status_code < 500:
                    break
            time.sleep(0.2)
        yield url
    finally:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(30)
        child.kill()


def ours(folder: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "mlxserve", "serve", "--model", str(folder), "--port", str(port)]


def theirs(folder: Path, port: int, clients: int) -> list[str]:
    """mlx_lm.server, with the BLAS that we use on Linux loaded first."""
    program = "import mlxserve, runpy; runpy.run_module('mlx_lm.server', run_name='__main__', alter_sys=True)"
    raised = ["--decode-concurrency", str(clients), "--prompt-concurrency", str(clients)]
    return [sys.executable, "-c", program, "--model", str(folder), "--port", str(port), *raised]


def free_port() -> int:
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return int(line.getsockname()[1])


def measure(command: list[str], port: int, model: str, clients: int, turns: int, tokens: int) -> Seen:
    """One warm-up request, then the load."""
    with server(command, port) as url:
        asyncio.run(drive(url, model, 1, 1, 4))
        return asyncio.run(drive(url, model, clients, turns, tokens))


async def engine_alone(folder: Path, clients: int, turns: int, tokens: int) -> Seen:
    """The same requests straight into the engine."""
    from mlxserve.engine.aio import AsyncLLM
    from mlxserve.request import Request, SamplingParams

    llm = await AsyncLLM.start(str(folder))
    seen = Seen()
    params = SamplingParams(max_tokens=tokens, temperature=0).resolved()

    async def client(number: int, turns: int, measured: Seen) -> None:
        for turn in range(turns):
            messages = [{"role": "user", "content": prompt_of(number, turn)}]
            request = Request(f"{number}-{turn}", llm.tokenizer.encode_chat(messages), params)
            begun = time.perf_counter()
            first = None
            async for delta in llm.generate(request):
                if first is None and delta.text:
                    first = time.perf_counter() - begun
                measured.tokens += len(delta.token_ids)
            measured.first_s.append(first or 0.0)

    await client(10_000, 1, Seen())
    begun = time.perf_counter()
    await asyncio.gather(*(client(number, turns, seen) for number in range(clients)))
    seen.total_s = time.perf_counter() - begun
    await llm.close()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1, help="the median of so many is shown")
    options = parser.parse_args()
    folder = options.model or smollm2_folder()
    table = Table(
        "clients",
        "server",
        "tokens/s",
        "first token, s: median",
        "95 %",
        "failed",
        "against",
        "tokens/s",
        "first token: median",
        "95 %",
    )
    for clients in options.clients:
        _compare(table, folder, clients, options)
    table.print(f"HTTP, {folder.name}, {options.turns} chats a client, {options.tokens} tokens each")


def _compare(table: Table, folder: Path, clients: int, options: argparse.Namespace) -> None:
    load = (clients, options.turns, options.tokens)
    runs = range(options.runs)
    port = free_port()
    peer = _median([measure(theirs(folder, port, clients), port, str(folder), *load) for _ in runs])
    mine = _median([measure(ours(folder, port), port, folder.name, *load) for _ in runs])
    alone = _median([asyncio.run(engine_alone(folder, *load)) for _ in runs])
    for name, seen, other, against in (
        ("mlx_lm.server", peer, "", peer),
        ("mlxserve", mine, "mlx_lm.server", peer),
        ("mlxserve", mine, "its engine alone", alone),
    ):
        ratios = (
            seen.tokens_per_s / against.tokens_per_s,
            seen.median_first_s / against.median_first_s,
            seen.late_first_s / against.late_first_s,
        )
        table.add(
            clients,
            name,
            f"{seen.tokens_per_s:.1f}",
            f"{seen.median_first_s:.2f}",
            f"{seen.late_first_s:.2f}",
            seen.failed,
            other,
            *(f"{each:.2f}×" if other else "" for each in ratios),
        )


def _median(runs: list[Seen]) -> Seen:
    middle = statistics.median_low([seen.tokens_per_s for seen in runs])
    return next(seen for seen in runs if seen.tokens_per_s == middle)


if __name__ == "__main__":
    main()
