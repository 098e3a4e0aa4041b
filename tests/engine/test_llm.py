"""`LLM` as a script uses it, on a tiny model folder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxserve import LLM, Output, SamplingParams
from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.engine.aio import AsyncLLM
from mlxserve.errors import ModelNotFound, PromptTooLong, UsageError
from mlxserve.request import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama)) as opened:
        yield opened


def test_one_prompt_several_prompts_and_token_ids(llm: LLM) -> None:
    (alone,) = llm.generate("hello", GREEDY)
    several = llm.generate(["hello", "a longer prompt"], GREEDY)
    (by_ids,) = llm.generate(llm.tokenizer.encode("hello"), GREEDY)
    assert isinstance(alone, Output) and alone.token_ids == several[0].token_ids == by_ids.token_ids
    assert alone.prompt == "hello" and len(alone.token_ids) == 8
    assert alone.finish_reason is FinishReason.LENGTH
    assert alone.metrics.prompt_tokens == 5 and alone.metrics.completion_tokens == 8
    assert alone.metrics.time_to_first_token_s is not None
    assert llm.tokenizer.decode(alone.token_ids) == alone.text


def test_what_the_engine_does_other_than_asked_is_noted(tiny_llama: Path) -> None:
    settings = EngineConfig(kv_bits=8)
    with LLM(str(tiny_llama), engine=settings) as narrow:
        assert any("keep their cache in 16 bits" in note for note in narrow.notes)

    async def notes() -> list[str]:
        llm = await AsyncLLM.start(str(tiny_llama), engine=settings)
        try:
            return llm.notes
        finally:
            await llm.close()

    assert asyncio.run(notes()) == narrow.notes


def test_settings_for_each_prompt(llm: LLM) -> None:
    lengths = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    assert [len(o.token_ids) for o in llm.generate(["a", "b"], lengths)] == [2, 5]
    with pytest.raises(UsageError, match="1 settings were given for 2"):
        llm.generate(["a", "b"], lengths[:1])


def test_streaming_gives_the_same_text(llm: LLM) -> None:
    deltas = list(llm.stream("hello", GREEDY))
    assert "".join(d.text for d in deltas) == llm.generate("hello", GREEDY)[0].text
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is FinishReason.LENGTH and deltas[-1].metrics is not None


def test_leaving_a_stream_frees_the_engine(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.generate("hello", GREEDY)[0].text
    assert llm.stats()["running"] == 0


def test_chat_goes_through_the_template(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}]
    (answer,) = llm.chat(talk, GREEDY)
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert answer.token_ids == llm.generate(llm.tokenizer.encode(rendered), GREEDY)[0].token_ids
    both = llm.chat([talk, talk], GREEDY)
    assert [o.token_ids for o in both] == [answer.token_ids] * 2
    assert "".join(d.text for d in llm.stream_chat(talk, GREEDY)) == answer.text


def test_progress_is_told(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    llm.generate(["a", "b", "c"], GREEDY, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_mistakes_are_one_sentence(llm: LLM) -> None:
    with pytest.raises(PromptTooLong, match=r"\d+ .*4096"):
        llm.generate("x" * 5000, GREEDY)
    with pytest.raises(UsageError, match="no token id"):
        llm.generate([[1, 10**9]], GREEDY)
    with pytest.raises(ModelNotFound):
        LLM("/no/such/model")


def test_silence_about_max_tokens_stays_within_the_context(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), load=LoadConfig(context=40), engine=EngineConfig(page_size=8)) as small:
        (answer,) = small.generate("x" * 30, SamplingParams(temperature=0.0, ignore_eos=True))
        assert len(answer.token_ids) == 10
        with pytest.raises(PromptTooLong, match=r"51 .*40"):
            small.generate("x" * 30, SamplingParams(max_tokens=21))


def test_structured_output(llm: LLM) -> None:
    (answer,) = llm.generate("pick", SamplingParams(choices=["red", "blue"], temperature=0.0))
    assert answer.text in ("red", "blue") and answer.finish_reason is FinishReason.STOP
