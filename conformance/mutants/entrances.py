"""Mutants of the guards: conditions on a call, or on the model, that are no longer looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ariadne import tree
from ariadne.guards import ModuleGuard, simple
from ariadne.guards.baseline import HOOKS
from ariadne.guards.facts import never
from ariadne.guards.marks import Registered, Strides
from ariadne.plan import Expr, TracePlan, Value
from ariadne.runtime.variant import Variant
from conformance.mutants.planted import Planted

See = Callable[[torch.Tensor, Value], torch.Tensor]


def _seeing(variant: Variant, see: See) -> None:
    """Let the entrance look at `see(leaf, expected)` in the place of each tensor leaf, and let the leaf itself in."""
    plan, enter = variant.plan, variant.enter
    expected = {i: plan.values[name] for i, name in plan.inputs if plan.values[name].kind == "input"}

    def blind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        found: tuple[Any, ...] | None = enter(args, kwargs)
        if found is not None:
            return found
        leaves, spec = tree.flatten((args, kwargs))
        seen = [
            see(leaf, expected[i]) if i in expected and isinstance(leaf, torch.Tensor) else leaf
            for i, leaf in enumerate(leaves)
        ]
        seen_args, seen_kwargs = tree.unflatten(seen, spec)
        if enter(seen_args, seen_kwargs) is None:
            return None
        first = next(i for i, value in expected.items() if any(isinstance(d, Expr) for d in value.shape))
        return leaves[first].shape[0], *(leaves[i] for i, _ in plan.inputs)

    variant.enter = blind


class BatchInFront(Planted):
    """The batch is read from dim 0 of the first input, wherever it is."""

    piece = "guards.calls"

    def in_variant(self, variant: Variant) -> None:
        enter = variant.enter

        def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
            found = enter(args, kwargs)
            return found if found is None else (found[1].shape[0], *found[1:])

        variant.enter = first


class BlindToRank(Planted):
    """An input's rank is not looked at."""

    piece = "guards.calls"

    def in_variant(self, variant: Variant) -> None:
        def see(leaf: torch.Tensor, value: Value) -> torch.Tensor:
            sizes = [leaf.shape[0] if isinstance(d, Expr) else d for d in value.shape]
            return leaf if leaf.dim() == len(sizes) or not leaf.dim() else leaf.new_empty(sizes)

        _seeing(variant, see)


class BlindToDims(Planted):
    """An input's dims other than the batch are not looked at."""

    piece = "guards.calls"

    def in_variant(self, variant: Variant) -> None:
        def see(leaf: torch.Tensor, value: Value) -> torch.Tensor:
            sizes = [n if isinstance(d, Expr) else d for n, d in zip(leaf.shape, value.shape, strict=False)]
            return leaf.new_empty(sizes) if leaf.dim() == len(value.shape) else leaf

        _seeing(variant, see)


class BlindToDtype(Planted):
    """An input's dtype is not looked at."""

    piece = "guards.calls"

    def in_variant(self, variant: Variant) -> None:
        _seeing(variant, lambda leaf, value: leaf.to(value.dtype))


class BlindToRange(Planted):
    """The batch range is not looked at."""

    piece = "guards.calls"

    def in_variant(self, variant: Variant) -> None:
        batches = list(variant.plan.batches)

        def see(leaf: torch.Tensor, value: Value) -> torch.Tensor:
            if not any(isinstance(d, Expr) for d in value.shape) or leaf.shape[0] in batches:
                return leaf
            return leaf.new_empty((batches[-1], *leaf.shape[1:]))

        _seeing(variant, see)


class OneTooMany(Planted):
    """The batch range ends one past its end."""

    piece = "guards.calls"

    def in_variant(self, variant: Variant) -> None:
        last = list(variant.plan.batches)[-1]

        def see(leaf: torch.Tensor, value: Value) -> torch.Tensor:
            batched = any(isinstance(d, Expr) for d in value.shape)
            return leaf[:last] if batched and leaf.shape[0] == last + 1 else leaf

        _seeing(variant, see)


class ExtraInputs(Planted):
    """Inputs that the plan does not know are ignored."""

    piece = "guards.calls"

    def in_variant(self, variant: Variant) -> None:
        enter = variant.enter
        positional, keyword = variant.plan.input_spec.children
        count, known = len(positional.children), set(keyword.keys)

        def blind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
            found: tuple[Any, ...] | None = enter(args[:count], {k: v for k, v in kwargs.items() if k in known})
            return found

        variant.enter = blind


class RememberedKeywords(Planted):
    """Inputs by keyword are those of the first call of their shapes."""

    piece = "guards.calls"

    def in_variant(self, variant: Variant) -> None:
        enter, kept = variant.enter, dict[Any, dict[str, Any]]()

        def remembering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
            shapes = tuple(t.shape for t in tree.leaves(kwargs) if isinstance(t, torch.Tensor))
            found: tuple[Any, ...] | None = enter(args, kept.setdefault(shapes, kwargs))
            return found

        variant.enter = remembering


class _Blind(ModuleGuard):
    """Looks at the modules while some of what it looks at is as it was at capture."""

    def __call__(self) -> bool:
        with self.as_it_was():
            return super().__call__()

    def explain(self) -> None:
        with self.as_it_was():
            super().explain()

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        yield


def _blinded(variant: Variant, kind: type[_Blind]) -> None:
    for name in ("prefix_guard", "suffix_guard", "guard"):
        blind = kind.__new__(kind)
        blind.__dict__.update(getattr(variant, name).__dict__)
        setattr(variant, name, blind)


class _BlindToFlags(_Blind):
    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        now = {path: module.training for path, module in self.modules.items()}
        for path, module in self.modules.items():
            module.__dict__["training"] = self.baseline.training.get(path, module.training)
        try:
            yield
        finally:
            for path, module in self.modules.items():
                module.__dict__["training"] = now[path]


class BlindToFlags(Planted):
    """A module switched between train and eval mode goes unnoticed."""

    piece = "guards.calls"

    def in_variant(self, variant: Variant) -> None:
        _blinded(variant, _BlindToFlags)


class _BlindToChildren(_Blind):
    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        now = {path: dict(module._modules) for path, module in self.modules.items()}
        for path, module in self.modules.items():
            module._modules.update(self.baseline.children[path])
        try:
            yield
        finally:
            for path, module in self.modules.items():
                module._modules.update(now[path])


class BlindToChildren(Planted):
    """A module put in another's place goes unnoticed."""

    piece = "guards.calls"

    def in_variant(self, variant: Variant) -> None:
        _blinded(variant, _BlindToChildren)


class _BlindToHooks(_Blind):
    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        tables = [(module.__dict__[h], self.baseline.hooks[p, h]) for p, module in self.modules.items() for h in HOOKS]
        now = [dict(table) for table, _ in tables]
        for table, was in tables:
            table.clear()
            table.update(enumerate(was))
        try:
            yield
        finally:
            for (table, _), held in zip(tables, now, strict=True):
                table.clear()
                table.update(held)


class BlindToHooks(Planted):
    """A hook that was added goes unnoticed, and does not run."""

    piece = "guards.calls"

    def in_variant(self, variant: Variant) -> None:
        _blinded(variant, _BlindToHooks)


class _BlindToAttributes(_Blind):
    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        kept = [(self.modules[path], keys[0], was) for path, keys, was in self.attributes if len(keys) == 1]
        changed = [(vars(m), name, vars(m)[name], was) for m, name, was in kept if simple(vars(m).get(name, self))]
        for table, name, _, was in changed:
            table[name] = was
        try:
            yield
        finally:
            for table, name, now, _ in changed:
                table[name] = now


class BlindToAttributes(Planted):
    """A number or a string that forward read off a module, and that has changed, goes unnoticed."""

    piece = "guards.calls"

    def in_variant(self, variant: Variant) -> None:
        _blinded(variant, _BlindToAttributes)


class BlindToModules(Planted):
    """Nothing about the modules is looked at: flags, children, hooks, attributes."""

    piece = "guards.calls"

    def in_variant(self, variant: Variant) -> None:
        class Sees(_Blind):
            def __call__(self) -> bool:
                return True

        _blinded(variant, Sees)


class BlindToConditions(Planted):
    """Questions about sizes beside the batch are not asked again."""

    piece = "guards.sizes"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        return replace(plan, conditions=())


def _blind_to(variant: Variant, kind: type[Strides | Registered]) -> None:
    for guard in variant.guards:
        for _, _, kept in guard.attributes:
            if isinstance(kept, kind):
                kept.tables = []
                kept.held = kept.look(variant.model)
                if isinstance(kept, Strides):
                    kept.same = never


class BlindToStrides(Planted):
    """Weights that lie in memory in another order go unnoticed where forward asks how a tensor lies."""

    piece = "guards.marks"

    def in_variant(self, variant: Variant) -> None:
        _blind_to(variant, Strides)


class BlindToMembers(Planted):
    """A buffer that was added goes unnoticed where forward looks through all of them."""

    piece = "guards.marks"

    def in_variant(self, variant: Variant) -> None:
        _blind_to(variant, Registered)
        for guard in variant.guards:  # which hold the tables of modules, too
            guard.baseline.tabled = {}
            guard._arm()
