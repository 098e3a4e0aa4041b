"""Who may import whom: the table in ARCHITECTURE.md, read from the code itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

EVERYONE = {"errors", "config", "request", "display"}
PLAIN = {"errors", "config", "request", "display", "engine.batch"}
MLX = {"mlx"}
MLX_LM = {"mlx_lm"}
# Bookkeeping in plain integers: pages, the prefix tree, and who is computed when.
BOOKS = {"cache.pages", "cache.prefix", "cache.radix"}
BOOKS |= {"engine.scheduler", "engine.sequence", "engine.waiting", "engine.pace"}
BOOKS |= {"engine.cache_manager", "engine.capacity", "engine.shared_prefix"}
PURE = PLAIN | BOOKS
# room -> rooms it may import, beyond EVERYONE; the most specific name decides.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "display": set(),
    "config": PLAIN,
    "request": PLAIN,
    "blas": set(),
    "engine.batch": PLAIN,
    **dict.fromkeys(BOOKS, PURE),
    "kernels_metal": MLX | {"kernels_metal"},
    "cache": MLX | {"cache", "kernels_metal"},
    "models": MLX | MLX_LM | {"models", "kernels_metal", "cache.store", "cache.state"},
    "text": {"text", "mlx_lm"},
    "engine": MLX | {"engine", "cache", "models", "text", "kernels_metal", "blas"},
    "bench": {"bench", "engine", "blas", ""},
    "server": {"server", "engine", "text", "models", ""},
    "lora": MLX | {"lora", "models", "text", "kernels_metal"},
    "distributed": MLX | MLX_LM | {"", "distributed", "models", "text", "engine", "cache", "kernels_metal"},
    "cli": MLX
    | {
        "cli",
        "bench",
        "server",
        "engine",
        "text",
        "models",
        "cache",
        "lora",
        "distributed",
        "kernels_metal",
        "blas",
        "",
    },
    "": {"blas", "engine"},
    "__main__": {"cli"},
}
NEVER_MLX = {"errors", "display", "config", "request", "engine.batch", *BOOKS}


def _files() -> list[Path]:
    rooms = [ROOT / "mlxserve", ROOT / "kernels_metal", ROOT / "lora", ROOT / "distributed"]
    found = [path for room in rooms for path in room.rglob("*.py")]
    return sorted(path for path in found if not _through_link(path))


def _through_link(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents)


def _dotted(path: Path) -> str:
    """mlxserve/cache/pages.py -> cache.pages; lora/train.py -> lora.train; mlxserve/__init__.py -> ''."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "mlxserve":
        parts = parts[1:]
    if parts and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def _covering(name: str, rooms: set[str]) -> bool:
    """True if `name` is one of `rooms` or lies inside one."""
    return any(room and (name == room or name.startswith(room + ".")) for room in rooms) or (
        "" in rooms and not name
    )


def _room(name: str) -> str:
    fitting = [room for room in ALLOWED if room and (name == room or name.startswith(room + "."))]
    return max(fitting, key=len, default="")


def _imports(path: Path) -> list[tuple[int, str]]:
    """(line, name) of each import that concerns rooms: 'cache.pages', 'mlx', 'mlx_lm'."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top = name.split(".")[0]
            if top in ("mlx", "mlx_lm", "lora", "distributed", "kernels_metal"):
                found.append((node.lineno, top if top in ("mlx", "mlx_lm") else f"bare {top}"))
            elif top == "mlxserve":
                found.append((node.lineno, _target(name)))
    return found


def _target(name: str) -> str:
    """The room-relative module of `mlxserve.a.b.attr`, or the attribute's own name at the top."""
    parts = name.split(".")[1:]
    for size in range(len(parts), 0, -1):
        base = ROOT / "mlxserve" / Path(*parts[:size])
        if base.is_dir() or base.with_suffix(".py").exists():
            return ".".join(parts[:size])
    return ""


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_table(path: Path) -> None:
    name = _dotted(path)
    allowed = EVERYONE | ALLOWED[_room(name)]
    wrong = [
        f"line {line}: {target or 'mlxserve'}"
        for line, target in _imports(path)
        if not _covering(target, allowed)
    ]
    assert not wrong, f"{name or 'mlxserve'} may not import {wrong}"


def test_plain_rooms_never_load_mlx() -> None:
    import subprocess
    import sys

    present = [
        name
        for name in sorted(NEVER_MLX)
        if (ROOT / "mlxserve" / Path(*name.split("."))).with_suffix(".py").exists()
    ]
    imports = "; ".join(f"import mlxserve.{name}" for name in present)
    code = f"import sys; {imports}; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
