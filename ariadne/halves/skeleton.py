"""The modules of a half: plain ones with its tensors under the model's own names, and the training flags that it relies on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ariadne.halves.atoms import flag, items, need, text
from ariadne.halves.weights import Row, row

Place = tuple[str, str, str]  # kind, module path, name
KINDS = ("parameter", "buffer", "attribute")
_PLAIN = "_ariadne_plain"  # the names of the buffers that were plain attributes; no tensor and no module is called so


class Bare(nn.Module):
    """A module of a half, which holds tensors and computes nothing.

    What was a plain attribute of the model's is a buffer here, so that copies find it; but `.to()` and its like leave it as it is,
    as they do in the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.__dict__[_PLAIN] = set[str]()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Bare:
        kept = {name: self._buffers[name] for name in self.__dict__[_PLAIN]}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._buffers.update(kept)
        return self


@dataclass(frozen=True)
class Held:
    """A tensor of a half: where it is kept, first where plans read it; whether state dicts have it, and it trains; how it lies."""

    places: tuple[Place, ...]
    persistent: bool
    trains: bool
    row: Row

    def told(self) -> list[Any]:
        """The same as JSON-able data."""
        return [[list(p) for p in self.places], self.persistent, self.trains, *self.row.told()]

    @property
    def name(self) -> str:
        """Its name in state dicts, by its first place."""
        return named(self.places[0])

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter."""
        return self.places[0][0] == "parameter"


def plain_tensors(root: nn.Module) -> list[torch.Tensor]:
    """The tensors of a half that were plain attributes of its model."""
    found = ((m, name) for m in root.modules() for name in sorted(m.__dict__.get(_PLAIN, ())))
    return [t for m, name in found if (t := m._buffers[name]) is not None]


def named(place: Place) -> str:
    """A place as state dicts name it."""
    return f"{place[1]}.{place[2]}".removeprefix(".")


def read_state(value: Any) -> list[Held]:
    """The tensors of a half, as `Held.told` wrote them."""
    found = []
    seen: set[tuple[str, str]] = set()
    for entry in items(value, "the tensors"):
        parts = items(entry, "a tensor")
        need(len(parts) == 8, "a tensor is malformed")
        places: list[Place] = []
        for place in items(parts[0], "the places of a tensor"):
            where = [text(p, "a place") for p in items(place, "a place")]
            need(len(where) == 3, "a place is malformed")
            kind, path, key = where
            steps = path.split(".") if path else []
            need(kind in KINDS and all(steps) and len(steps) <= 64, "a tensor is kept nowhere")
            need(key != "" and "." not in key and (path, key) not in seen, f"the name {key[:80]!r} is taken")
            seen.add((path, key))
            places.append((kind, path, key))
        at = row(parts[3:])
        trains = flag(parts[2], "requires_grad")
        need(
            bool(places) and (not trains or at.dtype.is_floating_point or at.dtype.is_complex), "a tensor is malformed"
        )
        found.append(Held(tuple(places), flag(parts[1], "persistent"), trains, at))
    return found


def read_flags(value: Any) -> dict[str, bool]:
    """The training flags of modules, by path."""
    found = {}
    for pair in items(value, "the flags"):
        parts = items(pair, "a flag")
        need(len(parts) == 2, "a flag is malformed")
        path = text(parts[0], "a module")
        need(path not in found and len(path.split(".")) <= 64, "a flag appears twice")
        need(not path or all(path.split(".")), "a flag is of no module")
        found[path] = flag(parts[1], "a flag")
    return found


def known_places(state: Iterable[Held]) -> dict[Place, Row]:
    """Where plans may find tensors: a plain attribute is a buffer to them."""
    return {
        ("buffer" if kind == "attribute" else kind, path, key): held.row
        for held in state
        for kind, path, key in held.places
    }


def skeleton(
    state: list[Held],
    tensors: Mapping[str, torch.Tensor],
    train: bool,
    flags: Mapping[str, bool],
    stored: Iterable[str] = (),
) -> nn.Module:
    """Plain modules that hold the tensors, each by its number in `state`, in the mode of `train` but where `flags` say another.

    `stored`: the modules in which forward leaves something, which may have no tensor in this half.
    """
    root = Bare()
    taken: set[tuple[str, str]] = {(path, key) for held in state for _, path, key in held.places}
    for i, held in enumerate(state):
        t = tensors[str(i)]
        made: torch.Tensor = nn.Parameter(t, requires_grad=held.trains) if held.is_parameter else t
        if held.trains and not held.is_parameter:
            made.requires_grad_()
        for kind, path, key in held.places:
            need((kind == "parameter") == held.is_parameter, f"{key[:80]!r} is a parameter and a buffer")
            module = _module(root, path, taken)
            tables: dict[str, dict[str, Any]] = {"parameter": module._parameters}
            tables.get(kind, module._buffers)[key] = made
            if not held.persistent:
                module._non_persistent_buffers_set.add(key)
            if kind == "attribute":
                module.__dict__[_PLAIN].add(key)
    for path in (*flags, *stored):
        _module(root, path, taken)
    root.train(train)
    for path, on in flags.items():
        root.get_submodule(path).training = on
    return root


def _module(root: Bare, path: str, taken: set[tuple[str, str]]) -> Bare:
    at, above = root, ""
    for step in path.split(".") if path else []:
        need((above, step) not in taken, f"{step[:80]!r} is a tensor and a module")
        if step not in at._modules:
            need(not hasattr(Bare, step) and step not in at.__dict__, f"a module is called {step[:80]!r}")
            at._modules[step] = Bare()
        child = at._modules[step]
        assert isinstance(child, Bare)
        at, above = child, f"{above}.{step}".removeprefix(".")
    return at
