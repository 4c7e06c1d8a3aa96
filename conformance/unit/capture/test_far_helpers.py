"""What forward puts outside of the model by helpers of helpers, however many calls away and by whatever name they are called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import prepare_split
from ariadne.errors import UnsupportedError

SOURCE = """
LOG, TABLE, COUNT = [], {}, 0

class Box:
    items = []

def appends(x): LOG.append(x.shape[0])
def puts(x): TABLE["sum"] = x.sum().detach()
def fills(x): Box.items.append(1)
def counts(x):
    global COUNT
    COUNT += 1
"""
FAR = "far_away_helpers"


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the user's, of which nothing stands among the globals of this one."""
    module = ModuleType(FAR)
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, FAR, module)
    return module


def far_state(far: Any) -> tuple[Any, ...]:
    return [*far.LOG], dict(far.TABLE), far.COUNT, [*far.Box.items]


def afresh(far: Any) -> None:
    far.LOG.clear(), far.TABLE.clear(), far.Box.items.clear()
    far.COUNT = 0


class Net(nn.Module):
    def __init__(self, helper: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.helper = nn.Linear(4, 4), nn.Linear(4, 4), helper

    def forward(self, x: Tensor) -> Tensor:
        self.helper(x)
        found: Tensor = self.b(self.a(x))
        return found


def chain(last: Callable[[Tensor], Any], calls: int) -> Callable[[Tensor], Any]:
    """A function that comes to `last` by so many calls, each of a global of a module of its own."""
    for i in range(calls):
        table: dict[str, Any] = {"__name__": f"link_{i}", "inner": last}
        exec("def link(x): inner(x)", table)
        last = table["link"]
    return last


def imports_from(x: Tensor) -> None:
    from far_away_helpers import appends  # type: ignore[import-not-found]  # noqa: PLC0415 - inside is what it is about

    appends(x)


def imports_it(x: Tensor) -> None:
    import far_away_helpers  # noqa: PLC0415

    far_away_helpers.appends(x)


def asks_by_name(x: Tensor) -> None:
    getattr(sys.modules["far_away_helpers"], "appends")(x)  # noqa: B009 - by name is what it is about


def asks_the_modules(x: Tensor) -> None:
    sys.modules["far_away_helpers"].appends(x)


HELD = SimpleNamespace()
TABLES = SimpleNamespace(known={})


def of_an_object(x: Tensor) -> None:
    HELD.appends(x)


def of_a_registry(x: Tensor) -> None:
    TABLES.known["appends"](x)


def as_in_the_whole(far: Any, helper: Callable[[Tensor], Any]) -> None:
    """Preparing leaves nothing, and two calls leave what two calls of the model leave."""
    torch.manual_seed(0)
    model, calls = Net(helper).eval(), [torch.randn(2, 4), torch.randn(3, 4)]
    afresh(far)
    clean = far_state(far)
    runtime = prepare_split(model, (calls[0],), split="after:a")
    assert far_state(far) == clean
    with torch.no_grad():
        for x in calls:
            model(x)
        whole = far_state(far)
        afresh(far)
        for x in calls:
            runtime.run_suffix(runtime.run_prefix(x))
    split = far_state(far)
    assert whole[1].keys() == split[1].keys()
    assert all(torch.equal(t, split[1][k]) for k, t in whole[1].items())
    assert (whole[0], *whole[2:]) == (split[0], *split[2:])
    assert whole != clean


@pytest.mark.parametrize("calls", [1, 4, 40, 400])
def test_a_helper_that_is_many_calls_away(far: Any, calls: int) -> None:
    as_in_the_whole(far, chain(far.appends, calls))


@pytest.mark.parametrize("name", ["puts", "fills"])
def test_what_far_helpers_put_into_dicts_and_classes(far: Any, name: str) -> None:
    as_in_the_whole(far, chain(getattr(far, name), 5))


def test_a_far_global_that_counts_is_refused_by_name(far: Any) -> None:
    with pytest.raises(UnsupportedError, match="changes what is in the globals of far_away_helpers"):
        prepare_split(Net(chain(far.counts, 5)), (torch.randn(2, 4),), split="after:a")
    assert far.COUNT == 0


HELPERS = [imports_from, imports_it, asks_the_modules, asks_by_name, of_an_object, of_a_registry]


@pytest.mark.parametrize("helper", HELPERS)
def test_a_helper_that_no_global_names(far: Any, helper: Callable[[Tensor], Any]) -> None:
    HELD.appends = TABLES.known["appends"] = far.appends
    as_in_the_whole(far, helper)


class Taps:
    """Holds a method of its own, as callback tables do."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.on_forward = self.on

    def on(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(len(args))


def test_an_object_that_holds_its_own_method_is_looked_at_once() -> None:
    taps = Taps()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    model[0].register_forward_hook(taps.on_forward)
    split = prepare_split(model, (torch.ones(2, 4),), split="after:1")
    split.run_suffix(split.run_prefix(torch.ones(3, 4)))
    assert taps.seen == [1]
