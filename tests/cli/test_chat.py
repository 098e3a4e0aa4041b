"""`mlxserve chat` at a pseudo-terminal: turns, commands, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import json
import os
import pty
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxserve.cli import common
from mlxserve.cli.chat import Conversation, data_folder, talk
from mlxserve.errors import UsageError
from mlxserve.request import SamplingParams
from tests.cli.conftest import Opened, Run
from tests.cli.fake_llm import FakeLLM
from tests.conftest import ROOT

DEADLINE_S = 60


class Terminal:
    """A child process at a terminal of its own, and what it has written so far."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.seen = ""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(home), "TERM": "dumb"}
            command = [sys.executable, "-m", "tests.cli.fake_llm", "chat", "-m", "fake", *arguments]
            os.chdir(home)
            os.execve(sys.executable, command, environment)

    def expect(self, text: str, *, press: str = "") -> str:
        """Wait until `text` has been written; what stood before it, and forget both.

        press: a key, pressed every few seconds till then: readline misses a Ctrl-C that comes in the moment
        between the prompt and its wait for input.
        """
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"never saw {text!r} in {self.seen!r}"
            if press:
                self.send(press)
            if select.select([self.fd], [], [], min(left, 3.0) if press else left)[0]:
                self.seen += self._read()
        before, _, self.seen = self.seen.partition(text)
        return before

    def _read(self) -> str:
        try:
            data = os.read(self.fd, 4096)
        except OSError as error:  # the child has gone
            raise AssertionError(f"the program left after {self.seen!r}") from error
        return data.decode("utf-8", "replace").replace("\r\n", "\n")

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait(self) -> int:
        """Read to the end; the exit code."""
        while True:
            try:
                data = os.read(self.fd, 4096)
            except OSError:
                break
            if not data:
                break
            self.seen += data.decode("utf-8", "replace").replace("\r\n", "\n")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    running = Terminal(tmp_path)
    running.expect(">>> ")
    yield running
    os.close(running.fd)


def test_a_conversation_and_ctrl_d(terminal: Terminal) -> None:
    terminal.send("Hello\n")
    assert "Hello!" in terminal.expect(">>> ")
    terminal.send("\x04")
    assert terminal.wait() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal, tmp_path: Path) -> None:
    terminal.send("slow\n")
    terminal.expect("tick tick ")
    terminal.send("\x03")
    terminal.expect(">>> ")
    terminal.send("again\n")
    assert "again!" in terminal.expect(">>> ")
    terminal.send("/save talk.json\n")
    terminal.expect("4 messages are in talk.json")
    terminal.expect(">>> ")
    terminal.send("/exit\n")
    assert terminal.wait() == 0
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    assert messages[1]["content"].startswith("tick tick")


def test_ctrl_c_at_the_prompt_clears_the_line(terminal: Terminal) -> None:
    terminal.send("half a lin")
    terminal.expect("half a lin")
    terminal.expect("(Ctrl-D or /exit leaves)", press="\x03")
    terminal.expect(">>> ")
    terminal.send("new\n")
    assert "lin" not in terminal.expect("new!")
    terminal.expect(">>> ")
    terminal.send("\x04")
    assert terminal.wait() == 0


def test_several_lines(terminal: Terminal) -> None:
    terminal.send("one\\\n")
    terminal.expect("... ")
    terminal.send("two\n")
    assert "one\ntwo!" in terminal.expect(">>> ")
    terminal.send('"""first\n')
    terminal.expect("... ")
    terminal.send('/not a command\nlast"""\n')
    assert "first\n/not a command\nlast!" in terminal.expect(">>> ")
    terminal.send("\x04")
    assert terminal.wait() == 0


def test_lines_are_remembered_by_the_next_conversation(terminal: Terminal, tmp_path: Path) -> None:
    terminal.send("remember me\n")
    terminal.expect("remember me!")
    terminal.expect(">>> ")
    terminal.send("/exit\n")
    assert terminal.wait() == 0
    assert "remember me" in (tmp_path / "mlxserve" / "chat-history").read_text()
    second = Terminal(tmp_path)
    second.expect(">>> ")
    second.send("\x1b[A\x1b[A\n")  # up, up: the line before /exit
    assert "remember me!" in second.expect(">>> ")
    second.send("\x04")
    assert second.wait() == 0
    os.close(second.fd)


def _say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    given = iter(lines)

    def answer(prompt: str) -> str:
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)


def _talk(llm: FakeLLM, conversation: Conversation) -> None:
    talk(llm, conversation, SamplingParams())  # type: ignore[arg-type]


def test_turns_build_up_and_reset_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM()
    _say(monkeypatch, "a", "", "b", "/reset", "c", "/exit", "never")
    _talk(llm, Conversation("Be brief."))
    system = {"role": "system", "content": "Be brief."}
    user = [{"role": "user", "content": text} for text in "abc"]
    answer = {"role": "assistant", "content": "a!"}
    assert llm.asked == [[system, user[0]], [system, user[0], answer, user[1]], [system, user[2]]]


def test_the_system_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm, conversation = FakeLLM(), Conversation()
    _say(monkeypatch, "/system", "a", "/system Speak in rhyme.", "/system", "b")
    _talk(llm, conversation)
    assert llm.asked[1] == [
        {"role": "system", "content": "Speak in rhyme."},
        {"role": "user", "content": "b"},
    ]
    said = capsys.readouterr().err
    assert "There is no system message." in said and "\nSpeak in rhyme.\n" in said


def test_save_and_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    _say(monkeypatch, "ä", f"/save {path}")
    first = Conversation("S")
    _talk(FakeLLM(), first)
    _say(monkeypatch, f"/load {path}", "b")
    llm, second = FakeLLM(), Conversation()
    _talk(llm, second)
    assert second.system == "S" and llm.asked == [[*first.messages, {"role": "user", "content": "b"}]]
    path.write_text(json.dumps(first.messages))  # a bare list of messages, as the API takes it
    third = Conversation()
    third.load(path)
    assert third.messages == first.messages


@pytest.mark.parametrize("content", ["{", "3", "[3]", '{"a": 1}', '[{"role": "user"}]', '[{"content": "x"}]'])
def test_a_file_that_is_no_conversation_changes_nothing(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    conversation = Conversation("S", [{"role": "user", "content": "a"}])
    with pytest.raises(UsageError, match="x.json"):
        conversation.load(path)
    assert conversation == Conversation("S", [{"role": "user", "content": "a"}])


def test_mistakes_are_said_and_the_conversation_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM()
    _say(
        monkeypatch, "/nothing", "/save", "/save no/folder/x", "/load absent", "//slash", "/help", "long", "x"
    )
    _talk(llm, Conversation())
    said = capsys.readouterr()
    for words in (
        "There is no command /nothing",
        "/save needs a file",
        "no/folder/x cannot be written",
        "absent cannot be read",
        "/system TEXT",
        "The prompt has 9 tokens",
    ):
        assert words in said.err
    assert said.out == "/slash!\nx!\n"
    assert {"role": "user", "content": "long"} not in llm.asked[-1]  # what was refused is not in the way


def test_without_a_terminal_lines_are_turns(fake: Opened, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    said = run("chat", "--system", "S")
    assert (said.code, said.out, said.err) == (0, "a!\nb!\n", "")
    assert [len(messages) for messages in fake.llm.asked] == [2, 4]


def test_chat_needs_a_template(fake: Opened, run: Run) -> None:
    fake.llm.tokenizer.chat_template = None
    said = run("chat")
    assert said.code == 2 and "no chat template" in said.err


def test_where_the_history_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert data_folder() == Path("/data/mlxserve")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "platform", "linux")
    assert data_folder() == Path("/home/me/.local/share/mlxserve")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert data_folder() == Path("/home/me/Library/Application Support/mlxserve")


def test_open_llm_is_what_the_fake_replaces() -> None:
    assert common.open_llm.__module__ == "mlxserve.cli.common"
