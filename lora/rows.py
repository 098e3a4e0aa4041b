"""Rows of training data as files hold them: which format they have, made into one plain form.

Knows: jsonl, json, csv and parquet; chat messages, prompt and completion, text, alpaca, sharegpt and
preference pairs. Knows nothing of tokens. A bad row's error names its file and line.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.errors import DependencyMissing, UsageError
from mlxserve.lora.config import DataConfig

Message = dict[str, Any]
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
ENCODING = "utf-8-sig"  # UTF-8, with or without the mark that Excel puts before it


@dataclass(frozen=True, slots=True)
class Row:
    """One row: a chat (`messages`), a raw `text`, or a pair of chats of which the first is preferred.

    raw: completion rows also keep prompt and completion, for models without a chat template.
    where: file and line.
    """

    where: str
    format: str
    messages: list[Message] | None = None
    text: str | None = None
    rejected: list[Message] | None = None
    raw: tuple[str, str] | None = None
    raw_rejected: tuple[str, str] | None = None
    tools: list[dict[str, Any]] | None = None


def read_rows(path: Path, config: DataConfig) -> list[Row]:
    """All rows of one file. Raises UsageError naming file and line for the first bad one."""
    rows: list[Row] = []
    for where, values in _records(path):
        if config.limit is not None and len(rows) >= config.limit:
            break
        rows.append(parse_row(values, where, config))
    if not rows:
        raise UsageError(f"{path} holds no rows.", param="data")
    return rows


def find_split(config: DataConfig, split: str) -> Path | None:
    """The file of a split: as named, or `<split>.jsonl` (…) in the folder that data.train names."""
    named = config.train if split == "train" else getattr(config, split)
    if isinstance(named, str) and named:
        path = Path(named).expanduser()
        if path.is_dir():
            found = _in_folder(path, split)
            if found is None:
                raise UsageError(
                    f"{path} holds no {split}.jsonl (json, csv, parquet).", param=f"data.{split}"
                )
            return found
        if not path.is_file():
            raise UsageError(f"There is no file {path} for data.{split}.", param=f"data.{split}")
        return path
    if split == "train":
        raise UsageError("data.train names no file; set it in the YAML or with --set data.train=FILE.")
    folder = Path(config.train).expanduser()
    return _in_folder(folder, split) if named is None and config.train and folder.is_dir() else None


def _in_folder(folder: Path, split: str) -> Path | None:
    names = [f"{split}.{suffix}" for suffix in ("jsonl", "json", "csv", "parquet")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"{path} is none of {', '.join(readers)}.", param="data")
    try:
        for number, values in reader(path):
            where = f"{path.name}:{number}"
            if not isinstance(values, Mapping):
                raise UsageError(f"{where} is no object but a {type(values).__name__}.", param="data")
            yield where, values
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 at byte {error.start}.", param="data") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", param="data") from error


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding=ENCODING) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise UsageError(f"{path.name}:{number} is not valid JSON: {error}.", param="data") from error


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        values = json.loads(path.read_text(encoding=ENCODING))
    except ValueError as error:
        raise UsageError(f"{path.name} is not valid JSON: {error}.", param="data") from error
    if not isinstance(values, list):
        raise UsageError(f"{path.name} must hold a list of rows.", param="data")
    yield from enumerate(values, 1)


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding=ENCODING, newline="") as file:
        reader = csv.DictReader(file)
        for values in reader:
            if None in values or None in values.values():
                raise UsageError(
                    f"{path.name}:{reader.line_num} has another number of fields than its header."
                )
            yield reader.line_num, values


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DependencyMissing(f"{path.name} needs the package pyarrow: pip install pyarrow.") from error
    yield from enumerate(parquet.read_table(path).to_pylist(), 1)


def parse_row(values: Mapping[str, Any], where: str, config: DataConfig) -> Row:
    """One row in plain form. Raises UsageError naming `where` and the field at fault."""
    named = dict(values)
    for wanted, present in config.columns.items():
        if present not in named:
            raise UsageError(f"{where} lacks the field {present!r} that data.columns names.", param="data")
        named[wanted] = named.pop(present)
    kind = config.format if config.format != "auto" else detect(named, where)
    return _PARSERS[kind](named, where)


def detect(values: Mapping[str, Any], where: str) -> str:
    """The format of a row, by its fields."""
    marks = {
        "messages": ("messages",),
        "sharegpt": ("conversations",),
        "preference": ("chosen", "rejected"),
        "completion": ("prompt", "completion"),
        "alpaca": ("instruction", "output"),
        "text": ("text",),
    }
    for name, fields in marks.items():
        if all(field in values for field in fields):
            return name
    raise UsageError(
        f"{where} has the fields {', '.join(map(str, values)) or 'none'}, which are no known format "
        "(messages, prompt and completion, text, instruction and output, conversations, chosen and "
        "rejected); data.columns renames fields.",
        param="data",
    )


def _text_of(values: Mapping[str, Any], field: str, where: str) -> str:
    value = values.get(field)
    if not isinstance(value, str):
        raise UsageError(f"{where}: {field} must be text, not {value!r:.60}.", param=field)
    return value


def _messages_of(value: Any, where: str, field: str = "messages") -> list[Message]:
    good = isinstance(value, list) and value and all(isinstance(m, Mapping) and "role" in m for m in value)
    if not good:
        raise UsageError(f"{where}: {field} must be a list of messages with roles.", param=field)
    return [dict(message) for message in value]


def _chat(values: Mapping[str, Any], where: str) -> Row:
    return Row(where, "messages", _messages_of(values.get("messages"), where), tools=_tools(values, where))


def _tools(values: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
    tools = values.get("tools")
    if isinstance(tools, str):  # some sets keep them as JSON in a string
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise UsageError(f"{where}: tools is not valid JSON.", param="tools") from error
    if tools is not None and not isinstance(tools, list):
        raise UsageError(f"{where}: tools must be a list.", param="tools")
    return tools


def _completion(values: Mapping[str, Any], where: str) -> Row:
    if isinstance(values.get("prompt"), list):
        chat = _messages_of(values["prompt"], where, "prompt")
        answer = values.get("completion")
        return Row(where, "completion", [*chat, *_answer(answer, where, "completion")])
    prompt, completion = (_text_of(values, field, where) for field in ("prompt", "completion"))
    return Row(where, "completion", _turn(prompt, completion), raw=(prompt, completion))


def _answer(value: Any, where: str, field: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return _messages_of(value, where, field)


def _turn(prompt: str, completion: str) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def _plain_text(values: Mapping[str, Any], where: str) -> Row:
    return Row(where, "text", text=_text_of(values, "text", where))


def _alpaca(values: Mapping[str, Any], where: str) -> Row:
    task, answer = (_text_of(values, field, where) for field in ("instruction", "output"))
    extra = values.get("input") or ""
    prompt = f"{task}\n\n{extra}" if extra else task
    return Row(where, "alpaca", _turn(prompt, answer), raw=(prompt, answer))


def _sharegpt(values: Mapping[str, Any], where: str) -> Row:
    turns = values.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise UsageError(f"{where}: conversations must be a list of turns.", param="conversations")
    messages = []
    for turn in turns:
        speaker = turn.get("from") if isinstance(turn, Mapping) else None
        if speaker not in SHAREGPT_ROLES:
            raise UsageError(f"{where}: a turn is from {speaker!r}, which is no known role.", param="from")
        messages.append({"role": SHAREGPT_ROLES[speaker], "content": _text_of(turn, "value", where)})
    if isinstance(values.get("system"), str) and values["system"]:
        messages.insert(0, {"role": "system", "content": values["system"]})
    return Row(where, "sharegpt", messages, tools=_tools(values, where))


def _preference(values: Mapping[str, Any], where: str) -> Row:
    prompt, chosen, rejected = (values.get(field) for field in ("prompt", "chosen", "rejected"))
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        return Row(
            where,
            "preference",
            _turn(prompt, chosen),
            rejected=_turn(prompt, rejected),
            raw=(prompt, chosen),
            raw_rejected=(prompt, rejected),
        )
    before: list[Message] = []
    if isinstance(prompt, list):
        before = _messages_of(prompt, where, "prompt")
    elif isinstance(prompt, str) and isinstance(chosen, list) and len(chosen) == 1:
        before = [{"role": "user", "content": prompt}]
    if not before and not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise UsageError(f"{where}: chosen and rejected need a prompt or whole chats.", param="prompt")
    good = [*before, *_answer(chosen, where, "chosen")]
    bad = [*before, *_answer(rejected, where, "rejected")]
    return Row(where, "preference", good, rejected=bad, tools=_tools(values, where))


_PARSERS = {
    "messages": _chat,
    "completion": _completion,
    "text": _plain_text,
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "preference": _preference,
}
