"""What Python keeps: attributes of modules and of what they hold, variables around them, and generators, at one moment."""

from __future__ import annotations

import dis
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import attrgetter, is_not
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ariadne import tree
from ariadne.guards import VERSION, Code, Reached, codes_of, global_hooks, outside_with_code, variables
from ariadne.stopped.absent import filled
from ariadne.stopped.held import Held, copied, names_stand, put, same, same_items
from ariadne.stopped.laid import PLAIN, SKIPPED, Laid, Tables, code_of, codes_in

_names_of, _holders_of, _tensors_of = attrgetter("names"), attrgetter("holders"), attrgetter("tensors")
MISSING = object()
Place = tuple[str, str, str]  # path of a module, "__dict__" or "_buffers", name


def generators() -> dict[str, Any]:
    """How the generators of Python and numpy stand; `plainly` tells it as plain data."""
    found: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    return found


def plainly(states: dict[str, Any]) -> dict[str, Any]:
    """The same as nested plain values, which can be compared and sent."""
    found = dict(states)
    if "numpy" in found:
        kind, keys, *rest = found["numpy"]
        found["numpy"] = (kind, tuple(keys.tolist()), *rest)
    return found


def set_generators(states: dict[str, Any]) -> None:
    """Have them stand so."""
    for name, state in states.items():
        if name == "random":
            random.setstate(state)
        else:
            sys.modules["numpy"].random.set_state(state)


_loaded: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
_outside: WeakKeyDictionary[nn.Module, list[tuple[Any, Reached, Code]]] = WeakKeyDictionary()
_MOST_KNOWN = 4


class PythonState:
    """The attributes of a model's modules, the variables that its functions reach, and the containers and objects that these
    hold, at one moment.

    `changes` tells what is otherwise now; `undoing` keeps what it takes to put that back.
    """

    def __init__(self, model: nn.Module, laid: Laid | None = None) -> None:
        self._model, self._laid = weakref.ref(model), laid or Laid()  # what is known of a model must not keep it alive
        self.generators, self._thread = generators(), threading.get_ident()
        self._tables = self._laid.tables(model)
        self.held = Held(self._laid.known())
        # Registries of hooks in which nothing is: most of all that a model holds.
        self.empty, self.bare = self._laid.hung(self._tables)  # and tensors on which nothing is set
        self.hookless = not any(self.empty)
        if not self.hookless:
            for where, registry in zip(chain.from_iterable(map(_names_of, self._tables)), self.empty, strict=True):
                if registry:
                    self.held.note(where, registry)
            self.empty = [registry for registry in self.empty if not registry]
        if any(self.bare):
            for (where, _), own in zip(chain.from_iterable(map(_tensors_of, self._tables)), self.bare, strict=True):
                if own:
                    self.held.note(where, own)
            self.bare = [own for own in self.bare if not own]
        for where, value in chain.from_iterable(map(_holders_of, self._tables)):
            self.held.note(where, value)
        hooks = [] if self.hookless else [h for one in self._hung() if isinstance(one, dict) for h in one.values()]
        runs = self._laid.runs(self._tables), [*map(code_of, (*hooks, *global_hooks()))], codes_in(self.held.runs)
        self.variables: list[
            tuple[str, Any, dict[str, Any]]
        ] = []  # where, a table of them, what stood under which name
        reached, self._code = _searched(model, runs)
        for root in reached.roots:
            if root.names:
                was = dict.fromkeys(sorted(root.names), MISSING) | variables(root.thing, root.names)
                self.variables.append((root.name, root.thing, was))
            else:
                self.held.note(root.name, root.now())
        for root in chain(reached.of_threads, reached.moving, reached.keeping):
            if not root.names:
                self.held.note(root.name, root.now())
        if "environ" in loaded_by(model):
            self.held.note("os.environ", os.environ)
        # What tells the code that may run from other code.
        self.runs = *runs[:2], codes_in(self.held.runs), self._code

    def _hung(self) -> list[Any]:
        """Torch's registries of the model."""
        return self._laid.hung(self._tables)[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the model by name, those in plain attributes too, each once."""
        return dict(self._laid.tensors(self._tables))

    def changes(self) -> Iterator[tuple[Place, dict[str, Any], Any, Any]]:
        """The attributes that stand otherwise: where, in what dict, what stood there and what does; `MISSING` for nothing."""
        return _changes_in(self._written())

    def _written(self) -> list[Tables]:
        """The tables of the modules whose tables were written since, or may have been: others are still laid out as they were."""
        model = self._model()
        now = self._laid.tables(model) if VERSION is not None and model is not None else []
        if now is self._tables:
            return []
        if len(now) != len(self._tables):  # other modules have come, which may be named as these
            return self._tables
        return [*compress(self._tables, map(is_not, self._tables, now))]

    def _changed_variables(self) -> Iterator[tuple[str, Any, str, Any, Any]]:
        """Those that stand otherwise: where, in what table, under which name, what stood there and what does."""
        for where, thing, was in self.variables:
            table = thing if type(thing) is dict else vars(thing) if isinstance(thing, type) else None
            if table is not None and names_stand(table.get, was):
                continue
            now = variables(thing, was)
            for name, before in was.items():
                if (after := now.get(name, MISSING)) is not before:
                    yield where, thing, name, before, after

    def changed_inside(self) -> str | None:
        """Where a variable, a container, an object or a generator that an attribute holds is otherwise now; None where none is."""
        if any(self.empty):
            return "a registry of hooks"
        if any(self.bare):
            return self._set_on()
        moved = next(self._changed_variables(), None)
        if moved is not None:
            return moved[0] if moved[2] == "cell_contents" else f"{moved[2]} of {moved[0]}"
        return self.held.changed()

    def _set_on(self) -> str:
        """The tensor of the model on which an attribute was set, in words."""
        of = {
            id(own): where
            for tables in self._tables
            for (where, _), own in zip(tables.tensors, tables.marks, strict=True)
        }
        return next(of[id(own)] for own in self.bare if own)

    def otherwise(self) -> dict[tuple[int, str], str]:
        """What stands otherwise now, generators left out: in words, by where it stands."""
        found = {(id(t), name): repr(name) for (_, _, name), t, was, now in self.changes() if not _alike(was, now)}
        for where, thing, name, was, now in self._changed_variables():
            if not _alike(was, now):
                found[id(thing), name] = where if name == "cell_contents" else f"{name!r} of {where}"
        found |= {(id(thing), ""): where for where, thing in self.held.otherwise()}
        found |= {(id(own), ""): self._set_on() for own in self.bare if own}
        return found | {(id(registry), ""): "a registry of hooks" for registry in self.empty if registry}

    def anothers(self) -> set[int]:
        """The ids of what a thread has for itself, and this is another one: a forward that began there keeps what it had."""
        return self.held.by_thread if self.held.by_thread and threading.get_ident() != self._thread else set()

    def contained(self) -> set[int]:
        """The ids of the containers and objects that it tells of."""
        return {id(thing) for _, thing, _ in chain(self.held.things, self.held.opaque)} | {
            *map(id, chain(self.empty, self.bare))
        }

    def undoing(self, buffers: bool = True) -> Undoing:
        """What was changed until now, to be put back later where nothing else changed it meanwhile; with `buffers` or without."""
        written = self._written()
        found = (one for one in _changes_in(written) if buffers or one[0][1] != "_buffers")
        attributes: list[tuple[Any, str, Any, Any]]
        attributes = [(now, name, before, after) for (_, _, name), now, before, after in found]
        attributes += [moved[1:] for moved in self._changed_variables()]
        held = [(where, thing, was, copied(thing)) for where, thing, was in self.held.moved()]
        full = (thing for thing in chain(self.empty, self.bare) if thing) if any(self.empty) or any(self.bare) else ()
        hooks: list[tuple[str, Any, Any, Any]] = [("a hook", thing, {}, copied(thing)) for thing in full]
        made = []
        for _, name, _, after in attributes:
            made.append(Held())
            made[-1].note(name, after)
        return Undoing(attributes, held + hooks, made, self, {*_registered_in(written)}, {*self._redone()})

    def _redone(self) -> Iterator[tuple[str, str, Any]]:
        """The code that is other code now: in words, its name, and what tells it. What was imported meanwhile is left out."""
        moved = self._code.moved()
        return ((words, name, now) for words, name, was, now in moved if was is not None or not _is_module(now))

    def moved_beside(self, done: Undoing, again: list[tuple[dict[str, Any], str, Any]]) -> Iterator[tuple[str, str]]:
        """What stands otherwise now than at this moment, beside what was `done` until then: in words, and by name.

        Attributes and variables by their names; what a container or an object holds has none. A container that another one took the
        place of, which holds the same, is none of these: it goes to `again`, with where it stood.
        """
        known = {(id(table), name) for table, name, _, _ in done.attributes}
        written = self._written()
        found = (
            one for one in _changes_in(written) if one[0][1] != "_buffers"
        )  # of tensors of the model, more is known
        attributes = ((now, name, before, after) for (_, _, name), now, before, after in found)
        for table, name, was, now in chain(attributes, (moved[1:] for moved in self._changed_variables())):
            if (id(table), name) in known or _alike(was, now):
                continue
            if type(table) is dict and _hold_the_same(was, now):
                again.append((table, name, was))
            else:
                yield repr(name), name
        # Which forward may ask for without a name, as `len(self._buffers)` does.
        yield from ((repr(one[1]), "") for one in _registered_in(written) if one not in done.registered)
        filled = {id(thing) for _, thing, _, _ in done.held} | self.anothers()
        yield from ((where, "") for where, thing, _ in self.held.moved() if id(thing) not in filled)
        if any(own and id(own) not in filled for own in self.bare):
            yield self._set_on(), ""
        yield from (one[:2] for one in self._redone() if one not in done.redone)


@dataclass
class Undoing:
    """Changes that can be put back: of attributes and variables (table, name, what stood there, what does), and of containers."""

    attributes: list[tuple[Any, str, Any, Any]]
    held: list[tuple[str, Any, Any, Any]]
    made: list[Held]  # what each of these attributes and variables holds
    since: PythonState  # the moment since which they were made
    registered: set[tuple[int, str]] = field(default_factory=set)  # tables of modules, and what came there or is gone
    redone: set[tuple[str, str, Any]] = field(
        default_factory=set
    )  # code that is other code now, as the moment tells it

    def meanwhile(self, model: nn.Module) -> str | None:
        """What else Python keeps was changed after this was made, if the model's code may read such a name; in words."""
        again: list[tuple[dict[str, Any], str, Any]] = []
        found = self.since.moved_beside(self, again)
        what = next((where for where, name in found if not name or name in loaded_by(model)), None)
        if what is None:
            _put_again(again)
        return what

    def moved_meanwhile(self) -> str | None:
        """The first of these changes that stands otherwise by now, in words; a container that holds the same makes way."""
        again: list[tuple[dict[str, Any], str, Any]] = []
        what = next(self.moved(again), None)
        if what is None:
            _put_again(again)
        return what

    def changed_since(self) -> str | None:
        """Which of these attributes and containers holds something else than it did when this was made; None where none does."""
        made = (held.changed() for one, held in zip(self.attributes, self.made, strict=True) if _stands(*one))
        return next(chain(filter(None, made), self._refilled()), None)

    def moved(self, again: list[tuple[dict[str, Any], str, Any]] | None = None) -> Iterator[str]:
        """What was changed and stands otherwise by now, in words.

        With `again`, a container that another one took the place of, which holds the same, goes there, with where it stood.
        """
        for at, (table, name, _, after) in enumerate(self.attributes):
            now = variables(table, (name,)).get(name, MISSING)
            if now is not after and again is not None and type(table) is dict and _hold_the_same(after, now):
                again.append((table, name, after))
            elif (now is not after and not _alike(after, now)) or (at < len(self.made) and self.made[at].changed()):
                yield f"the attribute {name!r}"
        if any(True for _ in self._refilled()):
            yield "a list, a dict or an object"

    def beside(self, done: Undoing) -> Undoing:
        """These changes without what others changed, too."""
        names = {(id(table), name) for table, name, _, _ in done.attributes}
        filled = {id(thing) for _, thing, _, _ in done.held}
        attributes = [one for one in self.attributes if (id(one[0]), one[1]) not in names]
        return Undoing(attributes, [one for one in self.held if id(one[1]) not in filled], [], self.since)

    def _refilled(self) -> Iterator[str]:
        """Where a container holds something else than it did when this was made."""
        skipped = self.since.anothers()
        return (where for where, thing, _, now in self.held if id(thing) not in skipped and not same(thing, now))

    def run(self) -> None:
        """Put back what stands as it stood when this was made."""
        for one in self.attributes:
            if _stands(*one):
                _put(*one[:3])
        for _, thing, was, now in self.held:
            if not same(thing, now):
                continue
            put(thing, was)


def _changes_in(written: list[Tables]) -> Iterator[tuple[Place, dict[str, Any], Any, Any]]:
    """What stands otherwise now in tables that may have been written, as `PythonState.changes` gives it."""
    for path, table, now, was in chain.from_iterable(tables.copies for tables in written):
        if same_items(now, was):
            continue
        for name in [*was, *(k for k in now if k not in was)]:
            before, after = was.get(name, MISSING), now.get(name, MISSING)
            if before is not after and name not in SKIPPED:
                yield (path, table, name), now, before, after


def _registered_in(written: list[Tables]) -> Iterator[tuple[int, str]]:
    """What came into a registry or is gone, and modules in the place of others: in which table, by id, and the name."""
    return ((id(table), name) for table, name in chain.from_iterable(tables.registered() for tables in written))


def _put_again(again: list[tuple[dict[str, Any], str, Any]]) -> None:
    """Have containers stand where they stood: lists that each call of a detector makes anew; forward may hold the first."""
    for table, name, was in again:
        table[name] = was


def _stands(table: Any, name: str, before: Any, after: Any) -> bool:
    """Whether a value that was put under a name stands there still."""
    return variables(table, (name,)).get(name, MISSING) is after


def fill_kept(model: nn.Module, fill: Callable[[Any], Any], seen: dict[int, Any]) -> None:
    """Apply `fill` to each tensor without data that a model's modules, or the variables around them, hold."""
    for module in model.modules():
        filled(module.__dict__, fill, seen)
    for root in reached_by(model).roots:
        if not root.names:
            filled(root.now(), fill, seen)
            continue
        for name, value in variables(root.thing, root.names).items():
            if (now := filled(value, fill, seen)) is not value:
                _put(root.thing, name, now)


def loaded_by(model: nn.Module) -> frozenset[str]:
    """The names of attributes and variables that the code of a model's own modules, its hooks, and what these call, may read."""
    found = _loaded.get(model)
    if found is None:
        found = _loaded[model] = frozenset().union(*map(_names_loaded, codes_of(_functions(model))))
    return found


def _functions(model: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """The functions of modules and of their classes, but for torch's own; each with the module."""
    for module in model.modules():
        for cls in type(module).__mro__:
            if not cls.__module__.startswith("torch."):
                yield from ((f, module) for f in vars(cls).values())
        yield from ((f, module) for f in module.__dict__.values() if callable(f))
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            yield from ((hook, module) for hook in hooks.values())


def _names_loaded(code: types.CodeType) -> frozenset[str]:
    names = {
        str(i.argval) for i in dis.get_instructions(code) if i.opname.startswith("LOAD_") and i.opname != "LOAD_CONST"
    }
    return frozenset(names.union(c for c in code.co_consts if isinstance(c, str)))  # these for `getattr`


def reached_by(model: nn.Module) -> Reached:
    """What the functions of a model reach outside of it, looked for again where other code has come to stand for some of it."""
    return _searched(model)[0]


def _searched(model: nn.Module, runs: Any = None) -> tuple[Reached, Code]:
    """The same, with the code that it was found by; `runs` tells the code that may run for what the model holds."""
    known = _outside.setdefault(model, [])
    found = next((one for one in known if runs is None or one[0] == runs), None)
    if found is None or not found[2].stands():
        others = [one for one in known if one is not found]
        runs = found[0] if found is not None else runs
        found = runs, *outside_with_code(dict(model.named_modules()), global_hooks())
        _outside[model] = [found, *others][:_MOST_KNOWN]
        _loaded.pop(model, None)
    return found[1:]


def _is_module(mark: Any) -> bool:
    """Whether what tells code is that of a module of Python's."""
    return type(mark) is weakref.ref and isinstance(mark(), types.ModuleType)


def _put(table: Any, name: str, value: Any) -> None:
    """Have a value, or nothing, stand under a name in a dict, a class or a cell."""
    if isinstance(table, dict):
        table[name] = value
        if value is MISSING:
            del table[name]
    elif value is MISSING:
        delattr(table, name)
    else:
        setattr(table, name, value)


def _alike(was: Any, now: Any) -> bool:
    """Whether two plain values are equal."""
    return type(now) is type(was) and type(now) in PLAIN and bool(tree.identical(now, was))


def _hold_the_same(was: Any, now: Any, deep: int = 8) -> bool:
    """Whether two lists, tuples or dicts hold the same things, or plain values that are equal."""
    if type(now) is not type(was) or not deep:
        return False
    if type(now) in (list, tuple):
        pairs = zip(was, now, strict=True) if len(now) == len(was) else None
    elif type(now) is dict:
        pairs = zip([*was, *was.values()], [*now, *now.values()], strict=True) if len(now) == len(was) else None
    else:
        return _alike(was, now)
    return pairs is not None and all(a is b or _hold_the_same(a, b, deep - 1) for a, b in pairs)
