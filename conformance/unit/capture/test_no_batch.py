"""Batch 0 where the model takes it, and inputs without a batch: equal to the whole model, from bytes and files, in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne import BoundaryPayload, SplitSpec, prepare_pipeline, prepare_split, validate_dynamic_batches
from ariadne.capture import ways
from ariadne.check import check, passed
from ariadne.compare import difference
from ariadne.errors import BatchError, InputError, SpecError, VerificationError


class Rows(nn.Module):
    """One plan for all batches, 0 too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        h = self.norm(self.a(x)).relu()
        return self.b(h), h.sum(0)


class Branches(Rows):
    """Other ops at batch 0: a row of its own."""

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x if len(x) else x.new_ones(1, 4)).relu())


class Divides(Rows):
    """A number of the batch that the plan holds as an expression, which has no value at 0."""

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x) + 1 / max(len(x), 1))


class Asks(Rows):
    """A question about data, whose answer at batch 0 is that of no data."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.b(h + 1 if (h.abs() > -1).any() else h)


def in_files(runtime: Any, folder: Path) -> list[Any]:
    for side in ("prefix", "suffix"):
        runtime.save(folder / f"{side}.safetensors", side=side)
    return [ariadne.load(folder / f"{side}.safetensors") for side in ("prefix", "suffix")]


def from_bytes(prefix: Any, suffix: Any, x: Tensor) -> Any:
    return suffix.run_suffix(BoundaryPayload.from_bytes(prefix.run_prefix(x).to_bytes()))


@pytest.mark.parametrize("make", [Rows, Branches, Divides, Asks])
def test_no_sample_gives_what_the_model_gives(make: type[nn.Module], tmp_path: Path) -> None:
    model = make().eval()
    runtime = prepare_split(model, (torch.randn(3, 4),), split=SplitSpec("after:a", dynamic_batch=(0, 8)))
    assert (0 in runtime.plan.batches) == (make is Rows)
    for batch in (0, 5, 1, 0):
        x = torch.randn(batch, 4)
        with torch.no_grad():
            assert difference(model(x), from_bytes(runtime, runtime, x)) is None
    if make is not Asks:  # a path that only the model knows
        x, halves = torch.randn(0, 4), in_files(runtime, tmp_path)
        with torch.no_grad():
            assert difference(model(x), from_bytes(*halves, x)) is None


@pytest.mark.parametrize("make", [Rows, Branches])
def test_a_step_on_no_sample_is_the_models_own(make: type[nn.Module]) -> None:
    found = check(make(), (torch.randn(3, 4),), cuts=("every",), batches=(0, 3), only=("train",))
    assert passed(found)
    assert {r.batch for r in found} == {0, 3}


def test_what_the_model_raises_on_no_sample_is_raised_and_zero_is_asked_for_by_its_range() -> None:
    class Raises(Rows):
        def forward(self, x: Tensor) -> Any:
            return self.b(self.a(x) * (1 / len(x)))

    x = torch.randn(3, 4)
    runtime = prepare_split(Raises(), (x,), split=SplitSpec("after:a", dynamic_batch=(0, 8)))
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        runtime.run_prefix(x[:0])
    with pytest.raises(BatchError, match="batch 0 lies outside dynamic_batch"):
        prepare_split(Rows(), (x,), split="after:a").run_prefix(x[:0])
    with pytest.raises(BatchError, match="nothing is learnt for others"):
        prepare_split(Rows(), (x[:0],), split=SplitSpec("after:a", dynamic_batch=(0, 8)))
    with pytest.raises(SpecError, match="0 <= smallest <= largest and 1 <= largest"):
        SplitSpec("after:a", dynamic_batch=(0, 0))
    outputs = validate_dynamic_batches(
        prepare_split(Rows(), (x,), split=SplitSpec("after:a", dynamic_batch=(0, 8))), (x,), batch_sizes=(0, 1, 3)
    )
    assert [len(out[0]) for out in outputs] == [0, 1, 3]


def test_a_plan_that_takes_batch_0_unseen_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a real run at batch 0 is not held against the plan."""
    inner = ways.differs_from
    monkeypatch.setattr(ways, "differs_from", lambda plan, seen: seen.plan.traced_batch and inner(plan, seen))
    with pytest.raises(VerificationError, match="at batch 0 the split at"):
        prepare_split(Branches(), (torch.randn(3, 4),), split=SplitSpec("after:a", dynamic_batch=(0, 8)))


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c, self.d = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(x).relu() * x.shape[1])  # type: ignore[no-any-return]


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c, self.d = nn.Linear(1, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(x.reshape(1)).relu())[0]  # type: ignore[no-any-return]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c, self.d = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(x).mean(0))  # type: ignore[no-any-return]


ALONE = [(Image, lambda: torch.randn(3, 8, 6)), (Scalar, lambda: torch.randn(())), (Table, lambda: torch.arange(7))]


@pytest.mark.parametrize(("make", "draw"), ALONE)
@pytest.mark.parametrize("along", ["none", {"x": None}])
def test_a_model_without_a_batch_is_split_as_it_is(make: Any, draw: Any, along: Any, tmp_path: Path) -> None:
    model = make().eval()
    spec = SplitSpec("after:c", batch_dim=along, trainable=True)
    runtime = prepare_split(model, (draw(),), split=spec)
    assert "no input has a batch" in str(runtime.plan)
    halves = in_files(runtime, tmp_path)
    for prefix, suffix in ((runtime, runtime), halves):
        x = draw()
        with torch.no_grad():
            assert torch.equal(model(x), from_bytes(prefix, suffix, x))
    assert len(runtime.plans) == 1
    assert passed(check(model.train(), (draw(),), cuts=("every",), batch_dim=along))


def test_sizes_beside_no_batch_are_symbols() -> None:
    model = Image().eval()
    spec = SplitSpec("after:c", batch_dim="none", dynamic={"x": {1: "H", 2: "W"}}, sizes={"H": (4, 32), "W": (4, 32)})
    runtime = prepare_split(model, (torch.randn(3, 8, 6),), split=spec)
    for size in ((8, 6), (12, 12), (5, 31)):
        x = torch.randn(3, *size)
        with torch.no_grad():
            assert torch.equal(model(x), from_bytes(runtime, runtime, x))
    assert len(runtime.plans) == 1


def test_what_has_no_batch_keeps_its_size_and_is_not_parted() -> None:
    x, spec = torch.randn(3, 8, 6), SplitSpec("after:c", batch_dim="none")
    runtime = prepare_split(Image(), (x,), split=spec)
    with pytest.raises(InputError, match="dim 0 is 3 in the plan"):
        runtime.run_prefix(torch.randn(1, 8, 6))
    with pytest.raises(SpecError, match="no batch sizes to validate"):
        validate_dynamic_batches(runtime, (x,), batch_sizes=(1,))
    with pytest.raises(SpecError, match="parts its inputs along the batch"):
        prepare_pipeline(Image(), (x,), parts=2, batch_dim="none")
    with pytest.raises(SpecError, match="or 'none' where no input has one"):
        SplitSpec("after:c", batch_dim="all")  # type: ignore[arg-type]
