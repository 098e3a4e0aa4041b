"""A run's settings: every key, its default and its limits, written once.

Knows: YAML, `--set a.b=c`, types and ranges. Knows nothing of MLX, models or data.
"""

from __future__ import annotations

import copy
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml

from mlxserve.errors import UsageError

Section = TypeVar("Section")
BITS = (2, 3, 4, 5, 6, 8)  # that MLX can pack weights to


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Which rows, and which of their tokens are trained. format: auto looks at the rows' fields.

    train: a file (jsonl, json, csv, parquet) or a folder holding train.jsonl and maybe valid.jsonl.
    valid: a file, a share of the training rows in (0, 1), or null for none; test: a file for `eval`.
    columns: renames a row's fields before its format is found ({prompt: question, completion: answer}).
    loss_on: the assistant's turns, the last of them, or all tokens. too_long: what becomes of rows above
    train.max_seq tokens. template_kwargs: handed to the chat template (enable_thinking: false). limit: rows
    read of each file at most.
    """

    train: str = ""
    valid: float | str | None = None
    test: str | None = None
    format: Literal["auto", "messages", "completion", "text", "alpaca", "sharegpt", "preference"] = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    too_long: Literal["drop", "truncate", "error"] = "drop"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What is trained: type lora, dora, or full, which is the model itself. The adapter's product is scaled by
    alpha/rank, with rslora by alpha/sqrt(rank). dropout: of the adapters' inputs.

    targets: all-linear (every linear layer of the blocks), attention, mlp, or names or path endings, as a list
    or with commas. layers: all, or how many of the last ones. plus_ratio: LoRA+'s learning-rate ratio of b to
    a. With type full, the default targets and layers mean every parameter, and others choose among them.
    """

    type: Literal["lora", "dora", "full"] = "lora"
    rank: int = 16
    alpha: float = 32.0
    rslora: bool = False
    dropout: float = 0.0
    targets: str | list[str] = "all-linear"
    layers: int | Literal["all"] = "all"
    plus_ratio: float | None = None

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How it is trained. objective: sft, or dpo/orpo on preference rows with `beta`. epochs: times that every
    row is seen. steps: stop after so many optimiser steps; null trains `epochs`.

    tokens_per_batch counts padded tokens of one micro-batch; rows_per_batch is a limit of its rows (or pairs)
    beside that. accumulate: micro-batches of one optimiser step, each target weighing the same. max_seq: tokens
    of a row at most. packing: rows of a batch stand behind one another, unpadded, each for itself.

    lr: the highest learning rate, reached by warmup (a share of all steps below 1, else a number of steps);
    schedule: how it falls from there, to min_lr_ratio of it. optimizer: adamw8bit and adafactor need little
    memory. weight_decay: of the optimiser. clip: the gradient's norm at most, 0 for no clipping.

    checkpointing: compute each block twice instead of keeping its values; auto does where memory would be tight.
    loss_chunk: rows of the head computed at a time. compile: fuse each step's operations; auto does on an
    accelerator, where no C++ compiler runs for it. seed: of the adapter's start, the rows' order and dropout.
    """

    objective: Literal["sft", "dpo", "orpo"] = "sft"
    beta: float = 0.1
    epochs: int = 1
    steps: int | None = None
    tokens_per_batch: int = 8192
    rows_per_batch: int | None = None
    accumulate: int = 1
    max_seq: int = 2048
    packing: bool = False
    lr: float = 1e-4
    min_lr_ratio: float = 0.0
    optimizer: Literal["adamw", "adamw8bit", "adafactor", "muon", "lion"] = "adamw"
    weight_decay: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: float = 0.03
    clip: float = 1.0
    checkpointing: bool | Literal["auto"] = "auto"
    loss_chunk: int | Literal["auto"] = "auto"
    compile: bool | Literal["auto"] = "auto"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """every: steps between evaluations, 0 for only the last. patience: evaluations without a better loss
    before the run stops; null never stops. keep: which adapter becomes final/, the best by held-out loss or the
    last. samples: a file of prompts, one a line, answered at each evaluation (as often, where nothing is held
    out) with sample_tokens tokens at most."""

    every: int = 100
    patience: int | None = None
    keep: Literal["best", "last"] = "best"
    samples: str | None = None
    sample_tokens: int = 100


@dataclass(frozen=True, slots=True)
class SaveConfig:
    """dir: the run's folder. every: steps between checkpoints. keep: how many of them stay."""

    dir: str = "runs/lora"
    every: int = 100
    keep: int = 3


@dataclass(frozen=True, slots=True)
class LogConfig:
    """jsonl: write metrics.jsonl. to: more loggers, tensorboard or wandb. every: steps between lines."""

    jsonl: bool = True
    to: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    every: int = 10


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One run. quantize: bits to quantise a float model to while loading (QLoRA)."""

    model: str = ""
    quantize: int | None = None
    data: DataConfig = field(default_factory=DataConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)


def read_config(path: Path | None, settings: Sequence[str] = ()) -> RunConfig:
    """The file's settings with `a.b=c` ones put over them. Raises UsageError, naming the key at fault."""
    return from_dict(override(_read_yaml(path) if path is not None else {}, settings))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = _load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", param="config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if values is not None and not isinstance(values, dict):
        raise UsageError(f"{path} must hold keys and values, not a {type(values).__name__}.")
    return values or {}


class _Loader(yaml.SafeLoader):
    """Plain values only: no dates (a folder may be called 2026-11-30), and no key twice."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
        if twice is not None:
            raise yaml.YAMLError(f"{twice!r} stands there twice, in line {node.start_mark.line + 1} or below")
        return super().construct_mapping(node, deep)


def _load_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # noqa: S506  a SafeLoader


def override(values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """`values` with `a.b=c` settings put over them. Raises UsageError for a malformed one."""
    changed = copy.deepcopy(dict(values))
    for setting in settings:
        _apply(changed, setting)
    return changed


def _apply(values: dict[str, Any], setting: str) -> None:
    key, separator, text = setting.partition("=")
    if not separator or not key.strip():
        raise UsageError(f"--set takes key=value, as in --set lora.rank=16; got {setting!r}.", param="set")
    *sections, leaf = key.strip().split(".")
    place = values
    for section in sections:
        if place.get(section) is None:
            place[section] = {}
        place = place[section]
        if not isinstance(place, dict):
            raise UsageError(f"{section} in --set {key} is no section.", param=key)
    try:
        place[leaf] = _load_yaml(text)
    except yaml.YAMLError as error:
        raise UsageError(f"The value of --set {key} is not valid YAML: {text!r}.", param=key) from error


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """A checked RunConfig. Raises UsageError for unknown keys, wrong types and values out of range."""
    config = _section(RunConfig, values, "")
    _check(config)
    return config


def to_dict(config: RunConfig) -> dict[str, Any]:
    """All settings as plain values, for YAML and JSON."""
    return dataclasses.asdict(config)


def write_yaml(config: RunConfig) -> str:
    return yaml.safe_dump(to_dict(config), sort_keys=False)


@dataclass(frozen=True, slots=True)
class Described:
    """One section for a person: what it is about, and (key, what it takes, default) of each setting."""

    name: str
    about: str
    settings: list[tuple[str, str, str]]


def described() -> list[Described]:
    """Every setting there is; first those that stand in no section."""
    hints = typing.get_type_hints(RunConfig)
    sections = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    plain = [f for f in dataclasses.fields(RunConfig) if f.name not in sections]
    kinds: dict[str, Any] = {"": RunConfig, **sections}
    return [
        Described(
            name,
            " ".join(str(kind.__doc__).split()),
            [_described(name, kind, f) for f in (dataclasses.fields(kind) if name else plain)],
        )
        for name, kind in kinds.items()
    ]


def _described(section: str, kind: Any, setting: dataclasses.Field[Any]) -> tuple[str, str, str]:
    default = setting.default_factory() if callable(setting.default_factory) else setting.default
    words = _words(typing.get_type_hints(kind)[setting.name])
    shown = yaml.safe_dump(default, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
    return f"{section}.{setting.name}" if section else setting.name, words, shown


def _section(kind: type[Section], values: Any, path: str) -> Section:
    if not isinstance(values, Mapping):
        raise UsageError(f"{path or 'The configuration'} must hold keys and values.", param=path)
    hints = typing.get_type_hints(kind)
    made: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{path}.{key}" if path else str(key)
        if key not in hints:
            near = get_close_matches(str(key), list(hints), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(hints)}."
            raise UsageError(f"There is no setting {name!r}; {hint}", param=name)
        hint = hints[key]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            made[key] = _section(hint, value, name)
        else:
            made[key] = _value(hint, value, name)
    return kind(**made)


def _value(hint: Any, value: Any, name: str) -> Any:
    """`value` as the type hint wants it; YAML reads 1e-4 as a string, which becomes a float here."""
    for option in get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,):
        found = _as(option, value)
        if found is not _WRONG:
            return found
    raise UsageError(f"{name} must be {_words(hint)}, not {value!r}.", param=name)


_WRONG = object()


def _as(option: Any, value: Any) -> Any:
    origin = get_origin(option)
    if origin is Literal:
        return value if any(value == a and type(value) is type(a) for a in get_args(option)) else _WRONG
    if origin is list:
        (inner,) = get_args(option)
        good = isinstance(value, list) and all(_as(inner, item) is not _WRONG for item in value)
        return list(value) if good else _WRONG
    if origin is dict:
        return dict(value) if isinstance(value, dict) and all(isinstance(k, str) for k in value) else _WRONG
    if option is float:
        return _as_float(value)
    if option is type(None):
        return None if value is None else _WRONG
    wrong_bool = isinstance(value, bool) and option is not bool
    return value if isinstance(value, option) and not wrong_bool else _WRONG


def _as_float(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return _WRONG
    try:
        number = float(value)
    except ValueError:
        return _WRONG
    return number if number == number and abs(number) != float("inf") else _WRONG


def _words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is list and get_origin(get_args(hint)[0]) is Literal:
        return "a list, in brackets, of " + ", ".join(map(str, get_args(get_args(hint)[0])))
    if get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_words(option) for option in get_args(hint))
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(hint, "a list" if get_origin(hint) is list else "keys and values")


def _check(config: RunConfig) -> None:
    train, lora = config.train, config.lora
    least_one = {
        "lora.rank": lora.rank,
        "train.epochs": train.epochs,
        "train.tokens_per_batch": train.tokens_per_batch,
        "train.accumulate": train.accumulate,
        "save.keep": config.save.keep,
        "log.every": config.log.every,
        "train.steps": train.steps,
        "train.rows_per_batch": train.rows_per_batch,
        "train.loss_chunk": None if train.loss_chunk == "auto" else train.loss_chunk,
        "lora.layers": None if lora.layers == "all" else lora.layers,
        "eval.patience": config.eval.patience,
        "eval.sample_tokens": config.eval.sample_tokens,
        "data.limit": config.data.limit,
    }
    for name, number in least_one.items():
        _require(number is None or number >= 1, name, "at least 1", number)
    _require(train.max_seq >= 2, "train.max_seq", "at least 2", train.max_seq)
    _require(train.lr > 0, "train.lr", "above 0", train.lr)
    _require(train.beta > 0, "train.beta", "above 0", train.beta)
    _require(0 <= train.seed < 2**63, "train.seed", "at least 0 and below 2^63", train.seed)
    _require(lora.alpha > 0, "lora.alpha", "above 0", lora.alpha)
    bits = ", ".join(map(str, BITS))
    _require(config.quantize in (None, *BITS), "quantize", f"null or one of {bits}", config.quantize)
    _require(0 <= lora.dropout < 1, "lora.dropout", "in [0, 1)", lora.dropout)
    _require(0 <= train.min_lr_ratio <= 1, "train.min_lr_ratio", "in [0, 1]", train.min_lr_ratio)
    _require(lora.plus_ratio is None or lora.plus_ratio > 0, "lora.plus_ratio", "above 0", lora.plus_ratio)
    for name in ("warmup", "clip", "weight_decay"):
        _require(getattr(train, name) >= 0, f"train.{name}", "at least 0", getattr(train, name))
    for name, number in (("eval.every", config.eval.every), ("save.every", config.save.every)):
        _require(number >= 0, name, "at least 0", number)
    share = config.data.valid
    _require(
        not isinstance(share, float) or 0 < share < 1, "data.valid", "a file or a share in (0, 1)", share
    )
    _check_together(config)


def _check_together(config: RunConfig) -> None:
    """Refuse settings that others would leave without effect."""
    lora, pairs = config.lora, config.train.objective != "sft"
    if config.train.packing and pairs:
        raise UsageError("train.packing works with the objective sft only.", param="train.packing")
    if pairs and config.data.loss_on == "all":
        raise UsageError(
            f"data.loss_on=all does not go with train.objective={config.train.objective}, which compares "
            "answers only.",
            param="data.loss_on",
        )
    if lora.type == "full":
        for name in ("rslora", "dropout", "plus_ratio"):
            if getattr(lora, name):
                raise UsageError(f"lora.{name} has no effect with lora.type=full.", param=f"lora.{name}")
    if not lora.targets or lora.targets == [""]:
        raise UsageError("lora.targets names no layer.", param="lora.targets")


def _require(good: bool, name: str, words: str, value: Any) -> None:
    if not good:
        raise UsageError(f"{name} must be {words}, not {value!r}.", param=name)
