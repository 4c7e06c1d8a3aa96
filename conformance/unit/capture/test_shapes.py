"""Shapes: for which batches a plan holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import ariadne.capture.generalize
import ariadne.capture.shapes
from ariadne import SplitSpec, prepare_split
from ariadne.compare import difference
from ariadne.errors import AriadneError
from ariadne.plan import TracePlan

WIDE = SplitSpec(boundary="percent:50", dynamic_batch=(1, 64))


def holds(model: nn.Module, x: torch.Tensor, split: SplitSpec = WIDE) -> TracePlan:
    """The plan of the model, which equals it at batches near the ends of what it covers."""
    runtime = prepare_split(model.eval(), (x,), split=split)
    for low, high in runtime.plan.batches.ranges:
        for batch in sorted({low, high}):
            again = torch.randn(batch, *x.shape[1:])
            with torch.no_grad():
                assert difference(model(again), runtime.run_suffix(runtime.run_prefix(again))) is None, batch
    return runtime.plan


class Upsampled(nn.Module):
    """More than 16 channels, so that convolution asks whether the batch is 16 or more, and an op that is composite."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 20, 3), nn.Upsample(scale_factor=2, mode=mode)
        self.end = nn.Conv2d(20, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.up(self.conv(x).relu()))


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "nearest-exact"])
def test_a_convolution_and_an_upsampling_hold_for_the_whole_range_in_one_way(mode: str) -> None:
    plan = holds(Upsampled(mode), torch.randn(2, 3, 8, 8))
    assert plan.captured_by == "symbolic"
    assert plan.batches.ranges == ((1, 64),)


def test_what_a_convolution_asks_of_its_batch_makes_no_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell is another run of every op: it took half of the time that preparing a mobilenet takes."""
    runs: list[int] = []
    first = ariadne.capture.shapes._Run.__init__

    def counted(self: ariadne.capture.shapes._Run, plan: TracePlan, batch: int, blind: set[int], **named: bool) -> None:
        runs.append(batch)
        first(self, plan, batch, blind, **named)

    monkeypatch.setattr(ariadne.capture.shapes._Run, "__init__", counted)
    holds(Upsampled("bilinear"), torch.randn(2, 3, 8, 8))
    assert runs == []
    monkeypatch.setattr(ariadne.capture.shapes, "_chooses_kernel", lambda op, args: False)
    holds(Upsampled("bilinear"), torch.randn(2, 3, 8, 8))
    assert runs == [16]


class Along(nn.Module):
    """A convolution along the batch: here it does ask for more than its kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.relu().t()).t().sum(0, keepdim=True) + x


@pytest.mark.parametrize("batch", [1, 2, 4, 5, 6, 9, 64])
def test_a_convolution_along_the_batch_equals_the_model_or_raises_where_the_model_does(batch: int) -> None:
    model, x = Along().eval(), torch.randn(batch, 3)
    runtime = prepare_split(model, (torch.randn(8, 3),), split=WIDE)
    with torch.no_grad():
        if batch < 5:
            with pytest.raises(RuntimeError, match="Kernel size"):
                model(x)
            with pytest.raises((AriadneError, RuntimeError)):
                runtime.run_suffix(runtime.run_prefix(x))
        else:
            assert difference(model(x), runtime.run_suffix(runtime.run_prefix(x))) is None


class Rows(nn.Module):
    """Thirty numbers in rows, one for each sample, that nothing uses; fake tensors take another path, so only real runs tell."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 6, 5) -> (6, 5)."""
        total = x.sum(0)
        total.reshape(x.shape[0], -1)
        y = self.linear(total)
        return y if type(y) is torch.Tensor else y.relu()


def test_real_runs_too_leave_out_a_batch_at_which_an_op_cannot_run_though_nothing_uses_its_result() -> None:
    model = Rows().eval()
    runtime = prepare_split(model, (torch.randn(2, 6, 5),), split=SplitSpec("percent:50", dynamic_batch=(1, 8)))
    assert runtime.plan.captured_by == "observed"
    assert not any("reshape" in node.target for node in runtime.plan.nodes)
    assert [b for b in range(1, 9) if b in runtime.plan.batches] == [1, 2, 3, 5, 6]
    for batch in (4, 7, 8):
        x = torch.randn(batch, 6, 5)
        for run in (model, runtime.run_prefix):
            with pytest.raises(RuntimeError, match=rf"shape '\[{batch}, -1\]' is invalid for input of size 30"):
                run(x)


class Images(nn.Module):
    """As many ops that nothing uses as there are samples, on the path of real runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 4) -> (B, 4)."""
        for sample in x:
            sample.sum()
        y = self.linear(x.tanh())
        return y if type(y) is torch.Tensor else y.relu()


def test_real_runs_make_one_plan_though_they_differ_in_ops_that_nothing_uses() -> None:
    runtime = prepare_split(Images().eval(), (torch.randn(2, 4),), split=SplitSpec("cut:1", dynamic_batch=(1, 8)))
    assert runtime.plan.captured_by == "observed"
    assert [b for b in range(1, 9) if b in runtime.plan.batches] == [1, 2, 3, 5]  # those that were run


class Fitting(nn.Module):
    """Twelve numbers in rows, one for each sample: at batches that don't divide twelve, forward raises."""

    def __init__(self, wanted: bool) -> None:
        super().__init__()
        self.wanted, self.linear = wanted, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum(0)  # (3, 4)
        rows = total.reshape(x.shape[0], -1)
        return self.linear(total) * (rows.sum() if self.wanted else 1.0)


@pytest.mark.parametrize("wanted", [False, True], ids=["nothing_uses_it", "used"])
def test_a_batch_at_which_an_op_cannot_run_is_left_out_though_nothing_uses_its_result(wanted: bool) -> None:
    model = Fitting(wanted).eval()
    runtime = prepare_split(model, (torch.randn(2, 3, 4),), split=SplitSpec("percent:50", dynamic_batch=(1, 8)))
    assert runtime.plan.captured_by == "symbolic"
    assert any("reshape" in node.target for node in runtime.plan.nodes) == wanted
    assert [b for b in range(2, 9) if b in runtime.plan.batches] == [2, 3, 4, 6]
    for batch in (5, 7, 8):
        x = torch.randn(batch, 3, 4)
        with pytest.raises(RuntimeError, match=rf"shape '\[{batch}, -1\]' is invalid for input of size 12"):
            model(x)
        with pytest.raises(RuntimeError, match=rf"shape '\[{batch}, -1\]' is invalid for input of size 12"):
            runtime.run_prefix(x)


class Sliced(nn.Module):
    """Indexes with slices of all, which torch skips on real tensors and makes aliases of on fake ones; and with nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(self.enter(x))
        z = y[:]
        return self.leave(y[:, :3] * z[:, -1:]), z[:, 2] + y[:, 0]


def test_a_slice_of_all_that_indexing_skips_is_in_no_symbolic_plan() -> None:
    torch.manual_seed(0)
    model = Sliced()
    spec = SplitSpec("percent:50", dynamic_batch=(1, 8))
    runtime = prepare_split(model, (torch.randn(2, 4),), split=spec)
    assert runtime.plan.captured_by == "symbolic", runtime.plan.not_captured_by
    assert [n.target for n in runtime.plan.nodes].count("aten.alias.default") == 1
    for candidate in filter(lambda c: c.safe, runtime.candidates):
        split = runtime.resplit(candidate)
        for batch in (1, 2, 5):
            x = torch.randn(batch, 4)
            assert difference(model(x), split.run_suffix(split.run_prefix(x))) is None


def test_an_alias_left_out_for_another_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ariadne.capture.generalize.without_slices_of_all
    dropped = []

    def all_of_them(plan: TracePlan, seen: TracePlan) -> TracePlan:
        bare = replace(seen, nodes=tuple(n for n in seen.nodes if n.target != "aten.alias.default"))
        dropped.append(len(seen.nodes) - len(bare.nodes))
        return real(plan, bare)

    monkeypatch.setattr("ariadne.capture.beside.without_slices_of_all", all_of_them)
    torch.manual_seed(0)
    runtime = prepare_split(Sliced(), (torch.randn(2, 4),), split=SplitSpec("percent:50", dynamic_batch=(1, 8)))
    assert {*dropped} == {1}
    assert runtime.plan.captured_by == "observed"
    assert "not what a real run does" in runtime.plan.not_captured_by[0][1]


class Detour(nn.Module):
    """Runs more ops where sizes are symbols, and then a slice of all."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.enter(x)
        if isinstance(x, FakeTensor):
            y = y.tanh().exp().sin()
        return y * 2, y[:]


def test_a_symbolic_run_that_is_longer_than_the_real_one_is_told_apart() -> None:
    runtime = prepare_split(Detour(), (torch.randn(2, 4),), split=SplitSpec("cut:1", dynamic_batch=(1, 8)))
    assert runtime.plan.captured_by == "observed"
    assert "not what a real run does" in runtime.plan.not_captured_by[0][1]
