"""SentencePiece vocabularies in GGUF metadata, against sentencepiece itself."""

from __future__ import annotations

import io
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from mlxserve.text.gguf_vocab import tokenizer_from_gguf
from tests.text.gguf_metadata import CORPUS, TEXTS, USER_DEFINED, Metadata, changed


def _spm(kind: str, **options: Any) -> tuple[Any, bytes]:
    out = io.BytesIO()
    defaults = {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<tool>"],
        "control_symbols": ["<ctl>"],
        "byte_fallback": True,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        vocab_size=500,
        model_type=kind,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **{**defaults, **options},
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue()), out.getvalue()


def spm_metadata(content: bytes, model: str, **changes: Any) -> Metadata:
    """Metadata as converters write it from a tokenizer.model."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(content)
    charsmap = proto.normalizer_spec.precompiled_charsmap
    metadata: Metadata = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [
            piece.piece.replace("▁", " ") if piece.type == USER_DEFINED else piece.piece
            for piece in proto.pieces
        ],
        "tokenizer.ggml.scores": [piece.score for piece in proto.pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in proto.pieces],
        "tokenizer.ggml.add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": proto.normalizer_spec.remove_extra_whitespaces,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    if charsmap:
        signed = [byte - 256 if byte > 127 else byte for byte in charsmap]
        metadata["tokenizer.ggml.precompiled_charsmap"] = signed
    return changed(metadata, changes)


SPM_KINDS = {
    "llama": ("bpe", "llama", {}),
    "gemma": (
        "bpe",
        "llama",
        {"add_dummy_prefix": False, "user_defined_symbols": ["<tool>", "▁▁", "▁▁▁"]},
    ),
    "unigram": ("unigram", "t5", {}),
    "t5": (
        "unigram",
        "t5",
        {
            "normalization_rule_name": "nmt_nfkc",
            "remove_extra_whitespaces": True,
            "byte_fallback": False,
        },
    ),
}


@pytest.fixture(scope="module", params=SPM_KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    kind, model, options = SPM_KINDS[request.param]
    theirs, content = _spm(kind, **options)
    return theirs, tokenizer_from_gguf(spm_metadata(content, model))


def test_spm_ids_and_text_equal_sentencepiece(pair: tuple[Any, Any]) -> None:
    theirs, ours = pair
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet=st.sampled_from("theqfox 12.,naïé東\n<>🙂"), max_size=30))
def test_spm_ids_of_any_text_equal_sentencepiece(pair: tuple[Any, Any], text: str) -> None:
    theirs, ours = pair
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)


def test_runs_of_spaces_may_begin_with_the_prefix() -> None:
    theirs, content = _spm("bpe", user_defined_symbols=["▁▁", "▁▁▁"])
    ours = tokenizer_from_gguf(spm_metadata(content, "llama"))
    for text in (" the", "  the", "a  b", "a   b", " "):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text), text
