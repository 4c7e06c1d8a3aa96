"""The README's table of Ariadne beside torch's own tools: each cell about what a tool does is a test here.

The last row, of times, is read out of the published report that it links to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split

ROOT = Path(__file__).resolve().parents[3]
SUMMARY = ROOT / "reports/published/2026-11-23-cpu-torch2.15.0/summary.md"


class Skipping(nn.Module):
    """A skip over the cut, and a reshape that asks for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).reshape(x.shape[0], 2, 2)
        return self.second(h.flatten(1)) + h.flatten(1)


class Branching(Skipping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h * 2 if h.sum() > 0 else h)


def doubled(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return output * 2


@pytest.fixture
def net() -> Skipping:
    torch.manual_seed(0)
    return Skipping().eval()


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


FOUR, SEVEN = torch.arange(16.0).view(4, 4), torch.arange(28.0).view(7, 4)


def test_ariadne_lists_the_cuts_carries_the_skip_and_takes_another_batch(net: Skipping) -> None:
    runtime = prepare_split(net, (FOUR,), split="after:first")
    assert [c.boundary_bytes for c in runtime.candidates if c.safe]
    runtime = runtime.resplit(next(c for c in runtime.candidates if len(c.live) > 1))
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(SEVEN)), net(SEVEN))


def test_ariadne_says_so_where_the_model_has_another_hook(net: Skipping) -> None:
    runtime = prepare_split(net, (FOUR,), split="after:first")
    net.first.register_forward_hook(doubled)
    with pytest.raises(ModuleError, match="hook"):
        runtime.run_prefix(FOUR)


def test_ariadne_answers_where_data_take_another_branch() -> None:
    runtime = prepare_split(Branching().eval(), (FOUR,), split="after:first")
    runtime.model.first.weight.data.neg_()
    runtime.model.first.bias.data.neg_()
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(FOUR)), runtime.model(FOUR))
    assert len(runtime.plans) == 2


def test_export_takes_the_batches_that_were_declared(net: Skipping) -> None:
    fixed = torch.export.export(net, (FOUR,)).module()
    with pytest.raises(AssertionError, match="Guard failed"):
        fixed(SEVEN)
    declared = torch.export.export(net, (FOUR,), dynamic_shapes=({0: torch.export.Dim("B", min=2, max=64)},)).module()
    assert torch.allclose(declared(SEVEN), net(SEVEN))


def test_export_goes_on_without_a_new_hook(net: Skipping) -> None:
    program = torch.export.export(net, (FOUR,)).module()
    net.first.register_forward_hook(doubled)
    assert not torch.equal(program(FOUR), net(FOUR))


def test_export_does_not_take_a_branch_on_data() -> None:
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(Branching().eval(), (FOUR,))


@pytest.mark.usefixtures("one_process")
def test_pipelining_carries_the_skip_and_keeps_the_examples_batch(net: Skipping) -> None:
    pipe = pipeline(net, mb_args=(FOUR,), split_spec={"second": SplitPoint.BEGINNING})
    assert torch.allclose(pipe(FOUR)[0], net(FOUR))
    with pytest.raises(RuntimeError):
        pipe(SEVEN)


@pytest.mark.usefixtures("one_process")
def test_pipelining_goes_on_without_a_new_hook(net: Skipping) -> None:
    pipe = pipeline(net, mb_args=(FOUR,), split_spec={"second": SplitPoint.BEGINNING})
    net.first.register_forward_hook(doubled)
    assert not torch.equal(pipe(FOUR)[0], net(FOUR))


@pytest.mark.usefixtures("one_process")
def test_pipelining_does_not_take_a_branch_on_data() -> None:
    with pytest.raises(RuntimeError, match="cannot capture your model as a full graph"):
        pipeline(Branching().eval(), mb_args=(FOUR,))


def test_compile_takes_another_batch_and_a_branch_and_goes_on_without_a_new_hook(net: Skipping) -> None:
    compiled = torch.compile(net, backend="eager")
    assert torch.equal(compiled(FOUR), net(FOUR))
    assert torch.equal(compiled(SEVEN), net(SEVEN))
    net.first.register_forward_hook(doubled)
    assert not torch.equal(compiled(FOUR), net(FOUR))
    branching = Branching().eval()
    assert torch.equal(torch.compile(branching, backend="eager")(FOUR), branching(FOUR))


def test_the_times_are_those_of_the_published_report() -> None:
    row = next(line for line in (ROOT / "README.md").read_text().splitlines() if "the model's own time" in line)
    times = re.findall(r"(\d\.\d\d)×", row)
    assert len(times) == 5
    text = SUMMARY.read_text()
    assert all(re.search(rf"\b{re.escape(time)}\d", text) for time in times)
