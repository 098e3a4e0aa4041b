"""`LLM`: a model in this process, for scripts and notebooks.

Knows: how names become a running engine, and how prompts and messages become requests. Does not know how
anything is computed.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from mlxserve import display
from mlxserve.config import DEFAULT_MODEL, EngineConfig, LoadConfig
from mlxserve.engine.adapters import AdapterInfo
from mlxserve.engine.engine import Engine
from mlxserve.engine.pageview import PageTables, page_tables
from mlxserve.engine.worker import Handle, Worker
from mlxserve.errors import MlxServeError, UsageError
from mlxserve.models.load import LoadedModel, load
from mlxserve.models.memory import show_bytes
from mlxserve.models.resolve import ModelFiles, resolve
from mlxserve.request import Collected, Delta, Output, Request, SamplingParams
from mlxserve.text.tokenizer import Tokenizer, load_tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int]
Adapter = str | Sequence[str | None] | None
Progress = Callable[[int, int], None]
_names = itertools.count()


def open_worker(
    model: str,
    load_config: LoadConfig,
    engine_config: EngineConfig,
    *,
    progress: Progress | None = None,
    on_death: Callable[[BaseException], None] | None = None,
) -> Worker:
    """Find, fetch, load and start a model; `progress` is told (bytes present, bytes in all) of a download."""
    files = resolve(model, progress)

    def build() -> Engine:
        loaded = load(files, load_config)
        return Engine(loaded, tokenizer_of(files, loaded), engine_config)

    return Worker(build, on_death=on_death)


def tokenizer_of(files: ModelFiles, loaded: LoadedModel) -> Tokenizer:
    """The tokenizer that came with a model: in a GGUF file's metadata, else in its folder."""
    if files.kind == "gguf":
        from mlxserve.text.gguf_vocab import tokenizer_from_gguf

        return tokenizer_from_gguf(loaded.metadata)
    return load_tokenizer(files.path)


class LLM:
    """A model ready to generate.

        llm = LLM("smollm2")
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=40)).text)
        llm.chat([{"role": "user", "content": "Hello!"}])

    model: a folder, a .gguf file, a Hub name or an alias. Several prompts given at once run in one batch.
    adapters: names and folders of LoRA adapters (mlx-lm's or PEFT's format) that `adapter=` chooses from; the
    attribute `adapter` names the one that answers where a call chooses none (None: the base).
    Any thread may call; use it as a context manager, or call `close`. Raises MlxServeError's children.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        load: LoadConfig = LoadConfig(),  # noqa: B008 (frozen)
        engine: EngineConfig = EngineConfig(),  # noqa: B008 (frozen)
        adapters: Mapping[str, str | Path] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._take(open_worker(str(model), load, engine, progress=progress))
        try:
            for name, folder in (adapters or {}).items():
                self.load_adapter(name, folder)
        except BaseException:
            self.close()
            raise

    @classmethod
    def on(cls, worker: Handle) -> LLM:
        """An LLM on an engine that runs already, wherever that is; closing it closes the engine."""
        llm = cls.__new__(cls)
        llm._take(worker)
        return llm

    def _take(self, worker: Handle) -> None:
        self._worker = worker
        self._engine = worker.engine
        self.adapter: str | None = None

    # -- what a caller may know ------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._engine.loaded.name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._engine.loaded.context

    @property
    def notes(self) -> list[str]:
        """What was done other than asked, for people to read."""
        return list(self._engine.notes)

    def stats(self) -> dict[str, Any]:
        """Figures of the engine, see `Engine.stats`."""
        return self._worker.call(lambda engine: engine.stats()).result()

    def page_tables(self) -> PageTables:
        """Which pages the sequences that run now have; of the first group of layers."""
        return self._worker.call(lambda engine: page_tables(engine.scheduler)).result()

    def peak_memory_bytes(self) -> int:
        """The most memory MLX has held at once."""
        return int(self.stats()["peak_bytes"])

    # -- adapters ----------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The adapters that `adapter=` may name."""
        return self._worker.call(lambda engine: engine.adapters.listed).result()

    def load_adapter(self, name: str, folder: str | Path) -> AdapterInfo:
        """Add an adapter beside running answers. Raises what does not fit, by name; see `Adapters.load`."""
        path = Path(folder).expanduser()
        return self._worker.call(lambda engine: engine.adapters.load(name, path)).result()

    def drop_adapter(self, name: str) -> int:
        """Take an adapter's name away; answers that use it go on to their end, and how many do is returned."""
        return self._worker.call(lambda engine: engine.adapters.drop(name)).result()

    # -- generation -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: Adapter = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Output]:
        """Complete each prompt (text, or token ids), all in one batch; answers in the order of the prompts.

        params: one for all, or one each; None takes the model's defaults. adapter: a loaded one's name for all,
        or one each (None in such a list: the base). progress: told (finished, all).
        """
        listed: list[Prompt] = [prompts] if _is_one(prompts) else list(prompts)  # type: ignore[arg-type,list-item]
        asked = zip(listed, _each(params, len(listed)), _adapters(adapter or self.adapter, len(listed)))
        requests = [
            self._request(self._encode(prompt), each, chosen, continues=True)
            for prompt, each, chosen in asked
        ]
        outputs = self._run(requests, progress)
        for output, prompt in zip(outputs, listed):
            output.prompt = prompt if isinstance(prompt, str) else None
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        adapter: Adapter = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Output]:
        """Answer one conversation, or several in one batch, through the model's chat template."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        talks: list[Any] = list(messages) if several else [messages]
        asked = zip(talks, _each(params, len(talks)), _adapters(adapter or self.adapter, len(talks)))
        requests = [
            self._request(
                self._encode_chat(talk, tools, template_kwargs, add_generation_prompt), each, chosen
            )
            for talk, each, chosen in asked
        ]
        return self._run(requests, progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[Delta]:
        """Complete one prompt piece by piece; the last Delta has finish_reason and metrics."""
        chosen = adapter or self.adapter
        return self._stream(self._request(self._encode(prompt), params, chosen, continues=True))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        adapter: str | None = None,
    ) -> Iterator[Delta]:
        """Answer a conversation piece by piece. Leaving the iterator cancels the answer."""
        prompt = self._encode_chat(messages, tools, template_kwargs, add_generation_prompt)
        return self._stream(self._request(prompt, params, adapter or self.adapter))

    # -- life --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self._worker.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.name!r}, context={self.context})"

    def _repr_html_(self) -> str:
        stats = self.stats()
        held = f"{show_bytes(stats['kv_bytes'])}, {show_bytes(stats['kv_limit_bytes'])} at most"
        pages = (
            f"{stats['pages_total']}, {stats['pages_free']} free, {stats['pages_cached']} kept for prefixes"
        )
        rows = [
            ("context", f"{self.context:,} tokens"),
            ("weights", show_bytes(stats["weight_bytes"])),
            ("keys and values", held),
            ("pages", pages),
            ("a step runs as", stats["way"]),
            ("answers so far", f"{stats['finished']}, {stats['generated_tokens']:,} tokens"),
        ]
        return display.facts(rows, self.name)

    # -- requests -----------------------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        wrong = next(
            (t for t in prompt if not isinstance(t, int) or not 0 <= t < self.tokenizer.vocab_size), None
        )
        if wrong is not None:
            raise UsageError(f"{wrong!r} is no token id of this model's vocabulary.", param="prompt")
        return list(prompt)

    def _encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
        add_generation_prompt: bool,
    ) -> list[int]:
        return self.tokenizer.encode_chat(
            messages,
            tools=tools,
            template_kwargs=template_kwargs,
            add_generation_prompt=add_generation_prompt,
        )

    def _request(
        self,
        prompt: list[int],
        params: SamplingParams | None,
        adapter: str | None,
        *,
        continues: bool = False,
    ) -> Request:
        room = self.context - len(prompt)
        resolved = (params or SamplingParams()).resolved(self._engine.loaded.generation_defaults, room=room)
        return Request(f"llm-{next(_names)}", prompt, resolved, adapter=adapter, continues=continues)

    def _run(self, requests: list[Request], progress: Callable[[int, int], None] | None) -> list[Output]:
        requests = [replace(request, whole=True) for request in requests]
        inbox: queue.SimpleQueue[tuple[int, Delta | MlxServeError]] = queue.SimpleQueue()
        collected = [Collected() for _ in requests]
        try:
            for index, request in enumerate(requests):
                self._worker.submit(request, lambda news, index=index: inbox.put((index, news)))  # type: ignore[misc]
            finished = 0
            while finished < len(requests):
                index, news = inbox.get()
                if isinstance(news, MlxServeError):
                    raise news
                collected[index].add(news)
                if news.finish_reason is not None:
                    finished += 1
                    if progress is not None:
                        progress(finished, len(requests))
        except BaseException:
            for request in requests:
                self._worker.cancel(request.id)
            raise
        return [part.output(request.prompt) for part, request in zip(collected, requests)]

    def _stream(self, request: Request) -> Iterator[Delta]:
        inbox: queue.SimpleQueue[Delta | MlxServeError] = queue.SimpleQueue()
        self._worker.submit(request, inbox.put)
        return _deltas(inbox, lambda: self._worker.cancel(request.id))


def _deltas(inbox: queue.SimpleQueue[Delta | MlxServeError], cancel: Callable[[], None]) -> Iterator[Delta]:
    done = False
    try:
        while not done:
            news = inbox.get()
            if isinstance(news, MlxServeError):
                done = True
                raise news
            done = news.finish_reason is not None
            yield news
    finally:
        if not done:
            cancel()


def _is_one(prompts: Any) -> bool:
    """True for a text or a list of token ids, False for a list of either."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise UsageError(f"{len(params)} settings were given for {count} prompts.", param="params")
    return list(params)


def _adapters(adapter: Adapter, count: int) -> list[str | None]:
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if len(adapter) != count:
        raise UsageError(f"{len(adapter)} adapters were given for {count} prompts.", param="adapter")
    return list(adapter)
