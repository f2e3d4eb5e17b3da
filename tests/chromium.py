"""A headless Chromium, driven over its DevTools protocol on a pipe, without any client library."""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 60
_KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), " ": (32, " ")}
# It reads commands from descriptor 3, and writes to 4.
_EXEC = """
import os, sys
read, write = (os.dup(int(number)) for number in sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.set_inheritable(3, True), os.set_inheritable(4, True)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """Path of a Chromium, None if this machine has none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Refused(AssertionError):
    """An error in the place of a method's result."""


class Chromium:
    """One process, with as many tabs as are asked for."""

    def __init__(self, program: str, profile: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _EXEC, str(ours[0]), str(theirs[1]), program),
                *("--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
                *("--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"),
                *("--disable-component-update", "--hide-scrollbars", "--no-proxy-server"),
                f"--user-data-dir={profile}",
            ],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._to = os.fdopen(ours[1], "wb", buffering=0)
        self._from = os.fdopen(theirs[0], "rb", buffering=0)
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._arrived: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.events: list[dict[str, Any]] = []
        self._reader = Thread(target=self._read)
        self._reader.start()

    def close(self) -> None:
        """Kill all of its processes, and wait."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._to.close()
        self._from.close()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        self._to.write(json.dumps(message).encode() + b"\0")
        while number not in self._answers:
            found = self._arrived.get(timeout=PATIENCE_S)
            assert found is not None, "Chromium has ended"
            if "id" in found:
                self._answers[found["id"]] = found
            else:
                self.events.append(found)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise Refused(method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> None:
        rest = b""
        while data := self._from.read(1 << 16):
            *whole, rest = (rest + data).split(b"\0")
            for message in whole:
                self._arrived.put(json.loads(message))
        self._arrived.put(None)

    @contextmanager
    def tab(
        self, url: str, *, width: int = 1200, height: int = 800, dark: bool = False
    ) -> Iterator[Tab]:
        """A tab of its own session at `url`; complaints of the page fail the test at the end."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = Tab(self, attached["sessionId"])
        try:
            tab.open(url, width, height, dark)
            yield tab
            assert tab.complaints() == []
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)


class Tab:
    """One tab; what it is asked to do is done as by a user's mouse and keyboard."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session
        self.allowed: tuple[str, ...] = ("status of 4", "status of 5")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def open(self, url: str, width: int, height: int, dark: bool) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if width < 600 else 1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def complaints(self) -> list[str]:
        """Errors and policy violations that the page has caused, but for HTTP statuses."""
        self.js("0")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["level"] in ("error", "warning"):
                    found.append(entry["text"])
        return [text for text in found if not any(part in text for part in self.allowed)]

    def js(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true, in the document that comes where one is leaving."""
        deadline = time.monotonic() + PATIENCE_S

        def is_true() -> bool:
            try:
                return bool(self.js(f"Boolean({expression})"))
            except Refused as error:
                if "navigated" in str(error):
                    return False
                raise

        while not is_true():
            assert time.monotonic() < deadline, (
                f"{expression}: {self.js('document.body.innerText')}"
            )
            time.sleep(0.02)

    def text(self, selector: str = "body") -> str:
        return str(self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    def type(self, text: str) -> None:
        """Insert text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        code, text = _KEYS[key]
        common = {
            "key": key,
            "code": {" ": "Space"}.get(key, key),
            "windowsVirtualKeyCode": code,
            "modifiers": 8 if shift else 0,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """Click in the middle of an element, which must be visible."""
        found = json.dumps(selector)
        self.until(f"document.querySelector({found})?.checkVisibility()")
        box = self.js(
            f"(e => {{ e.scrollIntoView({{block: 'nearest'}}); const r = e.getBoundingClientRect();"
            f" return [r.x + r.width / 2, r.y + r.height / 2]; }})(document.querySelector({found}))"
        )
        at = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **at)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **at)

    def fill(self, selector: str, text: str) -> None:
        """Replace what an input has."""
        self.js(f"document.querySelector({json.dumps(selector)}).select()")
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        self.type(text)

    def png(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
