"""`mlxserve doctor`, on this machine and on machines with something wrong."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlxserve import blas
from mlxserve.cli import doctor
from mlxserve.cli.doctor import is_within
from mlxserve.errors import DependencyMissing
from mlxserve.models import backend
from mlxserve.models.backend import backend_problem, check_backend
from tests.cli.conftest import Run
from tests.conftest import ROOT


def test_facts_of_this_machine(run: Run) -> None:
    report = run("doctor", "--json").json()
    assert report["problems"] == []
    facts = report["facts"]
    assert facts["mlx"] == mx.__version__
    assert facts["BLAS"] == blas.in_use()
    assert ("GPU" in facts["device"]) == (mx.default_device() != mx.cpu)
    words = run("doctor")
    assert words.code == 0 and re.search(rf"mlx +{re.escape(mx.__version__)}", words.out)


def test_bounds_are_those_of_the_project_file() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for name in ("mlx", "mlx-lm"):
        bounds = doctor.tested_bounds(name)
        stated = re.search(rf'"{name}(>=[^"]+)"', text)
        assert stated and set(bounds.split(",")) == set(stated[1].split(","))


@pytest.mark.parametrize(
    ("version", "within"), [("0.32.4", True), ("0.32.9", True), ("0.33.0", False), ("0.31.0", False)]
)
def test_within_bounds(version: str, within: bool) -> None:
    assert is_within(version, ">=0.32.4,<0.33") is within


def test_an_untested_version_is_advice(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"mlx": "0.99.0", "mlx-lm": None}
    monkeypatch.setattr(doctor, "package_version", lambda name: versions[name])
    report = run("doctor", "--json").json()
    assert any("mlx 0.99.0 is outside" in text and "pip install 'mlx" in text for text in report["advice"])
    assert any("mlx-lm is not installed" in text for text in report["problems"])


def test_reference_blas_is_advice(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "in_use", lambda: "reference")
    monkeypatch.setattr(doctor, "installed_backends", lambda: ["mlx-cpu"])
    assert any("libopenblas0" in text for text in run("doctor", "--json").json()["advice"])


def test_a_full_disk_is_advice(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_disk", lambda: 3 << 30)
    said = run("doctor")
    assert "advice: Only 3.0 GiB are free" in said.out and said.code == 0


def test_the_cache_is_where_it_is_set(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert run("doctor", "--json").json()["facts"]["model cache"].startswith(f"{tmp_path}, ")


@pytest.mark.parametrize(
    ("backends", "platform", "words"),
    [
        ([], "linux", r"no backend here: install exactly one, pip install 'mlxserve\[cpu\]'"),
        (["mlx-cpu", "mlx-cuda-13"], "linux", "both installed .* pip uninstall mlx-cpu mlx-cuda-13"),
        (["mlx-cpu"], "linux", None),
        ([], "darwin", None),
        (["mlx-metal"], "darwin", None),
    ],
)
def test_backends(backends: list[str], platform: str, words: str | None) -> None:
    problem = backend_problem(backends, platform)
    assert (problem is None) if words is None else re.search(words, problem or "")


def _broken(monkeypatch: pytest.MonkeyPatch, backends: list[str]) -> None:
    def fail(name: str) -> None:
        raise ImportError("libmlx.so: cannot open shared object file")

    monkeypatch.setattr(backend, "import_module", fail)
    for module in (backend, doctor):
        monkeypatch.setattr(module, "installed_backends", lambda: backends)
    monkeypatch.setattr(sys, "platform", "linux")


@pytest.mark.parametrize(
    ("backends", "words"),
    [
        ([], "no backend here: install exactly one"),
        (["mlx-cpu", "mlx-cuda-12"], "overwrite each other's library"),
        (["mlx-cpu"], r"MLX cannot be loaded \(libmlx\.so.*reinstall"),
    ],
)
def test_an_mlx_that_cannot_be_imported_is_explained(
    backends: list[str], words: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    _broken(monkeypatch, backends)
    with pytest.raises(DependencyMissing, match=words):
        check_backend()
    said = run("doctor")
    assert said.code == 69 and re.search(f"problem: .*{words}", said.out)


def test_two_backends_that_work_are_advice(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_backends", lambda: ["mlx-cpu", "mlx-cuda-13"])
    monkeypatch.setattr(sys, "platform", "linux")
    report = run("doctor", "--json").json()
    assert report["problems"] == [] and any("overwrite each other" in text for text in report["advice"])
