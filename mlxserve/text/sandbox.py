"""The Jinja environment that chat templates run in: immutable, sandboxed, bounded.

Knows: what templates on the Hub use beyond plain Jinja (Hugging Face documents it under "chat templating":
raise_exception, strftime_now, a tojson that does not escape HTML, loop controls, generation blocks), and how
much text one may make. Knows nothing of messages or tokens. A template is a downloaded program: it gets plain
data, no attributes of Python, and no way to fill the memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from datetime import datetime
from functools import cache, wraps
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxserve.text.user_text import (
    UserText,
    from_user,
    holds_user_text,
    kept,
    plain,
    to_json,
    without_stand_ins,
)

MAX_CHARACTERS = 32 * 1024 * 1024  # of a whole render and of any string on the way to it
MAX_RANGE_ITEMS = 1_000_000  # of all ranges of one render together

_range_items: ContextVar[int] = ContextVar("range_items", default=0)


class TemplateRefusal(TemplateError):
    """The template itself called raise_exception; `message` holds its words."""


class TemplateTooLarge(SecurityError):
    """A render passed MAX_CHARACTERS or MAX_RANGE_ITEMS."""


@cache
def environment() -> ImmutableSandboxedEnvironment:
    """The one environment: block tags take their line break with them, as Hugging Face renders templates."""
    made = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    made.filters["tojson"] = _tojson
    for name, check in _FILTER_CHECKS.items():
        made.filters[name] = _checked_filter(made.filters[name], check)
    for name, filter_ in made.filters.items():
        made.filters[name] = _on_plain(filter_) if name in _READING_FILTERS else _keeping(filter_)
    made.tests["in"] = lambda value, container: value in made.container(container)
    made.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, range=_counted_range)
    return made


def start_render() -> None:
    """Give the coming render a fresh allowance of range items."""
    _range_items.set(0)


def _raise_exception(message: Any) -> None:
    raise TemplateRefusal(plain(str(message)))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return to_json(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _counted_range(*bounds: int) -> range:
    wanted = range(*bounds)
    used = _range_items.get() + len(wanted)
    if used > MAX_RANGE_ITEMS:
        raise TemplateTooLarge(f"ranges of more than {MAX_RANGE_ITEMS} items")
    _range_items.set(used)
    return wanted


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote; rendering just prints it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _BoundedCode(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b` becomes one call of `join_bounded`."""
        self.write("environment.join_bounded((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        """`a in b`: a string `b` is asked as the environment's `container`."""
        if node.op not in ("in", "notin"):
            super().visit_Operand(node, frame)
            return
        self.write(f" {'not ' if node.op == 'notin' else ''}in environment.container(")
        self.visit(node.expr, frame)
        self.write(")")


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with every way to build a long string measured before or after it is built.

    Strings that Python builds of people's text become UserText again, so that templates can go on with them.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _BoundedCode

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What macros and blocks that are assigned join their pieces with."""
        return kept("".join(parts))

    @staticmethod
    def container(value: Any) -> Any:
        """`value` for `in`: a template's own string finds people's text in itself."""
        return UserText(value) if type(value) is str else value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`, refusing what would be long."""
        if operator == "*":
            _check_length(_length(left) * _count(right) + _length(right) * _count(left))
        elif operator == "**":
            _check_length(left.bit_length() * _count(right) if isinstance(left, int) else 0)
        elif operator == "%":
            _check_format(left)
        return self.measured(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function or method of the template's; a string's own methods are measured beforehand."""
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format in a function of its own
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_method(method.__name__, owner, args)
            if method is __obj and type(owner) is str and any(isinstance(arg, UserText) for arg in args):
                __obj = getattr(UserText(owner), method.__name__)
        return __self.measured(super().call(__context, __obj, *args, **kwargs))

    def join_bounded(self, parts: tuple[Any, ...]) -> str:
        """The `~` operator."""
        return self.measured("".join(map(str, parts)))

    def measured(self, value: Any) -> Any:
        """`value`, unless it is a string or list longer than MAX_CHARACTERS."""
        _check_length(_length(value))
        return kept(value)


def _check_method(name: str, text: str, args: tuple[Any, ...]) -> None:
    if name in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        _check_width(text, *args)
    elif name == "replace" and len(args) > 1:
        _check_replace(text, *args)
    elif name == "join" and args:
        _check_join(args[0], text)
    elif name == "format":
        _check_format(text)


def _check_width(text: Any, *numbers: Any) -> None:
    _check_length(_length(text) + sum(map(_count, numbers)))


def _check_replace(text: Any, old: Any, new: Any, *_: Any) -> None:
    grows = _length(new) > _length(old)
    _check_length((_length(text) + 1) * _length(new) if grows else 0)


def _check_join(parts: Any, glue: Any = "", *_: Any) -> None:
    if isinstance(parts, list | tuple):
        _check_length(sum(_length(part) + _length(glue) for part in parts))


def _check_indent(text: Any, width: Any = 4, *_: Any) -> None:
    _check_length(_length(text) + str(text).count("\n") * (_count(width) + _length(width)))


def _check_format(pattern: Any, *_: Any) -> None:
    """Refuse widths of more than four digits, and widths taken from an argument."""
    if isinstance(pattern, str) and _WIDE.search(pattern):
        raise TemplateTooLarge("a format with an unbounded width")


_WIDE = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|\{[^}]*\{")
_FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "center": _check_width,
    "format": _check_format,
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replace,
}


def _checked_filter(filter_: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """`filter_` behind `check`, which sees no context or environment that Jinja puts in front."""
    skipped = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @wraps(filter_)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args[skipped:], *kwargs.values())
        return filter_(*args, **kwargs)

    return checked


# Filters that look into text by other ways than str's methods, or make numbers of it.
_READING_FILTERS = frozenset(
    {
        *("e", "escape", "filesizeformat", "float", "forceescape", "int", "pprint", "striptags", "title"),
        *("urlencode", "urlize", "wordcount", "wordwrap", "xmlattr"),
    }
)


def _on_plain(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """`filter_` on plain text; where it was given people's text, all text that it makes is theirs."""
    skipped = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @wraps(filter_)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made = filter_(*args[:skipped], *without_stand_ins(args[skipped:]), **without_stand_ins(kwargs))
        given = [*args[skipped:], *kwargs.values()]
        return from_user(made) if any(holds_user_text(str(value)) for value in given) else made

    return wrapped


def _keeping(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """`filter_`, whose strings stay people's text where they were."""

    @wraps(filter_)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return kept(filter_(*args, **kwargs))

    return wrapped


def _length(value: Any) -> int:
    """Characters of a string; an item of a list counts as 32, about what it takes in memory."""
    if isinstance(value, list | tuple):
        return 32 * len(value)
    return len(value) if isinstance(value, str) else 0


def _count(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _check_length(characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise TemplateTooLarge(f"a text of more than {MAX_CHARACTERS} characters")
