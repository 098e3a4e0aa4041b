"""One loaded model's way with words: prompts in, parsers of replies out.

Knows: the text room, and what this model's template and tokenizer can do. Does not know engines or HTTP.

The one file of the server that touches templates and parsers; the API files see the methods below.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from mlxserve.errors import Unsupported, UsageError
from mlxserve.request import SamplingParams
from mlxserve.server.constraints import Tools
from mlxserve.server.fill import FillTokens, find_fill_tokens
from mlxserve.server.replies import PlainParser, ReplyParser, ReplyPlan, closing, plan_reply
from mlxserve.text.events import Event, Reasoning, Text, ToolArguments, ToolEnd, ToolStart
from mlxserve.text.messages import content_text
from mlxserve.text.tokenizer import Tokenizer

__all__ = [
    "Dialogue",
    "Event",
    "PlainParser",
    "Prompt",
    "Reasoning",
    "ReplyParser",
    "ReplyPlan",
    "Text",
    "ToolArguments",
    "ToolEnd",
    "ToolStart",
]

T = TypeVar("T")

# Longer texts are rendered and encoded on a thread, so that streams go on meanwhile.
_OFF_LOOP_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's ids."""

    ids: list[int]

    def after(self, earlier: Sequence[int]) -> Prompt:
        return replace(self, ids=[*earlier, *self.ids])


class Dialogue:
    """Prompts and parsers of one model; one object a loaded model, used on the event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    # -- what the model can do ----------------------------------------------------------------------

    @property
    def can_chat(self) -> bool:
        return self.tokenizer.chat_template is not None

    @cached_property
    def variables(self) -> frozenset[str]:
        """What the chat template reads from outside."""
        return self.tokenizer.template_for(False).variables if self.can_chat else frozenset()

    @cached_property
    def can_call_tools(self) -> bool:
        """True where the template itself shows tools; elsewhere they are described in words."""
        return self.can_chat and self.tokenizer.abilities(tools=True).tools is not None

    @cached_property
    def can_reason(self) -> bool:
        if not self.can_chat:
            return False
        reply = self.tokenizer.reply_format
        return reply.harmony or reply.reasoning is not None or bool(self.variables & _SWITCHES)

    @cached_property
    def filling(self) -> FillTokens | None:
        return find_fill_tokens(self.tokenizer.added_tokens)

    # -- prompts ------------------------------------------------------------------------------------

    async def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Tools,
        variables: Mapping[str, Any] | None = None,
        continue_last: bool = False,
    ) -> Prompt:
        """The chat as the template writes it, ready for the reply.

        With `continue_last` the last message, an assistant's, is the beginning of the reply. Raises
        UsageError and Unsupported that name the field.
        """
        if continue_last and messages[-1]["role"] != "assistant":
            raise UsageError("Only an assistant's message can be continued.", param="messages")

        def encode() -> Prompt:
            turns = messages[:-1] if continue_last else messages
            ids = self.tokenizer.encode_chat(
                turns, tools=list(tools.offered) or None, template_kwargs=variables
            )
            if continue_last:
                ids = ids + self.tokenizer.encode_user(_text_of(messages[-1]))
            return Prompt(ids)

        return await _maybe_off_loop(encode, sum(len(str(message)) for message in messages))

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Tools,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The chat as text."""
        return self.tokenizer.render_chat(
            messages,
            tools=list(tools.offered) or None,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=variables,
        )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A raw prompt's ids."""
        return await _maybe_off_loop(
            lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens), len(text)
        )

    async def encode_for_embedding(self, text: str, *, limit: int | None = None) -> list[int]:
        """A text's ids as `Tokenizer.encode_for_embedding` frames them."""
        return await _maybe_off_loop(
            lambda: self.tokenizer.encode_for_embedding(text, limit=limit), len(text)
        )

    async def fill(self, prefix: str, suffix: str, extra: Sequence[tuple[str, str]] = ()) -> list[int]:
        """The prompt for what stands between two texts; `extra` are (name, text) of other files.

        Raises Unsupported where the tokenizer has no tokens for that.
        """
        if self.filling is None:
            raise Unsupported("This model has no tokens to fill in the middle.", param="suffix")
        tokens = self.filling
        return await _maybe_off_loop(
            lambda: tokens.prompt(self.tokenizer, prefix, suffix, extra), len(prefix) + len(suffix)
        )

    def check_ids(self, ids: Sequence[int], param: str) -> list[int]:
        """The ids, if this vocabulary has them all."""
        size = self.tokenizer.vocab_size
        for i, token in enumerate(ids):
            if not 0 <= token < size:
                raise UsageError(f"{param}[{i}] is {token}; the vocabulary has {size} tokens.", param=param)
        return list(ids)

    # -- replies ------------------------------------------------------------------------------------

    def plan_reply(self, prompt: Prompt, params: SamplingParams, tools: Tools) -> ReplyPlan:
        """How a reply to `prompt` is begun, held to a form, and read."""
        return plan_reply(self.tokenizer, prompt.ids, params, tools)

    def thinking(self, wanted: bool) -> dict[str, Any]:
        """Template variables that switch reasoning on or off; none where the template has no switch."""
        return dict.fromkeys(_SWITCHES & self.variables, wanted)

    @property
    def can_close_reasoning(self) -> bool:
        """True where reasoning ends with a mark that can be put there (gpt-oss has channels instead)."""
        reply = self.tokenizer.reply_format
        return self.can_chat and not reply.harmony and reply.reasoning is not None

    def close_reasoning(self) -> tuple[str, list[int]]:
        """What ends the reasoning, as text and as ids."""
        return closing(self.tokenizer)

    def effort(self, level: str, *, strict: bool = True) -> dict[str, Any]:
        """Template variables for a reasoning effort.

        Raises Unsupported where the template has no such setting, if `strict`.
        """
        made = self.thinking(level != "none")
        if "reasoning_effort" in self.variables and level != "none":
            made["reasoning_effort"] = {"minimal": "low", "xhigh": "high"}.get(level, level)
        if not made and strict and level != "none":
            raise Unsupported(
                "This model's template has no setting for reasoning effort.", param="reasoning_effort"
            )
        return made

    # -- tokens -------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token)

    def token_text(self, token: int) -> str:
        return self.tokenizer.token_text(token)


# The variables by which templates are told whether to reason.
_SWITCHES = frozenset({"enable_thinking", "thinking"})


def _text_of(message: Mapping[str, Any]) -> str:
    return content_text(message.get("content"), "messages[-1].content")


async def _maybe_off_loop(work: Callable[[], T], characters: int) -> T:
    if characters < _OFF_LOOP_CHARACTERS:
        return work()
    return await asyncio.to_thread(work)
