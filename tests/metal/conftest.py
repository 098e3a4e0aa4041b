"""Every test here needs Linux and the compiler; elsewhere they are skipped with the reason."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import require
from tests.metal import harness


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if sys.platform != "linux":
        pytest.skip("the Metal harness runs on Linux only")  # a Mac has `mlxserve kernels selftest`
    reason = harness.why_unavailable()
    require(reason is None, reason or "")
