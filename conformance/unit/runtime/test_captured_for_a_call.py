"""Plans that are captured for a call are held against the model as the first is: outputs, and gradients where it trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ariadne.runtime.plans
from ariadne import SplitRuntime, SplitSpec
from ariadne.compare import difference
from ariadne.errors import ModuleError, UnsupportedError, VerificationError
from conformance.unit.refusing import prepare_split

SPLIT = SplitSpec("percent:50", dynamic_batch=(1, 8), trainable=True)
MODES = ("generated_eager", "debug_interpreter", "compiled")
_hook = torch.Tensor.register_hook  # taken before any capture, which refuses it by name


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.own = torch.Generator()


_Base: Any = torch._C.TensorBase


def from_five(change: Callable[[Any, Tensor], Tensor]) -> type[Base]:
    """A model that does something only where the batch is larger than 4."""

    class FromFive(Base):
        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            h = self.a(x)
            return self.b(self.drop(change(self, h) if x.shape[0] > 4 else h))

    return FromFive


def new_data(s: Any, h: Tensor) -> Tensor:
    t = h.clone()
    _Base.data.__set__(t, t.data * 2)  # as `t.data = ...`, which capture would refuse by itself
    return t


def applied(s: Any, h: Tensor) -> Tensor:
    t = h.detach().clone()
    _Base.apply_(t, lambda v: v * 2)
    return h + t


def mapped(s: Any, h: Tensor) -> Tensor:
    t = h.detach().clone()
    _Base.map_(t, t, lambda v, w: v * w)
    return h + t


def seeded(s: Any, h: Tensor) -> Tensor:
    return h + torch.rand(4, generator=torch.Generator().manual_seed(7))


def seeded_own(s: Any, h: Tensor) -> Tensor:
    s.own.manual_seed(7)
    return h + torch.rand(4, generator=s.own)


HIDDEN = {"data": new_data, "apply_": applied, "map_": mapped, "seeded": seeded, "own generator": seeded_own}


def hooked(s: Any, h: Tensor) -> Tensor:
    t = h * 1
    if t.requires_grad:
        _hook(t, lambda g: g * 2)
    return t


def prepared(kind: type[Base], mode: Any = "generated_eager") -> SplitRuntime:
    options: dict[str, Any] = {"compile_options": {"backend": "eager"}} if mode == "compiled" else {}
    return prepare_split(kind(), (torch.randn(2, 4),), split=SPLIT, mode=mode, **options)


def stands(model: nn.Module) -> Any:
    """All that a call may move."""
    return {**model.state_dict()}, torch.get_rng_state(), model.own.get_state(), [p.grad for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spelling", HIDDEN)
def test_what_no_op_shows_at_a_later_batch_is_refused_there_in_every_mode(spelling: str, mode: str) -> None:
    split = prepared(from_five(HIDDEN[spelling]), mode)
    split.run_suffix(split.run_prefix(torch.randn(3, 4)))
    before = [t.clone() if isinstance(t, Tensor) else t for t in (split.model.seen, torch.get_rng_state())]
    for batch in (6, 8, 6):
        for call in (split.run_prefix, split.run_training_prefix):
            told = f"at batch {batch} the split at cut:. differs from the|takes data out of torch unseen|seeds a torch.Generator"
            with pytest.raises((VerificationError, UnsupportedError), match=told):
                call(torch.zeros(batch, 4))
    assert difference(before, [split.model.seen, torch.get_rng_state()]) is None
    assert split.run_suffix(split.run_prefix(torch.randn(4, 4))).shape == (4, 4)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("spelling", [name for name in HIDDEN if name != "data"])  # which capture sees by itself
def test_without_that_proof_it_would_be_wrong_in_silence(spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ariadne.runtime.plans, "prove", lambda *args, **options: None)
    split, twin = prepared(from_five(HIDDEN[spelling])), from_five(HIDDEN[spelling])()
    split.model.eval()
    twin.eval()
    split = prepare_split(split.model, (torch.randn(2, 4),), split=SPLIT)
    x = torch.randn(6, 4)
    with torch.no_grad():
        assert difference(twin(x), split.run_suffix(split.run_prefix(x))) is not None


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_held_too_where_the_call_trains(mode: str) -> None:
    split = prepared(from_five(hooked), mode)
    split.run_suffix(split.run_prefix(torch.randn(6, 4)))
    with pytest.raises(
        VerificationError, match=r"the gradients through the split at cut:. differ from the model's at batch 6"
    ):
        split.run_training_prefix(torch.randn(6, 4))


@pytest.mark.parametrize("mode", MODES[:2])
def test_a_plan_that_holds_serves_as_the_model_does_and_leaves_nothing_behind(mode: str) -> None:
    kind = from_five(lambda s, h: h.relu() * 3)
    split, twin = prepared(kind, mode), kind()
    for batch in (6, 2, 8, 5):
        x, t = torch.randn(batch, 4), torch.randn(batch, 4)
        found = []
        for whole in (True, False):
            torch.manual_seed(batch)
            of = twin if whole else split.model
            of.zero_grad()
            if whole:
                loss = F.mse_loss(twin(x), t)
                loss.backward()
            else:
                boundary = split.run_training_prefix(x)
                loss, gradients = split.train_suffix(boundary, t, loss_fn=F.mse_loss)
                split.backward_prefix(boundary, gradients)
            found.append((loss.detach(), *stands(of), [p.grad.clone() for p in of.parameters()]))
        assert difference(*found) is None


def reentrant(s: Any, h: Tensor) -> Tensor:
    return checkpoint(lambda t: s.b(t).relu(), h, use_reentrant=True) + h


def turned(s: Any, h: Tensor) -> Tensor:
    return torch.view_as_real(torch.fft.fft(h)).sum(-1)


@pytest.mark.filterwarnings("ignore:.*requires_grad=True.*:UserWarning")
@pytest.mark.parametrize("change", [reentrant, turned])
def test_what_torch_s_own_grad_does_not_take_is_held_by_backward(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = from_five(change)
    split, twin = prepared(kind), kind()
    for p in split.model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: pytest.fail("the proof told a hook of the user's"))
    x, t = torch.randn(6, 4), torch.randn(6, 4)
    torch.manual_seed(1)
    boundary = split.run_training_prefix(x)
    for p in split.model.parameters():
        p._post_accumulate_grad_hooks.clear()
    _, gradients = split.train_suffix(boundary, t, loss_fn=F.mse_loss)
    split.backward_prefix(boundary, gradients)
    torch.manual_seed(1)
    F.mse_loss(twin(x), t).backward()
    assert difference([p.grad for p in twin.parameters()], [p.grad for p in split.model.parameters()]) is None


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.b = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, i: Tensor) -> Tensor:
        return self.b(self.e(i).relu() if i.shape[0] > 4 else self.e(i))


def test_sparse_gradients_are_held_as_well() -> None:
    split, twin = prepare_split(Sparse(), (torch.tensor([1, 1]),), split=SPLIT), Sparse()
    i = torch.tensor([1, 2, 2, 7, 1, 0])
    boundary = split.run_training_prefix(i)
    _, gradients = split.train_suffix(boundary, torch.ones(6, 4), loss_fn=F.mse_loss)
    split.backward_prefix(boundary, gradients)
    F.mse_loss(twin(i), torch.ones(6, 4)).backward()
    found = [p.grad.to_dense() for m in (twin, split.model) for p in m.parameters()]
    assert difference(found[:3], found[3:]) is None


def test_a_plan_is_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    split = prepared(from_five(lambda s, h: h.relu()))
    proof, proven = ariadne.runtime.plans.prove, []
    monkeypatch.setattr(ariadne.runtime.plans, "prove", lambda *a, **k: proven.append(a) or proof(*a, **k))
    split.run_prefix(torch.randn(6, 4))
    assert len(proven) == 1
    split.run_prefix(torch.randn(6, 4))
    split.run_prefix(torch.randn(8, 4))
    assert len(proven) == 1


def test_a_deep_copy_proves_its_plans_as_well() -> None:
    again = copy.deepcopy(prepared(from_five(applied)))
    with pytest.raises(VerificationError, match="at batch 6 "):
        again.run_prefix(torch.randn(6, 4))


def test_a_copy_of_a_model_that_holds_its_own_split_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    split = prepare_split(model, (torch.randn(2, 4),), split="after:1")
    model[1].split = split
    for copied in (model, model[1], split):
        with pytest.raises(ModuleError, match=r"a split of its own model.* copy both together"):
            copy.deepcopy(copied)
    del model[1].split
    _, twin = copy.deepcopy((model, split))
    x = torch.randn(3, 4)
    assert torch.equal(twin.run_suffix(twin.run_prefix(x)), split.run_suffix(split.run_prefix(x)))
