"""State that forward begins at its first call, and goes on with: refused as the same state of `__init__` is; caches stay plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import UnsupportedError

Body = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """Two layers; between them forward multiplies by what `body` gives."""

    def __init__(self, body: Body, **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.part, self.leave = nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 3)
        self.body = body
        self.__dict__.update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        found: Tensor = self.leave(self.part(h) * self.body(self, h))
        return found


def split(model: nn.Module) -> Any:
    return prepare_split(model.eval(), (torch.randn(2, 4),), split=SplitSpec("after:enter", dynamic_batch=(1, 8)))


def warm(count: float) -> float:
    """What a result follows when a warm-up of six calls is over."""
    return 0.5 if count > 6 else 1.0


def _getattr(m: Any, h: Tensor) -> float:
    m.n = getattr(m, "n", 0) + 1
    return warm(m.n)


def _hasattr(m: Any, h: Tensor) -> float:
    if not hasattr(m, "n"):
        m.n = 0
    m.n += 1
    return warm(m.n)


def _tries(m: Any, h: Tensor) -> float:
    try:
        m.n += 1
    except AttributeError:
        m.n = 1
    return warm(m.n)


def _in_a_part(m: Any, h: Tensor) -> float:
    m.part.n = getattr(m.part, "n", 0) + 1
    return warm(m.part.n)


def _tuple(m: Any, h: Tensor) -> float:
    m.n = (*getattr(m, "n", ()), 1)
    return warm(len(m.n))


def _string(m: Any, h: Tensor) -> float:
    m.n = getattr(m, "n", "") + "x"
    return warm(len(m.n))


def _largest_batch(m: Any, h: Tensor) -> float:
    m.n = max(getattr(m, "n", 0), h.shape[0])
    return 2.0 if m.n > 4 else 1.0


def _last_batch(m: Any, h: Tensor) -> float:
    found = 2.0 if getattr(m, "n", 0) == 4 else 1.0
    m.n = h.shape[0]
    return found


def _mean(m: Any, h: Tensor) -> Tensor:
    now = h.detach().mean()
    m.n = 0.9 * m.n + 0.1 * now if hasattr(m, "n") else now
    return torch.where(m.n > 9, 0.5, 1.0)


def _tensors(m: Any, h: Tensor) -> float:
    m.n = (*getattr(m, "n", ()), h.detach().mean())[-8:]
    return warm(len(m.n))


def _in_place(m: Any, h: Tensor) -> Tensor:
    if not hasattr(m, "n"):
        m.n = torch.zeros(1)
    m.n += 1
    return torch.where(m.n > 6, 0.5, 1.0)


def _array(m: Any, h: Tensor) -> float:
    if not hasattr(m, "n"):
        m.n = np.zeros(1)
    m.n[0] += 1
    return warm(m.n[0])


def _iterator(m: Any, h: Tensor) -> float:
    if not hasattr(m, "n"):
        m.n = itertools.count()
    return warm(next(m.n))


def _module(m: Any, h: Tensor) -> float:
    if not hasattr(m, "n"):
        m.n = nn.Identity()
        m.n.count = 0
    m.n.count += 1
    return warm(m.n.count)


def _function(m: Any, h: Tensor) -> float:
    m.f.n = getattr(m.f, "n", 0) + 1
    return warm(m.f.n)


def _function_of_a_list(m: Any, h: Tensor) -> float:
    m.fs[0].n = getattr(m.fs[0], "n", 0) + 1
    return warm(m.fs[0].n)


def _every_20th(m: Any, h: Tensor) -> float:
    m.f.n = getattr(m.f, "n", 0) + 1
    return 2.0 if m.f.n % 20 == 19 else 1.0


def _hooks(m: Any, h: Tensor) -> float:
    m.part.register_forward_hook(lambda m, i, o: None)
    return warm(len(m.part._forward_hooks))


def _appended(m: Any, h: Tensor) -> float:
    m.beside[0].append(nn.Identity())
    return warm(len(m.beside[0]))


def _buffer(m: Any, h: Tensor) -> Tensor:
    if not hasattr(m, "n"):
        m.register_buffer("n", torch.full((1,), 2.0))
    found: Tensor = m.n
    return found


COUNTED: dict[str, tuple[Body, str]] = {
    "getattr": (_getattr, "begins the attribute 'n' of the model at its first call"),
    "hasattr": (_hasattr, "begins the attribute 'n' of the model"),
    "tries": (_tries, "begins the attribute 'n' of the model"),
    "in a part": (_in_a_part, "begins the attribute 'n' of 'part'"),
    "a tuple": (_tuple, "begins the attribute 'n' of the model"),
    "a string": (_string, "begins the attribute 'n' of the model"),
    "the largest batch": (_largest_batch, "begins the attribute 'n' of the model"),
    "the last batch": (_last_batch, "reads and changes the attribute 'n'"),
    "a running mean": (_mean, "begins the attribute 'n'"),
    "the last tensors": (_tensors, "begins the attribute 'n'"),
    "in place": (_in_place, "sets up 'n' of the model when it first runs.*Run the model once"),
    "an array": (_array, "writes in place into the attribute 'n'"),
    "an iterator": (_iterator, "'n' of the model when it first runs, an iterator"),
    "a module": (_module, "begins the attribute 'count' of 'n'"),
    "on a function": (_function, "changes what is in the attributes of .*, which is "),
    "on a function of a list": (_function_of_a_list, "changes what is in the attributes of .*, which is "),
    "on a function, every 20th": (_every_20th, "changes what is in the attributes of .*, which is "),
    "hooks": (_hooks, "changes what is in torch's own '_forward_hooks' of 'part'"),
    "appended parts": (_appended, r"changes what is in the parts of 'beside\[0\]'"),
    "a buffer that it registers": (_buffer, "registers the buffer 'n' of the model where it finds none"),
}


def of_its_own() -> dict[str, Any]:
    """A function, and a module in a plain list, that no other test has."""
    return {"f": lambda: 1, "fs": [lambda: 1], "beside": [nn.Sequential()]}


@pytest.mark.parametrize("name", COUNTED)
def test_what_the_first_call_begins_and_later_ones_go_on_with_is_refused(name: str) -> None:
    body, why = COUNTED[name]
    model = Net(body, **of_its_own())
    with pytest.raises(UnsupportedError, match=why):
        split(model)
    assert "n" not in {**vars(model), **vars(model.part), **vars(model.f), **model._modules, **model._buffers}


class Amax(nn.Module):
    """A running maximum that the first call sets; how it tells which that is, is `first`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("amax", torch.tensor(0.0))
        self.__dict__.update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        now = h.detach().abs().max()
        self.amax.copy_(torch.maximum(self.amax, now) if getattr(self, "seen", False) else now)
        self.seen = True
        found: Tensor = self.leave(h)
        return found


@pytest.mark.parametrize("attributes", [{"seen": False}, {"seen": None}, {}], ids=["a flag", "None", "absent"])
def test_a_buffer_that_the_first_call_sets_and_later_ones_take_further_is_refused(attributes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="the attribute 'seen'"):
        split(Amax(**attributes))


class Scaled(Amax):
    """The same, told by a tensor that the first call fills."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        now = h.detach().abs().max()
        first = getattr(self, "scale", None) is None
        if first:
            self.scale = torch.ones(1)
        self.amax.copy_(now if first else torch.maximum(self.amax, now))
        found: Tensor = self.leave(h * self.scale)
        return found


def test_a_model_that_ran_goes_on_as_in_a_later_call() -> None:
    model, whole = Scaled(), Scaled()
    whole.load_state_dict(model.state_dict())
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert torch.equal(model(x), whole(x))
        runtime = split(model)
        runtime.run_suffix(runtime.run_prefix(x * 0.5))
        whole(x * 0.5)
    assert torch.equal(model.amax, whole.amax)


def _by_size(m: Any, h: Tensor) -> Tensor:
    if getattr(m, "rows", None) is None or m.rows.shape[0] != h.shape[0]:
        m.rows = torch.full((h.shape[0], 1), 2.0)
    found: Tensor = m.rows
    return found


def _by_batch(m: Any, h: Tensor) -> Tensor:
    if getattr(m, "batch", None) != h.shape[0]:
        m.batch, m.column = h.shape[0], torch.full((h.shape[0], 1), 2.0)
    found: Tensor = m.column
    return found


def _helper(m: Any, h: Tensor) -> Tensor:
    if not hasattr(m, "act"):
        m.act = nn.ReLU()
    found: Tensor = m.act(h)
    return found


def _in_a_dict(m: Any, h: Tensor) -> Tensor:
    if not hasattr(m, "known"):
        m.known = {}
    if h.shape[0] not in m.known:
        m.known[h.shape[0]] = torch.full((h.shape[0], 1), 2.0)
    found: Tensor = m.known[h.shape[0]]
    return found


def _scratch(m: Any, h: Tensor) -> Tensor:
    if not hasattr(m, "room"):
        m.room = torch.zeros(8)
    m.room.copy_(h.detach()[0])
    found: Tensor = m.room.clone()
    return found


def _shown(m: Any, h: Tensor) -> float:
    if hasattr(m, "shown"):
        del m.shown
    m.shown = h.detach()
    return 1.0


def _on_a_function(m: Any, h: Tensor) -> Tensor:
    if not hasattr(m.f, "row"):
        m.f.row = torch.full((8,), 2.0)
    found: Tensor = m.f.row
    return found


def _caches(m: Any, h: Tensor) -> Tensor:
    found = [_by_size(m, h), _by_batch(m, h), _helper(m, h), _in_a_dict(m, h), _scratch(m, h), _on_a_function(m, h)]
    return torch.stack([one.expand_as(h) for one in found]).sum(0) * _shown(m, h)


def test_what_later_calls_find_as_it_was_is_a_cache() -> None:
    model, whole = Net(_caches, **of_its_own()).eval(), Net(_caches, **of_its_own()).eval()
    runtime = split(model)
    for batch in (3, 5, 2):
        x = torch.randn(batch, 4)
        with torch.no_grad():
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))
