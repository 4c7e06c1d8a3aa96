"""Faults that tests of several checks plant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def training(**changed: Callable[..., Any]) -> Any:
    return changed


def no_walk_back(runtime: Any, boundary: Any, gradients: Any, **options: Any) -> None:
    pass


def halved_gradients(runtime: Any, boundary: Any, gradients: Any, **options: Any) -> None:
    off = {k: None if g is None else g * (1 + 2**-20) for k, g in gradients.items()}
    runtime.backward_prefix(boundary, off, **options)


def louder(runtime: Any, boundary: Any, targets: Any = None, *, loss_fn: Any, **options: Any) -> Any:
    loss, gradients = runtime.train_suffix(boundary, targets, loss_fn=loss_fn, **options)
    return loss * (1 + 2**-20), gradients


__all__ = ["halved_gradients", "louder", "no_walk_back", "training"]
