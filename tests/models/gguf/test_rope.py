"""RoPE scaling of a file against the angles that its own runtime would take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGUFWriter, RopeScalingType

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.models.definitions import import_definition
from mlxserve.models.gguf import open_gguf
from tests.models.gguf import writing
from tests.models.gguf.examples import EXAMPLES

DIMS, BASE, CONTEXT = 16, 10000.0, 4096
LLAMA = EXAMPLES["llama"].settings()


def _scaling(path: Path, extra: Any = lambda w: None, tensors: Any = None) -> dict[str, Any] | None:
    weights = writing.weights_of(writing.build(LLAMA))
    writing.write(path, "llama", weights, LLAMA, extra=extra, tensors=tensors)
    return open_gguf(path).config()["rope_scaling"]


def _rotated(scaling: dict[str, Any] | None, positions: int = 40) -> np.ndarray:
    """(positions, DIMS): a vector of ones rotated by mlx-lm's layer for `scaling`."""
    layer = import_definition("rope_utils").initialize_rope(DIMS, BASE, False, scaling, CONTEXT)
    return np.array(layer(mx.ones((1, 1, positions, DIMS))))[0, 0]


def _rotated_by(frequencies: np.ndarray, positions: int = 40, scale: float = 1.0) -> np.ndarray:
    """The same in NumPy, by explicit frequencies (DIMS/2,) in radians a position."""
    angles = np.arange(positions)[:, None] * frequencies
    first, second = np.cos(angles) - np.sin(angles), np.sin(angles) + np.cos(angles)
    return scale * np.concatenate([first, second], axis=1)


PLAIN = BASE ** -(np.arange(0, DIMS, 2) / DIMS)


def _llama3_tensor(factor: float, low: float, high: float, original: int) -> np.ndarray:
    """The factors that converters write, one frequency at a time."""
    factors = []
    for frequency in PLAIN:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_plain(tmp_path: Path) -> None:
    assert _scaling(tmp_path / "a.gguf") is None
    np.testing.assert_allclose(_rotated(None), _rotated_by(PLAIN), atol=1e-4)


def test_linear(tmp_path: Path) -> None:
    def linear(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    scaling = _scaling(tmp_path / "a.gguf", linear)
    np.testing.assert_allclose(_rotated(scaling), _rotated_by(PLAIN / 4), atol=1e-4)


def test_a_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    old = _scaling(tmp_path / "a.gguf", lambda w: w.add_float32("llama.rope.scale_linear", 2.0))
    new = _scaling(tmp_path / "b.gguf", lambda w: w.add_rope_scaling_factor(2.0))
    assert old == new == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_is_recognised_by_its_factors(factor: float, tmp_path: Path) -> None:
    factors = _llama3_tensor(factor, 1.0, 4.0, 8192)
    scaling = _scaling(tmp_path / "a.gguf", tensors={"rope_freqs.weight": factors})
    assert scaling is not None and (scaling["rope_type"], scaling["factor"]) == ("llama3", factor)
    np.testing.assert_allclose(_rotated(scaling), _rotated_by(PLAIN / factors), atol=1e-4)


def test_other_factors_are_taken_as_they_are(tmp_path: Path) -> None:
    factors = _llama3_tensor(5.0, 2.0, 3.0, 1000)
    scaling = _scaling(tmp_path / "a.gguf", tensors={"rope_freqs.weight": factors})
    assert scaling is not None and scaling["rope_type"] == "longrope"
    np.testing.assert_allclose(_rotated(scaling), _rotated_by(PLAIN / factors), atol=1e-4)


def test_factors_of_one_scale_nothing(tmp_path: Path) -> None:
    ones = {"rope_freqs.weight": np.ones(DIMS // 2, np.float32)}
    assert _scaling(tmp_path / "a.gguf", tensors=ones) is None


def test_factors_of_the_wrong_number_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match=r"rope_freqs\.weight has shape"):
        _scaling(tmp_path / "a.gguf", tensors={"rope_freqs.weight": np.ones(5, np.float32)})


def test_yarn(tmp_path: Path) -> None:
    factor, original, fast, slow = 4.0, 64, 16.0, 1.0

    def yarn(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_yarn_beta_fast(fast)

    def dimension(rotations: float) -> float:
        return DIMS * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(BASE))

    low = max(math.floor(dimension(fast)), 0)
    high = min(math.ceil(dimension(slow)), DIMS - 1)
    extrapolated = 1 - np.clip((np.arange(DIMS // 2) - low) / max(high - low, 0.001), 0, 1)
    frequencies = PLAIN / factor * (1 - extrapolated) + PLAIN * extrapolated
    expected = _rotated_by(frequencies, scale=0.1 * math.log(factor) + 1)
    np.testing.assert_allclose(_rotated(_scaling(tmp_path / "a.gguf", yarn)), expected, atol=1e-4)


def test_yarn_without_an_original_length_takes_the_context(tmp_path: Path) -> None:
    def yarn(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(2.0)

    scaling = _scaling(tmp_path / "a.gguf", yarn)
    assert scaling is not None and scaling["original_max_position_embeddings"] == CONTEXT


def test_longrope_without_its_factors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="rope_factors_long"):
        _scaling(tmp_path / "a.gguf", lambda w: w.add_rope_scaling_type(RopeScalingType.LONGROPE))


def test_two_scalings_at_once_are_refused(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": _llama3_tensor(8.0, 1.0, 4.0, 8192)}
    with pytest.raises(ModelUnsupported, match="twice"):
        _scaling(tmp_path / "a.gguf", lambda w: w.add_rope_scaling_factor(2.0), factors)
