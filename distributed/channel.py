"""A framed TCP connection between two ranks, and how a rank proves that it belongs.

Knows: sockets, frames, deadlines, a shared secret. Does not know what a frame means, nor MLX.

    frame    length u32 | kind u8 | step u64 | payload            little-endian, payload of `length` bytes

    greeting, before the first frame:
      listener → caller     magic (8) | nonce (32)
      caller → listener     nonce (32) | rank u16 | purpose u8 | HMAC (32) over both nonces, rank, purpose
      listener → caller     HMAC (32) over both nonces

HMAC is SHA-256 keyed with the secret (RFC 2104), so neither side shows it and neither can replay the
other. Frames themselves are neither signed nor encrypted: ranks share a network that its owner trusts.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from mlxserve.errors import EngineStopped

MIB = 1024 * 1024
HEADER = struct.Struct("<IBQ")
MAGIC = b"mlxserv1"
_CALLER = struct.Struct("<32sHB32s")
_NONCE_BYTES = _MAC_BYTES = 32
# No frame is larger: a length beyond it is not believed.
MOST_BYTES = 1024 * MIB
# A peer that takes no byte for so long is lost. Silence while it computes is not counted here.
SEND_TIMEOUT_S = 60.0
# A caller that does not finish its greeting in this time is a stranger.
GREETING_TIMEOUT_S = 5.0
_RETRY_S = 0.05


class PeerLost(EngineStopped):
    """A connection to another rank broke, or the rank was silent beyond a deadline. `rank` names it."""

    code = "peer_lost"

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Purpose(IntEnum):
    """What a connection is for: steps from rank 0, or hidden states from one stage to the next."""

    CONTROL = 1
    HANDOVER = 2


@dataclass(frozen=True, slots=True)
class Frame:
    """kind, step: whatever the sender meant by them. payload: bytes that nobody else holds."""

    kind: int
    step: int
    payload: bytearray


class Channel:
    """One connection to rank `rank`. One thread may receive while another sends; sending takes a lock."""

    def __init__(self, sock: socket.socket, rank: int, purpose: Purpose = Purpose.CONTROL) -> None:
        self.rank = rank
        self.purpose = purpose
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Two objects on one connection: a timeout belongs to the object, and each direction has its own.
        self._in, self._out = sock, sock.dup()
        self._out.settimeout(SEND_TIMEOUT_S)
        self._sending = threading.Lock()

    def send(self, kind: int, step: int, *parts: bytes | bytearray | memoryview) -> None:
        """Send one frame whose payload is the parts, one after another. Raises PeerLost."""
        views = [memoryview(part).cast("B") for part in parts]
        header = HEADER.pack(sum(len(view) for view in views), kind, step)
        try:
            with self._sending:
                if sum(len(view) for view in views) <= 64 * 1024:
                    self._out.sendall(b"".join([header, *views]))
                else:
                    for view in (memoryview(header), *views):
                        self._out.sendall(view)
        except TimeoutError:
            raise self._lost(f"took nothing for {SEND_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise self._lost(f"closed its connection ({_reason(error)})") from None

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next frame, waited for at most `timeout_s` (None: for ever). Raises PeerLost.

        After a deadline has passed the connection is of no more use.
        """
        try:
            self._in.settimeout(timeout_s)  # fails where another thread has closed the channel
            length, kind, step = HEADER.unpack(_read(self._in, HEADER.size))
            if length > MOST_BYTES:
                raise self._lost(f"sent a frame of {length:,} bytes, and {MOST_BYTES:,} is the most")
            return Frame(kind, step, _read(self._in, length))
        except TimeoutError:
            raise self._lost(f"has been silent for {timeout_s:g} s") from None
        except OSError as error:
            raise self._lost(f"closed its connection ({_reason(error)})") from None

    def readable(self, timeout_s: float = 0.0) -> bool:
        """True once a frame has begun to arrive, or the connection has ended."""
        return bool(select.select([self._in], [], [], timeout_s)[0])

    def close(self) -> None:
        """End the connection; a `receive` that waits in another thread raises PeerLost."""
        with contextlib.suppress(OSError):
            self._in.shutdown(socket.SHUT_RDWR)
        self._in.close()
        self._out.close()

    def _lost(self, what: str) -> PeerLost:
        return PeerLost(f"Rank {self.rank} {what}.", rank=self.rank)


class Listener:
    """Takes connections from ranks that know the secret; others are closed without a word."""

    def __init__(self, address: tuple[str, int], token: bytes) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family, backlog=64)
        self._token = token

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def accept(self, timeout_s: float) -> Channel:
        """The next rank's connection. Raises EngineStopped if none comes in time."""
        for left_s in _until(timeout_s):
            self._socket.settimeout(left_s)
            try:
                sock, _ = self._socket.accept()
            except TimeoutError:
                break
            channel = self._greet(sock, min(left_s, GREETING_TIMEOUT_S))
            if channel is not None:
                return channel
        raise EngineStopped(f"No rank connected within {timeout_s:g} s.")

    def _greet(self, sock: socket.socket, timeout_s: float) -> Channel | None:
        """The caller's channel if it knows the secret, else None and the socket closed."""
        sock.settimeout(timeout_s)
        ours = secrets.token_bytes(_NONCE_BYTES)
        try:
            sock.sendall(MAGIC + ours)
            theirs, rank, purpose, mac = _CALLER.unpack(_read(sock, _CALLER.size))
            if hmac.compare_digest(mac, _caller_mac(self._token, ours, theirs, rank, purpose)):
                sock.sendall(_listener_mac(self._token, ours, theirs))
                return Channel(sock, rank, Purpose(purpose))
        except (OSError, ValueError):
            pass
        sock.close()
        return None

    def close(self) -> None:
        self._socket.close()


def connect(
    address: tuple[str, int],
    token: bytes,
    *,
    rank: int,
    peer: int,
    purpose: Purpose = Purpose.CONTROL,
    timeout_s: float,
) -> Channel:
    """Call rank `peer` at `address` as rank `rank`, again and again until it listens. Raises PeerLost."""
    problem: Exception | None = None
    for left_s in _until(timeout_s):
        try:
            sock = socket.create_connection(address, left_s)
        except OSError as error:
            problem = error
        else:
            try:
                _introduce(sock, token, rank, peer, purpose, left_s)
                return Channel(sock, peer, purpose)
            except OSError as error:
                problem = error
                sock.close()
            except BaseException:
                sock.close()
                raise
        time.sleep(_RETRY_S)
    where = f"{address[0]}:{address[1]}"
    raise PeerLost(
        f"Rank {peer} does not answer at {where} ({_reason(problem)}) after {timeout_s:g} s.", rank=peer
    )


def _introduce(
    sock: socket.socket, token: bytes, rank: int, peer: int, purpose: Purpose, timeout_s: float
) -> None:
    """The caller's half of the greeting. OSError where trying again may help."""
    sock.settimeout(timeout_s)
    banner = _read(sock, len(MAGIC) + _NONCE_BYTES)
    theirs, ours = bytes(banner[len(MAGIC) :]), secrets.token_bytes(_NONCE_BYTES)
    if banner[: len(MAGIC)] != MAGIC:
        raise PeerLost(f"Whatever answers for rank {peer} is not a rank of this version.", rank=peer)
    mac = _caller_mac(token, theirs, ours, rank, purpose)
    sock.sendall(_CALLER.pack(ours, rank, purpose, mac))
    try:
        answer = bytes(_read(sock, _MAC_BYTES))
    except ConnectionError:
        answer = b""
    if not hmac.compare_digest(answer, _listener_mac(token, theirs, ours)):
        raise PeerLost(f"Rank {peer} was started with another secret than rank {rank}.", rank=peer)


def _caller_mac(token: bytes, listener: bytes, caller: bytes, rank: int, purpose: int) -> bytes:
    said = b"caller" + listener + caller + struct.pack("<HB", rank, purpose)
    return hmac.new(token, said, hashlib.sha256).digest()


def _listener_mac(token: bytes, listener: bytes, caller: bytes) -> bytes:
    return hmac.new(token, b"listener" + listener + caller, hashlib.sha256).digest()


def _read(sock: socket.socket, count: int) -> bytearray:
    """Exactly `count` bytes; ConnectionError at the end of the stream."""
    data = bytearray(count)
    view, have = memoryview(data), 0
    while have < count:
        got = sock.recv_into(view[have:])
        if not got:
            raise ConnectionResetError("end of the stream")
        have += got
    return data


def _until(timeout_s: float) -> Iterator[float]:
    """What is left of `timeout_s`, again and again until nothing is; once at least."""
    end = time.monotonic() + timeout_s
    left_s = timeout_s
    while left_s > 0:
        yield left_s
        left_s = end - time.monotonic()


def _reason(error: Exception | None) -> str:
    return getattr(error, "strerror", None) or str(error)


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Ports of this machine that nobody listens on now."""
    held = [socket.create_server((address, 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in held]
    for sock in held:
        sock.close()
    return ports


def close_all(channels: Sequence[Any]) -> None:
    """Close what is there."""
    for channel in channels:
        if channel is not None:
            channel.close()
