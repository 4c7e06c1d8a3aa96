"""What forward returns as it got it is that very tensor in a loss, too, as in the whole model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ariadne import SplitRuntime, SplitSpec, prepare_split


class Returns(nn.Module):
    """(B, 4) to (B, 2); beside it an input as it came in, and two tensors of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.rand(8), requires_grad=False)
        self.register_buffer("mean", torch.rand(8))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        h = self.a(x) * self.scale + self.mean
        return self.b(h.relu()) * mask, mask, self.scale, self.mean


def test_a_loss_gets_the_inputs_and_the_tensors_of_the_model_that_forward_returns() -> None:
    model, x, mask = Returns(), torch.randn(2, 4), torch.ones(2)
    split = prepare_split(model, (x, mask), split=SplitSpec("after:a", trainable=True))
    assert isinstance(split, SplitRuntime)

    def loss(out: tuple[Tensor, ...], _: None) -> Tensor:
        same.append([a is b for a, b in zip(out[1:], (mask, model.scale, model.mean), strict=True)])
        return out[0].sum()

    same: list[list[bool]] = []
    loss(model(x, mask), None)
    split.train_suffix(split.run_training_prefix(x, mask), loss_fn=loss)
    assert same == [[True] * 3] * 2


def test_an_input_that_is_to_get_a_gradient_after_the_prefix_ran_gets_none() -> None:
    model, x, mask = Returns(), torch.randn(2, 4), torch.ones(2)
    split = prepare_split(model, (x, mask), split=SplitSpec("after:a", trainable=True))
    boundary = split.run_training_prefix(x, mask)
    mask.requires_grad_()
    _, gradients = split.train_suffix(boundary, loss_fn=lambda out, _: out[0].sum())
    split.backward_prefix(boundary, gradients)
    assert mask.grad is None
