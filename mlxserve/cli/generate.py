"""`mlxserve generate`: text for one prompt, streamed; for several, in one batch; for a file, resumable.

Knows: where prompts come from and how answers are written. Answers alone go to standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxserve.cli import common
from mlxserve.cli.options import (
    adapter_option,
    load_options,
    model_option,
    sampling_options,
    structure_options,
)
from mlxserve.config import EngineConfig, LoadConfig
from mlxserve.errors import UsageError
from mlxserve.request import Delta, Output, SamplingParams

if TYPE_CHECKING:
    from mlxserve.engine.llm import LLM

TITLE_CHARS = 60


@click.command()
@model_option
@adapter_option
@click.option("-p", "--prompt", multiple=True, metavar="TEXT", help="May be repeated; - is standard input.")
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option("--raw", is_flag=True, help="Complete the prompt as it is, without the chat template.")
@sampling_options
@structure_options
@click.option("--logprobs", type=int, metavar="K", help="With --json: the K likeliest tokens at each place.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object an answer.")
@click.option("--input", type=click.Path(path_type=Path), metavar="FILE.jsonl", help="Prompts, one a line.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE.jsonl", help="Answers to --input.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing of speed and memory.")
@load_options
def generate(
    model: str,
    adapter: Path | None,
    prompt: tuple[str, ...],
    system: str | None,
    raw: bool,
    params: SamplingParams,
    structure: dict[str, Any],
    logprobs: int | None,
    as_json: bool,
    input: Path | None,
    output: Path | None,
    quiet: bool,
    load: LoadConfig,
    engine: EngineConfig,
) -> None:
    """Write text for one or many prompts.

    With --input, each line is an object with "prompt" or "messages", and may have an "id" and sampling
    settings of its own; other fields are kept. Run again, it goes on where it stopped.
    """
    if raw and system is not None:
        raise UsageError("--raw takes the prompt as it is, so --system has no place in it.", param="system")
    if logprobs is not None and not (as_json or input):
        raise UsageError("--logprobs needs --json, where it can be shown.", param="logprobs")
    params = replace(params, logprobs=logprobs, **structure)
    if input is not None or output is not None:
        _run_file(model, adapter, load, engine, prompt, input, output, params, system, raw)
        return
    prompts = read_prompts(prompt)
    with common.open_llm(model, load, engine, adapter) as llm:
        common.require_template(llm, raw)
        if len(prompts) == 1 and not as_json:
            _stream_one(llm, _start(llm, prompts[0], system, raw, params), quiet)
        else:
            _print_all(llm, prompts, _answers(llm, prompts, system, raw, params), as_json, quiet)


def read_prompts(given: Sequence[str]) -> list[str]:
    """The prompts, with `-` replaced by standard input, which is also read where none is given.

    Raises UsageError where there is no prompt, or standard input is asked for twice.
    """
    if not given and not sys.stdin.isatty():
        given = ("-",)
    if not given:
        raise UsageError(
            "There is no prompt: give --prompt TEXT, --prompt - or --input FILE.", param="prompt"
        )
    if list(given).count("-") > 1:
        raise UsageError("Standard input can be one prompt only; - stands there twice.", param="prompt")
    return [_read_stdin() if text == "-" else text for text in given]


def _read_stdin() -> str:
    """Standard input without its last line break."""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"Standard input is not UTF-8 text: {error}.", param="prompt") from error


def conversation(prompt: str, system: str | None) -> list[dict[str, Any]]:
    """A first turn, after the system message if there is one."""
    opening = [{"role": "system", "content": system}] if system is not None else []
    return [*opening, {"role": "user", "content": prompt}]


def _start(llm: LLM, prompt: str, system: str | None, raw: bool, params: SamplingParams) -> Iterator[Delta]:
    return llm.stream(prompt, params) if raw else llm.stream_chat(conversation(prompt, system), params)


def _stream_one(llm: LLM, deltas: Iterator[Delta], quiet: bool) -> None:
    text, last = "", Delta()
    for last in deltas:
        common.write(last.text)
        text = last.text or text
    if not text.endswith("\n"):
        common.write("\n")
    if last.metrics and not quiet:
        common.say(common.figures(last.metrics, llm.peak_memory_bytes()))


def _answers(
    llm: LLM, prompts: list[str], system: str | None, raw: bool, params: SamplingParams
) -> list[Output]:
    if raw:
        return llm.generate(prompts, params)
    return llm.chat([conversation(prompt, system) for prompt in prompts], params)


def _print_all(llm: LLM, prompts: list[str], outputs: list[Output], as_json: bool, quiet: bool) -> None:
    """Each answer in order: a JSON object a line, or the text, set apart by an empty line and a title."""
    peak_bytes = llm.peak_memory_bytes()
    for number, (prompt, output) in enumerate(zip(prompts, outputs), start=1):
        if as_json:
            common.write(json.dumps({"prompt": prompt, **common.record(output)}, ensure_ascii=False) + "\n")
            continue
        if not quiet:
            common.say(f"[{number}/{len(prompts)}] {_title(prompt)}")
        common.write(output.text.rstrip("\n") + ("\n\n" if number < len(prompts) else "\n"))
    if not quiet:
        for output in outputs:
            common.say(common.figures(output.metrics, peak_bytes))


def _title(prompt: str) -> str:
    """The prompt's beginning, in one line."""
    words = " ".join(prompt.split())
    return words if len(words) <= TITLE_CHARS else words[: TITLE_CHARS - 1] + "…"


def _run_file(
    model: str,
    adapter: Path | None,
    load: LoadConfig,
    engine: EngineConfig,
    prompt: tuple[str, ...],
    source: Path | None,
    target: Path | None,
    params: SamplingParams,
    system: str | None,
    raw: bool,
) -> None:
    from mlxserve.cli.batch import open_results, read_rows, run_rows

    if source is None or target is None:
        raise UsageError("--input and --output go together.", param="output")
    if prompt:
        raise UsageError("Give either --prompt or --input.", param="prompt")
    rows = read_rows(source, params, system, raw)
    results = open_results(target, rows)
    if results.missing:
        with common.open_llm(model, load, engine, adapter) as llm:
            common.require_template(llm, raw)
            run_rows(llm, results, at_once=engine.max_sequences)
    results.finish()
