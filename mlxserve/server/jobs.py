"""Fine-tuning jobs: one at a time, beside live traffic, and their adapters served when they end.

Knows: jobs' lives, files, the registry, a Trainer that was handed in. Does not know HTTP or how training works.

    data_dir/jobs/<id>/job.json      the job as it was last told of
                       events.jsonl  everything that happened, a line each
                       run/final/    the adapter, in mlx-lm's format

    validating_files ──▶ queued ──▶ running ──▶ succeeded | failed | cancelled
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from mlxserve.engine.beside import Beside, TrainingBase
from mlxserve.errors import Busy, Cancelled, MlxServeError, Unsupported, UsageError
from mlxserve.server.book import KnownAdapter
from mlxserve.server.faults import NotFound
from mlxserve.server.files import FileStore
from mlxserve.server.models import Loaded, ModelRegistry
from mlxserve.server.ports import PreparedTraining, Trainer, TrainingOrder

log = logging.getLogger("mlxserve.server")
ENDED = ("succeeded", "failed", "cancelled")
MOST_WAITING = 64


class Checkpoint(msgspec.Struct):
    """One that the trainer has kept; `adapter` is its name on the base."""

    id: str
    created: int
    step: int
    adapter: str
    metrics: dict[str, float]


class Event(msgspec.Struct):
    id: str
    created: int
    message: str
    level: str = "info"
    data: dict[str, Any] | None = None


class Job(msgspec.Struct):
    """One job's facts. epochs, rows_per_step and rate_factor: None until the trainer has chosen."""

    id: str
    base: str
    training_file: str
    validation_file: str | None
    suffix: str | None
    seed: int
    created: int
    epochs: int | None = None
    rows_per_step: int | None = None
    rate_factor: float | None = None
    lora: dict[str, Any] = {}
    metadata: dict[str, str] | None = None
    status: str = "validating_files"
    finished: int | None = None
    estimated_finish: int | None = None
    trained_tokens: int | None = None
    adapter: str | None = None
    error: dict[str, str | None] | None = None
    result_files: list[str] = []
    checkpoints: list[Checkpoint] = []

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def short(self) -> str:
        return self.id.rpartition("-")[2][:8]

    @property
    def adapter_name(self) -> str:
        return f"ft-{self.suffix}-{self.short}" if self.suffix else f"ft-{self.short}"


class Jobs:
    """All jobs of a server; its methods run on the loop. trainer None: jobs are refused."""

    def __init__(
        self, folder: Path, files: FileStore, models: ModelRegistry, trainer: Trainer | None
    ) -> None:
        self.folder, self.files, self.models, self._trainer = folder, files, models, trainer
        self._jobs: dict[str, Job] = {}
        self._events: dict[str, list[Event]] = {}
        self._waiting: asyncio.Queue[str] = asyncio.Queue()
        self._runner: asyncio.Task[None] | None = None
        self._current: tuple[Job, Beside[Path] | None] | None = None
        self._closing = False

    # -- looking ---------------------------------------------------------------------------------

    def get(self, job_id: str) -> Job:
        """Raises NotFound."""
        job = self._jobs.get(job_id)
        if job is None:
            raise NotFound(f"There is no fine-tuning job '{job_id}'.", param="fine_tuning_job_id")
        return job

    def listed(self) -> list[Job]:
        """The newest first."""
        return list(reversed(self._jobs.values()))

    def events(self, job_id: str) -> list[Event]:
        """The newest first. Raises NotFound."""
        return list(reversed(self._events[self.get(job_id).id]))

    # -- from a caller's wish to its end -----------------------------------------------------------

    async def create(self, job: Job) -> Job:
        """Take a job in. Raises NotFound for its files, what its base's name raises, Busy, Unsupported."""
        if self._trainer is None:
            raise Unsupported("This server was started without a trainer.")
        for file_id in filter(None, (job.training_file, job.validation_file)):
            self.files.get(file_id)
        if sum(not other.ended for other in self._jobs.values()) >= MOST_WAITING:
            raise Busy(f"{MOST_WAITING} fine-tuning jobs are waiting already.", retry_after_s=60.0)
        card = await self.models.card(job.base)
        if card.parent:
            raise Unsupported(f"{card.name} is an adapter; name its base, {card.parent}.", param="model")
        job.base = card.name
        job.status = "validating_files" if self._current is None else "queued"
        self._jobs[job.id], self._events[job.id] = job, []
        await self._tell(job, "Created; its files are being checked.")
        self._waiting.put_nowait(job.id)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run_all())
        return job

    async def cancel(self, job_id: str) -> Job:
        """Raises NotFound, and UsageError for a job that has ended."""
        job = self.get(job_id)
        if job.ended:
            raise UsageError(f"The job has {job.status} already.", param="fine_tuning_job_id")
        if self._current is not None and self._current[0] is job and self._current[1] is not None:
            self._current[1].stop()
        await self._end(job, "cancelled", "Cancelled.")
        return job

    async def close(self) -> None:
        """Stop what runs; unfinished jobs fail, saying why."""
        self._closing = True
        if self._current is not None and self._current[1] is not None:
            self._current[1].stop()
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        for job in self._jobs.values():
            if not job.ended:
                await self._fail(job, _stopped())

    async def _run_all(self) -> None:
        while True:
            job = self._jobs[await self._waiting.get()]
            self._current = (job, None)
            try:
                if not job.ended:
                    await self._run(job)
            except Cancelled as error:
                if not job.ended:  # otherwise `cancel` has said so already
                    await self._fail(job, error)
            except MlxServeError as error:
                await self._fail(job, error)
            except Exception as error:
                log.exception("fine-tuning job %s", job.id)
                await self._fail(
                    job, MlxServeError(f"The training failed ({type(error).__name__}: {error}).")
                )
            finally:
                self._current = None

    async def _run(self, job: Job) -> None:
        """The base stays loaded while its job runs."""
        async with self.models.use(job.base) as entry:
            job.status = "validating_files"
            base = await entry.engine.shared_copy()
            prepared = await self._prepare(job, entry, base)
            if job.ended:
                return
            job.status = "queued"
            await self._tell(job, _summary(prepared))
            folder = await self._train(job, entry, base, prepared)
        if not job.ended:
            await self._serve(job, folder)

    async def _prepare(self, job: Job, entry: Loaded, base: TrainingBase) -> PreparedTraining:
        assert self._trainer is not None
        order = TrainingOrder(
            base=job.base,
            train=self.files.path(job.training_file),
            valid=self.files.path(job.validation_file) if job.validation_file else None,
            folder=self.folder / job.id / "run",
            context=entry.engine.context,
            seed=job.seed,
            epochs=job.epochs,
            rows_per_step=job.rows_per_step,
            rate_factor=job.rate_factor,
            lora=job.lora,
        )
        prepared = await asyncio.to_thread(self._trainer.prepare, order, base)
        job.epochs, job.rows_per_step = prepared.epochs, prepared.rows_per_step
        job.rate_factor = prepared.rate_factor
        return prepared

    async def _train(self, job: Job, entry: Loaded, base: TrainingBase, prepared: PreparedTraining) -> Path:
        trainer, loop = self._trainer, asyncio.get_running_loop()
        assert trainer is not None
        news: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()

        def tell(event: Mapping[str, Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has gone: nobody listens any more
                loop.call_soon_threadsafe(news.put_nowait, dict(event))

        seat = entry.engine.beside(lambda seat: trainer.run(prepared, base, seat, tell))
        self._current = (job, seat)
        job.status = "running"
        await self._tell(job, "The training has begun.")
        reader = asyncio.create_task(self._listen(job, news))
        try:
            return await asyncio.wrap_future(seat.future)
        finally:
            seat.stop()
            news.put_nowait({"kind": "end"})
            await reader

    async def _serve(self, job: Job, folder: Path) -> None:
        """The trained adapter answers from now on, and after the next start."""
        known = await self.models.load_adapter(job.base, job.adapter_name, folder)
        job.adapter = job.adapter_name
        job.result_files = [await self._keep_metrics(job)]
        await self._end(job, "succeeded", f"The training has ended; {known.id} is served.")

    async def _keep_metrics(self, job: Job) -> str:
        """A file with each step's figures, as OpenAI's jobs leave one."""
        lines = ["step,train_loss,valid_loss"]
        for event in self._events[job.id]:
            data = event.data or {}
            if "step" in data:
                lines.append(f"{data['step']},{data.get('train_loss', '')},{data.get('valid_loss', '')}")
        text = ("\n".join(lines) + "\n").encode()
        name = f"{job.id}-metrics.csv"
        file = await asyncio.to_thread(self.files.add, name, "fine-tune-results", io.BytesIO(text), len(text))
        return file.id

    # -- what a trainer tells ------------------------------------------------------------------------

    async def _listen(self, job: Job, news: asyncio.Queue[Mapping[str, Any]]) -> None:
        began: tuple[float, int] | None = None
        tokens = 0
        while (event := await news.get())["kind"] != "end":
            step = event.get("step", 0)
            if job.ended:
                continue
            if event["kind"] == "step":
                began = began or (time.time(), step)
                tokens += event["tokens"]
                job.trained_tokens = tokens
                job.estimated_finish = _estimate(began, step, event["steps"])
                data = {"step": step, "total_steps": event["steps"], "train_loss": event["loss"]}
                await self._tell(job, f"Step {step}/{event['steps']}: loss {event['loss']:.4f}.", data)
            elif event["kind"] == "eval":
                data = {"step": step, "valid_loss": event["loss"]}
                await self._tell(job, f"Step {step}: validation loss {event['loss']:.4f}.", data)
            elif event["kind"] == "save":
                self._note_checkpoint(job, step, Path(event["path"]))
            elif event["kind"] == "note":
                await self._tell(job, event["message"], level=event.get("level", "info"))

    def _note_checkpoint(self, job: Job, step: int, path: Path) -> None:
        if path.parent.name != "checkpoints":
            return
        name = f"{job.adapter_name}-step-{step}"
        losses = [e.data for e in self._events[job.id] if e.data and e.data.get("step") == step]
        metrics = {"step": float(step)} | {
            key: value for data in losses for key, value in data.items() if key.endswith("_loss")
        }
        made = Checkpoint(f"ftckpt-{secrets.token_hex(12)}", int(time.time()), step, name, metrics)
        job.checkpoints.append(made)
        self.models.adapters.add(KnownAdapter(job.base, name, path, shown=False))
        kept = path.parent  # the trainer lets old ones go
        job.checkpoints = [c for c in job.checkpoints if (kept / str(c.step)).is_dir()]

    async def _fail(self, job: Job, error: MlxServeError) -> None:
        if job.ended:
            return
        job.error = {"code": error.code, "message": str(error), "param": error.param}
        await self._end(job, "failed", str(error), level="error")

    async def _end(self, job: Job, status: str, message: str, *, level: str = "info") -> None:
        job.status, job.finished, job.estimated_finish = status, int(time.time()), None
        await self._tell(job, message, level=level)

    async def _tell(
        self, job: Job, message: str, data: dict[str, Any] | None = None, *, level: str = "info"
    ) -> None:
        event = Event(f"ftevent-{secrets.token_hex(12)}", int(time.time()), message, level, data)
        self._events[job.id].append(event)
        await asyncio.to_thread(_write, self.folder / job.id, msgspec.json.encode(job), event)

    # -- from one start to the next -------------------------------------------------------------------

    def restore(self) -> None:
        """Read the jobs of earlier starts: their adapters are served again, what did not end has failed."""
        found = [_read(place) for place in (self.folder.iterdir() if self.folder.is_dir() else ())]
        whole = [entry for entry in found if entry is not None]
        for job, events in sorted(whole, key=lambda entry: (entry[0].created, entry[0].id)):
            self._jobs[job.id], self._events[job.id] = job, events
            run = self.folder / job.id / "run"
            if not job.ended:
                job.status, job.finished, job.estimated_finish = "failed", int(time.time()), None
                job.error = {"code": _stopped().code, "message": str(_stopped()), "param": None}
            if job.adapter is not None and (run / "final").is_dir():
                known = KnownAdapter(
                    job.base, job.adapter, run / "final", created=job.finished or job.created
                )
                self.models.adapters.add(known)
            for checkpoint in job.checkpoints:
                path = run / "checkpoints" / str(checkpoint.step)
                if path.is_dir():
                    self.models.adapters.add(KnownAdapter(job.base, checkpoint.adapter, path, shown=False))

    async def forget_trained(self, known: KnownAdapter) -> bool:
        """Delete the files of an adapter that a job has trained; False if no job has."""
        for job in self._jobs.values():
            if job.adapter == known.name and job.base == known.base:
                await asyncio.to_thread(shutil.rmtree, self.folder / job.id / "run", ignore_errors=True)
                job.checkpoints = []
                await self._tell(job, f"{known.id} was deleted.")
                return True
        return False


def _stopped() -> MlxServeError:
    return MlxServeError(
        "The server stopped before the job had ended; create it again.", code="server_stopped"
    )


def _summary(prepared: PreparedTraining) -> str:
    dropped = ", ".join(f"{count} {why}" for why, count in prepared.dropped.items())
    text = f"{prepared.rows} rows with {prepared.tokens} tokens are good"
    return f"{text}; left out: {dropped}." if dropped else f"{text}."


def _estimate(began: tuple[float, int], step: int, steps: int) -> int | None:
    when, first = began
    if step <= first:
        return None
    return int(time.time() + (time.time() - when) / (step - first) * (steps - step))


def _write(place: Path, job: bytes, event: Event) -> None:
    """The job's facts, whole or not at all, and one more line of its events."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = place / "job.json.part"
    part.write_bytes(job)
    part.replace(place / "job.json")
    with (place / "events.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(event) + b"\n")


def _read(place: Path) -> tuple[Job, list[Event]] | None:
    try:
        job = msgspec.json.decode((place / "job.json").read_bytes(), type=Job)
        lines = (place / "events.jsonl").read_bytes().splitlines()
        return job, [msgspec.json.decode(line, type=Event) for line in lines]
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("the fine-tuning job in %s cannot be read: %s", place, error)
        return None
