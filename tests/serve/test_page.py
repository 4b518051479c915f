"""The page of `drumline serve` in a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.browser import Page, opened
from serve.conftest import Server

MESSAGE = "Document 4"
MARKUP = "<img src=x onerror=alert(1)> & <b>bold</b>. "


def ask(page: Page, text: str = MESSAGE, *, temperature: str = "0", tokens: str = "12") -> str:
    """Send a message as a user does; what the page shows as the answer when it is complete."""
    before = page.evaluate("document.querySelectorAll('.assistant').length")
    page.type("#temperature", temperature)
    page.type("#tokens", tokens)
    page.type("#input", text)
    page.press("Enter")
    page.wait_for(f"!running && document.querySelectorAll('.assistant').length === {before + 1}")
    return str(page.evaluate("[...document.querySelectorAll('.assistant')].at(-1).textContent"))


def answered(server: Server, *texts: str, tokens: int = 12) -> str:
    """What the API answers to a conversation, greedily."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    with server.client() as client:
        answer = client.chat.completions.create(model="small", messages=messages, temperature=0, max_tokens=tokens)  # type: ignore[arg-type]
    return (answer.choices[0].message.content or "").strip()


@pytest.fixture
def quiet(server: Server) -> Callable[[Page], None]:
    """Check that a page has had no error and has asked for nothing elsewhere."""

    def check(page: Page) -> None:
        assert page.strangers() == [] and page.errors == []
        assert {url.removeprefix(server.url) for url in page.requests} <= {
            *("/", "/v1/models", "/v1/chat/completions", "/v1/completions", "data:,")
        }

    return check


def test_a_message_is_answered_by_the_text_of_the_api_as_it_is_generated(
    server: Server, quiet: Callable[[Page], None], tmp_path: Path
) -> None:
    with opened(server.url) as page:
        page.wait_for("document.querySelector('#name').textContent === 'small'")
        page.evaluate(
            "window.seen = new Set(); new MutationObserver(() => seen.add(document.querySelector('.assistant')"
            "?.textContent)).observe(document.querySelector('#log'), {childList: true, subtree: true})"
        )
        assert page.evaluate("document.querySelector('#key').checkVisibility()") is False  # nobody asks for one
        first = ask(page)
        assert first.strip() == answered(server, MESSAGE) != ""
        whole = json.dumps(first)
        grew = f"[...seen].some((text) => text && text !== {whole} && {whole}.startsWith(text))"
        assert page.evaluate(grew)  # it was shown before it was complete
        assert page.text(".user") == MESSAGE and page.evaluate("document.querySelector('#input').value") == ""
        second = ask(page, "line 7")
        assert second.strip() == answered(server, MESSAGE, first.strip(), "line 7")  # the conversation goes on
        page.screenshot(tmp_path / "page.png")
        page.click("#clear")
        assert page.evaluate("document.querySelector('#log').children.length") == 0
        assert ask(page) == first
        quiet(page)


def test_temperature_tokens_and_mode_are_those_of_the_fields(server: Server, quiet: Callable[[Page], None]) -> None:
    with opened(server.url) as page:
        assert len({ask(page, temperature="5", tokens="30") for _ in range(3)}) == 3
        with server.client() as client:
            whole = client.completions.create(model="small", prompt=MESSAGE, temperature=0, max_tokens=5)
        page.evaluate("document.querySelector('#mode').value = 'text'")
        assert ask(page, tokens="5") == MESSAGE + whole.choices[0].text
        quiet(page)


def test_the_page_speaks_english_and_chinese(server: Server, quiet: Callable[[Page], None], tmp_path: Path) -> None:
    with opened(server.url, language="zh-CN") as page:
        assert (page.text("#send"), page.text("#language"), page.evaluate("document.documentElement.lang")) == (
            *("发送", "English", "zh-CN"),
        )
        page.click("#language")
        assert (page.text("#send"), page.text("#language"), page.evaluate("document.documentElement.lang")) == (
            *("Send", "中文", "en"),
        )
        assert page.text("header").isascii() is False and "Temperature" in page.text("header")
        page.click("#language")
        ask(page, "鼓 rolls. Document")
        page.screenshot(tmp_path / "page-zh.png")
        quiet(page)
    with opened(server.url) as page:
        assert page.text("#send") == "Send"


def test_stop_ends_an_answer_and_text_of_the_model_is_never_markup(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    server = serve("--max_tokens", str(10**8), "--slots", "1")
    with opened(server.url, width=390, height=700) as page:
        page.evaluate("document.querySelector('#mode').value = 'text'")
        page.type("#temperature", "0")
        page.type("#tokens", str(10**8))
        page.type("#input", MARKUP + "Document 3, line")
        page.press("Enter")
        page.wait_for("document.querySelector('.assistant')?.textContent.length > 200")
        assert page.text("#send") == "Stop" and server.health()["active"] == 1
        page.click("#send")
        page.wait_for("!running")
        assert page.text("#send") == "Send" and page.evaluate("document.querySelector('#log img, #log b')") is None
        assert page.text(".assistant").startswith(MARKUP)
        page.screenshot(tmp_path / "narrow.png")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.strangers() == page.errors == []


def test_a_server_with_a_key_asks_for_it(serve: Callable[..., Server]) -> None:
    server = serve(env={"DRUMLINE_API_KEY": "open sesame"})
    with opened(server.url) as page:
        page.wait_for("document.querySelector('.error')")
        assert "API key" in page.text(".error") and page.evaluate("document.querySelector('#key').checkVisibility()")
        page.type("#key", "open sesame")
        page.press("Tab")
        page.wait_for("document.querySelector('#name').textContent === 'small'")
        assert ask(page, tokens="3")
