"""From logits to tokens, all rows of a step at once.

Knows: per-slot settings, seeds, penalties, biases and masks as arrays. Does not know sequences or text.
Rows pay for what they asked: without penalties, biases, masks or log-probabilities nothing but the draw
happens, and rows that are all greedy are one argmax.

Order, as in Hugging Face's and vLLM's: mask of a grammar, logit bias, penalties, then temperature, top-k,
top-p, min-p and the draw (kernels_metal/sample.py). Log-probabilities are the model's own, before all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxserve.engine.batch import Admission
from mlxserve.kernels_metal.dispatch import sample
from mlxserve.request import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """A uniform float32 in [0, 1) for each (seed, draw), the same on every machine and in any batch.

    splitmix64 (Steele, Lea, Flood 2014) of both numbers; the upper 24 bits of the result.
    """
    with np.errstate(over="ignore"):
        mixed = _splitmix(_splitmix(seeds.astype(np.uint64)) + draws.astype(np.uint64) * _GOLDEN)
    return ((mixed >> np.uint64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)


def _splitmix(state: np.ndarray) -> np.ndarray:
    z = state + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(slots=True)
class _Penalties:
    """A slot's penalties; counts: (V,) times each token stands in the answer; seen: (V,) in the prompt."""

    repetition: float
    presence: float
    frequency: float
    seen: mx.array
    counts: mx.array


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of the rows that asked. rows: their numbers; chosen (r,), top ids and values (r, k)."""

    rows: list[int]
    wanted: list[int]
    chosen: mx.array
    top_ids: mx.array | None
    top_values: mx.array | None

    def arrays(self) -> list[mx.array]:
        return [a for a in (self.chosen, self.top_ids, self.top_values) if a is not None]


class Sampler:
    """Settings of every slot, and the draw."""

    def __init__(self, slots: int) -> None:
        self._settings = np.zeros((slots, 4), np.float32)  # temperature, top_k, top_p, min_p
        self._seeds = np.zeros(slots, np.uint64)
        self._penalties: dict[int, _Penalties] = {}
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._logprobs: dict[int, int] = {}
        self._waiting: dict[int, Admission] = {}  # penalties are built when the vocabulary's size is seen

    def admit(self, admission: Admission) -> None:
        """A slot's new settings replace whatever it had."""
        slot, params = admission.slot, admission.params
        self._settings[slot] = (params.temperature, params.top_k, params.top_p, params.min_p)
        self._seeds[slot] = admission.seed
        for table in (self._penalties, self._biases, self._logprobs, self._waiting):
            table.pop(slot, None)
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias, np.int32, len(params.logit_bias))
            values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
            self._biases[slot] = (ids, values)
        if params.logprobs is not None:
            self._logprobs[slot] = params.logprobs
        if admission.history:
            self._waiting[slot] = admission

    def draw(
        self, logits: mx.array, slots: np.ndarray, draws: np.ndarray, masks: Mapping[int, np.ndarray]
    ) -> tuple[mx.array, Logprobs | None]:
        """Tokens (R,) int32 for logits (R, V) of `slots` (R,); draws: (R,) index of each token in its answer.

        masks: for slots under a grammar, the allowed tokens as packed bits, uint32 (ceil(V / 32),).
        """
        own = logits
        order = slots.tolist()
        if masks or self._biases or self._penalties or self._waiting:
            logits = self._shaped(logits, order, masks)
        settings = self._settings[slots]
        if settings[:, 0].any():
            u = mx.array(uniforms(self._seeds[slots], draws))
            tokens, _ = sample(logits, mx.array(settings), u)
        else:
            tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        self._count(tokens, order)
        return tokens, self._logprobs_of(own, tokens, order) if self._logprobs else None

    # -- what some rows ask for ----------------------------------------------------------------------

    def _shaped(self, logits: mx.array, order: list[int], masks: Mapping[int, np.ndarray]) -> mx.array:
        logits = logits.astype(mx.float32)
        masked = [row for row, slot in enumerate(order) if slot in masks]
        if masked:
            logits = _with_masks(logits, masked, [masks[order[row]] for row in masked])
        biased = [row for row, slot in enumerate(order) if slot in self._biases]
        if biased:
            logits = self._with_biases(logits, order, biased)
        for row, slot in enumerate(order):
            penalties = self._penalties_of(slot, logits.shape[-1])
            if penalties is not None:
                logits[row] = _penalised(logits[row], penalties)
        return logits

    def _with_biases(self, logits: mx.array, order: list[int], rows: list[int]) -> mx.array:
        ids = np.concatenate([self._biases[order[row]][0] for row in rows])
        values = np.concatenate([self._biases[order[row]][1] for row in rows])
        at = np.repeat(rows, [len(self._biases[order[row]][0]) for row in rows])
        return logits.at[mx.array(at.astype(np.int32)), mx.array(ids)].add(mx.array(values))

    def _penalties_of(self, slot: int, vocabulary: int) -> _Penalties | None:
        admission = self._waiting.pop(slot, None)
        if admission is not None:
            self._penalties[slot] = _new_penalties(admission, vocabulary)
        return self._penalties.get(slot)

    def _count(self, tokens: mx.array, order: list[int]) -> None:
        """Add the tokens just drawn to their slots' counts, without reading them."""
        if not self._penalties:
            return
        for row, slot in enumerate(order):
            penalties = self._penalties.get(slot)
            if penalties is not None:
                penalties.counts = penalties.counts.at[tokens[row]].add(1.0)

    def _logprobs_of(self, logits: mx.array, tokens: mx.array, order: list[int]) -> Logprobs | None:
        rows = [row for row, slot in enumerate(order) if slot in self._logprobs]
        if not rows:
            return None
        index = mx.array(rows)
        asked = logits[index].astype(mx.float32)  # (r, V)
        logprobs = asked - mx.logsumexp(asked, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(logprobs, tokens[index][:, None], axis=-1)[:, 0]
        wanted = [self._logprobs[order[row]] for row in rows]
        most = min(max(wanted), logits.shape[-1])
        if most == 0:
            return Logprobs(rows, wanted, chosen, None, None)
        ids = mx.argpartition(-logprobs, most - 1, axis=-1)[:, :most] if most < logprobs.shape[-1] else None
        values = logprobs if ids is None else mx.take_along_axis(logprobs, ids, axis=-1)
        sorting = mx.argsort(-values, axis=-1)
        top_values = mx.take_along_axis(values, sorting, axis=-1)
        top_ids = sorting if ids is None else mx.take_along_axis(ids, sorting, axis=-1)
        return Logprobs(rows, wanted, chosen, top_ids, top_values)

    def arrays(self) -> list[mx.array]:
        """What the draws change and must be evaluated with them."""
        return [penalties.counts for penalties in self._penalties.values()]


def neutral(params: SamplingParams) -> bool:
    """True if no penalty of `params` changes anything."""
    return (
        params.repetition_penalty in (None, 1.0)
        and not params.presence_penalty
        and not params.frequency_penalty
    )


def _new_penalties(admission: Admission, vocabulary: int) -> _Penalties:
    params = admission.params
    prompt = np.array(admission.history[: admission.prompt_tokens], np.int64)
    answer = np.array(admission.history[admission.prompt_tokens :], np.int64)
    seen = np.zeros(vocabulary, np.float32)
    seen[prompt[prompt < vocabulary]] = 1.0
    counts = np.bincount(answer, minlength=vocabulary)[:vocabulary].astype(np.float32)
    return _Penalties(
        repetition=float(params.repetition_penalty or 1.0),
        presence=float(params.presence_penalty or 0.0),
        frequency=float(params.frequency_penalty or 0.0),
        seen=mx.array(seen),
        counts=mx.array(counts),
    )


def _penalised(logits: mx.array, penalties: _Penalties) -> mx.array:
    """One row's logits (V,): repetition over prompt and answer, presence and frequency over the answer."""
    said = penalties.counts > 0
    if penalties.repetition != 1.0:
        scaled = mx.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
        logits = mx.where(said | (penalties.seen > 0), scaled, logits)
    if penalties.frequency:
        logits = logits - penalties.frequency * penalties.counts
    if penalties.presence:
        logits = logits - penalties.presence * said
    return logits


def _with_masks(logits: mx.array, rows: list[int], packed: Sequence[np.ndarray]) -> mx.array:
    """-inf where a row's bit is 0; logits (R, V), packed uint32 (ceil(V / 32),) each."""
    vocabulary = logits.shape[-1]
    words = mx.array(np.stack(packed))  # (r, W)
    bits = (words[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1  # (r, W, 32)
    allowed = bits.reshape(len(rows), -1)
    if allowed.shape[1] < vocabulary:  # ids past the tokenizer's own are never allowed
        allowed = mx.pad(allowed, [(0, 0), (0, vocabulary - allowed.shape[1])])
    allowed = allowed[:, :vocabulary] > 0
    if len(rows) == logits.shape[0]:
        return mx.where(allowed, logits, -mx.inf)
    index = mx.array(rows)
    logits[index] = mx.where(allowed, logits[index], -mx.inf)
    return logits
