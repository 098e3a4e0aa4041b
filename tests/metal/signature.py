"""Reads the signature that MLX wrote for a kernel, and writes the call of it that the runtime makes.

Knows MSL's thread attributes; knows nothing of arrays.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# MSL attribute -> field of `Thread` in runtime/state.h.
TRIPLES = {
    "thread_position_in_grid": "position_in_grid",
    "thread_position_in_threadgroup": "position_in_threadgroup",
    "threadgroup_position_in_grid": "threadgroup_position",
    "threadgroups_per_grid": "threadgroups",
    "threads_per_grid": "grid",
    "threads_per_threadgroup": "threadgroup_size",
    "dispatch_threads_per_threadgroup": "full_threadgroup_size",
}
SCALARS = {
    "thread_index_in_simdgroup": "t->lane",
    "simdgroup_index_in_threadgroup": "t->simdgroup",
    "thread_index_in_threadgroup": "t->index",
    "simdgroups_per_threadgroup": "t->simdgroups",
    "dispatch_simdgroups_per_threadgroup": "t->simdgroups",
    "quadgroup_index_in_threadgroup": "t->index / 4",
    "thread_index_in_quadgroup": "t->index % 4",
    "threads_per_simdgroup": "32",
    "thread_execution_width": "32",
}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class Signature:
    """A kernel's buffers in order, and the C++ expression that calls it for one thread."""

    buffers: tuple[str, ...]
    call: str


def strip_comments(text: str) -> str:
    """`text` with comments blanked, line numbers kept."""
    return _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group(0)), text)


def split_arguments(text: str) -> list[str]:
    """Split at commas that stand outside all brackets."""
    parts, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        depth += (ch in "(<[") - (ch in ")>]")
        if ch == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def read_signature(source: str, name: str) -> Signature:
    """Find kernel `name` in MLX's generated source."""
    code = strip_comments(source)
    head = re.search(rf"\[\[kernel\]\]\s+void\s+{re.escape(name)}\s*\(", code)
    assert head, f"no kernel {name} in the generated source"
    end = _closing(code, head.end())
    parameters = split_arguments(code[head.end() : end])
    template = _template_arguments(code, name)
    values = [_value(parameter, i, template) for i, parameter in enumerate(parameters)]
    buffers = tuple(_buffer_name(p) for p in parameters if "buffer(" in p)
    instance = f"<{', '.join(template.values())}>" if template else ""
    return Signature(buffers, f"{name}{instance}({', '.join(values)})")


def _closing(code: str, start: int) -> int:
    """Where the bracket that opened just before `start` closes."""
    depth, i = 1, start
    while depth:
        depth += {"(": 1, ")": -1}.get(code[i], 0)
        i += 1
    return i - 1


def _template_arguments(code: str, name: str) -> dict[str, str]:
    """Template parameter -> argument, from the explicit instantiation at the end."""
    found = re.search(rf"decltype\({re.escape(name)}<(.*?)>\)", code)
    if not found:
        return {}
    head = re.search(rf"template\s*<([^<>]*)>\s*\[\[kernel\]\]\s+void\s+{re.escape(name)}\b", code)
    assert head, f"kernel {name} is instantiated but is no template"
    names = [parameter.split()[-1] for parameter in split_arguments(head.group(1))]
    return dict(zip(names, split_arguments(found.group(1)), strict=True))


def _buffer_name(parameter: str) -> str:
    found = re.search(r"(\w+)\s*\[\[", parameter)
    assert found, f"no name in the parameter {parameter!r}"
    return found.group(1)


def _value(parameter: str, index: int, template: dict[str, str]) -> str:
    """The argument to pass for one parameter: MLX puts the buffers first, so a buffer's index is its own."""
    declaration, attribute = parameter.split("[[", 1)
    if "buffer(" in attribute:
        kind = re.sub(r"[&*]?\s*\w+\s*$", "", declaration).strip()
        for name, argument in template.items():
            kind = re.sub(rf"\b{name}\b", argument, kind)
        return f"{'*' if '&' in declaration else ''}({kind}*)buffers[{index}]"
    word, kind = attribute.split("]]")[0].strip(), declaration.split()[0]
    if word in SCALARS:
        return f"({kind})({SCALARS[word]})"
    assert word in TRIPLES, f"the attribute {word} is not known here"
    size = int(kind[-1]) if kind[-1].isdigit() else 1
    parts = ", ".join(f"({kind.rstrip('23')})t->{TRIPLES[word]}[{k}]" for k in range(size))
    return f"{kind}{{{parts}}}" if size > 1 else parts
