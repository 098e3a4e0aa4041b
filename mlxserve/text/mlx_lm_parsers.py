"""mlx-lm's tool-call parsers, loaded one at a time and without the rest of mlx-lm.

Knows: where they lie. `import mlx_lm` would bring in transformers, two seconds or more; a parser alone needs
some milliseconds. This is the only file of text/ that touches mlx-lm.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mlxserve.errors import DependencyMissing

ParseCall = Callable[[str, Sequence[Any] | None], dict[str, Any] | list[dict[str, Any]]]

_PACKAGE = "_mlxserve_mlx_lm_tool_parsers"  # a name of our own, so that a later `import mlx_lm` is untouched
_lock = threading.Lock()


@cache
def parser(name: str) -> ParseCall:
    """`parse_tool_call` of `mlx_lm.tool_parsers.<name>`: payload and tools to one call or several.

    It raises whatever it likes on payloads that it cannot read. Raises DependencyMissing where the installed
    mlx-lm has no such parser.
    """
    parse: ParseCall = module(name).parse_tool_call
    return parse


def module(name: str) -> ModuleType:
    """`mlx_lm.tool_parsers.<name>` under a name of our own. Raises as `parser`."""
    with _lock:
        package = _package()
        try:
            return importlib.import_module(f"{package.__name__}.{name}")
        except ModuleNotFoundError as error:
            raise DependencyMissing(
                f"The installed mlx-lm has no tool parser {name!r}; a newer mlx-lm may have it."
            ) from error


def _package() -> ModuleType:
    """An empty package over mlx-lm's folder of parsers."""
    if _PACKAGE not in sys.modules:
        spec = importlib.util.find_spec("mlx_lm")
        if spec is None or not spec.submodule_search_locations:
            raise DependencyMissing("mlx-lm is not installed; it reads this model's tool calls.")
        made = ModuleType(_PACKAGE)
        made.__path__ = [str(Path(spec.submodule_search_locations[0]) / "tool_parsers")]
        sys.modules[_PACKAGE] = made
    return sys.modules[_PACKAGE]
