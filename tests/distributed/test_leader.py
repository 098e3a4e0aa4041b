"""Rank 0 when something goes wrong: with two stages in this process, each on a thread of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.distributed import collective
from mlxserve.distributed.adapters import pack
from mlxserve.distributed.channel import PeerLost, free_ports
from mlxserve.distributed.follower import Follower, serve_rank
from mlxserve.distributed.frames import Diverged, Kind
from mlxserve.distributed.leader import leader_engine
from mlxserve.distributed.rank import RankContext, join
from mlxserve.distributed.runners import StageRunner
from mlxserve.distributed.split import Split
from mlxserve.distributed.stages import make_stage
from mlxserve.engine.engine import Engine
from mlxserve.errors import DoesNotFit, EngineStopped, ModelInvalid, Unsupported
from mlxserve.models.adapters import read
from mlxserve.models.load import load_folder
from mlxserve.text.tokenizer import load_tokenizer
from tests import tiny
from tests.adapters import write_adapter
from tests.engine.harness import Answer, finish, request, run

SPLIT = Split.pipeline([2, 1])
TOKEN = b"a secret of these tests"


class Pair:
    """Two contexts, and rank 1's loop as a future."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = ThreadPoolExecutor(2)
        addresses = [("127.0.0.1", port) for port in free_ports(2)]
        joining = [self.pool.submit(join, rank, SPLIT, addresses, TOKEN, timeout_s=10.0) for rank in (0, 1)]
        self.contexts = [each.result() for each in joining]
        self.faults: list[tuple[int, str]] = []
        self.noticed = threading.Event()
        self.contexts[0].on_fault = self._note
        self.follower: Future[None] = Future()

    def _note(self, rank: int, sentence: str) -> None:
        self.faults.append((rank, sentence))
        self.noticed.set()

    def follow(self, serve: Callable[..., None] = serve_rank) -> None:
        """Rank 1, on another thread."""

        def work() -> None:
            loaded = load_folder(self.folder, LoadConfig())
            stage = make_stage(loaded.model, SPLIT.layers_of(1), 3)
            serve(self.contexts[1], loaded, stage)

        self.follower = self.pool.submit(work)

    def lead(self, **settings: Any) -> Engine:
        """Rank 0's engine, on this thread."""
        loaded = load_folder(self.folder, LoadConfig())
        stage = make_stage(loaded.model, SPLIT.layers_of(0), 3)
        config = EngineConfig(**{"page_size": 8, "step_tokens": 64, **settings})
        return leader_engine(self.contexts[0], loaded, load_tokenizer(self.folder), config, stage=stage)

    def close(self) -> None:
        for context in self.contexts:
            context.close()
        self.pool.shutdown()


@pytest.fixture
def pair(tiny_llama: Path) -> Iterator[Pair]:
    made = Pair(tiny_llama)
    yield made
    made.close()


def begin(engine: Engine) -> Answer:
    """A request under way: its first token is there."""
    answer = Answer()
    engine.add(request([1, 2, 3, 4], 40), answer)
    while not answer.tokens:
        engine.step()
    return answer


def fail(engine: Engine) -> EngineStopped:
    """What the next steps raise."""
    with pytest.raises(EngineStopped) as caught:
        finish(engine, 100)
    return caught.value


def test_it_serves_and_lets_go(pair: Pair) -> None:
    pair.follow()
    engine = pair.lead()
    (answer,) = run(engine, [request([5, 6, 7], 6)])
    assert len(answer.tokens) == 6 and engine.micro_batches == 2
    engine.close()
    pair.follower.result(10.0)
    assert not pair.faults


def test_a_rank_whose_step_fails_says_why(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    original = StageRunner._build

    def build(self: StageRunner, batch: Any) -> Any:
        if self.stage.last and batch.step == 3:
            raise ValueError("shapes differ")
        return original(self, batch)

    monkeypatch.setattr(StageRunner, "_build", build)
    pair.follow()
    engine = pair.lead()
    begin(engine)
    assert str(fail(engine)) == "Rank 1 failed (ValueError: shapes differ)."
    with pytest.raises(ValueError, match="shapes differ"):
        pair.follower.result(10.0)
    assert pair.noticed.wait(10.0) and pair.faults[0] == (1, "Rank 1 failed (ValueError: shapes differ).")
    with pytest.raises(EngineStopped, match="shapes differ"):  # and it stays that way
        engine.runner.embed([1, 2])


def test_a_rank_that_goes_away_is_named(pair: Pair) -> None:
    pair.follow()
    engine = pair.lead()
    begin(engine)
    pair.contexts[1].close()
    assert "Rank 1" in str(fail(engine))
    assert pair.noticed.wait(10.0) and pair.faults[0][0] == 1
    with pytest.raises(PeerLost, match="Rank 0"):
        pair.follower.result(10.0)


def test_a_rank_that_missed_a_step_is_found_out(pair: Pair) -> None:
    pair.follow()
    engine = pair.lead()
    begin(engine)
    engine.runner.crew._ledger.enter(99, b"a step that rank 1 never saw")  # type: ignore[attr-defined]
    stopped = fail(engine)
    assert isinstance(stopped, Diverged) and stopped.rank == 1
    with pytest.raises(Diverged):
        pair.follower.result(10.0)


def test_a_rank_that_claims_another_history_is_found_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    finish_step = Follower._finish

    def claim(self: Follower, kind: Kind, drawn: Any, digest: bytes) -> None:
        finish_step(self, kind, drawn, bytes(8) if drawn.batch.step == 2 else digest)

    monkeypatch.setattr(Follower, "_finish", claim)
    pair.follow()
    engine = pair.lead()
    begin(engine)
    stopped = fail(engine)
    assert isinstance(stopped, Diverged) and "seen at step 2" in str(stopped)


def test_a_silent_rank_is_not_waited_for_beyond_patience(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    going_on = threading.Event()
    monkeypatch.setattr(Follower, "_finish", lambda *_: going_on.wait(20.0))
    pair.contexts[0].patience_s = 0.2
    pair.follow()
    engine = pair.lead()
    engine.add(request([1, 2, 3], 4), Answer())
    stopped = fail(engine)
    going_on.set()
    assert isinstance(stopped, PeerLost) and "Rank 1 has not answered step 0 in 0.2 s" in str(stopped)


def test_a_failure_here_cannot_be_taken_back(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.follow()
    engine = pair.lead()
    begin(engine)

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.runner, "_build", broken)
    assert "failed on rank 0 (RuntimeError: out of memory)" in str(fail(engine))
    pair.contexts[0].close()
    with pytest.raises(PeerLost, match="Rank 0"):
        pair.follower.result(10.0)


def test_memory_that_is_short_on_another_rank(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise DoesNotFit("The smallest cache takes 9 bytes; 5 are free.", needed_bytes=9, available_bytes=5)

    monkeypatch.setattr("mlxserve.distributed.follower.plan_memory", full)
    pair.follow()
    with pytest.raises(DoesNotFit, match="Rank 1: The smallest cache") as caught:
        pair.lead()
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (9, 5)
    with pytest.raises(DoesNotFit):
        pair.follower.result(10.0)


def test_pages_are_as_many_as_the_poorest_rank_has(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "mlxserve.distributed.follower.machine_budget", lambda: mx.get_active_memory() + 100_000
    )
    pair.follow()
    engine = pair.lead()
    # One layer of 2 heads of 16 floats, keys and values, 8 tokens a page; 0.8 of what is free.
    assert engine.stats()["pages_total"] == 80_000 // (8 * 2 * 16 * 4 * 2)
    engine.close()


def test_a_disk_cache_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="--cache-dir"):
        pair.lead(cache_dir=tmp_path)


def _no_room(stack: object, adapter: object, what: str) -> None:
    raise DoesNotFit(f"{what} takes 9 bytes and 5 are free.", needed_bytes=9, available_bytes=5)


def test_an_adapter_that_fits_no_rank_is_refused_and_the_engine_goes_on(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.follow()
    engine = pair.lead()
    deeper, other = tiny.build("llama", num_hidden_layers=4), tiny.build("llama", intermediate_size=96)
    write_adapter(tmp_path / "deep", deeper, 1, endings=("o_proj",))
    write_adapter(tmp_path / "wide", other, 1, endings=("layers.2.mlp.down_proj",))
    with pytest.raises(ModelInvalid, match=r"layer model\.layers\.3\.self_attn\.o_proj does not exist"):
        engine.adapters.load("deep", tmp_path / "deep")
    full = write_adapter(tmp_path / "full", deeper, 1)
    (full / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "full"}))
    with pytest.raises(Unsupported, match="full fine-tuning is no adapter"):
        engine.adapters.load("full", full)
    with pytest.raises(ModelInvalid, match=r"model\.layers\.2\.mlp\.down_proj"):  # rank 1 says so
        engine.adapters.load("wide", tmp_path / "wide")
    small = write_adapter(tmp_path / "small", tiny.build("llama"), 1)
    with monkeypatch.context() as patch:
        patch.setattr("mlxserve.distributed.adapters.require_memory", _no_room)
        with pytest.raises(DoesNotFit, match="The adapter's part on rank 1 takes 9 bytes") as caught:
            engine.adapters.load("small", small)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (9, 5)
    assert not engine.adapters.listed and not engine.adapters.stack.nbytes
    (answer,) = run(engine, [request([5, 6, 7], 4)])
    assert len(answer.tokens) == 4
    engine.close()
    pair.follower.result(10.0)


def test_a_large_adapter_travels_in_several_frames(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxserve.distributed.adapters.LOT_BYTES", 3000)
    folder = write_adapter(tmp_path / "any", tiny.build("llama"), 1)
    assert len(list(pack("digest", read(folder)))) > 4
    pair.follow()
    engine = pair.lead()
    engine.adapters.load("any", folder)
    (answer,) = run(engine, [replace(request([5, 6, 7], 4), adapter="any")])
    engine.close()
    pair.follower.result(10.0)
    loaded = load_folder(pair.folder, LoadConfig())
    alone = Engine(loaded, load_tokenizer(pair.folder), EngineConfig())
    alone.adapters.load("any", folder)
    (expected,) = run(alone, [replace(request([5, 6, 7], 4), adapter="any")])
    assert answer.tokens == expected.tokens


def test_one_rank_needs_no_other(tiny_llama: Path) -> None:
    loaded = load_folder(tiny_llama, LoadConfig())
    alone = RankContext(0, Split.tensor(1))
    engine = leader_engine(alone, loaded, load_tokenizer(tiny_llama), EngineConfig())
    (answer,) = run(engine, [request([1, 2, 3], 4)])
    assert len(answer.tokens) == 4


def test_small_sums_are_gathered_and_large_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which form runs, by size; that both give the same is in test_running.py, between processes."""
    gathered: list[int] = []
    group = mx.distributed.init()
    monkeypatch.setattr(collective, "gather_sum", lambda x, group, stream: (gathered.append(x.nbytes), x)[1])
    collective.install(64)
    try:
        for count in (16, 17):
            mx.eval(mx.distributed.all_sum(mx.ones(count), group=group))
        mx.eval(mx.distributed.all_sum(mx.ones(4)))  # of no group of ours
    finally:
        collective.install(0)
    assert gathered == [64]
    assert not hasattr(mx.distributed.all_sum, "original")
