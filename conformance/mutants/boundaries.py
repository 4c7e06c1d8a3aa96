"""Mutants of the boundary payload: what travels, and who may take it."""

from __future__ import annotations

import time

import torch

from ariadne.boundary import BoundaryPayload
from ariadne.boundary.wire import encode
from ariadne.plan import own
from ariadne.runtime.variant import Variant
from conformance.mutants.planted import Planted, as_kind, copied


class _Rounded(BoundaryPayload):
    __slots__ = ()

    def to_bytes(self) -> bytes:
        def rounded(t: torch.Tensor) -> torch.Tensor:
            return own(t.detach()).copy_(t.detach().half()) if t.is_floating_point() else t

        return copied(self, rounded).to_bytes()


class RoundedPayload(Planted):
    """Floating tensors travel in half precision, though they say otherwise."""

    piece = "boundary.wire"

    def in_payload(self, boundary: BoundaryPayload) -> BoundaryPayload:
        return as_kind(_Rounded, boundary)


class _Packed(BoundaryPayload):
    __slots__ = ()

    def to_bytes(self) -> bytes:
        return copied(self, lambda t: t.detach().contiguous()).to_bytes()


class PackedPayload(Planted):
    """Tensors travel without their strides."""

    piece = "boundary.wire"

    def in_payload(self, boundary: BoundaryPayload) -> BoundaryPayload:
        return as_kind(_Packed, boundary)


class _Apart(BoundaryPayload):
    __slots__ = ()

    def to_bytes(self) -> bytes:
        return copied(self, lambda t: own(t.detach())).to_bytes()


class PayloadApart(Planted):
    """Tensors that share memory arrive with memory of their own each."""

    piece = "boundary.wire"

    def in_payload(self, boundary: BoundaryPayload) -> BoundaryPayload:
        return as_kind(_Apart, boundary)


class _Dated(BoundaryPayload):
    __slots__ = ()

    def to_bytes(self) -> bytes:
        header = {
            "protocol_version": self.protocol_version,
            "split_id": self.split_id,
            "plan_signature": self.plan_signature,
            "batch": self.batch,
            "labels": self.labels,
            "requires_grad": self.requires_grad,
            "sent": time.perf_counter_ns(),
        }
        return encode(header, {label: t.detach() for label, t in self.tensors.items()}, self.values)


class DatedPayload(Planted):
    """The bytes of a payload hold the time, and so are never the same twice."""

    piece = "boundary.wire"

    def in_payload(self, boundary: BoundaryPayload) -> BoundaryPayload:
        return as_kind(_Dated, boundary)


class _Ungrateful(BoundaryPayload):
    __slots__ = ()

    def to_bytes(self) -> bytes:
        plain = as_kind(BoundaryPayload, self)
        plain.requires_grad = ()
        return plain.to_bytes()


class PayloadWithoutGradients(Planted):
    """A payload forgets on the way which of its tensors want a gradient."""

    piece = "boundary.payload"

    def in_payload(self, boundary: BoundaryPayload) -> BoundaryPayload:
        return as_kind(_Ungrateful, boundary)


class _Unconsumed(BoundaryPayload):
    __slots__ = ()

    def consume(self, by: str) -> None:
        pass

    def refuse_if_taken(self, by: str) -> None:
        pass


class UnconsumedBoundary(Planted):
    """A boundary may be trained on as often as one likes."""

    piece = "boundary.payload"

    def in_payload(self, boundary: BoundaryPayload) -> BoundaryPayload:
        return as_kind(_Unconsumed, boundary)


class AnyBoundary(Planted):
    """The boundary of another split is taken as if it were this one's."""

    piece = "runtime.plans"

    def accept(self, boundary: BoundaryPayload) -> Variant:
        return self._by_key.get((boundary.plan_signature, boundary.split_id), [self._main])[-1]
