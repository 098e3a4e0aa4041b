"""`mlxserve doctor`: what this machine has, what is wrong with it, and what would help.

Knows: how to find out, and the advice for each finding. A problem keeps models from running; advice
would make them run better.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxserve import __version__, blas
from mlxserve.cli.common import table
from mlxserve.config import DEFAULT_MODEL
from mlxserve.distributed.faults import LaunchFailed
from mlxserve.errors import DependencyMissing
from mlxserve.models.backend import backend_problem, check_backend, installed_backends, package_version
from mlxserve.models.cached import cache_folder
from mlxserve.models.hub import free_disk
from mlxserve.models.memory import show_bytes
from mlxserve.models.resolve import packaged_file

if TYPE_CHECKING:
    from mlxserve.distributed.survey import Survey

LOW_DISK_BYTES = 10 * 1024**3


@dataclass
class Report:
    """Findings by topic, and what to do about them."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--hosts", type=click.Path(path_type=Path), metavar="FILE", help="Look at these hosts instead.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, hosts: Path | None) -> None:
    """Look at this machine, or at several, and say what would help."""
    if hosts is not None:
        from mlxserve.distributed.hosts import read_hostfile
        from mlxserve.distributed.survey import survey

        found = survey(read_hostfile(hosts))
        click.echo(json.dumps(asdict(found), indent=1) if as_json else _hosts_in_words(found))
        if found.problems:
            ctx.exit(LaunchFailed.exit_code)
        return
    report = examine()
    click.echo(json.dumps(asdict(report), indent=1) if as_json else _in_words(report))
    if report.problems:
        ctx.exit(DependencyMissing.exit_code)


def examine() -> Report:
    """Look at everything; a part that cannot be looked at is a problem of the report, not an error."""
    report = Report()
    checks: list[Callable[[Report], None]] = [_system, _packages, _backend, _blas, _cache, _model]
    for check in checks:
        check(report)
    return report


def _system(report: Report) -> None:
    report.facts["mlxserve"] = __version__
    report.facts["python"] = f"{platform.python_version()} ({sys.executable})"
    report.facts["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        report.problems.append(
            "This Python runs as x86_64, and MLX has no Metal there: install a Python for Apple Silicon (arm64)."
        )


def _packages(report: Report) -> None:
    """Versions of MLX and mlx-lm against the bounds that the tests passed on."""
    for name in ("mlx", "mlx-lm"):
        found, bounds = package_version(name), tested_bounds(name)
        report.facts[name] = found or "not installed"
        if found is None:
            report.problems.append(f"The package {name} is not installed: pip install {name}.")
        elif bounds and not is_within(found, bounds):
            report.advice.append(
                f"{name} {found} is outside of what mlxserve was tested with ({bounds}): "
                f"pip install '{name}{bounds}'."
            )


def tested_bounds(name: str) -> str:
    """The versions of a package that mlxserve's own metadata asks for, '' if there is none of it."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires("mlxserve") or ()]
    except PackageNotFoundError:
        return ""
    return next((str(item.specifier) for item in wanted if item.name == name and not item.marker), "")


def is_within(version: str, bounds: str) -> bool:
    """True if a version satisfies bounds such as '>=0.32,<0.33'."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(bounds).contains(version, prereleases=True)


def _backend(report: Report) -> None:
    backends = installed_backends()
    report.facts["backends"] = ", ".join(backends) or "none"
    problem = backend_problem(backends)
    try:
        check_backend()
    except DependencyMissing as error:
        report.problems.append(problem or error.message)
        return
    if problem:
        report.advice.append(problem)
    _devices(report)


def _devices(report: Report) -> None:
    import mlx.core as mx

    from mlxserve.engine.memory import machine_budget

    device = mx.default_device()
    info = mx.device_info()
    on_gpu = device != mx.cpu
    report.facts["device"] = f"{'GPU' if on_gpu else 'CPU'}, {info.get('device_name', 'unnamed')}"
    report.facts["memory for models"] = show_bytes(machine_budget())
    if total := info.get("memory_size"):
        report.facts["memory"] = show_bytes(int(total))
    if not on_gpu and sys.platform == "darwin":
        report.problems.append("MLX finds no Metal device on this Mac; macOS 14 or later is needed.")
    if on_gpu and sys.platform == "darwin":
        report.facts["memory limit"] = "'sudo sysctl iogpu.wired_limit_mb=N' raises it until the next start"


def _blas(report: Report) -> None:
    report.facts["BLAS"] = blas.in_use()
    if blas.in_use() == "reference" and "mlx-cpu" in installed_backends():
        report.advice.append(
            "MLX computes with its slow reference BLAS; OpenBLAS makes it many times faster: "
            "apt install libopenblas0 (or your system's package of libopenblas)."
        )


def _cache(report: Report) -> None:
    from huggingface_hub import constants, get_token

    free = free_disk()
    report.facts["model cache"] = f"{cache_folder()}, {show_bytes(free)} free"
    report.facts["Hub"] = f"{'offline' if constants.is_offline_mode() else 'online'}, " + (
        "logged in" if get_token() else "not logged in"
    )
    if free < LOW_DISK_BYTES:
        report.advice.append(
            f"Only {show_bytes(free)} are free for models: remove some ('mlxserve models rm') or set "
            "HF_HUB_CACHE to another disk."
        )


def _model(report: Report) -> None:
    path: Path | None = packaged_file(DEFAULT_MODEL)
    report.facts["default model"] = f"{DEFAULT_MODEL}, {'packaged' if path else 'fetched when first used'}"


def _hosts_in_words(found: Survey) -> str:
    """One column a host, one line a topic."""
    topics = list(dict.fromkeys(topic for facts in found.facts for topic in facts))
    rows = [[_TOPICS.get(topic, topic), *(_show(topic, facts) for facts in found.facts)] for topic in topics]
    return "\n".join([table(rows), *_findings(found)])


_TOPICS = {"mlx_lm": "mlx-lm", "memory_bytes": "memory", "free_disk_bytes": "free disk", "rdma": "RDMA"}


def _show(topic: str, facts: Mapping[str, Any]) -> str:
    value = facts.get(topic, "?")
    if topic.endswith("_bytes") and value != "?":
        return show_bytes(int(value))
    return (", ".join(value) or "none") if isinstance(value, list) else str(value)


def _in_words(report: Report) -> str:
    facts = table([[topic, str(fact)] for topic, fact in report.facts.items()])
    return "\n".join([facts, *_findings(report)])


def _findings(report: Report | Survey) -> list[str]:
    parts = [f"problem: {text}" for text in report.problems]
    parts += [f"advice: {text}" for text in report.advice]
    if not report.problems and not report.advice:
        parts.append("Nothing to improve.")
    return parts
