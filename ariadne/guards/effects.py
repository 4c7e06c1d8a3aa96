"""Effects: what a forward puts into containers, and takes out of them; a cache, which is filled once, is told from it.

Dicts, lists, deques, sets and objects count: those that the model holds, those that are handed in, and those outside that hooks
and forward's own functions reach by their variables. Each is compared with itself before and after a run, and again after a
second run in the state that the first one left: what changes there again is no cache.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

from torch import nn

from ariadne import tree
from ariadne.errors import UnsupportedError, named
from ariadne.guards.attributes import (
    BOOKKEEPING,
    LEAVES,
    MISSING,
    SIMPLE,
    Attribute,
    Slots,
    held,
    is_a,
    is_bare,
    is_opaque,
    kind_of,
    kinds_of,
    lasts,
    own_of,
    shown,
    slot_of,
    slots_of,
    variables,
)
from ariadne.guards.contents import contents_of
from ariadne.guards.roots import Root
from ariadne.plan import Store

Put = tuple[tree.Spec, tuple[Any, ...]] | UnsupportedError  # a value as a plan holds it, or why none can

_ORDER = "comes to hold its keys in another order, as by move_to_end, or where a key is taken out and put again"
PARTS = "_modules"  # of a module
_DEEP = 8  # so many steps into what an attribute, an input or a variable holds


@dataclass(frozen=True, slots=True)
class Place:
    """Where a container stands: `held` at the steps from the module `path`, `input` at those from (args, kwargs), or `outside`.

    Outside, `path` is what the variable is called. `beside`: the attributes of a list, a dict or a set of a class of its own, and
    not what it holds. The parts of a module stand at its `_modules`.
    """

    table: str
    path: str
    steps: tuple[Any, ...]
    beside: bool = False

    def below(self, step: Any) -> Place:
        """What stands a step further."""
        return Place(self.table, self.path, (*self.steps, step))

    def above(self, known: Collection[Place]) -> Place:
        """Where this stands in, of the places that are known."""
        up = Place(self.table, self.path, self.steps[:-1])
        other = replace(up, beside=True)
        return other if other in known and isinstance(self.steps[-1], Attribute) else up

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
        if self.steps == (PARTS,):
            return f"the part {more[0]!r} of {named(self.path)}" if more else f"the parts of {named(self.path)}"
        if len(self.steps) == 1 and self.steps[0] in BOOKKEEPING:
            return f"torch's own {self.steps[0]!r} of {named(self.path)}"
        if not self.steps:
            return f"the attribute {more[0]!r} of {named(self.path)}"
        steps = [*map(shown, (*self.steps, *more))]
        return f"{str(self.steps[0])!r}{''.join(steps[1:])} of {named(self.path)}"


@dataclass(frozen=True, slots=True)
class Change:
    """A container's contents before and after a run: both dicts (of an object, its attributes), lists or sets.

    `end` is how many a deque holds at most, `thing` the container itself, or the root of variables.
    """

    kind: str
    before: Any
    after: Any
    end: int | None = None
    thing: Any = None

    def put(self) -> list[Any]:
        """The keys or positions that hold another thing than before."""
        if self.kind in ("dict", "object"):
            return [k for k, v in self.after.items() if self.before.get(k, MISSING) is not v]
        return [i for i, v in enumerate(self.after) if i >= len(self.before) or self.before[i] is not v]

    def gone(self) -> list[Any]:
        """The keys of a dict, or attributes of an object, that are no more."""
        return [k for k in self.before if k not in self.after] if self.kind in ("dict", "object") else []

    def lost(self) -> list[Any]:
        """What it holds no longer, where nothing else came in its place: keys, members, or what else stood in a list.

        Of a registry, as of a module's hooks, also where another name came.
        """
        if self.kind == "set":
            gone = self.before - self.after
            return [*gone] if is_a(self.thing, Names) or not self.after - self.before else []
        if self.kind == "list":
            kept = {*map(id, self.after)}
            return [v for v in self.before if id(v) not in kept] if len(self.after) < len(self.before) else []
        return [] if self.put() else self.gone()

    def stands(self, key: Any) -> Any:
        """What the container holds there now; `MISSING` where it holds nothing."""
        now = contents(self.thing, self.kind)
        return now.get(key, MISSING) if is_a(now, dict) else next(iter(now[key : key + 1]), MISSING)

    def place(self, key: Any, value: Any) -> None:
        """Have the container hold a value there."""
        thing = self.thing.thing if is_a(self.thing, Root) else self.thing
        if is_a(thing, (dict, list, deque)):  # whatever a class of its own makes of it
            next(cls for cls in (OrderedDict, dict, list, deque) if is_a(thing, cls)).__setitem__(thing, key, value)
        else:
            Slots(thing)[key] = value

    def reordered(self) -> bool:
        """Whether the keys of a dict stand otherwise than where new ones come to its end, and all others stay where they are."""
        if self.kind != "dict" or is_a(self.thing, Root):
            return False
        at = {key: i for i, key in enumerate(self.before)}
        places = [at.get(key, len(at)) for key in self.after]
        return places != sorted(places)

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
    primed: list[tuple[Place, Any]] = field(default_factory=list)  # where stood what is put there, before the first run
    assigned: set[tuple[str, str]] = field(default_factory=set)  # attributes of modules that changed in the second run
    settled: set[tuple[str, str]] = field(
        default_factory=set
    )  # those that forward reads and changes, and no result follows
    kept: set[tuple[str, str]] = field(default_factory=set)  # those of them that a plan sets, too
    once: frozenset[tuple[str, str]] = frozenset()  # those that the first run alone assigned: no plan does
    # How the first run read data more often than the second did: see `written.read_by`.
    read_once: frozenset[str] = frozenset()
    asked_once: frozenset[str] = frozenset()  # what the first run alone asked the machine
    # The rules and the attributes that the second run showed: what came to them since is kept for the batch of the last call.
    again: tuple[dict[Place, Rule], set[tuple[str, str]]] = field(default_factory=lambda: ({}, set()))
    holders: set[tuple[str, str]] = field(default_factory=set)  # the attributes that hold that batch

    @property
    def kept_for_size(self) -> bool:
        """Whether forward puts something anew in a call of another batch alone."""
        return bool(self.holders) or self.again != (self.rules, self.assigned)

    def puts_again(self, place: Place, key: Any) -> bool:
        """Whether each call puts something there, one at the batch of the last, too."""
        rules, assigned = self.again
        rule = rules.get(place)
        items = rule is not None and (rule.how != "items" or key in (*rule.what, *rule.grown))
        return items or (place.table == "held" and not place.steps and (place.path, key) in assigned)

    def renew(self, first: Mapping[Place, Change], renewed: Iterable[tuple[Place, Any]]) -> None:
        """Take it that something is put at these keys at each call: in a container that the first run made, the container is."""
        for place, key in renewed:
            at, k = place, key
            rule = self.rules.get(at, Rule("items"))
            if rule.how != "items" or k in (*rule.what, *rule.grown, *rule.gone):
                continue
            while at.steps and (at not in first or k not in first[at].put()):
                at, k = at.above(first), at.steps[-1]
            if at not in first or k not in first[at].put():
                self.primed.append((place, key))
                continue
            rule = self.rules.get(at, Rule("items"))
            if k not in rule.what:
                self.rules[at] = replace(rule, what=(*rule.what, k))


_NO_NAMES = frozenset[Any]()


class Names:
    """The names that stand in a registry of a module's, of parameters or hooks; what stands there under them does not count."""

    __slots__ = ("table",)

    def __init__(self, table: Any) -> None:
        self.table = table


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
        # Most are registries, in most of which nothing is: for those a place is made only where one is asked for.
        self._noted: dict[int, tuple[Any, Any, str, Any]] = {}
        for path, module in (*modules.items(), *strays.items()):
            for name, value in module.__dict__.items():
                if name == PARTS or (type(value) not in LEAVES and name not in BOOKKEEPING):
                    self._walk(Place("held", path, (name,)), value)
                elif name in BOOKKEEPING and is_a(
                    value, (dict, set)
                ):  # of what stands there others tell, where it counts
                    self._noted[id(value)] = (path, name), value, "names", {*value} or _NO_NAMES
        for side, part in enumerate(given):
            for step, value in held(part):
                self._walk(Place("input", "", (side, step)), value)
        empty = list[Root]()
        for root in outside:
            if root.is_empty():
                empty.append(root)
            elif root.names:
                kind = "dict" if is_a(root.thing, dict) else "object"
                place = Place("outside", root.name, ())
                self._noted[id(root.thing)] = place, root, kind, variables(root.thing, root.names)
            else:
                self._walk(_at(root), root.now())
        self._empty = {id(root.thing): root for root in empty if id(root.thing) not in self._noted}

    def _walk(self, start: Place, thing: Any) -> None:
        todo = [(start, thing)]
        while todo:
            place, value = todo.pop(0)
            if type(value) in LEAVES or value is MISSING or id(value) in self._noted or is_opaque(value):
                continue
            if is_bare(value) or len(place.steps) > _DEEP:
                continue
            for kind in kinds_of(value):
                beside = kind == "object" != kind_of(value)
                own = own_of(value) if beside else value
                at = -id(value) if own is None else id(own)
                if at not in self._noted:
                    stands = replace(place, beside=True) if beside else place
                    self._noted[at] = stands, value, kind, contents(value, kind)
            for step, inner in held(value):
                todo.append((place.below(step), inner))

    def _all(self, *, filled: bool = False) -> Iterator[tuple[Place, Any, str, Any]]:
        """Where each stands, it, its kind and what it held; with `filled` no dict that held nothing and holds nothing now, and no
        registry that holds the names that it held."""
        for noted in self._noted.values():
            at, thing, kind, was = noted
            if kind != "names":
                yield noted
            elif not filled or {*thing} != was:
                yield _of_names(*at), Names(thing), "set", {*was}
        for root in self._empty.values():
            if not filled or root.thing:
                yield _at(root), root.thing, "dict", {}

    def refuse_ordering(self, names: Collection[str]) -> None:
        """Raise `UnsupportedError` for an `OrderedDict` where code of these names may move keys of it.

        In the call that is looked at, the key may have been the last one already.
        """
        for place, thing, _, _ in self._all() if "move_to_end" in names else ():
            if is_a(thing, OrderedDict):
                raise refusal(place, _ORDER)

    def thing(self, place: Place) -> Any:
        """What stands at a place."""
        found = next(thing for at, thing, _, _ in self._all() if at == place)
        return found.thing if is_a(found, Root) else found

    def at(self, ids: Collection[int]) -> set[Place]:
        """Where the containers with these ids stand."""
        known = {
            **{key: _of_names(*at) if kind == "names" else at for key, (at, _, kind, _) in self._noted.items()},
            **{k: _at(r) for k, r in self._empty.items()},
        }
        return {known[key] for key in ids if key in known}

    def changes(self, inside: Callable[..., bool] = lambda thing, key: False) -> dict[Place, Change]:
        """The containers that hold other things now; not those, or those keys, that are changed `inside` of an opaque part.

        Raises `UnsupportedError` for a dict whose keys stand in another order, since a plan puts things where they stood.
        """
        found = {}
        for place, thing, kind, was in self._all(filled=True):
            now = contents(thing, kind)
            if _is_same(was, now):
                continue
            change = Change(kind, was, now, thing.maxlen if is_a(thing, deque) else None, thing)
            if change.kind in ("list", "set"):
                if inside(thing, None):
                    continue
            else:
                change = _outside(change, thing, inside)
            if change.reordered():
                raise refusal(place, _ORDER)
            if kind == "set":
                if change.before != change.after:
                    found[place] = change
            elif change.put() or change.gone() or len(change.before) != len(change.after):
                found[place] = change
        return found


def _of_names(path: str, name: str) -> Place:
    return Place("held", path, (name,))


def _at(root: Root) -> Place:
    return Place("outside", root.name, root.steps)


def _is_same(was: Any, now: Any) -> bool:
    """Whether two readings of one container show the same things in the same order."""
    if is_a(was, set):
        return bool(was == now)
    if len(was) != len(now) or not all(map(is_, now, was)):
        return False
    return not is_a(was, dict) or all(map(is_, now.values(), was.values()))


def _outside(change: Change, thing: Any, inside: Callable[..., bool]) -> Change:
    """The change without what stands at keys that are changed `inside`."""
    holders = (thing.thing,) if is_a(thing, Root) else (thing, own_of(thing))
    mine = {k for k in (*change.before, *change.after) if any(inside(h, k) for h in holders if h is not None)}
    if not mine:
        return change
    before, after = ({k: v for k, v in side.items() if k not in mine} for side in (change.before, change.after))
    return replace(change, before=before, after=after)


def contents(value: Any, kind: str) -> Any:
    """What a container holds now, whatever its class makes of iteration: a dict, a list or a set of its own."""
    if is_a(value, Root):
        return variables(value.thing, value.names)
    if is_a(value, Names):
        return {*value.table}
    if kind == "dict":
        return contents_of(value)
    if kind == "list":
        return [*(list if is_a(value, list) else deque).__iter__(value)]
    if kind == "set":
        return {*set.__iter__(value)}
    slots = {name: thing for name in slots_of(value) if (thing := slot_of(value, name)) is not MISSING}
    return {**slots, **(own_of(value) or {})}


def _briefly(value: Any) -> str:
    return repr(value) if is_a(value, SIMPLE) else f"a {type(value).__name__}"


def effects_of(first: Mapping[Place, Change], second: Mapping[Place, Change]) -> Effects:
    """What two runs, one after the other, did to containers; raises `UnsupportedError` for what no plan can follow."""
    found = Effects({}, {*first})
    for place, again in second.items():
        change = first.get(place)
        if change is None:
            key = place.steps[-1:]
            parent = place.above(first) if key else place
            made = first[parent].after.get(*key) if parent in first and first[parent].kind == "dict" else None
            if (
                not key
                or place.beside
                or type(made) is not list
                or again.kind != "list"
                or again.added() != len(again.before)
            ):
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
        lost = change.lost() if place not in second else [*{*change.gone()} - {*second[place].gone()}]
        if lost:
            raise UnsupportedError(
                f"forward changes what is in {place.words()}, which loses {_briefly(lost[0])}, and that may be for once or for "
                "each call. Where it is for once, as of a hook that removes itself, run the model once, and prepare then; else "
                "keep such state in a buffer"
            )
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
            for key in change.put():  # in the order in which a dict comes to hold them
                if key in rule.what:
                    spec, atoms = found(key)
                    step = Attribute(key) if change.kind == "object" else key
                    yield Store(path, place.table, place.words(step), spec, atoms, (*place.steps, step), "set", earlier)
                    earlier += atoms
                elif key in rule.grown:
                    spec, atoms = found(key)
                    at = 0
                    for one in spec.children:
                        inner = atoms[at : at + one.size]
                        inside, steps = tree.Spec("list", list, (), (one,)), (*place.steps, key)
                        yield Store(path, place.table, place.words(key), inside, inner, steps, "grow", earlier)
                        at, earlier = at + one.size, (*earlier, *inner)
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
