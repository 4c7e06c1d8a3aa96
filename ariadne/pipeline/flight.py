"""One micro-batch in one part: forward from what came in to what goes on, and back from the gradients of what went on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ariadne import tree
from ariadne.boundary import BoundaryPayload
from ariadne.errors import TrainingError
from ariadne.runtime import (
    TAPS,
    Ends,
    KeptWhole,
    SplitRuntime,
    Variant,
    casts,
    caught,
    leaves_of,
    refuse_hooked,
    taps,
    training,
)

Shares = dict[str, torch.Tensor]  # of tied parameters, by name: what later parts have for them


@dataclass(frozen=True)
class Onward:
    """What a part of one plan sends on: the values that cross the cut behind it, and those of them that a later part writes
    into."""

    split_id: str
    live: tuple[str, ...]
    copied: tuple[tuple[int, str], ...] = ()


@dataclass
class Flight:
    """One micro-batch in one part, from its forward to its backward pass.

    `gives`: what goes on to the next part, with the graph behind it; `output`: what the last part gives instead. `taken`:
    the values that came in, as the part got them; their gradients come into `arrived`, once `walking` holds something.
    """

    gives: BoundaryPayload | None = None
    output: Any = None
    taken: list[torch.Tensor] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    arrived: taps.Gradients = field(default_factory=dict)
    walking: list[bool] = field(default_factory=list)
    ends: Iterable[Any] = ()
    entered: tuple[BoundaryPayload, list[Any]] | None = None  # of the last part: what came in, and as the part got it


def onward(variant: Variant, raw: tuple[Any, ...], batch: int, to: Onward, trains: bool) -> BoundaryPayload:
    """What goes on to the next part; where it `trains` without its graph, which is kept beside it."""
    signature = variant.key[0]
    if not trains:
        return BoundaryPayload(to.split_id, signature, batch, to.live, raw)
    for i, name in to.copied:
        if raw[i]._is_view():
            raise TrainingError(
                f"a step across {to.split_id} may differ from the whole model's in the last bits: at this batch {name!r} is a view "
                "of another tensor, which it was not at capture, and a later part writes into it. Cut elsewhere"
            )
    carried, wanting = taps.carried(to.live, raw)
    return BoundaryPayload(to.split_id, signature, batch, to.live, carried, wanting, raw)


def first(runtime: SplitRuntime, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool) -> Flight:
    """The first part, on the inputs of the model."""
    if not trains:
        return Flight(runtime.run_prefix(*args, **kwargs))
    return Flight(runtime.run_training_prefix(*args, **kwargs))


def later(runtime: SplitRuntime, boundary: BoundaryPayload, to: Mapping[str, Onward], trains: bool) -> Flight:
    """Another part, on what the one before it gave; `to` says by the plan's signature what goes on, and nothing for the last."""
    variant = runtime.accept(boundary)
    next_ = to.get(variant.key[0])
    if not trains:
        out = runtime.run_suffix(boundary)
        return Flight(output=out) if next_ is None else Flight(onward(variant, out, boundary.batch, next_, False))
    variant.check_suffix(boundary)
    _refuse_casts(variant)
    flight = Flight()
    with torch.enable_grad():
        values, flight.arrived = taps.tapped(boundary, flight.walking)
        for label, value in boundary.leaves():
            if isinstance(value, torch.Tensor) and label in boundary.requires_grad:
                flight.labels.append(label)
        at = dict(zip((label for label, _ in boundary.leaves()), tree.leaves(tuple(values)), strict=True))
        flight.taken = [at[label] for label in flight.labels]
        out = variant.run(variant.suffix, boundary.batch, *values)
        if next_ is None:
            flight.output, flight.ends, flight.entered = out, Ends(out), (boundary, values)
        else:
            flight.gives = onward(variant, out, boundary.batch, next_, True)
    return flight


@contextmanager
def asked(flight: Flight | None, prefix: Sequence[torch.Tensor]) -> Iterator[None]:
    """A loss function of the last part; `TrainingError` where it asks for a gradient of which this part has a share alone.

    `prefix`: the parameters that other parts use, where they are at hand.
    """
    if flight is None or flight.entered is None:
        yield
        return
    boundary, values = flight.entered
    with KeptWhole(boundary, TAPS, prefix):
        yield
        refuse_hooked(boundary, values, TAPS)


def _refuse_casts(variant: Variant) -> None:
    """Raise `TrainingError` for a weight of this and an earlier part, of which each part would have a cast copy of its own."""
    if variant.cast and casts.kept() is not None:
        for name in variant.cast:
            path, key = variant.plan.values[name].origin
            p = variant.model.get_submodule(path)._parameters[key]
            if p is not None and p.requires_grad:
                told = f"{path}.{key}".strip(".")
                raise TrainingError(
                    f"autocast casts the parameter {told!r} once for all parts, and the whole model adds their gradients before it "
                    "casts back. Here each part that uses it has a cast of its own, and the sum may differ in the last bits. Use "
                    "torch.autocast(..., cache_enabled=False), or cut so that one part uses it alone"
                )


def roots_of(flight: Flight, loss: Any, gradients: Mapping[str, torch.Tensor | None]) -> tuple[list[Any], list[Any]]:
    """Where the walk back begins, and with what: the loss, or what went on and has gradients."""
    if flight.gives is None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TrainingError("loss_fn must return a tensor with one element. Reduce it, by sum() or mean()")
        return ([loss], [torch.ones_like(loss)]) if loss.requires_grad else ([], [])
    return training.roots_of(flight.gives, gradients)


class _Entering(torch.autograd.Function):
    """What later parts have for a parameter, as a node of its own that gives it away.

    A root's gradient would be held here, too, and autograd adds in place, into the first addend's strides, only to what it holds
    alone; else a dim of one element gets another stride than in the whole.
    """

    @staticmethod
    def forward(ctx: Any, p: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        """A number, to be a root."""
        ctx.held = held
        return torch.zeros((), device=p.device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The share."""
        return ctx.held.pop(), None


def _copied(share: torch.Tensor) -> torch.Tensor:
    """The same numbers with the same strides, in memory of their own."""
    if share.layout is not torch.strided:
        return share.clone()
    return torch.empty_strided(share.shape, share.stride(), dtype=share.dtype, device=share.device).copy_(share)


def back(
    flight: Flight,
    loss: Any,
    gradients: Mapping[str, torch.Tensor | None],
    shares: Mapping[str, torch.Tensor],
    tied: Mapping[str, torch.nn.Parameter],
    own: frozenset[str],
    parameters: Sequence[torch.nn.Parameter],
    foreign: Sequence[torch.Tensor],
) -> tuple[taps.Gradients, Shares]:
    """Walk back through one part: the gradients of what came in, and the shares of tied parameters that go on to earlier parts.

    `shares`: what later parts have for tied parameters. Each enters as a root where this part reads the parameter, so that autograd
    adds in the order in which the whole does, and goes by where it does not. What this part is the first to read (`own`) is
    accumulated here. `foreign`: the parameters of other parts alone, which a loss must not reach.
    """
    roots, given = roots_of(flight, loss, gradients)
    if flight.gives is None and roots:
        reached = {id(leaf) for leaf in leaves_of(roots[0], flight.ends)}
        if reached & {id(p) for p in foreign} - {id(p) for p in parameters}:
            raise TrainingError(
                "the loss reaches parameters that only other parts use, as a penalty over all parameters does; they are trained in "
                "other processes. Leave them out of the loss, and add their penalty to the gradients where they are"
            )
    for name, share in shares.items():
        if name in tied:
            roots.append(_Entering.apply(tied[name], [_copied(share)]))
            given.append(torch.ones_like(roots[-1]))
    onwards: Shares = {name: share for name, share in shares.items() if name not in tied}
    waiting = {name: p for name, p in tied.items() if name not in own and p.requires_grad}
    flight.walking.append(True)
    if roots:
        with training.no_autocast():
            if waiting:
                with caught(roots, waiting.values(), ()) as (found, _):
                    torch.autograd.backward(roots, given)
                names = {id(p): name for name, p in waiting.items()}
                onwards |= {names[id(p)]: share for p, share in found}
            else:
                torch.autograd.backward(roots, given)
    return {label: flight.arrived.get(label) for label in flight.labels}, onwards
