"""From generated MSL to a shared library: three edits of the text, clang with instrumentation, a cache.

The compiler is the PyPI package `ziglang` (raw `zig clang`, `zig ld.lld`): no system headers, no sanitizer's
runtime.

1. front end: MSL's address spaces, so that a missing or wrong one is an error; undefined behaviour is checked;
2. in the IR's text, a check of its alignment goes before every load and store, and the address spaces are erased;
3. back end: optimise as a GPU compiler would, then instrument every load, store and basic block;
4. link. `__tsan_*`, `__ubsan_*` and `msl_*` stay undefined; the runtime, loaded first, provides them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import mlx.core as mx

from tests.metal.signature import Signature, strip_comments

HERE = Path(__file__).resolve().parent
SHIM = HERE / "msl"
RUNTIME = HERE / "runtime"

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
    -Werror=shift-count-overflow -Werror=vla -Werror=infinite-recursion
""")
UNDEFINED = (
    "array-bounds,local-bounds,signed-integer-overflow,shift-exponent,integer-divide-by-zero,"
    "float-cast-overflow,builtin,return"
)
BACK_END = shlex.split("""
    -O1 -fPIC -fno-vectorize -fno-slp-vectorize -gline-tables-only -x ir -c
    -Wno-override-module -Wno-unused-command-line-argument
    -fsanitize=thread,local-bounds -fno-sanitize-trap=local-bounds -fsanitize-coverage=edge,trace-pc,no-prune
    -mllvm -tsan-instrument-func-entry-exit=0 -mllvm -tsan-instrument-read-before-write=1
    -mllvm -tsan-handle-cxx-exceptions=0
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


# ---- edits of the text; each keeps the line numbers

_INSTANTIATION = re.compile(r"template\s*(?:\[\[[^;]*?\]\]\s*)+decltype")
_VECTOR = r"(?:metal::)?(?:vec<[^<>;(){}]*>|(?:float|half|bfloat|u?int|u?short|u?char|u?long|bool)[234])"
_CONSTRUCTOR = re.compile(rf"(?<![\w:.])(?<!operator )({_VECTOR})\(")
_VARIABLE = re.compile(
    r"((?:^|[;{}])\s*)threadgroup\s+"
    r"((?:const\s+)?(?:metal::)?[A-Za-z_]\w*(?:\s*<[^;<>]*>)?(?:::\w+)*)\s+"
    r"([A-Za-z_]\w*\s*(?:\[[^;\]]*\]\s*)*(?:,\s*\w+\s*(?:\[[^;\]]*\]\s*)*)*)(?=;)"
)
_DECLARATOR = re.compile(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)(?:,|$)")


def edit(source: str) -> str:
    """The text as clang takes it: instantiations, vector constructors and shared variables respelled.

    Comments go too: one between a brace and `threadgroup` would hide a definition.
    """
    text = _INSTANTIATION.sub("template decltype", strip_comments(source))
    text = _CONSTRUCTOR.sub(r"msl::make<\1>(", text)
    return _VARIABLE.sub(_shared_variables, text)


def _shared_variables(m: re.Match[str]) -> str:
    before, kind, rest = m.group(1), m.group(2), m.group(3)
    made = [f"MSL_THREADGROUP({kind}, {name}, {dims.strip()})" for name, dims in _DECLARATOR.findall(rest)]
    lost = m.group(0).count("\n") - before.count("\n")
    return before + "; ".join(made) + "\n" * lost


def unit(source: str, signature: Signature) -> str:
    """The translation unit: MLX's prelude, the kernel, and the door through which the runtime calls it."""
    return f"""#include "mlx/backend/metal/kernels/utils.h"
{edit(source)}
#line 1 "<launcher>"
struct msl_thread {{
  uint position_in_grid[3], position_in_threadgroup[3], threadgroup_position[3];
  uint threadgroups[3], grid[3], threadgroup_size[3], full_threadgroup_size[3];
  uint lane, simdgroup, index, simdgroups;
}};
extern "C" void msl_entry(void** buffers, const msl_thread* t) {{ {signature.call}; }}
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;
extern "C" void* msl_image_begin() {{ return &__ehdr_start; }}
extern "C" void* msl_image_end() {{ return &_end; }}
"""


# ---- MLX's own headers


def _header_folder() -> Path:
    return Path(mx.__file__).parent / "include"


def _edit_header(text: str) -> str:
    """What MLX's headers, beyond utils.h, say in ways that clang does not take."""
    text = re.sub(r"\[\[threadgroup\(\d\)\]\]", "", edit(text))
    text = re.sub(r"constant const int64_t strides\[\d\]", "constant const int64_t* strides", text)
    text = re.sub(r"constant (\w+) (\w+)\s*\[\[function_constant\((\d+)\)\]\];", r"constant \1 \2 = 0;", text)
    # a struct copied from one address space to another
    return re.sub(
        r"\*\(\(threadgroup ReadVector\*\)\(&dst\[i \* dst_ld\]\)\) =\s*"
        r"\*\(\(const device ReadVector\*\)\(&src\[i \* src_ld\]\)\);",
        "for (int q_ = 0; q_ < vec_size; q_++) dst[i * dst_ld + q_] = src[i * src_ld + q_];",
        text,
    )


@functools.cache
def _mlx_headers() -> Path:
    """A folder with edited copies of the installed MLX's Metal headers."""
    source = _header_folder() / "mlx" / "backend" / "metal" / "kernels"
    key = _key(_digest_of_folder(source), (HERE / "compile.py").read_text())
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
        copy.write_text(_edit_header(path.read_text()))
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
    checks = [*REFUSED, f"-fsanitize={UNDEFINED}", "-fno-sanitize-trap=all"] if strict else ["-w"]
    text = unit(source, signature)
    front = [*FRONT_END, *checks, "-fsanitize=thread"]
    key = _key(text, front, BACK_END, _digest_of_folder(SHIM), mx.__version__)
    library = cache_folder() / f"{key}.so"
    if not library.exists():
        _build(text, front, library)
    return library


def _build(text: str, front: list[str], library: Path) -> None:
    base = str(library.with_name(f"{library.stem}.{os.getpid()}"))
    include = ["-isystem", str(SHIM), "-isystem", str(_mlx_headers())]
    try:
        Path(f"{base}.cpp").write_text(text)
        _run([_zig(), "clang", *front, *include, f"{base}.cpp", "-o", f"{base}.ll"])
        _rewrite_ir(Path(f"{base}.ll"))
        _run([_zig(), "clang", *BACK_END, f"{base}.ll", "-o", f"{base}.o"])
        _run([_zig(), "ld.lld", "-shared", "--eh-frame-hdr", "-o", f"{base}.so", f"{base}.o"])
        _put(Path(f"{base}.so"), library)
    finally:
        for suffix in ("cpp", "ll", "o"):
            Path(f"{base}.{suffix}").unlink(missing_ok=True)


# A load or store of a kernel's memory: address spaces 1 to 3, an alignment above a byte's.
_ACCESS = re.compile(
    r"^  (?:%\S+ = load (?:volatile )?[^,]+|store (?:volatile )?.+?), ptr addrspace\([123]\) (?P<address>[^,]+), "
    r"align (?P<align>\d+)(?:,[^!]*)?(?P<rest>.*)$",
    re.MULTILINE,
)
# It touches nothing a kernel can see, so that it stands in no optimisation's way.
_CHECK = (
    "declare void @msl_check_alignment(ptr, i64) memory(inaccessiblemem: readwrite) nounwind willreturn\n"
)


def _rewrite_ir(ir: Path) -> None:
    text = _ACCESS.sub(_check_alignment, ir.read_text()) + _CHECK
    text = re.sub(r" addrspace\(\d+\)", "", text)
    ir.write_text(text.replace("addrspacecast", "bitcast"))


def _check_alignment(m: re.Match[str]) -> str:
    """The optimiser may narrow an access, so what the text asks for is checked before it does."""
    if m["align"] == "1":
        return m.group(0)
    place = re.search(r"!dbg !\d+", m["rest"])
    check = f"  call void @msl_check_alignment(ptr {m['address']}, i64 {m['align']})"
    return f"{check}{', ' + place.group(0) if place else ''}\n{m.group(0)}"
