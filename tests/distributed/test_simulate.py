"""The simulator against closed forms: one sequence, a full pipeline, a queue that is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxserve.distributed.estimate import HANDOVER_S, decode_seconds
from mlxserve.distributed.facts import Facts, Tensor
from mlxserve.distributed.hosts import Host
from mlxserve.distributed.simulate import COMPUTE_SHARE, LINK_BYTES_S, Machine, Work, arrivals, simulate
from mlxserve.distributed.split import Split
from mlxserve.errors import DoesNotFit, UsageError
from mlxserve.models.kvlayout import KvLayer


def model(sizes: tuple[int, ...] = (1, 1, 1, 1), share: float = 1.0, kv: int = 0) -> Facts:
    """Layers of so many GB in half precision."""
    tensors = tuple(
        Tensor(f"layers.{n}.w", size * 10**9, size * 5 * 10**8, n, "layer", share)
        for n, size in enumerate(sizes)
    )
    halves = {tensor.name: tensor.nbytes // 2 for tensor in tensors}
    return Facts("made up", {}, tensors, (KvLayer(kv),) * len(sizes), tensor_parallel={2: halves})


def hosts(count: int, flops: float = 1e15) -> tuple[Host, ...]:
    """Hosts of 100 GB/s that compute so fast that only reading counts."""
    return tuple(Host(str(n), memory_bytes=64 * 2**30, bandwidth=100e9, flops=flops) for n in range(count))


@pytest.mark.parametrize("split", [Split.tensor(1), Split.tensor(2), Split.pipeline([3, 1])])
@pytest.mark.parametrize("link", ["tcp", "rdma"])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_one_sequence_is_the_estimate(split: Split, link: str, share: float) -> None:
    facts, machines = model(share=share, kv=1000), hosts(split.size)
    seen = simulate(Machine(facts, split, machines, link), Work(prompt=1, answer=2, count=1))
    # The one gap is the step whose context is the prompt and the first token.
    assert seen.gap_s == pytest.approx(decode_seconds(facts, split, machines, link, context=2))
    assert seen.first_s[0] == pytest.approx(decode_seconds(facts, split, machines, link, context=0))


@pytest.mark.parametrize("layers", [[2, 2], [3, 1], [1, 1, 2], [1, 1, 1, 1]])
def test_a_full_pipeline_is_as_fast_as_its_slowest_stage(layers: list[int]) -> None:
    split = Split.pipeline(layers)
    stages = len(layers)
    machine = Machine(model(), split, hosts(stages))
    each = [held * 1e9 / 75e9 for held in layers]
    cycle = max(stages * max(each), sum(each) + stages * HANDOVER_S)
    steps = 400
    seen = simulate(machine, Work(prompt=1, answer=steps, count=stages))
    assert seen.tokens_per_s == pytest.approx(stages / cycle, rel=0.01)
    more = simulate(machine, Work(prompt=1, answer=steps, count=2 * stages), micro_batches=2 * stages)
    assert more.tokens_per_s == pytest.approx(1 / max(each), rel=0.01)  # the slowest stage never waits
    assert more.busy[each.index(max(each))] == pytest.approx(1.0, abs=0.01)


def test_one_micro_batch_leaves_all_but_one_stage_idle() -> None:
    split = Split.pipeline([1, 1, 1, 1])
    machine = Machine(model(), split, hosts(4))
    work = Work(prompt=1, answer=100, count=4)
    alone, full = simulate(machine, work, micro_batches=1), simulate(machine, work)
    # Reading weights dominates: four sequences in one batch take as long as one, in turn they overlap.
    assert alone.gap_s == pytest.approx(4 / 75 + 4 * HANDOVER_S, rel=1e-3)
    assert sum(alone.busy) < 1.0 < sum(full.busy)


def test_a_prompt_takes_its_operations() -> None:
    """1,024 tokens in two steps of 512, each 2 operations a parameter at 0.65 of peak."""
    facts = model()
    machine = Machine(facts, Split.tensor(1), hosts(1, flops=1e13))
    seen = simulate(machine, Work(prompt=1024, answer=1, count=1))
    assert seen.first_s[0] == pytest.approx(1024 * 2 * 2e9 / (COMPUTE_SHARE * 1e13))


def test_attention_grows_with_what_was_read() -> None:
    facts = replace(model(), config={"num_attention_heads": 8, "head_dim": 64}, kv=(KvLayer(1),) * 4)
    machine = Machine(facts, Split.tensor(1), hosts(1, flops=1e12))
    seen = simulate(machine, Work(prompt=1024, answer=1, count=1))
    attention = sum(4 * 512 * end * 4 * 8 * 64 for end in (512, 1024))
    assert seen.first_s[0] == pytest.approx((1024 * 4e9 + attention) / (COMPUTE_SHARE * 1e12))


def test_what_is_cached_is_not_read_again() -> None:
    machine = Machine(model(kv=1000), Split.tensor(1), hosts(1, flops=1e13))
    work = Work(prompt=5000, answer=2, count=1)
    cold, warm = simulate(machine, work), simulate(machine, replace(work, cached=5000))
    assert warm.gap_s == pytest.approx(cold.gap_s)
    assert warm.first_s[0] == pytest.approx(
        decode_seconds(model(kv=1000), Split.tensor(1), hosts(1), context=4999)
    )


@pytest.mark.parametrize("split", [Split.tensor(2), Split.pipeline([3, 1])])
def test_kv_is_counted_as_in_a_plan(split: Split) -> None:
    facts = replace(model(), kv=(KvLayer(1000), KvLayer(500, 128), None, KvLayer(1000)))
    machine = Machine(facts, split, hosts(2))
    for rank in range(2):
        layers, size = (None, 2) if split.mode == "tensor" else (split.layers_of(rank), 1)
        assert machine.kv_bytes(rank, 1000) == facts.kv_bytes(1000, layers, size)


def test_links_carry_what_goes_beyond_a_token() -> None:
    facts = replace(model(), hidden=1000)
    machine = Machine(facts, Split.tensor(2), hosts(2), "tcp")
    one = simulate(machine, Work(prompt=1, answer=1, count=1)).first_s[0]
    many = simulate(machine, Work(prompt=101, answer=1, count=1)).first_s[0]
    assert many - one == pytest.approx(2 * 4 * 100 * 1000 * 2 / LINK_BYTES_S["tcp"])


def test_a_queue_of_one_place_is_served_in_turn() -> None:
    """Room for one sequence: the n-th of four waits for n - 1 others, whole."""
    facts = model(kv=10**6)
    machine = Machine(facts, Split.tensor(1), hosts(1))
    free = int(64 * 2**30 * 0.75) - 3 * 10**9 - 4 * 10**9
    tokens = free // (4 * 2 * 10**6)
    work = Work(prompt=tokens - 2, answer=2, count=4)
    seen = simulate(machine, work)
    assert seen.at_once == 1
    assert [round(total / seen.total_s[0], 6) for total in seen.total_s] == [1, 2, 3, 4]
    with pytest.raises(DoesNotFit, match="has no room for"):
        simulate(machine, replace(work, prompt=2 * tokens))


def test_arrivals_are_poisson_and_repeatable() -> None:
    work = Work(prompt=1, answer=1, count=4000, rate=2.0, seed=1)
    times = arrivals(work)
    assert times == arrivals(work) != arrivals(replace(work, seed=2))
    assert times[-1] / 4000 == pytest.approx(0.5, rel=0.05)
    gaps = [b - a for a, b in zip(times, times[1:])]
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_a_queue_under_load_obeys_pollaczek_and_khinchine() -> None:
    """One place, a fixed service time s, arrivals at rate r: the mean wait is r s^2 / (2 (1 - r s))."""
    facts = model(sizes=(1,), kv=5 * 10**7)
    machine = Machine(facts, Split.tensor(1), hosts(1, flops=1e12))
    free = int(64 * 2**30 * 0.75) - 25 * 10**8  # weights, and what a rank works in
    prompt = free // (2 * 5 * 10**7) - 1
    alone = simulate(machine, Work(prompt=prompt, answer=1, count=1)).first_s[0]
    rate = 0.6 / alone
    seen = simulate(machine, Work(prompt=prompt, answer=1, count=6000, rate=rate, seed=3))
    assert seen.at_once == 1
    wait = sum(seen.first_s) / len(seen.first_s) - alone
    assert wait == pytest.approx(0.6 * alone / (2 * (1 - 0.6)), rel=0.1)


def test_hosts_without_figures_are_refused() -> None:
    with pytest.raises(UsageError, match="chip or the bandwidth"):
        Machine(model(), Split.tensor(1), (Host("a", memory_bytes=2**36),))


def test_percentiles() -> None:
    seen = simulate(Machine(model(), Split.tensor(1), hosts(1)), Work(prompt=600, answer=2, count=20))
    assert seen.first_s[0] <= seen.first_at(0.5) <= seen.first_at(0.95) == seen.first_s[18]
