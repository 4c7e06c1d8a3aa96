"""The interpreter: one side of a cut, evaluated op by op; it shares nothing with code generation."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.compare import same_bits
from ariadne.cut import Part
from ariadne.errors import WitnessError
from ariadne.guards import Attribute, Switched, follow, place
from ariadne.plan import WHOLE, Expr, Ref, Region, Store, TraceNode, TracePlan, own, substitute


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
        for at, node in enumerate(part.nodes(plan), part.start):
            args = substitute(node.args, lambda a: self._value(a, env))
            kwargs = {k: substitute(v, lambda a: self._value(a, env)) for k, v in node.kwargs}
            with ExitStack() as stack:
                _enter(node.region, stack)
                if node.target == WHOLE:
                    if not same_bits(*args):
                        raise self._asked(
                            at,
                            "other data",
                            "Python took a tensor's data at capture, and now they are others; prepare again",
                        )
                    continue
                out = self.run(node, args, kwargs)
            outs = list(out) if node.unpack else [out] if node.outputs else []
            env.update(zip(node.outputs, outs, strict=True))
            if node.is_witness and node.outputs:
                expected = substitute(node.witness, lambda a: self._value(a, env))
                if not tree.identical(out, expected):
                    said = f"{node.target} gave {expected!r} at capture, now it gives {out!r}; prepare again"
                    raise self._asked(at, out, said)
        stores, output = part.stores(plan), () if part.gives is not None else plan.output
        # All of it is read before any of it is put in the place of another.
        read = [
            [substitute(a, lambda r: self._value(r, env)) for a in atoms]
            for atoms in (*(s.atoms for s in stores), output)
        ]
        for store, leaves in zip(stores, read, strict=False):
            self._store(store, tree.unflatten(leaves, store.spec), kept)
        if part.gives is not None:
            return tuple(self._value(Ref(n), env) for n in part.gives)
        return tree.unflatten(read[-1], plan.output_spec)

    def _asked(self, at: int, found: Any, said: str) -> WitnessError:
        error = WitnessError(said)
        error.plan, error.at, error.found = self.plan, at, found
        return error

    def run(self, node: TraceNode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What one op gives."""
        if node.target == "aten.sym_size.int":
            return args[0].shape[args[1]]
        if node.target.startswith("python."):
            return args[0](*args[1:])
        namespace, name, overload = node.target.split(".", 2)
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)(*args, **kwargs)

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
            last = str(last) if type(last) is Attribute else last  # as forward's own assignment has it
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
    if region.switches:
        stack.enter_context(Switched(*region.switches))
