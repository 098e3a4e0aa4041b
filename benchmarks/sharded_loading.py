"""Loading for tensor parallelism: our `load_shard` against mlx-lm's `sharded_load`, two ranks on this machine.

    python -m benchmarks.sharded_loading

A random llama (bfloat16, and packed to 4 bits) is written once. Each side loads it in two processes joined by
MLX's ring backend; each process imports everything first, then counts what its loading reads (rchar of
/proc/self/io) and its highest memory (MLX's count, and the process's, both above what they were before).
Packed weights stay packed on both sides. The larger of the two ranks counts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlxserve  # noqa: F401  (first: it puts OpenBLAS in before MLX loads)

import mlx.core as mx  # isort: skip
import numpy as np

from benchmarks.models import cache_folder
from benchmarks.table import Table

RANKS = 2
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32000,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(_measure(arguments.side, arguments.folder)))
        return
    table = Table("weights", "measure", "wanted", "ratio")
    for label, bits in (("bfloat16", None), ("4 bits", 4)):
        folder = _model(arguments.layers, bits)
        ours, theirs = _both_ranks("ours", folder), _both_ranks("theirs", folder)
        table.add(label, "bytes read, against mlx-lm", "≤ 0.65", _ratio(ours, theirs, "read", 0.65))
        table.add(
            label,
            "bytes read, against the plan",
            "1.000",
            f"{_most(ours, 'tensors') / _most(ours, 'plan'):.3f}",
        )
        table.add(
            label, "peak memory, MLX's count, against mlx-lm", "≤ 0.85", _ratio(ours, theirs, "peak", 0.85)
        )
        table.add(
            label, "peak memory, the process's, against mlx-lm", "≤ 0.85", _ratio(ours, theirs, "rss", 0.85)
        )
        table.add(label, "peak memory, MLX's count, against the plan", "≤ 1.05", _planned(ours))
        table.add(
            label,
            "time, digests included, against mlx-lm",
            "",
            f"{_most(ours, 's') / _most(theirs, 's'):.2f}",
        )
    table.print("Loading a rank's part, 2 ranks")


def _most(ranks: list[dict[str, float]], key: str) -> float:
    return max(rank[key] for rank in ranks)


def _ratio(ours: list[dict[str, float]], theirs: list[dict[str, float]], key: str, wanted: float) -> str:
    ratio = _most(ours, key) / _most(theirs, key)
    return f"{ratio:.2f}" if ratio <= wanted else f"**{ratio:.2f}**"


def _planned(ours: list[dict[str, float]]) -> str:
    ratio = max(rank["peak"] / rank["plan"] for rank in ours)
    return f"{ratio:.3f}" if ratio <= 1.05 else f"**{ratio:.3f}**"


def _both_ranks(side: str, folder: Path) -> list[dict[str, float]]:
    """What each rank measured; raises if one fails."""
    with tempfile.TemporaryDirectory() as scratch:
        hostfile = Path(scratch) / "hosts.json"
        hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports()]))
        command = [
            sys.executable,
            "-m",
            "benchmarks.sharded_loading",
            "--side",
            side,
            "--folder",
            str(folder),
        ]
        ranks = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                env=os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)},
            )
            for rank in range(RANKS)
        ]
        said = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit(f"a rank of {side} failed")
    return [json.loads(text.splitlines()[-1]) for text in said]


def _free_ports() -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(RANKS)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _measure(side: str, folder: Path) -> dict[str, float]:
    group = mx.distributed.init(strict=True, backend="ring")
    mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group))
    load = (_ours if side == "ours" else _theirs)(folder, group)
    mx.reset_peak_memory()
    read, resident, held, start = (
        _read_bytes(),
        _resident("VmRSS"),
        mx.get_active_memory(),
        time.perf_counter(),
    )
    facts = load()
    return {
        "s": time.perf_counter() - start,
        "read": _read_bytes() - read,
        "rss": _resident("VmHWM") - resident,
        "peak": mx.get_peak_memory() - held,
        **facts,
    }


def _ours(folder: Path, group: Any) -> Any:
    from mlxserve.config import LoadConfig
    from mlxserve.distributed.load import blueprint, fill
    from mlxserve.distributed.reader import TensorReader
    from mlxserve.distributed.sharding import attach_group
    from mlxserve.distributed.split import Split
    from mlxserve.models.load import build
    from mlxserve.models.resolve import resolve
    from mlxserve.text.tokenizer import load_tokenizer

    build(LLAMA | {"num_hidden_layers": 1})

    def load() -> dict[str, float]:
        files = resolve(str(folder))
        plan = blueprint(files, LoadConfig(), Split.tensor(group.size()), group.rank())
        with TensorReader(plan.tensors) as reader:
            fill(plan, reader)
        attach_group(plan.model, group)
        mx.eval(plan.model.parameters())
        load_tokenizer(files.path)
        return {"plan": plan.bytes, "tensors": reader.bytes_read}

    return load


def _theirs(folder: Path, group: Any) -> Any:
    from mlx_lm.models import llama  # noqa: F401
    from mlx_lm.utils import load_tokenizer, sharded_load

    load_tokenizer(folder)  # so that its imports are done

    def load() -> dict[str, float]:
        sharded_load(str(folder), tensor_group=group)
        return {}

    return load


def _read_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def _resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _model(layers: int, bits: int | None) -> Path:
    """A llama with random bytes for weights: loading does not look at them."""
    folder = cache_folder() / f"llama-{layers}-layers-{bits or 'bfloat16'}"
    if (folder / "config.json").is_file():
        return folder
    from mlx.utils import tree_flatten

    from mlxserve.models.load import build
    from tests import tiny

    settings: dict[str, Any] = {**LLAMA, "num_hidden_layers": layers}
    model = build(settings)
    if bits:
        import mlx.nn as nn

        nn.quantize(model, group_size=64, bits=bits)
        settings["quantization"] = {"group_size": 64, "bits": bits}
    draw = np.random.default_rng(0)
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        wide = value.dtype == mx.uint32
        numbers = draw.integers(0, 1 << (32 if wide else 14), value.shape, np.uint32 if wide else np.uint16)
        weights[name] = mx.array(numbers) if wide else mx.array(numbers).view(mx.bfloat16)
    tiny.write_tokenizer(folder)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(settings, indent=1))  # last: it marks the folder whole
    return folder


if __name__ == "__main__":
    main()
