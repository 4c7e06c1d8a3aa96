"""What is drawn is what the plan holds, in boxes that can be read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import model_zoo
from ariadne import SplitRuntime, prepare_split
from ariadne.visualization import export_split_dot
from ariadne.visualization.fit import MOST_BOXES, fits
from ariadne.visualization.fold import Depth
from ariadne.visualization.graph import Box, Options, graph
from conformance.unit.drawing_kit import Deep, boxes, drawn, groups, needs_graphviz, prepared, words


@pytest.mark.parametrize("detail", ["module", "operation"])
@pytest.mark.parametrize("depth", ["auto", 1, 2, 3, None])
def test_every_op_is_in_exactly_one_box_and_every_use_is_an_arrow(
    runtime: SplitRuntime, detail: Any, depth: Depth
) -> None:
    plan = runtime.plan
    for c in (None, *runtime.candidates):
        found = graph(plan, c, Options(detail, depth))
        at: dict[int, Box] = {}
        for box in boxes(found):
            for i in range(box.start, box.end):
                assert i not in at
                at[i] = box
        assert sorted(at) == list(range(len(plan.nodes)))
        arrows = {(e.tail, e.head) for e in found.edges}
        order = {box.id: i for i, box in enumerate(boxes(found))}
        assert all(order[tail] < order[head] for tail, head in arrows)
        for i, node in enumerate(plan.nodes):
            if c is not None:
                assert at[i].role == ("prefix" if i < c.cut else "suffix")
            for name in node.reads:
                made = plan.definitions.get(name)
                if made is None or at[made] is at[i]:
                    continue
                if c is not None and made < c.cut <= i:
                    assert any((at[made].id, mid) in arrows and (mid, at[i].id) in arrows for mid in order), name
                else:
                    assert (at[made].id, at[i].id) in arrows, name


def test_a_frozen_parameter_stands_in_brackets_and_the_number_of_them_too(runtime: SplitRuntime) -> None:
    opened = "\n".join(words(drawn(runtime)))
    assert "params: weight(4x3x3x3), bias(x4)" in opened
    assert ".bn1 BatchNorm2d\nBx4x6x6, <0.001 MB\nparams: weight[x4], bias[x4]" in opened
    closed = "\n".join(words(drawn(runtime, depth=2)))
    assert "blocks.0 Block\nBx4x6x6, <0.001 MB\nparams: [304]" in closed
    assert "params: 304 + [304]" in "\n".join(words(drawn(runtime, depth=1)))


def test_a_module_that_the_cut_runs_through_is_on_both_sides_and_says_which_part(runtime: SplitRuntime) -> None:
    middle = runtime.resplit("after:blocks.1.conv1")
    titles = [g.title for g in groups(drawn(middle, split=True).items)]
    assert "blocks.1 Block, op 1 of 7" in titles
    assert "blocks.1 Block, ops 2 to 7 of 7" in titles
    closed = [b.rows[0] for b in boxes(drawn(middle, split=True, depth=1))]
    assert "blocks Sequential, ops 1 to 8 of 14" in closed


class Many(nn.Module):
    """Every column of the input for itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([column.sin() for column in x.unbind(1)], 1)


def test_many_values_of_one_module_cross_in_one_box_that_names_some() -> None:
    runtime = prepare_split(Many(), (torch.randn(2, 20),), split="cut:20")
    (box,) = [b for b in boxes(drawn(runtime, split=True)) if b.role == "boundary"]
    assert box.rows[0] == "boundary: 20 values"
    assert box.rows[3].endswith(" +17 more")
    assert box.rows[4:] == ("20 of xB, <0.001 MB", "made in the model itself")
    assert next(groups(drawn(runtime.resplit("cut:1"), split=True).items)).title == "PREFIX: 1 op"


def test_the_titles_of_both_sides_stand_where_no_crossing_arrow_runs() -> None:
    runtime = prepare_split(nn.Sequential(nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))),
                            (torch.randn(2, 2),), split="after:0")  # fmt: skip
    text = export_split_dot(runtime.plan, runtime.candidate, max_module_depth=None)
    assert 'label="PREFIX\\l1 op\\l"' in text
    assert 'label="SUFFIX\\l3 ops\\l"' in text
    suffix = text.partition("SUFFIX")[2]
    assert suffix.index('labelloc="b"') < suffix.index('labelloc="t"')  # modules in it would inherit it


class Elsewhere(nn.Module):
    """Two layers that share an activation, which is kept in the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.second = nn.Sequential(nn.Linear(4, 4), self.first[1], nn.Linear(4, 4), self.first[1], nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_shared_module_is_drawn_where_it_was_called() -> None:
    runtime = prepare_split(Elsewhere(), (torch.randn(2, 4),), split="50%")
    first, second = groups(drawn(runtime).items)
    assert [b.rows[0] for b in second.boxes()] == [
        "second.0 Linear", "first.1 ReLU (call 2)", "second.2 Linear", "first.1 ReLU (call 3)", "second.4 Linear",
    ]  # fmt: skip
    assert len(list(first.boxes())) == 5


@pytest.mark.parametrize(("blocks", "layers"), [(3, 5), (20, 20), (360, 1)])
def test_the_automatic_depth_opens_what_fits_on_two_screens(blocks: int, layers: int) -> None:
    runtime = prepare_split(Deep(blocks, layers), (torch.randn(2, 4),), split="50%")
    for fold_repeats in (False, True):
        found = drawn(runtime, fold_repeats=fold_repeats)
        assert fits(found)
    assert f" × {blocks}, to " in "".join([*(b.rows[0] for b in boxes(found)), *(g.title for g in groups(found.items))])


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "torchvision/resnet18",
        "transformers/gpt2_tiny",
        "timm/swin_tiny_patch4_window7_224",
        "ultralytics/yolov8n",
    ],
)
def test_a_real_model_is_drawn_in_boxes_that_can_be_read_and_with_its_cut(name: str) -> None:
    pytest.importorskip(name.partition("/")[0])
    entry = model_zoo.entry(name)
    args, kwargs = entry.inputs(2)
    runtime = prepare_split(entry.build().eval(), args, example_kwargs=kwargs, split="percent:50")
    for split in (False, True):
        found = list(boxes(drawn(runtime, split=split)))
        assert 10 <= len(found) <= MOST_BOXES + 20
        assert max(len(row) for box in found for row in box.rows) <= 100
    assert {"prefix", "boundary", "suffix"} <= {box.role for box in found}
    crossing = {name for box in found if box.role in ("boundary", "passthrough") for name in box.tip.split(", ")}
    assert crossing == set(runtime.candidate.live)
    if shutil.which("dot"):
        text = runtime.visualize(view="split", return_dot=True)
        subprocess.run(["dot", "-Tsvg"], input=str(text).encode(), capture_output=True, check=True, timeout=60)


@pytest.mark.slow
@needs_graphviz
def test_a_model_of_1500_ops_is_drawn_in_seconds(here: Path) -> None:
    runtime = prepare_split(Deep(75, 20), (torch.randn(2, 4),), split="50%")
    assert len(runtime.plan.nodes) == 1500
    for options in ({}, {"view_detail": "operation"}):
        text = runtime.visualize(view="split", return_dot=True, **options)  # type: ignore[arg-type]
        subprocess.run(["dot", "-Tsvg"], input=str(text).encode(), capture_output=True, check=True, timeout=60)
    assert len(list(boxes(drawn(runtime)))) < 100


def test_the_same_plan_gives_the_same_bytes(runtime: SplitRuntime) -> None:
    again = prepared()
    for view in ("trace", "split"):
        assert runtime.visualize(view=view, return_dot=True) == again.visualize(view=view, return_dot=True)


def test_nothing_is_run_for_a_drawing(runtime: SplitRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a module was called")

    monkeypatch.setattr(nn.Module, "__call__", called)
    state = torch.get_rng_state()
    runtime.visualize(view="split", return_dot=True, show_debug_markers=True)
    assert torch.equal(torch.get_rng_state(), state)
