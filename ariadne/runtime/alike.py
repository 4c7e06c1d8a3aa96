"""Prefixes that do the same, on paths that part after the cut: what one of them sends serves the suffix of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from ariadne import tree
from ariadne.cut import SIDES, Part, SplitCandidate, crosses, parts
from ariadne.guards import Baseline, found_alike
from ariadne.plan import Assumption, TraceNode, TracePlan, Value
from ariadne.runtime.shared import is_pure, same_value
from ariadne.runtime.variant import told_apart

if TYPE_CHECKING:
    from ariadne.halves import Cut

Sided = tuple[TracePlan, SplitCandidate, Baseline]
Key = tuple[str, ...] | int


def asks_after(plan: TracePlan, candidate: SplitCandidate) -> bool:
    """Whether the suffix of a cut asks for numbers: only there can a call leave its path once the boundary is made."""
    return any(i >= candidate.cut for i, _ in plan.questions)


def serves(one: Sided, other: Sided) -> bool:
    """Whether a call that ran one prefix may go on in the suffix of the other, if what that takes is in the boundary.

    Both prefixes take the same inputs, find the model's tensors of the sizes that forward asked for, and move the same; and what
    both make they make alike. The first may have asked more, which the other's suffix then asks again. Values have the same names
    in both, since forward's Python was the same up to the question in which the paths part.
    """
    (a, cut_a, found_a), (b, cut_b, found_b) = one, other
    if not (_takes_the_same(a, b) and found_alike((a, found_a), (b, found_b))):
        return False
    mine, theirs = _prefix(a, cut_a), _prefix(b, cut_b)
    if mine.stores(a) != theirs.stores(b):
        return False
    ops, others = _keyed(mine.nodes(a)), _keyed(theirs.nodes(b))
    common = [key for key in ops if key in others]
    further = [node for key, (node, _) in ops.items() if isinstance(key, int) and key not in others]
    if not all(node.is_witness and not node.writes and not node.seeded for node in further):
        return False
    if any(isinstance(key, int) and key not in ops for key in others) or common != [k for k in others if k in ops]:
        return False
    if any(ops[key] != others[key] for key in common):  # the op, and how many writes came before
        return False
    return all(
        same_value(a, b, name)
        for node, _ in (*ops.values(), *others.values())
        for name in node.reads
        if not (name in a.definitions or name in b.definitions)
        and (name in a.values) == (name in b.values)
        and (name in a.objects) == (name in b.objects)
    )


def _takes_the_same(a: TracePlan, b: TracePlan) -> bool:
    """Whether two plans take the same calls, but for the batches that they serve."""
    fields = "batch_symbol input_spec inputs tied_inputs training sizes conditions".split()
    if any(getattr(a, name) != getattr(b, name) for name in fields) or a.keeps_inputs or b.keeps_inputs:
        return False
    if not _assume_the_same(a.assumption, b.assumption):
        return False
    if a.given or b.given or not tree.identical(a.literals, b.literals):
        return False
    shown = [[(v.shape, v.dtype, v.device) for _, n in p.inputs for v in (p.values[n],)] for p in (a, b)]
    return shown[0] == shown[1]


def _assume_the_same(a: Assumption, b: Assumption) -> bool:
    """Whether two plans rest on the same, but for what one path alone asks and its suffix holds by itself.

    Those are settings of torch, of which none may stand otherwise, and that dtypes and shapes of its tensors count.
    """
    switches = dict(a.switches), dict(b.switches)
    if any(switches[0][name] != switches[1][name] for name in switches[0].keys() & switches[1].keys()):
        return False
    first, second = (replace(one, switches=(), dtypes=False, shapes=False) for one in (a, b))
    return first == second


def _prefix(plan: TracePlan, candidate: SplitCandidate) -> Part:
    return parts(plan, (candidate,), SIDES)[0]


def _keyed(nodes: Sequence[TraceNode]) -> dict[Key, tuple[TraceNode, int]]:
    """Ops by what they make, and those with effects by their number; each with how many of these write before it."""
    found: dict[Key, tuple[TraceNode, int]] = {}
    effects, writes = count(), 0
    for node in nodes:
        found[node.outputs if is_pure(node) else next(effects)] = node, writes
        writes += bool(node.writes)
    return found


def together(cuts: Sequence[Cut], side: str) -> list[Cut]:
    """The cuts of a split, told whose suffix may follow whose prefix; in a file of the prefix, each sends what any of these takes.

    A half has no model from which another path could be captured, and its suffix no inputs to begin again from. So what crosses
    is what the suffix of any known path takes, which a prefix that has done the same up to there can make.
    """
    followers = {i: _followers(cut, cuts) for i, cut in enumerate(cuts)}
    numbered = {i for i, found in followers.items() if found} | {j for found in followers.values() for j in found}
    told = []
    for i, cut in enumerate(cuts):
        pieces = [cut]
        for j in followers[i] if side == SIDES[0] else ():
            pieces = [piece for one in pieces for piece in _widened(one, cuts[j])]
        number = i if i in numbered else -1
        follows = tuple(j for j in numbered if i in followers[j])
        told += [replace(piece, apart=replace(piece.apart, number=number, follows=follows)) for piece in pieces]
    return told


def _followers(cut: Cut, cuts: Sequence[Cut]) -> list[int]:
    """The cuts whose suffixes may follow this one's prefix: of two that make a value by unlike ops, the first."""
    found: list[int] = []
    for j, other in enumerate(cuts) if asks_after(cut.plan, cut.candidate) else ():
        mine, theirs = _sided(cut), _sided(other)
        alike = other.plan.grad_enabled == cut.plan.grad_enabled
        if other is cut or not alike or not asks_after(other.plan, other.candidate) or not serves(mine, theirs):
            continue
        if all(serves(theirs, there) or serves(there, theirs) for there in map(_sided, (cuts[k] for k in found))):
            found.append(j)
    return found


def _sided(cut: Cut) -> Sided:
    return cut.plan, cut.candidate, cut.baseline


def _widened(cut: Cut, other: Cut) -> list[Cut]:
    """A cut whose prefix makes, and sends, what the suffix of another takes, too; and as it is for the batches of it alone."""
    plan, there = cut.plan, other.plan
    part, theirs = _prefix(plan, cut.candidate), _prefix(there, other.candidate)
    wanted = [name for name in other.candidate.live if name not in cut.candidate.live]
    both, alone = plan.batches & there.batches, plan.batches - there.batches
    # State that is written crosses so that no other call's comes in between, which two files can't share anyway.
    if not wanted or not both or not all(crosses(there.values.get(name)) for name in wanted):
        return [cut]
    nodes, more = _merged(part.nodes(plan), theirs.nodes(there), wanted)
    values = {**_values(plan, there, more, wanted), **plan.values}
    names = {r for node in more for r in node.reads}
    wide = replace(
        plan,
        batches=both,
        nodes=(*nodes, *plan.nodes[part.stop :]),
        values=values,
        constants={**{n: t for n, t in there.constants.items() if n in names}, **plan.constants},
        objects={**{n: o for n, o in there.objects.items() if n in names}, **plan.objects},
    )
    candidate = replace(cut.candidate, cut=len(nodes), live=(*cut.candidate.live, *wanted))
    apart = replace(told_apart(wide, candidate), signature=cut.apart.signature)
    guarded = {side: {*cut.guarded[side], *other.guarded[side]} for side in cut.guarded}
    more_ops = cut.more + len(nodes) - part.stop
    found = replace(cut, plan=wide, candidate=candidate, apart=apart, guarded=guarded, more=more_ops)
    return [found, *([replace(cut, plan=replace(plan, batches=alone))] if alone else [])]


def _merged(
    mine: Sequence[TraceNode], theirs: Sequence[TraceNode], wanted: Sequence[str]
) -> tuple[list[TraceNode], list[TraceNode]]:
    """The ops of one prefix, and where the other has them those of its that the wanted values come from; and these alone.

    Both are what one run of forward did, less what nothing needs, so ops that both have stand in one order in both.
    """
    known, others = _keyed(mine), _keyed(theirs)
    needed, more = {*wanted}, set[Key]()
    for key, (node, _) in reversed(others.items()):
        if key not in known and needed & {*node.outputs}:
            more.add(key)
            needed.update(node.reads)
    merged: list[TraceNode] = []
    waiting = iter(others.items())
    for key, (node, _) in known.items():
        for theirs_key, (their_node, _) in waiting if key in others else ():
            if theirs_key in more:
                merged.append(their_node)
            if theirs_key == key:
                break
        merged.append(node)
    merged += [node for key, (node, _) in waiting if key in more]
    return merged, [others[key][0] for key in others if key in more]


def _values(plan: TracePlan, there: TracePlan, more: Sequence[TraceNode], wanted: Sequence[str]) -> dict[str, Value]:
    """What is known of the values that some ops of another plan name, with memory counted as it is in this one."""
    names = dict.fromkeys([*wanted, *(n for node in more for n in (*node.reads, *node.outputs))])
    storages = {v.storage: plan.values[n].storage for n, v in there.values.items() if n in plan.values}
    fresh = count(1 + max((v.storage for v in plan.values.values()), default=0))
    found = {}
    for name in names:
        value = there.values.get(name)
        if value is None or name in plan.values:
            continue
        if value.storage >= 0 and value.storage not in storages:
            storages[value.storage] = next(fresh)
        found[name] = replace(value, storage=storages.get(value.storage, value.storage))
    return found
