"""Memory and time of a run before anything runs, from configuration and shapes alone.

Knows: parameters tensor by tensor (a definition is built without its weights), bytes of weights, adapters,
optimiser, activations and loss. The activations are an estimate; the rest is counted. Does not know the
machine: its budget and speed are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxserve import display
from mlxserve.errors import DoesNotFit
from mlxserve.lora.batches import width_of
from mlxserve.lora.config import RunConfig
from mlxserve.lora.layers import add_adapters, find_targets, linear_shape
from mlxserve.lora.loss import default_chunk
from mlxserve.models.describe import Description
from mlxserve.models.load import build
from mlxserve.models.memory import show_bytes

STATE_BYTES = {"adamw": 8.0, "adamw8bit": 2.04, "lion": 4.0, "muon": 4.0, "adafactor": 0.1}
TIGHT = 0.8  # share of the memory above which blocks are computed twice
LOSS_BUFFERS = 8  # chunk-sized arrays alive at once, as measured


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes by what they are for; all at the run's widest micro-batch. flops: of one trained token."""

    weight_bytes: int
    trainable: int
    trainable_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    loss_bytes: int
    tokens: int
    width: int
    checkpointing: bool
    flops_per_token: float
    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def needed_bytes(self) -> int:
        return (
            self.weight_bytes
            + self.trainable_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.loss_bytes
        )

    def _repr_html_(self) -> str:
        names = ("weight", "trainable", "gradient", "optimizer", "activation", "loss", "needed")
        rows = [(name, show_bytes(getattr(self, f"{name}_bytes"))) for name in names]
        rows[-1] = ("together", rows[-1][1])
        return display.facts([*rows, ("parameters that train", f"{self.trainable:,}")], "A run's memory")

    def require(self, budget_bytes: int) -> None:
        """Raise DoesNotFit, with both numbers and what would help, unless it fits."""
        if self.needed_bytes > budget_bytes:
            raise DoesNotFit(
                f"This run needs about {show_bytes(self.needed_bytes)} and the machine has "
                f"{show_bytes(budget_bytes)}; lower train.tokens_per_batch or train.max_seq, set "
                "train.checkpointing=true or quantize=4, or say --force.",
                needed_bytes=self.needed_bytes,
                available_bytes=budget_bytes,
            )


def sizes_of(config: RunConfig, facts: Description, *, on_cpu: bool) -> dict[str, int]:
    """weight_bytes and float_bytes of `plan_run` for a model that is not loaded."""
    float_bytes = 4 if on_cpu else facts.float_bytes
    weights = facts.weights.loaded_bytes(float_bytes, on_cpu)
    packed = facts.config.get("quantization") or {}
    bits = config.quantize or packed.get("bits")  # a packed folder stays packed, on a CPU too
    if bits:
        weights = int(facts.weights.parameters * (bits + 0.5) / 8)
    return {"weight_bytes": weights, "float_bytes": float_bytes}


def plan_within(budget_bytes: int | None, planned: Callable[[bool | None], Plan], config: RunConfig) -> Plan:
    """The plan with checkpointing as `config` says; auto turns it on where the run would be tight without."""
    plain = planned(None)
    tight = budget_bytes is not None and plain.needed_bytes > TIGHT * budget_bytes
    return planned(True) if tight and config.train.checkpointing == "auto" else plain


def plan_run(
    config: RunConfig,
    architecture: Mapping[str, Any],
    *,
    weight_bytes: int,
    float_bytes: int,
    longest: int | None = None,
    checkpointing: bool | None = None,
) -> Plan:
    """What `config` needs on a model of this configuration.

    weight_bytes: of the frozen weights as they will lie in memory. float_bytes: of an activation. longest:
    tokens of the longest row, None for train.max_seq.
    """
    model = build(architecture)
    tensors = _trainable(model, config)
    count = sum(_size(shape) for _, shape in tensors)
    parameters = sum(value.size for _, value in tree_flatten(model.parameters()))
    width = width_of(min(longest or config.train.max_seq, config.train.max_seq) - 1)
    item = width * (1 if config.train.objective == "sft" else 2)  # a pair is never cut in two
    tokens = max(item, config.train.tokens_per_batch // item * item)
    if config.train.rows_per_batch:
        tokens = min(tokens, config.train.rows_per_batch * item)
    if checkpointing is None:
        checkpointing = config.train.checkpointing is True
    vocabulary = _vocabulary(architecture)
    chunk = default_chunk(vocabulary) if config.train.loss_chunk == "auto" else config.train.loss_chunk
    backward = (2 if config.lora.type != "full" else 4) + (2 if checkpointing else 0)
    accumulates = 2 if config.train.accumulate > 1 else 1
    return Plan(
        weight_bytes=weight_bytes,
        trainable=count,
        trainable_bytes=4 * count,
        gradient_bytes=4 * count * accumulates,
        optimizer_bytes=round(STATE_BYTES[config.train.optimizer] * count),
        activation_bytes=_activations(model, tokens, width, float_bytes, checkpointing, architecture),
        loss_bytes=LOSS_BUFFERS * min(chunk, tokens) * vocabulary * 4,
        tokens=tokens,
        width=width,
        checkpointing=checkpointing,
        flops_per_token=parameters * (2 + backward),
        tensors=tuple(tensors),
    )


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _trainable(model: nn.Module, config: RunConfig) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of everything that trains."""
    if config.lora.type == "full":
        add_adapters(model, config.lora)
        return [(name, tuple(value.shape)) for name, value in tree_flatten(model.trainable_parameters())]
    modules = dict(model.named_modules())
    found: list[tuple[str, tuple[int, ...]]] = []
    for path in find_targets(model, config.lora):
        found += _adapter_shapes(path, modules[path], config)
    return found


def _adapter_shapes(path: str, layer: nn.Module, config: RunConfig) -> list[tuple[str, tuple[int, ...]]]:
    rank = config.lora.rank
    if hasattr(layer, "num_experts"):
        experts, inputs, outputs = layer.num_experts, layer.input_dims, layer.output_dims
        return [(f"{path}.lora_a", (experts, rank, inputs)), (f"{path}.lora_b", (experts, outputs, rank))]
    inputs, outputs = linear_shape(layer)
    shapes: list[tuple[str, tuple[int, ...]]] = [
        (f"{path}.lora_a", (inputs, rank)),
        (f"{path}.lora_b", (rank, outputs)),
    ]
    return [*shapes, (f"{path}.m", (outputs,))] if config.lora.type == "dora" else shapes


def _vocabulary(architecture: Mapping[str, Any]) -> int:
    text = architecture.get("text_config") or {}
    return int(architecture.get("vocab_size") or text.get("vocab_size") or 32_000)


def _activations(
    model: nn.Module,
    tokens: int,
    width: int,
    float_bytes: int,
    checkpointing: bool,
    config: Mapping[str, Any],
) -> int:
    """Values kept for the backward pass: every linear layer's input and output, norms, attention scores.

    With checkpointing one block's values and every block's input. Scores are counted whole, as where no
    fused backward exists.
    """
    text = config.get("text_config") or config
    hidden = int(text.get("hidden_size") or text.get("n_embd") or 1024)
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 1)
    blocks = list(model.layers)
    each = [_block_values(block, hidden) * tokens + 2 * heads * tokens * width for block in blocks]
    kept = max(each) + hidden * tokens * len(blocks) if checkpointing else sum(each)
    return int(kept * float_bytes)


def _block_values(block: nn.Module, hidden: int) -> int:
    """Values a token in one block."""
    total = 4 * hidden
    for _, module in block.named_modules():
        if isinstance(module, nn.Linear | nn.QuantizedLinear):
            inputs, outputs = linear_shape(module)
            total += inputs + 2 * outputs
        elif hasattr(module, "num_experts") and hasattr(module, "input_dims"):
            total += 2 * (module.input_dims + 2 * module.output_dims)
    return total


def what_fits(
    config: RunConfig, architecture: Mapping[str, Any], budget_bytes: int, **settings: Any
) -> list[dict[str, Any]]:
    """For lengths and ranks: the most tokens a batch that fit, with and without checkpointing."""
    rows = []
    for length in (512, 1024, 2048, 4096, 8192):
        for rank in (8, 16, 64):
            for checkpointing in (False, True):
                tried = replace(config, lora=replace(config.lora, rank=rank))
                batch = _largest(tried, architecture, budget_bytes, length, checkpointing, **settings)
                rows.append({"length": length, "rank": rank, "checkpointing": checkpointing, "rows": batch})
    return rows


def _largest(
    config: RunConfig,
    architecture: Mapping[str, Any],
    budget_bytes: int,
    length: int,
    checkpointing: bool,
    **settings: Any,
) -> int:
    """Rows of `length` tokens that fit in one micro-batch, up to 64; 0 for none."""
    largest = 0
    for count in (1, 2, 4, 8, 16, 32, 64):
        train = replace(config.train, tokens_per_batch=count * width_of(length - 1), max_seq=length)
        plan = plan_run(
            replace(config, train=train),
            architecture,
            longest=length,
            checkpointing=checkpointing,
            **settings,
        )
        if plan.needed_bytes > budget_bytes:
            break
        largest = count
    return largest
