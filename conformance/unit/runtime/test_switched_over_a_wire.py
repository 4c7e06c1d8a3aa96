"""A boundary that came as bytes is taken by the plan that holds for the model as it is, of several with one signature."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ariadne import BoundaryPayload, SplitSpec, prepare_split

X = torch.linspace(-1, 1, 12).view(3, 4)


class Switched(nn.Module):
    """What one switch turns on does the same ops; it comes to stand on the instance when it is first set."""

    again = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.through = functools.partial(checkpoint, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        h = self.through(self.middle.__call__, h) if self.again and self.training else self.middle(h)
        return self.head(h)  # type: ignore[no-any-return]


def test_a_switch_that_is_turned_back_finds_its_plan_again() -> None:
    net = Switched()
    runtime = prepare_split(net, (X,), split=SplitSpec("after:first", trainable=True), on_change="capture")
    for _ in range(4):
        net.zero_grad()
        net(X).square().sum().backward()
        known = [p.grad for p in net.parameters()]
        net.zero_grad()
        boundary = runtime.run_training_prefix(X)
        sent = BoundaryPayload.from_bytes(boundary.to_bytes())
        _, gradients = runtime.train_suffix(sent, loss_fn=lambda out, _: out.square().sum())
        runtime.backward_prefix(boundary, gradients)
        for p, grad in zip(net.parameters(), known, strict=True):
            assert p.grad is not None
            assert grad is not None
            assert torch.equal(p.grad, grad)
        net.eval()
        with torch.no_grad():
            sent = BoundaryPayload.from_bytes(runtime.run_prefix(X).to_bytes())
            assert torch.equal(net(X), runtime.run_suffix(sent))
        net.train()
        net.again = not net.again
