"""Who runs an operation: kernels where there is Metal and the switch is on, references elsewhere."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxserve.errors import UsageError
from mlxserve.kernels_metal import dispatch, switch
from tests.kernels_metal.paged import problem


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that says it has Metal."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Who was asked for attention: the kernels by name, or the reference."""
    asked: list[Any] = []

    def kernel(*arguments: Any, kernels: frozenset[str], **options: Any) -> None:
        asked.append(set(kernels))

    monkeypatch.setattr(dispatch.paged, "paged_attention", kernel)
    monkeypatch.setattr(dispatch.reference, "paged_attention", lambda *a, **o: asked.append("reference"))
    return asked


def attend(size: int = 64) -> None:
    case = problem([5], [1], size=size)
    arrays = [mx.array(part) for part in (case.q, case.k_pages, case.v_pages)]
    dispatch.paged_attention(*arrays, case.plan, scale=1.0)


def test_without_metal_the_reference_runs(ran: list[Any]) -> None:
    attend()
    assert ran == ["reference"]


@pytest.mark.usefixtures("metal")
def test_with_metal_the_kernels_run(ran: list[Any]) -> None:
    attend()
    assert ran == [{"paged_decode", "paged_prefill"}]


@pytest.mark.usefixtures("metal")
def test_head_sizes_without_a_kernel_take_the_reference(ran: list[Any]) -> None:
    attend(size=40)
    assert ran == ["reference"]


@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize(
    ("off", "left"),
    [
        ("paged_decode", {"paged_prefill"}),
        (" sample, paged_prefill ,", {"paged_decode"}),
        ("all", "reference"),
        ("paged_decode,paged_prefill", "reference"),
    ],
)
def test_each_kernel_can_be_turned_off(
    off: str, left: Any, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch.OFF_VARIABLE, off)
    attend()
    assert ran == [left]


def test_a_name_that_is_no_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch.OFF_VARIABLE, "smaple")
    with pytest.raises(UsageError, match="names no kernel 'smaple'; there are paged_decode"):
        switch.turned_off("sample")
