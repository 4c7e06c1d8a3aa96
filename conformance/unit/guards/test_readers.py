"""What a call rests on of an object with many attributes: those that forward read, and no more."""

from __future__ import annotations

import dis
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne.errors import ModuleError
from ariadne.guards import readers
from ariadne.guards.steps import marked, names_by, plain_steps
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)


class Mixin:
    """What transformers puts under its configurations: it looks into the object's own dict, for one name."""

    def __getattribute__(self, key: str) -> Any:
        if super().__getattribute__("__dict__").get("_strict") is not None:
            raise AttributeError(key)
        return super().__getattribute__(key)


class Config(Mixin):
    """A configuration as transformers has them: other names may stand for an attribute."""

    attribute_map = {"hidden": "n_embd"}  # noqa: RUF012

    def __init__(self) -> None:
        self.n_embd, self.scale, self.bias = 2.0, 3.0, 0.5
        self.dtype, self.labels = None, {0: "a"}

    def __getattribute__(self, key: str) -> Any:
        if key != "attribute_map" and key in super().__getattribute__("attribute_map"):
            key = super().__getattribute__("attribute_map")[key]
        return super().__getattribute__(key)


class Plain:
    """The same without any ways of its own."""

    def __init__(self) -> None:
        self.n_embd, self.scale, self.bias = 2.0, 3.0, 0.5


class Bare:
    """One whose own way alone tells which name stands for another."""

    def __init__(self) -> None:
        self.n_embd, self.scale, self.bias = 2.0, 3.0, 0.5

    def __getattribute__(self, key: str) -> Any:
        if key == "hidden":
            key = "n_embd"
        return super().__getattribute__(key)


class Past(Config):
    """One that reads past its own way."""

    def __getattribute__(self, key: str) -> Any:
        return object.__getattribute__(self, key)


class Net(nn.Module):
    """Two layers, and what `read` makes of a configuration between."""

    def __init__(self, config: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.b, self.config, self.read = nn.Linear(4, 4), nn.Linear(4, 4), config, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.b(y.to(y.dtype) * self.read(self.config))


def mapped(c: Any) -> Any:
    return c.hidden * c.scale


def direct(c: Any) -> Any:
    return c.n_embd * c.scale


def by_variables(c: Any) -> Any:
    found = 1.0
    for name in ["scale", "gain"]:
        found *= getattr(c, name, None) or 1.0
    return found


def by_vars(c: Any) -> Any:
    return vars(c)["scale"]


def past(c: Any) -> Any:
    return object.__getattribute__(c, "sc" + "ale")


def add(c: Any) -> None:
    c.foo = 1


def unread(c: Any) -> None:
    c.bias = 7.0


def named_elsewhere(c: Any) -> None:
    c.dtype = "float32"


def relabelled(c: Any) -> None:
    c.labels[0] = "b"
    c.labels = {0: "c"}


def rescaled(c: Any) -> None:
    c.scale = 4.0


def remapped(c: Any) -> None:
    c.n_embd = 4.0


def renewed(c: Any) -> None:
    c.__dict__ = {**vars(c), "scale": 4.0}


def gained(c: Any) -> None:
    c.gain = 4.0


def strict(c: Any) -> None:
    vars(c)["_strict"] = 1


def outcome(config: Any, read: Callable[[Any], Any], change: Callable[[Any], None]) -> str:
    """Whether a split takes a change as none, or notices it: by another plan, or by an error."""
    model = Net(config, read)
    runtime = prepare_split(model, (X,), split="after:a")
    change(config)
    try:
        found = runtime.run_suffix(runtime.run_prefix(X))
    except (ModuleError, AttributeError):
        return "noticed"
    assert torch.equal(found, model(X))
    return "taken" if len(runtime.plans) == 1 else "noticed"


@pytest.mark.parametrize(
    ("config", "read", "change"),
    [
        (Config, mapped, add),
        (Config, mapped, unread),
        (Config, mapped, named_elsewhere),
        (Config, mapped, relabelled),
        (Config, by_variables, add),
        (Config, by_variables, unread),
        (Plain, by_variables, add),
        (Plain, by_variables, unread),
    ],
)
def test_what_forward_did_not_read_may_change(
    config: Callable[[], Any], read: Callable[[Any], Any], change: Callable[[Any], None]
) -> None:
    assert outcome(config(), read, change) == "taken"


@pytest.mark.parametrize(
    ("config", "read", "change"),
    [
        (Config, mapped, rescaled),
        (Config, mapped, remapped),
        (Bare, mapped, remapped),
        (Config, mapped, renewed),
        (Config, mapped, strict),
        (Config, by_variables, rescaled),
        (Config, by_variables, gained),
        (Config, by_vars, rescaled),
        (Plain, by_variables, rescaled),
        (Plain, by_variables, gained),
        (Plain, by_variables, renewed),
        (Config, past, rescaled),
        (Past, direct, rescaled),
        (Past, direct, remapped),
    ],
)
def test_what_forward_read_may_not(
    config: Callable[[], Any], read: Callable[[Any], Any], change: Callable[[Any], None]
) -> None:
    assert outcome(config(), read, change) == "noticed"


def test_a_class_tells_its_reads_if_each_way_to_read_is_its_own() -> None:
    assert readers.tells(Config)
    assert not readers.tells(Past)
    assert not readers.tells(Plain)


def names_of(f: Callable[..., Any]) -> frozenset[str] | None:
    return names_by([*plain_steps(marked(dis.get_instructions(f)))])


def test_the_variables_that_hold_names_are_found() -> None:
    assert names_of(by_variables) == {"name"}
    assert names_of(lambda c: getattr(c, "a")) == frozenset()  # noqa: B009
    assert names_of(lambda c, i: getattr(c, f"a{i}")) is None
    assert names_of(lambda c, n: getattr(c(), n)) is None
    assert names_of(lambda c, n, d: getattr(c, n, d())) is None
    assert names_of(lambda c, n: map(getattr, c, n)) is None


def by_all(c: Any) -> Any:
    return c.scale * len([n for n in vars(c) if n != "note"])


def test_a_refusal_names_the_attributes_that_came_and_went() -> None:
    config = Plain()
    runtime = prepare_split(Net(config, by_all), (X,), split="after:a")
    config.gain = 1.0  # type: ignore[attr-defined]
    del config.bias
    with pytest.raises(
        ModuleError, match="was a Plain with bias and without gain when forward read it, now it is a Plain with"
    ):
        runtime.run_prefix(X)


def test_a_refusal_names_the_attributes_that_changed_places() -> None:
    config = Plain()
    runtime = prepare_split(Net(config, by_all), (X,), split="after:a")
    bias = config.bias
    del config.bias
    config.scale, config.bias = config.scale, bias
    runtime.run_prefix(X)
    scale = config.scale
    del config.scale
    config.scale = scale
    with pytest.raises(
        ModuleError, match=r"was a Plain with scale, bias in this order when .* a Plain with bias, scale in"
    ):
        runtime.run_prefix(X)


def helper(thing: Any, name: str) -> Any:
    return object.__getattribute__(thing, {"hidden": "n_" + "embd"}.get(name, name))


class Helped(Plain):
    """One that leaves it to a function which name stands for another, and no code holds that name."""

    def __getattribute__(self, name: str) -> Any:
        return helper(self, name)


class Made(Plain):
    """The same by a function that it makes."""

    def __getattribute__(self, name: str) -> Any:
        get = lambda n: super(Made, self).__getattribute__(n)  # noqa: E731
        return get("n_" + "EMBD".lower()) if name == "hidden" else get(name)


OUTSIDE: dict[str, Any] = {}


def set_past(config: Any) -> None:
    object.__getattribute__(config, "__dict__")["n_" + "embd"] = 4.0


@torch.no_grad()
@pytest.mark.parametrize("kind", [Helped, Made, Config, Bare])
@pytest.mark.parametrize("where", ["a global", "in a dict out there"])
def test_what_stands_under_another_name_out_there_is_guarded(kind: type, where: str) -> None:
    OUTSIDE["config"] = config = kind()
    reads = {"a global": lambda _: config.hidden, "in a dict out there": lambda _: OUTSIDE["config"].hidden}
    model = Net(None, reads[where])
    runtime = prepare_split(model, (X,), split="after:a")
    before = model(X)
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), before)
    if kind in (Config, Bare):
        unread(config)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), before)
    set_past(config)
    assert not torch.equal(model(X), before)
    with pytest.raises(ModuleError, match="prepare_split again"):
        runtime.run_prefix(X)
