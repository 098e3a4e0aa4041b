"""`mlxserve generate --input --output`: every row answered once, whatever happens in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxserve.cli import batch, common
from mlxserve.errors import EngineStopped
from tests.cli.conftest import Opened, Run, Said
from tests.cli.fake_llm import FakeLLM


class Files:
    def __init__(self, folder: Path, run: Run) -> None:
        self.input, self.output, self._run = folder / "in.jsonl", folder / "out.jsonl", run

    def ask(self, rows: list[Any], *arguments: str) -> Said:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        self.input.write_text("\n".join(lines))
        return self._run("generate", "--input", str(self.input), "--output", str(self.output), *arguments)

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]


@pytest.fixture
def files(tmp_path: Path, run: Run) -> Files:
    return Files(tmp_path, run)


def test_rows_are_answered_in_order_and_keep_their_fields(fake: Opened, files: Files) -> None:
    rows = [
        {"prompt": "one", "id": "a", "gold": [1, 2], "temperature": 0},
        "",
        {"messages": [{"role": "user", "content": "twö"}], "max_tokens": 3},
    ]
    said = files.ask(rows, "--system", "Be brief.", "--seed", "5")
    assert (said.code, said.out) == (0, "") and "2 rows in" in said.err
    first, second = files.answers()
    assert (first["id"], first["gold"], first["text"], first["prompt"]) == ("a", [1, 2], "one!", "one")
    assert (second["index"], second["text"], second["finish_reason"]) == (1, "twö!", "stop")
    assert second["usage"]["completion_tokens"] == 3 and second["messages"] == rows[2]["messages"]  # type: ignore[index]
    asked = {json.dumps(messages) for messages in fake.llm.asked}
    assert all('"Be brief."' in messages for messages in asked)
    settings = {(params.temperature, params.max_tokens, params.seed) for params in fake.llm.params}
    assert settings == {(0, None, 5), (None, 3, 5)}


def test_a_run_goes_on_where_it_was_killed(fake: Opened, files: Files) -> None:
    rows = [{"prompt": f"p{n}"} for n in range(6)]
    files.ask(rows)
    whole = files.output.read_text()
    lines = whole.splitlines(keepends=True)
    files.output.write_text(lines[3] + lines[0] + lines[1][: len(lines[1]) // 2])
    fake.llm.asked.clear()
    assert files.ask(rows).code == 0
    assert sorted(messages[0]["content"] for messages in fake.llm.asked) == ["p1", "p2", "p4", "p5"]
    assert files.output.read_text() == whole
    fake.llm.asked.clear()
    assert files.ask(rows).code == 0 and fake.llm.asked == []


def test_a_row_that_fails_is_written_down_and_tried_again(fake: Opened, files: Files) -> None:
    rows = [{"prompt": "long", "id": 1}, {"prompt": "x", "id": 2}]
    said = files.ask(rows)
    assert said.code == 1 and '1 of 2 rows failed; "error" says why' in said.err
    first, second = files.answers()
    assert first["error"] == {
        "message": "The prompt has 9 tokens, and the context 8.",
        "code": "context_length_exceeded",
    }
    assert second["text"] == "x!" and "error" not in second
    fake.llm.asked.clear()
    assert files.ask(rows).code == 1
    assert len(fake.llm.asked) == 1 and len(files.answers()) == 2


def test_an_engine_that_stops_ends_the_run_and_keeps_what_is_done(
    fake: Opened,
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(llm: FakeLLM, row: batch.Row) -> Any:
        if row.index == 1:
            raise EngineStopped("The engine cannot go on.")
        return llm.stream(row.fields["prompt"], row.params)

    monkeypatch.setattr(batch, "_start", start)
    said = files.ask([{"prompt": "a"}, {"prompt": "b"}])
    assert said.code == 70 and "cannot go on" in said.err
    assert all("error" not in row for row in files.answers())
    monkeypatch.undo()
    monkeypatch.setattr(common, "open_llm", fake)
    assert files.ask([{"prompt": "a"}, {"prompt": "b"}]).code == 0
    assert [row["text"] for row in files.answers()] == ["a!", "b!"]


def test_raw_rows(fake: Opened, files: Files) -> None:
    files.ask([{"prompt": "x"}], "--raw")
    assert fake.llm.asked == ["x"]


def test_a_system_message_of_its_own_stays(fake: Opened, files: Files) -> None:
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "x"}]
    files.ask([{"messages": own}], "--system", "Yours.")
    assert fake.llm.asked == [own]


@pytest.mark.parametrize(
    ("rows", "arguments", "words"),
    [
        (["{"], (), "line 1 is not valid JSON"),
        (["[1]"], (), "line 1 is not a JSON object"),
        ([{"prompt": "x"}, {"gold": 1}], (), "line 2 needs one of prompt and messages"),
        ([{"prompt": "x", "messages": []}], (), "line 1 needs one of prompt and messages"),
        ([{"prompt": 3}], (), "line 1: prompt must be a text"),
        ([{"messages": "x"}], (), "line 1: messages must be a list"),
        ([{"prompt": "x", "temperature": 9}], (), "line 1: temperature must be at least 0.0"),
        ([{"prompt": "x", "temperature": "hot"}], (), "line 1: temperature must be a number"),
        ([{"prompt": "x", "stop": 3}], (), "line 1 has a setting of a wrong type"),
        ([{"prompt": "x", "logit_bias": {"a": 1}}], (), "line 1: logit_bias must be a whole number"),
        ([{"prompt": "x", "id": 1}, "", {"prompt": "y", "id": 1}], (), "line 3: the id 1 stands in line 1"),
        ([{"prompt": "x", "id": [1]}], (), "line 1: id must be"),
        ([{"prompt": "x", "text": "y"}], (), "line 1: the answer is written to 'text'"),
        ([{"messages": [{"role": "user", "content": "x"}]}], ("--raw",), "line 1 has messages"),
        ([""], (), "has no rows"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    rows: list[Any],
    arguments: tuple[str, ...],
    words: str,
    fake: Opened,
    files: Files,
) -> None:
    said = files.ask(rows, *arguments)
    assert said.code == 2 and words in said.err and said.err.count("\n") == 1
    assert fake.llm.asked == [] and not files.output.exists()


def test_files_that_are_not_there_or_not_text(fake: Opened, run: Run, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "in").write_text('{"prompt": "x"}')
    for source, target, words in (
        ("absent", "out", "absent cannot be read"),
        ("binary", "out", "binary is not UTF-8 text"),
        ("in", "no/folder/out", "no/folder/out cannot be written"),
    ):
        said = run("generate", "--input", str(tmp_path / source), "--output", str(tmp_path / target))
        assert said.code == 2 and words in said.err


@pytest.mark.parametrize(
    "content",
    ['{"index": 0, "prompt": "other", "text": ""}\n', '{"id": "z"}\n', "notes\n", "[1]\n", '{"a": 1}\n'],
)
def test_an_output_of_something_else_is_not_touched(content: str, fake: Opened, files: Files) -> None:
    files.output.write_text(content)
    said = files.ask([{"prompt": "x"}])
    assert said.code == 2 and "line 1" in said.err and files.output.read_text() == content


def test_a_setting_with_token_ids_for_keys(fake: Opened, files: Files) -> None:
    files.ask([{"prompt": "x", "logit_bias": {"5": -1}, "stop": "z"}])
    [params] = fake.llm.params
    assert params.logit_bias == {5: -1} and params.stop == ("z",)


def test_a_tiny_model_answers_rows_as_it_does_alone(tiny_llama: Path, files: Files, run: Run) -> None:
    settings = ("-m", str(tiny_llama), "--temperature", "0", "--max-tokens", "5", "--context", "64")
    rows = [{"prompt": "one"}, {"prompt": "x" * 90}, {"prompt": "three words here", "max_tokens": 2}]
    said = files.ask(rows, *settings)
    assert said.code == 1
    first, refused, last = files.answers()
    assert refused["error"]["code"] == "context_length_exceeded"
    assert len(first["token_ids"]) == 5 and len(last["token_ids"]) == 2
    alone = run("generate", *settings, "--json", "-p", "one").json()
    assert first["token_ids"] == alone["token_ids"]
