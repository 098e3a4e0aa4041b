"""Many prompts from a file into another file: batched, resumable, one bad row does not stop the rest.

Knows: the rows' format, which rows are answered already, and how a row's failure is written down.

Input, one JSON object a line: `prompt` (text) or `messages` (a conversation), optional `id` and sampling
settings named as in SamplingParams; other fields are kept. Output, one line a row: the row's fields and
`text`, `finish_reason`, `usage`, or `error`. A row is known again by its `id`, else by its `index`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxserve.cli import common
from mlxserve.cli.common import record
from mlxserve.errors import EngineStopped, MlxServeError, UsageError
from mlxserve.request import Collected, Delta, SamplingParams

if TYPE_CHECKING:
    from mlxserve.engine.llm import LLM

SETTINGS = {item.name for item in fields(SamplingParams)}
ANSWER_FIELDS = ("text", "finish_reason", "token_ids", "usage", "logprobs", "error")
Key = str | int


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the input: its fields, what to answer (one of prompt and messages), and settings."""

    index: int
    line: int
    fields: dict[str, Any]
    params: SamplingParams
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None

    @property
    def key(self) -> Key:
        return self.fields.get("id", self.index)


def read_rows(path: Path, params: SamplingParams, system: str | None, raw: bool) -> list[Row]:
    """All rows of the input, checked before anything runs.

    `params` hold where a row says nothing. Raises UsageError, naming file and line, for a line that is no
    such object, a setting out of range, or an id that stands there twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", param="input") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}.", param="input") from error
    rows: list[Row] = []
    seen: dict[Key, int] = {}
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        row = _read_row(f"{path}, line {number}", number, len(rows), text, params, system, raw)
        if row.key in seen:
            raise UsageError(f"{path}, line {number}: the id {row.key!r} stands in line {seen[row.key]} too.")
        seen[row.key] = number
        rows.append(row)
    if not rows:
        raise UsageError(f"{path} has no rows.", param="input")
    return rows


def _read_row(
    where: str, line: int, index: int, text: str, params: SamplingParams, system: str | None, raw: bool
) -> Row:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where} is not valid JSON: {error}.", param="input") from error
    if not isinstance(values, dict):
        raise UsageError(f"{where} is not a JSON object.", param="input")
    for name in ANSWER_FIELDS:
        if name in values:
            raise UsageError(f"{where}: the answer is written to {name!r}; give that field another name.")
    if not isinstance(values.get("id", ""), str | int):
        raise UsageError(f"{where}: id must be a text or a whole number.", param="id")
    settings = _settings(where, values, params)
    prompt, messages = values.get("prompt"), values.get("messages")
    if (prompt is None) == (messages is None):
        raise UsageError(f"{where} needs one of prompt and messages.", param="prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise UsageError(f"{where}: prompt must be a text.", param="prompt")
    if messages is not None and not isinstance(messages, list):
        raise UsageError(f"{where}: messages must be a list.", param="messages")
    if raw:
        if messages is not None:
            raise UsageError(f"{where} has messages, which --raw has no template for.", param="messages")
        return Row(index, line, values, settings, prompt=prompt)
    turns = messages if messages is not None else [{"role": "user", "content": prompt}]
    return Row(index, line, values, settings, messages=_with_system(turns, system))


def _settings(where: str, values: dict[str, Any], params: SamplingParams) -> SamplingParams:
    own = {name: values[name] for name in SETTINGS & values.keys()}
    if isinstance(own.get("logit_bias"), dict):  # JSON has no whole numbers for keys
        own["logit_bias"] = {int(k) if k.isdecimal() else k: v for k, v in own["logit_bias"].items()}
    try:
        return replace(params, **own)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", param=error.param) from error
    except (TypeError, AttributeError) as error:
        raise UsageError(f"{where} has a setting of a wrong type: {error}.") from error


def _with_system(turns: list[Any], system: str | None) -> list[Any]:
    """The turns after a system message, unless they have one of their own."""
    opened = bool(turns) and isinstance(turns[0], dict) and turns[0].get("role") in ("system", "developer")
    return turns if system is None or opened else [{"role": "system", "content": system}, *turns]


@dataclass
class Results:
    """The output file of `rows`: what it holds already, and a place for one line after another."""

    path: Path
    rows: list[Row]
    lines: dict[Key, dict[str, Any]] = field(default_factory=dict)

    @property
    def missing(self) -> list[Row]:
        return [row for row in self.rows if row.key not in self.lines]

    def add(self, row: Row, answer: dict[str, Any]) -> None:
        """Write a row's line whole, and out of this process's hands."""
        place = {} if "id" in row.fields else {"index": row.index}
        self.lines[row.key] = {**place, **row.fields, **answer}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_as_line(self.lines[row.key]))

    def put_in_order(self) -> None:
        """Rewrite the file in the order of the rows, in which answers need not arrive."""
        lines = [self.lines[row.key] for row in self.rows if row.key in self.lines]
        _replace(self.path, "".join(_as_line(line) for line in lines))

    def finish(self) -> None:
        """Order the file and say how it went. Raises MlxServeError when rows failed."""
        self.put_in_order()
        common.say(f"{len(self.lines)} rows in {self.path}.")
        failed = sum("error" in line for line in self.lines.values())
        if failed:
            raise MlxServeError(
                f'{failed} of {len(self.lines)} rows failed; "error" says why in {self.path}, and the same '
                "command tries them again."
            )


def open_results(path: Path, rows: list[Row]) -> Results:
    """The output file with what an earlier run left in it.

    A half-written last line is dropped, and so are rows that failed, which are tried again. Raises
    UsageError for a file that holds anything but answers to these rows, or cannot be written.
    """
    results = Results(path, rows)
    wanted = {row.key: row for row in rows}
    for number, line in _whole_lines(path):
        key = line.get("id", line.get("index"))
        row = wanted.get(key) if isinstance(key, str | int) else None
        if row is None or any(line.get(name) != row.fields.get(name) for name in ("prompt", "messages")):
            raise UsageError(
                f"{path}, line {number}, answers no row of the input; give another --output, or remove it.",
                param="output",
            )
        if "error" not in line:
            results.lines[row.key] = line
    results.put_in_order()
    return results


def _as_line(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False) + "\n"


def _whole_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, object) of every line that was written to its end."""
    text = path.read_bytes() if path.exists() else b""
    lines = text.split(b"\n")[:-1]  # what follows the last line break is a line cut short
    for number, content in enumerate(lines, start=1):
        try:
            line = json.loads(content)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise UsageError(f"{path}, line {number}, is no answer; give another --output, or remove it.")
        yield number, line


def _replace(path: Path, text: str) -> None:
    """Replace a file at once, so that a kill leaves the old one or the new one."""
    scratch = path.with_name(path.name + ".new")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.", param="output") from error


def run_rows(llm: LLM, results: Results, at_once: int) -> None:
    """Answer every missing row, `at_once` at a time; the engine batches them.

    A row that fails gets its error written and the others go on. Raises EngineStopped when nothing can.
    """
    stop = threading.Event()
    missing = results.missing
    pool = ThreadPoolExecutor(min(at_once, len(missing)))
    running = {pool.submit(_answer, llm, row, stop): row for row in missing}
    try:
        with _progress(len(results.rows), len(results.rows) - len(missing)) as advance:
            for task in as_completed(running):
                results.add(running[task], task.result())
                advance()
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _answer(llm: LLM, row: Row, stop: threading.Event) -> dict[str, Any]:
    """The fields that answer a row, or its error."""
    try:
        deltas = _start(llm, row)
        return _collect(deltas, stop)
    except EngineStopped:
        raise
    except MlxServeError as error:
        return {"error": {"message": error.message, "code": error.code}}


def _start(llm: LLM, row: Row) -> Iterator[Delta]:
    if row.messages is not None:
        return llm.stream_chat(row.messages, row.params)
    return llm.stream(row.prompt or "", row.params)


def _collect(deltas: Iterator[Delta], stop: threading.Event) -> dict[str, Any]:
    """An answer put together from its pieces; leaving the stream cancels it."""
    collected = Collected()
    for delta in deltas:
        collected.add(delta)
        if stop.is_set():
            break
    return {name: value for name, value in record(collected.output()).items() if name in ANSWER_FIELDS}


@contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[], None]]:
    """A bar of finished rows on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task("rows", total=total, completed=done)
        yield lambda: bars.advance(task)
