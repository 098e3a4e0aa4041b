"""What a person asks for and what comes back: plain Python, no MLX, no tokenizer.

Knows: the settings of one generation and their legal ranges; the shape of an answer.
Does not know: where settings come from (CLI, HTTP, Python) or how they are carried out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from mlxserve import display
from mlxserve.config import SAMPLING_DEFAULTS
from mlxserve.errors import UsageError

SEED_LIMIT = 2**64


class FinishReason(StrEnum):
    """Why a generation ended; the words are OpenAI's, other APIs translate."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"


class Priority(StrEnum):
    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one generation. None means: the model's own default, else `config.SAMPLING_DEFAULTS`.

    temperature 0 is greedy. top_k 0 keeps all. repetition_penalty (Keskar et al. 2019, CTRL) divides or
    multiplies the logits of every token in prompt and answer; presence_ and frequency_penalty (OpenAI's)
    subtract for tokens of the answer. logit_bias adds to single tokens' logits. seed fixes the draws
    whatever else is in the batch. stop cuts the text before the earliest match; stop_token_ids end it.
    logprobs: None for none, k for the chosen token's and the k most likely ones'.
    Structured output: at most one of schema (JSON schema), regex, choices, grammar (Lark), json_object.

    Raises UsageError, naming the field, for a value out of range.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    schema: Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choices: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _in_range("max_tokens", self.max_tokens, 1, None, whole=True)
        _in_range("temperature", self.temperature, 0.0, 5.0)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _in_range("top_k", self.top_k, 0, None, whole=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("seed", self.seed, 0, SEED_LIMIT - 1, whole=True)
        _in_range("logprobs", self.logprobs, 0, 20, whole=True)
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise UsageError("stop must be non-empty strings.", param="stop")
        for token, bias in self.logit_bias.items():
            _in_range("logit_bias", token, 0, None, whole=True)
            _in_range("logit_bias", bias, -100.0, 100.0)
        if sum(map(bool, self._constraints())) > 1:
            raise UsageError(
                "Only one of schema, regex, choices, grammar and json_object can hold at a time.",
                param="schema",
            )

    def _constraints(self) -> tuple[bool, ...]:
        return (
            self.schema is not None,
            self.regex is not None,
            self.choices is not None,
            self.grammar is not None,
            self.json_object,
        )

    @property
    def constrained(self) -> bool:
        """True where a grammar restricts the text."""
        return any(self._constraints())

    def resolved(
        self, model_defaults: Mapping[str, Any] | None = None, *, room: int | None = None
    ) -> SamplingParams:
        """The same settings with every None filled: from the model's defaults, then from ours.

        `seed` and `logprobs` stay None where nobody asked. room: tokens left in the context after the
        prompt; it bounds max_tokens where the request is silent, while a number that was asked for stays.
        A model default out of range is a UsageError that names the field.
        """
        known = dict(model_defaults or {})
        if room is not None:
            known["max_tokens"] = max(min(known.get("max_tokens") or SAMPLING_DEFAULTS.max_tokens, room), 1)
        filled = {}
        for item in fields(SAMPLING_DEFAULTS):
            if getattr(self, item.name) is None:
                value = known.get(item.name)
                filled[item.name] = getattr(SAMPLING_DEFAULTS, item.name) if value is None else value
        return replace(self, **filled)


def _in_range(
    name: str,
    value: Any,
    low: float | None,
    high: float | None,
    *,
    whole: bool = False,
    open_low: bool = False,
) -> None:
    if value is None:
        return
    right_type = isinstance(value, int) if whole else isinstance(value, int | float)
    if not right_type or isinstance(value, bool):
        raise UsageError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}.", param=name)
    below = low is not None and (value <= low if open_low else value < low)
    if below or (high is not None and value > high) or not math.isfinite(value):
        above = f"above {low}" if open_low else f"at least {low}"
        span = above if high is None else f"{above} and at most {high}"
        raise UsageError(f"{name} must be {span}, not {value!r}.", param=name)


@dataclass(frozen=True, slots=True)
class Request:
    """One generation: tokens in, settings, and who asked.

    `id` is unique in an engine. `client` is whom fairness counts. `params` are resolved settings.
    `adapter` names a LoRA adapter loaded on the base model, None the base itself. `deadline_s`: seconds
    after arrival when an unfinished request is given up. `continues`: the answer goes on from the prompt's
    text, as a raw completion does, so that a space it begins with is part of it. `whole`: nobody looks at the
    answer before its end, so that it may be begun again elsewhere. `resume`: tokens of the answer that were
    made, and handed out, before; the answer goes on behind them.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    priority: Priority = Priority.INTERACTIVE
    client: str = ""
    adapter: str | None = None
    deadline_s: float | None = None
    whole: bool = False
    resume: Sequence[int] = ()
    continues: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one token under the model, before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Metrics:
    """Counts in tokens, times in seconds from arrival; None for what has not happened."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    time_to_first_token_s: float | None = None
    total_s: float | None = None
    preemptions: int = 0

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens a second after the first one."""
        if self.time_to_first_token_s is None or self.total_s is None or self.completion_tokens < 2:
            return None
        elapsed_s = self.total_s - self.time_to_first_token_s
        return (self.completion_tokens - 1) / elapsed_s if elapsed_s > 0 else None

    def in_words(self) -> list[str]:
        """The figures for people, one part each: tokens in and out, time to the first, tokens a second."""
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        parts = [f"{self.prompt_tokens} tokens in{cached}, {self.completion_tokens} out"]
        if self.time_to_first_token_s is not None:
            parts.append(f"first after {self.time_to_first_token_s:.2f} s")
        if self.decode_tokens_per_s is not None:
            parts.append(f"{self.decode_tokens_per_s:.1f} tokens/s")
        return parts


@dataclass(slots=True)
class Output:
    """A finished answer. `text` has no stop string and no end-of-turn marker in it. Jupyter shows the text."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprob] | None = None
    metrics: Metrics = field(default_factory=Metrics)
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)

    def _repr_html_(self) -> str:
        figures = [
            *self.metrics.in_words(),
            *([f"ended: {self.finish_reason}"] if self.finish_reason else []),
        ]
        return display.text(self.text) + display.small(figures)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds to a stream: text (possibly empty, when held back), ids, and how it ended.

    `stopped_by` is the stop string that ended it, where one did.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    metrics: Metrics | None = None
    stopped_by: str | None = None


class Collected:
    """One answer, put together from its deltas."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._reason: FinishReason | None = None
        self._metrics = Metrics()

    def add(self, delta: Delta) -> None:
        """The next delta, in their order."""
        self._pieces.append(delta.text)
        self._tokens.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._reason = delta.finish_reason
        self._metrics = delta.metrics or self._metrics

    def output(self, prompt: Sequence[int] = ()) -> Output:
        """The answer so far; `prompt` are its ids."""
        return Output(
            text="".join(self._pieces),
            token_ids=self._tokens,
            finish_reason=self._reason,
            logprobs=self._logprobs or None,
            metrics=self._metrics,
            prompt_token_ids=list(prompt),
        )
