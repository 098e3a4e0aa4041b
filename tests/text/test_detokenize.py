"""Tokens to text piece by piece: the pieces are the whole, whatever bytes come (case 28)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from mlxserve.text.spm import PieceType, build_spm_backend
from mlxserve.text.tokenizer import Tokenizer
from tests.text.conftest import MakeTokenizer

EMOJI = "🙂".encode()
QUICK = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def pieces(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    stream = tokenizer.detokenizer(**options)
    return [*map(stream.add, ids), stream.finish()]


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    return sentencepiece()


def sentencepiece() -> Tokenizer:
    """A SentencePiece vocabulary with byte pieces: 0 to 255 are the bytes, then a few words."""
    words = ["\u2581", "\u2581the", "\u2581fox", "es", "東"]
    names = [*[f"<0x{i:02X}>" for i in range(256)], *words, "<unk>", "<s>", "</s>"]
    types = [*[PieceType.BYTE] * 256, *[PieceType.NORMAL] * 5, PieceType.UNKNOWN, *[PieceType.CONTROL] * 2]
    return Tokenizer(
        build_spm_backend(names, [0.0] * len(names), types, model="unigram"), eos_token_ids=[263]
    )


def test_case_28_an_emoji_of_one_token_a_byte(make: MakeTokenizer, llama: Tokenizer) -> None:
    for tokenizer in (make(), llama):
        assert pieces(tokenizer, list(EMOJI)) == ["", "", "", "🙂", ""]


def test_case_28_half_a_character_then_a_space(make: MakeTokenizer, llama: Tokenizer) -> None:
    half = list("東".encode()[:2])
    assert "".join(pieces(make(), [*half, ord(" "), ord("a")])) == "\ufffd a"
    assert "".join(pieces(llama, [*half, 257])) == "\ufffd the"


def test_case_28_an_end_in_mid_character(make: MakeTokenizer, llama: Tokenizer) -> None:
    for tokenizer in (make(), llama):
        for length in (1, 2, 3):
            assert pieces(tokenizer, list(EMOJI[:length])) == [*[""] * length, "\ufffd"]


def test_case_28_streams_do_not_share_what_they_hold(make: MakeTokenizer) -> None:
    tokenizer = make()
    first, second = tokenizer.detokenizer(), tokenizer.detokenizer()
    assert (first.add(EMOJI[0]), second.add(ord("a"))) == ("", "a")
    assert [second.add(ord("b")), *map(first.add, EMOJI[1:])] == ["b", "", "", "🙂"]


@QUICK
@given(content=st.binary(max_size=40))
def test_pieces_of_any_bytes_are_pythons_decoding(make: MakeTokenizer, content: bytes) -> None:
    tokenizer = _shared(make)
    expected = content.decode("utf-8", "replace")
    assert "".join(pieces(tokenizer, list(content))) == expected
    assert tokenizer.decode(list(content)) == expected
    assert tokenizer.backend.decode(list(content)) == expected


_made: list[Tokenizer] = []


def _shared(make: MakeTokenizer) -> Tokenizer:
    if not _made:
        _made.append(make())
    return _made[0]


@QUICK
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_pieces_of_smollm2s_vocabulary_are_the_whole(smol: Tokenizer, ids: list[int]) -> None:
    expected = smol.backend.decode(ids, skip_special_tokens=True)
    hidden = smol.special_ids
    assert "".join(pieces(smol, ids, hidden=hidden)) == smol.decode(ids) == expected


@QUICK
# U+2581 is how SentencePiece itself writes a space.
@given(
    text=st.text(
        st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"], exclude_characters="\u2581"),
        max_size=40,
    )
)
def test_text_comes_back(smol: Tokenizer, llama: Tokenizer, text: str) -> None:
    known = "".join(char for char in text if smol.backend.decode(smol.encode_user(char)) == char)
    assert smol.decode(smol.encode_user(known)) == known  # its vocabulary lacks some bytes
    assert "".join(pieces(llama, llama.encode_user(text))) == text


def test_every_token_of_smollm2_has_its_bytes(smol: Tokenizer) -> None:
    for i in range(smol.vocab_size):
        whole = smol.backend.decode([i], skip_special_tokens=False)
        assert smol.token_text(i) == whole


def test_leading_space_of_sentencepiece(llama: Tokenizer) -> None:
    ids = [257, 258, 259]
    assert pieces(llama, ids) == ["the", " fox", "es", ""]
    assert llama.backend.decode(ids) == "the foxes"
    assert pieces(llama, ids, continues=True) == [" the", " fox", "es", ""]
    assert pieces(llama, [262, 256, 257]) == ["", "", " the", ""]


def test_special_and_end_tokens_are_hidden(make: MakeTokenizer) -> None:
    tokenizer = make()
    eos, tool = tokenizer.added_tokens["<|eos|>"], tokenizer.added_tokens["<|bos|>"]
    assert pieces(tokenizer, [97, eos, tool, 98]) == ["a", "", "", "b", ""]
    assert pieces(tokenizer, [97, eos], hidden=()) == ["a", "<|eos|>", ""]


@pytest.mark.parametrize("unknown", [-1, 10**6, 2**40])
def test_unknown_ids_show_nothing_and_do_not_raise(
    make: MakeTokenizer, wordpiece: Tokenizer, unknown: int
) -> None:
    assert "".join(pieces(make(), [97, unknown, 98])) == "ab"
    assert "".join(pieces(wordpiece, [1, unknown, 2])) == "hello world"


@pytest.fixture(scope="module")
def wordpiece() -> Tokenizer:
    vocabulary = {"[UNK]": 0, "hello": 1, "world": 2, "##s": 3}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend)


def test_wordpiece_goes_through_the_library(wordpiece: Tokenizer) -> None:
    ids = wordpiece.encode("hello worlds")
    assert "".join(pieces(wordpiece, ids)) == wordpiece.backend.decode(ids) == "hello worlds"
