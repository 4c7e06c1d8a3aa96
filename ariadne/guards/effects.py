"""Effects: what a forward puts into containers, and takes out of them; a cache, which is filled once, is told from it.

Dicts, lists, deques, sets and objects count: those that the model holds, those that are handed in, and those outside that hooks
and forward's own functions reach by their variables. Each is compared with itself before and after a run, and again after a
second run in the state that the first one left: what changes there again is no cache.
"""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from ariadne import tree
from ariadne.errors import UnsupportedError, named
from ariadne.guards.around import is_known
from ariadne.guards.attributes import (
    BOOKKEEPING,
    LEAVES,
    MISSING,
    SIMPLE,
    Attribute,
    follow,
    held,
    is_a,
    is_array,
    is_opaque,
    lasts,
    own_of,
    shown,
    slot_of,
    slots_of,
    variables,
)
from ariadne.plan import Store

Put = tuple[tree.Spec, tuple[Any, ...]] | UnsupportedError  # a value as a plan holds it, or why none can

_NEAR = 3  # so many functions away from a hook or a method, what a function reaches is looked at
_DEEP = 8  # so many steps into what an attribute, an input or a variable holds
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@dataclass(frozen=True, slots=True)
class Root:
    """A variable, or an object, outside of the model: by `steps` from `thing` one comes to what it holds now.

    With `names`, the variables of these names themselves, of a cell, of a class or among the globals in `thing`.
    """

    name: str
    thing: Any
    steps: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()

    def now(self) -> Any:
        """What it holds now; `MISSING` where it holds nothing."""
        try:
            return follow(self.thing, self.steps)
        except (LookupError, AttributeError, ValueError, TypeError):
            return MISSING


@dataclass(frozen=True, slots=True)
class Place:
    """Where a container stands: `held` at the steps from the module `path`, `input` at those from (args, kwargs), or `outside`.

    Outside, `path` is what the variable is called.
    """

    table: str
    path: str
    steps: tuple[Any, ...]

    def words(self, *more: Any) -> str:
        """The place, and steps that lead on from it, as a user would say it."""
        if self.table == "input":
            side, *steps = (*self.steps, *more)
            first = f"input {steps[0]!r}" if side else f"input {steps[0]}"
            return first + "".join(map(shown, steps[1:]))
        if self.table == "outside":
            steps = [s for s in (*self.steps, *more) if s != "cell_contents"]
            named_already = bool(self.steps) and self.steps[0] != "cell_contents"
            return self.path + "".join(map(shown, steps[named_already:]))
        if not self.steps:
            return f"the attribute {more[0]!r} of {named(self.path)}"
        steps = [*map(shown, (*self.steps, *more))]
        return f"{str(self.steps[0])!r}{''.join(steps[1:])} of {named(self.path)}"


@dataclass(frozen=True, slots=True)
class Change:
    """A container's contents before and after a run: both dicts (of an object, its attributes), lists or sets.

    `end` is how many a deque holds at most.
    """

    kind: str
    before: Any
    after: Any
    end: int | None = None

    def put(self) -> list[Any]:
        """The keys or positions that hold another thing than before."""
        if self.kind in ("dict", "object"):
            return [k for k, v in self.after.items() if self.before.get(k, MISSING) is not v]
        return [i for i, v in enumerate(self.after) if i >= len(self.before) or self.before[i] is not v]

    def gone(self) -> list[Any]:
        """The keys of a dict, or attributes of an object, that are no more."""
        return [k for k in self.before if k not in self.after] if self.kind in ("dict", "object") else []

    def added(self) -> int | None:
        """How many things were put at a list's end, if nothing else happened to it but that a full deque let go of its first."""
        b, a = self.before, self.after
        for n in range(1, len(a) + 1):
            kept = a[: len(a) - n]
            lost = len(b) - len(kept)
            full = self.end is not None and len(a) == self.end
            if lost >= 0 and (not lost or full) and all(x is y for x, y in zip(kept, b[lost:], strict=True)):
                return n
        return None


@dataclass(frozen=True, slots=True)
class Rule:
    """What forward does to a container at each call: `how` is items, append or contents.

    `what`: of items, the keys that it sets; else how many things it puts there. `gone`: the keys that it removes. `grown`: the
    keys of lists that it makes where there are none, and appends to.
    """

    how: str
    what: tuple[Any, ...] = ()
    gone: tuple[Any, ...] = ()
    grown: tuple[Any, ...] = ()


@dataclass
class Effects:
    """What a first and a second run did: `rules`, by place, of what is done at each call; `known`: all that changed at all."""

    rules: dict[Place, Rule] = field(default_factory=dict)
    known: set[Place] = field(default_factory=set)
    assigned: set[tuple[str, str]] = field(default_factory=set)  # attributes of modules that changed in the second run


class Containers:
    """The containers that a forward can reach, with what they hold at one moment.

    `given`: (args, kwargs); `outside`: the roots of others.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        strays: Mapping[str, nn.Module],
        given: Any,
        outside: Iterable[Root],
    ) -> None:
        self._noted: dict[int, tuple[Place, Any, str, Any]] = {}
        for path, module in (*modules.items(), *strays.items()):
            for name, value in module.__dict__.items():
                if type(value) not in LEAVES and name not in BOOKKEEPING:
                    self._walk(Place("held", path, (name,)), value)
        for side, part in enumerate(given):
            for step, value in held(part):
                self._walk(Place("input", "", (side, step)), value)
        for root in outside:
            if root.names:
                kind = "dict" if is_a(root.thing, dict) else "object"
                place = Place("outside", root.name, ())
                self._noted[id(root.thing)] = place, root, kind, variables(root.thing, root.names)
            else:
                self._walk(Place("outside", root.name, root.steps), root.now())

    def _walk(self, start: Place, thing: Any) -> None:
        todo = [(start, thing)]
        while todo:
            place, value = todo.pop(0)
            if type(value) in LEAVES or value is MISSING or id(value) in self._noted or is_opaque(value):
                continue
            if is_array(value) or len(place.steps) > _DEEP:
                continue
            kind = kind_of(value)
            if kind:
                self._noted[id(value)] = place, value, kind, contents(value, kind)
            for step, inner in held(value):
                todo.append((Place(place.table, place.path, (*place.steps, step)), inner))

    def changes(self) -> dict[Place, Change]:
        """The containers that hold other things now."""
        found = {}
        for place, thing, kind, was in self._noted.values():
            change = Change(kind, was, contents(thing, kind), thing.maxlen if is_a(thing, deque) else None)
            if kind == "set":
                if change.before != change.after:
                    found[place] = change
            elif change.put() or change.gone() or len(change.before) != len(change.after):
                found[place] = change
        return found


def kind_of(value: Any) -> str:
    """dict, list, set or object; nothing for what holds nothing that can be put there."""
    for kind, name in ((dict, "dict"), ((list, deque), "list"), (set, "set"), ((tuple, frozenset, partial), "")):
        if is_a(value, kind):
            return name
    return "object" if own_of(value) is not None or slots_of(value) else ""


def contents(value: Any, kind: str) -> Any:
    """What a container holds now, whatever its class makes of iteration: a dict, a list or a set of its own."""
    if is_a(value, Root):
        return variables(value.thing, value.names)
    if kind == "dict":
        return dict(dict.items(value))
    if kind == "list":
        return [*(list if is_a(value, list) else deque).__iter__(value)]
    if kind == "set":
        return {*set.__iter__(value)}
    slots = {name: thing for name in slots_of(value) if (thing := slot_of(value, name)) is not MISSING}
    return {**slots, **(own_of(value) or {})}


def effects_of(first: Mapping[Place, Change], second: Mapping[Place, Change]) -> Effects:
    """What two runs, one after the other, did to containers; raises `UnsupportedError` for what no plan can follow."""
    found = Effects({}, {*first})
    for place, again in second.items():
        change = first.get(place)
        if change is None:
            parent, key = Place(place.table, place.path, place.steps[:-1]), place.steps[-1:]
            made = first[parent].after.get(*key) if parent in first and first[parent].kind == "dict" else None
            if not key or type(made) is not list or again.kind != "list" or again.added() != len(again.before):
                raise refusal(place, "changes in the second run alone")
            known = found.rules.get(parent, Rule("items"))
            found.rules[parent] = replace(known, grown=(*known.grown, *key))
            continue
        rule = _rule(change, again)
        if rule is None:
            raise refusal(place, "changes in another way at each call")
        counted = _counted(change, again, rule)
        if counted is not None:
            raise refusal(place, f"is {counted} in a first call and something else in a second")
        grown = found.rules[place].grown if place in found.rules else ()
        found.rules[place] = replace(rule, grown=grown)
    for place, change in first.items():
        if place not in second and change.gone() and not change.put():
            raise refusal(place, f"loses {change.gone()[0]!r}, which may be for once or for each call")
    return found


def _rule(first: Change, second: Change) -> Rule | None:
    if first.kind == "set" or first.kind != second.kind:
        return None
    if first.kind in ("dict", "object"):
        put, gone = second.put(), second.gone()
        if not {*put} <= {*first.put()} or not {*gone} <= {*first.gone()}:
            return None
        plain = [k for k in first.put() if k not in put]
        if put and all(
            lasts(first.after[k]) for k in plain
        ):  # no cache is among them: an equal number was put there again
            put = first.put()
        return Rule("items", tuple(put), tuple(gone))
    if first.added() is not None and first.added() == second.added():
        return Rule("append", (first.added(),))
    alike = len(first.before) == len(first.after) == len(second.after) == len(second.before)
    if alike and first.put() == second.put() and len(first.put()) < len(first.after):
        return Rule("items", tuple(first.put()))
    if len(first.after) == len(second.after) and all(_renewed(change) for change in (first, second)):
        return Rule("contents", (len(first.after),))
    return None


def _counted(first: Change, second: Change, rule: Rule) -> str | None:
    """Something plain that two calls, one after the other, put there otherwise: it follows what was there, as a count does."""
    if rule.how == "items":
        pairs = [(first.after[key], second.after[key]) for key in rule.what]
    else:
        pairs = (
            list(zip(first.after[-rule.what[0] :], second.after[-rule.what[0] :], strict=True)) if rule.what[0] else []
        )
    for one, other in pairs:
        (a, spec), (b, spec_again) = tree.flatten(one), tree.flatten(other)
        if spec != spec_again:
            return f"{type(one).__name__} {spec}"
        for x, y in zip(a, b, strict=True):
            if is_a(x, SIMPLE) and not tree.identical(x, y):
                return repr(x)
    return None


def _renewed(change: Change) -> bool:
    """Whether nothing that a list held is in it still."""
    old = {*map(id, change.before)}
    return not any(id(v) in old for v in change.after)


def follows(change: Change, rule: Rule) -> bool:
    """Whether what a further run did to a container is what a rule says."""
    if rule.how == "append":
        return bool(change.added() == rule.what[0])
    if rule.how == "contents":
        return bool(len(change.after) == rule.what[0]) and _renewed(change)
    if not all(type(change.after.get(key)) is list for key in rule.grown):
        return False
    return {*rule.what, *rule.grown} <= {*change.put()} and {*rule.gone} <= {*change.gone()}


def stores_of(
    rules: Mapping[Place, Rule], changes: Mapping[Place, Change], put: Mapping[tuple[Place, Any], Put]
) -> Iterator[Store]:
    """What a run put into containers as the stores of its plan; raises `UnsupportedError` for what no plan can put there."""
    for place, rule in rules.items():
        change = changes.get(place)
        if change is None or not follows(change, rule):
            raise refusal(place, "changes in another way in another run")
        path = "" if place.table == "input" else place.path

        def found(key: Any, place: Place = place) -> tuple[tree.Spec, tuple[Any, ...]]:
            value = put[place, key]
            if isinstance(value, UnsupportedError):
                raise value
            return value

        if rule.how == "items":
            earlier: tuple[Any, ...] = ()
            for key in change.put():
                if key in rule.what:
                    spec, atoms = found(key)
                    step = Attribute(key) if change.kind == "object" else key
                    yield Store(path, place.table, place.words(step), spec, atoms, (*place.steps, step), "set", earlier)
                    earlier += atoms
            for key in rule.grown:
                spec, atoms = found(key)
                at, before = 0, ()
                for one in spec.children:
                    inner = atoms[at : at + one.size]
                    inside = tree.Spec("list", list, (), (one,))
                    yield Store(path, place.table, place.words(key), inside, inner, (*place.steps, key), "grow", before)
                    at, before = at + one.size, (*before, *inner)
            for key in rule.gone:
                if change.kind == "object":
                    raise refusal(place, f"loses {key!r}")
                empty = tree.Spec(tree.LEAF)
                yield Store(path, place.table, place.words(key), empty, (None,), (*place.steps, key), "remove", earlier)
            continue
        values = [found(i) for i in range(len(change.after) - rule.what[0], len(change.after))]
        if rule.how == "contents":
            spec = tree.Spec("list", list, (), tuple(s for s, _ in values))
            atoms = tuple(a for _, found_atoms in values for a in found_atoms)
            yield Store(path, place.table, place.words(), spec, atoms, place.steps, "contents")
            continue
        earlier = ()
        for one, atoms in values:
            spec = tree.Spec("list", list, (), (one,))
            yield Store(path, place.table, place.words(), spec, atoms, place.steps, "append", earlier)
            earlier += atoms


def stores_beside_caches(assigned: Iterable[tuple[str, str]], put: Mapping[tuple[Place, Any], Put]) -> Iterator[Store]:
    """What is assigned at each call to attributes of modules that keep a cache in others."""
    for path, name in assigned:
        value = put.get((Place("held", path, ()), name))
        if isinstance(value, UnsupportedError):
            raise value
        if value is not None:
            yield Store(path, "__dict__", name, *value)


def attributes_of(modules: Mapping[str, nn.Module]) -> dict[tuple[str, str], Any]:
    """What stands in the attributes of modules now."""
    return {
        (path, name): value
        for path, module in modules.items()
        for name, value in module.__dict__.items()
        if name not in BOOKKEEPING
    }


def refusal(place: Place, how: str) -> UnsupportedError:
    """The error for a container that forward changes so that no plan can follow."""
    return UnsupportedError(
        f"forward changes what is in {place.words()}, which {how}; a plan can follow what is assigned to the same keys, or "
        "appended to a list, at every call. Return it instead, or keep it in a buffer"
    )


def refused(place: Place, step: Any, why: str) -> UnsupportedError:
    """The error for something that forward puts into a container, and that a plan can't put there."""
    return UnsupportedError(f"forward puts something into {place.words(step)} {why}")


# --- outside of the model -------------------------------------------------------------------------------------------


def outside_of(modules: Mapping[str, nn.Module]) -> list[Root]:
    """The variables and objects outside of a model that its hooks and its classes' own functions can reach."""
    search = _Search()
    for module in modules.values():
        for table in _HOOKS:
            for hook in module.__dict__[table].values():
                search.enter(hook, 0)
        if "forward" in module.__dict__:
            search.enter(module.__dict__["forward"], 0)
        search.of_class(type(module))
    return list(search.found.values())


class _Search:
    def __init__(self) -> None:
        self.found: dict[tuple[int, tuple[Any, ...], bool], Root] = {}
        self.names: set[str] = set()
        self.seen: set[tuple[int, ...]] = set()
        self.known: dict[int, tuple[bool, Any]] = {}

    def of_class(self, cls: type) -> None:
        if (id(cls),) in self.seen:
            return
        self.seen.add((id(cls),))
        for base in cls.__mro__[:-1]:
            if base.__module__.partition(".")[0] == "torch" or base is nn.Module:
                continue
            for name, thing in list(vars(base).items()):
                if is_a(thing, (staticmethod, classmethod)):
                    thing = thing.__func__
                if is_a(thing, property):
                    thing = thing.fget
                if is_a(thing, (FunctionType, partial)):
                    self.enter(thing, 0)
                elif not name.startswith("__"):
                    self.consider(thing, Root(f"{base.__name__}.{name}", thing), 0)
            code = [f.__code__ for f in vars(base).values() if isinstance(f, FunctionType)]
            names = {n for c in code if _says_class(c) for n in _names(c)}
            names -= {n for n in names if hasattr(vars(base).get(n), "__get__")}
            if names:
                self.keep(Root(base.__name__, base, (), tuple(sorted(names))))

    def enter(self, thing: Any, far: int) -> None:
        """Look at what a function, or something else that can be called, reaches."""
        if far > _NEAR:
            return
        if is_a(thing, partial):
            self.enter(thing.func, far)
            name = f"an argument of {_called(thing.func)}"
            for value in (*thing.args, *thing.keywords.values()):
                self.consider(value, Root(name, value), far)
        elif is_a(thing, MethodType):
            self.consider(
                thing.__self__, Root(f"the {type(thing.__self__).__name__} of {_called(thing)}", thing.__self__), far
            )
            self.enter(thing.__func__, far)
        elif is_a(thing, FunctionType):
            self.function(thing, far)
        elif callable(thing) and not is_opaque(thing):
            self.consider(thing, Root(f"the {type(thing).__name__} that is called", thing), far)
            self.enter(type(thing).__call__, far)

    def function(self, f: FunctionType, far: int) -> None:
        table = f.__globals__
        if id(table) not in self.known:
            self.known[id(table)] = is_known(table), table
        at = (id(f.__code__), id(table), *map(id, f.__closure__ or ()))
        if self.known[id(table)][0] or at in self.seen:
            return
        self.seen.add(at)
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            root = Root(f"the variable {name!r} of {_called(f)}", cell, (Attribute("cell_contents"),))
            self.consider(root.now(), root, far)
            if name in _assigned(f.__code__)[0]:
                self.keep(Root(root.name, cell, (), ("cell_contents",)))
        for value in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            self.consider(value, Root(f"a default argument of {_called(f)}", value), far)
        counted = sorted(_assigned(f.__code__)[1])
        if counted:
            self.keep(Root(f"the globals of {f.__module__}", table, (), tuple(counted)))
        names = {*_names(f.__code__)}
        for name in sorted(names & table.keys()):
            self.consider(table[name], Root(f"the global {name!r}", table, (name,)), far, names)

    def consider(self, value: Any, root: Root, far: int, names: Iterable[str] = ()) -> None:
        """Keep a root, if something can be put into what it holds; go on from there if it can be called."""
        if is_a(value, (FunctionType, MethodType, partial)):
            self.enter(value, far + 1)
        elif is_a(value, ModuleType) and not is_known(vars(value)):
            for name in sorted({*names} & vars(value).keys()):
                inner = vars(value)[name]
                if not isinstance(inner, ModuleType):
                    self.consider(inner, Root(f"{value.__name__}.{name}", vars(value), (name,)), far + 1)
        elif is_a(value, type) and not is_a(value, ModuleType) and not issubclass(value, nn.Module):
            if value.__module__.partition(".")[0] != "torch":
                for name in sorted({*names} & vars(value).keys()):
                    inner = vars(value)[name]
                    if not is_opaque(inner):
                        self.consider(inner, Root(f"{value.__name__}.{name}", inner), far + 1)
        elif type(value) not in LEAVES and value is not MISSING and not is_opaque(value) and not is_array(value):
            self.keep(root)

    def keep(self, root: Root) -> None:
        if not root.names and not kind_of(root.now()):
            return
        key = id(root.thing), root.steps, bool(root.names)
        if key in self.found:
            names = tuple(dict.fromkeys((*self.found[key].names, *root.names)))
            self.found[key] = replace(self.found[key], names=names)
            return
        name, i = root.name, 1
        while name in self.names:
            i += 1
            name = f"{root.name} ({i})"
        self.names.add(name)
        self.found[key] = replace(root, name=name)


def _names(code: CodeType) -> Iterator[str]:
    """The names in a function's code, and in that of functions inside."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _says_class(code: CodeType) -> bool:
    """Whether a function may assign an attribute of its class."""
    stores = any(s.opname == "STORE_ATTR" for s in dis.get_instructions(code))
    return stores and (
        not {"__class__", "type", "cls"}.isdisjoint({*code.co_names, *code.co_varnames, *code.co_freevars})
    )


@lru_cache(maxsize=4096)
def _assigned(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The variables of functions around, and the globals, that a function assigns; with those of functions inside."""
    inner = [_assigned(c) for c in code.co_consts if isinstance(c, CodeType)]
    steps = [(s.opname, s.argval) for s in dis.get_instructions(code)]
    around = {name for kind, name in steps if kind == "STORE_DEREF"}.union(*(a for a, _ in inner))
    counted = {name for kind, name in steps if kind == "STORE_GLOBAL"}.union(*(b for _, b in inner))
    return frozenset(around), frozenset(counted)


def _called(f: Any) -> str:
    return str(getattr(f, "__qualname__", None) or getattr(f, "__name__", type(f).__name__)).replace("<locals>.", "")
