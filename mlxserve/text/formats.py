"""How model families mark reasoning and tool calls in their replies, and which of it a given model does.

Knows: markers, as data, and how to recognise them from a chat template and added tokens. Knows nothing of
streams, nor of what stands between the markers of a call (text/tools.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mlxserve.text.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning stands between these two."""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class Dialect:
    """How calls are written: `start`, a payload, `end`. An empty end: the reply's end or the next start.

    payload: how to read it: `json` (objects with a name and arguments), one of tools.py's own readers, or the
    name of a parser of mlx-lm's. hint: what tells the dialect in a template that does not write `start` in
    one piece. needs: what the template must also hold. tokens: added tokens that tell the dialect where the
    template does not. each: a pattern of one call, where a payload holds several. inner: special tokens
    inside payloads. bare: a reply that begins with a JSON object may be a call, too.
    """

    name: str
    start: str
    end: str
    payload: str = "json"
    hint: str = ""
    needs: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    each: str | None = None
    inner: tuple[str, ...] = ()
    bare: bool = False


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """What one model's replies may hold.

    dialects: its own first; then the one that text/tool_turns.py asks for where a template has no words for
    tools, which many models also fall back on. dropped: structural markers that stand for nothing to show.
    """

    reasoning: Reasoning | None
    dialects: tuple[Dialect, ...]
    harmony: bool
    dropped: tuple[str, ...]

    def markers(self) -> tuple[str, ...]:
        """Everything that a parser must see, also where it is made of special tokens."""
        reasoning = (self.reasoning.start, self.reasoning.end) if self.reasoning else ()
        harmony = HARMONY_MARKERS if self.harmony else ()
        dialects = [mark for d in self.dialects for mark in (d.start, d.end, *d.inner)]
        return tuple(filter(None, (*reasoning, *dialects, *self.dropped, *harmony)))


HARMONY_MARKERS = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)

REASONINGS = (
    Reasoning("<think>", "</think>"),
    Reasoning("<longcat_think>", "</longcat_think>"),
    Reasoning("<|think:start|>", "<|think:end|>"),
    Reasoning("<seed:think>", "</seed:think>"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<|channel>thought", "<channel|>"),
    Reasoning("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
    Reasoning("<|inner_prefix|>", "<|inner_suffix|>"),
    Reasoning("<thought>", "</thought>"),
    Reasoning("Here is my thought process:", "Here is my response:"),
)

HERMES = Dialect("hermes", "<tool_call>", "</tool_call>")

# The most telling first: several families share `<tool_call>`.
DIALECTS = (
    Dialect(
        "minimax_m2",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "minimax_m2",
        each=r"<invoke name=.*?</invoke>",
    ),
    Dialect("gemma4", "<|tool_call>", "<tool_call|>", "gemma4", inner=('<|"|>',)),
    Dialect(
        "function_gemma",
        "<start_function_call>",
        "<end_function_call>",
        "function_gemma",
        inner=("<escape>",),
    ),
    Dialect("longcat", "<longcat_tool_call>", "</longcat_tool_call>", "longcat"),
    Dialect("glm", "<tool_call>", "</tool_call>", "glm47", needs=("<arg_key>",)),
    Dialect(
        "pythonic", "<|tool_call_start|>", "<|tool_call_end|>", "pythonic", tokens=("<|tool_call_start|>",)
    ),
    Dialect("qwen3_coder", "<tool_call>", "</tool_call>", "qwen3_coder", needs=("<function=",)),
    Dialect("seed", "<seed:tool_call>", "</seed:tool_call>", "qwen3_coder"),
    Dialect(
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "kimi_k2",
        each=r"<\|tool_call_begin\|>.*?<\|tool_call_end\|>",
        inner=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    Dialect(
        "kimi_k3",
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        "kimi_k3",
        tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        each=r"<\|open\|>call(?=[ <]).*?<\|close\|>call<\|sep\|>",
    ),
    Dialect("minicpm5", "<function name=", "</function>", "minicpm5", needs=("<param name=",)),
    Dialect(
        "muse_spark",
        "<atem:function_calls>",
        "</atem:function_calls>",
        "muse_spark",
        each=r"<atem:invoke.*?</atem:invoke>",
    ),
    Dialect("mistral", "[TOOL_CALLS]", "", "mistral", inner=("[ARGS]", "[CALL_ID]")),
    Dialect(
        "deepseek",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "deepseek",
        each=r"<｜tool▁call▁begin｜>.*?<｜tool▁call▁end｜>",
        inner=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    Dialect(
        "deepseek_v3.2",
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        "dsml",
        hint="｜DSML｜",
        needs=("function_calls>",),
        each=r"<｜DSML｜invoke .*?</｜DSML｜invoke>",
        inner=("｜DSML｜",),
    ),
    Dialect(
        "deepseek_v4",
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
        "dsml",
        hint="｜DSML｜",
        each=r"<｜DSML｜invoke .*?</｜DSML｜invoke>",
        inner=("｜DSML｜",),
    ),
    Dialect("command", "<|START_ACTION|>", "<|END_ACTION|>"),
    Dialect("phi4_mini", "<|tool_call|>", "<|/tool_call|>", needs=("<|/tool_call|>",)),
    Dialect("granite", "<|tool_call|>", ""),
    Dialect("apertus", "<|tools_prefix|>", "<|tools_suffix|>", "pairs"),
    Dialect("internlm", "<|action_start|><|plugin|>", "<|action_end|>"),
    Dialect("jamba", "<tool_calls>", "</tool_calls>"),
    Dialect("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    HERMES,
    Dialect(
        "llama3",
        "<|python_tag|>",
        "",
        hint="ipython",
        needs=('"parameters"',),
        tokens=("<|python_tag|>",),
        bare=True,
    ),
)

_DROPPED = (
    "<|open|>response<|sep|>",
    "<|close|>response<|sep|>",
    "<|close|>message<|sep|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|START_TEXT|>",
    "<|END_TEXT|>",
)


def recognise(templates: Collection[ChatTemplate], added_tokens: Collection[str]) -> ReplyFormat:
    """The format of a model's replies, from its templates' sources and its added tokens.

    Where neither tells a dialect, calls are written as text/tool_turns.py asks for them.
    """
    source = "\0".join(template.source for template in templates)
    dialect = next((d for d in DIALECTS if _speaks(d, source, added_tokens)), HERMES)
    return ReplyFormat(
        reasoning=_reasoning(source, added_tokens),
        dialects=(dialect,) if dialect.start == HERMES.start else (dialect, HERMES),
        harmony="<|channel|>" in source and "<|message|>" in source,
        dropped=tuple(mark for mark in _DROPPED if _known(mark, source, added_tokens)),
    )


def _reasoning(source: str, added_tokens: Collection[str]) -> Reasoning | None:
    """What the template itself handles, else what there are tokens for."""
    written = next((r for r in REASONINGS if r.end in source), None)
    return written or next((r for r in REASONINGS if _known(r.end, "", added_tokens)), None)


def _known(mark: str, source: str, added_tokens: Collection[str]) -> bool:
    """True if the template writes the mark, or if it is made of added tokens (with words between them)."""
    if mark in source or mark in added_tokens:
        return True
    parts = re.findall(r"<\|?\w+\|>|<\|\w+>", mark)
    return len(parts) > 1 and all(part in added_tokens for part in parts)


def _speaks(dialect: Dialect, source: str, added_tokens: Collection[str]) -> bool:
    by_tokens = bool(dialect.tokens) and all(token in added_tokens for token in dialect.tokens)
    told = by_tokens or (dialect.hint or dialect.start) in source
    return told and all(needed in source for needed in dialect.needs)


def visible_markers(reply: ReplyFormat, added_tokens: Mapping[str, int]) -> frozenset[int]:
    """Ids of added tokens that the format's markers are made of; a stream must not hide them."""
    markers = reply.markers()
    return frozenset(
        token_id
        for text, token_id in added_tokens.items()
        if text.strip() and any(text in marker for marker in markers)
    )
