"""Guards of the model's own tensors: what a plan relies on beyond their values, which it reads anew at each call."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from ariadne.errors import ModuleError, named
from ariadne.guards.attributes import Attribute
from ariadne.guards.baseline import Baseline, shown, table_of
from ariadne.guards.facts import WHATEVER, Facts
from ariadne.guards.referred import Reference
from ariadne.plan import TraceNode, TracePlan, Value, storage_of

# Of a tensor of the model: its kind, its module, and the steps from there.
Key = tuple[str, str, tuple[Any, ...]]


class Slot(NamedTuple):
    """Where the model keeps a tensor: `table[steps[-1]]`."""

    table: Any
    path: str
    steps: tuple[Any, ...]

    @property
    def key(self) -> Any:
        """The last step."""
        return self.steps[-1]

    @property
    def place(self) -> tuple[str, Any]:
        """The module, and its attribute in which the tensor is."""
        return self.path, self.steps[0]

    def now(self) -> Any:
        """What stands there; None where nothing does."""
        try:
            return self.table[self.key]
        except (LookupError, AttributeError, TypeError, ValueError):
            return None

    def words(self) -> str:
        """What it is called."""
        return repr(".".join(filter(None, (self.path, shown(self.steps)))))


class Referred(NamedTuple):
    """A slot that the plan reads, and another reference by which forward reached the tensor in it; see `referred`."""

    home: Slot
    place: Slot
    called: str
    views: bool

    def holds(self) -> bool:
        """Whether it is one tensor still, or shows the memory of it."""
        one, other = self.home.now(), self.place.now()
        if not self.views:
            return one is other
        return one is not None and other is not None and storage_of(one) == storage_of(other)


def asks_sizes(plan: TracePlan, baseline: Baseline) -> bool:
    """Whether forward asked for the size of a tensor of the model's."""
    return plan.assumption.shapes or baseline.asks_sizes


def sizes_count(plan: TracePlan, baseline: Baseline) -> bool:
    """Whether sizes of the model's tensors count at all: forward asked for one, or for one that follows them."""
    return asks_sizes(plan, baseline) or bool(baseline.deciding)


def size_facts(plan: TracePlan, model: nn.Module, baseline: Baseline) -> list[tuple[Slot, tuple[Any, ...]]]:
    """Those of `known_facts` whose sizes count: all where forward asked for one, else those that decide what it asked."""
    known = known_facts(plan, model, baseline)
    if asks_sizes(plan, baseline):
        return known
    return [(_slot(model, baseline, key), values) for key, values in baseline.deciding.items()]


def known_facts(plan: TracePlan, model: nn.Module, baseline: Baseline) -> list[tuple[Slot, tuple[Any, ...]]]:
    """The slots of the model's tensors, and the (dtype, device type, shape) of each at capture."""
    return [(_slot(model, baseline, key), values) for key, values in _all_facts(plan, baseline).items()]


def _all_facts(plan: TracePlan, baseline: Baseline) -> dict[Key, tuple[Any, ...]]:
    facts: dict[Key, tuple[Any, ...]] = baseline.deciding | baseline.facts
    for v in plan.values.values():
        if v.is_state and v.dtype is not None:
            facts[v.kind, v.origin[0], _steps(v)] = v.dtype, v.device.split(":")[0], v.shape
    return facts


def found_alike(one: tuple[TracePlan, Baseline], other: tuple[TracePlan, Baseline]) -> bool:
    """Whether two plans were captured of tensors of the same types and sizes, as far as Python asked in either of them.

    That counts where no guard can ask: a call that began in one plan goes on in the suffix of the other, and its prefix has put
    another tensor in the place of one that forward asked.
    """
    (plan, baseline), (plan_2, baseline_2) = one, other
    a, b = _all_facts(*one), _all_facts(*other)
    types = plan.assumption.dtypes or plan_2.assumption.dtypes
    everywhere = types or asks_sizes(*one) or asks_sizes(*other)
    counting = a.keys() & b.keys() if everywhere else baseline.deciding.keys() & baseline_2.deciding.keys()
    return all(a[key] == b[key] if types else a[key][2] == b[key][2] for key in counting)


def unread_alike(plan: TracePlan, model: nn.Module, baseline: Baseline) -> bool:
    """Whether tensors of the model that no op reads are of the types and sizes that forward asked for; a half holds none of these,
    so that nobody could ask there."""
    types, everywhere = plan.assumption.dtypes, asks_sizes(plan, baseline)
    asked = baseline.deciding | baseline.facts if types or everywhere else baseline.deciding
    read = {(v.kind, v.origin[0], _steps(v)) for v in plan.values.values() if v.is_state}
    for key in asked.keys() - read:
        t, (dtype, device, shape) = _slot(model, baseline, key).now(), asked[key]
        if not isinstance(t, torch.Tensor) or (types and (t.dtype, t.device.type) != (dtype, device)):
            return False
        if t.shape != shape and (everywhere or key in baseline.deciding):
            return False
    return True


def facts_of_state(
    plan: TracePlan, model: nn.Module, baseline: Baseline, pairs: Iterable[tuple[Slot, Slot]]
) -> Facts | None:
    """What forward asked of the types of the model's tensors; None where it asked for nothing.

    The second slot of each of the tied `pairs` has to hold the tensor of the first, and is left out.
    """
    others = {(id(other.table), other.key) for _, other in pairs}
    types, sizes = plan.assumption.dtypes, {(id(s.table), s.key): v[2] for s, v in size_facts(plan, model, baseline)}
    if not (types or sizes):
        return None
    slots = [
        (slot.table, slot.key, (dtype, device, sizes.get((id(slot.table), slot.key), WHATEVER)) if types else (shape,))
        for slot, (dtype, device, shape) in (known_facts if types else size_facts)(plan, model, baseline)
        if (id(slot.table), slot.key) not in others
    ]
    return Facts(["dtype", "device.type", "shape"] if types else ["shape"], slots)


def tied(plan: TracePlan, model: nn.Module, baseline: Baseline) -> list[tuple[Slot, Slot]]:
    """Slots that held one and the same tensor at capture, each after the slot that the plan reads."""
    read = {v.origin for v in plan.values.values() if v.kind in ("parameter", "buffer")}
    pairs = []
    for slots in baseline.ties:
        homes = [Slot(model.get_submodule(path).__dict__[table], path, (name,)) for path, table, name in slots]
        chosen = next((h for h in homes if (h.path, h.key) in read), None)
        if chosen is not None:
            pairs += [(chosen, h) for h in homes if h is not chosen]
    return pairs


def referred(plan: TracePlan, model: nn.Module, baseline: Baseline) -> list[Referred]:
    """The slots that the plan reads of which forward reached the tensors by other references, too, or by these alone."""
    read = {(v.origin[0], _steps(v)) for v in plan.values.values() if v.is_state}
    found = []
    for one in baseline.references:
        home = next((h for h in one.homes if (h[0], h[2]) in read), None)
        if home is None or (one.outside is None and (one.path, one.steps) == (home[0], home[2])):
            continue
        path, table, steps = home
        slot = Slot(_table(model, baseline, table.strip("_").removesuffix("s"), path, steps), path, steps)
        found.append(Referred(slot, _place(model, baseline, one), one.name(), one.views))
    return found


def _place(model: nn.Module, baseline: Baseline, one: Reference) -> Slot:
    try:
        if one.outside is not None:
            return Slot(one.table(), "", one.steps or (one.outside.key,))
        return Slot(_table(model, baseline, "", one.path, one.steps), one.path, one.steps)
    except (LookupError, AttributeError, TypeError, ValueError):  # it leads nowhere by now
        return Slot({}, one.path, one.steps)


def flag_of(model: nn.Module, path: str) -> tuple[dict[str, torch.Tensor | None], str]:
    """The table in which a parameter or a buffer stands, and its key there."""
    holder, _, name = path.rpartition(".")
    module = model.get_submodule(holder)
    return module._buffers if name in module._buffers else module._parameters, name  # type: ignore[return-value]


class StateGuard:
    """That the tensors which a suffix reads are tied as they were, and of the sizes that forward asked for.

    For a suffix whose prefix runs elsewhere: what enters a prefix is checked for the whole model, and calls for a new plan. The
    dtypes and devices of a suffix may be others than the prefix's. What the prefix itself stores does not count. Nor does what the
    suffix stores, if it follows from sizes, where the prefix ran here, in the state that it found. A suffix whose prefix runs
    elsewhere must find what it stored to be of the size of capture: that prefix can't see it, and would go on as in the first call.
    """

    def __init__(self, plan: TracePlan, cut: int, nodes: Iterable[TraceNode], model: nn.Module, baseline: Baseline,
                 paths: Collection[str]) -> None:  # fmt: skip
        before = {(s.path, s.name) for s in plan.stores if not s.inside and plan.stored_before(cut, s)}
        read = {name for node in nodes for name in node.reads}
        origins = {(v.origin[0], _steps(v)): name in read for name, v in plan.values.items() if v.is_state}
        sizes = size_facts(plan, model, baseline)
        counting = [
            (slot, shape)
            for slot, (_, _, shape) in sizes
            if origins.get(
                (slot.path, slot.steps), slot.path in paths
            )  # or read by none, in modules that are looked at
        ]
        alike = plan.stored_from_sizes - before if counting else frozenset()
        self._sizes = [(slot, shape) for slot, shape in counting if slot.place not in before | alike]
        self._own = [(slot, shape) for slot, shape in counting if slot.place in alike]
        pairs = tied(plan, model, baseline)
        self._pairs = [
            (one, other)
            for one, other in pairs
            if (origins[one.path, one.steps] or other.path in paths) and not before & {one.place, other.place}
        ]
        self._facts = Facts(("shape",), [(slot.table, slot.key, (shape,)) for slot, shape in self._sizes])
        self._referred = [
            one
            for one in referred(plan, model, baseline)
            if origins[one.home.path, one.home.steps] and not before & {one.home.place, one.place.place}
        ]
        self.asks = bool(self._pairs or self._sizes or self._own or self._referred)

    def __call__(self, here: bool) -> bool:
        """Whether all of it holds, for a boundary whose prefix ran `here`, or elsewhere."""
        for one, other in self._pairs:
            if one.now() is not other.now():
                return False
        if not all(one.holds() for one in self._referred):
            return False
        if not here and any(getattr(slot.now(), "shape", None) != shape for slot, shape in self._own):
            return False
        return not self._sizes or self._facts.hold()

    def explain(self, here: bool) -> None:
        """Raise `ModuleError` with the first difference."""
        again = "; undo that, or call prepare_split again"
        for one, other in self._pairs:
            if one.now() is not other.now():
                first, second = (repr(".".join(filter(None, (s.path, s.key)))) for s in (one, other))
                raise ModuleError(f"{first} and {second} were one tensor at capture, and are two now{again}")
        for known in self._referred:
            if not known.holds():
                raise ModuleError(
                    f"{known.home.words()} was what forward reached by {known.called or known.place.words()}, too, and is another "
                    f"tensor now: there forward goes on with the one of capture{again}"
                )
        for slot, shape in self._sizes if here else (*self._sizes, *self._own):
            now = getattr(slot.now(), "shape", None)
            if now != shape:
                found = "gone" if now is None else list(now)
                raise ModuleError(
                    f"the shape of {shown(slot.steps)!r} of {named(slot.path)}, which forward asked for, was {list(shape)} at "
                    f"capture, now it is {found}{again}"
                )


def _steps(value: Value) -> tuple[Any, ...]:
    return tuple(Attribute(k[1]) if isinstance(k, tuple) and k[0] == "." else k for k in value.origin[1:])


def _slot(model: nn.Module, baseline: Baseline, key: tuple[str, str, tuple[Any, ...]]) -> Slot:
    return Slot(_table(model, baseline, *key), *key[1:])


def _table(model: nn.Module, baseline: Baseline, kind: str, path: str, steps: tuple[Any, ...]) -> Any:
    module = baseline.strays[path] if path in baseline.strays else model.get_submodule(path)
    return module.__dict__[f"_{kind}s"] if kind in ("parameter", "buffer") else table_of(module, steps)
