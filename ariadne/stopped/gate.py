"""The gate: where the end of one call of a module is noticed, in one thread, and the model is left as it was after."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from ariadne.forks import rlock

_SLOT = "_call_impl"  # what `nn.Module.__call__` asks the instance for; with a compiled module it asks for the other
_COMPILED = "_compiled_call_impl"
_lock = rlock()
_here = threading.local()


class _Gate:
    """Stands before one way to call a module, for as long as any thread waits for one of its calls."""

    def __init__(self, module: nn.Module, slot: str) -> None:
        self.module, self.slot = module, slot
        self.had = slot in module.__dict__
        self.before = module.__dict__.get(slot)
        self.plain = slot == _SLOT and not self.had  # whether nothing else stands there
        self.waiting = 0
        self.copies: list[_Gate] = []  # before modules that forward copied from this one meanwhile

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gate:
        """One before the copy of the module, which is gone when this one is."""
        made = type(self)(self.module, self.slot)
        made.module, made.had, made.plain = memo.get(id(self.module), self.module), self.had, self.plain
        made.before = copy.deepcopy(self.before, memo)
        self.copies.append(made)
        return made

    def leave(self) -> None:
        """Let stand before the module, and before copies of it, what would stand there without the gate."""
        for gate in (self, *self.copies):
            own = gate.module.__dict__
            if own.get(gate.slot) is not gate:
                continue
            if gate.had:
                own[gate.slot] = gate.before
            else:
                del own[gate.slot]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        awaited: Awaited | None = getattr(_here, "awaited", None)
        if awaited is None or awaited.module is not self.module:
            return self.inner(*args, **kwargs)
        awaited.begun += 1
        mine = awaited.begun == awaited.number
        output = awaited.begins() if mine and awaited.begins is not None and self.plain else None
        if output is None:
            output = self.inner(*args, **kwargs)
        if mine:
            awaited.close()
            return awaited.reached(output)
        return output

    def inner(self, *args: Any, **kwargs: Any) -> Any:
        """The call as it is without the gate."""
        if self.had:
            return self.before(*args, **kwargs)  # type: ignore[misc]
        return getattr(type(self.module), self.slot)(self.module, *args, **kwargs)


class Awaited:
    """A call of a module that this thread waits for: when the call of that `number` ends, `reached` gets its output,
    and what it gives is the output then. `begins` is asked when it begins, unless something else stands there: what that gives is
    the module's output, which runs where it is None.

    Each thread waits for one at most. The module has an attribute more until `close`.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        reached: Callable[[Any], Any],
        begins: Callable[[], Any] | None = None,
    ) -> None:
        self.module, self.number, self.reached, self.begins = module, number, reached, begins
        self.begun = 0
        self.slot = _COMPILED if module._compiled_call_impl is not None else _SLOT
        with _lock:
            gate = module.__dict__.get(self.slot)
            if not isinstance(gate, _Gate) or gate.module is not module:
                gate = module.__dict__[self.slot] = _Gate(module, self.slot)
            gate.waiting += 1
        self.gate: _Gate | None = gate
        _here.awaited = self

    def close(self) -> None:
        """Wait no longer."""
        _here.awaited = None
        with _lock:
            gate, self.gate = self.gate, None
            if gate is None:
                return
            gate.waiting -= 1
            if not gate.waiting:
                gate.leave()
