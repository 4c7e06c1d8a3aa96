"""Ariadne splits a PyTorch model in two, and proves it.

The pipeline, in import order; nothing imports backwards::

    errors, expr, tree, held, plan, solve     the words: errors, sizes, nested values, plans as data
    prune, state, strided                     what a forward may move, noted and put back
    versions, kept                            what a guard holds of things that change by themselves
    surroundings, refusals                    what it reads elsewhere; what it may not do
    packed, foreseen                          sequences packed by their lengths; which sizes follow data
    recorder                                  a forward, recorded
    baseline, lower, generalize, frontier     recordings become a plan; every cut of it
    shapes, verify, capture                   for which batches; how equality is proved; from a model to a plan
    spec, select                              the cut that was asked for
    bindings, codegen, segment                one side of a cut becomes Python
    facts, tensors, watched, guards           what it relies on
    lift, compilable, tracing                 the same, for compilers
    rows, buckets                             samples that never meet may be padded
    package, ahead, compiled                  native code with what it relies on; compiled ahead of time, and when first called
    ragged, wire, boundary, training          what crosses, and how gradients come back
    visualization                             pictures of a plan and of a cut, from what they hold
    variant, proof, runtime, prepare          a plan, cut; held against the model; running and training it; the door
    benchmark                                 how long each part of it takes here
    profile                                   bytes and time along all cuts, drawn
    observation, twins, check                 a model of the user's held against its split
    cli                                       the command line, which nothing else imports
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ariadne.boundary import BoundaryPayload, ReplayBoundary, register_boundary_serializer
    from ariadne.cut import SplitCandidate, SplitSpec
    from ariadne.errors import AriadneError
    from ariadne.half import Half, load
    from ariadne.plan import TraceNode, TracePlan
    from ariadne.prepare import prepare_split, prepare_split_replay, validate_dynamic_batches
    from ariadne.runtime import RuntimeCacheKey, SplitRuntime

__all__ = [
    "AriadneError",
    "BoundaryPayload",
    "Half",
    "ReplayBoundary",
    "RuntimeCacheKey",
    "SplitCandidate",
    "SplitRuntime",
    "SplitSpec",
    "TraceNode",
    "TracePlan",
    "load",
    "prepare_split",
    "prepare_split_replay",
    "register_boundary_serializer",
    "validate_dynamic_batches",
]

# Where each name comes from. It is imported when it is first asked for: what captures brings sympy, over a second of it, and
# who only reads a boundary needs none of that.
_HOMES = {
    "AriadneError": "errors",
    "BoundaryPayload": "boundary",
    "Half": "half",
    "ReplayBoundary": "boundary",
    "RuntimeCacheKey": "runtime",
    "SplitCandidate": "frontier",
    "SplitRuntime": "runtime",
    "SplitSpec": "spec",
    "TraceNode": "plan",
    "TracePlan": "plan",
    "load": "half",
    "prepare_split": "prepare",
    "prepare_split_replay": "prepare",
    "register_boundary_serializer": "boundary",
    "validate_dynamic_batches": "prepare",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = globals()[name] = getattr(importlib.import_module(f"ariadne.{_HOMES[name]}"), name)
        return value
    if name.isidentifier() and not name.startswith("_") and importlib.util.find_spec(f"ariadne.{name}"):
        return importlib.import_module(f"ariadne.{name}")
    raise AttributeError(f"module 'ariadne' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
