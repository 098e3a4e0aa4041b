"""A model in this process as the one who answers.

Knows: `AsyncLLM`. Answers go on to their full length, so that two models do the same work.
"""

from __future__ import annotations

import itertools

from mlxserve.bench.target import Ask, Heard, Totals
from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.engine.aio import AsyncLLM
from mlxserve.errors import UsageError
from mlxserve.request import Delta, Request, SamplingParams


class InProcess:
    """An `AsyncLLM` behind the protocol of `Target`. Greedy, and deaf to end markers unless a schema holds."""

    kind = "in process"

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.name = llm.name
        self.context: int | None = llm.context
        self._ids = itertools.count()

    @classmethod
    async def start(cls, model: str, load: LoadConfig, engine: EngineConfig) -> InProcess:
        """Load the model. Raises UsageError if it has no chat template, and what `AsyncLLM.start` raises."""
        llm = await AsyncLLM.start(model, load=load, engine=engine)
        if llm.tokenizer.chat_template is None:
            await llm.close()
            raise UsageError(f"{llm.name} has no chat template, and bench asks it to chat.", param="model")
        return cls(llm)

    async def ask(self, question: Ask, heard: Heard) -> Totals:
        prompt = self.llm.tokenizer.encode_chat(question.messages)
        params = SamplingParams(
            max_tokens=question.max_tokens,
            temperature=0.0,
            schema=question.schema,
            ignore_eos=question.schema is None,
        ).resolved(self.llm.generation_defaults)
        last = Delta()
        async for last in self.llm.generate(Request(f"bench-{next(self._ids)}", prompt, params)):
            if last.token_ids:
                heard(last.text, len(last.token_ids))
            elif last.text:
                heard(last.text, 0)
        assert last.metrics is not None
        told = last.metrics
        return Totals(
            told.prompt_tokens, told.completion_tokens, told.cached_tokens, str(last.finish_reason or "")
        )

    async def peak_bytes(self) -> int | None:
        return int(self.llm.stats()["peak_bytes"])

    async def close(self) -> None:
        await self.llm.close()
