"""One API call's generations: engine deltas in, reply events out, tokens counted.

Knows: how n choices run side by side, how an answer ends, what it cost. Does not know wire formats.

    Run.steps()    Step(choice, events, delta) as they come, the choices interleaved
    gather(run)    the same folded into whole replies: a stream and its unstreamed twin cannot differ
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from mlxserve.errors import Cancelled, EngineFailed
from mlxserve.request import Delta, FinishReason, Request, TokenLogprob
from mlxserve.server.dialogue import (
    Dialogue,
    Event,
    Reasoning,
    ReplyParser,
    Text,
    ToolArguments,
    ToolEnd,
    ToolStart,
)
from mlxserve.server.ports import AsyncEngine


class Observer(Protocol):
    """Told what happens; metrics implement it."""

    def first_token(self, seconds: float) -> None: ...
    def gap(self, seconds: float) -> None: ...
    def tokens(self, prompt: int, cached: int, completion: int) -> None: ...


@dataclass(slots=True)
class Usage:
    """Tokens of one call: prompts counted once a choice's prompt, answers of all choices together."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """What one delta means for one choice. `finish` is set on a choice's last step and only there."""

    choice: int
    events: tuple[Event, ...]
    delta: Delta
    finish: FinishReason | None = None


class Kind(StrEnum):
    TEXT = "text"
    THOUGHT = "thought"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """A stretch of a reply: text, reasoning, or one tool call (`text` then is its arguments, JSON).

    logprobs: of text, those of all tokens since the text before it.
    """

    kind: Kind
    text: str = ""
    id: str = ""
    name: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class Reply:
    """One whole choice, its blocks in the order in which they came."""

    blocks: list[Block] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.STOP
    stopped_by: str | None = None
    _waiting: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks if block.kind is Kind.TEXT)

    @property
    def thought(self) -> str:
        return "".join(block.text for block in self.blocks if block.kind is Kind.THOUGHT)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind is Kind.CALL]

    def add(self, step: Step) -> None:
        self._waiting.extend(step.delta.logprobs)
        for event in step.events:
            self._add_event(event)
        self.logprobs.extend(step.delta.logprobs)
        self.token_ids.extend(step.delta.token_ids)
        if step.finish is not None:
            self._give_logprobs()
            self.finish = step.finish
            self.stopped_by = step.delta.stopped_by

    def _add_event(self, event: Event) -> None:
        match event:
            case Text(text):
                self._block(Kind.TEXT).text += text
                self._give_logprobs()
            case Reasoning(text):
                self._block(Kind.THOUGHT).text += text
            case ToolStart(id=id_, name=name):
                self._give_logprobs()
                self.blocks.append(Block(Kind.CALL, id=id_, name=name))
            case ToolArguments(index=index, delta=text):
                self.calls[index].text += text

    def _give_logprobs(self) -> None:
        """To the text that is being written, those that wait."""
        if self.blocks and self.blocks[-1].kind is Kind.TEXT:
            self.blocks[-1].logprobs += self._waiting
            self._waiting.clear()

    def _block(self, kind: Kind) -> Block:
        """The block that is being written, or a new one of this kind."""
        if not self.blocks or self.blocks[-1].kind is not kind:
            self._give_logprobs()
            self.blocks.append(Block(kind))
        return self.blocks[-1]


@dataclass(slots=True, eq=False)
class Run:
    """The generations of one API call: request i is read through parsers[i].

    With parallel_calls False a choice ends after its first tool call. thinking_budget: tokens of reasoning
    after which it is closed for the model, which then goes on with its answer.
    """

    engine: AsyncEngine
    dialogue: Dialogue
    requests: Sequence[Request]
    parsers: Sequence[ReplyParser]
    observer: Observer | None = None
    parallel_calls: bool = True
    thinking_budget: int | None = None
    usage: Usage = field(default_factory=Usage)
    started: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        # The same prompt for several choices is one prompt to the caller.
        self.usage.prompt_tokens = sum({id(r.prompt): len(r.prompt) for r in self.requests}.values())

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Every step of every choice. Closing it cancels what still runs."""
        source = self._one(0) if len(self.requests) == 1 else self._all()
        try:
            async with aclosing(source) as steps:
                async for step in steps:
                    yield step
        finally:
            self._report()

    async def _one(self, choice: int) -> AsyncGenerator[Step, None]:
        """One choice: its request; where reasoning used up its budget, then another that answers."""
        budget = _Budget(self.thinking_budget)
        async with aclosing(self._request(choice, self.requests[choice], budget)) as steps:
            async for step in steps:
                yield step
        if not budget.spent:
            return
        request, closing = self._without_thinking(choice, budget)
        if request is None:
            yield Step(choice, tuple(self.parsers[choice].finish()), Delta(), FinishReason.LENGTH)
            return
        yield Step(choice, tuple(self._read(self.parsers[choice], closing)), closing)
        async with aclosing(self._request(choice, request, _Budget(None))) as steps:
            async for step in steps:
                yield step

    async def _request(self, choice: int, request: Request, budget: _Budget) -> AsyncGenerator[Step, None]:
        parser = self.parsers[choice]
        calls = 0
        last = self.started
        async with aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                _raise_if_broken(delta)
                last = self._clock(last, delta)
                events = self._read(parser, delta)
                cut = None if self.parallel_calls else _first_call_end(events)
                if cut is not None:
                    yield Step(choice, tuple(events[: cut + 1]), delta, FinishReason.TOOL_CALLS)
                    return
                calls += sum(isinstance(event, ToolStart) for event in events)
                yield Step(choice, tuple(events), delta, _finish(delta.finish_reason, calls))
                if delta.finish_reason is not None or budget.take(delta, parser.thinking):
                    return
        raise EngineFailed("The engine ended an answer without saying why.")

    def _without_thinking(self, choice: int, budget: _Budget) -> tuple[Request | None, Delta]:
        """The request that goes on behind closed reasoning (None: no token is left), and what closes it."""
        request = self.requests[choice]
        text, ids = self.dialogue.close_reasoning()
        left = (request.params.max_tokens or 0) - len(budget.made) - len(ids)
        if left < 1:
            return None, Delta()
        params = replace(request.params, max_tokens=left)
        prompt = [*request.prompt, *budget.made, *ids]
        onward = replace(request, id=f"{request.id}-answer", prompt=prompt, params=params)
        return onward, Delta(text, tuple(ids))

    def _read(self, parser: ReplyParser, delta: Delta) -> list[Event]:
        was_thinking = parser.thinking
        events = list(parser.feed(delta.text))
        if delta.finish_reason is not None:
            events += parser.finish()
        self._count(delta, was_thinking or parser.thinking)
        return events

    async def _all(self) -> AsyncGenerator[Step, None]:
        """All choices at once; each waits until its step is taken, so none runs ahead unread."""
        steps: asyncio.Queue[Step | Exception | None] = asyncio.Queue(maxsize=len(self.requests))
        tasks = [asyncio.create_task(self._feed(i, steps)) for i in range(len(self.requests))]
        try:
            still_open = len(tasks)
            while still_open:
                item = await steps.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    still_open -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, choice: int, steps: asyncio.Queue[Step | Exception | None]) -> None:
        try:
            async with aclosing(self._one(choice)) as source:
                async for step in source:
                    await steps.put(step)
        except Exception as error:
            await steps.put(error)
        else:
            await steps.put(None)

    def _clock(self, last: float, delta: Delta) -> float:
        if not delta.token_ids:
            return last
        now = time.perf_counter()
        if self.first_token_s is None:
            self.first_token_s = now - self.started
            if self.observer:
                self.observer.first_token(self.first_token_s)
        elif self.observer:
            self.observer.gap(now - last)
        return now

    def _count(self, delta: Delta, thinking: bool) -> None:
        self.usage.completion_tokens += len(delta.token_ids)
        if thinking:
            self.usage.reasoning_tokens += len(delta.token_ids)
        if delta.metrics is not None:
            self.usage.cached_tokens = max(self.usage.cached_tokens, delta.metrics.cached_tokens)

    def _report(self) -> None:
        """What was computed, also for an answer that was broken off."""
        if self.observer and self.first_token_s is not None:
            usage = self.usage
            self.observer.tokens(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


@dataclass(slots=True)
class _Budget:
    """Counts one choice's tokens of reasoning, and keeps all its tokens."""

    limit: int | None
    made: list[int] = field(default_factory=list)
    thought: int = 0

    def take(self, delta: Delta, thinking: bool) -> bool:
        """True once the reasoning has had its share and still goes on."""
        if self.limit is None:
            return False
        self.made += delta.token_ids
        self.thought += len(delta.token_ids) if thinking else 0
        return self.spent and thinking

    @property
    def spent(self) -> bool:
        return self.limit is not None and self.thought >= self.limit


async def gather(run: Run) -> list[Reply]:
    """The whole replies, one a choice."""
    run.requests = [replace(request, whole=True) for request in run.requests]
    replies = [Reply() for _ in run.requests]
    async with aclosing(run.steps()) as steps:
        async for step in steps:
            replies[step.choice].add(step)
    return replies


def _raise_if_broken(delta: Delta) -> None:
    if delta.finish_reason is FinishReason.ERROR:
        raise EngineFailed("The engine failed in the middle of the answer.")
    if delta.finish_reason is FinishReason.CANCELLED:
        raise Cancelled("The answer was cancelled.")


def _finish(reason: FinishReason | None, calls: int) -> FinishReason | None:
    """A choice that stopped by itself after tool calls ended for them."""
    return FinishReason.TOOL_CALLS if reason is FinishReason.STOP and calls else reason


def _first_call_end(events: Sequence[Event]) -> int | None:
    """Where the first call of these events is complete."""
    return next((i for i, event in enumerate(events) if isinstance(event, ToolEnd)), None)
