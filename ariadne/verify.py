"""Verification: an evaluator of plans that shares nothing with code generation, and the one comparator of results."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.errors import WitnessError
from ariadne.expr import Expr
from ariadne.held import follow, place
from ariadne.part import Part
from ariadne.plan import Ref, Region, Store, TracePlan, substitute
from ariadne.recorder import WHOLE
from ariadne.strided import own


class Interpreter:
    """One part of a plan as a callable that evaluates the plan op by op, through torch's dispatcher.

    Slow, and simple enough to be read at a glance: it is what generated code is held against.
    """

    def __init__(self, plan: TracePlan, part: Part, model: nn.Module) -> None:
        self.plan, self.part, self.model = plan, part, model

    def __call__(self, batch: int, *given: Any) -> Any:
        plan, part = self.plan, self.part
        *given, kept = (*given, None) if not (part.start == 0 and plan.keeps_inputs) else given  # type: ignore[assignment]
        env: dict[str, Any] = {plan.batch_symbol: batch, **dict(zip(part.takes, given, strict=True))}
        env.update({n: own(env[n]) for n in part.written})
        for node in part.nodes(plan):
            args = substitute(node.args, lambda a: self._value(a, env))
            kwargs = {k: substitute(v, lambda a: self._value(a, env)) for k, v in node.kwargs}
            with ExitStack() as stack:
                _enter(node.region, stack)
                if node.target == WHOLE:
                    if not torch.equal(args[0].detach().to(args[1].device), args[1]):
                        raise WitnessError(
                            "Python took a tensor's data at capture, and now they are others; prepare again"
                        )
                    continue
                if node.target == "aten.sym_size.int":
                    out: Any = args[0].shape[args[1]]
                elif node.target.startswith("python."):
                    out = args[0](*args[1:])
                else:
                    namespace, name, overload = node.target.split(".", 2)
                    out = getattr(getattr(getattr(torch.ops, namespace), name), overload)(*args, **kwargs)
            outs = list(out) if node.unpack else [out] if node.outputs else []
            env.update(zip(node.outputs, outs, strict=True))
            if node.is_witness and node.outputs:
                expected = substitute(node.witness, lambda a: self._value(a, env))
                if not tree.identical(out, expected):
                    raise WitnessError(
                        f"{node.target} gave {expected!r} at capture, now it gives {out!r}; prepare again"
                    )
        for store in part.stores(plan):
            leaves = [substitute(a, lambda r: self._value(r, env)) for a in store.atoms]
            self._store(store, tree.unflatten(leaves, store.spec), kept)
        if part.gives is not None:
            return tuple(env[n] for n in part.gives)
        return tree.unflatten([substitute(a, lambda r: self._value(r, env)) for a in plan.output], plan.output_spec)

    def _store(self, store: Store, value: Any, given: Any) -> None:
        if not store.inside:
            getattr(self.model.get_submodule(store.path), store.table)[store.name] = value
            return
        if store.table == "held":
            start: Any = self.model.get_submodule(store.path).__dict__
        else:
            start = given if store.table == "input" else self.plan.objects[store.path]
        if store.how in ("set", "remove", "grow"):
            *steps, last = store.steps
            holder = place(follow(start, tuple(steps)), last)
            if store.how == "set":
                holder[last] = value
            elif store.how == "grow":
                holder.setdefault(last, []).extend(value)
            else:
                holder.pop(last, None)
            return
        thing = follow(start, store.steps)
        if store.how == "contents":
            thing.clear()
        thing.extend(value)

    def _value(self, atom: Ref | Expr, env: dict[str, Any]) -> Any:
        if isinstance(atom, Expr):
            return atom.evaluate(env)
        if atom.name in env:
            found = env[atom.name]
        elif atom.name in self.plan.objects:
            found = self.plan.objects[atom.name]
        elif atom.name in self.plan.constants:
            found = self.plan.constants[atom.name]
        else:
            path, *keys = self.plan.values[atom.name].origin
            module = self.model.get_submodule(path)
            found = getattr(module, keys[0])
            for key in keys[1:]:
                found = getattr(found, key[1]) if isinstance(key, tuple) and key[0] == "." else found[key]
        return found if atom.item is None else found[atom.item]


def _enter(region: Region, stack: ExitStack) -> None:
    if region.grad is not None:
        stack.enter_context(torch.set_grad_enabled(region.grad))
    for device, enabled, dtype, cache in region.autocast:
        stack.enter_context(torch.autocast(device, dtype, enabled=enabled, cache_enabled=cache))


def bits(t: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements as integers, so that NaNs and signed zeros compare by their bits."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    t = t.detach().resolve_conj().resolve_neg()
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.contiguous().view(kind[t.element_size()])


def difference(whole: Any, split: Any, *, exact: bool = True) -> str | None:
    """The first difference between two nested results, in words; None if they are the same, bit for bit.

    Structure, types, dtypes, shapes, strides, devices and every bit of every tensor count. With `exact=False` tensors need
    only be equal as numbers.

    >>> difference({"out": torch.zeros(2)}, {"out": torch.ones(2)})
    "['out']: values differ in 2 of 2 elements, by at most 1.0"
    """
    _, spec_a = tree.flatten(whole)
    b, spec_b = tree.flatten(split)
    if spec_a != spec_b:
        return f"structure: {spec_a} against {spec_b}"
    for (where, x), y in zip(tree.paths(whole), b, strict=True):
        found = _leaf_difference(x, y, exact)
        if found:
            return f"{where or 'the result'}: {found}"
    return None


def _leaf_difference(x: Any, y: Any, exact: bool) -> str | None:
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return None if tree.identical(x, y) else f"{x!r} against {y!r}"
    kinds = [tree.subclass_of(t) or torch.Tensor for t in (x, y)]
    if kinds[0] is not kinds[1]:
        return f"class {kinds[0].__name__} against {kinds[1].__name__}"
    for what in ("dtype", "shape", "device", "layout"):
        if getattr(x, what) != getattr(y, what):
            return f"{what} {getattr(x, what)} against {getattr(y, what)}"
    if x.layout is not torch.strided:
        pairs = zip(_parts(x), _parts(y), strict=True)
        return next(
            (f"{name} {wrong}" for (name, a), (_, b) in pairs if (wrong := _leaf_difference(a, b, exact))), None
        )
    if x.stride() != y.stride():
        return f"stride {x.stride()} against {y.stride()}"
    if x.numel() == 0 or x is y:
        return None
    unequal = bits(x) != bits(y) if exact else x != y
    if not bool(unequal.any()):
        return None
    far = largest_difference(x, y)
    return f"values differ in {int(unequal.sum())} of {x.numel()} elements, by at most {far}"


def _parts(t: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The dense tensors that a sparse one, or one in a library's own layout, consists of."""
    if t.layout is torch.sparse_coo:
        return [("indices", t._indices()), ("values", t._values())]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [("rows", t.crow_indices()), ("columns", t.col_indices()), ("values", t.values())]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [("columns", t.ccol_indices()), ("rows", t.row_indices()), ("values", t.values())]
    return [("elements", t.to_dense())]


def largest_difference(whole: Any, split: Any) -> float:
    """The largest absolute difference between two nested results of the same structure; 0.0 where all bits agree."""
    found = 0.0
    for x, y in zip(tree.leaves(whole), tree.leaves(split), strict=True):
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            continue
        if x.layout is not torch.strided:
            x, y = x.to_dense(), y.to_dense()
        if x.numel() and not torch.equal(bits(x), bits(y)):
            wide = torch.complex128 if x.is_complex() else torch.float64
            gap = (x.detach().to(wide) - y.detach().to(wide)).abs().max().item()
            found = max(found, gap if gap == gap else float("inf"))
    return found
