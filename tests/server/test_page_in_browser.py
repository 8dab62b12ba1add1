"""In a browser, the page to chat on shows answers as they are written, by keyboard alone, light, dark and narrow."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxinfer.server.api.chat import ChatForm
from tests.server.browser import Browser, browsing
from tests.server.harness import Running

pytestmark = pytest.mark.slow

QUESTION = "The old heron watched the moon. The old heron"
SETTINGS = {"temperature": 0, "max_tokens": 60, "seed": 3}
TURNS = "[...document.querySelectorAll('.turn')].map((turn) => [turn.className, turn.textContent])"
IS_DONE = "!document.querySelector('.waiting') && !document.getElementById('send').hidden"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture
def page(browser: Browser, server: Running) -> Iterator[Browser]:
    """The page of the shared server, with settings that make its answers known; it must report no error."""
    open_page(browser, server)
    yield browser
    browser.evaluate("location.href = 'about:blank'")
    assert browser.faults == []


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let answers come at a pace at which they can be stopped."""
    delta = ChatForm.delta

    def slow(self: ChatForm, *given: Any) -> Any:
        time.sleep(0.05)
        return delta(self, *given)

    monkeypatch.setattr(ChatForm, "delta", slow)


def open_page(browser: Browser, server: Running, **window: Any) -> None:
    browser.open(server.address, **window)
    browser.until("document.title !== 'jaxinfer'")
    for name, value in SETTINGS.items():
        browser.evaluate(f"document.getElementById('{name}').value = {value}")


def ask(page: Browser, text: str = QUESTION) -> None:
    assert page.evaluate("document.activeElement.id") == "message"
    page.write(text)
    page.press("Enter")


def focused(page: Browser) -> str:
    return page.evaluate("document.activeElement.id || document.activeElement.tagName")


def test_an_answer_comes_in_pieces_and_shows_what_drafts_gave(page: Browser, server: Running, slowly: None) -> None:
    page.evaluate(
        "window.lengths = new Set(); new MutationObserver(() => lengths.add(document.body.textContent.length))"
        ".observe(conversation, {childList: true, subtree: true, characterData: true})"
    )
    ask(page)
    page.until(IS_DONE)
    messages = [{"role": "user", "content": QUESTION}]
    (choice,) = server.chat(messages=messages, **SETTINGS, top_p=0.95, return_drafts=True).json()["choices"]
    text = choice["message"]["content"]
    assert page.evaluate(TURNS) == [["turn user", QUESTION], ["turn assistant", text]]
    assert page.evaluate("lengths.size") > 4
    shown = page.evaluate("[...document.querySelectorAll('.turn span')].map((one) => [one.className, one.textContent])")
    origins = [kind == "draft" for kind, part in shown for _ in part]
    pairs = zip(choice["token_texts"], choice["from_draft"])
    assert origins == [is_draft for part, is_draft in pairs for _ in part]
    assert True in origins
    assert False in origins
    colours = page.evaluate(
        "['.turn .draft', '.turn .own', '#pace .draft']"
        ".map((one) => getComputedStyle(document.querySelector(one)).color)"
    )
    assert colours[0] == colours[2] != colours[1]
    pace = page.evaluate("document.getElementById('pace').textContent")
    share = round(100 * sum(choice["from_draft"]) / len(choice["from_draft"]))
    assert f"{len(choice['from_draft'])} tokens" in pace
    assert pace.endswith(f"{share}% from drafts")
    assert "tokens/s" in pace
    assert "first token" in pace


@pytest.mark.parametrize("way", ["button", "key"])
def test_an_answer_that_is_stopped_stays_and_the_conversation_goes_on(
    page: Browser, server: Running, slowly: None, way: str
) -> None:
    ask(page)
    page.until("document.querySelector('.assistant')?.textContent.length > 3")
    assert page.evaluate("[send.hidden, document.getElementById('stop').hidden]") == [True, False]
    if way == "button":
        page.click("#stop")
    else:
        page.press("Escape")
    page.until(IS_DONE)
    server.until(lambda: server.is_idle)
    messages = [{"role": "user", "content": QUESTION}]
    whole = server.chat(messages=messages, **SETTINGS, top_p=0.95).json()["choices"][0]["message"]["content"]
    (_, (kind, part)) = page.evaluate(TURNS)
    assert kind == "turn assistant"
    assert whole.startswith(part)
    assert len(part) < len(whole)
    assert page.evaluate("messages") == [*messages, {"role": "assistant", "content": part}]
    ask(page, "And?")
    page.until(f"{IS_DONE} && document.querySelectorAll('.turn').length === 4")


def test_the_keyboard_alone_reaches_everything(page: Browser, server: Running) -> None:
    page.write("One line")
    page.press("Enter", shift=True)
    page.write("and another")
    assert page.evaluate("message.value") == "One line\nand another"
    assert page.evaluate("message.clientHeight") > page.evaluate("send.clientHeight")
    page.press("Enter")
    page.until(IS_DONE)
    assert page.evaluate(TURNS)[0] == ["turn user", "One line\nand another"]
    page.press("Tab", shift=True)
    assert focused(page) == "SUMMARY"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    page.press("Enter")
    assert page.evaluate("settings.open")
    reached = []
    while focused(page) != "message":
        page.press("Tab")
        reached.append(focused(page))
        assert page.evaluate(outline) != "none"
    assert reached == ["system", "temperature", "top_p", "max_tokens", "seed", "key", "message"]
    page.press("Tab")
    assert focused(page) == "send"
    for _ in range(20):
        page.press("Tab")
        if focused(page) == "clear":
            break
    page.press(" ")
    assert page.evaluate(TURNS) == []
    assert focused(page) == "message"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1000])
def test_it_fits_a_telephone_and_both_schemes(page: Browser, server: Running, width: int, dark: bool) -> None:
    open_page(page, server, width=width, height=700, dark=dark)
    ask(page, "A word: " + "y" * 70)
    page.until(f"document.querySelectorAll('.turn').length === 2 && {IS_DONE}")
    page.evaluate("settings.open = true")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(json.loads(ground.replace("rgb(", "[").replace(")", "]"))) / 3
    assert (brightness < 60) if dark else (brightness > 200)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.scrollHeight") <= 700
    assert page.evaluate("document.querySelector('header').offsetHeight") <= 110
    outside = (
        "[...document.querySelectorAll('button, input, textarea, .turn')].filter((one) => !one.hidden).filter((one) =>"
        " {const box = one.getBoundingClientRect(); return box.left < 0 || box.right > innerWidth;}).length"
    )
    assert page.evaluate(outside) == 0
    heights = "[...document.querySelectorAll('button, summary')].map((one) => one.offsetHeight).filter(Boolean)"
    assert min(page.evaluate(heights)) >= 24
    assert page.screenshot().startswith(b"\x89PNG")


def test_errors_are_shown_and_the_question_can_be_asked_again(page: Browser) -> None:
    page.evaluate("document.getElementById('max_tokens').value = 5000")
    ask(page)
    page.until(IS_DONE)
    kinds = [kind for kind, _ in page.evaluate(TURNS)]
    assert kinds == ["turn user", "turn error"]
    assert page.evaluate("[messages, message.value]") == [[], QUESTION]
    page.faults.clear()  # the browser itself notes a status of 400
    page.evaluate("document.getElementById('max_tokens').value = 5")
    page.press("Enter")
    page.until(f"{IS_DONE} && messages.length === 2")
