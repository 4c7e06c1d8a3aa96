"""A forward that is stopped at the end of a module's call and goes on: the model's own Python, where no graph holds.

A model, its example and the reason why there is no graph flow in; a runtime with the methods of `SplitRuntime` flows out. The
files, in import order::

    handed      what Python keeps for each thread, handed on between two
    absent      tensors without data, for what was made before the cut
    unseen      modes of ours that forward does not hear of
    ambient     what a thread has of its own: modes and switches
    gate        where the end of one call of a module is noticed
    laid        what stands in the tables of modules, laid out once
    plain       modules that run torch's own code alone
    held        what containers and objects hold, and how it is put back
    python      what Python keeps, at one moment, and how it is put back
    noted       what forward did before the cut
    skipped     forward with that part skipped, from what crossed alone
    standing    whether the model's state was moved since
    forward     a forward in a thread of its own, which waits and goes on
    boundary    the output of the call, and the forward that waits there
    crossing    in training: what crosses besides, and what the suffix's backward pass reaches
    calls       the calls of modules that a forward makes, and the one that is meant
    standins    leaves in the place of tensors that a graph of the caller's made
    proof       a forward that was stopped, held against the model
    ending      what a forward that is let go changes as it ends
    split       what a user calls
    mixed       a graph before the cut, the model's own Python after it
"""

from ariadne.stopped.mixed import MixedSplit, beside
from ariadne.stopped.proof import held_as_found
from ariadne.stopped.split import PythonSplit, prepared

__all__ = ["MixedSplit", "PythonSplit", "beside", "held_as_found", "prepared"]
