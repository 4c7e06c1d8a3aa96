"""What an opaque part does behind the plan's back: it is refused by name, at prepare or in the call that shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne import BoundaryPayload, SplitSpec, prepare_split
from ariadne.errors import TrainingError, UnsupportedError
from conformance.unit.capture.test_opaque import Net, Part, of


def keeps_its_argument(part: Part, x: torch.Tensor) -> torch.Tensor:
    y = x * 2 if not part.kept else x * 2 + part.kept[-1]
    part.kept = [x.detach()]
    return y


def keeps_its_result(part: Part, x: torch.Tensor) -> torch.Tensor:
    part.kept = [(x * 1).detach()]
    return part.kept[-1]


def replaces_a_buffer(part: Part, x: torch.Tensor) -> torch.Tensor:
    part.norm.running_mean = part.norm.running_mean + 1
    return x * 2


def hooks_its_argument(part: Part, x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: g * g)
    return x * 2


def hooks_a_weight(part: Part, x: torch.Tensor) -> torch.Tensor:
    if part.calls == 0:
        part.inner.weight.register_hook(lambda g: g * 2)
    part.calls += 1
    return part.inner(x)


class WritesLater(Net):
    """Writes into what the part was given, and into what it gave, after it ran."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.enter(x) * 1
        y = self.part(h)
        z = y.tanh()
        h.mul_(2)
        if not torch.is_grad_enabled():
            y.mul_(2)
        return self.leave(z + h + y)


class ReadsLater(Net):
    """Reads the part's buffer after it ran."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.leave(self.part(self.enter(x)) + self.part.norm.running_mean)


class Shares(Net):
    """What the part is given is used beside it, too."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.enter(x)
        return self.leave(h * 3 + self.part(h))


@pytest.mark.parametrize(
    ("does", "net", "says"),
    [
        (keeps_its_argument, WritesLater, "keeps in Python; let the part keep a clone"),
        (keeps_its_result, WritesLater, "keeps in Python; let the part keep a clone"),
        (replaces_a_buffer, ReadsLater, "put in Python in this call"),
        (hooks_its_argument, Shares, "registers a hook on, or sets an attribute of, a tensor"),
        (hooks_a_weight, Net, "registers a hook on, or sets an attribute of, a tensor"),
    ],
)
def test_what_a_part_does_behind_the_plan_is_refused(does: Any, net: type[Net], says: str) -> None:
    model = of(does, net).eval()
    with pytest.raises(UnsupportedError, match=says):
        prepare_split(model, (torch.randn(3, 4),), split=SplitSpec("cut:1", trainable=does is hooks_its_argument))
    assert not model.part.inner.weight._backward_hooks


class Reaches(nn.Module):
    """Its part uses the head's weight, for some data alone."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 2)

    @ariadne.opaque
    def back(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.leave.weight.sum() if float(h.detach().sum()) > 0 else h * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.back(self.enter(x).square() * x.sum()))


def test_a_part_that_uses_a_parameter_of_the_other_side_later_on_is_refused_in_training() -> None:
    torch.manual_seed(0)
    model = Reaches()
    x = torch.ones(3, 4)
    runtime = prepare_split(model, (-x,), split=SplitSpec("percent:80", trainable=True))
    boundary = runtime.run_training_prefix(-x)
    runtime.train_suffix(boundary, loss_fn=lambda y, _: y.square().sum())
    boundary = runtime.run_training_prefix(x)
    with pytest.raises(TrainingError, match="an opaque part used a parameter"):
        runtime.train_suffix(boundary, loss_fn=lambda y, _: y.square().sum())


class Words(nn.Module):
    """Gives what is no number beside its tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, None, str, complex]:
        return x * 2, None, "words", 1 + 2j


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.part, self.head = nn.Linear(4, 4), ariadne.opaque(Words()), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        h, *rest = self.part(self.encoder(x))
        return (self.head(h), *rest)


def test_what_an_opaque_part_gives_beside_tensors_crosses_as_bytes() -> None:
    model, x = Told().eval(), torch.randn(3, 4)
    runtime = prepare_split(model, (x,), split="50%")
    with torch.no_grad():
        expected = model(x)
    for candidate in (c for c in runtime.candidates if c.safe):
        split = runtime.resplit(candidate)
        boundary = BoundaryPayload.from_bytes(split.run_prefix(x).to_bytes())
        found = split.run_suffix(boundary)
        assert torch.equal(found[0], expected[0]), candidate.split_id
        assert found[1:] == expected[1:], candidate.split_id
