"""What tests that execute kernels lean on."""

from __future__ import annotations

import pytest

from tests.conftest import require
from tests.metal import harness


@pytest.fixture(scope="session")
def compiler() -> None:
    """The compiler that the harness needs; where it is missing the test is skipped with the reason."""
    reason = harness.why_unavailable()
    require(reason is None, reason or "")
