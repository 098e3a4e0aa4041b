"""The agent: one small process on each host that starts that host's ranks, and never leaves one behind.

Knows: processes, their groups, their pipes, free ports. Does not know what a rank does, nor MLX.
Run as `python -m mlxserve.distributed.agent`, by ssh or directly. It takes messages (wire.py) on standard
input and answers on standard output:

    start    worker, argv, env, files, cwd, control →  pid
    tell     worker, message                        →  (to the worker's standard input)
    kill     worker, grace_s                        →  ended follows
    ports    count, address                         →  free ports, held open until `release`
    probe    targets                                →  those that cannot be reached
    release                                         →  done
    look                                            →  facts of this host, for `doctor`
    unasked: hello, said (a worker's message), wrote (its output), ended (its exit code)

When its input ends, for whatever reason (the launcher died, the connection broke), it ends every process
group it started, by SIGTERM and then SIGKILL, and leaves. Secrets come in `env`, so that no command line
shows them.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.distributed.handshake import Versions
from mlxserve.distributed.wire import LINE_LIMIT, decode, encode

CONTROL_FD = "MLXSERVE_CONTROL_FD"
GRACE_S = 2.0
_DRAIN_S = 2.0  # for output that is still in the pipes of an ended worker
_PROBE_S = 5.0
_DYING_S = 10.0  # for the kernel to end what was killed
_CHUNK = 65536

Send = Callable[[dict[str, Any]], None]


@dataclass(slots=True, eq=False)
class Worker:
    """A process group of ours: the group's id is its leader's process id."""

    name: str
    process: subprocess.Popen[bytes]
    watch: asyncio.Task[None]


class Agent:
    """Carries out messages; `send` takes answers and news. All on one event loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._workers: dict[str, Worker] = {}
        self._held: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, message: dict[str, Any]) -> None:
        """Carry out one message in the background; its answer carries the same id."""
        task = asyncio.ensure_future(self._answer(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"re": message.get("id")}
        try:
            work = getattr(self, f"_do_{message['do']}", None)
            if work is None:
                raise ValueError(f"this agent knows no '{message['do']}'")
            answer["ok"] = await work(message)
        except OSError as error:
            answer["error"] = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        except (ValueError, KeyError) as error:
            answer["error"] = str(error)
        self._send(answer)

    # -- workers -------------------------------------------------------------------------------------------

    async def _do_start(self, message: dict[str, Any]) -> dict[str, Any]:
        control = bool(message.get("control"))
        theirs = ours = -1
        if control:
            ours, theirs = os.pipe()
        folder = Path(tempfile.mkdtemp(prefix="mlxserve-"))
        env = {**os.environ, **message.get("env", {}), **_write_files(folder, message.get("files", {}))}
        cwd = message.get("cwd")
        try:
            process = subprocess.Popen(
                message["argv"],
                stdin=subprocess.PIPE if control else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**env, CONTROL_FD: str(theirs)} if control else env,
                cwd=cwd if cwd and os.path.isdir(cwd) else None,
                start_new_session=True,
                pass_fds=(theirs,) if control else (),
            )
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            if control:
                os.close(ours)
            raise
        finally:
            if control:
                os.close(theirs)
        name = message["worker"]
        watch = asyncio.ensure_future(self._watch(name, process, ours, folder))
        self._workers[name] = Worker(name, process, watch)
        return {"pid": process.pid}

    async def _watch(self, name: str, process: subprocess.Popen[bytes], control: int, folder: Path) -> None:
        """Pass on what a worker says and writes; when it has ended, sweep its group and say how."""
        readers = [
            asyncio.ensure_future(self._copy(name, "stdout", process.stdout)),
            asyncio.ensure_future(self._copy(name, "stderr", process.stderr)),
        ]
        if control >= 0:
            readers.append(asyncio.ensure_future(self._hear(name, control)))
        code = await _exit_code(process)
        _signal_group(process.pid, signal.SIGKILL)
        _, late = await asyncio.wait(readers, timeout=_DRAIN_S)
        for reader in late:
            reader.cancel()
        shutil.rmtree(folder, ignore_errors=True)
        self._workers.pop(name, None)
        self._send({"event": "ended", "worker": name, "code": code})

    async def _copy(self, name: str, stream: str, file: Any) -> None:
        reader = await _reader_of(file)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while chunk := await reader.read(_CHUNK):
            self._send({"event": "wrote", "worker": name, "stream": stream, "text": decoder.decode(chunk)})

    async def _hear(self, name: str, control: int) -> None:
        reader = await _reader_of(os.fdopen(control, "rb"))
        while line := await reader.readline():
            message = decode(line)
            if message is not None:
                self._send({"event": "said", "worker": name, "message": message})

    async def _do_tell(self, message: dict[str, Any]) -> None:
        worker = self._workers.get(message["worker"])
        if worker is None or worker.process.stdin is None:
            return
        with contextlib.suppress(ConnectionError):
            worker.process.stdin.write(encode(message["message"]))
            worker.process.stdin.flush()

    async def _do_kill(self, message: dict[str, Any]) -> None:
        worker = self._workers.get(message["worker"])
        if worker is not None:
            await _end([worker], float(message.get("grace_s", GRACE_S)))

    async def reap(self) -> None:
        """End every worker and its children; returns when they are gone."""
        self._release()
        await _end(list(self._workers.values()), GRACE_S)

    # -- ports ---------------------------------------------------------------------------------------------

    async def _do_ports(self, message: dict[str, Any]) -> list[int]:
        """Free ports of an address, held open so that `probe` elsewhere can reach them."""
        for _ in range(int(message["count"])):
            self._held.append(listen(message.get("address", "")))
        return [held.getsockname()[1] for held in self._held[-int(message["count"]) :]]

    async def _do_release(self, message: dict[str, Any]) -> None:
        self._release()

    def _release(self) -> None:
        for held in self._held:
            held.close()
        self._held.clear()

    async def _do_probe(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Which (address, port) of `targets` cannot be reached from here, and why."""
        results = await asyncio.gather(*(_reach(host, port) for host, port in message["targets"]))
        return [
            {"address": host, "port": port, "reason": reason}
            for (host, port), reason in zip(message["targets"], results)
            if reason
        ]

    async def _do_look(self, message: dict[str, Any]) -> dict[str, Any]:
        from mlxserve.distributed.look import look

        return await asyncio.to_thread(look)


def _write_files(folder: Path, files: dict[str, str]) -> dict[str, str]:
    """Texts as files that only this user reads; the paths, by the names of their environment variables."""
    for name, text in files.items():
        (folder / name).write_text(text)
    return {name: str(folder / name) for name in files}


def listen(address: str) -> socket.socket:
    """A listening socket on a free port of `address` ('' is every address of this host)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.bind((address, 0))
        held.listen()
    except OSError as error:
        held.close()
        raise OSError(f"cannot listen on {address or 'any address'}: {error.strerror or error}") from error
    return held


async def _reach(host: str, port: int) -> str:
    """'' if a connection is taken, else why not."""
    try:
        async with asyncio.timeout(_PROBE_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no answer in {_PROBE_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return ""


async def _end(workers: Sequence[Worker], grace_s: float) -> None:
    """SIGTERM to the groups, SIGKILL after `grace_s` (at once if 0); a stopped process takes the latter."""
    if grace_s > 0:
        for worker in workers:
            _signal_group(worker.process.pid, signal.SIGTERM)
        await _ended(workers, grace_s)
    for worker in workers:
        if not worker.watch.done():
            _signal_group(worker.process.pid, signal.SIGKILL)
    await _ended(workers, _DYING_S)


async def _ended(workers: Sequence[Worker], within_s: float) -> None:
    if workers:
        await asyncio.wait([worker.watch for worker in workers], timeout=within_s)


async def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """As soon as the process has ended, though its children may hold its pipes open."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended first
            loop.call_soon_threadsafe(ended.set_result, code)

    threading.Thread(target=wait, daemon=True).start()
    return await ended


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


async def _reader_of(file: Any) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    return reader


def _private_output() -> int:
    """Our answers' way out; whatever else writes to standard output goes to standard error from now on."""
    answers = os.dup(1)
    os.set_inheritable(answers, False)
    os.dup2(2, 1)
    return answers


async def run() -> None:
    """Serve until standard input ends or a stop signal comes."""
    answers = _private_output()
    agent = Agent(lambda message: _write_all(answers, encode(message)))
    serving = asyncio.ensure_future(_serve(agent, answers))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    await agent.reap()


async def _serve(agent: Agent, answers: int) -> None:
    hello = {"event": "hello", "versions": Versions.here().plain(), "pid": os.getpid()}
    _write_all(answers, encode({**hello, "host": socket.gethostname()}))
    reader = await _reader_of(sys.stdin.buffer)
    while line := await reader.readline():
        message = decode(line)
        if message is not None:
            agent.handle(message)


def _write_all(fd: int, data: bytes) -> None:
    """Write to a launcher that may be gone: then our input ends too, and that is acted on."""
    with contextlib.suppress(BrokenPipeError):
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:  # standard input and output are one socket, and it is full
                select.select([], [fd], [])


if __name__ == "__main__":
    asyncio.run(run())
