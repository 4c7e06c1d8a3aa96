"""Python state that forward reads through a module's attributes: followed by guards, however deep, and left as found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ariadne.compare import difference
from ariadne.errors import ModuleError, UnsupportedError
from conformance.unit.refusing import prepare_split

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Slotted:
    __slots__ = ("inner", "scale")

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Reads(nn.Module):
    def __init__(self, held: Any, scale: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear, self.held, self.scale = nn.Linear(4, 4), held, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() * self.scale(self.held)


def put(thing: Any, name: str, value: Any) -> None:
    setattr(thing, name, value)


# What the model holds, how forward reads it, a change to it, and how the error names it.
DEEP: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], None], str]] = {
    "array_in_object": (
        lambda: SimpleNamespace(a=np.ones(2)),
        lambda h: float(h.a[0]),
        lambda h: h.a.__setitem__(0, 3.0),
        "held.a",
    ),
    "deque": (lambda: deque([1.0, SimpleNamespace()]), lambda h: h[0], lambda h: h.appendleft(3.0), "held"),
    "list_of_objects": (
        lambda: [SimpleNamespace(scale=2.0)],
        lambda h: h[0].scale,
        lambda h: put(h[0], "scale", 3.0),
        "held[0].scale",
    ),
    "object_added_to_list": (
        lambda: [SimpleNamespace(scale=2.0)],
        lambda h: sum(o.scale for o in h),
        lambda h: h.append(SimpleNamespace(scale=3.0)),
        "held",
    ),
    "object_in_object": (
        lambda: SimpleNamespace(inner=SimpleNamespace(scale=2.0)),
        lambda h: h.inner.scale,
        lambda h: put(h.inner, "scale", 3.0),
        "held.inner.scale",
    ),
    "object_in_object_replaced": (
        lambda: SimpleNamespace(inner=SimpleNamespace(scale=2.0)),
        lambda h: h.inner.scale,
        lambda h: put(h, "inner", SimpleNamespace(scale=3.0)),
        "held.inner",
    ),
    "object_in_dict_in_dict": (
        lambda: {"a": {"b": [SimpleNamespace(scale=2.0)]}},
        lambda h: h["a"]["b"][0].scale,
        lambda h: put(h["a"]["b"][0], "scale", 3.0),
        "held['a']['b'][0].scale",
    ),
    "slots": (lambda: Slotted(2.0), lambda h: h.scale, lambda h: put(h, "scale", 3.0), "held.scale"),
}


@pytest.mark.parametrize("case", sorted(DEEP))
def test_a_change_deep_inside_what_forward_read_is_named(case: str) -> None:
    make, read, change, name = DEEP[case]
    model = Reads(make(), read).eval()
    runtime = prepare_split(model, (X,), split="percent:50")
    with torch.no_grad():
        assert difference(model(X), runtime.run_suffix(runtime.run_prefix(X))) is None
    change(model.held)
    with pytest.raises(ModuleError) as caught:
        runtime.run_suffix(runtime.run_prefix(X))
    assert repr(name) in str(caught.value)
    assert "prepare_split again" in str(caught.value)


def grow(held: Any) -> float:
    held.append(1.0)
    return float(len(held))


def fill(held: Any) -> float:
    held += 1
    return float(held[0])


def move(held: Any) -> float:
    held.scale += 1.0
    held.inner = "new"
    return float(held.scale)


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any]]] = {
    "array": (lambda: np.zeros(2), fill, lambda h: h.tolist()),
    "deque": (lambda: deque([1.0], maxlen=9), grow, list),
    "list": (lambda: [1.0], grow, list),
    "slots": (lambda: Slotted(2.0), move, lambda h: (h.scale, hasattr(h, "inner"))),
}


@pytest.mark.parametrize("case", sorted(CHANGED))
def test_what_forward_changes_is_refused_and_put_back(case: str) -> None:
    make, moves, look = CHANGED[case]
    model = Reads(make(), moves).eval()
    before = look(model.held)
    with pytest.raises(UnsupportedError, match=r"keeps|buffer"):
        prepare_split(model, (X,), split="percent:50")
    assert look(model.held) == before


class Counts(nn.Linear):
    calls = 0  # in the class: the first call makes it the module's own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) if self.calls < 100 else super().forward(x) * 2


class Remembers(nn.Linear):
    last = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) + self.last * 1e-30
        self.last = y.sum()
        return y


@pytest.mark.parametrize("kind", [Counts, Remembers])
def test_what_forward_counts_from_a_start_in_its_class_is_refused(kind: type[nn.Linear]) -> None:
    model = nn.Sequential(kind(4, 4), nn.ReLU()).eval()
    with pytest.raises(UnsupportedError, match=r"reads and changes the attribute '(calls|last)' of '0'"):
        prepare_split(model, (X,), split="after:0")
    assert not {"calls", "last"} & model[0].__dict__.keys()


def test_cyclic_and_shared_objects_are_walked_once() -> None:
    held = SimpleNamespace(scale=2.0)
    held.me, held.pair = held, [held, held]
    model = Reads(held, lambda h: h.pair[1].me.scale).eval()
    runtime = prepare_split(model, (X,), split="percent:50")
    runtime.run_prefix(X)
    held.scale = 3.0
    with pytest.raises(ModuleError, match=r"held\.scale"):
        runtime.run_prefix(X)


class SetsUpAtItsFirstCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "ready", False):
            self.linear.register_forward_hook(lambda module, args, output: None)
            self.ready = True
        return self.linear(x).relu()


def test_what_forward_sets_up_at_its_first_call_may_be_there_or_not() -> None:
    model = SetsUpAtItsFirstCall().eval()
    runtime = prepare_split(model, (X,), split="percent:50")
    assert not hasattr(model, "ready")
    assert not model.linear._forward_hooks
    first = runtime.run_suffix(runtime.run_prefix(X))
    assert not hasattr(model, "ready"), "one part of what forward sets up, without the other"
    with torch.no_grad():
        whole = model(X)
    assert model.ready
    assert len(model.linear._forward_hooks) == 1
    assert difference(whole, first) is None
    assert difference(whole, runtime.run_suffix(runtime.run_prefix(X))) is None
    model.linear.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(ModuleError, match="hooks"):
        runtime.run_prefix(X)


class Sometimes(nn.Module):
    """Looks at one attribute where there is one sample, at another where there are more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.one, self.more = nn.Linear(4, 4), 2.0, 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (self.one if x.shape[0] == 1 else self.more)


@pytest.mark.parametrize("attribute", ["more", "one"])
@pytest.mark.parametrize("prepared_at", [1, 3])
def test_an_attribute_is_held_that_only_other_batches_look_at(prepared_at: int, attribute: str) -> None:
    model = Sometimes().eval()
    runtime = prepare_split(model, (torch.randn(prepared_at, 4),), split="percent:50")
    setattr(model, attribute, 5.0)
    for batch in (1, 3):
        x = torch.randn(batch, 4)
        with torch.no_grad():
            try:
                found = runtime.run_suffix(runtime.run_prefix(x))
            except ModuleError as error:
                refused = str(error)
            else:
                refused = ""
                assert torch.equal(found, model(x))
        assert not refused or f"'{attribute}' of the model" in refused


class AsExported(nn.Module):
    """Writes an attribute only where sizes are symbols, as code for an exporter does; `kind` says what it does there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.one, self.two, self.size, self.weight, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), 4, 2.0, kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.one(x))
        if isinstance(x, FakeTensor):
            if self.kind == "writes":
                self.size = None
            return x * self.weight if self.kind == "reads" else x
        return x if self.size == 4 else x * 3


def test_what_only_fake_tensors_make_forward_write_frees_no_guard() -> None:
    model = AsExported("writes").eval()
    runtime = prepare_split(model, (torch.randn(3, 4),), split="after:one")
    model.size = 5
    with pytest.raises(ModuleError, match="'size' of the model was 4"):
        runtime.run_suffix(runtime.run_prefix(torch.randn(3, 4)))


def test_what_only_a_plan_that_was_dropped_looked_at_is_no_guard() -> None:
    model, x = AsExported("reads").eval(), torch.randn(3, 4)
    runtime = prepare_split(model, (x,), split="after:one")
    assert runtime.plan.captured_by != "symbolic"
    model.weight = 3.0
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))


def test_a_list_in_a_tuple_is_looked_into() -> None:
    model = Reads(([2.0], 1.0), lambda h: h[0][0]).eval()
    runtime = prepare_split(model, (X,), split="percent:50")
    model.held[0][0] = 3.0
    with pytest.raises(ModuleError, match="'held'"):
        runtime.run_suffix(runtime.run_prefix(X))
