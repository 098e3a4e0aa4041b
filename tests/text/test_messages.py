"""Messages as clients send them against what templates print (cases 7 to 11)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxserve.errors import Unsupported, UsageError
from mlxserve.text.abilities import probe
from mlxserve.text.messages import suit
from mlxserve.text.template import ChatTemplate
from mlxserve.text.tool_turns import GENERIC_TOOLS
from tests.text.conftest import MakeTokenizer

CHATML = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
# One template iterates over the arguments' pairs, one concatenates them as a string, one takes either.
ITERATING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}"
    "</call>{% endfor %}{% endfor %}{{ tools | tojson if tools }}"
)
CONCATENATING = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + ' ' + c.function.arguments + '</call>' }}{% endfor %}{% endfor %}"
    "{{ tools | tojson if tools }}"
)
DUMPING = CONCATENATING.replace("c.function.arguments", "(c.function.arguments | tojson)")
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must come first.') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}{% endfor %}"
    "{{ tools | tojson if tools }}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def call(arguments: Any, name: str = "add", call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def render(source: str, messages: Any, tools: Any = None) -> str:
    template = ChatTemplate(source)
    suited = suit(messages, tools, probe(template), source)
    return template.render(
        suited.messages, tools=suited.tools, add_generation_prompt=False, variables=suited.variables
    )


def user(text: Any = "hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


TOOL_TALK = [
    user("2 and 3?"),
    {"role": "assistant", "content": None, "tool_calls": [call('{"a": 2, "b": 3}')]},
    {"role": "tool", "tool_call_id": "call_1", "content": "5"},
]


def test_case_7_empty_tools_are_no_tools(make: MakeTokenizer, data: Path) -> None:
    source = (data / "templates" / "qwen2.5-instruct.jinja").read_text()
    tokenizer = make(source)
    assert tokenizer.render_chat([user()], tools=[]) == tokenizer.render_chat([user()])
    assert tokenizer.render_chat([user()], tools=[ADD]) != tokenizer.render_chat([user()])


@pytest.mark.parametrize("source", [ITERATING, CONCATENATING, DUMPING, STRICT])
def test_case_8_null_content_beside_a_call(source: str) -> None:
    rendered = render(source, TOOL_TALK, [ADD])
    assert rendered.startswith("[user]2 and 3?[assistant]<call>")
    assert "</call>[tool]5" in rendered
    assert "None" not in rendered


@pytest.mark.parametrize("arguments", ['{"a": 2, "b": "x"}', {"a": 2, "b": "x"}, ' { "a": 2,\n"b": "x"}'])
def test_case_9_arguments_as_string_or_object(arguments: Any) -> None:
    talk = [user(), {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}]
    assert "<call>add a=2 b=x</call>" in render(ITERATING, talk)
    for source in (CONCATENATING, DUMPING):
        rendered = render(source, talk)
        text = rendered.split("<call>add ")[1].split("</call>")[0]
        assert json.loads(text) == {"a": 2, "b": "x"}


@pytest.mark.parametrize("arguments", ['{"path": "C:\\d"', "[1, 2]", "not json", ""])
@pytest.mark.parametrize("source", [ITERATING, CONCATENATING, DUMPING, STRICT])
def test_case_9_arguments_that_are_no_object_render(arguments: str, source: str) -> None:
    rendered = render(source, [user(), {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}])
    assert "{{" not in rendered and "<call>" in rendered


def test_case_9_on_the_families_templates(data: Path) -> None:
    for name, before in (("qwen2.5-instruct", '"arguments": '), ("llama-3.1-instruct", '"parameters": ')):
        source = (data / "templates" / f"{name}.jinja").read_text()
        rendered = render(source, TOOL_TALK)
        assert f'"name": "add", {before}{{"a": 2, "b": 3}}}}' in rendered


def test_case_10_parts_are_joined_in_order() -> None:
    two = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert render(CHATML, [user(two)]) == "[user]one\ntwo"
    assert render(CHATML, [{"role": "system", "content": two}, user("x")]) == "[system]one\ntwo[user]x"
    assert render(STRICT, [*TOOL_TALK[:2], {**TOOL_TALK[2], "content": two}]).endswith("[tool]one\ntwo")
    assert render(CHATML, [user([])]) == "[user]"


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image", "input_audio", "file"])
def test_case_10_other_parts_are_refused_by_name(kind: str) -> None:
    messages = [user("a"), user([{"type": "text", "text": "b"}, {"type": kind, kind: {"url": "x"}}])]
    with pytest.raises(Unsupported, match=f"'{kind}'.*text only") as caught:
        render(CHATML, messages)
    assert caught.value.param == "messages[1].content[1]"


def test_case_10_templates_that_want_parts_get_them() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}"
        "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    assert render(source, [{"role": "system", "content": "s"}, user("hi")]) == "[system]s[user]hi"


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (["developer", "user"], "[system]0[user]1"),
        (["system", "user", "developer", "user"], "[system]0\n\n2[user]1[user]3"),
        (["user", "system"], "[system]1[user]0"),
    ],
)
def test_case_11_system_turns_are_folded(roles: list[str], expected: str) -> None:
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    assert render(STRICT, messages) == expected


def test_case_11_tool_pairs_stay_together() -> None:
    messages = [*TOOL_TALK[:2], {"role": "developer", "content": "d"}, TOOL_TALK[2]]
    assert render(STRICT, messages).startswith("[system]d[user]2 and 3?[assistant]<call>")
    assert "</call>[tool]5" in render(STRICT, messages)


def test_case_11_a_template_without_system_and_with_alternation() -> None:
    roles = ["system", "user", "developer", "user"]
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    assert render(NO_SYSTEM, messages) == "[user]0\n\n2\n\n1\n\n3"
    with pytest.raises(UsageError, match="roles must alternate"):
        render(NO_SYSTEM, [user(), user()])


def test_case_11_on_every_familys_template(data: Path) -> None:
    for path in sorted((data / "templates").glob("*.jinja")):
        source = path.read_text()
        for roles in (["developer", "user"], ["system", "user", "developer", "user"]):
            rendered = render(source, [{"role": r, "content": f"text-{i}"} for i, r in enumerate(roles)])
            assert [f"text-{i}" in rendered for i in range(len(roles))] == [True] * len(roles), path.name


def test_tools_without_a_word_for_them_are_written_as_text(data: Path) -> None:
    for path in sorted((data / "templates").glob("*.jinja")):
        rendered = render(path.read_text(), TOOL_TALK, [ADD])
        for part in ("2 and 3?", '"name": "add"', '"a": 2', "5"):
            assert part in rendered, path.name
    rendered = render((data / "templates" / "phi-3.jinja").read_text(), TOOL_TALK, [ADD])
    assert GENERIC_TOOLS.split("{")[0] in rendered
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>' in rendered
    assert "<tool_response>\n5\n</tool_response>" in rendered


def test_several_results_make_one_turn_where_roles_alternate(data: Path) -> None:
    source = (data / "templates" / "llama-3-instruct.jinja").read_text()
    talk = [
        TOOL_TALK[0],
        {**TOOL_TALK[1], "tool_calls": [call("{}"), call("{}")]},
        TOOL_TALK[2],
        TOOL_TALK[2],
    ]
    assert render(source, talk).count("<tool_response>\n5\n</tool_response>") == 2


def test_granites_own_roles(data: Path) -> None:
    rendered = render((data / "templates" / "granite-3.0-instruct.jinja").read_text(), TOOL_TALK, [ADD])
    assert '<|tool_call|>[{"name": "add", "arguments": {"a": 2, "b": 3}}]<|end_of_text|>' in rendered
    assert "<|start_of_role|>tool_response<|end_of_role|>5<|end_of_text|>" in rendered


def test_tools_in_the_system_message() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tools if m.tools }}{% endfor %}"
    rendered = render(source, [user()], [ADD])
    assert json.loads(rendered.removeprefix("[system]").removesuffix("[user]hi")) == [ADD]


def test_some_results_are_printed_where_calls_are_not() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    rendered = render(source, TOOL_TALK)
    assert '[assistant]<tool_call>\n{"name": "add"' in rendered and rendered.endswith("[tool]5")


def test_tools_under_another_name_and_only_full_ones() -> None:
    named = "{{ xml_tools | tojson if xml_tools }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert render(named, [user()], [ADD]).startswith('[{"type": "function"')
    full = (
        "{% for t in tools or [] %}{{ t.function.name + ': ' + t.function.description }}"
        "{% for n, p in t.function.parameters.properties | items %} {{ n + '/' + p.description }}{% endfor %};"
        "{% endfor %}{{ messages[0].content }}"
    )
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    assert render(full, [user()], [tool]) == "add:  a/;hi"
    assert probe(ChatTemplate(full)).full_tools and not probe(ChatTemplate(named)).full_tools


def test_a_template_that_is_made_for_tools_only() -> None:
    source = (
        "{% for t in tools %}{{ t.function.name }};{% endfor %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    assert render(source, [{"role": "system", "content": "s"}, user()], [ADD]) == "add;[system]s[user]hi"


def test_results_that_must_name_their_function() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
        "{% endfor %}{% if m.role == 'tool' %}{{ m.name + '=' }}{% endif %}{{ m.content }}{% endfor %}"
    )
    talk = [user(), {"role": "assistant", "tool_calls": [call("{}", "add"), call("{}", "sub", "call_2")]}]
    talk += [{"role": "tool", "tool_call_id": "call_2", "content": "2"}, {"role": "tool", "content": "1"}]
    assert render(source, talk).endswith("[tool]sub=2[tool]sub=1")


def test_ids_that_stand_for_the_name() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}({{ c.id }}){{ c.function.arguments | tojson }}"
        "{% endfor %}{{ m.tool_call_id if m.role == 'tool' }}{{ m.content }}{% endfor %}"
    )
    again = [{"role": "assistant", "tool_calls": [call({}, "sub", "functions.sub:7")]}]
    again += [{"role": "tool", "tool_call_id": "functions.sub:7", "content": "9"}]
    rendered = render(source, [*TOOL_TALK, *again])
    assert "(functions.add:0)" in rendered and "functions.add:05" in rendered
    assert rendered.endswith("(functions.sub:7){}functions.sub:79")


def test_only_plain_data_reaches_a_template() -> None:
    class Sly:
        def __str__(self) -> str:
            return "plain"

        def write(self) -> str:
            raise AssertionError("a template called a method")

    source = "{% for m in messages %}{{ m.content }}{{ m.extra.write() if m.extra.write }}{{ m.extra }}{% endfor %}"
    assert render(source, [{**user(), "extra": Sly()}]) == "hiplain"


def test_tool_call_ids_of_nine_characters() -> None:
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}" + (
        "{{ raise_exception('nine') }}{% endif %}[{{ c.id }}]{{ c.function | tojson }}{% endfor %}"
        "{% if m.role == 'tool' %}({{ m.tool_call_id }}){{ m.content }}{% endif %}{% endfor %}"
    )
    rendered = render(source, TOOL_TALK)
    made = rendered[1:10]
    assert made.isalnum() and f"({made})5" in rendered
    kept = [user(), {"role": "assistant", "content": "", "tool_calls": [call({}, call_id="abcDEF123")]}]
    assert "[abcDEF123]" in render(source, kept)


def test_reasoning_inside_the_content_is_told_apart() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}"
        "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
    )
    whole = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    apart = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert render(source, [user(), whole]) == render(source, [user(), apart])
    assert render(source, [user(), {**apart, "reasoning_content": None, "reasoning": "hm"}]).count("hm") == 1
    assert "<think>hm</think>" in render(source, [user(), apart])


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ({"role": "user"}, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([user(), {"content": "x"}], "messages[1].role"),
        ([{"role": "end|>", "content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([user(3)], "messages[0].content"),
        ([user([3])], "messages[0].content[0]"),
        ([user([{"type": "text"}])], "messages[0].content[0].text"),
        ([user(), {"role": "assistant", "tool_calls": "x"}], "messages[1].tool_calls"),
        (
            [user(), {"role": "assistant", "tool_calls": [{"function": {}}]}],
            "messages[1].tool_calls[0].function.name",
        ),
        (
            [user(), {"role": "assistant", "tool_calls": [call(3)]}],
            "messages[1].tool_calls[0].function.arguments",
        ),
    ],
)
def test_malformed_messages_name_the_field(messages: Any, param: str) -> None:
    with pytest.raises(UsageError) as caught:
        render(CHATML, messages)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("tools", "param"),
    [({"a": 1}, "tools"), ("x", "tools"), ([ADD, {"type": "function"}], "tools[1].function.name")],
)
def test_malformed_tools_name_the_field(tools: Any, param: str) -> None:
    with pytest.raises(UsageError) as caught:
        render(STRICT, [user()], tools)
    assert caught.value.param == param


def test_roles_that_the_template_names_are_let_through() -> None:
    source = "{% for m in messages %}{% if m.role == 'critic' %}<{{ m.content }}>{% endif %}{% endfor %}"
    assert render(source, [user(), {"role": "critic", "content": "c"}]) == "<c>"


def test_the_input_is_not_changed() -> None:
    before = json.dumps(TOOL_TALK)
    for source in (ITERATING, CONCATENATING, NO_SYSTEM):
        render(source, TOOL_TALK, [ADD])
    assert json.dumps(TOOL_TALK) == before
