"""Guards: what a plan relies on, checked at every call by code that was made for it, and explained where it fails."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter, is_not
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ariadne import tree
from ariadne.errors import BatchError, InputError, ModuleError, named
from ariadne.guards import switches
from ariadne.guards.at_once import Calm, at_once, changed_since
from ariadne.guards.attributes import Attribute, Slots, follow, lasts, own_of
from ariadne.guards.baseline import HOOKS, Baseline, global_hooks, keeps_its_weights, table_of
from ariadne.guards.bound import accepts, matched, may_be_none, once_more
from ariadne.guards.classes import Lookup
from ariadne.guards.counted import owner_of
from ariadne.guards.explained import beside, other_structure, refuse_changes, unlike
from ariadne.guards.kept import Kept, OfKind, OfTables, Own, Same
from ariadne.guards.left import AsLeft
from ariadne.guards.marks import Asked, Tabled, marks_on, same_marks
from ariadne.guards.outside import Outside
from ariadne.guards.remembered import all_hold
from ariadne.guards.sizes import fits
from ariadne.guards.tensors import facts_of_state, flag_of, referred, tied
from ariadne.guards.versions import stamp
from ariadne.guards.watched import Named, Surrounded, Watched, is_known, same_dicts, same_hooks
from ariadne.plan import Expr, TracePlan, layout, other_layout, short_dtype, sizes_at, sizes_in

_is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
_autocast_dtype: Callable[[str], torch.dtype] = torch.get_autocast_dtype


def entrance(
    plan: TracePlan, model: nn.Module, baseline: Baseline
) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]:
    """A function from (args, kwargs) to (batch, leaves...), or to None where any condition on the call does not hold.

    It checks structure, type, rank, dims, dtype and device type of every input, the batch range, and the modes and
    parameter types that the plan looked at; `explain` says which one it was.
    """
    names = dict(plan.inputs)
    literals = dict(plan.literals)
    env: dict[str, Any] = {
        "Tensor": torch.Tensor,
        "flatten": tree.flatten,
        "identical": tree.identical,
        "of_class": of_class,
        "marks_on": marks_on,
        "mark_names": baseline.mark_names,
        "same_marks": same_marks,
        "strided": torch.strided,
        "spec": plan.input_spec,
    }
    env["again"] = once_more(model, plan.input_spec, env)
    lines = ["def enter(args, kwargs):", "  try:"]
    count = plan.input_spec.size
    leaf = [f"leaf{i}" for i in range(count)]
    positional, keyword = plan.input_spec.children
    flat = all(c.kind == tree.LEAF for c in (*positional.children, *keyword.children))
    n = len(positional.children)
    lines.append(f"    if len(args) != {n} or len(kwargs) != {len(keyword.keys)}: return again(args, kwargs)")
    if order := plan.assumption.order:
        env["order"] = [*order]
        lines.append("    if [k for k in kwargs if k in order] != order: return None")
    if flat:
        if n:
            lines.append(f"    {', '.join(leaf[:n])}, = args")
        lines += [f"    {name} = kwargs[{key!r}]" for name, key in zip(leaf[n:], keyword.keys, strict=True)]
    else:
        lines += [
            f"    leaves, found = flatten((args, {{k: kwargs[k] for k in {keyword.keys!r}}}))",
            "    if found != spec: return None",
            f"    {', '.join(leaf)}, = leaves",
        ]
    first = True
    sizes: dict[str, str] = {}  # symbols, and the variables that hold them
    classes = iter(plan.assumption.classes or [None] * count)
    for i in range(count):
        if i in literals:
            env[f"literal{i}"] = literals[i]
            lines.append(f"    if {leaf[i]} is not literal{i} and not identical({leaf[i]}, literal{i}): return None")
            continue
        value = plan.values[names[i]]
        if value.kind == "object":
            env[f"given{i}"] = plan.given[value.name].same
            lines.append(f"    if not given{i}({leaf[i]}): return None")
            continue
        env[f"kind{i}"] = cls = next(classes)
        usual = "Tensor" if cls is None else f"kind{i}"
        lines.append(f"    if type({leaf[i]}) is not {usual} and not of_class({leaf[i]}, kind{i}): return None")
        env[f"marks{i}"] = marks = baseline.marks.get(i, {})
        asked = f"{leaf[i]}.__dict__" if not marks else "True"
        lines.append(f"    if {asked} and not same_marks(marks_on({leaf[i]}, mark_names), marks{i}): return None")
        if i in baseline.exact:
            env[f"exact{i}"] = baseline.exact[i]
            lines.append(f"    if type({leaf[i]}) is not exact{i}: return None")
        lines.append(f"    if {leaf[i]}.layout is not strided or {leaf[i]}.is_nested: return None")
        dims = [f"d{i}_{k}" for k in range(len(value.shape))]
        lines.append(
            f"    {', '.join(dims)}, = {leaf[i]}.shape" if dims else f"    if {leaf[i]}.dim() != 0: return None"
        )
        checks = []
        for name, dim in zip(dims, value.shape, strict=True):
            if isinstance(dim, int):
                checks.append(f"{name} != {dim}")
            elif dim.source in plan.over:
                known = sizes.setdefault(dim.source, name)
                checks += [f"{name} != {known}"] if known != name else []
            elif first:
                lines.append(f"    B = {name}")
                first = False
            else:
                checks.append(f"{name} != B")
        env[f"dtype{i}"] = value.dtype
        checks.append(f"{leaf[i]}.dtype is not dtype{i}")
        kind = value.device.split(":")[0]
        checks.append(f"not {leaf[i]}.is_{kind}" if kind in ("cpu", "cuda") else f"{leaf[i]}.device.type != {kind!r}")
        lines.append(f"    if {' or '.join(checks)}: return None")
    if first:
        lines.append(f"    B = {plan.traced_batch}")
    tensors = [i for i, name in plan.inputs if plan.values[name].kind == "input"]
    for k, i in enumerate(tensors):
        for j in tensors[:k]:
            sign = "is not" if (i, j) in plan.tied_inputs else "is"
            lines.append(f"    if leaf{i} {sign} leaf{j}: return None")
    within = " or ".join(f"{lo} <= B <= {hi}" if lo != hi else f"B == {lo}" for lo, hi in plan.batches.ranges)
    lines.append(served := f"    if not ({within or 'False'}): return None")
    if sizes:
        env["fits"] = fits(plan, (*sizes,))
        lines.append(f"    if not fits(B, {', '.join(sizes.values())}): return None")
    for name, line, thing in _assumed(plan, model, baseline):
        env[name] = thing
        lines.append(f"    {line}")
    lines += ["  except (AttributeError, ValueError, LookupError, TypeError):", "    return None"]
    handed_in = "(args, kwargs), " if plan.keeps_inputs else ""
    lines.append(f"  return (B, {''.join(leaf[i] + ', ' for i, _ in plan.inputs)}{handed_in})")
    exec("\n".join(lines), env)
    found: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None] = env["enter"]
    found.asks = [line for line in lines if line != served]  # type: ignore[attr-defined]  # what it asks beside the batch
    return found


def of_class(value: Any, cls: type | None) -> bool:
    """Whether a value is a tensor of that subclass; with None, of torch's own classes."""
    return isinstance(value, torch.Tensor) and tree.subclass_of(value) is cls


def _assumed(plan: TracePlan, model: nn.Module, baseline: Baseline) -> list[tuple[str, str, Any]]:
    """The conditions that only some plans have, as (name, source line, the object that the name stands for)."""
    found: list[tuple[str, str, Any]] = []
    assumed = plan.assumption
    tensors = [f"leaf{i}" for i, name in plan.inputs if plan.values[name].kind == "input"]
    if assumed.autocast is not None:
        found.append(("autocast_holds", "if not autocast_holds(): return None", partial(autocast_is, assumed.autocast)))
    if assumed.layouts is not None:
        now = ", ".join(f"layout({t}, {assumed.strides})" for t in tensors)
        found.append(("layout", f"if ({now},) != layouts: return None", layout))
        found.append(("layouts", "pass", assumed.layouts))
    if assumed.requires_grad is not None:
        tables = [flag_of(model, path) for path, _ in assumed.requires_grad]
        found.append(("flag_tables", "if [t[k].requires_grad for t, k in flag_tables] != flags: return None", tables))
        found.append(("flags", "pass", [flag for _, flag in assumed.requires_grad]))
    if assumed.inputs_require_grad is not None:
        names = [f"{leaf}.requires_grad" for leaf in tensors]
        found.append(
            ("given_flags", f"if [{', '.join(names)}] != given_flags: return None", [*assumed.inputs_require_grad])
        )
    for i, (ask, was) in enumerate(switches.readers(assumed.switches)):
        found.append((f"switch{i}", f"if switch{i}() != stood{i}: return None", ask))
        found.append((f"stood{i}", "pass", was))
    if baseline.remembered:
        found.append(("remembered", "if not all_hold(remembered): return None", baseline.remembered))
        found.append(("all_hold", "pass", all_hold))
    pairs = tied(plan, model, baseline)
    facts = facts_of_state(plan, model, baseline, pairs)
    if facts is not None:
        found.append(("facts_hold", "if not facts_hold(): return None", facts.hold))
    if pairs:
        slots = [(one.table, one.key, other.table, other.key) for one, other in pairs]
        found.append(("tied", "if any(t[k] is not u[l] for t, k, u, l in tied): return None", slots))
    others = [one.holds for one in referred(plan, model, baseline)]
    if others:
        found.append(("others", "if not all([holds() for holds in others]): return None", others))
    return found


def _told(leaf: Any) -> str:
    """An input in words: a tensor by its type and sizes."""
    if isinstance(leaf, torch.Tensor):
        return f"{short_dtype(leaf.dtype)}{list(leaf.shape)} on {leaf.device.type}"
    return f"{leaf!r}{beside(leaf)}"


def references_hold(plan: TracePlan, model: nn.Module, baseline: Baseline) -> bool:
    """Whether weights that forward reaches by two ways are those that the plan knows; a call captures anew where they are not."""
    same = all(one.table[one.key] is other.table[other.key] for one, other in tied(plan, model, baseline))
    return same and all(one.holds() for one in referred(plan, model, baseline))


def autocast_is(then: tuple[tuple[str, bool, torch.dtype], ...]) -> bool:
    """Whether autocast is now what it was then, per device type: (device type, enabled, dtype).

    To ask a device type takes as long as all else at the entrance of a small model, and most often no type is enabled. The dtype
    counts all the same: a forward that enables autocast takes it.
    """
    if _is_any_autocast_enabled():
        return all(torch.is_autocast_enabled(d) is on and _autocast_dtype(d) is dtype for d, on, dtype in then)
    return not [d for d, on, dtype in then if on or _autocast_dtype(d) is not dtype]


def _stays_as_it_is(thing: Any) -> bool:
    """Whether an input that is no tensor can't change by itself, and is not made for each call, as a lambda may be: another one in
    its place has a plan of its own."""
    if type(thing) is slice:
        return lasts((thing.start, thing.stop, thing.step))
    return tree.is_shared(thing) and "<" not in getattr(thing, "__qualname__", "")


def explain(
    plan: TracePlan,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batches: range,
    plain: bool = True,
) -> None:
    """Raise the error that says which condition on the inputs does not hold; return where none is at fault.

    Without `plain`, numbers, strings, slices, functions and members of enumerations may be others, a tensor may stand where None
    did, arguments that forward takes may be passed or left out, and some may have another structure, such as None where a pair was:
    for them a plan can be captured.
    """
    positional, keys = len(plan.input_spec.children[0].children), plan.input_spec.children[1].keys
    ordered = {k: kwargs[k] for k in keys} if kwargs.keys() == {*keys} else dict(kwargs)
    leaves, spec = tree.flatten((args, ordered))
    as_many = len(args) == positional and kwargs.keys() == {*keys}
    followed = not plain and (as_many or accepts(model, args, kwargs))
    if spec != plan.input_spec and not (followed and any(isinstance(leaf, torch.Tensor) for leaf in leaves)):
        raise InputError(other_structure(spec, plan.input_spec))
    at = matched(spec, plan.input_spec)
    if plain and (came := tuple(k for k in kwargs if k in plan.assumption.order)) != plan.assumption.order:
        raise InputError(
            "forward takes keyword inputs in the order in which they come (**kwargs): expected "
            f"{', '.join(plan.assumption.order)}; found {', '.join(came)}. Pass them as example_kwargs had them, or prepare again"
        )
    where = [p for p, _ in tree.paths((args, ordered))]
    literals = dict(plan.literals)
    batch, free = None, {(size.leaf, size.dim) for size in plan.sizes}
    for i, leaf, place in zip(at, leaves, where, strict=True):
        name = place.removeprefix("[0]") if place.startswith("[0]") else place.removeprefix("[1]")
        if i is None:
            continue
        if i in literals:
            comes = literals[i] is None and isinstance(leaf, torch.Tensor)
            if not tree.identical(leaf, literals[i]) and (plain or not (comes or lasts(leaf))):
                raise InputError(
                    f"input {name} was {literals[i]!r}{beside(literals[i])} at capture, now it is {_told(leaf)}; "
                    "a value that is no tensor is part of the plan. Prepare again for another one"
                )
            continue
        called = dict(plan.inputs)[i]
        value = plan.values[called]
        if value.kind == "object":
            given = plan.given[value.name]
            if not given.same(leaf) and leaf is given.thing:
                raise InputError(
                    f"input {name}, {reprlib.repr(leaf)}, holds other things than at capture: it was changed in place. A value "
                    "that is no tensor is part of the plan; undo that, or prepare again"
                )
            if not plain and _stays_as_it_is(given.thing) and _stays_as_it_is(leaf):
                continue
            if not given.same(leaf):
                raise InputError(
                    f"input {name} {unlike(given.thing, leaf)}; a value that is no tensor is part of the plan. Prepare again for "
                    "another one"
                )
            continue
        if leaf is None and not plain and i in may_be_none(model, plan.input_spec):
            continue
        if not isinstance(leaf, torch.Tensor):
            raise InputError(
                f"input {name} must be a tensor {value.describe()}; found {type(leaf).__name__}. Pass a tensor, or prepare again"
            )
        if how := other_layout(leaf):
            raise InputError(
                f"input {name} must be {value.describe()}, dense; found one that is {how}. Hand it in dense, or run the "
                "model's own Python, with an example that is so: prepare_split(..., fallback='python')"
            )
        found = _told(leaf)
        if leaf.dim() != len(value.shape):
            raise InputError(
                f"input {name} must be {value.describe()}, of rank {len(value.shape)}; found {found}. Reshape it, or prepare again"
            )
        for d, dim in enumerate(value.shape):
            if (i, d) in free:
                continue
            if isinstance(dim, Expr):
                if batch is None:
                    batch = leaf.shape[d]
                elif leaf.shape[d] != batch:
                    raise BatchError(
                        f"inputs must share one batch: the first has {batch}, input {name} has {leaf.shape[d]}. At capture its "
                        f"dim {d} was as large as the batch; if by accident, say SplitSpec(batch_dim={{{called!r}: None}}), or "
                        "prepare again with an example of another batch"
                    )
            elif leaf.shape[d] != dim:
                raise InputError(
                    f"input {name} must be {value.describe()}: dim {d} is {dim} in the plan; found {found}. What may change "
                    "is the batch, and what SplitSpec(dynamic=...) names; prepare again for other sizes, or with batch_dim={...} "
                    "where the batch is another dim"
                )
        if leaf.dtype is not value.dtype:
            raise InputError(f"input {name} must be {value.describe()}; found {found}. Convert it, or prepare again")
        if leaf.device.type != value.device.split(":")[0]:
            raise InputError(f"input {name} was captured on {value.device}; found {found}. Move it, or prepare again")
    sizes_in(sizes_at(plan.sizes, at), leaves)
    if batch is not None and batch not in batches:
        raise BatchError(
            f"batch {batch} lies outside dynamic_batch ({batches.start}, {batches.stop - 1}); prepare with a range that holds it"
        )


def _at(module: nn.Module, keys: tuple[Any, ...], table: Any) -> tuple[int, type, Any]:
    """The same for two ways to one place: a class makes a new view of itself each time, and an object with slots has none."""
    view = owner_of(module, keys[0]) if isinstance(table, MappingProxyType) else table
    return id(table.thing if isinstance(table, Slots) else view), type(table), keys[-1]


def same_kinds(kinds: list[OfKind]) -> list[Callable[[], bool]]:
    """What tells whether things are of the classes that they were of; nothing for none."""
    things, classes = [kind.thing for kind in kinds], [kind.held for kind in kinds]
    return [lambda: [*map(type, things)] == classes] if things else []


_own_of = attrgetter("__dict__")


class ModuleGuard:
    """Whether the modules that some ops came from are as they were: class, flags, attributes read, children, hooks.

    Called without arguments, it returns True if so. It covers the modules whose calls ran any of the given ops, or none at
    their edge (a dropout in eval mode), all that contain them, those that were never called but whose attributes forward
    read, and those that another module's code looked at. `explain` raises the error that names the difference.
    """

    def __init__(self, plan: TracePlan, nodes: range, baseline: Baseline) -> None:
        self.baseline = baseline
        self.called = called = {call.path for call in plan.calls}
        paths = {"", *baseline.tabled, *(baseline.modules.keys() - (called - baseline.foreign) - baseline.followed)}
        for call in plan.calls:
            overlaps = call.start < nodes.stop and call.end > nodes.start
            if overlaps or (call.start == call.end and nodes.start <= call.start <= nodes.stop):
                parts = call.path.split(".") if call.path else []
                paths |= {".".join(parts[:i]) for i in range(len(parts) + 1)}
        gone = sorted(paths - baseline.modules.keys())
        if gone:
            raise ModuleError(f"{named(gone[0])}, whose ops the plan holds, is gone; call prepare_split again")
        self.modules = {p: baseline.modules[p] for p in sorted(paths)}
        self._own = [m.__dict__ for m in self.modules.values()]
        early = [s for s in plan.stores if nodes.start != plan.first and plan.stored_before(nodes.start, s)]
        filled = {(s.path, s.table, s.name) for s in early if baseline.is_filled_by(s)}
        self.absent = {p: [a for a in baseline.absent[p] if (p, *a) not in filled] for p in self.modules}
        places = {f"{s.path}.{s.name}".lstrip(".") for s in early if s.table == "_buffers" and not s.inside}
        self.attributes = [
            (path, keys, value.without(places) if places and isinstance(value, Asked) else value)
            for path, keys, value in baseline.attributes
            if path in self.modules
        ]
        self._arm()

    def _arm(self) -> None:
        """Lay out what to compare; it is cold at each call, so little memory is to be touched."""
        base, modules = self.baseline, self.modules
        attributes: dict[str, list[tuple[tuple[Any, ...], Any]]] = {}
        for path, keys, value in self.attributes:
            attributes.setdefault(path, []).append((keys, value))
        changed = any(p in modules and hasattr(modules[p], name) for p, name in base.missing)
        contents: list[Kept] = []
        kinds: dict[int, OfKind] = {}  # of objects that many modules may hold
        inner: set[int] = set()  # the dicts that attributes hold
        held: dict[int, tuple[Any, Any]] = {}  # objects in attributes, and the dicts of these
        identical: dict[Any, tuple[Any, Any, Any]] = {}
        slots: dict[Any, tuple[Any, Any, Any]] = {}
        of_classes: list[Outside] = []  # plain values that stand in a class, which is read once for all
        for path, m in modules.items():
            if path in base.training:
                slots[id(m.__dict__), "training"] = m.__dict__, "training", base.training[path]
            for table, thing in zip(
                ("_parameters", "_buffers", "_modules"), (*base.tables[path], m._modules), strict=True
            ):
                identical[id(m.__dict__), table] = m.__dict__, table, thing
            if path in base.strays:  # its tensors are in the plan as they were
                for where, name, tensor in base.tensors[path]:
                    table = m.__dict__[where]
                    identical[id(table), name] = table, name, tensor
            for table, name in ((m.__dict__[table], name) for table, name in self.absent[path]):
                if name in table:
                    slots[id(table), name] = table, name, None
            for keys, value in attributes.get(path, ()):
                if isinstance(value, OfKind):
                    kinds[id(value.thing)] = value
                    continue
                if isinstance(value, Kept):
                    contents.append(value)
                    continue
                try:
                    table = table_of(m, keys)
                except (LookupError, AttributeError, TypeError):  # it is gone, which `explain` says
                    changed = True
                    continue
                if len(keys) > 1:
                    inner.add(id(table))
                    if isinstance(keys[-1], Attribute) and type(table) is dict:
                        held[id(table)] = follow(m.__dict__[keys[0]], keys[1:-1]), table
                if isinstance(table, MappingProxyType) and lasts(value):
                    if (there := table[keys[-1]]) is not value and not tree.identical(there, value):
                        changed = True
                    found = Lookup(type(m))  # nothing, where it is nn.Module's own: then none must come before that
                    of_classes.append(Outside(found, keys[0], found[keys[0]], keys[0]))
                elif isinstance(value, Same):
                    identical[id(table), keys[-1]] = table, keys[-1], value.thing
                else:
                    slots.setdefault(_at(m, keys, table), (table, keys[-1], value))
        nowhere = base.missing | base.handed_on
        for path, name in sorted(nowhere):  # nor come to stand in its class
            if path in modules:
                found = Lookup(type(modules[path]))
                of_classes.append(Outside(found, name, found[name], name))
        contents += [Tabled(modules[path], were) for path, were in base.tabled.items() if path in modules]
        surrounded = Surrounded([*base.outside, *of_classes])
        parents = [
            (m, [*m._modules.items()] if base.keeps_its_children(p) else base.children[p])
            for p, m in modules.items()
            if base.children[p] or p not in self.called or p in base.tabled
        ]
        families = [(m._modules, children) for m, children in parents]  # with such as may have been added
        hooks = [(m, h, base.hooks[p, h]) for p, m in modules.items() for h in HOOKS]
        loud = [(m.__dict__[h], base.hooks_now(m, h) == was) for m, h, was in hooks if was or m.__dict__[h]]
        loud_now = [(live, [*live.values()] if same else None) for live, same in loud]
        self._hookless = [m.__dict__[h] for m, h, was in hooks if not was and not m.__dict__[h]]
        identical.update(((id(m.__dict__), h), (m.__dict__, h, m.__dict__[h])) for m, h, _ in hooks)
        self._handles = RemovableHandle.next_id
        own = {id(t) for m in modules.values() for t in (m.__dict__, m._modules, m._parameters)} | inner
        own |= {id(m._buffers) for m in modules.values() if not m._buffers}
        looked_in_vain = {path for path, _ in nowhere}
        sized = [m.__dict__ for m in modules.values()] + [m._modules for m, _ in parents]
        sized += [t for p, m in modules.items() if p in looked_in_vain for t in (m._parameters, m._buffers)]
        # What was looked for in vain, or found in the class, must not come to stand in a module's own dicts.
        absent = [
            (t, n)
            for p, n in nowhere
            if p in modules
            for t in (modules[p].__dict__, modules[p]._parameters, modules[p]._buffers, modules[p]._modules)
        ]
        absent += [
            (m.__dict__, k[0]) for p, m in modules.items() for k, _ in attributes.get(p, ()) if k[0] not in m.__dict__
        ]
        absent += [(modules[p].__dict__, n) for p, n in base.inherited if p in modules]
        # Buffers that there are may be written at each call, by the plan itself.
        dicts = [d for d in (*sized, *(s[0] for s in (*slots.values(), *identical.values()))) if id(d) in own]
        watched = Watched(
            dicts, list(slots.values()), list(identical.values()), [(t, len(t)) for t in sized], families, absent
        )
        flags = [
            (modules[path].__dict__, name, before, now, [(base.modules[p].__dict__, n) for p, n in beside])
            for path, name, before, now, beside in base.flags
            if path in modules
        ]
        self._modules = list(modules.values())
        self._classes = [base.classes[p] for p in modules]
        told = [kept for kept in contents if isinstance(kept, OfTables) and kept.is_told]
        named = Named(told, modules.values())
        held.update((id(own_of(k.thing)), (k.thing, own_of(k.thing))) for k in contents if isinstance(k, Own))
        self.surrounded, self._parts = surrounded, (watched, surrounded, named)
        self._held, self._walk, self._calm = [*held.values()], changed_since, Calm()
        keep_their_dicts: list[Callable[[], bool]] = (
            [partial(same_dicts, *zip(*self._held, strict=True))] if held else []
        )
        homes = {id(thing) for thing, _ in self._held}
        keep_their_dicts += same_kinds([kind for at, kind in kinds.items() if at in homes])
        self._gather()
        self.contents = contents
        self._asked: list[Callable[[], bool]] = [
            *([bool] if changed else []),  # which says False
            *watched.asked,
            *surrounded.asked,
            *(partial(same_hooks, hooks, expected) for hooks, expected in loud_now),
            *named.asked,
            *keep_their_dicts,
            *same_kinds([kind for at, kind in kinds.items() if at not in homes]),
            *(kept.asked for kept in contents if not named.takes(kept)),
            *(partial(is_known, *flag) for flag in flags),
            *(partial(keeps_its_weights, m) for m in modules.values() if isinstance(m, nn.RNNBase)),
        ]
        walked = {*surrounded.in_one_walk, *keep_their_dicts}
        self._beside = [ask for ask in self._asked if ask not in walked]

    def __call__(self) -> bool:
        walked = self._walk()
        if not walked and stamp(self._dicts) != self._total and not self._still():
            return False
        for ask in self._beside if walked else self._asked:
            if not ask():
                return False
        if any(self._hookless):  # by registration, or written into the table itself
            return False
        if self._handles != RemovableHandle.next_id and not self._no_global_hook():
            return False
        return walked or self._keep_their_kind()

    def _keep_their_kind(self) -> bool:
        """Whether the modules are of their classes and keep their attributes where they did."""
        if any(map(is_not, map(_own_of, self._modules), self._own)):  # what was written into the new one is not told
            return False
        if list(map(type, self._modules)) != self._classes:
            return False
        if self._calm.lasts(total := self._total):
            self._lay_out_walk(total)
        return True

    def _lay_out_walk(self, total: int) -> None:
        """Ask for most of it in one call from here on, until something is written; it held just now, with this total."""
        homes = [*zip(self._modules, self._own, strict=True), *self.surrounded.owners, *self._held]
        walk = at_once(self._dicts, self.surrounded.attributes, homes)
        if walk is not None and stamp(self._dicts) == total:  # no other thread has written meanwhile
            self._walk = walk

    def _still(self) -> bool:
        """Whether what rests on the dicts, one of which was written, is as it was."""
        total = stamp(self._dicts)
        if not all(part.still() for part in self._parts):
            return False
        self._total = total
        if any(part.dicts is not dicts for part, dicts in zip(self._parts, self._gathered, strict=True)):
            self._gather()
        return True

    def _gather(self) -> None:
        """Lay out the dicts on which all of it rests, of which the versions are to be added up."""
        self._gathered = [part.dicts for part in self._parts]
        self._dicts: list[dict[Any, Any]] = [*{id(d): d for dicts in self._gathered for d in dicts}.values()]
        self._total = -1

    def _no_global_hook(self) -> bool:
        """Whether no hook for all modules is there. Asked only after torch gave out a handle, as every registration does."""
        if global_hooks():
            return False
        self._handles = RemovableHandle.next_id
        return True

    def explain(self, serving: bool = True) -> None:
        """Raise `ModuleError` with the first difference; where there is none that matters, take note of the new state.

        What a first call of its plan would have left counts only where the plan is `serving` this one.
        """
        counted = [a for a in self.attributes if serving or not isinstance(a[2], AsLeft)]
        refuse_changes(self.baseline, self.modules, self._own, counted, self.absent)
        self._arm()
