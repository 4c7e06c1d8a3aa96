"""Pages in a real browser: Chromium without a window, spoken to over a pipe."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
).split()
# Chromium reads commands from descriptor 3 and answers on 4, whatever numbers the pipes have here.
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for number, end in enumerate(ends, start=3):
    os.dup2(end, number)
    os.close(end)
os.execv(sys.argv[3], sys.argv[3:])
"""
SECONDS = 60.0
DESK, PHONE, PAPER = 1280, 390, 1039  # the last: A4 across, between its margins, at 96 dots per inch

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=f"no Chromium here: looked for {', '.join(NAMES)}")


class Browser:
    """A Chromium with one page, and all that it asked for and complained about."""

    def __init__(self, profile: Path) -> None:
        from_us, to_us = os.pipe(), os.pipe()
        ends = (from_us[0], to_us[1])
        command = [
            sys.executable,
            "-I",
            "-c",
            START,
            *map(str, ends),
            str(CHROMIUM),
            *OPTIONS,
            f"--user-data-dir={profile}",
        ]
        self.process = subprocess.Popen(
            command,
            pass_fds=ends,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(from_us[0]), os.close(to_us[1])
        self.write, self.read, self.rest = from_us[1], to_us[0], b""
        self.ids = itertools.count(1)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Do one thing, and return what it gave."""
        number = next(self.ids)
        message = {"id": number, "method": method, "params": parameters}
        os.write(
            self.write, json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0"
        )
        found = self._until(lambda m: m.get("id") == number, method)
        assert "error" not in found, f"{method}: {found['error']}"
        return dict(found["result"])

    def _until(self, wanted: Any, what: str) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while True:
            *messages, self.rest = self.rest.split(b"\0")
            for i, text in enumerate(messages):
                message = json.loads(text)
                self._note(message)
                if wanted(message):
                    self.rest = b"\0".join([*messages[i + 1 :], self.rest])
                    return dict(message)
            ready, _, _ = select.select([self.read], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium said nothing within {SECONDS:g} s: {what}"
            data = os.read(self.read, 1 << 20)
            assert data, f"Chromium ended: {what}"
            self.rest += data

    def _note(self, message: dict[str, Any]) -> None:
        method, given = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(given["exceptionDetails"]["text"])
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("warning", "error"):
            self.complaints.append(given["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("warning", "error", "assert"):
            self.complaints.append(json.dumps(given["args"]))

    def open(self, page: Path, width: int, scheme: str = "light", media: str = "screen", height: int = 900) -> None:
        """Show a page on a screen of this width, with this colour scheme, or as for this medium."""
        self(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width == PHONE
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self("Emulation.setEmulatedMedia", media=media, features=features)
        self("Page.navigate", url=page.resolve().as_uri())
        self._until(lambda m: m.get("method") == "Page.loadEventFired", f"load {page}")

    def ask(self, expression: str) -> Any:
        """What an expression of JavaScript gives."""
        found = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its own children, too
        self.process.wait()
        os.close(self.write), os.close(self.read)


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A browser that ends with the block."""
    found = Browser(profile)
    try:
        yield found
    finally:
        found.end()
