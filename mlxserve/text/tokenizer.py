"""The one tokenizer face of the project: text and chats to ids, ids to text.

Knows: a `tokenizers` backend, which ids begin and end a text, and a chat template. Does not know where these
came from (Hugging Face files, GGUF metadata), nor the model.

Two rules hold everywhere. A person's text never becomes a control token in a chat, while the template's own
markers do. And a chat begins with one BOS, whether template or tokenizer puts it there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from mlxserve.errors import UsageError
from mlxserve.text.abilities import Abilities, probe
from mlxserve.text.control import Protected, Span, told_apart
from mlxserve.text.detokenize import BackendDetokenizer, ByteDetokenizer, Detokenizer
from mlxserve.text.eos import end_of_turn_tokens
from mlxserve.text.formats import ReplyFormat, recognise, visible_markers
from mlxserve.text.messages import suit
from mlxserve.text.template import ChatTemplate
from mlxserve.text.user_text import from_user, plain
from mlxserve.text.vocabulary import PlainEncoder, TokenBytes, repair_decoder, strips_first_space


class Tokenizer:
    """Encodes, decodes and renders chats. Safe to share between threads.

    backend: the `tokenizers` library's object. It is changed: truncation and padding are switched off, and a
    byte-level one with a decoder of another kind gets the right one.
    bos_token_id: put before raw prompts if `add_bos`, whatever the backend's post-processor says.
    eos_token_ids: every id known to end a generation; the markers that the chat template ends turns
    with are added.
    chat_template: the Jinja source, or several under names (`default`, `tool_use`).
    special_tokens: what a template may print, by name: `{"bos_token": "<s>", "eos_token": "</s>"}`. Those of
    the ids above are filled in.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        add_bos: bool = False,
        chat_template: str | Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        repair_decoder(backend)
        backend.no_truncation()  # some files keep the settings of their training
        backend.no_padding()
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.add_bos = add_bos and bos_token_id is not None
        self._given_eos = frozenset(eos_token_ids)
        self._templates = _named(chat_template)
        self._special_names = dict(special_tokens or {})
        self._added = backend.get_added_tokens_decoder()
        self.added_tokens: dict[str, int] = {token.content: i for i, token in sorted(self._added.items())}
        self._bytes = TokenBytes(backend, {i: token.content for i, token in self._added.items()})

    # What the vocabulary is.

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self.backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in self._added), 0)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """The names and texts that templates may print."""
        found = dict(self._special_names)
        first_eos = min(self._given_eos, default=None)
        for name, token_id in (("bos_token", self.bos_token_id), ("eos_token", first_eos)):
            if name not in found and token_id is not None:
                found[name] = self.token_text(token_id)
        return found

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Added tokens marked special: not part of what a person reads."""
        return frozenset(i for i, token in self._added.items() if token.special)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a generation: the given ones, and those the template ends turns with."""
        found = set(self._given_eos)
        special = {self._added[i].content for i in self.special_ids}
        for template in self._compiled.values():
            ends = end_of_turn_tokens(template, self.added_tokens, special)
            found |= {self.added_tokens[token] for token in ends}
        return frozenset(found)

    @cached_property
    def reply_format(self) -> ReplyFormat:
        """How this model marks reasoning and tool calls."""
        return recognise(self._compiled.values(), self.added_tokens)

    @cached_property
    def hidden_in_replies(self) -> frozenset[int]:
        """Ids that a reply's text does not show: those that end a turn, and special tokens.

        Special tokens that mark reasoning or tool calls are not hidden; a `ReplyParser` takes them out.
        """
        markers = visible_markers(self.reply_format, self.added_tokens)
        return (self.special_ids - markers) | self.eos_token_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, its leading space among them; none for an unknown id."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text; bytes that are no whole character as U+FFFD."""
        return self._bytes[token_id].decode("utf-8", "replace")

    # Text to ids.

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A raw prompt's ids. Added tokens in the text count as such.

        With `add_special_tokens` the tokenizer's own setting decides what stands around them: BOS, or BERT's
        [CLS] and [SEP]. A BOS that the text already begins with is not doubled. No id that ends a generation
        is put behind a prompt.
        """
        before, after = self._frame if add_special_tokens else ([], [])
        ids = self.backend.encode(text, add_special_tokens=False).ids
        before = [] if before and ids[: len(before)] == before else before
        return [*before, *ids, *(i for i in after if i not in self.eos_token_ids)]

    def encode_for_embedding(self, text: str, *, limit: int | None = None) -> list[int]:
        """The ids whose hidden states are pooled; some models want their end token behind the text.

        limit: of how many ids there may be; it is the text that is cut, the frame stays.
        """
        before, after = self._frame
        ids = self.backend.encode(text, add_special_tokens=False).ids
        room = len(ids) if limit is None else max(limit - len(before) - len(after), 0)
        return [*before, *ids[:room], *after]

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """The ids before and after a raw text: what the post-processor adds, with BOS as `add_bos` says."""
        bare = self.backend.encode("a", add_special_tokens=False).ids
        framed = self.backend.encode("a", add_special_tokens=True).ids
        added = len(framed) - len(bare)
        start = next((i for i in range(added + 1) if framed[i : i + len(bare)] == bare), 0)
        before = [i for i in framed[:start] if i != self.bos_token_id]
        return self._with_bos(before), framed[start + len(bare) :]

    def encode_user(self, text: str) -> list[int]:
        """The ids of text that a person wrote: nothing in it becomes a control or other added token."""
        return self._plain.encode(text)

    @cached_property
    def _plain(self) -> PlainEncoder:
        return PlainEncoder(self.backend)

    # Ids to text.

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD; unknown ids nothing."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        stream = self.detokenizer(hidden=hidden)
        return "".join([*map(stream.add, ids), stream.finish()])

    def detokenizer(self, *, hidden: Collection[int] | None = None, continues: bool = False) -> Detokenizer:
        """A fresh stream. `hidden` ids show nothing: by default those of `hidden_in_replies`.

        `continues`: the text goes on from a prompt, so that a leading space is part of it. Otherwise the
        space that SentencePiece puts before a text's first word is dropped.
        """
        if hidden is None:
            hidden = self.hidden_in_replies
        if self._bytes.fixed:
            strip = self._strips_first_space and not continues
            return ByteDetokenizer(self._bytes, hidden, strip_space=strip)
        return BackendDetokenizer(self.backend, hidden)

    @cached_property
    def _strips_first_space(self) -> bool:
        return strips_first_space(self.backend)

    # Chats.

    @cached_property
    def _compiled(self) -> dict[str, ChatTemplate]:
        return {name: ChatTemplate(source, self.special_tokens) for name, source in self._templates.items()}

    @property
    def chat_template(self) -> str | None:
        """The source of the default template, None where the model has none."""
        return next(iter(self._templates.values()), None)

    @cached_property
    def _abilities(self) -> dict[str, Abilities]:
        return {}

    def template_for(self, tools: bool) -> ChatTemplate:
        """The template for a chat with or without tools.

        Raises UsageError when the model has no chat template.
        """
        if not self._compiled:
            raise UsageError(
                "This model has no chat template, so it cannot chat; give it a raw prompt.", param="messages"
            )
        default = next(iter(self._compiled.values()))
        return self._compiled.get("tool_use", default) if tools else default

    def abilities(self, tools: bool = False) -> Abilities:
        """What the template can print. Probed once. Raises as `template_for`."""
        template = self.template_for(tools)
        if template.source not in self._abilities:
            self._abilities[template.source] = probe(template)
        return self._abilities[template.source]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as text, as the template writes it.

        Raises UsageError for messages or tools that are malformed or that the template refuses, Unsupported
        for images, ModelInvalid for a broken template.
        """
        return plain(self._render(messages, tools, add_generation_prompt, template_kwargs))

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """The chat with stand-ins for all that is not the template's own, but for roles, which are checked."""
        template = self.template_for(bool(tools))
        suited = suit(messages, tools, self.abilities(bool(tools)), template.source)
        variables = {**suited.variables, **(template_kwargs or {})}
        return template.render(
            [{**from_user(message), "role": message["role"]} for message in suited.messages],
            tools=from_user(suited.tools),
            add_generation_prompt=add_generation_prompt,
            variables={name: from_user(value) for name, value in variables.items()},
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The chat's ids, beginning with one BOS where the model uses it. Raises as `render_chat`.

        Control tokens come only from the template: where messages, tools or template_kwargs spell one, those
        characters are encoded as ordinary text.
        """
        rendered = self._render(messages, tools, add_generation_prompt, template_kwargs)
        ids = self._encode_rendered(*told_apart(rendered))
        return ids if self.bos_token_id in ids else self._with_bos(ids)

    def _with_bos(self, ids: list[int]) -> list[int]:
        return ids if self.bos_token_id is None or not self.add_bos else [self.bos_token_id, *ids]

    def _encode_rendered(self, text: str, protected: Protected) -> list[int]:
        """The ids of a render in which no control token may touch a protected span.

        Only stretches between control tokens that hold a forbidden one are encoded anew.
        """
        encoding = self.backend.encode(text, add_special_tokens=False)
        all_ids: list[int] = encoding.ids
        found = self._controls(encoding, text)
        allowed = [control for control in found if not protected.touches(*control.visible)]
        if len(allowed) == len(found):
            return all_ids
        forbidden = [control.place for control in found if protected.touches(*control.visible)]
        ids: list[int] = []
        done, position = 0, 0  # in ids, in characters
        for control in [*allowed, _Control(len(all_ids), -1, (len(text), len(text)), (0, 0))]:
            start, end = control.extent
            if bisect_left(forbidden, done) < bisect_left(forbidden, control.place):
                ids += self._encode_stretch(text, position, start, protected)
            else:
                ids += all_ids[done : control.place]
            ids += all_ids[control.place : control.place + 1]
            done, position = control.place + 1, end
        return ids

    def _encode_stretch(self, text: str, start: int, end: int, protected: Protected) -> list[int]:
        """The ids of a part of `text` in which a forbidden control token may have hidden an allowed one."""
        ids: list[int] = []
        for begin, stop in protected.gaps(start, end):
            gap = text[begin:stop]
            for control in self._controls(self.backend.encode(gap, add_special_tokens=False), gap):
                first, last = (begin + offset for offset in control.extent)
                ids += [*self._plain.encode(text[start:first], first=start == 0), control.token_id]
                start = last
        return ids + self._plain.encode(text[start:end], first=start == 0)

    def _controls(self, encoding: Encoding, text: str) -> list[_Control]:
        """The added tokens with visible text in an encoding of `text`, in order."""
        return [
            _Control(place, token_id, extent, _trimmed(text, *extent))
            for place, (token_id, extent) in enumerate(zip(encoding.ids, encoding.offsets))
            if token_id in self._added and self._added[token_id].content.strip()
        ]


class _Control(NamedTuple):
    """A control token in an encoding: its place among the ids, and the characters that it covers.

    `visible` leaves out white space at the ends, which some tokens take in from the text around them.
    """

    place: int
    token_id: int
    extent: Span
    visible: Span


def _trimmed(text: str, start: int, end: int) -> Span:
    covered = text[start:end]
    return end - len(covered.lstrip()), start + len(covered.rstrip())


def _named(templates: str | Mapping[str, str] | None) -> dict[str, str]:
    """Templates by name, the default first."""
    if not templates:
        return {}
    if isinstance(templates, str):
        return {"default": templates}
    return dict(sorted(templates.items(), key=lambda item: item[0] != "default"))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder in Hugging Face layout.

    Raises ModelInvalid for damaged files, ModelUnsupported where no file here can be read as a tokenizer.
    """
    from mlxserve.text.files import read_tokenizer_files

    return Tokenizer(**read_tokenizer_files(folder))
