"""From a file's tensors to the weights of an mlx-lm definition: names, order of rows, numbers.

Knows: how to undo what a converter did (rows interleaved by head, norms with one added, head and embedding
tied), and the forms of the result: floats, MLX's packed quantisation, or blocks as they lie in the file.
Every tensor of the file is either used or refused by name. Knows nothing of metadata; the row and the
configuration say it all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.kernels_metal.gguf_formats import FORMATS
from mlxserve.models.gguf.architectures import Architecture
from mlxserve.models.gguf.config import EMBEDDING, HEAD
from mlxserve.models.gguf.file import TensorInfo
from mlxserve.models.gguf.quants import FLOAT_TYPES, GROUP_SIZE, REPACKABLE, Packed, dequantise, repack
from mlxserve.models.gguf.rope import FACTOR_TENSORS

Mode = Literal["float", "packed", "blocks"]
Form = tuple[int, str]  # bits and MLX's mode
# Tables of rotary frequencies in old files; the definitions compute them.
_UNUSED = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?|rope_freqs")


@dataclass(slots=True)
class Weights:
    """What a definition loads.

    arrays: parameter name -> array. quantization: for mlx-lm's configuration, None where nothing is packed:
    the commonest `group_size`, `bits` and `mode`, and an entry of its own for each layer that differs.
    blocks: path of a layer whose weight is uint8 blocks -> their type, for kernels_metal.layers.use_blocks.
    report: tensor name -> "blocks", "repacked", "dequantised" (stored in blocks) or "float" (as numbers).
    """

    arrays: dict[str, mx.array] = field(default_factory=dict)
    blocks: dict[str, str] = field(default_factory=dict)
    quantization: dict[str, Any] | None = None
    report: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one tensor goes. heads: undo the interleaving of its rows in that many heads. offset: subtract.

    source None: zeros of `shape`, for a bias that the definition has and the file leaves out.
    """

    target: str
    source: TensorInfo | None
    shape: tuple[int, ...]
    heads: int | None = None
    offset: float = 0.0


def read_weights(
    tensors: Mapping[str, TensorInfo],
    row: Architecture,
    config: Mapping[str, Any],
    *,
    dtype: mx.Dtype = mx.float32,
    mode: Mode = "float",
) -> Weights:
    """All weights, evaluated, as the definition names them; one tensor at a time.

    mode "float": everything in `dtype`. mode "packed": block types that have an exact form in MLX's
    quantisation keep their size, with scales and biases in `dtype` (exact in float32, and in float16 for
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and MXFP4); all others become `dtype`. mode "blocks": matrices of a type
    that kernels_metal reads stay as they lie in the file; all others as in "packed".
    Raises ModelInvalid (a tensor missing or of the wrong size) or ModelUnsupported (one that the definition
    has no place for, or a type that cannot be read); both name the tensor.
    """
    result = Weights()
    forms: dict[str, Form] = {}
    for placed in placements(tensors, row, config):
        if placed.source is None:
            result.arrays[placed.target] = mx.zeros(placed.shape, dtype)
            continue
        source = _ordered(placed.source, placed.heads)
        if mode == "blocks" and _stays_in_blocks(placed, source):
            result.arrays[placed.target] = mx.array(source.data)
            result.blocks[placed.target.removesuffix(".weight")] = source.type.name
            result.report[source.name] = "blocks"
            continue
        matrix = source.type in REPACKABLE and len(source.shape) > 1
        packed = repack(source.data, source.type, source.shape) if matrix else None
        if packed is not None and mode != "float" and _fits(packed, dtype):
            layer = placed.target.removesuffix(".weight")
            arrays = _packed_arrays(layer, packed, dtype)
            forms[layer], outcome = (packed.bits, packed.mode), "repacked"
        else:
            values = _values(packed) if packed is not None else mx.array(dequantise(source))
            arrays = {placed.target: (values - placed.offset if placed.offset else values).astype(dtype)}
            outcome = "float" if source.type in FLOAT_TYPES else "dequantised"
        mx.async_eval(arrays)  # MLX works on this tensor while the next one is unpacked
        result.arrays |= arrays
        result.report[source.name] = outcome
    mx.eval(result.arrays)
    result.quantization = _quantization(forms)
    return result


def placements(
    tensors: Mapping[str, TensorInfo], row: Architecture, config: Mapping[str, Any]
) -> list[Placement]:
    """Where each tensor goes, in the row's order; raises as `read_weights` does, before anything is read."""
    placed: list[Placement] = []
    used: set[str] = set(FACTOR_TENSORS)
    for base in _bases(tensors, row, config["num_hidden_layers"]):
        weight = tensors.get(f"{base}.weight")
        if weight is None:
            raise ModelInvalid(f"The file has no tensor {base}.weight, which {row.name} needs.")
        used.add(weight.name)
        if weight.name == HEAD and row.head == "tied":
            _check_tied(tensors)
            continue
        placed.append(_place_weight(base, weight, row, config))
        bias = _place_bias(base, weight, tensors, row, config)
        placed += bias
        used |= {place.source.name for place in bias if place.source is not None}
    _refuse_leftovers(tensors, used, row)
    return placed


def _stays_in_blocks(placed: Placement, source: TensorInfo) -> bool:
    matrix = len(source.shape) > 1 and placed.target.endswith(".weight")
    return matrix and not placed.offset and source.type.name in FORMATS


def _bases(tensors: Mapping[str, TensorInfo], row: Architecture, layers: int) -> Iterator[str]:
    """Names without suffix of all tensors that the row wants, absent optional ones left out."""
    for name in row.ends:
        if name != "output" or HEAD in tensors or row.head == "own":
            yield name
    for layer in range(layers):
        for name in row.block:
            base = f"blk.{layer}.{name}"
            if name not in row.optional or f"{base}.weight" in tensors:
                yield base


def _check_tied(tensors: Mapping[str, TensorInfo]) -> None:
    """A head beside a definition that always uses the embedding must be the same numbers."""
    head, embedding = tensors[HEAD], tensors[EMBEDDING]
    if head.type != embedding.type or not np.array_equal(head.data, embedding.data):
        raise ModelUnsupported(
            f"The file has an {HEAD} of its own; the definition of this architecture always uses {EMBEDDING}."
        )


def _place_weight(base: str, weight: TensorInfo, row: Architecture, config: Mapping[str, Any]) -> Placement:
    inner = base.split(".")[-1]
    target = row.path(base) if inner in row.bare else f"{row.path(base)}.weight"
    offset = row.norm_offset if inner.endswith("norm") else 0.0
    return Placement(target, weight, weight.shape, _heads(inner, row, config), offset)


def _place_bias(
    base: str,
    weight: TensorInfo,
    tensors: Mapping[str, TensorInfo],
    row: Architecture,
    config: Mapping[str, Any],
) -> list[Placement]:
    """The layer's bias if the definition has one: the file's, or zeros where a flag covers several layers."""
    inner = base.split(".")[-1]
    flag = row.biases.get(inner)
    if flag is None or (flag and not config[flag]):
        return []
    name, target = f"{base}.bias", f"{row.path(base)}.bias"
    shape = weight.shape[:-1] or weight.shape
    source = tensors.get(name)
    if source is None and not flag:
        raise ModelInvalid(f"The file has no tensor {name}, which {row.name} needs.")
    return [Placement(target, source, shape, _heads(inner, row, config))]


def _heads(inner: str, row: Architecture, config: Mapping[str, Any]) -> int | None:
    """In how many heads a tensor's rows are interleaved: K has its own, smaller number."""
    if not row.interleaved or inner not in ("attn_q", "attn_k"):
        return None
    return int(config["num_attention_heads" if inner == "attn_q" else "num_key_value_heads"])


def _refuse_leftovers(tensors: Mapping[str, TensorInfo], used: set[str], row: Architecture) -> None:
    left = [name for name in tensors if name not in used and not _UNUSED.fullmatch(name)]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ModelUnsupported(
            f"The file has a tensor {left[0]}{more} that the definition of {row.name} has no place for."
        )


def _ordered(tensor: TensorInfo, heads: int | None) -> TensorInfo:
    """The tensor with each head's rows in halves again, as rotate-half RoPE wants them.

    Converters interleave them: row 2j of a head is row j, row 2j + 1 is row j + width/2. Rows are whole
    blocks, so packed types are reordered as they are.
    """
    if heads is None:
        return tensor
    rows = tensor.shape[0]
    if not rows or rows % (2 * heads):
        raise ModelInvalid(f"{tensor.name} has {rows} rows, which {heads} heads cannot share evenly.")
    order = np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    raw = tensor.data.reshape(rows, -1)[order].reshape(tensor.data.shape)
    return replace(tensor, data=raw)


def _values(packed: Packed) -> mx.array:
    """float32 values; MLX multiplies and adds as the `gguf` package does, to the last bit."""
    return mx.dequantize(
        mx.array(packed.weight),
        mx.array(packed.scales),
        None if packed.biases is None else mx.array(packed.biases),
        group_size=packed.group_size,
        bits=packed.bits,
        mode=packed.mode,
        dtype=mx.float32,
    )


def _packed_arrays(layer: str, packed: Packed, dtype: mx.Dtype) -> dict[str, mx.array]:
    weight, scales = mx.array(packed.weight), mx.array(packed.scales)
    if packed.biases is None:
        return {f"{layer}.weight": weight, f"{layer}.scales": scales}
    return {
        f"{layer}.weight": weight,
        f"{layer}.scales": scales.astype(dtype),
        f"{layer}.biases": mx.array(packed.biases).astype(dtype),
    }


def _fits(packed: Packed, dtype: mx.Dtype) -> bool:
    """False where a scale or bias is too large for float16."""
    if dtype != mx.float16 or packed.biases is None:
        return True
    limit = float(np.finfo(np.float16).max)
    return bool(np.abs(packed.scales).max() <= limit and np.abs(packed.biases).max() <= limit)


def _quantization(forms: Mapping[str, Form]) -> dict[str, Any] | None:
    """mlx-lm's `quantization` entry: the commonest form for all, and the layers that differ by path."""
    if not forms:
        return None
    common = Counter(forms.values()).most_common(1)[0][0]
    others = {layer: _settings(form) for layer, form in forms.items() if form != common}
    return {**_settings(common), **others}


def _settings(form: Form) -> dict[str, Any]:
    bits, mode = form
    return {"group_size": GROUP_SIZE, "bits": bits, "mode": mode}
