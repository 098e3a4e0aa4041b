"""Heartbeats on a clock of the test's own: silence, standstill, and pauses that are nobody's fault."""

from __future__ import annotations

import threading

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxserve.distributed.heartbeat import SERVING, STARTING_S, Beat, Monitor, Pulse
from mlxserve.distributed.integrity import IntegrityWatch, checksum
from tests.distributed.processes import WAIT_S, until

NAMES = ["rank 0 (a)", "rank 1 (b)", "rank 2 (c)"]


class Watched:
    """A monitor of three ranks, asked as often as it wants to be."""

    def __init__(self, deadline_s: float = 10.0) -> None:
        self.now = 100.0
        self.monitor = Monitor(NAMES, deadline_s, lambda: self.now)
        self.beats = [Beat(SERVING)] * 3

    def pass_time(self, seconds: float, silent: tuple[int, ...] = ()) -> str | None:
        """Let time pass while all but `silent` ranks beat; the fault that is found."""
        end = self.now + seconds
        while self.now < end:
            self.now += self.monitor.every_s
            for rank, beat in enumerate(self.beats):
                if rank not in silent:
                    self.monitor.hear(rank, beat)
            if fault := self.monitor.fault():
                return fault.sentence
        return None

    def all_at(self, step: int, *, begun: int | None = None, queued: bool = True) -> None:
        self.beats = [Beat(SERVING, step, step if begun is None else begun, queued)] * 3


def test_idle_ranks_that_beat_are_well() -> None:
    watched = Watched()
    watched.all_at(7, queued=False)
    assert watched.pass_time(1000) is None


def test_a_silent_rank_is_named_with_what_it_did_last() -> None:
    watched = Watched()
    watched.all_at(17, queued=False)
    assert watched.pass_time(2) is None
    assert watched.pass_time(9, silent=(2,)) is None
    found = watched.pass_time(9, silent=(2,))
    assert found == "Rank 2 (c) has given no sign of life for 10 s; it had completed step 17."


def test_a_rank_that_loads_may_be_silent_for_longer() -> None:
    watched = Watched()
    watched.beats = [Beat("loading")] * 3
    assert watched.pass_time(1) is None
    assert watched.pass_time(STARTING_S - 10, silent=(0, 1, 2)) is None
    assert "it was loading" in (watched.pass_time(30, silent=(1,)) or "")


def test_liveness_is_not_progress() -> None:
    """All beat, work is queued, no step ends: the rank that is behind is named."""
    watched = Watched()
    watched.all_at(5, begun=6)
    assert watched.pass_time(9) is None
    watched.beats[2] = Beat(SERVING, 6)
    watched.beats[1] = Beat(SERVING, 5)
    assert watched.pass_time(2 + watched.monitor.every_s) == (
        "Rank 1 (b) has completed no step for 10 s with work queued; it had completed step 5."
    )


def test_rank_0_that_begins_nothing_is_to_blame_itself() -> None:
    watched = Watched()
    watched.all_at(5)
    assert (watched.pass_time(30) or "").startswith("Rank 0 (a) has completed no step")


def test_no_step_is_due_while_an_adapter_is_put_on() -> None:
    watched = Watched()
    watched.all_at(5)
    assert watched.pass_time(5) is None
    watched.beats[0] = Beat(SERVING, 5, 5, queued=True, adapting=True)
    assert watched.pass_time(STARTING_S - 10) is None
    watched.all_at(5)
    assert watched.pass_time(9) is None, "the time of a step begins anew"
    assert "has completed no step for 10 s" in (watched.pass_time(9) or "")
    watched.beats[0] = Beat(SERVING, 5, 5, queued=True, adapting=True)
    assert "for 60 s" in (watched.pass_time(STARTING_S + 10) or "")


def test_slow_steps_get_twenty_times_their_usual_time() -> None:
    watched = Watched()
    for step in range(5):  # 4 s each
        watched.all_at(step)
        assert watched.pass_time(4) is None
    assert watched.pass_time(70) is None
    assert "for 80 s" in (watched.pass_time(20) or "")


def test_a_pause_of_the_watcher_is_nobodys_fault() -> None:
    """The Mac slept an hour: clocks jump, nobody could be heard."""
    watched = Watched()
    watched.all_at(3)
    assert watched.pass_time(5) is None
    watched.now += 3600
    assert watched.monitor.fault() is None
    watched.all_at(4)
    assert watched.pass_time(5) is None
    assert watched.pass_time(30, silent=(0, 1, 2)) is not None


def test_a_pulse_beats_by_itself() -> None:
    heard = []
    pulse = Pulse(lambda: Beat(SERVING, 3), heard.append, deadline_s=0.05)
    until(lambda: len(heard) > 2)
    pulse.stop()
    assert set(heard) == {Beat(SERVING, 3)}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint32])
def test_a_checksum_sees_one_bit(dtype: mx.Dtype) -> None:
    weight = mx.arange(6 * 5).reshape(6, 5).astype(dtype)
    other = mx.array(weight)
    other[3, 2] = other[3, 2] + 1
    mx.eval(weight, other)
    assert checksum(weight) == checksum(mx.array(weight)) != checksum(other)


def test_a_weight_that_changes_in_memory_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mx.eval(model.parameters())
    changed, done = [], threading.Event()
    watch = IntegrityWatch(model, lambda name: (changed.append(name), done.set()), sweep_s=0.02)
    until(lambda: watch.sweeps > 2)
    assert not changed
    weight = model.layers[1].weight
    model.layers[1].weight = weight + mx.array([1e-6] * 8)
    mx.eval(model.parameters())
    assert done.wait(WAIT_S)
    watch.stop()
    assert changed == ["layers.1.weight"]


def test_only_a_ranks_own_weights_are_looked_at() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mx.eval(model.parameters())
    changed: list[str] = []
    watch = IntegrityWatch(model, changed.append, sweep_s=0.02, only=["layers.0.weight"])
    until(lambda: watch.sweeps > 1)
    model.layers[1].weight = model.layers[1].weight + 1
    mx.eval(model.parameters())
    sweeps = watch.sweeps
    until(lambda: watch.sweeps > sweeps + 2)
    watch.stop()
    assert not changed
