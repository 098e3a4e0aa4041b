"""From what a caller asked to the engine's Requests.

Knows: whose defaults hold, how n choices are seeded, what fits a context. Does not know any API's fields.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlxserve.errors import PromptTooLong
from mlxserve.request import SEED_LIMIT, Priority, Request, SamplingParams
from mlxserve.server.answer import Service
from mlxserve.server.dialogue import ReplyParser
from mlxserve.server.generation import Run
from mlxserve.server.models import Loaded


@dataclass(frozen=True, slots=True)
class Wish:
    """How one call wants to be generated, beside its prompts.

    params.max_tokens None means: as far as the context reaches. `limit` lowers the context for this call.
    `continues` as in Request: the answer is one text with the prompt's.
    """

    params: SamplingParams
    parser: Callable[[], ReplyParser]
    choices: int = 1
    client: str = ""
    priority: Priority = Priority.INTERACTIVE
    parallel_calls: bool = True
    thinking_budget: int | None = None
    limit: int | None = None
    continues: bool = False


def make_run(service: Service, entry: Loaded, prompts: Sequence[Sequence[int]], wish: Wish) -> Run:
    """The Run of every prompt, `wish.choices` times each, prompt by prompt.

    Raises PromptTooLong, with both numbers, before anything is computed, and UsageError for a stop token that
    this vocabulary does not have.
    """
    context = min(entry.engine.context, wish.limit or entry.engine.context)
    entry.dialogue.check_ids(wish.params.stop_token_ids, "stop_token_ids")
    requests = [
        _request(prompt, _params(entry, prompt, wish, choice, context), wish, entry.adapter)
        for prompt in prompts
        for choice in range(wish.choices)
    ]
    return Run(
        entry.engine,
        entry.dialogue,
        requests,
        [wish.parser() for _ in requests],
        observer=service.metrics.observer(entry.card.name),
        parallel_calls=wish.parallel_calls,
        thinking_budget=wish.thinking_budget if entry.dialogue.can_close_reasoning else None,
    )


def _params(entry: Loaded, prompt: Sequence[int], wish: Wish, choice: int, context: int) -> SamplingParams:
    room = room_for_answer(len(prompt), context, entry.card.name)
    wanted = wish.params.max_tokens
    seed = wish.params.seed
    return replace(
        wish.params,
        max_tokens=room if wanted is None else min(wanted, room),
        seed=None if seed is None else (seed + choice) % SEED_LIMIT,
    ).resolved(entry.engine.generation_defaults)


def room_for_answer(prompt_tokens: int, context: int, model: str) -> int:
    """Tokens left for the answer. Raises PromptTooLong where there is none."""
    if prompt_tokens >= context:
        raise PromptTooLong(
            f"The prompt has {prompt_tokens} tokens, and {model}'s context of {context} tokens "
            "must hold it and at least one token of the answer.",
            needed=prompt_tokens + 1,
            limit=context,
        )
    return context - prompt_tokens


def _request(prompt: Sequence[int], params: SamplingParams, wish: Wish, adapter: str | None) -> Request:
    return Request(
        uuid.uuid4().hex,
        prompt,
        params,
        priority=wish.priority,
        client=wish.client,
        adapter=adapter,
        continues=wish.continues,
    )
