"""What forward learns of its batch where nobody can ask again: it must not decide at batches that no real run showed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.verify import difference

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


@pytest.mark.parametrize("what", sorted(READ))
def test_what_is_read_out_of_the_batch_decides_only_where_it_was_shown(what: str) -> None:
    model = Branch(READ[what]).eval()
    held(model, torch.randn(16, 4), torch.ones(16, 4, dtype=torch.long))


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
    monkeypatch.setattr("ariadne.capture.symbolic", lambda *_: pytest.fail("captured from the start"))
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
