"""Tool calls in replies: each family's, the same however the text is cut (cases 1, 4, 6, 9)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxserve.text.events import Text, ToolStart
from mlxserve.text.formats import DIALECTS
from mlxserve.text.mlx_lm_parsers import module
from mlxserve.text.reply import ReplyParser
from mlxserve.text.tokenizer import Tokenizer
from tests.conftest import ROOT
from tests.text.conftest import MakeTokenizer
from tests.text.families import ARGUMENTS, BOTH, FAMILIES, READ, TOOLS, build, calls, cut, take_apart, text


@pytest.mark.parametrize("family", FAMILIES)
def test_case_4_each_familys_calls(make: MakeTokenizer, family: str) -> None:
    reply = FAMILIES[family][2]
    events = take_apart(build(make, family), [reply])
    assert calls(events) == [("read", ARGUMENTS), ("list_files", {})]
    assert len(events) == 6, events


@pytest.mark.parametrize("family", FAMILIES)
def test_case_4_pieces_of_one_character_give_the_same(make: MakeTokenizer, family: str) -> None:
    tokenizer = build(make, family)
    whole = FAMILIES[family][2]
    if not family.startswith(("llama3", "harmony")):
        whole = f"I will look.\n\n{whole}\n"
    events = take_apart(tokenizer, [whole])
    assert take_apart(tokenizer, list(whole)) == events
    assert text(events) in ("", "I will look.")


@pytest.mark.parametrize("family", FAMILIES)
def test_markers_of_special_tokens_are_not_hidden(make: MakeTokenizer, family: str) -> None:
    tokenizer = build(make, family)
    ids = tokenizer.encode(FAMILIES[family][2])
    assert tokenizer.decode(ids, skip_special_tokens=False) == FAMILIES[family][2]
    stream = tokenizer.detokenizer()
    shown = "".join([*(stream.add(i) for i in ids), stream.finish()])
    assert calls(take_apart(tokenizer, [shown])) == [("read", ARGUMENTS), ("list_files", {})]


_built: dict[str, Tokenizer] = {}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_case_4_any_split_gives_the_same_events(make: MakeTokenizer, data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(sorted(FAMILIES)))
    tokenizer = _built.setdefault(family, _built.get(family) or build(make, family))
    bits = [
        *FAMILIES[family][1],
        FAMILIES[family][2],
        FAMILIES[family][2][:-9],
        "<tool_call>",
        "</tool_call>",
    ]
    bits += ["<think>", "</think>", "text", " ", "\n", '{"name": "x"', "{", "}", "[", '"']
    whole = "".join(data.draw(st.lists(st.sampled_from(bits), max_size=6)))
    places = data.draw(st.lists(st.integers(0, 10_000), max_size=8))
    assert take_apart(tokenizer, cut(whole, places)) == take_apart(tokenizer, [whole])


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"harmony"}))  # whose markers are structure
def test_without_tools_calls_are_text(make: MakeTokenizer, family: str) -> None:
    reply = FAMILIES[family][2]
    for tools in (None, []):
        assert take_apart(build(make, family), list(reply), tools) == [Text(reply)]


def test_case_4_prose_then_a_call(make: MakeTokenizer) -> None:
    pieces = [
        "I will ",
        "read it.\n<tool",
        "_c",
        'all>\n{"name": "read", "argum',
        'ents": {"filePath": "a"}}',
        "\n</",
        "tool_call>",
    ]
    parser = ReplyParser(build(make, "hermes"), [READ])
    streamed = [parser.push(piece) for piece in pieces]
    assert streamed[:2] == [[Text("I will")], [Text(" read it.")]]
    assert streamed[2:-1] == [[]] * 4
    assert calls([*streamed[-1], *parser.finish()]) == [("read", {"filePath": "a"})]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (r'{"filePath": "C:\dir\new"}', "C:\\dir\new"),
        (r'{"filePath": "a\"b\\c\u00e9"}', 'a"b\\cé'),
        ('{"filePath": "a\nb"}', "a\nb"),
        ("{'filePath': 'it\\'s'}", "it's"),
        (r'"{\"filePath\": \"a\"}"', "a"),
        (r'{"filePath": "\d+\u12"}', "\\d+\\u12"),
    ],
)
def test_case_6_arguments_with_faults_that_can_be_read(
    make: MakeTokenizer, written: str, expected: str
) -> None:
    reply = f'<tool_call>{{"name": "read", "arguments": {written}}}</tool_call>'
    if written.startswith("{'"):
        reply = reply.replace('"', "'")
    assert calls(take_apart(build(make, "hermes"), [reply])) == [("read", {"filePath": expected})]


@pytest.mark.parametrize("family", ["mistral_named", "mistral_list"])
def test_case_6_mistrals_forms_with_a_stray_backslash(make: MakeTokenizer, family: str) -> None:
    reply = FAMILIES[family][2].replace("src/a.py", r"\d")
    assert calls(take_apart(build(make, family), [reply]))[0] == ("read", {"filePath": "\\d", "lines": 3})
    if family == "mistral_named":
        bare = reply.replace("[ARGS]", "")
        assert calls(take_apart(build(make, family), [bare]))[0][1]["filePath"] == "\\d"


@pytest.mark.parametrize(
    "payload",
    [
        "nonsense",
        '{"name": "read", "arguments": {"filePath": }}',
        '{"name": "read", "arguments": {"filePath": "a"',
        '{"name": "read", "arguments": [1]}',
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        "{}",
        "",
        '{"name": "read", "arguments": NaN}',
    ],
)
def test_case_6_a_malformed_call_is_text_and_its_siblings_live(make: MakeTokenizer, payload: str) -> None:
    bad = f"<tool_call>{payload}</tool_call>"
    good = f"<tool_call>{BOTH[0]}</tool_call>"
    events = take_apart(build(make, "hermes"), list(f"{good}{bad}{good}"))
    assert [call[0] for call in calls(events)] == ["read", "read"]
    assert text(events) == bad


@pytest.mark.parametrize(
    ("family", "good", "bad"),
    [
        ("kimi_k2", '{"filePath": "src/a.py", "lines": 3}', "{broken"),
        ("deepseek_v3", '{"filePath": "src/a.py", "lines": 3}', '{"filePath": }'),
        ("mistral_list", BOTH[0], '{"name": "read", "arguments": {"filePath": }}'),
        ("minimax_m2", '<invoke name="read">', "<invoke name=>"),
    ],
)
def test_case_6_siblings_in_one_block_live(make: MakeTokenizer, family: str, good: str, bad: str) -> None:
    reply = FAMILIES[family][2]
    assert good in reply
    events = take_apart(build(make, family), [reply.replace(good, bad)])
    assert ("list_files", {}) in calls(events)


def test_calls_as_the_generic_words_ask_for_them_count_too(make: MakeTokenizer) -> None:
    tokenizer = build(make, "deepseek_v3")
    whole = FAMILIES["hermes"][2] + FAMILIES["deepseek_v3"][2]
    assert [call[0] for call in calls(take_apart(tokenizer, list(whole)))] == ["read", "list_files"] * 2


def test_case_6_glm_text_that_is_no_known_function(make: MakeTokenizer) -> None:
    reply = "<tool_call>I am not sure</tool_call>"
    assert take_apart(build(make, "glm"), [reply]) == [Text(reply)]


def test_a_call_whose_end_marker_was_an_end_token_counts(make: MakeTokenizer) -> None:
    events = take_apart(build(make, "hermes"), [f"<tool_call>{BOTH[0]}"])
    assert calls(events) == [("read", ARGUMENTS)]


def test_a_call_cut_off_is_text(make: MakeTokenizer) -> None:
    cut_off = '<tool_call>\n{"name": "read", "argum'
    assert take_apart(build(make, "hermes"), list(cut_off)) == [Text(cut_off)]


def test_own_ids_are_kept_and_others_unique(make: MakeTokenizer) -> None:
    starts = [
        e for e in take_apart(build(make, "kimi_k2"), [FAMILIES["kimi_k2"][2]]) if isinstance(e, ToolStart)
    ]
    assert [start.id for start in starts] == ["functions.read:0", "functions.list_files:1"]
    parser = ReplyParser(build(make, "hermes"), TOOLS)
    made = [e.id for e in parser.push(FAMILIES["hermes"][2]) if isinstance(e, ToolStart)]
    assert len(set(made)) == 2 and all(call_id.startswith("call_") for call_id in made)


@pytest.mark.parametrize("reply", ['{"city": "Paris"}', "{ not json", '{"name": "x"', " {}", '{"name": 3}'])
def test_json_that_is_no_call_stays_text(make: MakeTokenizer, reply: str) -> None:
    assert take_apart(build(make, "llama3"), list(reply)) == [Text(reply)]


@pytest.mark.parametrize("reply", ["", "hello ", " hello", "a\n\nb \n", "1 < 2", "<tool", "</think>"])
def test_plain_text_passes_unchanged(make: MakeTokenizer, reply: str) -> None:
    for family in FAMILIES:
        events = take_apart(build(make, family), list(reply))
        assert events == ([Text(reply)] if reply else []), family


def test_a_model_without_tools_in_its_template_answers_as_it_was_asked(
    make: MakeTokenizer, data: Path
) -> None:
    tokenizer = make((data / "templates" / "zephyr.jinja").read_text())
    prompt = tokenizer.render_chat([{"role": "user", "content": "hi"}], tools=TOOLS)
    assert "<tool_call>" in prompt
    assert calls(take_apart(tokenizer, [FAMILIES["hermes"][2]])) == [("read", ARGUMENTS), ("list_files", {})]


@pytest.mark.parametrize(
    ("name", "dialect"), [("qwen2.5-instruct", "hermes"), ("llama-3.1-instruct", "llama3")]
)
def test_dialects_are_recognised_in_shipped_templates(
    make: MakeTokenizer, data: Path, name: str, dialect: str
) -> None:
    tokenizer = make((data / "templates" / f"{name}.jinja").read_text())
    assert tokenizer.reply_format.dialects[0].name == dialect
    assert not tokenizer.reply_format.harmony


def test_granites_template_is_recognised(make: MakeTokenizer, data: Path) -> None:
    tokenizer = make(
        (data / "templates" / "granite-3.0-instruct.jinja").read_text(), added=("<|tool_call|>",)
    )
    assert calls(take_apart(tokenizer, [FAMILIES["granite"][2]]))[0] == ("read", ARGUMENTS)


def test_mlx_lms_parsers_are_all_used_with_their_own_markers() -> None:
    folder = Path(str(module("json_tools").__file__)).parent
    here = {dialect.payload: dialect for dialect in DIALECTS if dialect.name != "seed"}
    for name in sorted(path.stem for path in folder.glob("*.py")):
        if name in ("__init__", "json_tools", "laguna"):  # read here; the same as glm47
            continue
        theirs = module(name)
        assert here[name].start.startswith(theirs.tool_call_start), name
        assert here[name].end == theirs.tool_call_end, name


def test_mlx_lms_parsers_do_not_bring_mlx_lm() -> None:
    code = "import sys; from mlxserve.text.mlx_lm_parsers import parser; parser('gemma4'); "
    code += "sys.exit(bool({'mlx_lm', 'transformers', 'mlx'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
