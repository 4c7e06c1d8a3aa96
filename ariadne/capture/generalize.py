"""Generalisation: plans observed at several batch sizes become one plan, or are shown to disagree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ariadne import tree
from ariadne.capture.sizes import UNKNOWN, Sources
from ariadne.compare import same_bits
from ariadne.errors import CaptureError
from ariadne.plan import WHOLE, Batches, Expr, Ref, TraceNode, TracePlan, Value, substitute, uses, without

_ALIAS, SIZE = "aten.alias.default", "aten.sym_size.int"


class Disagreement(CaptureError):
    """Two recordings of one forward differ in more than numbers that follow the batch."""


def disagreement(plan: TracePlan, seen: TracePlan) -> str | None:
    """Where a real run, lowered to the plan `seen`, did something that `plan` at that batch does not say; None if nowhere.

    Both are walked op by op: same overloads, same values, same numbers.
    """
    env: dict[str, Any] = {plan.batch_symbol: seen.traced_batch}
    names: dict[str, str] = {a: b for (_, a), (_, b) in zip(plan.inputs, seen.inputs, strict=True)}

    same = partial(_same, plan, seen, env, names)
    rest = _ops(seen)
    at = 0
    for i, node in enumerate(plan.nodes):
        if node.target == SIZE:
            ref, dim = node.args
            env[node.outputs[0]] = seen.values[names[ref.name]].shape[dim]
            continue
        if at >= len(rest):
            return f"the real run ends before op {i}, {plan.show(node)}"
        other = rest[at]
        at += 1
        if (
            node.target != other.target
            or node.region != other.region
            or len(node.outputs) != len(other.outputs)
            or [k for k, _ in node.kwargs] != [k for k, _ in other.kwargs]
            or not same((node.args, tuple(v for _, v in node.kwargs)), (other.args, tuple(v for _, v in other.kwargs)))
            or (node.is_witness and other.is_witness and not same(node.witness, other.witness))
        ):
            return f"op {i} is {plan.show(node)} in the plan, {seen.show(other)} in the real run ({other.module})"
        for a, b in zip(node.outputs, other.outputs, strict=True):
            names[a] = b
            if other.is_witness:
                env[a] = other.witness
            mine, theirs = plan.values[a], seen.values[b]
            if mine.dtype is not theirs.dtype:
                return f"op {i} makes {mine.describe()} in the plan, {theirs.describe()} in the real run"
            sizes = tuple(d.evaluate(env) if isinstance(d, Expr) and d.names <= env.keys() else d for d in mine.shape)
            known = [(x, y) for x, y in zip(sizes, theirs.shape, strict=False) if not isinstance(x, Expr)]
            if len(mine.shape) != len(theirs.shape) or any(x != y for x, y in known):
                return f"op {i} makes {mine.describe()} in the plan, {theirs.describe()} in the real run"
    if at != len(rest):
        return f"the real run goes on after the plan ends, with {seen.show(rest[at])}"
    if plan.output_spec != seen.output_spec or not same(plan.output, seen.output):
        return "the outputs differ"
    for left, right in zip(plan.stores, seen.stores, strict=False):
        if replace(left, atoms=(), needs=()) != replace(right, atoms=(), needs=()) or not same(left.atoms, right.atoms):
            return f"what forward assigns to {left.where} differs"
    return None if len(plan.stores) == len(seen.stores) else "what forward assigns to attributes differs"


def _same(plan: TracePlan, seen: TracePlan, env: Mapping[str, Any], names: dict[str, str], a: Any, b: Any) -> bool:
    """Whether an argument is the same in both plans; `names`: what their values are called, so far, `env`: what numbers are.

    No function inside of another that calls itself: such keep what they see, here two plans, until garbage is collected.
    """
    if isinstance(a, Ref):
        if not isinstance(b, Ref):
            return a.name in env and _same_number(env[a.name], b)
        if a.name not in names and a.name in plan.values and a.name not in plan.definitions:
            if not _same_source(plan, plan.values[a.name], seen, seen.values[b.name]):
                return False
            names[a.name] = b.name
        return names.get(a.name) == b.name
    if isinstance(a, Expr):
        try:
            number = a.evaluate(env)
        except ZeroDivisionError:  # this batch has no such number, so forward went another way
            return False
        return _same_number(number, env.get(b.source) if isinstance(b, Expr) else b)
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(_same(plan, seen, env, names, x, y) for x, y in zip(a, b, strict=True))
    return _same_number(a, b)


def evaluated(plan: TracePlan) -> TracePlan:
    """The plan of one run, with the numbers that its expressions have at its batch."""
    env = {plan.batch_symbol: plan.traced_batch}

    def numbers(atoms: Any) -> Any:
        return substitute(atoms, lambda a: a.evaluate(env) if isinstance(a, Expr) and a.names <= env.keys() else a)

    nodes = tuple(
        replace(n, args=numbers(n.args), kwargs=tuple((k, numbers(v)) for k, v in n.kwargs)) for n in plan.nodes
    )
    stores = tuple(replace(s, atoms=numbers(s.atoms)) for s in plan.stores)
    return replace(plan, nodes=nodes, stores=stores, output=numbers(plan.output))


def expressed(plan: TracePlan, seen: TracePlan) -> Iterator[tuple[Any, Any]]:
    """The numbers that follow the batch in a plan or in `seen`, a recording that agrees with it op by op: those of both."""

    def pairs(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
        if type(a) is tuple:
            for x, y in zip(a, b, strict=True):
                yield from pairs(x, y)
        elif isinstance(a, Expr) or isinstance(b, Expr):
            yield a, b

    for node, other in zip(_ops(plan), _ops(seen), strict=True):
        yield from pairs((node.args, node.kwargs), (other.args, other.kwargs))
    yield from pairs(plan.output, seen.output)
    for left, right in zip(plan.stores, seen.stores, strict=True):
        yield from pairs(left.atoms, right.atoms)


def _ops(plan: TracePlan) -> list[TraceNode]:
    """The ops of a plan that a real run has, too: there a size is read without one."""
    return [node for node in plan.nodes if node.target != SIZE]


def unexplained(plan: TracePlan, seen: TracePlan) -> str | None:
    """Where two real runs on inputs with other numbers differ, up to the first number that Python was seen to read
    out of a tensor and that differs itself; None if nowhere."""

    def witnessed(of: TracePlan, node: TraceNode) -> Any:
        return of.constants[node.args[1].name] if node.target == WHOLE else node.witness

    end = None
    for i, (a, b) in enumerate(zip(plan.nodes, seen.nodes, strict=False)):
        if a.target != b.target:
            break
        if a.is_witness and b.is_witness and not _same_constant(witnessed(plan, a), witnessed(seen, b)):
            end = plan.definitions.get(a.args[0].name, i) if a.target == SIZE else i
            break
    if end is None:
        return disagreement(plan, seen)
    plan, seen = (
        replace(p, nodes=p.nodes[:end], output=(), output_spec=plan.output_spec, stores=()) for p in (plan, seen)
    )
    return disagreement(plan, seen)


def with_views_of(plan: TracePlan, seen: TracePlan) -> TracePlan:
    """The plan with what were views in a real run that it agrees with: composite ops run otherwise on fake tensors."""
    pairs = [
        (a, b) for x, y in zip(_ops(plan), _ops(seen), strict=True) for a, b in zip(x.outputs, y.outputs, strict=True)
    ]
    told = {a: replace(plan.values[a], is_view=seen.values[b].is_view) for a, b in pairs}
    return replace(plan, values={**plan.values, **told})


def without_slices_of_all(plan: TracePlan, seen: TracePlan) -> TracePlan:
    """The symbolic plan without the aliases that a real run lacks: indexing skips a slice of all, but not of a fake tensor.

    It is a guess which those are; `disagreement` says whether it was right.
    """
    rest = _ops(seen)
    instead: dict[str, Ref] = {}
    dropped: set[int] = set()
    at = 0
    for i, node in enumerate(plan.nodes):
        if node.target == SIZE:
            continue
        if node.target == _ALIAS and (at >= len(rest) or rest[at].target != _ALIAS):
            dropped.add(i)
            (source,) = uses(node.args)
            instead[node.name] = instead.get(source, Ref(source))
        else:
            at += 1
    if not dropped:
        return plan

    def named_now(atoms: Any) -> Any:
        return substitute(atoms, lambda atom: instead.get(atom.name, atom) if isinstance(atom, Ref) else atom)

    def name_now(name: str) -> str:
        return instead[name].name if name in instead else name

    nodes = tuple(
        replace(
            node,
            args=named_now(node.args),
            kwargs=named_now(node.kwargs),
            writes=tuple(dict.fromkeys(map(name_now, node.writes))),
            may_alias=tuple((a, name_now(b)) for a, b in node.may_alias),
        )
        for node in plan.nodes
    )
    stores = tuple(replace(store, atoms=named_now(store.atoms), needs=named_now(store.needs)) for store in plan.stores)
    return without(replace(plan, nodes=nodes, output=named_now(plan.output), stores=stores), dropped)


def _same_number(a: Any, b: Any) -> bool:
    """Whether two constants are one and the same."""
    return not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and tree.identical(a, b)


def _same_constant(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    return _same_number(a, b)


def _same_source(plan: TracePlan, a: Value, seen: TracePlan, b: Value) -> bool:
    if a.kind != b.kind:
        return False
    if a.name in plan.objects:
        return _same_object(plan.objects[a.name], seen.objects.get(b.name))
    if a.kind == "constant":
        x, y = plan.constants[a.name], seen.constants[b.name]
        return _same_constant(x, y)
    return a.origin == b.origin


def _same_object(a: Any, b: Any) -> bool:
    """Whether two objects that ops took are one, or stand for one: torch wraps its own (packed weights) anew for each op."""
    if a is b:
        return True
    if isinstance(a, torch.ScriptObject) and isinstance(b, torch.ScriptObject):
        return str(a._type()) == str(b._type()) and _same_state(a.__getstate__(), b.__getstate__())
    return bool(a == b)


def _same_state(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same_state(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return _same_state([*a.items()], [*b.items()])
    return _same_object(a, b)


def generalize(plans: Sequence[TracePlan], batches: Batches, loose: Collection[str] = ()) -> TracePlan:
    """One plan that agrees with every plan in `plans` at its batch, for the batches given.

    Numbers that are the same throughout stay constants; those that differ are fitted as expressions in the batch, from the
    first two plans where two decide, and every other plan must agree. Raises `Disagreement` where ops differ in kind or
    number, or where no expression fits; but if that is a size of one of the `loose` values, which nothing uses, the value is left
    without a dtype, which is to say that nothing is known of it.
    """
    first, *others = plans
    for other in others:
        if len(other.nodes) != len(first.nodes):
            raise Disagreement(
                f"at batch {first.traced_batch} forward runs {len(first.nodes)} ops, at batch {other.traced_batch} it runs "
                f"{len(other.nodes)}"
            )
    fit = _Fit([p.traced_batch for p in plans], first.batch_symbol)
    names: list[dict[str, str]] = [
        dict(zip((n for _, n in p.inputs), (n for _, n in first.inputs), strict=True)) for p in plans
    ]

    def merge(items: Sequence[Any], where: Callable[[], str]) -> Any:
        head = items[0]
        if isinstance(head, Ref):
            for k, (p, item) in enumerate(zip(plans, items, strict=True)):
                if not isinstance(item, Ref):
                    raise Disagreement(f"{where()}: a tensor at one batch, {item!r} at another")
                if item.name not in names[k] and item.name not in p.definitions:
                    if not _same_source(first, first.values[head.name], p, p.values[item.name]):
                        raise Disagreement(f"{where()}: it reads {head.name!r} at one batch, {item.name!r} at another")
                    names[k][item.name] = head.name
                if names[k].get(item.name) != head.name:
                    raise Disagreement(f"{where()}: it reads {head.name!r} at one batch, {item.name!r} at another")
            return head
        if type(head) is tuple:
            if any(type(i) is not tuple or len(i) != len(head) for i in items):
                raise Disagreement(f"{where()}: its arguments differ in number from one batch to another")
            return tuple(merge(parts, where) for parts in zip(*items, strict=True))
        if all(_same_number(head, i) for i in items[1:]):
            return head
        if all(isinstance(i, (int, float)) and not isinstance(i, bool) for i in items):
            found = fit(items)
            if found is not None:
                return found
        raise Disagreement(f"{where()}: {', '.join(map(repr, items))} at batch {', '.join(map(str, fit.sizes))}")

    nodes: list[TraceNode] = []
    values = dict(first.values)
    for i, group in enumerate(zip(*(p.nodes for p in plans), strict=True)):
        head = group[0]

        def where(i: int = i, head: TraceNode = head) -> str:
            return f"op {i} ({head.target} in {head.module or 'the model itself'})"

        for other_node in group[1:]:
            if (head.target, head.region, head.unpack, len(head.outputs), [k for k, _ in head.kwargs]) != (
                other_node.target, other_node.region, other_node.unpack, len(other_node.outputs), [k for k, _ in other_node.kwargs],
            ):  # fmt: skip
                told = f"is {other_node.target}"
                if head.target == other_node.target and len(head.outputs) != len(other_node.outputs):
                    told = f"gives {len(head.outputs)} tensors at one batch, {len(other_node.outputs)}"
                raise Disagreement(f"{where()} {told} at another batch")
        args = merge([n.args for n in group], where)
        kwargs = tuple((k, merge([n.kwargs[j][1] for n in group], where)) for j, (k, _) in enumerate(head.kwargs))
        witness = merge([n.witness for n in group], where) if head.is_witness else None
        nodes.append(replace(head, args=args, kwargs=kwargs, witness=witness))
        for j, name in enumerate(head.outputs):
            for k, other_node in enumerate(group):
                names[k][other_node.outputs[j]] = name
            merged = [p.values[n.outputs[j]] for p, n in zip(plans, group, strict=True)]
            try:
                values[name] = _merge_value(merged, values[name], fit)
            except Disagreement:
                if name not in loose:
                    raise
                values[name] = replace(values[name], dtype=None)
    for _, name in first.inputs:
        group_of = [p.values[next(n for n in p.values if names[k].get(n) == name)] for k, p in enumerate(plans)]
        values[name] = _merge_value(group_of, values[name], fit)
    output = merge([p.output for p in plans], lambda: "the output")
    if any(p.output_spec != first.output_spec for p in others):
        raise Disagreement("the structure of the output differs from one batch to another")
    if len({tuple((s.path, s.table, s.name, str(s.spec), s.how, str(s.steps)) for s in p.stores) for p in plans}) > 1:
        raise Disagreement("what forward assigns to attributes differs from one batch to another")
    stores = tuple(
        replace(group[0], atoms=merge([s.atoms for s in group], lambda: "an attribute that forward assigns"))
        for group in zip(*(p.stores for p in plans), strict=True)
    )
    return replace(
        first, nodes=tuple(nodes), values=values, output=output, stores=stores, batches=batches, captured_by="observed"
    )


def _merge_value(group: Sequence[Value], head: Value, fit: _Fit) -> Value:
    if any(len(v.shape) != len(head.shape) or v.dtype != head.dtype for v in group):
        raise Disagreement(f"{head.name!r} has another rank or dtype at another batch")
    dims = []
    for sizes in zip(*(v.shape for v in group), strict=True):
        found = (
            sizes[0]
            if all(s == sizes[0] for s in sizes)
            else fit(sizes)
            if not any(isinstance(s, Expr) for s in sizes)
            else None
        )
        if found is None:
            raise Disagreement(
                f"a size of {head.name!r} is {', '.join(map(str, sizes))} at batch {', '.join(map(str, fit.sizes))}"
            )
        dims.append(found)
    return replace(head, shape=tuple(dims))


class _Fit:
    """Expressions in the batch through observed numbers; what fits some must fit all."""

    def __init__(self, sizes: Sequence[int], symbol: str) -> None:
        self.sizes, self.symbol = list(sizes), symbol
        self.cache: dict[tuple[Any, ...], Expr | None] = {}

    def __call__(self, numbers: Sequence[Any]) -> Expr | None:
        key = tuple(numbers), *map(type, numbers)  # 2 and 2.0 are one key of a dict
        if key not in self.cache:
            self.cache[key] = self._search(tuple(numbers))
        return self.cache[key]

    def _search(self, numbers: tuple[Any, ...]) -> Expr | None:
        b, (b0, b1), (n0, n1) = self.symbol, self.sizes[:2], numbers[:2]
        candidates: list[str] = []
        if all(isinstance(n, int) for n in numbers):
            slope, rest = divmod(n1 - n0, b1 - b0)
            if rest == 0:
                offset = n0 - slope * b0
                times = b if slope == 1 else f"{slope}*{b}"
                candidates.append(f"{times} + {offset}" if offset > 0 else f"{times} - {-offset}" if offset else times)
            for k in range(2, 9):
                candidates += [f"{b}//{k}", f"({b} + {k - 1})//{k}"]
            if n0 % (b0 * b0) == 0:
                candidates.append(f"{n0 // (b0 * b0)}*{b}*{b}")
        else:
            candidates += [f"{n0 * b0!r}/{b}", f"{n0 / b0!r}*{b}"]
        for source in candidates:
            expr = Expr(source)
            if all(_same_number(expr.evaluate({b: size}), n) for size, n in zip(self.sizes, numbers, strict=True)):
                return expr
        return None


def at_batch(plan: TracePlan, batch: int) -> TracePlan:
    """The plan of one batch alone."""
    return replace(plan, batches=Batches(((batch, batch),)), captured_by="observed-per-batch")


def size_sources(
    shapes: Sequence[Sequence[Sequence[tuple[int, ...]]]], sizes: Sequence[int], symbol: str
) -> list[list[Sources]] | None:
    """For every tensor that the recorded ops made, its dims as expressions in the batch, None where constant.

    `shapes[k]` are the shapes seen at batch `sizes[k]`, event by event. None if the runs had other numbers of ops, or of tensors
    or dims of any, for Python can learn these and is not asked about them. A dim that no expression fits is `UNKNOWN`.
    """
    alike = {tuple(tuple(len(t) for t in event) for event in events) for events in shapes}
    if len(alike) > 1:
        return None
    fit = _Fit(sizes, symbol)
    found: list[list[Sources]] = []
    for events in zip(*shapes, strict=True):
        tensors: list[Sources] = []
        for tensor in zip(*events, strict=True):
            dims = [(None if len(set(d)) == 1 else (fit(d) or UNKNOWN)) for d in zip(*tensor, strict=True)]
            tensors.append(tuple(d.source if isinstance(d, Expr) else d for d in dims))
        found.append(tensors)
    return found
