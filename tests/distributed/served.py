"""A launched server, and what one process would answer in its place."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from mlxserve import LLM, SamplingParams
from tests import tiny
from tests.distributed.processes import WAIT_S, Marked, until

CONTEXT = 1024
# In every rank, SIGUSR1 changes one weight in memory, as a failing memory chip would.
CORRUPT = """
import signal

def corrupt(*_):
    import gc
    import mlx.core as mx
    import mlx.nn as nn
    for thing in gc.get_objects():
        if isinstance(thing, nn.Module) and "layers" in thing:
            layer = thing["layers"][-1]["mlp"]["down_proj"]
            weight = mx.array(layer["weight"])
            weight[0, 0] = weight[0, 0] + 0.5
            mx.eval(weight)
            layer["weight"] = weight

signal.signal(signal.SIGUSR1, corrupt)
"""


class Server:
    """`mlxserve launch … -- serve`, once it listens."""

    def __init__(
        self, marked: Marked, model: Path, *options: str, serve: Sequence[str] = (), setup: str = CORRUPT
    ) -> None:
        self.marked = marked
        (marked.folder / "sitecustomize.py").write_text(setup)
        command = ["serve", "--model", str(model), "--port", "0", "--drain", "1", *serve]
        self.process = marked.start("launch", *options, "--", *command)
        self.said: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        found = until(
            lambda: [m for line in self.said if (m := re.search(r"http://\S+", line))] or self._ended()
        )
        self.url = found[0].group()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said += self.process.stderr

    def _ended(self) -> bool:
        assert self.process.poll() is None, "".join(self.said)
        return False

    def rank(self, number: int) -> int:
        """The process id of a rank."""
        (pid,) = [
            pid
            for pid in self.marked.alive()
            if b"distributed.member" in Path(f"/proc/{pid}/cmdline").read_bytes()
            and f"MLX_RANK={number}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        ]
        return pid

    def health(self) -> tuple[int, dict[str, Any]]:
        answer = httpx.get(f"{self.url}/health", timeout=WAIT_S)
        return answer.status_code, answer.json()

    def ask(self, text: str, tokens: int = 12, model: str = "llama", **settings: Any) -> Any:
        """A chat's answer, greedy."""
        return self.client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": text}],
            max_tokens=tokens,
            temperature=0,
            logit_bias={str(end): -100 for end in ENDS},
            **settings,
        )

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


@contextmanager
def launched(folder: Path, model: Path, *options: str, serve: Sequence[str] = ()) -> Iterator[Server]:
    """A server on two ranks by tensors; it has to end well, and nothing of it may be left."""
    marked = Marked(folder)
    try:
        server = Server(
            marked, model, "-n", "2", "--split", "tensor:2", "--deadline", "6", *options, serve=serve
        )
        yield server
        assert server.stop() == 0, "".join(server.said)
        marked.nobody_is_left()
    finally:
        marked.clean()


ENDS = range(256, 256 + len(tiny.BYTE_SPECIALS))


def truth(alone: LLM, text: str, tokens: int = 12, adapter: str | None = None, **settings: Any) -> str:
    """What one process answers."""
    params = SamplingParams(
        max_tokens=tokens, temperature=0, logit_bias=dict.fromkeys(ENDS, -100.0), **settings
    )
    return alone.chat([{"role": "user", "content": text}], params, adapter=adapter)[0].text
