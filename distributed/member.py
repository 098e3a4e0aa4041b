"""One rank's process when a model is served: it loads its part, joins the others and carries out steps.

Run by the agent as `python -m mlxserve.distributed.member`. Knows: the order of a rank's life, and what it
tells the supervisor. Does not know who asks (calls.py brings requests to rank 0) or what happens after its
end.

    supervisor → rank     job → … → join → … → stop                  lines on standard input
    rank → supervisor     identity → up (rank 0: with facts) → …     lines on a pipe of its own
                          beat, several times a second
                          diverged (a weight has changed), refused (an error that a restart will not mend),
                          failed (any other, in words)

It ends when told to, when its standard input ends (its agent is gone), or with an exit code of faults.py.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from mlxserve.distributed.agent import CONTROL_FD
from mlxserve.distributed.faults import EXIT_DIVERGED, EXIT_LOST_PEER, EXIT_REFUSED, encode_error
from mlxserve.distributed.heartbeat import SERVING, Beat, Pulse
from mlxserve.distributed.wire import decode, encode
from mlxserve.errors import EngineStopped, MlxServeError

if TYPE_CHECKING:
    from mlxserve.distributed.load import ShardLoaded
    from mlxserve.distributed.rank import RankContext
    from mlxserve.distributed.split import Split
    from mlxserve.engine.engine import Engine
    from mlxserve.models.resolve import ModelFiles

TOKEN = "MLXSERVE_TOKEN"
JOIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank is told first. addresses: where each rank listens for others; requests: where rank 0
    listens for the front. model: its path, name and origin as the front found it; folder: where models lie
    on this host, '' for the same place. sharing: ranks on this host."""

    rank: int
    split: str
    backend: str
    model: dict[str, str]
    folder: str
    load: dict[str, Any]
    engine: dict[str, Any]
    addresses: list[list[Any]]
    requests: list[Any]
    sharing: int
    deadline_s: float
    sweep_s: float


class Control:
    """Lines from and to the supervisor, by way of the agent. The end of its lines ends this process."""

    def __init__(self) -> None:
        self._out = os.fdopen(int(os.environ.pop(CONTROL_FD)), "wb", buffering=0)
        self._lock = threading.Lock()
        self._heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="mlxserve-control", daemon=True).start()

    def say(self, **message: Any) -> None:
        """Tell the supervisor. One that is gone is no error: standard input ends with it."""
        try:
            with self._lock:
                self._out.write(encode(message))
        except OSError:
            os._exit(EXIT_LOST_PEER)

    def wait(self, do: str) -> dict[str, Any]:
        """The next message, which must be `do`; `stop` ends the process instead."""
        message = self._heard.get()
        if message.get("do") == "stop":
            os._exit(0)
        assert message.get("do") == do, f"{message} instead of {do}"
        return message

    def _listen(self) -> None:
        for line in sys.stdin.buffer:
            message = decode(line)
            if message is not None:
                self._heard.put(message)
        os._exit(EXIT_LOST_PEER)


class Rank:
    """This process: its job, its progress, its way to end."""

    def __init__(self, control: Control, job: Job) -> None:
        self.control, self.job = control, job
        self.phase = "starting"
        self.step = -1
        self._adapting = False
        self.engine: Engine | None = None
        self.split: Split | None = None
        self.files: ModelFiles | None = None
        self._pulse = Pulse(self.beat, self._say_beat, job.deadline_s)

    def beat(self) -> Beat:
        if self.engine is None:
            return Beat(self.phase, self.step, self.step)
        begun = self.engine.scheduler.steps_begun - 1
        return Beat(self.phase, self.step, begun, self.engine.has_work, self._adapting)

    @contextmanager
    def adapting(self) -> Iterator[None]:
        """Inside, no step is completed although nothing is wrong: an adapter is put on."""
        self._adapting = True
        self._say_beat(self.beat())
        try:
            yield
        finally:
            self._adapting = False

    def enter(self, phase: str) -> None:
        """A new phase of this rank's life, told at once."""
        self.phase = phase
        self._say_beat(self.beat())

    def _say_beat(self, beat: Beat) -> None:
        self.control.say(beat=beat.plain())

    def completed(self, step: int) -> None:
        self.step = max(self.step, step)

    # -- coming up -----------------------------------------------------------------------------------------

    def load(self) -> ShardLoaded:
        """Read this rank's part and say what it is; returns once all ranks are found to be the same."""
        from mlxserve.distributed.calls import load_settings
        from mlxserve.distributed.digest import config_digest, reference_digests, tokenizer_digest
        from mlxserve.distributed.handshake import Identity
        from mlxserve.distributed.load import load_shard
        from mlxserve.distributed.locate import layers_of, locate
        from mlxserve.distributed.split import Split
        from mlxserve.models.files import read_config

        self.enter("loading")
        job, settings = self.job, load_settings(self.job.load)
        files = self.files = locate(job.model, job.folder, job.split, job.rank, settings)
        split = self.split = Split.parse(job.split, layers_of(read_config(files.path)))
        shard = load_shard(files, settings, split, job.rank)
        tensors = dict(shard.digests)
        if job.rank == 0:
            tensors |= reference_digests(files, split, 0, settings)
        identity = Identity(
            split=str(split),
            dtype=str(shard.loaded.dtype),
            config=config_digest(files.path),
            tokenizer=tokenizer_digest(files.path),
            tensors=tensors,
        )
        self.control.say(identity=identity.plain())
        self.control.wait("join")
        return shard

    def join(self, shard: ShardLoaded) -> RankContext:
        """Connect with the other ranks, first by MLX where tensors are divided, then by our channels."""
        import mlx.core as mx

        from mlxserve.distributed.rank import join
        from mlxserve.distributed.sharding import attach_group

        self.enter("joining")
        job, split = self.job, self.split
        assert split is not None
        group = None
        if split.mode == "tensor":
            backend = job.backend.partition("-")[0] if split.size > 1 else "any"
            group = mx.distributed.init(strict=split.size > 1, backend=backend)
            attach_group(shard.loaded.model, group)
        addresses = [(str(host), int(port)) for host, port in job.addresses]
        token = os.environ[TOKEN].encode()
        context = join(job.rank, split, addresses, token, timeout_s=JOIN_S, group=group)
        context.sharing = job.sharing
        context.on_step = self.completed
        return context

    def serve(self, shard: ShardLoaded) -> None:
        """From here on silence is a fault, and the weights are looked after."""
        from mlxserve.distributed.integrity import IntegrityWatch

        self.enter(SERVING)
        owned = shard.loaded.owned
        IntegrityWatch(shard.loaded.model, self.diverged, sweep_s=self.job.sweep_s, only=owned)

    # -- ends ----------------------------------------------------------------------------------------------

    def diverged(self, name: str) -> NoReturn:
        self.control.say(diverged=name, step=self.step)
        os._exit(EXIT_DIVERGED)

    def end(self, error: BaseException) -> NoReturn:
        """Say what happened and leave at once: other threads may wait for ranks that are gone."""
        from mlxserve.distributed.frames import Diverged

        if isinstance(error, Diverged):
            self.control.say(failed=str(error), of=error.rank)
            os._exit(EXIT_DIVERGED)
        if isinstance(error, EngineStopped) and error.__cause__ is None:  # another rank's fault, passed on
            self.control.say(lost=True, reason=str(error))
            os._exit(EXIT_LOST_PEER)
        if isinstance(error, MlxServeError) and self.phase != SERVING:
            self.control.say(refused=encode_error(error))
            os._exit(EXIT_REFUSED)
        traceback.print_exception(error)
        self.control.say(failed=f"{type(error).__name__}: {error}")
        sys.stderr.flush()
        os._exit(1)


def main() -> None:
    control = Control()
    job = Job(**control.wait("job")["job"])
    rank = Rank(control, job)
    try:
        if job.rank == 0:
            from mlxserve.distributed.lead import lead

            lead(rank)
        else:
            follow(rank)
    except BaseException as error:
        rank.end(error)
    os._exit(0)  # a thread still waits for lines


def follow(rank: Rank) -> None:
    """A rank other than 0, on this thread, until rank 0 says stop."""
    from mlxserve.distributed.follower import serve_rank

    shard = rank.load()
    context = rank.join(shard)
    rank.control.say(up=True)
    rank.serve(shard)
    serve_rank(context, shard.loaded, shard.stage)
    context.close()


if __name__ == "__main__":
    main()
