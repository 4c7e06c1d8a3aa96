"""What forward takes out of objects that the model holds is followed or guarded; what it leaves alone is neither."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ariadne.errors import ModuleError, UnsupportedError
from conformance.unit import held_names
from conformance.unit.held_kit import Activation, Config, Net, a_default, agree, split_of, through_all, with_strays
from conformance.unit.refusing import prepare_split


class Slotted:
    """An object without a dict."""

    __slots__ = ("t",)

    def __init__(self) -> None:
        self.t = torch.ones(4)


def scaled(x: torch.Tensor, k: float = 1.0, t: torch.Tensor | None = None) -> torch.Tensor:
    return x * k if t is None else x * t


def a_question(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if hasattr(m.config, "gain") else x


def by_a_name_that_is_kept(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * getattr(m.config.sizes, m.config.which)


def by_a_name_that_is_made(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * sum(getattr(m.config, f"gain{i}") for i in (1,))


def sizes(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * m.w.numel() + m.w.size(0)


REFUSED: dict[str, tuple[Callable[[], Net], Callable[[Any], Any], str]] = {
    "an attribute that covers one of the class": (
        lambda: Net(lambda m, x: x * m.config.scale, config=Config()),
        lambda m: setattr(m.config, "scale", 3.0),
        "config.scale was 2.0",
    ),
    "a default that is needed no more": (
        lambda: Net(a_default, config=Config()),
        lambda m: setattr(m.config, "gain", 3.0),
        "config.gain was missing",
    ),
    "an attribute that was not there": (
        lambda: Net(a_question, config=Config()),
        lambda m: setattr(m.config, "gain", 3.0),
        "config.gain was missing",
    ),
    "a callable object": (
        lambda: Net(lambda m, x: m.act(x), act=Activation()),
        lambda m: setattr(m.act, "gain", 3.0),
        "'act.gain' of the model was 2.0",
    ),
    "a bound method": (
        lambda: Net(lambda m, x: m.act(x), act=Activation().__call__),
        lambda m: setattr(m.act.__self__, "gain", 3.0),
        "'act.__self__.gain' of the model was 2.0",
    ),
    "a partial": (
        lambda: Net(lambda m, x: m.act(x), act=functools.partial(scaled, k=2.0)),
        lambda m: m.act.keywords.update(k=3.0),
        "was {'k': 2.0}",
    ),
    "an attribute by a name that another one keeps": (
        lambda: Net(by_a_name_that_is_kept, config=SimpleNamespace(sizes=SimpleNamespace(hidden=2.0), which="hidden")),
        lambda m: setattr(m.config.sizes, "hidden", 3.0),
        "'config.sizes.hidden' of the model was 2.0",
    ),
    "an attribute by a name that is made": (
        lambda: Net(by_a_name_that_is_made, config=SimpleNamespace(gain1=2.0)),
        lambda m: setattr(m.config, "gain1", 3.0),
        "'config.gain1' of the model was 2.0",
    ),
    "an object's attribute that a module named like one of Python's reads": (
        lambda: Net(lambda m, x: held_names.scaled(m.config, x), config=SimpleNamespace(gain=2.0, other=1)),
        lambda m: setattr(m.config, "gain", 3.0),
        "'config.gain' of the model was 2.0",
    ),
    "a member of a set": (
        lambda: Net(lambda m, x: x * 3 if 2 in m.picked else x, picked={1, 2}),
        lambda m: (m.picked.discard(2), m.picked.add(0)),
        "was {1, 2}",
    ),
    "a member of a large set": (
        lambda: Net(lambda m, x: x * 3 if 2 in m.picked else x, picked=set(range(100))),
        lambda m: (m.picked.discard(2), m.picked.add(-1)),
        "'picked' of the model was a set of",
    ),
    "an element of a long list": (
        lambda: Net(lambda m, x: x * m.table[500], table=list(range(1000))),
        lambda m: m.table.__setitem__(500, 7),
        "'table' of the model was a list of",
    ),
    "an equal number of another type in a long list": (
        lambda: Net(lambda m, x: x + torch.full((4,), m.table[1]), table=list(range(1000))),
        lambda m: m.table.__setitem__(1, 1.0),
        "'table' of the model was a list of",
    ),
    "a value in a large dict": (
        lambda: Net(lambda m, x: x * m.table[50], table={i: i for i in range(100)}),
        lambda m: m.table.update({50: 7}),
        "'table' of the model was a dict of",
    ),
    "a tensor behind a key that is no text or number": (
        lambda: Net(lambda m, x: x * m.table[torch.float32], table={torch.float32: torch.ones(4)}),
        lambda m: m.table.update({torch.float32: torch.ones(4) * 3}),
        "table[torch.float32]",
    ),
    "the flag of a module in a list": (with_strays, lambda m: m.aux[1].train(), "'aux[1].0' was captured in eval mode"),
    "the weight of a module in a list": (
        with_strays,
        lambda m: setattr(m.aux[0], "weight", nn.Parameter(torch.ones(4, 4))),
        "'weight' of 'aux[0]', which stands in no registry",
    ),
    "a module in a list": (
        with_strays,
        lambda m: m.aux.__setitem__(0, nn.Identity()),
        "'aux[0]' of the model was Linear",
    ),
    "a part of a module in a list": (
        with_strays,
        lambda m: m.aux[1].__setitem__(0, nn.Tanh()),
        "'aux[1].0' was replaced",
    ),
    "a hook of a module in a list": (
        with_strays,
        lambda m: m.aux[0].register_forward_hook(lambda module, args, out: out * 2),
        "the hooks of 'aux[0]'",
    ),
}


class Mapped:
    """Finds an attribute under another name, as configs of transformers do."""

    def __init__(self) -> None:
        self.n_head, self._map = 2.0, {"heads": "n_head"}

    def __getattribute__(self, name: str) -> Any:
        names = object.__getattribute__(self, "__dict__").get("_map", {})
        return object.__getattribute__(self, names.get(name, name))


def tried(m: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        return x * m.config.gain
    except AttributeError:
        return x


def helped(x: torch.Tensor, config: Any) -> torch.Tensor:
    return x * config.scale


def weights_only(m: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in m.aux:
        x = nn.functional.linear(x, layer.weight)
    return x


def matched(m: Any, x: torch.Tensor) -> torch.Tensor:
    match m.config:
        case Point(2.0):
            return x * 2
    return x


@dataclasses.dataclass
class Point:
    """Something that `match` takes apart by position."""

    gain: float = 2.0


REFUSED |= {
    "an attribute that a class finds under another name": (
        lambda: Net(lambda m, x: x * m.config.heads, config=Mapped()),
        lambda m: setattr(m.config, "n_head", 3.0),
        "'config.n_head' of the model was 2.0",
    ),
    "an attribute that an object is matched by": (
        lambda: Net(matched, config=Point()),
        lambda m: setattr(m.config, "gain", 3.0),
        "'config.gain' of the model was 2.0",
    ),
    "an object as a whole": (
        lambda: Net(lambda m, x: x * sum(vars(m.config).values()), config=SimpleNamespace(gain=2.0)),
        lambda m: setattr(m.config, "gain", 3.0),
        "'config.gain' of the model was 2.0",
    ),
    "an attribute that was tried": (
        lambda: Net(tried, config=SimpleNamespace()),
        lambda m: setattr(m.config, "gain", 3.0),
        "config.gain was missing",
    ),
    "a second argument": (
        lambda: Net(lambda m, x: helped(x, m.config), config=Config()),
        lambda m: setattr(m.config, "scale", 3.0),
        "Config.scale was 2.0",
    ),
    "a variable of the function around": (
        lambda: Net(lambda m, x: x * sum(m.config.scale for _ in range(2)), config=Config()),
        lambda m: setattr(m.config, "scale", 3.0),
        "config.scale was 2.0",
    ),
    "a weight of a module in a list that is not called": (
        lambda: Net(weights_only, aux=[nn.Linear(4, 4)]),
        lambda m: setattr(m.aux[0], "weight", nn.Parameter(torch.ones(4, 4))),
        "'weight' of 'aux[0]', which stands in no registry",
    ),
    "a module behind its bound forward": (
        lambda: Net(lambda m, x: m.act(x), act=nn.Linear(4, 4).forward),
        lambda m: setattr(m.act.__self__, "bias", None),
        "'act.__self__'",
    ),
    "a module in a set": (
        lambda: Net(through_all, aux={nn.Linear(4, 4)}),
        lambda m: setattr(next(iter(m.aux)), "bias", None),
        "which stands in no registry",
    ),
    "the shape of an array": (
        lambda: Net(lambda m, x: x * m.table.shape[0], table=np.ones((2, 3))),
        lambda m: setattr(m.table, "shape", (3, 2)),
        "'table' of the model was an array float64[2, 3]",
    ),
}

FOLLOWED: dict[str, tuple[Callable[[], Net], Callable[[Any], Any]]] = {
    "a tensor in a deque": (
        lambda: Net(lambda m, x: x * m.kept[0], kept=deque([torch.ones(4)])),
        lambda m: m.kept.__setitem__(0, torch.ones(4) * 3),
    ),
    "a tensor in an ordered dict": (
        lambda: Net(lambda m, x: x * m.kept["a"], kept=OrderedDict(a=torch.ones(4))),
        lambda m: m.kept.update(a=torch.ones(4) * 3),
    ),
    "a tensor in a slot": (
        lambda: Net(lambda m, x: x * m.kept.t, kept=Slotted()),
        lambda m: setattr(m.kept, "t", torch.ones(4) * 3),
    ),
    "a tensor in a partial": (
        lambda: Net(lambda m, x: m.act(x), act=functools.partial(scaled, t=torch.ones(4))),
        lambda m: m.act.keywords.update(t=torch.ones(4) * 3),
    ),
    "a tensor in a callable object": (
        lambda: Net(lambda m, x: m.act(x) * m.act.gain, act=with_tensor()),
        lambda m: setattr(m.act, "gain", torch.ones(4) * 3),
    ),
    "the data of a module in a list": (with_strays, lambda m: m.aux[0].weight.data.zero_()),
    "the size of a view of a parameter": (
        lambda: Net(lambda m, x: x * m.w.data.shape[0] + m.w.ndim, w=nn.Parameter(torch.ones(3))),
        lambda m: setattr(m, "w", nn.Parameter(torch.ones(5, 1))),
    ),
    "what a logger remembers": (
        lambda: Net(logged, log=logging.getLogger("ariadne.test")),
        lambda m: m.log.isEnabledFor(logging.WARNING),
    ),
    "a cache in an object": (
        lambda: Net(remembered, config=SimpleNamespace(cache={})),
        lambda m: m.config.cache.clear(),
    ),
    "the size of a parameter that no op uses": (
        lambda: Net(sizes, w=nn.Parameter(torch.ones(3))),
        lambda m: setattr(m, "w", nn.Parameter(torch.ones(5))),
    ),
    "an attribute of an object that forward does not read": (
        lambda: Net(lambda m, x: x * m.config.gain, config=SimpleNamespace(gain=2.0, epoch=1)),
        lambda m: setattr(m.config, "epoch", 2),
    ),
    "an attribute that an object gets and forward does not read": (
        lambda: Net(lambda m, x: x * m.config.gain, config=SimpleNamespace(gain=2.0)),
        lambda m: setattr(m.config, "_name_or_path", "somewhere"),
    ),
}


def logged(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.log.debug("called")
    return x


def remembered(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.config.cache.setdefault(x.shape[1], "seen")
    return x * 2


def with_tensor() -> Any:
    found: Any = Activation()
    found.gain = torch.ones(4)
    return found


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_a_change_in_what_was_taken_is_refused(case: str) -> None:
    build, change, words = REFUSED[case]
    model, split, x = split_of(build, False)
    agree(model, split, x)
    with torch.no_grad():
        before = model(x)
        change(model)
        moved = not torch.equal(model(x), before)
    assert moved != (case in UNMOVED), "what the change changes"
    with pytest.raises(ModuleError, match=r"call prepare_split again|prepare again") as error:
        split.run_suffix(split.run_prefix(x))
    assert words in str(error.value)


# Changes after which this forward happens to give the same.
UNMOVED = {"an equal number of another type in a long list"}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", sorted(FOLLOWED))
def test_a_change_that_needs_no_other_plan_is_followed(case: str, training: bool) -> None:
    build, change = FOLLOWED[case]
    model, split, x = split_of(build, training)
    agree(model, split, x)
    with torch.no_grad():
        change(model)
    agree(model, split, x)
    agree(model, split, torch.randn(3, 4))


def test_what_an_input_requires_is_asked_again() -> None:
    model, split, x = split_of(lambda: Net(lambda m, x: x), False)
    model.forward = lambda x: model.b(model.a(x)) * (2 if x.requires_grad else 1)  # type: ignore[method-assign]
    split = prepare_split(model, example_inputs=(x,), split="50%")
    for flag in (False, True, False):
        agree(model, split, torch.randn(2, 4).requires_grad_(flag))


def test_a_class_that_gets_another_number_is_noticed() -> None:
    class Own(Config):
        pass

    model, split, x = split_of(lambda: Net(lambda m, x: x * m.config.scale, config=Own()), False)
    agree(model, split, x)
    Own.scale = 3.0
    with pytest.raises(ModuleError, match=r"config.scale was 2.0"):
        split.run_prefix(x)


def test_python_state_of_callables_and_of_modules_in_lists_is_left_as_found() -> None:
    class Counts(Activation):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().__call__(x)

    with pytest.raises(UnsupportedError, match="which is 1 in a first call and something else in a second"):
        split_of(lambda: Net(lambda m, x: m.act(x), act=Counts()), False)

    class Remembers(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x.shape[1]
            return x * 2

    model = Net(through_all, aux=[Remembers()])
    with pytest.raises(
        UnsupportedError, match=r"assigns attribute 'last' of 'aux\[0\]', a module that stands in no registry"
    ):
        prepare_split(model, example_inputs=(torch.randn(2, 4),), split="50%")
    assert not hasattr(model.aux[0], "last")
