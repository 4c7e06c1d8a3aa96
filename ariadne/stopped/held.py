"""What containers and objects hold at one moment, told again later and put back: lists, attributes, generators, text in memory."""

from __future__ import annotations

import gc
import io
import os
import random
import sys
import threading
import time
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextvars import ContextVar
from functools import partial
from itertools import chain, count, repeat
from operator import is_, is_not, length_hint
from queue import Queue, SimpleQueue
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.guards import MISSING as NOTHING
from ariadne.guards import (
    SHOWING,
    bound_to,
    contents_of,
    is_a,
    is_iterator,
    is_ours,
    is_torchs_own,
    own_of,
    referent,
    refill,
    simple,
    slot_of,
    slots_of,
)
from ariadne.stopped.absent import Ghost
from ariadne.stopped.handed import LOCKS
from ariadne.stopped.laid import CALLS, PLAIN, REGISTRIES

_FILLED = (list, deque, dict, set)
_IN_C = (types.BuiltinFunctionType, types.MethodWrapperType)
_WHICH = (type, types.ModuleType)  # others look into these
_EMPTY = types.CellType()
_TORCHS = (torch.Tensor, torch.Generator, nn.Module)
_ASIDE = REGISTRIES | CALLS | {"_parameters"}  # of a module that stands in no registry
_ENVIRONMENT = type(os.environ)
_LOCK = type(threading.Lock())
_MOMENT = 0.1  # seconds for which another thread may hold a lock
_THREADS = (threading.Thread, Executor)  # what they hold changes by itself, and forward reads none of it
_LOGGING = ("logging", "logging.handlers")  # each leads to all others, and forward asks for its own attributes alone
_SHARED = (threading.Event, threading.Semaphore, threading.Condition, threading.Barrier, Queue)  # threads meet there


class Held:
    """Containers, objects and the like, as they are at one moment; of tensors without data, what crossed for them."""

    def __init__(self, modules: frozenset[int] | None = None) -> None:
        """`modules`: the ids of those that others look into; without, all are."""
        self.modules = modules
        self.things: list[tuple[str, Any, Any]] = []  # where, what can be put back, what was in it
        self.opaque: list[tuple[str, Any, Any]] = []  # where, a thing that can only be told again, what it was
        self.crossed: list[tuple[str, torch.Tensor, int]] = []
        self.seen: set[int] = set()
        self.runs: set[Any] = set()  # the code of the functions among these things, the classes, and those of others
        self.locals: list[threading.local] = []
        self.by_thread: set[int] = set()  # ids of dicts that hold what this thread has of those
        self.shared: set[int] = set()  # ids of what other threads may change at any time
        self.locks: list[tuple[str, Any]] = []  # where, a lock that a thread may take again
        self.context: list[
            tuple[str, ContextVar[Any], Any]
        ] = []  # where, a variable that each context has, what it was here
        self.flags: list[tuple[str, Any, bool]] = []  # where, another lock, whether it was held

    def note(self, where: str, value: Any) -> None:
        """Note what a value holds, and what that holds."""
        todo = [value]
        while todo:
            one = todo.pop()
            if type(one) in PLAIN or id(one) in self.seen:
                continue
            if is_a(one, _WHICH):
                if isinstance(one, type):
                    self.runs.add(one)
                continue
            if is_a(one, nn.Module) and (self.modules is None or id(one) in self.modules):
                continue
            self.seen.add(id(one))
            found = [part for part in self._looked_into(where, one) if type(part) not in PLAIN]
            todo += reversed(found)

    def _looked_into(self, where: str, value: Any) -> Iterable[Any]:
        """Note one thing; gives what it holds."""
        if type(value) is dict or type(value) is list:  # of most things, what is asked below comes out so
            was = value.copy()
            self.things.append((where, value, was))
            return [*was, *was.values()] if type(was) is dict else was
        self.runs.add(value.__code__ if type(value) is types.FunctionType else type(value))
        if is_a(value, torch.Tensor):
            return self._of_tensor(where, value)
        if is_ours(type(value)) or is_a(value, _THREADS) or _is_for_all(value):
            return ()
        if (owners := _led_to(value)) is not None:
            return owners
        if is_a(value, types.FunctionType):
            return self._of_function(where, value)
        if is_a(value, LOCKS):
            self.locks.append((where, value))
            return ()
        if type(value) is ContextVar:
            self.context.append((where, value, now := value.get(NOTHING)))
            return (now,)
        if is_a(value, _LOCK):
            self.flags.append((where, value, value.locked()))
            return ()
        if is_a(value, (SimpleQueue, _ENVIRONMENT)):
            self.shared.add(id(value))
        if (state := _state(value)) is not None:
            self.things.append((where, value, state))
            return () if is_a(value, _ENVIRONMENT) else self._attributes(where, value)
        parts = [*self._contents(where, value), *self._attributes(where, value)]
        if is_a(value, _SHARED):
            self.shared |= {id(own_of(value)), *map(id, parts)}
        return parts

    def _of_tensor(self, where: str, t: torch.Tensor) -> Iterable[Any]:
        if isinstance(t, Ghost):
            if t.here is not None:
                self.crossed.append((where, t.here, 0 if t.here.is_inference() else t.here._version))
            return ()
        self.things.append((where, own := vars(t), dict(own)))
        return own.values()

    def _of_function(self, where: str, f: Any) -> Iterable[Any]:
        """Note what is set on a function; gives that and what its own variables hold, but for torch's own."""
        if is_torchs_own(str(f.__module__)):
            return ()
        if own := vars(f):
            self.things.append((where, own, dict(own)))
        inside = (cell.cell_contents for cell in f.__closure__ or () if cell != _EMPTY)
        found = (*inside, *own.values(), *(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values())
        return [one for one in found if not is_torchs_own(type(one).__module__) or is_a(one, _TORCHS)]

    def _contents(self, where: str, value: Any) -> Iterable[Any]:
        """What lies in a container; of what is none and has no attributes, note what it tells of itself."""
        if is_a(value, _FILLED):
            was = contents_of(value)
            self.things.append((where, value, was))
            return [*was, *was.values()] if is_a(value, dict) else was
        if is_a(value, (tuple, frozenset)):
            return (tuple if is_a(value, tuple) else frozenset).__iter__(value)
        if is_a(value, partial):
            return value.func, value.args, value.keywords
        in_c = own_of(value) is None or any("tobytes" in vars(kind) for kind in type(value).__mro__)
        if in_c and (told := _opaque(value)) is not None:
            self.opaque.append((where, value, told))
        return ()

    def _attributes(self, where: str, value: Any) -> Iterable[Any]:
        found = [thing for name in slots_of(value) if (thing := slot_of(value, name)) is not NOTHING]
        own = value.__dict__ if is_a(value, threading.local) else own_of(value)
        if own is not None and own is not value:
            if is_a(value, threading.local):
                self.locals.append(value)
                self.by_thread.add(id(own))
            self.things.append((where, own, dict(own)))
            found += (
                [part for name, part in own.items() if name not in _ASIDE] if is_a(value, nn.Module) else own.values()
            )
        return () if type(value).__module__ in _LOGGING else found

    def moved(self) -> Iterator[tuple[str, Any, Any]]:
        """Those that hold something else now, and what they held."""
        return (one for one in self.things if not same(one[1], one[2]))

    def changed(self) -> str | None:
        """Where one is otherwise now; None where none is."""
        opaque = (where for where, thing, was in self.opaque if _opaque(thing) != was)
        crossed = (where for where, t, version in self.crossed if not t.is_inference() and t._version != version)
        context = (where for where, variable, was in self.context if variable.get(NOTHING) is not was)
        return next(chain(opaque, (where for where, _, _ in self.moved()), crossed, context), None)

    def otherwise(self) -> Iterator[tuple[str, Any]]:
        """Where a thing is otherwise now, and which."""
        yield from ((where, thing) for where, thing, _ in self.moved())
        yield from ((where, thing) for where, thing, was in self.opaque if _opaque(thing) != was)

    def put_back(self, alone: bool) -> str | None:
        """Have all hold what it held; gives what could not be put back, in words, and None where all was.

        Unless this thread is `alone`, what others wait at is left as it is.
        """
        lost = []
        queues = (one for one in self.things if alone and is_a(one[1], SimpleQueue))
        grown = (one for one in queues if one[1].qsize() > len(one[2]))
        for one in chain(self.moved(), grown):
            try:
                if not alone and id(one[1]) in self.shared:
                    lost.append(one)
                else:
                    put(*one[1:])
            except (
                OSError,
                ValueError,
                BufferError,
            ):  # a file that was closed meanwhile, or bytes that a view looks at
                lost.append(one)
        for where, lock, was in self.flags:
            if alone and lock.locked() is not was:
                lock.acquire(blocking=False) if was else lock.release()
            elif not _stands(lock, was):
                lost.append((where, lock, was))
        lost += [one for one in self.opaque if (now := _opaque(one[1])) != one[2] and now == _opaque(one[1])]
        return next((_words(where, thing) for where, thing, _ in lost), None)


def _stands(lock: Any, was: bool) -> bool:
    """Whether a lock is held as it was, at once or soon: another thread may hold it for a moment."""
    until = time.monotonic() + _MOMENT
    while lock.locked() is not was:
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _words(where: str, thing: Any) -> str:
    place = where if " " in where else repr(where.lstrip("."))
    return f"what {place} holds" if type(thing) is dict else f"the {type(thing).__name__} in {place}"


def _led_to(value: Any) -> Iterable[Any] | None:
    """What a reference or a bound method leads to, or a view shows; None for what is neither."""
    if is_a(value, weakref.ref):
        return (weakref.ref.__call__(value),)
    if is_a(value, weakref.ProxyTypes):
        return (referent(value),)
    if is_a(value, types.MethodType):
        return (value.__self__,)
    if is_a(value, _IN_C):
        return (bound_to(value),)
    return gc.get_referents(value) if is_a(value, SHOWING) else None


def _is_for_all(value: Any) -> bool:
    """Whether a value is one of the generators of the process, which are every thread's, and are looked after by themselves; or
    stands for nothing.
    """
    numbers = sys.modules.get("numpy.random.mtrand")
    mine = NOTHING, getattr(random, "_inst", NOTHING), getattr(numbers, "_rand", NOTHING)
    return any(value is one for one in mine)


# --- things that tell where they stand, and can be put there ----------------------------------------------------------


def _state(value: Any) -> Any:
    """How a thing stands that has methods to tell and to take that: a random generator, text or bytes in memory, a file that is
    read; None for all else.
    """
    if is_a(value, random.Random):
        return None if is_a(value, random.SystemRandom) else random.Random.getstate(value)
    if is_a(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if is_a(value, SimpleQueue):
        return _waiting(value)
    if is_a(value, _ENVIRONMENT):
        return dict(value)
    if is_a(value, (io.StringIO, io.BytesIO)):
        kind: Any = io.StringIO if is_a(value, io.StringIO) else io.BytesIO
        return None if value.closed else kind.__getstate__(value)[:-1]
    if is_a(value, io.IOBase):
        return _place(value)
    if (bits := _bits(value)) is not None:
        return repr(bits.state), bits.state
    return None


def _waiting(queue: Any) -> tuple[Any, ...]:
    """What is in a queue of C's, as the garbage collector knows it: it shows that to nobody else."""
    found, left = gc.get_referents(queue), queue.qsize()
    if sys.version_info < (3, 13):
        found = next(one for one in found if type(one) is list)[-left:]
    return tuple(found[:left])


def _place(file: Any) -> int | None:
    """Where a file is read; None for one that is written, can't be moved, or does not tell."""
    try:
        return None if not file.seekable() or file.writable() else file.tell()
    except Exception:  # one that is closed, or in the middle of a loop over its lines; or whatever a class raises
        return None


def _bits(value: Any) -> Any:
    """What a generator of numpy's draws its numbers from; None for what is none."""
    numbers = sys.modules.get("numpy.random")
    return value._bit_generator if numbers and is_a(value, (numbers.RandomState, numbers.Generator)) else None


def put(thing: Any, was: Any) -> None:
    """Have a thing hold what it held, as `copied` or `Held` tell it."""
    if is_a(thing, random.Random):
        thing.setstate(was)
    elif is_a(thing, torch.Generator):
        thing.set_state(torch.frombuffer(bytearray(was), dtype=torch.uint8))
    elif is_a(thing, SimpleQueue):
        while not thing.empty():
            thing.get_nowait()
        for one in was:
            thing.put(one)
    elif is_a(thing, _ENVIRONMENT):
        for name in thing.keys() - was.keys():
            del thing[name]
        thing.update(was)
    elif is_a(thing, (io.StringIO, io.BytesIO)):
        thing.__setstate__((*was, None))
    elif is_a(thing, io.IOBase):
        thing.seek(was)
    elif (bits := _bits(thing)) is not None:
        bits.state = was[1]
    else:
        refill(thing, was)


def same(thing: Any, was: Any) -> bool:
    """Whether a thing holds what it held, in the same order."""
    if (
        type(thing) is dict
        and len(thing) == len(was)
        and all(map(is_, chain(thing, thing.values()), chain(was, was.values())))
    ):
        return True  # as most do
    if is_a(thing, dict):
        return same_items(thing, was) and _in_order(contents_of(thing), was)
    if is_a(thing, SimpleQueue):  # what is put into one is for another thread, and no state of forward's
        return len(now := _waiting(thing)) >= len(was) and all(map(is_, now, was))
    if not is_a(thing, _FILLED):
        now = _state(thing)
        return bool(now[0] == was[0] if now and _bits(thing) else now == was)
    now = contents_of(thing)
    if type(now) is set:
        return len(now) == len(was) and all(any(a is b for b in now) for a in was) if len(was) < 65 else now == was
    return len(now) == len(was) and all(map(is_, now, was))


def copied(thing: Any) -> Any:
    """What a thing holds now."""
    return contents_of(thing) if is_a(thing, _FILLED) else _state(thing)


def names_stand(get: Callable[[Any, Any], Any], was: dict[Any, Any]) -> bool:
    """Whether what a dict's `get` finds under these names is what stood there."""
    return not any(map(is_not, map(get, was, repeat(NOTHING)), was.values()))


def same_items(thing: dict[Any, Any], was: dict[Any, Any]) -> bool:
    """Whether a dict holds what it held, in whatever order."""
    if type(thing) is dict:
        return len(thing) == len(was) and names_stand(thing.get, was)
    return dict.__len__(thing) == len(was) and names_stand(partial(dict.get, thing), was)  # its class may have another


def _in_order(now: dict[Any, Any], was: dict[Any, Any]) -> bool:
    """Whether the keys of two dicts that hold the same come in the same order."""
    return all(map(is_, now, was)) or all(
        a is b or (type(a) is type(b) and simple(a) and a == b) for a, b in zip(now, was, strict=True)
    )


# --- things that can only be told again -------------------------------------------------------------------------------


def _opaque(value: Any) -> Any:
    """What a numpy array, an iterator, a hash or an object of C's holds; None where there is no telling."""
    if is_iterator(value):
        return at(value)
    if is_a(value, (io.IOBase, *_IN_C)):
        return None
    try:
        if hasattr(type(value), "tobytes"):
            return value.tobytes()
        if hasattr(type(value), "hexdigest"):
            return value.hexdigest()
        return repr(value.__reduce_ex__(2)[1:])
    except Exception:  # whatever a class raises
        return None


def at(one: Any) -> Any:
    """Where a generator stands, and what its variables are, by id; where another iterator stands, as far as it tells."""
    if is_a(one, types.GeneratorType):
        frame = one.gi_frame
        return frame and (frame.f_lasti, [(k, id(v)) for k, v in frame.f_locals.items()])
    if is_a(one, (count, repeat)):
        return repr(one)
    left = length_hint(one, -1)
    try:
        with warnings.catch_warnings():  # Python 3.12 and 3.13 warn of that
            warnings.simplefilter("ignore", DeprecationWarning)
            parts = [] if left >= 0 else one.__reduce__()[1:]
    except TypeError:  # those of `itertools` tell nothing from Python 3.14 on
        return left
    return left, [at(v) if is_iterator(v) else repr(v) if simple(v) else id(v) for v in tree.leaves(parts)]
