"""The state that a run may move: random generators, and all that a model holds, snapshot and put back in place."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from conformance.suite.compare import difference, opened

try:
    import numpy
except ImportError:  # torch works without it, and so do the models of plain torch
    numpy = None  # type: ignore[assignment]


def seed_torch(seed: int) -> None:
    """Seed torch's generators. Where there is no accelerator that is the CPU's alone, in microseconds.

    `torch.manual_seed` takes milliseconds there: it writes down three stacks, for backends that may come to life later.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed torch, numpy and Python's random."""
    seed_torch(seed)
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def rng_state() -> dict[str, Any]:
    """Where the random generators of torch, numpy and Python stand."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if numpy is not None:
        found["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the random generators where `rng_state` found them."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state:
        numpy.random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run a block and put the random generators back after it."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def rng_moved(whole: dict[str, Any], split: dict[str, Any]) -> str | None:
    """Which generator stands elsewhere after the split than after the whole; None if all agree."""
    names = [name for name in whole if difference(whole[name], split.get(name)) is not None]
    return f"the generator of {' and '.join(names)} stands elsewhere than after the whole model" if names else None


class Snapshot:
    """All that a model holds at one moment, to any depth; `restore` puts it back in place, into the same objects.

    Registries, hooks, plain attributes and what these hold, the data and gradients of every tensor, flags, and
    generators that the model owns.
    """

    def __init__(self, model: nn.Module) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[list[Any] | deque[Any], list[Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, bool]] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._keep(model, set())

    def _keep(self, node: Any, seen: set[int]) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, torch.Tensor):
            self._tensors.append((node, node.detach().clone(), node.grad if node.is_leaf else None, node.requires_grad))
            self._keep(node.grad if node.is_leaf else None, seen)
        elif isinstance(node, torch.Generator):
            self._generators.append((node, node.get_state()))
        elif isinstance(node, set):
            self._sets.append((node, set(node)))
        level = opened(node)
        if level is None:
            return
        if isinstance(node, dict):
            self._dicts.append((node, dict(node)))
        elif isinstance(node, (list, deque)):
            self._lists.append((node, list(node)))
        elif not isinstance(node, tuple) and isinstance(getattr(node, "__dict__", None), dict):
            self._dicts.append((node.__dict__, dict(node.__dict__)))
        for _, child in level[1]:
            self._keep(child, seen)

    def restore(self) -> None:
        """Put everything back."""
        for table, was in self._dicts:
            if len(table) != len(was) or any(a is not b for a, b in zip(_flat(table), _flat(was), strict=True)):
                table.clear()
                table.update(was)
        for values, items in self._lists:
            if len(values) != len(items) or any(a is not b for a, b in zip(values, items, strict=True)):
                values.clear()
                values.extend(items)
        for group, members in self._sets:
            if group != members:
                group.clear()
                group.update(members)
        for t, data, gradient, flag in self._tensors:
            if t.shape != data.shape or t.dtype != data.dtype or t.stride() != data.stride():
                t.data = data.clone()
            else:
                t.data.copy_(data)
            if t.is_leaf:
                t.grad = gradient
                if t.requires_grad != flag:
                    t.requires_grad_(flag)
        for generator, state in self._generators:
            generator.set_state(state)


def _flat(table: dict[Any, Any]) -> list[Any]:
    return [thing for pair in table.items() for thing in pair]
