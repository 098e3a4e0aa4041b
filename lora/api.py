"""Fine-tuning in one call: settings in, a trained adapter and its files out.

Knows: how model, data, adapters, plan, trainer and loggers are put together. The machine's memory, a
watcher, a function that writes samples and a process group are handed in.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxserve import display
from mlxserve.errors import UsageError
from mlxserve.lora.base import Base, open_base
from mlxserve.lora.complete import complete
from mlxserve.lora.config import RunConfig, from_dict, override, read_config, to_dict
from mlxserve.lora.data import Dataset, load_all
from mlxserve.lora.layers import add_adapters
from mlxserve.lora.logs import Event, Files, Logger, other_logger, package_of
from mlxserve.lora.notebook import live
from mlxserve.lora.plan import Plan, plan_run, plan_within, sizes_of
from mlxserve.lora.plot import plot
from mlxserve.lora.rows import find_split
from mlxserve.lora.share import Share, data_parallel
from mlxserve.lora.train import Outcome, Trainer
from mlxserve.models.describe import describe

Generate = Callable[[Base, str, int], str]


@dataclass(slots=True, repr=False)
class Result:
    """What a run left. In Jupyter it shows its loss curve; `adapter` is the folder to serve or fuse."""

    outcome: Outcome
    adapter: Path
    model: nn.Module
    config: RunConfig

    @property
    def history(self) -> list[Event]:
        """Every step's and evaluation's figures."""
        return self.outcome.history

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts())
        return f"<Result: {facts}>"

    def _facts(self) -> list[tuple[str, str]]:
        outcome = self.outcome
        losses = {"last training loss": outcome.last_loss, "best held-out loss": outcome.best_loss}
        return [
            ("ended", f"{outcome.why} after {outcome.steps} steps"),
            *((name, f"{loss:.4f}") for name, loss in losses.items() if loss is not None),
            ("adapter", str(self.adapter)),
        ]

    def _repr_html_(self) -> str:
        """How it ended above the curves, in the notebook's own text colour."""
        table = display.facts(self._facts(), "Fine-tuning")
        return table + (plot(self.history, inline=True) if self.history else "")


@dataclass(slots=True)
class Prepared:
    """Everything of a run that has not begun."""

    config: RunConfig
    base: Base
    train: Dataset
    valid: Dataset | None
    plan: Plan


def prepare(
    config: RunConfig,
    *,
    budget_bytes: int | None = None,
    force: bool = False,
    base: Base | None = None,
    fresh: bool = False,
) -> Prepared:
    """Load model and data and plan the run. Raises DoesNotFit, unless forced, where memory is too small.

    base: a model that is open already, such as this process's part of one. fresh: this process will begin a new
    run, so its folder must be free. What can be known to be wrong before the model is loaded is told before.
    """
    if not config.model:
        raise UsageError("No model is named; set model in the YAML or with --set model=NAME.", param="model")
    full = config.lora.type == "full"
    if full and config.quantize is not None:
        raise UsageError(
            "lora.type=full cannot train quantised weights; leave quantize out.", param="quantize"
        )
    if fresh:
        require_free(Path(config.save.dir))
    for split in ("train", "valid"):
        find_split(config.data, split)
    sample_prompts(config)
    for name in config.log.to:
        package_of(name)
    if base is None:
        if budget_bytes is not None and not force:
            _require_room(config, budget_bytes)
        base = open_base(config.model, quantize=config.quantize, floats=full)
    if config.lora.type == "full" and base.config.get("quantization") is not None:
        raise UsageError(
            f"{config.model} is quantised, and lora.type=full trains floats only.", param="lora.type"
        )
    train, valid = load_all(config, base.tokenizer)
    if config.eval.patience is not None and valid is None:
        raise UsageError(
            "eval.patience stops a run by its held-out loss; set data.valid.", param="eval.patience"
        )
    longest = int(train.lengths.max())
    plan = plan_within(budget_bytes, lambda on: plan_loaded(config, base, longest, on), config)
    if budget_bytes is not None and not force:
        plan.require(budget_bytes)
    return Prepared(config, base, train, valid, plan)


def _require_room(config: RunConfig, budget_bytes: int) -> None:
    """Raise DoesNotFit where not even the shortest rows would fit beside the weights, which are not loaded yet."""
    facts = describe(config.model)
    sizes = sizes_of(config, facts, on_cpu=mx.default_device() == mx.cpu)
    short = replace(config, train=replace(config.train, rows_per_batch=1, tokens_per_batch=1))
    plan_run(short, dict(facts.config), longest=2, checkpointing=True, **sizes).require(budget_bytes)


RUN_FILES = ("checkpoints", "best", "final", "config.yaml", "metrics.jsonl", "samples.jsonl", "loss.svg")


def require_free(folder: Path) -> None:
    """Raise UsageError unless a new run can be written there: a run replaces files of its names."""
    if (folder / "checkpoints").is_dir():
        raise UsageError(
            f"{folder} already holds a run; take it up with 'mlxserve lora resume {folder}', or set another "
            "save.dir.",
            param="save.dir",
        )
    there = next((name for name in RUN_FILES if (folder / name).exists()), None)
    if there is not None:
        raise UsageError(
            f"{folder} already holds {there}, which a run would replace; set another save.dir.",
            param="save.dir",
        )
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        what = "cannot be written to" if place.is_dir() else "is no folder"
        raise UsageError(f"save.dir is {folder}, and {place} {what}.", param="save.dir")


def plan_loaded(config: RunConfig, base: Base, longest: int, checkpointing: bool | None = None) -> Plan:
    """The plan for a model that is in memory."""
    weights = [value for _, value in tree_flatten(base.model.parameters())]
    floats = [value.dtype.size for value in weights if mx.issubdtype(value.dtype, mx.floating)]
    return plan_run(
        config,
        base.config,
        weight_bytes=sum(value.nbytes for value in weights),
        float_bytes=max(floats, default=4),
        longest=longest,
        checkpointing=checkpointing,
    )


def run(
    prepared: Prepared,
    *,
    resume: bool = False,
    watch: Callable[[Event], None] | None = None,
    generate: Generate | None = None,
    group: Any = None,
    divide: Callable[[nn.Module], Share] | None = None,
    stop: threading.Event | None = None,
) -> Result:
    """Train what was prepared. Raises as `Trainer.run`.

    group: of processes that each have the whole model. divide: for those that have a part of it; called
    with the model once its adapters are in, and gives the process's share.
    """
    config, base = prepared.config, prepared.base
    folder = Path(config.save.dir)
    add_adapters(base.model, config.lora, seed=config.train.seed)
    share = divide(base.model) if divide else data_parallel(group)
    loggers = _loggers(config, folder, resume, show=watch is None) if share.writes else []
    watchers: list[Callable[[Event], None]] = [*loggers, *([watch] if watch else [])]
    try:
        trainer = _trainer(prepared, folder, watchers, generate, share, stop)
        if resume:
            trainer.resume()
        return Result(trainer.run(), folder / "final", base.model, config)
    finally:
        for logger in loggers:
            logger.close()


def _loggers(config: RunConfig, folder: Path, resume: bool, *, show: bool) -> list[Logger]:
    """What the process that writes tells of its run."""
    if not resume:
        require_free(folder)
    shown = live() if show else None
    others = [other_logger(name, folder, to_dict(config)) for name in config.log.to]
    return [Files(folder, jsonl=config.log.jsonl), *([shown] if shown else []), *others]


def _trainer(
    prepared: Prepared,
    folder: Path,
    watchers: Sequence[Callable[[Event], None]],
    generate: Generate | None,
    share: Share,
    stop: threading.Event | None,
) -> Trainer:
    config, base = prepared.config, prepared.base
    return Trainer(
        base.model,
        config,
        prepared.train,
        prepared.valid,
        vocabulary=base.vocabulary,
        checkpointing=prepared.plan.checkpointing,
        base=config.model,
        architecture=base.config,
        run=folder,
        watch=lambda event: _tell_all(watchers, event),
        generate=_sampler(config, base, generate or complete),
        share=share,
        stop=stop,
    )


def _tell_all(watchers: Sequence[Callable[[Event], None]], event: Event) -> None:
    for watcher in watchers:
        watcher(event)


def sample_prompts(config: RunConfig) -> list[str]:
    """The lines of eval.samples. Raises UsageError for a file that cannot be read or holds none."""
    if config.eval.samples is None:
        return []
    path = Path(config.eval.samples).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"{path} of eval.samples cannot be read: {reason}.", param="eval.samples") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UsageError(f"{path} of eval.samples holds no prompt.", param="eval.samples")
    return prompts


def _sampler(config: RunConfig, base: Base, generate: Generate) -> Callable[[], list[Event]] | None:
    """What the model answers to each line of eval.samples; None where there is no such file."""
    prompts = sample_prompts(config)
    if not prompts:
        return None

    def sample() -> list[Event]:
        base.model.eval()
        return [{"prompt": p, "text": generate(base, p, config.eval.sample_tokens)} for p in prompts]

    return sample


def finetune(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    settings: Sequence[str] = (),
    resume: bool = False,
    watch: Callable[[Event], None] | None = None,
    generate: Generate | None = None,
    group: Any = None,
    budget_bytes: int | None = None,
    force: bool = False,
) -> Result:
    """Fine-tune a model: `finetune({"model": "smollm2", "data": {"train": "rows.jsonl"}})`.

    config: a RunConfig, the same as a dict, or a YAML file. settings: `a.b=c` put over it.
    generate(base, prompt, max_tokens) -> text writes the samples of eval.samples, `complete` if it is None.
    group: mx.distributed's. budget_bytes: what the run may take; None asks nothing, and blocks are then computed
    twice only where train.checkpointing says so. In a notebook figures and curves are shown while it trains,
    unless `watch` is told.
    Raises UsageError for settings or rows, DoesNotFit before anything runs, TrainingDiverged, Cancelled.
    """
    if isinstance(config, str | Path):
        config = read_config(Path(config), settings)
    else:
        values = to_dict(config) if isinstance(config, RunConfig) else config
        config = from_dict(override(values, settings))
    fresh = not resume and (group is None or group.rank() == 0)
    prepared = prepare(config, budget_bytes=budget_bytes, force=force, fresh=fresh)
    return run(prepared, resume=resume, watch=watch, generate=generate, group=group)
