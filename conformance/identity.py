"""The identity target: its prefix hands the inputs through, its suffix runs the whole model.

    python -m conformance --target conformance.identity:prepare_split …

What the suite says of it is known beforehand: all that compares values must pass, since split and whole are one and the same, and
a failure is a false alarm of the suite. What asks for a plan or for source is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class UnsupportedError(RuntimeError):
    """There is no plan, no source and no wire format to ask for."""


@dataclass(frozen=True)
class Plan:
    """Stands where a plan would."""

    signature: str = "identity"
    captured_by: str = "nothing"
    nodes: tuple[Any, ...] = ()

    @property
    def inputs(self) -> tuple[Any, ...]:
        """No input is guarded."""
        raise UnsupportedError("the identity target has no plan, and so nothing to guard")


@dataclass(frozen=True)
class Candidate:
    """The only cut there is: before everything."""

    cut: int = 1
    split_id: str = "cut:1"
    safe: bool = True
    reason: str = ""
    boundary_bytes: float = 0.0
    after: str = ""


class Boundary:
    """The inputs of one call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.raw = (args, kwargs)

    def to_bytes(self) -> bytes:
        """There is no form for arbitrary inputs."""
        raise UnsupportedError("the identity target has no wire format")


class Identity:
    """A runtime that splits nothing."""

    plan, candidate, candidates = Plan(), Candidate(), (Candidate(),)
    plans: tuple[Plan, ...] = ()

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def run_prefix(self, *args: Any, **kwargs: Any) -> Boundary:
        """The inputs."""
        return Boundary(args, kwargs)

    def run_suffix(self, boundary: Boundary) -> Any:
        """What the model gives without gradients."""
        with torch.no_grad():
            return self.model(*boundary.raw[0], **boundary.raw[1])

    run_training_prefix = run_prefix

    def train_suffix(
        self,
        boundary: Boundary,
        targets: Any = None,
        *,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The whole step, backward pass included; no gradients are left for the prefix, and no parameters are its own."""
        if optimizer is not None:
            raise UnsupportedError("the identity target has no sides, and so no optimizer for one")
        with torch.enable_grad():
            loss = loss_fn(self.model(*boundary.raw[0], **boundary.raw[1]), targets)
        with torch.autocast("cpu", enabled=False):
            loss.backward()
        return loss.detach(), {}

    def backward_prefix(
        self, boundary: Boundary, gradients: Mapping[str, Any], *, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Nothing is left to do."""

    def resplit(self, cut: Any = None, **_: Any) -> Identity:
        """The same: there is one cut, and one mode."""
        return self

    @property
    def prefix_source(self) -> str:
        """There is none."""
        raise UnsupportedError("the identity target has no source")

    suffix_source = prefix_source

    def save(self, path: Any, **options: Any) -> None:
        """There is no plan that a file could hold."""
        raise UnsupportedError("the identity target has no files")


def prepare_split(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    split: Any,
    mode: str = "generated_eager",
    compile_options: Mapping[str, Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    fallback: str = "refuse",
) -> Identity:
    """A runtime with the interface of a split, around the whole model; the mode makes no difference."""
    return Identity(model)
