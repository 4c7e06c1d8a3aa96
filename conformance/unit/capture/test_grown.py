"""A container that grows at each call: what forward asks of it is refused by name, and a log that it never asks goes on."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.capture.grown import _holders
from ariadne.compare import difference
from ariadne.errors import UnsupportedError

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
OF_ALL: list[Any] = []


class Window:
    """A list in a slot."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: list[Any] = []


class Net(nn.Module):
    of_class: ClassVar[list[Any]] = []

    def __init__(self, asks: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.hist: list[Any] = []
        self.win: deque[Any] = deque(maxlen=6)
        self.table: dict[Any, Any] = {}
        self.lists: defaultdict[str, list[Any]] = defaultdict(list)
        self.window, self.held, self.steps = Window(), SimpleNamespace(log=[]), 0
        self.put, self.count = self.hist.append, self.hist.__len__
        vars(self)["asks"] = asks

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        found: Tensor = self.b(h * self.asks(self, h))
        return found

    def kept(self) -> list[Any]:
        return [self.hist, [*self.win], self.table, {**self.lists}, self.window.kept, self.held.log]


def length(m: Net, h: Tensor) -> float:
    m.hist.append(h.detach().mean())
    return 0.5 if len(m.hist) > 8 else 1.0


def one_length(m: Net, h: Tensor) -> float:
    m.hist.append(len(h))
    return 0.5 if len(m.hist) == 6 else 1.0


def schedule(m: Net, h: Tensor) -> float:
    m.hist.append(len(h))
    return float(0.9 ** (len(m.hist) // 6))


def sliced(m: Net, h: Tensor) -> float:
    m.hist.append(h.detach())
    return 0.5 if m.hist[8:] else 1.0


def an_index(m: Net, h: Tensor) -> float:
    m.hist += [h.detach()]
    try:
        return 0.5 if m.hist[7] is h else 0.7
    except IndexError:
        return 1.0


def first_of_all(m: Net, h: Tensor) -> Any:
    m.hist.append(h.detach().mean())
    return m.hist[0]


def by_bound_methods(m: Net, h: Tensor) -> float:
    m.put(1)  # nothing else can be put in the place of what these are bound to
    return 0.5 if m.count() > 8 else 1.0


def emptiness(m: Net, h: Tensor) -> float:
    known = bool(m.held.log)
    m.held.log.append(1)
    return 1.0 if known or len(h) else 0.5


def through_a_variable(m: Net, h: Tensor) -> float:
    log = m.hist
    log.append(h.detach())
    return 0.5 if sum(1 for _ in log) == 9 else 1.0


def full(m: Net, h: Tensor) -> float:
    m.win.append(h.detach().mean())
    return 0.5 if len(m.win) == m.win.maxlen else 1.0


def left(m: Net, h: Tensor) -> float:
    m.hist.append(1)
    m.steps = len(m.hist)
    return 1.0


def a_default(m: Net, h: Tensor, seen: list[Any] = []) -> float:  # noqa: B006
    seen.append(1)
    return 0.5 if len(seen) == 7 else 1.0


def a_global(m: Net, h: Tensor) -> float:
    OF_ALL.append(1)
    return 0.5 if len(OF_ALL) == 7 else 1.0


def of_the_class(m: Net, h: Tensor) -> float:
    m.of_class.append(1)
    return 0.5 if len(m.of_class) == 7 else 1.0


def in_a_slot(m: Net, h: Tensor) -> float:
    m.window.kept.append(1)
    return 0.5 if len(m.window.kept) == 7 else 1.0


def made_at_first(m: Net, h: Tensor) -> float:
    m.lists["h"].append(h.detach())
    return 0.5 if len(m.lists["h"]) == 7 else 1.0


def window(m: Net, h: Tensor) -> float:
    m.hist.append(h.detach().mean())
    if len(m.hist) > 3:
        m.hist.pop(0)
    return 1.0


def cut_down(m: Net, h: Tensor) -> float:
    m.hist.append(h.detach().mean())
    del m.hist[:-3]
    return 1.0


def capped(m: Net, h: Tensor) -> float:
    m.table[len(h)] = h.detach().mean()
    while len(m.table) > 2:
        m.table.pop(next(iter(m.table)))
    return 1.0


def flushed(m: Net, h: Tensor) -> float:
    m.hist.append(h.detach().mean())
    if len(m.hist) == 6:
        m.hist.clear()
    return 1.0


def _save(seen: list[Any], m: Net, h: Tensor) -> float:
    seen.append(1)
    return 0.5 if len(seen) == 7 else 1.0


def _around() -> Callable[[Net, Tensor], float]:
    seen: list[Any] = []
    return lambda m, h: _save(seen, m, h)


ASKED = {
    f.__name__: f
    for f in (
        *(
            length,
            one_length,
            schedule,
            sliced,
            an_index,
            first_of_all,
            by_bound_methods,
            emptiness,
            through_a_variable,
            full,
            left,
        ),
        *(a_default, a_global, of_the_class, in_a_slot, made_at_first, window, cut_down, capped, flushed),
    )
}


@pytest.mark.parametrize("case", [*ASKED, "around"])
def test_what_grows_and_is_asked_is_refused_and_left_as_it_was(case: str) -> None:
    asks = ASKED[case] if case in ASKED else _around()
    model = Net(asks).eval()
    before = copy.deepcopy(model.kept())
    lists = [OF_ALL, Net.of_class, *(a_default.__defaults__ or ()), model.hist, model.win]
    bound = "changes what is in Net.put at each call" if case == "by_bound_methods" else "puts something more into"
    with pytest.raises(UnsupportedError, match=rf"{bound}.*fallback=\"python\""):
        prepare_split(model, (X[:2],), split=SplitSpec("percent:50", dynamic_batch=(1, 5)))
    assert difference(before, model.kept()) is None
    now = [OF_ALL, Net.of_class, *(a_default.__defaults__ or ()), model.hist, model.win]
    assert all(a is b and type(b) in (list, deque) for a, b in zip(lists, now, strict=True))
    assert not any(map(len, lists))


def log(m: Net, h: Tensor) -> float:
    m.hist.append(h.detach())
    m.lists["h"].append(h.detach())
    m.lists.setdefault("n", []).extend([h.detach(), 1.5])
    m.window.kept.append(2)
    m.held.log += [h.detach().mean()]
    m.win.append(len(h))
    return 1.0


def its_own(m: Net, h: Tensor) -> Any:
    m.hist.append(h.detach().mean())
    m.hist.append(h.detach().amax())
    return m.hist[-1] + m.hist[-2]


def anew(m: Net, h: Tensor) -> Any:
    m.hist = []
    m.hist.append(h.detach().mean())
    m.table["h"] = h.detach()
    return sum(m.hist) + len(m.hist) + len(m.table["h"])


def by_size(m: Net, h: Tensor) -> float:
    m.table[len(h)] = h.detach()
    return float(m.table[len(h)].shape[0])


@pytest.mark.parametrize("asks", [log, its_own, anew, by_size])
def test_what_is_not_asked_or_is_this_calls_own_is_followed(asks: Callable[[Net, Tensor], Any]) -> None:
    model, whole = Net(asks).eval(), Net(asks).eval()
    runtime = prepare_split(model, (X[:2],), split=SplitSpec("percent:50", dynamic_batch=(2, 3)))
    for call, batch in enumerate((3, 2, 3)):
        with torch.no_grad():
            expected = whole(X[:batch])
        assert torch.equal(expected, runtime.run_suffix(runtime.run_prefix(X[:batch])))
        assert difference(whole.kept(), model.kept()) is None
        if call == 1:  # the user takes what was kept, and goes on
            for m in (model, whole):
                m.hist.clear()
                m.held.log.clear()


def test_all_that_hold_a_container_are_found() -> None:
    thing: list[Any] = []

    def closed(seen: list[Any] = thing) -> Any:
        return thing, seen

    slot, spaces, filled = Window(), SimpleNamespace(a=thing), partial(_save, thing)
    slot.kept, table, inside, queue = thing, {"a": thing}, [0, thing], deque([thing])
    of_class = type("OfClass", (), {"a": thing})
    for where, key, _ in [*_holders([thing])]:
        where[key] = "other"
    found = (slot.kept, spaces.a, filled.args[0], table["a"], inside[1], queue[0], closed()[1], closed()[0])
    assert found == ("other",) * 8
    assert of_class.a == "other"  # type: ignore[attr-defined]
