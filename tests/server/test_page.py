"""The chat page in a real browser: a conversation, stopping, settings, themes, a phone's width."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from mlxserve.errors import EngineFailed
from tests.server.browser import Browser, chromium
from tests.server.stub import RunningServer, StubEngine, running

pytestmark = pytest.mark.browser

MARKDOWN = """## Sorting a list

Use `sorted`, which makes a **new** list, or *sort in place*:

```python
def by_length(words: list[str]) -> list[str]:
    return sorted(words, key=len)  # <b>not markup</b>
```

| call | changes the list |
|---|---|
| `sorted(x)` | no |
| `x.sort()` | yes |

1. Pick a key
2. Sort
   - ascending
   - or `reverse=True`

> Sorting is stable, see [the guide](https://docs.python.org/3/howto/sorting.html).
"""
THINKING = ["<think>\n", "The person wants ", "a short answer.\n", "</think>\n\n"]


@pytest.fixture(scope="module")
def _browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(_browser: Browser, server: RunningServer, stub: StubEngine) -> Iterator[Browser]:
    """The page, opened afresh, with nothing kept from before; no complaint of the browser's at the end."""
    _browser.resize(1280, 860)
    _browser.prefer("light")
    _browser.open(server.url)
    _browser.run("localStorage.clear()")
    _browser.open(server.url)
    _browser.wait(lambda: _browser.find("#model").get_attribute("value") == "stub")
    yield _browser
    assert _browser.complaints() == []


def say(browser: Browser, text: str) -> None:
    browser.find("#input").send_keys(text, Keys.ENTER)


def answered(browser: Browser, count: int = 1) -> str:
    """Waits for answer number `count` to be finished; its text."""

    def done() -> Any:
        turns = browser.all(".turn.assistant")
        return len(turns) == count and "busy" not in (turns[-1].get_attribute("class") or "")

    browser.wait(done)
    return browser.all(".turn.assistant .body")[-1].text


def test_a_conversation(browser: Browser, stub: StubEngine) -> None:
    browser.shoot("1-welcome")
    assert browser.run("return document.activeElement.id") == "input"
    stub.script = ["The capital ", 0.1, "of France ", "is Paris."]
    say(browser, "What is the capital of France?")
    assert answered(browser) == "The capital of France is Paris."
    note = browser.all(".turn.assistant .note")[-1].text
    assert "tokens/s" in note
    assert f"{len('The capital of France is Paris.')} tokens" in note
    stub.script = [*THINKING, MARKDOWN]
    say(browser, "How do I sort a list in Python?")
    answered(browser, 2)
    at_end = (
        "const l = document.getElementById('log'); return l.scrollHeight - l.scrollTop - l.clientHeight < 2"
    )
    browser.wait(lambda: browser.run(at_end))
    browser.shoot("2-conversation-light")
    prompt = stub.tokenizer.decode(stub.seen[-1].prompt, skip_special_tokens=False)
    assert "is Paris.<|im_end|>" in prompt  # the conversation goes along


def test_markdown_and_code_and_no_markup_from_the_model(browser: Browser, stub: StubEngine) -> None:
    stub.script = [MARKDOWN, '\n<img src=x onerror="window.bad=1"> [x](javascript:alert(1))\n']
    say(browser, "hi")
    answered(browser)
    body = browser.all(".turn.assistant .body")[-1]
    count = lambda selector: len(body.find_elements("css selector", selector))
    assert [count(s) for s in ("h2", "strong", "em", "pre", "table", "ol > li", "li li", "blockquote")] == [
        1, 1, 1, 1, 1, 2, 2, 1
    ]  # fmt: skip
    code = body.find_element("css selector", "pre code").text
    assert code.startswith("def by_length")
    assert "# <b>not markup</b>" in code
    assert body.find_element("css selector", ".code .bar span").text == "python"
    assert body.find_element("css selector", "a").get_attribute("href").startswith("https://docs.python.org")
    assert count("a") == 1  # the script address is no link
    assert count("img, b, script") == 0
    assert browser.run("return window.bad") is None


def test_it_streams_and_stops(browser: Browser, server: RunningServer, stub: StubEngine) -> None:
    gate = asyncio.Event()
    stub.script = ["first words", gate, *[" tick", 0.01] * 2000]
    say(browser, "go")
    browser.wait(lambda: browser.all(".turn.assistant .body")[-1].text == "first words")
    assert stub.running == 1
    assert browser.find("#stop").is_displayed()
    assert not browser.find("#send").is_displayed()
    server.loop.call_soon_threadsafe(gate.set)
    browser.wait(lambda: "tick" in browser.all(".turn.assistant .body")[-1].text)
    browser.shoot("3-streaming")
    browser.find("#input").send_keys(Keys.ESCAPE)
    assert "tick" in answered(browser)
    assert "stopped" in browser.find(".note").text
    browser.wait(lambda: stub.running == 0)
    stub.script = ["second"]
    say(browser, "and again")
    assert answered(browser, 2) == "second"
    # The button stops, too.
    stub.script = [" tick", 0.01] * 2000
    say(browser, "more")
    browser.wait(lambda: browser.find("#stop").is_displayed())
    browser.find("#stop").click()
    answered(browser, 3)
    browser.wait(lambda: stub.running == 0)


def test_reasoning_is_folded(browser: Browser, server: RunningServer, stub: StubEngine) -> None:
    gate = asyncio.Event()
    stub.script = [*THINKING[:3], gate, 0.1, THINKING[3], "Five."]
    say(browser, "2+3?")
    summary = browser.wait(lambda: browser.find("details.thought summary"))
    browser.wait(lambda: summary.text == "Thinking…")
    server.loop.call_soon_threadsafe(gate.set)
    assert answered(browser) == "Five."
    assert summary.text.startswith("Thought for")
    thought = browser.find("details.thought > div")
    assert not thought.is_displayed()
    summary.click()
    assert thought.text == "The person wants a short answer."
    browser.shoot("4-reasoning")


def test_settings_go_along_and_are_kept(browser: Browser, server: RunningServer, stub: StubEngine) -> None:
    browser.wait(lambda: browser.find("#open-settings")).click()
    values = {
        "system": "Be kind.",
        "temperature": "0.3",
        "top_p": "0.9",
        "top_k": "7",
        "max_tokens": "50",
        "seed": "4",
    }
    for name, value in values.items():
        browser.find(f"#{name}").send_keys(value, Keys.TAB)
    browser.find("#input").click()
    say(browser, "hi")
    answered(browser)
    params = stub.seen[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (
        0.3,
        0.9,
        7,
        50,
        4,
    )
    assert "system\nBe kind." in stub.tokenizer.decode(stub.seen[-1].prompt)
    browser.shoot("5-settings")
    browser.open(server.url)
    browser.wait(lambda: len(browser.all(".turn")) == 2)  # the conversation is still there
    assert browser.find("#temperature").get_attribute("value") == "0.3"
    browser.find("#new").click()
    assert browser.all(".turn") == []


def test_the_model_thinks_or_not(browser: Browser, stub: StubEngine) -> None:
    say(browser, "hi")  # loads the model, so that its abilities are known
    answered(browser)
    browser.find("#open-settings").click()
    browser.wait(lambda: browser.find("#thinking").is_displayed())
    browser.run(
        "const t = document.getElementById('thinking'); t.value = 'off'; t.dispatchEvent(new Event('change'))"
    )
    browser.find("#input").click()
    say(browser, "hi")
    answered(browser, 2)
    prompt = stub.tokenizer.decode(stub.seen[-1].prompt, skip_special_tokens=False)
    assert "<think>\n\n</think>" in prompt


def test_edit_and_again(browser: Browser, stub: StubEngine) -> None:
    say(browser, "one")
    answered(browser)
    stub.script = ["Another."]
    browser.all(".turn.assistant .foot button")[-1].click()
    browser.wait(lambda: browser.all(".turn.assistant .body")[-1].text == "Another.")
    assert len(browser.all(".turn")) == 2
    edit = browser.all(".turn.user .foot button")[1]
    browser.run("arguments[0].click()", edit)
    assert browser.find("#input").get_attribute("value") == "one"
    assert browser.all(".turn") == []


def test_keys(browser: Browser, stub: StubEngine) -> None:
    field = browser.find("#input")
    field.send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.SHIFT, "two")
    assert field.get_attribute("value") == "one\ntwo"
    field.send_keys(Keys.CONTROL, ",", Keys.CONTROL)
    assert browser.find("#settings").is_displayed()
    browser.find("#system").send_keys(Keys.ESCAPE)
    assert not browser.find("#settings").is_displayed()
    assert browser.run("return document.activeElement.id") == "input"


def test_an_error_is_shown(browser: Browser, stub: StubEngine) -> None:
    stub.script = ["Hel", EngineFailed("A step failed.")]
    say(browser, "hi")
    answered(browser)
    assert browser.find(".fault").text == "A step failed."
    stub.script = ["Better."]
    say(browser, "again")
    assert answered(browser, 2) == "Better."


def test_dark(browser: Browser, stub: StubEngine) -> None:
    stub.script = [*THINKING, MARKDOWN]
    say(browser, "How do I sort a list in Python?")
    answered(browser)
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = browser.run(ground)
    browser.prefer("dark")
    browser.wait(lambda: browser.run(ground) != light)
    browser.shoot("6-dark")
    # A person's own choice comes before the system's.
    browser.run(
        "const t = document.getElementById('theme'); t.value = 'light'; t.dispatchEvent(new Event('change'))"
    )
    assert browser.run(ground) == light


def test_a_phone(browser: Browser, stub: StubEngine) -> None:
    browser.resize(375, 720)
    stub.script = [*THINKING, MARKDOWN, "\n" + "x" * 300]
    say(browser, "How do I sort a list in Python, please?")
    answered(browser)
    browser.shoot("7-phone")
    assert browser.run("return document.documentElement.scrollWidth") <= 375
    browser.find("#open-settings").click()
    browser.shoot("8-phone-settings")
    assert browser.find("#settings").size["width"] == 375
    browser.find("#close-settings").click()
    assert not browser.find("#settings").is_displayed()


def test_contrast_in_both_themes(browser: Browser, stub: StubEngine) -> None:
    """Text against its ground: at least 4.5 to 1 (WCAG 2.2, 1.4.3)."""
    pairs = [("--text", "--ground"), ("--faint", "--ground"), ("--faint", "--sunken"), ("--text", "--mine"),
             ("--on-accent", "--accent"), ("--bad", "--bad-ground"), ("--accent", "--ground")]  # fmt: skip
    script = "return getComputedStyle(document.documentElement).getPropertyValue(arguments[0]).trim()"
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        for front, back in pairs:
            colours = [luminance(browser.run(script, name)) for name in (front, back)]
            ratio = (max(colours) + 0.05) / (min(colours) + 0.05)
            assert ratio >= 4.5, (scheme, front, back, round(ratio, 2))


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_it_asks_for_the_key(_browser: Browser) -> None:
    with running(api_keys=("secret",)) as server:
        _browser.open(server.url)
        _browser.wait(lambda: _browser.find("#settings").is_displayed())
        _browser.find("#key").send_keys("secret", Keys.TAB)
        _browser.wait(lambda: _browser.find("#model").get_attribute("value") == "stub")
        _browser.find("#close-settings").click()
        say(_browser, "hi")
        assert answered(_browser) == "Hello there."
    _browser.complaints()


def test_headers_keep_strangers_out(http: httpx.Client, stub: StubEngine) -> None:
    answer = http.get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    again = http.get("/", headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304
    for name in ("app.js", "api.js", "markdown.js", "style.css", "icon.svg"):
        assert http.get(f"/static/{name}").status_code == 200
    text = "".join(
        http.get(f"/static/{name}").text for name in ("app.js", "markdown.js", "api.js", "index.html")
    )
    assert "innerHTML" not in text
