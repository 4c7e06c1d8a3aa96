"""Capture: from a model and example inputs to a plan, and for which batches it holds.

A model and inputs flow in. Forward is recorded, on real and on symbolic tensors; a plan, the runs that it was held
against and a baseline of the model flow out. The model is left as found. The files, in import order::

    turn          one thread at a time captures
    refusals      what a forward may not do while it is recorded
    generators    where the process's random generators stand
    copies        what a tensor holds, kept before it is written and put back after
    raw           data that Python keeps as bytes
    context       the context variables that stand otherwise than before
    state         what a forward may move, noted before it runs and put back after
    own_runs      runs of Ariadne's own, of which nobody hears
    example       the inputs that a model is captured with, and what a capture gives
    flags         training flags that forward itself sets
    disguise      symbols that pose as numbers to forward's Python
    followed      sizes that are followed through arithmetic, and end the run where C would read them
    packed        packed sequences on fake tensors
    sized         results of common ops without data
    foreseen      which sizes of an op's results follow from the sizes of its inputs
    values        the values of a plan in the making: live tensors and objects by name
    sizes         sizes that remember what they were compared with
    call          calls of Python that is kept whole
    copied        the objects of a plan for a deep copy of its model
    scripted      functions under `torch.jit.script`, each call kept whole as an op
    drawn         which random generators forward drew from, and no other thread
    reach         the containers that forward can put something into
    ran           which ops a run called, on which numbers
    written       the data of what a forward writes, kept before it does
    unheard       what forward changes by no op of torch
    history       what forward keeps from one call to the next
    grown         containers that forward puts more into at each call, and asks as well
    predispatch   how the ops of forward reach the recorder, and those of no other thread
    recorder      the pre-dispatch ATen ops that a forward runs
    deciding      which of the model's tensors decide sizes that are asked of others
    measured      what forward's Python asks of the sizes of tensors
    wanted        tensors that forward tells that they require a gradient
    parts         parts that `ariadne.opaque` was told of, each call one op
    applied       functions of autograd, by whatever name they are applied
    repeated      what a checkpointed part does, which the backward pass runs once more
    threads       what forward has other threads do
    listed        where forward looks through the names of attributes
    taken         where forward takes all of a tensor's data
    outsiders     modules outside of the model that forward comes upon
    setters       other data in a tensor, by no op
    recorded      a block in which all that forward does is noted
    first         what forward filled at an earlier call
    identity      what forward compares by `is`
    outcome       what forward leaves: its output, what it stores, what it puts into containers
    hung          what forward sets on the model's own tensors
    made          ops by which forward makes something of the model's tensors alone, run by themselves
    filled        what a first call makes of the model's tensors, and keeps
    clocks        whether forward only tells the time that it asks for
    carried       what forward made of a call's inputs and keeps, and what later calls give that follows it
    begun         state that forward begins at its first call, and goes on with
    lively        calls that are unlike the example, one after the other
    settled       flags of a first call, and the batch of the last one
    once          what a first call alone writes or draws, which a plan would do at each
    lower         a recording of live tensors becomes a plan of names
    generalize    plans observed at several batches become one, or are shown to disagree
    shapes        for which batches a plan holds
    observed      a real run of forward, recorded
    symbolic      a run on tensors without data whose batch is a symbol
    beside        sizes beside the batch, as symbols
    leaks         data that leave torch unseen are refused
    ways          from a model to a plan, by the first way that serves
"""

import importlib
from typing import TYPE_CHECKING, Any

from ariadne.capture.call import QUESTIONS, Call, drawn_by, is_opaque_call, version
from ariadne.capture.copied import copied_plan
from ariadne.capture.drawn import moves_by_others, noted
from ariadne.capture.example import Captured, Example, batch_dims, called, declared, dims_named, sizes_named, swallowed
from ariadne.capture.generators import ALL, NUMPY, PYTHON, TORCH, Names
from ariadne.capture.own_runs import left_as_found, without_saving_hooks
from ariadne.capture.reach import Reach
from ariadne.capture.refusals import Patches, calls_class
from ariadne.capture.scripted import is_scripted
from ariadne.capture.state import Snapshot
from ariadne.capture.turn import capturing
from ariadne.capture.written import Looking

if TYPE_CHECKING:
    from ariadne.capture.ways import capture

__all__ = [
    "capture",
    "Snapshot",
    "Reach",
    "left_as_found",
    "without_saving_hooks",
    "is_scripted",
    "is_opaque_call",
    "drawn_by",
    "moves_by_others",
    "noted",
    "ALL",
    "NUMPY",
    "PYTHON",
    "TORCH",
    "Names",
    "Call",
    "copied_plan",
    "QUESTIONS",
    "Captured",
    "Example",
    "declared",
    "called",
    "batch_dims",
    "dims_named",
    "sizes_named",
    "swallowed",
    "capturing",
    "Looking",
    "Patches",
    "calls_class",
    "version",
]


def __getattr__(name: str) -> Any:
    if name == "capture":  # imported when it is first asked for: who runs a half needs no symbolic sizes
        return getattr(importlib.import_module("ariadne.capture.ways"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
