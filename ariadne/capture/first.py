"""First calls: a model that ran before is captured as one that did not, so that both have one plan.

What forward fills at its first call (anchors, masks, tables of positions) stands in attributes of the modules. Which those are is
tried out: forward's own code assigns them, and where they are taken away it fills them again, with the same, runs no fewer ops, and
gives the same result, bit for bit. The plan then makes what stands there at each call, as it does for a model that never ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.capture.ran import Answer, detached
from ariadne.compare import difference
from ariadne.guards import BOOKKEEPING, Recording, held, is_a, is_array, owner_of, refill

_MOST = 12  # so many runs at most to find out what forward fills again
_VALUES = (bool, int, float, complex, str, bytes, bytearray, range, slice, set, frozenset)
Slot = tuple[nn.Module, str]


def filled_before(modules: Mapping[str, nn.Module], seen: Recording) -> list[Slot]:
    """The attributes that forward read in a run, and that its code assigns, or puts something into: what an earlier call may have
    filled. None where no tensor stands in one, unless forward assigned it anew.
    """
    changed = {(path, name) for path, name, _, _ in seen.changed}
    found, renewed = [], False
    for (path, name), (module, _, _) in seen.read_attributes.items():
        value = module.__dict__.get(name)
        if path not in modules or name in BOOKKEEPING or value is None or is_a(value, (nn.Module, bool)):
            continue
        if name in seen.filled and value if type(value) is dict else name in seen.assigned:
            found.append((module, name))
            renewed |= (path, name) in changed
    held = (value for module, name in found for value in tree.leaves(module.__dict__[name]))
    return found if renewed or any(is_a(value, torch.Tensor) for value in held) else []


def filled_again(
    slots: Sequence[Slot], run: Callable[[Callable[[], Any]], tuple[Answer, Any]]
) -> list[tuple[Slot, bool]]:
    """Those of the slots that forward fills again where nothing is in them, and whether it must find them absent.

    `run` gives what it gives, and what is asked of it then, before all is put back.
    """
    if not slots:
        return []
    later, left = run(lambda: {slot: detached(_value(slot)) for slot in slots})
    runs = 0

    def fills(these: Sequence[Slot]) -> list[tuple[Slot, bool]]:
        nonlocal runs
        for absent in (False, True):
            tried = [(slot, absent) for slot in these]
            with emptied(tried):
                runs += 1
                if runs > _MOST:
                    return []
                first, filled = run(lambda: all(_is_as_left(_value(slot), left[slot]) for slot in these))
                if filled and not first.differs(later):
                    return tried
        return []

    if found := fills(slots):
        return found
    for module in dict.fromkeys(module for module, _ in slots):
        mine = [slot for slot in slots if slot[0] is module]
        found += fills(mine) or ([one for slot in mine for one in fills([slot])] if len(mine) > 1 else [])
    return found


def _value(slot: Slot) -> Any:
    module, name = slot
    return module.__dict__.get(name)


def _is_as_left(value: Any, left: Any) -> bool:
    """Whether forward filled a slot, with the same as where an earlier call had: of a dict, with some of it."""
    if type(value) is dict and type(left) is dict:
        return bool(value) and all(key in left and _same(inner, left[key]) for key, inner in value.items())
    return value is not None and _same(value, left)


def _same(one: Any, other: Any) -> bool:
    """Whether two things are the same as far as torch's tensors and Python's values tell; of others, what they hold."""
    todo, met = [(one, other)], set[tuple[int, int]]()
    while todo:
        a, b = todo.pop()
        if a is b or (id(a), id(b)) in met:
            continue
        met.add((id(a), id(b)))
        if type(a) is not type(b):
            return False
        if is_a(a, torch.Tensor):
            if difference(a.detach(), b.detach()):
                return False
            continue
        if is_a(a, _VALUES):
            if not tree.identical(a, b):
                return False
            continue
        if is_array(a) and a.dtype.kind != "O" and (a.shape != b.shape or a.tobytes() != b.tobytes()):
            return False
        (steps, inner), (others, inner_too) = (tuple(zip(*held(x), strict=True)) or ((), ()) for x in (a, b))
        if len(steps) != len(others) or not all(map(_is_step, steps, others)):
            return False
        todo += zip(inner, inner_too, strict=True)
    return True


def _is_step(one: Any, other: Any) -> bool:
    return one is other or (is_a(one, _VALUES) and tree.identical(one, other))


@contextmanager
def emptied(slots: Sequence[tuple[Slot, bool]]) -> Iterator[None]:
    """Within the block nothing stands in the slots: an empty dict, what the class has, or None, or they are absent; after it,
    what was there.
    """
    kept = [(module.__dict__, name, module.__dict__[name]) for (module, name), _ in slots]
    order = {id(own): [*own] for own, _, _ in kept}
    try:
        for ((module, name), absent), (own, _, value) in zip(slots, kept, strict=True):
            if type(value) is dict:
                own[name] = {}
            elif absent or owner_of(module, name) is not None:
                del own[name]
            else:
                own[name] = None
        yield
    finally:
        for own, name, value in kept:
            own[name] = value
        for own, _, _ in kept:  # attributes stand in their order again
            if [*own] != order[id(own)]:
                found = {name: own[name] for name in order[id(own)] if name in own}
                found |= own
                refill(own, found)
