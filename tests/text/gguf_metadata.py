"""Small vocabularies as GGUF metadata, and texts to try them on."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? They'll say WE'RE here.",
    "the 12 monkeys, the 400 blows; 1234567 things and 3.14159",
    "naïve café, déjà vu, über 東京 と 大阪, привет мир, 한국어 문장",
    "def add(a, b):\n    return a + b\n\n\n# done!!! ($5 <= x ^ y~z)\r\n",
    "a  b   c    d     e\tf\t\tg",
] * 10
TEXTS = [
    *CORPUS[:5],
    "",
    " ",
    "  leading and trailing  ",
    "line\n\nbreaks \n\r\n mixed",
    "I'll I'LL i'Ll don't ''quoted''",
    "x=12345;y=0.5e10 ½ ² Ⅷ ٣",
    "CamelCase HTMLParser ÀÉÎ straße ǅ",
    "emoji 🙂👍🏽 and é composed by two",
    "東京都に行きました。한국어! ไทย हिन्दी",
    "!!??... --- /*/ path/to/file\n//",
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
Metadata = dict[str, Any]


def _trained(splitter: pre_tokenizers.PreTokenizer) -> tuple[list[str], list[str]]:
    """(tokens by id, merges) of a byte-level BPE trained here; the special tokens come first."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = splitter
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=600, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
        ),
    )
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(pair) for pair in model["merges"]]


TOKENS, MERGES = _trained(pre_tokenizers.ByteLevel(add_prefix_space=False))


def byte_level(pre: str | None = "gpt-2", **changes: Any) -> Metadata:
    """Metadata of the small byte-level vocabulary; a change to None leaves the key out."""
    metadata: Metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }
    return changed(metadata, changes)


def changed(metadata: Metadata, changes: Metadata) -> Metadata:
    for name, value in changes.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        metadata[key] = value
    return {key: value for key, value in metadata.items() if value is not None}


def small_llama(**changes: Any) -> Metadata:
    """The smallest SentencePiece vocabulary with every token type."""
    pieces: list[tuple[str, int]] = [
        ("<unk>", UNKNOWN),
        ("<s>", CONTROL),
        ("</s>", CONTROL),
        *((f"<0x{byte:02X}>", BYTE) for byte in range(256)),
        ("▁", NORMAL),
        ("a", NORMAL),
        ("b", NORMAL),
        ("ab", NORMAL),
        ("▁ab", NORMAL),
        ("<tool_call>", USER_DEFINED),
        ("<|user|>", CONTROL),
        ("[PAD]", UNUSED),
    ]
    metadata: Metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece for piece, _ in pieces],
        "tokenizer.ggml.scores": [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [kind for _, kind in pieces],
    }
    return changed(metadata, changes)


def id_of(metadata: Metadata, token: str) -> int:
    return metadata["tokenizer.ggml.tokens"].index(token)
