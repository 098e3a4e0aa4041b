"""Replies of model families, for the tests that take them apart, and what takes them apart."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from mlxserve.text.events import Event, Text, ToolArguments, ToolEnd, ToolStart, merged
from mlxserve.text.reply import ReplyParser
from mlxserve.text.tokenizer import Tokenizer
from tests.text.conftest import MakeTokenizer

READ = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {
            "type": "object",
            "properties": {"filePath": {"type": "string"}, "lines": {"type": "integer"}},
        },
    },
}
LIST = {"type": "function", "function": {"name": "list_files", "parameters": {"type": "object"}}}
TOOLS = [READ, LIST]
ARGUMENTS = {"filePath": "src/a.py", "lines": 3}
BOTH = (
    '{"name": "read", "arguments": {"filePath": "src/a.py", "lines": 3}}',
    '{"name": "list_files", "arguments": {}}',
)

# Family: what its template writes (in short), added special tokens, and one reply that calls both tools.
FAMILIES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "hermes": (
        "<tool_call>",
        (),
        "<tool_call>\n{}\n</tool_call>\n<tool_call>\n{}\n</tool_call>".format(*BOTH),
    ),
    "mistral_list": ("[TOOL_CALLS]", ("[TOOL_CALLS]",), "[TOOL_CALLS][{}, {}]".format(*BOTH)),
    "mistral_named": (
        "[TOOL_CALLS][ARGS]",
        ("[TOOL_CALLS]", "[ARGS]"),
        '[TOOL_CALLS]read[ARGS]{"filePath": "src/a.py", "lines": 3}[TOOL_CALLS]list_files[ARGS]{}',
    ),
    "llama3": (
        '<|python_tag|>{"name": "parameters"}',
        ("<|python_tag|>",),
        '{"name": "read", "parameters": {"filePath": "src/a.py", "lines": 3}}; '
        '{"name": "list_files", "parameters": {}}',
    ),
    "llama3_tagged": (
        '<|python_tag|>{"name": "parameters"}',
        ("<|python_tag|>",),
        "<|python_tag|>{}\n{}".format(*BOTH).replace("arguments", "parameters"),
    ),
    "granite": ("<|tool_call|>", ("<|tool_call|>",), "<|tool_call|>[{}, {}]".format(*BOTH)),
    "phi4_mini": (
        "<|tool_call|><|/tool_call|>",
        ("<|tool_call|>", "<|/tool_call|>"),
        "<|tool_call|>[{}, {}]<|/tool_call|>".format(*BOTH),
    ),
    "command": (
        "<|START_ACTION|><|END_ACTION|>",
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "read", "parameters": '
        '{"filePath": "src/a.py", "lines": 3}},\n{"tool_name": "list_files", "parameters": {}}]'
        "<|END_ACTION|>",
    ),
    "nemotron": ("<TOOLCALL>", (), "<TOOLCALL>[{}, {}]</TOOLCALL>".format(*BOTH)),
    "jamba": ("<tool_calls>", (), "<tool_calls>[\n{},\n{}\n]</tool_calls>".format(*BOTH)),
    "apertus": (
        "<|tools_prefix|><|tools_suffix|>",
        ("<|tools_prefix|>", "<|tools_suffix|>"),
        '<|tools_prefix|>[{"read": {"filePath": "src/a.py", "lines": 3}}, {"list_files": {}}]'
        "<|tools_suffix|>",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read\n```json\n"
        '{"filePath": "src/a.py", "lines": 3}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>list_files\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read<｜tool▁sep｜>"
        '{"filePath": "src/a.py", "lines": 3}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>list_files<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v3.2": (
        "'function_calls>｜DSML｜",
        ("｜DSML｜",),
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="read">\n<｜DSML｜parameter name="filePath" string="true">'
        'src/a.py</｜DSML｜parameter>\n<｜DSML｜parameter name="lines" string="false">3</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="list_files">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    "glm": (
        "<tool_call><arg_key>",
        (),
        "<tool_call>read\n<arg_key>filePath</arg_key>\n<arg_value>src/a.py</arg_value>\n<arg_key>lines</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call><tool_call>list_files\n</tool_call>",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=",
        (),
        "<tool_call>\n<function=read>\n<parameter=filePath>\nsrc/a.py\n</parameter>\n<parameter=lines>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=list_files>\n</function>\n</tool_call>",
    ),
    "seed": (
        "<seed:tool_call>",
        (),
        "<seed:tool_call><function=read><parameter=filePath>src/a.py</parameter><parameter=lines>3</parameter>"
        "</function></seed:tool_call><seed:tool_call><function=list_files></function></seed:tool_call>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>"
        '{"filePath": "src/a.py", "lines": 3}<|tool_call_end|><|tool_call_begin|>functions.list_files:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "kimi_k3": (
        "",
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        '<|open|>tools<|sep|><|open|>call tool="read" index="1"<|sep|><|open|>argument key="filePath" '
        'type="string"<|sep|>src/a.py<|close|>argument<|sep|><|open|>argument key="lines" type="number"'
        '<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="list_files" index="2"<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    "minimax_m2": (
        "<minimax:tool_call>",
        (),
        '<minimax:tool_call>\n<invoke name="read">\n<parameter name="filePath">src/a.py</parameter>\n'
        '<parameter name="lines">3</parameter>\n</invoke>\n<invoke name="list_files">\n</invoke>\n'
        "</minimax:tool_call>",
    ),
    "gemma4": (
        "<|tool_call><tool_call|>",
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
        '<|tool_call>call:read{filePath:<|"|>src/a.py<|"|>,lines:3}<tool_call|>'
        "<|tool_call>call:list_files{}<tool_call|>",
    ),
    "function_gemma": (
        "<start_function_call>",
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        "<start_function_call>call:read{filePath:<escape>src/a.py<escape>,lines:3}<end_function_call>"
        "<start_function_call>call:list_files{}<end_function_call>",
    ),
    "longcat": (
        "<longcat_tool_call>",
        (),
        "<longcat_tool_call>read\n<longcat_arg_key>filePath</longcat_arg_key>\n"
        "<longcat_arg_value>src/a.py</longcat_arg_value>\n<longcat_arg_key>lines</longcat_arg_key>\n"
        "<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call><longcat_tool_call>"
        '{"name": "list_files", "arguments": {}}</longcat_tool_call>',
    ),
    "pythonic": (
        "",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        '<|tool_call_start|>[read(filePath="src/a.py", lines=3), list_files()]<|tool_call_end|>',
    ),
    "minicpm5": (
        '<function name="<param name="',
        (),
        '<function name="read"><param name="filePath">src/a.py</param><param name="lines">3</param>'
        '</function><function name="list_files"></function>',
    ),
    "muse_spark": (
        "<atem:function_calls>",
        (),
        '<atem:function_calls>\n<atem:invoke name="read">\n<atem:parameter name="filePath">src/a.py'
        '</atem:parameter>\n<atem:parameter name="lines">3</atem:parameter>\n</atem:invoke>\n'
        '<atem:invoke name="list_files">\n</atem:invoke>\n</atem:function_calls>',
    ),
    "internlm": (
        "<|action_start|><|plugin|>",
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        "<|action_start|><|plugin|>{}<|action_end|><|action_start|><|plugin|>{}<|action_end|>".format(*BOTH),
    ),
    "harmony": (
        "<|start|><|channel|><|message|><|call|><|return|>",
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        "<|channel|>commentary to=functions.read <|constrain|>json<|message|>"
        '{"filePath": "src/a.py", "lines": 3}<|call|><|start|>assistant to=functions.list_files<|channel|>'
        "commentary json<|message|>{}",
    ),
}


def build(make: MakeTokenizer, family: str) -> Tokenizer:
    source, added, _ = FAMILIES[family]
    return make("{{ messages[0].content }}{# " + source + " #}", added=added)


def take_apart(
    tokenizer: Tokenizer, pieces: Sequence[str], tools: Any = TOOLS, **options: Any
) -> list[Event]:
    count = itertools.count()
    parser = ReplyParser(tokenizer, tools, new_id=lambda: f"id{next(count)}", **options)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.finish()])


def calls(events: Sequence[Event]) -> list[tuple[str, Any]]:
    """Name and arguments of each call; the events of a call must be in order."""
    found = []
    for i, event in enumerate(events):
        if isinstance(event, ToolStart):
            index, arguments = len(found), events[i + 1]
            assert isinstance(arguments, ToolArguments)
            assert (event.index, arguments.index, events[i + 2]) == (index, index, ToolEnd(index))
            found.append((event.name, json.loads(arguments.delta)))
    return found


def text(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def cut(whole: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(place % (len(whole) + 1) for place in places), len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(edges)]
