"""8-bit moments: the code bit by bit, packing beside NumPy, and trajectories beside AdamW in float32."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from mlxserve.lora.blockwise import BLOCK, AdamW8bit, dynamic_code, pack, unpack


def _decoded(byte: int, bits: int) -> float:
    """What a code of `bits` bits means, by the paper's figure: zeros, a one, then the fraction."""
    if byte == 0:
        return 0.0
    text = f"{byte:0{bits}b}"
    zeros = len(text) - len(text.lstrip("0"))
    fraction = text[zeros + 1 :]
    share = (int(fraction or "0", 2) + 0.5) / 2 ** len(fraction)
    return 10.0**-zeros * (0.1 + 0.9 * share)


def test_the_signed_code_is_the_papers_tree() -> None:
    magnitudes = [_decoded(byte, 7) for byte in range(128)]
    expected = sorted({1.0, *magnitudes, *(-value for value in magnitudes)})
    np.testing.assert_allclose(dynamic_code(True), expected, rtol=1e-6)


def test_the_unsigned_code_has_one_more_fraction_bit() -> None:
    """The sign's bit: twice the values in each of the same 7 decades."""
    code = dynamic_code(False)
    assert len(code) == 256 and code[0] == 0 and code[-1] == 1
    signed = dynamic_code(True)
    for decade in range(7):
        low, high = 10.0 ** -(decade + 1), 10.0**-decade
        twice = 2 * ((signed > low) & (signed < high)).sum()
        assert ((code > low) & (code < high)).sum() == twice == 2 ** (7 - decade)


@pytest.mark.parametrize("signed", [True, False])
def test_every_value_becomes_a_neighbour(signed: bool) -> None:
    """Beside NumPy, block by block: magnitudes over ten decades, zeros, and a last block that is not full."""
    draw = np.random.default_rng(0)
    values = (draw.normal(size=1000) * 10.0 ** draw.uniform(-10, 2, 1000)).astype(np.float32)
    values[17] = 0
    values = values if signed else np.abs(values)
    codes, maxima = (np.array(part) for part in pack(mx.array(values), mx.random.key(1), signed=signed))
    assert codes.shape == (4, BLOCK) and codes.dtype == np.uint8
    book = np.array(dynamic_code(signed), np.float64)
    for number in range(4):
        block = values[number * BLOCK : (number + 1) * BLOCK].astype(np.float64)
        top = block[np.argmax(np.abs(block))]
        assert maxima[number] == np.float32(top)
        for share, code in zip(block / top, codes[number]):
            place = np.searchsorted(book, share)  # book[place - 1] < share <= book[place]
            near = {max(place - 1, 0), place} if share > book[0] else {0}
            good = near | {c + 1 for c in near if c < 255 and np.isclose(book[c], share, rtol=1e-5)}
            assert code in good and (signed or share == 0 or code > 0)


def test_the_mean_over_keys_is_the_value() -> None:
    values = mx.array(np.random.default_rng(2).normal(size=512).astype(np.float32))
    total = np.zeros(512)
    for seed in range(300):
        total += np.array(unpack(*pack(values, mx.random.key(seed), signed=True), (512,), signed=True))
    error = total / 300 - np.array(values)
    assert np.abs(error).max() < 5 * 0.05 / np.sqrt(300)  # steps of the code are at most about 0.05 here
    assert abs(error.mean()) < 1e-3


def test_zeros_and_equal_values_are_exact() -> None:
    for value in (0.0, 1e-30, -3.0):
        packed = pack(mx.full((2, 300), value), mx.random.key(0), signed=True)
        np.testing.assert_array_equal(np.array(unpack(*packed, (2, 300), signed=True)), np.float32(value))


def _run(made: Any, start: mx.array, gradients: list[np.ndarray]) -> np.ndarray:
    values = {"w": start}
    made.init(values)
    for gradient in gradients:
        values = made.apply_gradients({"w": mx.array(gradient)}, values)
        mx.eval(values, made.state)
    return np.array(values["w"]) - np.array(start)


@pytest.mark.parametrize(("decades", "limit"), [(0, 0.04), (2, 0.12), (6, 0.5)])
def test_trajectories_stay_near_float32(decades: float, limit: float) -> None:
    """200 noisy steps of 8192 weights whose gradients lie `decades` apart within each block.

    Linear codes, or this code on v itself, blow up at 6 (the largest way is 100 times the right one).
    """
    draw = np.random.default_rng(1)
    shape = (64, 128)
    scales = 10.0 ** draw.uniform(-decades, 0, shape)
    drift = 0.3 * draw.normal(size=shape)
    gradients = [((drift + draw.normal(size=shape)) * scales).astype(np.float32) for _ in range(200)]
    start = mx.array(draw.normal(size=shape).astype(np.float32))
    exact = _run(optim.AdamW(1e-3, weight_decay=0.0, bias_correction=True), start, gradients)
    near = _run(AdamW8bit(1e-3), start, gradients)
    assert np.linalg.norm(near - exact) < limit * np.linalg.norm(exact)
    assert np.abs(near).max() < 5 * np.abs(exact).max()
    assert (near * exact).sum() / (exact * exact).sum() == pytest.approx(1, abs=0.1)


def test_a_second_moment_that_fades_is_followed() -> None:
    """Gradients that fall to a hundredth: rounded to the nearest code, the moment would stay where it was."""
    draw = np.random.default_rng(3)
    gradients = [
        draw.normal(size=(64, 64)).astype(np.float32) * (1.0 if i < 20 else 0.01) for i in range(400)
    ]
    start = mx.zeros((64, 64))
    exact, near = optim.AdamW(1e-3, weight_decay=0.0, bias_correction=True), AdamW8bit(1e-3)
    _run(exact, start, gradients)
    _run(near, start, gradients)
    state = near.state["w"]
    root = np.array(unpack(state["root_v"], state["root_v_max"], (64, 64), signed=False))
    expected = np.sqrt(np.array(exact.state["w"]["v"]))
    assert np.mean(root) == pytest.approx(np.mean(expected), rel=0.02)


def test_bytes_and_small_parameters() -> None:
    made = AdamW8bit(1e-3)
    made.init({"large": mx.zeros((512, 256)), "small": mx.zeros((16, 16))})
    large = sum(value.nbytes for value in made.state["large"].values())
    assert large / (512 * 256) == pytest.approx(2 + 2 * 4 / BLOCK, abs=0.01)
    assert set(made.state["small"]) == {"m", "v"}
