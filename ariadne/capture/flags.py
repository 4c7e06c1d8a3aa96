"""Training flags that forward itself sets, as `self.backbone.eval()` does: what stood there before a call decides nothing.

A plan sets them at each call, as forward does, and no guard asks for them. Where such a flag stands already as forward leaves it,
nothing shows that forward sets it; the model is captured with the other value there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from ariadne.guards import Recording

FLAG = "training"


def set_in(seen: Recording, modules: Mapping[str, nn.Module]) -> dict[tuple[str, str], tuple[bool, bool]]:
    """The flags that forward set before it read them, and that are otherwise after the run: as they were, and are."""
    return {
        (path, name): (before, now)
        for path, name, before, now in seen.changed
        if (path, name) in seen.written and path in modules and type(before) is type(now) is bool
    }


def set_again(seen: Recording, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, bool, bool]]:
    """The flags that forward set to what they were: (module path, name, the other value, its value)."""
    changed = {(path, name) for path, name, _, _ in seen.changed}
    for path, name in sorted(seen.written - changed):
        if name == FLAG and path in modules and type(modules[path].training) is bool:
            yield path, name, not modules[path].training, modules[path].training
