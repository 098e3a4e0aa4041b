"""16-bit floats and element-wise functions against NumPy and MLX."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.metal import harness


def convert(x: mx.array, kind: mx.Dtype, expression: str = "T(x[i])") -> np.ndarray:
    """y[i] = `expression`, of dtype `kind`, as its bits in uint16 or its value in float32."""
    kernel = mx.fast.metal_kernel(
        name="convert",
        input_names=["x"],
        output_names=["y"],
        source=f"uint i = thread_position_in_grid.x; y[i] = {expression};",
    )

    def launch(values: mx.array) -> list[mx.array]:
        return kernel(
            inputs=[values],
            grid=(values.size, 1, 1),
            threadgroup=(256, 1, 1),
            template=[("T", kind)],
            output_shapes=[values.shape],
            output_dtypes=[kind],
        )

    return harness.run(launch, x).outputs[0]


def all_halves() -> np.ndarray:
    return np.arange(65536, dtype=np.uint32).astype(np.uint16).view(np.float16)


def hard_floats() -> np.ndarray:
    """Ties, neighbours of ties and extremes around every half, and all exponents of float32."""
    halves = all_halves()[::7].astype(np.float32)
    halves = halves[np.isfinite(halves)]
    upper = np.nextafter(halves.astype(np.float16), np.float16(np.inf)).astype(np.float32)
    ties = (halves.astype(np.float64) + upper) / 2
    ties = ties[np.isfinite(ties)].astype(np.float32)
    around = [np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))]
    exponents = (np.arange(512, dtype=np.uint32) << 23).view(np.float32)
    mantissas = (np.arange(512, dtype=np.uint32) << 23 | 0x7FFFFF).view(np.float32)
    return np.concatenate(
        [ties, *around, exponents, mantissas, np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0])]
    )


def assert_same_bits_or_nan(ours: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(right))
    numbers = ~np.isnan(right)
    np.testing.assert_array_equal(ours[numbers], right[numbers])
    np.testing.assert_array_equal(np.signbit(ours[numbers]), np.signbit(right[numbers]))


def test_every_half_widens() -> None:
    halves = all_halves()
    assert_same_bits_or_nan(convert(mx.array(halves), mx.float32, "float(x[i])"), halves.astype(np.float32))


def test_floats_round_to_half() -> None:
    floats = hard_floats()
    with np.errstate(over="ignore", invalid="ignore"):
        right = floats.astype(np.float16)
    assert_same_bits_or_nan(convert(mx.array(floats), mx.float16).astype(np.float16), right)


def test_floats_round_to_bfloat() -> None:
    floats = hard_floats()
    right = np.array(mx.array(floats).astype(mx.bfloat16).astype(mx.float32))
    assert_same_bits_or_nan(convert(mx.array(floats), mx.bfloat16), right)


UNARY = ["exp", "exp2", "log", "log2", "sin", "cos", "tanh", "sqrt", "floor", "ceil", "abs", "rint", "trunc"]


@pytest.mark.parametrize("name", UNARY)
def test_functions(name: str) -> None:
    x = np.linspace(0.01, 9.5, 256, dtype=np.float32)
    right = getattr(np, name)(x.astype(np.float64))
    np.testing.assert_allclose(convert(mx.array(x), mx.float32, f"{name}(x[i])"), right, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16])
def test_arithmetic_rounds_after_each_operation(kind: mx.Dtype) -> None:
    x = mx.array(np.random.default_rng(3).standard_normal(512).astype(np.float32)).astype(kind)
    right = ((x * x).astype(kind) + x).astype(kind)
    np.testing.assert_array_equal(convert(x, kind, "x[i] * x[i] + x[i]"), np.array(right.astype(mx.float32)))
