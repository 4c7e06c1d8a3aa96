"""What Python asks of weights by which they are: whether there is one, of which class, and whether two are one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)
Part = Callable[[Any], Any]


class Own(nn.Parameter):
    """A class of weights of the user's own."""


class Net(nn.Module):
    """Two layers, and a factor that follows which weights there are."""

    def __init__(self, asks: Part, begin: Part) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.asks = nn.Linear(4, 4), nn.Linear(4, 4), asks
        self.register_buffer("table", torch.ones(1))
        begin(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) * self.asks(self)


def as_it_is(m: Any) -> None:
    pass


def none(m: Any) -> None:
    m.last.bias = None


def new(m: Any) -> None:
    m.last.bias = nn.Parameter(torch.ones(4))


def tied(m: Any) -> None:
    m.last.bias = m.first.bias


def own(m: Any) -> None:
    m.first.weight = Own(m.first.weight.detach())


def by_variable(m: Any) -> int:
    bias = m.last.bias
    return 1 if bias is not None else 2


ASKED: dict[str, tuple[Part, Part, Part]] = {
    "is None": (lambda m: 2 if m.last.bias is None else 1, as_it_is, none),
    "is None, by a variable": (by_variable, as_it_is, none),
    "is None, as a number": (lambda m: 1 + (m.last.bias is None), as_it_is, none),
    "is None, of the table": (lambda m: 2 if m.last._parameters.get("bias") is None else 1, as_it_is, none),
    "is None, and one comes": (by_variable, none, new),
    "is None, of a buffer": (lambda m: 2 if m.table is None else 1, as_it_is, lambda m: setattr(m, "table", None)),
    "is": (lambda m: 2 if m.first.bias is m.last.bias else 1, as_it_is, tied),
    "is, and is no more": (lambda m: 2 if m.first.bias is m.last.bias else 1, tied, new),
    "id": (lambda m: 2 if id(m.first.bias) == id(m.last.bias) else 1, as_it_is, tied),
    "count": (lambda m: len([*m.parameters()]), as_it_is, tied),
    "type": (lambda m: 2 if type(m.first.weight) is nn.Parameter else 1, as_it_is, own),
    "isinstance": (lambda m: 2 if isinstance(m.first.weight, Own) else 1, as_it_is, own),
    "__class__": (lambda m: len(m.first.weight.__class__.__name__), as_it_is, own),
}


@torch.no_grad()
@pytest.mark.parametrize("name", ASKED)
def test_another_answer_is_refused_by_name(name: str) -> None:
    asks, begin, change = ASKED[name]
    model = Net(asks, begin)
    split = prepare_split(model, (X,), split="after:first")
    before = [m.__dict__[t].copy() for m in model.modules() for t in ("_parameters", "_buffers")]
    change(model)
    with pytest.raises(ModuleError, match=r"which tensors stand where|was None at capture"):
        split.run_suffix(split.run_prefix(X))
    tables = [m.__dict__[t] for m in model.modules() for t in ("_parameters", "_buffers")]
    for table, was in zip(tables, before, strict=True):
        table.update(was)
    assert torch.equal(split.run_suffix(split.run_prefix(X)), model(X)), "as it was, it serves again"


@torch.no_grad()
@pytest.mark.parametrize("name", ["is None", "is", "type"])
def test_another_weight_of_which_the_answer_is_the_same_is_followed(name: str) -> None:
    model = Net(ASKED[name][0], as_it_is)
    split = prepare_split(model, (X,), split="after:first")
    new(model)
    assert torch.equal(split.run_suffix(split.run_prefix(X)), model(X))


def to_parameter(m: Any) -> None:
    table = m.table
    del m.table
    m.table = nn.Parameter(table)


def to_buffer(m: Any) -> None:
    bias = m.last.bias.detach()
    del m.last.bias
    m.last.register_buffer("bias", bias)


def buffer_trains(m: Any) -> None:
    m.table.requires_grad_()


MOVED: dict[str, tuple[Part, Part]] = {
    "its class": (lambda m: 2 if isinstance(m.table, nn.Parameter) else 1, to_parameter),
    "its class, of a weight": (lambda m: 2 if isinstance(m.last.bias, nn.Parameter) else 1, to_buffer),
    "whether it is a buffer": (lambda m: 2 if "table" in m._buffers else 1, to_parameter),
    "whether it is a parameter": (lambda m: 2 if m._parameters.get("table") is not None else 1, to_parameter),
    "whether it is a buffer, of a weight": (lambda m: 2 if "bias" in m.last._buffers else 1, to_buffer),
}


@pytest.mark.parametrize("case", MOVED)
def test_a_tensor_that_came_to_stand_in_another_registry_is_noticed(case: str) -> None:
    asks, move = MOVED[case]
    split = prepare_split(Net(asks, as_it_is), (X,), split="after:first")
    assert split.run_suffix(split.run_prefix(X)) is not None
    move(split.model)
    with pytest.raises(ModuleError, match=r"table|bias"):
        split.run_suffix(split.run_prefix(X))


@pytest.mark.parametrize("move", [to_parameter, buffer_trains])
def test_whether_a_buffer_requires_grad_is_followed(move: Part) -> None:
    split = prepare_split(Net(lambda m: 2 if m.table.requires_grad else 1, as_it_is), (X,), split="after:first")
    before = split.run_suffix(split.run_prefix(X))
    move(split.model)
    now = split.run_suffix(split.run_prefix(X))
    assert torch.equal(now, split.model(X))
    assert not torch.equal(now, before)


def test_a_guard_that_takes_both_registries_for_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("baseline", "explained", "marks"):
        both = f"ariadne.guards.{place}.tabled"
        monkeypatch.setattr(both, lambda module: (sorted([*module._parameters, *module._buffers]), []))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_tensor_that_came_to_stand_in_another_registry_is_noticed("whether it is a buffer")
