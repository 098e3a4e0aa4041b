"""Pages are cleared and copied so that nothing of their last owner is left where nobody wrote."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.cache.store import LayerPages


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_copied_page_ends_where_its_new_owner_goes_on(bits: int) -> None:
    draw = np.random.default_rng(0)
    store = LayerPages(5, 4, None, kv_bits=bits)
    arrays = [
        mx.array(draw.integers(1, 9, (5, 4, 2, width)).astype(np.float32))
        for width in ((32,) if bits == 16 else (32 * bits // 32, 1, 1))
    ]
    if bits != 16:
        arrays[0] = arrays[0].astype(mx.uint32)
    everything = mx.arange(5)
    store.put(everything, arrays * 2)
    before = [np.array(array) for array in store.arrays()]
    store.copy_pages(mx.array([0, 2]), mx.array([1, 4]), mx.array([3, 0]))
    store.clear_pages(mx.array([3]))
    for was, now in zip(before, map(np.array, store.arrays()), strict=True):
        np.testing.assert_array_equal(now[[0, 2]], was[[0, 2]])
        np.testing.assert_array_equal(now[1, :3], was[0, :3])
        assert now.dtype == was.dtype and was.all() and not now[1, 3:].any() and not now[[3, 4]].any()
