"""Optimizers, schedulers and losses as they are typed: `sgd:lr=0.1,momentum=0.9`, `cross_entropy:label_smoothing=0.1`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ariadne.errors import SpecError, nearest

LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss", "poisson_nll_loss"),
)
OPTIMIZERS = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
SCHEDULERS = {
    name.lower(): kind
    for name, kind in vars(torch.optim.lr_scheduler).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler)
}
Loss = Callable[[Any, Any], torch.Tensor]


def _parsed(text: str, what: str) -> tuple[str, dict[str, Any]]:
    """A name and its options, which are Python's literals."""
    name, _, options = text.partition(":")
    try:
        call = ast.parse(f"f({options})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError("options are name=value")
        return name.strip().lower(), {str(k.arg): _literal(k.value) for k in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise SpecError(f"the {what} {text!r} is not NAME:option=value,option=value: {error}") from None


def _literal(value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError:
        raise ValueError(f"{ast.unparse(value)!r} is no literal of Python's, such as True, 0.9 or 'text'") from None


def optimizer(text: str, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
    """The optimizer that a text names, over these parameters; None where there is nothing to train.

    >>> optimizer("sgd:lr=0.1,momentum=0.9", model.parameters())
    """
    name, options = _parsed(text, "optimizer")
    kind = OPTIMIZERS.get(name)
    if kind is None:
        raise SpecError(
            f"there is no optimizer {name!r} in torch.optim; near: {nearest(name, OPTIMIZERS, 3) or 'none'}"
        )
    trained = [p for p in parameters if p.requires_grad]
    try:
        return kind(trained, **options) if trained else None
    except (TypeError, ValueError) as error:
        raise SpecError(f"the optimizer {text!r} can't be made: {error}") from None


def scheduler(text: str, optimizer: torch.optim.Optimizer | None) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The learning-rate scheduler that a text names, over an optimizer; None where there is nothing to train.

    >>> scheduler("cosineannealinglr:T_max=100", optimizer)
    """
    name, options = _parsed(text, "scheduler")
    kind = SCHEDULERS.get(name)
    if kind is None:
        raise SpecError(
            f"there is no scheduler {name!r} in torch.optim.lr_scheduler; near: {nearest(name, SCHEDULERS, 3) or 'none'}"
        )
    try:
        return None if optimizer is None else kind(optimizer, **options)
    except (TypeError, ValueError) as error:
        raise SpecError(f"the scheduler {text!r} can't be made: {error}") from None


def loss(text: str) -> Loss:
    """The function of torch.nn.functional that a text names, of output and targets.

    >>> loss("cross_entropy:label_smoothing=0.1")
    """
    name, options = _parsed(text, "loss")
    if name not in LOSSES:
        raise SpecError(
            f"there is no loss {name!r}; there are {', '.join(LOSSES)}. For others call ariadne.serve(loss_fn=…)"
        )
    return partial(getattr(functional, name), **options)
