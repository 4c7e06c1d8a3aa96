"""Ariadne splits a PyTorch model in two, and proves it.

A room for each stage of the pipeline, in import order; nothing imports backwards, and others come in by the door, the `__init__`::

    imports                   many modules at once, without the garbage collector
    errors, tree, compare     the ground: the tree of errors, the walker of nested values, the comparator of results
    forks                     what another thread held as the process was forked
    units                     numbers with units, as people read them
    plan                      a forward as frozen data: ops, values, sizes as expressions in the batch
    boundary                  what crosses, in memory and as bytes
    cut                       every frontier of a plan, and the one that was asked for
    guards                    what forward looked at, and whether it is still so
    capture                   from a model to a plan, and for which batches it holds
    segment                   one side of a cut becomes Python, or is interpreted
    compiled                  segments as native code: when first called, or ahead of time
    halves                    one side as a file: what it says, and what it may not say
    visualization             pictures of a plan and of a cut, from what they hold
    runtime                   a plan, cut; running and training it
    stopped                   where no graph holds: a forward that stops at a module's call, and goes on
    half                      a side, loaded from its file without the model
    prepare                   the pipeline, readable from top to bottom
    pipeline                  N parts on torch's pipeline engine
    remote                    a suffix in another process, run and trained across the line
    benchmark                 how long each part of it takes here
    check                     a model of the user's held against its split; bytes and time along all cuts
    cli                       the command line, which nothing else imports

To read the code for the first time, begin with `prepare`.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from ariadne.imports import imported as _imported

if TYPE_CHECKING:
    from ariadne.boundary import BoundaryPayload, ReplayBoundary, register_boundary_serializer
    from ariadne.cut import SplitCandidate, SplitSpec
    from ariadne.errors import AriadneError
    from ariadne.guards import opaque
    from ariadne.half import Half, load
    from ariadne.pipeline import Pipeline, prepare_pipeline
    from ariadne.plan import TraceNode, TracePlan
    from ariadne.prepare import prepare_split, prepare_split_replay, validate_dynamic_batches
    from ariadne.remote import Remote, connect, serve
    from ariadne.runtime import RuntimeCacheKey, SplitRuntime
    from ariadne.stopped import MixedSplit, PythonSplit

__all__ = [
    "AriadneError",
    "BoundaryPayload",
    "Half",
    "Remote",
    "Pipeline",
    "MixedSplit",
    "PythonSplit",
    "ReplayBoundary",
    "RuntimeCacheKey",
    "SplitCandidate",
    "SplitRuntime",
    "SplitSpec",
    "TraceNode",
    "TracePlan",
    "connect",
    "load",
    "opaque",
    "prepare_pipeline",
    "prepare_split",
    "prepare_split_replay",
    "register_boundary_serializer",
    "serve",
    "validate_dynamic_batches",
]

# Where each name comes from. It is imported when it is first asked for: what captures brings sympy, over a second of it, and
# who only reads a boundary needs none of that.
_HOMES = {
    "AriadneError": "errors",
    "BoundaryPayload": "boundary",
    "Half": "half",
    "Remote": "remote",
    "Pipeline": "pipeline",
    "MixedSplit": "stopped",
    "PythonSplit": "stopped",
    "ReplayBoundary": "boundary",
    "RuntimeCacheKey": "runtime",
    "SplitCandidate": "cut",
    "SplitRuntime": "runtime",
    "SplitSpec": "cut",
    "TraceNode": "plan",
    "TracePlan": "plan",
    "connect": "remote",
    "load": "half",
    "opaque": "guards",
    "prepare_pipeline": "pipeline",
    "prepare_split": "prepare",
    "prepare_split_replay": "prepare",
    "register_boundary_serializer": "boundary",
    "serve": "remote",
    "validate_dynamic_batches": "prepare",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = globals()[name] = getattr(_imported(f"ariadne.{_HOMES[name]}"), name)
        return value
    if name.isidentifier() and not name.startswith("_") and importlib.util.find_spec(f"ariadne.{name}"):
        return _imported(f"ariadne.{name}")
    raise AttributeError(f"module 'ariadne' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
