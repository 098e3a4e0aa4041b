"""Options that several commands share, and the settings that they make.

Knows: names, help texts and types of flags. Defaults are `config`'s, ranges `request`'s.
Does not know: what a command does with the settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from mlxserve.config import DEFAULT_MODEL, SAMPLING_DEFAULTS, EngineConfig, LoadConfig
from mlxserve.errors import UsageError
from mlxserve.request import SamplingParams

Command = TypeVar("Command", bound=Callable[..., Any])
QUANTIZE_BITS = ("2", "3", "4", "5", "6", "8")
KV_BITS = ("16", "8", "4")
DTYPES = ("auto", "float32", "float16", "bfloat16")


def model_option(command: Command) -> Command:
    """`--model`, passed on as `model`."""
    return click.option(
        *("-m", "--model"),
        default=DEFAULT_MODEL,
        show_default=True,
        envvar="MLXSERVE_MODEL",
        help="A folder, a .gguf file, a Hub name (org/name, org/name:FILE.gguf) or an alias.",
    )(command)


def adapter_option(command: Command) -> Command:
    """`--adapter`, passed on as `adapter`."""
    return click.option(
        "--adapter",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="Answer through this LoRA adapter (mlx-lm's or PEFT's format).",
    )(command)


def load_options(command: Command) -> Command:
    """How the model is loaded and run; passed on as `load` and `engine`."""

    @click.option(
        "--quantize", type=click.Choice(QUANTIZE_BITS), help="Quantise to so many bits while loading."
    )
    @click.option(
        "--context", type=int, metavar="TOKENS", help="Tokens a sequence may hold.  [default: the model's]"
    )
    @click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        default=LoadConfig().dtype,
        show_default=True,
        help="What to compute in; auto is as stored, and float32 on a CPU.",
    )
    @click.option("--rope-theta", type=float, help="Override the base of the rotary embedding.")
    @click.option("--rope-scaling", metavar="JSON", help="Override the scaling of the rotary embedding.")
    @click.option(
        "--kv-bits",
        type=click.Choice(KV_BITS),
        default=str(EngineConfig().kv_bits),
        show_default=True,
        help="Bits of each stored key and value; 16 is as the model computes.",
    )
    @click.option("--check", is_flag=True, help="Check the engine's books whenever it is idle.")
    @wraps(command)
    def with_settings(
        *args: Any,
        quantize: str | None,
        context: int | None,
        dtype: str,
        rope_theta: float | None,
        rope_scaling: str | None,
        kv_bits: str,
        check: bool,
        **others: Any,
    ) -> Any:
        load = LoadConfig(
            dtype=dtype,
            quantize_bits=int(quantize) if quantize else None,
            context=_positive("--context", context),
            rope=_rope(rope_theta, rope_scaling),
        )
        return command(*args, load=load, engine=EngineConfig(kv_bits=int(kv_bits), check=check), **others)

    return with_settings  # type: ignore[return-value]


def _positive(flag: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise UsageError(f"{flag} must be at least 1, not {value}.", param=flag)
    return value


def _rope(theta: float | None, scaling: str | None) -> dict[str, Any]:
    rope: dict[str, Any] = {}
    if theta is not None:
        rope["rope_theta"] = theta
    if scaling is not None:
        rope["rope_scaling"] = parse_json_object("--rope-scaling", scaling)
    return rope


def parse_json_object(flag: str, text: str) -> dict[str, Any]:
    """The JSON object that a flag holds. Raises UsageError, naming the flag, for anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{flag} is not valid JSON: {error}.", param=flag) from error
    if not isinstance(value, dict):
        raise UsageError(f"{flag} must be a JSON object, not {text}.", param=flag)
    return value


def sampling_options(command: Command) -> Command:
    """How text is drawn; passed on as `params`, a SamplingParams with None where nothing was said."""

    @_number("--max-tokens", int, "Tokens of an answer at most.")
    @_number("--temperature", float, "0 takes the likeliest token.")
    @_number("--top-p", float, "Keep the likeliest tokens up to this share.")
    @_number("--top-k", int, "Keep so many of the likeliest tokens, 0 all.")
    @_number("--min-p", float, "Keep tokens with this share of the likeliest's.")
    @_number("--repetition-penalty", float, "Above 1 avoids what was said.")
    @_number("--presence-penalty", float, "Above 0 avoids tokens of the answer.")
    @_number("--frequency-penalty", float, "The same, growing with every use.")
    @click.option("--seed", type=int, help="The same seed draws the same answer.")
    @click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
    @wraps(command)
    def with_params(*args: Any, **options: Any) -> Any:
        given = {name: options.pop(name) for name in SAMPLING_FLAGS}
        return command(*args, params=SamplingParams(**given), **options)

    return with_params  # type: ignore[return-value]


SAMPLING_FLAGS = (*(item.name for item in fields(SAMPLING_DEFAULTS)), "seed", "stop")


def _number(flag: str, kind: type, words: str) -> Callable[[Command], Command]:
    """An option that is None where nothing was said, and says what holds then."""
    default = getattr(SAMPLING_DEFAULTS, flag.lstrip("-").replace("-", "_"))
    return click.option(flag, type=kind, help=f"{words}  [default: the model's, else {default}]")


def structure_options(command: Command) -> Command:
    """What the answer must look like; passed on as `structure`, fields for SamplingParams."""

    @click.option(
        "--schema",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Answer in JSON of this JSON schema.",
    )
    @click.option("--regex", metavar="PATTERN", help="Answer with a text that this expression matches.")
    @click.option("--choice", multiple=True, metavar="TEXT", help="Answer with one of these; repeat it.")
    @wraps(command)
    def with_structure(
        *args: Any, schema: Path | None, regex: str | None, choice: tuple[str, ...], **others: Any
    ) -> Any:
        structure: dict[str, Any] = {}
        if schema is not None:
            structure["schema"] = read_schema(schema)
        if regex is not None:
            structure["regex"] = regex
        if choice:
            structure["choices"] = choice
        return command(*args, structure=structure, **others)

    return with_structure  # type: ignore[return-value]


def read_schema(path: Path) -> Mapping[str, Any] | bool:
    """A JSON schema from a file. Raises UsageError, naming the file, if it is none."""
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", param="schema") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}.", param="schema") from error
    if not isinstance(schema, dict | bool):
        raise UsageError(f"{path} holds no JSON schema, which is an object.", param="schema")
    return schema
