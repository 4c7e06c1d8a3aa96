"""Reports in a real browser: Chromium without a window, spoken to over a pipe; skipped only where there is none."""

from __future__ import annotations

import base64
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

from conformance import report_kit as kit
from reports.build import build

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

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"no Chromium here: looked for {', '.join(NAMES)}"),
]


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


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    build([kit.whole_run(folder / "now")], kit.whole_run(folder / "earlier"), folder / "report")
    return folder / "report" / "index.html"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    found = Browser(tmp_path / "profile")
    try:
        yield found
    finally:
        found.end()


WIDER = """
[...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1
  && !e.parentElement.closest(".scroll") && getComputedStyle(e).display !== "none").map((e) => e.tagName + "." + e.className)
"""


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_it_opens_without_a_complaint_and_asks_for_nothing(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width)
    assert browser.ask("document.querySelectorAll('section').length") == 8
    browser.ask("scrollTo(0, document.body.scrollHeight)")
    assert browser.complaints == []
    assert set(browser.requests) == {page.resolve().as_uri()}


def test_it_has_no_horizontal_overflow_on_a_phone(browser: Browser, page: Path) -> None:
    browser.open(page, PHONE)
    for opened in (False, True):  # with all that is folded shown, too
        browser.ask(f"document.querySelectorAll('details').forEach((d) => d.open = {str(opened).lower()})")
        assert browser.ask("document.documentElement.scrollWidth") <= PHONE
        assert browser.ask(WIDER) == []


OPENED = """
[...document.querySelectorAll("td.square details")].map((cell) => {
  const family = cell.closest("details.family");
  if (family) family.open = true;
  cell.querySelector("summary").click();
  const code = cell.querySelector("code");
  return [code.innerText, code.offsetHeight > 0];
})
"""


def test_every_cell_opens_to_the_line_that_runs_it_again(browser: Browser, page: Path) -> None:
    browser.open(page, PHONE)
    cells = browser.ask(OPENED)
    assert len(cells) == 5 + 4  # of a model and a check, and of a check over all models
    for text, shown in cells:
        assert text.startswith("python -m conformance --case '")
        assert shown, text


def test_the_matrix_can_be_filtered_and_needs_no_script(browser: Browser, page: Path) -> None:
    browser.open(page, DESK)
    shown = "[...document.querySelectorAll('tr[data-model]')].filter((r) => r.offsetHeight).map((r) => r.dataset.model)"
    typed = "const i = document.getElementById('model-filter'); i.value = 'nn/'; i.dispatchEvent(new Event('input'));"
    browser.ask(typed)
    assert browser.ask(shown) == ["nn/mlp10x64"]
    browser.ask("i.value = ''; i.dispatchEvent(new Event('input')); document.getElementById('only-others').click()")
    assert set(browser.ask(shown)) == {"nn/mlp10x64", "toys/branch_on_data", "toys/residual"}
    browser("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(page, DESK)
    assert browser.ask("document.querySelector('.filter').offsetHeight") == 0
    assert browser.ask("document.querySelectorAll('tr[data-model]').length") == 3
    assert browser.complaints == []


COLORS = """
(() => {
  const numbers = (c) => c.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v / 255 <= .04045 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4);
  const light = (c) => { const [r, g, b] = numbers(c).map(linear); return .2126 * r + .7152 * g + .0722 * b; };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (numbers(c).length < 4 || numbers(c)[3] > 0) return c; } return "rgb(255, 255, 255)"; };
  const found = [];
  for (const e of document.querySelectorAll("h1, h2, h3, p, td, th, a, strong, small, summary, dt, dd, figcaption, li, svg text")) {
    const style = getComputedStyle(e), text = e.tagName === "text" ? style.fill : style.color;
    const [a, b] = [light(text), light(behind(e.tagName === "text" ? e.closest("figure") : e))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) found.push([e.tagName, e.className.baseVal ?? e.className, text, e.textContent.slice(0, 30)]);
  }
  return [getComputedStyle(document.body).backgroundColor, found];
})()
"""


def test_text_can_be_read_in_light_and_in_dark(browser: Browser, page: Path) -> None:
    papers = []
    for scheme in ("light", "dark"):
        browser.open(page, DESK, scheme)
        paper, pale = browser.ask(COLORS)
        papers.append(paper)
        assert pale == [], scheme
    assert papers == ["rgb(255, 255, 255)", "rgb(20, 23, 27)"]


DRAWN = """
[...document.querySelectorAll("svg text, svg path, svg line")].map((e) => getComputedStyle(e))
  .map((style) => style.fill + style.stroke).join()
"""


def test_charts_take_the_colours_of_the_scheme(browser: Browser, page: Path) -> None:
    found = {}
    for scheme in ("light", "dark"):
        browser.open(page, DESK, scheme)
        found[scheme] = browser.ask(DRAWN)
    assert found["light"] != found["dark"]
    assert "var(" not in found["light"]


def test_no_table_is_cut_off_on_paper(browser: Browser, page: Path) -> None:
    browser.open(page, PAPER, scheme="dark", media="print")
    assert browser.ask(WIDER.replace('!e.parentElement.closest(".scroll") && ', "")) == []
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    pdf = base64.b64decode(browser("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])
    assert pdf.startswith(b"%PDF-")
    assert len(pdf) > 20_000
    assert browser.ask("document.querySelectorAll('details.family:not([open])').length") > 0  # as it was before


def test_a_picture_of_it_is_not_blank(browser: Browser, page: Path) -> None:
    for width in (DESK, PHONE):
        browser.open(page, width)
        assert len(base64.b64decode(browser("Page.captureScreenshot", format="png")["data"])) > 20_000
