"""Optimisers over named parameters, learning rates over steps, and clipping.

Knows: mlx.optimizers, LoRA+ groups (arXiv:2402.12354). All parameters and gradients are float32 dicts by
name. Does not know models, losses or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxserve.lora.blockwise import AdamW8bit
from mlxserve.lora.config import RunConfig, TrainConfig

Arrays = dict[str, mx.array]


def schedule(config: TrainConfig, total_steps: int) -> Callable[[int], float]:
    """step (from 0) -> learning rate: linear warm-up, then constant, linear or cosine down to its floor.

    Warm-up reaches the full rate at its last step and the first step is above zero.
    """
    warm = round(config.warmup * total_steps) if config.warmup < 1 else int(config.warmup)
    floor = config.lr * config.min_lr_ratio

    def rate(step: int) -> float:
        if step < warm:
            return config.lr * (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, total_steps - warm))
        if config.schedule == "constant":
            return config.lr
        left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return floor + (config.lr - floor) * left

    return rate


def sum_of_squares(gradients: Arrays) -> mx.array:
    """Scalar float32; always added in the order of names, so that it rounds the same each time."""
    ordered = (gradients[name].astype(mx.float32) for name in sorted(gradients))
    return sum((mx.square(gradient).sum() for gradient in ordered), mx.array(0.0))


def clip_by_norm(gradients: Arrays, limit: float, norm: mx.array | None = None) -> tuple[Arrays, mx.array]:
    """(gradients scaled so that their joint norm is at most `limit`, the norm before); 0 does not clip.

    norm: where these are a part of all gradients, the norm of all.
    """
    norm = mx.sqrt(sum_of_squares(gradients)) if norm is None else norm
    if not limit:
        return gradients, norm
    factor = mx.minimum(1.0, limit / (norm + 1e-6))
    return {name: gradient * factor for name, gradient in gradients.items()}, norm


def _make(name: str, decay: float) -> optim.Optimizer:
    if name == "adamw":
        return optim.AdamW(0.0, weight_decay=decay, bias_correction=True)
    if name == "adamw8bit":
        return AdamW8bit(0.0, weight_decay=decay)
    if name == "lion":
        return optim.Lion(0.0, weight_decay=decay)
    if name == "muon":
        return optim.Muon(0.0, weight_decay=decay)
    return optim.Adafactor(
        0.0, weight_decay=decay, relative_step=False, scale_parameter=False, warmup_init=False
    )


class Optimizer:
    """One optimiser for all parameters, or several where groups differ.

    Groups: LoRA+ gives `lora_b` its own rate; Muon takes matrices only, AdamW the rest.
    """

    def __init__(self, config: RunConfig, parameters: Arrays) -> None:
        self.groups: list[tuple[optim.Optimizer, list[str], float]] = []
        kinds: dict[tuple[str, float], list[str]] = {}
        for name, value in parameters.items():
            kinds.setdefault(_group(config, name, value), []).append(name)
        for (kind, factor), names in sorted(kinds.items()):
            made = _make(kind, config.train.weight_decay)
            made.init(_keyed({name: parameters[name] for name in names}))
            self.groups.append((made, names, factor))

    def apply(self, parameters: Arrays, gradients: Arrays, rate: float) -> Arrays:
        """The parameters after one step at learning rate `rate`; both dicts by name."""
        updated: Arrays = {}
        for made, names, factor in self.groups:
            made.learning_rate = rate * factor
            chosen = _keyed({name: gradients[name] for name in names})
            new = made.apply_gradients(chosen, _keyed({name: parameters[name] for name in names}))
            # row order always, as files have it: another layout rounds otherwise, and a resumed run differs
            updated |= {name: mx.contiguous(new[_key(name)]) for name in names}
            made.state = tree_map(mx.contiguous, made.state)
        return {name: updated[name] for name in parameters}

    def state(self) -> Arrays:
        """Everything that a resumed run needs, by name."""
        parts = {str(i): made.state for i, (made, _, _) in enumerate(self.groups)}
        return dict(tree_flatten(parts))

    def restore(self, state: Arrays) -> None:
        """Take over what `state` gave. Raises KeyError where it is not this optimiser's."""
        if state.keys() != self.state().keys():
            raise KeyError("the optimiser's state is another optimiser's")
        parts = tree_unflatten(list(state.items()))
        for i, (made, _, _) in enumerate(self.groups):
            made.state = parts[i] if isinstance(parts, list) else parts[str(i)]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.state().values())


def map_moments(state: Arrays, change: Callable[[Arrays], Arrays]) -> Arrays:
    """An optimiser's state with `change` done to its moments, as dicts by the parameter's name.

    `change` may give other names than it took: a part's moments become the whole model's, or the reverse.
    """
    leaves: dict[tuple[str, str], Arrays] = {}
    changed: Arrays = {}
    for key, value in state.items():
        group, _, rest = key.partition(".")
        name, separator, leaf = rest.rpartition(".")
        if separator:
            leaves.setdefault((group, leaf), {})[name.replace("/", ".")] = value
        else:
            changed[key] = value
    for (group, leaf), moments in leaves.items():
        changed |= {f"{group}.{_key(name)}.{leaf}": value for name, value in change(moments).items()}
    return changed


def _group(config: RunConfig, name: str, value: mx.array) -> tuple[str, float]:
    kind: Any = config.train.optimizer
    if kind == "muon" and value.ndim != 2:
        kind = "adamw"
    ratio = config.lora.plus_ratio
    return kind, float(ratio) if ratio is not None and name.endswith(".lora_b") else 1.0


def _key(name: str) -> str:
    """mlx splits names at dots; here a name is one key."""
    return name.replace(".", "/")


def _keyed(arrays: Arrays) -> Arrays:
    return {_key(name): value for name, value in arrays.items()}
