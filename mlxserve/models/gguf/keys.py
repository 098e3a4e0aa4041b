"""The metadata of one architecture, with a memory of what was read.

Knows: keys such as `llama.attention.head_count`, values that some writers give per layer, and which keys
change nothing. Knows nothing of what a key means: that is the table's and `rope`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxserve.errors import ModelInvalid, ModelUnsupported

# Keys that never change the maths: where a file comes from, or the epsilon of the kind of norm not used.
HARMLESS = {
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "attention.causal",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
}
# Values at which a key says: nothing special. Zero, false and empty are neutral for every key.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_weights_scale": (1.0,),
    "expert_gating_func": (1,),  # softmax
    "rope.scaling.attn_factor": (1.0,),
}
_MISSING = object()


class Keys:
    """Reads `<architecture>.<name>` entries; `check_all_read` refuses the ones that nobody asked for."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.architecture = architecture
        self._prefix = f"{architecture}."
        self._values = {
            key.removeprefix(self._prefix): value
            for key, value in metadata.items()
            if key.startswith(self._prefix)
        }
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it stands in the file."""
        self._read.add(name)
        return self._values.get(name, default)

    def number(self, name: str, default: Any = _MISSING) -> Any:
        """A number; one given per layer must be the same in each.

        Raises ModelInvalid if it is required and absent or no number, ModelUnsupported if layers differ.
        """
        value = self.get(name, default)
        if value is _MISSING:
            raise ModelInvalid(f"The file's metadata has no {self._prefix}{name}.")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelUnsupported(
                    f"The file gives {self._prefix}{name} layer by layer ({value[:4]}…); layers of different "
                    f"sizes are not supported for {self.architecture}."
                )
            value = value[0]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelInvalid(f"The file's {self._prefix}{name} is {_short(value)}, which is no number.")
        return value

    def size(self, name: str, default: Any = _MISSING) -> int:
        """A whole number above zero. Raises as `number`."""
        value = self.number(name, default)
        if value < 1 or value != int(value):
            raise ModelInvalid(f"The file's {self._prefix}{name} is {value}, which is no size.")
        return int(value)

    def unread(self, name: str) -> Any:
        """The value if nobody has read it yet, else None; it counts as read afterwards."""
        return None if name in self._read else self.get(name)

    def check_all_read(self) -> None:
        """Raises ModelUnsupported, naming the first key that was not read and would change the maths."""
        for name, value in self._values.items():
            neutral = not value or value in NEUTRAL.get(name, ())
            if name == "attention.causal" and not value:
                raise ModelUnsupported(f"The file is an encoder ({self._prefix}{name} is false).")
            if name not in self._read and name not in HARMLESS and not neutral:
                raise ModelUnsupported(
                    f"The file sets {self._prefix}{name} = {_short(value)}, which is not supported for "
                    f"{self.architecture}; ignoring it would give wrong answers."
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"
