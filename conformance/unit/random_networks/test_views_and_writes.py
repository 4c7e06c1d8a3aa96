"""Random programs of views and of writes into them: every cut trains as the whole to the bit, or refuses to.

Those of `random_networks` have a wide vocabulary, and seldom meet three gradients in one piece of memory. These draw little else.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.cut.frontier import GradientOrder
from ariadne.errors import AriadneError, TrainingError
from conformance.random_networks.extent import PROFILE
from conformance.suite.compare import difference
from conformance.unit.trap_kit import without_what_is_a_view

SIZE = 8
SOURCES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "batched_matmul": lambda m, x: (q := m.linear(x).view(-1, SIZE, 2, 4).transpose(1, 2)) @ q.transpose(-1, -2),
    "bmm": lambda m, x: torch.bmm(x, m.weight.expand(x.shape[0], SIZE, SIZE)),
    "conv": lambda m, x: m.conv(x),
    "einsum": lambda m, x: torch.einsum("bti,io->bot", x, m.weight),
    "expanded": lambda m, x: m.linear(x).unsqueeze(0).expand(2, -1, -1, -1),
    "gru": lambda m, x: m.gru(x)[0],
    "linear": lambda m, x: m.linear(x),
    "rows": lambda m, x: m.linear(x.flatten(0, 1)),
    "sliced": lambda m, x: m.linear(x)[:, :, :6],
    "transposed": lambda m, x: m.linear(x).transpose(1, 2),
    "unfolded": lambda m, x: m.linear(x).unfold(1, 3, 2),
}


def add_to_itself(t: torch.Tensor) -> None:
    t[..., :1] += t[..., 1:2]


def clamp_without_gradients(t: torch.Tensor) -> None:
    with torch.no_grad():
        t.clamp_(-1, 1)


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t.transpose(-1, -2),
    lambda t: t[..., 1:],
    lambda t: t[0:2],
    lambda t: t.flatten(1) if t.dim() > 2 else t.flatten(),
    lambda t: t.clone(),
    lambda t: t.contiguous(),
    lambda t: t[...],
]
WRITES: list[Callable[[torch.Tensor], Any]] = [
    lambda t: t.relu_(),
    lambda t: t.mul_(0.5),
    add_to_itself,
    clamp_without_gradients,
]
USES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t * 2,
    lambda t: t + 1,
    lambda t: torch.cat([t, t * 2]),
    lambda t: t,
]


class Drawn(nn.Module):
    """A forward drawn by a seed: one tensor, and then views of it, writes and uses in any order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.linear, self.conv = nn.Linear(SIZE, SIZE), nn.Conv1d(SIZE, SIZE, 1)
        self.gru = nn.GRU(SIZE, SIZE, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(batch, 8, 8) -> whatever was drawn."""
        draw = random.Random(self.seed)
        known = [SOURCES[draw.choice(sorted(SOURCES))](self, x)]
        outputs = []
        for _ in range(draw.randint(4, 9)):
            kind, t = draw.choice((VIEWS, USES, WRITES)), draw.choice(known)
            made = draw.choice(kind)(t)
            if kind is VIEWS:
                known.append(made)
            elif kind is USES:
                outputs.append(made)
        return *outputs, known[-1] * 0.3, known[0] * 0.7


def loss_of(output: tuple[torch.Tensor, ...], _: object = None) -> torch.Tensor:
    weighed = [t * torch.linspace(0, 1.7 + i, t.numel()).view(t.shape) for i, t in enumerate(output)]
    return torch.stack([t.sum() for t in weighed]).sum()


def train(seed: int) -> Counter[str]:
    """How many cuts of the program of that seed trained as the whole, differed or were not to be trained."""
    torch.manual_seed(seed)
    model, x, count = Drawn(seed), torch.randn(3, SIZE, SIZE), Counter[str]()
    whole = copy.deepcopy(model)
    try:
        loss_of(whole(x)).backward()
    except (IndexError, RuntimeError):  # as autograd forbids, or the shapes: there is nothing to hold against
        return Counter(not_a_program=1)
    try:
        split = prepare_split(model, (x,), split=SplitSpec("auto", dynamic_batch=(1, 8)))
    except AriadneError as error:
        return Counter({type(error).__name__: 1})
    for cut in split.candidates:
        if not cut.safe or cut.inexact:
            count["unsafe" if not cut.safe else "inexact"] += 1
            continue
        runtime = split.resplit(cut)
        model.zero_grad()
        try:
            boundary = runtime.run_training_prefix(x)
        except TrainingError:
            count["refused"] += 1
            continue
        _, gradients = runtime.train_suffix(boundary, loss_fn=loss_of)
        runtime.backward_prefix(boundary, gradients)
        ours, theirs = ({n: p.grad for n, p in m.named_parameters()} for m in (whole, model))
        count["differs" if difference(ours, theirs) else "alike"] += 1
    return count


@pytest.mark.parametrize("block", range({"smoke": 2, "nightly": 80}.get(PROFILE, 8)))
def test_every_cut_trains_as_the_whole_or_refuses_to(block: int) -> None:
    found = {seed: train(seed) for seed in range(10 * block, 10 * block + 10)}
    assert not {seed: count for seed, count in found.items() if count["differs"]}
    total = sum(found.values(), Counter[str]())
    assert total["alike"] > 20
    assert set(total) <= {"alike", "inexact", "not_a_program", "refused", "unsafe"}


def without_the_rules(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradientOrder, "at", lambda self, cut, live: "")


PLANTED = [without_the_rules, without_what_is_a_view]


@pytest.mark.planted
@pytest.mark.parametrize("plant", PLANTED, ids=lambda f: f.__name__)
def test_they_would_tell(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(train(seed)["differs"] for seed in range(80))
