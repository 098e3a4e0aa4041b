"""mlx-lm's model definitions, without mlx-lm's own start-up.

Knows: which module of `mlx_lm.models` defines an architecture, and how to import it alone: `import
mlx_lm` pulls in transformers (2 s or more), the definition under a bare parent module takes 0.1 s.
Knows nothing of files, weights or caches.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from mlxserve.errors import DependencyMissing, ModelInvalid, ModelUnsupported

# Configurations whose model_type has no module of its own, as mlx_lm.utils.MODEL_REMAPPING has them
# (importing that table would import transformers); tests/models/test_contract.py compares the two.
REMAPPED = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    "gemma4_unified": "gemma4",
    "deepseek_v41_text": "deepseek_v41",
}
REMAPPED_BY_ARCHITECTURE = {("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3"}

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]+")
_lock = threading.Lock()


def module_name(config: Mapping[str, Any]) -> str:
    """The name of the `mlx_lm.models` module for a configuration.

    Raises ModelInvalid when the configuration names no model type, or none that can be a module's name.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not _PLAIN_NAME.fullmatch(model_type):
        raise ModelInvalid(f"The configuration's model_type is {model_type!r}, which names no architecture.")
    for architecture in config.get("architectures") or ():
        remapped = REMAPPED_BY_ARCHITECTURE.get((model_type, architecture))
        if remapped:
            return remapped
    return REMAPPED.get(model_type, model_type)


def find_definition(config: Mapping[str, Any]) -> ModuleType:
    """The module that defines a configuration's architecture: it has `Model` and `ModelArgs`.

    Raises ModelUnsupported when the installed mlx-lm defines no such architecture.
    """
    return import_definition(module_name(config), wanted_by=str(config.get("model_type")))


def import_definition(name: str, wanted_by: str | None = None) -> ModuleType:
    """`mlx_lm.models.<name>`, imported without running `mlx_lm/__init__`."""
    full_name = f"mlx_lm.models.{name}"
    with _lock, _bare_parent():
        try:
            return importlib.import_module(full_name)
        except ModuleNotFoundError as error:
            if error.name != full_name:
                raise
    raise ModelUnsupported(
        f"The architecture {wanted_by or name!r} is not defined by the installed mlx-lm; "
        "a newer mlx-lm may have it."
    )


@contextmanager
def _bare_parent() -> Iterator[None]:
    """While active, `mlx_lm` is a module with a path and nothing else.

    It is taken away again, so that a person's own `import mlx_lm` runs mlx-lm's real start-up; the
    definitions that were imported stay and are the same objects for both.
    """
    if "mlx_lm" in sys.modules:
        yield
        return
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or spec.submodule_search_locations is None:
        raise DependencyMissing("The package mlx-lm is not installed: pip install mlx-lm.")
    parent = ModuleType("mlx_lm")
    parent.__path__ = list(spec.submodule_search_locations)
    parent.__spec__ = spec
    sys.modules["mlx_lm"] = parent
    try:
        yield
    finally:
        if sys.modules.get("mlx_lm") is parent:
            del sys.modules["mlx_lm"]
            _AttachModels.install()


class _AttachModels(MetaPathFinder, Loader):
    """When a person imports mlx-lm later, gives it the attribute `models` that importing would have set.

    Python sets a submodule's attribute only on the parent it was imported under, which was the bare one.
    """

    def __init__(self) -> None:
        self._inner: Loader | None = None

    @classmethod
    def install(cls) -> None:
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.insert(0, cls())

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "mlx_lm" or "mlx_lm.models" not in sys.modules or self._inner is not None:
            return None
        spec = PathFinder.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._inner, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        assert self._inner is not None
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self._inner is not None
        module.models = sys.modules["mlx_lm.models"]  # type: ignore[attr-defined]
        module.__loader__ = self._inner
        inner, self._inner = self._inner, None
        inner.exec_module(module)
