"""What the part before a cut leaves in the world, and what the suffix finds of it: from bytes, on other paths, in views."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, PythonSplit, SplitSpec, prepare_split
from ariadne.errors import BoundaryError, TrainingError
from ariadne.stopped.absent import Ghost

X = torch.linspace(-1, 1, 12).view(3, 4)
CALLS = 0
SEEN: list[int] = []


class Plain:
    """Holds what it is given."""

    at: Any


class Net(nn.Module):
    """Draws from Python's generator after the cut, so that no graph holds it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.cut, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.kept: Any = None

    def before(self, first: Tensor) -> Tensor:
        return first

    def after(self, h: Tensor, first: Tensor) -> Any:
        return self.last(h)

    def forward(self, x: Tensor) -> Any:
        first = self.before(self.first(x))
        return self.after(self.cut(first) * random.random(), first)


class KeepsAfter(Net):
    def after(self, h: Tensor, first: Tensor) -> Any:
        self.kept = [first, Plain()]
        self.kept[1].at = first
        return self.last(h)


class KeepsMuchAfter(Net):
    def before(self, first: Tensor) -> Tensor:
        self.wide = first.repeat(1, 400)
        return first

    def after(self, h: Tensor, first: Tensor) -> Any:
        self.kept = (1, self.wide)
        return self.last(h)


class GivesAnObject(Net):
    def after(self, h: Tensor, first: Tensor) -> Any:
        found = Plain()
        found.at = [self.last(h), first]
        return found


class WritesIntoTheOutput(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.cut(self.first(x))
        h.mul_(random.random())
        return self.last(h)


class AddsToItsList(Net):
    def before(self, first: Tensor) -> Tensor:
        self.kept = [1]
        return first

    def after(self, h: Tensor, first: Tensor) -> Any:
        self.kept.append(2)
        return self.last(h)


class WritesIntoWhatItKept(Net):
    def before(self, first: Tensor) -> Tensor:
        self.kept = first.new_zeros(3)
        return first

    def after(self, h: Tensor, first: Tensor) -> Any:
        self.kept.add_(1)
        return self.last(h)


class WritesIntoItsInput(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.cut(self.first(x)) * random.random()
        x.add_(1)
        return self.last(h)


class CountsOutside(Net):
    def before(self, first: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return first


class CountsInAGlobalList(Net):
    def before(self, first: Tensor) -> Tensor:
        SEEN.append(len(first))
        return first


class CountsOnItsClass(Net):
    calls = 0

    def before(self, first: Tensor) -> Tensor:
        type(self).calls += 1
        return first


class AsksAStaleView(Net):
    """A view whose memory was written into is looked at, and used later: its node is made at the use."""

    def after(self, h: Tensor, first: Tensor) -> Any:
        base = h * 1
        view = base[:, :8]
        base.mul_(1.7)
        scale = 3.3 if bool((view > 1e9).any()) else 2.3
        return self.last(base.sin() * scale + view.exp() * 0.37 + base.cos() * 1.1)


class UsesTheHeadBefore(Net):
    """On another path the part before the cut uses what the example used after it alone."""

    def forward(self, x: Tensor) -> Any:
        first = self.first(x)
        if x.sum() < -100:
            return self.last(first) * random.random()
        return self.last(self.cut(first)) * random.random()


def split(model: nn.Module, trainable: bool = False) -> PythonSplit:
    spec = SplitSpec("after:cut", trainable=trainable, max_paths=1)
    made = prepare_split(model, (X,), split=spec, fallback="python")
    assert isinstance(made, PythonSplit)
    return made


def total(output: Any, _: Any = None) -> Tensor:
    return (output * torch.arange(output.numel()).view(output.shape).cos()).sum()


def sent(boundary: BoundaryPayload) -> BoundaryPayload:
    return BoundaryPayload.from_bytes(boundary.to_bytes())


def held(value: Any) -> list[Tensor]:
    """The tensors in a value, those of objects too."""
    if isinstance(value, Tensor):
        assert not isinstance(value, Ghost)
        return [value]
    if isinstance(value, Plain):
        return held(value.at)
    return [t for v in value for t in held(v)] if isinstance(value, (list, tuple)) else []


@pytest.mark.parametrize("kind", [KeepsAfter, KeepsMuchAfter, GivesAnObject])
def test_no_stand_in_without_data_is_left_on_the_model_or_in_what_it_gives(kind: type[Net]) -> None:
    model, twin = kind().eval(), kind().eval()
    runtime = split(model)
    assert runtime.stays == ""
    for x in (X, X + 1):
        random.seed(1)
        with torch.no_grad():
            theirs = twin(x)
        random.seed(1)
        mine = runtime.run_suffix(sent(runtime.run_prefix(x)))
        for a, b in zip(held([theirs, twin.kept]), held([mine, model.kept]), strict=True):
            assert torch.equal(a, b)


def test_a_write_into_the_output_of_the_cut_can_be_sent_and_trained() -> None:
    model, twin = WritesIntoTheOutput(), WritesIntoTheOutput()
    runtime = split(model, trainable=True)
    assert runtime.stays == ""
    random.seed(1)
    total(twin(X)).backward()
    random.seed(1)
    boundary = runtime.run_training_prefix(X)
    _, gradients = runtime.train_suffix(sent(boundary), loss_fn=total)
    runtime.backward_prefix(boundary, gradients)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (AddsToItsList, "changes what 'kept' holds"),
        (WritesIntoWhatItKept, "changes what 'kept' holds"),
        (WritesIntoItsInput, "writes into an input"),
        (CountsOutside, "'CALLS of the globals"),
        (CountsInAGlobalList, "the global 'SEEN'"),
        (CountsOnItsClass, "'calls of CountsOnItsClass'"),
    ],
)
def test_what_a_skipped_part_would_do_twice_or_elsewhere_is_named(kind: type[Net], cause: str) -> None:
    runtime = split(kind().eval())
    assert cause in runtime.stays
    boundary = runtime.run_prefix(X.clone())
    with pytest.raises(BoundaryError, match="no bytes can be made"):
        boundary.to_bytes()
    runtime.run_suffix(boundary)


class PutsIntoItsDict(Net):
    """A state that is handed in, as a cell's, and that is written where the inputs are large enough."""

    def forward(self, x: Tensor, state: Any, only: float = -1e9) -> Any:
        h = self.cut(self.first(x)) * random.random()
        if x.sum() > only:
            self.put(state, h)
        return self.last(h)

    def put(self, state: Any, h: Tensor) -> None:
        state["h"] = h


class AddsToItsInput(PutsIntoItsDict):
    def put(self, state: Any, h: Tensor) -> None:
        state["all"].append(h)


@pytest.mark.parametrize("kind", [PutsIntoItsDict, AddsToItsInput])
def test_what_is_put_into_a_container_among_the_inputs_after_the_cut_stays_in_the_process(kind: type[Net]) -> None:
    def state() -> dict[str, Any]:
        return {"h": X, "all": [X]}

    spec = SplitSpec("after:cut", trainable=False, max_paths=1)
    runtime = prepare_split(kind().eval(), (X, state()), split=spec, fallback="python")
    assert isinstance(runtime, PythonSplit)
    assert "changes what a list or a dict among its inputs holds" in runtime.stays
    mine = state()
    boundary = runtime.run_prefix(X, mine)
    with pytest.raises(BoundaryError, match="no bytes can be made"):
        boundary.to_bytes()
    runtime.run_suffix(boundary)
    assert mine["h"] is not X or len(mine["all"]) == 2
    runtime = prepare_split(kind().eval(), (X, state(), 100.0), split=spec, fallback="python")
    assert isinstance(runtime, PythonSplit)
    assert runtime.stays == ""
    runtime.run_suffix(sent(runtime.run_prefix(X, state(), 100.0)))
    with pytest.raises(BoundaryError, match="changes what a list or a dict among its inputs holds"):
        runtime.run_suffix(sent(runtime.run_prefix(X + 100, state(), 100.0)))


def test_a_view_whose_memory_was_written_into_is_asked_no_sooner_than_in_the_model() -> None:
    model, twin = AsksAStaleView(), AsksAStaleView()
    runtime = split(model, trainable=True)
    for seed in range(8):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        model.zero_grad()
        twin.zero_grad()
        random.seed(1)
        total(twin(x)).backward()
        random.seed(1)
        boundary = runtime.run_training_prefix(x)
        _, gradients = runtime.train_suffix(boundary, loss_fn=total)
        runtime.backward_prefix(boundary, gradients)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)


def test_a_parameter_that_another_path_uses_on_the_other_side_is_not_stepped_too_early() -> None:
    runtime = split(UsesTheHeadBefore(), trainable=True)
    optimizer = torch.optim.SGD(runtime.suffix_parameters(), lr=0.1)
    boundary = runtime.run_training_prefix(X - 100)
    with pytest.raises(TrainingError, match="would step before the prefix has added its gradient"):
        runtime.train_suffix(boundary, loss_fn=total, optimizer=optimizer)


class UsesTheHeadInTheSkip(Net):
    def forward(self, x: Tensor) -> Any:
        first = self.first(x)
        if x.sum() < -100:
            first = first + self.last.weight.sum()
        return self.last(self.cut(first)) * random.random()


def test_a_prefix_that_uses_a_parameter_of_a_suffix_that_is_trained_elsewhere_is_refused() -> None:
    runtime = split(UsesTheHeadInTheSkip(), trainable=True)
    boundary = runtime.run_training_prefix(X - 100)
    with pytest.raises(TrainingError, match="the prefix uses a parameter that the suffix alone used"):
        runtime.backward_prefix(boundary, {"cut": torch.ones(3, 8)})


class UsesItsInputAfter(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return self.last(self.cut(self.first(x)) * random.random() + x.sum() + (0 if y is None else y.sum()))


def test_inputs_with_a_graph_of_their_own_are_refused_where_it_would_be_walked_twice_or_in_another_order() -> None:
    for _ in range(50):
        torch.ones(1, requires_grad=True).exp()  # the nodes of this thread have higher numbers than those of forward's
    runtime = split(UsesItsInputAfter(), trainable=True)
    made = X.clone().requires_grad_().exp()
    boundary = runtime.run_training_prefix(made)
    with pytest.raises(TrainingError, match="uses an input that was computed outside"):
        runtime.train_suffix(boundary, loss_fn=total)
    with pytest.raises(TrainingError, match="computed from one another"):
        runtime.run_training_prefix(made, made.sin())


class Targets(nn.Module):
    """At its first call it copies a module, as a target network is made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.target: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.target is None:
            self.target = copy.deepcopy(self.a)
        found: torch.Tensor = self.c(self.b(self.a(x) - self.target(x).detach()))
        return found


def test_a_module_that_forward_copies_holds_nothing_of_ours() -> None:
    torch.manual_seed(0)
    model, x = Targets(), torch.randn(3, 8)
    whole = copy.deepcopy(model)
    runtime = prepare_split(model, (x,), split="after:a", fallback="python")
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))
    assert vars(model.target).keys() == vars(whole.target).keys()
