"""A headless Chromium, spoken to through two pipes by the DevTools protocol: no driver, no port."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
NONE = "no Chromium here (Debian: apt install chromium)"


class Browser:
    """A page in a browser; its errors and its requests are noted."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        to_browser, ours_out = os.pipe()
        ours_in, from_browser = os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to 4.
        line = (
            f"exec 3<&{to_browser} 4>&{from_browser}; exec {PROGRAM} --headless=new --no-sandbox "
            f"--disable-gpu --disable-dev-shm-usage --remote-debugging-pipe --no-first-run "
            f"--user-data-dir='{profile}' about:blank"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", line],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._out, self._in = os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb")
        self._number, self._session, self._rest = 0, "", b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._in.close()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command."""
        self._number += 1
        message: dict[str, Any] = {
            "id": self._number,
            "method": method,
            "params": parameters,
        }
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._in.fileno(), 1 << 16)
            assert piece, "the browser ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        self._note(found)
        return found

    def _note(self, found: dict[str, Any]) -> None:
        method, about = found.get("method"), found.get("params", {})
        if method == "Runtime.exceptionThrown":
            thrown = about["exceptionDetails"]
            said = thrown.get("exception", {}).get("description", thrown["text"])
            self.errors.append(f"{said} ({thrown.get('url')})")
        elif method == "Log.entryAdded" and about["entry"]["level"] in (
            "error",
            "warning",
        ):
            self.errors.append(about["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and about["type"] in (
            "error",
            "warning",
        ):
            self.errors.append(json.dumps(about["args"])[:500])
        elif (
            method == "Network.requestWillBeSent"
            and about["request"]["url"] != "about:blank"
        ):
            self.requests.append(about["request"]["url"])

    def look(self, width: int, *, dark: bool = False, height: int = 900) -> None:
        """The window's width in CSS pixels, and whether the reader likes it dark."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path, state: str = "") -> None:
        """Load a file anew, and wait until it is there. state: what follows its address."""
        self.errors.clear()
        self.requests.clear()
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=f"{page.absolute().as_uri()}{state}")
        self.wait("document.readyState === 'complete'")

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Wait until an expression is true in the page. Fails with the page's errors as soon as it
        has one, and after so many seconds."""
        until = time.monotonic() + seconds
        while not self.run(condition):
            assert not self.errors, self.errors
            assert time.monotonic() < until, f"not within {seconds:g} s: {condition}"
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key, by its name in the DOM."""
        codes = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "ArrowUp": 38, "ArrowDown": 40,
                 "Escape": 27, "Enter": 13, "PageUp": 33, "PageDown": 34}  # fmt: skip
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                     windowsVirtualKeyCode=codes[key], modifiers=8 if shift else 0)  # fmt: skip

    def point(self, kind: str, x: float, y: float) -> None:
        """The mouse, its left button: `mousePressed`, `mouseMoved` with it held, `mouseReleased`,
        at a place of the window in CSS pixels."""
        held = 0 if kind == "mouseReleased" else 1
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=held,
                 clickCount=1)  # fmt: skip

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        found = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))
