"""First calls: a model that ran before is captured as one that did not, so that both have one plan.

What forward fills at its first call (anchors, masks, tables of positions) stands in attributes of the modules. Which those are is
tried out: forward's own code assigns them, and where they are taken away it fills them again and gives the same result, bit for
bit. The plan then makes what stands there at each call, as it does for a model that never ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ariadne import tree
from ariadne.guards import BOOKKEEPING, Recording, is_a, owner_of, refill

_MOST = 12  # so many runs at most to find out what forward fills again
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


def filled_again(slots: Sequence[Slot], same: Callable[[Callable[[], bool]], bool]) -> list[tuple[Slot, bool]]:
    """Those of the slots that forward fills again where nothing is in them, and whether it must find them absent.

    `same` runs it and says whether it gives the same, and whether what it is given holds then.
    """
    runs = 0

    def fills(these: Sequence[Slot]) -> list[tuple[Slot, bool]]:
        nonlocal runs
        for absent in (False, True):
            tried = [(slot, absent) for slot in these]
            with emptied(tried):
                runs += 1
                if runs <= _MOST and same(lambda: all(_is_full(*slot) for slot in these)):
                    return tried
        return []

    if not slots or (found := fills(slots)):
        return found if slots else []
    for module in dict.fromkeys(module for module, _ in slots):
        mine = [slot for slot in slots if slot[0] is module]
        found += fills(mine) or ([one for slot in mine for one in fills([slot])] if len(mine) > 1 else [])
    return found


def _is_full(module: nn.Module, name: str) -> bool:
    value = module.__dict__.get(name)
    return bool(value) if type(value) is dict else value is not None


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
