"""A headless Chromium that a test sends keys to and asks what it shows, over the pipes of its DevTools protocol."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS = 30.0
# Of keys that write no letter: what they do is found by their code.
_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
_TEXTS = {"Enter": "\r", " ": " "}
_SHIFT = 8


def find_chromium() -> str:
    """Return the path of a Chromium, or skip the calling test where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path is not None:
            return path
    pytest.skip("chromium absent")


class Browser:
    """One page of a browser; ``faults`` are the errors that it has reported, of scripts and of what it did not load."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._rest = read, write, b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.faults: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1000, height: int = 800, dark: bool = False) -> None:
        """Load a page in a window of some size, as people see it who like it light or dark."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[feature])
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript's, which must be JSON."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value."""
        began = time.monotonic()
        while not (found := self.evaluate(expression)):
            assert time.monotonic() - began < SECONDS, expression
            time.sleep(0.02)
        return found

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        fields = {
            "key": key,
            "code": {" ": "Space"}.get(key, key),
            "windowsVirtualKeyCode": _CODES[key],
            "modifiers": _SHIFT * shift,
        }
        text = {"text": _TEXTS[key]} if key in _TEXTS else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def write(self, text: str) -> None:
        """Write a text where the focus is."""
        self._call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click with the mouse on the middle of an element."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self) -> bytes:
        """Return what the window shows, as a PNG file."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        asked = {"id": number, "method": method, "params": params}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        while (message := self._next()).get("id") != number:
            self._note(message)
        assert "error" not in message, (method, message["error"])
        return message["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], SECONDS)
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.faults.append(json.dumps(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.faults.append(params["entry"]["text"])


@contextlib.contextmanager
def browsing(scratch: Path) -> Iterator[Browser]:
    """Run a browser that keeps its files in a folder."""
    command = [
        find_chromium(),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        f"--user-data-dir={scratch}",
        "--remote-debugging-pipe",
        "about:blank",
    ]
    to_it, from_it = os.pipe(), os.pipe()
    # It reads from its descriptor 3 and writes to 4.
    its = [(os.POSIX_SPAWN_DUP2, to_it[0], 3), (os.POSIX_SPAWN_DUP2, from_it[1], 4)]
    for number, name in enumerate((os.devnull, scratch / "out", scratch / "err")):
        its.append((os.POSIX_SPAWN_OPEN, number, name, os.O_CREAT | os.O_RDWR, 0o600))
    number = os.posix_spawn(command[0], command, os.environ, file_actions=its)
    os.close(to_it[0])
    os.close(from_it[1])
    try:
        yield Browser(from_it[0], to_it[1])
    finally:
        os.kill(number, signal.SIGTERM)
        os.waitpid(number, 0)
        os.close(from_it[0])
        os.close(to_it[1])
