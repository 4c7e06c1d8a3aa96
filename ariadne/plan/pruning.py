"""Pruning: the plan without ops that nothing can tell from not having run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import accumulate, compress

from ariadne.plan.atoms import uses
from ariadne.plan.trace import TraceNode, TracePlan, Value


class Disjoint:
    """Names in disjoint sets, each alone at first."""

    def __init__(self, names: Iterable[str]) -> None:
        self.parent: dict[str, str] = {name: name for name in names}

    def find(self, name: str) -> str:
        """The name that stands for all that are in one set with `name`."""
        while self.parent[name] != name:
            self.parent[name] = self.parent[self.parent[name]]
            name = self.parent[name]
        return name

    def join(self, a: str, b: str) -> None:
        """Put two into one set."""
        self.parent[self.find(a)] = self.find(b)


class Groups(Disjoint):
    """Values that may share memory, as disjoint sets: by what was seen at capture, and by what the ops' schemas allow."""

    def __init__(self, plan: TracePlan) -> None:
        super().__init__(plan.values)
        by_storage: dict[int, str] = {}
        for name, value in plan.values.items():
            if value.storage >= 0:
                self.join(name, by_storage.setdefault(value.storage, name))
        for node in plan.nodes:
            for a, b in node.may_alias:
                self.join(a, b)


def reached(plan: TracePlan, groups: Groups, starts: Iterable[str], begins: Callable[[TraceNode], bool]) -> set[int]:
    """The ops that read what follows from these values, or from what the ops that `begins` names make, by any memory they share."""
    roots = {groups.find(name) for name in starts}
    found: set[int] = set()
    for i, node in enumerate(plan.nodes):
        reads = any(groups.find(name) in roots for name in node.reads if name in groups.parent)
        if reads:
            found.add(i)
        if reads or begins(node):
            roots.update(groups.find(name) for name in (*node.outputs, *node.writes) if name in groups.parent)
    return found


def _lasting(value: Value) -> bool:
    return value.is_state or value.kind in ("input", "constant")


def prune(plan: TracePlan) -> TracePlan:
    """The plan without ops whose results reach no output, write nothing that lasts, draw no random numbers and guard nothing.

    A number that Python read out of what forward makes anew in each call guards nothing: it can't change. What reads memory that
    was written into stays, if it was made before and has gradients: the first use of a view after a write gives it its place in
    the graph, whatever becomes of the result. Without gradients, too, so that one plan serves both.
    """
    groups = Groups(plan)
    written: dict[str, list[int]] = {}
    for i, node in enumerate(plan.nodes):
        for name in node.writes:
            written.setdefault(groups.find(name), []).append(i)

    def stale(i: int, name: str) -> bool:
        """Whether an op reads a value that was made before a write into its memory, which is needed."""
        root, made = groups.find(name), plan.definitions.get(name, -1)
        return (
            root in needed_groups
            and plan.values[name].differentiable
            and any(made < w < i for w in written.get(root, ()))
            and plan.nodes[i].region.grad is not False
        )

    lasting = {groups.find(n) for n, v in plan.values.items() if _lasting(v)}
    given = (n for n, v in plan.values.items() if v.is_state or v.kind == "input" or v.is_outside)
    varies = reached(plan, groups, given, lambda node: node.seeded)
    needed = {*uses(plan.output), *(n for store in plan.stores for n in uses(store.atoms))}
    needed_groups = {groups.find(n) for n in needed if n in groups.parent}
    kept: list[int] = []
    for i in range(len(plan.nodes) - 1, -1, -1):
        node = plan.nodes[i]
        if (
            node.seeded
            or any(n in needed for n in node.outputs)
            or (node.is_witness and i in varies)
            or any(groups.find(w) in lasting or groups.find(w) in needed_groups for w in node.writes)
            or (written and any(stale(i, r) for r in node.reads if r in groups.parent))
        ):
            kept.append(i)
            needed.update(node.reads)
            needed_groups.update(groups.find(r) for r in node.reads if r in groups.parent)
    return without(plan, set(range(len(plan.nodes))).difference(kept))


def without(plan: TracePlan, dropped: Collection[int]) -> TracePlan:
    """The plan without these ops, whose results nothing may read."""
    if not dropped:
        return plan
    kept = [i not in dropped for i in range(len(plan.nodes))]
    index = (0, *accumulate(map(int, kept)))
    calls = tuple(replace(c, start=index[c.start], end=index[c.end]) for c in plan.calls)
    return plan.with_nodes(tuple(compress(plan.nodes, kept)), calls=calls)
