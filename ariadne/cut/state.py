"""State over a cut: what of the model the ops write into, and which side of a cut uses it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ariadne.plan import Groups, TracePlan, Value, uses, writes_silently

Slot = tuple[str, str]  # the path of a module, and a name there


def held_by_itself(value: Value) -> bool:
    """Whether a tensor outlives the call without anybody's help: the model holds it, or a variable outside of it does."""
    return value.is_state or value.kind == "constant"


@dataclass(frozen=True, slots=True)
class Sides:
    """State of the model as the two sides of one cut use it.

    `before` and `after`: what the prefix and the suffix write or put anew, by the path of its module and its name (that of a tensor
    outside of the model: "", and its name in the plan). `used`: what the suffix uses of it itself. `both`: what of that the
    prefix uses too, where either writes. `watched`: the tensors among them, to be looked at. `crossing`: the crossing values into
    whose memory the next call's prefix may write.
    """

    before: frozenset[Slot]
    after: frozenset[Slot]
    used: frozenset[Slot]
    both: frozenset[Slot]
    watched: tuple[Value, ...]
    crossing: tuple[str, ...]
    silent: frozenset[str]


@dataclass(slots=True)
class _Memory:
    """State that shares memory: its names, each with the last op that uses it by that name; ops that use it, and that write."""

    names: dict[str, int]
    uses: list[int]
    writes: list[int]
    keeps: bool  # whether it is a parameter's, whose gradient is to arrive
    silent: bool = False  # whether an op writes it without counting that


class State:
    """The state that a plan reads, and the ops that write into it in place.

    What the prefix writes and the suffix only reads crosses with the boundary: the suffix must find it as the prefix left it,
    whatever prefix has run since. A parameter does not, since its gradient is to reach it, nor what the suffix writes, too.
    """

    def __init__(self, plan: TracePlan, groups: Groups) -> None:
        self.plan, self.groups = plan, groups
        self.end = plan.first + len(plan.nodes)
        self.memory: dict[str, _Memory] = {}
        for name, value in plan.values.items():
            if held_by_itself(value):
                found = self.memory.setdefault(groups.find(name), _Memory({}, [], [], False))
                found.names[name] = -1
                found.keeps |= value.kind == "parameter"
        for i, node in enumerate(plan.nodes, plan.first):
            self._use(node.reads, i)
            for root in {groups.find(n) for n in node.writes if n in groups.parent} & self.memory.keys():
                self.memory[root].writes.append(i)
                self.memory[root].silent |= writes_silently(node.target)
        self._use(uses(plan.output), self.end)
        self.sharing: dict[str, list[str]] = {}  # the values that share memory with state that is written
        for name in plan.values:
            if name in groups.parent and (root := groups.find(name)) in self.memory and self.memory[root].writes:
                self.sharing.setdefault(root, []).append(name)
        self.stores = [s for s in plan.stores if not s.inside and (s.path, s.name) not in plan.stored_from_sizes]
        for store in plan.stores:  # what is put somewhere may be used after the call
            for name in uses(store.atoms):
                if name in groups.parent and groups.find(name) in self.memory:
                    self.memory[groups.find(name)].keeps |= plan.stored_from(store) > plan.first
        self._crossing = [
            (m.writes[-1], last, name)
            for m in self.memory.values()
            if m.writes and not m.keeps
            for name, last in m.names.items()
            if last > m.writes[-1]
        ]

    def _use(self, names: Iterable[str], at: int) -> None:
        for name in names:
            found = self.memory.get(self.groups.find(name)) if name in self.groups.parent else None
            if found is not None:
                found.uses.append(at)
                if name in found.names:
                    found.names[name] = at

    def crossing(self, cut: int) -> list[str]:
        """The state that must cross a cut, by name."""
        return [name for written, last, name in self._crossing if written < cut <= last]

    def sides(self, cut: int, live: Iterable[str]) -> Sides:
        """What the sides of a cut do with the state; `live`: what crosses it."""
        live, values = [*live], self.plan.values
        early = [s for s in self.stores if self.plan.stored_before(cut, s)]
        before = {(s.path, s.name) for s in early}
        after = put = {(s.path, s.name) for s in self.stores if s not in early}
        first, used, both, moved = set[Slot](), set[Slot](), set[Slot](), set[str]()
        watched: list[Value] = []
        for root, m in self.memory.items():
            slots = {_slot(values[n]) for n in m.names}
            used_before, late = any(i < cut for i in m.uses), [i >= cut for i in m.writes]
            first |= slots if used_before else set()
            if not all(late):
                before |= slots
                moved.add(root)
            after = after | slots if any(late) else after
            parted = any(n in live and values[n].dtype is None for n in self.sharing.get(root, ()))
            if any(late) or parted or any(last >= cut and name not in live for name, last in m.names.items()):
                used |= slots
                if used_before and late:
                    both |= slots
                    watched += [values[n] for n in m.names]
        if self.sharing:  # what is put in the place of state may be written into there
            moved |= {self.groups.find(n) for s in early for n in uses(s.atoms) if n in self.groups.parent}
        dense = [n for n in live if values[n].dtype is not None and n in self.groups.parent]
        crossing = tuple(n for n in dense if self.groups.find(n) in moved)
        quiet = {root for root, m in self.memory.items() if m.silent}
        return Sides(
            frozenset(before),
            frozenset(after),
            frozenset(used),
            frozenset(both | (put & first)),
            tuple(watched),
            crossing,
            frozenset(n for n in (*crossing, *(v.name for v in watched)) if self.groups.find(n) in quiet),
        )


def _slot(value: Value) -> Slot:
    return (str(value.origin[0]), str(value.origin[1])) if value.origin else ("", value.name)
