"""Small kernels written in a test: one input `x`, one output `y`, one thread an element."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from tests.metal import harness

INDEX = "uint i = thread_position_in_grid.x; "


def run_body(body: str, header: str = "", threads: int = 64, **options: Any) -> harness.Result:
    """Run `INDEX + body` with x = 0..threads-1 in float32; `options` go to `harness.run`."""
    kernel = mx.fast.metal_kernel(
        name="scratch", input_names=["x"], output_names=["y"], header=header, source=INDEX + body
    )

    def launch(x: mx.array) -> list[mx.array]:
        return kernel(
            inputs=[x],
            grid=(threads, 1, 1),
            threadgroup=(min(threads, 64), 1, 1),
            output_shapes=[(threads,)],
            output_dtypes=[mx.float32],
        )

    return harness.run(launch, mx.arange(threads, dtype=mx.float32), **options)
