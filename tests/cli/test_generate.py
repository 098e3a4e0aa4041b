"""`mlxserve generate`: what goes where, and how settings arrive; then the real engine on a tiny model."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxserve.cli import common
from mlxserve.config import DEFAULT_MODEL, EngineConfig, LoadConfig
from tests import tiny
from tests.cli.conftest import Opened, Run


def _stdin(monkeypatch: pytest.MonkeyPatch, content: bytes, terminal: bool = False) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
    monkeypatch.setattr(stdin, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdin", stdin)


def test_one_prompt_streams_and_figures_go_to_standard_error(fake: Opened, run: Run) -> None:
    said = run("generate", "--prompt", "Hello there")
    assert (said.code, said.out) == (0, "Hello there!\n")
    assert said.err == "5 tokens in, 3 out · first after 0.25 s · 2.0 tokens/s · peak 5 MiB\n"
    assert fake.llm.asked == [[{"role": "user", "content": "Hello there"}]]
    assert fake.model == DEFAULT_MODEL


def test_pieces_are_written_as_they_come(fake: Opened, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr(common, "write", pieces.append)
    run("generate", "-p", "abcdef")
    assert pieces == ["abc", "def", "!", "\n"]


def test_quiet(fake: Opened, run: Run) -> None:
    assert run("generate", "-p", "x", "--quiet").err == ""


def test_system_and_raw(fake: Opened, run: Run) -> None:
    run("generate", "-p", "x", "--system", "Be brief.")
    run("generate", "-p", "x", "--raw")
    assert fake.llm.asked == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}],
        "x",
    ]
    assert run("generate", "-p", "x", "--raw", "--system", "y").code == 2


def test_several_prompts_are_answered_in_order(fake: Opened, run: Run) -> None:
    said = run("generate", "-p", "one", "-p", "two\nlines " + "x" * 80)
    assert said.out == "one!\n\n" + "two\nlines " + "x" * 80 + "!\n"
    titles = [line for line in said.err.splitlines() if line.startswith("[")]
    assert titles[0] == "[1/2] one" and titles[1].startswith("[2/2] two lines xxx") and titles[1][-1] == "…"


def test_json_is_one_object_a_line(fake: Opened, run: Run) -> None:
    said = run("generate", "-p", "one", "-p", "twö", "--json", "--logprobs", "1")
    first, second = [json.loads(line) for line in said.out.splitlines()]
    assert (first["prompt"], first["text"], second["text"]) == ("one", "one!", "twö!")
    assert first["finish_reason"] == "stop" and first["token_ids"] == [1, 2]
    assert first["usage"] == {"prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 3}
    assert first["logprobs"] == [{"token_id": 7, "logprob": -0.5, "top": [[7, -0.5]]}]


@pytest.mark.parametrize("arguments", [["-p", "-"], []])
def test_standard_input(
    arguments: list[str], fake: Opened, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stdin(monkeypatch, "zwei\nZeilen ü\n".encode())
    assert run("generate", *arguments).out == "zwei\nZeilen ü!\n"


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (b"\xff\xfe", ["-p", "-"], "not UTF-8"),
        (b"", ["-p", "-", "-p", "-"], "stands there twice"),
    ],
)
def test_bad_standard_input(
    content: bytes, arguments: list[str], words: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stdin(monkeypatch, content)
    said = run("generate", *arguments)
    assert said.code == 2 and words in said.err


def test_no_prompt_at_a_terminal(fake: Opened, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _stdin(monkeypatch, b"", terminal=True)
    said = run("generate")
    assert said.code == 2 and "There is no prompt" in said.err


def test_settings_arrive(fake: Opened, run: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    run(
        *("generate", "-p", "x", "--max-tokens", "9", "--temperature", "0.5", "--top-p", "0.9"),
        *("--top-k", "3", "--min-p", "0.1", "--repetition-penalty", "1.1", "--presence-penalty", "0.2"),
        *("--frequency-penalty", "0.3", "--seed", "7", "--stop", "a", "--stop", "b", "--schema", str(schema)),
        *("--model", "m", "--quantize", "4", "--context", "99", "--dtype", "float16", "--kv-bits", "8"),
        *("--rope-theta", "5e5", "--rope-scaling", '{"type": "linear", "factor": 2}'),
    )
    [params] = fake.llm.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 3)
    assert (params.min_p, params.repetition_penalty, params.presence_penalty) == (0.1, 1.1, 0.2)
    assert (params.frequency_penalty, params.seed, params.stop) == (0.3, 7, ("a", "b"))
    assert params.schema == {"type": "object"}
    rope = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    assert fake.load == LoadConfig(dtype="float16", quantize_bits=4, context=99, rope=rope)
    assert fake.model == "m" and fake.engine == EngineConfig(kv_bits=8)


def test_what_is_not_said_is_left_to_the_model(fake: Opened, run: Run) -> None:
    run("generate", "-p", "x")
    [params] = fake.llm.params
    assert params.temperature is None and params.max_tokens is None and params.seed is None
    assert fake.load == LoadConfig() and fake.engine == EngineConfig()


def test_choices_and_regex(fake: Opened, run: Run) -> None:
    run("generate", "-p", "x", "--choice", "yes", "--choice", "no")
    run("generate", "-p", "x", "--regex", "[0-9]+")
    assert fake.llm.params[0].choices == ("yes", "no") and fake.llm.params[1].regex == "[0-9]+"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "9"], "temperature must be at least 0.0 and at most 5.0, not 9.0."),
        (["--seed", "-1"], "seed must be at least 0"),
        (["--temperature", "hot"], "'hot' is not a valid float"),
        (["--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--top-p", "nan"], "top_p must be"),
        (["--context", "0"], "--context must be at least 1"),
        (["--quantize", "7"], "--quantize"),
        (["--rope-scaling", "{"], "--rope-scaling is not valid JSON"),
        (["--rope-scaling", "3"], "--rope-scaling must be a JSON object"),
        (["--schema", "absent.json"], "absent.json cannot be read: No such file"),
        (["--regex", "a", "--choice", "b"], "Only one of schema, regex, choices"),
        (["--logprobs", "2"], "--logprobs needs --json"),
        (["--logprobs", "99", "--json"], "logprobs must be"),
        (["--output", "x.jsonl"], "--input and --output go together"),
        (["--input", "x.jsonl"], "--input and --output go together"),
        (["--input", "x.jsonl", "--output", "y.jsonl"], "either --prompt or --input"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], words: str, fake: Opened, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = run("generate", "-p", "x", *arguments)
    assert said.code == 2 and said.out == "" and words in said.err and said.err.count("\n") == 1
    assert fake.llm.asked == []


@pytest.mark.parametrize("content", ["{", "[1]", '"text"'])
def test_a_file_that_is_no_schema_is_named(content: str, fake: Opened, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(content)
    said = run("generate", "-p", "x", "--schema", str(path))
    assert said.code == 2 and str(path) in said.err


def test_a_model_without_chat_template_names_raw(fake: Opened, run: Run) -> None:
    fake.llm.tokenizer.chat_template = None
    said = run("generate", "-p", "x")
    assert said.code == 2 and "no chat template; use --raw" in said.err
    assert run("generate", "-p", "x", "--raw").out == "x!\n"


def test_an_error_in_the_stream_is_one_sentence(fake: Opened, run: Run) -> None:
    said = run("generate", "-p", "long")
    assert (said.code, said.out) == (2, "") and said.err == (
        "mlxserve: The prompt has 9 tokens, and the context 8.\n"
    )


# -- the real engine ------------------------------------------------------------------------------------------


def _answers(run: Run, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    said = run("generate", "-m", str(folder), "--json", "--temperature", "0", "--max-tokens", "6", *arguments)
    assert said.code == 0, said.err
    return [json.loads(line) for line in said.out.splitlines()]


def test_a_tiny_model_answers_alike_alone_and_together(tiny_llama: Path, run: Run) -> None:
    alone = [_answers(run, tiny_llama, "-p", text)[0] for text in ("one", "three words here")]
    together = _answers(run, tiny_llama, "-p", "one", "-p", "three words here")
    assert [row["token_ids"] for row in alone] == [row["token_ids"] for row in together]
    assert all(len(row["token_ids"]) == 6 for row in together)
    streamed = run("generate", "-m", str(tiny_llama), "-p", "one", "--temperature", "0", "--max-tokens", "6")
    assert streamed.out.rstrip("\n") == alone[0]["text"].rstrip("\n") and "tokens/s" in streamed.err


def test_bad_models_are_one_sentence(run: Run, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 40)
    for name, code, words in (
        (str(folder), 3, "model.safetensors is cut short"),
        (str(tmp_path / "empty"), 3, "holds no model"),
        (str(tmp_path / "bad.gguf"), 3, "bad.gguf"),
        (str(tmp_path / "absent.gguf"), 3, "no file or folder"),
        ("smolm2", 3, "did you mean smollm2"),
    ):
        said = run("generate", "-m", name, "-p", "x")
        assert said.code == code and words in said.err and said.err.count("\n") == 1, said.err
        assert said.out == ""


def test_a_prompt_longer_than_the_context(tiny_llama: Path, run: Run) -> None:
    said = run("generate", "-m", str(tiny_llama), "--context", "40", "-p", "x" * 100)
    assert said.code == 2 and said.out == "" and "40" in said.err and said.err.count("\n") == 1
