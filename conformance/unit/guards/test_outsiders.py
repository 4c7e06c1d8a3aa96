"""What stands outside of the model and may change there: numbers in tensors, and modules such as a frozen teacher."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec
from ariadne.capture import outsiders
from ariadne.errors import AriadneError, ModuleError
from conformance.unit.refusing import prepare_split

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
tau = torch.tensor(2.0)  # annealed in place by the tests
OF_CONTEXT: ContextVar[Any] = ContextVar("OF_CONTEXT")


class Around(nn.Module):
    """Two layers with something between them that stands outside of the model."""

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(4, 4), nn.Linear(4, 4), middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.middle(self.a(x))))


class Holder:
    rate = tau

    def __init__(self, rate: torch.Tensor) -> None:
        self.own = rate

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.own.item()


def by_default(h: torch.Tensor, rate: torch.Tensor = tau) -> torch.Tensor:
    return h * float(rate)


HOLDER, FOREIGN, TABLE = Holder(tau), nn.Linear(1, 1), {"rate": [tau]}
FOREIGN.weight.data = tau.reshape(1, 1)  # the same memory
NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float": lambda h: h * float(tau),
    "branch": lambda h: h.relu() if tau > 2 else h,
    "tolist": lambda h: h * tau.tolist(),
    "numpy": lambda h: h * float(tau.numpy()),
    "text": lambda h: h * float(f"{tau:.3f}"),
    "alpha": lambda h: torch.add(h, h, alpha=tau),  # type: ignore[arg-type]
    "of an op": lambda h: h * (tau.clone() * 2).item(),
    "default": by_default,
    "class": lambda h: h * float(Holder.rate),
    "object": lambda h: HOLDER(h),
    "table": lambda h: h * float(TABLE["rate"][0]),
    "context": lambda h: h * OF_CONTEXT.get().item(),
    "weight": lambda h: h * FOREIGN.weight.sum().item(),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_read_out_of_a_tensor_outside_is_asked_again(name: str) -> None:
    OF_CONTEXT.set(tau)
    tau.fill_(2.0)
    with torch.no_grad():
        model = Around(NUMBERS[name])
        runtime = prepare_split(model, (X[:2],), split="percent:50")
        for value in (2.0, 3.0, 0.5):
            tau.fill_(value)
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))


def test_a_number_of_a_tensor_that_forward_makes_anew_asks_nothing() -> None:
    runtime = prepare_split(Around(lambda h: h * torch.tensor(2.0).item()), (X[:2],), split="percent:50")
    assert not [node for node in runtime.plan.nodes if node.is_witness]


def teacher() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.ReLU()).eval()


def gone_through(t: Any) -> Any:
    def run(h: torch.Tensor) -> torch.Tensor:
        for layer in t:
            h = layer(h)
        return h

    return run


def given(t: Any) -> Any:
    return lambda h, module=t: module(h)


def of_class(t: Any) -> Any:
    kind: Any = type("Kind", (), {"part": t})
    return lambda h: kind.part(h)


def of_context(t: Any) -> Any:
    OF_CONTEXT.set(t)
    return lambda h: OF_CONTEXT.get()(h)


WAYS: dict[str, Callable[[Any], Any]] = {
    "variable": lambda t: lambda h: t(h),
    "default": given,
    "list": lambda t: lambda h, held=[t]: held[0](h),
    "object": lambda t: (lambda o: lambda h: o.part(h))(SimpleNamespace(part=t)),
    "class": of_class,
    "context": of_context,
    "partial": functools.partial,
    "forward": lambda t: t.forward,
    "weak reference": lambda t: (lambda r: lambda h: r()(h))(weakref.ref(t)),
    "loop": gone_through,
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "train": lambda t: t[1].train(),
    "eps": lambda t: setattr(t[2], "eps", 0.5),
    "part": lambda t: t.__setitem__(3, nn.GELU()),
    "hook": lambda t: t[0].register_forward_hook(lambda module, args, out: out * 3),
    "weight": lambda t: setattr(t[0], "weight", nn.Parameter(torch.ones(4, 4))),
    "buffer": lambda t: setattr(t[2], "running_mean", torch.ones(4)),
    "no bias": lambda t: setattr(t[0], "bias", None),
    "forward": lambda t: setattr(t[3], "forward", lambda x: x * 5),
    "append": lambda t: t.append(nn.Tanh()),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_module_outside_that_changes_is_noticed(way: str) -> None:
    whole = teacher()
    model = Around(WAYS[way](whole)).eval()
    runtime = prepare_split(model, (X[:2],), split="percent:50")
    state = {p: (dict(m.__dict__), *(dict(m.__dict__[t]) for t in TABLES)) for p, m in whole.named_modules()}
    modules = dict(whole.named_modules())

    def put_back() -> None:
        for path, module in modules.items():
            own, *tables = state[path]
            module.__dict__.clear()
            module.__dict__.update(own)
            for name, was in zip(TABLES, tables, strict=True):
                own[name].clear()
                own[name].update(was)

    with torch.no_grad():
        for name, change in CHANGES.items():
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X)), name
            change(whole)
            with pytest.raises(ModuleError):
                runtime.run_suffix(runtime.run_prefix(X))
            put_back()
        whole[0].weight.mul_(2)  # the values of weights are followed
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))


TABLES = ("_parameters", "_buffers", "_modules", "_forward_hooks")


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.last = nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.l(x)
        return self.last


def test_a_module_outside_that_keeps_something_is_refused_and_left_alone() -> None:
    part = Counts()
    with pytest.raises(AriadneError, match=r"assigns attribute 'last' of '\(outside of the model\) Counts"):
        prepare_split(Around(lambda h: part(h)), (X[:2],), split=SplitSpec("percent:50"), fallback="refuse")
    assert part.last is None


def test_modules_that_forward_makes_itself_are_not_outside() -> None:
    def made(h: torch.Tensor) -> torch.Tensor:
        part = nn.LayerNorm(4)
        part.eps = 1e-3
        return part(h)

    runtime = prepare_split(Around(made), (X[:2],), split="percent:50")
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), runtime.model(X))
    assert not [label for _, label in outsiders._labels.values() if "LayerNorm" in label]


def test_a_deep_copy_of_a_split_shares_a_module_outside() -> None:
    whole = teacher()
    runtime = prepare_split(Around(lambda h: whole(h)).eval(), (X[:2],), split="percent:50")
    copied = copy.deepcopy(runtime)
    assert torch.equal(copied.run_suffix(copied.run_prefix(X)), runtime.model(X))
    whole[1].train()
    for split in (runtime, copied):
        with pytest.raises(
            ModuleError, match=r"\(outside of the model\) Sequential( \d+)?\.1' was captured in eval mode"
        ):
            split.run_prefix(X)
