"""Structured output: what conforms can be said, what does not cannot, and what is not enforced is refused.

The judge of JSON is the jsonschema package, of regular expressions Python's re. The model is a tiny random
one, biased towards characters that end things, so that it comes to an end.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mlxserve.engine.grammar import Grammars
from mlxserve.errors import Unsupported
from mlxserve.request import FinishReason, SamplingParams
from tests import tiny
from tests.engine.harness import Answer, engine, finish, request, run, tiny_model

# Quotes and closing brackets before digits, digits before letters, letters before the rest.
CLOSING = {ord(c): 90.0 - i for i, c in enumerate('"}]0,:')} | {ord(c): 40.0 for c in "123456789"}
LETTERS = {ord(c): 20.0 for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_ ./@"}
TOWARDS_AN_END = {**LETTERS, **CLOSING}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(tiny_model("llama")[1], tiny.VOCAB)


def schemas(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / "schemas" / "schemas.jsonl").read_text().splitlines()]


def accepts(grammars: Grammars, params: SamplingParams, text: str) -> bool:
    """Whether a whole text may be said, byte by byte, and may end there."""
    constraint = grammars.compile(params)
    matcher = constraint.matcher
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def test_real_schemas_judge_their_own_examples(data: Path, grammars: Grammars) -> None:
    """All 150: compiled, then every example is judged as its author did; or refused with a reason."""
    refused = 0
    for entry in schemas(data):
        params = SamplingParams(schema=entry["schema"])
        try:
            grammars.compile(params)
        except Unsupported as error:
            assert error.param == "schema" and len(error.message) > 40
            refused += 1
            continue
        for example in entry["tests"]:
            said = json.dumps(example["data"], ensure_ascii=False)
            assert accepts(grammars, params, said) == example["valid"], (entry.get("name"), said[:200])
    assert refused <= 3


def test_real_schemas_are_followed(data: Path) -> None:
    """All that are not refused: generated in one batch, each answer validates or was cut off by its limit."""
    subject = engine(max_sequences=64, step_tokens=512)
    asked, answers, wanted = [], [], []
    for entry in schemas(data):
        each = request([1], 600, schema=entry["schema"], logit_bias=TOWARDS_AN_END)
        answer = Answer()
        try:
            subject.add(each, answer)
        except Unsupported:
            continue
        asked.append(each)
        answers.append(answer)
        wanted.append(entry["schema"])
    finish(subject, 20000)
    complete = 0
    for schema, answer in zip(wanted, answers):
        assert answer.error is None
        if answer.reason is FinishReason.STOP:
            complete += 1
            jsonschema.validate(json.loads(answer.text), schema)
    assert complete >= 0.8 * len(wanted), f"only {complete} of {len(wanted)} came to an end"
    assert subject.stats()["forced_tokens"] > 1000


def test_case_59_never_unconstrained_text() -> None:
    schema = {"type": "object", "properties": {"animal": {"type": "string"}}, "required": ["animal"]}
    (answer,) = run(engine(), [request(list(b"Say hi"), 200, schema=schema, logit_bias=TOWARDS_AN_END)])
    jsonschema.validate(json.loads(answer.text), schema)
    broken = {**schema, "properties": {"animal": {"type": "string", "pattern": "(["}}}
    with pytest.raises(Unsupported, match="schema cannot be enforced"):
        engine().add(request([1], 20, schema=broken), Answer())


CASE_63: dict[str, dict[str, Any]] = {
    "closed object with anyOf": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "additionalProperties": False,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "patternProperties": {
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "patternProperties": {"^x_": {"type": "boolean"}},
        "additionalProperties": False,
        "required": ["id"],
    },
    "$ref to an enum": {
        "$defs": {"colour": {"enum": ["red", "green"]}},
        "type": "array",
        "items": {"$ref": "#/$defs/colour"},
        "minItems": 2,
        "maxItems": 2,
    },
    "a recursive tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["v", "kids"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
}


@pytest.mark.parametrize("name", CASE_63)
def test_case_63_all_keywords_hold_together_or_are_refused(name: str) -> None:
    schema = CASE_63[name]
    subject, answer = engine(), Answer()
    try:
        subject.add(request([1], 300, schema=schema, logit_bias=TOWARDS_AN_END), answer)
    except Unsupported as error:
        assert error.http_status == 400
        return
    finish(subject)
    assert answer.reason is FinishReason.STOP
    jsonschema.validate(json.loads(answer.text), schema)


def test_regular_expressions_choices_and_grammars() -> None:
    subject = engine()
    asked = [
        request([1], 40, regex=r"[a-f]{3}-\d{2,4}"),
        request([2], 40, choices=["yes", "no way", "größer"]),
        request([3], 40, grammar='start: "a" ("b" | "c")+ "d"', logit_bias={ord("d"): 50.0}),
        request([4], 40, grammar='root ::= "x" [0-9] "y"'),
    ]
    words, choice, lark, gbnf = run(subject, asked)
    assert re.fullmatch(r"[a-f]{3}-\d{2,4}", words.text) and choice.text in ("yes", "no way", "größer")
    assert re.fullmatch(r"a[bc]+d", lark.text) and re.fullmatch(r"x\dy", gbnf.text)
    assert {a.reason for a in (words, choice, lark, gbnf)} == {FinishReason.STOP}


def test_cut_off_by_the_limit_is_a_valid_beginning(grammars: Grammars) -> None:
    params = SamplingParams(regex="[ab]{50}")
    (answer,) = run(engine(), [request([1], 10, regex="[ab]{50}")])
    assert answer.reason is FinishReason.LENGTH and re.fullmatch("[ab]{10}", answer.text)
    assert grammars.compile(params).matcher.try_consume_tokens(answer.tokens) == 10


def test_forced_tokens_need_no_step_each() -> None:
    word = "abcdefghijklmnopqrstuvwxyz" * 2
    subject = engine()
    (answer,) = run(subject, [request([1, 2], 200, choices=[word + "!", word + "?"])])
    assert answer.text[:-1] == word and answer.reason is FinishReason.STOP
    assert subject.stats()["forced_tokens"] >= len(word) - 1
    assert subject.stats()["steps"] < 10


def test_forced_and_drawn_tokens_give_the_same_text() -> None:
    """With log-probabilities every token is drawn; the text must not depend on that."""
    schema = {
        "type": "object",
        "properties": {"first_name": {"type": "string", "maxLength": 4}, "age": {"type": "integer"}},
        "required": ["first_name", "age"],
        "additionalProperties": False,
    }
    settings = {"schema": schema, "logit_bias": TOWARDS_AN_END}
    forced, drawn = run(
        engine(), [request([7, 8], 200, **settings), request([7, 8], 200, logprobs=0, **settings)]
    )
    assert forced.text == drawn.text and len(drawn.deltas) > len(forced.deltas)


def test_free_rows_beside_constrained_ones_are_not_disturbed() -> None:
    from tests.engine.harness import solo_tokens

    asked = [request([5, 6, 7], 20), request([1], 20, regex="[xyz]{20}"), request([8, 9], 20)]
    free, bound, other = run(engine(), asked)
    assert free.tokens == solo_tokens("llama", [5, 6, 7], 20)
    assert other.tokens == solo_tokens("llama", [8, 9], 20)
    assert re.fullmatch("[xyz]{20}", bound.text)
