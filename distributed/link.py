"""The launcher's end of an agent: one a host, over ssh or as a local process.

Knows: how an agent is started, asked and heard, and how to say why a host does not answer. Does not know
what ranks are for. Everything happens on one event loop; no MLX in here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from mlxserve.distributed.faults import HostUnreachable, LaunchFailed
from mlxserve.distributed.handshake import Versions
from mlxserve.distributed.hosts import Host
from mlxserve.distributed.wire import LINE_LIMIT, decode, encode

AGENT = ("-m", "mlxserve.distributed.agent")
CONNECT_S = 10
HELLO_S = 60.0
_ALIVE_S = 5  # ssh asks the other end so often whether it is there, and gives up after three silences
_CALL_S = 30.0
_LEAVE_S = 8.0
_SSH_FAILED = 255
_NOT_FOUND = 127

News = Callable[["Link", dict[str, Any]], None]


def is_local(host: Host) -> bool:
    """True where no ssh is needed: no name is given, or it is this machine's own."""
    target = host.ssh.rpartition("@")[2]
    return target in ("", "localhost", "127.0.0.1", "::1", socket.gethostname())


def agent_command(host: Host) -> list[str]:
    """How a host's agent is started. The interpreter is the one that runs here, unless the host names its own."""
    python = host.python or sys.executable
    if is_local(host):
        return [python, *AGENT]
    alive = ["-o", f"ServerAliveInterval={_ALIVE_S}", "-o", "ServerAliveCountMax=3"]
    connect = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", *alive]
    return [*connect, "--", host.ssh, shlex.join([python, *AGENT])]


class Link:
    """One agent. `on_news` is told what it says unasked, and {"event": "lost"} when it is gone.

    `pids` are the process groups that it started and that have not ended.
    """

    def __init__(self, host: Host, on_news: News) -> None:
        self.host = host
        self.pids: dict[str, int] = {}
        self.versions: Versions | None = None
        self._on_news = on_news
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last_words: deque[str] = deque(maxlen=5)
        self._hello: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None and self._hello.done()

    async def open(self, within_s: float = HELLO_S) -> Versions:
        """Start the agent and hear its greeting. Raises HostUnreachable with the reason."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *agent_command(self.host),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=LINE_LIMIT,
                start_new_session=True,
            )
        except OSError as error:
            raise HostUnreachable(f"{self.host.name} cannot be reached: {error}.") from None
        self._tasks = [asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._overhear())]
        try:
            hello = await asyncio.wait_for(asyncio.shield(self._hello), within_s)
        except TimeoutError:
            await self.close()
            raise HostUnreachable(f"{self.host.name} gave no sign within {within_s:g} s.") from None
        self.versions = Versions.read(hello.get("versions", {}))
        return self.versions

    async def call(self, do: str, *, within_s: float = _CALL_S, **fields: Any) -> Any:
        """Ask the agent for something and wait for its answer.

        Raises HostUnreachable where it is gone or silent, LaunchFailed with its own words.
        """
        if self._process is None or self._process.stdin is None or not self.alive:
            raise HostUnreachable(f"The connection to {self.host.name} has ended.")
        number = max(self._answers, default=0) + 1
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(encode({"id": number, "do": do, **fields}))
            await self._process.stdin.drain()
            found = await asyncio.wait_for(answer, within_s)
        except TimeoutError:
            raise HostUnreachable(f"{self.host.name} has not answered for {within_s:g} s.") from None
        except ConnectionError:
            raise HostUnreachable(f"The connection to {self.host.name} has ended.") from None
        finally:
            del self._answers[number]
        if "error" in found:
            raise LaunchFailed(f"{self.host.name}: {found['error']}.")
        return found["ok"]

    async def start(self, worker: str, argv: list[str], **fields: Any) -> int:
        """Start a process group on the host; its id."""
        pid: int = (await self.call("start", worker=worker, argv=argv, **fields))["pid"]
        self.pids[worker] = pid
        return pid

    def tell(self, worker: str, message: dict[str, Any]) -> None:
        """A line to a worker's standard input; nobody waits for it."""
        if self._process is not None and self._process.stdin is not None and self.alive:
            self._process.stdin.write(encode({"do": "tell", "worker": worker, "message": message}))

    async def close(self) -> None:
        """End the agent, and with it all that it started."""
        self._closing = True
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _LEAVE_S)
        if process.returncode is None:
            process.kill()
            await process.wait()
            await self.sweep()
        await asyncio.wait(self._tasks, timeout=_LEAVE_S)

    async def sweep(self) -> None:
        """Kill the groups of an agent that is gone itself and could not do it."""
        groups, self.pids = list(self.pids.values()), {}
        if not groups:
            return
        if is_local(self.host):
            for group in groups:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            return
        targets = " ".join(f"-{group}" for group in groups)
        command = [*agent_command(self.host)[:-1], f"kill -s KILL -- {targets}"]
        sweeper = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(sweeper.wait(), CONNECT_S)

    # -- what it says --------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message = decode(line)
            if message is None:
                self._last_words.append(line.decode("utf-8", "replace").strip())
            else:
                self._take(message)
        await self._gone()

    def _take(self, message: dict[str, Any]) -> None:
        if "re" in message:
            answer = self._answers.get(message["re"])
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif message.get("event") == "hello":
            if not self._hello.done():
                self._hello.set_result(message)
        else:
            if message.get("event") == "ended":
                self.pids.pop(message["worker"], None)
            self._on_news(self, message)

    async def _overhear(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while line := await self._process.stderr.readline():
            self._last_words.append(line.decode("utf-8", "replace").strip())

    async def _gone(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.wait(self._tasks[1:], timeout=_LEAVE_S)  # its last words say why
        error = HostUnreachable(self._why(code))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        if not self._hello.done():
            self._hello.set_exception(error)
        elif not self._closing:
            await self.sweep()
            self._on_news(self, {"event": "lost", "reason": error.message})

    def _why(self, code: int) -> str:
        """Why the connection ended, in words, from ssh's exit code and last line."""
        name, words = self.host.name, next((line for line in reversed(self._last_words) if line), "")
        python = self.host.python or sys.executable
        if "No module named" in words:
            return f"mlxserve is not installed for {python} on {name}, or is another version ({words})."
        if self._hello.done():
            return (
                f"The connection to {name} broke (exit code {code})" + (f": {words}" if words else "") + "."
            )
        if code == _SSH_FAILED and not is_local(self.host):
            reason = words.rstrip(".") or "no reason given"
            return f"{name} cannot be reached by 'ssh {self.host.ssh}': {reason}."
        if code == _NOT_FOUND:
            return f'There is no {python} on {name}; name its interpreter as "python" in the hostfile.'
        return f"The agent on {name} ended with exit code {code}" + (f": {words}" if words else "") + "."
