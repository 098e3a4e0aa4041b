"""Chat templates: from messages to the one string that a model was trained on.

Knows: how a template is compiled, rendered and asked what it can do. Knows nothing of tokens, nor of how
messages are made to suit it (text/messages.py). User text only ever is data in a render; where it comes as UserText
(text/user_text.py), the render holds its stand-ins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import Template, TemplateSyntaxError, meta
from jinja2.exceptions import SecurityError

from mlxserve.errors import ModelInvalid, UsageError
from mlxserve.text import sandbox
from mlxserve.text.user_text import plain

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception"})


_NO_TOKENS = {"bos_token": "", "eos_token": ""}  # printed by templates also where the vocabulary has none


@lru_cache(maxsize=64)
def _compile(source: str) -> Template:
    try:
        return sandbox.environment().from_string(source)
    except TemplateSyntaxError as error:
        raise ModelInvalid(
            f"The model's chat template has a syntax error in line {error.lineno}: {error.message}"
        ) from error
    except (RecursionError, SecurityError) as error:
        raise ModelInvalid(f"The model's chat template cannot be compiled: {error}") from error


class ChatTemplate:
    """One template and the tokenizer's special tokens (`{"bos_token": "<s>", …}`) that it may print.

    Compiling costs some 10 ms and is done once per source, rendering a short chat some 0.1 ms.
    Raises ModelInvalid when the source is no Jinja template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._compiled = _compile(source)

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads from outside: `tools`, `enable_thinking`, …"""
        return frozenset(meta.find_undeclared_variables(sandbox.environment().parse(self.source)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as one string. `variables` are further names for the template, such as enable_thinking.

        Raises UsageError, with the template's own words, when it rejects the messages or fails on them;
        ModelInvalid when it runs away.
        """
        values = {
            **_NO_TOKENS,
            **self.special_tokens,
            **_checked(variables or {}),
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": (variables or {}).get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        sandbox.start_render()
        try:
            return "".join(_bounded(self._compiled.generate(values)))
        except sandbox.TemplateRefusal as refusal:
            raise UsageError(
                f"The model's chat template refuses these messages: {refusal.message}", param="messages"
            ) from refusal
        except (SecurityError, RecursionError, MemoryError, OverflowError) as error:
            raise ModelInvalid(f"The model's chat template was stopped: {plain(str(error))}") from error
        except Exception as error:  # whatever template code does to data it did not expect
            raise UsageError(
                f"The model's chat template cannot render these messages: {plain(str(error))}",
                param="messages",
            ) from error


def _checked(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in variables:
        if name in RESERVED - {"documents"} or not str(name).isidentifier():
            raise UsageError(f"chat_template_kwargs cannot set {name!r}.", param="chat_template_kwargs")
    return variables


def _bounded(pieces: Any) -> Any:
    """`pieces` one by one, until they are too much together."""
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > sandbox.MAX_CHARACTERS:
            raise sandbox.TemplateTooLarge(f"more than {sandbox.MAX_CHARACTERS} characters")
        yield piece
