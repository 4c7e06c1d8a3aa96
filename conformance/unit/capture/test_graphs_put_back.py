"""A value that carries gradients, written into what the model holds, leaves no graph of a run that is over in there."""

import copy

import pytest
import torch
from torch import nn

from ariadne import SplitRuntime, SplitSpec, prepare_split


class Remembers(nn.Module):
    """Adds to a buffer, of its own memory or a view of more, what it has computed."""

    h: torch.Tensor

    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("h", torch.zeros(2, 8)[1] if view else torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).relu()
        self.h.mul_(0.5).add_(h.mean(0))
        y: torch.Tensor = self.c(h + self.h)
        return y


@pytest.mark.parametrize("view", [False, True])
def test_a_buffer_that_takes_gradients_is_a_leaf_again_and_trains_equal(view: bool) -> None:
    model, x = Remembers(view=view), torch.randn(2, 4)
    whole = Remembers(view=view)
    whole.load_state_dict(model.state_dict())

    def told(out: torch.Tensor, _: object) -> torch.Tensor:
        return out.square().mean()

    with torch.set_grad_enabled(not view):  # a view that no_grad makes takes no gradients later
        runtime = prepare_split(model, (x,), split=SplitSpec("after:a", trainable=True))
    assert isinstance(runtime, SplitRuntime)
    assert model.h.is_leaf
    assert not model.h.requires_grad
    assert not model.h.any()
    assert model.h._is_view() == view
    assert copy.deepcopy(model).h.is_leaf
    for _ in range(2):
        boundary = runtime.run_training_prefix(x)
        _, gradients = runtime.train_suffix(boundary, None, loss_fn=told)
        runtime.backward_prefix(boundary, gradients)
        told(whole(x), None).backward()
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        assert all(p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad) for p, q in pairs)
        assert model.h.requires_grad
        assert torch.equal(model.h, whole.h)
        model.h, whole.h = model.h.detach(), whole.h.detach()
