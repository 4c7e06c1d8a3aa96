"""Drawings: the contract page's visualization snippets run as written; what is drawn is what the plan holds, and can be read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import AriadneError, SplitRuntime, prepare_split
from ariadne.errors import SpecError, VisualizationError
from ariadne.visualization import (
    export_split_candidates_table,
    export_split_dot,
    export_trace_dot,
    labels,
)
from ariadne.visualization.dot import quoted
from conformance.unit.drawing_kit import Deep, boxes, drawn, groups, needs_graphviz, words

PICTURES = """
runtime.visualize(view="trace", outpath="trace_graph", fileformat="svg")
runtime.visualize(view="split", outpath="split_graph", fileformat="svg")
"""

SOURCE = """
trace_dot = runtime.visualize(view="trace", return_dot=True)
split_dot = runtime.visualize(view="split", return_dot=True)
"""

HELPERS = """
from ariadne.visualization import (
    export_split_candidates_table,
    export_split_dot,
    export_trace_dot,
)

trace_dot = export_trace_dot(runtime.trace_plan)
split_dot = export_split_dot(runtime.trace_plan, runtime.candidate)
candidates = export_split_candidates_table(runtime.trace_plan)
"""

OPERATIONS = """
runtime.visualize(
    view="trace",
    view_detail="operation",
    show_operation_targets=True,
    show_debug_markers=True,
    show_node_indices=True,
    outpath="trace_ops",
)
"""

DEPTHS = """
runtime.visualize(view="split", max_module_depth=2)  # collapse BasicBlock nodes
runtime.visualize(view="trace", max_module_depth=None)
"""


def run(snippet: str, **given: Any) -> dict[str, Any]:
    """The names that a snippet leaves, run with those `given`."""
    exec(compile(snippet, "<contract page>", "exec"), given)
    return given


# --- the contract page ---------------------------------------------------------------------------------------------


@needs_graphviz
@pytest.mark.zoo
def test_the_picture_snippet_draws_two_svg_files(resnet18: SplitRuntime, here: Path) -> None:
    run(PICTURES, runtime=resnet18)
    for name in ("trace_graph.svg", "split_graph.svg"):
        assert "layer1.0 BasicBlock" in (here / name).read_text()
    assert {f.name for f in here.iterdir()} == {"trace_graph.svg", "split_graph.svg"}


def test_the_source_snippet_needs_no_graphviz_and_writes_nothing(
    runtime: SplitRuntime, here: Path, no_graphviz: None
) -> None:
    names = run(SOURCE, runtime=runtime)
    assert names["trace_dot"].startswith("digraph ariadne {")
    assert "PREFIX" not in names["trace_dot"]
    assert "PREFIX" in names["split_dot"]
    assert list(here.iterdir()) == []


def test_the_helpers_snippet_gives_what_the_runtime_gives_and_a_row_for_each_cut(runtime: SplitRuntime) -> None:
    names = run(HELPERS, runtime=runtime)
    assert names["trace_dot"] == runtime.visualize(view="trace", return_dot=True)
    assert names["split_dot"] == runtime.visualize(view="split", return_dot=True)
    table = names["candidates"]
    assert [row["split_id"] for row in table] == [c.split_id for c in runtime.candidates]
    assert [row["reason"] for row in table] == [c.reason for c in runtime.candidates]
    (row,) = [row for row in table if row["after"] == "blocks.0"]
    assert (row["safe"], row["boundary_bytes"], row["values"]) == (True, 4 * 6 * 6 * 4 + 8, 2)
    lines = str(table).splitlines()
    assert lines[0].split()[:4] == ["split_id", "after", "safe", "boundary_bytes"]
    assert len(lines) == len(table) + 1


@needs_graphviz
def test_the_operations_snippet_draws_targets_markers_and_indices(runtime: SplitRuntime, here: Path) -> None:
    run(OPERATIONS, runtime=runtime)
    text = (here / "trace_ops.svg").read_text()
    for word in (
        "aten.batch_norm.default",
        "writes blocks_0_bn1",
        "buffers: running_mean[x4]",
        "f32, 576 bytes",
        "op 3",
    ):
        assert word in text, word


@needs_graphviz
@pytest.mark.zoo
def test_the_depth_snippet_closes_blocks_at_two_and_opens_all_at_none(resnet18: SplitRuntime, here: Path) -> None:
    run(DEPTHS, runtime=resnet18)
    closed, opened = (here / "split_graph.svg").read_text(), (here / "trace_graph.svg").read_text()
    assert closed.count("BasicBlock") > 0
    assert "params: 74.0K" in closed
    assert "conv2 Conv2d" not in closed
    assert "downsample.0" in opened
    assert "params: 74.0K" not in opened


@pytest.mark.zoo
def test_a_resnet_is_drawn_by_default_as_its_blocks_with_what_is_in_them(resnet18: SplitRuntime) -> None:
    found = drawn(resnet18)
    (block,) = [g for g in groups(found.items) if g.title == "layer2.0 BasicBlock"]
    titles = [b.rows[0] for b in block.boxes()]
    assert titles == [
        ".conv1 Conv2d", ".bn1 BatchNorm2d", ".relu ReLU (call 1)", ".conv2 Conv2d", ".bn2 BatchNorm2d",
        ".downsample Sequential", "add", ".relu ReLU (call 2)",
    ]  # fmt: skip
    assert words(found)[1] == "conv1 Conv2d\nBx64x32x32, 0.262 MB\nparams: weight(64x3x7x7)"
    assert words(found)[-2] == "fc Linear\nBx1000, 0.004 MB\nparams: weight(1000x512), bias(x1000)"


def test_labels_leave_out_by_default_what_the_page_says_they_do(runtime: SplitRuntime) -> None:
    for view in ("trace", "split"):
        text = runtime.visualize(view=view, return_dot=True)
        for word in ("aten.", "op 0", "f32", "running_mean", "writes ", " bytes, "):
            assert word not in text, (view, word)


def test_a_split_shows_sides_crossing_values_and_their_cost(runtime: SplitRuntime) -> None:
    found = drawn(runtime, split=True)
    c = runtime.candidate
    roles = {b.role: b.rows[0] for b in boxes(found)}
    assert roles["boundary"] == "boundary: blocks_0_relu_call2"
    assert roles["passthrough"] == "passthrough: input scale"
    assert found.legend[:5] == (
        "split: cut:8 (after blocks.0)",
        "boundary_bytes: 584 B per sample, 2 values",
        "input: 776 B, output: 8 B per sample",
        f"prefix: {c.prefix_ops} ops, suffix: {c.suffix_ops} ops",
        "suffix trainable: yes, prefix trainable: yes",
    )
    text = runtime.visualize(view="split", return_dot=True)
    shapes = [
        re.search(rf"key_{r} \[.*?shape=\"(\w+)\", style=\"([\w,]+)\"", text) for r in roles if f"key_{r} " in text
    ]
    assert len({m.groups() for m in shapes if m}) == 4  # told apart without colour


# --- words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("conv1", '"conv1"'),
        ('a "b" \\n c', '"a \\"b\\" \\\\n c"'),
        ("x & y &lt;", '"x &amp; y &amp;lt;"'),
        ("a\nb", '"a\\nb"'),
        ("a\0b\x1b", '"a<0000>b<001b>"'),
        ("größe-層", '"größe-層"'),
    ],
)
def test_a_dot_string_shows_exactly_what_it_was_made_from(text: str, expected: str) -> None:
    assert quoted(text) == expected


@needs_graphviz
def test_a_module_with_an_odd_name_is_drawn_by_that_name(here: Path) -> None:
    odd = 'a "b" <i>\\N</i> &amp; {c|d}'
    kind = type('Odd"<&>\\G', (nn.Linear,), {})
    model = nn.Sequential()
    model.add_module(odd, kind(4, 4))
    model.add_module("next", nn.Linear(4, 4))
    runtime = prepare_split(model, (torch.randn(2, 4),), split="50%")
    path = runtime.visualize(view="split", outpath=here / "odd names" / "it's here")
    assert path == here / "odd names" / "it's here.svg"
    text = Path(path).read_text()
    assert "a &quot;b&quot; &lt;i&gt;\\N&lt;/i&gt; &amp;amp; {c|d} Odd&quot;&lt;&amp;&gt;\\G</text>" in text


@pytest.mark.parametrize(
    ("size", "expected"), [(0, "0 MB"), (10, "<0.001 MB"), (262144, "0.262 MB"), (4.2e9, "4,200 MB")]
)
def test_sizes_are_in_megabytes(size: float, expected: str) -> None:
    assert labels.megabytes(size) == expected


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"view": "tree"}, r"view must be 'trace' or 'split'; found 'tree'"),
        ({"view_detail": "all"}, r"view_detail must be 'module' or 'operation'; found 'all'"),
        ({"fileformat": "jpeg"}, r"fileformat must be one of 'svg', 'pdf', 'png', 'dot', 'gv', 'html'; found 'jpeg'"),
        ({"max_module_depth": 0}, r"max_module_depth is how many modules deep .* 'auto'; found 0"),
        ({"max_module_depth": True}, r"found True"),
        ({"outpath": 3}, r"outpath is a path such as 'trace_graph'; found int"),
    ],
)
def test_an_option_that_means_nothing_is_refused(runtime: SplitRuntime, here: Path, options: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        runtime.visualize(**options)
    assert list(here.iterdir()) == []


def test_a_candidate_of_another_plan_is_refused(runtime: SplitRuntime) -> None:
    other = prepare_split(Deep(2, 20), (torch.randn(2, 4),), split="cut:39")
    with pytest.raises(SpecError, match=r"cut:39 is not a cut of this plan, which has \d+ ops"):
        export_split_dot(runtime.plan, other.candidate)
    with pytest.raises(SpecError, match=r"candidate is a SplitCandidate .* found str"):
        export_split_dot(runtime.plan, "cut:3")  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_graphviz")
def test_without_graphviz_the_error_says_so_and_where_the_dot_text_is(runtime: SplitRuntime, here: Path) -> None:
    with pytest.raises(
        VisualizationError, match=r"'dot' is not on PATH\. The DOT text is in 'split_graph\.dot'.*apt-get"
    ) as e:
        runtime.visualize(view="split")
    assert isinstance(e.value, AriadneError)
    assert (here / "split_graph.dot").read_text() == runtime.visualize(view="split", return_dot=True)
    assert {f.name for f in here.iterdir()} == {"split_graph.dot"}


def test_where_graphviz_fails_the_error_repeats_what_it_said_and_no_half_picture_is_left(
    runtime: SplitRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "dot"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'out of luck' >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/bin:/usr/bin")
    with pytest.raises(VisualizationError, match=r"failed with status 3: out of luck\. The DOT text is in"):
        runtime.visualize(outpath=tmp_path / "net.png", fileformat="png")
    assert {f.name for f in tmp_path.iterdir()} == {"bin", "net.dot"}


def test_the_text_itself_is_a_format(runtime: SplitRuntime, here: Path, no_graphviz: None) -> None:
    assert runtime.visualize(fileformat="dot") == Path("trace_graph.dot")
    assert (here / "trace_graph.dot").read_text() == export_trace_dot(runtime.plan)


def test_the_table_is_data_and_text() -> None:
    runtime = prepare_split(Deep(1, 3), (torch.randn(2, 4),), split="50%")
    table = export_split_candidates_table(runtime.plan)
    assert table[0]["after"] == "blocks.0.0"
    assert str(table).splitlines()[1].split() == ["cut:1", "blocks.0.0", "yes", "16", "1", "1", "2", "yes"]
