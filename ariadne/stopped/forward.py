"""A forward in a thread of its own: it runs up to a module's call, waits there, and goes on when it is told to.

The thread has what its caller has (`Ambient`), is new for each forward, and ends with it. One that waits and is not needed any
more is unwound: what forward has open (`with`, `finally`) is closed, and nothing after it runs.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from ariadne.errors import BoundaryError, ConsumedError
from ariadne.stopped.ambient import Ambient, switches
from ariadne.stopped.gate import Awaited
from ariadne.stopped.noted import Before, Noting
from ariadne.stopped.python import PythonState, Undoing
from ariadne.stopped.skipped import leave
from ariadne.stopped.standing import Stood

count: Callable[[], int] = torch._C._autograd._get_sequence_nr  # how many autograd nodes this thread has made


class _Dropped(BaseException):
    """Unwinds a forward that nobody waits for any more."""


@dataclass
class Halt:
    """Where a forward waits: `output` of the module, or of forward itself where that `ended` before the call came.

    `made`: how many autograd nodes its thread had made. `autocast`: whether weights may have been cast for both halves. `switches`:
    how those of the process stood. `before`: what was done so far, and `kept`
    what crosses besides the output, for a suffix elsewhere. `left`: the changes that Python has made so far.
    """

    output: Any
    ended: bool
    made: int
    autocast: bool
    switches: tuple[Any, ...]
    before: Before
    kept: list[torch.Tensor]
    left: Undoing


@dataclass(frozen=True)
class _Order:
    """What a forward that waits is to do: go on under `mode`, and give what `then` makes of its output."""

    mode: TorchFunctionMode | None
    then: Callable[[Any], Any]


class Forward:
    """One call of a model that stops at the end of a module's call; raises what the model raises."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        module: nn.Module,
        number: int,
        grad: bool,
        noting: Noting | None = None,
        stood: Stood | None = None,
    ) -> None:
        self.ambient, self.process, self.taken = Ambient.now(grad), os.getpid(), False
        self.orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._news: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        context = contextvars.copy_context()
        python = PythonState(model) if noting is None else noting.python
        looking = noting or (stood.looking if stood is not None else None)
        work = (
            context, self.ambient, model, args, kwargs, module, number, noting, looking, python, self.orders, self._news
        )  # fmt: skip
        threading.Thread(target=_work, args=work, name="ariadne forward", daemon=True).start()
        self.halt: Halt = self._next()
        self.stood = stood.stop(self.halt.left) if stood is not None else None

    def go_on(self, mode: TorchFunctionMode | None = None, then: Callable[[Any], Any] | None = None) -> Any:
        """Run the rest, once: what `then` makes of what forward returns, in its thread, all of it under `mode`."""
        if self.process != os.getpid():
            raise BoundaryError(
                "this boundary was made in the process that this one was forked from; its forward waits there, in a thread, and "
                "threads are not forked. Run the prefix in this process"
            )
        with _taking:
            if self.taken:
                raise ConsumedError(
                    "this boundary was run before: its forward went on from the cut, and can't go back. Each boundary of a Python "
                    "split is run once; make another with run_prefix"
                )
            self.taken = True
        self.halt.output = None
        self.orders.put(_Order(mode, then or _itself))
        return self._next()

    def _next(self) -> Any:
        try:
            kind, value = self._news.get()
        except BaseException:  # an interrupt: forward ends where it would have stopped
            self.taken = True
            self.orders.put(None)
            raise
        if kind == "raised":
            try:
                raise value
            finally:
                del value
        return value


_taking = threading.Lock()


def _itself(output: Any) -> Any:
    return output


def _work(
    context: contextvars.Context,
    ambient: Ambient,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    module: nn.Module,
    number: int,
    noting: Noting | None,
    looking: TorchFunctionMode | None,
    python: PythonState,
    orders: SimpleQueue[_Order | None],
    news: SimpleQueue[tuple[str, Any]],
) -> None:
    """What the thread does."""
    given: list[_Order] = []

    def waits(output: Any, ended: bool = False) -> Any:
        before, kept = Before(refusal="what forward did before the cut was not noted"), list[torch.Tensor]()
        if looking is not None:
            leave(looking)
        if noting is not None:
            before, kept = noting.finish(output)
        autocast = any(torch.is_autocast_enabled(d) for d in ("cpu", "cuda")) and torch.is_autocast_cache_enabled()
        news.put(("halts", Halt(output, ended, count(), autocast, switches(), before, kept, python.undoing())))
        held = [output]
        del output, kept
        order = orders.get()
        if order is None:
            raise _Dropped
        given.append(order)
        if order.mode is not None:
            _beneath(order.mode)
        return held.pop()

    def run() -> Any:
        with ambient.entered():
            awaited = Awaited(module, number, waits)
            if looking is not None:
                _push_mode(looking)
            try:
                output = model(*args, **kwargs)
            finally:
                awaited.close()
            if not given:
                output = waits(output, ended=True)
            return given[0].then(output)

    try:
        result = context.run(run)
    except _Dropped:
        news.put(("dropped", None))
    except BaseException as error:
        news.put(("raised", error))
    else:
        news.put(("ended", result))


def _beneath(mode: TorchFunctionMode) -> None:
    """Put a mode below those that forward has entered, so that each is left in its turn."""
    above = []
    while torch._C._len_torch_function_stack():
        above.append(_pop_mode())
    _push_mode(mode)
    for other in reversed(above):
        _push_mode(other)
