"""The runtime: a plan, cut, run and trained.

Plans, candidates and the model flow in; boundaries, outputs, losses and gradients flow out. The files, in import
order::

    turns       which threads walk back at the same time
    waiting     gradients that wait for the other side's share
    casts       weights that autocast casts once for both sides
    asked       gradients that a loss function asks for by itself
    hooked      hooks over the parameters of both sides
    taps        where the suffix begins, and keeps what comes back
    optimizers  cleared and stepped, as torch does it
    owners      which side reads which parameters, and which optimizers may step them
    training    the two functions that train across a cut
    moved       what the ops of a side move, kept so that a call can be taken back
    standing    what boundaries in flight find of the model's state
    shared      what two plans share up to a question
    caught      errors of ops that forward itself may catch
    variant     a plan, cut, with its guards and segments
    taken       what a boundary from elsewhere is held to
    alike       prefixes that do the same, so that the suffix of each path may follow
    met         gradients where a run meets a graph of the caller's
    proof       a variant held against the model before it serves
    plans       the plans of a split, and which of them serves a call
    paths       which path a call takes, where Python branches on data
    told        what a split tells of itself, and how it is drawn
    split       what a user calls
"""

from ariadne.runtime.asked import KeptWhole, refuse_hooked
from ariadne.runtime.hooked import refuse_hooks_of_both
from ariadne.runtime.moved import refuse_resized
from ariadne.runtime.optimizers import step
from ariadne.runtime.owners import NOTHING_OWNED, Owned, PrefixMemory, refuse_shared, refuse_upstream
from ariadne.runtime.proof import AT_FAULT, prove
from ariadne.runtime.split import SplitRuntime
from ariadne.runtime.taps import Gradients, Tap, carried
from ariadne.runtime.told import NotCalled, RuntimeCacheKey
from ariadne.runtime.training import (
    TAPS,
    backward_prefix,
    held_gradients,
    loss_of,
    train_suffix,
    walks,
    watched_walk,
    with_gradients,
)
from ariadne.runtime.variant import OnChange, Settings, Variant, keeps_sides, told_apart
from ariadne.runtime.waiting import Ends, caught, leaves_of, led_to, nodes_behind, rejoins
