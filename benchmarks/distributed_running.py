"""What running on several ranks costs and gains, with processes of this machine on loopback.

    python benchmarks/distributed_running.py [--part channel|pipeline]

channel: microseconds for one step's control traffic: the batch becomes bytes, goes to a rank, is checked and
read there, and the rank's word that the step is done comes back.

pipeline: two stages, four streams, a proxy that delays every byte between the stages by 5 ms. Tokens a
second with two micro-batches in flight (two streams each), against one in flight with all four streams in
it. What is gained depends on what a step's time is spent on: where it grows with the streams in it (here:
long contexts), half a batch is half the work and both stages work at once; where it is the same for one
stream as for four (weights are read, or the network is waited for), one batch of all is as good. Both are
shown.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.delay import DelayProxy
from benchmarks.table import Table  # first: it puts OpenBLAS in before MLX loads
from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.distributed.channel import Channel, Listener, connect, free_ports
from mlxserve.distributed.follower import serve_rank
from mlxserve.distributed.frames import DIGEST_BYTES, Kind, Ledger, decode_batch, encode_batch
from mlxserve.distributed.leader import leader_engine
from mlxserve.distributed.rank import join
from mlxserve.distributed.split import Split
from mlxserve.distributed.stages import make_stage
from mlxserve.engine.batch import Batch, Segment
from mlxserve.engine.engine import Engine
from mlxserve.models.load import load_folder
from mlxserve.request import Request, SamplingParams
from mlxserve.text.tokenizer import load_tokenizer
from tests import tiny

HOST = "127.0.0.1"
TOKEN = b"a secret of this benchmark"
WANTED_US = 200.0
WANTED_RATIO = 1.5
DELAY_S = 0.005
STREAMS = 4
CONTEXTS = (32, 1200, 2400)
RUNS = 3
# A llama whose step takes its time in attention once contexts are long.
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


# -- the control channel -----------------------------------------------------------------------------------


def batch_of(step: int, sequences: int) -> Batch:
    """A decoding step as the scheduler makes it; every sixteenth sequence takes a new page."""
    segments = [Segment(slot, 500 + step, 1, None, True, 40 + step) for slot in range(sequences)]
    pages = [(0, slot, 32, 7 * slot) for slot in range(0, sequences, 16)]
    return Batch(step, pages=pages, segments=segments)


def follow(port: int) -> None:
    """The other end: read, check, answer."""
    channel = connect((HOST, port), TOKEN, rank=1, peer=0, timeout_s=30.0)
    ledger = Ledger()
    while (frame := channel.receive()).kind == Kind.BATCH:
        decode_batch(frame.step, ledger.expect(frame.step, frame.payload, 1))
        channel.send(Kind.DONE, frame.step, bytes(frame.payload[:DIGEST_BYTES]))


def one_step(channel: Channel, ledger: Ledger, batch: Batch) -> None:
    body = encode_batch(batch)
    digest = ledger.enter(batch.step, body)
    channel.send(Kind.BATCH, batch.step, digest, body)
    assert bytes(channel.receive(10.0).payload) == digest


def channel_part(steps: int) -> None:
    table = Table(
        "streams", "bytes a step", "µs a step (median)", "95th percentile", f"wanted ≤ {WANTED_US:.0f}"
    )
    listener = Listener((HOST, 0), TOKEN)
    other = multiprocessing.get_context("spawn").Process(target=follow, args=(listener.port,))
    other.start()
    channel, ledger, step = listener.accept(30.0), Ledger(), 0
    for sequences in (1, 4, 32, 256):
        times = []
        for _ in range(steps):
            batch = batch_of(step, sequences)
            began = time.perf_counter()
            one_step(channel, ledger, batch)
            times.append((time.perf_counter() - began) * 1e6)
            step += 1
        median, late = statistics.median(times), sorted(times)[int(0.95 * len(times))]
        size = len(encode_batch(batch)) + DIGEST_BYTES + 13
        table.add(sequences, size, f"{median:.0f}", f"{late:.0f}", "yes" if median <= WANTED_US else "**no**")
    channel.send(Kind.STOP, 0)
    other.join()
    table.print(f"Control traffic of one step, there and back, over {steps} steps")


# -- the pipeline ------------------------------------------------------------------------------------------


def serve_part(job: dict[str, Any]) -> None:
    """One rank; rank 0 prints tokens a second for each number of micro-batches."""
    folder = Path(job["folder"])
    loaded = load_folder(folder, LoadConfig())
    split = Split.parse("pipeline:2", len(loaded.model.layers))
    addresses = [(HOST, port) for port in job["ports"][job["rank"]]]
    context = join(job["rank"], split, addresses, TOKEN, timeout_s=60.0)
    stage = make_stage(loaded.model, split.layers_of(job["rank"]), len(loaded.model.layers))
    if job["rank"]:
        serve_rank(context, loaded, stage)
        return
    config = EngineConfig(step_tokens=1024)  # prompts are the same each time, and read once
    engine = leader_engine(context, loaded, load_tokenizer(folder), config, stage=stage)
    found = []
    for micro_batches in job["settings"]:
        engine.micro_batches = engine.scheduler.micro_batches = micro_batches
        found.append(tokens_per_s(engine, job["prompt"], job["tokens"]))
    engine.close()
    print(json.dumps(found))


def tokens_per_s(engine: Engine, prompt: int, tokens: int) -> float:
    """Of STREAMS streams, from when all have read their prompts to the end of the first answer."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True).resolved()
    for number in range(STREAMS):
        ids = [(7 * number + 3 * place) % 256 for place in range(prompt)]
        engine.add(Request(f"{time.perf_counter()}-{number}", ids, params), lambda news: None)
    running = engine.scheduler.running
    while len(running) < STREAMS or min(sequence.generated for sequence in running) < 3:
        engine.step()
    before, began = engine.counters.generated_tokens, time.perf_counter()
    while len(running) == STREAMS:
        engine.step()
    rate = (engine.counters.generated_tokens - before) / (time.perf_counter() - began)
    while engine.has_work:
        engine.step()
    return rate


def run_pair(folder: Path, prompt: int, tokens: int, settings: list[int]) -> list[float]:
    """Both ranks with a proxy in front of each, seen by the other."""
    real = free_ports(2)
    proxies = [DelayProxy((HOST, port), DELAY_S) for port in real]
    seen = [[real[0], proxies[1].port], [proxies[0].port, real[1]]]
    job = {"folder": str(folder), "ports": seen, "prompt": prompt, "tokens": tokens, "settings": settings}
    command = [sys.executable, "-m", "benchmarks.distributed_running", "--job"]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, json.dumps({**job, "rank": rank})], stdout=subprocess.PIPE, env=env, text=True
        )
        for rank in (0, 1)
    ]
    try:
        out, _ = ranks[0].communicate(timeout=400)
        return json.loads(out)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for proxy in proxies:
            proxy.close()


def pipeline_part(tokens: int) -> None:
    table = Table("context", "two in flight, tokens/s", "one in flight, tokens/s", "ratio (medians)")
    settings = [2, 1] * RUNS
    with tempfile.TemporaryDirectory() as name:
        folder = tiny.write(Path(name) / "llama", "llama", **MODEL)
        for prompt in CONTEXTS:
            found = run_pair(folder, prompt, tokens, settings)
            two, one = found[0::2], found[1::2]
            ratio = statistics.median(two) / statistics.median(one)
            shown = f"{ratio:.2f}" if ratio >= WANTED_RATIO else f"**{ratio:.2f}**"
            table.add(prompt, _spread(two), _spread(one), shown)
    table.print(f"Two stages, {STREAMS} streams, {DELAY_S * 1e3:.0f} ms each way (wanted ≥ {WANTED_RATIO})")


def _spread(rates: list[float]) -> str:
    return " ".join(f"{rate:.1f}" for rate in rates)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["channel", "pipeline"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        serve_part(args.job)
        return
    if args.part in (None, "channel"):
        channel_part(args.steps)
    if args.part in (None, "pipeline"):
        pipeline_part(args.tokens)


if __name__ == "__main__":
    main()
