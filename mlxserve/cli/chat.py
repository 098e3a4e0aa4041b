"""`mlxserve chat`: a conversation in the terminal.

Knows: turns, commands that start with a slash, and the keys: Ctrl-C stops the answer, Ctrl-D leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxserve.cli import common
from mlxserve.cli.options import adapter_option, load_options, model_option, sampling_options
from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.errors import MlxServeError, UsageError
from mlxserve.request import SamplingParams

if TYPE_CHECKING:
    from mlxserve.engine.llm import LLM

PROMPT, MORE = ">>> ", "... "
BLOCK = '"""'
HISTORY_LINES = 1000
HELP = f"""\
/system TEXT   set the system message and begin anew; without TEXT, show it
/reset         forget the conversation
/save FILE     write the conversation to a file
/load FILE     go on with a conversation from a file
/help          this text
/exit          leave, as Ctrl-D does
A line that ends in \\ goes on in the next; {BLOCK} begins and ends a text of several lines.
Ctrl-C stops an answer."""


@dataclass
class Conversation:
    """The turns so far, without the system message, which is kept apart."""

    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, Any]]:
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return opening + self.turns

    def save(self, path: Path) -> None:
        """Write the messages as JSON. Raises UsageError where the file cannot be written."""
        try:
            path.write_text(json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1), "utf-8")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from error

    def load(self, path: Path) -> None:
        """Take over the messages of a file. Raises UsageError, naming it, if it holds none."""
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise UsageError(f"{path} is not valid JSON: {error}.") from error
        messages = stored.get("messages") if isinstance(stored, dict) else stored
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise UsageError(f"{path} holds no conversation (a list of messages with role and content).")
        opened = bool(messages) and messages[0]["role"] == "system"
        self.system = messages[0]["content"] if opened else None
        self.turns = messages[1:] if opened else messages


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


@click.command()
@model_option
@adapter_option
@click.option("--system", metavar="TEXT", help="The system message.")
@sampling_options
@load_options
def chat(
    model: str,
    adapter: Path | None,
    system: str | None,
    params: SamplingParams,
    load: LoadConfig,
    engine: EngineConfig,
) -> None:
    """Hold a conversation in the terminal."""
    with common.open_llm(model, load, engine, adapter) as llm, _line_history():
        common.require_template(llm, raw=False)
        if sys.stdin.isatty():
            common.say(f"{llm.name}, {llm.context:,} tokens of context. /help for help, Ctrl-D to leave.")
        talk(llm, Conversation(system), params)


def talk(llm: LLM, conversation: Conversation, params: SamplingParams) -> None:
    """Read turns and answer them until the person leaves."""
    for text in _turns():
        if not _is_command(text):
            _answer(llm, conversation, text[1:] if text.startswith("//") else text, params)
        elif _command(conversation, text):
            return


def _is_command(text: str) -> bool:
    return text.startswith("/") and not text.startswith("//") and "\n" not in text


def _answer(llm: LLM, conversation: Conversation, text: str, params: SamplingParams) -> None:
    """One turn and its answer, streamed; Ctrl-C keeps what has been said, an error forgets the turn."""
    conversation.turns.append({"role": "user", "content": text})
    pieces: list[str] = []
    try:
        deltas = llm.stream_chat(conversation.messages, params)
        with contextlib.closing(deltas):  # type: ignore[type-var]
            for delta in deltas:
                pieces.append(delta.text)
                common.write(delta.text)
    except KeyboardInterrupt:
        common.write(" …")
    except MlxServeError as error:
        conversation.turns.pop()
        common.say(error.message)
        return
    common.write("\n")
    if any(pieces):
        conversation.turns.append({"role": "assistant", "content": "".join(pieces)})
    else:
        conversation.turns.pop()


def _turns() -> Iterator[str]:
    """What the person says, turn by turn, without empty ones, until Ctrl-D."""
    while True:
        try:
            text = _read_turn()
        except KeyboardInterrupt:
            common.say("\n(Ctrl-D or /exit leaves)")
            continue
        except EOFError:
            if sys.stdin.isatty():
                common.say("")
            return
        if text.strip():
            yield text


def _read_turn() -> str:
    """One turn: a line, lines that end in a backslash, or a block between triple quotes."""
    prompts = (PROMPT, MORE) if sys.stdin.isatty() else ("", "")
    line = input(prompts[0])
    if line.lstrip().startswith(BLOCK):
        return _read_block(line.lstrip().removeprefix(BLOCK), prompts[1])
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input(prompts[1])
    return line


def _read_block(line: str, prompt: str) -> str:
    lines = [line]
    while not lines[-1].rstrip().endswith(BLOCK):
        lines.append(input(prompt))
    return "\n".join(lines).rstrip().removesuffix(BLOCK).strip("\n")


def _command(conversation: Conversation, text: str) -> bool:
    """Do what a line with a slash says; True if it is to leave."""
    word, _, rest = text.strip().partition(" ")
    if word in ("/exit", "/quit", "/bye"):
        return True
    command = COMMANDS.get(word)
    if command is None:
        common.say(f"There is no command {word}; /help shows what there is. // begins a text with a slash.")
        return False
    try:
        common.say(command(conversation, rest.strip()))
    except UsageError as error:
        common.say(error.message)
    return False


def _reset(conversation: Conversation, _: str) -> str:
    conversation.turns.clear()
    return "The conversation is forgotten."


def _system(conversation: Conversation, text: str) -> str:
    if not text:
        return conversation.system or "There is no system message."
    conversation.system = text
    conversation.turns.clear()
    return "The system message is set, and the conversation begins anew."


def _save(conversation: Conversation, name: str) -> str:
    path = _file("/save", name)
    conversation.save(path)
    return f"{len(conversation.messages)} messages are in {path}."


def _load(conversation: Conversation, name: str) -> str:
    path = _file("/load", name)
    conversation.load(path)
    return f"{len(conversation.messages)} messages from {path}."


def _file(command: str, name: str) -> Path:
    if not name:
        raise UsageError(f"{command} needs a file: {command} FILE.")
    return Path(name).expanduser()


COMMANDS: dict[str, Callable[[Conversation, str], str]] = {
    "/help": lambda conversation, text: HELP,
    "/reset": _reset,
    "/system": _system,
    "/save": _save,
    "/load": _load,
}


@contextlib.contextmanager
def _line_history() -> Iterator[None]:
    """Line editing with the lines of earlier conversations, where readline and a terminal are there."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:
        yield
        return
    path = data_folder() / "chat-history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)


def data_folder() -> Path:
    """Where a person's own files of this program lie: XDG's data folder, or a Mac's Application Support."""
    if sys.platform == "darwin" and not os.environ.get("XDG_DATA_HOME"):
        return Path.home() / "Library" / "Application Support" / "mlxserve"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "mlxserve"
