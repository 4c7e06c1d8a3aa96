"""Mutants of what no op shows: the class of a tensor, data that leave torch, a division by zero, and what is around a call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

import ariadne.prepare
from ariadne import tree
from ariadne.boundary import BoundaryPayload
from ariadne.capture import disguise, followed, generalize, refusals, ways
from ariadne.capture.values import Values
from ariadne.plan import Ref, TracePlan
from ariadne.runtime.variant import Variant
from conformance.mutants.planted import Planted

Replaced = tuple[Any, str, Any]
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)
_atom, _object, _same_object = Values.atom, Values.object, generalize._same_object


def nothing(*_: Any, **__: Any) -> None:
    """In the place of something that checks."""


@contextmanager
def put(*replaced: Replaced) -> Iterator[None]:
    """Other things stand under these names of modules and classes, in the block."""
    with ExitStack() as stack:
        for owner, name, thing in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, thing)
        yield


class _AtCapture(Planted):
    """A bug that captures with other things in the place of Ariadne's own; nothing that it makes is held against the model."""

    replaced: ClassVar[tuple[Replaced, ...]] = ()

    @classmethod
    def prepare(cls, model: nn.Module, example_inputs: Sequence[Any], **options: Any) -> Any:
        """What `ariadne.prepare_split` gives where the bug is in it."""
        with put((ariadne.prepare, "prove", nothing), *cls.replaced):
            return super().prepare(model, example_inputs, **options)


class BlindToLeaks(_AtCapture):
    """Data that leave torch by a way that no op shows, and come back, are taken for constants."""

    piece = "capture.leaks"
    replaced = (
        (ways, "refuse_leaks", nothing),
        (ways, "refuse_unlike_constants", nothing),
        (ways, "refuse_kept_data", nothing),
    )


def without(asked: Callable[[Any, str], bool]) -> Replaced:
    """Refusals of what is `asked`, by owner and name, are not put in the place of what forward calls."""
    plain: Any = refusals.Patches.set

    def put_others(self: refusals.Patches, owner: Any, name: str, value: Any) -> None:
        if not (getattr(value, "__qualname__", "").startswith("_refuse.") and asked(owner, name)):
            plain(self, owner, name, value)

    return refusals.Patches, "set", put_others


def _literal(self: Values, value: Any) -> Any:
    if not isinstance(value, _STORAGES):
        return _object(self, value)
    name = self.new(type(value).__name__, "object")
    self.objects[name] = value
    return Ref(name)


class StorageInThePlan(_AtCapture):
    """A storage that forward hands to an op stands in the plan as it was at capture."""

    piece = "capture.values"
    replaced = (
        *BlindToLeaks.replaced,
        (Values, "object", _literal),
        (Values, "atom", lambda self, value: (_literal if isinstance(value, _STORAGES) else _atom)(self, value)),
        (generalize, "_same_object", lambda a, b: isinstance(a, _STORAGES) or _same_object(a, b)),
    )


class BlindToPointers(_AtCapture):
    """Where a tensor lies in memory is taken for a constant."""

    piece = "capture.refusals"
    replaced = (without(lambda owner, name: name == "data_ptr"), *BlindToLeaks.replaced)


class BlindToPickles(_AtCapture):
    """What forward pickles, and gets back, is taken for a constant."""

    piece = "capture.refusals"
    replaced = (without(lambda owner, name: name == "__reduce_ex__"), *StorageInThePlan.replaced)


def _undivided(self: followed.Node, sign: str, function: Callable[[Any, Any], Any], other: followed.Node) -> Any:
    return self._made(function(self.value, other.value), f"({self.text} {sign} {other.text})")


class OtherWeights(_AtCapture):
    """Packed weights, which torch wraps anew for each op, are others to each run that is compared."""

    piece = "capture.generalize"
    replaced = ((generalize, "_same_object", lambda a, b: a is b),)


class BlindToPackedWeights(Planted):
    """Packed weights that are others go unnoticed."""

    piece = "guards.attributes"

    def in_variant(self, variant: Variant) -> None:
        for guard in (*variant.guards, variant.guard):
            guard.baseline = copy.copy(guard.baseline)
            for held in (guard, guard.baseline):
                held.attributes = [one for one in held.attributes if one[1] != ("_packed_params",)]
            guard._arm()


class BlindToZero(_AtCapture):
    """That a size is divided by, and may be zero at another batch, is not asked."""

    piece = "capture.disguise"
    replaced = ((disguise, "_refuse_zero", nothing), (followed.Node, "binary", _undivided))


def _plain(spec: tree.Spec) -> tree.Spec:
    children = tuple(_plain(child) for child in spec.children)
    return children[0] if spec.kind == "subclass" else replace(spec, children=children)


class PlainOutputs(Planted):
    """Results of a class of the user's own come back as torch's plain tensors."""

    piece = "capture.outcome"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        spec = _plain(plan.output_spec)
        return plan if spec == plan.output_spec else replace(plan, output_spec=spec)


class BlindToKept(Planted):
    """That parametrized weights are kept from one call to the next, by `parametrize.cached()` around them, goes unnoticed."""

    piece = "guards.switches"

    @classmethod
    def in_plan(cls, plan: TracePlan) -> TracePlan:
        then = tuple(s for s in plan.assumption.switches if not s[0].startswith("torch.nn.utils.parametrize"))
        return replace(plan, assumption=replace(plan.assumption, switches=then))


class BlindToAutocast(Planted):
    """A suffix may be called under another autocast than its prefix ran under."""

    piece = "boundary.autocast"

    def in_payload(self, boundary: BoundaryPayload) -> BoundaryPayload:
        boundary.autocast = None
        return boundary


class RewoundGenerator(Planted):
    """Preparing puts torch's generator where it stood before, whatever another thread drew meanwhile."""

    piece = "capture.state"

    @classmethod
    def prepare(cls, model: nn.Module, example_inputs: Sequence[Any], **options: Any) -> Any:
        """What `ariadne.prepare_split` gives, with the generator put back after it."""
        stood = torch.get_rng_state()
        try:
            return super().prepare(model, example_inputs, **options)
        finally:
            torch.set_rng_state(stood)
