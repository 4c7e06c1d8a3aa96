"""Checkpoints: a half, its optimizer and the random generators at one step, as one safetensors file that is there whole or not.

Floats stand as text of their bits, so that what is read is what was written.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ariadne.errors import AriadneError, CheckpointError
from ariadne.halves import File, Row, parsed, row
from ariadne.halves import weights as files

_FORMAT = 2
Generators = Mapping[str, torch.Tensor]
Beside = Mapping[str, Any]  # schedulers and scalers, by name


class Held(Protocol):
    """What a checkpoint holds: a half, or the parts of an edge."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Its parameters, each once."""

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Its buffers, those that no state dict has too."""


def write(
    path: Path,
    half: Held,
    optimizer: torch.optim.Optimizer | None,
    about: Mapping[str, Any],
    states: Generators,
    beside: Beside | None = None,
) -> None:
    """Write the file, to one beside it first, which then takes its place; `CheckpointError` where that fails.

    `about`: plain data that are given back. `beside`: what else has a `state_dict()`, by name, as a scheduler.
    """
    tensors = {f"half {name}": t for name, t in _held(half).items()}
    tensors |= {f"generator {name}": t for name, t in states.items()}
    told = None if optimizer is None else _told(optimizer.state_dict(), "optimizer", tensors)
    also = {n: _told(thing.state_dict(), n, tensors) for n, thing in (beside or {}).items()}
    try:
        kept, rows = files.gather(tensors)
        data = {
            "checkpoint": _FORMAT,
            "about": dict(about),
            "optimizer": told,
            "beside": also,
            "rows": {name: at.told() for name, at in rows.items()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, json.dumps(data, separators=(",", ":")), kept)
    except (OSError, AriadneError) as error:
        raise CheckpointError(
            f"the checkpoint {path} could not be written: {error}. What was there before is still there; make room, and go on"
        ) from error


def about(path: Path) -> dict[str, Any] | None:
    """The plain data of a checkpoint; None where there is no file, or no whole one."""
    try:
        return dict(_data(path)[1]["about"])
    except (CheckpointError, FileNotFoundError):
        return None


def restore(
    path: Path, half: Held, optimizer: torch.optim.Optimizer | None, beside: Beside | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Put a half and its optimizer where they were; returns the plain data and the states of the generators.

    Raises `CheckpointError` for a file that is none, or one of another half or optimizer; then nothing has changed.
    """
    file, data = _data(path)
    try:
        rows: dict[str, Row] = {name: row(told) for name, told in data["rows"].items()}
        found = dict(file.tensors(rows))
        mine = _held(half)
        theirs = {n.removeprefix("half "): t for n, t in found.items() if n.startswith("half ")}
        odd = [n for n in mine.keys() | theirs.keys() if _kind(mine.get(n)) != _kind(theirs.get(n))]
        if odd:
            n = min(odd)
            raise CheckpointError(
                f"{path} is a checkpoint of another half: {n!r} is {_kind(theirs.get(n))} there, {_kind(mine.get(n))} here. Name "
                "the folder of this half's run"
            )
        if (optimizer is None) != (data["optimizer"] is None):
            raise CheckpointError(f"{path} was written {'with' if optimizer is None else 'without'} an optimizer")
        things = beside or {}
        if things.keys() != data["beside"].keys():
            raise CheckpointError(
                f"{path} has the states of {sorted(data['beside']) or 'nothing'} beside the optimizer's, and here there is "
                f"{sorted(things) or 'nothing'}: go on with what the run began with"
            )
        if optimizer is not None:
            optimizer.load_state_dict(_read(data["optimizer"], found))
        for name, thing in things.items():
            thing.load_state_dict(_read(data["beside"][name], found))
    except (AriadneError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is no checkpoint of this half and optimizer: {str(error)[:200]}") from error
    with torch.no_grad():
        for name, t in mine.items():
            t.copy_(theirs[name])
    for _, p in half.named_parameters():
        p.grad = None
    states = {n.removeprefix("generator "): t.clone() for n, t in found.items() if n.startswith("generator ")}
    return dict(data["about"]), states


def _data(path: Path) -> tuple[File, dict[str, Any]]:
    try:
        file = File(path)
        data = parsed(file)
    except (AriadneError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if data.get("checkpoint") != _FORMAT or not all(type(data.get(k)) is dict for k in ("about", "rows", "beside")):
        raise CheckpointError(f"{path} is no checkpoint of this version of Ariadne")
    return file, data


def _held(half: Held) -> dict[str, torch.Tensor]:
    """All its parameters and buffers by name, those that no state dict has too."""
    return {**dict(half.named_parameters()), **dict(half.named_buffers())}


def _kind(t: torch.Tensor | None) -> str:
    return "missing" if t is None else f"{t.dtype}{list(t.shape)}"


def _told(value: Any, at: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A tree of an optimizer's state as JSON-able data; its tensors go into `tensors`, under where they stood."""
    if isinstance(value, torch.Tensor):
        tensors[at] = value
        return {"tensor": at}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, dict):
        pairs = [[_told(k, f"{at} key", tensors), _told(v, f"{at} {k}", tensors)] for k, v in value.items()]
        return {"Counter" if type(value) is Counter else "dict": pairs}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_told(v, f"{at} {i}", tensors) for i, v in enumerate(value)]}
    if value is None or type(value) in (bool, int, str):
        return value
    raise CheckpointError(f"what is trained with keeps a {type(value).__name__} ({at}), which a checkpoint can't hold")


def _read(told: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if type(told) is not dict:
        return told
    ((kind, value),) = told.items()
    if kind == "tensor":
        return tensors[value].clone()
    if kind == "float":
        return float.fromhex(value)
    if kind in ("dict", "Counter"):
        pairs = {_read(k, tensors): _read(v, tensors) for k, v in value}
        return Counter(pairs) if kind == "Counter" else pairs
    return {"list": list, "tuple": tuple}[kind](_read(v, tensors) for v in value)


def swept(folder: Path) -> None:
    """Remove what an interrupted writing left in a folder."""
    for path in folder.glob(".*.safetensors.*"):
        os.unlink(path)
