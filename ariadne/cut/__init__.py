"""The cut: where a plan can be parted, and which of these places was asked for.

A plan and what a user typed flow in; candidates, and the one that is meant, flow out. The files, in import order::

    spec         the strings that users type, parsed once
    state        what of the model the ops write into, and which side uses it
    frontier     the live values of every cut, and whether it is safe
    part         consecutive ops as one function: prefix, suffix and what lies between
    selection    from a parsed boundary to one candidate
"""

from ariadne.cut.frontier import Ends, SplitCandidate, crosses, ends_of, frontiers, with_trainable
from ariadne.cut.part import SIDES, Part, others_read, parameters_read, parts
from ariadne.cut.selection import around, best, select
from ariadne.cut.spec import (
    MODES,
    BatchDim,
    Boundary,
    CompileOptions,
    ExecutionMode,
    Objective,
    SplitSpec,
    parse_boundary,
)
from ariadne.cut.state import Sides, Slot, State, held_by_itself
