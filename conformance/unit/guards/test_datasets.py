"""Datasets, samplers and loaders of torch's that a model holds: what forward reads of them is guarded as a user's own is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
)

from ariadne.guards import around, attributes, links, opened
from conformance.unit.trap_kit import numbers, refuses_after

X = numbers(2, 4)


class Row(IterableDataset[float]):
    """Numbers, one after another."""

    def __init__(self, *row: float) -> None:
        self.row = [*row]

    def __iter__(self) -> Iterator[float]:
        yield from self.row


class Net(nn.Module):
    """Two layers, and what stands in `held` between them."""

    def __init__(self, held: Any, reads: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.last, self.held, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), held, reads

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() + self.reads(self.held))


def bank(value: float = 0.0) -> TensorDataset:
    """Two rows."""
    return TensorDataset(torch.arange(8.0).view(2, 4) + value)


def loader() -> DataLoader[Any]:
    """One batch of both."""
    return DataLoader(bank(), batch_size=2)


def fill(dataset: Any) -> None:
    """Give it other rows."""
    dataset.tensors = (torch.ones(3, 4),)


Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]
# What the model holds, what forward computes with it, and what changes.
CASES: dict[str, Case] = {
    "tensors": (bank, lambda d: d[0][0], fill),
    "length": (bank, lambda d: float(len(d)), fill),
    "subset": (lambda: Subset(bank(), [0]), lambda d: d[0][0], lambda d: d.indices.__setitem__(0, 1)),
    "second subset": (
        lambda: [Subset(bank(), [0]), Subset(bank(), [0])],
        lambda d: d[0][0][0] + 2 * d[1][0][0],
        lambda d: setattr(d[1], "indices", [1]),
    ),
    "concatenated": (lambda: ConcatDataset([bank(), bank(3.0)]), lambda d: d[3][0], lambda d: fill(d.datasets[1])),
    "chained": (
        lambda: ChainDataset([Row(1.0, 2.0), Row(3.0)]),
        lambda d: sum(d),
        lambda d: d.datasets[1].row.append(4.0),
    ),
    "stacked": (lambda: StackDataset(a=bank()), lambda d: d[0]["a"][0], lambda d: fill(d.datasets["a"])),
    "loader": (loader, lambda d: d.dataset[0][0], lambda d: fill(d.dataset)),
    "batches": (loader, lambda d: float(len(d)), lambda d: setattr(d.batch_sampler, "batch_size", 1)),
    "sampler": (
        lambda: BatchSampler(SequentialSampler(range(8)), 4, False),
        lambda d: float(len(next(iter(d)))),
        lambda d: setattr(d, "batch_size", 2),
    ),
}


def refused(name: str) -> None:
    """See a split go on with what is as it was, and refuse what changed."""
    make, reads, change = CASES[name]
    held = make()
    refuses_after(Net(held, reads), X, lambda: change(held))


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_what_changes_in_one_is_refused(name: str) -> None:
    refused(name)


@torch.no_grad()
@pytest.mark.planted
@pytest.mark.parametrize("name", ["tensors", "batches"])
def test_a_guard_that_takes_them_for_torchs_own_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for home in (around, links, opened):
        monkeypatch.setattr(home, "is_torchs_own", lambda name: name.partition(".")[0] == "torch")
    monkeypatch.setattr(attributes, "_is_opaque", lambda kind: True)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused(name)
