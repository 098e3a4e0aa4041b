"""A TCP proxy that passes everything on after a delay: a slower network between processes of one machine."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

_CHUNK = 256 * 1024
Item = tuple[float, bytes]


class DelayProxy:
    """Listens on `port` of loopback and passes connections on to `target`, each byte `delay_s` late."""

    def __init__(self, target: tuple[str, int], delay_s: float) -> None:
        self._target, self._delay_s = target, delay_s
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """No new connections; those there are end with their ends."""
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listening.accept()
                threading.Thread(target=self._join, args=(caller,), daemon=True).start()

    def _join(self, caller: socket.socket) -> None:
        try:
            callee = socket.create_connection(self._target)
        except OSError:
            caller.close()
            return
        for sock in (caller, callee):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, sink in ((caller, callee), (callee, caller)):
            late: queue.SimpleQueue[Item] = queue.SimpleQueue()
            threading.Thread(target=self._read, args=(source, late), daemon=True).start()
            threading.Thread(target=_write, args=(sink, late), daemon=True).start()

    def _read(self, source: socket.socket, late: queue.SimpleQueue[Item]) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(_CHUNK)
            except OSError:
                data = b""
            late.put((time.perf_counter() + self._delay_s, data))


def _write(sink: socket.socket, late: queue.SimpleQueue[Item]) -> None:
    while True:
        due_s, data = late.get()
        time.sleep(max(due_s - time.perf_counter(), 0.0))
        with contextlib.suppress(OSError):
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)
