"""Mutants of what makes a plan: the lowering of ops, the fit of sizes to the batch, stores, guards that a plan states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ariadne import tree
from ariadne.plan import PLAIN, Expr, Ref, TraceNode, TracePlan, Value, substitute, uses
from ariadne.runtime import SplitRuntime
from ariadne.segment.bindings import resolve
from conformance.mutants.planted import Planted, edited


def _rewritten(plan: TracePlan, atom: Callable[[Any], Any]) -> TracePlan:
    """The plan with another atom for each `Ref` and `Expr` that an op or the output reads."""

    def edit(node: TraceNode, values: dict[str, Value]) -> Iterator[TraceNode]:
        kwargs = tuple((k, substitute(v, atom)) for k, v in node.kwargs)
        yield replace(node, args=substitute(node.args, atom), kwargs=kwargs)

    return edited(plan, edit, output=substitute(plan.output, atom))


def _once_more(node: TraceNode, values: dict[str, Value]) -> TraceNode:
    """The same op with results that nobody reads."""
    names = {name: f"again_{name}" for name in node.outputs}
    values.update({again: replace(values[name], name=again, storage=-1) for name, again in names.items()})
    return replace(node, outputs=tuple(names.values()))


def _writes_state(node: TraceNode, values: dict[str, Value]) -> bool:
    return any(values[w].kind == "buffer" for w in node.writes)


class BakedBatch(Planted):
    """Sizes that follow the batch are numbers: those of the batch that was traced."""

    piece = "capture.values"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        here = {plan.batch_symbol: plan.traced_batch}
        return _rewritten(
            plan, lambda a: a.evaluate(here) if isinstance(a, Expr) and a.names == {plan.batch_symbol} else a
        )


class SwappedSizes(Planted):
    """Of two sizes beside the batch each is read off the dim of the other."""

    piece = "capture.lower"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        dims = {size.symbol: size.dim for size in plan.sizes}
        other = dict(zip(dims, reversed(dims.values()), strict=True))

        def edit(node: TraceNode, values: dict[str, Value]) -> Iterator[TraceNode]:
            read = node.outputs and node.outputs[0] in other
            yield replace(node, args=(node.args[0], other[node.outputs[0]])) if read else node

        return edited(plan, edit)


class MisfittedBatch(Planted):
    """A size that follows the batch is fitted by an expression that is right at the traced batch alone."""

    piece = "capture.generalize"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        b, traced = plan.batch_symbol, plan.traced_batch

        def misfit(atom: Any) -> Any:
            follows = isinstance(atom, Expr) and atom.names == {b}
            return Expr(f"({atom.source}) + abs({b} - {traced})") if follows else atom

        return _rewritten(plan, misfit)


class RepeatedStatistics(Planted):
    """An op that moves a buffer runs twice."""

    piece = "capture.lower"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        def edit(node: TraceNode, values: dict[str, Value]) -> Iterator[TraceNode]:
            if _writes_state(node, values):
                yield _once_more(node, values)
            yield node

        return edited(plan, edit)


class UncountedBatches(Planted):
    """Ops that write integers into a buffer are lost, and `num_batches_tracked` stands still."""

    piece = "plan.pruning"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        def edit(node: TraceNode, values: dict[str, Value]) -> Iterator[TraceNode]:
            if not any(values[w].kind == "buffer" and values[w].dtype is torch.int64 for w in node.writes):
                yield node

        return edited(plan, edit)


class MomentumOfTheOthers(Planted):
    """BatchNorm's momentum is taken for the share of the old statistics, as other libraries have it."""

    piece = "capture.lower"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        def edit(node: TraceNode, values: dict[str, Value]) -> Iterator[TraceNode]:
            names = [a.name for a in resolve(node.target)._schema.arguments] if node.target.startswith("aten.") else []
            if "momentum" in names and _writes_state(node, values):
                at = names.index("momentum")
                node = replace(node, args=(*node.args[:at], 1 - node.args[at], *node.args[at + 1 :]))
            yield node

        return edited(plan, edit)


class RepeatedDraw(Planted):
    """An op that draws random numbers runs twice."""

    piece = "capture.lower"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        def edit(node: TraceNode, values: dict[str, Value]) -> Iterator[TraceNode]:
            yield node
            if node.seeded and not node.writes:
                yield _once_more(node, values)

        return edited(plan, edit)


class LostDropout(Planted):
    """Dropout is taken for something that only passes its input on, in training too."""

    piece = "capture.lower"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        passed = {
            node.outputs[0]: node.args[0]
            for node in plan.nodes
            if node.seeded
            and not node.writes
            and isinstance(node.args[0], Ref)
            and plan.values[node.outputs[0]].shape == plan.values[node.args[0].name].shape
        }

        def atom(a: Any) -> Any:
            while isinstance(a, Ref) and a.name in passed:
                a = passed[a.name]
            return a

        def edit(node: TraceNode, values: dict[str, Value]) -> Iterator[TraceNode]:
            if node.outputs[:1] and node.outputs[0] in passed:
                return
            yield replace(
                node, args=substitute(node.args, atom), kwargs=tuple((k, substitute(v, atom)) for k, v in node.kwargs)
            )

        return edited(plan, edit, output=substitute(plan.output, atom))


class RecomputedValue(Planted):
    """A value is freed while an op still wants it, and made again for that op by the op that had made it."""

    piece = "segment.codegen"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        readers: dict[str, int] = {}
        for i, node in enumerate(plan.nodes):
            readers |= dict.fromkeys(node.reads, i)
        times = [name for node in plan.nodes for name in node.reads]
        index = {id(node): i for i, node in enumerate(plan.nodes)}

        def edit(node: TraceNode, values: dict[str, Value]) -> Iterator[TraceNode]:
            here = index[id(node)]
            for name in node.reads:
                maker = plan.nodes[plan.definitions[name]] if name in plan.definitions else None
                if maker and readers[name] == here and times.count(name) > 1 and len(maker.outputs) == 1:
                    again = _once_more(maker, values)
                    fresh = Ref(again.outputs[0])
                    yield again
                    node = replace(node, args=substitute(node.args, lambda a, n=name, f=fresh: f if a == Ref(n) else a))
            yield node

        return edited(plan, edit)


class ReversedPieces(Planted):
    """The pieces of a chunk or split come in the wrong order."""

    piece = "capture.lower"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        def edit(node: TraceNode, values: dict[str, Value]) -> Iterator[TraceNode]:
            shapes = {values[name].shape for name in node.outputs}
            yield replace(node, outputs=node.outputs[::-1]) if node.unpack and len(shapes) == 1 else node

        return edited(plan, edit)


class LostKeywords(Planted):
    """Ops lose the arguments that are passed by keyword."""

    piece = "capture.lower"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        return edited(plan, lambda node, _: [replace(node, kwargs=())])


class LostStore(Planted):
    """What forward assigns to buffers and attributes is computed and dropped."""

    piece = "capture.outcome"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        return replace(plan, stores=()) if plan.stores else plan


class LostRegion(Planted):
    """A `no_grad` block or autocast inside forward is forgotten."""

    piece = "capture.recorder"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        return edited(plan, lambda node, _: [replace(node, region=PLAIN)])


class LostWitness(Planted):
    """A value that Python read out of a tensor is no longer held against what it was at capture."""

    piece = "segment.codegen"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        return edited(
            plan,
            lambda node, _: (
                [replace(node, is_witness=False, witness=None)] if node.outputs or not node.is_witness else []
            ),
        )


class KnownSize(Planted):
    """A size that follows the data is taken for the one that it was at capture, and not looked at again."""

    piece = "capture.foreseen"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        return edited(
            plan,
            lambda node, _: [
                replace(node, is_witness=False, witness=None) if node.target == "aten.sym_size.int" else node
            ],
        )


class LostAssumption(Planted):
    """The plan of a forward that records gradients serves calls that record none, though Python asked for the mode."""

    piece = "capture.ways"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        return replace(plan, assumption=replace(plan.assumption, grad=None)) if plan.grad_enabled else plan

    @classmethod
    def planted_in(cls, plain: SplitRuntime) -> Planted:
        found = super().planted_in(plain)
        return cls(found.model, found.settings, dict(reversed(found._plans.items())), found._recapture)


class ListsForTuples(Planted):
    """Tuples in the output come back as lists."""

    piece = "tree"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        def listed(spec: tree.Spec) -> tree.Spec:
            children = tuple(map(listed, spec.children))
            return tree.Spec("list", list, (), children) if spec.kind == "tuple" else replace(spec, children=children)

        spec = listed(plan.output_spec)
        return plan if spec == plan.output_spec else replace(plan, output_spec=spec)


class SortedKeys(Planted):
    """Dicts in the output come back with their keys sorted backwards."""

    piece = "tree"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        order: list[int] = []
        count = iter(range(plan.output_spec.size))

        def walk(spec: tree.Spec) -> tuple[tree.Spec, list[int]]:
            if spec.kind == tree.LEAF:
                return spec, [next(count)]
            found = [walk(child) for child in spec.children]
            if spec.kind == "dict":
                pairs = sorted(zip(spec.keys, found, strict=True), key=lambda p: str(p[0]), reverse=True)
                spec, found = replace(spec, keys=tuple(k for k, _ in pairs)), [f for _, f in pairs]
            return replace(spec, children=tuple(s for s, _ in found)), [i for _, at in found for i in at]

        spec, order = walk(plan.output_spec)
        if spec == plan.output_spec:
            return plan
        return replace(plan, output_spec=spec, output=tuple(plan.output[i] for i in order))


class SharedInputs(Planted):
    """Two inputs of one type are read as one: the first stands for both."""

    piece = "capture.values"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        first: dict[Any, str] = {}
        same = {}
        for _, name in plan.inputs:
            value = plan.values[name]
            same[name] = Ref(first.setdefault((value.shape, value.dtype), name))
        read = {n for node in plan.nodes for n in node.reads} | set(uses(plan.output))
        if all(ref.name == name or name not in read for name, ref in same.items()):
            return plan
        return _rewritten(plan, lambda a: same.get(a.name, a) if isinstance(a, Ref) and a.item is None else a)
