"""How much memory a model takes, worked out before anything is loaded.

Knows: parameters, bits and bytes of weights from their headers; bytes of K/V for a number of tokens
from the configuration; and the comparison with a budget. Pure functions: no MLX, no machine.
Does not know: what the machine has (`backend`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxserve.config import GIB, MIB, EngineConfig
from mlxserve.errors import DoesNotFit
from mlxserve.models.files import TensorInfo
from mlxserve.models.kvlayout import kv_layers

FLOAT_BITS = 16
KV_GROUP_SIZE = EngineConfig().kv_group_size


@dataclass(frozen=True, slots=True)
class Weights:
    """What the weights are: `parameters` as trained, `nbytes` as stored."""

    parameters: int
    nbytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.parameters if self.parameters else 0.0

    def loaded_bytes(self, float_bytes: int, on_cpu: bool) -> int:
        """Bytes in memory: as stored, but on a CPU every weight is a float of `float_bytes`."""
        return self.parameters * float_bytes if on_cpu else self.nbytes


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes that a model and one sequence of `context` tokens need, and what there is."""

    weight_bytes: int
    kv_bytes: int
    context: int
    budget_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.budget_bytes

    def require(self, name: str) -> None:
        """Raise DoesNotFit, with both numbers, unless it fits."""
        if not self.fits:
            raise DoesNotFit(
                f"{name} with {self.context:,} tokens needs {show_bytes(self.needed_bytes)} (weights "
                f"{show_bytes(self.weight_bytes)}, K/V {show_bytes(self.kv_bytes)}), and this machine has "
                f"{show_bytes(self.budget_bytes)} for it; use fewer bits (--quantize 4, --kv-bits 8) or a "
                "shorter --context.",
                needed_bytes=self.needed_bytes,
                available_bytes=self.budget_bytes,
            )


def weigh(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Weights:
    """Count parameters and bytes from headers, unpacking what quantised formats hold in one number.

    `config` says how many bits packed weights have (MLX: `quantization`; GPTQ and AWQ:
    `quantization_config`).
    """
    parameters = sum(_parameters(name, tensor, tensors, config) for name, tensor in tensors.items())
    return Weights(parameters, sum(tensor.nbytes for tensor in tensors.values()))


def _parameters(
    name: str, tensor: TensorInfo, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> int:
    """Trained numbers in one stored tensor; 0 for scales and other helpers of a quantised one."""
    base, _, leaf = name.rpartition(".")
    if leaf in ("scales", "biases") and f"{base}.weight" in tensors:  # MLX
        return 0
    if leaf == "weight" and f"{base}.scales" in tensors and tensor.dtype == "U32":
        return tensor.size * 32 // _mlx_bits(base, config)
    if leaf in ("weight_scale_inv", "weight_scale", "input_scale", "qzeros", "g_idx", "scales"):
        return 0
    if leaf == "qweight":  # GPTQ and AWQ pack into 32-bit words
        return tensor.size * 32 // int((config.get("quantization_config") or {}).get("bits", 4))
    if leaf.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in tensors:  # MXFP4: 2 a byte
        return tensor.size * 2
    if leaf.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in tensors:
        return 0
    return tensor.size


def _mlx_bits(base: str, config: Mapping[str, Any]) -> int:
    """Bits of one layer of an MLX-quantised model: its own entry, else the common one."""
    settings = config.get("quantization") or config.get("quantization_config") or {}
    own = settings.get(base)
    return int((own if isinstance(own, Mapping) else settings).get("bits", settings.get("bits", 4)))


def kv_bytes(
    config: Mapping[str, Any],
    context: int,
    *,
    kv_bits: int = FLOAT_BITS,
    group_size: int = KV_GROUP_SIZE,
    float_bytes: int = 2,
    sequences: int = 1,
) -> int:
    """Bytes of K/V that `sequences` sequences of `context` tokens hold.

    kv_bits 16 stores numbers as the model computes them, `float_bytes` each (2, or 4 in float32); 8 and
    4 add such a number twice, as scale and bias, for every `group_size` values. Layers with a window keep
    no more than it.
    """
    values = sum(layer.values * layer.tokens(context) for layer in kv_layers(config))
    return sequences * round(values * bytes_per_value(kv_bits, group_size, float_bytes))


def bytes_per_value(
    kv_bits: int = FLOAT_BITS, group_size: int = KV_GROUP_SIZE, float_bytes: int = 2
) -> float:
    """Bytes of one number in the K/V cache, with its part of a group's scale and bias."""
    return float(float_bytes) if kv_bits == FLOAT_BITS else kv_bits / 8 + 2 * float_bytes / group_size


def width_of(dtype: str, stored_bytes: int, on_cpu: bool) -> int:
    """Bytes of a float that a model computes with: "auto" is as stored, but float32 on a CPU."""
    if dtype == "auto":
        return 4 if on_cpu else stored_bytes
    return 4 if dtype == "float32" else 2


def show_bytes(nbytes: int) -> str:
    """Bytes for people: '4.2 GiB', '103 MiB'."""
    if nbytes >= GIB:
        return f"{nbytes / GIB:.1f} GiB"
    return f"{nbytes / MIB:.0f} MiB" if nbytes >= MIB else f"{nbytes:,} bytes"


def show_count(parameters: int) -> str:
    """Parameters as model names write them: '7.2B', '135M'."""
    if parameters >= 10**9:
        return f"{parameters / 10**9:.1f}B"
    return f"{parameters / 10**6:.0f}M" if parameters >= 10**6 else f"{parameters:,}"
