"""Structured output: JSON schemas, regular expressions, choices and grammars as masks over the vocabulary.

Knows: llguidance (which compiles and walks them) and a tokenizer's bytes. Does not know MLX, sequences or
steps. What llguidance does not enforce is refused with its reason, never ignored.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np

from mlxserve.config import WHITE_SPACE
from mlxserve.errors import EngineFailed, Unsupported
from mlxserve.request import SamplingParams
from mlxserve.text.tokenizer import Tokenizer

REMEMBERED = 64
_ASCII = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}


class Constraint:
    """One answer's way through a grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher

    def accept(self, token: int) -> bool:
        """Take a token that was drawn; True when the text is complete and nothing may follow.

        Raises EngineFailed for a token that the grammar does not allow here, or if it became too complex.
        """
        if not self.matcher.consume_token(token):
            raise EngineFailed(f"The grammar cannot be followed further: {self.matcher.get_error()}")
        return self.matcher.is_stopped()

    def forced(self) -> list[int]:
        """The tokens that must come next, whatever the model says; empty where it has a choice."""
        return list(self.matcher.compute_ff_tokens())


class Grammars:
    """Compiles settings into constraints for one tokenizer. Any thread may call; compiling frees the GIL."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._words = (vocabulary + 31) // 32
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._ready: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._executor = llguidance.LLExecutor()

    def compile(self, params: SamplingParams) -> Constraint:
        """A new constraint for `params.schema`, `regex`, `choices`, `grammar` or `json_object`.

        Raises Unsupported, naming the field and the reason, for what cannot be enforced exactly.
        """
        field, grammar = _grammar_of(params)
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
        if known is None:
            known = self._compile(field, grammar)
            with self._lock:
                self._compiled[grammar] = known
                while len(self._compiled) > REMEMBERED:
                    self._compiled.popitem(last=False)
        return Constraint(known.deep_copy())

    def masks(self, constraints: Sequence[Constraint]) -> np.ndarray:
        """Packed bits, uint32 (n, ceil(V / 32)), of the tokens each may go on with; computed in parallel."""
        packed = np.zeros((len(constraints), self._words), np.int32)
        jobs = [(constraint.matcher, row) for row, constraint in enumerate(constraints)]
        llguidance.numpy.fill_next_token_bitmask_par(self._executor, jobs, packed)
        return packed.view(np.uint32)

    def _compile(self, field: str, grammar: str) -> llguidance.LLMatcher:
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._prepared())
        if failed or messages:
            raise Unsupported(f"{field} cannot be enforced: {_short(messages)}", param=field)
        matcher = llguidance.LLMatcher(self._prepared(), grammar, log_level=0)
        if matcher.is_error():
            raise Unsupported(f"{field} cannot be enforced: {_short([matcher.get_error()])}", param=field)
        return matcher

    def _prepared(self) -> llguidance.LLTokenizer:
        """llguidance's own view of the vocabulary, made once, at the first grammar."""
        with self._lock:
            if self._ready is None:
                wrapped = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocabulary))
                eos = sorted(self._tokenizer.eos_token_ids)
                self._ready = llguidance.LLTokenizer(wrapped, n_vocab=self._vocabulary, eos_token=eos)
            return self._ready


class _Vocabulary:
    """What llguidance asks of a tokenizer: the bytes of every token, which are special, and encoding."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self.eos_token_id = min(tokenizer.eos_token_ids, default=None)
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocabulary)]
        hidden = tokenizer.hidden_in_replies | frozenset(tokenizer.added_tokens.values())
        self.special_token_ids = sorted(i for i in hidden if i < vocabulary)
        self._encode = tokenizer.encode_user

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def _grammar_of(params: SamplingParams) -> tuple[str, str]:
    """(field, llguidance's grammar) of the one constraint that `params` has."""
    try:
        if params.schema is not None:
            return "schema", _from_schema(params.schema)
        if params.json_object:
            return "json_object", _from_schema({"type": "object"})
        if params.regex is not None:
            return "regex", llguidance.LLMatcher.grammar_from_regex(_ascii_classes(params.regex))
        if params.choices is not None:
            return "choices", _from_choices(params.choices)
    except ValueError as error:
        raise Unsupported(f"schema cannot be enforced: {_short([str(error)])}", param="schema") from error
    assert params.grammar is not None
    return "grammar", _from_grammar(params.grammar)


def _ascii_classes(regex: str) -> str:
    r"""`\d` and `\w` as people mean them, ASCII: llguidance would allow every script's digits and letters."""
    parts, in_class = [], False
    for token in re.findall(r"\\.|.", regex, re.DOTALL):
        if token in _ASCII:
            token = _ASCII[token] if in_class else f"[{_ASCII[token]}]"
        elif token == "[":
            in_class = True
        elif token == "]":
            in_class = False
        parts.append(token)
    return "".join(parts)


def _from_schema(schema: Any) -> str:
    options: Any = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE}
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _from_choices(choices: Sequence[str]) -> str:
    if not choices or any(not isinstance(choice, str) or not choice for choice in choices):
        raise Unsupported("choices must be non-empty strings, at least one.", param="choices")
    listed = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return llguidance.LLMatcher.grammar_from_lark(f"start: {listed}")


def _from_grammar(text: str) -> str:
    """Lark as llguidance reads it, or GBNF (llama.cpp's), which is told by its `::=`."""
    if "::=" not in text:
        return llguidance.LLMatcher.grammar_from_lark(text)
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(text))
    except Exception as error:  # the converter raises whatever its parser meets
        raise Unsupported(f"grammar is no valid GBNF: {_short([str(error)])}", param="grammar") from error


def _short(messages: Sequence[str]) -> str:
    """The first line of what llguidance says, bounded."""
    text = " ".join(" ".join(messages).split()) or "no reason was given"
    return (text[:297] + "…" if len(text) > 300 else text).rstrip(".") + "."
