"""A call that changes to a path which is known goes on from its question, without an error, and asks no guard twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, SplitRuntime, SplitSpec
from ariadne.compare import difference
from ariadne.errors import ModuleError, WitnessError
from ariadne.guards.further import enter_alike
from ariadne.guards.versions import VERSION
from ariadne.runtime.moved import Moves
from ariadne.segment import Halted
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_twins import same, seeded


class Net(nn.Module):
    """(B, 6) to (B, 6), by `left` or `right`, whichever the numbers call for."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.left, self.right, self.leave = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        h = self.left(h).relu() if h.sum() > 0 else self.right(h).sigmoid() * 2
        found: Tensor = self.leave(h)
        return found


class Exits(Net):
    """The same with a second question, which one path alone asks."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        if h.sum() > 0:
            h = self.left(h)
            if h[0, 0] > 0:
                return h
        found: Tensor = self.leave(h)
        return found


def prepared(kind: type[Net], boundary: str) -> tuple[Net, SplitRuntime, list[Tensor]]:
    """A split whose paths are all known, and inputs that take them in turn."""
    torch.manual_seed(0)
    model, inputs = kind().eval(), [seeded((3, 6), seed) for seed in range(6)]
    runtime = prepare_split(model, (inputs[0],), split=SplitSpec(boundary), more_examples=[(x,) for x in inputs[1:]])
    assert isinstance(runtime, SplitRuntime)
    for _ in range(2):
        for x in inputs:
            runtime.run_suffix(runtime.run_prefix(x))
    return model, runtime, inputs


@pytest.mark.parametrize(("kind", "boundary"), [(Net, "after:enter"), (Net, "percent:70"), (Exits, "after:enter")])
def test_a_call_that_changes_to_a_known_path_raises_nothing_on_the_way(
    kind: type[Net], boundary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runtime, inputs = prepared(kind, boundary)
    made: list[Any] = []
    init = WitnessError.__init__

    def counted(self: Any, *args: Any) -> None:
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(WitnessError, "__init__", counted)
    with torch.no_grad():
        for x in (*inputs, *inputs[::-1]):
            same(model(x), runtime.run_suffix(runtime.run_prefix(x)))
    assert not made
    assert len({id(v) for v in runtime._variants}) > 1


def test_the_segments_of_inference_and_training_differ_in_what_a_question_does() -> None:
    _, runtime, inputs = prepared(Net, "percent:70")
    variant: Any = runtime._now[False]
    others = [x for x in inputs if variant.prefix.halting(*variant.enter((x,), {})).__class__ is Halted]
    halted = variant.prefix.halting(*variant.enter((others[0],), {}))
    assert {name for name, value in halted.there.items() if isinstance(value, Tensor)}
    with pytest.raises(WitnessError) as raised:
        variant.prefix(*variant.enter((others[0],), {}))
    question = halted.question(variant.plan)
    assert str(question) == str(raised.value)
    assert (question.at, question.found, question.plan) == (raised.value.at, raised.value.found, variant.plan)


def write(model: Net) -> None:
    with torch.no_grad():
        model.enter.weight.mul_(1.5)


def replaced(model: Net) -> None:
    model.enter.weight = nn.Parameter(model.enter.weight.detach().clone())


def swapped(model: Net) -> None:
    model.enter.__dict__["_parameters"]["bias"] = nn.Parameter(torch.zeros(6))


@pytest.mark.parametrize("change", [write, replaced, swapped])
def test_state_of_the_prefix_that_moves_before_a_suffix_on_another_path_is_told(change: Callable[[Net], None]) -> None:
    model, runtime, inputs = prepared(Net, "after:enter")
    boundary = runtime.run_prefix(inputs[0])
    assert not boundary._before.moved()
    change(model)
    assert boundary._before.moved()


def test_what_is_kept_of_the_state_is_looked_up_anew_once_a_table_was_written() -> None:
    model, runtime, inputs = prepared(Net, "after:enter")
    moves: Any = runtime._now[False].prefix_moves
    assert isinstance(moves, Moves)
    first = moves.seen(inputs[:1], ((inputs[0],), {}))
    kept = moves.seen(inputs[:1], ((inputs[0],), {}))
    assert (kept.state is first.state) is (
        VERSION is not None
    )  # without versions of dicts it is looked up at each call
    assert first.stands(kept)
    replaced(model)
    again = moves.seen(inputs[:1], ((inputs[0],), {}))
    assert again.state is not first.state
    assert not first.stands(again)


def test_entrances_of_paths_are_alike_and_those_of_other_inputs_are_not() -> None:
    _, runtime, _ = prepared(Net, "after:enter")
    entrances: Any = [variant.enter for variant in runtime._variants]
    one, other = sorted(entrances, key=lambda enter: -len(enter.__globals__["mark_names"]))
    assert one is not other
    assert enter_alike(one, other)
    others: Any = prepare_split(runtime.model, (seeded((3, 7, 6), 0),), split=SplitSpec("after:enter"))
    assert not enter_alike(one, others._now[False].enter)
    assert not enter_alike(one, lambda args, kwargs: None)
    names = other.__globals__["mark_names"]
    for key, value in (("dtype0", torch.float64), ("mark_names", names | {"a mark"}), ("marks0", {"a": 1})):
        was, other.__globals__[key] = other.__globals__[key], value
        assert not enter_alike(one, other)
        other.__globals__[key] = was
    assert enter_alike(one, other)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def tripled(x: Tensor) -> Tensor:
    return x * 3


class ByFunctions(nn.Module):
    """A function on each path."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to the same."""
        h = self.a(x)
        found: Tensor = self.c(self.b(doubled(h) if h.sum() > 0 else tripled(h)))
        return found


@pytest.mark.parametrize("at", ["after:a", "after:b"])
def test_a_function_of_the_path_that_a_call_goes_on_in_is_asked_for(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = ByFunctions().eval()
    inputs = {bool(model.a(x).sum() > 0): x for x in torch.randn(32, 2, 4)}
    up, down = inputs[True], inputs[False]
    split = prepare_split(model, (up,), split=at, more_examples=[(down,)])
    for x in (up, down, up, down, up):
        with torch.no_grad():
            assert torch.equal(split.run_suffix(split.run_prefix(x)), model(x))
    monkeypatch.setattr(tripled, "__code__", (lambda x: x * 5).__code__)
    with contextlib.suppress(ModuleError), torch.no_grad():  # or refused by name
        assert torch.equal(split.run_suffix(split.run_prefix(down)), model(down))


class Loudest(nn.Module):
    """Its path follows which of its features is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(6, 8), nn.Linear(8, 4)
        self.a.weight.data, self.a.bias.data = torch.eye(8)[:, :6].clone(), torch.zeros(8)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        h = self.a(x).relu()
        return self.o(h), int(h.sum(0).argmax())


def test_paths_learnt_by_calls_are_known_to_boundaries_that_come_as_bytes() -> None:
    torch.manual_seed(0)
    model = Loudest().eval()
    inputs = [torch.eye(6)[k : k + 1] * 5 for k in range(3)]
    runtime = prepare_split(model, (inputs[0],), split="after:a")
    for x in inputs:
        runtime.run_suffix(runtime.run_prefix(x))
    assert len(runtime.plans) == 3
    for x in (*inputs, *reversed(inputs)):
        sent = BoundaryPayload.from_bytes(runtime.run_prefix(x).to_bytes())
        assert difference(model(x), runtime.run_suffix(sent)) is None
