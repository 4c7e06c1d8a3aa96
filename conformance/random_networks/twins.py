"""A network twice, equal at first: one runs whole, the other split; both always do the same, and are compared after."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, PythonSplit, SplitRuntime, SplitSpec, prepare_split, tree
from ariadne.capture import called
from ariadne.errors import AriadneError
from conformance.random_networks import given_steps
from conformance.random_networks.compare import (
    ON_CLASS,
    Different,
    aliases,
    bare,
    copied,
    same,
    seed_all,
    state,
    tensors,
)
from conformance.random_networks.parts import Delay, Recorded
from conformance.random_networks.program import Program, apart, build
from conformance.random_networks.python_steps import Counting
from conformance.suite.state import rng_state, set_rng_state

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
APART = 3  # every third step is by an optimizer for each side, as the docs have it
BATCHES = (1, 6)  # what every split is prepared for, or from 0 on


class Invalid(Exception):
    """The whole model itself can't do what was asked, so there is nothing to hold the split against."""


def loss_of(output: Any, targets: Any = None) -> Tensor:
    """A sum to which every element of every floating tensor of the output contributes with a weight of its own."""
    total = torch.zeros(())
    for k, t in enumerate(t for t in tensors(output) if t.is_floating_point()):
        weight = (torch.arange(t.numel(), dtype=torch.float32) + k).cos().view(t.shape)
        total = total + (t.float() * weight).sum()
    return total


def asked(model: nn.Module, seed: int) -> nn.Parameter | None:
    """The parameter for which the loss of a step of that number asks for gradients itself; None where it asks for none."""
    wanting = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    return wanting[seed // 2 % len(wanting)] if wanting and seed % 6 in (2, 4) else None


def penalised(model: nn.Module, seed: int) -> Callable[..., Tensor]:
    """The loss for a step of that number: every second has a penalty over all parameters, before the sum or after it.

    Of the others, two of three ask for the gradient of one parameter, which may be one that the loss does not reach.
    """
    wanted = asked(model, seed)
    if wanted is not None:

        def asking(output: Any, targets: Any = None) -> Tensor:
            found = loss_of(output)
            if not found.requires_grad:
                return found
            if seed % 6 == 4:
                found.backward(inputs=[wanted], retain_graph=True)
                return found * 2
            (gradient,) = torch.autograd.grad(found, [wanted], retain_graph=True, allow_unused=True)
            return found + (0.125 if gradient is None else gradient.detach().float().sum())

        return asking
    if seed % 2 == 0:
        return loss_of

    def loss(output: Any, targets: Any = None) -> Tensor:
        found = loss_of(output) if seed % 4 == 1 else torch.zeros(())
        for k, p in enumerate(p for p in model.parameters() if p.requires_grad and p.is_floating_point()):
            found = found + (0.125 + k) * (p.float().pow(3) / 8).sum()
        return found if seed % 4 == 1 else found + loss_of(output)

    return loss


class Twins:
    """The whole network and its split twin, each with an optimizer of its own."""

    def __init__(self, program: Program, training: bool) -> None:
        self.program, self.turned, self.beside = program, False, given_steps.beside()
        self.whole = build(program).train(training)
        self.split = apart(copy.deepcopy(self.whole))
        self.optimizers()

    def optimizers(self) -> None:
        """New optimizers, for the parameters that each model has now."""
        self.whole_step, self.split_step = (_optimizer(m) for m in (self.whole, self.split))

    def inputs(self, batch: int, seed: int = 0) -> Inputs:
        """Inputs of that batch; the same for the same numbers. The keywords come the other way round where they are `turned`."""
        args, kwargs = self.program.arguments(batch, seed, beside=self.beside)
        return args, dict(reversed(kwargs.items())) if self.turned else kwargs

    def trace(self, where: str, prepare: Callable[..., SplitRuntime] = prepare_split) -> SplitRuntime:
        """Prepare a split of the second model, which must be left as found."""
        before = state(self.split, self.split_step)
        args, kwargs = self.inputs(self.program.batch, seed=9)
        given = copied((args, kwargs))
        try:
            return prepare(self.split, args, split=self.spec(args, kwargs), example_kwargs=kwargs)
        finally:
            same(before, state(self.split, self.split_step), f"{where}, left as found")
            same(given, (args, kwargs), f"{where}, example inputs")

    def spec(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitSpec:
        """Half of the way, for all batches; where the batch of any input lies elsewhere than in front, this is said of all."""
        along, names = self.program.along, called(self.split, tree.flatten((args, kwargs))[1])
        names = [name for name in names if not name.startswith("beside")]
        said = dict(zip(names, along, strict=True)) if any(along) else None
        return SplitSpec("50%", dynamic_batch=(self.program.least, BATCHES[1]), batch_dim=said)

    def reset(self) -> None:
        """Set the second model and its optimizer to the state of the first."""
        with torch.no_grad():
            if len([*self.whole.buffers()]) > len([*self.split.buffers()]):  # half of a call hands one on to another
                for module in self.split.modules():
                    module._buffers.update({k: t.clone() for k, t in module._buffers.items() if t is not None})
            self.split.load_state_dict(self.whole.state_dict())
            self.split.records[:] = self.whole.records
            self.split.notes.clear()
            self.split.notes.update(self.whole.notes)
            for name in ON_CLASS:
                left = getattr(type(self.whole), name)
                setattr(type(self.split), name, [*left] if isinstance(left, list) else left)
            for mine, other in zip(self.split.modules(), self.whole.modules(), strict=True):
                if isinstance(mine, Counting):
                    mine.calls = other.calls
                if isinstance(mine, Delay):
                    mine.seen.update(copied(other.seen))
                if isinstance(mine, Recorded):
                    mine.recorder.found.clear()
                    mine.recorder.found.update(other.recorder.found)
            theirs = dict(self.whole.named_parameters())
            for n, p in self.split.named_parameters():
                p.grad = copied(theirs[n].grad)
        if self.whole_step and self.split_step:
            self.split_step.load_state_dict(copy.deepcopy(self.whole_step.state_dict()))

    def equal(self, where: str) -> None:
        """Raise `Different` unless both models, optimizers and all generators stand alike."""
        self.alike(where, state(self.whole, self.whole_step))

    def alike(self, where: str, after: dict[str, Any]) -> None:
        same(after, state(self.split, self.split_step), where)

    def replay(self, runtime: SplitRuntime, batch: int, where: str, *, wire: bool = False, seed: int = 0) -> bool:
        """Run both without gradients and compare all there is; False where the whole model, and the split, refuse the batch."""
        mine, theirs = copied(self.inputs(batch, seed)), copied(self.inputs(batch, seed))
        seed_all(seed)
        try:
            with torch.no_grad():
                expected = self.whole(*mine[0], **mine[1])
        except Exception as error:
            return self._raises(error, lambda: runtime.run_suffix(runtime.run_prefix(*theirs[0], **theirs[1])), where)
        if wire:
            _bared(self.whole)
        after = state(self.whole, self.whole_step)
        seed_all(seed)
        boundary = runtime.run_prefix(*theirs[0], **theirs[1])
        carried = sent(boundary, batch) if wire else boundary
        kept = [t.clone() for t in tensors(list(carried.raw))]
        found = runtime.run_suffix(carried)
        # Bytes carry data: that a tensor wanted a gradient stays behind. And a warm function under `torch.jit.script` says without
        # gradients, too, of what it makes that it wants one.
        if wire or any(step["do"].startswith("scripted") for step in self.whole.program.steps):
            expected, found = (bare(value) for value in (expected, found))
        if wire:
            _bared(self.split)
        same(expected, found, where)
        self.alike(where, after)
        same(mine, theirs, f"{where}, inputs")
        if wire or not isinstance(
            runtime, PythonSplit
        ):  # a forward that waits holds what crosses itself, and may write there
            same(kept, [t.clone() for t in tensors(list(carried.raw))], f"{where}, the boundary itself")
        if not wire:
            same(aliases([expected, mine]), aliases([found, theirs]), f"{where}, shared memory")
        return True

    def two_in_flight(self, runtime: SplitRuntime, batch: int, where: str, *, seed: int = 0) -> bool:
        """Run two prefixes and then both suffixes, each with random numbers of its own; each must give what the whole gives.

        What the suffixes put into containers goes there in another order than in two calls of the whole: that is not compared.
        """
        calls = [(s, copied(self.inputs(batch, s)), copied(self.inputs(batch, s))) for s in (seed, seed + 1)]
        expected, flying = [], []
        for s, (args, kwargs), _ in calls:
            seed_all(s)
            try:
                with torch.no_grad():
                    expected.append(copied(self.whole(*args, **kwargs)))
            except Exception:
                self.reset()
                return False
        for s, _, (args, kwargs) in calls:
            seed_all(s)
            flying.append((runtime.run_prefix(*args, **kwargs), rng_state()))
        for whole, (boundary, stood) in zip(expected, flying, strict=True):
            set_rng_state(stood)
            same(whole, copied(runtime.run_suffix(boundary)), f"{where}, two in flight")
        same(dict(self.whole.named_buffers()), dict(self.split.named_buffers()), f"{where}, buffers of two in flight")
        self.reset()
        return True

    def train(self, runtime: SplitRuntime, batch: int, where: str, *, seed: int = 0, wire: bool = False) -> bool:
        """Train both for one step and compare all that it moves; False where the whole model, and the split, refuse it."""
        mine, theirs = copied(self.inputs(batch, seed)), copied(self.inputs(batch, seed))
        seed_all(seed)
        if self.whole_step:
            self.whole_step.zero_grad()
            self.split_step.zero_grad()
        sides = seed % APART == 0 and not wire and hasattr(runtime, "prefix_parameters")
        ours = _plain_step([p for p in self.whole.parameters() if p.requires_grad]) if sides else self.whole_step

        def halves() -> Tensor:
            before, after, rest = self._of_sides(runtime) if sides else (None, None, self.split_step)
            boundary = runtime.run_training_prefix(*theirs[0], **theirs[1])
            given = sent(boundary, batch) if wire else boundary
            loss, gradients = runtime.train_suffix(given, loss_fn=penalised(self.split, seed), optimizer=after)
            runtime.backward_prefix(boundary, gradients, optimizer=before)
            if rest:
                rest.step()
            return loss

        try:
            with torch.enable_grad():
                loss = penalised(self.whole, seed)(self.whole(*mine[0], **mine[1]))
                loss.backward()
        except Exception as error:
            return self._raises(error, halves, where)
        if ours:
            ours.step()
        after = state(self.whole, self.whole_step)
        seed_all(seed)
        found = halves()
        same(loss.detach(), found, f"{where}, loss")
        self.alike(where, after)
        same(mine, theirs, f"{where}, inputs")
        same(_gradients(mine), _gradients(theirs), f"{where}, gradients of inputs")
        return True

    def _of_sides(self, runtime: SplitRuntime) -> tuple[torch.optim.Optimizer | None, ...]:
        """An optimizer for the prefix, one for the suffix, and one for what is of both or of neither."""
        sides = [[*runtime.prefix_parameters()], [*runtime.suffix_parameters()]]
        both = {id(p) for p in sides[0]} & {id(p) for p in sides[1]}
        owned = [[p for p in side if id(p) not in both] for side in sides]
        taken = {id(p) for side in owned for p in side}
        return tuple(
            _plain_step([p for p in side if p.requires_grad])
            for side in (*owned, [p for p in self.split.parameters() if id(p) not in taken])
        )

    def _raises(self, error: Exception, act: Callable[[], Any], where: str) -> bool:
        """Where the whole model raises, so must the split; whatever moved until then is put back."""
        try:
            act()
        except Exception as other:
            if type(other) is not type(error) and not isinstance(other, AriadneError):
                raise Different(f"{where}: the whole model raises {error!r}, the split {other!r}") from other
            self.reset()
            return False
        raise Different(f"{where}: the whole model raises {error!r}, the split does not")


def _gradients(inputs: Inputs) -> list[tuple[bool, Tensor | None]]:
    """Of each input, whether it is a leaf, and its gradient if so: one that was written into may be none."""
    return [(t.is_leaf, t.grad if t.is_leaf else None) for t in tensors(list(inputs))]


def sent(boundary: BoundaryPayload, batch: int) -> BoundaryPayload:
    """What a boundary is after it was sent as bytes, or, at odd batches, copied: a forward that waits can't be."""
    if batch % 2 and type(boundary) is BoundaryPayload:
        return copy.deepcopy(boundary)
    return BoundaryPayload.from_bytes(boundary.to_bytes())


def _bared(model: nn.Module) -> None:
    """What a network noted of its tensors wants no gradient from now on: beyond the wire there is no such wish."""
    model.records[:] = bare(list(model.records))
    model.notes.update(bare(dict(model.notes)))
    for part in model.modules():
        if isinstance(part, Recorded):
            part.recorder.found.update(bare(part.recorder.found))
    type(model).seen[:] = bare(type(model).seen)
    type(model).latest = bare(type(model).latest)


def _plain_step(parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    """An optimizer that remembers nothing."""
    return torch.optim.SGD(parameters, lr=0.01) if parameters else None


def _optimizer(model: nn.Module) -> torch.optim.Optimizer | None:
    found = [p for p in model.parameters() if p.requires_grad]
    sparse = any(
        getattr(m, "sparse", False) for m in model.modules()
    )  # momentum that began sparse takes no dense gradient
    return torch.optim.SGD(found, lr=0.01, momentum=0.0 if sparse else 0.9) if found else None


__all__ = ["BATCHES", "Invalid", "Twins", "loss_of"]
