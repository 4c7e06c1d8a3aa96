"""Pre-dispatch: how the ops of forward reach a recorder, and those of no other thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from ariadne.forks import undone

# No profile hears of a call of what is no function itself.
silent_getattr: Callable[..., Any] = partial(getattr)
silent_id: Callable[[Any], int] = partial(id)
silent_length: Callable[[Any], int] = partial(len)
silent_thread: Callable[[], int] = partial(threading.get_ident)
_stack_of: Any = type(torch._ops.mode_stack_state_for_pre_dispatch())
_compiling: Any = partial(torch._C._dynamo.eval_frame.get_eval_frame_callback)


class Stack(_stack_of):  # type: ignore[misc]
    """The modes of one thread at the pre-dispatch key: slot 0 is a recorder's."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[Any] = [None, None]

    def set(self, index: int, mode: Any) -> None:
        self.modes[index] = mode

    def get(self, index: int) -> Any:
        return self.modes[index]

    def count(self) -> int:
        return sum(mode is not None for mode in (*self.modes, self._schema_check_mode))


@contextmanager
def modes_of_its_own(recorder: Any) -> Iterator[None]:
    """While in the block, this thread has modes at the pre-dispatch key of its own: torch keeps one stack of them for all threads.

    Another thread that puts its modes aside for a moment, as each fake tensor does, would take the recorder's off, too, and put it
    onto itself. Where the `recorder` is the only mode there, an op goes straight to it. Torch's own way takes the mode off and puts
    it back by functions that it makes anew for each op, which are a third of what a profile of forward hears of.
    """
    ops, own, me = torch._ops, Stack(), threading.get_ident()
    plain: Any = ops.mode_stack_state_for_pre_dispatch
    plainly: Any = OpOverload._get_dispatch
    modes, included = own.modes, partial(torch._C._dispatch_tls_set_dispatch_key_included, DispatchKey.PreDispatch)
    kept_out = partial(torch._C._dispatch_tls_is_dispatch_key_excluded, DispatchKey.Python)

    def taken(op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
        modes[0] = None
        included(False)
        try:
            if _compiling() is not None:  # what is called while compiled code runs would be compiled itself
                return recorder.__torch_dispatch__(op, (), args, kwargs)
            return recorder.dispatched(op, args, kwargs)
        finally:
            modes[0] = recorder
            included(True)

    def get_dispatch(op: OpOverload, key: Any) -> Any:
        if (
            key == DispatchKey.PreDispatch
            and modes[0] is recorder
            and modes[1] is None
            and silent_thread() == me
            and own._schema_check_mode is None
            and not kept_out()
        ):
            return partial(taken, op)
        return plainly(op, key)

    def put_back() -> None:
        ops.mode_stack_state_for_pre_dispatch = plain
        OpOverload._get_dispatch = plainly  # type: ignore[method-assign]

    end = undone(put_back)
    ops.mode_stack_state_for_pre_dispatch = lambda: own if silent_thread() == me else plain()
    OpOverload._get_dispatch = get_dispatch  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        put_back()
        end()
