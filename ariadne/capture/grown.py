"""Grown: containers that forward puts more into at each call, and asks as well: how many stand in them, or which.

A plan follows what is appended; what was asked stays as it was in the capture. So forward runs once more with another in each such
container's place, which holds more, and notes what is asked of it. A log, which is appended to and never asked, stays followed.
"""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType
from typing import Any, cast

from ariadne import tree
from ariadne.compare import difference
from ariadne.errors import UnsupportedError
from ariadne.guards import (
    MISSING,
    Change,
    Containers,
    Place,
    Rule,
    Slots,
    bound_to,
    contents_of,
    held,
    is_a,
    own_dict,
    own_of,
    place,
    refill,
)
from ariadne.plan import tensors_in

_MORE, _FEW, _SMALL = 256, 8, 4096  # entries that are added; of those that hold more than so many numbers, few
_ASKS = {
    "asks its length": ("__len__", "__sizeof__"),
    "asks what stands in it": (
        *("__getitem__", "__iter__", "__reversed__", "__contains__", "__repr__", "__reduce_ex__", "__copy__"),
        *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__add__", "__mul__", "__rmul__"),
        *("index", "count", "copy", "keys", "values", "items", "__or__", "__ror__"),
    ),
    "takes out, or moves, what stands in it": (
        *("__delitem__", "pop", "popleft", "popitem", "remove", "clear", "rotate", "sort", "reverse", "insert"),
        *("__imul__", "move_to_end"),
    ),
}
_OF_LISTS = ("__setitem__",)  # of a dict, that is how it grows


@dataclass(frozen=True, slots=True)
class _Grown:
    """A container that grows by `count` at each call, where that is known; `asked`: what forward asks of the other one."""

    words: str
    thing: Any
    count: int | None
    asked: list[str] = field(default_factory=list)


def refuse_asked(
    run: Callable[[], Any], output: Any, containers: Containers, rules: Mapping[Place, Rule], larger: Collection[Place]
) -> None:
    """Raise `UnsupportedError` for a container that forward both grows and asks; `run` gives what it then gives, else `output`.

    `larger`: the dicts that got more keys at another batch.
    """
    grown = [*_grown(containers, rules, larger)]
    if not grown:
        return
    before = [contents_of(one.thing) for one in grown]
    with ExitStack() as stack:
        for one, was in zip(grown, before, strict=True):
            stack.callback(refill, one.thing, was)
            refill(one.thing, _padded(one.thing))
        padded = [contents_of(one.thing) for one in grown]
        others = stack.enter_context(_in_place(grown))
        now = run()
        ends = [(contents_of(one.thing), contents_of(other)) for one, other in zip(grown, others, strict=True)]
    for one, was, end in zip(grown, padded, ends, strict=True):
        if not one.asked and not any(_grew(one, was, now_it_is) for now_it_is in end):
            one.asked.append("does something else with it when more stands in it")
    told = next((one for one in grown if one.asked), None)
    differs = "" if told else difference(output, now)
    if told is None and not differs:
        return
    words = told.words if told else " or ".join(one.words for one in grown[:3])
    why = told.asked[0] if told else f"gives another result when more stands there ({differs})"
    raise UnsupportedError(
        f"forward puts something more into {words} at each call, and {why}: a later call finds more there than the capture did, "
        "which a plan can't follow. Count in a buffer, return what it keeps, or look at it outside of forward"
    )


def _grown(containers: Containers, rules: Mapping[Place, Rule], larger: Collection[Place]) -> Iterator[_Grown]:
    """The containers that grow by these rules; what is handed in is another one at each call."""
    for at, rule in rules.items():
        if at.table == "input":
            continue
        thing = containers.thing(at)
        if rule.how == "append" and rule.what[0]:
            yield _Grown(at.words(), thing, rule.what[0])
        elif at in larger and is_a(thing, dict):
            yield _Grown(at.words(), thing, None)
        for key in rule.grown:
            if is_a(thing, dict) and type(inner := dict.get(thing, key)) is list:
                yield _Grown(at.words(key), inner, None)


def _grew(one: _Grown, was: Any, now: Any) -> bool:
    """Whether it holds what it held, and at its end as many more as a rule says."""
    if is_a(was, dict):
        return bool(was.keys() <= now.keys())
    added = Change("list", was, now, one.thing.maxlen if is_a(one.thing, deque) else None).added()
    return bool(added is not None and one.count in (None, added))


def _padded(thing: Any) -> Any:
    """What a container holds, with more before it, of the kind that it holds."""
    now = contents_of(thing)
    if not now:
        return now
    last = [*now.items()][-1] if is_a(now, dict) else now[-1]
    size = sum(t.numel() for t in tensors_in(tuple(tree.leaves(last[1] if is_a(now, dict) else last))))
    more = _FEW if size > _SMALL else _MORE
    if is_a(now, dict):
        keys = [_another(last[0], i) for i in range(more)]
        return {**{key: last[1] for key in keys if key is not None and key not in now}, **now}
    if is_a(thing, deque) and thing.maxlen is not None:
        more = min(more, thing.maxlen - len(now))
    return [last] * more + now


def _another(key: Any, i: int) -> Any:
    if type(key) is int:
        return -1 - i
    return f"{key} {i}" if type(key) is str else None


@contextmanager
def _in_place(grown: Sequence[_Grown]) -> Iterator[list[Any]]:
    """Within the block others stand wherever these containers stood, which hold the same and note what is asked of them."""
    others = [_noting(one) for one in grown]
    by_id = {id(one.thing): other for one, other in zip(grown, others, strict=True)}
    holders = [*_holders([one.thing for one in grown])]
    try:
        for table, key, thing in holders:
            table[key] = by_id[id(thing)]
        yield others
    finally:
        for table, key, thing in holders:
            table[key] = thing


def _holders(things: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Where containers stand, as (table, key, container): in dicts, lists, attributes, variables of functions, and defaults.

    The garbage collector knows, whatever leads there: a global of another file, or the default of a function in a function.
    """
    ids = {*map(id, things)}
    # A method in C is bound to one for good: `append`, taken before, goes on to add to that one.
    holders = [one for one in gc.get_referrers(*things) if one is not things and bound_to(one) is MISSING]
    further = [
        one for one in holders if type(one) is tuple or (is_a(one, dict) and dict.__contains__(one, "__module__"))
    ]
    owners = gc.get_referrers(*further) if further else []
    classes = {id(own_dict(cls)): cls for cls in owners if is_a(cls, type)}
    given = {id(table.now()): table for table in map(_Given, owners) if type(table.function) in (FunctionType, partial)}
    for holder in holders:
        for table, key, thing in _entries(holder):
            if id(thing) not in ids:
                continue
            if type(holder) is tuple:
                table = given.get(id(holder))
            elif (
                id(table) in classes
            ):  # what is written past a class into its dict, later reads of the class may not see
                table = Slots(classes[id(table)])
            if table is not None:
                yield table, key, thing


def _entries(holder: Any) -> Iterator[tuple[Any, Any, Any]]:
    """What an object holds, as (table, key, thing); of Ariadne's own objects nothing."""
    if type(holder) is CellType:
        yield Slots(holder), "cell_contents", holder.cell_contents
    elif is_a(holder, dict):
        yield from ((holder, key, thing) for key, thing in [*dict.items(holder)])
    elif bound_to(holder) is MISSING and not type(holder).__module__.startswith("ariadne."):
        yield from ((place(holder, step), step, thing) for step, thing in held(holder))
        # From Python 3.13 on an object holds its attributes itself, and its dict tells the collector of none: a module's too.
        own = own_of(holder) or {}
        yield from ((own, key, thing) for key, thing in [*own.items()])


class _Given:
    """The defaults of a function, or the arguments that a `functools.partial` holds, to be set one by one."""

    __slots__ = ("function",)

    def __init__(self, function: Any) -> None:
        self.function = function

    def now(self) -> Any:
        """All of them."""
        return self.function.args if type(self.function) is partial else self.function.__defaults__

    def __setitem__(self, at: int, value: Any) -> None:
        now, f = self.now(), self.function
        given = (*now[:at], value, *now[at + 1 :])
        if type(f) is partial:
            cast("Any", f).__setstate__((f.func, given, f.keywords, vars(f)))
        else:
            f.__defaults__ = given


def _noting(one: _Grown) -> Any:
    """A container of a class derived from this one's, with the same in it; itself where none can be derived, or none be made."""
    cls: Any = type(one.thing)
    start = len(contents_of(one.thing))

    def noting(name: str, what: str) -> Callable[..., Any]:
        plain = getattr(cls, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            own = name == "__getitem__" and _is_own(args, len(contents_of(self)) - start)
            one.asked.extend([] if own else [what])
            return plain(self, *args, **kwargs)

        return method

    asks = {name: what for what, names in _ASKS.items() for name in names if hasattr(cls, name)}
    if is_a(one.thing, dict):  # forward may ask for what it has put there itself, under the key
        del asks["__getitem__"], asks["__contains__"]
    else:
        asks.update(dict.fromkeys(_OF_LISTS, "takes out, or moves, what stands in it"))
    methods = {name: noting(name, what) for name, what in asks.items()}
    try:
        made: Any = type(cls)
        derived = made(cls.__name__, (cls,), {**methods, "__hash__": cls.__hash__})
        other = derived.__new__(derived)
        if is_a(other, deque):
            deque.__init__(other, (), one.thing.maxlen)
        elif is_a(other, defaultdict):
            defaultdict.__init__(other, one.thing.default_factory)
    except TypeError:
        return one.thing
    refill(other, contents_of(one.thing))
    (own_of(other) or {}).update(own_of(one.thing) or {})
    return other


def _is_own(args: tuple[Any, ...], put: int) -> bool:
    """Whether an index, counted from the end, is of something that this very call has put there."""
    return len(args) == 1 and type(args[0]) is int and -put <= args[0] < 0
