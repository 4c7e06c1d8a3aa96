"""Standing: which of a model's tensors were moved since a forward stopped that has yet to use them.

A forward that waits reads the model as it is when it goes on. Of two in flight, the first would find what the second's prefix
wrote, and the second's prefix would have missed what the first's suffix writes.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ariadne import tree
from ariadne.errors import BoundaryError
from ariadne.plan import as_bytes
from ariadne.stopped.absent import ANSWERED
from ariadne.stopped.laid import Laid
from ariadne.stopped.noted import Before, Noting, marks_of, memory_of, stands, state_of, version_of
from ariadne.stopped.python import Undoing
from ariadne.stopped.unseen import Unseen, unseen

Moved = dict[str, tuple[torch.Tensor, ...]]  # by name: what stands there now, and what did


class Looking(Unseen):
    """Tells which of the model's tensors the ops take that run under it: for a prefix of which nothing else is noted."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.used: set[str] = set()
        self._ids = {id(t): name for name, t in state.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in ANSWERED:
            self.used.update([self._ids[id(t)] for t in tree.leaves((args, kwargs or {})) if id(t) in self._ids])
        return func(*args, **(kwargs or {}))


@dataclass
class Since:
    """How Python stood where a prefix stopped: `left` is what that had changed; `later`, with what its own suffix has, too."""

    left: Undoing
    later: Undoing | None = None

    def begin(self, model: nn.Module) -> None:
        """Let a suffix begin; `BoundaryError` where anything else has changed what Python keeps: another suffix, a call of the
        whole model, or who calls. The prefix may have read that before: forward would have found it changed.
        """
        if self.later is None:
            what = self.left.meanwhile(model)
        else:
            what = self.later.meanwhile(model) or self.later.beside(self.left).moved_meanwhile()
        if what is not None:
            raise BoundaryError(
                f"another call, or you, changed {what} after this boundary's prefix had run; forward may read that before the "
                "cut, and would have found it changed. Run each suffix before the next call, or keep such state in a buffer"
            )

    def end(self) -> None:
        """Take what stands now as what its own suffix left: that may run again."""
        self.later = self.left.since.undoing(buffers=False)


class Stood:
    """The state of a model as a prefix left it: made before that runs, and told when it has."""

    def __init__(self, model: nn.Module, noting: Noting | None, laid: Laid) -> None:
        self._laid, self._state = laid, dict(state_of(model, laid)) if noting is None else noting.state
        self._model, self._marks = model, marks_of(model, self._state, laid) if noting is None else noting.marks
        self.looking: Noting | Looking = Looking(self._state) if noting is None else noting

    def stop(self, left: Undoing) -> Stood:
        """Note what the prefix wrote, and what it used; `left`: what it changed of what Python keeps."""
        self._since = Since(left)
        state = self._state
        self.written = {name for name, t in state.items() if not stands(t, self._marks[name])}
        # A weight moves between the halves where an optimizer steps, and is followed.
        read = {n for n in self.looking.used if n not in self.written and not isinstance(state[n], nn.Parameter)}
        now = self._laid.bound(self._model) if read else {}
        # Where Python has put another tensor there, that one counts from now on.
        told = {n: now.get(n, t) if n in read else t for n, t in state.items() if n in self.written or n in read}
        marks = marks_of(self._model, told, self._laid)
        self._stood, self._read = [(name, t, marks[name]) for name, t in told.items()], read
        self._state, self._marks = {}, {}
        self.looking = Looking({})
        return self

    def told(self, before: Before) -> Before:
        """What was done before the cut, with how that stood which it only reads: for a suffix elsewhere, or a second one."""
        known = _known(self._model)
        used = {n: known.mark(n, t, mark) for n, t, mark in self._stood if n in self._read}
        return replace(before, used={**used, PYTHONS: known.keep(self._since)}, origin=known.origin())

    def unmoved(self) -> Unmoved:
        """What refuses all that was moved."""
        self._since.begin(self._model)
        return Unmoved(self._model, self._laid, self.moved(), self._since)

    def going_on(self, crossing: Collection[Any] | None) -> Unmoved:
        """The same for a forward that waits, which uses what crosses; None where that is not known, and may be all."""
        self._since.begin(self._model)
        moved = self.moved()
        used = moved.keys() & (self.written if crossing is None else {c[1] for c in crossing if c[0] == "state"})
        if used:
            raise refusal(used)
        return Unmoved(self._model, self._laid, moved, self._since)

    def moved(self) -> Moved:
        """What was written into since, or stands no more where it stood; by name."""
        now = self._laid.bound(self._model) if self._read else {}
        return {
            name: (now.get(name, t), t)
            for name, t, mark in self._stood
            if not stands(t, mark) or (name in self._read and now.get(name) is not t)
        }


class _Known:
    """The tensors of a model that boundaries tell of: each has a number, which no other one gets in this process.

    And what stood in Python where the prefixes stopped of which bytes were made.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Since] = {}
        self._token, self._count = secrets.token_hex(8), count()
        self._numbers: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}

    def origin(self) -> str:
        """What tells this model, in this process, from others."""
        return f"{self._token}-{os.getpid()}"

    def keep(self, since: Since) -> str:
        """Keep how Python stood where a prefix stopped; under which name."""
        name = str(next(self._count))
        self._kept[name] = since
        if len(self._kept) > _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return name

    def kept(self, name: str) -> Since:
        """What was kept under that name."""
        if name not in self._kept:
            raise BoundaryError(
                f"more than {_MOST_KEPT} boundaries of this model were sent since this one; run suffixes sooner"
            )
        return self._kept[name]

    def mark(self, name: str, t: torch.Tensor, mark: Any) -> str:
        """Which tensor stands under a name, and how often it was written into, or what it holds where that is not counted."""
        known = self._numbers.get(name)
        if known is None or known[0]() is not t:
            known = self._numbers[name] = weakref.ref(t), next(self._count)
        version, was = mark
        if was is None:
            return f"{known[1]}.{version}."
        data = as_bytes(was).numpy().tobytes()
        return f"{known[1]}.{version}.{hashlib.blake2b(data, digest_size=16).hexdigest()}"


_MOST_KEPT, PYTHONS = 256, "<python>"
_KNOWN: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def _known(model: nn.Module) -> _Known:
    found = _KNOWN.get(model)
    return _KNOWN.setdefault(model, _Known()) if found is None else found


def unmoved_since(model: nn.Module, before: Before, laid: Laid) -> Unmoved:
    """What a suffix runs under that begins with what crossed: it refuses what was moved since the prefix read it.

    Where that ran on another model, nothing tells what has become of its state: there what it reads must not be written here.
    """
    known = _known(model)
    state = laid.bound(model) if before.used.keys() - {PYTHONS} else {}
    here = {name: state[name] for name in before.used if name in state}
    if before.origin != known.origin():
        return Unmoved(model, laid, {}, apart=here)
    since = known.kept(before.used[PYTHONS]) if PYTHONS in before.used else None
    if since is not None:
        since.begin(model)
    marks = {n: (version_of(t), t if before.used[n][-1:] != "." else None) for n, t in here.items()}
    moved: Moved = {n: (t,) for n, t in here.items() if known.mark(n, t, marks[n]) != before.used[n]}
    return Unmoved(model, laid, moved, since)


class Unmoved(Unseen):
    """Refuses each op that takes one of these tensors of the model, which another call has moved, and a suffix that writes one.

    `apart`: those which the prefix read on a model of its own, and which are only not to be written. `since` is told of the end.
    """

    def __init__(
        self,
        model: nn.Module,
        laid: Laid,
        moved: Moved,
        since: Since | None = None,
        apart: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.since = since
        self.memories = {memory_of(t): name for name, both in moved.items() for t in both}
        self.error: BoundaryError | None = None
        held = {**{name: both[0] for name, both in moved.items()}, **apart}
        self._model, self._laid, self._apart, self._began = model, laid, apart, (held, marks_of(model, held, laid))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in ANSWERED:
            self.look((args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def look(self, given: Any) -> None:
        """Raise `BoundaryError` if one of them is given."""
        for t in tree.leaves(given) if self.memories else ():
            if isinstance(t, torch.Tensor) and (name := self.memories.get(memory_of(t))) is not None:
                self.error = self.error or refusal([name])
                raise self.error

    def over(self, go_on: Callable[[Unseen | None], Any]) -> Any:
        """What a forward gives that goes on under this, where there is something to refuse."""
        with self.to_the_end():
            return self.settle(go_on(self if self.memories else None))

    def within(self, run: Callable[[], Any]) -> Any:
        """What a function gives that runs under this."""
        with self.to_the_end(), unseen(self if self.memories else None):
            return self.settle(run())

    @contextmanager
    def to_the_end(self) -> Iterator[None]:
        """What Python keeps when the block ends, be it by an error, is what this suffix left there."""
        try:
            yield
        finally:
            if self.since is not None:
                self.since.end()

    def settle(self, output: Any) -> Any:
        """What forward gave, unless it holds one of them, or went on after it was refused one."""
        if self.error is not None:
            raise self.error
        self.look(output)
        held, marks = self._began
        now = self._laid.bound(self._model) if held else {}
        with torch._C.DisableTorchFunction():  # what is asked here of tensors is no op of forward's
            written = [name for name, t in held.items() if now.get(name) is not t or not stands(t, marks[name])]
        if written and written[0] in self._apart:
            raise BoundaryError(
                f"the suffix wrote {written[0]!r} of the model, which the part before the cut reads, and that ran for this "
                "boundary, or may run, on a model of its own, where the next call would not see it. Run both sides with one "
                "PythonSplit (fallback='python'), or cut elsewhere"
            )
        if written:
            raise refusal(written)
        return output


def refusal(names: Collection[str]) -> BoundaryError:
    """The error for state that the suffix uses, and that is not as its own prefix left it."""
    return BoundaryError(
        f"another call, or you, wrote {min(names)!r} of the model since this boundary's prefix ran; forward uses it after the cut, "
        "and would not find it as it left it. Run each suffix before the next prefix, or cut elsewhere"
    )
