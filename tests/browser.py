"""A headless Chromium, driven by the DevTools protocol over a pair of pipes: no driver, no port, no dependency."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--force-color-profile=srgb",
    "--window-size=1280,800",
    "--remote-debugging-pipe",
]


def chromium() -> str:
    """The browser's path; skips the test where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium here")
    return found


class Page:
    """One page in the browser."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._count, self._rest, self._session = read, write, 0, b"", None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and note the events that come before its answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 20)
            assert part, "the browser is gone"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def open(self, path: Path) -> float:
        """Open a file, wait until it is drawn, and return the seconds that took."""
        begun = time.monotonic()
        self.call("Page.navigate", url=f"file://{path.resolve()}")
        while self.run("document.readyState") != "complete":
            assert time.monotonic() - begun < 60
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.monotonic() - begun

    def run(self, code: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """kind: "mouseMoved", "mousePressed" or "mouseReleased"."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, x: float, y: float, to: float) -> None:
        """Drag along a line."""
        button = {"button": "left", "clickCount": 1}
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, **button)
        for part in (0.25, 0.5, 1):
            self.mouse("mouseMoved", x + (to - x) * part, y, button="left", buttons=1)
        self.mouse("mouseReleased", to, y, **button)

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write a picture of what is shown, or of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def problems(self) -> list[str]:
        """Errors in the console, and whatever was asked of the network."""
        self.run("1")
        found = []
        for event in self.events:
            name, what = event.get("method"), event.get("params", {})
            level = {"Log.entryAdded": what.get("entry", {}).get("level"), "Runtime.consoleAPICalled": what.get("type")}
            if name == "Runtime.exceptionThrown" or level.get(name) in ("error", "assert"):
                found.append(json.dumps(what)[:500])
            elif name == "Network.requestWillBeSent":
                url = what["request"]["url"]
                found += [url] if not url.startswith(("file:", "data:", "about:")) else []
        return found


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A page in a browser of its own."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    def connect() -> None:
        """In the browser: commands come by 3, answers go by 4."""
        ends = os.dup(to_read), os.dup(from_write)
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    process = subprocess.Popen(
        [chromium(), *FLAGS, f"--user-data-dir={profile}"],
        preexec_fn=connect,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Page(from_read, to_write)
    finally:
        process.terminate()
        process.wait(20)
        os.close(to_write)
        os.close(from_read)
