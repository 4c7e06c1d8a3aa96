"""Steps that call functions under `torch.jit.script`: run cold at first, they are differentiated by the executor once warm."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that scripting is deprecated; packages go on using it
    from torch.jit import script

    @script
    def snake(x: Tensor, p: Tensor) -> Tensor:
        return x + torch.sin(p * x).pow(2)

    @script
    def swish(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    @script
    def halves(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
        low = x * by
        low.clamp_(max=0.0)
        return low, x.relu()

    @script
    def by_size(x: Tensor) -> Tensor:
        if x.shape[0] > 3:
            return x * 2
        return x - 1

    @script
    def doubled_(x: Tensor) -> Tensor:
        x.mul_(2)
        return x

    @script
    def row_wise(x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1)

    @script
    def joined(parts: list[Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": parts[0] + parts[1], "b": more["x"].tanh()}

    @script
    def width(x: Tensor) -> int:
        return x.shape[-1]

    @script
    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def both(function: Any, use: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A step that uses a scripted function, and the same by the Python that it was made from, for meta tensors."""
    python = function._torchdynamo_inline
    return (lambda f, *given, **said: use(function, *given, **said)), (
        lambda f, *given, **said: use(python, *given, **said)
    )


def of_joined(function: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    """Containers in, by keyword too, and a container out."""
    found = function([x, x], more={"x": y})
    return found["a"] + found["b"]


CALLED: dict[str, tuple[str, Any, Callable[..., Any]]] = {
    "scripted": ("ff", snake, lambda g, x, p: g(x, p)),
    "scripted_swish": ("f", swish, lambda g, x: g(x)),
    "scripted_halves": ("f", halves, lambda g, x: sum(g(x, by=0.5))),
    "scripted_by_size": ("f", by_size, lambda g, x: g(x)),
    "scripted_rows": ("f", row_wise, lambda g, x: g(x)),
    "scripted_containers": ("ff", joined, of_joined),
    "scripted_width": ("f", width, lambda g, x: x * g(x)),
    "scripted_noise": ("f", noisy, lambda g, x: g(x)),
}
