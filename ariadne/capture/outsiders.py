"""Outsiders: modules that stand outside of the model, and that its forward calls or looks at: a frozen teacher, a backbone.

Whichever way forward comes by them (a variable, a class, a default, an object, a weak reference), it reads an attribute of each,
or assigns one. From then on they are recorded and guarded as the modules are that stand in no registry of the model.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ariadne.capture.recorder import Recorder

_labels: dict[int, tuple[weakref.ref[nn.Module], str]] = {}  # the same in each run, by which they are


class Outsiders:
    """Adds the modules from outside to those whose `paths` are known, as forward comes upon them."""

    def __init__(self, recorder: Recorder, paths: dict[int, str]) -> None:
        self.recorder, self.paths = recorder, paths
        self.made: dict[int, nn.Module] = {}  # by forward itself, anew in each call

    def knows(self, module: nn.Module) -> bool:
        """Whether forward's own Python looks at a module that counts; one that comes for the first time does, unless it was made
        by forward."""
        if id(module) in self.paths:
            return self.recorder.is_mine()
        return self.recorder.is_mine() and self._meets(module)

    def _meets(self, module: nn.Module) -> bool:
        if id(module) in self.made:
            return False
        with self.recorder.aside():  # to look into a module is to read of it
            if "_modules" not in module.__dict__:  # it is being made
                self.made[id(module)] = module
                return False
            for path, part in module.named_modules(prefix=_label(module)):
                if id(part) not in self.paths and id(part) not in self.made:
                    self.paths[id(part)] = path
                    self.recorder.recording.outsiders[path] = part
                    self.recorder.snapshot.note_stray(path, part)
        return id(module) in self.paths


def _label(module: nn.Module) -> str:
    """What messages call it: the same as long as it lives, and no other one that lives."""
    reference, label = _labels.get(id(module), (None, ""))
    if reference is not None and reference() is module:
        return label
    alive = {known for one, known in _labels.values() if one() is not None}
    kind, number = f"(outside of the model) {type(module).__name__}", 1
    label = kind
    while label in alive:
        number += 1
        label = f"{kind} {number}"
    key = id(module)

    def gone(reference: Any) -> None:
        if _labels.get(key, (None,))[0] is reference:
            del _labels[key]

    _labels[key] = weakref.ref(module, gone), label
    return label
