"""Settled: plain attributes that forward reads and changes, and that no result follows: flags of a first call, and the batch of the
last one. They are caches, as tables are that forward fills: a plan lets them be.

A flag must stay as the first call left it, and results must be the same with it at all batches that are tried. Of what holds the
batch of the last call, forward must ask nothing but whether it is the batch of this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.capture.example import Example
from ariadne.capture.followed import Node, ReadError, Real, Size, followed
from ariadne.capture.generators import Names
from ariadne.capture.history import gives
from ariadne.capture.reach import Reach
from ariadne.capture.recorded import recording
from ariadne.capture.sizes import Watch
from ariadne.compare import difference
from ariadne.errors import UnsupportedError, named
from ariadne.guards import BOOKKEEPING, Flag, Recording, simple, told_of
from ariadne.plan import own

Change = tuple[str, str, Any, Any]  # of an attribute: before, and now
Key = tuple[str, str]  # a module's path, and the name of an attribute
NO_BATCH = 1_000_003  # of any call


def settles(before: Any, now: Any, batch: int) -> bool:
    """Whether a change may be that of a flag, or of what holds the batch of the last call."""
    return (type(before) is bool and type(now) is bool) or (type(before) is int and type(now) is int and now == batch)


def refuse_change(key: Key, before: Any, now: Any) -> None:
    """Raise `UnsupportedError` for an attribute that a plan can't follow."""
    path, name = key
    raise UnsupportedError(
        f"forward reads and changes the attribute {name!r} of {named(path)} (from {before!r} to {now!r}), which "
        "a plan can't follow; keep such state in a buffer"
    )


class Begun:
    """What stands in the attributes that a first run looked for in vain, and set, and in the parts that it made: a second run on
    the same inputs leaves the same there."""

    def __init__(self, modules: Mapping[str, nn.Module], found: Recording) -> None:
        self.modules, known = modules, {id(m) for m in modules.values()}
        keys = {(path, name) for path, name, _, _ in found.changed} & found.missing
        self.first = {key: told_of(self._found(key)) for key in sorted(keys) if key[0] in modules}
        self.parts = [(path, m, _plain(m)) for path, m in modules[""].named_modules() if id(m) not in known]

    def refuse_moved(self) -> None:
        """Raise `UnsupportedError` for one that holds something else now: it counts, or follows what stood there before."""
        for key, was in self.first.items():
            if not tree.identical(was, told_of(self._found(key))):
                self._refuse(*key)
        for path, module, then in self.parts:
            now = _plain(module)
            if not tree.identical(now, then):
                self._refuse(
                    path, next(name for name in {**then, **now} if now.get(name, self) != then.get(name, self))
                )

    def _refuse(self, path: str, name: str) -> None:
        raise UnsupportedError(
            f"forward sets up the attribute {name!r} of {named(path)} at its first call, and a second call on the same inputs "
            "leaves something else there: it reads and changes it, which a plan can't follow. Set it up in __init__, and keep such "
            "state in a buffer"
        )

    def _found(self, key: Key) -> Any:
        return self.modules[key[0]].__dict__.get(key[1])


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in BOOKKEEPING and simple(value)}


class Held:
    """The attributes that forward reads and changes, as later calls leave them.

    `settled`: those that must settle, with what stood there before the first run and after it. `holders`: others that hold the
    batch of the last call, so far: those that held nothing before, and those that held this batch before the first run, too.
    """

    def __init__(self, modules: Mapping[str, nn.Module], settled: dict[Key, tuple[Any, Any]]) -> None:
        self.modules, self.settled = modules, settled
        self.holders: dict[Key, tuple[Any, Any]] = {}
        self.begun: dict[Key, int | float] = {}  # numbers where nothing stood before
        self.went_on: dict[Key, int | float] = {}  # those of them that another batch moved on

    def look(self, asked: Iterable[Key], changed: Iterable[Change], batch: int) -> None:
        """Find what may be a holder after a first run, among the attributes that it read, or looked for in vain."""
        moved = {(path, name): (before, now) for path, name, before, now in changed}
        for key in asked:
            if key[0] not in self.modules:
                continue
            now = self._found(key)
            before = moved.get(key, (now, now))[0]
            if type(now) is int and now == batch and before in (None, now):
                self.holders[key] = before, now
            if type(now) in (int, float) and before is None:
                self.begun[key] = now

    def left(self, batch: int) -> None:
        """A call at this batch ran; raises `UnsupportedError` where a flag moved on by it, or another batch is held."""
        for key, (before, now) in self.settled.items():
            found = self._found(key)
            if type(found) is not type(now) or found != (now if type(now) is bool else batch):
                refuse_change(key, before, found)
        self.holders = {k: v for k, v in self.holders.items() if type(n := self._found(k)) is int and n == batch}
        self.went_on |= {k: v for k, v in self.begun.items() if not tree.identical(v, self._found(k))}

    def kept(self, changed: Sequence[Change], assigned: set[Key], caches: bool) -> set[Key]:
        """Those that a plan sets as forward does: all, where nothing else that forward leaves is left to a cache.

        `assigned`: what the plan sets besides; `caches`: forward fills containers that the plan does not. Raises
        `UnsupportedError` for a number that began at the first call and goes on at another batch as no holder does. Raises
        `UnsupportedError` where a plan would set what belongs to a batch, and could not set which batch it is; and where it would
        set what follows from an attribute as the first call found it.
        """
        first = {(path, name): now for path, name, _, now in changed}
        for key in self.went_on.keys() - self.holders.keys():
            refuse_change(key, self.went_on[key], self._found(key))
        for key in self.settled and assigned & first.keys():
            if simple(first[key]) and key[0] in self.modules and not tree.identical(first[key], self._found(key)):
                refuse_change(key, first[key], self._found(key))
        found = self.settled | {key: v for key, v in self.holders.items() if v[0] is None}
        if not caches and {(path, name) for path, name, _, _ in changed} <= assigned | found.keys():
            return set(found)
        if caches:  # which a guard could not see to be filled, where a flag says so
            flag = next((key for key, (_, now) in found.items() if type(now) is bool), None)
            if flag is not None:
                refuse_change(flag, *found[flag])
        holder = next((key for key, (_, now) in found.items() if type(now) is int), None)
        if holder is not None and assigned:
            refuse_change(holder, *found[holder])
        return set()

    def flags(self, changed: Sequence[Change], set_too: set[Key]) -> list[Flag]:
        """The flags, with what a first call fills beside them and a plan does not."""
        beside = tuple(
            (path, name) for path, name, _, _ in changed if (path, name) not in set_too | self.settled.keys()
        )
        return [(*key, before, now, beside) for key, (before, now) in self.settled.items() if type(now) is bool]

    @property
    def primed(self) -> list[Key]:
        """Those that held the batch of the first run before it."""
        return [key for key, (before, _) in self.holders.items() if before is not None]

    def _found(self, key: Key) -> Any:
        return self.modules[key[0]].__dict__.get(key[1])


def refuse_questions(
    model: nn.Module,
    example: Example,
    grad: bool,
    settled: Mapping[Key, tuple[Any, Any]],
    batches: Iterable[int],
    drew: Names,
) -> None:
    """Raise `UnsupportedError` where forward asks something else of what holds a batch than whether it is that of the call.

    `drew`: the random generators that it draws from; others, which are every thread's, are left alone.
    """
    holders = [(key, change) for key, change in settled.items() if type(change[1]) is int]
    for key, (before, now) in holders:
        for batch in batches:
            if not all(_asks_equality(model, example, grad, key, batch, held, drew) for held in (batch, NO_BATCH)):
                refuse_change(key, before, now)


def _asks_equality(
    model: nn.Module, example: Example, grad: bool, key: Key, batch: int, held: int, drew: Names
) -> bool:
    args, kwargs = tree.unflatten(example.resized(batch), example.spec)
    reach = Reach(model)
    snapshot, watch = reach.snapshot(args, kwargs), Watch()
    snapshot.save_buffers()
    try:
        if held == batch:  # as a call left it that had this batch, with whatever belongs to that
            gives(model, example, batch, grad, drew, snapshot)
            snapshot.again(drew)
        snapshot.modules[key[0]].__dict__[key[1]] = followed(Node(held, "held", watch))
        with torch.set_grad_enabled(grad), recording(model, None, snapshot, watch) as (found, _):
            output = model(*args, **kwargs)
            drew = {*drew, *found.drew}
            given = [output, *(event.args for event in found.events)]
            given += [v for at, m in snapshot.modules.items() for n, v in m.__dict__.items() if (at, n) != key]
            leaks = any(isinstance(leaf, Size | Real) for one in given for leaf in tree.leaves(one))
        found.forget_tensors()
    except (ReadError, Exception):  # it made a number of it, or can't do without the batch that it knew
        return False
    finally:
        snapshot.restore(drew)
    leaks &= held != batch  # else it may stand for the batch, once forward knows that they are the same
    return not leaks and not watch.lost and watch.questions.keys() <= {f"(held == {batch})", f"(held != {batch})"}


def refuse_flags(
    model: nn.Module,
    example: Example,
    grad: bool,
    settled: Mapping[Key, tuple[Any, Any]],
    batches: Iterable[int],
    drew: Names,
) -> None:
    """Raise `UnsupportedError` where what a call gives at one of the batches, or leaves in buffers, follows a flag of the first
    call; `drew` as above."""
    flags = [(key, change) for key, change in settled.items() if type(change[1]) is bool]
    for one, other in ((example, example.turned()), (example.turned(), example)) if flags else ():
        if _differs_by_flags(model, one, other, grad, {key: was for key, (was, _) in flags}, drew):
            refuse_change(flags[0][0], *flags[0][1])
    for key, (before, now) in flags[:1]:
        for batch in batches:
            if _follows_the_first(model, example, grad, batch, drew):
                refuse_change(key, before, now)


def _differs_by_flags(
    model: nn.Module, before: Example, example: Example, grad: bool, flags: Mapping[Key, Any], drew: Names
) -> str | None:
    """What a call gives or leaves in buffers otherwise, after one on the inputs `before`, than with the flags that a first finds:
    a plan goes a first call's way at each call."""
    args, kwargs = tree.unflatten(example.leaves, example.spec)
    snapshot = Reach(model).snapshot(args, kwargs)
    snapshot.save_buffers()

    def leaves(flags: Mapping[Key, Any]) -> Any:
        again = snapshot.anew()
        again.save_buffers()
        try:
            for (path, name), value in flags.items():
                again.modules[path].__dict__[name] = value
            found = gives(model, example, example.batch, grad, (), again)
            return found, {name: own(t.detach()) for name, t in model.named_buffers()}
        finally:
            again.restore(drew)

    try:
        gives(model, before, before.batch, grad, drew, snapshot)
        as_it_is, as_at_first = leaves({}), leaves({key: was for key, was in flags.items() if type(was) is bool})
        raised = type(as_at_first[0]) is str  # it can do so but once
        return None if raised else difference(as_it_is, as_at_first)
    finally:
        snapshot.restore(drew)


def _follows_the_first(model: nn.Module, example: Example, grad: bool, batch: int, drew: Names) -> str | None:
    args, kwargs = tree.unflatten(example.leaves, example.spec)
    snapshot = Reach(model).snapshot(args, kwargs)
    snapshot.save_buffers()
    try:
        alone = gives(model, example, batch, grad, drew, snapshot)
    finally:
        snapshot.restore(drew)
    snapshot = Reach(model).snapshot(args, kwargs)
    snapshot.save_buffers()
    try:
        gives(model, example, example.batch, grad, drew, snapshot)
        snapshot.again(drew)
        return difference(alone, gives(model, example, batch, grad, drew, snapshot))
    finally:
        snapshot.restore(drew)
