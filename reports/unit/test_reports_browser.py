"""Reports in a real browser: Chromium without a window, spoken to over a pipe; skipped only where there is none."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.unit.browser_kit import DESK, PAPER, PHONE, Browser, browsing, needs_chromium
from reports.build import build
from reports.unit import report_kit as kit

pytestmark = [
    pytest.mark.browser,
    needs_chromium,
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    build([kit.whole_run(folder / "now")], kit.whole_run(folder / "earlier"), folder / "report")
    return folder / "report" / "index.html"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with browsing(tmp_path / "profile") as found:
        yield found


WIDER = """
[...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1
  && !e.parentElement.closest(".scroll") && getComputedStyle(e).display !== "none").map((e) => e.tagName + "." + e.className)
"""


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_it_opens_without_a_complaint_and_asks_for_nothing(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width)
    assert browser.ask("document.querySelectorAll('section').length") == 9
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
