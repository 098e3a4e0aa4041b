"""What the server needs from the rest, as protocols: an engine, a loader of engines.

Knows: names and signatures. Does not know who implements them; `cli/serve.py` puts the parts together.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mlxserve.engine.adapters import AdapterInfo
from mlxserve.engine.beside import Beside, TrainingBase
from mlxserve.request import Delta, Request
from mlxserve.text.tokenizer import Tokenizer


class AsyncEngine(Protocol):
    """One loaded model.

    `context` is the number of tokens a sequence may hold, prompt and answer together.
    `generation_defaults` are the model's own sampling settings. Embedding models have no `generate`.
    """

    @property
    def name(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def generation_defaults(self) -> Mapping[str, Any]: ...

    def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Deltas of one request; closing the iterator cancels it.

        Raises PromptTooLong, Busy and UsageError before the first delta, EngineFailed at any time.
        """
        ...

    def stats(self) -> Mapping[str, Any]:
        """Figures of the moment: queue, running, pages_free, pages_total, prefix_hit_tokens, …"""
        ...

    @property
    def healthy(self) -> bool:
        """False once the engine cannot go on."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why requests wait at the moment, though they will be answered; None where nothing is wrong."""
        ...

    async def embed(self, batch: list[list[int]], adapter: str | None = None) -> list[list[float]]:
        """One vector a sequence of tokens, of length one. Raises Unsupported where there is none."""
        ...

    @property
    def adapters(self) -> Sequence[AdapterInfo]:
        """The adapters that requests may name now."""
        ...

    async def load_adapter(self, name: str, folder: Path) -> AdapterInfo:
        """Puts an adapter on the model. Raises ModelErrors, UsageError, DoesNotFit."""
        ...

    async def drop_adapter(self, name: str) -> int:
        """Takes it off once nobody uses it; how many answers still do. Raises ModelNotFound."""
        ...

    async def shared_copy(self) -> TrainingBase:
        """What a trainer needs of the model. Raises Unsupported where it cannot be trained."""
        ...

    def beside(self, work: Callable[[Beside[Path]], Path]) -> Beside[Path]:
        """Long work that takes turns with the engine's steps."""
        ...

    async def limit_cache(self, limit_bytes: int) -> None:
        """How much its cache may hold from now on; what was cached beyond goes. Raises EngineStopped."""
        ...

    async def close(self) -> None:
        """Ends every request with EngineStopped and gives the memory back."""
        ...


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What is known of a model without loading it.

    name: as clients write it. needed_bytes: weights plus cache_bytes, the least K/V it is served with.
    created: seconds since 1970. digest: of the files. template: the chat template's text. parent: of an
    adapter, its base.
    """

    name: str
    needed_bytes: int = 0
    cache_bytes: int = 0
    size_bytes: int = 0
    created: int = 0
    digest: str = ""
    family: str = ""
    parameters: int = 0
    quantization: str = ""
    format: str = "safetensors"
    context: int = 0
    template: str = ""
    embeds: bool = False
    config: Mapping[str, Any] | None = None
    licence: str = ""
    parent: str = ""


@dataclass(frozen=True, slots=True)
class PullProgress:
    """One step of a download; bytes where they are known."""

    status: str
    digest: str = ""
    total_bytes: int = 0
    completed_bytes: int = 0


class Loader(Protocol):
    """Finds models and makes engines of them. Methods that touch the disk are called off the loop."""

    def catalogue(self) -> list[ModelCard]:
        """The models that could be loaded without a download."""
        ...

    def find(self, name: str) -> ModelCard:
        """The card of one model. Raises ModelNotFound and the other ModelErrors."""
        ...

    async def load(self, card: ModelCard) -> AsyncEngine:
        """A new engine. Raises ModelErrors and DoesNotFit."""
        ...

    def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """Downloads a model. Raises ModelNotFound, ModelGated."""
        ...

    def remove(self, name: str) -> None:
        """Deletes a downloaded model. Raises ModelNotFound."""
        ...


@dataclass(frozen=True, slots=True)
class TrainingOrder:
    """What a fine-tuning job asks of a trainer; None is its own choice.

    folder: the run's, to be made. rows_per_step: rows of one optimiser step. rate_factor: multiplies the
    trainer's own learning rate. lora: fields of the adapter (rank, alpha, targets, …).
    """

    base: str
    train: Path
    valid: Path | None
    folder: Path
    context: int
    seed: int
    epochs: int | None = None
    rows_per_step: int | None = None
    rate_factor: float | None = None
    lora: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreparedTraining:
    """Rows that were read and found good, and the settings that will hold; `inner` is the trainer's own."""

    rows: int
    tokens: int
    epochs: int
    rows_per_step: int
    rate_factor: float
    dropped: Mapping[str, int]
    inner: Any


class Trainer(Protocol):
    """Trains adapters; handed in by whoever starts the server."""

    def prepare(self, order: TrainingOrder, base: TrainingBase) -> PreparedTraining:
        """Reads and checks the rows; computes nothing. Called off the loop. Raises UsageError that names a row."""
        ...

    def run(
        self,
        prepared: PreparedTraining,
        base: TrainingBase,
        seat: Beside[Path],
        tell: Callable[[Mapping[str, Any]], None],
    ) -> Path:
        """Trains on the seat's thread, pausing between pieces; the adapter's folder. Raises Cancelled.

        tell: {"kind": "step", "step", "steps", "loss", "tokens", …}, "eval", "save" (with "path"), "note"
        (with "message").
        """
        ...
