"""Every test here needs the compiler; where it is missing they are skipped with the reason."""

from __future__ import annotations

import pytest

from tests.conftest import require
from tests.metal import harness


@pytest.fixture(autouse=True)
def _compiler() -> None:
    reason = harness.why_unavailable()
    require(reason is None, reason or "")
