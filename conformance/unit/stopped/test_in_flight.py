"""Boundaries of a Python split beside each other, and what their forwards put on the model."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, prepare_split
from ariadne.errors import BoundaryError


class _Keeps(nn.Module):
    """What the part before the cut puts on the model is used after it."""

    def __init__(self, into_list: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept: Any = [None] if into_list else None

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.kept, list):
            self.kept[0] = x * 2
        else:
            self.kept = x * 2
        h: Tensor = self.last(self.first(x) * random.random())
        return h + (self.kept[0] if isinstance(self.kept, list) else self.kept)


@pytest.mark.parametrize("into_list", [False, True])
def test_what_a_prefix_put_on_the_model_must_be_there_when_its_forward_goes_on(into_list: bool) -> None:
    model = _Keeps(into_list).eval()
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    split = prepare_split(model, (x,), split="after:first", fallback="python")
    first, second = split.run_prefix(x), split.run_prefix(y)
    with pytest.raises(BoundaryError, match="into which the prefix had put something"):
        split.run_suffix(first)
    with torch.no_grad():
        random.seed(0)
        whole = model(y)
        random.seed(0)
        assert torch.equal(split.run_suffix(split.run_prefix(y)), whole)
    with pytest.raises(BoundaryError, match="into which the prefix had put something"):
        split.run_suffix(second)
    first, second = split.run_training_prefix(x), split.run_training_prefix(y)
    with pytest.raises(BoundaryError, match="into which the prefix had put something"):
        split.train_suffix(first, loss_fn=lambda output, _: output.sum())


def test_bytes_are_read_by_the_class_of_the_boundary_that_wrote_them() -> None:
    model, x = _Keeps(False).eval(), torch.randn(2, 4)
    split = prepare_split(model, (x,), split="after:first", fallback="python")
    boundary = split.run_prefix(x)
    assert type(type(boundary).from_bytes(boundary.to_bytes())) is BoundaryPayload


class _Writes(nn.Module):
    """What the part before the cut reads, the part after it changes."""

    kept_by_the_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.number, self.items, self.table = 1, [1.0], {"k": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(self.first(x) * self.read())
        self.write()
        return h * (random.random() < 2)

    def read(self) -> Any:
        raise NotImplementedError

    def write(self) -> None:
        raise NotImplementedError


class _Number(_Writes):
    def read(self) -> Any:
        return self.number

    def write(self) -> None:
        self.number += 1


class _Item(_Writes):
    def read(self) -> Any:
        return self.items[0]

    def write(self) -> None:
        self.items[0] += 1


class _Entry(_Writes):
    def read(self) -> Any:
        return self.table["k"]

    def write(self) -> None:
        self.table["k"] += 1


FACTOR = 1.0


class _Global(_Writes):
    def read(self) -> Any:
        return FACTOR

    def write(self) -> None:
        global FACTOR
        FACTOR = FACTOR + 1


class _OfTheClass(_Writes):
    def read(self) -> Any:
        return type(self).kept_by_the_class

    def write(self) -> None:
        type(self).kept_by_the_class += 1


def read_beside(model: Any) -> Any:
    return model.number


class _Beside(_Writes):
    """A helper reads it, within a decorated forward; no method names it but to write."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        h = self.last(self.first(x) * read_beside(self))
        setattr(self, "num" + "ber", read_beside(self) + 1)
        return h * (random.random() < 2)


class _Decorated(_Writes):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        h = self.last(self.first(x) * self.number)
        self.number += 1
        return h * (random.random() < 2)


def afresh(model: _Writes) -> None:
    model.number, model.items[0], model.table["k"] = 1, 1.0, 1.0
    globals()["FACTOR"] = _OfTheClass.kept_by_the_class = 1.0


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("kind", [_Number, _Item, _Entry, _Global, _OfTheClass, _Beside, _Decorated])
def test_a_prefix_that_did_not_see_what_another_suffix_changed_in_python_is_told(
    kind: type[_Writes], sent: bool
) -> None:
    model, calls = kind().eval(), [torch.randn(2, 4) for _ in range(2)]
    split = prepare_split(model, (calls[0],), split="after:last", fallback="python")
    afresh(model)
    whole = [model(x) for x in calls]
    afresh(model)

    def flying(x: Tensor) -> Any:
        boundary = split.run_prefix(x)
        return BoundaryPayload.from_bytes(boundary.to_bytes()) if sent else boundary

    first, second = map(flying, calls)
    assert torch.equal(split.run_suffix(first), whole[0])
    with pytest.raises(BoundaryError, match=r"another call, or you, changed .* after this boundary's prefix had run"):
        split.run_suffix(second)
    third = flying(calls[1])
    assert torch.equal(split.run_suffix(third), whole[1])  # one call at a time goes on from call to call
    if sent:
        assert torch.equal(split.run_suffix(third), whole[1])


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("kind", [_Number, _Item, _Global, _Beside])
def test_a_call_of_the_whole_model_between_the_sides_of_another_is_told(kind: type[_Writes], sent: bool) -> None:
    model, calls = kind().eval(), [torch.randn(2, 4) for _ in range(2)]
    split = prepare_split(model, (calls[0],), split="after:last", fallback="python")
    afresh(model)
    with torch.no_grad():
        first = model(calls[0])
    afresh(model)
    boundary = split.run_prefix(calls[0])
    boundary = BoundaryPayload.from_bytes(boundary.to_bytes()) if sent else boundary
    with torch.no_grad():
        model(calls[1])
    with pytest.raises(BoundaryError, match=r"another call, or you, changed .* after this boundary's prefix had run"):
        split.run_suffix(boundary)
    afresh(model)  # and it stands again as it stood
    assert torch.equal(split.run_suffix(boundary), first)


@pytest.mark.parametrize("kind", [_Number, _Item])
def test_a_suffix_runs_again_until_something_else_changes_what_it_changed_itself(kind: type[_Writes]) -> None:
    model, x = kind().eval(), torch.randn(2, 4)
    split = prepare_split(model, (x,), split="after:last", fallback="python")
    boundary = split.run_prefix(x)
    boundary = BoundaryPayload.from_bytes(boundary.to_bytes())
    assert torch.equal(split.run_suffix(boundary), split.run_suffix(boundary))
    model(x)
    with pytest.raises(BoundaryError, match="another call, or you, changed"):
        split.run_suffix(boundary)


class _Shadows(nn.Module):
    """An attribute of a name that a global of its file has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.shadowed, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shadowed(x) * random.random())  # type: ignore[no-any-return]


class _Loads(_Shadows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * len(shadowed))


class _Asks(_Shadows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * len(globals()["shadowed"]))


class _OfTheModule(_Shadows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * len(sys.modules[__name__].shadowed))


shadowed: list[int] = [1]


@pytest.mark.parametrize("kind", [_Shadows, _Loads, _Asks, _OfTheModule])
def test_a_global_counts_where_code_loads_it_and_not_where_an_attribute_has_its_name(kind: type[_Shadows]) -> None:
    model, x = kind().eval(), torch.randn(2, 4)
    split = prepare_split(model, (x,), split="after:shadowed", fallback="python")
    boundary = split.run_prefix(x)
    shadowed.append(1)
    try:
        if kind is _Shadows:
            assert split.run_suffix(boundary).shape == (2, 4)
        else:
            with pytest.raises(BoundaryError, match=r"changed .*shadowed"):
                split.run_suffix(boundary)
    finally:
        shadowed.pop()


class _Anchors(nn.Module):
    """Makes its list of anchors anew in each call, of the same tensors, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.anchors: Any = [torch.ones(4), torch.ones(4)]
        self.sizes: Any = {"a": (1, [2])}

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.sizes["a"][0]
        self.anchors, self.sizes = [a.to(x.dtype) for a in self.anchors], {"a": (1, [2])}
        found: Tensor = self.last(h) + self.anchors[0] * random.random()
        return found


@pytest.mark.parametrize("sent", [False, True])
def test_a_list_that_each_call_makes_anew_of_the_same_keeps_no_boundary_from_being_in_flight(sent: bool) -> None:
    model = _Anchors().eval()
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    split = prepare_split(model, (x,), split="after:first", fallback="python")
    with torch.no_grad():
        random.seed(0)
        wholes = model(x), model(y)
        boundaries = [split.run_prefix(x), split.run_prefix(y)]
        if sent:
            boundaries = [BoundaryPayload.from_bytes(b.to_bytes()) for b in boundaries]
        random.seed(0)
        for boundary, whole in zip(boundaries, wholes, strict=True):
            assert torch.equal(split.run_suffix(boundary), whole)
        boundary = split.run_prefix(x)
        model.sizes = {"a": (1, [3])}
        with pytest.raises(BoundaryError, match="changed 'sizes' after this boundary's prefix"):
            split.run_suffix(boundary)


class _Collects(nn.Module):
    """Begins a list before the cut and fills it after: two in flight have a list each, which hold the same at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.outs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.outs = []
        h = self.first(x) * random.random()
        self.outs.append(self.last(h))
        return torch.stack([*self.outs]).sum(0)


def test_a_list_that_the_prefix_made_is_not_another_calls_because_both_are_empty() -> None:
    model = _Collects().eval()
    split = prepare_split(model, (torch.randn(2, 4),), split="after:first", fallback="python")
    with torch.no_grad():
        first, second = split.run_prefix(torch.randn(2, 4)), split.run_prefix(torch.randn(2, 4))
        with pytest.raises(BoundaryError, match="into which the prefix had put something"):
            split.run_suffix(first)
        split.run_suffix(second)


class _Holds(_Anchors):
    """Keeps its list in a variable over the cut, and adds to it after."""

    def forward(self, x: Tensor) -> Tensor:
        held = self.anchors
        h = self.first(x) * random.random()
        held.append(self.last(h))
        found: Tensor = sum(self.anchors) + h
        self.anchors = held[:2]
        return found


def test_a_list_of_the_same_that_took_the_place_of_one_that_forward_holds_makes_way_for_it() -> None:
    model, twin = _Holds().eval(), _Holds().eval()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, 4)
    split = prepare_split(model, (x,), split="after:first", fallback="python")
    with torch.no_grad():
        random.seed(0)
        whole = twin(x)
        random.seed(0)
        boundary = split.run_prefix(x)
        model.anchors = list(model.anchors)
        assert torch.equal(split.run_suffix(boundary), whole)


def test_what_is_written_into_a_list_that_the_prefix_made_is_noticed() -> None:
    model = _Collects().eval()
    split = prepare_split(model, (torch.randn(2, 4),), split="after:first", fallback="python")
    with torch.no_grad():
        boundary = split.run_prefix(torch.randn(2, 4))
        model.outs.append(torch.zeros(2, 4))
        with pytest.raises(BoundaryError, match="'outs', into which the prefix had put something"):
            split.run_suffix(boundary)
