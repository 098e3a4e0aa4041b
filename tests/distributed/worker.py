"""One rank of a case of `crew.py`: reads it from standard input, rank 0 writes its report to standard output."""

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
    case = json.load(sys.stdin)
    folder = Path(case["folder"])
    loaded = load_folder(folder, LoadConfig())
    split = Split.parse(case["split"], len(loaded.model.layers))
    addresses = [(host, port) for host, port in case["addresses"]]
    token = os.environ["MLXSERVE_TOKEN"].encode()
    context = join(case["rank"], split, addresses, token, timeout_s=30.0)
    context.patience_s = 30.0
    stage = _part(context, loaded)
    if context.rank:
        serve_rank(context, loaded, stage)
        return
    engine = leader_engine(
        context, loaded, load_tokenizer(folder), EngineConfig(**case["settings"]), stage=stage
    )
    found = report(engine, case["rounds"])
    engine.close()
    json.dump(found, sys.stdout)


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
