"""`mlxserve serve`: one local endpoint for editors, agents and a browser.

Knows: flags, the configuration file, and how the server's parts are put together. Flags come before the file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from mlxserve.cli.common import say
from mlxserve.cli.options import load_options
from mlxserve.config import DEFAULT_MODEL, GIB, MIB, EngineConfig, LoadConfig, ServerConfig
from mlxserve.errors import UsageError
from mlxserve.models.memory import show_bytes

if TYPE_CHECKING:
    from mlxserve.models.resolve import ModelFiles
    from mlxserve.server.ports import AsyncEngine
    from mlxserve.server.settings import ModelChoice, Settings

DEFAULTS = ServerConfig()
_SIZES = {"": 1, "k": 1024, "m": MIB, "g": GIB, "t": 1024 * GIB}
_TIMES = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class Size(click.ParamType):
    """Bytes, as '24GiB', '512M' or a number."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r} is no size such as 24GiB.", param, ctx)
        return int(float(match[1]) * _SIZES[match[2]])


class Duration(click.ParamType):
    """Seconds, as '10m', '1h' or a number; 'never' is infinity."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip().lower()
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text)
        if text == "never":
            return float("inf")
        if match is None:
            self.fail(f"{value!r} is no duration such as 10m.", param, ctx)
        return float(match[1]) * _TIMES[match[2]]


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a server is started with."""

    models: tuple[ModelChoice, ...]
    server: ServerConfig
    load: LoadConfig
    engine: EngineConfig


@click.command()
@click.option(
    *("-m", "--model", "models"),
    multiple=True,
    metavar="MODEL",
    help=f"Load this model at the start; may be repeated.  [default: {DEFAULT_MODEL}]",
)
@click.option(
    *("--adapter", "adapters"),
    multiple=True,
    metavar="NAME=FOLDER",
    help="Serve a LoRA adapter as MODEL@NAME, on the first model (or MODEL@NAME=FOLDER); may be repeated.",
)
@click.option(
    *("--adapter-dir", "adapter_dirs"),
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Where callers may load adapters from.  [default: anywhere, while only this machine can call]",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="For uploaded files and fine-tuning jobs.  [default: ~/.local/share/mlxserve]",
)
@click.option("--pin", is_flag=True, help="Keep the models named here in memory, whatever else is asked for.")
@click.option("--host", help=f"The address to listen on.  [default: {DEFAULTS.host}]")
@click.option("--port", type=click.IntRange(0, 65535), help=f"[default: {DEFAULTS.port}]")
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE.yaml", help="Settings as a file.")
@click.option(
    "--api-key", "api_keys", multiple=True, envvar="MLXSERVE_API_KEY", help="Ask callers for this key."
)
@click.option("--allowed-host", "allowed_hosts", multiple=True, help="Another name for this machine.")
@click.option("--cors-origin", "cors_origins", multiple=True, help="Web pages that may call, or *.")
@click.option("--tls-certificate", type=click.Path(path_type=Path, exists=True), help="A PEM file.")
@click.option("--tls-key", type=click.Path(path_type=Path, exists=True), help="A PEM file.")
@click.option(
    "--memory", "memory_bytes", type=Size(), help="For all models.  [default: what the machine has]"
)
@click.option(
    "--keep-alive", "keep_alive_s", type=Duration(), help="Of models loaded on demand.  [default: 5m]"
)
@click.option("--drain", "drain_s", type=Duration(), help="For running answers at the end.  [default: 15s]")
@click.option("--max-body", "max_body_bytes", type=Size(), help="Of a request.  [default: 32MiB]")
@click.option("--max-sequences", type=click.IntRange(1), help="Answers at once, a model.  [default: 256]")
@click.option("--max-queue", type=click.IntRange(1), help="Waiting requests, a model.  [default: 1024]")
@click.option("--cache-bytes", type=Size(), help="Of K/V, a model.  [default: what is free]")
@click.option("--cache-dir", type=click.Path(path_type=Path, file_okay=False), help="Keep prefixes on disk.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="[default: text]")
@click.option("--log-prompts", is_flag=True, default=None, help="Write what is asked into the log.")
@load_options
@click.pass_context
def serve(
    ctx: click.Context,
    models: tuple[str, ...],
    adapters: tuple[str, ...],
    pin: bool,
    config: Path | None,
    **flags: Any,
) -> None:
    """Serve models over HTTP.

    OpenAI's, Anthropic's and Ollama's APIs, and a chat page at the address itself. Stop it with Ctrl-C.
    """
    load, engine = flags.pop("load"), flags.pop("engine")
    said = {
        name for name in flags if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }
    given = {name: flags[name] for name in said if flags[name] not in (None, ())}
    plan = make_plan(models, pin, config, given, load, engine, _said_of_loading(ctx))
    _start(with_adapters(plan, adapters))


_LOADING = {
    "quantize": ("load", "quantize_bits"),
    "context": ("load", "context"),
    "dtype": ("load", "dtype"),
    "rope_theta": ("load", "rope"),
    "rope_scaling": ("load", "rope"),
    "kv_bits": ("engine", "kv_bits"),
    "check": ("engine", "check"),
}


def _said_of_loading(ctx: click.Context) -> set[tuple[str, str]]:
    """Which fields of LoadConfig and EngineConfig flags gave."""
    default = click.core.ParameterSource.DEFAULT
    return {field for name, field in _LOADING.items() if ctx.get_parameter_source(name) is not default}


def make_plan(
    models: Sequence[str],
    pin: bool,
    config: Path | None,
    given: Mapping[str, Any],
    load: LoadConfig,
    engine: EngineConfig,
    said: set[tuple[str, str]],
) -> Plan:
    """Flags over the file over defaults. Raises UsageError that names the flag or the file's key."""
    from mlxserve.server.settings import ModelChoice, Settings, read_settings

    file: Settings = read_settings(config) if config else Settings()
    chosen = tuple(ModelChoice(name=name, pin=pin) for name in models) or file.models
    server = {name: value for name, value in given.items() if name in ServerConfig.__dataclass_fields__}
    running = {name: value for name, value in given.items() if name in EngineConfig.__dataclass_fields__}
    plan = Plan(
        chosen or (ModelChoice(name=DEFAULT_MODEL, pin=pin),),
        replace(ServerConfig(), **{"data_dir": _data_dir(), **file.section("server"), **server}),
        replace(load, **_unless_said(file.section("load"), "load", said)),
        replace(engine, **{**_unless_said(file.section("engine"), "engine", said), **running}),
    )
    _check(plan.server)
    return plan


def _data_dir() -> Path:
    """Where XDG's rules put a program's data."""
    root = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(root) / "mlxserve"


def with_adapters(plan: Plan, said: Sequence[str]) -> Plan:
    """The plan with `[MODEL@]NAME=FOLDER` of the command line. Raises UsageError that names what is wrong."""
    chosen = {choice.name: dict(choice.adapters) for choice in plan.models}
    for text in said:
        where, equals, folder = text.partition("=")
        base, _, name = where.rpartition("@")
        base = base or plan.models[0].name
        if not equals or not name or not folder:
            raise UsageError(f"--adapter takes NAME=FOLDER, not {text!r}.", param="adapter")
        if base not in chosen:
            raise UsageError(f"--adapter {text}: {base} is none of the models to load.", param="adapter")
        if name in chosen[base]:
            raise UsageError(f"--adapter: {base} has two adapters called '{name}'.", param="adapter")
        chosen[base][name] = folder
    models = tuple(msgspec.structs.replace(c, adapters=chosen[c.name]) for c in plan.models)
    return replace(plan, models=models)


def _unless_said(values: Mapping[str, Any], section: str, said: set[tuple[str, str]]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if (section, name) not in said}


def _check(server: ServerConfig) -> None:
    if (server.tls_certificate is None) != (server.tls_key is None):
        raise UsageError("--tls-certificate and --tls-key go together.", param="tls_key")
    for key in server.api_keys:
        # What a header cannot carry would lock everybody out.
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(
                "An API key must not be empty, and be of ASCII letters, digits and signs without spaces.",
                param="api_keys",
            )
    for origin in server.cors_origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise UsageError(
                f"--cors-origin takes *, or scheme://host[:port] without a path, not {origin!r}.",
                param="cors_origins",
            )


def _start(plan: Plan) -> None:
    from mlxserve.models.backend import check_backend

    check_backend()
    _set_up_log(plan.server)
    asyncio.run(_serve(plan))


def _set_up_log(server: ServerConfig) -> None:
    """Our own lines on standard error; other packages only where something is wrong."""
    from mlxserve.server.logs import JsonLines

    text = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if server.log_format == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("mlxserve").setLevel(logging.INFO)


async def _serve(plan: Plan) -> None:
    import mlx.core as mx

    from mlxserve.cli.trainer import JobTrainer
    from mlxserve.distributed.front import launched
    from mlxserve.engine.memory import machine_budget
    from mlxserve.server.app import make_app
    from mlxserve.server.lifecycle import allow_many_connections, bind, check_tls, serve, warnings_for
    from mlxserve.server.local import LocalLoader
    from mlxserve.server.models import ModelRegistry

    if launched() and len(plan.models) > 1:
        raise UsageError("Ranks serve one model; give --model once.", param="model")
    check_tls(plan.server)
    allow_many_connections()
    listener = bind(plan.server)
    on_cpu = mx.default_device() == mx.cpu
    names = [choice.name for choice in plan.models]
    start = _start_on_ranks if launched() else None
    loader = await asyncio.to_thread(LocalLoader, names, plan.load, plan.engine, on_cpu=on_cpu, start=start)
    models = ModelRegistry(
        loader,
        plan.server.memory_bytes or machine_budget(),
        keep_alive_s=plan.server.keep_alive_s,
        load_wait_s=plan.server.load_wait_s,
    )
    try:
        for choice in plan.models:
            await _preload(models, loader.served[choice.name], choice, pin=choice.pin or start is not None)
        for warning in warnings_for(plan.server):
            say(f"Warning: {warning}")
        say(f"Listening on {_address(plan.server, listener.getsockname()[1])}")
        app = make_app(plan.server, models, JobTrainer())
        await serve(app, plan.server, listener)
    finally:
        await models.close()
        listener.close()


async def _start_on_ranks(files: ModelFiles, load: LoadConfig, engine: EngineConfig) -> AsyncEngine:
    """The engine of a model on the ranks that `mlxserve launch` has started."""
    from mlxserve.distributed.front import start_ranks
    from mlxserve.engine.aio import AsyncLLM

    return AsyncLLM(await asyncio.to_thread(start_ranks, files, load, engine))


async def _preload(models: Any, name: str, choice: ModelChoice, *, pin: bool) -> None:
    entry = await models.preload(name, pinned=pin)
    for note in getattr(entry.engine, "notes", ()):
        say(note)
    size = (
        f"{show_bytes(entry.card.needed_bytes)}, " if entry.card.needed_bytes else ""
    )  # 0: it lies elsewhere
    say(f"{name}: {size}{entry.engine.context:,} tokens of context")
    for adapter, folder in choice.adapters.items():
        known = await models.load_adapter(name, adapter, Path(folder).expanduser())
        say(f"{known.id}: {known.info.kind} of rank {known.info.rank} on {known.info.layers} layers")
        if known.info.note:
            say(known.info.note)


def _address(server: ServerConfig, port: int) -> str:
    scheme = "https" if server.tls_certificate else "http"
    host = f"[{server.host}]" if ":" in server.host else server.host
    return f"{scheme}://{host}:{port}"
