"""Normalised tensors without data: made by one product, where torch's own rule takes means and roots of them in twenty ops.

That was a third of a symbolic run of ResNet. Sizes, strides, dtype and need of a gradient are those of the input times the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

_aten: Any = torch.ops.aten


def _batch_norm(input: torch.Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool,
                momentum: float, eps: float, cudnn_enabled: bool) -> Any:  # fmt: skip
    size = [*input.shape[1:2]]
    if not training and all(_are_plain(input, size, *two) for two in ((weight, bias), (running_mean, running_var))):
        return _aten.mul.Tensor(input, _aten.view.default(weight, [*size, *(1 for _ in input.shape[2:])]))
    rest = (running_mean, running_var, training, momentum, eps, cudnn_enabled)
    return _aten.batch_norm.default(input, weight, bias, *rest)


def _layer_norm(input: torch.Tensor, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None,
                eps: float = 1e-5, cudnn_enable: bool = True) -> Any:  # fmt: skip
    size = [*input.shape[input.dim() - len(normalized_shape) :]]
    if _are_plain(input, size, weight, bias) and [*normalized_shape] == size and input.is_contiguous():
        return _aten.mul.Tensor(input, weight)
    return _aten.layer_norm.default(input, normalized_shape, weight, bias, eps, cudnn_enable)


def _are_plain(input: torch.Tensor, size: list[Any], one: Any, other: Any) -> bool:
    """Whether two tensors have this size, in which is no symbol, and are like the input, so that nothing is cast; and the first has
    a gradient if the second has one."""
    if torch._C._is_any_autocast_enabled() or not size or any(type(n) is not int for n in size):
        return False
    for t in (one, other):
        if t is None or t.dtype is not input.dtype or t.device != input.device or [*t.shape] != size:
            return False
    return bool(one.requires_grad >= other.requires_grad)


RULES: dict[OpOverload, Callable[..., Any]] = {
    _aten.batch_norm.default: _batch_norm,
    _aten.layer_norm.default: _layer_norm,
}
