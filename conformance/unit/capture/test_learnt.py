"""What forward learns of its batch where nobody can ask again: it must not decide at batches that no real run showed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.compare import difference
from ariadne.runtime.plans import MOST_PLANS

BATCHES = range(1, 17)


class Branch(nn.Module):
    """Takes another way where `asks` says so, of what it was given."""

    def __init__(self, asks: Callable[..., Any]) -> None:
        super().__init__()
        self.asks, self.a, self.b = asks, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """(B, 4) -> (B, 4)."""
        y = self.a(x)
        return self.b(y.tanh() if self.asks(x, *others) else y.relu())


class Total(nn.Module):
    """(B, 6, 5) -> (6, 5); `asks` is given the thirty numbers of the sum over samples, which nothing else uses in rows."""

    def __init__(self, asks: Callable[[torch.Tensor, int], Any]) -> None:
        super().__init__()
        self.asks, self.linear = asks, nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum(0)
        return self.linear(total) * (2 if self.asks(total, x.shape[0]) else 3)


def again(rows: torch.Tensor) -> bool:
    rows.reshape(rows.shape[0], rows.shape[1], 1)
    return True


# Each is false up to batch 6 or so; capture runs 2, 3, 5 and 1.
READ = {
    "the sum of a mask": lambda x, mask: mask.sum().item() > 24,
    "the sum of a mask, as a size": lambda x, mask: len(range(mask.sum())) > 24,
    "a list of a mask": lambda x, mask: len(mask.flatten().tolist()) > 24,
    "the largest of arange": lambda x, mask: torch.arange(x.shape[0]).max().item() > 6,
    "any of arange": lambda x, mask: bool((torch.arange(x.shape[0]) > 6).any()),
    "the sum of ones": lambda x, mask: torch.ones(x.shape[0]).sum() > 7,
    "a tensor of the batch": lambda x, mask: torch.tensor(x.shape[0]) > 7,
    "a list of arange": lambda x, mask: torch.arange(x.shape[0]).tolist()[-1] > 6,
    "the number of parts": lambda x, mask: len(x.split(2)) > 3,
    "the number of samples, counted": lambda x, mask: sum(1 for _ in x) > 6,
    "the number of rows that are not zero": lambda x, mask: len(mask.nonzero()) > 24,
}


def written(x: torch.Tensor, mask: torch.Tensor) -> bool:
    kept = torch.zeros(16)
    kept[: x.shape[0]] = 1
    return bool(kept[7].item())


def caught(x: torch.Tensor, mask: torch.Tensor) -> bool:
    try:
        return x[6] is not None
    except IndexError:
        return False


def fitting(x: torch.Tensor, mask: torch.Tensor) -> bool:
    try:
        return x.reshape(7, 4) is not None
    except RuntimeError:
        return False


LATER = [False] * 7 + [True] * 10
READ |= {
    "what was written into a part": written,
    "an index that is none": caught,
    "a shape that does not fit": fitting,
    "numpy of arange": lambda x, mask: (torch.arange(x.shape[0]) > 6).any().numpy(),
    "a list of one": lambda x, mask: (torch.arange(x.shape[0]) > 6).any().tolist(),
    "an entry of a list": lambda x, mask: LATER[x.shape[0]],
}
TAKEN = {  # where fake tensors stop at a question about the data, so that real runs alone tell
    "the product of a shape": lambda x: x.shape.numel() > 28,
    "torch.numel": lambda x: torch.numel(x) > 28,
    "a range": lambda x: len(range(x.shape[0])) > 7,
    "the shape of data": lambda x: x.data.shape[0] > 7,
    "a stride": lambda x: x.t().contiguous().stride(0) > 7,
    "an offset": lambda x: (x * 1)[-1].storage_offset() > 24,
    "a shape in words": lambda x: "[8," in str(x.shape),
}
ROWS = {
    "the size of a row": lambda total, n: total.reshape(n, -1).shape[1] > 4,
    "the size of a part of a row": lambda total, n: total.reshape(n, -1)[:, :5].shape[1] == 5,
    "a column that not all have": lambda total, n: total.reshape(n, -1)[:, 5] is not None,
    "rows made into rows": lambda total, n: again(total.reshape(n, -1)),
}


def held(model: nn.Module, *inputs: torch.Tensor) -> None:
    """The split of the model does at every batch what the whole one does, be it to raise."""
    runtime = prepare_split(model, tuple(t[:2] for t in inputs), split=SplitSpec("cut:1", dynamic_batch=(1, 16)))
    for batch in BATCHES:
        some = tuple(t[:batch] for t in inputs)
        try:
            expected = model(*some)
        except (RuntimeError, IndexError) as error:
            with pytest.raises(type(error)):
                runtime.run_suffix(runtime.run_prefix(*some))
        else:
            assert difference(expected, runtime.run_suffix(runtime.run_prefix(*some))) is None, (batch, runtime.plan)


LONG = "a list of a mask"  # torch reads 64 numbers of each batch one by one where they are fake


@pytest.mark.parametrize(
    "what", [w if w != LONG else pytest.param(w, marks=pytest.mark.variants) for w in sorted(READ)]
)
def test_what_is_read_out_of_the_batch_decides_only_where_it_was_shown(what: str) -> None:
    model = Branch(READ[what]).eval()
    held(model, torch.randn(16, 4), torch.ones(16, 4, dtype=torch.long))


@pytest.mark.parametrize("what", sorted(TAKEN))
def test_what_is_computed_of_sizes_out_of_sight_decides_only_where_it_was_shown(what: str) -> None:
    model = Branch(lambda x, mask: bool((mask >= 0).all()) and TAKEN[what](x)).eval()
    held(model, torch.randn(16, 4), torch.ones(16, 4, dtype=torch.long))


def test_a_branch_on_data_that_were_written_into_a_part_is_followed() -> None:
    def asks(x: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros(4)
        kept[:2] = x[0, :2]
        return kept.sum() > 0

    model, x = Branch(asks).eval(), torch.ones(2, 4)
    runtime = prepare_split(model, (x,), split=SplitSpec("cut:1", dynamic_batch=(1, 16)))
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(-x)), model(-x))
    assert len(runtime.plans) == 2


@pytest.mark.parametrize("what", ["a flag of the input", "the grad mode"])
@pytest.mark.parametrize("at", [1, 3])
def test_what_forward_looks_at_in_one_of_the_runs_is_a_condition_of_the_plan(what: str, at: int) -> None:
    def asks(x: torch.Tensor) -> bool:
        looks = x.shape[0] == 1 if at == 1 else sum(1 for _ in x) == at  # the second way, in real runs alone
        return looks and (x.requires_grad if what == "a flag of the input" else not torch.is_grad_enabled())

    model = Branch(asks).eval()
    runtime = prepare_split(model, (torch.randn(2, 4),), split=SplitSpec("cut:1", dynamic_batch=(1, 16)))
    x = torch.randn(at, 4, requires_grad=what == "a flag of the input")
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))


def test_what_forward_looks_at_from_a_further_batch_on_is_a_condition_there() -> None:
    def asks(x: torch.Tensor) -> bool:
        return sum(1 for _ in x) == 7 and x.requires_grad

    model = Branch(asks).eval()
    runtime = prepare_split(model, (torch.randn(2, 4),), split=SplitSpec("cut:1", dynamic_batch=(1, 16)))
    for flag in (False, True, False):
        x = torch.randn(7, 4, requires_grad=flag)
        with torch.no_grad():
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x)), flag


def test_a_frozen_parameter_calls_for_a_new_plan_and_gets_one() -> None:
    model = Branch(lambda x: sum(1 for _ in x) > 99).eval()
    model.asks = lambda x: sum(1 for _ in x) > 99 or not model.a.weight.requires_grad
    x = torch.randn(2, 4)
    runtime = prepare_split(model, (x,), split=SplitSpec("cut:1", dynamic_batch=(1, 16)))
    assert runtime.plan.captured_by == "observed"
    model.a.weight.requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))


def test_a_plan_in_use_is_never_put_aside_for_others() -> None:
    model = Branch(lambda x: sum(1 for _ in x) > 99).eval()
    runtime = prepare_split(model, (torch.randn(2, 4),), split=SplitSpec("cut:1", dynamic_batch=(1, 64)))
    x = torch.randn(4, 4)

    def step() -> torch.Tensor:
        return runtime.train_suffix(runtime.run_training_prefix(x), loss_fn=lambda out, _: out.sum())[0]

    first = step()
    for batch in range(6, 6 + MOST_PLANS + 2):
        runtime.run_prefix(torch.randn(batch, 4))
    assert torch.equal(step(), first)
    assert len(runtime._variants) <= MOST_PLANS


@pytest.mark.parametrize("what", sorted(ROWS))
def test_sizes_that_fit_no_expression_decide_only_where_they_were_shown(what: str) -> None:
    model = Total(ROWS[what]).eval()
    held(model, torch.randn(16, 6, 5))


def test_a_plan_of_real_runs_serves_a_further_batch_after_one_run_that_does_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Branch(lambda x: sum(1 for _ in x) > 6).eval()
    runtime = prepare_split(model, (torch.randn(2, 4),), split=SplitSpec("cut:1", dynamic_batch=(1, 16)))
    assert (runtime.plan.captured_by, str(runtime.plan.batches)) == ("observed", "1 to 3, 5")
    monkeypatch.setattr("ariadne.capture.ways.symbolic", lambda *_: pytest.fail("captured from the start"))
    x = torch.randn(6, 4)
    boundary = runtime.run_prefix(x)
    assert torch.equal(runtime.run_suffix(boundary), model(x))
    assert boundary.plan_signature != runtime.plan.signature
    monkeypatch.undo()
    x = torch.randn(7, 4)  # here it goes another way
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))


@pytest.mark.parametrize("mode", ["compiled", "generated_eager"])
@pytest.mark.parametrize(("example", "batches"), [(1, (1, 1)), (2, (4, 8))])
def test_gradients_are_compared_at_a_batch_of_the_range(example: int, batches: tuple[int, int], mode: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    spec = SplitSpec("50%", dynamic_batch=batches, trainable=True)
    options = {"backend": "eager"} if mode == "compiled" else None
    runtime = prepare_split(model, (torch.randn(example, 4),), split=spec, mode=mode, compile_options=options)
    assert batches[1] in runtime.plan.batches
