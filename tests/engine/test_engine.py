"""The engine gives every request what it would have got alone, whatever else runs, and loses nothing.

The truth is mlx-lm's own loop over the same weights, one sequence alone (tests/engine/harness.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mlxserve.config import EngineConfig
from mlxserve.engine.engine import Engine
from mlxserve.engine.memory import measure
from mlxserve.errors import Busy, DoesNotFit, PromptTooLong, UsageError
from mlxserve.request import FinishReason, Priority
from tests import tiny
from tests.engine.harness import (
    Answer,
    engine,
    finish,
    prompts,
    request,
    run,
    solo_logprobs,
    solo_tokens,
    tiny_model,
)

BATCHED = [kind for kind in tiny.kinds() if kind not in ("mistral",)]


@pytest.mark.parametrize("kind", BATCHED)
def test_ragged_batch_equals_solo_runs(kind: str) -> None:
    asked = [request(p, 3 + 2 * i) for i, p in enumerate(prompts(6, seed=1))]
    subject = engine(kind)
    answers = run(subject, asked)
    for each, answer in zip(asked, answers):
        assert answer.tokens == solo_tokens(kind, each.prompt, each.params.max_tokens)
        assert answer.reason is FinishReason.LENGTH
    stats = subject.stats()
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3", "gemma2", "lfm2"])
def test_requests_that_come_and_go_share_prefixes(kind: str) -> None:
    """Later requests start with earlier ones' tokens, partly and wholly, while those still run."""
    subject = engine(kind, page_size=4)
    base = prompts(1, seed=2, longest=50)[0] + list(range(40))
    asked = [request(base[: 10 + 9 * i] + [i], 4 + i) for i in range(8)]
    answers = []
    for each in asked:
        answers.append(Answer())
        subject.add(each, answers[-1])
        subject.step()
    finish(subject)
    for each, answer in zip(asked, answers):
        assert answer.tokens == solo_tokens(kind, each.prompt, each.params.max_tokens)
    assert subject.stats()["prefix_hit_tokens"] > 0


def test_a_conversation_is_continued_from_its_pages() -> None:
    subject = engine()
    first = request(list(range(60)), 20)
    (answer,) = run(subject, [first])
    longer = request([*first.prompt, *answer.tokens, 7, 8, 9], 5)
    (second,) = run(subject, [longer])
    assert second.tokens == solo_tokens("llama", longer.prompt, 5)
    assert second.deltas[-1].metrics is not None
    # All but the last token of the answer was computed, and what follows it was not there.
    assert second.deltas[-1].metrics.cached_tokens == 79


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_sequences_resume_with_the_same_text(kind: str, overlap: bool) -> None:
    subject = engine(kind, cache_bytes=_bytes_for(kind, 14), overlap=overlap)
    asked = [request(p, 30) for p in prompts(6, seed=3, longest=40)]
    answers = run(subject, asked)
    for each, answer in zip(asked, answers):
        assert answer.tokens == solo_tokens(kind, each.prompt, 30)
    assert subject.stats()["preemptions"] > 0


def test_a_token_read_after_its_sequence_gave_way_has_its_log_probability() -> None:
    subject = engine(cache_bytes=_bytes_for("llama", 14))
    asked = [request(p, 30, logprobs=0) for p in prompts(6, seed=3, longest=40)]
    answers = run(subject, asked)
    assert subject.stats()["preemptions"] > 0
    for each, answer in zip(asked, answers):
        got = [entry for delta in answer.deltas for entry in delta.logprobs]
        assert [entry.token_id for entry in got] == answer.tokens
        table = solo_logprobs("llama", [*each.prompt, *answer.tokens])
        want = [table[len(each.prompt) + i - 1, token] for i, token in enumerate(answer.tokens)]
        np.testing.assert_allclose([entry.logprob for entry in got], want, atol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "granitemoehybrid"])
def test_batch_requests_give_way_to_interactive_ones_and_resume(kind: str) -> None:
    subject = engine(kind, max_sequences=2)
    slow = [request(p, 25, priority=Priority.BATCH) for p in prompts(2, seed=9, longest=30)]
    answers = [Answer(), Answer(), Answer()]
    for each, answer in zip(slow, answers):
        subject.add(each, answer)
    for _ in range(6):
        subject.step()
    urgent = request([1, 2, 3], 4)
    subject.add(urgent, answers[2])
    finish(subject)
    for each, answer in zip([*slow, urgent], answers):
        assert answer.tokens == solo_tokens(kind, each.prompt, each.params.max_tokens)
    assert subject.stats()["preemptions"] == 1


def _bytes_for(kind: str, pages: int) -> int:
    """A cache limit with about so many pages, and as many bytes again for recurrent state if there is any."""
    loaded = tiny_model(kind)[0]
    sizes = measure(loaded.model, engine(kind).way, EngineConfig(page_size=8))
    half = max(pages * sum(sizes.page_bytes), 6 * sizes.slot_bytes)
    return 2 * half if sizes.slot_bytes and sizes.page_bytes else half


def test_case_33_conversations_stay_apart() -> None:
    """16 prompts with unique markers at once, then a short one: each as if alone."""
    subject = engine()
    asked = [request([*range(30), 100 + i, *range(10)], 12) for i in range(16)]
    answers = run(subject, asked)
    assert [a.tokens for a in answers] == [solo_tokens("llama", r.prompt, 12) for r in asked]
    subject.scheduler.tree.clear()
    (hello,) = run(subject, [request([104, 105], 12)])
    assert hello.tokens == solo_tokens("llama", [104, 105], 12)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_case_34_a_shared_beginning_is_reused_to_the_token(kind: str) -> None:
    """20 tokens stored, a request that shares 8: log-probabilities match a cold run."""
    subject = engine(kind, page_size=4)
    stored = list(range(20))
    run(subject, [request(stored, 2)])
    fork = request([*stored[:8], 200, 201, 202], 3, logprobs=0)
    (answer,) = run(subject, [fork])
    logprobs = solo_logprobs(kind, [*fork.prompt, *answer.tokens])
    for i, delta in enumerate(answer.deltas):
        (entry,) = delta.logprobs
        assert entry.logprob == pytest.approx(logprobs[len(fork.prompt) + i - 1, entry.token_id], abs=1e-3)


def test_case_35_reuse_only_where_every_layer_can_resume() -> None:
    """gemma3 with windows of 8: pages that slid out are not reused, and the answer is a cold run's."""
    subject = engine("gemma3_text", page_size=4)
    stored = list(range(20))
    run(subject, [request(stored, 30)])
    fork = request([*stored[:12], 250, 251], 6)
    (answer,) = run(subject, [fork])
    assert answer.tokens == solo_tokens("gemma3_text", fork.prompt, 6)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba2", "lfm2"])
@pytest.mark.parametrize("together", [True, False])
def test_case_36_bytes_held_stay_within_the_limit(kind: str, together: bool) -> None:
    limit = _bytes_for(kind, 40)
    subject = engine(kind, cache_bytes=limit)
    asked = [request(p, 6) for p in prompts(24, seed=4, longest=120)]
    for batch in [asked] if together else [[each] for each in asked]:
        for each in batch:
            subject.add(each, Answer())
        while subject.has_work:
            subject.step()
            assert subject.runner.model.nbytes <= limit


def test_case_37_layers_that_cannot_be_packed_are_named() -> None:
    """Head size 16 is no multiple of the group of 32: start-up says so, and the cache stays whole."""
    subject = engine("llama", kv_bits=8, kv_group_size=32)
    assert any("16 bits" in note for note in subject.notes)
    (answer,) = run(subject, [request(list(range(20)), 5)])
    assert answer.tokens == solo_tokens("llama", list(range(20)), 5)


def test_case_38_a_short_row_is_not_disturbed_by_a_long_one() -> None:
    asked = [request(list(range(12)), 4, logprobs=0), request([5, 6, 7], 4, logprobs=0)]
    answers = run(engine(), asked)
    for each, answer in zip(asked, answers):
        logprobs = solo_logprobs("llama", [*each.prompt, *answer.tokens])
        got = [delta.logprobs[0].logprob for delta in answer.deltas]
        want = [logprobs[len(each.prompt) + i - 1, t] for i, t in enumerate(answer.tokens)]
        np.testing.assert_allclose(got, want, atol=1e-3)


@pytest.mark.parametrize("length", [255, 256, 257])
def test_case_39_lengths_about_a_boundary(length: int) -> None:
    asked = [request([1, 2, 3, 4, 5], 3), request([i % 250 for i in range(length)], 3)]
    answers = run(engine(page_size=16, step_tokens=512), asked)
    assert [a.tokens for a in answers] == [solo_tokens("llama", r.prompt, 3) for r in asked]


def test_case_41_sliding_and_full_layers_agree_batched_and_alone() -> None:
    prompt = prompts(1, seed=5, longest=60)[0]
    alone = run(engine("gemma3_text"), [request(prompt, 20)])[0].tokens
    batched = run(engine("gemma3_text"), [request(p, 20) for p in [*prompts(5, seed=6), prompt]])[-1].tokens
    assert alone == batched == solo_tokens("gemma3_text", prompt, 20)


# -- packed K/V -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_cache_gives_the_same_batched_and_alone(bits: int) -> None:
    """Attention reads what was stored, so batch and chunk sizes do not change the answer."""
    asked = [request(p, 12) for p in prompts(6, seed=7)]
    together = run(engine_wide(bits), asked)
    for each, answer in zip(asked, together):
        (alone,) = run(engine_wide(bits, step_tokens=16), [request(each.prompt, 12)])
        assert alone.tokens == answer.tokens


def engine_wide(bits: int, **settings: int) -> Engine:
    """qwen3 with heads of 32, which groups of 32 divide."""
    return engine("qwen3", model={"head_dim": 32}, kv_bits=bits, kv_group_size=32, **settings)


def test_packed_cache_is_smaller() -> None:
    sizes = {bits: sum(engine_wide(bits).memory.page_bytes) for bits in (16, 8, 4)}
    assert sizes[8] < 0.4 * sizes[16] and sizes[4] < 0.3 * sizes[16]


# -- scheduling as seen from outside --------------------------------------------------------------------------


def test_interactive_goes_before_batch() -> None:
    subject = engine(max_sequences=1)
    order: list[str] = []
    first = request([1], 2)
    late = [request([i], 2, priority=p) for i, p in ((2, Priority.BATCH), (3, Priority.INTERACTIVE))]
    for each in [first, *late]:
        subject.add(each, lambda news, name=each.id: order.append(name))  # type: ignore[misc]
    finish(subject)
    assert list(dict.fromkeys(order)) == [first.id, late[1].id, late[0].id]


def test_one_client_cannot_fill_the_line() -> None:
    subject = engine(max_sequences=1)
    order: list[str] = []
    greedy = [request([i], 4, client="a") for i in range(4)]
    other = request([9], 4, client="b")
    for each in [*greedy, other]:
        subject.add(each, lambda news, name=each.client: order.append(name))  # type: ignore[misc]
    finish(subject)
    assert list(dict.fromkeys(order)) == ["a", "b"] and order.index("b") <= 8


def test_a_full_queue_is_said() -> None:
    subject = engine(max_sequences=1, max_queue=2)
    for i in range(2):
        subject.add(request([i], 2), Answer())
    with pytest.raises(Busy, match="2 requests are waiting"):
        subject.add(request([5], 2), Answer())


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    subject = engine(cache_bytes=_bytes_for("llama", 10))
    with pytest.raises(DoesNotFit) as refused:
        subject.add(request(list(range(100)), 100), Answer())
    assert refused.value.needed_bytes > refused.value.available_bytes > 0


def test_case_21_a_prompt_beyond_the_context() -> None:
    with pytest.raises(PromptTooLong, match=r"5000 .*4096") as refused:
        engine().add(request([1] * 4990, 10), Answer())
    assert (refused.value.needed, refused.value.limit) == (5000, 4096)
    assert refused.value.code == "context_length_exceeded"


def test_an_id_twice_and_a_bias_outside_the_vocabulary_are_refused() -> None:
    subject = engine()
    once = request([1], 4)
    subject.add(once, Answer())
    with pytest.raises(UsageError, match="already here"):
        subject.add(once, Answer())
    with pytest.raises(UsageError, match="logit_bias"):
        subject.add(request([1], 4, logit_bias={10**6: 1.0}), Answer())


def test_case_18_cancelling_frees_pages_within_one_step() -> None:
    subject = engine()
    long, short = request(list(range(50)), 500), request([1, 2], 3)
    answer = Answer()
    subject.add(long, answer)
    for _ in range(4):
        subject.step()
    subject.cancel(long.id)
    assert answer.reason is FinishReason.CANCELLED
    stats = subject.stats()
    assert stats["running"] == 0 and stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    (after,) = run(subject, [short])
    assert after.tokens == solo_tokens("llama", short.prompt, 3)


def test_a_deadline_ends_a_request() -> None:
    subject = engine()
    now = 0.0
    subject.clock = lambda: now
    answer = Answer()
    subject.add(request([1], 500, deadline_s=5.0), answer)
    subject.step()
    now = 6.0
    finish(subject)
    assert answer.reason is FinishReason.CANCELLED and len(answer.tokens) < 10


# -- ends -------------------------------------------------------------------------------------------------------


def test_end_of_turn_ids_end_the_answer_and_show_nothing() -> None:
    prompt = [3, 1, 4]
    tokens = solo_tokens("llama", prompt, 8)
    loaded, tokenizer = tiny_model("llama")
    subject = engine()
    subject.scheduler.eos = frozenset({tokens[4]})
    (answer,) = run(subject, [request(prompt, 8, ignore_eos=False)])
    assert answer.tokens == tokens[: tokens.index(tokens[4]) + 1]
    assert answer.reason is FinishReason.STOP
    assert answer.text == tokenizer.decode(answer.tokens[:-1])


def test_a_stop_string_ends_the_answer_before_it() -> None:
    prompt = [3, 1, 4]
    whole = run(engine(), [request(prompt, 30)])[0].text
    stop = whole[8:10]
    (answer,) = run(engine(), [request(prompt, 30, stop=(stop,))])
    assert answer.text == whole[: whole.index(stop)]
    assert answer.reason is FinishReason.STOP and answer.deltas[-1].stopped_by == stop


def test_both_ways_of_building_steps_give_the_same() -> None:
    asked = [request(p, 15) for p in prompts(5, seed=8)]
    ahead = [a.tokens for a in run(engine(overlap=True), asked)]
    behind = [a.tokens for a in run(engine(overlap=False), [request(r.prompt, 15) for r in asked])]
    assert ahead == behind


def test_embeddings_are_the_mean_of_the_trunk() -> None:
    import mlx.core as mx

    subject = engine()
    ids = list(range(9))
    (vector,) = subject.embed([ids])
    trunk = tiny_model("llama")[0].model.model
    mean = np.array(trunk(mx.array(ids)[None])[0], np.float64).mean(axis=0)
    np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "continues", "text"),
    [
        ([259], True, " the the"),
        ([259], False, "the the"),
        ([262], True, "the the"),
        ([262, 65], True, " the the"),
    ],
)
def test_a_raw_completion_keeps_the_space_it_begins_with(
    prompt: list[int], continues: bool, text: str
) -> None:
    """Of a SentencePiece vocabulary; 262 is its BOS, behind which a text begins."""
    from tests.text.test_detokenize import sentencepiece

    subject = Engine(tiny_model("llama")[0], sentencepiece(), EngineConfig(page_size=8))
    asked = replace(request(prompt, 2, logit_bias={257: 100.0}), continues=continues)
    assert run(subject, [asked])[0].text == text
