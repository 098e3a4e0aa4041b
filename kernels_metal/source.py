"""The text of our Metal kernels, from the files beside this one."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def read(*names: str) -> str:
    """The files `name`.metal of this folder, one after another."""
    return "\n".join((FOLDER / f"{name}.metal").read_text() for name in names)
