"""Puts trainer and sharder together: a process's part of a model to train, and its share of the run.

Knows: `lora`'s Base and Share, `distributed`'s parts. The processes are started by `mlxserve launch`; each
runs the same command with the same settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxserve.config import LoadConfig
from mlxserve.distributed.digest import refuse_differences
from mlxserve.distributed.load import ShardLoaded, load_shard
from mlxserve.distributed.split import Split
from mlxserve.distributed.training import TensorPart
from mlxserve.distributed.training_stage import StagePart
from mlxserve.errors import UsageError
from mlxserve.lora.base import Base
from mlxserve.lora.config import RunConfig
from mlxserve.lora.layers import add_adapters
from mlxserve.lora.share import Share
from mlxserve.models.describe import describe
from mlxserve.models.load import build
from mlxserve.models.resolve import resolve
from mlxserve.text.tokenizer import load_tokenizer

Divide = Callable[[nn.Module], Share]


def open_part(config: RunConfig, split: str, group: Any) -> tuple[Base, Divide]:
    """This process's part of the model that `config` trains, and what makes it one of several.

    Raises UsageError for a split that does not fit the processes or the run, ModelInvalid where they have
    different files, and whatever `load_shard` raises.
    """
    if group is None:
        raise UsageError(
            "--split needs several processes: mlxserve launch --hosts FILE -- lora train --split …",
            param="split",
        )
    if config.eval.samples is not None:
        raise UsageError(
            "A divided model writes no samples while it trains; leave eval.samples out.", param="eval.samples"
        )
    files = resolve(config.model)
    divided = Split.parse(split, _layers(config.model))
    if divided.size != group.size():
        raise UsageError(f"{split} is for {divided.size} processes; {group.size()} run.", param="split")
    settings = LoadConfig(quantize_bits=config.quantize)
    loaded = load_shard(files, settings, divided, group.rank(), group, packed=True)
    refuse_differences(group, loaded, files)
    model = loaded.loaded
    base = Base(config.model, files.path, model.model, model.config, load_tokenizer(files.path))
    part = (TensorPart if divided.mode == "tensor" else StagePart)(loaded, group)
    return base, lambda _: _connected(part, loaded, config)


def _connected(part: TensorPart | StagePart, loaded: ShardLoaded, config: RunConfig) -> Share:
    part.connect(_start(loaded.loaded.config, config), optimizer=config.train.optimizer)
    return Share(**part.share())


def _start(architecture: dict[str, Any], config: RunConfig) -> dict[str, mx.array]:
    """The adapters that one process would start with, made for a model of which nothing else is evaluated."""
    model = build({key: value for key, value in architecture.items() if not key.startswith("quantization")})
    # DoRA's lengths are those of the weights, which only the processes that hold them know.
    kind = "lora" if config.lora.type == "dora" else config.lora.type
    add_adapters(model, replace(config.lora, type=kind), seed=config.train.seed)
    return dict(tree_flatten(model.trainable_parameters()))


def _layers(model: str) -> int:
    facts = dict(describe(model).config)
    text = {**facts, **(facts.get("text_config") or {})}
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if isinstance(text.get(key), int):
            return int(text[key])
    raise UsageError(f"The configuration of {model} does not say how many layers it has.", param="split")
