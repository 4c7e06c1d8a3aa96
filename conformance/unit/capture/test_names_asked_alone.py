"""`self.__dict__.pop("name", None)` and `.get("name")` look for one attribute; of any other use of the dict, all of them count."""

from __future__ import annotations

import dis
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import prepare_split
from ariadne.capture.listed import asked_alone
from ariadne.errors import UnsupportedError

X = torch.arange(8.0).view(2, 4).cos()


class Net(nn.Module):
    def __init__(self, rule: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.rule = nn.Linear(4, 4), nn.Linear(4, 4), rule
        self.log: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        found = self.rule(self, h)
        self.log = h.mean()
        out: Tensor = self.b(h if found is None else h * found)
        return out


def keeps(net: Any, h: Tensor) -> Any:
    net.scale = h.sum()
    return net.__dict__.pop("scale")


RULES: dict[str, Callable[[Any, Tensor], Any]] = {
    "dropped": lambda net, h: net.__dict__.pop("scale", None),
    "asked": lambda net, h: net.__dict__.get("scale"),
    "asked, or another": lambda net, h: net.__dict__.get("scale", 3.0),
}


@torch.no_grad()
@pytest.mark.parametrize("name", RULES)
def test_one_name_that_is_asked_for_leaves_the_others_to_be_logged(name: str) -> None:
    whole, model = Net(RULES[name]), Net(RULES[name])
    model.load_state_dict(whole.state_dict())
    nets = (whole, model)
    split = prepare_split(model, (X,), split="after:a")
    for scale in (None, *((5.0, 7.0) if name != "dropped" else ())):
        for net in nets if scale else ():
            net.scale = scale
        assert torch.equal(split.run_suffix(split.run_prefix(X)), whole(X))
        assert torch.equal(model.log, whole.log)
        assert getattr(model, "scale", None) == getattr(whole, "scale", None)


def test_what_a_call_finds_and_drops_is_refused() -> None:
    model = Net(RULES["dropped"])
    split = prepare_split(model, (X,), split="after:a")
    model.scale = 2.0
    with pytest.raises(UnsupportedError, match=r"'scale' of the model \(from 2.0 to None\)"):
        split.run_prefix(X)


ALL: list[Callable[[Any, Tensor], Any]] = [
    lambda net, h: dict(net.__dict__).get("scale"),
    lambda net, h: vars(net).get("scale"),
    keeps,
]


@pytest.mark.parametrize("rule", ALL)
def test_a_dict_that_may_be_looked_through_counts_with_all_that_is_in_it(rule: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(UnsupportedError, match="'log'"):
        prepare_split(Net(rule), (X,), split="after:a")


USES: dict[str, tuple[Callable[..., Any], str | None]] = {
    "pop": (lambda net: net.__dict__.pop("a", None), "a"),
    "get": (lambda net: net.__dict__.get("a"), "a"),
    "a name that is computed": (lambda net, name: net.__dict__.get(name), None),
    "the method, kept": (lambda net: (net.__dict__.pop, "a"), None),
    "the method, handed on": (lambda net, f: f(net.__dict__.pop, "a", None), None),
    "the dict, kept": (lambda net: [net.__dict__, "a"], None),
    "another method": (lambda net: net.__dict__.setdefault("a", 1), None),
}


@pytest.mark.parametrize("name", USES)
def test_code_tells_whether_one_name_alone_is_asked_for(name: str) -> None:
    use, expected = USES[name]
    at = next(step.offset for step in dis.get_instructions(use) if step.argval == "__dict__")
    assert asked_alone(use.__code__, at) == expected
