"""Listed: where forward looks through the names of a module's attributes, by `vars`, `dir` or its `__dict__`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ariadne.capture.recorder import Recorder
from ariadne.capture.refusals import Patches, called_by_torch
from ariadne.guards import BOOKKEEPING, Recording


def patch(recorder: Recorder, paths: Mapping[int, str], patches: Patches) -> None:
    """Note the modules that forward asks `dir` of."""
    plain: Any = nn.Module.__dir__

    def names(self: nn.Module) -> Any:
        if id(self) in paths and recorder.is_mine() and not called_by_torch():
            recorder.recording.listed.add(paths[id(self)])
        return plain(self)

    patches.set(nn.Module, "__dir__", names)


def whole(found: Recording, path: str, own: Mapping[str, Any], read: Callable[[str], Any]) -> None:
    """Note that forward has a module's `__dict__` at hand: what it looks up in there, and what it misses, nobody sees."""
    found.listed.add(path)
    for key in [k for k in own if k not in BOOKKEEPING]:
        read(key)
