"""A forward in a thread of its own: it runs up to a module's call, waits there, and goes on when it is told to.

The thread has what its caller has (`Ambient`), is new for each forward, and ends with it. One that waits and is not needed any
more is unwound: what forward has open (`with`, `finally`) is closed, and nothing after it runs. Whoever lets go of it waits for
that end, so that no thread of ours runs code of the model at a moment that nobody chose.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import nn

from ariadne.errors import BoundaryError, ConsumedError, FrontierError
from ariadne.stopped.ambient import Ambient, Saving, switches
from ariadne.stopped.gate import Awaited
from ariadne.stopped.handed import Handed, NewlyFound, held_of, refuse_held
from ariadne.stopped.noted import Before, Noting
from ariadne.stopped.python import PythonState, Undoing, loaded_by
from ariadne.stopped.standing import Stood
from ariadne.stopped.unseen import Unseen, beneath, enter, leave, leave_all

count: Callable[[], int] = torch._C._autograd._get_sequence_nr  # how many autograd nodes this thread has made


_HERE = os.path.dirname(__file__)


class _Dropped(BaseException):
    """Unwinds a forward that nobody waits for any more."""


@dataclass
class Halt:
    """Where a forward waits: `output` of the module, or of forward itself where that `ended` before the call came.

    `made`: how many autograd nodes its thread had made. `autocast`: whether weights may have been cast for both halves. `switches`:
    how those of the process stood. `before`: what was done so far, and `kept`
    what crosses besides the output, for a suffix elsewhere. `left`: the changes that Python has made so far. `saving`: the
    part under `torch.utils.checkpoint` in which it waits. `locked`: where a lock stands that its thread holds meanwhile.
    """

    output: Any
    ended: bool
    made: int
    autocast: bool
    switches: tuple[Any, ...]
    before: Before
    kept: list[torch.Tensor]
    left: Undoing
    saving: Saving | None
    locked: str


@dataclass(frozen=True)
class _Order:
    """What a forward that waits is to do: go on under `mode`, and give what `then` makes of its output."""

    mode: Unseen | None
    then: Callable[[Any], Any]


class Forward:
    """One call of a model that stops at the end of a module's call; raises what the model raises.

    Where it is let go of while it waits, it ends as by `end`.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        module: nn.Module,
        number: int,
        grad: bool,
        python: PythonState,
        noting: Noting | None = None,
        stood: Stood | None = None,
    ) -> None:
        self.ambient = Ambient.now(grad)
        self._context = context = contextvars.copy_context()
        self._variables = dict(context)  # as they were when forward began, or when its caller took them last
        self._tokens: dict[contextvars.ContextVar[Any], contextvars.Token[Any]] = {}
        looking = noting or (stood.looking if stood is not None else None)
        self._locks, self._read = python.held.locks, partial(loaded_by, model)
        self.refuse_held()
        self.handed = Handed(python.held.locals)
        self._worker = _Worker(
            (context, self.ambient, self.handed, model, args, kwargs, module, number, noting, looking, python)
        )
        weakref.finalize(self, self._worker.end, _PATIENCE).atexit = False
        self._worker.start()
        self.halt: Halt = self._next()
        if self.halt.locked:
            self.end()
            raise FrontierError(
                f"forward holds the lock {self.halt.locked!r} at the cut, and would while it waits there: another call would wait "
                "for that lock for ever. Cut outside of the block that holds it"
            )
        self.stood = stood.stop(self.halt.left) if stood is not None else None

    @property
    def taken(self) -> bool:
        """Whether it went on, or was told to end."""
        return self._worker.taken.locked()

    @property
    def process(self) -> int:
        """The process in which it waits."""
        return self._worker.process

    def refuse_held(self) -> None:
        """Raise `UnsupportedError` where this thread holds a lock that forward may take again, in its own."""
        refuse_held(self._locks, self._read)

    def end(self, under: AbstractContextManager[Any] | None = None) -> None:
        """Unwind it where it waits, `under` something in its thread, and return when that is done; nothing where it went on, or has
        ended."""
        self._worker.under = under
        self._worker.end()

    def go_on(self, mode: Unseen | None = None, then: Callable[[Any], Any] | None = None) -> Any:
        """Run the rest, once: what `then` makes of what forward returns, in its thread, all of it under `mode`."""
        if self.process != os.getpid():
            raise BoundaryError(
                "this boundary was made in the process that this one was forked from; its forward waits there, in a thread, and "
                "threads are not forked. Run the prefix in this process"
            )
        if not self._worker.taken.acquire(blocking=False):
            raise ConsumedError(
                "this boundary was run before: its forward went on from the cut, and can't go back. Each boundary of a Python "
                "split is run once; make another with run_prefix"
            )
        self.halt.output = None
        self.handed.lend()
        self._worker.order(_Order(mode, then or _itself))
        return self._next()

    def _hand_on_variables(self) -> None:
        """Set in the caller's context what forward has set in its own since, and take back what it has."""
        now = dict(self._context)
        for variable, value in now.items():
            if self._variables.get(variable, self) is not value:
                token = variable.set(value)
                if variable not in self._variables:
                    self._tokens[variable] = token
        for variable in self._variables.keys() - now.keys():
            if variable in self._tokens:
                with suppress(ValueError, RuntimeError):  # of another context, in which it was not set
                    variable.reset(self._tokens.pop(variable))
        self._variables = now

    def _next(self) -> Any:
        try:
            kind, value = self._worker.news.get()
        except BaseException:  # an interrupt: forward ends where it would have stopped
            self._worker.taken.acquire(blocking=False)
            self._worker.order(None)
            raise
        self._hand_on_variables()
        try:
            self.handed.settle()
        except NewlyFound as error:
            raise error from (value if kind == "raised" else None)
        if kind == "raised":
            try:
                raise value
            finally:
                del value
        return value


def _itself(output: Any) -> Any:
    return output


_PATIENCE = 5.0  # seconds for the end of a forward that is let go of while a lock may be held that this end needs


class _Worker(threading.Thread):
    """The thread of one forward: it waits once, for one order, and tells what came of it when nothing of forward is left in it."""

    def __init__(self, work: tuple[Any, ...]) -> None:
        super().__init__(name="ariadne forward", daemon=True)
        self.process, self.waits = os.getpid(), False
        self.under: AbstractContextManager[Any] | None = None  # what it ends under
        self.taken = threading.Lock()  # held, for good, once somebody has decided what becomes of forward
        self.news: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._work = [work]

    def run(self) -> None:
        """What the thread does."""
        self.news.put(_worked(self, *self._work.pop()))

    def halt(self, halt: Halt) -> _Order | None:
        """Tell where forward stopped, and wait for what it is to do; None: end."""
        self.waits = True
        self.news.put(("halts", halt))
        del halt
        return self._orders.get()

    def order(self, order: _Order | None) -> None:
        """Tell forward what to do."""
        self.waits = False
        self._orders.put(order)

    def end(self, seconds: float | None = None) -> None:
        """Have forward end, where it waits and nobody has taken it, and wait until it did, or for so many seconds."""
        if self.waits and self.process == os.getpid() and self.taken.acquire(blocking=False):
            self.order(None)
            with suppress(Empty):
                self.news.get(timeout=seconds)


@atexit.register
def _let_end() -> None:
    """Wait for the forwards that run: Python stops threads at its end, and within torch's own code that aborts the process."""
    until = time.monotonic() + _PATIENCE
    for thread in threading.enumerate():
        if isinstance(thread, _Worker) and not thread.waits:
            thread.join(max(0.0, until - time.monotonic()))


def _worked(
    worker: _Worker,
    context: contextvars.Context,
    ambient: Ambient,
    handed: Handed,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    module: nn.Module,
    number: int,
    noting: Noting | None,
    looking: Unseen | None,
    python: PythonState,
) -> tuple[str, Any]:
    """Run forward: how it ended, and with what."""
    given: list[_Order] = []

    def waits(output: Any, ended: bool = False) -> Any:
        handed.give()
        before, kept = Before(refusal="what forward did before the cut was not noted"), list[torch.Tensor]()
        if looking is not None:
            leave(looking)
        if noting is not None:
            before, kept = noting.finish(output)
            if not before.refusal and (what := next(handed.written(), None)) is not None:
                before = replace(before, refusal=f"before the cut forward changes {what}")
        autocast = any(torch.is_autocast_enabled(d) for d in ("cpu", "cuda")) and torch.is_autocast_cache_enabled()
        held = [output]
        del output
        order = worker.halt(
            Halt(
                held[0], ended, count(), autocast, switches(), before, kept, python.undoing(), Saving.now(),
                next((where for where, _ in held_of(python.held.locks)), ""),
            )
        )  # fmt: skip
        if order is None:
            handed.dropped = True
            if worker.under is not None:
                worker.under.__enter__()
            raise _Dropped
        handed.take()
        given.append(order)
        if order.mode is not None:
            beneath(order.mode)
        return held.pop()

    def run() -> Any:
        handed.take()
        try:
            return forward()
        finally:
            handed.give()
            leave_all()  # what is entered for good would keep the graph until the thread has ended

    def forward() -> Any:
        with ambient.entered():
            begins = partial(noting.begins, module) if noting is not None else None
            awaited = Awaited(module, number, waits, begins)
            if looking is not None:
                enter(looking)
            try:
                output = model(*args, **kwargs)
            finally:
                awaited.close()
            if not given:
                output = waits(output, ended=True)
            return given[0].then(output)

    try:
        return "ended", context.run(run)
    except _Dropped:
        if worker.under is not None:
            worker.under.__exit__(None, None, None)
        return "dropped", None
    except BaseException as error:
        return "raised", error


def is_forwards(error: BaseException) -> bool:
    """Whether forward raised it, in its own thread, and not what Ariadne does there."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _worked.__code__ in codes and not codes[-1].co_filename.startswith(_HERE)
