"""Messages between launcher, agents and ranks: one JSON object a line.

Knows: how a message becomes a line and comes back. Does not know what messages mean, or what carries them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# A line holds at most so many bytes: the digests of a model of some ten thousand tensors are 1 MB.
LINE_LIMIT = 64 * 1024 * 1024


def encode(message: Mapping[str, Any]) -> bytes:
    """The message as one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The message of a line; None for a line that is none, such as a login shell's greeting."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
