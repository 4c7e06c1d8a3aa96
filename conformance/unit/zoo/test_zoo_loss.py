"""The zoo's loss hides no mistake."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model_zoo.losses import floating_leaves, loss


@dataclasses.dataclass
class Answer:
    boxes: Tensor
    count: int


def nested() -> tuple[Any, list[Tensor]]:
    leaves = [torch.randn(2, 3, requires_grad=True) for _ in range(5)]
    output = {
        "a": (leaves[0], [leaves[1], None, 3, "words", True, 0.5]),
        "b": Answer(leaves[2], 4),
        "c": OrderedDict(x=leaves[3], indices=torch.arange(3)),
        "d": leaves[4],
    }
    return output, leaves


def test_the_loss_reaches_every_floating_tensor_with_a_weight_of_its_own() -> None:
    output, leaves = nested()
    assert [id(leaf) for leaf in floating_leaves(output)] == [id(leaf) for leaf in leaves]
    loss(output).backward()
    gradients = [leaf.grad for leaf in leaves]
    assert all(gradient is not None and gradient.all() for gradient in gradients)
    assert len({tuple(gradient.flatten().tolist()) for gradient in gradients if gradient is not None}) == len(leaves)


def test_the_loss_sees_swapped_leaves_and_swapped_rows() -> None:
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    assert loss((a, b)) != loss((b, a))
    assert loss(a) != loss(a.flip(0))


def test_the_loss_goes_through_a_batchnorm_at_the_end() -> None:
    x = torch.randn(8, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(nn.BatchNorm1d(3)(x).mean(), x)
    assert gradient.abs().max() < 1e-6, "a plain mean would do, and the loss could be simpler"
    (gradient,) = torch.autograd.grad(loss(nn.BatchNorm1d(3)(x)), x)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_loss_is_taken_in_float32_at_least(dtype: torch.dtype) -> None:
    found = loss((torch.ones(3, dtype=dtype), torch.ones(2, dtype=torch.float16)))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_the_loss_refuses_what_it_cannot_look_into() -> None:
    with pytest.raises(TypeError, match="cannot look for tensors in a object"):
        loss((torch.ones(1), object()))
    assert loss((torch.ones(1), torch.ones(0, 2))) == loss(torch.ones(1)), "the mean of nothing is nan"
    with pytest.raises(ValueError, match=r"the output \(dict\) holds no floating tensor"):
        loss({"indices": torch.arange(3), "none": None})
