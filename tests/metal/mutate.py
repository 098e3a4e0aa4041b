"""Mutants of a kernel: its text with one small mistake each, made by rule.

A test that runs a kernel is worth what it catches. Each rule imitates a mistake that people make in
kernels: a bound off by one, a missing or weak barrier, a wrong index, cast, operator or reduction, a
forgotten statement. `judge` runs a kernel's own test on a mutant and says what caught it, if anything did.
Knows the text alone; what a kernel computes, its test knows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.metal import harness
from tests.metal.signature import strip_comments


@dataclass(frozen=True)
class Mutant:
    """`text` is the whole file with one change, made by `rule` in `line` (from 1)."""

    rule: str
    line: int
    before: str  # the line as it was, without surrounding space
    after: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.rule}:{self.line}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class Rule:
    """Replaces the group called `it` of each match, or the whole match where there is none."""

    name: str
    pattern: str
    replacement: str | Callable[[str], str]


def _next_number(text: str) -> str:
    return str(int(text, 0) + 1)


def _half_mask(text: str) -> str:
    """15 -> 7, 0xf0 -> 0x78: one bit fewer."""
    return f"{int(text.rstrip('uUlL'), 0) >> 1}{'u' if text[-1] in 'uU' else ''}"


NUMBER = r"(?:0x[0-9a-fA-F]+|\d+)[uU]?(?![\w.])"
RULES = [
    # bounds
    Rule("bound", r"(?<= )<(?= )", "<="),
    Rule("bound", r"(?<= )<=(?= )", "<"),
    Rule("bound", r"(?<= )>(?= )", ">="),
    Rule("bound", r"(?<= )>=(?= )", ">"),
    Rule("loop start", rf"\bfor \(\w+ \w+ = (?P<it>{NUMBER});", _next_number),
    Rule("loop step", rf"\bfor \([^;]*;[^;]*; \w+ \+= (?P<it>{NUMBER})\)", _next_number),
    Rule("clamp", r"\bmin(?=\()", "max"),
    Rule("clamp", r"\bmax(?=\()", "min"),
    # barriers
    Rule("no barrier", r"\bthreadgroup_barrier\([^)]*\);", ";"),
    Rule("weak barrier", r"\bthreadgroup_barrier\(mem_flags::(?P<it>mem_threadgroup)\)", "mem_none"),
    Rule("barrier of a simdgroup", r"\b(?P<it>threadgroup)_barrier\(", "simdgroup"),
    Rule("no simdgroup barrier", r"\bsimdgroup_barrier\([^)]*\);", ";"),
    # indices
    Rule(
        "index",
        r"(?<=\w)\[(?P<it>[^\[\]]*[a-z]\w*[^\[\]]*)\](?=\s*(?:[-+*/%&|<>=;,)\].]|\[))",
        lambda s: f"{s} + 1",
    ),
    Rule("axis", r"\.(?P<it>x)\b", "y"),
    Rule("axis", r"\.(?P<it>y)\b", "x"),
    Rule("lane", r"\bthread_index_in_simdgroup\b", "simdgroup_index_in_threadgroup"),
    Rule("lane", r"\bsimdgroup_index_in_threadgroup\b", "thread_index_in_simdgroup"),
    Rule(
        "small array",
        r"^\s*threadgroup\s+[\w:]+(?:<[^<>]*>)?\s+\w+\[(?P<it>[^\]]*)\]",
        lambda s: f"({s}) / 2",
    ),
    # casts
    Rule("cast", r"(?<![\w:.])(?P<it>float|int)\((?!simdgroup_index)(?=\w)", "bool"),
    Rule("cast", r"(?<![\w:.])(?P<it>T)\((?=\w)(?![\d.]+f?\))", "int"),
    Rule("cast", r"\(\(?(?:const )?device (?P<it>ushort|uchar|uint)\*\)", "float"),
    # operators
    Rule("operator", r"(?<=[\w)\]] )\*(?= [\w(])", "+"),
    Rule("operator", r"(?<=[\w)\]] )/(?= [\w(])", "%"),
    Rule("operator", r"(?<=[\w)\]] )%(?= [\w(])", "/"),
    Rule("operator", r"(?<=[\w)\]] )\+(?= [\w(])", "-"),
    Rule("operator", r"(?<=[\w)\]] )-(?= [\w(])", "+"),
    Rule("operator", r"(?<= )\+=(?= )", "-="),
    Rule("mask", rf"& (?P<it>{NUMBER})", _half_mask),
    Rule("shift", rf">> (?P<it>{NUMBER})", _next_number),
    Rule("shift", rf"<< (?P<it>{NUMBER})", _next_number),
    # conditions
    Rule("condition", r"&&", "||"),
    Rule("condition", r"\|\|", "&&"),
    Rule("condition", r"(?<= )==(?= )", "!="),
    Rule("condition", r"(?<= )!=(?= )", "=="),
    # order and reduction
    Rule("reduction", r"\bsimd_sum(?=\()", "simd_max"),
    Rule("reduction", r"\bsimd_max(?=\()", "simd_min"),
    Rule("reduction", r"\bsimd_sum(?=\()", ""),
    Rule("reduction", r"\bsimd_shuffle_xor\(\w+, (?P<it>\w+)\)", "0"),
    Rule("transposed", r"\bsimdgroup_load\([^;]*(?P<it>true)\);", "false"),
    # statements
    Rule("no assignment", r"^[ ]*(?P<it>[a-z]\w*(?:\[[^;=]*\]|\.\w+)* [-+*/]?= [^;]*;)", ";"),
    Rule("no exit", r"\b(?:return|break|continue);", ";"),
    Rule("start value", r"= (?P<it>0\.0f|-INFINITY)(?=[;,}])", "1.0f"),
]
OF_ARRAYS = ("small array", "start value")
# Array declarations, whose sizes have a rule of their own.
_ARRAY = re.compile(r"^\s*(?:threadgroup\s+)?[\w:]+(?:<[^<>]*>)?\s+\w+\[")
# Lines that state facts to the compiler, or hold no code of their own.
_SKIPPED = re.compile(r"^\s*(?:#|typedef\b|static_assert\b|template\b|UNROLL\b|_Pragma\b)")


def mutants(text: str) -> list[Mutant]:
    """Every mutant that the rules make of a kernel's text, each different, in the order of the lines."""
    code = strip_comments(text)
    found = {mutant.text: mutant for rule in RULES for mutant in _apply(rule, text, code)}
    return sorted(found.values(), key=lambda mutant: mutant.line)


def _apply(rule: Rule, text: str, code: str) -> Iterator[Mutant]:
    for m in re.finditer(rule.pattern, code, re.MULTILINE):
        start, end = m.span("it" if "it" in m.groupdict() else 0)
        line = _line_around(code, start)
        if _SKIPPED.match(line) or (_ARRAY.match(line) and rule.name not in OF_ARRAYS):
            continue
        old = text[start:end]
        new = rule.replacement if isinstance(rule.replacement, str) else rule.replacement(old)
        changed = text[:start] + new + text[end:]
        yield Mutant(
            rule=rule.name,
            line=text.count("\n", 0, start) + 1,
            before=_line_around(text, start).strip(),
            after=_line_around(changed, start).strip(),
            text=changed,
        )


def _line_around(text: str, at: int) -> str:
    start = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    return text[start : end if end >= 0 else len(text)]


def sample(every: list[Mutant], count: int) -> list[Mutant]:
    """`count` of the mutants, the rules in turn, chosen by their text: the same ones in every run."""
    rest = sorted(every, key=lambda mutant: hashlib.sha256(mutant.name.encode()).digest())
    chosen: list[Mutant] = []
    while rest and len(chosen) < count:
        for rule in sorted({mutant.rule for mutant in rest}):
            first = next(mutant for mutant in rest if mutant.rule == rule)
            rest.remove(first)
            chosen.append(first)
    return chosen[:count]


Verdict = Literal["refused", "check", "result", "survived"]


def judge(path: Path, mutant: Mutant, test: Callable[[], None]) -> Verdict:
    """Run `test` with the file at `path` replaced by a mutant, and say what caught it.

    refused: the compiler or a lint rule; check: a check of the runtime; result: a comparison in `test`.
    Raises AssertionError if no kernel that `test` ran holds the file.
    """
    with harness.replaced(path.read_text(), mutant.text) as uses:
        try:
            test()
        except harness.CompileError:
            return "refused"
        except harness.KernelFailure:
            return "check"
        except AssertionError:
            return "result"
    assert uses, f"no kernel of the test holds {path.name}"
    return "survived"
