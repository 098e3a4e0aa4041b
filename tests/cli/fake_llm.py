"""A stand-in for LLM that answers at once, with what it was asked, in small pieces.

`python -m tests.cli.fake_llm chat …` runs the real command line on it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxserve.cli import common
from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.errors import PromptTooLong
from mlxserve.request import Delta, FinishReason, Metrics, Output, SamplingParams, TokenLogprob

FIGURES = Metrics(prompt_tokens=5, completion_tokens=3, time_to_first_token_s=0.25, total_s=1.25)


@dataclass
class _Tokenizer:
    chat_template: str | None = "{{ messages }}"


@dataclass
class FakeLLM:
    """Answers "<last user text>!"; "long" is refused, "slow" takes a piece every 50 ms without end."""

    name: str = "fake"
    context: int = 4096
    tokenizer: _Tokenizer = field(default_factory=_Tokenizer)
    asked: list[Any] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    cancelled: int = 0

    def peak_memory_bytes(self) -> int:
        return 5 << 20

    def stream_chat(self, messages: Sequence[Any], params: SamplingParams) -> Iterator[Delta]:
        self.asked.append(list(messages))
        return self._stream(messages[-1]["content"], params)

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[Delta]:
        self.asked.append(prompt)
        return self._stream(prompt, params)

    def chat(self, talks: Sequence[Any], params: SamplingParams) -> list[Output]:
        self.asked.extend(talks)
        return [_output(talk[-1]["content"], params) for talk in talks]

    def generate(self, prompts: Sequence[str], params: SamplingParams) -> list[Output]:
        self.asked.extend(prompts)
        return [_output(prompt, params) for prompt in prompts]

    def _stream(self, text: str, params: SamplingParams) -> Iterator[Delta]:
        self.params.append(params)
        if text == "long":
            raise PromptTooLong("The prompt has 9 tokens, and the context 8.", needed=9, limit=8)
        return self._pieces(text)

    def _pieces(self, text: str) -> Iterator[Delta]:
        finished = False
        try:
            while text == "slow":
                yield Delta("tick ")
                time.sleep(0.05)
            for start in range(0, len(text), 3):
                yield Delta(text[start : start + 3], (start,))
            finished = True
            yield Delta("!", (0,), finish_reason=FinishReason.STOP, metrics=FIGURES)
        finally:
            self.cancelled += not finished


def _output(text: str, params: SamplingParams) -> Output:
    logprobs = [TokenLogprob(7, -0.5, ((7, -0.5),))] if params.logprobs else None
    return Output(f"{text}!", [1, 2], FinishReason.STOP, logprobs, FIGURES)


@contextmanager
def opened(
    model: str, load: LoadConfig, engine: EngineConfig, adapter: Path | None = None
) -> Iterator[FakeLLM]:
    yield FakeLLM(name=model)


if __name__ == "__main__":
    from mlxserve.cli.main import main

    common.open_llm = opened  # type: ignore[assignment]
    sys.exit(main())
