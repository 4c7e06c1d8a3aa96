"""Standing: which of a model's tensors were moved since a forward stopped that has yet to use them.

A forward that waits reads the model as it is when it goes on. Of two in flight, the first would find what the second's prefix
wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ariadne import tree
from ariadne.errors import BoundaryError
from ariadne.stopped.noted import Noting, marks_of, memory_of, stands, state_of


class Stood:
    """The state of a model as a prefix left it: made before that runs, and told when it has."""

    def __init__(self, model: nn.Module, noting: Noting | None) -> None:
        self._noting, self._state = noting, dict(state_of(model)) if noting is None else noting.state
        self._model, self._marks = model, marks_of(model, self._state) if noting is None else noting.marks

    def stop(self) -> Stood:
        """Note what the prefix wrote, and what it used."""
        state = self._state
        self.written = {name for name, t in state.items() if not stands(t, self._marks[name])}
        used: Collection[str] = () if self._noting is None else self._noting.used
        # A weight moves between the halves where an optimizer steps, and is followed.
        told = {n: t for n, t in state.items() if n in self.written or (n in used and not isinstance(t, nn.Parameter))}
        marks = marks_of(self._model, told)
        self._stood = [(name, t, marks[name]) for name, t in told.items()]
        self._noting, self._state, self._marks = None, {}, {}
        return self

    def unmoved(self, crossing: Collection[Any] = ()) -> Unmoved:
        """What refuses all that was moved, save for what crosses as the prefix left it."""
        return Unmoved({name: t for name, t in self.moved().items() if ("state", name) not in crossing})

    def going_on(self, crossing: Collection[Any] | None) -> Unmoved:
        """The same for a forward that waits, which uses what crosses; None where that is not known, and may be all."""
        used = self.moved().keys() & (self.written if crossing is None else {c[1] for c in crossing if c[0] == "state"})
        if used:
            raise refusal(used)
        return self.unmoved()

    def moved(self) -> dict[str, torch.Tensor]:
        """What was written into since, by name."""
        return {name: t for name, t, mark in self._stood if not stands(t, mark)}


class Unmoved(TorchFunctionMode):
    """Refuses each op that takes one of these tensors of the model, which another call has moved."""

    def __init__(self, moved: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.memories = {memory_of(t): name for name, t in moved.items()}
        self.error: BoundaryError | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.look((args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def look(self, given: Any) -> None:
        """Raise `BoundaryError` if one of them is given."""
        for t in tree.leaves(given) if self.memories else ():
            if isinstance(t, torch.Tensor) and (name := self.memories.get(memory_of(t))) is not None:
                self.error = self.error or refusal([name])
                raise self.error

    def over(self, go_on: Callable[[TorchFunctionMode | None], Any]) -> Any:
        """What a forward gives that goes on under this, where there is something to refuse."""
        return self.settle(go_on(self if self.memories else None))

    def within(self, run: Callable[[], Any]) -> Any:
        """What a function gives that runs under this."""
        with self if self.memories else nullcontext():
            return self.settle(run())

    def settle(self, output: Any) -> Any:
        """What forward gave, unless it holds one of them, or went on after it was refused one."""
        if self.error is None:
            self.look(output)
            return output
        raise self.error


def refusal(names: Collection[str]) -> BoundaryError:
    """The error for state that the suffix uses, and that is not as its own prefix left it."""
    return BoundaryError(
        f"another call, or you, wrote {min(names)!r} of the model since this boundary's prefix ran; the forward that waits there "
        "uses it after the cut, and would not find it as it left it. Run each suffix before the next prefix, or cut elsewhere"
    )
