"""What turns a drawn token into what somebody reads: text, log-probabilities, the last word of a request.

Knows: each request's text, stop strings and grammar, and who listens. Does not know MLX, or how tokens come
to be drawn. The scheduler ends an answer by ids and limits; here a stop string or a complete grammar does.

    open                   a request came; forced tokens, or those that another engine has drawn, come first
    deliver                a token becomes a Delta; those that its grammar leaves no choice about follow
    cancel, fail           the last Delta, with the figures; or one error
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxserve.engine.adapters import Adapters
from mlxserve.engine.persist import Persistence
from mlxserve.engine.scheduler import Scheduler
from mlxserve.engine.sequence import Sequence, Status
from mlxserve.engine.stats import Counters
from mlxserve.errors import MlxServeError
from mlxserve.request import Delta, FinishReason, Metrics, Request, TokenLogprob
from mlxserve.text.stream import TextStream
from mlxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mlxserve.engine.grammar import Constraint

log = logging.getLogger("mlxserve.engine")

Sink = Callable[[Delta | MlxServeError], None]


@dataclass(slots=True)
class Stream:
    """One request's way out: its text so far, and who listens."""

    sequence: Sequence
    text: TextStream
    sink: Sink
    deadline_s: float | None
    constraint: Constraint | None = None


class OutputProcessor:
    """The answers of one engine, by request id. Not thread-safe.

    persistence: where prompts and answers are kept, if anywhere. adapters: are tidied when a request that had
    one is over.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        adapters: Adapters,
        persistence: Persistence | None,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.adapters = adapters
        self.persistence = persistence
        self.counters = counters
        self.clock = clock
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def users_of(self, adapter: str) -> int:
        """How many requests have the adapter of this digest."""
        return sum(s.sequence.request.adapter == adapter for s in self._streams.values())

    def late(self, now_s: float) -> list[str]:
        """Ids of the requests whose deadline is past."""
        late = (s for s in self._streams.values() if s.deadline_s is not None and now_s > s.deadline_s)
        return [stream.sequence.request.id for stream in late]

    def constraints(self, slots: Container[int]) -> dict[int, Constraint]:
        """The grammars of those slots whose sequences still wait for the draw on its way."""
        return {
            stream.sequence.slot: stream.constraint
            for stream in self._streams.values()
            if stream.constraint is not None and stream.sequence.in_flight and stream.sequence.slot in slots
        }

    # -- a request's life ----------------------------------------------------------------------------------

    def open(self, sequence: Sequence, sink: Sink, constraint: Constraint | None) -> None:
        """From now on the news of `sequence` go to `sink`."""
        request = sequence.request
        deadline_s = None if request.deadline_s is None else sequence.arrived_s + request.deadline_s
        text = TextStream(self.tokenizer, request.params.stop, continues=self._goes_on(request))
        stream = self._streams[request.id] = Stream(sequence, text, sink, deadline_s, constraint)
        if request.resume:
            self._resume(stream)
        if constraint is not None:
            self._force(stream)

    def deliver(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        """Turn one token into text and send it on; a stop string or a complete grammar ends the answer."""
        stream = self._streams.get(sequence.request.id)
        if stream is None:
            return
        self.counters.generated_tokens += 1
        if self.persistence is not None and len(sequence.tokens) == sequence.prompt_tokens + 1:
            self.persistence.save(sequence.request.prompt, sequence.request.adapter)
        ended_by_id = sequence.finish_reason is FinishReason.STOP
        text = "" if ended_by_id else stream.text.push(token)
        try:
            complete = stream.constraint is not None and not ended_by_id and stream.constraint.accept(token)
        except MlxServeError as error:
            self.fail(sequence, error)
            return
        if (stream.text.stopped or complete) and sequence.status is not Status.FINISHED:
            self.scheduler.finish(sequence, FinishReason.STOP)
        elif stream.text.stopped:
            sequence.finish_reason = FinishReason.STOP
        asked = sequence.request.params.logprobs is not None
        logprobs = (logprob,) if asked and logprob is not None else ()
        self._send(stream, text, (token,), logprobs)
        if stream.constraint is not None and sequence.status is not Status.FINISHED:
            self._force(stream)

    def cancel(self, request_id: str) -> None:
        """End a request now. Unknown ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self.scheduler.finish(stream.sequence, FinishReason.CANCELLED)
            self._send(stream, "", ())

    def fail(self, sequence: Sequence, error: MlxServeError) -> None:
        """End a request with an error."""
        stream = self._streams.get(sequence.request.id)
        if stream is None:
            return
        self.scheduler.finish(sequence, FinishReason.ERROR)
        self._forget(stream)
        self.counters.failed += 1
        self._tell(stream, error)

    # -- what comes without a draw ---------------------------------------------------------------------------

    def _goes_on(self, request: Request) -> bool:
        """True where the answer is one text with the prompt's; a prompt of special tokens has none."""
        return request.continues and any(i not in self.tokenizer.special_ids for i in request.prompt)

    def _resume(self, stream: Stream) -> None:
        """Take up an answer where another engine left it: its tokens, and the state of text and grammar."""
        tokens = list(stream.sequence.request.resume)
        self.scheduler.force(stream.sequence, tokens, self.clock())
        for token in tokens:
            stream.text.push(token)
            if stream.constraint is not None:
                stream.constraint.accept(token)

    def _force(self, stream: Stream) -> None:
        """Take the tokens that a grammar leaves no choice about, without a forward pass for each.

        A single one is drawn in the step on its way anyway. Not where log-probabilities were asked for:
        these come from logits.
        """
        assert stream.constraint is not None
        sequence = stream.sequence
        forced = stream.constraint.forced()
        room = (sequence.request.params.max_tokens or 1) - len(sequence.tokens) + sequence.prompt_tokens
        if len(forced) < 2 or len(forced) >= room or sequence.request.params.logprobs is not None:
            return
        self.scheduler.force(sequence, forced, self.clock())
        for token in forced:
            stream.constraint.accept(token)
        text = "".join(stream.text.push(token) for token in forced)
        self.counters.generated_tokens += len(forced)
        self.counters.forced_tokens += len(forced)
        if stream.text.stopped:
            self.scheduler.finish(sequence, FinishReason.STOP)
        self._send(stream, text, tuple(forced))

    # -- out -------------------------------------------------------------------------------------------------

    def _send(
        self, stream: Stream, text: str, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] = ()
    ) -> None:
        """A delta; the last one, if the sequence is finished."""
        if stream.sequence.status is Status.FINISHED:
            self._close(stream, text, tokens, logprobs)
        else:
            self._tell(stream, Delta(text, tokens, logprobs))

    def _close(
        self, stream: Stream, text: str, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> None:
        """The last delta of a request: what was held back, the reason, the figures."""
        sequence = stream.sequence
        text += stream.text.finish()
        if stream.text.stopped and sequence.finish_reason is FinishReason.LENGTH:
            sequence.finish_reason = FinishReason.STOP
        self._forget(stream)
        if self.persistence is not None:
            self.persistence.save(sequence.tokens[:-1], sequence.request.adapter)
        self.counters.finished += 1
        self.counters.cached_tokens += sequence.cached_tokens
        reason, metrics = sequence.finish_reason, self._metrics(sequence)
        self._tell(stream, Delta(text, tokens, logprobs, reason, metrics, stopped_by=stream.text.stop))

    def _tell(self, stream: Stream, news: Delta | MlxServeError) -> None:
        """Who cannot listen any more has left: the request ends, and nobody else's is touched."""
        try:
            stream.sink(news)
        except Exception as error:
            name = type(error).__name__
            log.warning("Nobody takes the answer of request %s any more.", stream.sequence.request.id)
            self.counters.errors[name] = self.counters.errors.get(name, 0) + 1
            self.scheduler.finish(stream.sequence, FinishReason.CANCELLED)
            if stream.sequence.request.id in self:
                self._forget(stream)

    def _metrics(self, sequence: Sequence) -> Metrics:
        first = sequence.first_token_s
        return Metrics(
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            completion_tokens=len(sequence.tokens) - sequence.prompt_tokens,
            time_to_first_token_s=None if first is None else first - sequence.arrived_s,
            total_s=self.clock() - sequence.arrived_s,
            preemptions=sequence.preemptions,
        )

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.sequence.request.id]
        if stream.sequence.request.adapter is not None:
            self.adapters.tidy()
