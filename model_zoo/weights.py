"""Random weights in which nothing is zero, one, or the same twice.

As libraries initialise them, biases are zero, norms are the identity, layer scales are 1e-6 and cloned layers are
equal: a runtime that loses, swaps or repeats one of those would pass every comparison.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Redraw every constant parameter and jitter all the others by up to 10 %, from torch's default generator."""
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        if _is_constant(parameter):
            parameter.copy_(_redrawn(parameter))
        elif parameter.requires_grad:  # what is frozen is a table with a meaning, such as the bins of YOLO's DFL
            parameter.mul_(torch.empty_like(parameter).uniform_(0.9, 1.1))


@torch.no_grad()
def settle_batch_norms(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Set BatchNorm statistics to those of one training forward over the inputs, and jitter them.

    Statistics drawn at random don't fit the activations: over fifty layers these then vanish or explode, and the output
    no longer depends on the input. The forward runs on a copy, so that the model keeps no other trace of it.
    """
    if not _norms(model):
        return
    rehearsed = deepcopy(model).train()
    for copy in _norms(rehearsed):
        copy.momentum = None  # a plain average over forwards: here, the one forward itself
        copy.reset_running_stats()
    rehearsed(*args, **kwargs)
    for norm, copy in zip(_norms(model), _norms(rehearsed), strict=True):
        mean, var = _buffer(copy.running_mean), _buffer(copy.running_var)
        var = 0.9 * var + 0.1 * var.mean() + 1e-3  # a channel that is dead here must not be blown up in eval mode
        _buffer(norm.running_mean).copy_(mean + 0.1 * var.sqrt() * torch.randn_like(mean))
        _buffer(norm.running_var).copy_(var * torch.empty_like(var).uniform_(0.8, 1.25))
        _buffer(norm.num_batches_tracked).fill_(1)


def _norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]


def _buffer(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # track_running_stats says so; torch's annotations cannot
    return tensor


def _is_constant(parameter: Tensor) -> bool:
    low, high = torch.aminmax(parameter)
    return bool(low == high)


def _redrawn(parameter: Tensor) -> Tensor:
    value = parameter.flatten()[0]
    if value.abs() >= 0.1:  # the weight of a norm, the prior of a detection head
        return value * torch.empty_like(parameter).uniform_(0.5, 1.5)
    return torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.02)
