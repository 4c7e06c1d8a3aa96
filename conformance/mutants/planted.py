"""What every mutant stands on: a runtime like Ariadne's, made after Ariadne's own preparation has checked itself.

A bug is planted in copies: in a plan made from the plan, in segments written anew, in a subclass of the runtime or of
its payload. Nothing of `ariadne` is patched, so what one mutant breaks is whole for the next. Since the bug comes after
`prepare_split` has held split against whole, only the suite is left to notice it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

import ariadne
from ariadne.boundary import BoundaryPayload
from ariadne.capture import Captured, Example
from ariadne.compiled import SegmentReport, compiled
from ariadne.cut import SplitCandidate, frontiers
from ariadne.guards import Baseline
from ariadne.plan import TraceNode, TracePlan, Value
from ariadne.runtime import SplitRuntime
from ariadne.runtime.variant import Variant
from ariadne.segment import Source, load

Segment = Callable[..., Any]


@dataclass(frozen=True)
class _Recapture:
    """Captures as the runtime does, and plants the bug in the plan."""

    kind: type[Planted]
    inner: Any

    def __call__(self, example: Example, training: bool, like: TracePlan | None = None) -> Captured:
        captured: Captured = self.inner(example, training, like)
        return replace(captured, plan=self.kind.in_plan(captured.plan))

    def of(self, model: nn.Module) -> _Recapture:
        """The same for another model."""
        return _Recapture(self.kind, self.inner.of(model))


class Planted(SplitRuntime):
    """A runtime without a bug, though it takes every way by which a subclass plants one.

    A mutant is a subclass: its docstring says what it breaks, and `piece` in which module of `ariadne` such a bug would be.
    It overrides one of the `in_…`, `prepare`, or any method of the runtime.
    """

    piece: ClassVar[str] = ""

    @classmethod
    def prepare(cls, model: nn.Module, example_inputs: Sequence[Any], **options: Any) -> Any:
        """What `ariadne.prepare_split` gives, with the bug in it."""
        made = ariadne.prepare_split(model, example_inputs, **options)
        return cls.in_python(made) if isinstance(made, ariadne.PythonSplit) else cls.planted_in(made)

    @classmethod
    def prepare_pipeline(cls, model: nn.Module, example_inputs: Sequence[Any], **options: Any) -> ariadne.Pipeline:
        """What `ariadne.prepare_pipeline` gives, with the bug in it."""
        return ariadne.prepare_pipeline(model, example_inputs, **options)

    @classmethod
    def planted_in(cls, plain: SplitRuntime) -> Planted:
        """A runtime for the same model, with the bug in it."""
        plans: dict[TracePlan, tuple[tuple[SplitCandidate, ...], Baseline]] = {}
        for plan, (candidates, baseline) in plain._plans.items():
            mine = cls.in_plan(plan)
            plans[mine] = cls.in_candidates(candidates if mine is plan else frontiers(mine)), baseline
        return cls(plain.model, plain.settings, plans, _Recapture(cls, plain._recapture), plain.candidate)

    @classmethod
    def in_python(cls, plain: ariadne.PythonSplit) -> Any:
        """The split to use for one of the model's own Python."""
        return plain

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        """The plan to use for one that was captured."""
        return plan

    @classmethod
    def in_candidates(cls, candidates: tuple[SplitCandidate, ...]) -> tuple[SplitCandidate, ...]:
        """The cuts to offer for those that were found."""
        return candidates

    def in_variant(self, variant: Variant) -> None:
        """Change a plan that was cut, and its segments."""

    def in_payload(self, boundary: BoundaryPayload) -> BoundaryPayload:
        """The payload to hand out for one that a prefix made."""
        return boundary

    def run_prefix(self, *args: Any, **kwargs: Any) -> BoundaryPayload:
        return self.in_payload(super().run_prefix(*args, **kwargs))

    def run_training_prefix(self, *args: Any, **kwargs: Any) -> BoundaryPayload:
        return self.in_payload(super().run_training_prefix(*args, **kwargs))

    def resplit(self, *boundary: str | SplitCandidate | None, **options: Any) -> Planted:
        return self._again(super().resplit(*boundary, **options))

    def __deepcopy__(self, memo: dict[int, Any]) -> Planted:
        return self._again(super().__deepcopy__(memo))

    def _again(self, found: SplitRuntime) -> Planted:
        return type(self)(found.model, found.settings, found._plans, found._recapture, found.candidate)

    def _cut(self, plan: TracePlan, candidates: tuple[SplitCandidate, ...], baseline: Baseline,
             chosen: SplitCandidate | None = None) -> Variant:  # fmt: skip
        variant = super()._cut(plan, candidates, baseline, chosen)
        self.in_variant(variant)
        return variant

    def _prove(self, variant: Variant, captured: Captured, example: Example, trains: bool) -> None:
        if type(self) is Planted:  # a bug is for the checks to notice
            super()._prove(variant, captured, example, trains)

    def recode(self, variant: Variant, side: str, source: Source) -> None:
        """Take another source for one side; the debug interpreter, which reads no source, stays as it is."""
        setattr(variant, f"{side}_source", source)
        if self.settings.mode != "debug_interpreter":
            split_id = variant.candidate.split_id
            label = f"{split_id} of {type(self.model).__name__}"
            if self.settings.mode == "compiled":
                report, nodes = SegmentReport(side, split_id), variant.parts[side].nodes(variant.plan)
                segment = compiled(source, variant.plan, nodes, label, self.settings.compile_options, report)
            else:
                segment = load(source, label)
            setattr(variant, side, segment)


def wrapped(variant: Variant, side: str, around: Callable[[Segment, int, tuple[Any, ...]], Any]) -> None:
    """Put `around(segment, batch, given)` in the place of one side's segment."""
    inner = getattr(variant, side)
    setattr(variant, side, lambda batch, *given: around(inner, batch, given))


def as_kind(kind: type[BoundaryPayload], boundary: BoundaryPayload) -> BoundaryPayload:
    """The same payload, graph included, as one of another class."""
    b = boundary
    return kind(b.split_id, b.plan_signature, b.batch, b.labels, b.raw, b.requires_grad, b._graph)


def edited(
    plan: TracePlan, edit: Callable[[TraceNode, dict[str, Value]], Iterable[TraceNode]], **changes: Any
) -> TracePlan:
    """The plan with what `edit` makes of each op, given the values, to which it may add."""
    values, nodes, starts = dict(plan.values), list[TraceNode](), list[int]()
    for node in plan.nodes:
        starts.append(len(nodes))
        nodes += edit(node, values)
    starts.append(len(nodes))
    if tuple(nodes) == plan.nodes and not changes:
        return plan
    calls = tuple(replace(c, start=starts[c.start], end=starts[c.end]) for c in plan.calls)
    return replace(plan, nodes=tuple(nodes), values=values, calls=calls, **changes)


def on_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The same nested value with `function` applied to every tensor."""
    return ariadne.tree.map_leaves(lambda t: function(t) if isinstance(t, torch.Tensor) else t, value)


def copied(payload: BoundaryPayload, tensors: Callable[[torch.Tensor], torch.Tensor]) -> BoundaryPayload:
    """A payload of Ariadne's own kind with a function of every tensor of this one."""
    plain = as_kind(BoundaryPayload, payload)
    plain.raw = tuple(on_tensors(tensors, value) for value in payload.raw)
    return plain
