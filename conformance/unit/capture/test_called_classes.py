"""Forwards that call a class of tensors, and such as run only after they have returned: told what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import SpecError, UnsupportedError

X = torch.arange(12.0).view(3, 4).cos()


class Marked(Tensor):
    pass


class Net(nn.Module):
    def __init__(self, rule: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.rule = nn.Linear(4, 4), nn.Linear(4, 4), rule

    def forward(self, x: Tensor) -> Any:
        return self.rule(self, x)


def calls(m: Net, x: Tensor) -> Tensor:
    return m.b(Marked(m.a(x) * 1))


def takes_it_as_one(m: Net, x: Tensor) -> Tensor:
    return m.b((m.a(x) * 1).as_subclass(Marked))


def test_a_class_of_tensors_that_forward_calls_is_told_with_what_does_the_same() -> None:
    with pytest.raises(UnsupportedError, match=r'Marked\(x\).*write x.as_subclass\(Marked\).*fallback="python"'):
        prepare_split(Net(calls), (X,), split="after:a")


@pytest.mark.parametrize(("rule", "fallback"), [(calls, "python"), (takes_it_as_one, "refuse")])
def test_both_ways_out_give_what_the_model_gives(rule: Callable[[Net, Tensor], Any], fallback: Any) -> None:
    model = Net(rule)
    runtime = prepare_split(model, (X,), split="after:a", fallback=fallback)
    found, whole = runtime.run_suffix(runtime.run_prefix(X[:2])), model(X[:2])
    assert type(found) is type(whole) is Marked
    assert torch.equal(found, whole)
    assert "__new__" not in vars(Tensor)
    assert type(Marked(X)) is Marked
    assert Tensor(2, 3).shape == (2, 3)


PLAIN: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "of an input": lambda m, x: m.b(m.a(Tensor(x))),
    "of a part of it": lambda m, x: m.b(m.a(Tensor(x.detach()))),
    "by an old name": lambda m, x: m.b(m.a(torch.FloatTensor(x))),
    "of what it made": lambda m, x: m.b(Tensor(m.a(x).detach())),
}


@pytest.mark.parametrize("name", PLAIN)
def test_torchs_own_class_makes_a_plain_tensor_of_one_of_another_class(name: str) -> None:
    model, x = Net(PLAIN[name]), X.as_subclass(Marked)
    runtime = prepare_split(model, (x,), split=SplitSpec("50%", trainable=False))
    found, whole = runtime.run_suffix(runtime.run_prefix(x[:2])), model(x[:2])
    assert type(found) is type(whole) is Tensor
    assert torch.equal(found, whole)


def one_by_one(m: Net, x: Tensor) -> Iterator[Tensor]:
    yield m.a(x)
    yield m.b(x)


@pytest.mark.parametrize("fallback", ["refuse", "python"])
def test_a_forward_that_runs_after_it_returns_is_told(fallback: Any) -> None:
    with pytest.raises(SpecError, match=r"forward returns a generator, whose code runs .* as a list or a tuple"):
        prepare_split(Net(one_by_one), (X,), split="after:a", fallback=fallback)
