"""A real browser for tests of pages: headless Chromium, driven over the pipes of its DevTools protocol.

    with opened(url) as page:
        page.wait_for("document.querySelectorAll('li').length === 3")
        page.type("#name", "drum")
        assert page.errors == [] and page.strangers() == []

Needs Debian's chromium and no Python package. It is started once in a test process, each page in a context of its own
(no cookies or storage of other pages), and it resolves no name but localhost: a page that asks for anything else sees
an error, and so does the test.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = """
--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run --no-default-browser-check
--disable-background-networking --disable-component-update --disable-sync --disable-extensions --disable-breakpad
--disable-features=Translate,MediaRouter,OptimizationHints --hide-scrollbars --mute-audio --remote-debugging-pipe
""".split()
_LONGEST_S = 60.0
"""No answer of the browser, and nothing that a test waits for, takes that long."""


@contextlib.contextmanager
def opened(url: str, *, width: int = 1000, height: int = 700, language: str = "en-US") -> Iterator[Page]:
    """A page that has been loaded; the test is skipped where there is no Chromium.

    language: what the page sees as the user's
    """
    browser = _browser()
    context = browser.call("Target.createBrowserContext")["browserContextId"]
    try:
        target = browser.call(
            "Target.createTarget", url="about:blank", browserContextId=context, width=width, height=height
        )["targetId"]
        session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(browser, session)
        page.call("Emulation.setUserAgentOverride", userAgent="drumline tests", acceptLanguage=language)
        page.call("Emulation.setLocaleOverride", locale=language)
        page.resize(width, height)
        page.go(url)
        yield page
    finally:
        with contextlib.suppress(OSError):  # where the browser itself has gone
            browser.call("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """One page.

    errors:   what its console shows as an error or a warning, and exceptions that nobody caught
    requests: URLs that it has asked for, in order
    """

    def __init__(self, browser: _Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []
        self.requests: list[str] = []
        browser.pages[session] = self
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A method of the DevTools protocol, for this page."""
        return self._browser.call(method, session=self._session, **params)

    def go(self, url: str) -> None:
        """Load a page, with all that it loads before its `load` event."""
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, f"{url}: {answer['errorText']}"
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page, as JSON carries it; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """The value of an expression as soon as it is true, or anything else that counts as true."""
        deadline = time.monotonic() + _LONGEST_S
        told = f"(value => value instanceof Node ? true : value)({script})"  # an element is no JSON
        while not (value := self.evaluate(told)):
            assert time.monotonic() < deadline, f"never came true: {script}; console: {self.errors}"
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        """What an element shows."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of an element."""
        place = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoViewIfNeeded();"
            " const r = e.getBoundingClientRect(); return {x: r.x + r.width / 2, y: r.y + r.height / 2}; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def type(self, selector: str, text: str) -> None:
        """Put text in the place of what an input field holds, as if typed."""
        self.evaluate(
            f"(e => {{ e.focus(); e.select && e.select(); }})(document.querySelector({json.dumps(selector)}))"
        )
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """A key by its name: Enter, Escape, Tab, ArrowDown..."""
        code, text = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}.get(key, (0, ""))
        more = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **more)

    def resize(self, width: int, height: int) -> None:
        """Another size of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def screenshot(self, path: Path) -> Path:
        """What the window shows, as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path

    def strangers(self) -> list[str]:
        """URLs among the requests that lead to another machine."""
        self.evaluate("0")  # what it has asked for by now has been told
        return [
            url
            for url in self.requests
            if urlsplit(url).scheme not in ("data", "blob", "about") and urlsplit(url).hostname != "127.0.0.1"
        ]

    def happened(self, method: str, params: dict[str, Any]) -> None:
        """An event of the protocol."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Network.webSocketCreated":
            self.requests.append(params["url"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(each.get("value", each.get("description"))) for each in params["args"]))
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            entry = params["entry"]
            self.errors.append(" ".join(filter(None, (entry["text"], entry.get("url")))))


class _Browser:
    """The process, and the two pipes on which it takes and gives messages: JSON, each ended by a zero byte."""

    def __init__(self, program: str) -> None:
        self.pages: dict[str, Page] = {}
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        theirs_in, self._ask = os.pipe()
        self._answers, theirs_out = os.pipe()
        flags = [*_FLAGS, "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={self._folder}"]
        own = "/proc/self/fd"  # dash duplicates no number above 9
        self._process = subprocess.Popen(  # it reads from 3 and writes to 4
            ["sh", "-c", f'exec "$0" "$@" 3<{own}/{theirs_in} 4>{own}/{theirs_out}', program, *flags, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            env={**os.environ, "HOME": self._folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._unread = 0, b""
        atexit.register(self.close)
        self.call("Browser.getVersion")

    def call(self, method: str, *, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(self._ask, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            page = self.pages.get(answer.get("sessionId", ""))
            if page is not None and "method" in answer:
                page.happened(answer["method"], answer["params"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready = select.select([self._answers], [], [], _LONGEST_S)[0]
            more = os.read(self._answers, 1 << 20) if ready else b""
            if not more:
                raise OSError("Chromium has ended" if ready else f"Chromium did not answer in {_LONGEST_S:g} s")
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@functools.cache
def _started(program: str) -> _Browser:
    return _Browser(program)


def _browser() -> _Browser:
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        pytest.skip("needs chromium (apt-get install chromium)")
    return _started(program)
