"""Written: the data of each tensor that an op is about to write is kept, so that it can be put back.

In runs that nobody records, too: in another state of Python, forward may write what the recorded run did not, and break off after.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ariadne.capture import generators
from ariadne.capture.ran import Ran
from ariadne.capture.state import Snapshot
from ariadne.errors import UnsupportedError
from ariadne.plan import WHOLE, bind, storage_of, tensors_in, written_arguments

NUMBER = "a number"


def read_by(target: str) -> str:
    """How Python reads data by an op of a plan, whatever its name: a `NUMBER`, or the `WHOLE`; empty for a size, which is none."""
    return {WHOLE: WHOLE, "aten.sym_size.int": ""}.get(target, NUMBER)


class Writes:
    """What the ops of one run write: a snapshot keeps the data of it, unless an op of this run made the memory.

    It is kept op by op: a copy of all that a model holds would take as much memory again.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._made = set[int]()
        self._kept = set[tuple[Any, ...]]()
        self._lent: dict[int, _Lent] = {}  # by memory
        self._rewritten: dict[int, _Lent] = {}  # those that an op writes at this moment

    def made(self, args: Any, out: Any) -> None:
        """An op was called with these, and gave that."""
        theirs = {storage_of(t) for t in tensors_in(args)}
        self._made |= {key for t in tensors_in(out) if (key := storage_of(t)) is not None and key not in theirs}
        for lent in self._rewritten.values():
            lent.data = _data_of(lent.tensor)
        self._rewritten.clear()

    def lend(self, t: torch.Tensor, where: str) -> None:
        """Forward gets an array with a tensor's memory, into which it may write."""
        memory = storage_of(t)
        if memory is not None and t.device.type == "cpu":
            self._keep(t, memory)
            self._lent.setdefault(memory, _Lent(t, where, _data_of(t)))

    def refuse_written(self) -> None:
        """Raise `UnsupportedError` where a tensor was written through its array."""
        for lent in self._lent.values():
            lent.refuse_written()

    def keep(self, t: torch.Tensor) -> None:
        """A tensor is about to be written."""
        memory = storage_of(t)
        if memory is not None and memory in self._lent:
            self._rewritten[memory] = self._lent[memory]
            self._lent[memory].refuse_written()
        if memory not in self._made:
            self.snapshot.note_written(memory)
            self._keep(t, memory)

    def _keep(self, t: torch.Tensor, memory: int | None) -> None:
        if memory in self._made:
            return
        self.snapshot.save_owners(t)
        # No two views of a variable's tensor are one object: they are told apart by what they show.
        shows = memory is not None and not t.is_nested
        view = (memory, t.storage_offset(), tuple(t.shape), t.stride()) if shows else (id(t),)
        if view not in self._kept:
            self._kept.add(view)
            self.snapshot.save(t)


@dataclass
class _Lent:
    """A tensor of which forward has an array with the same memory: where it got that, and all bytes that are in the memory."""

    tensor: torch.Tensor
    where: str
    data: torch.Tensor

    def refuse_written(self) -> None:
        """Raise `UnsupportedError` where these are others now."""
        if not torch.equal(self.data, _data_of(self.tensor)):
            raise UnsupportedError(
                f"forward writes into a tensor {list(self.tensor.shape)} through the array that .numpy() gave it in {self.where}: "
                "no op of torch does that, so a plan would leave it out. Write into the tensor itself, or into a copy of the array"
            )


def _data_of(t: torch.Tensor) -> torch.Tensor:
    """A copy of the bytes of all memory that a tensor shows a part of."""
    memory = torch._C.TensorBase.untyped_storage(t)
    with torch.utils._python_dispatch._disable_current_modes():
        return torch.empty(0, dtype=torch.uint8).set_(memory).clone()


class Looking(TorchDispatchMode):
    """Looks at the ops that run, and changes nothing."""

    supports_higher_order_operators = (
        True  # such as `torch.cond` or `flex_attention`, whose functions may write nothing
    )

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Such an op compiles what it is called with, and is to do so under this mode as it does without."""
        return True


class TooLongError(BaseException):
    """A run takes more ops than it may: a loop that goes on until numbers are small may never end with others, and may go on after
    any error but of this kind."""


class Undone(Looking):
    """While it is on, a snapshot keeps the data of what the ops write; and the ops that run are noted: `most` of them."""

    def __init__(self, snapshot: Snapshot, most: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes, self.ran, self._left = Writes(snapshot), Ran(), most
        self.drew = False  # from torch's generators, by its own ops
        self.asked = Counter[str]()  # how often Python read a `NUMBER`, or all of a tensor's data
        self.reading = 0  # whether Python takes all of a tensor's data now, by ops that count as one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise TooLongError
        bound = bind(func, args, given) if isinstance(func, OpOverload) else (*args, *given.values())
        written: list[torch.Tensor] = []
        key: tuple[Any, ...] = ()
        if isinstance(func, OpOverload):
            key = self.ran.key(func, bound)
            if _may_write(func):
                written = [t for i in written_arguments(func, bound) for t in tensors_in(bound[i])]
            for t in written:
                self._writes.keep(t)
        seeded = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and not self.drew
        stood = generators.states() if seeded else {}
        with plainly(func):
            out = func(*args, **given)
        self.drew |= seeded and generators.TORCH in generators.differing(stood, generators.states())
        self._writes.made((*args, *given.values()), out)
        self.ran.note(key, tensors_in(bound), written, out)
        if not self.reading and isinstance(out, (int, float, complex)):
            self.asked[NUMBER] += 1
        return out


def plainly(func: Any) -> AbstractContextManager[object]:
    """For the op that `torch.Tensor(x)` is made of, of which no class of tensors hears: what it gives is a plain tensor."""
    return torch._C.DisableTorchFunctionSubclass() if func is torch.ops.aten.alias.default else nullcontext()


@cache
def _may_write(func: OpOverload) -> bool:
    """Whether an op writes any argument, as far as its schema tells; of running statistics it keeps silent."""
    return func._schema.is_mutable or any(a.name.startswith("running_") for a in func._schema.arguments)
