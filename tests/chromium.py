"""Headless Chromium for tests of pages: opens a file, evaluates JavaScript in it, and collects its errors.

A minimal client of the DevTools protocol over a pair of pipes, without a port and without a further library. Tests that
need it take the fixture `chromium`, by `from chromium import chromium`; they are skipped where it is not installed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

PROGRAM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
LIMIT_S = 60.0
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-extensions",
    "--hide-scrollbars",
)


class Chromium:
    """One browser process. Use it as a context: it ends with its children, and its profile is removed."""

    def __init__(self, *options: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 100) for end in (their_in, their_out)]

        def connect() -> None:  # the protocol's numbers of the two pipes
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [PROGRAM, *OPTIONS, f"--user-data-dir={self._profile}", "--remote-debugging-pipe", *options],
            preexec_fn=connect,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in (their_in, their_out, *high):
            os.close(end)
        self._buffer, self._number = b"", 0
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, TimeoutError, RuntimeError):
            self.call("Browser.close")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, path: Path, fragment: str = "", width: int = 1200, height: int = 900, dark: bool = False) -> Page:
        """A new tab with this file, loaded. fragment: the part of the address after #."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        page.call("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        page.call("Emulation.setEmulatedMedia", {"features": scheme})
        page.go(path.resolve().as_uri() + (f"#{fragment}" if fragment else ""))
        return page

    def call(self, method: str, params: dict[str, Any] | None = None, session: str = "") -> dict[str, Any]:
        """The result of one command. Raises: RuntimeError for a refusal, TimeoutError after LIMIT_S."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params or {}}
        data = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        number, deadline = self._number, time.monotonic() + LIMIT_S
        while True:
            answer = self.receive(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next message; events are recorded in their page."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium does not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError(f"Chromium has ended with exit code {self._process.wait()}")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("sessionId") in self._pages and "method" in message:
            self._pages[message["sessionId"]].record(message["method"], message["params"])
        return message


class Page:
    """One tab. errors: its exceptions, its console errors and failed loads, as texts. dialogs: alert and similar."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        self._loaded = False

    def call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._browser.call(method, params, self._session)

    def record(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(part.get("value", part.get("description"))) for part in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def go(self, address: str) -> None:
        """Load an address and wait for its load event."""
        self._loaded = False
        self.call("Page.navigate", {"url": address})
        deadline = time.monotonic() + LIMIT_S
        while not self._loaded:
            self._browser.receive(deadline)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited if it is a promise. Raises: RuntimeError with an exception of it."""
        wanted = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        found = self.call("Runtime.evaluate", wanted)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", expression))
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The first value of the expression that is true. Raises: TimeoutError with the page's errors."""
        deadline = time.monotonic() + LIMIT_S
        while (value := self.evaluate(expression)) in (None, False, 0, ""):  # an element is an empty dict
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} stays {value!r}; errors of the page: {self.errors}")
            time.sleep(0.02)
        return value

    def press(self, key: str) -> None:
        """Press and release a key, such as Tab, Enter or ArrowRight."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("rawKeyDown", "keyUp"):
            event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0)}
            self.call("Input.dispatchKeyEvent", event)

    def type(self, text: str) -> None:
        """Insert a text where the focus is."""
        self.call("Input.insertText", {"text": text})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", {"format": "png"})["data"]))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    """The browser of a test session; each test opens its own pages."""
    if not PROGRAM:
        pytest.skip("Chromium is not installed")
    with Chromium() as browser:
        yield browser
