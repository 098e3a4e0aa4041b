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
_ANSWER = "probe answer"
_TALK = (
    {"role": "user", "content": "probe question"},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": "probe reply"},
)


def end_of_turn_tokens(
    template: ChatTemplate, added_tokens: Collection[str], special: Collection[str]
) -> set[str]:
    """Added tokens that a turn of the assistant ends with: known ones, else what a probe of the template shows.

    The probe counts only tokens that are `special`.
    """
    known = {token for token in _ALWAYS_END if token in added_tokens and token in template.source}
    if known or _is_harmony(template.source):
        return known
    probed = _behind_answer(template, special)
    return {probed} if probed else set()


def _is_harmony(source: str) -> bool:
    """gpt-oss ends each of several messages of one turn with `<|end|>`, and the turn with `<|return|>`."""
    return "<|channel|>" in source and "<|return|>" in source


def _behind_answer(template: ChatTemplate, tokens: Collection[str]) -> str | None:
    """The first of the tokens in a row behind an answer: its end, or the beginning of the next turn.

    A token with a word right behind it is part of a larger structure and ends nothing by itself.
    """
    try:
        rendered = template.render(_TALK, add_generation_prompt=False)
    except MlxServeError:
        return None
    pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"
    row = re.search(rf"{re.escape(_ANSWER)}((?:\s*(?:{pattern})(?!\w))+)", rendered)
    return re.findall(pattern, row[1])[0] if row else None
