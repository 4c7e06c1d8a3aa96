"""What stands in Python modules, on functions and on plain tensors that a model holds must not change unseen."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ariadne.errors import ModuleError, UnsupportedError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers, same

_SOURCE = """
import torch
gain, table, object_ = 1.0, {"k": 1.0}, type("Thing", (), {})()
object_.k, tensor, calls, unread = 1.0, torch.ones(4), 0, 1.0
def act(h): return h * 2.0
def counted(h):
    global calls
    calls += 1
    return h * 2.0
"""


def a_module() -> types.ModuleType:
    found = types.ModuleType("settings_of_a_test")
    exec(_SOURCE, found.__dict__)
    return found


def a_function() -> Any:
    def act(h: torch.Tensor) -> torch.Tensor:
        return h.relu()

    act.gain = 1.0  # type: ignore[attr-defined]
    return act


def one_that_reads_its_own() -> Any:
    def act(h: torch.Tensor) -> torch.Tensor:
        return h * act.gain  # type: ignore[attr-defined, no-any-return]

    act.gain = 1.0  # type: ignore[attr-defined]
    return act


def decorated() -> Any:
    def around(f: Any) -> Any:
        @functools.wraps(f)
        def wrapper(h: torch.Tensor) -> Any:
            return f(h) * wrapper.gain  # type: ignore[attr-defined]

        wrapper.gain = 1.0  # type: ignore[attr-defined]
        return wrapper

    return around(lambda h: h.relu())


def a_tensor() -> Any:
    found: Any = torch.ones(4)
    found.gain = 1.0
    return found


def with_a_default() -> Any:
    module = a_module()

    def act(h: torch.Tensor, settings: Any = module) -> Any:
        return h * settings.gain

    return act


def read_of(thing: Any) -> Any:
    return thing.gain


class Net(nn.Module):
    """What `read` makes of `kept` scales what comes between two layers."""

    def __init__(self, kept: Any, read: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.kept, self.read = kept, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.read(self, self.a(x)))  # type: ignore[no-any-return]


def put(name: str, value: Any, *keys: str) -> Callable[[Any], None]:
    """Sets an attribute of what stands at these keys of `kept`."""

    def change(kept: Any) -> None:
        for key in keys:
            kept = kept[key] if isinstance(kept, dict) else getattr(kept, key)
        setattr(kept, name, value)

    return change


Case = tuple[Callable[[], Any], Callable[[Any, torch.Tensor], Any], Callable[[Any], Any], str]
CASES: dict[str, Case] = {
    "a module: number": (a_module, lambda s, h: h * s.kept.gain, put("gain", 3.0), "settings_of_a_test.gain was 1.0"),
    "a module: number, helper": (a_module, lambda s, h: h * read_of(s.kept), put("gain", 3.0), "gain"),
    "a module: in a list": (lambda: [a_module()], lambda s, h: h * s.kept[0].gain, lambda k: put("gain", 3.0)(k[0]), "gain"),
    "a module: in a closure": (lambda: (lambda q: lambda h: h * q.gain)(a_module()), lambda s, h: s.kept(h),
        lambda k: put("gain", 3.0)(k.__closure__[0].cell_contents), "gain"),
    "a module: as a default": (with_a_default, lambda s, h: s.kept(h),
        lambda k: put("gain", 3.0)(k.__defaults__[0]), "gain"),
    "a module: for a partial": (lambda: functools.partial(lambda q, h: h * q.gain, a_module()), lambda s, h: s.kept(h),
        lambda k: put("gain", 3.0)(k.args[0]), "gain"),
    "a module: dict": (a_module, lambda s, h: h * s.kept.table["k"], lambda k: k.table.update(k=3.0), "table"),
    "a module: object": (a_module, lambda s, h: h * s.kept.object_.k, put("k", 3.0, "object_"), "object_"),
    "a module: function": (a_module, lambda s, h: s.kept.act(h), put("act", lambda h: h * 9.0), "act"),
    "a module: tensor": (a_module, lambda s, h: h * s.kept.tensor, put("tensor", torch.full((4,), 3.0)), "tensor"),
    "a function: number": (a_function, lambda s, h: s.kept(h) * s.kept.gain, put("gain", 3.0), "act.gain was 1.0"),
    "a function: not called": (a_function, lambda s, h: h * read_of(s.kept), put("gain", 3.0), "gain"),
    "a function: in a dict": (lambda: {"f": a_function()}, lambda s, h: h * s.kept["f"].gain, put("gain", 3.0, "f"), "gain"),
    "a function: its own": (one_that_reads_its_own, lambda s, h: s.kept(h), put("gain", 3.0), "gain"),
    "a function: decorator's": (decorated, lambda s, h: s.kept(h), put("gain", 3.0), "gain"),
    "a tensor": (a_tensor, lambda s, h: h * s.kept * s.kept.gain, put("gain", 3.0), "kept.gain = 1.0"),
    "a tensor: helper": (a_tensor, lambda s, h: h * read_of(s.kept), put("gain", 3.0), "kept.gain = 1.0"),
    "a tensor: in a list": (lambda: [a_tensor()], lambda s, h: h * read_of(s.kept[0]), lambda k: put("gain", 3.0)(k[0]), "gain"),
    "a tensor: another": (lambda: [a_tensor()], lambda s, h: h * s.kept[0] * getattr(s.kept[0], "gain", 2.0),
        lambda k: k.__setitem__(0, torch.ones(4)), "no kept"),
    "a tensor: none yet": (lambda: [torch.ones(4)], lambda s, h: h * getattr(s.kept[0], "gain", 2.0),
        lambda k: put("gain", 3.0)(k[0]), "gain"),
}  # fmt: skip


def split_of(kept: Any, read: Callable[[Any, torch.Tensor], Any]) -> tuple[nn.Module, Any, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Net(kept, read).eval(), numbers(2, 4)
    return model, prepare_split(model, (x,), split="after:a"), x


@pytest.mark.parametrize("name", sorted(CASES))
def test_what_stands_in_what_a_model_holds_must_not_change_unseen(name: str) -> None:
    make, read, change, says = CASES[name]
    model, split, x = split_of(kept := make(), read)
    with torch.no_grad():
        same(model(x), split.run_suffix(split.run_prefix(x)))
        change(kept)
        with pytest.raises(ModuleError, match=says):
            split.run_suffix(split.run_prefix(x))


def test_a_function_of_torchs_that_is_replaced_in_a_module_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    _, split, x = split_of(F, lambda s, h: s.kept.softsign(h))
    monkeypatch.setattr(F, "softsign", lambda h: h * 9.0)
    with torch.no_grad(), pytest.raises(ModuleError, match="softsign"):
        split.run_prefix(x)


def test_what_forward_does_not_read_may_change() -> None:
    kept = types.SimpleNamespace(module=a_module(), function=a_function(), tensor=a_tensor())
    model, split, x = split_of(kept, lambda s, h: s.kept.function(s.kept.module.act(h)))
    with torch.no_grad():
        for value in (2.0, 3.0):
            kept.module.unread = kept.function.unread = kept.tensor.unread = value
            same(model(x), split.run_suffix(split.run_prefix(x)))


def on_the_function(s: Any, h: torch.Tensor) -> Any:
    s.kept.function.times = getattr(s.kept.function, "times", 0) + 1
    return s.kept.function(h)


def in_the_module(s: Any, h: torch.Tensor) -> Any:
    return s.kept.module.counted(h)


@pytest.mark.parametrize("counting", [on_the_function, in_the_module], ids=lambda way: way.__name__)
def test_what_forward_counts_there_is_refused_as_it_is_on_the_model(counting: Any) -> None:
    kept = types.SimpleNamespace(module=a_module(), function=a_function())
    with pytest.raises(UnsupportedError, match="something else in a second"):
        split_of(kept, counting)
    assert not hasattr(kept.function, "times")
    assert kept.module.calls == 0
