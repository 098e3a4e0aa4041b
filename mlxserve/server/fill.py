"""Fill in the middle: which tokens a tokenizer has for it, and the prompt they make.

Knows: the code-model families' tokens. Does not know whether a model was trained on them.

Sources: Bavarian et al. 2022 (prefix, suffix, middle); the families' published formats: StarCoder, Granite,
Qwen2.5-Coder, DeepSeek-Coder, CodeLlama, CodeGemma, Codestral (suffix first).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class _Encoder(Protocol):
    bos_token_id: int | None
    add_bos: bool

    def encode_user(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class FillTokens:
    """Ids of one family's tokens. `middle` None: the answer follows the prefix (Codestral).

    `file` separates other files where the family has a token for it, `ends` are ids that end an answer.
    """

    prefix: int
    suffix: int
    middle: int | None
    file: int | None = None
    ends: tuple[int, ...] = ()

    def prompt(
        self, tokenizer: _Encoder, prefix: str, suffix: str, extra: Sequence[tuple[str, str]] = ()
    ) -> list[int]:
        """The whole prompt. No text of the caller's becomes a control token."""
        before = tokenizer.encode_user(prefix)
        after = tokenizer.encode_user(suffix)
        ids = [tokenizer.bos_token_id] if tokenizer.add_bos and tokenizer.bos_token_id is not None else []
        ids += self._files(tokenizer, extra)
        if self.middle is None:
            return [*ids, self.suffix, *after, self.prefix, *before]
        return [*ids, self.prefix, *before, self.suffix, *after, self.middle]

    def _files(self, tokenizer: _Encoder, extra: Sequence[tuple[str, str]]) -> list[int]:
        ids: list[int] = []
        for name, text in extra:
            if self.file is not None:
                ids.append(self.file)
            ids += tokenizer.encode_user(f"{name}\n{text}\n")
        return ids


# (prefix, suffix, middle or None, file separator or None, further end tokens)
_FAMILIES: tuple[tuple[str, str, str | None, str | None, tuple[str, ...]], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", ("<|fim_pad|>", "<|repo_name|>")),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", ("<fim_pad>", "<repo_name>")),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", None, ("<fim-pad>",)),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", None, ()),
    ("▁<PRE>", "▁<SUF>", "▁<MID>", None, ("▁<EOT>",)),
    ("<PRE>", "<SUF>", "<MID>", None, ("<EOT>",)),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", None, ()),
    ("[PREFIX]", "[SUFFIX]", None, None, ()),
)


def find_fill_tokens(added_tokens: Mapping[str, int]) -> FillTokens | None:
    """The family whose tokens are all there, None where there is none."""
    for prefix, suffix, middle, file, ends in _FAMILIES:
        needed = [prefix, suffix] if middle is None else [prefix, suffix, middle]
        if all(token in added_tokens for token in needed):
            return FillTokens(
                added_tokens[prefix],
                added_tokens[suffix],
                None if middle is None else added_tokens[middle],
                added_tokens.get(file) if file else None,
                tuple(added_tokens[token] for token in (*ends, file or "") if token in added_tokens),
            )
    return None
