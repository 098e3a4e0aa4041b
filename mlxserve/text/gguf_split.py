r"""How byte-level vocabularies cut text before they merge: the names in `tokenizer.ggml.pre`.

Knows: for each name the regular expressions, applied one after another to the pieces that the last one left
(matches and what lies between them are pieces), a Unicode normalisation where the models have one, and two
habits of the family. Knows nothing of vocabularies.

A name stands for a family of models; the expressions are those of the models' own tokenizer.json files.
Names: https://github.com/ggml-org/llama.cpp (src/llama-vocab.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenizers import Regex, normalizers, pre_tokenizers

from mlxserve.errors import ModelUnsupported


@dataclass(frozen=True, slots=True)
class Split:
    """expressions: in order. whole_words: a piece that is in the vocabulary is taken without merging.

    add_bos: whether the family puts a BOS before raw text where a file does not say. nfc: text is
    normalised to Unicode's composed form first.
    """

    expressions: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(text), behavior="isolated") for text in self.expressions]
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, level])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_WIDE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SMALL_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_LARGE_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SLASHED_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
# Letters with case, less the blocks that DeepSeek LLM's list leaves out (lower-case Armenian, most of
# Georgian, the mathematical alphabets and a few rare ones).
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8f}\x{2d00}-\x{2d2d}"
    r"\x{a790}-\x{a7ff}\x{ab30}-\x{ab6f}\x{10570}-\x{105bf}\x{16e40}-\x{16e7f}\x{1d400}-\x{1dfff}]]"
)


def _words(*alternatives: str) -> str:
    return "|".join(alternatives)


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _words(_CONTRACTION, _WORD, _DIGITS, _SYMBOLS, _SPACES)
_QWEN2 = _words(_CONTRACTION, _WORD, _DIGIT, _SYMBOLS, _SPACES)
_QWEN35 = _words(
    _CONTRACTION,
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    _DIGIT,
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    _SPACES,
)
_GPT4O = _words(
    rf"{_SMALL_WORD}{_CONTRACTION}?", rf"{_LARGE_WORD}{_CONTRACTION}?", _DIGITS, _SLASHED_SYMBOLS, _SPACES
)
_TEKKEN = _words(_SMALL_WORD, _LARGE_WORD, _DIGIT, _SLASHED_SYMBOLS, _SPACES)
_DEEPSEEK3 = _words(
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    _SPACES,
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_gpt2 = Split((_GPT2,))
_digits_apart = Split((r"\p{N}", _GPT2))
_llama3 = Split((_LLAMA3,))
_qwen2 = Split((_QWEN2,), nfc=True)
_qwen2_plain = Split((_QWEN2,))
_gpt4o = Split((_GPT4O,))
_deepseek3 = Split((_DIGITS, _CJK, _DEEPSEEK3))
_bailing = Split(
    (
        _words(
            r"'(?i:[sdmt]|ll|ve|re)",
            r"[^\r\n\p{L}\p{N}]?+\p{L}+",
            _DIGIT,
            r" ?[^\s\p{L}\p{N}]++[\r\n]*",
            r"\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    )
)
_default = Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_llama3_family = replace(_llama3, whole_words=True, add_bos=True)

SPLITS: dict[str, Split] = {
    "default": _default,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum"), _gpt2),
    **dict.fromkeys(("exaone4", "trillion", "granite-docling"), _gpt2),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b"), _digits_apart),
    "mellum2": _digits_apart,
    "command-r": replace(_digits_apart, nfc=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"), _llama3_family),
    **dict.fromkeys(("midm-2.0", "lfm2"), _llama3_family),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _llama3),
    "qwen2": _qwen2,
    "qwen35": Split((_QWEN35,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez", "kormo", "hunyuan", "grok-2"), _qwen2_plain),
    "solar-open": _qwen2_plain,
    "seed-coder": Split(
        (_words(_CONTRACTION, _WORD, _DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES),),
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _bailing),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _gpt4o),
    "tekken": Split((_TEKKEN,), whole_words=True, add_bos=True),
    "deepseek-llm": Split(
        (
            r"[\r\n]",
            rf"\s?{_CASED}+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK_WIDE,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_WIDE, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _deepseek3),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Split((_BLOOM,))),
    "viking": Split((_BLOOM, r"\p{N}")),
    "superbpe": Split((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
}


def find_split(name: str) -> Split:
    """The split for a `tokenizer.ggml.pre`. Raises ModelUnsupported, naming the known ones."""
    if name not in SPLITS:
        raise ModelUnsupported(
            f"The pre-tokenizer {name!r} of this GGUF file is not known; known are {', '.join(SPLITS)}. "
            "The same model as a folder with tokenizer.json works."
        )
    return SPLITS[name]
