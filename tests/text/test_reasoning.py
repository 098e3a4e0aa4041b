"""Reasoning and channels in replies, told apart however the text is cut."""

from __future__ import annotations

import pytest

from mlxserve.text.events import Reasoning, Text, merged
from mlxserve.text.reply import ReplyParser
from mlxserve.text.tokenizer import Tokenizer
from tests.text.conftest import MakeTokenizer
from tests.text.families import BOTH, build, calls, take_apart, text

REASONING = {
    "qwen3": ("<think>", "</think>", ("<think>", "</think>")),
    "magistral": ("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    "gemma4": ("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>", ("<|open|>", "<|close|>", "<|sep|>")),
    "command": ("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_THINKING|>", "<|END_THINKING|>")),
    "seed": ("<seed:think>", "</seed:think>", ("<seed:think>", "</seed:think>")),
    "granite": ("Here is my thought process:", "Here is my response:", ()),
}


def thinker(make: MakeTokenizer, family: str, opened: str = "") -> Tokenizer:
    start, end, added = REASONING[family]
    return make("{{ messages[0].content }}" + opened + "{# " + start + end + " #}", added=added)


@pytest.mark.parametrize("family", REASONING)
def test_reasoning_is_told_apart(make: MakeTokenizer, family: str) -> None:
    start, end, _ = REASONING[family]
    tokenizer = thinker(make, family)
    whole = f"{start}\nlet me see \n\n so\n{end}\n\nThe answer. "
    expected = [Reasoning("let me see \n\n so"), Text("The answer. ")]
    assert take_apart(tokenizer, [whole]) == take_apart(tokenizer, list(whole)) == expected
    shown = tokenizer.detokenizer()
    visible = "".join([*map(shown.add, tokenizer.encode(whole)), shown.finish()])
    assert visible == whole


def test_reasoning_that_the_prompt_opened(make: MakeTokenizer) -> None:
    tokenizer = thinker(make, "qwen3", opened="<think>\n")
    prompt = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    parser = ReplyParser(tokenizer, prompt_ids=prompt)
    assert parser.thinking
    events = [*parser.push("hm\n</think>\n\nyes"), *parser.finish()]
    assert (merged(events), parser.thinking) == ([Reasoning("hm"), Text("yes")], False)


def test_reasoning_that_the_prompt_closed(make: MakeTokenizer) -> None:
    tokenizer = thinker(make, "qwen3", opened="<think>\n\n</think>\n\n")
    prompt = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert take_apart(tokenizer, ["yes"], prompt_ids=prompt) == [Text("yes")]


def test_reasoning_cut_off_and_around_calls(make: MakeTokenizer) -> None:
    tokenizer = make("{{ messages[0].content }}{# <think></think><tool_call> #}")
    assert take_apart(tokenizer, ["<think>hm, ", "so"]) == [Reasoning("hm, so")]
    call = f"<tool_call>{BOTH[1]}</tool_call>"
    events = take_apart(tokenizer, list(f"<think>a</think>\n{call}\n<think>b</think>\n{call}"))
    assert [e.text for e in events if isinstance(e, Reasoning)] == ["a", "b"]
    assert len(calls(events)) == 2 and text(events) == ""


def test_the_word_think_in_an_answer_is_text(make: MakeTokenizer) -> None:
    reply = "Use the <think> tag and close it with </think>."
    assert take_apart(thinker(make, "qwen3"), list(reply)) == [Text(reply)]


def test_structural_markers_are_dropped(make: MakeTokenizer) -> None:
    added = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    tokenizer = make("{{ messages[0].content }}", added=added)
    assert take_apart(tokenizer, list("<|START_RESPONSE|>Hi.<|END_RESPONSE|>")) == [Text("Hi.")]


HARMONY = (
    "<|channel|>analysis<|message|>Need to look.<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "I will look.<|end|><|start|>assistant<|channel|>analysis<|message|>Good.<|end|>"
)


def test_harmony_channels(make: MakeTokenizer) -> None:
    tokenizer = build(make, "harmony")
    whole = HARMONY + "<|start|>assistant<|channel|>final<|message|>Here it is.<|return|>"
    expected = [
        Reasoning("Need to look."),
        Text("I will look."),
        Reasoning("\n\nGood."),
        Text("\n\nHere it is."),
    ]
    assert take_apart(tokenizer, [whole]) == take_apart(tokenizer, list(whole)) == expected


def test_harmony_calls_that_are_none_are_text(make: MakeTokenizer) -> None:
    tokenizer = build(make, "harmony")
    head = "<|channel|>commentary to=functions.read <|constrain|>json<|message|>"
    assert take_apart(tokenizer, [head + '{"filePath": <|call|>']) == [Text('{"filePath": ')]
    assert take_apart(tokenizer, [head + "{}"], None) == [Text("{}")]
    python = "<|channel|>analysis to=python<|message|>1 + 1<|call|>"
    assert take_apart(tokenizer, [python]) == [Reasoning("1 + 1")]


def test_harmony_thinking_follows_the_channel(make: MakeTokenizer) -> None:
    parser = ReplyParser(build(make, "harmony"))
    parser.push("<|channel|>analysis<|message|>hm")
    assert parser.thinking
    parser.push("<|end|><|start|>assistant<|channel|>final<|message|>a")
    assert not parser.thinking
