"""What forward does before the cut that a suffix from bytes can't make good, and what preparing must put back."""

from __future__ import annotations

import contextvars
import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ariadne import BoundaryPayload, SplitSpec, prepare_split
from ariadne.errors import AriadneError, BoundaryError, FrontierError, TrainingError, UnsupportedError

X = torch.linspace(-1, 1, 12).view(3, 4)


class Net(nn.Module):
    """Two layers; `middle` is what a test wants between them."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(4, 4), nn.Linear(4, 4), middle

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self, self.a(x))
        return self.b(h)


def split(model: nn.Module, boundary: str = "after:a", trainable: bool = True, **options: Any) -> Any:
    return prepare_split(model, (torch.ones(2, 4),), split=SplitSpec(boundary, trainable=trainable), **options)


def sent(boundary: Any) -> BoundaryPayload:
    return BoundaryPayload.from_bytes(boundary.to_bytes())


def squares(output: Tensor, _: Any) -> Tensor:
    return output.square().sum()


# --- what preparing puts back -----------------------------------------------------------------------------------------


def drawn_and_hooked(m: Any, h: Tensor) -> Tensor:
    h = h * (1 + random.random()) + np.random.rand()
    if h.requires_grad:
        h.register_hook(lambda g: g * 0.5)
    return h


def drawn_and_differentiated(m: Any, h: Tensor) -> Tensor:
    h = h * (1 + random.random())
    return h + torch.func.grad(lambda q: q.square().sum())(h.detach())


@pytest.mark.parametrize("middle", [drawn_and_hooked, drawn_and_differentiated])
@pytest.mark.parametrize("fallback", ["python", "refuse"])
def test_draws_before_a_refusal_are_put_back(middle: Any, fallback: Any) -> None:
    model = Net(middle)
    stood = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    try:
        split(model, fallback=fallback)
    except AriadneError:
        assert fallback == "refuse"
    assert random.getstate() == stood[0]
    assert repr(np.random.get_state()) == stood[1]
    assert torch.equal(torch.get_rng_state(), stood[2])


COUNTED, COUNTS, NORM = torch.zeros(4), (torch.zeros(4),), nn.BatchNorm1d(4)


class Counting(Net):
    SEEN = torch.zeros(4)


@pytest.mark.parametrize("trainable", [False, True])
def test_preparing_leaves_tensors_outside_of_the_model_alone(trainable: bool) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        for t in (COUNTED, COUNTS[0], Counting.SEEN):
            t.add_(h.detach().sum(0))
        return NORM(h) * (1 + random.random())

    outside = [COUNTED, *COUNTS, Counting.SEEN, *NORM.state_dict().values()]
    before = copy.deepcopy(outside)
    split(Counting(middle), trainable=trainable, fallback="python")
    assert all(map(torch.equal, before, outside))
    assert all(p.grad is None for p in NORM.parameters())


# --- a suffix from bytes ----------------------------------------------------------------------------------------------


def maybe(h: Tensor) -> Tensor:
    return h * 1.5 if random.random() < 0.5 else h


class Normed(Net):
    """Writes both weights as it begins, so that the part before the cut writes one that the part after it uses."""

    def __init__(self, by_data: bool) -> None:
        super().__init__(lambda m, h: maybe(h))
        self.by_data = by_data

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in (self.a, self.b):
                (layer.weight.data if self.by_data else layer.weight).renorm_(2, 0, 0.3)
        return super().forward(x)


@pytest.mark.parametrize("by_data", [False, True])
def test_a_weight_that_the_prefix_writes_crosses_for_inference(by_data: bool) -> None:
    here = Normed(by_data)
    there, whole = copy.deepcopy(here), copy.deepcopy(here)
    prefix, suffix = (split(m, fallback="python") for m in (here, there))
    random.seed(0)
    found = suffix.run_suffix(sent(prefix.run_prefix(X)))
    random.seed(0)
    with torch.no_grad():
        assert torch.equal(found, whole(X))


@pytest.mark.parametrize("by_data", [False, True])
def test_and_is_refused_in_training_where_it_would_miss_its_gradient(by_data: bool) -> None:
    model = Normed(by_data)
    whole, runtime = copy.deepcopy(model), split(model, fallback="python")
    random.seed(0)
    boundary = runtime.run_training_prefix(X)
    with pytest.raises(BoundaryError, match=r"writes into 'b.weight', a parameter"):
        runtime.train_suffix(sent(boundary), loss_fn=squares)
    loss, gradients = runtime.train_suffix(boundary, loss_fn=squares)
    runtime.backward_prefix(boundary, gradients)
    random.seed(0)
    expected = whole(X).square().sum()
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), whole.parameters(), strict=True))


class Checkpointed(nn.Module):
    """A part whose halves save tensors of like sizes: torch's own check of what it runs again sees nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.leave(checkpoint(self.part, maybe(self.enter(x)), use_reentrant=False))


@pytest.mark.parametrize("boundary", ["after:part.2", "after:enter"])
def test_a_cut_at_the_end_of_a_checkpoint_trains_from_bytes(boundary: str) -> None:
    model = Checkpointed()
    whole, runtime = copy.deepcopy(model), split(model, boundary, fallback="python")
    random.seed(0)
    made = runtime.run_training_prefix(X)
    _, gradients = runtime.train_suffix(sent(made), loss_fn=squares)
    runtime.backward_prefix(made, gradients)
    random.seed(0)
    whole(X).square().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), whole.parameters(), strict=True))


def test_a_cut_within_a_checkpoint_is_for_inference() -> None:
    model = Checkpointed()
    with pytest.raises(FrontierError, match="once in the whole model, and once for each half"):
        split(model, "after:part.0", fallback="python")
    runtime = split(model, "after:part.0", trainable=False, fallback="python")
    runtime.run_suffix(sent(runtime.run_prefix(X)))
    with pytest.raises(TrainingError, match="for inference alone"):
        runtime.train_suffix(runtime.run_training_prefix(X), loss_fn=squares)


class WrittenBefore(Net):
    """Writes a weight of the prefix whose gradient lies before it, as layers with a limit on their norm do."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(x * self.a.bias)
        with torch.no_grad():
            self.a.weight.renorm_(2, 0, 0.3)
        return self.b(torch.tanh(self.a(h))) * (1 + random.random())


def test_a_graph_before_python_trains_though_it_writes_a_weight() -> None:
    model = WrittenBefore(lambda m, h: h)
    whole, runtime = copy.deepcopy(model), split(model, fallback="python-suffix")
    for batch in (2, 3):
        x = torch.ones(batch, 4)
        random.seed(0)
        boundary = runtime.run_training_prefix(x)
        loss, gradients = runtime.train_suffix(boundary, loss_fn=squares)
        runtime.backward_prefix(boundary, gradients)
        random.seed(0)
        expected = squares(whole(x), None)
        expected.backward()
        assert torch.equal(loss, expected.detach())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), whole.parameters(), strict=True))


# --- what forward keeps outside, and what it is given -----------------------------------------------------------------

DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)


def deeper(m: Any, h: Tensor) -> Tensor:
    if DEPTH.get() < 5:
        DEPTH.set(DEPTH.get() + 1)
    return h * (1 + random.random())


def test_a_context_variable_that_forward_sets_is_its_callers() -> None:
    runtime = split(Net(deeper), trainable=False, fallback="python")
    assert DEPTH.get() == 0
    token = DEPTH.set(0)
    for count in (1, 2):
        runtime.run_suffix(runtime.run_prefix(X))
        assert DEPTH.get() == count
    DEPTH.reset(token)


TEMPORARY: contextvars.ContextVar[int] = contextvars.ContextVar("temporary")


def test_one_that_forward_sets_and_resets_is_unset_again() -> None:
    class Sets(Net):
        def forward(self, x: Tensor) -> Tensor:
            token = TEMPORARY.set(3)
            h = self.b(self.a(x)) * (1 + random.random())
            TEMPORARY.reset(token)
            return h

    runtime = split(Sets(lambda m, h: h), trainable=False, fallback="python")
    boundary = runtime.run_prefix(X)
    assert TEMPORARY.get(0) == 3
    runtime.run_suffix(boundary)
    assert TEMPORARY.get(0) == 0


def test_what_forward_puts_on_a_weight_is_gone_after_preparing() -> None:
    class Keeps(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.b.weight.ema = getattr(self.b.weight, "ema", h.detach()) * 0.5
            return self.b(h + self.b.weight.ema.mean())

    model = Keeps(lambda m, h: h)
    whole = copy.deepcopy(model)
    runtime = split(model, trainable=False, fallback="python")
    assert vars(model.b.weight) == {}
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), whole(X))


def test_a_cut_in_a_block_that_puts_a_generator_back_is_refused() -> None:
    class Forked(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.random.fork_rng():
                torch.manual_seed(3)
                return self.b(self.a(x) + torch.rand(4) * random.random())

    with pytest.raises(FrontierError, match="torch's random generator"):
        split(Forked(lambda m, h: h), fallback="python")


HOOKED: dict[str, int] = {"n": 0}


class Counted(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        Counted.calls += 1
        HOOKED["n"] += 1
        COUNTED.add_(1)
        return -g


@pytest.mark.parametrize("fallback", ["refuse", "python"])
def test_what_backward_passes_leave_outside_is_put_back(fallback: Any) -> None:
    model = Net(lambda m, h: m.reverse(h.view_as(h)) * (1 if fallback == "refuse" else 1 + random.random()))
    model.reverse = Counted.apply
    model.a.weight.register_hook(lambda g: HOOKED.__setitem__("n", HOOKED["n"] + 1))
    before = COUNTED.clone()
    split(model, fallback=fallback)
    assert (Counted.calls, HOOKED) == (0, {"n": 0})
    assert torch.equal(COUNTED, before)


def test_an_input_made_from_a_weight_of_the_suffix_is_refused_in_training() -> None:
    model = Net(lambda m, h: h)
    runtime = split(model)
    with pytest.raises(TrainingError, match=r"from a parameter that the part after the cut uses \(shape \(4, 4\)\)"):
        runtime.run_training_prefix(X @ model.b.weight)
    boundary = runtime.run_training_prefix(X @ model.a.weight)
    runtime.backward_prefix(boundary, runtime.train_suffix(boundary, loss_fn=squares)[1])


def test_a_write_outside_within_a_checkpoint_is_refused() -> None:
    def part(m: Any, h: Tensor) -> Tensor:
        COUNTED.add_(h.detach().sum(0))
        return h.relu()

    with pytest.raises(UnsupportedError, match="that it did not make within"):
        split(Net(lambda m, h: checkpoint(part, m, h, use_reentrant=False)))


class Doubled(torch.autograd.Function):
    """In the form whose forward takes no context."""

    @staticmethod
    def forward(x: Tensor, part: nn.Module) -> Tensor:
        with torch.enable_grad():
            return (part(x) * 2).detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 2, None


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda m, h: checkpoint(nn.Sequential(m.c, nn.ReLU()), maybe(h), use_reentrant=True), "CheckpointFunction"),
        (lambda m, h: Doubled.apply(maybe(h), m.c), "Doubled"),
    ],
)
def test_a_cut_within_a_function_of_autograds_does_not_train_from_bytes(run: Any, name: str) -> None:
    model = Net(run)
    model.c = nn.Tanh()
    runtime = split(model, "after:c", fallback="python")
    boundary = runtime.run_training_prefix(X)
    with pytest.raises(BoundaryError, match=rf"autograd\.Function \({name}\)"):
        runtime.train_suffix(sent(boundary), loss_fn=squares)
    runtime.train_suffix(boundary, loss_fn=squares)  # in one process it goes on
