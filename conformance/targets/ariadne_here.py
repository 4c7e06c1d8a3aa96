"""Ariadne, from this checkout: both halves at the middle, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from ariadne import SplitSpec, prepare_split
from conformance.targets.base import LARGEST, Captured, Loss, Target


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    fallback: Literal["refuse", "python"] = "refuse",
) -> Captured:
    """As the README's first example, in the middle."""
    spec = SplitSpec("percent:50", dynamic_batch=(1, LARGEST))
    runtime = prepare_split(model, tuple(args), split=spec, example_kwargs=dict(kwargs) or None, fallback=fallback)

    def call(*args: Any, **kwargs: Any) -> Any:
        return runtime.run_suffix(runtime.run_prefix(*args, **kwargs))

    def step(loss: Loss, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        boundary = runtime.run_training_prefix(*args, **kwargs)
        _, gradients = runtime.train_suffix(boundary, loss_fn=lambda output, _: loss(output))
        runtime.backward_prefix(boundary, gradients)

    return Captured(call, step=step)


TARGET = Target(
    name="ariadne_here",
    title="Ariadne",
    kind="split",
    package="ariadne-runtime",
    source="README.md and docs/errors.md of this repository",
    capture=capture,
    disclaims={
        "state/cache": "documented: a cache that forward fills once may stay empty, for no result depends on it"
    },
    tolerance=0.0,
)
