"""`mlxserve models`: what models there are, fetching them, what they need, and taking them away."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from mlxserve.cli.common import say, table
from mlxserve.cli.options import DTYPES, KV_BITS
from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.errors import DependencyMissing, ModelNotFound, UsageError
from mlxserve.models.aliases import HUB, PACKAGED
from mlxserve.models.cached import list_cached, parse_hub_name, remove
from mlxserve.models.describe import Description, describe
from mlxserve.models.kvlayout import kv_layers
from mlxserve.models.memory import Estimate, kv_bytes, show_bytes, show_count, width_of
from mlxserve.models.resolve import find_local, packaged_file


@click.group()
def models() -> None:
    """List, fetch, show and remove models."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
def list_models(as_json: bool) -> None:
    """Show models on this disk, and aliases for more."""
    here = _on_this_disk()
    present = {alias for row in here if row["kind"] != "incomplete" for alias in row["aliases"]}
    absent = [{"name": alias, "source": name} for alias, name in HUB.items() if alias not in present]
    if as_json:
        click.echo(json.dumps({"models": here, "aliases": absent}, indent=1))
        return
    if here:
        rows = [
            [row["name"], row["kind"], show_bytes(row["bytes"]), ", ".join(row["aliases"])] for row in here
        ]
        click.echo(table([["MODEL", "KIND", "SIZE", "ALIASES"], *rows]))
    else:
        click.echo("No models on this disk.")
    if absent:
        click.echo("\nFetched when first used:")
        click.echo(table([["ALIAS", "HUB NAME"], *_by_source(absent)]))


def _by_source(absent: list[dict[str, str]]) -> list[list[str]]:
    """One row a Hub name, with all its aliases."""
    sources = dict.fromkeys(row["source"] for row in absent)
    return [[", ".join(r["name"] for r in absent if r["source"] == source), source] for source in sources]


def _on_this_disk() -> list[dict[str, Any]]:
    rows = []
    for alias, (package, _) in PACKAGED.items():
        if path := packaged_file(alias):
            size = path.stat().st_size
            row = {"name": alias, "kind": "gguf", "bytes": size, "path": str(path), "aliases": [alias]}
            rows.append({**row, "package": package})
    for model in list_cached():
        aliases = [alias for alias, name in HUB.items() if name == model.name and not packaged_file(alias)]
        row = {"name": model.name, "kind": model.kind, "bytes": model.nbytes, "path": str(model.path)}
        rows.append({**row, "aliases": aliases})
    return rows


@models.command()
@click.argument("name")
def pull(name: str) -> None:
    """Fetch a model from the Hub, or bring it up to date; prints where it is."""
    found = find_local(name)
    if found:
        say(f"{name} is already on this disk.")
        click.echo(found.path)
        return
    from mlxserve.models.hub import pull as fetch

    hub_name = parse_hub_name(HUB.get(name.lower(), name))
    if hub_name is None:
        raise ModelNotFound(
            f"{name!r} is no alias and no Hub name (org/name); 'mlxserve models list' shows aliases."
        )
    click.echo(fetch(hub_name))


@models.command()
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def rm(name: str, yes: bool) -> None:
    """Remove a model from the cache."""
    packaged = PACKAGED.get(name.lower())
    if packaged and packaged_file(name):
        package = packaged[0].replace("_", "-")
        raise UsageError(f"{name} is part of the Python package {package}: pip uninstall {package}.")
    hub_name = parse_hub_name(HUB.get(name.lower(), name))
    if hub_name is None:
        raise UsageError(f"{name!r} is no alias and no Hub name; only models of the cache can be removed.")
    if not yes and not _agreed(f"Remove {hub_name} from the cache?"):
        say("Nothing was removed.")
        return
    say(f"Removed {hub_name}; {show_bytes(remove(hub_name))} are free again.")


def _agreed(question: str) -> bool:
    """Ask on the terminal; without one nobody can answer, and the way out is a flag."""
    if not sys.stdin.isatty():
        raise UsageError("Nobody is there to ask; say --yes to remove without asking.", param="--yes")
    return click.confirm(question, err=True)


@models.command()
@click.argument("name")
@click.option(
    "--context", type=click.IntRange(min=1), metavar="TOKENS", help="Tokens to work memory out for."
)
@click.option("--kv-bits", type=click.Choice(KV_BITS), default=str(EngineConfig().kv_bits), show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), default=LoadConfig().dtype, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def show(name: str, context: int | None, kv_bits: str, dtype: str, as_json: bool) -> None:
    """Show size, context and memory of a model, and whether it fits this machine."""
    facts = _facts(describe(name), context, int(kv_bits), dtype)
    click.echo(json.dumps(facts, indent=1) if as_json else _card(facts))


def _facts(model: Description, context: int | None, kv_bits: int, dtype: str) -> dict[str, Any]:
    """Everything `show` says, as plain values; sizes in bytes."""
    machine = _machine()
    on_cpu = machine is None or machine["device"] == "cpu"
    float_bytes = width_of(dtype, model.float_bytes, on_cpu)
    tokens = context or model.context
    estimate = Estimate(
        weight_bytes=model.weights.loaded_bytes(float_bytes, on_cpu),
        kv_bytes=kv_bytes(model.config, tokens, kv_bits=kv_bits, float_bytes=float_bytes),
        context=tokens,
        budget_bytes=machine["budget_bytes"] if machine else 0,
    )
    return {
        "name": model.name,
        "path": str(model.path) if model.path else None,
        "architecture": model.architecture,
        "supported": model.is_defined,
        "parameters": model.weights.parameters,
        "bits_per_weight": round(model.weights.bits_per_weight, 2),
        "types": model.types,
        "bytes": model.weights.nbytes,
        "context": model.context,
        "layers_with_kv": len(kv_layers(model.config)),
        "kv_bits": kv_bits,
        "kv_bytes_per_token": kv_bytes(model.config, 1, kv_bits=kv_bits, float_bytes=float_bytes),
        "memory": {
            "context": tokens,
            "weight_bytes": estimate.weight_bytes,
            "kv_bytes": estimate.kv_bytes,
            "needed_bytes": estimate.needed_bytes,
        },
        "machine": {**machine, "fits": estimate.fits} if machine else None,
    }


def _machine() -> dict[str, Any] | None:
    """What this machine has for models; None where MLX cannot be loaded."""
    try:
        from mlxserve.models.backend import check_backend

        check_backend()
    except DependencyMissing:
        return None
    import mlx.core as mx

    from mlxserve.engine.memory import machine_budget

    device = "cpu" if mx.default_device() == mx.cpu else "gpu"
    return {"device": device, "budget_bytes": machine_budget()}


def _card(facts: dict[str, Any]) -> str:
    memory, machine = facts["memory"], facts["machine"]
    types = ", ".join(f"{count} {kind}" for kind, count in list(facts["types"].items())[:4])
    rows = [
        ["architecture", facts["architecture"] + ("" if facts["supported"] else " (not defined by mlx-lm)")],
        ["parameters", f"{show_count(facts['parameters'])}, {facts['bits_per_weight']} bits each ({types})"],
        ["size", f"{show_bytes(facts['bytes'])} {'at ' + facts['path'] if facts['path'] else 'on the Hub'}"],
        ["context", f"{facts['context']:,} tokens"],
        ["K/V", f"{facts['kv_bytes_per_token']:,} bytes a token, {_kv_form(facts)}"],
        [
            "memory",
            f"{show_bytes(memory['weight_bytes'])} weights + {show_bytes(memory['kv_bytes'])} K/V for "
            f"{memory['context']:,} tokens = {show_bytes(memory['needed_bytes'])}",
        ],
        ["this machine", _verdict(machine)],
    ]
    return f"{facts['name']}\n" + table([["", *row] for row in rows])


def _kv_form(facts: dict[str, Any]) -> str:
    return "as computed" if facts["kv_bits"] == 16 else f"packed in {facts['kv_bits']} bits"


def _verdict(machine: dict[str, Any] | None) -> str:
    if machine is None:
        return "unknown, MLX cannot be loaded here; see 'mlxserve doctor'"
    room = f"{show_bytes(machine['budget_bytes'])} for models on its {machine['device'].upper()}"
    return f"{room}: it {'fits' if machine['fits'] else 'does not fit'}"
