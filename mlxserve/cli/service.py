"""`mlxserve service`: the server as a launchd agent, which starts with the session and comes back after a crash.

Knows: launchd's property lists (launchd.plist(5)) and `launchctl`. Does not know what `serve` does with its
arguments; they are checked by its own parser, and their file by its own reader, before anything is written.
"""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from mlxserve.cli.common import say
from mlxserve.errors import MlxServeError, UsageError

LABEL = "io.mlxserve.serve"


def agent_file() -> Path:
    return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"


def log_file() -> Path:
    return Path.home() / "Library" / "Logs" / "mlxserve.log"


def agent(arguments: list[str]) -> dict[str, Any]:
    """The agent's property list: restarted unless it ended well, throttled, its output in one file.

    It runs in the folder where it was installed, so that relative paths mean what they meant there.
    """
    log = str(log_file())
    return {
        "Label": LABEL,
        "ProgramArguments": [sys.executable, "-m", "mlxserve", "serve", *arguments],
        "WorkingDirectory": os.getcwd(),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ProcessType": "Interactive",
        "ExitTimeOut": 30,
        "StandardOutPath": log,
        "StandardErrorPath": log,
        "EnvironmentVariables": _environment(),
    }


def _environment() -> dict[str, str]:
    """What the server reads from the environment, as it is now; no keys are written to the file."""
    kept = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "PATH", "XDG_CACHE_HOME", "XDG_DATA_HOME")
    return {name: os.environ[name] for name in kept if name in os.environ}


@click.group()
def service() -> None:
    """Run the server in the background of a Mac session (launchd)."""


@service.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def install(arguments: tuple[str, ...]) -> None:
    """Install and start the agent: mlxserve service install --model smollm2 --port 8080"""
    _check_arguments(list(arguments))
    path = agent_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    log_file().parent.mkdir(parents=True, exist_ok=True)
    loaded = path.exists() and _launchctl("bootout", _target(), quiet=True)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(plistlib.dumps(agent(list(arguments))))
    fresh.chmod(0o600)
    fresh.replace(path)
    say(f"Wrote {path}")
    if os.environ.get("MLXSERVE_API_KEY"):
        say(
            "Warning: MLXSERVE_API_KEY is not written into the agent; for a key, put api_keys into a file that "
            "only you can read, and give --config FILE."
        )
    if _launchctl("bootstrap", _domain(), str(path)):
        say(f"{'Restarted' if loaded else 'Started'}; it writes to {log_file()}")
    else:
        say("This is no Mac, so the agent was written and not started.")


def _check_arguments(arguments: list[str]) -> None:
    """Refuses now what `serve` would refuse in the background, where nobody looks."""
    from mlxserve.cli.serve import serve
    from mlxserve.server.settings import read_settings

    if any(word == "--api-key" or word.startswith("--api-key=") for word in arguments):
        raise UsageError(
            "An API key does not belong in the agent's arguments, which anyone can list; put api_keys into a "
            "file that only you can read, and give --config FILE.",
            param="--api-key",
        )
    said = serve.make_context("serve", list(arguments)).params
    if said["config"] is not None:
        read_settings(said["config"])


@service.command()
def uninstall() -> None:
    """Stop the agent and remove it."""
    path = agent_file()
    if not path.exists():
        raise UsageError(f"No agent is installed ({path}).")
    _launchctl("bootout", _target(), quiet=True)
    path.unlink()
    say(f"Removed {path}")


@service.command()
def status() -> None:
    """Say whether the agent is installed, and whether it runs."""
    path = agent_file()
    if not path.exists():
        raise UsageError(f"No agent is installed ({path}).")
    command = plistlib.loads(path.read_bytes())["ProgramArguments"]
    click.echo(f"installed: {path}\ncommand: {' '.join(command[1:])}\nlog: {log_file()}\nstate: {_state()}")


def _state() -> str:
    if shutil.which("launchctl") is None:
        return "unknown, this is no Mac"
    shown = subprocess.run(["launchctl", "print", _target()], capture_output=True, text=True, check=False)
    if shown.returncode:
        return "not running"
    lines = (line.strip() for line in shown.stdout.splitlines())
    return next((line.removeprefix("state = ") for line in lines if line.startswith("state = ")), "loaded")


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _target() -> str:
    return f"{_domain()}/{LABEL}"


def _launchctl(*arguments: str, quiet: bool = False) -> bool:
    """True once launchctl has done it; False where there is no launchctl, or it refused and `quiet`."""
    if shutil.which("launchctl") is None:
        return False
    done = subprocess.run(["launchctl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode and not quiet:
        raise MlxServeError(f"launchctl {arguments[0]} failed: {done.stderr.strip() or done.returncode}.")
    return done.returncode == 0
