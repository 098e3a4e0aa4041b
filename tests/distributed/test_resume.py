"""An answer taken up by another engine goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from mlxserve import SamplingParams
from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.engine.engine import Engine
from mlxserve.models.load import load_folder
from mlxserve.request import Delta, Request
from mlxserve.text.tokenizer import load_tokenizer
from tests import tiny

ENDS = dict.fromkeys(range(256, 256 + len(tiny.BYTE_SPECIALS)), -100.0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tiny.write(tmp_path_factory.mktemp("resume") / "llama", "llama", max_position_embeddings=256)
    made = Engine(load_folder(folder, LoadConfig()), load_tokenizer(folder), EngineConfig())
    yield made
    made.close()


def run(engine: Engine, request: Request) -> list[Delta]:
    deltas: list[Delta] = []

    def sink(news: object) -> None:
        assert isinstance(news, Delta), news
        deltas.append(news)

    engine.add(request, sink)
    while engine.has_work:
        engine.step()
    return deltas


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=40, temperature=0, logit_bias=ENDS),
        SamplingParams(max_tokens=40, temperature=1, seed=7, presence_penalty=1.5, logit_bias=ENDS),
        SamplingParams(max_tokens=40, temperature=1, seed=3, repetition_penalty=1.3, logit_bias=ENDS),
        SamplingParams(max_tokens=40, temperature=0, regex="([a-f]{3}-){4}", logit_bias=ENDS),
        SamplingParams(max_tokens=40, temperature=1, seed=5, stop=["e", "ab"], logit_bias=ENDS),
    ],
    ids=["greedy", "seeded", "penalised", "grammar", "stop"],
)
@pytest.mark.parametrize("kept", [1, 5])
def test_the_rest_is_the_same(engine: Engine, params: SamplingParams, kept: int) -> None:
    """Tokens, text (a character that was cut in two included), reason and counts are those of one run."""
    request = Request("whole", engine.tokenizer.encode("Once"), params.resolved())
    whole = run(engine, request)
    before, after = whole[:kept], whole[kept:]
    resume = tuple(token for delta in before for token in delta.token_ids)
    rest = run(engine, replace(request, id=f"again-{kept}", resume=resume))
    assert [token for d in rest for token in d.token_ids] == [token for d in after for token in d.token_ids]
    assert "".join(d.text for d in rest) == "".join(d.text for d in after)
    assert rest[-1].finish_reason is whole[-1].finish_reason
    assert rest[-1].metrics and whole[-1].metrics
    assert rest[-1].metrics.completion_tokens == whole[-1].metrics.completion_tokens
    assert rest[-1].metrics.prompt_tokens == whole[-1].metrics.prompt_tokens
