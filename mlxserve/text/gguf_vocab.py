"""A tokenizer from a GGUF file's metadata.

Knows: the keys `tokenizer.ggml.*` and `tokenizer.chat_template*`: byte-level BPE (model `gpt2`),
SentencePiece BPE (`llama`) and unigram (`t5`), token types, flags, and what holds where a flag is missing.
Knows nothing of files or tensors: it is handed a mapping.

Where metadata is silent, the family's default holds:

    key                  gpt2                                llama     t5
    add_bos_token        true for Llama 3's family, Tekken   true      false
    add_space_prefix     (none)                              true      true
    bos, eos, unknown    none                                1, 2, 0   none, 1, 2
    pre                  "default"                           -         -

`add_eos_token` is about training data; a prompt that ended in EOS would ask for nothing, so it is not
applied. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.text.gguf_split import find_split
from mlxserve.text.spm import META, PieceType, build_spm_backend
from mlxserve.text.tokenizer import Tokenizer

Metadata = Mapping[str, Any]
# A template may use these by the names that Hugging Face gives them.
_NAMED_IDS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # spelled so in the format
    "mask_token": "mask",
}
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2},
}
_STOPS = ("eos", "eot", "eom")
# Control tokens that end a text or a turn in every model that has them; a file has room for one or two.
_END_MARKERS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
)
_SPM_MODELS: dict[str, Literal["bpe", "unigram"]] = {"llama": "bpe", "t5": "unigram"}


def tokenizer_from_gguf(metadata: Metadata) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes, with its chat templates and end-of-turn ids.

    Raises ModelUnsupported for a kind of tokenizer or pre-tokenizer that is not known, ModelInvalid for
    metadata that is incomplete or contradicts itself.
    """
    kind = _kind(metadata)
    tokens = _tokens(metadata)
    ids = _ids(metadata, kind, len(tokens))
    types = _types(metadata, tokens, ids)
    if kind == "gpt2":
        backend, add_bos = _byte_level(metadata, tokens, types)
    else:
        backend, add_bos = _sentencepiece(metadata, tokens, types, _SPM_MODELS[kind]), kind == "llama"
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos and "bos" in ids))
    if add_bos and "bos" not in ids:
        raise ModelInvalid("The GGUF file's tokenizer adds a BOS but names none (bos_token_id).")
    return Tokenizer(
        backend,
        bos_token_id=ids.get("bos"),
        eos_token_ids=_end_ids(tokens, types, ids),
        add_bos=add_bos,
        chat_template=_templates(metadata),
        special_tokens={name: tokens[ids[key]] for name, key in _NAMED_IDS.items() if key in ids},
    )


def _kind(metadata: Metadata) -> str:
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ModelInvalid("The GGUF file holds no tokenizer: its metadata has no tokenizer.ggml.model.")
    if kind != "gpt2" and kind not in _SPM_MODELS:
        raise ModelUnsupported(
            f"The tokenizer {kind!r} of this GGUF file is not known; known are gpt2, llama and t5. "
            "The same model as a folder with tokenizer.json works."
        )
    return str(kind)


# --- vocabularies --------------------------------------------------------------------------------------


def _tokens(metadata: Metadata) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelInvalid("The GGUF file holds no vocabulary: tokenizer.ggml.tokens is missing or empty.")
    return [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]


def _types(metadata: Metadata, tokens: Sequence[str], ids: Mapping[str, int]) -> list[int]:
    """The types as stored; without them, tokens that the metadata names are control tokens."""
    types = metadata.get("tokenizer.ggml.token_type")
    if types is not None:
        if len(types) != len(tokens):
            raise ModelInvalid(f"The GGUF file has {len(tokens)} tokens and {len(types)} token types.")
        return [int(kind) for kind in types]
    special = set(ids.values())
    return [PieceType.CONTROL if i in special else _guess(token) for i, token in enumerate(tokens)]


def _guess(token: str) -> int:
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return PieceType.BYTE if is_byte else PieceType.NORMAL


def _byte_level(metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> tuple[Backend, bool]:
    """(backend, whether the family adds a BOS): BPE over GPT-2's printable stand-ins for bytes."""
    split = find_split(str(metadata.get("tokenizer.ggml.pre") or "default"))
    vocabulary, merges = _vocabulary(tokens), _merges(metadata)
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole_words)
    except Exception as error:  # the library raises plain Exception
        raise ModelInvalid(f"The GGUF file's merges do not fit its vocabulary: {error}.") from error
    backend = Backend(model)
    if split.nfc:
        backend.normalizer = split.normalizer()
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_added(tokens, types, PieceType.CONTROL, PieceType.UNKNOWN))
    backend.add_tokens(_added(tokens, types, PieceType.USER_DEFINED))
    return backend, split.add_bos


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise ModelInvalid(f"The tokenizer's vocabulary holds the token {twice!r} twice.")
    return vocabulary


def _merges(metadata: Metadata) -> list[tuple[str, str]]:
    """Pairs in order of rank; each is stored as both halves with a space between, the first never empty."""
    stored = metadata.get("tokenizer.ggml.merges")
    if stored is None:
        raise ModelInvalid("The GGUF file's tokenizer has no merges (tokenizer.ggml.merges).")
    pairs = []
    for merge in stored:
        cut = merge.find(" ", 1)
        if cut < 0:
            raise ModelInvalid(f"The GGUF file's merge {merge!r} is not two tokens.")
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


def _added(tokens: Sequence[str], types: Sequence[int], *wanted: int) -> list[AddedToken]:
    special = PieceType.USER_DEFINED not in wanted
    return [
        AddedToken(token, normalized=False, special=special)
        for token, kind in zip(tokens, types)
        if kind in wanted
    ]


def _sentencepiece(
    metadata: Metadata, tokens: Sequence[str], types: Sequence[int], model: Literal["bpe", "unigram"]
) -> Backend:
    merges = _merges(metadata) if "tokenizer.ggml.merges" in metadata else None
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        if merges is None:
            raise ModelInvalid("The GGUF file's tokenizer has neither scores nor merges.")
        scores = [0.0] * len(tokens)
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    if prefix:
        # A run of spaces may begin with the prefix, so it must be found behind the normaliser.
        tokens = [META * len(token) if token and not token.strip(" ") else token for token in tokens]
    try:
        backend = build_spm_backend(
            tokens,
            scores,
            types,
            model=model,
            add_dummy_prefix=prefix,
            remove_extra_whitespaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
            charsmap=bytes(value % 256 for value in charsmap) if charsmap else None,
            merges=merges,
        )
    except ModelInvalid:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ModelInvalid(f"The GGUF file's SentencePiece vocabulary is damaged: {error}.") from error
    return _strip_after_control(backend) if metadata.get("general.architecture") == "phi3" else backend


# Phi-3's control tokens swallow the white space behind them, except these; the format has no room for it.
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")


def _strip_after_control(backend: Backend) -> Backend:
    """The backend anew, since the library cannot change a token that it has."""
    description = json.loads(backend.to_str())
    for token in description["added_tokens"]:
        token["rstrip"] = token["special"] and token["content"] not in _PHI3_PLAIN
    return Backend.from_str(json.dumps(description))


# --- ids and templates ---------------------------------------------------------------------------------


def _ids(metadata: Metadata, kind: str, size: int) -> dict[str, int]:
    """Special ids by the format's names; ones beyond the vocabulary are left out, as its runtime does."""
    found = {name: i for name, i in _DEFAULT_IDS.get(kind, {}).items() if i < size}
    for name in {*_NAMED_IDS.values(), *_STOPS}:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and 0 <= value < size:
            found[name] = int(value)
    return found


def _end_ids(tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int]) -> set[int]:
    """Every id that ends a generation: those named, and control tokens that mean nothing else."""
    named = {ids[name] for name in _STOPS if name in ids}
    control = {i for i, kind in enumerate(types) if kind == PieceType.CONTROL}
    return named | {i for i in control if tokens[i] in _END_MARKERS}


def _templates(metadata: Metadata) -> dict[str, str] | None:
    """The default template and those under names."""
    found = {}
    if metadata.get("tokenizer.chat_template"):
        found["default"] = str(metadata["tokenizer.chat_template"])
    for name in metadata.get("tokenizer.chat_templates") or ():
        source = metadata.get(f"tokenizer.chat_template.{name}")
        if source:
            found[str(name)] = str(source)
    return found or None
