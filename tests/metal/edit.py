"""Every change between MLX's text and the machine's: in the kernel, in MLX's own headers, in the LLVM IR.

Line numbers are kept. Knows the names that msl/ and runtime/ give things; runs no compiler.
"""

from __future__ import annotations

import re

from tests.metal.signature import Signature, strip_comments

# ---- the kernel's text

_INSTANTIATION = re.compile(r"template\s*(?:\[\[[^;]*?\]\]\s*)+decltype")
_VECTOR = r"(?:metal::)?(?:vec<[^<>;(){}]*>|(?:float|half|bfloat|u?int|u?short|u?char|u?long|bool)[234])"
_HALF_LITERAL = re.compile(r"\b(\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+)[hH]\b", re.IGNORECASE)
_CONSTRUCTOR = re.compile(rf"(?<![\w:.])(?<!operator )({_VECTOR})\(")
_VARIABLE = re.compile(
    r"((?:^|[;{}])\s*)threadgroup\s+"
    r"((?:const\s+)?(?:metal::)?[A-Za-z_]\w*(?:\s*<[^;<>]*>)?(?:::\w+)*)\s+"
    r"([A-Za-z_]\w*\s*(?:\[[^;\]]*\]\s*)*(?:,\s*\w+\s*(?:\[[^;\]]*\]\s*)*)*)(?=;)"
)
# No store of a kernel can change its inputs: Apple's compiler knows that from the address spaces and `const`.
_INPUT = re.compile(r"(\bconst (?:device|constant) \w+[*&])\s*(\w+\s*\[\[buffer)")
_DECLARATOR = re.compile(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)(?:,|$)")


def edit(source: str) -> str:
    """The text as clang takes it: what clang spells otherwise is respelled.

    Comments go too: one between a brace and `threadgroup` would hide a definition.
    """
    text = _INSTANTIATION.sub("template decltype", strip_comments(source))
    text = _HALF_LITERAL.sub(r"\1f16", text)
    text = _CONSTRUCTOR.sub(r"msl::make<\1>(", text)
    text = _INPUT.sub(r"\1 __restrict \2", text)
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


def edit_mlx_header(text: str) -> str:
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


# ---- LLVM IR


class Unwatched(Exception):
    """An access that the instrumentation would pass over."""


# A load or store of a kernel's memory: address spaces 1 to 3, an alignment above a byte's.
_ACCESS = re.compile(
    r"^  (?:%\S+ = load (?:volatile )?[^,]+|store (?:volatile )?.+?), "
    r"ptr addrspace\([123]\) (?P<address>[^,]+), align (?P<align>\d+)(?:,[^!]*)?(?P<rest>.*)$",
    re.MULTILINE,
)
# Clang lets an index be one past the end where only an address is formed, and takes the target of a struct's
# assignment for such a place. Nothing here needs that, so "at most N" becomes "less than N".
_ONE_PAST = re.compile(
    r"icmp ule (i64 \S+, \d+, [^\n]*!nosanitize[^\n]*\n  br i1 \S+, label \S+, label %(?P<fails>\S+),[^\n]*\n"
    r"\n(?P=fails):[^\n]*\n  call void @__ubsan_handle_out_of_bounds)"
)
# It touches nothing a kernel can see, so that it stands in no optimisation's way.
_CHECK = (
    "declare void @msl_check_alignment(ptr captures(none), i64) "
    "memory(inaccessiblemem: readwrite) nounwind willreturn\n"
)


def edit_ir(ir: str) -> str:
    """Alignment checks go before every load and store of a kernel's memory, then the address spaces go.

    Requests to unroll a loop fully go too: they make the compiler ten times slower here and no kernel faster.
    """
    text = _ACCESS.sub(_check_alignment, ir) + _CHECK
    text = _ONE_PAST.sub(r"icmp ult \1", text)
    text = text.replace('"llvm.loop.unroll.full"', '"msl.loop.unroll.full"')
    return re.sub(r" addrspace\(\d+\)", "", text).replace("addrspacecast", "bitcast")


def _check_alignment(m: re.Match[str]) -> str:
    """The optimiser may narrow an access, so what the text asks for is checked before it does."""
    wide = re.search(r"<(\d+) x i64>", m.group(0))
    if wide and int(wide.group(1)) > 2:
        raise Unwatched("a load or store of more than 16 bytes is not watched: use two long2 or ulong2")
    if m["align"] == "1":
        return m.group(0)
    place = re.search(r"!dbg !\d+", m["rest"])
    check = f"  call void @msl_check_alignment(ptr {m['address']}, i64 {m['align']})"
    return f"{check}{', ' + place.group(0) if place else ''}\n{m.group(0)}"
