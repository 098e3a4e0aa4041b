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


def end_of_turn_tokens(
    template: ChatTemplate, added_tokens: Collection[str], special: Collection[str]
) -> set[str]:
    """Added tokens that a turn of the assistant ends with, from a list and from a probe of the template.

    The probe counts only tokens that are `special`.
    """
    found = {token for token in _ALWAYS_END if token in added_tokens and token in template.source}
    if _is_harmony(template.source):
        return found
    probed = _end_of_answer(template, special)
    return found | {probed} if probed else found


def _is_harmony(source: str) -> bool:
    """gpt-oss ends each of several messages of one turn with `<|end|>`, and the turn with `<|return|>`."""
    return "<|channel|>" in source and "<|return|>" in source


def _end_of_answer(template: ChatTemplate, tokens: Collection[str]) -> str | None:
    """The token behind an answer; of several in a row the one that also ends the user's turn, if any does.

    A token with words behind it is part of a larger structure and ends nothing by itself.
    """
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        rendered = template.render(messages, add_generation_prompt=False)
    except MlxServeError:
        return None
    pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"
    answer_ends, next_char = _row_behind(_ANSWER, rendered, pattern)
    question_ends, _ = _row_behind(_QUESTION, rendered, pattern)
    shared = [token for token in answer_ends if token in question_ends[:1]]
    if shared:
        return shared[0]
    if not answer_ends or (len(answer_ends) == 1 and next_char.isalnum()):
        return None
    return answer_ends[0]


def _row_behind(text: str, rendered: str, pattern: str) -> tuple[list[str], str]:
    """The tokens in a row behind `text`, and the character after them."""
    start = rendered.rfind(text)
    row = re.compile(rf"(?:\s*(?:{pattern}))*").match(rendered, start + len(text)) if start >= 0 else None
    if row is None:
        return [], ""
    return re.findall(pattern, row.group()), rendered[row.end() : row.end() + 1]
