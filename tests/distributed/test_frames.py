"""Frames: what one rank says is what another hears, and whoever hears something else notices."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.config import EngineConfig
from mlxserve.distributed.frames import (
    DIGEST_BYTES,
    Diverged,
    Ledger,
    Room,
    Start,
    decode_batch,
    decode_error,
    decode_masks,
    decode_room,
    decode_start,
    decode_tokens,
    encode_batch,
    encode_error,
    encode_masks,
    encode_plain,
    encode_tokens,
    for_sampler,
)
from mlxserve.distributed.handover import Packed, unpack
from mlxserve.engine.batch import Admission, Batch, Segment
from mlxserve.errors import DoesNotFit, EngineStopped
from mlxserve.request import SamplingParams, TokenLogprob

SMALL = st.integers(0, 2**31 - 1)
TOKENS = st.lists(st.integers(0, 300_000), max_size=6)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 99),
    temperature=st.floats(0, 5),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 99),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.1, 10),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 300_000), st.floats(-100, 100), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    stop=st.just(("end",)),
    logprobs=st.none() | st.integers(0, 20),
)
ADMISSIONS = st.builds(
    Admission,
    slot=SMALL,
    params=PARAMS,
    seed=st.integers(0, 2**64 - 1),
    history=TOKENS,
    prompt_tokens=SMALL,
    adapter=st.none() | st.text(max_size=5),
    state_slot=st.none() | SMALL,
)
SEGMENTS = st.builds(
    Segment,
    slot=SMALL,
    start=SMALL,
    count=SMALL,
    tokens=st.none() | TOKENS,
    sample=st.booleans(),
    draw=SMALL,
)
PAGES = st.lists(st.tuples(SMALL, SMALL, SMALL, SMALL), max_size=4)
STATES = st.lists(st.tuples(SMALL, SMALL), max_size=4)
BATCHES = st.builds(
    Batch,
    step=st.integers(0, 2**63),
    admitted=st.lists(ADMISSIONS, max_size=3),
    pages=PAGES,
    copies=st.lists(st.tuples(SMALL, SMALL, SMALL), max_size=4),
    restores=STATES,
    segments=st.lists(SEGMENTS, max_size=5),
    checkpoints=STATES,
    later_pages=PAGES,
)


@settings(max_examples=40)
@given(BATCHES)
def test_a_batch_comes_back(batch: Batch) -> None:
    back = decode_batch(batch.step, encode_batch(batch))
    for mine, theirs in zip(batch.admitted, back.admitted, strict=True):
        assert theirs.params == for_sampler(mine.params)
        for name in ("temperature", "top_k", "top_p", "min_p", "logprobs", "logit_bias"):
            assert getattr(theirs.params, name) == getattr(mine.params, name)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            assert getattr(theirs.params, name) == getattr(mine.params, name)
        for name in ("slot", "seed", "history", "prompt_tokens", "adapter", "state_slot"):
            assert getattr(theirs, name) == getattr(mine, name)
    for name in ("step", "pages", "copies", "restores", "segments", "checkpoints", "later_pages"):
        assert getattr(back, name) == getattr(batch, name)


def test_a_decoding_step_is_small() -> None:
    few = Batch(900, segments=[Segment(slot, 500 + slot, 1, None, True, 40) for slot in range(4)])
    many = Batch(900, segments=[Segment(slot, 4000 + slot, 1, None, True, 300) for slot in range(256)])
    many.pages = [(0, slot, 250, 3000 + slot) for slot in range(16)]
    assert len(encode_batch(few)) <= 100
    assert len(encode_batch(many)) <= 4096


def test_settings_of_a_generation_that_no_sampler_reads_stay_at_home() -> None:
    params = SamplingParams(stop=["secret words"], schema={"type": "object"}, max_tokens=7, temperature=0.5)
    body = encode_batch(Batch(1, admitted=[Admission(0, params.resolved(), 1, (), 3)]))
    assert b"secret" not in body and b"object" not in body


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b"\xc1" + b[1:], lambda b: b"", lambda b: b"\x91\xc3"]
)
def test_what_is_no_batch_is_refused(damage) -> None:  # type: ignore[no-untyped-def]
    body = encode_batch(Batch(3, segments=[Segment(1, 2, 1, [5], True)]))
    with pytest.raises(EngineStopped, match="step 3"):
        decode_batch(3, damage(body))


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_ledgers_that_saw_the_same_agree(bodies: list[bytes]) -> None:
    sending, receiving = Ledger(), Ledger()
    for step, body in enumerate(bodies):
        payload = bytearray(sending.enter(step, body) + body)
        assert len(payload) == DIGEST_BYTES + len(body)
        assert bytes(receiving.expect(step, payload, 1)) == body


@pytest.mark.parametrize("fault", ["missed", "repeated", "changed", "swapped", "renumbered"])
def test_a_ledger_notices(fault: str) -> None:
    sending, receiving = Ledger(), Ledger()
    frames = [
        (step, bytearray(sending.enter(step, body) + body)) for step, body in enumerate([b"a", b"b", b"c"])
    ]
    if fault == "missed":
        del frames[1]
    elif fault == "repeated":
        frames.insert(1, frames[0])
    elif fault == "changed":
        frames[1][1][-1] ^= 1
    elif fault == "swapped":
        frames[0], frames[1] = frames[1], frames[0]
    else:
        frames[1] = (7, frames[1][1])
    with pytest.raises(Diverged, match="Rank 2 and rank 0 no longer carry out the same steps") as caught:
        for step, payload in frames:
            receiving.expect(step, bytearray(payload), 2)
    assert caught.value.rank == 2


@given(st.dictionaries(st.integers(0, 300), st.lists(st.integers(0, 2**32 - 1), max_size=5), max_size=4))
def test_masks_come_back(masks: dict[int, list[int]]) -> None:
    packed = {slot: np.array(words, np.uint32) for slot, words in masks.items()}
    back = decode_masks(encode_masks(packed))
    assert {slot: mask.tolist() for slot, mask in back.items()} == masks
    assert all(mask.dtype == np.uint32 for mask in back.values())


def test_tokens_and_logprobs_come_back() -> None:
    logprobs = {1: TokenLogprob(7, -0.25, ((7, -0.25), (3, -2.0))), 2: TokenLogprob(9, -1e-9)}
    assert decode_tokens(encode_tokens([5, 7, 9], logprobs)) == ([5, 7, 9], logprobs)
    assert decode_tokens(encode_tokens([], {})) == ([], {})


def test_the_start_carries_what_arrays_depend_on() -> None:
    config = EngineConfig(page_size=8, max_sequences=5, kv_bits=4, cache_bytes=999, max_queue=3)
    start = decode_start(encode_plain(Start.of("rows", 4096, config)))
    assert (start.way, start.context) == ("rows", 4096)
    assert (start.config.page_size, start.config.max_sequences, start.config.kv_bits) == (8, 5, 4)
    assert start.config.cache_bytes == 999 and start.config.max_queue == EngineConfig().max_queue


def test_ranks_agree_on_what_all_have() -> None:
    mine, theirs = Room((10, 4), 7), decode_room(encode_plain(Room((8, 5), 9)))
    assert mine.least(theirs) == Room((8, 4), 7)


def test_failures_keep_their_meaning() -> None:
    no_room = decode_error(encode_error(DoesNotFit("Too large.", needed_bytes=9, available_bytes=5)), 2)
    assert isinstance(no_room, DoesNotFit) and str(no_room) == "Rank 2: Too large."
    assert (no_room.needed_bytes, no_room.available_bytes) == (9, 5)
    apart = decode_error(encode_error(Diverged("Rank 1 and rank 0 differ.", rank=1)), 1)
    assert isinstance(apart, Diverged) and apart.rank == 1
    other = decode_error(encode_error(ValueError("bad shape")), 1)
    assert isinstance(other, EngineStopped) and str(other) == "Rank 1 failed (ValueError: bad shape)."


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_hidden_states_come_back(dtype: mx.Dtype) -> None:
    first = mx.random.normal((5, 1, 8)).astype(dtype)
    turned = mx.random.normal((4, 3)).astype(dtype).T  # not in row order
    calls = [[first], [turned, mx.arange(3)], [mx.array(2.5)]]
    packed = Packed(calls)
    back = unpack(bytearray(b"".join(bytes(part) for part in packed.parts())))
    assert [[a.shape for a in arrays] for arrays in back] == [[(5, 1, 8)], [(3, 4), (3,)], [()]]
    for sent, got in zip(sum(calls, []), sum(back, []), strict=True):
        assert sent.dtype == got.dtype and mx.array_equal(sent, got)
