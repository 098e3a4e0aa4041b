"""What a `tokenizers` backend's tokens stand for in bytes, and how to split text without its added tokens.

Knows: the parts of a backend (normaliser, pre-tokenizer, decoder) as the JSON they serialise to. Knows
nothing of files, chat or streams.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

META = "\u2581"


def part(component: Any) -> dict[str, Any]:
    """A normaliser, pre-tokenizer or decoder as JSON; empty where there is none."""
    return json.loads(component.__getstate__()) if component is not None else {}


def flat(component: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The steps of a component, sequences unfolded."""
    for key in ("pretokenizers", "normalizers", "decoders"):
        for step in component.get(key, ()):
            yield from flat(step)
    if component.get("type", "Sequence") != "Sequence":
        yield component


def is_byte_level(backend: Tokenizer) -> bool:
    """True if text is split over GPT-2's printable stand-ins for bytes."""
    steps = [*flat(part(backend.pre_tokenizer)), *flat(part(backend.normalizer))]
    return any(step["type"] == "ByteLevel" for step in steps)


def repair_decoder(backend: Tokenizer) -> None:
    """Give a byte-level backend a byte-level decoder.

    Conversions exist that leave SentencePiece's there, and then spaces come out as 'Ġ'.
    """
    steps = {step["type"] for step in flat(part(backend.decoder))}
    if is_byte_level(backend) and "ByteLevel" not in steps:
        backend.decoder = decoders.ByteLevel()


def strips_first_space(backend: Tokenizer) -> bool:
    """True if decoding drops the space before the first word (SentencePiece's dummy prefix)."""
    for step in flat(part(backend.decoder)):
        if step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0:
            return True
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (github.com/openai/gpt-2, encoder.py): character to byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    alphabet, spare = {}, 256
    for byte in range(256):
        if byte in printable:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(spare)] = byte
            spare += 1
    return alphabet


class TokenBytes(dict[int, bytes]):
    """The bytes each token stands for, by id; looked up when first asked for. Unknown ids stand for none.

    `fixed` is False where a token's text depends on its neighbours, so that bytes are only an approximation.
    """

    def __init__(self, backend: Tokenizer, added: Mapping[int, str]) -> None:
        super().__init__({i: content.encode("utf-8", "replace") for i, content in added.items()})
        self._backend = backend
        self._alphabet = byte_alphabet() if is_byte_level(backend) else {}
        steps = {step["type"] for step in flat(part(backend.decoder))}
        self.fixed = bool(self._alphabet) or bool(steps & {"ByteFallback", "Metaspace", "Fuse"})

    def __missing__(self, token_id: int) -> bytes:
        found = self._look_up(token_id)
        if found:
            self[token_id] = found
        return found

    def _look_up(self, token_id: int) -> bytes:
        try:
            token = self._backend.id_to_token(token_id)
        except OverflowError:  # negative, or beyond 32 bits
            token = None
        if token is None:
            return b""
        if self._alphabet and all(char in self._alphabet for char in token):
            return bytes(self._alphabet[char] for char in token)
        if not self._alphabet and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return _hex_byte(token)
        text = token if self._alphabet else token.replace(META, " ")
        return text.encode("utf-8", "replace")


def _hex_byte(token: str) -> bytes:
    try:
        return bytes([int(token[3:5], 16)])
    except ValueError:
        return token.encode("utf-8", "replace")


class PlainEncoder:
    """The same backend without its added tokens: no text can become one of them.

    Runs of white space stay added tokens where the backend has such, since they are ordinary text.
    """

    def __init__(self, backend: Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self._forbidden = {i for i, token in added.items() if token.content.strip()}
        self._spaces = {i: token for i, token in sorted(added.items()) if token.content.isspace()}
        splitter = part(backend.pre_tokenizer)
        self._first = self._without_added(backend, splitter)
        self._later = self._without_added(backend, _prepending_nothing(splitter))
        # Without the other added tokens in between, a run of spaces may get another id here.
        self._ids = {self._first.token_to_id(token.content): i for i, token in self._spaces.items()}

    def _without_added(self, backend: Tokenizer, splitter: Mapping[str, Any]) -> Tokenizer:
        """Shares the vocabulary with `backend`, so that it costs no memory."""
        plain = Tokenizer(backend.model)
        if backend.normalizer is not None:
            plain.normalizer = backend.normalizer
        if splitter:
            plain.pre_tokenizer = _pre_tokenizer(splitter)
        plain.add_tokens([_copy(token) for token in self._spaces.values()])
        return plain

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """Ids of `text`, none of them an added token with visible text.

        `first` says whether the text opens the sequence: some tokenizers put a space before the first word.
        """
        encoding = (self._first if first else self._later).encode(text, add_special_tokens=False)
        ids: list[int] = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets):
            token_id = self._ids.get(token_id, token_id)
            if token_id in self._forbidden:
                ids += self._in_halves(text[start:end])
            else:
                ids.append(token_id)
        return ids

    def _in_halves(self, text: str) -> list[int]:
        """For a model that spells a control token by itself; a single character that is one is left out."""
        middle = len(text) // 2
        if not middle:
            return []
        return self.encode(text[:middle], first=False) + self.encode(text[middle:], first=False)


def _copy(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
    )


def _pre_tokenizer(description: Mapping[str, Any]) -> pre_tokenizers.PreTokenizer:
    """A pre-tokenizer from its JSON; the library reads one only as part of a whole tokenizer."""
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": description, "model": empty}
    return Tokenizer.from_str(json.dumps(whole)).pre_tokenizer


def _prepending_nothing(description: Mapping[str, Any]) -> dict[str, Any]:
    """The pre-tokenizer as it treats text after the first: no space is put before it."""
    made = dict(description)
    if "pretokenizers" in made:
        made["pretokenizers"] = [_prepending_nothing(step) for step in made["pretokenizers"]]
    if made.get("prepend_scheme") == "first":
        made["prepend_scheme"] = "never"
    return made
