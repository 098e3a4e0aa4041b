"""Rows, formats, and exactly which tokens are trained. The byte tokenizer makes the truth readable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxserve.errors import UsageError
from mlxserve.lora.config import from_dict
from mlxserve.lora.data import Dataset, Sample, encode_rows, encode_sample, load_all
from mlxserve.lora.rows import find_split, parse_row, read_rows
from mlxserve.text.tokenizer import Tokenizer, load_tokenizer
from tests import tiny

TWO_TURNS = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "first."},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "second."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(tiny.write_tokenizer(tmp_path_factory.mktemp("chat")))


def _sample(row: dict[str, Any], tokenizer: Tokenizer, **data: Any) -> Sample:
    config = from_dict({"data": data})
    return encode_sample(parse_row(row, "f:1", config.data), config, tokenizer)


def _trained(sample: Sample, tokenizer: Tokenizer) -> list[str]:
    """The trained tokens' text, a string a run of neighbours."""
    runs: list[str] = []
    for i, token in enumerate(sample.tokens.tolist()):
        if sample.targets[i]:
            if i == 0 or not sample.targets[i - 1]:
                runs.append("")
            runs[-1] += tokenizer.token_text(token)
    return runs


def test_case_53_every_assistant_turn_with_its_end_marker(tokenizer: Tokenizer) -> None:
    """Fault 6 of mlx-lm: only the last turn was trained."""
    sample = _sample({"messages": TWO_TURNS}, tokenizer)
    assert _trained(sample, tokenizer) == ["first.<|im_end|>", "second.<|im_end|>"]


@pytest.mark.parametrize(("loss_on", "runs"), [("last", ["second.<|im_end|>"]), ("all", None)])
def test_which_turns(tokenizer: Tokenizer, loss_on: str, runs: list[str] | None) -> None:
    sample = _sample({"messages": TWO_TURNS}, tokenizer, loss_on=loss_on)
    if runs is None:
        assert sample.targets[1:].all() and not sample.targets[0]
    else:
        assert _trained(sample, tokenizer) == runs


def test_equal_answers_and_answers_inside_questions(tokenizer: Tokenizer) -> None:
    chat = [
        {"role": "user", "content": "say yes"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "yes?"},
        {"role": "assistant", "content": "yes"},
    ]
    sample = _sample({"messages": chat}, tokenizer)
    assert _trained(sample, tokenizer) == ["yes<|im_end|>", "yes<|im_end|>"]


def test_control_tokens_in_user_text_stay_text(tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "a<|im_end|>b"}, {"role": "assistant", "content": "ok<|im_start|>"}]
    sample = _sample({"messages": chat}, tokenizer)
    assert _trained(sample, tokenizer) == ["ok<|im_start|><|im_end|>"]
    specials = [t for t in sample.tokens.tolist() if t >= 256]
    assert specials == [258, 259, 258, 259]


def test_case_51_generation_prompt_that_is_no_prefix(tmp_path: Path) -> None:
    """Templates that print thinking only in the generation prompt, or drop it from earlier turns."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    )
    other = load_tokenizer(tiny.write_tokenizer(tmp_path, template))
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>hm</think>one"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "<think>so</think>two"},
    ]
    runs = _trained(_sample({"messages": chat}, other), other)
    assert runs == ["one<|im_end|>", "<think>so</think>two<|im_end|>"]


@pytest.mark.parametrize(
    "name", ["llama-3-instruct", "zephyr", "gemma-it", "phi-3", "qwen2.5-instruct", "mistral-instruct"]
)
def test_real_templates(data: Path, tmp_path: Path, name: str) -> None:
    """Every assistant turn's words are trained, and nothing of the user's."""
    source = (data / "templates" / f"{name}.jinja").read_text()
    other = load_tokenizer(tiny.write_tokenizer(tmp_path, source))
    chat = TWO_TURNS[1:]
    runs = _trained(_sample({"messages": chat}, other), other)
    assert len(runs) == 2
    assert runs[0].strip().startswith("first.") and runs[1].strip().startswith("second.")
    assert not any("?" in run for run in runs)


def test_case_51_truncated_prompts_are_skipped_and_counted(tokenizer: Tokenizer) -> None:
    """Fault 3 of mlx-lm: a prompt above the maximum gave zero targets and a NaN."""
    config = from_dict({"data": {"too_long": "truncate"}, "train": {"max_seq": 64}})
    rows = [{"prompt": "x" * 200, "completion": "y"}, {"prompt": "x", "completion": "y" * 200}]
    made = encode_rows([parse_row(r, f"f:{i}", config.data) for i, r in enumerate(rows)], config, tokenizer)
    assert made.dropped == {"without targets": 1}
    assert (made.truncated, made.items[0].length, made.rows) == (1, 64, 2)
    with pytest.raises(UsageError, match="No row is left"):
        encode_rows([parse_row(rows[0], "f:1", config.data)], config, tokenizer)


def test_too_long_rules(tokenizer: Tokenizer) -> None:
    rows = [{"text": "a" * 100}, {"text": "b"}]
    for rule, lengths in (("drop", [2]), ("truncate", [50, 2])):
        config = from_dict({"data": {"too_long": rule}, "train": {"max_seq": 50}})
        made = encode_rows([parse_row(r, "f:1", config.data) for r in rows], config, tokenizer)
        assert made.lengths.tolist() == lengths
    config = from_dict({"data": {"too_long": "error"}, "train": {"max_seq": 50}})
    with pytest.raises(UsageError, match="f:1 has 101 tokens"):
        encode_rows([parse_row(rows[0], "f:1", config.data)], config, tokenizer)


CHAT_FORMS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    {"prompt": "q", "completion": "a"},
    {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
    {"instruction": "q", "output": "a"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
]


@pytest.mark.parametrize("row", CHAT_FORMS)
def test_formats_mean_the_same_chat(tokenizer: Tokenizer, row: dict[str, Any]) -> None:
    text = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    sample = _sample(row, tokenizer)
    assert "".join(map(tokenizer.token_text, sample.tokens.tolist())) == text
    assert _trained(sample, tokenizer) == ["a<|im_end|>"]


def test_text_and_completion_without_template(tmp_path: Path) -> None:
    plain = load_tokenizer(tiny.write_tokenizer(tmp_path, None))
    assert _trained(_sample({"text": "hi"}, plain), plain) == ["i<|eos|>"]
    assert _trained(_sample({"prompt": "hi", "completion": "yo"}, plain), plain) == ["yo<|eos|>"]
    with pytest.raises(UsageError, match="no chat template"):
        _sample({"messages": TWO_TURNS}, plain)


def test_preference_pairs(tokenizer: Tokenizer) -> None:
    config = from_dict({"train": {"objective": "dpo"}})
    row = parse_row({"prompt": "q", "chosen": "good", "rejected": "bad"}, "f:1", config.data)
    pair = encode_rows([row], config, tokenizer).items[0]
    assert _trained(pair.chosen, tokenizer) == ["good<|im_end|>"]
    assert _trained(pair.rejected, tokenizer) == ["bad<|im_end|>"]
    with pytest.raises(UsageError, match="f:1.*preference"):
        encode_rows([row], from_dict({}), tokenizer)


def test_files_of_every_kind(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completion": "a,b"}, {"prompt": "r", "completion": "c"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text('prompt,completion\nq,"a,b"\nr,c\n')
    for name in ("a.jsonl", "a.json", "a.csv"):
        read = read_rows(tmp_path / name, from_dict({}).data)
        assert [row.raw for row in read] == [("q", "a,b"), ("r", "c")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}\n{"text": \n', "bad.jsonl:2 is not valid JSON"),
        ('{"text": "a"}\n\n{"text": 3}\n', "bad.jsonl:3: text must be text"),
        ('{"a": 1}\n', "bad.jsonl:1 has the fields a"),
        ("[1]\n", "bad.jsonl:1 is no object"),
        ('{"messages": []}\n', "bad.jsonl:1: messages"),
        ('{"conversations": [{"from": "who", "value": ""}]}\n', "bad.jsonl:1: a turn is from 'who'"),
        ("", "holds no rows"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(UsageError) as caught:
        read_rows(tmp_path / "bad.jsonl", from_dict({}).data)
    assert words in caught.value.message


def test_columns_are_renamed(data: Path, tokenizer: Tokenizer) -> None:
    config = from_dict({"data": {"columns": {"prompt": "question", "completion": "answer"}, "limit": 3}})
    made = encode_rows(read_rows(data / "gsm8k" / "train.jsonl", config.data), config, tokenizer)
    assert made.rows == 3 and made.formats == {"completion": 3}
    assert "#### 72<|im_end|>" in _trained(made.items[0], tokenizer)[0]


def test_valid_share_is_seeded_and_disjoint(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": f"row {i}"}) for i in range(20)))
    values = {"data": {"train": str(tmp_path / "t.jsonl"), "valid": 0.25}}
    train, valid = load_all(from_dict(values), tokenizer)
    assert valid is not None and (len(train.items), len(valid.items)) == (15, 5)
    assert not {i.where for i in train.items} & {i.where for i in valid.items}
    again = load_all(from_dict(values), tokenizer)[0]
    assert again.digest() == train.digest()
    assert Dataset(train.items[::-1], 15).digest() != train.digest()


def test_files_that_begin_with_a_mark(tmp_path: Path) -> None:
    """Excel puts a byte order mark before its UTF-8."""
    (tmp_path / "rows.csv").write_bytes(b"\xef\xbb\xbfprompt,completion\na,b\n")
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a", "completion": "b"}\n')
    for name in ("rows.csv", "rows.jsonl"):
        (row,) = read_rows(tmp_path / name, from_dict({}).data)
        assert row.raw == ("a", "b")


def test_no_split_is_found_by_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without data.train the working folder is nobody's data."""
    (tmp_path / "test.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert find_split(from_dict({}).data, "test") is None
