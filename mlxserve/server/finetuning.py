"""OpenAI's /v1/fine_tuning/jobs.

Knows: the objects of https://platform.openai.com/docs/api-reference/fine-tuning. Does not know how jobs run.

Beside OpenAI's fields a job takes `lora`, the adapter's own settings (rank, alpha, type, targets, …).
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, Literal

from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlxserve.errors import Unsupported
from mlxserve.server.answer import json_response, read_json, service_of
from mlxserve.server.fields import Body, Name, Part, require
from mlxserve.server.files import page_of
from mlxserve.server.jobs import Checkpoint, Event, Job, Jobs

Epochs = Annotated[int, Meta(ge=1, le=1000)] | Literal["auto"]
Rows = Annotated[int, Meta(ge=1, le=4096)] | Literal["auto"]
Factor = Annotated[float, Meta(gt=0, le=1000)] | Literal["auto"]


class Hyperparameters(Part):
    n_epochs: Epochs = "auto"
    batch_size: Rows = "auto"
    learning_rate_multiplier: Factor = "auto"


class Supervised(Part):
    hyperparameters: Hyperparameters | None = None


class Method(Part):
    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: Supervised | None = None
    dpo: dict[str, Any] | None = None
    reinforcement: dict[str, Any] | None = None


class Lora(Part):
    """The trainer's own settings of an adapter (`lora.*` of its configuration)."""

    type: Literal["lora", "dora"] = "lora"
    rank: Annotated[int, Meta(ge=1, le=512)] = 16
    alpha: Annotated[float, Meta(gt=0)] = 32.0
    rslora: bool = False
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    targets: str | list[str] = "all-linear"
    layers: Annotated[int, Meta(ge=1)] | Literal["all"] = "all"


class JobBody(Body):
    model: Name
    training_file: Name
    validation_file: Name | None = None
    hyperparameters: Hyperparameters | None = None
    method: Method | None = None
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    suffix: Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$")] | None = None
    metadata: dict[str, str] | None = None
    lora: Lora | None = None
    REFUSED = {"integrations": "This server reports to nobody."}
    NEUTRAL = {"integrations": ([],)}


def jobs_of(request: HttpRequest) -> Jobs:
    """Raises Unsupported where the server runs no jobs."""
    jobs: Jobs | None = request.app.state.jobs
    if jobs is None:
        raise Unsupported("This server runs no fine-tuning jobs; start it with --data-dir.")
    return jobs


async def create(request: HttpRequest) -> Response:
    body = await read_json(request, JobBody)
    wanted = _hyperparameters(body)
    job = Job(
        id=f"ftjob-{secrets.token_hex(12)}",
        base=body.model,
        training_file=body.training_file,
        validation_file=body.validation_file,
        suffix=body.suffix,
        seed=secrets.randbelow(2**31) if body.seed is None else body.seed,
        created=int(time.time()),
        epochs=_number(wanted.n_epochs),
        rows_per_step=_number(wanted.batch_size),
        rate_factor=_number(wanted.learning_rate_multiplier),
        lora={} if body.lora is None else {name: getattr(body.lora, name) for name in Lora.__struct_fields__},
        metadata=body.metadata,
    )
    return json_response(job_object(await jobs_of(request).create(job)))


def _hyperparameters(body: JobBody) -> Hyperparameters:
    """From `method`, or from the older field beside it."""
    method = body.method
    if method is not None and method.type != "supervised":
        raise Unsupported(
            f"The method '{method.type}' is not run here; only 'supervised' is.", param="method"
        )
    for name in ("dpo", "reinforcement"):
        if method is not None and getattr(method, name) is not None:
            raise Unsupported(f"method.{name} is not run here; only 'supervised' is.", param=f"method.{name}")
    inner = method.supervised.hyperparameters if method is not None and method.supervised else None
    require(
        inner is None or body.hyperparameters is None,
        "Send hyperparameters in method, or beside it, but not both.",
        "hyperparameters",
    )
    return inner or body.hyperparameters or Hyperparameters()


def _number(value: Any) -> Any:
    return None if value == "auto" else value


async def list_jobs(request: HttpRequest) -> Response:
    items = [job_object(job) for job in jobs_of(request).listed()]
    return json_response(page_of(items, {"limit": "20", **request.query_params}))


async def retrieve(request: HttpRequest) -> Response:
    return json_response(job_object(jobs_of(request).get(request.path_params["id"])))


async def cancel(request: HttpRequest) -> Response:
    return json_response(job_object(await jobs_of(request).cancel(request.path_params["id"])))


async def events(request: HttpRequest) -> Response:
    found = [_event_object(event) for event in jobs_of(request).events(request.path_params["id"])]
    return json_response(page_of(found, {"limit": "20", **request.query_params}))


async def checkpoints(request: HttpRequest) -> Response:
    job = jobs_of(request).get(request.path_params["id"])
    found = [_checkpoint_object(job, checkpoint) for checkpoint in reversed(job.checkpoints)]
    return json_response(page_of(found, {"limit": "10", **request.query_params}))


async def delete_model(request: HttpRequest) -> Response:
    """DELETE /v1/models/{base@adapter}: an adapter, and its files where a job has trained it."""
    name, models = request.path_params["model"], service_of(request).models
    card = await models.card(name)
    known = models.adapters.find(card.parent, card.name.rpartition("@")[2]) if card.parent else None
    if known is None:
        raise Unsupported(f"{card.name} is a model; only adapters are deleted here.", param="model")
    await models.drop_adapter(known)
    if request.app.state.jobs is not None:
        await jobs_of(request).forget_trained(known)
    return json_response({"id": known.id, "object": "model", "deleted": True})


def job_object(job: Job) -> dict[str, Any]:
    chosen = {
        "n_epochs": job.epochs or "auto",
        "batch_size": job.rows_per_step or "auto",
        "learning_rate_multiplier": job.rate_factor or "auto",
    }
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": job.created,
        "error": job.error,
        "estimated_finish": job.estimated_finish,
        "fine_tuned_model": f"{job.base}@{job.adapter}" if job.adapter else None,
        "finished_at": job.finished,
        "hyperparameters": chosen,
        "integrations": [],
        "metadata": job.metadata,
        "method": {"type": "supervised", "supervised": {"hyperparameters": chosen}},
        "model": job.base,
        "organization_id": "local",
        "result_files": job.result_files,
        "seed": job.seed,
        "status": job.status,
        "trained_tokens": job.trained_tokens,
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "lora": job.lora,
    }


def _event_object(event: Event) -> dict[str, Any]:
    return {
        "id": event.id,
        "object": "fine_tuning.job.event",
        "created_at": event.created,
        "level": event.level,
        "message": event.message,
        "type": "message" if event.data is None else "metrics",
        "data": event.data or {},
    }


def _checkpoint_object(job: Job, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "id": checkpoint.id,
        "object": "fine_tuning.job.checkpoint",
        "created_at": checkpoint.created,
        "fine_tuned_model_checkpoint": f"{job.base}@{checkpoint.adapter}",
        "fine_tuning_job_id": job.id,
        "metrics": checkpoint.metrics,
        "step_number": checkpoint.step,
    }
