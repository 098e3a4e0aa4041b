"""Channels: frames arrive as they were sent, strangers do not get in, and whoever is lost is named."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.distributed import channel as module
from mlxserve.distributed.channel import (
    HEADER,
    MAGIC,
    Channel,
    Listener,
    PeerLost,
    Purpose,
    connect,
    free_ports,
)
from mlxserve.distributed.rank import join
from mlxserve.distributed.split import Split
from mlxserve.errors import EngineStopped

TOKEN = b"the secret of this launch"
HOST = "127.0.0.1"


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Rank 0's channel to rank 3, and rank 3's to rank 0."""
    listener = Listener((HOST, 0), TOKEN)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(connect, (HOST, listener.port), TOKEN, rank=3, peer=0, timeout_s=5.0)
        theirs, ours = listener.accept(5.0), calling.result()
    listener.close()
    yield theirs, ours
    theirs.close()
    ours.close()


def test_both_know_who_the_other_is(pair: tuple[Channel, Channel]) -> None:
    assert (pair[0].rank, pair[1].rank) == (3, 0)
    assert pair[0].purpose is pair[1].purpose is Purpose.CONTROL


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 255), st.integers(0, 2**64 - 1), st.lists(st.binary(max_size=99), max_size=3)
        ),
        max_size=5,
    )
)
def test_frames_arrive_whole_and_in_order(frames: list[tuple[int, int, list[bytes]]]) -> None:
    first, second = socket.socketpair()
    sender, receiver = _over(first), _over(second)
    for kind, step, parts in frames:
        sender.send(kind, step, *parts)
    for kind, step, parts in frames:
        got = receiver.receive(5.0)
        assert (got.kind, got.step, bytes(got.payload)) == (kind, step, b"".join(parts))
    assert not receiver.readable()
    sender.close()
    assert receiver.readable(5.0)
    receiver.close()


def _over(sock: socket.socket) -> Channel:
    """A channel over any socket; a pair of local ones has no TCP options to set."""
    taken = Channel.__new__(Channel)
    taken.rank, taken.purpose = 1, Purpose.CONTROL
    taken._in, taken._out, taken._sending = sock, sock.dup(), threading.Lock()
    return taken


def test_large_frames_and_both_directions_at_once(pair: tuple[Channel, Channel]) -> None:
    data = bytes(range(256)) * 40_000  # beyond any socket's buffer
    with ThreadPoolExecutor(2) as pool:
        sending = [pool.submit(end.send, 1, 7, data[:1000], memoryview(data)[1000:]) for end in pair]
        got = [end.receive(20.0) for end in pair]
        for each in sending:
            each.result()
    assert all(bytes(frame.payload) == data for frame in got)


def test_frames_of_several_threads_do_not_mix(pair: tuple[Channel, Channel]) -> None:
    with ThreadPoolExecutor(4) as pool:
        for value in range(64):
            pool.submit(pair[0].send, value, value, bytes([value]) * 3000)
        got = [pair[1].receive(20.0) for _ in range(64)]
    assert sorted(frame.kind for frame in got) == list(range(64))
    assert all(
        bytes(frame.payload) == bytes([frame.kind]) * 3000 and frame.step == frame.kind for frame in got
    )


def test_header_on_the_wire(pair: tuple[Channel, Channel]) -> None:
    pair[0].send(5, 258, b"abc")
    assert bytes(module._read(pair[1]._in, 16)) == bytes([3, 0, 0, 0, 5, 2, 1, 0, 0, 0, 0, 0, 0]) + b"abc"


def test_a_closed_peer_is_named(pair: tuple[Channel, Channel]) -> None:
    pair[1].close()
    with pytest.raises(PeerLost, match="Rank 3 closed its connection") as caught:
        pair[0].receive(5.0)
    assert caught.value.rank == 3
    with pytest.raises(PeerLost, match="Rank 3"):
        for _ in range(100):
            pair[0].send(1, 0, bytes(100_000))


def test_half_a_frame_is_a_lost_peer(pair: tuple[Channel, Channel]) -> None:
    pair[1]._out.sendall(HEADER.pack(100, 1, 1) + b"only a part")
    pair[1].close()
    with pytest.raises(PeerLost, match="Rank 3"):
        pair[0].receive(5.0)


def test_silence_beyond_a_deadline(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(PeerLost, match=r"Rank 3 has been silent for 0\.05 s"):
        pair[0].receive(0.05)


def test_a_peer_that_takes_nothing(pair: tuple[Channel, Channel]) -> None:
    pair[0]._out.settimeout(0.1)
    with pytest.raises(PeerLost, match="Rank 3 took nothing"):
        pair[0].send(1, 0, bytes(64 * 1024 * 1024))


def test_a_length_beyond_the_limit_is_not_believed(pair: tuple[Channel, Channel]) -> None:
    pair[1]._out.sendall(HEADER.pack(2**31, 1, 1))
    with pytest.raises(PeerLost, match="2,147,483,648 bytes"):
        pair[0].receive(5.0)


def test_closing_wakes_whoever_receives(pair: tuple[Channel, Channel]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair[0].receive)
        while not waiting.running():
            time.sleep(0.001)
        pair[0].close()
        with pytest.raises(PeerLost):
            waiting.result(10.0)


# -- who gets in -------------------------------------------------------------------------------------------


def test_another_secret_is_refused_on_both_sides() -> None:
    listener = Listener((HOST, 0), TOKEN)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(connect, (HOST, listener.port), b"another", rank=1, peer=0, timeout_s=5.0)
        with pytest.raises(EngineStopped, match="No rank connected"):
            listener.accept(0.5)
        with pytest.raises(PeerLost, match="Rank 0 was started with another secret than rank 1"):
            calling.result()
    listener.close()


def test_a_listener_that_only_pretends_is_found_out() -> None:
    """Whoever sends the caller's own proof back does not know the secret."""
    server = socket.create_server((HOST, 0))

    def pretend() -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(MAGIC + bytes(32))
            said = module._read(sock, 32 + 3 + 32)
            sock.sendall(said[-32:])

    with ThreadPoolExecutor(1) as pool, server:
        pool.submit(pretend)
        with pytest.raises(PeerLost, match="another secret"):
            connect((HOST, server.getsockname()[1]), TOKEN, rank=1, peer=0, timeout_s=5.0)


def test_proof_binds_rank_and_purpose() -> None:
    """A proof made for rank 1 does not let rank 2 in: RFC 2104 over nonces, rank and purpose."""
    listener = Listener((HOST, 0), TOKEN)
    with ThreadPoolExecutor(1) as pool, socket.create_connection((HOST, listener.port)) as sock:
        accepting = pool.submit(listener.accept, 0.5)
        theirs, ours = bytes(module._read(sock, 40))[8:], bytes(32)
        proof = hmac.new(TOKEN, b"caller" + theirs + ours + struct.pack("<HB", 1, 1), hashlib.sha256).digest()
        sock.sendall(ours + struct.pack("<HB", 2, 1) + proof)
        assert sock.recv(32) == b""
        with pytest.raises(EngineStopped):
            accepting.result()
    listener.close()


def test_strangers_do_not_keep_a_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GREETING_TIMEOUT_S", 0.1)
    listener = Listener((HOST, 0), TOKEN)
    address = (HOST, listener.port)
    silent = socket.create_connection(address)
    socket.create_connection(address).close()
    rude = socket.create_connection(address)
    rude.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(connect, address, TOKEN, rank=1, peer=0, timeout_s=10.0)
        accepted = listener.accept(10.0)
        assert accepted.rank == 1
        for each in (accepted, calling.result(), silent, rude, listener):
            each.close()


def test_connecting_waits_for_a_listener() -> None:
    (port,) = free_ports(1)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(connect, (HOST, port), TOKEN, rank=1, peer=0, timeout_s=10.0)
        time.sleep(0.15)
        listener = Listener((HOST, port), TOKEN)
        for each in (listener.accept(10.0), calling.result(), listener):
            each.close()


def test_nobody_there_is_an_error_with_the_address() -> None:
    (port,) = free_ports(1)
    with pytest.raises(PeerLost, match=rf"Rank 2 does not answer at 127\.0\.0\.1:{port} .*refused"):
        connect((HOST, port), TOKEN, rank=0, peer=2, timeout_s=0.2)


# -- who talks to whom -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["tensor:3", "pipeline:1,1,1,1"])
def test_every_rank_joins(text: str) -> None:
    split = Split.parse(text, 4)
    addresses = [(HOST, port) for port in free_ports(split.size)]
    with ThreadPoolExecutor(split.size) as pool:
        joining = [pool.submit(join, r, split, addresses, TOKEN, timeout_s=10.0) for r in range(split.size)]
        contexts = [each.result() for each in joining]
    for channel, context in zip(contexts[0].followers, contexts[1:], strict=True):
        assert channel.rank == context.rank
        channel.send(1, context.rank)
        assert context.control is not None and context.control.receive(5.0).step == context.rank
    for here, there in zip(contexts, contexts[1:]):
        if split.mode == "tensor":
            assert here.after is there.before is None
            continue
        assert here.after is not None and there.before is not None
        here.after.send(5, here.rank)
        assert there.before.receive(5.0).step == there.before.rank == here.rank
    for context in contexts:
        context.close()


def test_the_rank_that_is_missing_is_named() -> None:
    split = Split.tensor(3)
    addresses = [(HOST, port) for port in free_ports(3)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, 0, split, addresses, TOKEN, timeout_s=0.5)
        second = pool.submit(join, 1, split, addresses, TOKEN, timeout_s=5.0)
        with pytest.raises(EngineStopped, match=r"Rank 2 did not connect within 0\.5 s"):
            first.result()
        second.result().close()
