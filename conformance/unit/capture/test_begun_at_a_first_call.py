"""State that a first call sets up and later calls go on from: refused where a second call on the same inputs, or calls on others,
leave something else there; a cache that is set up once is no obstacle."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import UnsupportedError
from conformance.unit.trap_kit import numbers

X = numbers(3, 4)
Ask = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """Two layers; between them it multiplies by what `asks` gives."""

    def __init__(self, asks: Ask, **kept: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("most", torch.tensor(0.0))
        vars(self).update(asks=asks, **kept)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        found: Tensor = self.last(h * self.asks(self, h))
        return found


def late(n: Any) -> float:
    """Another number after six calls."""
    return 0.5 if n > 6 else 1.0


def by_getattr(net: Any, h: Tensor) -> float:
    net.n = getattr(net, "n", 0) + 1
    return late(net.n)


def by_hasattr(net: Any, h: Tensor) -> float:
    if not hasattr(net, "n"):
        net.n = 0
    net.n += 1
    return late(net.n)


def by_error(net: Any, h: Tensor) -> float:
    try:
        net.n += 1
    except AttributeError:
        net.n = 1
    return late(net.n)


def on_a_part(net: Any, h: Tensor) -> float:
    net.last.n = getattr(net.last, "n", 0) + 1
    return late(net.last.n)


def in_a_tuple(net: Any, h: Tensor) -> float:
    net.n = (*getattr(net, "n", ()), h.sum())[-8:]
    return late(len(net.n))


def in_an_array(net: Any, h: Tensor) -> float:
    if not hasattr(net, "n"):
        net.n = np.zeros(1)
    net.n[0] += 1
    return late(net.n[0])


def in_a_tensor(net: Any, h: Tensor) -> Tensor:
    if not hasattr(net, "n"):
        net.n = torch.zeros(1)
    net.n += 1
    return torch.where(net.n > 6, 0.5, 1.0)


def in_a_new_tensor(net: Any, h: Tensor) -> Tensor:
    net.n = getattr(net, "n", torch.zeros(1)) + 1
    return torch.where(net.n > 6, 0.5, 1.0)


def in_a_new_part(net: Any, h: Tensor) -> float:
    if not hasattr(net, "part"):
        net.part = nn.Identity()
        net.part.n = 0
    net.part.n += 1
    return late(net.part.n)


COUNTS = [by_getattr, by_hasattr, by_error, on_a_part, in_a_tuple]
COUNTS += [in_an_array, in_a_tensor, in_a_new_tensor, in_a_new_part]  # type: ignore[list-item]


def refused(asks: Ask, message: str, batches: tuple[int, int] | None = None, **kept: Any) -> None:
    with pytest.raises(UnsupportedError, match=message):
        prepare_split(Net(asks, **kept), (X,), split=SplitSpec("after:first", dynamic_batch=batches))


@torch.no_grad()
@pytest.mark.parametrize("asks", COUNTS)
def test_a_count_that_a_first_call_begins_is_refused_by_name(asks: Ask) -> None:
    refused(asks, "forward (begins|sets up|reads and changes|writes in place into).* 'n' of ")


@torch.no_grad()
def test_an_iterator_that_a_first_call_makes_is_refused() -> None:
    def asks(net: Any, h: Tensor) -> float:
        if not hasattr(net, "n"):
            net.n = itertools.count()
        return late(next(net.n))

    refused(asks, "forward sets up the attribute 'n' of the model when it first runs, an iterator")


# --- by batch -------------------------------------------------------------------------------------------------------


def last_size(net: Any, h: Tensor) -> float:
    found = 2.0 if getattr(net, "size", 0) == 7 else 1.0
    net.size = h.shape[0]
    return found


def most_size(net: Any, h: Tensor) -> float:
    net.size = max(getattr(net, "size", 0), h.shape[0])
    return 2.0 if net.size > 4 else 1.0


def most_size_or_none(net: Any, h: Tensor) -> float:
    net.size = h.shape[0] if net.size is None else max(net.size, h.shape[0])
    return 2.0 if net.size > 4 else 1.0


@torch.no_grad()
@pytest.mark.parametrize(("asks", "kept"), [(last_size, {}), (most_size, {}), (most_size_or_none, {"size": None})])
def test_a_size_that_a_first_call_keeps_and_later_ones_ask_is_refused(asks: Ask, kept: dict[str, Any]) -> None:
    refused(asks, "forward (begins|reads and changes) the attribute 'size' of the model", (1, 8), **kept)


def ones_of_size(net: Any, h: Tensor) -> Tensor:
    if getattr(net, "size", None) != h.shape[0]:
        net.ones, net.size = torch.ones(h.shape[0], 4), h.shape[0]
    found: Tensor = net.ones
    return found


def ones_once(net: Any, h: Tensor) -> Tensor:
    if not hasattr(net, "ones"):
        net.ones = torch.ones(4)
    found: Tensor = net.ones
    return found


def room(net: Any, h: Tensor) -> Tensor:
    """Memory that is made once, and filled at each call."""
    if not hasattr(net, "room"):
        net.room = torch.zeros(3, 4)
    found: Tensor = net.room.copy_(h)
    return found.clone()


@torch.no_grad()
@pytest.mark.parametrize("asks", [ones_of_size, ones_once, room])
def test_a_cache_is_no_obstacle(asks: Ask) -> None:
    whole, by_batch = Net(asks), asks is not room
    split = prepare_split(
        copy.deepcopy(whole), (X,), split=SplitSpec("after:first", dynamic_batch=(1, 8) if by_batch else None)
    )
    for batch in (3, 5, 3) if by_batch else (3, 3):
        x = numbers(batch, 4, seed=batch)
        assert torch.equal(split.run_suffix(split.run_prefix(x)), whole(x))


# --- a flag ---------------------------------------------------------------------------------------------------------


def running(net: Any, h: Tensor) -> Tensor:
    now = h.abs().max()
    net.most.copy_(torch.maximum(net.most, now) if net.begun else now)
    net.begun = True
    return net.most.clone()


def running_in_buffers_alone(net: Any, h: Tensor) -> float:
    running(net, h)
    return 1.0


def set_once(net: Any, h: Tensor) -> float:
    if not net.begun:
        net.most.fill_(1.0)
        net.begun = True
    return 1.0


@torch.no_grad()
@pytest.mark.parametrize("asks", [running, running_in_buffers_alone])
def test_a_running_maximum_that_the_first_call_sets_is_refused(asks: Ask) -> None:
    refused(asks, "reads and changes the attribute 'begun' of the model", begun=False)


@torch.no_grad()
def test_a_buffer_that_the_first_call_alone_sets_is_refused_until_it_is_set() -> None:
    """A split would set it again after `load_state_dict`."""
    whole = Net(set_once, begun=False)
    with pytest.raises(UnsupportedError, match="writes into the buffer 'most' of the model at its first call"):
        prepare_split(copy.deepcopy(whole), (X,), split="after:first")
    whole(X)
    split = prepare_split(copy.deepcopy(whole), (X,), split="after:first")
    for x in (X, X + 1):
        for m in (whole, split.model):
            m.load_state_dict({**m.state_dict(), "most": x.sum()})
        assert torch.equal(split.run_suffix(split.run_prefix(x)), whole(x))
        assert torch.equal(split.model.most, whole.most)  # type: ignore[arg-type]


# --- registries -----------------------------------------------------------------------------------------------------


def hooks(net: Any, h: Tensor) -> float:
    net.first.register_forward_hook(lambda module, given, out: None)
    return late(len(net.first._forward_hooks))


def empty_buffers(net: Any, h: Tensor) -> float:
    net.register_buffer(f"more{len(net._buffers)}", None)
    return late(len(net._buffers))


def not_kept(net: Any, h: Tensor) -> float:
    names = net._non_persistent_buffers_set
    names.add(str(len(names)))
    return late(len(names))


def put_and_taken(net: Any, h: Tensor) -> float:
    net.last.register_forward_hook(lambda module, given, out: None).remove()
    return 1.0


@torch.no_grad()
@pytest.mark.parametrize(
    ("asks", "where"),
    [
        (hooks, "changes what is in torch's own '_forward_hooks' of 'first', which changes in another way"),
        (empty_buffers, "registers the buffer 'more1' of the model"),
        (not_kept, "changes what is in torch's own '_non_persistent_buffers_set' of .*, which changes in another way"),
    ],
)
def test_what_each_call_adds_to_a_registry_is_refused(asks: Ask, where: str) -> None:
    refused(asks, f"forward {where}")


@torch.no_grad()
def test_a_hook_that_is_taken_off_again_is_no_obstacle() -> None:
    whole = Net(put_and_taken)
    split = prepare_split(copy.deepcopy(whole), (X,), split="after:first")
    assert torch.equal(split.run_suffix(split.run_prefix(X)), whole(X))


class Observed(nn.Module):
    """A buffer that the first call gives its size, as the observers of torch.ao.quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(3, 2)
        self.register_buffer("least", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, least = self.a(x), self.a.weight.detach().amin(1)
        if self.least.numel() == 0:
            self.least.resize_(least.shape)
        else:
            least = torch.minimum(least, self.least)
        self.least.copy_(least)
        return self.b(h - self.least)


def test_a_buffer_that_the_first_call_resizes_says_to_run_the_model_once() -> None:
    model, x = Observed(), torch.randn(4, 6)
    with pytest.raises(
        UnsupportedError, match=r"gives the buffer 'least' another size, \[3\] where it has \[0\].* once"
    ):
        prepare_split(model, (x,), split="percent:75")
    assert model.least.shape == (0,)
    model(x)
    runtime = prepare_split(model, (x,), split="percent:75")
    assert torch.equal(model(x), runtime.run_suffix(runtime.run_prefix(x)))
