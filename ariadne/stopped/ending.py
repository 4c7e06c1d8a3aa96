"""Ending: what a forward that is let go at the cut changes of the model as it ends, looked for before anything is split there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor, nn

from ariadne.capture import NUMPY, PYTHON, TORCH, Example, Names, moves_by_others, noted
from ariadne.compare import difference
from ariadne.errors import FrontierError
from ariadne.stopped.forward import Forward
from ariadne.stopped.proof import counted, drawn, isolated, move_on, own, tensors_of
from ariadne.stopped.python import PythonState, loaded_by

_TURNS = 4
_GENERATORS = {
    "torch's random generator": TORCH,
    "the generators of CUDA": TORCH,
    "random": PYTHON,
    "numpy.random": NUMPY,
}
Started = Callable[[tuple[Any, ...], dict[str, Any], bool], Forward]


def refuse_changing_end(
    model: nn.Module, example: Example, grad: bool, start: Started, after: str, others: str, drew: Names
) -> None:
    """Raise `FrontierError` where a forward that waits after the module `after` would change the model by being let go.

    `start` starts one; `others` names cuts that may do instead; `drew`: the random generators that forward draws from. What
    only puts back what forward has changed before the cut changes nothing, but for random generators. The model is left as found.
    """

    def changed(*args: Any, **kwargs: Any) -> str | None:
        began, mine = _values(model, drew), set[str]()
        forward = start(args, kwargs, grad)
        move_on(drew)  # as who calls may: a block that puts a generator back shows, though nothing was drawn in it
        halted, values = PythonState(model), _values(model, drew)
        forward.end(None if alone else noted(mine))
        found = _changes(model, forward.halt.left.since, halted, began, values, drew)
        return next((what for what in found if alone or what not in _GENERATORS or _is_its_own(what, mine)), None)

    alone = threading.active_count() == 1
    drew = counted(drew)
    if "set_state" in loaded_by(
        model
    ):  # of numpy, whose calls nobody hears: what forward sets, no other thread relies on
        drew = {*drew, NUMPY}
    what: str | None = ""
    for _ in range(1 if alone else _TURNS):  # what another thread changed meanwhile, it does not change each time
        if what is not None:
            what = isolated(model, example, grad, changed, drew)
    if what is not None:
        raise FrontierError(
            f"cannot split after {after!r}: the cut lies within a block of forward (try and finally, with, a bare except) that "
            f"changes {what} as it ends. A forward that is let go there would change that too, without a call of the model. "
            "Change it outside of that block, or cut outside of it"
            + (f"; the nearest other cuts, some of which may lie in it too: {others}" if others else "")
        )


def _is_its_own(what: str, mine: Collection[str]) -> bool:
    """Whether it was the end that moved a generator, and no other thread; `mine`: those that it was seen to draw from or to set."""
    name = _GENERATORS[what]
    return name in mine or (name == TORCH and not moves_by_others(name))


def _values(model: nn.Module, drew: Names) -> dict[str, Any]:
    """The model's tensors, copied, and the random generators that forward draws from."""
    return {name: own(t) for name, t in tensors_of(model).items()} | drawn(drew)


def _changes(
    model: nn.Module,
    began: PythonState,
    halted: PythonState,
    first: dict[str, Any],
    then: dict[str, Any],
    drew: Names,
) -> Iterator[str]:
    """What stands neither as when forward began (`first`, of tensors) nor as when it waited (`then`), in words."""
    otherwise, known = began.otherwise(), began.contained()
    for (at, name), where in halted.otherwise().items():
        if (at, name) in otherwise or not (name or at in known):
            yield where
    numbers = drawn(drew)
    now: dict[str, Any] = {**tensors_of(model), **numbers}
    for name, value in now.items():
        # A generator is the process's: to put it back would undo what was drawn or seeded since.
        if _differs(then.get(name), value) and (name in numbers or _differs(first.get(name), value)):
            yield name


def _differs(was: Any, now: Any) -> bool:
    if isinstance(now, Tensor):
        now = now.detach()
    return difference(was, now) is not None
