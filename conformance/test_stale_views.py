"""A view whose memory was written into after it was made: autograd places it anew where it is next used."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ariadne import prepare_split
from ariadne.errors import FrontierError
from ariadne.frontier import Stale


class Net(nn.Module):
    """Three paths lead back to one tensor: the chain, the view and the tensor itself."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.used, self.first = used, nn.Linear(4, 4)
        self.chain = nn.ModuleList(nn.Linear(4, 4) for _ in range(7))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        base = self.first(x)
        view = base.unsqueeze(0).expand(3, -1, -1)
        y = base.relu_()
        early = view * 2 if self.used else x
        for layer in self.chain:
            y = layer(y)
        return y, view, base, early


def loss_of(output: tuple[torch.Tensor, ...], _: object = None) -> torch.Tensor:
    total = torch.zeros(())
    for i, t in enumerate(output):
        total = total + (t * torch.randn(t.shape, generator=torch.Generator().manual_seed(i))).sum()
    return total


def differing(used: bool) -> list[str]:
    """The safe cuts at which a gradient of some step is not the whole model's."""
    torch.manual_seed(0)
    model = Net(used)
    found = []
    split = prepare_split(model, (torch.randn(2, 4),), split="auto")
    for cut in split.candidates:
        if not cut.safe:
            continue
        runtime, whole = split.resplit(cut), copy.deepcopy(model)
        for step in range(8):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            whole.zero_grad()
            loss_of(whole(x)).backward()
            boundary = runtime.run_training_prefix(x)
            _, gradients = runtime.train_suffix(boundary, loss_fn=loss_of)
            runtime.backward_prefix(boundary, gradients)
            if any(
                not torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
                for p, q in zip(model.parameters(), whole.parameters(), strict=True)
            ):
                found.append(cut.split_id)
                break
    return found


def test_a_cut_that_a_stale_view_crosses_with_its_base_is_refused_by_name() -> None:
    split = prepare_split(Net(False), (torch.randn(2, 4),), split="auto")
    with pytest.raises(FrontierError, match=r"'expand_1' is a view of memory that 'relu__1' wrote into afterwards"):
        split.resplit("cut:4")


@pytest.mark.parametrize("used", [False, True], ids=["stale", "used_again"])
def test_every_safe_cut_trains_as_the_whole(used: bool) -> None:
    assert differing(used) == []


def test_a_view_that_was_used_after_the_write_may_cross() -> None:
    split = prepare_split(Net(True), (torch.randn(2, 4),), split="auto")
    after = [c for c in split.candidates if c.cut >= 5]
    assert after
    assert all(c.safe and {"expand_1", "relu__1"} <= {*c.live} for c in after)


def test_without_the_rule_gradients_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stale, "at", lambda self, cut, live: None)
    assert differing(False)
