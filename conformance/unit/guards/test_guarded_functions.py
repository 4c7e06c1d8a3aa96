"""Functions and methods that forward reaches are guarded: one that was replaced after preparing is an error, not another result."""

from __future__ import annotations

import enum
import functools
import operator
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ariadne import SplitRuntime
from ariadne.errors import ModuleError, UnsupportedError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

Change = Callable[[pytest.MonkeyPatch, "Net"], None]
FACTORS: list[float] = [1.0, 3.0]
NESTED: dict[str, list[float]] = {"factors": [1.0, 3.0]}
NAMES = {"one", "two"}
WEIGHT = torch.full((4,), 2.0)
ARRAY = np.array([1.0, 2.0])
TABLE: dict[str, Any] = {"act": torch.tanh, "scale": 2.0}
SEEN: dict[int, int] = {}
LEVEL: ContextVar[float] = ContextVar("LEVEL", default=2.0)


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLE = 2


class Config:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def factor(self) -> float:
        return self.scale


CONFIG, MODE = Config(2.0), Mode.PLAIN


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def with_default(x: torch.Tensor, scales: list[float] = [1.0, 2.0]) -> torch.Tensor:  # noqa: B006
    return x * scales[1]


def with_keyword(x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
    return x * scale


def with_plain(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return x * scale


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return function(*args)

    return call


@wrapped
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x * SCALES.first


class SCALES:
    first = 2.0


def annealed(start: float) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    temperature = start

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x / temperature

    def anneal(to: float) -> None:
        nonlocal temperature
        temperature = to

    return scaled, anneal


def closed_over(thing: Any, use: Callable[[torch.Tensor, Any], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def used(x: torch.Tensor) -> torch.Tensor:
        return use(x, thing)

    return used


def kept(x: torch.Tensor) -> torch.Tensor:
    if x.shape[-1] not in SEEN:
        SEEN[x.shape[-1]] = 1
    return x * 2


class Base(nn.Module):
    scale = 2.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x) + self.more(x)

    @staticmethod
    def more(x: torch.Tensor) -> torch.Tensor:
        return x

    @property
    def twice(self) -> float:
        return 2.0


class Middle(Base):
    def __init__(self, does: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.does, self.rate, self.part = does, 2.0, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x) * self.rate * self.scale * self.twice
        return self.part(x if self.does is None else self.does(x))


class Net(nn.Module):
    def __init__(self, does: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.gelu, self.last = nn.Linear(4, 4), Middle(does), nn.GELU(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.gelu(self.middle(self.first(x))))


SCALED, ANNEAL = annealed(2.0)
HOOKED, ANNEAL_HOOK = annealed(2.0)
WRAPPED, ANNEAL_WRAPPED = annealed(2.0)
BOX, HELD = [2.0], Config(2.0)
TRIPLE: Any = lambda *args: args[-1] * 3  # noqa: E731


def on(owner: Any, name: str, value: Any) -> Change:
    return lambda patch, net: patch.setattr(owner, name, value)


def put(name: str, value: Any) -> Change:
    return lambda patch, net: patch.setitem(globals(), name, value)


def item(owner: Any, key: Any, value: Any) -> Change:
    def change(patch: pytest.MonkeyPatch, net: Net) -> None:
        before = owner[key]
        owner[key] = value
        UNDO.append(lambda: operator.setitem(owner, key, before))

    return change


def called(change: Callable[[Any], Any], to: Any, back: Any) -> Change:
    def put_it(patch: pytest.MonkeyPatch, net: Net) -> None:
        change(to)
        UNDO.append(lambda: change(back))

    return put_it


UNDO: list[Callable[[], Any]] = []


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    undo()


def undo() -> None:
    while UNDO:
        UNDO.pop()()


CHANGES: dict[str, tuple[Callable[..., Any] | None, Change, str]] = {
    "forward of a class": (None, on(Middle, "forward", lambda s, x: x), "Middle.forward"),
    "forward of a base class, called by super": (None, on(Base, "forward", lambda s, x: x), "Base.forward"),
    "forward of a class of torch": (None, on(nn.Linear, "forward", lambda s, x: x[:, :2]), "Linear.forward"),
    "forward of a base class of torch's, put in a class": (
        None, lambda p, n: p.setattr(nn.GELU, "__call__", lambda s, x: x, raising=False), "GELU"
    ),
    "a method": (None, on(Base, "scaled", TRIPLE), "Base.scaled"),
    "a method put before another": (None, lambda p, n: p.setattr(Middle, "scaled", TRIPLE, raising=False), "(Middle|Base).scaled"),
    "a static method": (None, on(Base, "more", staticmethod(TRIPLE)), "(Middle|Base).more"),
    "a property": (None, on(Base, "twice", property(lambda s: 3.0)), "Base.twice"),
    "a constant of a base class hidden": (None, lambda p, n: p.setattr(Middle, "scale", 3.0, raising=False), "scale"),
    "an attribute that becomes a property": (
        None, lambda p, n: p.setattr(Middle, "rate", property(lambda s: 3.0, lambda s, v: None), raising=False), "Middle.rate"
    ),
    "a submodule that becomes an attribute of the class": (
        None, lambda p, n: p.setattr(Middle, "part", nn.Identity(), raising=False), "Middle.part"
    ),
    "a function of torch's": (lambda x: F.gelu(x), on(F, "gelu", torch.relu), "gelu"),
    "a function of torch's, by its full name": (lambda x: torch.nn.functional.silu(x), on(F, "silu", torch.relu), "silu"),
    "a function of torch's that torch calls": (None, on(F, "gelu", lambda x, approximate: x), "gelu"),
    "a function in torch's own namespace": (lambda x: torch.tanh(x), on(torch, "tanh", torch.relu), "tanh"),
    "a global function": (lambda x: helper(x), put("helper", TRIPLE), "helper"),
    "a global function's code": (lambda x: helper(x), on(helper, "__code__", (lambda x: x * 3).__code__), "the code of helper"),
    "a mutable default": (lambda x: with_default(x), item(with_default.__defaults__[0], 1, 3.0), "default of 'scales'"),
    "a keyword's default": (lambda x: with_keyword(x), item(with_keyword.__kwdefaults__, "scale", 3.0), "default of 'scale'"),
    "other defaults": (lambda x: with_plain(x), on(with_plain, "__defaults__", (3.0,)), "the defaults of with_plain"),
    "a constant that a decorated function reads": (decorated, on(SCALES, "first", 3.0), "first"),
    "a closed-over number": (SCALED, called(ANNEAL, 3.0, 2.0), "'temperature' around .*scaled was 2.0 .* 3.0"),
    "a closed-over number of a hook": (HOOKED, called(ANNEAL_HOOK, 3.0, 2.0), "'temperature'"),
    "a closed-over number of a wrapped function": (
        functools.partial(wrapped(WRAPPED)), called(ANNEAL_WRAPPED, 3.0, 2.0), "'temperature'"
    ),
    "an entry of a closed-over list": (closed_over(BOX, lambda x, box: x * box[0]), item(BOX, 0, 3.0), "'thing'"),
    "an attribute of a closed-over object": (
        closed_over(HELD, lambda x, c: x * c.factor()), on(HELD, "scale", 3.0), "'scale', 2.0"
    ),
    "an iterated list": (lambda x: sum(x * f for f in FACTORS), item(FACTORS, 0, 5.0), "FACTORS was a list"),
    "an iterated list, grown": (
        lambda x: sum(x * f for f in FACTORS), lambda p, n: p.setitem(globals(), "FACTORS", [1.0, 3.0, 4.0]), "FACTORS"
    ),
    "a list in a dict": (lambda x: x * sum(NESTED["factors"]), item(NESTED["factors"], 1, 5.0), "NESTED"),
    "a set": (lambda x: x * len(NAMES), lambda p, n: p.setitem(globals(), "NAMES", {"one"}), "NAMES"),
    "what .get gives": (lambda x: x * TABLE.get("scale", 1.0), item(TABLE, "scale", 3.0), "TABLE"),
    "a function in a dict": (lambda x: TABLE["act"](x), item(TABLE, "act", torch.relu), "TABLE"),
    "a function in a dict, by a name": (lambda x: next(iter(TABLE.values()))(x), item(TABLE, "act", torch.relu), "TABLE"),
    "a global tensor bound anew": (lambda x: x * WEIGHT, put("WEIGHT", torch.full((4,), 3.0)), "WEIGHT"),
    "an array": (lambda x: x * float(ARRAY.sum()), item(ARRAY, 0, 5.0), "ARRAY"),
    "another object": (lambda x: x * CONFIG.factor(), put("CONFIG", Config(3.0)), "CONFIG"),
    "an attribute that a method of an object reads": (
        lambda x: x * CONFIG.factor(), on(CONFIG, "scale", 3.0), "CONFIG.*'scale', 2.0"
    ),
    "a method of an object": (lambda x: x * CONFIG.factor(), on(Config, "factor", lambda s: 3.0), "Config.factor"),
    "a member of an enum": (lambda x: x * (2 if MODE is Mode.PLAIN else 3), put("MODE", Mode.DOUBLE), "MODE"),
    "the environment": (
        lambda x: x * (3 if os.environ.get("ARIADNE_TEST") else 2), lambda p, n: p.setenv("ARIADNE_TEST", "1"), "'ARIADNE_TEST'"
    ),
    "the environment, by getenv": (
        lambda x: x * (3 if os.getenv("ARIADNE_TEST") else 2), lambda p, n: p.setenv("ARIADNE_TEST", "1"), "'ARIADNE_TEST'"
    ),
    "the environment, by in": (
        lambda x: x * (3 if "ARIADNE_TEST" in os.environ else 2), lambda p, n: p.setenv("ARIADNE_TEST", "1"), "'ARIADNE_TEST'"
    ),
    "a context variable": (lambda x: x * LEVEL.get(), called(LEVEL.set, 3.0, 2.0), "the context variable 'LEVEL'"),
}  # fmt: skip


def split_of(does: Callable[..., torch.Tensor] | None, trainable: bool = False) -> SplitRuntime:
    net = Net(does).eval()
    if does is HOOKED:
        net = Net().eval()
        net.middle.register_forward_hook(lambda module, args, output: HOOKED(output))
    return prepare_split(net, (numbers(2, 4),), split="after:first")


def agree(runtime: SplitRuntime) -> None:
    x = numbers(3, 4)
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), runtime.model(x))


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_what_changed_around_forward_is_an_error_until_it_is_put_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    does, change, words = CHANGES[name]
    runtime = split_of(does)
    agree(runtime)
    boundary = runtime.run_prefix(numbers(3, 4))
    with monkeypatch.context() as patch:
        change(patch, runtime.model)
        with pytest.raises(ModuleError, match=f"(?s){words}.*prepare_split again"):
            runtime.run_suffix(runtime.run_prefix(numbers(3, 4)))
        with pytest.raises(ModuleError, match=f"(?s){words}"):
            runtime.run_suffix(boundary)
    undo()
    agree(runtime)


def test_what_no_function_of_forward_touches_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = split_of(lambda x: helper(x) * TABLE["scale"])
    monkeypatch.setitem(globals(), "with_default", TRIPLE)
    monkeypatch.setitem(globals(), "CONFIG", Config(7.0))
    monkeypatch.setattr(F, "silu", torch.relu)
    monkeypatch.setattr(Config, "factor", lambda s: 7.0)
    monkeypatch.setattr(Middle, "other", TRIPLE, raising=False)
    monkeypatch.setenv("ARIADNE_TEST", "1")
    ANNEAL(5.0)
    try:
        agree(runtime)
    finally:
        ANNEAL(2.0)


def test_a_counter_around_a_function_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="the variable 'calls' of kept, which is 1 in a first call"):
        split_of(counted(kept))


def test_a_cache_around_a_function_may_go_on() -> None:
    runtime = split_of(wrapped(kept))
    agree(runtime)
    SEEN[99] = 1
    runtime.model(numbers(3, 4))
    agree(runtime)


def test_a_function_that_forward_makes_anew_at_each_call_is_no_change() -> None:
    def does(x: torch.Tensor) -> torch.Tensor:
        factor = float(x.shape[-1])

        def scaled(y: torch.Tensor) -> torch.Tensor:
            return y * factor

        return sum(scaled(x) * f for f in FACTORS)  # type: ignore[return-value]

    runtime = split_of(does)
    agree(runtime)
    agree(runtime)


def test_another_thread_that_prepares_meanwhile_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = split_of(lambda x: F.gelu(x) if not torch.is_grad_enabled() else x)
    for name in ("is_grad_enabled", "numel"):
        monkeypatch.setattr(torch, name, getattr(torch, name))
    other = split_of(None)
    agree(runtime)
    agree(other)
