"""Chat templates: the same text as transformers renders, and no harm from a template that means it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxserve.errors import ModelInvalid, UsageError
from mlxserve.text.template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": ' Hi <b>"you"</b> é '},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "{{ 1 + 1 }} {% raw %}"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "a < b & 'c' é", "parameters": {"type": "object"}},
    }
]
NAMES = [
    "chatml",
    "gemma-it",
    "granite-3.0-instruct",
    "llama-2-chat",
    "llama-3-instruct",
    "llama-3.1-instruct",
    "mistral-instruct",
    "phi-3",
    "qwen2.5-instruct",
    "zephyr",
]


def theirs(source: str, messages: list[dict[str, Any]], **values: Any) -> str:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(source).render(messages=messages, documents=None, **SPECIAL, **values)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(data: Path, name: str, tools: Any, prompt: bool) -> None:
    source = (data / "templates" / f"{name}.jinja").read_text()
    ours = ChatTemplate(source, SPECIAL).render(TALK, tools=tools, add_generation_prompt=prompt)
    assert ours == theirs(source, TALK, tools=tools, add_generation_prompt=prompt)
    assert "{{ 1 + 1 }} {% raw %}" in ours


@pytest.mark.parametrize(
    "source",
    [
        "{{ {'a': '<é>', 'b': [1, none]} | tojson(indent=2) }}|{{ 'é' | tojson(ensure_ascii=true) }}",
        "{{ [1, 2] | tojson(separators=(',', ':')) }}",
        "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{{ strftime_now('%Y-%m') }}",
        "{{ 'a' ~ 1 ~ none }}{{ '%03d' | format(7) }}{{ 'ab' * 3 }}{{ 'x' | center(5) }}",
        "{{ ['a', 'b'] | join('-') }}{{ ' '.join(['a', 'b']) }}{{ '%s' % 3 }}",
        "{{ messages[0].content.split(' ')[-1] }}{{ 'bcb'.replace('b', 'x') }}{{ 'bcb' | replace('b', '') }}",
        "{%- macro show(x) -%}[{{ x }}]{%- endmacro %}{{ show(messages[0]['role']) }}",
        "{{ tools is none }}{{ documents is none }}{{ nothing is defined }}",
        "{{ '{} {}'.format(1, 'a') }}{{ 'a\nb' | indent(2) }}{{ messages | length }}",
    ],
)
def test_what_hub_templates_use_is_there(source: str) -> None:
    ours = ChatTemplate(source, SPECIAL).render(TALK)
    assert ours == theirs(source, TALK, tools=None, add_generation_prompt=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='a' * 9) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='a' * 9) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% for i in range(1000) %}{{ 'a' * 1000000 }}{% endfor %}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ '%999999999d' | format(3) }}",
        "{{ '%999999999d' % 3 }}",
        "{{ '{:>999999999}'.format(3) }}",
        "{{ ('a' * 9999999).replace('', 'b' * 9999999) }}",
        "{{ ('a' * 9999999) | replace('a', 'b' * 9999999) }}",
        "{{ (['a' * 9999999] * 9999) | join }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{%- macro f() -%}{{ f() }}{%- endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_runs_away_is_stopped(source: str) -> None:
    with pytest.raises(ModelInvalid, match="was stopped"):
        ChatTemplate(source).render(TALK)


def test_the_allowance_of_ranges_is_for_each_render() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}")
    for _ in range(20):
        assert template.render(TALK) == ""


def test_errors_carry_the_templates_own_words(data: Path) -> None:
    template = ChatTemplate((data / "templates" / "llama-2-chat.jinja").read_text(), SPECIAL)
    with pytest.raises(UsageError, match="must alternate user/assistant") as caught:
        template.render([TALK[1], TALK[1]])
    assert caught.value.param == "messages"
    with pytest.raises(UsageError, match="cannot render these messages"):
        ChatTemplate("{{ messages[0].content + 1 }}").render(TALK)


def test_a_broken_template_is_named_with_its_line() -> None:
    with pytest.raises(ModelInvalid, match="syntax error in line 2"):
        ChatTemplate("a\n{% if %}")


@pytest.mark.parametrize("name", ["messages", "tools", "raise_exception", "not a name"])
def test_template_kwargs_cannot_replace_what_a_render_is_made_of(name: str) -> None:
    with pytest.raises(UsageError, match="chat_template_kwargs"):
        ChatTemplate("").render(TALK, variables={name: 1})


def test_case_16_template_kwargs() -> None:
    source = "{% if enable_thinking is defined and not enable_thinking %}quiet{% else %}think{% endif %}"
    thinking = ChatTemplate(source)
    assert "enable_thinking" in thinking.variables
    assert thinking.render(TALK, variables={"enable_thinking": False}) == "quiet"
    assert thinking.render(TALK, variables={"enable_thinking": True}) == "think"
    assert thinking.render(TALK) == "think"
    plain = ChatTemplate("{{ messages[0].content }}")
    assert plain.render(TALK, variables={"enable_thinking": False}) == "Be kind."
