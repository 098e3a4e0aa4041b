"""A model's plain answer to a prompt: greedy, one sequence, with the modules that train.

Knows: mlx-lm's cache protocol and the tokenizer. Does not know the engine, which serves models properly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxserve.lora.base import Base
from mlxserve.models.layout import plain_caches


def complete(base: Base, prompt: str, max_tokens: int) -> str:
    """The greedy answer to a prompt, as a chat where the model has a template."""
    if base.tokenizer.chat_template is not None:
        return answer(base, [{"role": "user", "content": prompt}], max_tokens)
    return _continued(base, base.tokenizer.encode(prompt), max_tokens)


def answer(
    base: Base,
    messages: Sequence[dict[str, Any]],
    max_tokens: int,
    template_kwargs: dict[str, Any] | None = None,
) -> str:
    """The greedy answer to a chat. Raises UsageError for messages that the template refuses."""
    ids = base.tokenizer.encode_chat(messages, template_kwargs=template_kwargs or {})
    return _continued(base, ids, max_tokens)


def _continued(base: Base, ids: list[int], max_tokens: int) -> str:
    cache = plain_caches(base.model)
    written: list[int] = []
    base.model.eval()
    while len(written) < max_tokens:
        logits = base.model(mx.array([ids]), cache=cache)
        token = int(mx.argmax(logits[0, -1]))
        if token in base.tokenizer.eos_token_ids:
            break
        written.append(token)
        ids = [token]
    return base.tokenizer.decode(written)
