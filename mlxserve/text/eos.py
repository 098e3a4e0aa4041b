"""Which added tokens end a model's turn, beyond those that its files list.

Knows: a chat template and the added tokens. Many files list only the end of text while chats end with another
marker (or the other way round), and GGUF metadata has room for one.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from mlxserve.errors import MlxServeError
from mlxserve.text.template import ChatTemplate

# Never printed inside a turn by the families that have them. `<|end|>` is missing: see `_is_harmony`.
_ALWAYS_END = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|return|>",
    "<|call|>",
    "<|endofturn|>",
)
_QUESTION, _ANSWER = "probe question", "probe answer"


def end_of_turn_tokens(template: ChatTemplate, added_tokens: Collection[str]) -> set[str]:
    """Added tokens that a turn of the assistant ends with, from a list and from a probe of the template."""
    found = {token for token in _ALWAYS_END if token in added_tokens and token in template.source}
    if _is_harmony(template.source):
        return found
    probed = _token_after_answer(template, added_tokens)
    return found | {probed} if probed else found


def _is_harmony(source: str) -> bool:
    """gpt-oss ends each of several messages of one turn with `<|end|>`, and the turn with `<|return|>`."""
    return "<|channel|>" in source and "<|return|>" in source


def _token_after_answer(template: ChatTemplate, added_tokens: Collection[str]) -> str | None:
    """The added token right behind an answer, if only white space or another added token follows it.

    A marker with words behind it is part of a larger structure and ends nothing by itself.
    """
    try:
        rendered = template.render(
            [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}],
            add_generation_prompt=False,
        )
    except MlxServeError:
        return None
    _, found, rest = rendered.rpartition(_ANSWER)
    visible = sorted((token for token in added_tokens if token.strip()), key=len, reverse=True)
    pattern = "|".join(map(re.escape, visible)) or "(?!)"
    match = re.fullmatch(rf"\s*({pattern})\s*((?:{pattern}).*)?", rest, re.DOTALL) if found else None
    return match[1] if match else None
