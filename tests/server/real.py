"""The real engine behind a server, with a tiny random model: how the tests start and ask it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from mlxserve.config import EngineConfig, LoadConfig, ServerConfig
from mlxserve.server.local import LocalLoader
from tests import tiny
from tests.server.stub import TEMPLATE, RunningServer

HI = [{"role": "user", "content": "Say hi"}]
ENGINE = EngineConfig(max_sequences=32, cache_bytes=8 * 1024 * 1024)


def write_model(parent: Path) -> Path:
    """A folder of the model `tiny-chat`."""
    folder = tiny.write(parent / "tiny-chat", "llama", max_position_embeddings=1024)
    tiny.write_tokenizer(folder, TEMPLATE)
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 30, "eos_token_id": 257}')
    return folder


def start(*folders: Path) -> RunningServer:
    """A server that has these models; the caller stops it."""
    loader = LocalLoader([str(folder) for folder in folders], LoadConfig(), ENGINE, on_cpu=True)
    return RunningServer(loader, ServerConfig(keep_alive_s=None), budget_bytes=1 << 30)


def client_of(server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=120, verify=False)


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json={"model": "tiny-chat", "messages": HI, **body})
    assert response.status_code == 200, response.text
    return response.json()


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]
