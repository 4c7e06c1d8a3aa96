"""A Python split's boundary, run from its bytes: what forward changes where no call of torch tells it."""

from __future__ import annotations

import collections
import copy
import ctypes
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, PythonSplit, prepare_split
from ariadne.errors import BoundaryError
from ariadne.stopped.skipped import run_rest

X = torch.linspace(-1, 0.5, 12).view(3, 4)  # its sum is below zero


class Net(nn.Module):
    """Draws from Python's generator after the cut; `before` and `after` are told apart by subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.kept: Any = None

    def before(self, x: Tensor) -> Any:
        return 0

    def forward(self, x: Tensor) -> Tensor:
        more = self.before(x)
        h = self.middle(self.encoder(x).relu())
        h.mul_(random.random())
        h.add_(1)
        return self.head(h) + more


class FromNumpy(Net):
    def before(self, x: Tensor) -> Any:
        total = torch.from_numpy(numpy.zeros(1, "float32"))
        if x.sum() > 0:
            total += 1
        return total


class Counter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept = collections.Counter()

    def before(self, x: Tensor) -> Any:
        self.kept["n"] += 1
        return 0


class Array(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept = numpy.zeros(2)

    def before(self, x: Tensor) -> Any:
        if x.sum() > 0:
            self.kept[0] += 1
        return float(self.kept[0])


class Numbers(Array):
    def __init__(self) -> None:
        super().__init__()
        self.kept = numpy.random.RandomState(0)

    def before(self, x: Tensor) -> Any:
        return float(self.kept.rand()) if x.sum() > 0 else 0.0


class Pointer(Net):
    def before(self, x: Tensor) -> Any:
        return ctypes.c_float.from_address(x.data_ptr()).value


class PointerOfAWeight(Net):
    """Gives one where it gets the address that the weight has in this model."""

    def before(self, x: Tensor) -> Any:
        weight: Any = self.encoder.weight
        return float(weight.data_ptr() == torch._C._data_address(weight))  # type: ignore[attr-defined]


def whole(model: nn.Module, x: Tensor) -> Tensor:
    random.seed(1)
    with torch.no_grad():
        return model(x)


@pytest.mark.parametrize("fallback", ["python", "python-suffix"])
def test_a_payload_is_run_twice_where_forward_writes_into_what_crossed(fallback: Any) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    runtime = prepare_split(model, (X,), split="after:middle", fallback=fallback)
    payload = BoundaryPayload.from_bytes(runtime.run_prefix(X).to_bytes())
    for _ in range(3):
        random.seed(1)
        assert torch.equal(runtime.run_suffix(payload), whole(model, X))


@pytest.mark.parametrize("net", [FromNumpy, Counter, Array, Numbers, Pointer])
def test_what_changes_where_no_call_of_torch_tells_it_is_not_sent(net: type[Net]) -> None:
    torch.manual_seed(0)
    model = net().eval()
    runtime = prepare_split(model, (X,), split="after:middle", fallback="python")
    boundary = runtime.run_prefix(-X)
    with pytest.raises(BoundaryError, match=r"can't be sent|no bytes"):
        boundary.to_bytes()
    random.seed(1)
    runtime.run_suffix(boundary)


def test_an_address_is_asked_of_the_data_that_are_here() -> None:
    torch.manual_seed(0)
    model = PointerOfAWeight().eval()
    twin = copy.deepcopy(model)
    ours, theirs = (prepare_split(m, (X,), split="after:middle", fallback="python") for m in (model, twin))
    payload = BoundaryPayload.from_bytes(ours.run_prefix(X).to_bytes())
    random.seed(1)
    assert torch.equal(theirs.run_suffix(payload), whole(model, X))


class Signed(Net):
    def before(self, x: Tensor) -> Any:
        return x.is_signed()


class Address(Net):
    def before(self, x: Tensor) -> Any:
        return float(x.data_ptr() > 0)


def test_a_payload_that_tells_an_address_is_refused() -> None:
    model = Signed().eval()
    runtime = prepare_split(model, (X,), split="after:middle", fallback="python")
    assert isinstance(runtime, PythonSplit)
    boundary, model.__class__ = runtime.run_prefix(X), Address  # where the first call is another one
    crossed = [torch.zeros(3, 6), *boundary.kept]
    with pytest.raises(BoundaryError, match="asks where in memory a tensor's data lie"), torch.no_grad():
        run_rest(model, model.middle, 1, boundary.before, crossed, known=frozenset())


class Untrained(nn.Module):
    """Cut within `torch.no_grad()`, at the end of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.middle(self.encoder(x)) * random.random()
        return self.head(h)  # type: ignore[no-any-return]


def test_what_lies_after_a_cut_within_no_grad_gets_no_gradients_from_bytes() -> None:
    model = Untrained()
    split = prepare_split(model, (X,), split="after:encoder", fallback="python")
    boundary = split.run_training_prefix(X)
    arrived = BoundaryPayload.from_bytes(boundary.to_bytes())
    _, gradients = split.train_suffix(arrived, loss_fn=lambda output, _: output.sum())
    split.backward_prefix(boundary, gradients)
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["head.weight", "head.bias"]


class Wanting(Untrained):
    """Switches gradients on before the cut, whatever the caller has."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = self.middle(self.encoder(x)) * random.random()
        return self.head(h)  # type: ignore[no-any-return]


def test_what_crosses_with_a_graph_where_gradients_are_off_is_no_bytes() -> None:
    split = prepare_split(Wanting(), (X,), split="after:encoder", fallback="python")
    assert split.run_suffix(split.run_prefix(X)).shape == (3, 2)
    with pytest.raises(BoundaryError, match="before the cut forward switches gradients on"):
        split.run_prefix(X).to_bytes()
