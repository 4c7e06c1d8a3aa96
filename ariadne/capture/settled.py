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
from ariadne.capture.begun import refuse_begun
from ariadne.capture.example import Example
from ariadne.capture.followed import Node, ReadError, Real, Size, followed
from ariadne.capture.generators import Names
from ariadne.capture.history import gives
from ariadne.capture.ran import Answer
from ariadne.capture.reach import Reach
from ariadne.capture.recorded import recording
from ariadne.capture.sizes import Watch
from ariadne.compare import difference
from ariadne.errors import UnsupportedError, named
from ariadne.guards import BOOKKEEPING, MISSING, Flag, is_a, refill, simple
from ariadne.plan import own

Change = tuple[str, str, Any, Any]  # of an attribute: before, and now
Key = tuple[str, str]  # a module's path, and the name of an attribute
NO_BATCH = 1_000_003  # of any call
_HOOKS = sorted(name for name in BOOKKEEPING if "forward" in name and "hooks" in name)
_FACTORS = (0.5, 2.0)  # of inputs: of smaller ones a running maximum stays, of larger ones a minimum


def settles(before: Any, now: Any, batch: int) -> bool:
    """Whether a change may be that of a flag, or of what holds the batch of the last call."""
    return (type(before) is bool and type(now) is bool) or (type(before) is int and type(now) is int and now == batch)


def refuse_change(key: Key, before: Any, now: Any, grows: bool = False) -> None:
    """Raise `UnsupportedError` for an attribute that a plan can't follow; `grows`: tensors are made anew with it."""
    path, name = key
    ready = (
        "; where it is the largest size so far, run the model once on the largest inputs, and prepare then"
        if grows
        else ""
    )
    if type(before) is bool and type(now) is bool:
        ready = "; where the first call alone sets it, run the model once, and prepare then"
    raise UnsupportedError(
        f"forward reads and changes the attribute {name!r} of {named(path)} (from {before!r} to {_told(now)}), which "
        f"a plan can't follow; keep such state in a buffer{ready}"
    )


def _told(value: Any) -> str:
    return "a tensor" if is_a(value, torch.Tensor) else repr(value)


class Held:
    """The attributes that forward reads and changes, as later calls leave them; `begun`: those that the first call began.

    `settled`: those that must settle, with what stood there before the first run and after it. `holders`: others that hold the
    batch of the last call, so far: those that held nothing before, and those that held this batch before the first run, too.
    `of_begun`: and those that were not there before.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], settled: dict[Key, tuple[Any, Any]], begun: Mapping[Key, Any]
    ) -> None:
        self.modules, self.settled, self.begun = modules, settled, begun
        self.holders: dict[Key, tuple[Any, Any]] = {}
        self.of_begun: dict[Key, tuple[Any, Any]] = {}

    def look(self, asked: Iterable[Key], changed: Iterable[Change], batch: int) -> None:
        """Find what may be a holder after a first run, among the attributes that it read."""
        moved = {(path, name): (before, now) for path, name, before, now in changed}
        for key in asked:
            if key[0] not in self.modules:
                continue
            now = self._found(key)
            before = moved.get(key, (now, now))[0]
            if type(now) is int and now == batch and before in (None, now):
                self.holders[key] = before, now
        numbers = {key: now for key, now in self.begun.items() if key not in self.holders and key[0] in self.modules}
        self.of_begun = {key: (None, now) for key, now in numbers.items() if type(now) is int and now == batch}

    def left(self, batch: int, same: bool) -> None:
        """A call at this batch ran, perhaps on the same inputs as the first.

        Raises `UnsupportedError` where a flag moved on by it, another batch is held, or it went on with what the first began.
        """
        if same:
            refuse_begun(self.modules, self.begun)
        for key, (before, now) in self.settled.items():
            found = self._found(key)
            if type(found) is not type(now) or found != (now if type(now) is bool else batch):
                refuse_change(key, before, found)
        self.holders = self._holding(self.holders, batch)
        self.of_begun = self._holding(self.of_begun, batch)

    def kept(self, changed: Sequence[Change], assigned: set[Key], caches: bool) -> set[Key]:
        """Those that a plan sets as forward does: all, where nothing else that forward leaves is left to a cache.

        `assigned`: what the plan sets besides; `caches`: forward fills containers that the plan does not. Raises
        `UnsupportedError` where a plan would set what belongs to a batch, and could not set which batch it is; and where it would
        set what follows from an attribute as the first call found it.
        """
        first = {(path, name): now for path, name, _, now in changed}
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

    def _holding(self, keys: dict[Key, tuple[Any, Any]], batch: int) -> dict[Key, tuple[Any, Any]]:
        return {k: v for k, v in keys.items() if type(n := self._found(k)) is int and n == batch}

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
        stood = {key: before for key, (before, _) in flags}
        if any(_goes_on(model, *calls, grad, stood, drew) for calls in _pairs(example)):
            refuse_change(key, before, now)


def _differs_by_flags(
    model: nn.Module, before: Example, example: Example, grad: bool, flags: Mapping[Key, Any], drew: Names
) -> str | None:
    """What a call gives or leaves in buffers otherwise, after one on the inputs `before`, than with the flags that a first finds:
    a plan goes a first call's way at each call."""
    args, kwargs = tree.unflatten(example.leaves, example.spec)
    snapshot = Reach(model).snapshot(args, kwargs)
    snapshot.save_buffers()

    def leaves(flags: Mapping[Key, Any]) -> tuple[Answer, Any]:
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
        raised = type(as_at_first[0].output) is str  # it can do so but once
        return None if raised else _differs(as_at_first, as_it_is)
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
        return alone.differs(gives(model, example, batch, grad, drew, snapshot))
    finally:
        snapshot.restore(drew)


def refuse_beginnings(model: nn.Module, example: Example, grad: bool, stood: Mapping[Key, Any], drew: Names) -> None:
    """Raise `UnsupportedError` where what a call gives or leaves follows whether the first call began these attributes.

    `stood`: what stood there before it, None or `MISSING`.
    """
    for calls in _pairs(example) if stood else ():
        if differs := _goes_on(model, *calls, grad, stood, drew):
            path, name = next(iter(stood))
            raise UnsupportedError(
                f"forward begins the attribute {name!r} of {named(path)} at its first call, and goes on with tensors that it sets "
                f"then, in a later call otherwise than in the first ({differs}), which a plan can't follow; keep such state in a "
                "buffer that __init__ registers"
            )


def _pairs(example: Example) -> list[tuple[Example, Example]]:
    """Two calls each, of which the second may follow what the first leaves: of a running maximum, say, only where it is smaller."""
    one, other = example.lively(1), example.lively(-1)
    return [*((example, example.scaled(factor)) for factor in _FACTORS), (one, other), (other, one)]


def _goes_on(
    model: nn.Module, before: Example, example: Example, grad: bool, stood: Mapping[Key, Any], drew: Names
) -> str | None:
    """What a second call, after one on the inputs `before`, gives or leaves in tensors otherwise than where these attributes stand
    as they `stood` before the first.

    A plan takes the way of a first call each time. The tensors stand as the first call left them. Hooks that the first call
    registered are gone where it is to register them again, as transformers' models do with those that collect what their layers
    give.
    """
    left = []
    for reset in (False, True):
        snapshot = Reach(model).snapshot(*tree.unflatten(example.leaves, example.spec))
        snapshot.save_buffers()
        hooks = [(table, {**table}) for m in snapshot.modules.values() for table in (m.__dict__[n] for n in _HOOKS)]
        try:
            gives(model, before, before.batch, grad, drew, snapshot)
            for table, held in hooks if reset else ():
                refill(table, held)
            for (path, name), was in stood.items() if reset else ():
                own_dict = snapshot.modules[path].__dict__
                own_dict[name] = was
                if was is MISSING:
                    del own_dict[name]
            result = gives(model, example, example.batch, grad, drew, snapshot)
            left.append((result, _tensors(snapshot.modules)))
        finally:
            snapshot.restore(drew)
    (one, ours), (other, theirs) = left
    both = sorted(ours.keys() & theirs.keys())
    return _differs((other, {key: theirs[key] for key in both}), (one, {key: ours[key] for key in both}))


def _differs(first: tuple[Answer, Any], later: tuple[Answer, Any]) -> str | None:
    """What a later run gives, does, or leaves in tensors otherwise than one that is as a first."""
    return first[0].differs(later[0]) or difference(first[1], later[1])


def _tensors(modules: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Copies of the buffers, and of the tensors in plain attributes."""
    return {
        f"{path}.{name}": own(t.detach())
        for path, module in modules.items()
        for name, t in (*module._buffers.items(), *module.__dict__.items())
        if is_a(t, torch.Tensor)
    }
