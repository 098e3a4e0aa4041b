"""SentencePiece vocabularies against the sentencepiece library itself, on small models trained here."""

from __future__ import annotations

import io
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxserve.errors import ModelInvalid
from mlxserve.text.spm import PieceType, build_spm_backend, read_spm_file

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "the 12 monkeys, the 400 blows; the third man",
    "naïve café, déjà vu, über 東京 と 大阪",
    "def add(a, b):\n    return a + b",
    "a  b   c    d",
] * 20


def train(model_type: str, **options: Any) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        vocab_size=420,
        model_type=model_type,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False, **options},
    )
    return out.getvalue()


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    content = train(request.param, user_defined_symbols=["<tool>"], control_symbols=["<ctl>"])
    return sentencepiece.SentencePieceProcessor(model_proto=content), read_spm_file(content)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet=st.sampled_from("theqfox 12.,naïé東\n<>🙂"), max_size=40))
def test_same_ids_and_text_as_sentencepiece(pair: tuple[Any, Any], text: str) -> None:
    theirs, ours = pair
    ids = theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False).ids == ids
    assert ours.decode(ids) == theirs.decode(ids) == text


def test_user_defined_pieces_are_tokens_and_control_pieces_special(pair: tuple[Any, Any]) -> None:
    theirs, ours = pair
    assert theirs.piece_to_id("<tool>") in ours.encode("the<tool>fox", add_special_tokens=False).ids
    added = ours.get_added_tokens_decoder()
    assert added[theirs.piece_to_id("<ctl>")].special
    assert not added[theirs.piece_to_id("<tool>")].special


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_no_dummy_prefix_and_squeezed_spaces(model_type: str) -> None:
    content = train(
        model_type,
        add_dummy_prefix=False,
        normalization_rule_name="nmt_nfkc",
        remove_extra_whitespaces=True,
    )
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=content), read_spm_file(content)
    for text in ("the fox", "  the   ｆｏｘ  ", "\tthe\u00a0man "):
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids)


def test_text_that_spells_a_control_piece_is_not_one() -> None:
    pieces = ["<unk>", "<s>", *"<s>a", *[f"<0x{i:02X}>" for i in range(256)]]
    types = [PieceType.UNKNOWN, PieceType.CONTROL, *[PieceType.NORMAL] * 4, *[PieceType.BYTE] * 256]
    for model in ("unigram", "bpe"):
        backend = build_spm_backend(pieces, [0.0] * len(pieces), types, model=model, add_dummy_prefix=False)
        plain = type(backend)(backend.model)
        assert 1 not in plain.encode("<s>").ids
        assert backend.decode(plain.encode("<s>a").ids) == "<s>a"


def test_damaged_vocabularies_are_named() -> None:
    with pytest.raises(ModelInvalid, match="2 pieces, 1 scores"):
        build_spm_backend(["a", "b"], [0.0], [1, 1], model="bpe")
    with pytest.raises(ModelInvalid, match="'a' twice"):
        build_spm_backend(["a", "a"], [0.0, 0.0], [1, 1], model="bpe")
    with pytest.raises(ModelInvalid, match="not a SentencePiece model"):
        read_spm_file(b"\xff\xff\xff\xff")
