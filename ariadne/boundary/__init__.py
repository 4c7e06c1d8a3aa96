"""The boundary: what crosses from the prefix to the suffix.

The live values of a cut flow in, by label; a payload or its bytes flow out, and back. Bytes from outside are data:
nothing in them runs, and what is not well formed is a `PayloadError`. The files, in import order::

    autocast   the one that a side ran under, and the other has to
    ragged     nested tensors as plain data
    nodes      nested values as bytes
    sections   what stands before the tensors, worked out once where it comes again
    wire       payloads as bytes
    payload    what crosses, in memory and on the wire
"""

from ariadne.boundary.autocast import autocast_in, autocast_now
from ariadne.boundary.nodes import TensorRef, register_boundary_serializer, shown
from ariadne.boundary.payload import BoundaryPayload, ReplayBoundary, no_boundary
from ariadne.boundary.ragged import sizes_of
from ariadne.boundary.sections import Memo, header_section, values_section
from ariadne.boundary.wire import decode, encode, joined

__all__ = [
    "BoundaryPayload",
    "Memo",
    "ReplayBoundary",
    "TensorRef",
    "autocast_in",
    "autocast_now",
    "decode",
    "encode",
    "header_section",
    "joined",
    "no_boundary",
    "register_boundary_serializer",
    "shown",
    "sizes_of",
    "values_section",
]
