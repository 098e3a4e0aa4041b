"""UserText answers as str does, and each character remembers who wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.text.template import ChatTemplate
from mlxserve.text.user_text import UserText, from_user, plain, to_json, user_runs

LETTERS = 'aAbB <|\t\n\\"ßé東1%𝒳'
PIECES = st.lists(st.tuples(st.text(LETTERS, max_size=6), st.booleans()), max_size=4)
SMALL = st.text(LETTERS, max_size=2)


def mixed(pieces: list[tuple[str, bool]]) -> UserText:
    """One text of a person's pieces (True) and a template's."""
    return UserText("".join(from_user(text) if theirs else text for text, theirs in pieces))


def originals(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    return type(value)(map(originals, value)) if isinstance(value, list | tuple) else value


def call(text: str, name: str, *args: Any) -> Any:
    try:
        return getattr(text, name)(*args)
    except (ValueError, IndexError) as error:
        return type(error).__name__


CUTS = [
    *((name, n) for name in ("strip", "lstrip", "rstrip") for n in (0, 1)),
    *((name, n) for name in ("split", "rsplit") for n in (0, 1)),
    *((name, 1) for name in ("partition", "rpartition", "removeprefix", "removesuffix")),
    ("splitlines", 0),
]
ANSWERS = ["startswith", "endswith", "find", "rfind", "index", "count", "__contains__", "__lt__", "__eq__"]
CHANGES = ["upper", "lower", "title", "capitalize", "swapcase", "casefold", "expandtabs"]


@given(PIECES, SMALL, SMALL, st.integers(-1, 3), st.booleans())
def test_methods_answer_as_those_of_str(
    pieces: list[tuple[str, bool]], one: str, two: str, count: int, theirs: bool
) -> None:
    text = mixed(pieces)
    first = from_user(one) if theirs else one
    for name, args in CUTS:
        assert originals(call(text, name, *[first][:args])) == call(plain(text), name, *[one][:args]), name
    for name in ("split", "rsplit"):
        assert originals(call(text, name, None, count)) == call(plain(text), name, None, count)
        assert originals(call(text, name, first, count)) == call(plain(text), name, one, count)
    assert plain(text.replace(first, two, count)) == plain(text).replace(one, two, count)
    assert originals(text.splitlines(True)) == plain(text).splitlines(True)
    for name in ANSWERS:
        assert call(text, name, first) == call(plain(text), name, one), name
    for name in CHANGES:
        assert plain(call(text, name)) == call(plain(text), name), name
    assert hash(text) == hash(plain(text)) and text == plain(text) and plain(repr(text)) == repr(plain(text))
    assert plain(text[::-2]) == plain(text)[::-2] and [*map(plain, text)] == [*plain(text)]


@given(PIECES, SMALL, st.integers(-1, 3))
def test_who_wrote_a_character_stays(pieces: list[tuple[str, bool]], one: str, count: int) -> None:
    """With letters of two kinds, in one text the people's, in the other the template's."""
    swapped = [(text if theirs else text.translate(OTHERS), theirs) for text, theirs in pieces]
    text = mixed(swapped)
    results: list[str] = [*text.split(one or None, count), *text.rsplit(), *text.splitlines(), *text]
    results += [text.strip(), text.lstrip(one), text.rstrip(one), text[1:], *text.partition(one or "a")]
    results += [text.replace(one, "", count), text.replace("", one.translate(OTHERS), count)]
    results += [text.removeprefix(one), text.removesuffix(one), text.expandtabs() if "\t" not in text else ""]
    for result in results:
        whole = plain(result)
        theirs = {i for start, end in user_runs(result) for i in range(start, end)}
        assert theirs == {i for i, char in enumerate(whole) if char in LETTERS}


OTHERS = {ord(char): 0x2460 + i for i, char in enumerate(LETTERS)}  # encircled numbers and letters

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(LETTERS + "\x00\x7f\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(LETTERS, max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON, st.booleans(), st.booleans(), st.sampled_from([None, 2]))
def test_json_is_that_of_the_plain_value(value: Any, ascii_: bool, sort: bool, indent: int | None) -> None:
    ours = to_json(from_user(value), ensure_ascii=ascii_, sort_keys=sort, indent=indent)
    assert plain(ours) == json.dumps(value, ensure_ascii=ascii_, sort_keys=sort, indent=indent)
    theirs = "".join(ours[start:end] for start, end in user_runs(ours))
    assert all(plain(theirs).count(char) == plain(ours).count(char) for char in "AbB")


SOURCES = [
    "{{ x | trim }}|{{ x | upper }}|{{ x | lower }}|{{ x | title }}|{{ x | capitalize }}|{{ x | length }}",
    "{{ x | replace('a', 'b') }}|{{ x | truncate(3) }}|{{ x | wordwrap(3) }}|{{ x | indent(2, true) }}",
    "{{ x | center(30) }}|{{ x.ljust(9) }}|{{ '%-9s' % x }}|{{ '{:>9}'.format(x) }}|{{ '%s' | format(x) }}",
    "{{ x | e }}|{{ x | urlencode }}|{{ x | striptags }}|{{ x | wordcount }}|{{ x | int }}|{{ x | float }}",
    "{{ x | list }}|{{ x | reverse }}|{{ x | first }}|{{ x | last }}|{{ x | sort | join('-') }}|{{ [x] }}",
    "{{ x in 'ab<|' }}|{{ 'a' in x }}|{{ x not in ['a'] }}|{{ x is in 'aAb' }}|{{ 'aAb'.startswith(x) }}",
    "{{ x == 'a' }}|{{ 'a' == x }}|{{ x < 'b' }}|{{ {'a': 1}[x] }}|{{ {x: 2}['a'] }}|{{ x is string }}",
    "{{ 'aXb'.replace('X', x) }}|{{ 'a b'.split(x or '?') }}|{{ ', '.join([x, 'c']) }}|{{ x * 2 + x ~ 1 }}",
    "{% set y %}<{{ x }}>{% endset %}{{ y.strip('<>') }}{% macro m(z) %}{{ z }}{% endmacro %}{{ m(x)[1:] }}",
    "{{ x.split('<')[-1] }}|{{ (x ~ ' b').split() }}|{{ x | tojson }}|{{ [x, {x: x}] | tojson(indent=1) }}",
    "{{ x | tojson(ensure_ascii=true) }}|{{ x | string }}|{{ x | safe }}|{{ x | pprint }}|{{ x | unique | list }}",
    "{% for c in x %}{{ c }}{{ loop.changed(c) }}{% endfor %}{{ x | batch(2) | list }}{{ x | map('upper') | join }}",
    "{{ x | default('d', true) }}|{{ x is lower }}|{{ x | select('equalto', 'a') | list }}|{{ x | max }}",
]


@pytest.mark.parametrize("source", SOURCES)
@given(text=st.text(LETTERS, min_size=1, max_size=12))
def test_templates_print_as_with_plain_text(source: str, text: str) -> None:
    template = ChatTemplate(source)
    ours = template.render([], variables={"x": from_user(text)})
    assert plain(ours) == template.render([], variables={"x": text})


@pytest.mark.parametrize("char", ["\U00040000", "\U000afffd", "\U000d1234"])
def test_code_points_of_planes_without_characters_are_replaced(char: str) -> None:
    assert plain(from_user(f"a{char}b")) == "a\ufffdb"


@pytest.mark.parametrize("char", ["\0", "z", "\ud800", "\uffff", "\U0003ffff", "\U000e0000", "\U0010ffff"])
def test_every_other_character_comes_back(char: str) -> None:
    theirs = from_user(char)
    assert plain(theirs) == char and user_runs(theirs) == [(0, 1)] and str.__str__(theirs) != char
