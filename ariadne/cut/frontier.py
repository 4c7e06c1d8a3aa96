"""The frontier of every cut: which values cross it, what they weigh, and whether the cut is safe."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ariadne.cut.state import State, held_by_itself
from ariadne.plan import Disjoint, Groups, TraceNode, TracePlan, Value, uses


@dataclass(frozen=True, slots=True)
class SplitCandidate:
    """One cut of a plan: the first `cut` ops are the prefix, the others the suffix.

    `live`: the values that cross, in the order in which they were made, and state of the model that the prefix writes and the
    suffix reads. `written`: those of them that the suffix writes
    into, and so copies first. `boundary_bytes`: bytes per sample. `trainable`: the suffix reads a parameter that requires
    grad; `trainable_prefix`: the prefix does. `after`: the outermost module that ends here, if one does.
    `reason` says why a cut is not `safe`, and is empty where it is; `inexact` says why gradients across it may differ from the
    whole's in the last bits, and is empty where they don't; that rests on `ungraphed` state, which must have no graph when a step
    begins.
    """

    cut: int
    live: tuple[str, ...]
    written: tuple[str, ...]
    boundary_bytes: float
    prefix_ops: int
    suffix_ops: int
    trainable: bool
    trainable_prefix: bool
    after: str
    reason: str
    inexact: str = ""
    ungraphed: tuple[str, ...] = ()

    @property
    def split_id(self) -> str:
        """The string that names this cut of its plan."""
        return f"cut:{self.cut}"

    @property
    def safe(self) -> bool:
        """Whether the two sides, run one after the other, equal the whole."""
        return not self.reason


def crosses(value: Value | None) -> bool:
    """Whether a value, where live, must be carried over: state, constants and callables are at hand on both sides."""
    return value is not None and (
        value.kind in ("input", "tensor", "sequence", "scalar") or (value.kind == "object" and bool(value.origin))
    )


@dataclass(frozen=True, slots=True)
class Ends:
    """Bytes per sample of what the whole model takes and of what it gives: what sending the raw input, or the answer, costs."""

    input_bytes: float
    output_bytes: float


def ends_of(plan: TracePlan) -> Ends:
    """What a plan takes and gives, in bytes per sample; a tensor that stands there twice counts once.

    >>> ends_of(plan)
    Ends(input_bytes=64.0, output_bytes=16.0)
    """
    env: dict[str, Any] = plan.traced

    def weight(names: Iterable[str]) -> float:
        values = [plan.values[n] for n in dict.fromkeys(names) if crosses(plan.values.get(n))]
        return sum(v.nbytes(env) for v in values) / (plan.traced_batch or 1)

    return Ends(weight(name for _, name in plan.inputs), weight(uses(plan.output)))


def with_trainable(
    plan: TracePlan, candidates: tuple[SplitCandidate, ...], trains: Callable[[Value], bool]
) -> tuple[SplitCandidate, ...]:
    """The candidates with `trainable` and `trainable_prefix` as they are now: `trains` says it of each parameter."""
    first, last = _trainable_span(plan, trains)
    if all((c.trainable, c.trainable_prefix) == (last >= c.cut, first < c.cut) for c in candidates):
        return candidates
    return tuple(replace(c, trainable=last >= c.cut, trainable_prefix=first < c.cut) for c in candidates)


def _trainable_span(plan: TracePlan, trains: Callable[[Value], bool]) -> tuple[int, int]:
    """The first and the last op that reads a parameter to be trained; an empty span where none does."""
    wanted = {n for n, v in plan.values.items() if v.kind == "parameter" and trains(v)}
    found = [i for i, node in enumerate(plan.nodes) if any(r in wanted for r in node.reads)]
    return (found[0], found[-1]) if found else (len(plan.nodes), -1)


def _sweep(plan: TracePlan) -> Iterator[tuple[int, dict[str, None]]]:
    """Each cut with what is live across it, from the last to the first."""
    values = plan.values
    live = {n: None for n in uses(plan.output) if crosses(values.get(n))}
    pending = [(plan.stored_from(s) - 1, s) for s in plan.stores if s.table != "input"]
    for cut in range(len(plan.nodes) - 1, 0, -1):
        node = plan.nodes[cut]
        for last, store in pending:
            if last == cut:  # at this cut and before, the suffix does it
                live.update({n: None for n in uses(store.atoms) if crosses(values.get(n))})
        for name in node.outputs:
            live.pop(name, None)
        for name in node.reads:
            if crosses(values.get(name)):
                live[name] = None
        yield cut, live


_DETACHES = frozenset({"aten.detach.default", "aten.data.default"})
_NEW_VIEWS = frozenset(
    "as_strided chunk diagonal expand expand_as narrow permute select slice split split_with_sizes t transpose unbind unfold "
    "unsqueeze view view_as view_as_complex view_as_real".split()
)
_SINGLE = frozenset(
    "batch_norm conv1d conv2d conv3d dropout flatten group_norm layer_norm linear matmul reshape".split()
)  # composites of ops, of which one takes the input


def _gradients(node: TraceNode) -> int:
    """How many gradients an op may bring to one tensor that it takes: one that runs as several may use it more than once."""
    space, kind = node.target.split(".")[:2]
    return 2 if space == "python" or (kind not in _SINGLE and node.has_kernel("CompositeImplicitAutograd")) else 1


def _is_plain(value: Value) -> bool:
    """Whether it is state that could have a graph, and had none at capture."""
    return value.kind in ("buffer", "attribute") and value.differentiable and not value.requires_grad


class GradientOrder:
    """What autograd makes of writes into views, by which a cut may add up gradients in another order or layout than the whole.

    A view that crosses together with other values of its memory, and was made before a write into that: autograd gives it its
    place in the graph anew when it is next used, in the whole model among the suffix's ops. It shows where three gradients or
    more are added up: each view brings one, and the tensor that it is a view of, one for each of its uses. It may show where two
    are, since their sum lies in memory as the one that comes first, unless both lie as that tensor does.

    A view into which the suffix writes: the whole model takes the gradient of what was written to the tensor that it is a view
    of, and lays it out as that; the split takes it to the view.

    State that the prefix writes into with a graph, and the suffix reads: its graph leads into the prefix beside the boundary.
    """

    def __init__(self, plan: TracePlan, groups: Groups) -> None:
        self.plan, self.groups = plan, groups
        self.given = {*uses(plan.output), *(n for s in plan.stores for n in uses(s.atoms))}
        self.writes: dict[str, list[int]] = {}
        for i, node in enumerate(plan.nodes):
            for root in {groups.find(name) for name in node.writes}:
                self.writes.setdefault(root, []).append(i)
        # Of each group the tensor that its views are views of, which was made first; None where no value of the plan is it.
        self.bases: dict[str, str | None] = {}
        storages: dict[str, set[int]] = {}  # more than one where an op that may copy did: at another batch it may not
        for name, value in plan.values.items() if self.writes else ():
            root = groups.find(name)
            if root in self.writes:
                self.bases.setdefault(root, None if value.is_view else name)
                storages.setdefault(root, set()).update([value.storage] if value.storage >= 0 else ())
        self.mixed = {root for root, found in storages.items() if len(found) > 1}
        self.tensor: dict[str, str] = {}  # values that are or may be one tensor, by the first of them
        self.uses: dict[str, list[int]] = {}  # of the bases, the ops; one may take several gradients back
        self.states, self.if_graphed = [*self._states()], [*self._states(may_have=True)]
        read = {name for node in plan.nodes for name in node.reads} if len(self.if_graphed) > len(self.states) else {""}
        self.plain = tuple(name for name, value in plan.values.items() if name in read and _is_plain(value))
        bases = {*self.bases.values()}
        for i, node in enumerate(plan.nodes if self.writes else ()):
            for name in uses((node.args, tuple(v for _, v in node.kwargs))):
                if self.tensor.get(name, name) in bases:
                    self.uses.setdefault(groups.find(name), []).extend([i] * _gradients(node))
            for name in () if node.target.split(".")[1] in _NEW_VIEWS else node.outputs:
                if plan.values[name].is_view and not node.writes:
                    continue  # an op that may copy, and did not
                memory = groups.find(name), plan.values[name].storage
                known = (r for r in node.reads if r in plan.values)
                source = next((r for r in known if (groups.find(r), plan.values[r].storage) == memory), name)
                self.tensor[name] = self.tensor.get(source, source)

    def _states(self, *, may_have: bool = False) -> Iterator[tuple[str, int, int]]:
        """State that ops write into with a graph: its name, the first of these ops, and the last op that reads it with one.

        `may_have`: as if any state had a graph when the call begins.
        """
        values, root_of = self.plan.values, self.groups.find
        if not self.writes:
            return
        alike, members = self._alike(), dict[str, set[str]]()
        for name, other in alike.items():
            members.setdefault(other, set()).add(name)
        graphed = self._graphed(alike, members, may_have)
        for name, value in values.items():
            root = root_of(name) if value.is_state and name in self.groups.parent else None
            mine = members.get(alike.get(name, ""), set())
            for i in self.writes.get(root, ()) if root is not None and value.kind != "parameter" else ():
                node = self.plan.nodes[i]
                taken = [r for r in node.reads if r in self.groups.parent and r not in mine]
                given = not mine.isdisjoint(node.outputs)
                if given and node.region.grad is not False and not graphed.isdisjoint(taken):
                    yield name, i, max(k for k, n in enumerate(self.plan.nodes) if self._reads(n, mine))
                    break

    def _alike(self) -> dict[str, str]:
        """The values of memory that is written, by which have a graph where one of them has: not what was detached of them."""
        root_of = self.groups.find
        written = {n: root_of(n) for n in self.plan.values if n in self.groups.parent and root_of(n) in self.writes}
        same, first = Disjoint(written), dict[str, str]()
        for name, root in written.items():
            if name not in self.plan.definitions:
                same.join(name, first.setdefault(root, name))
        for node in self.plan.nodes:
            for name in () if node.target in _DETACHES else node.outputs:
                for read in node.reads if name in written else ():
                    if written.get(read) == written[name]:
                        same.join(name, read)
        return {name: same.find(name) for name in written}

    def _graphed(self, alike: dict[str, str], members: dict[str, set[str]], may_have: bool) -> set[str]:
        """The values that may have a graph: not what follows from others by a detach, or where gradients are off.

        State has one where it had one at capture, `may_have` it, or an earlier call left it one.
        """
        values = self.plan.values
        found = {
            name for name, value in values.items()
            if value.differentiable and name not in self.plan.definitions
            and (may_have or not _is_plain(value))
        }  # fmt: skip
        known = -1
        while known != len(found):
            known = len(found)
            for node in self.plan.nodes:
                detaches = node.target in _DETACHES or node.region.grad is False
                if detaches or found.isdisjoint(node.reads):
                    continue
                found.update(name for name in node.outputs if values[name].differentiable)
                for other in {alike[name] for name in node.writes if name in alike}:
                    found.update(members[other])
        return found

    def _reads(self, node: TraceNode, names: set[str]) -> bool:
        return node.target != "aten.detach_.default" and not names.isdisjoint(node.reads)

    def at(self, cut: int, live: Iterable[str]) -> str:
        """Why gradients across a cut may differ from the whole model's in the last bits; empty where they don't."""
        if not self.writes:
            return ""
        return self._written_before(cut, live) or self._written_after(cut, live) or self._written_state(cut)

    def ungraphed(self, cut: int) -> tuple[str, ...]:
        """The state that must have no graph when a step begins, or one could lead past the boundary, too."""
        return self.plain if any(at < cut <= last for _, at, last in self.if_graphed) else ()

    def _written_state(self, cut: int) -> str:
        for name, at, last in self.states:
            if at < cut <= last:
                return (
                    f"{name!r}, which the model holds, gets a graph before the cut, by {self.plan.nodes[at].name!r}, and is read "
                    "after it: a walk back from there goes into the prefix, past the boundary"
                )
        return ""

    def _written_after(self, cut: int, live: Iterable[str]) -> str:
        for name in live:
            value, writes = self.plan.values[name], self.writes.get(self.groups.find(name), ())
            if writes and writes[-1] >= cut and value.is_view and value.differentiable:
                first = self.plan.nodes[writes[bisect_left(writes, cut)]]
                return (
                    f"{name!r} is a view of memory that {first.name!r} writes into after the cut: the whole takes the gradient of "
                    "what is written to the tensor that it is a view of, and adds it up and lays it out there"
                )
        return ""

    def _written_before(self, cut: int, live: Iterable[str]) -> str:
        members: dict[str, list[str]] = {}
        for name in live:
            root = self.groups.find(name)
            if root in self.writes and self.plan.values[name].differentiable:
                members.setdefault(root, []).append(name)
        for root, names in members.items():
            at = bisect_left(self.writes[root], cut) - 1
            base = self.bases[root]
            found = self.uses.get(root, [])
            later = found[bisect_left(found, cut) :]
            gradients = len(later)
            gradients += sum(2 * (name in self.given) if self.tensor.get(name, name) == base else 1 for name in names)
            if at < 0 or gradients < 2 or (gradients == 2 and root not in self.mixed and self._lie_alike(base, later)):
                continue
            last = self.writes[root][at]
            writer = self.plan.nodes[last]
            for name in names:
                made = self.plan.definitions.get(name, -1)
                silent = made == last and writer.region.grad is False
                if (made < last or silent) and self.tensor.get(name, name) != base:
                    return (
                        f"{name!r} is a view of memory that {writer.name!r} wrote into, and crosses with another value of it: the "
                        "whole model takes up such a view where it is next used, after the cut, and adds up gradients in another "
                        "order or layout"
                    )
        return ""

    def _lie_alike(self, base: str | None, later: list[int]) -> bool:
        """Whether the gradients that a base gets from its views and from `later` uses lie in memory as it does.

        Those of its views do, by `as_strided`; those of its own uses, where it stands between linear layers. No kernel takes
        the gradient of a parameter.
        """
        if base is None or not later or self.plan.values[base].kind == "parameter":
            return True
        made = self.plan.definitions.get(base)
        if made is None or not self.plan.nodes[made].target.startswith("aten.linear."):
            return False
        ops = [self.plan.nodes[i] for i in later]
        return all(
            op.target.startswith("aten.linear.") and base in (self.tensor.get(n, n) for n in uses(op.args[0]))
            for op in ops
        )


def frontiers(plan: TracePlan) -> tuple[SplitCandidate, ...]:
    """Every cut of the plan, in order, with the values that must cross it.

    One backward sweep: time is linear in the number of ops, and in that of the live values of each cut.

    >>> [c.split_id for c in frontiers(plan)]
    ['cut:1', 'cut:2', 'cut:3']
    """
    groups = Groups(plan)
    state_over = State(plan, groups)
    last_write: dict[str, tuple[int, str]] = {}
    fixed: dict[str, str] = {}
    stored = {s.stands_at: s for s in plan.stores if s.stands_at}
    for i, node in enumerate(plan.nodes):
        for name in node.writes:
            last_write[groups.find(name)] = (i, node.name)
    for name, value in plan.values.items():
        if value.is_state or value.kind in ("input", "constant"):
            fixed.setdefault(groups.find(name), name)
    order = {name: i for i, name in enumerate(plan.values)}
    first_trainable, last_trainable = _trainable_span(plan, lambda value: value.requires_grad)
    ends: dict[int, str] = {}
    times = Counter(c.path for c in plan.calls)
    for call in plan.calls:
        if call.end > call.start and call.path:
            ends.setdefault(call.end, call.path if times[call.path] == 1 else f"{call.path}#{call.call}")
    env: dict[str, Any] = plan.traced
    weights = {
        name: value.nbytes(env) / (plan.traced_batch or 1)
        for name, value in plan.values.items()
        if crosses(value) or held_by_itself(value)
    }
    # What an op with `out=` gives other sizes is noted as what it became, by a `detach` of what it was.
    resized = {
        node.outputs[0]
        for node in plan.nodes
        if node.target == "aten.detach.default" and node.outputs
        and (was := plan.values.get(next(uses(node.args), ""))) is not None
        and was.shape != plan.values[node.outputs[0]].shape
    }  # fmt: skip
    old_reads: dict[tuple[Any, ...], int] = {}
    reads = [(i, r) for i, node in enumerate(plan.nodes) for r in node.reads]
    reads += [(plan.stored_from(s) - 1, r) for s in plan.stores for r in uses(s.atoms)]
    reads += [(len(plan.nodes), r) for r in uses(plan.output)]
    for i, r in reads:
        for at in plan.values[r].stands_in(stored) if r in plan.values else ():
            old_reads[at] = max(i, old_reads.get(at, i))

    state = {groups.find(n) for n, v in plan.values.items() if v.is_state}  # of which the suffix has no copy
    written_stores = [
        (s, max(last_write[groups.find(n)][0] for n in written))
        for s in plan.stores
        if (written := [n for n in uses(s.atoms) if n in groups.parent and groups.find(n) in last_write.keys() - state])
    ]
    handed_in = [(s, plan.stored_from(s)) for s in plan.stores if s.table == "input"]
    order_of_gradients = GradientOrder(plan, groups)
    casts: dict[str, tuple[int, int]] = {}
    last_scope: dict[tuple[int, str], int] = {}
    for i, node in enumerate(plan.nodes):
        if node.region.autocast:
            for r in node.reads:
                if r in plan.values and plan.values[r].kind == "parameter":
                    first = last_scope.setdefault((node.region.scope, r), i)
                    if first < i:
                        casts[r] = (min(first, casts.get(r, (first, i))[0]), i)

    def nested(live: Iterable[str]) -> str:
        found = next((n for n in live if plan.values[n].is_nested and plan.values[n].requires_grad), None)
        return f"{found!r} is a nested tensor, and a step can't be taken up behind one" if found else ""

    def weigh(cut: int, live: dict[str, None]) -> SplitCandidate:
        written, reason = [], ""
        members: dict[str, list[str]] = {}
        for name in live:
            root = groups.find(name)
            at, _ = last_write.get(root, (-1, ""))
            if at >= cut:
                written.append(name)
                members.setdefault(root, []).append(name)
        for root, names in members.items():
            _, writer = last_write[root]
            if len(names) > 1:
                reason = (
                    f"{writer!r} writes into memory that {' and '.join(repr(n) for n in sorted(names)[:3])} share, and both "
                    "cross the boundary"
                )
            elif root in fixed:
                what = plan.values[fixed[root]]
                owner = "an input of the model" if what.kind == "input" else f"the model's {what.kind}"
                reason = (
                    f"{writer!r} writes through {names[0]!r}, which crosses the boundary, into {owner} {what.name!r}"
                )
        for name in written:
            if name in resized:
                reason = f"{last_write[groups.find(name)][1]!r} gives {name!r}, which crosses the boundary, other sizes"
        for name, (first, last) in casts.items():
            if first < cut <= last:
                reason = f"autocast in forward casts {name!r} once for ops on both sides, and keeps the cast"
        for place, last in old_reads.items():
            if cut <= last and plan.stored_before(cut, store := stored[place]):
                by = next(uses(store.atoms), "")
                reason = f"forward replaces {store.where} before the cut (by {by!r}) and reads the old one after it"
        for store, last in written_stores:
            if last >= cut and plan.stored_before(cut, store):
                reason = (
                    f"forward keeps {next(uses(store.atoms))!r} as {store.where} before the cut, and "
                    f"{plan.nodes[last].name!r} writes into it after"
                )
        for store, start in handed_in:
            if cut < start:
                reason = f"forward puts what is made after the cut into {store.name}, which the prefix alone is given"
        names_in_order = tuple(sorted((*live, *state_over.crossing(cut)), key=order.__getitem__))
        if not names_in_order:
            reason = reason or "nothing crosses it: the suffix does not depend on the prefix"
        return SplitCandidate(
            cut,
            names_in_order,
            tuple(n for n in names_in_order if n in written),
            sum(weights[n] for n in names_in_order),
            cut,
            len(plan.nodes) - cut,
            last_trainable >= cut,
            first_trainable < cut,
            ends.get(cut, ""),
            reason,
            nested(live) or order_of_gradients.at(cut, live),
            order_of_gradients.ungraphed(cut),
        )

    return tuple(weigh(cut, live) for cut, live in _sweep(plan))[::-1]
