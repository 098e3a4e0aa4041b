"""One rank of `crew.py`: its job comes on standard input, rank 0 writes its reports to standard output."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import mlxserve  # noqa: F401  before MLX
from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.distributed.follower import serve_rank
from mlxserve.distributed.leader import leader_engine
from mlxserve.distributed.rank import RankContext, join
from mlxserve.distributed.split import Split
from mlxserve.models.load import LoadedModel, load_folder
from mlxserve.text.tokenizer import load_tokenizer
from tests.distributed.rounds import report


def main() -> None:
    job = json.load(sys.stdin)
    done = [carry_out(case, job["split"], job["rank"]) for case in job["cases"]]
    if job["rank"] == 0:
        json.dump(done, sys.stdout)


def carry_out(case: dict[str, Any], split_text: str, rank: int) -> dict[str, Any]:
    """One case on this rank; the report, on rank 0."""
    folder = Path(case["folder"])
    loaded = load_folder(folder, LoadConfig())
    split = Split.parse(split_text, len(loaded.model.layers))
    addresses = [(host, port) for host, port in case["addresses"]]
    context = join(rank, split, addresses, os.environ["MLXSERVE_TOKEN"].encode(), timeout_s=30.0)
    context.patience_s = 30.0
    context.gathered_bytes = case["gathered_bytes"]
    done: list[int] = []
    context.on_step = done.append
    stage = _part(context, loaded)
    if rank:
        serve_rank(context, loaded, stage)
        found = {}
    else:
        config = EngineConfig(**case["settings"])
        settings = {"stage": stage, "micro_batches": case["micro_batches"]}
        engine = leader_engine(context, loaded, load_tokenizer(folder), config, **settings)
        found = report(engine, case["rounds"], case["adapters"])
        engine.close()
    context.close()
    assert done == sorted(set(done)) and done, "steps complete in their order"
    return {**found, "done": done[-1]}


def _part(context: RankContext, loaded: LoadedModel) -> Any:
    """Make `loaded` this rank's part; a pipeline's handle."""
    import mlx.core as mx

    if context.split.mode == "tensor":
        context.group = mx.distributed.init(strict=True, backend="ring")
        loaded.model.shard(context.group)
        mx.eval(loaded.model.parameters())
        return None
    from mlxserve.distributed.stages import make_stage

    return make_stage(loaded.model, context.split.layers_of(context.rank), len(loaded.model.layers))


if __name__ == "__main__":
    main()
