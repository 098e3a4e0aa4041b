"""A server on two ranks, and what happens to it: killed, stopped and corrupted ranks, and files that differ.

What is asserted is the order of events; a fault is noticed within the deadline that the launch was given.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from mlxserve import LLM, SamplingParams
from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.distributed.choose import choose_split
from mlxserve.distributed.hosts import Host, local_hosts
from mlxserve.distributed.split import Split
from mlxserve.errors import DoesNotFit, UsageError
from mlxserve.models.resolve import resolve
from tests import tiny
from tests.distributed.processes import WAIT_S, Marked, until
from tests.distributed.served import CONTEXT, Server, launched, truth

LONG = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("faults") / "llama", "llama", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[LLM]:
    """The same model in this process: what every answer must be."""
    with LLM(str(model)) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    patience = ["--sweep", "0.2", "--restarts", "9"]
    with launched(tmp_path_factory.mktemp("served"), model, *patience) as made:
        yield made


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[Marked]:
    made = Marked(tmp_path)
    yield made
    made.clean()


# -- a whole server -----------------------------------------------------------------------------------------------


def test_two_ranks_answer_as_one_process(server: Server, alone: LLM) -> None:
    whole = server.ask("How are you?")
    assert whole.choices[0].message.content == truth(alone, "How are you?")
    pieces = server.ask("How are you?", stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == truth(alone, "How are you?")
    assert server.health() == (200, {"status": "ok"})


def test_prefixes_are_shared_and_forms_kept(server: Server, alone: LLM) -> None:
    long = "The same beginning of a rather long conversation, "
    server.ask(long + "once.")
    again = server.ask(long + "twice.")
    assert again.usage.prompt_tokens_details.cached_tokens >= 48
    assert again.choices[0].message.content == truth(alone, long + "twice.")
    form = r"([a-f]{4}-){3}"
    answer = server.ask("A code.", tokens=40, extra_body={"structured_outputs": {"regex": form}})
    assert answer.choices[0].message.content == truth(alone, "A code.", 40, regex=form)
    assert re.fullmatch(form, answer.choices[0].message.content)


def test_two_requests_at_once(server: Server, alone: LLM) -> None:
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(server.ask, text, 40) for text in ("One", "Two")]
        found = [each.result().choices[0].message.content for each in asked]
    assert found == [truth(alone, "One", 40), truth(alone, "Two", 40)]


# -- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "rank", "words"),
    [
        (
            signal.SIGKILL,
            1,
            r"Rank 1 \(local1\) was killed by SIGKILL; it had completed (no step|step \d+)\.",
        ),
        (
            signal.SIGKILL,
            0,
            r"Rank 0 \(local0\) was killed by SIGKILL; it had completed (no step|step \d+)\.",
        ),
        (
            signal.SIGSTOP,
            1,
            r"Rank 1 \(local1\) has given no sign of life for 6 s; it had completed (no step|step \d+)\.",
        ),
        (
            signal.SIGUSR1,
            1,
            r"Rank 1 \(local1\) no longer has the weights it loaded: "
            r"model\.layers\.2\.mlp\.down_proj\.weight has changed in its memory; "
            r"it had completed (no step|step \d+)\.",
        ),
    ],
    ids=["killed", "leader-killed", "stopped", "corrupted"],
)
def test_case_65_fault_propagation(
    server: Server, alone: LLM, number: signal.Signals, rank: int, words: str
) -> None:
    """In mid-reply: the stream gets an error, health says why, the whole answer and the next one are right."""
    before = set(server.marked.alive())
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(server.ask, "Tell me all.", LONG)
        stream = iter(server.ask("Count.", CONTEXT - 100, stream=True))
        received = [next(stream) for _ in range(3)]
        assert received and not whole.done()
        os.kill(server.rank(rank), number)
        with pytest.raises(openai.APIError) as ended:
            for _ in stream:
                pass
        assert re.search(words, str(ended.value)), str(ended.value)
        status, said = until(lambda: (found := server.health())[0] == 503 and found, "a health of 503")
        assert said["status"] == "recovering" and re.fullmatch(words, said["reason"])
        assert not whole.done()
        held = whole.result(WAIT_S)
    assert server.health() == (200, {"status": "ok"})
    assert held.choices[0].message.content == truth(alone, "Tell me all.", LONG)
    assert held.usage.completion_tokens == LONG
    assert server.ask("And now?").choices[0].message.content == truth(alone, "And now?")
    assert any(re.match(words + " All ranks are started anew", line) for line in server.said)
    replaced = before - set(server.marked.alive())
    assert len(replaced) == 2, "both ranks of the failed epoch are gone, front and agent are the same"


def test_ranks_that_cannot_be_restored_end_the_launch(marked: Marked, model: Path) -> None:
    server = Server(marked, model, "-n", "2", "--deadline", "6", "--restarts", "0")
    os.kill(server.rank(1), signal.SIGKILL)
    assert server.process.wait(WAIT_S) == 70
    assert any("Rank 1 (local1) was killed by SIGKILL" in line for line in server.said)
    marked.nobody_is_left()


@pytest.mark.parametrize("victim", ["launcher", "front"])
def test_nothing_is_left_when_launcher_or_front_die(marked: Marked, model: Path, victim: str) -> None:
    server = Server(marked, model, "-n", "2")
    if victim == "launcher":
        server.process.kill()
    else:
        (front,) = [
            pid
            for pid in marked.alive()
            if (line := Path(f"/proc/{pid}/cmdline").read_bytes())
            and b"\0serve\0" in line
            and b"launch" not in line
        ]
        os.kill(front, signal.SIGKILL)
    assert server.process.wait(WAIT_S) in (-9, 137)
    marked.nobody_is_left()


# -- before anything runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["tensor:2", "pipeline:1,2"])
def test_one_changed_tensor_is_refused_by_name(marked: Marked, model: Path, split: str) -> None:
    import mlx.core as mx

    other = marked.folder / "elsewhere" / "llama"
    tiny.write(other, "llama", max_position_embeddings=CONTEXT)
    weights = dict(mx.load(str(other / "model.safetensors")))
    name = "model.layers.1.self_attn.o_proj.weight"
    rows, columns = weights[name].shape
    last = (
        mx.arange(rows * columns).reshape(rows, columns) == columns - 1
    )  # one number, of rank 1 in any split
    weights[name] = weights[name] + last
    mx.save_safetensors(str(other / "model.safetensors"), weights, {"format": "mlx"})
    hosts = marked.folder / "hosts.json"
    entries = [("mac1", model.parent), ("mac2", other.parent)]
    hosts.write_text(
        json.dumps([{"ssh": host, "ips": ["127.0.0.1"], "folder": str(folder)} for host, folder in entries])
    )
    done = generate(marked, model, "--hosts", str(hosts), "--split", split)
    assert done.returncode == 76 and done.stdout == ""
    assert "rank 1 (mac2) has another tensor model.layers.1.self_attn.o_proj.weight" in done.stderr
    assert "than rank 0 (mac1)" in done.stderr and done.stderr.count("another tensor") == 1
    marked.nobody_is_left()


def test_a_host_without_the_model_is_named(marked: Marked, model: Path) -> None:
    hosts = marked.hostfile("mac1", "mac2", folder=str(marked.folder))
    done = generate(marked, model, "--hosts", hosts)
    assert done.returncode == 3 and f"There is no model at {marked.folder}/llama on this host" in done.stderr
    assert "rank " in done.stderr
    marked.nobody_is_left()


@pytest.mark.parametrize("ranks", [1, 2])
def test_generate_prints_once_and_ends_well(marked: Marked, model: Path, alone: LLM, ranks: int) -> None:
    """Over ssh, and with a single rank; the same text as one process, on rank 0's side alone."""
    options = (
        ["--hosts", marked.hostfile("mac1", "mac2")] if ranks == 2 else ["-n", "1", "--split", "tensor:1"]
    )
    done = generate(marked, model, *options)
    params = SamplingParams(max_tokens=6, temperature=0)
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone.generate("Hello", params)[0].text.rstrip("\n") + "\n"
    marked.nobody_is_left()


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("pipeline:2,2", "divides 4 layers, but the model has 3"),
        ("pipeline:1,1,1", "names 3 ranks, and there are 2"),
        ("tensor:3", "names 3 ranks, and there are 2"),
        ("halves", "'halves' is no split"),
    ],
)
def test_case_64_a_wrong_split_is_refused(model: Path, split: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        split_for(model, 2, split)


def test_case_64_a_split_is_the_one_asked_for_or_the_plans(model: Path) -> None:
    assert str(split_for(model, 2, "pipeline:1,2")) == "pipeline:1,2"
    assert str(split_for(model, 2, "tensor")) == "tensor:2"
    assert str(split_for(model, 3, "pipeline")) == "pipeline:1,1,1"
    planned = split_for(model, 2, None)
    assert planned.size == 2
    with pytest.raises(DoesNotFit, match="tiny0"):
        small = [Host(f"tiny{rank}", memory_bytes=1000) for rank in range(2)]
        choose_split(resolve(str(model)), small, None, LoadConfig(), EngineConfig(), "tcp")


def split_for(model: Path, ranks: int, asked: str | None) -> Split:
    return choose_split(resolve(str(model)), local_hosts(ranks), asked, LoadConfig(), EngineConfig(), "tcp")


def generate(marked: Marked, model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    ask = [
        "generate",
        "--model",
        str(model),
        "--raw",
        "-p",
        "Hello",
        "--max-tokens",
        "6",
        "--temperature",
        "0",
    ]
    return marked.run("launch", *options, "--", *ask)
