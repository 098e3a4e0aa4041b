"""SentencePiece vocabularies as `tokenizers` backends.

Knows: pieces, scores and piece types, as they stand in a `tokenizer.model` file and in GGUF metadata alike,
and the small part of SentencePiece's normaliser that language models use. Knows nothing of files' other
parts, chat or BOS rules.

Source: the SentencePiece model proto (github.com/google/sentencepiece, src/sentencepiece_model.proto).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from mlxserve.errors import ModelInvalid

META = "\u2581"  # SentencePiece writes a space as this character
# Below any real score, so that Viterbi never picks a control piece for text that merely spells it.
_UNREACHABLE_SCORE = -1e4


class PieceType(IntEnum):
    """SentencePiece's piece types; GGUF's `tokenizer.ggml.token_type` uses the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_NOT_TEXT = {PieceType.UNKNOWN, PieceType.CONTROL, PieceType.UNUSED, PieceType.BYTE}


def build_spm_backend(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    model: Literal["unigram", "bpe"],
    add_dummy_prefix: bool = True,
    remove_extra_whitespaces: bool = False,
    charsmap: bytes | None = None,
    merges: Sequence[tuple[str, str]] | None = None,
) -> Tokenizer:
    """A backend that splits and joins text as SentencePiece would; token i is `pieces[i]`.

    `scores` and `types` are parallel to `pieces`. `add_dummy_prefix` puts a space before the text and after
    each control token. `charsmap` is the normaliser's precompiled table, `merges` replaces the BPE merges
    that are otherwise derived from the scores. Control pieces become special added tokens, user-defined
    ones plain added tokens. It has no post-processor: BOS is the caller's matter.

    Raises ModelInvalid when the lists differ in length or a piece stands twice.
    """
    _check(pieces, scores, types)
    backend = Tokenizer(_model(pieces, scores, types, model, merges))
    backend.normalizer = _normalizer(add_dummy_prefix, remove_extra_whitespaces, charsmap)
    backend.decoder = _decoder(add_dummy_prefix)
    backend.add_special_tokens(_of_types(pieces, types, {PieceType.CONTROL}))
    backend.add_tokens(_of_types(pieces, types, {PieceType.USER_DEFINED}))
    return backend


def _check(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> None:
    if not len(pieces) == len(scores) == len(types):
        raise ModelInvalid(
            f"The tokenizer has {len(pieces)} pieces, {len(scores)} scores and {len(types)} types; "
            "the three must be as many."
        )
    if len(set(pieces)) != len(pieces):
        twice, _ = Counter(pieces).most_common(1)[0]
        raise ModelInvalid(f"The tokenizer's vocabulary holds the piece {twice!r} twice.")


def _model(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    model: str,
    merges: Sequence[tuple[str, str]] | None,
) -> models.Model:
    unknown = next((i for i, kind in enumerate(types) if kind == PieceType.UNKNOWN), None)
    byte_fallback = PieceType.BYTE in types
    if model == "unigram":
        never = {PieceType.CONTROL, PieceType.UNUSED}
        rows = [
            (piece, _UNREACHABLE_SCORE if kind in never else float(score))
            for piece, score, kind in zip(pieces, scores, types)
        ]
        return models.Unigram(rows, unk_id=unknown, byte_fallback=byte_fallback)
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    return models.BPE(
        vocab=vocabulary,
        merges=list(merges) if merges is not None else merges_from_scores(pieces, scores, types),
        unk_token=None if unknown is None else pieces[unknown],
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )


def merges_from_scores(
    pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """BPE merges, best first: SentencePiece joins whichever neighbours make the piece of highest score."""
    rank = {piece: i for i, (piece, kind) in enumerate(zip(pieces, types)) if kind not in _NOT_TEXT}
    found = []
    for piece, own in rank.items():
        for cut in range(1, len(piece)):
            left, right = rank.get(piece[:cut]), rank.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[own], left, right))
    found.sort()
    return [(pieces[left], pieces[right]) for _, left, right in found]


def _of_types(pieces: Sequence[str], types: Sequence[int], wanted: set[PieceType]) -> list[AddedToken]:
    """Pieces of the wanted types. Runs of META stay with the model: text holds them only once normalised."""
    return [
        AddedToken(piece, normalized=False, special=kind == PieceType.CONTROL)
        for piece, kind in zip(pieces, types)
        if kind in wanted and piece and (kind == PieceType.CONTROL or META not in piece)
    ]


def _normalizer(
    add_dummy_prefix: bool, remove_extra_whitespaces: bool, charsmap: bytes | None
) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if charsmap:
        steps.append(normalizers.Precompiled(charsmap))
    if remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if add_dummy_prefix:
        steps.append(normalizers.Prepend(META))
    steps.append(normalizers.Replace(" ", META))
    return normalizers.Sequence(steps)


def _decoder(add_dummy_prefix: bool) -> decoders.Decoder:
    steps: Iterable[decoders.Decoder] = [
        decoders.Replace(META, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if add_dummy_prefix:
        steps = [*steps, decoders.Strip(content=" ", left=1, right=0)]
    return decoders.Sequence(list(steps))


def read_spm_file(content: bytes) -> Tokenizer:
    """The backend of a `tokenizer.model` file's bytes.

    Raises ModelInvalid when they are no SentencePiece model, or one of words or characters.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        raise ModelInvalid("tokenizer.model is not a SentencePiece model.") from error
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    names: dict[int, Literal["unigram", "bpe"]] = {trainer.UNIGRAM: "unigram", trainer.BPE: "bpe"}
    if trainer.model_type not in names or not proto.pieces:
        raise ModelInvalid("tokenizer.model is neither a unigram nor a BPE SentencePiece model.")
    return build_spm_backend(
        [piece.piece for piece in proto.pieces],
        [piece.score for piece in proto.pieces],
        [piece.type for piece in proto.pieces],
        model=names[trainer.model_type],
        add_dummy_prefix=normalizer.add_dummy_prefix,
        remove_extra_whitespaces=normalizer.remove_extra_whitespaces,
        charsmap=normalizer.precompiled_charsmap or None,
    )
