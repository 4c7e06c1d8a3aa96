"""Traps 22 and 23: state that Python keeps, and a suffix that runs twice on one payload."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ariadne import BoundaryPayload
from ariadne.errors import AriadneError, CaptureError, GuardError, UnsupportedError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_nets import Body, Box
from conformance.unit.trap_twins import Twins, either, same, seeded, square_loss

# 22. State that Python keeps


def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n += 1
    return m.b(x) * m.n


def counted_in_a_list(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.seen.append(1)
    return m.b(x) * len(m.seen)


def counted_in_a_dict(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.table["n"] += 1
    return m.b(x) * m.table["n"]


def counted_in_an_object(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.box.n += 1
    return m.b(x) * m.box.n


def counted_by_an_iterator(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(x) * next(m.numbers)


def counted_in_the_module_globals(m: Any, x: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return m.b(x) * CALLS


def alternating(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.flip = not m.flip
    return m.b(x) * 2 if m.flip else m.b(x) + 1


def kept_from_before(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.b(x)
    if m.last is not None:
        y = y + m.last
    m.last = y.detach().mean()
    return y


def kept_in_a_list(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.b(x) + sum(m.seen)
    m.seen.append(x.detach().mean())
    return y


def drawn_from_random(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(x) * random.random()


def branch_on_random(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(x) if random.random() < 0.5 else torch.relu(x)


def drawn_from_numpy(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(x) + float(np.random.rand())


def drawn_from_a_generator_of_its_own(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(x) * m.generator.random()


CALLS = 0


STATEFUL: dict[Callable[..., Any], Callable[[], dict[str, Any]]] = {
    counted: lambda: {"n": 0},
    counted_in_a_list: lambda: {"seen": []},
    counted_in_a_dict: lambda: {"table": {"n": 0}},
    counted_in_an_object: lambda: {"box": Box()},
    counted_by_an_iterator: lambda: {"numbers": itertools.count(1)},
    counted_in_the_module_globals: dict,
    alternating: lambda: {"flip": False},
    kept_from_before: lambda: {"last": None},
    kept_in_a_list: lambda: {"seen": []},
    drawn_from_random: dict,
    branch_on_random: dict,
    drawn_from_numpy: dict,
}


@pytest.mark.parametrize("middle", STATEFUL, ids=lambda m: m.__name__)
def test_state_that_python_keeps_is_followed_or_refused(middle: Callable[..., Any]) -> None:
    global CALLS

    def act() -> None:
        global CALLS
        CALLS = 0
        model, want = Body(middle, **STATEFUL[middle]()), []
        runtime_model = Body(middle, **STATEFUL[middle]())
        runtime_model.load_state_dict(model.state_dict())
        x = seeded((2, 6))
        random.seed(3), np.random.seed(3)
        for _ in range(3):
            with torch.no_grad():
                want.append(model(x))
        CALLS = 0
        runtime = prepare_split(runtime_model, (x,), split="cut:1")
        random.seed(3), np.random.seed(3)
        same(want, [runtime.run_suffix(runtime.run_prefix(x)) for _ in range(3)])

    try:
        act()
    except (UnsupportedError, GuardError) as error:
        refusal = str(error)
    else:
        refusal = "draws from"
    assert any(words in refusal for words in ("attribute", "draws from", "changes", "no guard can see")), refusal


@pytest.mark.parametrize(
    "make", [lambda: random.Random(3), lambda: np.random.default_rng(3), lambda: np.random.RandomState(3)],
    ids=["random.Random", "numpy Generator", "numpy RandomState"],
)  # fmt: skip
def test_a_generator_that_the_model_owns_is_followed_or_refused(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    whole = Body(lambda m, x: m.b(x) * float(m.generator.random()), generator=make())
    split = Body(whole.middle, generator=make())
    split.load_state_dict(whole.state_dict())
    x = seeded((2, 6))
    with torch.no_grad():
        want = [whole(x) for _ in range(2)]
    try:
        runtime = prepare_split(split, (x,), split="cut:1")
        same(want, [runtime.run_suffix(runtime.run_prefix(x)) for _ in range(2)])
    except (CaptureError, GuardError) as error:
        refusal = str(error)
    else:
        refusal = "followed, generator and all"
    assert "generator" in refusal


def test_a_torch_generator_that_the_model_owns_is_drawn_at_replay_and_left_alone_by_prepare() -> None:
    def build() -> nn.Module:
        return Body(
            lambda m, x: m.b(x) * torch.rand(x.shape, generator=m.generator),
            generator=torch.Generator().manual_seed(9),
        )

    twins = Twins(build, seeded((2, 6)))
    same(twins.whole.generator.get_state(), twins.split.generator.get_state())
    twins.replay(seeded((3, 6)))
    same(twins.whole.generator.get_state(), twins.split.generator.get_state())


@pytest.mark.parametrize("draw", [drawn_from_random, branch_on_random, drawn_from_numpy], ids=lambda m: m.__name__)
def test_draws_from_python_are_refused_by_name_and_their_states_left_as_found(draw: Callable[..., Any]) -> None:
    model = Body(draw)
    before = random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]
    with pytest.raises(UnsupportedError, match=r"draws from (random|numpy.random).*torch's RNG"):
        prepare_split(model, (seeded((2, 6)),), split="cut:1")
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2])


def test_a_draw_at_one_batch_alone_is_noticed() -> None:
    """Where no run at capture draws, the one that would must not be served without."""
    build = lambda: Body(lambda m, x: m.b(x) * (random.random() if x.shape[0] == 6 else 1.0))  # noqa: E731
    twins = Twins(build, seeded((2, 6)))
    twins.hold(6)
    with pytest.raises(AriadneError):
        twins.runtime.run_prefix(seeded((6, 6)))


class Aux(nn.Module):
    """Leaves a loss of its own on itself, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.aux: torch.Tensor | None = None
        self.shape: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        self.aux = (x * x).mean()
        self.shape = tuple(x.shape)
        return self.c(torch.tanh(self.b(x)))


def test_prepare_leaves_attributes_that_forward_writes_as_found() -> None:
    model = Aux()
    with suppress(UnsupportedError):
        prepare_split(model, (seeded((2, 6)),), split="50%")
    assert model.aux is None
    assert model.shape == ()


@pytest.mark.parametrize("attribute", ["aux", "shape"])
def test_an_attribute_that_forward_writes_is_written_or_refused(attribute: str) -> None:
    def act() -> None:
        twins = Twins(Aux, seeded((2, 6)))
        with torch.no_grad():
            twins.whole(seeded((3, 6)))
        twins.runtime.run_suffix(twins.runtime.run_prefix(seeded((3, 6))))
        same(getattr(twins.whole, attribute), getattr(twins.split, attribute))

    either(act, UnsupportedError, attribute)


# 23. A suffix run twice on one payload


IN_PLACE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "relu_": lambda m, x: torch.relu_(x) + m.b(x),
    "add_": lambda m, x: m.b(x.add_(1)),
    "setitem": lambda m, x: (x.__setitem__((slice(None), 0), 5.0), m.b(x))[1],
    "a view is written": lambda m, x: (x[:, 1:3].mul_(3), m.b(x) + x)[1],
    "written late": lambda m, x: m.b(x.clone()) + torch.sin((x + 1) * 2) + x.mul_(2),
    "one of a sequence": lambda m, x: (p := x.split(2, dim=1), torch.cat([p[0] + 1, p[1].mul(2), p[2]], 1).mul_(2))[1],
    "chunks written": lambda m, x: m.b(torch.cat([c.add_(i) for i, c in enumerate((x * 1).unsafe_chunk(3, 1))], 1)),
    "fill_ and copy_": lambda m, x: m.b(torch.zeros_like(x).copy_(x).clamp_(min=0)) + x.neg_(),
    "out=": lambda m, x: m.b(torch.add(x, 1, out=torch.empty_like(x))) if not torch.is_grad_enabled() else m.b(x + 1),
}


@pytest.mark.parametrize("middle", IN_PLACE)
def test_a_suffix_that_writes_leaves_the_payload_as_it_is(middle: str) -> None:
    twins = Twins(lambda: Body(IN_PLACE[middle]), seeded((2, 6)))
    x = seeded((3, 6))
    for runtime in twins.cuts():
        with torch.no_grad():
            want = twins.whole(x.clone())
        boundary = runtime.run_prefix(x.clone())
        before = {k: t.clone() for k, t in boundary.tensors.items()}
        for _ in range(3):
            same(want, runtime.run_suffix(boundary))
            same(before, {k: t.clone() for k, t in boundary.tensors.items()})
        sent = BoundaryPayload.from_bytes(boundary.to_bytes())
        for _ in range(2):
            same(want, runtime.run_suffix(sent))
        same(before, {k: t.clone() for k, t in sent.tensors.items()})
    twins.train(x)


@pytest.mark.parametrize("middle", IN_PLACE)
def test_training_leaves_the_payload_as_it_is(middle: str) -> None:
    twins = Twins(lambda: Body(IN_PLACE[middle]), seeded((2, 6)))
    for runtime in twins.cuts():
        boundary = runtime.run_training_prefix(seeded((3, 6)))
        before = {k: t.clone() for k, t in boundary.tensors.items()}
        _, gradients = runtime.train_suffix(boundary, loss_fn=square_loss)
        same(before, {k: t.clone() for k, t in boundary.tensors.items()})
        runtime.backward_prefix(boundary, gradients)
        same(before, {k: t.clone() for k, t in boundary.tensors.items()})


class WritesItsInput(nn.Module):
    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late, self.a, self.b = late, nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.late:
            x.mul_(2)
        y = torch.tanh(self.a(x))
        if self.late:
            x.add_(y)
        return self.b(y + x)


@pytest.mark.parametrize("late", [False, True])
def test_an_input_that_the_model_writes_is_written_as_the_model_does(late: bool) -> None:
    twins = Twins(lambda: WritesItsInput(late), seeded((2, 6)))
    for runtime in twins.cuts():
        whole, split = seeded((3, 6)), seeded((3, 6))
        with torch.no_grad():
            want = twins.whole(whole)
        same(want, runtime.run_suffix(runtime.run_prefix(split)))
        same(whole, split)
