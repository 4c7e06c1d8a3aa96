"""Results of common ops without data, made by cheaper ops that give tensors of the same kind.

Torch's own rules take means, roots, products and sums in their place, ten to thirty fake ops each: most of a symbolic run.
Sizes, strides, dtype, need of a gradient and what a gradient leads to are as theirs. What a rule does not know, torch's has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

_aten: Any = torch.ops.aten


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> Any:
    plain = bias is not None and input.dtype is weight.dtype and weight.dim() == 2
    # Where a bias is added to a product, that is another tensor than a view of it.
    if plain and _fit(weight, (bias,), weight.shape[0]) and (input.dim() == 2 or input.is_contiguous()):
        return _aten.linear.default(input, _aten.add.Tensor(weight, _aten.unsqueeze.default(bias, 1)))
    return _aten.linear.default(input, weight, bias)


def _batch_norm(input: torch.Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool,
                momentum: float, eps: float, cudnn_enabled: bool) -> Any:  # fmt: skip
    tracked = (running_mean, running_var)
    if input.dim() > 1 and _fit(input, (weight, bias, *tracked), input.shape[1]):
        if training:  # it writes them
            for t in tracked:
                _aten.mul_.Tensor(t, t)
        scale = _aten.add.Tensor(weight, bias)
        return _aten.mul.Tensor(input, _aten.view.default(scale, [*scale.shape, *(1 for _ in input.shape[2:])]))
    return _aten.batch_norm.default(input, weight, bias, *tracked, training, momentum, eps, cudnn_enabled)


def _layer_norm(input: torch.Tensor, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None,
                eps: float = 1e-5, cudnn_enable: bool = True) -> Any:  # fmt: skip
    size = [*input.shape[input.dim() - len(normalized_shape) :]]
    if [*normalized_shape] == size and _fit(input, (weight, bias), *size) and input.is_contiguous():
        return _aten.mul.Tensor(input, _aten.add.Tensor(weight, bias))
    return _aten.layer_norm.default(input, normalized_shape, weight, bias, eps, cudnn_enable)


def _dropout(input: torch.Tensor, p: float, train: bool) -> Any:
    if train and 0 < p < 1 and _is_plain(input) and input.is_contiguous():
        return _aten.mul.Tensor(input, input)
    return _aten.dropout.default(input, p, train)


def _of_each_element(op: OpOverload) -> Callable[..., Any]:
    def rule(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_plain(input) and not kwargs and all(type(a) in (int, float) for a in args):
            return _aten.mul.Tensor(input, input)
        return op(input, *args, **kwargs)

    return rule


def _is_plain(input: torch.Tensor) -> bool:
    return input.layout is torch.strided and input.is_floating_point() and not torch._C._is_any_autocast_enabled()


def _fit(like: torch.Tensor, tensors: Sequence[Any], *size: Any) -> bool:
    """Whether all tensors have this size, in which is no symbol, and are like the first, so that nothing is cast."""
    return (
        _is_plain(like)
        and bool(size)
        and all(type(n) is int for n in size)
        and all(
            t is not None and t.dtype is like.dtype and t.device == like.device and [*t.shape] == [*size]
            for t in tensors
        )
    )


_ELEMENTWISE = (
    _aten.elu.default,
    _aten.gelu.default,
    _aten.hardswish.default,
    _aten.hardtanh.default,
    _aten.leaky_relu.default,
    _aten.mish.default,
    _aten.relu.default,
    _aten.silu.default,
    _aten.softplus.default,
    _aten.tanh.default,
)
RULES: dict[OpOverload, Callable[..., Any]] = {
    _aten.batch_norm.default: _batch_norm,
    _aten.dropout.default: _dropout,
    _aten.layer_norm.default: _layer_norm,
    _aten.linear.default: _linear,
    **{op: _of_each_element(op) for op in _ELEMENTWISE},
}
