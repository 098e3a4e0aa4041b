"""Tokens to text, one by one: what a stream may show so far.

Knows: the bytes of each token and UTF-8. Knows nothing of stop strings, requests or the model.

Where every token stands for fixed bytes (byte-level BPE, SentencePiece), a token costs one table look-up and
one step of Python's incremental UTF-8 decoder, under 1 µs. Other tokenizers (WordPiece) go through
`tokenizers.decoders.DecodeStream`.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping
from typing import Protocol

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream


class Detokenizer(Protocol):
    """One stream of tokens. Not thread-safe; never raises, whatever ids come.

    The pieces together are the decoded whole, invalid UTF-8 as U+FFFD. Bytes of an unfinished character
    are held back until it is whole; `finish` gives one U+FFFD for what never became so.
    """

    def add(self, token_id: int) -> str:
        """The text that this token makes certain; often none."""
        ...

    def finish(self) -> str:
        """What was still held back. No `add` may follow."""
        ...


class ByteDetokenizer:
    """For tokens with bytes of their own. `hidden` ids show nothing, `strip_space` drops a leading space."""

    def __init__(
        self, token_bytes: Mapping[int, bytes], hidden: Collection[int], *, strip_space: bool = False
    ) -> None:
        self._bytes = token_bytes
        self._hidden = hidden
        self._strip = strip_space
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        text = self._decode(self._bytes[token_id])
        return self._stripped(text) if self._strip else text

    def finish(self) -> str:
        return self._decode(b"", True)

    def _stripped(self, text: str) -> str:
        if text:
            self._strip = False
        return text.removeprefix(" ")


class BackendDetokenizer:
    """For tokenizers whose text depends on the neighbours (WordPiece and the like)."""

    def __init__(self, backend: Backend, hidden: Collection[int]) -> None:
        self._backend = backend
        self._hidden = hidden
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []

    def add(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # ids that the backend does not know
            return ""
        if text is None:
            return ""
        self._held.clear()
        return text

    def finish(self) -> str:
        """The ids since the last text; DecodeStream has no flush of its own."""
        text = self._backend.decode(self._held, skip_special_tokens=False)
        self._held.clear()
        return text
