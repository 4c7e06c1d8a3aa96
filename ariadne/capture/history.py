"""History: a model is run again, on other inputs of another batch, in the state that a first run left Python in, and then as first.

What forward keeps for later calls is a cache only if no result follows what stands in it, whichever calls came before. What each
call puts in place of what the call before left is no cache: a plan puts it there, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.capture.example import Example
from ariadne.capture.generators import TORCH, Names
from ariadne.capture.ran import Answer, detached
from ariadne.capture.reach import Reach
from ariadne.capture.state import Snapshot
from ariadne.capture.written import TooLongError, Undone
from ariadne.compare import difference
from ariadne.errors import UnsupportedError
from ariadne.guards import MISSING, Change, Containers, Place, Slots, attributes_of, is_a, refusal, simple

_OTHER_SEED = 8725724278030350  # any but the one that is in use
Slot = tuple[Any, Any, Any]  # a container, a key, and a value


@dataclass(frozen=True)
class History:
    """Runs after a first one: on other inputs, at its own batch and another, which gave `later`; and on the first one's again.

    `moved`: something in Python is otherwise after them than before the first one. `renewed`: the keys of containers at which both
    put something, with the slots as they were in between; `assigned`: attributes of modules that both changed. `larger`: the dicts
    that got more keys at the other batch.
    """

    later: dict[int, Answer] = field(default_factory=dict)
    moved: bool = False
    renewed: dict[tuple[Place, Any], Slot] = field(default_factory=dict)
    assigned: frozenset[tuple[str, str]] = frozenset()
    larger: frozenset[Place] = frozenset()


def another(batch: int, batches: range) -> int:
    """A batch beside this one, if the range has one."""
    return next((b for b in (batch + 1, batch - 1) if b in batches and b > 0), batch)


def gives(
    model: nn.Module,
    example: Example,
    batch: int,
    grad: bool,
    reseeded: Names,
    snapshot: Snapshot,
    most: int | None = None,
) -> Answer:
    """What forward gives in the state that Python is in; or how it raises. `reseeded`: with random numbers of its own, if torch's
    are among these. `most`: of the ops that it may run.

    The snapshot keeps what it writes.
    """
    if TORCH in reseeded:
        torch.manual_seed(_OTHER_SEED)
    args, kwargs = tree.unflatten(example.resized(batch), example.spec)
    drawn, alone = torch.get_rng_state(), threading.active_count() == 1
    undone = Undone(snapshot, most)
    try:
        with torch.set_grad_enabled(grad), undone:
            output = model(*args, **kwargs)
        undone.ran.leads_to(output)
        return Answer(detached(output), undone.ran)
    except (Exception, TooLongError) as error:  # of inputs that nobody asked it to take
        return Answer(type(error).__name__, undone.ran)
    finally:
        if (
            TORCH not in reseeded and alone
        ):  # on another path than the first run's it may have drawn; else another thread did
            torch.set_rng_state(drawn)


def lived(
    model: nn.Module, example: Example, batch: int, other: int, grad: bool, reach: Reach, snapshot: Snapshot, output: Any,
    drew: Names, moved: bool, left: Callable[[int, bool], None] = lambda batch, same: None,
) -> History:  # fmt: skip
    """The history of a model that gave `output` at `batch`; `moved`: and left something in Python. `left` is told of each batch
    that ran after it, and whether on the same inputs.

    Raises `UnsupportedError` if it gives something else for the same inputs after the call at the other batch.
    """
    snapshot.again(drew)
    one = _Look(reach, snapshot)
    later = {other: gives(model, example.turned(), other, grad, drew, snapshot)}
    left(other, False)
    puts, assigned = one.changes()
    if not (moved or puts or assigned or snapshot.memories.grew()):
        return History()
    snapshot.again(drew)
    two = _Look(reach, snapshot)
    differs = difference(output, gives(model, example, batch, grad, (), snapshot).output)
    left(batch, True)
    puts_again, assigned_again = two.changes()
    if differs:
        places = ((place, change) for found in (puts_again, puts) for place, change in found.items())
        names = [place.words(*([] if change.kind == "set" else change.put()[:1])) for place, change in places]
        names += [f"the attribute {name!r}" for _, name in assigned_again]
        told = f" ({', '.join(dict.fromkeys(names[:3]))})" if names else ""
        raise UnsupportedError(
            f"forward keeps something for later calls{told} which results follow: after a call on other inputs at batch {other} it "
            f"gives another result on the same inputs as before ({differs}). A plan can't follow that; return such state, or keep "
            "it in a buffer"
        )
    for place, change in puts.items():
        if change.kind == "set" and change.after - change.before:
            raise refusal(place, "gets other members at another batch")
    renewed = {
        (place, key): (_holder(two.containers.thing(place), change), key, change.after[key])
        for place, change in puts.items()
        for key in _both(change, puts_again.get(place))
    }
    if batch not in later:
        snapshot.again(drew)
        later[batch] = gives(model, example.turned(), batch, grad, drew, snapshot)
    larger = {
        place for place, change in puts.items() if change.kind == "dict" and len(change.after) > len(change.before)
    }
    return History(later, True, renewed, assigned & assigned_again, frozenset(larger))


@contextmanager
def standing(slots: Iterable[Slot]) -> Iterator[None]:
    """Within the block the values stand in the containers; after it, what stood there."""
    kept = []
    for thing, key, value in slots:
        table = thing if is_a(thing, (dict, list, deque, Slots)) else Slots(thing)
        kept.append((table, key, table[key]))
        table[key] = value
    try:
        yield
    finally:
        for table, key, value in kept:
            table[key] = value


def puts_again(
    model: nn.Module, leaves: Callable[[], tuple[Any, Any]], grad: bool, reach: Reach, snapshot: Snapshot, output: Any,
    drew: Names, changes: Mapping[Place, Change],
) -> tuple[Containers, dict[Place, Change], set[tuple[str, str]]] | None:  # fmt: skip
    """What a further run does where tensors of the model's, that the first run put into containers, stand as others of the same
    memory: so it shows where they are put again, be they the same each time. A buffer is one: each run finds it as the first did.

    None where no such tensor was put anywhere; or where such a run raises or gives something else, as of code that asks by `is`.
    """
    known, placed = {*map(id, snapshot.all_tensors())}, []
    for change in changes.values():
        for key in () if change.kind == "set" else change.put():
            t = change.after[key]
            if is_a(t, torch.Tensor) and id(t) in known and change.stands(key) is t:
                other = t.detach()
                change.place(key, other)
                placed.append((change, key, t, other))
    if not placed:
        return None
    snapshot.again(drew)
    args, kwargs = leaves()
    look = _Look(reach, snapshot, (args, kwargs))
    try:
        with torch.set_grad_enabled(grad), Undone(snapshot):
            same = difference(output, model(*args, **kwargs)) is None
    except Exception:  # the user's own, of a state that its code never meets
        same = False
    puts, assigned = look.changes()
    for change, key, t, other in placed:
        if change.stands(key) is other:
            change.place(key, t)
    return (look.containers, puts, {*assigned}) if same else None


def assigned_once(
    modules: Mapping[str, nn.Module], left: Mapping[tuple[str, str], Any], once_more: Callable[[], Any]
) -> frozenset[tuple[str, str]]:
    """Those attributes of modules, of these that a first run `left`, that a further one does not assign.

    Meanwhile each holds the same in tensors and numbers that are other objects: so one that is put there anew tells itself, be it
    the same. A bool has no other.
    """
    others = {at: tree.map_leaves(_another_object, value) for at, value in left.items()}
    for (path, name), other in others.items():
        modules[path].__dict__[name] = other
    once_more()
    found = {(path, name) for (path, name), other in others.items() if modules[path].__dict__.get(name) is other}
    for path, name in found:
        modules[path].__dict__[name] = left[path, name]
    return frozenset(found)


def _another_object(leaf: Any) -> Any:
    if is_a(leaf, torch.Tensor):
        return leaf.detach().requires_grad_(leaf.requires_grad)
    return _OTHERS[type(leaf)](leaf) if type(leaf) in _OTHERS else leaf


# An instance of such a class is no other number, and never the one that Python keeps for all.
_OTHERS: dict[type, type] = {cls: type(cls.__name__, (cls,), {}) for cls in (int, float, str)}


def _holder(thing: Any, change: Change) -> Any:
    return Slots(thing) if change.kind == "object" else thing


class _Look:
    """What stands in containers and attributes before a run."""

    def __init__(self, reach: Reach, snapshot: Snapshot, given: tuple[Any, Any] = ((), {})) -> None:
        self.modules, self.containers, self.inside = snapshot.modules, reach.containers(*given), snapshot.is_inside
        self.attributes = attributes_of(self.modules)

    def changes(self) -> tuple[dict[Place, Change], frozenset[tuple[str, str]]]:
        """What is otherwise now: in containers, and the attributes of modules."""
        found = (
            k for k, v in attributes_of(self.modules).items()
            if (was := self.attributes.get(k, MISSING)) is not v and not alike(was, v)
            and not self.inside(self.modules[k[0]].__dict__, k[1])
        )  # fmt: skip
        return self.containers.changes(self.inside), frozenset(found)


def _both(one: Change, other: Change | None) -> list[Any]:
    """The keys at which two changes, one after the other, put something else."""
    if other is None or one.kind != other.kind or one.kind == "set":
        return []
    if one.kind == "list" and not len(one.before) == len(one.after) == len(other.after):
        return []
    again = other.put()
    return [key for key in one.put() if key in again and not alike(one.after[key], other.after[key])]


def alike(a: Any, b: Any) -> bool:
    """Whether two values are plain and the same."""
    return simple(a) and simple(b) and tree.identical(a, b)
