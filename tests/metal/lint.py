"""What only Apple's compiler would refuse: rules on the text, for what clang takes without a word.

Rules are regular expressions over the source without comments, plus a few that look at whole functions: a
net, not a parser. Knows MSL's restrictions; knows nothing of how a kernel is compiled or run here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.metal.signature import split_arguments, strip_comments


@dataclass(frozen=True)
class Finding:
    """`line` counts from 1 in the text that was linted."""

    line: int
    text: str


START = r"(?:^|(?<=[;{}]))\s*"  # of a statement
NAME = r"[A-Za-z_]\w*"
TYPE = rf"(?:(?:const|volatile|unsigned)\s+)*(?:{NAME}::)*{NAME}(?:\s*<[^<>;(){{}}]*>)?(?:\s+const)?"
SPACE = r"\b(?:device|constant|threadgroup|thread|ray_data|object_data)\b"
NOT_A_TYPE = r"(?!return\b|else\b|case\b|using\b|typedef\b|struct\b|enum\b|template\b|namespace\b)"
BARE = "needs an address space: device, constant, threadgroup or thread"

RULES = [
    (r"\bdouble\b", "MSL has no double"),
    (r"\bstd::", "MSL has no std::, use metal::"),
    (r"\b(?:virtual|dynamic_cast|typeid|throw|try|catch|new|delete|goto|thread_local|asm)\b", "not in MSL"),
    (r"\b__builtin_\w+|\b__attribute__\b|\b__int128\b|\b_Float16\b", "a compiler's own, not MSL"),
    (r"\b(?:concept|requires|consteval|constinit|co_\w+)\b|<=>", "later than the C++ of MSL"),
    (r"\bauto\s*&{0,2}\s*\[", "structured bindings are later than the C++ of MSL"),
    (r"\[[\w&=, ]*\]\s*\([^()]*\)\s*(?:mutable\s*)?(?:->\s*\w+\s*)?\{", "no lambdas before Metal 4"),
    (r"\bprintf\s*\(", "MSL has no printf"),
    (rf"{START}static\s+(?![^;(]*\bconstant\b)[^;(){{}}=]*[;=\[]", "a static variable must be constant"),
    (rf"{TYPE}\s*\(\s*\*\s*{NAME}\s*\)\s*\(", "no function pointers"),
    (
        rf"{START}{NOT_A_TYPE}{TYPE}\s*[*&]\s*(?:const\s+)?{NAME}\s*(?:=(?!=)|;)",
        f"a pointer or reference {BARE}",
    ),
    (
        rf"{START}(?:(?:inline|static|METAL_FUNC)\s+)*{NOT_A_TYPE}{TYPE}\s*[*&]\s*{NAME}\s*\(",
        f"a pointer or reference that is returned {BARE}",
    ),
    (r"\[\[\s*buffer\((?:3[1-9]|[4-9]\d|\d{3,})\)\s*\]\]", "Metal passes at most 31 buffers"),
    (rf"\(\s*{TYPE}\s*\*+\s*\)", f"the type of a cast {BARE}"),
    (rf"_cast\s*<\s*{TYPE}\s*[*&]+\s*>", f"the type of a cast {BARE}"),
]
_COMPILED = [(re.compile(pattern, re.MULTILINE), why) for pattern, why in RULES]
_PARAMETER = re.compile(rf"{TYPE}\s*(?:[*&]+\s*(?:const\s+|restrict\s+)*{NAME}|\(\s*&\s*{NAME}\s*\)[^()]*)")
_HEAD = re.compile(
    rf"\b({NAME})\s*\(([^(){{}};]*(?:\([^(){{}};]*\)[^(){{}};]*)*)\)\s*(?:const\s*)?(?:thread\s*)?\{{"
)
_GLOBAL = re.compile(
    rf"{START}{NOT_A_TYPE}(?:(?:static|const|constexpr|inline)\s+)*{TYPE}\s+({NAME})\s*(?:\[[^\]]*\]\s*)*[=;]",
    re.M,
)
_SHARED = re.compile(rf"{START}threadgroup\s+[^;*&()]*;", re.MULTILINE)


def lint(source: str) -> list[Finding]:
    """Everything the rules find, by line."""
    code = strip_comments(source)
    found = [
        Finding(_line(code, m), f"`{' '.join(m.group(0).split())}`: {why}")
        for pattern, why in _COMPILED
        for m in pattern.finditer(code)
        if not re.search(SPACE, m.group(0))
    ]
    found += _globals(code)
    for function in _functions(code):
        found += [*_bare_parameters(function), *_recursion(function), *_shared_in_helper(function)]
    return sorted(found, key=lambda f: f.line)


def _line(code: str, match: re.Match[str]) -> int:
    """Line of a match's first character that is not a space."""
    lead = len(match.group(0)) - len(match.group(0).lstrip())
    return code.count("\n", 0, match.start() + lead) + 1


@dataclass(frozen=True)
class _Function:
    name: str
    line: int
    parameters: str
    body: str


def _functions(code: str) -> Iterator[_Function]:
    """Each function with its body."""
    for m in _HEAD.finditer(code):
        if m.group(1) in ("if", "for", "while", "switch"):
            continue
        body = code[m.end() : _closing_brace(code, m.end())]
        yield _Function(m.group(1), _line(code, m), m.group(2), body)


def _closing_brace(code: str, start: int) -> int:
    depth, end = 1, start
    while depth and end < len(code):
        depth += {"{": 1, "}": -1}.get(code[end], 0)
        end += 1
    return end


def _bare_parameters(function: _Function) -> Iterator[Finding]:
    for part in split_arguments(function.parameters):
        m = _PARAMETER.fullmatch(part.split("[[")[0].strip())
        if m and not re.search(SPACE, part):
            yield Finding(function.line, f"`{part}` in {function.name}: a pointer or reference {BARE}")


def _recursion(function: _Function) -> Iterator[Finding]:
    if re.search(rf"(?<![\w:.]){function.name}\s*(?:<[^;<>]*>)?\s*\(", function.body):
        yield Finding(function.line, f"`{function.name}` calls itself: MSL has no recursion")


def _shared_in_helper(function: _Function) -> Iterator[Finding]:
    if not function.name.startswith("custom_kernel_") and _SHARED.search(function.body):
        text = f"`{function.name}` defines a threadgroup variable: only a kernel's body may"
        yield Finding(function.line, text)


def _outside_braces(code: str) -> str:
    out, depth = [], 0
    for ch in code:
        depth -= ch == "}"
        out.append(ch if depth == 0 or ch == "\n" else " ")
        depth += ch == "{"
    return "".join(out)


def _globals(code: str) -> Iterator[Finding]:
    for m in _GLOBAL.finditer(_outside_braces(code)):
        if not re.search(SPACE, m.group(0)):
            yield Finding(_line(code, m), f"`{m.group(1)}`: a global must be constant (the address space)")
