"""The sdist and the wheel: they hold everything, and install into an empty environment.

No network: the build runs without isolation, the installation without dependencies; those of this environment are
lent to the new one for the time of a command.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxserve import __version__
from tests.conftest import ROOT

PARTS = {
    "mlxserve": "mlxserve",
    **{name: f"mlxserve/{name}" for name in ("kernels_metal", "lora", "distributed")},
}
NEEDED = ("pyproject.toml", "README.md", "LICENSE", *PARTS)


def sources() -> set[str]:
    """Every file of the package by its name in it: also .metal bodies, the chat page, the recipes."""
    found = set()
    for folder, place in PARTS.items():
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT / folder)
            through_link = any((ROOT / folder / parent).is_symlink() for parent in inside.parents)
            if path.is_file() and not through_link and "__pycache__" not in inside.parts:
                found.add(f"{place}/{inside}")
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the sdist, and the wheel that was built from it."""
    copy = tmp_path_factory.mktemp("source") / "mlxserve"
    copy.mkdir()
    hidden = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=hidden)
        else:
            shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    yield out


def test_the_wheel_holds_every_file_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"mlxserve-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == sources()
    for sample in (
        "mlxserve/kernels_metal/attention.metal",
        "mlxserve/server/static/index.html",
        "mlxserve/py.typed",
    ):
        assert sample in inside
    assert any(name.startswith("mlxserve/lora/recipes/") for name in inside)
    assert f"mlxserve-{__version__}.dist-info/licenses/LICENSE" in names


def test_the_sdist_can_build_it_all(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert sources() | {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_it_installs_into_an_empty_environment(built: Path, tiny_llama: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    home = tmp_path / "empty"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    # Without the paths that test runners hand on: pip would find this checkout, and have nothing to do.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, str(wheel)], check=True, env=clean, cwd=tmp_path)
    site = next(home.glob("lib/python*/site-packages"))
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(home / "bin" / arguments[0]), *arguments[1:]],
            capture_output=True,
            text=True,
            env=clean,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run("python", "-c", "import mlxserve.lora, mlxserve.distributed; print(mlxserve.lora.__file__)")
    assert Path(where.strip()).is_relative_to(home)
    assert run("mlxserve", "--version") == f"mlxserve {__version__}\n"
    assert "paged_decode" in run("mlxserve", "kernels", "list")
    said = run("mlxserve", "generate", "-m", str(tiny_llama), "-p", "hi", "--max-tokens", "3", "--json")
    assert '"completion_tokens": 3' in said
