"""From generated MSL to a shared library: clang with instrumentation, and a cache.

The compiler is the PyPI package `ziglang` (raw `zig clang`, `zig ld.lld`): no system headers, no sanitizer's
runtime.

1. front end: MSL's address spaces, so that a missing or wrong one is an error, and checks of arithmetic;
2. edit.py adds alignment checks to the LLVM IR and erases the address spaces, which a CPU does not have;
3. back end: optimise as a GPU compiler would, then instrument every load, store and basic block;
4. link. `__tsan_*`, `__ubsan_*` and `msl_*` stay undefined; the runtime, loaded first, provides them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from tests.metal.edit import Unwatched, edit_ir, edit_mlx_header, unit
from tests.metal.signature import Signature

HERE = Path(__file__).resolve().parent
SHIM = HERE / "msl"
RUNTIME = HERE / "runtime"
_EDITS = (HERE / "edit.py").read_text()  # a part of every cache key

FRONT_END = shlex.split("""
    -x c++ -std=c++20 -ffreestanding -nostdinc -fPIC -fno-exceptions -fno-rtti -fno-stack-protector
    -fno-threadsafe-statics -fsigned-char -ffp-contract=on -gline-tables-only
    -fno-finite-loops -fno-delete-null-pointer-checks
    -Xclang -cl-single-precision-constant
    -Xclang -ffloat16-excess-precision=none -Xclang -fbfloat16-excess-precision=none
    -ftrivial-auto-var-init=pattern
    -Wno-unknown-attributes -Wno-duplicate-decl-specifier -Wno-ignored-attributes -Wno-undefined-inline
    -Wno-unused-command-line-argument
    -O1 -Xclang -disable-llvm-passes -S -emit-llvm
""")
# What Metal refuses or leaves undefined, and clang would only warn of.
REFUSED = shlex.split("""
    -Werror=implicit-float-conversion -Wno-error=implicit-int-float-conversion -Werror=return-type
    -Werror=uninitialized -Werror=sometimes-uninitialized -Werror=conditional-uninitialized
    -Werror=shift-count-overflow -Werror=vla -Werror=infinite-recursion -Werror=pre-c++20-compat
""")
UNDEFINED = (
    "array-bounds,local-bounds,signed-integer-overflow,shift-exponent,integer-divide-by-zero,"
    "float-cast-overflow,builtin,return"
)
BACK_END = shlex.split("""
    -O2 -fPIC -fno-vectorize -fno-slp-vectorize -gline-tables-only -x ir -c
    -Wno-override-module -Wno-unused-command-line-argument
    -fsanitize=thread,local-bounds -fno-sanitize-trap=local-bounds -fsanitize-coverage=edge,trace-pc,no-prune
    -mllvm -tsan-instrument-func-entry-exit=0 -mllvm -tsan-instrument-read-before-write=1
    -mllvm -tsan-handle-cxx-exceptions=0 -mllvm -inline-threshold=10000
""")
LIBRARY = shlex.split("""
    -std=c++20 -O2 -fPIC -ffreestanding -nostdinc -fno-exceptions -fno-rtti -fno-stack-protector
    -fno-threadsafe-statics -Wno-unused-command-line-argument -c
""")


class CompileError(Exception):
    """The compiler, or a rule on the text, refuses a kernel."""


def why_unavailable() -> str | None:
    """None where kernels can be compiled and run, else the reason."""
    if sys.platform != "linux":
        return "the Metal harness runs on Linux only"
    if importlib.util.find_spec("ziglang") is None:
        return "ziglang is not installed (pip install ziglang)"
    return None


def cache_folder() -> Path:
    """MLXSERVE_METAL_CACHE, or a folder under the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("MLXSERVE_METAL_CACHE") or Path(base) / "mlxserve" / "metal")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _zig() -> str:
    spec = importlib.util.find_spec("ziglang")
    assert spec and spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]) / "zig")


@functools.cache
def _digest_of_folder(folder: Path) -> str:
    """Changes when any file below `folder` does."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr.strip() or f"{command[1]} failed")


@functools.cache
def _mlx_headers() -> Path:
    """A folder with edited copies of the installed MLX's Metal headers."""
    source = Path(mx.__file__).parent / "include" / "mlx" / "backend" / "metal" / "kernels"
    key = _key(_digest_of_folder(source), _EDITS)
    target = cache_folder() / f"headers-{key}"
    if target.exists():
        return target
    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    headers = list(source.rglob("*.h"))
    if not headers:
        raise CompileError(f"this MLX has no Metal headers at {source}")
    for path in headers:
        copy = scratch / "mlx" / "backend" / "metal" / "kernels" / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(edit_mlx_header(path.read_text()))
    _put(scratch, target)
    return target


def _put(scratch: Path, target: Path) -> None:
    """Rename into place; another process may have been first, with the same content."""
    try:
        scratch.rename(target)
    except OSError:
        if not target.exists():
            raise


# ---- build steps


@functools.cache
def load_runtime() -> ctypes.CDLL:
    """The runtime, with its symbols (and libm's) visible to kernels."""
    key = _key(_digest_of_folder(RUNTIME), LIBRARY)
    library = cache_folder() / f"runtime-{key}.so"
    if not library.exists():
        base = library.with_name(f"{library.stem}.{os.getpid()}")
        _run([_zig(), "clang", *LIBRARY, str(RUNTIME / "runtime.cpp"), "-o", f"{base}.o"])
        _run([_zig(), "ld.lld", "-shared", "-o", f"{base}.so", f"{base}.o"])
        _put(Path(f"{base}.so"), library)
        Path(f"{base}.o").unlink()
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def build(source: str, signature: Signature, strict: bool = True) -> Path:
    """Compile a kernel, or find it in the cache. `strict` off is for text that is not ours."""
    checks = (
        [*REFUSED, f"-fsanitize={UNDEFINED}", "-fno-sanitize-trap=all", "-fno-sanitize-recover=all"]
        if strict
        else ["-w"]
    )
    text = unit(source, signature)
    front = [*FRONT_END, *checks, "-fsanitize=thread"]
    key = _key(text, front, BACK_END, _EDITS, _digest_of_folder(SHIM), version("mlx"))
    library, refusal = cache_folder() / f"{key}.so", cache_folder() / f"{key}.refused"
    if refusal.exists():
        raise CompileError(refusal.read_text())
    if not library.exists():
        try:
            _build(text, front, library)
        except (CompileError, Unwatched) as error:
            refusal.write_text(str(error))
            raise CompileError(str(error)) from None
    return library


def _build(text: str, front: list[str], library: Path) -> None:
    base = str(library.with_name(f"{library.stem}.{os.getpid()}"))
    include = ["-isystem", str(SHIM), "-isystem", str(_mlx_headers())]
    try:
        Path(f"{base}.cpp").write_text(text)
        _run([_zig(), "clang", *front, *include, f"{base}.cpp", "-o", f"{base}.ll"])
        intermediate = Path(f"{base}.ll")
        intermediate.write_text(edit_ir(intermediate.read_text()))
        _run([_zig(), "clang", *BACK_END, f"{base}.ll", "-o", f"{base}.o"])
        _run([_zig(), "ld.lld", "-shared", "--eh-frame-hdr", "-o", f"{base}.so", f"{base}.o"])
        _put(Path(f"{base}.so"), library)
    finally:
        for suffix in ("cpp", "ll", "o"):
            Path(f"{base}.{suffix}").unlink(missing_ok=True)
