"""Ariadne splits a PyTorch model in two, and proves it.

The pipeline, in import order; nothing imports backwards::

    errors, expr, tree, plan, state      the words: errors, sizes, nested values, plans as data, leaving things as found
    prune, sizes, recorder, lower,
    generalize, capture                  a forward, recorded, becomes a plan
    frontier, spec, select               every cut, and the one that was asked for
    bindings, codegen, segment           one side of a cut becomes Python
    verify, guards, wire, boundary       how equality is proved, what is relied on, what crosses
    training, runtime, prepare           running and training it; the door
"""

from ariadne.boundary import BoundaryPayload, ReplayBoundary, register_boundary_serializer
from ariadne.errors import AriadneError
from ariadne.frontier import SplitCandidate
from ariadne.plan import TraceNode, TracePlan
from ariadne.prepare import prepare_split, prepare_split_replay, validate_dynamic_batches
from ariadne.runtime import RuntimeCacheKey, SplitRuntime
from ariadne.spec import SplitSpec

__all__ = [
    "AriadneError",
    "BoundaryPayload",
    "ReplayBoundary",
    "RuntimeCacheKey",
    "SplitCandidate",
    "SplitRuntime",
    "SplitSpec",
    "TraceNode",
    "TracePlan",
    "prepare_split",
    "prepare_split_replay",
    "register_boundary_serializer",
    "validate_dynamic_batches",
]
