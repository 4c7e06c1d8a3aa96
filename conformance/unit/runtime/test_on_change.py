"""A model that is changed between calls: each change is followed by a plan, or refused where that is asked for."""

from __future__ import annotations

import copy
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ariadne.runtime.plans
from ariadne import SplitRuntime, SplitSpec, prepare_split
from ariadne.errors import ModuleError, SpecError, TrainingError


class Net(nn.Module):
    """Something to change on each side of a cut in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.25)
        self.b, self.c, self.extra = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 8)
        self.tau, self.late, self.early = 1.0, False, False

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 4) -> (batch, 2), or as the head has it."""
        h = self.drop(self.norm(self.a(x)).relu())
        h = self.b(h.tanh() if self.early else h) / self.tau
        return self.c(h.sin() if self.late else h)


def _set(path: str, **values: Any) -> Callable[[Net], None]:
    def change(m: Net) -> None:
        for name, value in values.items():
            setattr(m.get_submodule(path), name, value)

    return change


def _doubles(module: Any, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _plain(self: Net, x: Tensor) -> Tensor:
    return self.c(self.b(self.a(x)))


CHANGES: dict[str, Callable[[Net], Any]] = {
    "the mode": lambda m: m.train(not m.training),
    "the mode of a part": lambda m: m.norm.eval(),
    "a rate": _set("drop", p=0.75),
    "a number before the cut": _set("norm", eps=0.5),
    "a number after the cut": _set("", tau=0.5),
    "a flag before the cut": _set("", early=True),
    "a flag after the cut": _set("", late=True),
    "a head": lambda m: setattr(m, "c", nn.Linear(8, 3)),
    "a wrapped head": lambda m: setattr(m, "c", nn.Sequential(m.c, nn.Tanh())),
    "a hook before the cut": lambda m: m.a.register_forward_hook(_doubles),
    "a hook after the cut": lambda m: m.c.register_forward_hook(_doubles),
    "a bias that is gone": lambda m: setattr(m.b, "bias", None),
    "a part that is frozen": lambda m: m.a.requires_grad_(False),
    "forward": lambda m: setattr(m, "forward", types.MethodType(_plain, m)),
}


def _pair(boundary: str = "50%", train: bool = True, **options: Any) -> tuple[Net, Net, Any]:
    torch.manual_seed(0)
    whole = Net().train(train)
    split = copy.deepcopy(whole)
    spec = SplitSpec(boundary, trainable=True, dynamic_batch=(1, 8))
    return whole, split, prepare_split(split, (torch.randn(3, 4),), split=spec, **options)


def _step(runtime: SplitRuntime, x: Tensor, **options: Any) -> Tensor:
    boundary = runtime.run_training_prefix(x)
    loss, gradients = runtime.train_suffix(boundary, loss_fn=lambda output, _: output.square().mean(), **options)
    runtime.backward_prefix(boundary, gradients)
    return loss


def _equal(whole: Net, split: Net, runtime: SplitRuntime, batch: int) -> None:
    """A call and a step of both, with all that they leave."""
    x = torch.randn(batch, 4, generator=torch.Generator().manual_seed(batch))
    torch.manual_seed(batch)
    with torch.no_grad():
        want = whole(x)
    torch.manual_seed(batch)
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), want)
    torch.manual_seed(batch)
    loss = whole(x).square().mean()
    loss.backward()
    torch.manual_seed(batch)
    assert torch.equal(_step(runtime, x), loss)
    for (name, p), (_, q) in zip(whole.named_parameters(), split.named_parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    assert all(map(torch.equal, whole.buffers(), split.buffers()))


def _change(change: Callable[[Net], Any], *models: Net) -> None:
    for model in models:
        torch.manual_seed(1)
        change(model)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_change_is_followed(name: str) -> None:
    """At two batches, in a call and a step; and taken back where it can be."""
    whole, split, runtime = _pair()
    _change(CHANGES[name], whole, split)
    _equal(whole, split, runtime, 2)
    captured = len(runtime.plans)
    assert captured > 1 or name in ("a part that is frozen", "a bias that is gone")
    _equal(whole, split, runtime, 5)
    assert len(runtime.plans) == captured, "one plan serves both batches"


@pytest.mark.parametrize("name", sorted(set(CHANGES) - {"a part that is frozen", "a bias that is gone"}))
def test_a_change_is_refused_where_that_is_asked_for(name: str) -> None:
    """By the side that reads it, and before that has run."""
    _, split, runtime = _pair(on_change="refuse")
    _change(CHANGES[name], split)
    with pytest.raises(ModuleError):
        runtime.run_suffix(runtime.run_prefix(torch.randn(2, 4)))
    assert len(runtime.plans) == 1


def test_changes_one_after_the_other_and_back() -> None:
    """Each on top of those before; a known mode captures nothing."""
    whole, split, runtime = _pair(train=False)
    for name in ("a number after the cut", "the mode", "a flag before the cut", "a hook after the cut"):
        _change(CHANGES[name], whole, split)
        _equal(whole, split, runtime, 3)
    counts = []
    for _ in range(4):
        _change(CHANGES["the mode"], whole, split)
        _equal(whole, split, runtime, 2)
        counts.append(len(runtime.plans))
    assert counts[0] == counts[-1]


@pytest.mark.parametrize("name", ["a number after the cut", "the mode", "a flag before the cut"])
def test_a_change_between_prefix_and_suffix_is_refused(name: str) -> None:
    """The prefix ran by a plan of the model as it was."""
    _, split, runtime = _pair("after:norm")
    boundary = runtime.run_prefix(torch.randn(2, 4))
    _change(CHANGES[name], split)
    if name == "a flag before the cut":  # which is the suffix's: the cut is before it
        assert "norm" in (runtime.candidate.after or "")
    with pytest.raises(ModuleError):
        runtime.run_suffix(boundary)


def test_a_boundary_as_bytes_finds_the_plan_of_the_model_as_it_is() -> None:
    """Where two plans are alike but for what they rest on, the newer one's guards may hold alone."""
    _, split, runtime = _pair(train=False)
    x = torch.randn(2, 4)
    split.extra.train()
    split.norm.momentum = 0.5  # read in training alone
    runtime.run_prefix(x)
    boundary = type(runtime.run_prefix(x)).from_bytes(runtime.run_prefix(x).to_bytes())
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(boundary), split(x))


def test_a_parameter_that_neither_side_read_is_the_suffixs_and_refused_before_the_cut() -> None:
    """It was the model's when the sides' parameters were asked for."""
    _, split, runtime = _pair()
    x = torch.randn(2, 4)
    sides = runtime.prefix_parameters(), runtime.suffix_parameters()
    assert [any(p is split.extra.weight for p in side) for side in sides] == [False, True]
    split.c = nn.Sequential(split.extra, split.c)
    _step(runtime, x)
    assert any(p is split.extra.weight for p in runtime.suffix_parameters())
    _, split, runtime = _pair()
    runtime.suffix_parameters()
    split.a = nn.Sequential(split.a, split.extra)
    with pytest.raises(TrainingError, match=r"'a\.1\.(weight|bias)' before the cut now.*would step it too early"):
        _step(runtime, x)
    runtime.run_suffix(runtime.run_prefix(x))  # which trains nothing
    _, split, runtime = _pair()
    split.c = nn.Sequential(split.extra, split.c)
    _step(runtime, x)
    assert any(p is split.extra.weight for p in runtime.suffix_parameters())


def test_parameters_are_told_once_a_call_has_met_the_module() -> None:
    """Before, it can't be told whose they are."""
    _, split, runtime = _pair()
    split.c = nn.Linear(8, 3)
    with pytest.raises(ModuleError, match=r"'c' was replaced since the last call with gradients.*runtime.learn"):
        runtime.suffix_parameters()
    runtime.learn((torch.randn(3, 4),))
    assert any(p is split.c.weight for p in runtime.suffix_parameters())


def test_a_cut_elsewhere_leaves_out_plans_of_modules_that_are_gone() -> None:
    """Those of the model as it is go along."""
    whole, split, runtime = _pair()
    _change(lambda m: setattr(m, "late", True), whole, split)
    _equal(whole, split, runtime, 2)
    known = len(runtime.plans)
    again = runtime.resplit("after:b")
    _equal(whole, split, again, 2)
    assert len(again.plans) == known


def test_a_half_is_saved_once_a_call_has_met_the_change(tmp_path: Any) -> None:
    """A file holds the plans that hold now."""
    whole, split, runtime = _pair()
    whole.eval(), split.eval()
    with pytest.raises(ModuleError, match="call the split once"):
        runtime.save(tmp_path / "half.ariadne", side="prefix")
    runtime.learn((torch.randn(3, 4),))
    runtime.save(tmp_path / "half.ariadne", side="prefix")


def test_many_changes_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with what changed last."""
    monkeypatch.setattr(ariadne.runtime.plans, "MANY_CHANGES", 3)
    _, split, runtime = _pair(train=False)
    x = torch.randn(2, 4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(5):
            split.tau = 1.0 + i / 8
            out = runtime.run_suffix(runtime.run_prefix(x))
            assert torch.equal(out, split(x).detach())
    found = [str(w.message) for w in told if "was changed between calls" in str(w.message)]
    assert len(found) == 1
    assert "attribute 'tau' of the model was" in found[0]


def test_what_on_change_may_be() -> None:
    """Anything else is an error, and a cut elsewhere may be asked for the other."""
    with pytest.raises(SpecError, match=r"on_change is one of 'capture', 'refuse'; found 'ignore'"):
        _pair(on_change="ignore")
    _, split, runtime = _pair()
    strict = runtime.resplit(on_change="refuse")
    split.tau = 0.5
    with pytest.raises(ModuleError, match="attribute 'tau'"):
        strict.joined(torch.randn(2, 4))
    runtime.joined(torch.randn(2, 4))


class Masked(nn.Module):
    """A mask that the first call makes of a number, and a dict that each call writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(4, 4), nn.Linear(4, 2), 1.0
        self.mask: Tensor | None = None
        self.stats: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 4) -> (batch, 2)."""
        h = self.a(x)
        if self.mask is None:
            self.mask = torch.linspace(0, 1, 4) * self.scale
        self.stats["most"] = h.detach().max()
        return self.b((h * self.mask).relu()) * self.scale


def test_what_a_first_call_made_of_a_number_is_not_made_of_another() -> None:
    """The model keeps the mask of its first call, and a new plan would make another."""
    model, x = Masked(), torch.randn(3, 4)
    runtime = prepare_split(model, (x,), split="after:a")
    runtime.run_suffix(runtime.run_prefix(x))
    model.scale = 2.0
    with pytest.raises(ModuleError, match="fills the attribute 'mask' of the model at its first call"):
        runtime.run_prefix(x)


class Gated(nn.Module):
    """A layer that a flag adds."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.a, self.extra, self.b, self.on = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2), on

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """(batch, 4) -> (batch, 2)."""
        h = self.a(self.extra(x)) if self.on else self.a(x)
        return self.b(h if scale is None else h * scale)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_a_parameter_in_no_optimizer_is_refused_by_whatever_plan(known: bool, beside: bool) -> None:
    """Also by one for another kind of inputs. One that a plan read before the parameters were asked for is among them."""
    model, x = Gated(known), torch.randn(3, 4)
    runtime = prepare_split(model, (x,), split=SplitSpec("after:a", trainable=True))
    model.on = False
    _step(runtime, x)
    sides = runtime.prefix_parameters(), runtime.suffix_parameters()
    assert [any(p is model.extra.weight for p in side) for side in sides] == [known, not known]
    model.on = True
    given = {"scale": torch.ones(3, 1)} if beside else {}
    if known:
        runtime.run_training_prefix(x, **given)
        return
    with pytest.raises(TrainingError, match=r"'extra\.(weight|bias)' before the cut now.*would step it too early"):
        runtime.run_training_prefix(x, **given)
    runtime.learn(((x,), given))
    with pytest.raises(TrainingError, match="would step it too early"):
        runtime.run_training_prefix(x, **given)
    assert any(p is model.extra.weight for p in runtime.prefix_parameters())
    runtime.run_training_prefix(x, **given)


def test_copies_and_other_cuts_after_a_change_know_their_plans_apart() -> None:
    """Of two modes, and of a module that was replaced by another of its shape or of another."""
    for change in (CHANGES["the mode"], CHANGES["a head"], CHANGES["a wrapped head"]):
        whole, split, runtime = _pair()
        _equal(whole, split, runtime, 2)
        _change(change, whole, split)
        _equal(whole, split, runtime, 3)
        copied = copy.deepcopy(runtime)
        _equal(copy.deepcopy(whole), copied.model, copied, 2)
        _equal(whole, split, runtime.resplit("after:b"), 2)


def test_a_python_split_knows_parameters_by_where_they_stand() -> None:
    """A new head is its old one's side's; of what stood nowhere the example tells nothing."""
    whole, split, _ = _pair(train=False)
    whole, twin = Draws(whole), Draws(split)
    x = torch.randn(3, 4)
    runtime = prepare_split(twin, (x,), split=SplitSpec("after:net.b", trainable=True), fallback="python")
    head, split.c = split.c, nn.Sequential(split.c)  # the same one by another name
    assert any(p is head.weight for p in runtime.suffix_parameters())
    split.c = nn.Linear(8, 2)
    whole.net.c = copy.deepcopy(split.c)
    assert any(p is split.c.weight for p in runtime.suffix_parameters())
    assert not any(p is split.c.weight for p in runtime.prefix_parameters())
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in (runtime.prefix_parameters(), runtime.suffix_parameters())]
    random.seed(0)
    boundary = runtime.run_training_prefix(x)
    loss, gradients = runtime.train_suffix(boundary, x[:, :2], loss_fn=F.mse_loss, optimizer=optimizers[1])
    runtime.backward_prefix(boundary, gradients, optimizer=optimizers[0])
    one = torch.optim.SGD(whole.parameters(), lr=0.1)
    random.seed(0)
    expected = F.mse_loss(whole(x), x[:, :2])
    expected.backward()
    one.step()
    assert torch.equal(loss, expected)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), twin.parameters(), strict=True))
    split.c = nn.Sequential(nn.Linear(8, 2))
    with pytest.raises(ModuleError, match=r"'net\.c\.0\.weight' came after the split was prepared"):
        runtime.suffix_parameters()


class Draws(nn.Module):
    """A model that no graph holds: Python draws in it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """What the net gives, times a number."""
        return self.net(x) * random.random()


class Heads(nn.Module):
    """(B, 4) to (B, 2), by the head of the task that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.heads, self.task = nn.Linear(4, 8), nn.ModuleDict({k: nn.Linear(8, 2) for k in "xy"}), "x"

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.heads[self.task](self.a(x).relu())
        return found


def test_two_optimizers_train_heads_in_turn_that_a_flag_chooses() -> None:
    torch.manual_seed(0)
    model, x, target = Heads(), torch.randn(4, 4), torch.randn(4, 2)
    whole = copy.deepcopy(model)
    runtime = prepare_split(model, (x,), split=SplitSpec("after:a", trainable=True))
    for model.task in "yx":
        runtime.learn((x,))
    back, front = (torch.optim.SGD(ps, lr=0.1) for ps in (runtime.suffix_parameters(), runtime.prefix_parameters()))
    one = torch.optim.SGD(whole.parameters(), lr=0.1)
    for task in "xyxy":
        model.task = whole.task = task
        one.zero_grad()
        F.mse_loss(whole(x), target).backward()
        one.step()
        boundary = runtime.run_training_prefix(x)
        _, gradients = runtime.train_suffix(boundary, target, loss_fn=F.mse_loss, optimizer=back)
        runtime.backward_prefix(boundary, gradients, optimizer=front)
        for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine, other)
