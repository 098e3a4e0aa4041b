"""The trainer: LoRA, QLoRA, DoRA and full fine-tuning, on any model that loads here.

Knows: rows of text, adapters, losses, optimisers and files of a run. Does not know the engine or the
server; what generates samples and which processes train together is handed in.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["Result", "RunConfig", "finetune"]

_LAZY = {"finetune": "mlxserve.lora.api", "Result": "mlxserve.lora.api", "RunConfig": "mlxserve.lora.config"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mlxserve.lora' has no attribute {name!r}")
