"""serve.yaml: the server's settings as a file.

Knows: the sections and their fields, which are `config`'s own; unknown ones are refused by name. Does not know
the command line, whose flags come before the file.

    models: [smollm2, {name: ./my-model, pin: true, adapters: {support: ./runs/support/final}}]
    server: {port: 8080, api_keys: [secret], keep_alive_s: 600}
    load: {context: 8192}
    engine: {kv_bits: 8, max_sequences: 64}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
import yaml
from msgspec import Meta

from mlxserve.config import EngineConfig, LoadConfig, ServerConfig
from mlxserve.errors import UsageError
from mlxserve.server.fields import Part, part

# Paths are written as text.
_WRITTEN: dict[Any, Any] = {Path: str, Path | None: str | None, tuple[Path, ...]: list[str]}


# Which values are legal, where the type alone says too little.
_CHOICES: dict[str, Any] = {
    "log_format": Literal["text", "json"],
    "dtype": Literal["auto", "float32", "float16", "bfloat16"],
    "quantize_bits": Literal[2, 3, 4, 5, 6, 8] | None,
    "quantize_group_size": Literal[32, 64, 128],
    "kv_bits": Literal[4, 8, 16],
    "kv_group_size": Literal[32, 64, 128],
}
_NONE_OF = {
    "drain_s",
    "keep_alive_s",
    "load_wait_s",
    "stored_responses",
    "stored_response_bytes",
}  # 0 is legal
_RANGES = {"port": Meta(ge=0, le=65535)} | dict.fromkeys(_NONE_OF, Meta(ge=0))


def _legal(name: str, hint: Any) -> Any:
    """The type of one field with its range: numbers are above 0 unless said otherwise."""
    if name in _CHOICES:
        return _CHOICES[name]
    if hint in _WRITTEN:
        return _WRITTEN[hint]
    number = next((each for each in (hint, *get_args(hint)) if each in (int, float)), None)
    if number is None:
        return hint
    bounded = Annotated[number, _RANGES.get(name, Meta(gt=0))]  # type: ignore[valid-type]
    return bounded | None if hint == number | None else bounded


def _section(kind: type) -> type[msgspec.Struct]:
    """A frozen dataclass's fields as an object to be read: each optional, none unknown or out of range."""
    hints = {name: _legal(name, hint) for name, hint in get_type_hints(kind).items()}
    return msgspec.defstruct(
        kind.__name__,
        [(item.name, hints[item.name], msgspec.UNSET) for item in fields(kind)],
        forbid_unknown_fields=True,
        kw_only=True,
    )


class ModelChoice(Part):
    """One model to load at the start. `pin` keeps it in memory whatever else is asked for.

    adapters: LoRA adapters on it, names and folders; requests name them as `model@adapter`.
    """

    name: str
    pin: bool = False
    adapters: dict[str, str] = {}


class _File(Part):
    models: list[str | ModelChoice] = []
    server: dict[str, Any] = {}
    load: dict[str, Any] = {}
    engine: dict[str, Any] = {}


_SECTIONS: dict[str, type] = {"server": ServerConfig, "load": LoadConfig, "engine": EngineConfig}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a file says; only what it says. `values` has a mapping for each section."""

    models: tuple[ModelChoice, ...] = ()
    values: Mapping[str, Mapping[str, Any]] | None = None

    def section(self, name: str) -> Mapping[str, Any]:
        return (self.values or {}).get(name, {})


def read_settings(path: Path) -> Settings:
    """The settings in a YAML file. Raises UsageError that names the file and the key."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", param="config") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is not valid YAML: {' '.join(str(error).split())}.", param="config"
        ) from None
    try:
        return _read(raw)
    except UsageError as error:
        raise UsageError(f"{path}: {error}", param=error.param) from None


def _read(raw: Any) -> Settings:
    file = part(raw, _File)
    models = tuple(ModelChoice(name=item) if isinstance(item, str) else item for item in file.models)
    values = {name: _values(getattr(file, name), kind, name) for name, kind in _SECTIONS.items()}
    return Settings(models, values)


def _values(raw: Mapping[str, Any], kind: type, name: str) -> dict[str, Any]:
    read = part(raw, _section(kind), name)
    hints = get_type_hints(kind)
    return {field: _as_path(hints[field], getattr(read, field)) for field in raw}


def _as_path(hint: Any, value: Any) -> Any:
    if hint not in _WRITTEN or value is None:
        return value
    return tuple(map(_path, value)) if isinstance(value, list) else _path(value)


def _path(text: str) -> Path:
    return Path(text).expanduser()
