"""Made: the ops by which forward makes something of the model's tensors alone, run by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.guards import is_a
from ariadne.plan import Expr, Groups, Ref, TraceNode, TracePlan, substitute

Make = Callable[[nn.Module], Any]
Structure = tuple[list[str], Any]


def structure_of(value: Any, ids: Mapping[int, str]) -> Structure | None:
    """How a value consists of tensors: their names in the plan, and what holds them; None where it holds anything else, too."""
    leaves, spec = tree.flatten(value)
    names = [ids.get(id(leaf)) if is_a(leaf, torch.Tensor) else None for leaf in leaves]
    return ([name for name in names if name is not None], spec) if names and None not in names else None


def maker(plan: TracePlan, structure: Structure | None) -> Make | None:
    """What makes such a value of a model as it is now; None where it takes more than parameters and buffers, as the batch, or where
    a gradient goes back through it."""
    if structure is None or any(plan.values[name].requires_grad for name in structure[0]):
        return None
    names, spec = structure
    nodes = _made_by(plan, names)
    return None if nodes is None else lambda model: tree.unflatten(_run(plan, nodes, model, names), spec)


def _made_by(plan: TracePlan, names: Sequence[str]) -> list[TraceNode] | None:
    groups, wanted, found = Groups(plan), set(names), list[TraceNode]()
    for node in reversed(plan.nodes):
        memory = {groups.find(name) for name in wanted if name in groups.parent}
        if wanted.isdisjoint(node.outputs) and not any(groups.find(name) in memory for name in node.writes):
            continue
        if node.is_witness or node.seeded or node.region.switches or not node.target.startswith("aten."):
            return None
        wanted.update(node.reads)
        found.append(node)
    given = wanted.difference(*(node.outputs for node in found))
    memory = {groups.find(name) for node in found for name in node.writes}
    for name in given:
        value = plan.values.get(name)
        if value is None or value.kind not in ("parameter", "buffer") or groups.find(name) in memory:
            return None
    return found[::-1]


def _run(plan: TracePlan, nodes: list[TraceNode], model: nn.Module, names: Sequence[str]) -> list[Any]:
    made: dict[str, Any] = {}

    def value(atom: Ref | Expr) -> Any:
        if not isinstance(atom, Ref):
            raise TypeError("what is made of weights alone has no size that follows the batch")
        if atom.name not in made:
            path, name = plan.values[atom.name].origin
            made[atom.name] = getattr(model.get_submodule(path), name)
        return made[atom.name] if atom.item is None else made[atom.name][atom.item]

    with torch.no_grad():
        for node in nodes:
            args, kwargs = substitute(node.args, value), {k: substitute(v, value) for k, v in node.kwargs}
            _, op, overload = node.target.split(".", 2)
            with ExitStack() as stack:
                for device, enabled, dtype, cache in node.region.autocast:
                    stack.enter_context(torch.autocast(device, dtype, enabled=enabled, cache_enabled=cache))
                out = getattr(getattr(torch.ops.aten, op), overload)(*args, **kwargs)
            outs = list(out) if node.unpack else [out] if node.outputs else []
            made.update(zip(node.outputs, outs, strict=True))
        return [value(Ref(name)) for name in names]
