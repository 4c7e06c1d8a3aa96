"""What the tests of the traps stand on: a model beside its split twin, run and trained in step, every bit compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ariadne.capture.values
from ariadne import BoundaryPayload, SplitRuntime, SplitSpec, prepare_split, tree
from ariadne.boundary.payload import gradients_from_bytes, gradients_to_bytes
from ariadne.compare import difference
from ariadne.errors import GuardError, ModuleError
from ariadne.runtime.variant import Variant
from conformance.suite.state import seed_torch

Modes = Callable[[], AbstractContextManager[Any]]


def same(whole: Any, split: Any, where: str = "") -> None:
    """Hold two nested results against each other, bit for bit."""
    wrong = difference(whole, split)
    assert wrong is None, f"{where}: {wrong}"


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Reproducible numbers that draw nothing from the global generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loss_of(output: Any, targets: Any = None) -> torch.Tensor:
    """A loss to which every floating tensor of a nested output contributes, each element with another weight."""
    total = torch.zeros(())
    for t in tree.leaves(output):
        if isinstance(t, torch.Tensor) and t.is_floating_point():
            weight = torch.linspace(0.5, 1.5, t.numel()).reshape(t.shape)
            total = total + (t.float() * weight).pow(2).mean()
    return total


def over_the_wire(boundary: BoundaryPayload) -> BoundaryPayload:
    """The boundary as another process would receive it."""
    return BoundaryPayload.from_bytes(boundary.to_bytes())


class Twins:
    """One model twice, equal at first: `whole` runs as it is, `split` through a runtime."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        *args: Any,
        train: bool = True,
        boundary: str = "50%",
        batches: tuple[int, int] = (1, 8),
        **kwargs: Any,
    ) -> None:
        seed_torch(0)
        self.whole = build().train(train)
        self.split = copy.deepcopy(self.whole)
        spec = SplitSpec(boundary, dynamic_batch=batches)
        self.runtime = prepare_split(self.split, args, split=spec, example_kwargs=kwargs, on_change="refuse")

    def cuts(self, exact: bool = False) -> Iterator[SplitRuntime]:
        """A runtime for every safe cut of the plan, or for those that train exactly."""
        safe = [c for c in self.runtime.candidates if c.safe and not (exact and c.inexact)]
        assert safe
        for candidate in safe:
            yield self.runtime.resplit(candidate)

    def state(self, model: nn.Module) -> dict[str, Any]:
        """All that a step may move: parameters, gradients, buffers and the generator."""
        return {
            "parameters": {n: p.detach() for n, p in model.named_parameters()},
            "gradients": {n: p.grad for n, p in model.named_parameters()},
            "buffers": dict(model.named_buffers()),
            "rng": torch.get_rng_state(),
        }

    def both(self, change: Callable[[nn.Module], Any]) -> None:
        """Change both models in the same way."""
        for model in (self.whole, self.split):
            change(model)

    def held(self, runtimes: Sequence[SplitRuntime], *args: Any, **kwargs: Any) -> None:
        """Each of the runtimes equals the model as it is now, or a guard says that it can't."""
        for runtime in runtimes:
            try:
                self.replay(*args, runtime=runtime, **kwargs)
            except GuardError:
                self.whole.load_state_dict(self.split.state_dict())

    def replay(
        self,
        *args: Any,
        runtime: SplitRuntime | None = None,
        wire: bool = False,
        mode: Modes = nullcontext,
        **kwargs: Any,
    ) -> Any:
        """Run both on the same inputs, at every safe cut (or one), and compare all that moved."""
        for cut in [runtime] if runtime else self.cuts():
            seed_torch(7)
            with torch.no_grad(), mode():
                expected = self.whole(*copies(args), **copies(kwargs))
            after = self.state(self.whole)
            seed_torch(7)
            with mode():
                boundary = cut.run_prefix(*copies(args), **copies(kwargs))
                carried = over_the_wire(boundary) if wire else boundary
                found = cut.run_suffix(carried)
            same(expected, found, cut.split_id)
            same(after, self.state(self.split), cut.split_id)
        return found

    def train(
        self,
        *args: Any,
        steps: int = 2,
        runtime: SplitRuntime | None = None,
        wire: bool = False,
        mode: Modes = nullcontext,
        backward_outside: bool = False,
        optimizer: str = "SGD",
        one: bool = False,
        loss: Callable[..., Any] = loss_of,
        **kwargs: Any,
    ) -> None:
        """Train both for some steps at every safe cut (or one) and compare all that a step moves.

        One optimizer per side, as users have them; parameters that both sides read go to neither and are stepped by a
        third. With `one`, a single optimizer owns all, and steps after both halves.
        """
        for cut in [runtime] if runtime else self.cuts(exact=True):
            shared = {id(p) for p in cut.shared_parameters()}
            sides = [
                [p for p in side if id(p) not in shared] for side in (cut.prefix_parameters(), cut.suffix_parameters())
            ]
            sides.append(cut.shared_parameters())
            if one:
                sides = [[], [], list(self.split.parameters())]
            prefix_step, suffix_step, shared_step = (make_optimizer(optimizer, side) for side in sides)
            whole_step = make_optimizer(optimizer, list(self.whole.parameters()))
            for step in range(steps):
                at = f"{cut.split_id}, step {step}"
                seed_torch(step)
                mine, theirs = copies(args), copies(args)
                for p in self.whole.parameters():
                    p.grad = None
                with mode():
                    expected = loss(self.whole(*mine, **copies(kwargs)), None)
                    if not backward_outside:
                        expected.backward()
                if backward_outside:
                    expected.backward()
                if whole_step:
                    whole_step.step()
                after = self.state(self.whole)
                seed_torch(step)
                if shared_step:
                    shared_step.zero_grad()
                with mode():
                    boundary = cut.run_training_prefix(*theirs, **copies(kwargs))
                    carried = over_the_wire(boundary) if wire else boundary
                    found, gradients = cut.train_suffix(carried, loss_fn=loss, optimizer=suffix_step)
                if wire:
                    gradients = gradients_from_bytes(gradients_to_bytes(gradients))
                with nullcontext() if backward_outside else mode():
                    cut.backward_prefix(boundary, gradients, optimizer=prefix_step)
                if shared_step:
                    shared_step.step()
                same(expected.detach(), found, at)
                same(after, self.state(self.split), at)
                same(gradients_of(mine), gradients_of(theirs), f"{at}, inputs")
            same(
                self.memory(self.whole, whole_step),
                self.memory(self.split, prefix_step, suffix_step, shared_step),
                cut.split_id,
            )

    @staticmethod
    def memory(model: nn.Module, *optimizers: torch.optim.Optimizer | None) -> dict[str, Any]:
        """What the optimizers remember of each parameter, by its name."""
        names = {id(p): n for n, p in model.named_parameters()}
        found = {names[id(p)]: dict(s) for o in optimizers if o for p, s in o.state.items() if s}
        return dict(sorted(found.items()))


def make_optimizer(kind: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer | None:
    """SGD with momentum, or Adam; None where there is nothing to own."""
    if not parameters:
        return None
    return (
        torch.optim.Adam(parameters, lr=0.01) if kind == "Adam" else torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    )


def copies(value: Any) -> Any:
    """Fresh tensors in the same structure, since a forward may write into its inputs; `requires_grad` is kept."""

    def copied(t: Any) -> Any:
        return t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t

    return tree.map_leaves(copied, value)


def gradients_of(inputs: Any) -> list[Any]:
    """The gradients that arrived at the inputs."""
    return [t.grad for t in tree.leaves(inputs) if isinstance(t, torch.Tensor)]


class Fn(nn.Module):
    """A model whose forward is a function of itself and its inputs; its parts are given by name."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def without_what_is_a_view(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: nothing knows any more which values are views."""
    made = ariadne.capture.values.Value
    patch.setattr(
        ariadne.capture.values, "Value", lambda *fields, **named: replace(made(*fields, **named), is_view=False)
    )
    patch.setattr(Variant, "refuse_views", lambda self, raw: None)


__all__ = ["Fn", "Modes", "Twins", "copies", "loss_of", "numbers", "over_the_wire", "same", "without_what_is_a_view"]


def refuses_after(model: nn.Module, inputs: torch.Tensor, change: Callable[[], Any]) -> None:
    """See a split of a model go on with what is as it was, and refuse what changed."""
    split = prepare_split(model, (inputs,), split="after:first", on_change="refuse")
    whole = model(inputs)
    assert torch.equal(split.run_suffix(split.run_prefix(inputs)), whole)
    change()
    assert not torch.equal(model(inputs), whole), "the change counts"
    with pytest.raises(ModuleError, match="undo that, or call prepare_split again"):
        split.run_suffix(split.run_prefix(inputs))
