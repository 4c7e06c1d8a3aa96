"""Modules that are handed to a half, since it calls them: whose tensors they have, how they are copied, and what is refused."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ariadne
from ariadne import Half, prepare_split
from ariadne.errors import HalfError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Gate(nn.Module):
    """A layer, statistics, a count and a branch on data."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner, self.norm, self.calls = nn.Linear(width, width), nn.BatchNorm1d(width), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.inner(x)) if float(x.detach().sum()) > -100 else x


class Net(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.gate, self.leave, self.again = nn.Linear(4, 8), ariadne.opaque(Gate()), nn.Linear(8, 2), again

    def forward(self, x: Tensor) -> Tensor:
        h = self.gate(self.enter(x).tanh())
        return self.leave(self.gate(h.sigmoid()) if self.again else h.sigmoid())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.middle = nn.Linear(4, 4), nn.Linear(4, 4)

    def part(self, h: Tensor) -> Tensor:
        return torch.tanh(self.middle(h))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.part, self.enter(x), use_reentrant=True).sigmoid()
        return found


def saved(model: nn.Module, folder: Path, split: str = "after:enter") -> tuple[Any, Path]:
    runtime = prepare_split(model, (X,), split=split)
    runtime.save(folder / "suffix", side="suffix")
    return runtime, folder / "suffix"


def step(half: Half, boundary: Any) -> Any:
    loss, back = half.train_suffix(boundary, loss_fn=lambda output, _: output.square().sum())
    return loss, back, {n: p.grad for n, p in half.named_parameters()}


def test_it_has_the_half_s_tensors_and_a_copy_has_others(tmp_path: Path) -> None:
    model = Net()
    runtime, path = saved(model, tmp_path)
    gate = Gate()
    half = ariadne.load(path, modules={"gate": gate})
    assert gate.inner.weight is half.get_parameter("gate.inner.weight")
    again = copy.deepcopy(half)
    boundary = runtime.run_prefix(X)
    expected = runtime.run_suffix(boundary)
    assert torch.equal(half.run_suffix(boundary), expected)
    with torch.no_grad():
        half.get_parameter("gate.inner.weight").zero_()
        half.get_parameter("gate.inner.bias").fill_(3)
    boundary = runtime.run_prefix(X + 1)
    count = gate.calls
    copied, changed = again.run_suffix(boundary), half.run_suffix(boundary)
    assert gate.calls == count + 1
    assert not torch.equal(copied, changed)
    with torch.no_grad():
        twin = Net()
        assert torch.equal(copied, twin(X + 1))


def test_it_trains_goes_to_another_type_and_is_saved_again(tmp_path: Path) -> None:
    model, twin = Net(), Net()
    runtime, path = saved(model, tmp_path)
    half = ariadne.load(path, modules={"gate": Gate()})
    boundary = runtime.run_training_prefix(X)
    sent = ariadne.BoundaryPayload.from_bytes(boundary.to_bytes())
    loss, _, found = step(half, sent)
    expected = twin(X).square().sum()
    expected.backward()
    assert torch.equal(loss, expected.detach())
    for name, p in twin.named_parameters():
        assert name.startswith("enter") or torch.equal(found[name], p.grad)
    half.save(tmp_path / "again")
    once_more = ariadne.load(tmp_path / "again", modules={"gate": Gate()})
    assert torch.equal(once_more.get_buffer("gate.norm.running_mean"), twin.gate.norm.running_mean)
    assert once_more.get_buffer("gate.norm.num_batches_tracked") == 1


def test_a_method_under_a_checkpoint_is_handed_over_by_its_name(tmp_path: Path) -> None:
    model, twin = Checkpointed(), Checkpointed()
    runtime, path = saved(model, tmp_path)
    allow = ["torch.utils.checkpoint:CheckpointFunction"]
    with pytest.raises(HalfError, match=r"modules=\{'part': \.\.\.\}"):
        ariadne.load(path, allow=allow)
    half = ariadne.load(path, allow=allow, modules={"part": Checkpointed().part})
    boundary = runtime.run_training_prefix(X)
    loss, back, found = step(half, ariadne.BoundaryPayload.from_bytes(boundary.to_bytes()))
    runtime.backward_prefix(boundary, back)
    expected = twin(X).square().sum()
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert torch.equal(found["middle.weight"], twin.middle.weight.grad)
    assert torch.equal(model.enter.weight.grad, twin.enter.weight.grad)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    _, path = saved(Net(), tmp_path)
    taken = Gate()
    ariadne.load(path, modules={"gate": taken})
    for given, says in (
        ({}, "this half calls 'gate' of its model"),
        ({"gates": Gate()}, "this half calls 'gate' of its model"),
        ({"gate": torch.tanh}, "must be a module, or a method of one"),
        ({"gate": nn.Linear(8, 8)}, "has no module 'inner'"),
        ({"gate": Gate(4)}, r"has no parameter 'inner.weight' of shape \[8, 8\]"),
        ({"gate": taken}, "is of another half"),
    ):
        with pytest.raises(HalfError, match=says):
            ariadne.load(path, modules=given)


def test_what_both_sides_keep_something_in_is_refused(tmp_path: Path) -> None:
    runtime = prepare_split(Net(again=True).eval(), (X,), split="after:gate#1")
    for side in ("prefix", "suffix"):
        with pytest.raises(HalfError, match="keeps something in Python, and both sides of the cut call it"):
            runtime.save(tmp_path / side, side=side)


class Noisy(nn.Module):
    def __init__(self, both: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave, self.both = nn.Linear(4, 8), nn.Linear(8, 2), both
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        if self.both:
            h = h + torch.rand(8, generator=self.generator)
        h = h.tanh() + torch.rand(8, generator=self.generator)
        found: Tensor = self.leave(h)
        return found


def test_a_generator_goes_on_from_where_it_stood(tmp_path: Path) -> None:
    model = Noisy(False)
    runtime, path = saved(model, tmp_path, "after:enter")
    half = ariadne.load(path)
    other = copy.deepcopy(half)
    boundary = runtime.run_prefix(X)
    expected = [runtime.run_suffix(boundary) for _ in range(3)]
    found = [half.run_suffix(boundary)]
    half.save(tmp_path / "later")
    found += [half.run_suffix(boundary), ariadne.load(tmp_path / "later").run_suffix(boundary)]
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[1])
    assert torch.equal(other.run_suffix(boundary), expected[0])


def test_a_generator_of_both_sides_is_refused(tmp_path: Path) -> None:
    runtime = prepare_split(Noisy(True), (X,), split="cut:3")
    for side in ("prefix", "suffix"):
        with pytest.raises(HalfError, match=r"one torch.Generator of the model's own on both sides"):
            runtime.save(tmp_path / side, side=side)


def doubled(x: Tensor) -> Tensor:
    return x * 2


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that scripting is deprecated; packages go on using it
    scripted: Any = torch.jit.script(doubled)
    doubled = torch.jit.script(doubled)  # as a decorator does


class Scripted(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave, self.function = nn.Linear(4, 8), nn.Linear(8, 2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.function(self.enter(x).tanh()))


def test_a_scripted_function_is_named_by_where_it_stands(tmp_path: Path) -> None:
    model = Scripted(doubled)
    runtime = prepare_split(model, (X,), split="after:enter")
    runtime.save(tmp_path / "prefix", side="prefix")
    runtime.save(tmp_path / "suffix", side="suffix")
    first = ariadne.load(tmp_path / "prefix")
    with pytest.raises(HalfError, match=rf"allow=\['{__name__}:doubled'\]"):
        ariadne.load(tmp_path / "suffix")
    second = ariadne.load(tmp_path / "suffix", allow=[f"{__name__}:doubled"])
    with torch.no_grad():
        assert torch.equal(second.run_suffix(first.run_prefix(X)), model(X))


def test_one_that_stands_nowhere_by_its_name_is_refused(tmp_path: Path) -> None:
    runtime = prepare_split(Scripted(scripted), (X,), split="after:enter")
    with pytest.raises(HalfError, match="'doubled' can't be named in a file: no module has it under its own name"):
        runtime.save(tmp_path / "suffix", side="suffix")
