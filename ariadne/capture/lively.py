"""Lively: other calls than those like the example, after which, and before which, the model must do what its plan does.

An example may show little: zeros, small numbers, the same in each row. Then what forward keeps is followed by no result of it,
nor of one that is much like it. And a path that forward takes for other numbers may leave what this one reads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import nn

from ariadne import tree
from ariadne.capture import generators
from ariadne.capture.example import Example
from ariadne.capture.generators import Names
from ariadne.capture.history import gives
from ariadne.capture.ran import Answer
from ariadne.capture.reach import Reach
from ariadne.compare import difference
from ariadne.errors import UnsupportedError


def in_turn(
    model: nn.Module, calls: Sequence[Example], grad: bool, drew: Names, most: int | None = None
) -> list[Answer]:
    """What the model gives in these calls, one after the other, from the state that it is in, which is put back.

    Tensors stand as they did before each, and so do the random numbers, those of `drew` at least: others are every thread's.
    """
    snapshot, found = Reach(model).snapshot(*tree.unflatten(calls[0].leaves, calls[0].spec)), list[Answer]()
    snapshot.save_buffers()
    drawn, names = generators.states(), generators.ALL if threading.active_count() == 1 else drew
    try:
        for call in calls:
            if found:
                snapshot.again(drew)
                generators.put_back(drawn, names)
            found.append(gives(model, call, call.batch, grad, (), snapshot, most))
        return found
    finally:
        snapshot.restore(drew)
        generators.put_back(drawn, names)


def differs_by_state(
    model: nn.Module, example: Example, others: Sequence[Example], grad: bool, drew: Names, most: int, alike: bool
) -> str | None:
    """What any of these calls gives otherwise after the ones before it than alone, in words; None where that is the same.

    `alike`: on the example's path; what another raises, or asks with another answer, tells nothing. `most`: of the ops that each
    may run.
    """
    alone = [in_turn(model, [other], grad, drew, most)[0] for other in others]
    first, *later, last = in_turn(model, [example, *others, example], grad, drew, most)
    for one, after in zip(alone, later, strict=True):
        told = type(one.output) is not str and (not alike or one.ran.answers == first.ran.answers)
        if told and (differs := one.differs(after)):
            return differs
    on_path = not alike or all(one.ran.answers == first.ran.answers for one in later)
    return difference(first.output, last.output) if on_path and type(first.output) is not str else None


def refuse_paths_beside(
    model: nn.Module, example: Example, others: Sequence[Example], grad: bool, drew: Names, most: int
) -> None:
    """Raise `UnsupportedError` where a call like the example follows what one like the others, which takes another path, leaves in
    Python, or the other way round: each path has a plan of its own, and none knows what another would have left."""
    for other in others:
        if other.spec == example.spec and (
            differs := differs_by_state(model, example, [other], grad, drew, most, False)
        ):
            raise UnsupportedError(
                "forward keeps something in Python on one path, by what it reads in a tensor, that another path's result follows "
                f"({differs}), which plans of single paths can't follow; keep such state in a buffer, or return it"
            )
