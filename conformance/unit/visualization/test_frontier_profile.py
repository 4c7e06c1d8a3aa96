"""The frontier profile: what is drawn is what the cuts are; as a picture, and as a page in a browser."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from ariadne import SplitRuntime, prepare_split
from ariadne.check import FORMATS, frontier_profile
from ariadne.check.profile import evenly, measured_times
from ariadne.compare import difference
from ariadne.cut import Ends, frontiers
from ariadne.errors import SpecError, VisualizationError
from ariadne.units import size
from ariadne.visualization import render
from ariadne.visualization.chart import chart
from ariadne.visualization.curve import Times, profile
from conformance.unit.browser_kit import DESK, PHONE, Browser, browsing, needs_chromium

SVG = "{http://www.w3.org/2000/svg}"
X = torch.randn(4, 6)


class Net(nn.Module):
    """Four layers; after the second a view of the activations is written, which some cuts can't go through."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Linear(6, 32), nn.BatchNorm1d(32)
        self.narrow, self.head = nn.Linear(32, 3), nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.wide(x))
        part = y[:, :3]
        part.add_(self.narrow(y))
        return self.head(y) * part.sum(1, keepdim=True)


class Odd(nn.Module):
    """A model whose module names are markup."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("</script><script>alert('a')</script>", nn.Linear(6, 3))
        self.add_module("@@BEST@@ & \u2028", nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def runtime() -> SplitRuntime:
    torch.manual_seed(0)
    return prepare_split(Net().eval(), (X,), split="after:wide")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of_class(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [e for e in svg.iter() if e.get("class") == name]


# --- data ----------------------------------------------------------------------------------------------------------


def test_the_pareto_best_cuts_are_safe_and_each_sends_less_than_the_input_and_all_safe_ones_before_it(
    runtime: SplitRuntime,
) -> None:
    found = profile(runtime.plan, runtime.candidates, runtime.candidate)
    assert any(not p.candidate.safe for p in found.points)
    for p in found.points:
        before = [
            q.candidate.boundary_bytes for q in found.points if q.candidate.safe and q.candidate.cut < p.candidate.cut
        ]
        less = p.candidate.boundary_bytes < min([found.ends.input_bytes, *before])
        assert p.best == (p.candidate.safe and less)
    assert [p.boundary for p in found.points if p.chosen] == ["after:wide"]
    assert found.ends == Ends(X.nbytes / len(X), runtime.model(X).nbytes / len(X))


def test_where_no_cut_sends_less_than_the_input_none_is_best_and_the_picture_says_so() -> None:
    wide = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8))
    runtime = prepare_split(wide, (torch.randn(3, 2),), split="50%")
    found = profile(runtime.plan, runtime.candidates, runtime.candidate)
    assert found.best == ()
    assert (
        "the input is 8 B per sample, the output 32 B; no safe cut sends less than the input"
        in chart(found, 960, listed=True)[0]
    )


def test_of_cuts_that_send_as_much_as_one_another_the_end_of_a_module_is_best() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) + 1).relu()

    model = nn.Sequential(Block(), nn.Linear(4, 4))
    runtime = prepare_split(model, (torch.randn(3, 8),), split="50%")
    found = profile(runtime.plan, runtime.candidates)
    assert [p.boundary for p in found.best] == ["after:0.layer"]
    plan = replace(runtime.plan, calls=tuple(c for c in runtime.plan.calls if c.path != "0.layer"))
    assert [p.boundary for p in profile(plan, frontiers(plan)).best] == ["after:0"]


def test_measuring_runs_some_safe_cuts_and_the_one_in_use_and_leaves_the_model_as_found() -> None:
    torch.manual_seed(0)
    model = Net().train()
    runtime = prepare_split(model, (X,), split="after:wide")
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    times = measured_times(runtime, (X,), {}, cuts=2, iterations=3)
    safe = [c.cut for c in runtime.candidates if c.safe]
    assert set(times) == {safe[0], safe[-1], runtime.candidate.cut}
    assert all(t.both > 0 and 0 < t.low <= t.share <= t.high < 1 for t in times.values())
    assert difference(before, dict(model.state_dict())) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_share_comes_with_the_span_that_holds_four_calls_of_five() -> None:
    calls = [(1.0, 3.0)] * 8 + [(3.0, 1.0), (0.0, 4.0)]
    assert Times.of(calls) == Times(4.0, 0.25, 0.25, 0.25)
    assert Times.of([(1.0, 3.0), (3.0, 1.0), (2.0, 2.0)]) == Times(4.0, 0.5, 0.25, 0.75)


@pytest.mark.parametrize(("count", "expected"), [(1, [0]), (2, [0, 9]), (4, [0, 3, 6, 9]), (20, list(range(10)))])
def test_cuts_are_taken_evenly(count: int, expected: list[int]) -> None:
    assert evenly(list(range(10)), count) == expected  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "0 B"), (12, "12 B"), (196608, "197 kB"), (2.5e6, "2.5 MB"), (3e9, "3 GB")]
)
def test_bytes_have_units(number: float, expected: str) -> None:
    assert size(number) == expected


# --- the picture ---------------------------------------------------------------------------------------------------


def test_the_svg_marks_every_cut_by_shape_and_names_the_best_and_the_chosen(runtime: SplitRuntime, here: Path) -> None:
    assert frontier_profile(runtime) == Path("frontier_profile.svg")
    svg = ElementTree.parse(here / "frontier_profile.svg").getroot()
    points = profile(runtime.plan, runtime.candidates, runtime.candidate).points
    best, bad = sum(p.best for p in points), sum(not p.candidate.safe for p in points)
    assert [e.tag for e in of_class(svg, "safe")] == [f"{SVG}circle"] * (1 + len(points) - best - bad)  # one in the key
    assert [e.tag for e in of_class(svg, "bad")] == [f"{SVG}path"] * (1 + bad)
    assert len(of_class(svg, "best")) == 1 + best
    assert [e.tag for e in of_class(svg, "chosen")] == [f"{SVG}rect"] * 2
    words = [e.text for e in svg.iter(f"{SVG}text")]
    assert "chosen: after wide (cut:1): 128 B per sample, 1 of 8 ops in the prefix" in words
    assert f"{len(points)} cuts, {bad} of them not safe" in words
    assert of_class(svg, "share") == []


def test_measured_shares_are_drawn_below(runtime: SplitRuntime, here: Path) -> None:
    frontier_profile(runtime, "timed", measure=True, example_inputs=(X,), iterations=2, cuts=3)
    svg = ElementTree.parse(here / "timed.svg").getroot()
    assert len(of_class(svg, "share")) == 1
    assert [e.tag for e in of_class(svg, "safe")].count(f"{SVG}rect") == 3


@pytest.mark.parametrize("width", [358, 960])
def test_numbers_of_neighbouring_cuts_do_not_cover_one_another(width: int) -> None:
    model = nn.Sequential(*(nn.Linear(40 - i, 39 - i) for i in range(30)))
    runtime = prepare_split(model, (torch.randn(2, 40),), split="50%")
    times = {c.cut: Times(1.0, c.cut / 30, 0.0, 1.0) for c in runtime.candidates}
    body, height = chart(profile(runtime.plan, runtime.candidates, runtime.candidate, times), width, listed=True)
    svg = ElementTree.fromstring(f"<svg>{body}</svg>")
    numbers = [
        (float(e.get("x", "0")), float(e.get("y", "0"))) for e in of_class(svg, "number") if e.get("text-anchor")
    ]
    assert len(numbers) == 29
    for i, (x, y) in enumerate(numbers):
        assert not [1 for a, b in numbers[:i] if abs(x - a) < 11 and abs(y - b) < 9]
    assert all(float(e.get("y", "0")) <= height for e in svg.iter("text"))


def test_the_same_plan_gives_the_same_bytes(runtime: SplitRuntime, here: Path) -> None:
    torch.manual_seed(0)
    again = prepare_split(Net().eval(), (X,), split="after:wide")
    for kind in ("svg", "html"):
        first, second = (frontier_profile(r, f"{i}", fileformat=kind) for i, r in enumerate((runtime, again)))
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.skipif(not any(map(shutil.which, render.CONVERTERS)), reason="nothing here turns SVG into PNG")
def test_a_png_is_made_where_a_program_can(runtime: SplitRuntime, here: Path) -> None:
    path = frontier_profile(runtime, "cuts", fileformat="png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert {f.name for f in here.iterdir()} == {"cuts.png"}


def test_without_a_converter_the_error_says_which_would_do_and_the_svg_is_kept(
    runtime: SplitRuntime, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(here / "nothing"))
    said = r"'cuts\.png': there is no program .*looked for rsvg-convert, inkscape, chromium.*'cuts\.svg' as SVG"
    with pytest.raises(VisualizationError, match=said):
        frontier_profile(runtime, "cuts", fileformat="png")
    assert {f.name for f in here.iterdir()} == {"cuts.svg"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fileformat": "pdf"}, rf"fileformat must be one of {', '.join(map(repr, FORMATS))}; found 'pdf'"),
        ({"measure": True}, r"measure=True runs the split, and so needs inputs: pass example_inputs"),
        ({"example_inputs": (X,)}, r"example inputs are for measuring; pass measure=True"),
        ({"cuts": 0}, r"cuts is a whole number of at least 1; found 0"),
        ({"iterations": True}, r"iterations is a whole number of at least 1; found True"),
        ({"sources": -1}, r"sources is a whole number of at least 0; found -1"),
    ],
)
def test_an_option_that_means_nothing_is_refused(runtime: SplitRuntime, here: Path, options: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        frontier_profile(runtime, **options)
    assert list(here.iterdir()) == []


# --- the page ------------------------------------------------------------------------------------------------------


def data_of(page: Path) -> Any:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(found)


def source_of(data: Any, cut: int, side: int) -> str:
    runs = data["sources"][str(cut)][side]
    return "\n".join(line for at, n in zip(runs[::2], runs[1::2], strict=True) for line in data["lines"][at : at + n])


def test_the_page_holds_the_generated_source_of_every_safe_cut(runtime: SplitRuntime, here: Path) -> None:
    data = data_of(frontier_profile(runtime, fileformat="html"))
    assert [c["cut"] for c in data["cuts"]] == [c.cut for c in runtime.candidates]
    assert sorted(map(int, data["sources"])) == [c.cut for c in runtime.candidates if c.safe]
    for c in runtime.candidates:
        if c.safe:
            there = runtime.resplit(c)
            assert source_of(data, c.cut, 0) == there.prefix_source.rstrip("\n")
            assert source_of(data, c.cut, 1) == there.suffix_source.rstrip("\n")


def test_fewer_sources_keep_those_of_the_cut_in_use(runtime: SplitRuntime, here: Path) -> None:
    assert list(data_of(frontier_profile(runtime, fileformat="html", sources=1))["sources"]) == ["1"]
    assert data_of(frontier_profile(runtime, fileformat="html", sources=0))["sources"] == {}


def test_the_page_takes_names_for_what_they_are(here: Path) -> None:
    runtime = prepare_split(Odd(), (X,), split="cut:1")
    path = frontier_profile(runtime, fileformat="html")
    text = path.read_text()
    assert text.count("<script") == 2
    assert "alert('a')" not in text.partition('id="data"')[0]
    assert data_of(path)["cuts"][0]["where"] == "</script><script>alert('a')</script>"
    assert not re.search(r"(?:src|href)=|url\(|https?://", text)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with browsing(tmp_path / "profile") as found:
        yield found


@pytest.fixture(scope="module")
def page(runtime: SplitRuntime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = {"measure": True, "example_inputs": (X,), "iterations": 2, "cuts": 3}
    return frontier_profile(runtime, tmp_path_factory.mktemp("page") / "profile", fileformat="html", **given)


AT = """
(() => {{
  const svg = [...document.querySelectorAll("svg.chart")].find((s) => s.getBoundingClientRect().width);
  const box = svg.getBoundingClientRect();
  const [x, y] = place(svg, data.cuts[{index}]), k = box.width / svg.viewBox.baseVal.width;
  return [box.left + x * k, box.top + y * k];
}})()
"""


def point(browser: Browser, index: int, *, click: bool = False) -> str:
    """What the panel says after the pointer went to a cut, and clicked."""
    x, y = browser.ask(AT.format(index=index))
    for kind in ("mouseMoved", *(("mousePressed", "mouseReleased") if click else ())):
        extra = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        browser("Input.dispatchMouseEvent", type=kind, x=x, y=y, **extra)
    return str(browser.ask("document.getElementById('detail').innerText"))


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize("width", [DESK, PHONE])
def test_hover_shows_a_cut_and_a_click_its_source(
    browser: Browser, page: Path, runtime: SplitRuntime, width: int
) -> None:
    browser.open(page, width)
    assert browser.ask("document.getElementById('detail').innerText").startswith("after wide (Linear): cut 1 of 7\n")
    bad = next(i for i, c in enumerate(runtime.candidates) if not c.safe)
    said = point(browser, bad)
    assert f"Not safe: {runtime.candidates[bad].reason}" in said
    assert browser.ask("document.getElementById('source').hidden")
    assert "ms in the prefix (median, measured)" in point(browser, 0)
    said = point(browser, 1, click=True)
    for words in (
        "after norm (BatchNorm1d): cut 2 of 7",
        "Safe",
        "128 B per sample in 1 value:",
        "norm: f32[B, 32]",
    ):
        assert words in said
    shown = [browser.ask(f"document.getElementById('{side}').textContent") for side in ("prefix", "suffix")]
    split = runtime.resplit("after:norm")
    assert shown == [split.prefix_source.rstrip("\n"), split.suffix_source.rstrip("\n")]
    assert all(browser.ask(f"document.getElementById('{side}').offsetHeight") > 0 for side in ("prefix", "suffix"))
    point(browser, bad, click=True)
    assert "the cut is not safe" in browser.ask("document.getElementById('source-note').innerText")
    assert browser.ask("document.getElementById('prefix').offsetHeight") == 0
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.complaints == []
    assert set(browser.requests) == {page.resolve().as_uri()}


@pytest.mark.browser
@needs_chromium
def test_keys_and_the_list_of_best_cuts_do_what_the_pointer_does(browser: Browser, page: Path) -> None:
    browser.open(page, DESK)
    browser.ask("document.querySelector('svg.wide').focus()")
    for key in ("ArrowRight", "Enter"):
        browser("Input.dispatchKeyEvent", type="keyDown", key=key)
        browser("Input.dispatchKeyEvent", type="keyUp", key=key)
    assert browser.ask("document.getElementById('source-title').innerText") == "Source at after:norm (cut:2)"
    browser.ask("document.querySelector('#best button').click()")
    assert browser.ask("document.getElementById('source-title').innerText") == "Source at after:head (cut:6)"


@pytest.mark.browser
@needs_chromium
def test_the_page_follows_the_scheme_and_its_picture_is_not_blank(browser: Browser, page: Path) -> None:
    looks = []
    for scheme, width in (("light", DESK), ("dark", PHONE)):
        browser.open(page, width, scheme)
        colors = "[document.body, document.querySelector('.chart .safe')].map((e) => getComputedStyle(e))"
        looks.append(browser.ask(f"{colors}.map((s, i) => i ? s.fill : s.backgroundColor)"))
        assert len(base64.b64decode(browser("Page.captureScreenshot", format="png")["data"])) > 10_000
    assert looks[0] == ["rgb(255, 255, 255)", "rgb(9, 105, 218)"]
    assert looks[1] == ["rgb(20, 23, 27)", "rgb(108, 182, 255)"]


@pytest.mark.browser
@needs_chromium
def test_markup_in_names_is_shown_and_not_run(browser: Browser, here: Path) -> None:
    path = frontier_profile(prepare_split(Odd(), (X,), split="cut:1"), fileformat="html")
    browser.open(path, DESK)
    assert "</script><script>alert('a')</script>" in browser.ask("document.getElementById('detail').innerText")
    assert browser.complaints == []
