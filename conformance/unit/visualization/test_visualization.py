"""Drawings: the contract page's visualization snippets run as written; what is drawn is what the plan holds, and can be read."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import model_zoo
from ariadne import AriadneError, SplitRuntime, SplitSpec, prepare_split
from ariadne.errors import SpecError, VisualizationError
from ariadne.visualization import (
    export_split_candidates_table,
    export_split_dot,
    export_trace_dot,
    labels,
)
from ariadne.visualization.dot import quoted
from ariadne.visualization.fit import MOST_BOXES, fits
from ariadne.visualization.fold import Depth
from ariadne.visualization.graph import Box, Graph, Group, Options, graph

needs_graphviz = pytest.mark.skipif(shutil.which("dot") is None, reason="no Graphviz here: there is no 'dot' on PATH")

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


class Block(nn.Module):
    """A residual block, whose activation is called twice."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + x)


class Net(nn.Module):
    """Two blocks, the first of them frozen, and a head that also takes a second input of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.Sequential(Block(frozen=True), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3))) * scale


def prepared() -> SplitRuntime:
    torch.manual_seed(0)
    given = {"example_kwargs": {"scale": torch.randn(2, 2)}, "split": SplitSpec("after:blocks.0", trainable=True)}
    return prepare_split(Net().eval(), (torch.randn(2, 3, 8, 8),), **given)


@pytest.fixture(scope="module")
def runtime() -> SplitRuntime:
    return prepared()


@pytest.fixture(scope="module")
def resnet18() -> SplitRuntime:
    entry = model_zoo.entry("torchvision/resnet18")
    args, kwargs = entry.inputs(2)
    return prepare_split(entry.build().eval(), args, split="after:layer2", example_kwargs=kwargs)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


def run(snippet: str, **given: Any) -> dict[str, Any]:
    """The names that a snippet leaves, run with those `given`."""
    exec(compile(snippet, "<contract page>", "exec"), given)
    return given


def boxes(found: Graph) -> Iterator[Box]:
    for item in found.items:
        yield from [item] if isinstance(item, Box) else item.boxes()


def groups(items: Any) -> Iterator[Group]:
    for item in items:
        if isinstance(item, Group):
            yield item
            yield from groups(item.items)


def drawn(runtime: SplitRuntime, split: bool = False, **options: Any) -> Graph:
    return graph(runtime.plan, runtime.candidate if split else None, Options(**options))


def words(found: Graph) -> list[str]:
    return ["\n".join(box.rows) for box in boxes(found)]


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
    assert found.legend[:4] == (
        "split: cut:8 (after blocks.0)",
        "boundary_bytes: 584 per sample, 2 values",
        f"prefix: {c.prefix_ops} ops, suffix: {c.suffix_ops} ops",
        "suffix trainable: yes, prefix trainable: yes",
    )
    text = runtime.visualize(view="split", return_dot=True)
    shapes = [
        re.search(rf"key_{r} \[.*?shape=\"(\w+)\", style=\"([\w,]+)\"", text) for r in roles if f"key_{r} " in text
    ]
    assert len({m.groups() for m in shapes if m}) == 4  # told apart without colour


# --- what is drawn -------------------------------------------------------------------------------------------------


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


class Deep(nn.Module):
    """Blocks of blocks, of which some are larger than others."""

    def __init__(self, blocks: int, layers: int) -> None:
        super().__init__()
        inner = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))) for _ in range(blocks)]
        self.blocks = nn.Sequential(*inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


@pytest.mark.parametrize(("blocks", "layers"), [(3, 5), (20, 20), (360, 1)])
def test_the_automatic_depth_opens_what_fits_on_two_screens(blocks: int, layers: int) -> None:
    runtime = prepare_split(Deep(blocks, layers), (torch.randn(2, 4),), split="50%")
    for fold_repeats in (False, True):
        found = drawn(runtime, fold_repeats=fold_repeats)
        assert fits(found)
    assert f" × {blocks}, to " in "".join([*(b.rows[0] for b in boxes(found)), *(g.title for g in groups(found.items))])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "timm/swin_tiny_patch4_window7_224",
        "torchvision/resnet18",
        "transformers/gpt2_tiny",
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
