"""`mlxserve launch` and `doctor --hosts` with real processes, ssh being a stand-in on this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxserve.cli.main import main
from mlxserve.distributed.faults import EXIT_LOST_PEER, Fault
from mlxserve.distributed.fleet import Fleet, choose_backend
from mlxserve.distributed.hosts import Host, Hostfile
from mlxserve.distributed.look import parse_devices, rdma_hint
from mlxserve.distributed.outcome import Failure, at_fault, ending
from mlxserve.errors import MlxServeError, UsageError
from tests.distributed.processes import WAIT_S, Marked, until

PYTHON = sys.executable


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[Marked]:
    made = Marked(tmp_path)
    yield made
    made.clean()


def python(code: str) -> list[str]:
    return ["--", PYTHON, "-c", "import os, sys, time; rank = int(os.environ['MLX_RANK'])\n" + code]


# -- what is started, and what is shown ------------------------------------------------------------------------


def test_ranks_meet_by_mlx_and_only_rank_0_prints(marked: Marked) -> None:
    code = """
import mlxserve, mlx.core as mx
group = mx.distributed.init(strict=True, backend="ring")
total = mx.distributed.all_sum(mx.array([group.rank() + 1]))
print("total", total.item(), "of", group.size())
"""
    done = marked.run("launch", "-n", "3", "--", PYTHON, "-c", code)
    assert (done.stdout, done.returncode) == ("total 6 of 3\n", 0), done.stderr
    marked.nobody_is_left()


def test_ssh_hosts_run_the_command_after_their_greeting(marked: Marked) -> None:
    hosts = marked.hostfile("mac1", "mac2")
    done = marked.run("launch", "--hosts", hosts, *python("print(rank, os.environ['MLX_HOSTFILE'] > '')"))
    assert (done.stdout, done.returncode) == ("0 True\n", 0), done.stderr
    marked.nobody_is_left()


def test_verbose_shows_every_rank(marked: Marked) -> None:
    done = marked.run("launch", "-n", "2", "--verbose", *python("print('from', rank)"))
    assert done.stdout == "from 0\n"
    assert "[rank 1 (local1)] from 1" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--split", "tensor:2", "--", "lora", "train"],
            "--split is for serve, generate and chat; lora runs on every",
        ),
        (
            ["--restarts", "1", "--", "true"],
            "--restarts is for serve, generate and chat; true runs on every rank",
        ),
        (
            ["--", "serv", "--model", "x"],
            "serv is no command of mlxserve and no program here; did you mean serve?",
        ),
    ],
)
def test_what_would_not_be_heeded_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "-n", "2", *arguments]) == 2
    assert words in capsys.readouterr().err


# -- what goes wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        (
            "os.kill(os.getpid(), 9) if rank else time.sleep(600)",
            137,
            "Rank 1 (local1) was killed by SIGKILL.",
        ),
        ("sys.exit('no disk' if rank else 0)", 1, "ended with exit code 1. It wrote last: no disk"),
    ],
)
def test_a_failed_rank_ends_all_and_is_named(marked: Marked, code: str, exit_code: int, words: str) -> None:
    done = marked.run("launch", "-n", "2", *python(code))
    assert words in done.stderr and done.returncode == exit_code
    assert "Traceback" not in done.stderr
    marked.nobody_is_left()


def test_children_of_a_rank_are_reaped_too(marked: Marked) -> None:
    code = """
import subprocess
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
sys.exit(rank)
"""
    assert marked.run("launch", "-n", "2", *python(code)).returncode == 1
    marked.nobody_is_left()


@pytest.mark.parametrize(("victim", "hosts"), [("launcher", ("mac1", "mac2")), ("agent", ("-n", "2"))])
def test_no_orphan_is_left_whatever_dies(marked: Marked, hosts: tuple[str, ...], victim: str) -> None:
    args = hosts if hosts[0] == "-n" else ("--hosts", marked.hostfile(*hosts))
    launcher = marked.start("launch", *args, *python("open(f'up{rank}', 'w').close(); time.sleep(600)"))
    until(lambda: (marked.folder / "up0").exists() and (marked.folder / "up1").exists())
    if victim == "launcher":
        launcher.kill()
    else:
        agents = [pid for pid in marked.alive() if b"distributed.agent" in command_line(pid)]
        assert agents
        for pid in agents:
            os.kill(pid, signal.SIGKILL)
    _, errors = launcher.communicate(timeout=WAIT_S)
    if victim == "agent":
        assert launcher.returncode == 70 and "was lost: The connection to" in errors
    marked.nobody_is_left()


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_stop_signal_ends_ranks_in_their_own_time(marked: Marked) -> None:
    code = """
import signal
signal.signal(signal.SIGTERM, lambda *_: (open(f'bye{rank}', 'w').close(), sys.exit(0)))
open(f'up{rank}', 'w').close()
time.sleep(600)
"""
    launcher = marked.start("launch", "-n", "2", *python(code))
    until(lambda: (marked.folder / "up0").exists() and (marked.folder / "up1").exists())
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=WAIT_S)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert (marked.folder / "bye0").exists() and (marked.folder / "bye1").exists()
    marked.nobody_is_left()


@pytest.mark.parametrize(
    ("other", "exit_code", "words"),
    [
        (
            "gone",
            68,
            "gone cannot be reached by 'ssh gone': ssh: connect to host gone port 22: No route to host.",
        ),
        ("old1", 76, "rank 1 (old1) has mlxserve 0.0.1, and rank 0 (mac1) has mlxserve "),
        ("bare1", 68, "mlxserve is not installed for"),
    ],
)
def test_a_host_that_cannot_take_part_is_refused(
    marked: Marked, other: str, exit_code: int, words: str
) -> None:
    done = marked.run("launch", "--hosts", marked.hostfile("mac1", other), *python("open('ran', 'w')"))
    assert words in done.stderr and done.returncode == exit_code, done.stderr
    assert not (marked.folder / "ran").exists()
    marked.nobody_is_left()


def test_an_address_that_is_not_the_hosts_is_found_before_ranks_start(marked: Marked) -> None:
    file = marked.folder / "hosts.json"
    file.write_text(
        json.dumps([{"ssh": "mac1", "ips": ["127.0.0.1"]}, {"ssh": "mac2", "ips": ["127.0.0.1:1"]}])
    )
    done = marked.run("launch", "--hosts", str(file), *python("open('ran', 'w')"))
    assert done.returncode == 68 and not (marked.folder / "ran").exists()
    assert "rank 0 (mac1) cannot reach rank 1 (mac2) at 127.0.0.1:1 port" in done.stderr


def test_a_program_that_is_not_there(marked: Marked) -> None:
    done = marked.run("launch", "-n", "2", "--", "no-such-program")
    assert done.returncode == 69 and "no-such-program: No such file or directory" in done.stderr


@pytest.mark.parametrize("args", [["--", "models"], ["-n", "2", "--hosts", "x", "--", "models"], ["-n", "2"]])
def test_wrong_flags_are_usage_errors(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert main(["launch", *args]) == 2
    assert capsys.readouterr().err.startswith("mlxserve: ")


# -- doctor -----------------------------------------------------------------------------------------------------


def test_doctor_names_what_keeps_hosts_apart(marked: Marked) -> None:
    done = marked.run("doctor", "--json", "--hosts", marked.hostfile("mac1", "old1", "gone"))
    found = json.loads(done.stdout)
    assert done.returncode == 69
    assert [facts["host"] for facts in found["facts"]] == ["mac1", "old1", "gone"]
    assert found["facts"][1]["mlxserve"] == "0.0.1" and "mlxserve" not in found["facts"][2]
    assert any("gone cannot be reached" in text for text in found["problems"])
    assert any("rank 1 (old1) has mlxserve 0.0.1" in text for text in found["problems"])


def test_doctor_is_content_with_equal_hosts(marked: Marked) -> None:
    done = marked.run("doctor", "--hosts", marked.hostfile("mac1", "mac2"))
    assert done.returncode == 0 and "Nothing to improve" in done.stdout, done.stdout
    assert "mac2" in done.stdout.splitlines()[0]


def test_rdma_is_read_and_advised() -> None:
    listing = "    device          \t   node GUID\n    ------          \t----------------\n    rdma_en2        \t0001\n"
    assert parse_devices(listing) == ["rdma_en2"]
    assert parse_devices("") == []
    assert "26.2 or later" in rdma_hint("darwin", "15.6", [])
    assert "rdma_ctl enable" in rdma_hint("darwin", "26.3", [])
    assert rdma_hint("darwin", "26.3", ["rdma_en2"]) == rdma_hint("linux", "", []) == ""


# -- plain parts ------------------------------------------------------------------------------------------------


def test_the_cause_comes_before_its_consequences() -> None:
    lost = Failure(Fault(0, "rank 0", ending(EXIT_LOST_PEER)), EXIT_LOST_PEER)
    killed = Failure(Fault(1, "rank 1", ending(-9)), -9)
    failed = Failure(Fault(2, "rank 2", ending(1)), 1)
    assert at_fault([lost, failed, killed]) is killed
    assert at_fault([lost, failed]) is failed
    assert killed.fault.sentence == "Rank 1 was killed by SIGKILL."


def test_the_backend_is_the_askers_then_the_files_then_the_wires() -> None:
    fast = tuple(Host(f"m{r}", ("10.0.0.1",), rdma=("en2", "en2")) for r in range(2))
    assert choose_backend(Hostfile(fast), None) == "jaccl"
    assert choose_backend(Hostfile(fast), "ring") == "ring"
    assert choose_backend(Hostfile(fast[:1]), None) == "ring"
    assert choose_backend(Hostfile(fast, backend="jaccl-ring"), None) == "jaccl-ring"
    with pytest.raises(UsageError, match="not mpi"):
        choose_backend(Hostfile(fast, backend="mpi"), None)


def test_jaccl_gets_its_devices_and_coordinator() -> None:
    hosts = tuple(
        Host(
            f"m{r}", (f"10.0.0.{r}",), ssh=f"m{r}", rdma=tuple(None if r == o else f"en{o}" for o in range(2))
        )
        for r in range(2)
    )
    env, files = Fleet(Hostfile(hosts)).meeting(1, [[7000], [7001]], "jaccl")
    assert env == {"MLX_RANK": "1", "MLX_JACCL_COORDINATOR": "10.0.0.0:7000"}
    assert json.loads(files["MLX_IBV_DEVICES"]) == [[None, "en1"], ["en0", None]]
    with pytest.raises(MlxServeError, match="rdma"):
        Fleet(Hostfile(tuple(Host(f"m{r}", (f"10.0.0.{r}",)) for r in range(2)))).meeting(
            1, [[1], [2]], "jaccl"
        )


# -- training ---------------------------------------------------------------------------------------------------


def test_lora_trains_on_every_ranks_share_of_the_data(marked: Marked, tiny_llama: Path) -> None:
    rows = marked.folder / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{i}+1?", "completion": f"#### {i}"}) + "\n" for i in range(12))
    )
    values = [f"model={tiny_llama}", f"data.train={rows}", "save.dir=run", "train.steps=2", "log.every=1"]
    values += ["data.valid=0.2", "train.tokens_per_batch=64", "train.max_seq=128"]
    settings = [part for value in values for part in ("--set", value)]
    done = marked.run("launch", "-n", "2", "--", "lora", "train", *settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "run/final\n" and done.stderr.count("step 2/2: loss") == 1
    steps = [json.loads(line) for line in (marked.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in steps if event["kind"] == "step"] == [1, 2]
    assert (marked.folder / "run" / "final" / "adapters.safetensors").is_file()
