"""The loads: what they ask, of whom, and that no two prompts begin alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from os.path import commonprefix

import jsonschema
import pytest

from mlxserve.bench.scenarios import NAMES, SCHEMA, Load, Sizes, make

SMALL = Sizes(clients=3, requests=7, tokens=8, prompt_tokens=20, prefix_tokens=60, long_tokens=90)


def texts(load: Load) -> list[str]:
    return [job.ask.messages[0]["content"] for phase in load.phases for job in phase]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "prefix"])
def test_no_two_prompts_begin_alike(name: str) -> None:
    listed = texts(make(name, replace(SMALL, requests=40, clients=20)))
    assert len(listed) > 1
    assert max(len(commonprefix(pair)) for pair in combinations(listed, 2)) < 8


def test_a_seed_draws_the_same_prompts_and_another_others() -> None:
    assert texts(make("throughput", SMALL)) == texts(make("throughput", SMALL))
    assert not set(texts(make("throughput", SMALL))) & set(texts(make("throughput", replace(SMALL, seed=1))))


def test_throughput_gives_every_client_its_share() -> None:
    (phase,) = make("throughput", SMALL).phases
    assert [job.client for job in phase] == [0, 1, 2, 0, 1, 2, 0]


def test_latency_is_one_client() -> None:
    (phase,) = make("latency", SMALL).phases
    assert {job.client for job in phase} == {0} and len(phase) >= 2


def test_prefix_first_one_then_all_behind_it() -> None:
    first, behind = make("prefix", SMALL).phases
    assert len(first) == 1 and len(behind) == SMALL.clients
    assert {job.ask.messages[0]["content"] for job in behind} == {first[0].ask.messages[0]["content"]}
    assert len({job.ask.messages[1]["content"] for job in (*first, *behind)}) == 1 + SMALL.clients


def test_the_long_prompt_waits_for_the_streams() -> None:
    (phase,) = make("long-prompt", SMALL).phases
    *streams, long = phase
    assert {job.role for job in streams} == {"stream"} and long.role == "long prompt"
    assert long.after_pieces > 0 and all(job.after_pieces == 0 for job in streams)
    assert streams[0].ask.max_tokens > long.after_pieces


def test_lengths_follow_tokens_a_word() -> None:
    def words(tokens_per_word: float) -> int:
        load = make("throughput", replace(SMALL, prompt_tokens=100, tokens_per_word=tokens_per_word))
        return len(texts(load)[0].split())

    assert words(1.0) == 100
    assert words(5.0) == 20


def test_own_prompts_are_asked_in_turn() -> None:
    own = [[{"role": "user", "content": text}] for text in ("a", "b")]
    load = make("throughput", replace(SMALL, own=own))
    assert texts(load) == ["a", "b", "a", "b", "a", "b", "a"]


def test_the_schema_is_sound_and_bounded() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    free, held = make("structured", SMALL).phases
    assert all(job.ask.schema is None for job in free) and all(job.ask.schema == SCHEMA for job in held)
