"""Byte-level vocabularies cut text as their families do, against the libraries' own components."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mlxserve.errors import ModelUnsupported
from mlxserve.text.gguf_split import SPLITS
from mlxserve.text.gguf_vocab import tokenizer_from_gguf
from tests.text.gguf_metadata import CONTROL, MERGES, NORMAL, TEXTS, TOKENS, byte_level


def _byte_level_oracle(
    *cuts: pre_tokenizers.PreTokenizer, nfc: bool = False, ignore_merges: bool = False
) -> Tokenizer:
    """A byte-level tokenizer put together as the models' tokenizer.json files have it."""
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(cuts))
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _ids(backend: Tokenizer, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
# As these families' tokenizer.json files have them, written with other components than the code's.
FILES: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: _byte_level_oracle(WORDS),
    "olmo": lambda: _byte_level_oracle(WORDS),
    "smollm": lambda: _byte_level_oracle(DIGITS, WORDS),
    "starcoder": lambda: _byte_level_oracle(DIGITS, WORDS),
    "refact": lambda: _byte_level_oracle(DIGITS, WORDS),
    "command-r": lambda: _byte_level_oracle(DIGITS, WORDS, nfc=True),
}


@pytest.mark.parametrize("name", FILES)
def test_ids_equal_those_of_the_familys_own_file(name: str) -> None:
    ours, theirs = tokenizer_from_gguf(byte_level(name)), FILES[name]()
    for text in TEXTS:
        assert ours.encode(text) == _ids(theirs, text), text


def _transformers_splits() -> list[str]:
    return ["llama-bpe", "pixtral", "dbrx", "tekken", "deepseek-r1-qwen", "gpt-4o", "llama4", "megrez"]


@pytest.mark.parametrize("name", _transformers_splits())
def test_ids_equal_transformers_conversion(name: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    theirs = _byte_level_oracle(split, LEVEL, ignore_merges=SPLITS[name].whole_words)
    ours = tokenizer_from_gguf(byte_level(name))
    for text in TEXTS:
        assert ours.encode(text) == _ids(theirs, text), text


def test_qwen2_equals_its_own_class_with_its_normalisation() -> None:
    from transformers import Qwen2Tokenizer

    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=pairs)
    ours = tokenizer_from_gguf(byte_level("qwen2"))
    for text in [*TEXTS, "cafe\u0301 u\u0308ber"]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


PIECES = {
    "llama-bpe": ("I'LL x1234\n\n y", ["I", "'LL", " x", "123", "4", "\n\n", " y"]),
    "qwen2": ("x1234 a", ["x", "1", "2", "3", "4", " a"]),
    "gpt-4o": ("don't HTMLParser//\n", ["don't", " HTMLParser", "//\n"]),
    "tekken": ("don't 12", ["don", "'t", " ", "1", "2"]),
    "deepseek-v3": ("a1234日本x (y", ["a", "123", "4", "日本", "x", " (", "y"]),
    "deepseek-coder": ("a12 日本\n", ["a", "1", "2", " ", "日本", "\n"]),
    "deepseek-llm": ("Größe 1234 日本", ["Gr", "öß", "e", " ", "1234", " ", "日本"]),
    "superbpe": ("n 1234567", ["n ", "1", "234", "567"]),
    "seed-coder": ("a;\n\nb", ["a", ";", "\n\n", "b"]),
    "viking": ("ab 12.", ["ab", " ", "1", "2", "."]),
    "bailingmoe": ("I'd go\n\n", ["I", "'d", " go", "\n\n"]),
    "qwen35": ("नमस्ते 12", ["नमस्ते", " ", "1", "2"]),
    "default": ("a1234!?", ["a", "123", "4", "!?"]),
    "falcon": ("a1234`!?", ["a", "123", "4", "`!?"]),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces(name: str) -> None:
    """How each family cuts; runs of pieces that the byte-level step sees one by one."""
    text, expected = PIECES[name]
    offsets = [span for _, span in SPLITS[name].pre_tokenizer().pre_tokenize_str(text)]
    assert [text[start:end] for start, end in offsets] == expected


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_keeps_all_text(name: str) -> None:
    tokenizer = tokenizer_from_gguf(byte_level(name))
    for text in TEXTS:
        expected = tokenizer.backend.normalizer.normalize_str(text) if SPLITS[name].nfc else text
        assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_whole_words_are_taken_without_merging() -> None:
    """Llama 3's family looks a piece up first: here no merge leads to the word."""
    tokens = [*TOKENS, "qxz"]
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3)
    found = {
        name: tokenizer_from_gguf(byte_level(name, tokens=tokens, token_type=types)).encode("qxz")
        for name in ("llama-bpe", "qwen2")
    }
    assert found["llama-bpe"] == [len(tokens) - 1]
    assert len(found["qwen2"]) == 3


def test_an_unknown_pre_tokenizer_is_named() -> None:
    with pytest.raises(ModelUnsupported, match=r"'novel-bpe'.*llama-bpe.*tokenizer\.json"):
        tokenizer_from_gguf(byte_level("novel-bpe"))


def test_a_missing_pre_tokenizer_is_the_default() -> None:
    text = TEXTS[1]
    missing, named = tokenizer_from_gguf(byte_level(None)), tokenizer_from_gguf(byte_level("default"))
    assert missing.encode(text) == named.encode(text)


@pytest.mark.real_model
def test_smollm2_equals_a_tokenizer_put_together_by_hand(smollm2: Any) -> None:
    from mlxserve.models.gguf import open_gguf

    metadata = open_gguf(smollm2).metadata
    ours = tokenizer_from_gguf(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    pairs = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    theirs.pre_tokenizer = pre_tokenizers.Sequence([DIGITS, WORDS])
    theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens(tokens[:17])
    for text in [*TEXTS, "<|im_start|>user\nHi<|im_end|>", "<repo_name>x"]:
        ids = _ids(theirs, text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert (ours.bos_token_id, ours.eos_token_ids, ours.add_bos) == (1, {0, 2}, False)
