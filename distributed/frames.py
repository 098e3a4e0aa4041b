"""What ranks say to each other, as bytes: a step's batch, its masks, its tokens, hidden states.

Knows: the plain objects of a step, and MessagePack (msgspec's, which also checks types on the way in).
Does not know sockets, the model or when something is said.

A batch travels whole to every rank, as arrays without field names: 256 decoding sequences take about
2 KB. Of sampling settings only what a sampler reads goes along. In front of every batch stands a digest
of all batches so far (`Ledger`): whoever missed, repeated or misread one notices at the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np

from mlxserve.config import EngineConfig
from mlxserve.engine.batch import Admission, Batch, Segment
from mlxserve.errors import DoesNotFit, EngineStopped, MlxServeError, ModelInvalid, Unsupported
from mlxserve.request import SamplingParams, TokenLogprob

DIGEST_BYTES = 8


class Kind(IntEnum):
    """Kinds of frames; the arrows say who sends them."""

    START = 1  # rank 0 → all: how the engine runs
    MEMORY = 2  # all → rank 0, and back: how much fits, what was agreed
    BATCH = 3  # rank 0 → all: a step
    MASKS = 4  # rank 0 → last stage: the rows of that step under a grammar
    HIDDEN = 5  # stage → next stage
    TOKENS = 6  # last stage → rank 0
    DONE = 7  # all → rank 0: a step is complete
    EMBED = 8  # rank 0 → all: token ids whose embedding is wanted, and under which adapter
    VECTOR = 9  # last stage → rank 0: an embedding
    FAILED = 10  # all → rank 0: why a rank stops
    STOP = 11  # rank 0 → all, and back: the end
    ADAPTER = 12  # rank 0 → all: arrays of a LoRA adapter, step: how many such frames follow; and back: its
    # layers that a rank does not have
    DROP = 13  # rank 0 → all: an adapter that nobody uses any more
    REFUSED = 14  # all → rank 0: in place of an answer, why not
    ADOPT = 15  # rank 0 → all: put the adapter on that was offered


class Diverged(EngineStopped):
    """Two ranks no longer carry out the same steps. `rank` names the one that noticed or was noticed."""

    code = "ranks_diverged"

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Ledger:
    """A running digest of all batches since the start: BLAKE2b, 8 bytes, each over the one before."""

    def __init__(self) -> None:
        self._digest = bytes(DIGEST_BYTES)

    def enter(self, step: int, body: bytes | memoryview) -> bytes:
        """Take in one batch; the digest of all so far."""
        hashed = hashlib.blake2b(self._digest, digest_size=DIGEST_BYTES)
        hashed.update(step.to_bytes(8, "little"))
        hashed.update(body)
        self._digest = hashed.digest()
        return self._digest

    def expect(self, step: int, payload: bytearray, rank: int) -> memoryview:
        """The body of a batch frame, if rank `rank` has entered the same batches; raises Diverged."""
        view = memoryview(payload)
        if self.enter(step, view[DIGEST_BYTES:]) != bytes(view[:DIGEST_BYTES]):
            raise Diverged(
                f"Rank {rank} and rank 0 no longer carry out the same steps (seen at step {step}).", rank=rank
            )
        return view[DIGEST_BYTES:]


# -- a batch ---------------------------------------------------------------------------------------------

# temperature, top_k, top_p, min_p, repetition, presence and frequency penalty, logprobs, logit bias
_Params = tuple[
    float | None,
    int | None,
    float | None,
    float | None,
    float | None,
    float | None,
    float | None,
    int | None,
    dict[int, float],
]
# slot, settings, seed, history, prompt tokens, adapter, state slot
_Admission = tuple[int, _Params, int, list[int], int, str | None, int | None]
_Page = tuple[int, int, int, int]
_Copy = tuple[int, int, int]
_State = tuple[int, int]
_Batch = tuple[
    list[_Admission],
    list[_Page],
    list[_Copy],
    list[_State],
    list[Segment],
    list[_State],
    list[_Page],
]
_encoder = msgspec.msgpack.Encoder()
_decode_batch = msgspec.msgpack.Decoder(_Batch).decode


def encode_batch(batch: Batch) -> bytes:
    """The batch without its step number, which stands in the frame's header."""
    return _encoder.encode(
        (
            [_plain_admission(admission) for admission in batch.admitted],
            batch.pages,
            batch.copies,
            batch.restores,
            batch.segments,
            batch.checkpoints,
            batch.later_pages,
        )
    )


def decode_batch(step: int, body: bytes | memoryview) -> Batch:
    """The batch of `encode_batch`, with settings as `for_sampler` leaves them. Raises EngineStopped."""
    try:
        admitted, pages, copies, restores, segments, checkpoints, later = _decode_batch(body)
    except msgspec.MsgspecError as error:
        raise EngineStopped(f"The frame of step {step} holds no batch: {error}.") from None
    return Batch(
        step,
        [_admission(*plain) for plain in admitted],
        pages,
        copies,
        restores,
        segments,
        checkpoints,
        later,
    )


def for_sampler(params: SamplingParams) -> SamplingParams:
    """Only the settings that a sampler reads."""
    return _params(*_plain_params(params))


def _plain_params(params: SamplingParams) -> _Params:
    return (
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        params.logprobs,
        dict(params.logit_bias),
    )


def _params(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition: float | None,
    presence: float | None,
    frequency: float | None,
    logprobs: int | None,
    bias: dict[int, float],
) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logprobs=logprobs,
        logit_bias=bias,
    )


def _plain_admission(admission: Admission) -> _Admission:
    return (
        admission.slot,
        _plain_params(admission.params),
        admission.seed,
        list(admission.history),
        admission.prompt_tokens,
        admission.adapter,
        admission.state_slot,
    )


def _admission(
    slot: int,
    params: _Params,
    seed: int,
    history: list[int],
    prompt_tokens: int,
    adapter: str | None,
    state_slot: int | None,
) -> Admission:
    return Admission(slot, _params(*params), seed, history, prompt_tokens, adapter, state_slot)


# -- masks and tokens ------------------------------------------------------------------------------------

_decode_masks = msgspec.msgpack.Decoder(dict[int, bytes]).decode
# chosen, top ids, top values of one row
_Logprob = tuple[float, list[int], list[float]]
_Tokens = tuple[list[int], dict[int, _Logprob]]
_decode_tokens = msgspec.msgpack.Decoder(_Tokens).decode


def encode_masks(masks: Mapping[int, np.ndarray]) -> bytes:
    """Packed bits of allowed tokens, uint32 (words,) a slot."""
    return _encoder.encode(
        {slot: np.ascontiguousarray(mask, np.uint32).tobytes() for slot, mask in masks.items()}
    )


def decode_masks(body: bytes | bytearray) -> dict[int, np.ndarray]:
    """What `encode_masks` was given."""
    return {slot: np.frombuffer(packed, np.uint32) for slot, packed in _decode_masks(body).items()}


def encode_tokens(tokens: list[int], logprobs: Mapping[int, TokenLogprob]) -> bytes:
    """A step's tokens in the order of its rows, and log-probabilities by row."""
    plain = {
        row: (found.logprob, [i for i, _ in found.top], [value for _, value in found.top])
        for row, found in logprobs.items()
    }
    return _encoder.encode((tokens, plain))


def decode_tokens(body: bytes | memoryview) -> tuple[list[int], dict[int, TokenLogprob]]:
    """What `encode_tokens` was given."""
    tokens, plain = _decode_tokens(body)
    found = {
        row: TokenLogprob(tokens[row], chosen, tuple(zip(ids, values)))
        for row, (chosen, ids, values) in plain.items()
    }
    return tokens, found


# -- before the first step ---------------------------------------------------------------------------------

# What a rank's arrays depend on; everything else in EngineConfig concerns rank 0 alone.
_SHARED = ("page_size", "max_sequences", "step_tokens", "kv_bits", "kv_group_size", "cache_bytes")


@dataclass(frozen=True, slots=True)
class Start:
    """How every rank runs: the way of models/step.py, the context, the engine's settings.

    handed: dtype and shape of the arrays that a pipeline's stage hands on for one token. gathered_bytes: sums
    of up to so many bytes are gathered (collective.py); None where the ranks shall measure it together.
    """

    way: str
    context: int
    settings: dict[str, int | None]
    handed: list[tuple[str, list[int]]]
    gathered_bytes: int | None = None

    @classmethod
    def of(
        cls,
        way: str,
        context: int,
        config: EngineConfig,
        handed: list[tuple[str, list[int]]] | None = None,
        gathered_bytes: int | None = None,
    ) -> Start:
        settings = {name: getattr(config, name) for name in _SHARED}
        return cls(way, context, settings, handed or [], gathered_bytes)

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(**self.settings)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Room:
    """How many pages of each group and how many state slots a rank has."""

    pages: tuple[int, ...]
    state_slots: int

    def least(self, other: Room) -> Room:
        """What both have."""
        return Room(tuple(map(min, self.pages, other.pages)), min(self.state_slots, other.state_slots))


def encode_plain(value: object) -> bytes:
    """Objects of the start, what is to be embedded, an embedding, names."""
    return _encoder.encode(value)


def decode_start(body: bytes | bytearray) -> Start:
    return msgspec.msgpack.decode(body, type=Start)


def decode_room(body: bytes | bytearray) -> Room:
    return msgspec.msgpack.decode(body, type=Room)


def decode_ids(body: bytes | bytearray) -> tuple[list[int], str | None]:
    """Token ids to embed, and the digest of their adapter."""
    return msgspec.msgpack.decode(body, type=tuple[list[int], str | None])


def decode_names(body: bytes | bytearray) -> list[str]:
    return msgspec.msgpack.decode(body, type=list[str])


# -- embeddings and failures ---------------------------------------------------------------------------------


def decode_vector(body: bytes | bytearray) -> list[float]:
    return msgspec.msgpack.decode(body, type=list[float])


def encode_error(error: BaseException) -> bytes:
    """A failure as its class's name, its sentence and, where memory was short, both numbers."""
    needed, available = getattr(error, "needed_bytes", 0), getattr(error, "available_bytes", 0)
    return _encoder.encode((type(error).__name__, str(error), needed, available))


def decode_refusal(body: bytes | bytearray) -> MlxServeError:
    """The error of a rank that goes on: what was asked of it is at fault."""
    name, sentence, needed, available = msgspec.msgpack.decode(body, type=tuple[str, str, int, int])
    if name == DoesNotFit.__name__:
        return DoesNotFit(sentence, needed_bytes=needed, available_bytes=available)
    return Unsupported(sentence) if name == Unsupported.__name__ else ModelInvalid(sentence)


def decode_error(body: bytes | bytearray, rank: int) -> MlxServeError:
    """The failure of `rank`, to raise here: DoesNotFit where memory was short, Diverged, or EngineStopped."""
    name, sentence, needed, available = msgspec.msgpack.decode(body, type=tuple[str, str, int, int])
    if name == DoesNotFit.__name__:
        return DoesNotFit(f"Rank {rank}: {sentence}", needed_bytes=needed, available_bytes=available)
    if name == Diverged.__name__:
        return Diverged(sentence, rank=rank)
    return EngineStopped(f"Rank {rank} failed ({name}: {sentence}).")
