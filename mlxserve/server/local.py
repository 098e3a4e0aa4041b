"""Models of this machine, for the server: what there is, and engines made of them.

Knows: the models room and AsyncLLM. Does not know HTTP, nor which models are loaded.

A caller's word for a model never reaches the disk as a path, and never starts a download: only models that
were named when the server started, and complete ones in the cache, are found.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.errors import Cancelled, ModelInvalid, ModelNotFound, UsageError
from mlxserve.models.aliases import HUB, PACKAGED, near
from mlxserve.models.bert import is_encoder
from mlxserve.models.cached import find as find_cached
from mlxserve.models.cached import list_cached, parse_hub_name, remove
from mlxserve.models.describe import Description, describe_files
from mlxserve.models.memory import kv_bytes, width_of
from mlxserve.models.resolve import ModelFiles, find_local, packaged_file, resolve
from mlxserve.server.ports import AsyncEngine, ModelCard, PullProgress

# K/V that a model is served with at the least, when its share of the budget is worked out.
LEAST_TOKENS = 4096
_PROGRESS_S = 0.2

Start = Callable[[ModelFiles, LoadConfig, EngineConfig], Awaitable[AsyncEngine]]


class LocalLoader:
    """Finds models here and starts engines for them.

    named: what `--model` said; paths are allowed there, and Hub names are fetched at once.
    on_cpu: weights become float32, so that they take more memory than their files.
    start: makes an engine outside of this process, for named models alone; they take no memory here.
    """

    def __init__(
        self,
        named: Sequence[str],
        load: LoadConfig,
        engine: EngineConfig,
        *,
        on_cpu: bool,
        start: Start | None = None,
    ) -> None:
        self._load, self._engine, self._on_cpu = load, engine, on_cpu
        self._start = start
        self._named: dict[str, ModelFiles] = {}
        self._cards: dict[Path, ModelCard] = {}
        # What was said for a model, and the name it is served under.
        self.served: dict[str, str] = {}
        for name in named:
            files = resolve(name)
            self.served[name] = files.name
            if files.name in self._named and self._named[files.name].path != files.path:
                raise UsageError(f"Two models are called '{files.name}'; rename one folder.", param="model")
            self._named[files.name] = files

    # -- looking --------------------------------------------------------------------------------------

    def catalogue(self) -> list[ModelCard]:
        files = dict(self._named)
        if self._start is not None:
            return [card for entry in files.values() if (card := self._card_or_none(entry)) is not None]
        for alias in PACKAGED:
            if (path := packaged_file(alias)) is not None:
                files.setdefault(alias, ModelFiles("gguf", path, alias, "package"))
        for model in list_cached():
            if model.kind != "incomplete":
                found = _found_in_cache(model.name, model.path)
                files.setdefault(model.name, found)
        return [card for entry in files.values() if (card := self._card_or_none(entry)) is not None]

    def find(self, name: str) -> ModelCard:
        return self._card(self._files(name.removesuffix(":latest")))

    def _files(self, name: str) -> ModelFiles:
        if name in self._named:
            return self._named[name]
        if self._start is not None:
            raise self._nothing(name, fetchable=False)
        if name.lower() in PACKAGED and (packaged := find_local(name.lower())) is not None:
            return packaged
        hub_name = parse_hub_name(HUB.get(name.lower(), name))
        path = find_cached(hub_name) if hub_name is not None else None
        if path is None:
            raise self._nothing(name, fetchable=hub_name is not None)
        return _found_in_cache(name, path)

    def _nothing(self, name: str, *, fetchable: bool) -> ModelNotFound:
        close = near(name, list(self._named))
        if close:
            hint = f"did you mean {' or '.join(close)}?"
        elif fetchable:
            hint = f"'mlxserve models pull {name}' (or POST /api/pull) fetches it."
        else:
            hint = "GET /v1/models lists what there is."
        return ModelNotFound(f"There is no model '{name}' here; {hint}", param="model")

    def _card_or_none(self, files: ModelFiles) -> ModelCard | None:
        """A list is not spoilt by one damaged model."""
        try:
            return self._card(files)
        except (ModelInvalid, ModelNotFound):
            return None

    def _card(self, files: ModelFiles) -> ModelCard:
        known = self._cards.get(files.path)
        if known is None:
            known = self._cards[files.path] = _describe(files, self._load, self._engine, on_cpu=self._on_cpu)
        needed = known.needed_bytes if self._start is None else 0
        return replace(known, name=files.name, needed_bytes=needed)

    # -- engines --------------------------------------------------------------------------------------

    async def load(self, card: ModelCard) -> AsyncEngine:
        from mlxserve.engine.aio import AsyncLLM

        files = await asyncio.to_thread(self._files, card.name)
        if self._start is not None:
            return await self._start(files, self._load, self._engine)
        if card.embeds:
            from mlxserve.engine.encoder import AsyncEncoder

            return await AsyncEncoder.start(files.path, name=card.name, max_queue=self._engine.max_queue)
        return await AsyncLLM.start(str(files.path), load=self._load, engine=self._engine)

    # -- the cache ------------------------------------------------------------------------------------

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """Fetches from the Hub; ends when the caller leaves, what has arrived is kept."""
        from mlxserve.models.hub import pull

        hub_name = parse_hub_name(HUB.get(name.removesuffix(":latest").lower(), name))
        if hub_name is None:
            raise ModelNotFound(f"'{name}' is neither an alias nor a Hub name (org/name).", param="model")
        meter = _Meter()
        yield PullProgress("pulling manifest")
        work = asyncio.create_task(asyncio.to_thread(pull, hub_name, meter))
        try:
            while not (await asyncio.wait({work}, timeout=_PROGRESS_S))[0]:
                if meter.total:
                    yield PullProgress(f"pulling {hub_name}", str(hub_name), meter.total, meter.done)
            await work
        finally:
            meter.stopped = True

    def remove(self, name: str) -> None:
        if name in self._named:
            raise UsageError(f"{name} was named when this server started; stop it first.", param="model")
        hub_name = parse_hub_name(HUB.get(name.removesuffix(":latest").lower(), name))
        if hub_name is None:
            raise ModelNotFound(f"There is no model '{name}' in the cache.", param="model")
        remove(hub_name)


def _found_in_cache(name: str, path: Path) -> ModelFiles:
    return ModelFiles("folder" if path.is_dir() else "gguf", path, name, "hub")


class _Meter:
    """A download's progress, written by its threads; raises in them once `stopped`."""

    def __init__(self) -> None:
        self.done = self.total = 0
        self.stopped = False

    def __call__(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        if self.stopped:
            raise Cancelled("The caller left.")


def _describe(files: ModelFiles, load: LoadConfig, engine: EngineConfig, *, on_cpu: bool) -> ModelCard:
    model = describe_files(files)
    width = width_of(load.dtype, model.float_bytes, on_cpu)
    context = min(model.context, load.context or model.context)
    modified = int(files.path.stat().st_mtime)
    cache_bytes = _least_kv(model, engine, context, width)
    identity = f"{files.path}\0{model.weights.nbytes}\0{modified}".encode()
    return ModelCard(
        files.name,
        needed_bytes=_weight_bytes(model, load, width, on_cpu=on_cpu) + cache_bytes,
        cache_bytes=cache_bytes,
        size_bytes=model.weights.nbytes,
        created=modified,
        digest=f"sha256:{hashlib.sha256(identity).hexdigest()}",
        family=model.architecture,
        parameters=model.weights.parameters,
        quantization=_quantization(model),
        format="gguf" if files.kind == "gguf" else "safetensors",
        context=context,
        template=_template(files),
        embeds=is_encoder(model.config),
        config=model.config,
    )


def _weight_bytes(model: Description, load: LoadConfig, width: int, *, on_cpu: bool) -> int:
    whole = model.weights.loaded_bytes(width, on_cpu)
    if load.quantize_bits is None:
        return whole
    bits = load.quantize_bits + 32 / load.quantize_group_size  # a scale and a bias of 16 bits a group
    return min(whole, round(model.weights.parameters * bits / 8))


def _least_kv(model: Description, engine: EngineConfig, context: int, width: int) -> int:
    if engine.cache_bytes is not None:
        return engine.cache_bytes
    return kv_bytes(model.config, min(context, LEAST_TOKENS), kv_bits=engine.kv_bits, float_bytes=width)


def _quantization(model: Description) -> str:
    bits = (model.config.get("quantization") or {}).get("bits")
    return f"{bits}-bit" if bits else next(iter(model.types), "")


def _template(files: ModelFiles) -> str:
    """The chat template's source, without loading a tokenizer; empty where there is none."""
    if files.kind == "gguf":
        from mlxserve.models.gguf import open_gguf

        return str(open_gguf(files.path).metadata.get("tokenizer.chat_template") or "")
    source = files.path / "chat_template.jinja"
    if source.is_file():
        return source.read_text(encoding="utf-8", errors="replace")
    settings = files.path / "tokenizer_config.json"
    try:
        found: Any = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    except ValueError:
        return ""
    template = found.get("chat_template") if isinstance(found, Mapping) else None
    return template if isinstance(template, str) else ""
