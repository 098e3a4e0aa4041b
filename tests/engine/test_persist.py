"""Prefixes on disk: they come back after a restart, give a cold run's answer, and damage is a miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxserve.cache.disk import DiskTier
from mlxserve.engine.engine import Engine
from tests.engine.harness import engine, finish, prompts, request, run, solo_tokens

PROMPT = prompts(1, seed=11, longest=1)[0] + list(range(60)) + list(range(60, 130))


def with_disk(folder: Path, kind: str = "llama", **settings: Any) -> Engine:
    """Pages of 4 tokens, so blocks of 32."""
    return engine(kind, cache_dir=folder, page_size=4, **settings)


def cached(subject: Engine, prompt: list[int], count: int = 8) -> tuple[list[int], int]:
    (answer,) = run(subject, [request(prompt, count)])
    metrics = answer.deltas[-1].metrics
    assert metrics is not None
    return answer.tokens, metrics.cached_tokens


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3", "gemma2"])
def test_a_prefix_survives_a_restart(kind: str, tmp_path: Path) -> None:
    first = with_disk(tmp_path, kind)
    tokens, _ = cached(first, PROMPT)
    first.close()
    again = with_disk(tmp_path, kind)
    assert cached(again, PROMPT) == (tokens, 128)
    assert again.stats()["disk_hits"] == 4
    assert tokens == solo_tokens(kind, PROMPT, 8)
    again.close()


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_pages_too(bits: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": {"head_dim": 32}, "kv_bits": bits}
    first = with_disk(tmp_path, "qwen3", **settings)
    tokens, _ = cached(first, PROMPT)
    first.close()
    again = with_disk(tmp_path, "qwen3", **settings)
    assert cached(again, PROMPT) == (tokens, 128)
    other_form = with_disk(tmp_path, "qwen3", model={"head_dim": 32})
    assert cached(other_form, PROMPT)[1] == 0


def test_a_conversation_goes_on_from_its_answer(tmp_path: Path) -> None:
    first = with_disk(tmp_path)
    tokens, _ = cached(first, PROMPT, 40)
    first.close()
    again = with_disk(tmp_path)
    longer = [*PROMPT, *tokens, 1, 2, 3]
    answer, reused = cached(again, longer)
    assert reused == 160 and answer == solo_tokens("llama", longer, 8)
    again.close()
    files = set(tmp_path.glob("*.kv"))
    third = with_disk(tmp_path)
    cached(third, longer)
    third.close()
    assert files == set(tmp_path.glob("*.kv")), "nothing is written twice"


def test_damage_is_a_miss_and_never_a_wrong_answer(tmp_path: Path) -> None:
    first = with_disk(tmp_path)
    tokens, _ = cached(first, PROMPT)
    first.close()
    for path in tmp_path.glob("*.kv"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    again = with_disk(tmp_path)
    assert cached(again, PROMPT) == (tokens, 0)


def test_another_model_does_not_read_these_files(tmp_path: Path) -> None:
    first = with_disk(tmp_path)
    cached(first, PROMPT)
    first.close()
    other = with_disk(tmp_path, "qwen3")
    assert cached(other, PROMPT) == (solo_tokens("qwen3", PROMPT, 8), 0)


def test_what_comes_back_fits_beside_running_sequences(tmp_path: Path) -> None:
    first = with_disk(tmp_path)
    cached(first, PROMPT)
    first.close()
    page_bytes = sum(first.memory.page_bytes)
    again = with_disk(tmp_path, cache_bytes=40 * page_bytes)
    asked = [request(p, 20) for p in (PROMPT, *prompts(4, seed=12), PROMPT[:70])]
    answers = run(again, asked)
    assert [a.tokens for a in answers] == [solo_tokens("llama", r.prompt, 20) for r in asked]
    finish(again)
    again.scheduler.tree.clear()
    assert all(pool.free == pool.total for pool in again.scheduler.pools)


HYBRIDS = ["qwen3_next", "lfm2", "mamba2"]


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_hybrids_prefix_survives_a_restart(kind: str, tmp_path: Path) -> None:
    first = with_disk(tmp_path, kind)
    tokens, _ = cached(first, PROMPT, 40)
    first.close()
    again = with_disk(tmp_path, kind)
    assert cached(again, PROMPT, 40) == (tokens, 128)
    assert tokens == solo_tokens(kind, PROMPT, 40)
    again.close()
    files = set(tmp_path.glob("*.kv"))
    longer = [*PROMPT, *tokens, 1, 2, 3]
    third = with_disk(tmp_path, kind)
    assert cached(third, longer) == (solo_tokens(kind, longer, 8), 128)
    third.close()
    more = {path.name for path in set(tmp_path.glob("*.kv")) - files}
    names = third.persistence.disk.chain(longer)
    ends = {f"{name}.kv" for name in (*names[4:], DiskTier.state_of(names[-1]))}
    assert more == ends if kind != "mamba2" else more == {f"{DiskTier.state_of(names[-1])}.kv"}
    fourth = with_disk(tmp_path, kind)
    assert cached(fourth, longer)[1] == len(longer) // 32 * 32


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_damaged_state_is_a_miss(kind: str, tmp_path: Path) -> None:
    first = with_disk(tmp_path, kind)
    tokens, _ = cached(first, PROMPT)
    first.close()
    (path,) = [tmp_path / f"{DiskTier.state_of(first.persistence.disk.chain(PROMPT)[-1])}.kv"]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    again = with_disk(tmp_path, kind)
    assert cached(again, PROMPT) == (tokens, 0)


def test_a_hybrid_comes_back_beside_running_sequences(tmp_path: Path) -> None:
    first = with_disk(tmp_path, "lfm2")
    cached(first, PROMPT)
    cached(first, PROMPT[:70])
    first.close()
    again = with_disk(tmp_path, "lfm2", max_sequences=3)
    asked = [request(p, 20) for p in (PROMPT, *prompts(4, seed=12), PROMPT[:70])]
    answers = run(again, asked)
    assert [a.tokens for a in answers] == [solo_tokens("lfm2", r.prompt, 20) for r in asked]
    assert again.stats()["disk_hits"] >= 4
    again.scheduler.tree.clear()
    pools = [*again.scheduler.pools, again.scheduler.states]
    assert all(pool is not None and pool.free == pool.total for pool in pools)


def test_without_a_prefix_cache_it_is_said_that_nothing_is_kept(tmp_path: Path) -> None:
    subject = with_disk(tmp_path / "none", "lfm2", prefix_cache=False)
    assert any("on disk" in note for note in subject.notes)
    assert cached(subject, PROMPT)[0] == solo_tokens("lfm2", PROMPT, 8)
