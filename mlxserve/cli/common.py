"""What several commands do: open a model, say how fast it was, lay out a table.

Knows: the terminal. Answers go to standard output, everything else to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.errors import UsageError
from mlxserve.models.memory import show_bytes
from mlxserve.request import Metrics, Output

if TYPE_CHECKING:
    from mlxserve.engine.llm import LLM

ADAPTER = "given"  # the name inside this process of what --adapter names


@contextmanager
def open_llm(
    model: str, load: LoadConfig, engine: EngineConfig, adapter: Path | None = None
) -> Iterator[LLM]:
    """The model, ready to generate; what was done other than asked is said on standard error.

    adapter: a folder with the LoRA adapter that answers. Raises DependencyMissing where MLX cannot be loaded,
    and what `LLM` raises.
    """
    from mlxserve.models.backend import check_backend

    check_backend()
    from mlxserve.distributed.front import launched
    from mlxserve.engine.llm import LLM

    with _llm_on_ranks(model, load, engine) if launched() else LLM(model, load=load, engine=engine) as llm:
        for note in llm.notes:
            say(note)
        if adapter is not None:
            note = llm.load_adapter(ADAPTER, adapter).note
            llm.adapter = ADAPTER
            if note:
                say(note)
        yield llm


def _llm_on_ranks(model: str, load: LoadConfig, engine: EngineConfig) -> LLM:
    """The same where `mlxserve launch` has started this command: the model is on its ranks."""
    from mlxserve.distributed.front import start_ranks
    from mlxserve.engine.llm import LLM
    from mlxserve.models.resolve import resolve

    return LLM.on(start_ranks(resolve(model), load, engine))


def require_template(llm: LLM, raw: bool) -> None:
    """Raise UsageError if a chat is wanted of a model that has no chat template."""
    if not raw and llm.tokenizer.chat_template is None:
        raise UsageError(f"{llm.name} has no chat template; use --raw to complete the prompt as it is.")


def say(text: str) -> None:
    """A line for the person, on standard error."""
    click.echo(text, err=True)


def write(text: str) -> None:
    """A piece of an answer, on standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def figures(metrics: Metrics, peak_bytes: int) -> str:
    """One answer's figures in a line: tokens, time to the first one, tokens a second, peak memory."""
    return " · ".join([*metrics.in_words(), f"peak {show_bytes(peak_bytes)}"])


def record(output: Output) -> dict[str, Any]:
    """An answer as plain values, for JSON."""
    metrics = output.metrics
    found: dict[str, Any] = {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "token_ids": output.token_ids,
        "usage": {
            "prompt_tokens": metrics.prompt_tokens,
            "cached_tokens": metrics.cached_tokens,
            "completion_tokens": metrics.completion_tokens,
        },
        "time_to_first_token_s": metrics.time_to_first_token_s,
        "total_s": metrics.total_s,
    }
    if output.logprobs is not None:
        found["logprobs"] = [
            {"token_id": item.token_id, "logprob": item.logprob, "top": [list(pair) for pair in item.top]}
            for item in output.logprobs
        ]
    return found


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
