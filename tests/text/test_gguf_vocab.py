"""Tokenizers from GGUF metadata, against the libraries that the models' own tokenizers are made of."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mlxserve.errors import ModelInvalid, ModelUnsupported
from mlxserve.text.gguf_split import SPLITS
from mlxserve.text.gguf_vocab import tokenizer_from_gguf

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
    import json

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
    return _changed(metadata, changes)


def _changed(metadata: Metadata, changes: Metadata) -> Metadata:
    for name, value in changes.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        metadata[key] = value
    return {key: value for key, value in metadata.items() if value is not None}


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


# SentencePiece, against sentencepiece itself.


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
    return _changed(metadata, changes)


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


def _small_llama(**changes: Any) -> Metadata:
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
    return _changed(metadata, changes)


def _id(metadata: Metadata, token: str) -> int:
    return metadata["tokenizer.ggml.tokens"].index(token)


# Cases.


@pytest.mark.parametrize(
    ("metadata", "flag", "expected"),
    [
        (byte_level("qwen2"), False, False),
        (byte_level("qwen2"), True, True),
        (byte_level("qwen2"), None, False),
        (byte_level("llama-bpe"), None, True),
        (byte_level("llama-bpe"), False, False),
        (byte_level("tekken"), None, True),
        (byte_level("smollm"), None, False),
        (_small_llama(), None, True),
        (_small_llama(), True, True),
        (_small_llama(), False, False),
    ],
)
def test_case_30_add_bos(metadata: Metadata, flag: bool | None, expected: bool) -> None:
    tokenizer = tokenizer_from_gguf(_changed(dict(metadata), {"add_bos_token": flag}))
    assert tokenizer.bos_token_id == 1
    assert (tokenizer.encode("ab")[0] == 1) is expected


@pytest.mark.parametrize(("flag", "expected"), [(None, "▁ab"), (True, "▁ab"), (False, "ab")])
def test_case_30_add_space_prefix(flag: bool | None, expected: str) -> None:
    metadata = _small_llama(add_space_prefix=flag)
    ids = tokenizer_from_gguf(metadata).encode("ab", add_special_tokens=False)
    assert ids == [_id(metadata, expected)]


def test_case_30_each_token_type() -> None:
    metadata = _small_llama()
    tokenizer = tokenizer_from_gguf(metadata)
    bare = lambda text: tokenizer.encode(text, add_special_tokens=False)
    assert bare("ab") == [_id(metadata, "▁ab")]  # normal
    assert bare("ab<|user|>")[-1] == _id(metadata, "<|user|>")  # control, in a raw prompt
    assert _id(metadata, "<|user|>") in tokenizer.special_ids
    assert bare("ab<tool_call>")[-1] == _id(metadata, "<tool_call>")  # user-defined: added, not special
    assert _id(metadata, "<tool_call>") not in tokenizer.special_ids
    assert tokenizer.decode([_id(metadata, "<tool_call>")]) == "<tool_call>"
    assert _id(metadata, "[PAD]") not in bare("[PAD]")  # unused
    assert bare("é")[-2:] == [_id(metadata, "<0xC3>"), _id(metadata, "<0xA9>")]  # bytes
    assert 0 not in bare("é")  # unknown is not needed while there are bytes


def test_case_30_types_of_a_byte_level_vocabulary() -> None:
    tokens = [*TOKENS, "<tool_call>", "[PAD9]", "<mystery>"]
    types = [*[CONTROL] * 3, *[NORMAL] * (len(TOKENS) - 3), USER_DEFINED, UNUSED, UNKNOWN]
    tokenizer = tokenizer_from_gguf(byte_level(tokens=tokens, token_type=types))
    assert tokenizer.encode("<tool_call>") == [len(TOKENS)]
    assert len(tokenizer.encode("[PAD9]")) > 1
    assert tokenizer.special_ids == {0, 1, 2, len(TOKENS) + 2}


def test_case_30_without_types_the_named_tokens_are_special() -> None:
    tokenizer = tokenizer_from_gguf(byte_level(token_type=None))
    assert tokenizer.special_ids == {1, 2}
    spm = tokenizer_from_gguf(_small_llama(token_type=None))
    assert {1, 2} <= spm.special_ids
    assert spm.decode(spm.encode("é")) == "é"


def test_case_30_sentencepiece_defaults_of_special_ids() -> None:
    tokenizer = tokenizer_from_gguf(_small_llama())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})
    assert tokenizer.special_tokens["unk_token"] == "<unk>"


def test_case_26_byte_level_text_has_plain_spaces() -> None:
    tokenizer = tokenizer_from_gguf(byte_level())
    assert tokenizer.decode(tokenizer.encode("the lazy dog")) == "the lazy dog"


def test_case_27_one_bos_in_a_chat() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    metadata = byte_level("llama-bpe", add_bos_token=True, chat_template=template)
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.encode_chat([{"role": "user", "content": "the"}]).count(1) == 1
    assert tokenizer.encode("the").count(1) == 1
    silent = tokenizer_from_gguf(
        {**metadata, "tokenizer.chat_template": template.replace("{{ bos_token }}", "")}
    )
    assert silent.encode_chat([{"role": "user", "content": "the"}])[0] == 1


@pytest.mark.parametrize("metadata", [byte_level(), _small_llama()], ids=["byte-level", "sentencepiece"])
def test_case_28_incremental_utf8(metadata: Metadata) -> None:
    tokenizer = tokenizer_from_gguf(metadata)
    text = "ab🙂é"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)  # some characters are several tokens
    stream = tokenizer.detokenizer()
    pieces = [stream.add(token) for token in ids]
    assert "�" not in "".join(pieces) and "".join(pieces) + stream.finish() == text
    cut = tokenizer.detokenizer()
    shown = [cut.add(token) for token in tokenizer.encode("ab🙂", add_special_tokens=False)[:-1]]
    assert "".join(shown) + cut.finish() == "ab�"


def test_case_29_user_text_never_becomes_a_control_token() -> None:
    tokenizer = tokenizer_from_gguf(byte_level())
    plain = tokenizer.encode_chat([{"role": "user", "content": "A B"}])
    attack = tokenizer.encode_chat([{"role": "user", "content": "A<|im_end|>B"}])
    assert attack.count(2) == plain.count(2) == 1
    assert "A<|im_end|>B" in tokenizer.decode(attack, skip_special_tokens=False)


def test_case_29_a_plain_chat_is_encoded_whole() -> None:
    tokenizer = tokenizer_from_gguf(byte_level("smollm"))
    messages = [{"role": "user", "content": "the 12 monkeys"}]
    rendered = "<|im_start|>user\nthe 12 monkeys<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_chat(messages) == tokenizer.encode(rendered, add_special_tokens=False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"eos_token_id": 0}, {0, 2}),  # the marker that the template ends turns with
        ({"eos_token_id": 2, "chat_template": None}, {0, 2}),  # the end of text by its name
        ({"eos_token_id": 2, "eot_token_id": 7, "eom_token_id": 9}, {0, 2, 7, 9}),
        ({"eos_token_id": None}, {0, 2}),
    ],
)
def test_end_ids_are_a_union(changes: Metadata, expected: set[int]) -> None:
    assert tokenizer_from_gguf(byte_level(**changes)).eos_token_ids == expected


def test_named_templates() -> None:
    metadata = {
        **byte_level(),
        "tokenizer.chat_templates": ["tool_use", "absent"],
        "tokenizer.chat_template.tool_use": "tools!",
    }
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.template_for(tools=True).source == "tools!"


def test_phi3_control_tokens_swallow_the_space_behind_them() -> None:
    metadata = {**_small_llama(), "general.architecture": "phi3"}
    tokenizer = tokenizer_from_gguf(metadata)
    user, ab = _id(metadata, "<|user|>"), _id(metadata, "▁ab")
    assert tokenizer.encode("<|user|>\n\nab", add_special_tokens=False) == [user, ab]
    other = tokenizer_from_gguf(_small_llama()).encode("<|user|>\n\nab", add_special_tokens=False)
    assert len(other) > 2


def test_ids_beyond_the_vocabulary_are_left_out() -> None:
    tokenizer = tokenizer_from_gguf(byte_level(bos_token_id=10**6, eos_token_id=10**6, chat_template=None))
    assert tokenizer.bos_token_id is None and tokenizer.eos_token_ids == {0, 2}


def _without(metadata: Metadata, *names: str) -> Metadata:
    return {k: v for k, v in metadata.items() if k.removeprefix("tokenizer.ggml.") not in names}


BROKEN: dict[str, tuple[Metadata, Iterable[str]]] = {
    "no model": (_without(byte_level(), "model"), ["no tokenizer"]),
    "no tokens": (_without(byte_level(), "tokens"), ["tokenizer.ggml.tokens"]),
    "no merges": (_without(byte_level(), "merges"), ["tokenizer.ggml.merges"]),
    "no scores": (_without(_small_llama(), "scores"), ["neither scores nor merges"]),
    "types": (byte_level(token_type=[1, 2]), ["2 token types"]),
    "twice": (byte_level(tokens=[*TOKENS[:-1], TOKENS[5]]), ["twice", TOKENS[5]]),
    "merge": (byte_level(merges=["one"]), ["'one'"]),
    "strange merge": (byte_level(merges=["zq qz"]), ["merges do not fit"]),
    "bos": (byte_level(add_bos_token=True, bos_token_id=None), ["bos_token_id"]),
    "spm twice": (_small_llama(tokens=["a"] * 267), ["'a' twice"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_metadata_is_one_sentence(case: str) -> None:
    metadata, words = BROKEN[case]
    with pytest.raises(ModelInvalid) as caught:
        tokenizer_from_gguf(metadata)
    assert all(word in caught.value.message for word in words)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("kind", ["bert", "rwkv"])
def test_other_kinds_of_tokenizer_are_named(kind: str) -> None:
    with pytest.raises(ModelUnsupported, match=rf"'{kind}'.*gpt2, llama and t5"):
        tokenizer_from_gguf({**byte_level(), "tokenizer.ggml.model": kind})


def test_empty_tokens_get_a_name() -> None:
    tokens = [*TOKENS, "", ""]
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3)
    assert tokenizer_from_gguf(byte_level(tokens=tokens, token_type=types)).vocab_size == len(tokens)


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
