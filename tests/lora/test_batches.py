"""Batches: nothing lost, little padding, only real targets, the same order for the same seed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.lora.batches import make_batch, plan_epoch, width_of
from mlxserve.lora.data import Pair, Sample


def _sample(length: int, prompt: int, where: str = "f:1") -> Sample:
    targets = np.arange(length) >= prompt
    return Sample(where, np.arange(1, length + 1, dtype=np.int32), targets)


@given(st.lists(st.integers(2, 600), min_size=1, max_size=60), st.integers(32, 2048), st.booleans())
def test_every_row_is_in_exactly_one_batch(lengths: list[int], budget: int, packing: bool) -> None:
    """Fault 4 of mlx-lm: the remainder of an epoch was dropped."""
    batches = plan_epoch(np.array(lengths), budget=budget, seed=1, epoch=0, packing=packing)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        size = sum(lengths[i] - 1 for i in batch) if packing else _padded(lengths, batch)
        assert size <= budget or len(batch) == 1


def _padded(lengths: list[int], batch: list[int]) -> int:
    return len(batch) * max(width_of(lengths[i] - 1) for i in batch)


def test_eleven_rows_at_four_train_eleven() -> None:
    batches = plan_epoch(np.full(11, 10), budget=4096, seed=0, epoch=0, rows_per_batch=4)
    assert sorted(map(len, batches)) == [3, 4, 4]


def test_bucketing_pads_little_where_sorting_by_nothing_pads_much() -> None:
    """Fault 1 of mlx-lm: its sort reads lengths that are always 1, so rows stay in file order."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(20, 500, 1000)
    batches = plan_epoch(lengths, budget=4096, seed=0, epoch=0)
    padded = sum(len(b) * width_of(int(lengths[b].max()) - 1) for b in batches)
    waste = 1 - (lengths - 1).sum() / padded
    fours = lengths.reshape(-1, 4)
    unsorted_waste = 1 - fours.sum() / (4 * fours.max(1)).sum()
    assert waste < 0.1 < 0.3 < unsorted_waste


def test_order_is_by_seed_and_epoch() -> None:
    lengths = np.arange(10, 200)

    def plan(seed: int, epoch: int) -> list[list[int]]:
        return plan_epoch(lengths, budget=512, seed=seed, epoch=epoch)

    assert plan(1, 0) == plan(1, 0)
    assert plan(1, 0) != plan(1, 1)
    assert plan(1, 0) != plan(2, 0)


def test_no_padding_is_trained() -> None:
    """Fault 2 of mlx-lm: 9 tokens with a prompt of 6 counted 4 targets, not 3."""
    batch = make_batch([_sample(9, 6), _sample(40, 30)], [0, 1])
    assert batch.inputs.shape == (2, 40)
    assert batch.owners.tolist() == [0] * 3 + [1] * 10
    assert batch.targets[:3].tolist() == [7, 8, 9]
    flat = batch.inputs.reshape(-1)
    assert (flat[batch.rows] + 1 == batch.targets).all()  # tokens count up, so the next is one more


def test_packed_rows_predict_the_same_targets() -> None:
    samples = [_sample(9, 6), _sample(40, 30)]
    packed, padded = make_batch(samples, [0, 1], packing=True), make_batch(samples, [0, 1])
    assert packed.inputs.shape == (1, 8 + 39)
    assert packed.segments == ((0, 8), (8, 47))
    assert packed.targets.tolist() == padded.targets.tolist()
    assert (packed.inputs.reshape(-1)[packed.rows] + 1 == packed.targets).all()
    assert packed.padded_tokens == packed.real_tokens == padded.real_tokens


def test_pairs_put_the_chosen_first() -> None:
    pair = Pair(_sample(9, 6, "f:1"), _sample(12, 6, "f:1"))
    batch = make_batch([pair, pair], [0, 1])
    assert batch.inputs.shape[0] == 4
    assert np.bincount(batch.owners).tolist() == [3, 3, 6, 6]


@given(st.integers(1, 40_000))
def test_widths_are_few_and_close(length: int) -> None:
    width = width_of(length)
    assert length <= width <= max(length + 7, length * 1.125)


def test_packed_batches_hold_no_more_rows_than_asked() -> None:
    plan = plan_epoch(np.full(10, 5), budget=4096, seed=0, epoch=0, rows_per_batch=3, packing=True)
    assert sorted(map(len, plan)) == [1, 3, 3, 3] and sorted(sum(plan, [])) == list(range(10))
