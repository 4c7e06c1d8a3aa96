"""The drawing as a page: all ops are in it once, it asks for nothing, and it can be opened, searched and read by keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec
from ariadne.cut import frontiers, parse_boundary, select
from ariadne.plan import TracePlan
from ariadne.prepare import captured
from ariadne.visualization import visualize
from ariadne.visualization.interactive import interactive
from conformance.unit.browser_kit import DESK, browsing, needs_chromium


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(5))), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


@pytest.fixture(scope="module")
def plan() -> TracePlan:
    return captured(Net().eval(), (torch.randn(2, 4),), spec=SplitSpec("auto")).plan


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def ops_in(items: list[Any]) -> Iterator[int]:
    for item in items:
        yield from [item] if isinstance(item, int) else ops_in(item["items"])


@pytest.mark.parametrize("cut", [None, "cut:7", "after:blocks.2"])
def test_every_op_is_in_the_page_once_and_in_order_with_its_line_and_what_it_reads(
    plan: TracePlan, cut: str | None
) -> None:
    candidate = select(plan, frontiers(plan), parse_boundary(cut)) if cut else None
    data = data_of(interactive(plan, candidate))
    assert list(ops_in(data["tree"])) == list(range(len(plan.nodes)))
    for node, (_, module, line, _, _, reads, _) in zip(plan.nodes, data["ops"], strict=True):
        assert (module, line) == (node.module, plan.show(node))
        made = {n for n in node.reads if n in plan.definitions}
        assert {r for r in reads if r >= 0} == {plan.definitions[n] for n in made}
    assert data["cut"] == (candidate.cut if candidate else None)
    assert [name for _, name, _, _ in data["live"]] == (list(candidate.live) if candidate else [])


def test_the_rest_of_a_repeat_stands_closed_behind_the_first(plan: TracePlan) -> None:
    (blocks, _) = data_of(interactive(plan, None))["tree"]
    first, more = blocks["items"]
    assert first["name"] == "blocks.0 Block × 5"
    assert more["more"] == "4 more alike, to blocks.4"
    assert len(data_of(interactive(plan, None, fold_repeats=False))["tree"][0]["items"]) == 5


def test_the_page_asks_for_nothing_and_a_name_can_not_leave_its_place(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("</script><b>@@DATA@@", nn.Linear(4, 4))
    odd = captured(model.eval(), (torch.randn(2, 4),), spec=SplitSpec("auto")).plan
    path = visualize(odd, None, outpath=tmp_path / "net", fileformat="html")
    page = Path(path).read_text()
    assert page.count("</script>") == 2
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert data_of(page)["ops"][0][1] == "</script><b>@@DATA@@"


@pytest.mark.browser
@needs_chromium
def test_a_module_opens_a_name_is_found_and_keys_do_as_much(plan: TracePlan, tmp_path: Path) -> None:
    page = tmp_path / "net.html"
    page.write_text(interactive(plan, select(plan, frontiers(plan), parse_boundary("after:blocks.1"))))
    with browsing(tmp_path / "profile") as browser:
        browser.open(page, DESK)
        shown = "[...document.querySelectorAll('.op')].filter((e) => e.checkVisibility()).length"
        arrows = "document.querySelectorAll('path.arrow').length"
        browser.ask("document.getElementById('close').click()")
        assert (browser.ask(shown), browser.ask(arrows)) == (3, 3)  # input, blocks, head, output
        browser.ask(
            "const s = document.getElementById('search'); s.value = 'blocks.3.down'; s.dispatchEvent(new Event('input'))"
        )
        browser.ask("s.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter' }))")
        detail = browser.ask("document.getElementById('detail').textContent")
        assert "blocks.3.down" in detail
        assert "f32[B, 4]" in detail
        assert browser.ask(shown) > 3
        browser.ask("document.querySelector('summary').focus()")
        key = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{ key: '{}', bubbles: true }}))"
        browser.ask(key.format("ArrowLeft"))
        assert browser.ask(shown) == 3
        browser.ask(key.format("ArrowDown"))
        assert browser.ask("document.activeElement.textContent").startswith("linear · head")
        browser.ask(key.format("+"))
        assert browser.ask("document.getElementById('fit').textContent") == "125 %"
        browser.open(page, DESK, scheme="dark")
        assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        assert browser.requests == [page.resolve().as_uri()] * 2
        assert browser.complaints == []
