"""From rows to token samples with a mask: exactly which tokens are trained.

Knows: the project's Tokenizer, chat turns and their end markers. Does not know batches or models.

An assistant's span is found by encoding the same chat twice, once with that turn's words replaced by a
character that none of the chat holds: what stands between the common beginning and the common end of the
two is the turn. That needs nothing of a template but that it prints the words.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlxserve.errors import UsageError
from mlxserve.lora.config import RunConfig
from mlxserve.lora.rows import Row, find_split, read_rows
from mlxserve.text.tokenizer import Tokenizer

PRIVATE_USE = range(0xE000, 0xF8FF)


@dataclass(frozen=True, slots=True)
class Sample:
    """tokens: (L,) int32. targets: (L,) bool, True where the token is trained (never the first)."""

    where: str
    tokens: np.ndarray
    targets: np.ndarray

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def target_count(self) -> int:
        return int(self.targets.sum())


@dataclass(frozen=True, slots=True)
class Pair:
    """A preferred and a rejected answer to one prompt."""

    chosen: Sample
    rejected: Sample

    @property
    def where(self) -> str:
        return self.chosen.where

    @property
    def length(self) -> int:
        return max(self.chosen.length, self.rejected.length)

    @property
    def target_count(self) -> int:
        return self.chosen.target_count + self.rejected.target_count


Item = Sample | Pair


@dataclass(slots=True)
class Dataset:
    """Samples that train, and what became of the other rows: reasons with their counts."""

    items: list[Any]
    rows: int
    formats: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    truncated: int = 0

    @property
    def lengths(self) -> np.ndarray:
        return np.array([item.length for item in self.items], np.int64)

    @property
    def target_count(self) -> int:
        return sum(item.target_count for item in self.items)

    def digest(self) -> str:
        """A name for exactly these tokens and masks in this order."""
        seen = hashlib.sha256()
        for item in self.items:
            for sample in (item.chosen, item.rejected) if isinstance(item, Pair) else (item,):
                seen.update(sample.tokens.tobytes() + sample.targets.tobytes() + b"|")
        return seen.hexdigest()


def load_split(config: RunConfig, split: str, tokenizer: Tokenizer) -> Dataset | None:
    """The samples of train, valid or test; None where there is no such split. A share is `load_all`'s."""
    path = find_split(config.data, split)
    return None if path is None else encode_rows(read_rows(path, config.data), config, tokenizer)


def load_all(config: RunConfig, tokenizer: Tokenizer) -> tuple[Dataset, Dataset | None]:
    """Train and valid. A share for valid is split off by the seed, before anything else happens."""
    path = find_split(config.data, "train")
    assert path is not None
    rows = read_rows(path, config.data)
    share = config.data.valid
    if not isinstance(share, float):
        return encode_rows(rows, config, tokenizer), load_split(config, "valid", tokenizer)
    order = np.random.default_rng([config.train.seed, 7]).permutation(len(rows))
    held = set(order[: max(1, round(share * len(rows)))].tolist())
    if len(held) == len(rows):
        raise UsageError(f"data.valid={share} of {len(rows)} rows leaves none to train.", param="data.valid")
    kept = [row for i, row in enumerate(rows) if i not in held]
    valid = [row for i, row in enumerate(rows) if i in held]
    return encode_rows(kept, config, tokenizer), encode_rows(valid, config, tokenizer)


def encode_rows(rows: Sequence[Row], config: RunConfig, tokenizer: Tokenizer) -> Dataset:
    """Encode and mask every row; rows too long or without targets are left out and counted."""
    wants_pairs = config.train.objective != "sft"
    data = Dataset([], len(rows), dict(Counter(row.format for row in rows)))
    for row in rows:
        item = _encode(row, config, tokenizer, wants_pairs)
        kept, why = _fitted(item, config)
        if kept is None:
            data.dropped[why] = data.dropped.get(why, 0) + 1
            continue
        data.truncated += why == "truncated"
        data.items.append(kept)
    if not data.items:
        reasons = ", ".join(f"{count} {why}" for why, count in data.dropped.items())
        raise UsageError(f"No row is left to train on: {reasons}.", param="data")
    return data


def _encode(row: Row, config: RunConfig, tokenizer: Tokenizer, wants_pairs: bool) -> Item:
    if (row.rejected is not None) != wants_pairs:
        kind = "preference rows (prompt, chosen, rejected)" if wants_pairs else "no preference rows"
        raise UsageError(f"{row.where}: train.objective={config.train.objective} wants {kind}.", param="data")
    chosen = encode_sample(row, config, tokenizer)
    if row.rejected is None:
        return chosen
    other = Row(row.where, row.format, row.rejected, raw=row.raw_rejected, tools=row.tools)
    return Pair(chosen, encode_sample(other, config, tokenizer))


def encode_sample(row: Row, config: RunConfig, tokenizer: Tokenizer) -> Sample:
    """One row's tokens and mask. Raises UsageError naming the row."""
    loss_on = config.data.loss_on if row.rejected is None and config.train.objective == "sft" else "last"
    try:
        if row.text is not None:
            ids = [*tokenizer.encode(row.text), *_end(tokenizer)]
            spans = [(0, len(ids))]
        elif tokenizer.chat_template is None and row.raw is not None:
            ids, spans = _raw_completion(row.raw, tokenizer)
        else:
            assert row.messages is not None
            ids, spans = _chat(row, config.data.template_kwargs, tokenizer, loss_on)
    except UsageError as error:
        raise UsageError(f"{row.where}: {error.message}", param=error.param) from error
    if loss_on == "all":
        spans = [(0, len(ids))]
    targets = np.zeros(len(ids), bool)
    for start, end in spans:
        targets[start:end] = True
    targets[:1] = False  # nothing predicts the first token
    return Sample(row.where, np.array(ids, np.int32), targets)


def _end(tokenizer: Tokenizer) -> list[int]:
    """The id that ends a raw text: the tokenizer's own, not one of a chat's turns, where there are both."""
    name = tokenizer.special_tokens.get("eos_token")
    token = tokenizer.added_tokens.get(name) if name else None
    ends = [token] if token is not None else sorted(tokenizer.eos_token_ids)[:1]
    return [i for i in ends if i is not None]


def _raw_completion(raw: tuple[str, str], tokenizer: Tokenizer) -> tuple[list[int], list[tuple[int, int]]]:
    prompt = tokenizer.encode(raw[0])
    ids = [*prompt, *tokenizer.encode_user(raw[1]), *_end(tokenizer)]
    return ids, [(len(prompt), len(ids))]


def _chat(
    row: Row, template_kwargs: dict[str, Any], tokenizer: Tokenizer, loss_on: str
) -> tuple[list[int], list[tuple[int, int]]]:
    messages = row.messages or []

    def encode(chat: Sequence[dict[str, Any]]) -> list[int]:
        return tokenizer.encode_chat(
            chat, tools=row.tools, add_generation_prompt=False, template_kwargs=template_kwargs
        )

    ids = encode(messages)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    stand_in = _absent_character(messages)
    spans = []
    for turn in turns[-1:] if loss_on == "last" else turns:
        other = encode([*messages[:turn], {"role": "assistant", "content": stand_in}, *messages[turn + 1 :]])
        start, end = differing(ids, other)
        spans.append((start, _with_end_marker(ids, end, tokenizer)))
    return ids, spans


def _absent_character(messages: Sequence[dict[str, Any]]) -> str:
    text = str(messages)
    return next(chr(code) for code in PRIVATE_USE if chr(code) not in text and f"\\u{code:04x}" not in text)


def differing(ids: Sequence[int], other: Sequence[int]) -> tuple[int, int]:
    """The half-open range of `ids` that lies between its common beginning and common end with `other`."""
    limit = min(len(ids), len(other))
    start = next((i for i in range(limit) if ids[i] != other[i]), limit)
    tail = 0
    while tail < limit - start and ids[-1 - tail] == other[-1 - tail]:
        tail += 1
    return start, len(ids) - tail


def _with_end_marker(ids: Sequence[int], end: int, tokenizer: Tokenizer) -> int:
    """`end` moved behind the token that ends the turn: the first added token there, if it ends turns.

    A template may print white space before it (Llama 2); the model is to write that too.
    """
    for i in range(end, len(ids)):
        if ids[i] in tokenizer.eos_token_ids:
            return i + 1
        if ids[i] in tokenizer.special_ids or tokenizer.token_text(ids[i]).strip():
            break
    return end


def _fitted(item: Item, config: RunConfig) -> tuple[Item | None, str]:
    """(item, "") as it is, (shorter item, "truncated"), or (None, why it cannot train)."""
    limit, rule = config.train.max_seq, config.data.too_long
    why = ""
    if item.length > limit:
        if rule == "error":
            raise UsageError(
                f"{item.where} has {item.length} tokens, train.max_seq is {limit}.", param="data"
            )
        if rule == "drop":
            return None, "too long"
        item, why = _cut(item, limit), "truncated"
    parts = (item.chosen, item.rejected) if isinstance(item, Pair) else (item,)
    if any(part.target_count == 0 for part in parts):
        return None, "without targets"
    return item, why


def _cut(item: Item, limit: int) -> Item:
    if isinstance(item, Pair):
        return Pair(_cut_sample(item.chosen, limit), _cut_sample(item.rejected, limit))
    return _cut_sample(item, limit)


def _cut_sample(sample: Sample, limit: int) -> Sample:
    return Sample(sample.where, sample.tokens[:limit], sample.targets[:limit])
