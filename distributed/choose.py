"""Which split a launch uses: what was asked for, else the plan's.

Knows: words such as tensor:2 or pipeline, and what a plan needs of a model on this disk. Does not know
processes. Only headers are read.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.distributed.hosts import Host
from mlxserve.distributed.locate import layers_of
from mlxserve.distributed.plan import make_plan
from mlxserve.distributed.sources import facts_of_files
from mlxserve.distributed.split import Mode, Split
from mlxserve.errors import UsageError
from mlxserve.models.files import read_config
from mlxserve.models.load import context_of
from mlxserve.models.resolve import ModelFiles

# Without a wanted context, one sequence of so many tokens is to fit.
LEAST_CONTEXT = 4096


def choose_split(
    files: ModelFiles,
    hosts: Sequence[Host],
    asked: str | None,
    load: LoadConfig,
    engine: EngineConfig,
    link: str,
) -> Split:
    """A split of `files` over `hosts`. One that is asked for with its numbers is taken as it is.

    asked: as `--split`; tensor or pipeline alone leave its cut to the plan. Raises UsageError for a split of
    other ranks or layers, or of a model that cannot be divided so; DoesNotFit, naming the host, where a
    planned one does not fit.
    """
    if asked is not None and ":" in asked:
        return _as_asked(asked, files, len(hosts))
    if asked not in (None, "tensor", "pipeline"):
        raise UsageError(
            f"{asked!r} is no split; write tensor:2, pipeline:2 or pipeline:76,50.", param="split"
        )
    mode: Mode | None = "tensor" if asked == "tensor" else "pipeline" if asked else None
    facts = facts_of_files(files, load.quantize_bits, {len(hosts)}, load.quantize_group_size)
    context = min(context_of(facts.config, load), load.context or LEAST_CONTEXT)
    plan = make_plan(facts, hosts, context, mode, kv_bits=engine.kv_bits, link=link)
    plan.require()
    return plan.split


def _as_asked(asked: str, files: ModelFiles, size: int) -> Split:
    split = Split.parse(asked, layers_of(read_config(files.path)))
    if split.size != size:
        raise UsageError(f"--split {asked} names {split.size} ranks, and there are {size}.", param="split")
    return split
