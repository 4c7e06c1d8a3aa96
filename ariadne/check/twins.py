"""Twins: a model whole and split, run and trained alike, with all that either returns or moves compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ariadne import tree
from ariadne.capture import left_as_found
from ariadne.check.observation import (
    Given,
    Inputs,
    Loss,
    copied,
    first_difference,
    generators,
    is_blank,
    requires_grad,
    seed_all,
)
from ariadne.errors import AriadneError
from ariadne.plan import TracePlan
from ariadne.runtime import SplitRuntime

Status = Literal["pass", "fail", "refused", "nondeterministic", "skipped", "left out"]
Optimizers = Sequence[torch.optim.Optimizer | None]
RATE, MOMENTUM = 1e-3, 0.9


class NothingShownError(Exception):
    """The model itself gives nothing that a comparison could show something by."""


class Whole:
    """A copy of a model, trained as it is, by SGD with momentum; every second step only adds to the gradients."""

    def __init__(self, model: nn.Module, loss_fn: Loss) -> None:
        self.model, self.loss_fn = copy.deepcopy(model), loss_fn
        self.optimizers: Optimizers = [_optimizer(list(self.model.parameters()))]
        self.output: Any = None

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> dict[str, Any]:
        """The training step of that number; returns the loss and all that a step moves, by names."""
        adding = number % 2 == 1
        for optimizer in self.optimizers:
            if optimizer is not None and not adding:
                optimizer.zero_grad(set_to_none=True)
        loss = self.train(args, kwargs, [None, None] if adding else self.optimizers)
        names: dict[torch.Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        state = {names[p]: dict(s) for o in self.optimizers if o is not None for p, s in o.state.items()}
        return {
            "output": self.output,
            "loss": loss.detach(),
            "gradients": {name: p.grad for p, name in names.items()},
            "gradients of inputs": {path: t.grad for path, t in tree.paths((args, kwargs)) if _wants_gradient(t)},
            "buffers": dict(self.model.named_buffers()),
            "optimizer state": {name: state.get(name) for name in names.values()},
            "parameters": {name: p.detach() for p, name in names.items()},
        }

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any], optimizers: Optimizers) -> torch.Tensor:
        """Forward, backward and the optimizer's step, where there is one; returns the loss."""
        with torch.enable_grad():
            loss = self.loss_of(self.model(*args, **kwargs))
            loss.backward()
        if optimizers[0] is not None:
            optimizers[0].step()
        return loss

    def loss_of(self, output: Any, targets: Any = None) -> torch.Tensor:
        """The loss, with a copy of the output kept."""
        self.output = copied(output)
        return self.loss_fn(output)


class Split(Whole):
    """A copy of a model that was split, trained in two halves, each with an optimizer of its own."""

    def __init__(self, runtime: SplitRuntime, loss_fn: Loss) -> None:
        self.runtime, self.loss_fn = copy.deepcopy(runtime), loss_fn
        self.model = self.runtime.model
        prefix = self.runtime.prefix_parameters()
        mine = {id(p) for p in prefix}
        suffix = [p for p in self.runtime.suffix_parameters() if id(p) not in mine]
        self.optimizers = [_optimizer(prefix), _optimizer(suffix)]
        self.output = None

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any], optimizers: Optimizers) -> torch.Tensor:
        """The same, split: the prefix's optimizer owns the parameters that both halves read."""
        prefix, suffix = optimizers
        boundary = self.runtime.run_training_prefix(*args, **kwargs)
        loss, gradients = self.runtime.train_suffix(boundary, loss_fn=self.loss_of, optimizer=suffix)
        self.runtime.backward_prefix(boundary, gradients, optimizer=prefix)
        return loss


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    wanted = [p for p in parameters if p.requires_grad]
    return torch.optim.SGD(wanted, lr=RATE, momentum=MOMENTUM) if wanted else None


@dataclass(frozen=True)
class Comparison:
    """Holds splits of a model against the model itself; what the whole gave is kept, by batch."""

    model: nn.Module
    inputs: Inputs
    seed: int
    loss_fn: Loss
    steps: int
    wholes: dict[int, tuple[Status, Any]] = field(default_factory=dict)
    trainings: dict[int, tuple[Status, Any]] = field(default_factory=dict)

    def of(self, split: SplitRuntime, kind: str, batch: int) -> tuple[Status, str]:
        """One check of one split at one batch: its status, and why."""
        verdict, given = self.training_of(batch) if kind == "train" else self.whole_of(batch)
        if verdict != "pass":
            return verdict, given
        try:
            if kind == "train":
                wrong = self.lockstep(Split(split, self.loss_fn), batch)
            else:
                wrong = (self.forward if kind == "forward" else self.replay)(split, batch, given)
        except AriadneError as error:
            return "refused", f"{type(error).__name__}: {error}"
        except Exception as error:
            return "fail", f"the split raises {_words(error)}, and the whole model does not"
        return ("fail", wrong) if wrong else ("pass", "")

    # --- the model itself -----------------------------------------------------------------------------------------

    def differs_from_itself(self, batch: int) -> str | None:
        """How the model's answers to one input under one seed differ, in words; None if they are the same."""
        wrong = first_difference(self.observed(self.whole, batch, 0), self.observed(self.whole, batch, 0))
        return f"two runs of the model itself on the same input and seed differ: {wrong}" if wrong else None

    def whole_of(self, batch: int) -> tuple[Status, Any]:
        """What the whole model gives for two inputs of a batch, or why there is nothing to compare with."""
        if batch not in self.wholes:
            try:
                moved = self.differs_from_itself(batch)
                seen = [self.observed(self.whole, batch, number) for number in (0, 1)]
                blank = not moved and any(is_blank(found["output"]) for found in seen)
                nan = f"the model itself gives nothing but nan at batch {batch}, and so equality would show nothing"
                self.wholes[batch] = (
                    ("nondeterministic", moved) if moved else ("skipped", nan) if blank else ("pass", seen)
                )
            except Exception as error:
                self.wholes[batch] = "skipped", f"the model itself raises {_words(error)} at batch {batch}"
        return self.wholes[batch]

    def training_of(self, batch: int) -> tuple[Status, Any]:
        """Whether two copies of the whole model, trained alike, come out alike; else why there is nothing to compare with."""
        if not any(p.requires_grad for p in self.model.parameters()):
            return "skipped", "the model has no parameter to train"
        if batch not in self.trainings:
            try:
                moved = self.lockstep(Whole(self.model, self.loss_fn), batch)
                words = "two copies of the model itself, trained under the same seed, differ: "
                self.trainings[batch] = ("nondeterministic", words + moved) if moved else ("pass", "")
            except Exception as error:
                why = f"the model itself can't be trained at batch {batch}: {_words(error)}"
                self.trainings[batch] = "skipped", why
        return self.trainings[batch]

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, without gradients."""
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def observed(self, call: Callable[..., Any], batch: int, number: int, plans: Sequence[TracePlan] = ()) -> Any:
        """Copies of all that a forward returns or moves."""
        with left_as_found(self.model, plans, buffers=True):
            args, kwargs = self.start(batch, number)
            output = call(*args, **kwargs)
            stood, buffers = generators(), dict(self.model.named_buffers())
            found: dict[str, Any] = copied({"output": output, "inputs": (args, kwargs), "buffers": buffers})
            return {**found, "requires_grad of the output": requires_grad(output), "generators": stood}

    def start(self, batch: int, number: int) -> Given:
        """Inputs, and the generators seeded for a run on them."""
        seed_all(self.seed)
        given = self.inputs(batch, self.seed + number)
        seed_all(self.seed + number)
        return given

    # --- the split ------------------------------------------------------------------------------------------------

    def forward(self, split: SplitRuntime, batch: int, whole: Sequence[dict[str, Any]]) -> str | None:
        """Prefix and suffix against the whole, on two inputs of one batch."""

        def halves(*args: Any, **kwargs: Any) -> Any:
            return split.run_suffix(split.run_prefix(*args, **kwargs))

        for number, expected in enumerate(whole):
            wrong = first_difference(expected, self.observed(halves, batch, number, split.plans))
            if wrong:
                return wrong
        return None

    def replay(self, split: SplitRuntime, batch: int, whole: Sequence[dict[str, Any]]) -> str | None:
        """One boundary, its suffix run twice, and between the two a boundary of other inputs made and used up."""
        with left_as_found(self.model, split.plans, buffers=True):
            args, kwargs = self.start(batch, 0)
            boundary = split.run_prefix(*args, **kwargs)
            crossing = copied(boundary.tensors)
            with left_as_found(self.model, split.plans, buffers=True):
                first = split.run_suffix(boundary)
                kept = copied(first)
            with left_as_found(self.model, split.plans, buffers=True):
                args, kwargs = self.start(batch, 1)
                split.run_suffix(split.run_prefix(*args, **kwargs))
            later = copied(first)
            with left_as_found(self.model, split.plans, buffers=True):
                second = copied(split.run_suffix(boundary))
            for words, expected, found in (
                ("the first run", whole[0]["output"], kept),
                ("the first answer, after a run on other inputs,", kept, later),
                ("the second run on the same boundary", whole[0]["output"], second),
                ("the first answer, after the second run,", kept, first),
                ("the boundary, after its suffix ran,", crossing, boundary.tensors),
            ):
                wrong = first_difference({words: expected}, {words: found})
                if wrong:
                    return wrong
        return None

    def lockstep(self, other: Whole, batch: int) -> str | None:
        """Train a copy of the whole and another twin step by step; the first difference, in words."""
        whole = Whole(self.model, self.loss_fn)
        with left_as_found(self.model, buffers=True):
            for step in range(self.steps):
                found = []
                for twin in (whole, other):
                    args, kwargs = self.start(batch, step)
                    found.append(
                        {**twin.step(args, kwargs, step), "inputs": (args, kwargs), "generators": generators()}
                    )
                if is_blank(found[0]["loss"]):
                    raise NothingShownError(f"its loss is {found[0]['loss'].item()} at step {step + 1}")
                wrong = first_difference(*found)
                if wrong:
                    return f"step {step + 1} of {self.steps}: {wrong}"
        return None


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
