"""The formulas: the paper's examples, and what must hold whatever the numbers are."""

from __future__ import annotations

import pytest

from mlxserve.distributed.estimate import Speed, decode_seconds, decode_speed
from mlxserve.distributed.facts import Facts, Tensor
from mlxserve.distributed.hosts import Host, parse_hosts
from mlxserve.distributed.sources import facts_of
from mlxserve.distributed.split import Split
from mlxserve.models.kvlayout import KvLayer


@pytest.fixture(scope="module")
def llama_405b() -> Facts:
    return facts_of("llama-3.1-405b", 4, (2,))


@pytest.mark.parametrize(
    ("split", "link", "tokens_per_s"),
    [(Split.tensor(2), "rdma", 5.2), (Split.tensor(2), "tcp", 2.4), (Split.pipeline([63, 63]), "tcp", 2.7)],
)
def test_405b_on_two_m3_ultra(llama_405b: Facts, split: Split, link: str, tokens_per_s: float) -> None:
    speed = decode_speed(llama_405b, split, parse_hosts(["2x192GB:m3-ultra"]), link)
    assert speed is not None and round(speed.tokens_per_s, 1) == tokens_per_s


def plain(layers: int = 4, nbytes: int = 10**9, share: float = 1.0) -> Facts:
    """`layers` layers of `nbytes` each, nothing else; 1,000 numbers of K/V a token and layer."""
    tensors = tuple(Tensor(f"layers.{n}.w", nbytes, nbytes, n, "layer", share) for n in range(layers))
    halves = {tensor.name: tensor.nbytes // 2 for tensor in tensors}
    return Facts("plain", {}, tensors, (KvLayer(1000),) * layers, tensor_parallel={2: halves})


def two(first: float = 100e9, second: float = 100e9) -> list[Host]:
    return [Host("a", bandwidth=first), Host("b", bandwidth=second)]


def test_by_hand() -> None:
    facts = plain()
    assert decode_seconds(facts, Split.tensor(1), two()[:1]) == pytest.approx(4e9 / 75e9)
    assert decode_seconds(facts, Split.tensor(2), two(), "tcp") == pytest.approx(2e9 / 75e9 + 8 * 0.94e-3)
    assert decode_seconds(facts, Split.tensor(2), two(), "rdma") == pytest.approx(2e9 / 75e9 + 8 * 31e-6)
    assert decode_seconds(facts, Split.pipeline([2, 2]), two()) == pytest.approx(4e9 / 75e9 + 2 * 1.3e-3)


def test_experts_by_hand() -> None:
    facts = plain(share=0.25)
    assert decode_seconds(facts, Split.tensor(1), two()[:1]) == pytest.approx(1e9 / 90e9 + 4 * 150e-6)


def test_a_tensor_split_waits_for_the_slowest_and_a_pipeline_for_each() -> None:
    facts = plain()
    assert decode_seconds(facts, Split.tensor(2), two(100e9, 50e9)) == pytest.approx(
        2e9 / 37.5e9 + 8 * 0.94e-3
    )
    uneven = decode_seconds(facts, Split.pipeline([3, 1]), two(100e9, 50e9))
    assert uneven == pytest.approx(3e9 / 75e9 + 1e9 / 37.5e9 + 2.6e-3)


def test_context_is_read_too() -> None:
    facts = plain()
    empty = decode_seconds(facts, Split.tensor(1), two()[:1])
    full = decode_seconds(facts, Split.tensor(1), two()[:1], context=10_000)
    packed = decode_seconds(facts, Split.tensor(1), two()[:1], context=10_000, kv_bits=8)
    assert empty is not None and full is not None and packed is not None
    assert full - empty == pytest.approx(4 * 1000 * 2 * 10_000 / 75e9)
    assert empty < packed < full


def test_no_bandwidth_no_estimate() -> None:
    assert decode_speed(plain(), Split.tensor(1), [Host("a")]) is None


def test_a_range_of_35_percent() -> None:
    speed = Speed(10.0)
    assert (speed.low, speed.high, str(speed)) == (6.5, 13.5, "6.5 to 13.5")
