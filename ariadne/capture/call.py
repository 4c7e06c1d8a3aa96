"""Calls of Python that is kept whole, as one op: functions under `torch.jit.script`, and parts that `ariadne.opaque` takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ariadne import tree
from ariadne.capture.generators import OF_PYTHON, TORCH
from ariadne.errors import WitnessError
from ariadne.guards import is_a
from ariadne.plan import TraceNode, TracePlan, may_draw

OPAQUE = "python.opaque."  # how the target of an op begins that `ariadne.opaque` was told of


@dataclass(frozen=True)
class Call:
    """A function that is kept whole, as a callable of flat arguments that gives flat results.

    `given` is the structure of its arguments, `gives` that of its results in words, for the graph executor makes the class of a
    namedtuple anew at each call; `one`: it is a single value; `tensors`: which of the results are tensors. `unwritten`: the
    arguments that it was not seen to write into, and must not. `moves`: it was seen to change something in Python beside its
    results, or that it `draws` from Python's own generators; `keeps`: the former.
    """

    function: Any
    name: str
    given: tree.Spec
    gives: str
    one: bool
    tensors: tuple[bool, ...]
    unwritten: tuple[int, ...] = ()
    moves: bool = field(default=False, compare=False)
    draws: bool = field(default=False, compare=False)
    keeps: bool = field(default=False, compare=False)

    def __call__(self, *leaves: Any) -> Any:
        """Raises `WitnessError` where the results have another structure than at capture, or an argument was written into."""
        args, kwargs = tree.unflatten(leaves, self.given)
        before = [version(leaves[i]) for i in self.unwritten]
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        marks = [marks_of(t) for t in given]
        found, spec = tree.flatten(self.function(*args, **kwargs))
        if str(spec) != self.gives or tuple([isinstance(f, torch.Tensor) for f in found]) != self.tensors:
            raise WitnessError(
                f"{self.words} gives {spec}, and at capture it gave {self.gives}, or tensors where other "
                "things were: what was captured does not hold; call prepare_split again with inputs that take the new path"
            )
        if before and before != [version(leaves[i]) for i in self.unwritten]:
            raise WitnessError(
                f"{self.words} wrote into a tensor that it was given, and at capture it did not: what was "
                "captured does not hold; let it write into a clone() of its own"
            )
        if marks != [marks_of(t) for t in given]:
            raise WitnessError(
                f"{self.words} registered a hook on a tensor that it was given, which in a split sees a part of its gradient; let "
                "it register one on a tensor of its own, such as t.view_as(t)"
            )
        return found[0] if self.one else found

    @property
    def words(self) -> str:
        """What it is, for an error message."""
        kind = "scripted function" if isinstance(self.function, torch.jit.ScriptFunction) else "opaque part"
        return f"the {kind} {self.name!r}"


def marks_of(t: torch.Tensor) -> tuple[frozenset[int], frozenset[int], bool]:
    """What hooks a tensor has, and whether it keeps its gradient."""
    return frozenset(t._backward_hooks or ()), frozenset(t._post_accumulate_grad_hooks or ()), t.retains_grad


def version(t: torch.Tensor) -> int:
    """How often a tensor was written into, where torch counts it."""
    return 0 if t.is_inference() else t._version


def is_opaque_call(node: TraceNode) -> bool:
    """Whether an op of a plan is a call of a part that `ariadne.opaque` was told of."""
    return node.target.startswith(OPAQUE)


def drawn_by(plans: Iterable[TracePlan]) -> frozenset[str]:
    """The random generators of the process that a run of these plans may draw from."""
    plans = [*plans]
    calls = (thing for plan in plans for thing in plan.objects.values() if is_a(thing, Call))
    found = {name for call in calls if call.draws for name in OF_PYTHON}
    return frozenset({TORCH, *found} if any(may_draw(plan.nodes) for plan in plans) else found)


def itself(value: Any) -> Any:
    """What a number that such a function gave is asked through, so that it can be held against what it was."""
    return value


def of_rank(t: torch.Tensor) -> int:
    """How many dims a tensor has that an opaque part gave."""
    return t.dim()


def of_type(t: torch.Tensor) -> str:
    """The same with its dtype, where forward asks for dtypes."""
    return f"{t.dim()}d, {t.dtype}"


QUESTIONS = (itself, of_rank, of_type)
