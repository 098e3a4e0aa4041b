"""Lines of a generated source lead back to the file and line that a person wrote."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from tests.metal import harness, sources
from tests.metal.sources import Piece, annotate, locate

HEADER = "// helpers\ninline float half_of(float v) {\n  return v / 2;\n}\n"
BODY = "// body: one thread an element\nuint i = thread_position_in_grid.x;\ny[i] = half_of(x[i]);\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "helpers.metal").write_text(HEADER)
    (tmp_path / "scale.metal").write_text(BODY)
    return tmp_path


def generated(header: str, body: str) -> str:
    return f"{header}[[kernel]] void k(\n  device float* y [[buffer(0)]]) {{\n{body}\n}}\n"


def line_of(text: str, annotated: str) -> int:
    return 1 + next(n for n, line in enumerate(annotated.split("\n")) if text in line)


def test_body_and_header_files(folder: Path) -> None:
    annotated = annotate(generated(HEADER, BODY), [Piece(HEADER, "h"), Piece(BODY, "b")], "k", folder)
    assert locate(annotated, line_of("return v / 2", annotated)) == f"{folder}/helpers.metal:3"
    assert locate(annotated, line_of("half_of(x[i])", annotated)) == f"{folder}/scale.metal:3"
    assert locate(annotated, line_of("[[kernel]]", annotated)) == "<generated k>:5"


def test_part_of_a_file(folder: Path) -> None:
    body = BODY.split("\n", 1)[1]
    annotated = annotate(generated("", body), [Piece("", "h"), Piece(body, "b")], "k", folder)
    assert locate(annotated, line_of("half_of(x[i])", annotated)) == f"{folder}/scale.metal:3"


def test_several_files_in_one_header(folder: Path) -> None:
    header = f"#define N 4\n{HEADER}inline int own() {{ return 3; }}\n"
    annotated = annotate(generated(header, BODY), [Piece(header, "<header>"), Piece(BODY, "b")], "k", folder)
    assert locate(annotated, line_of("#define N", annotated)) == "<header>:1"
    assert locate(annotated, line_of("return v / 2", annotated)) == f"{folder}/helpers.metal:3"
    assert locate(annotated, line_of("own()", annotated)) == "<header>:6"


def test_text_of_no_file_keeps_its_label(tmp_path: Path) -> None:
    annotated = annotate(generated("", "a;\nb;\n"), [Piece("a;\nb;\n", "<body>")], "k", tmp_path)
    assert locate(annotated, line_of("b;", annotated)) == "<body>:2"


def test_nothing_but_directives_is_added(folder: Path) -> None:
    source = generated(HEADER, BODY)
    annotated = annotate(source, [Piece(HEADER, "h"), Piece(BODY, "b")], "k", folder)
    kept = [line for line in annotated.split("\n") if not line.startswith("#line")]
    assert kept == source.split("\n")


def test_failure_and_refusal_name_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "KERNELS", folder)

    def run(header: str, body: str) -> None:
        kernel = mx.fast.metal_kernel(
            name="scale", input_names=["x"], output_names=["y"], header=header, source=body
        )
        shape = (64, 1, 1)
        harness.run(
            lambda x: kernel(
                inputs=[x], grid=shape, threadgroup=shape, output_shapes=[(64,)], output_dtypes=[mx.float32]
            ),
            mx.zeros(64),
        )

    run(HEADER, BODY)
    wrong = BODY.replace("x[i]", "x[i + 1]")
    (folder / "wrong.metal").write_text(wrong)
    with pytest.raises(harness.KernelFailure, match=r"wrong\.metal:3, thread 63"):
        run(HEADER, wrong)
    refused = BODY.replace("half_of", "expf")
    (folder / "refused.metal").write_text(refused)
    with pytest.raises(harness.CompileError, match=r"refused\.metal:3:"):
        run(HEADER, refused)
    linted = HEADER.replace("float v", "float& v")
    (folder / "linted.metal").write_text(linted)
    with pytest.raises(harness.CompileError, match=r"linted\.metal:2: `float& v` in half_of"):
        run(linted, BODY)
