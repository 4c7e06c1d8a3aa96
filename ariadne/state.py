"""Leaving things as found: what a forward may move is noted before it runs, and put back after."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_SKIPPED = (torch.Tensor, nn.Module, type, torch.dtype, torch.device, torch.Generator, str, bytes, int, float, bool)


def _rng() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    return found


class Snapshot:
    """A model's Python state and every RNG at one moment; tensors are added as something is about to write them.

    Covers each module's attributes, the lists, dicts, sets and plain objects that these hold, and the registries of
    parameters, buffers, submodules and hooks. `restore` puts all of it back, tensors' data included.
    """

    def __init__(self, model: nn.Module) -> None:
        self.rng = _rng()
        self.modules = dict(model.named_modules())
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        seen: set[int] = set()
        for module in self.modules.values():
            self._note(module.__dict__, seen)

    def _note(self, value: Any, seen: set[int]) -> None:
        if id(value) in seen or isinstance(value, _SKIPPED) or callable(value) or value is None:
            return
        seen.add(id(value))
        children: Any = ()
        if isinstance(value, dict):
            self._dicts.append((value, dict(value)))
            children = list(value.values())
        elif isinstance(value, list):
            self._lists.append((value, list(value)))
            children = list(value)
        elif isinstance(value, set):
            self._sets.append((value, set(value)))
        elif isinstance(value, tuple):
            children = value
        elif isinstance(getattr(value, "__dict__", None), dict) and not type(value).__module__.startswith("torch."):
            self._note(value.__dict__, seen)
        for child in children:
            self._note(child, seen)

    def save(self, tensor: torch.Tensor) -> None:
        """Keep a copy of a tensor's data, the first time it is about to be written."""
        if id(tensor) not in self._saved:
            self._saved[id(tensor)] = (tensor, tensor.detach().clone())

    def save_buffers(self) -> None:
        """Keep a copy of every buffer."""
        for module in self.modules.values():
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.save(buffer)

    def moved_rng(self) -> list[str]:
        """Which of Python's own generators moved since: `random`, `numpy.random`."""
        now, names = _rng(), []
        if now["python"] != self.rng["python"]:
            names.append("random")
        if "numpy" in now and "numpy" in self.rng:
            old, new = self.rng["numpy"], now["numpy"]
            if any((a != b).any() if hasattr(a, "any") else a != b for a, b in zip(old, new, strict=True)):
                names.append("numpy.random")
        return names

    def changes(self) -> Iterator[tuple[str, str, Any, Any]]:
        """The plain attributes of modules that differ now: (module path, name, before, now)."""
        before = {id(d): old for d, old in self._dicts}
        missing = object()
        for path, module in self.modules.items():
            old = before[id(module.__dict__)]
            for name in {**old, **module.__dict__}:
                was, now = old.get(name, missing), module.__dict__.get(name, missing)
                if was is not now:
                    yield path, name, None if was is missing else was, None if now is missing else now

    def replaced_buffers(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The buffers that forward replaced by assignment: (module path, name, the new tensor)."""
        before = {id(d): old for d, old in self._dicts}
        for path, module in self.modules.items():
            old = before[id(module._buffers)]
            for name, now in module._buffers.items():
                if now is not None and old.get(name) is not now:
                    yield path, name, now

    def restore(self) -> None:
        """Put everything back."""
        for d, old in self._dicts:
            if len(d) != len(old) or any(d.get(k, d) is not v for k, v in old.items()):
                d.clear()
                d.update(old)
        for values, was in self._lists:
            if len(values) != len(was) or any(a is not b for a, b in zip(values, was, strict=True)):
                values[:] = was
        for s, before in self._sets:
            if s != before:
                s.clear()
                s.update(before)
        for tensor, data in self._saved.values():
            if tensor.is_inference():
                with torch.inference_mode():
                    tensor.copy_(data)
            else:
                tensor.data.copy_(data)
        self._saved.clear()
        self.restore_rng()

    def restore_rng(self) -> None:
        """Put every RNG back."""
        torch.set_rng_state(self.rng["torch"])
        random.setstate(self.rng["python"])
        if "cuda" in self.rng:
            torch.cuda.set_rng_state_all(self.rng["cuda"])
        if "numpy" in self.rng:
            sys.modules["numpy"].random.set_state(self.rng["numpy"])
