"""Weights from elsewhere: those of a state dict or of another file, held against a half's, and put into it all or not at all."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ariadne.errors import HalfError, SpecError, nearest
from ariadne.halves.weights import File
from ariadne.plan import as_bytes

Weights = str | os.PathLike[str] | Mapping[str, torch.Tensor]


def given(weights: Weights, wanted: Collection[str]) -> Mapping[str, torch.Tensor]:
    """The tensors of a state dict, or those of a safetensors file that are wanted."""
    if isinstance(weights, Mapping):
        return weights
    if not isinstance(weights, (str, os.PathLike)):
        raise SpecError(f"weights are a state dict or the path of a safetensors file; found {type(weights).__name__}")
    file = File(weights)
    return {name: file.tensor(name) for name in wanted if name in file.keys}


def refuse_unfit(mine: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    """Raise `HalfError` unless each of these tensors is given with data, of its shape and dtype, and tied ones with one value."""
    wrong = []
    first: dict[int, str] = {}
    for name, t in mine.items():
        one = found.get(name)
        if not isinstance(one, torch.Tensor):
            near = nearest(name, found, 1)
            wrong.append(f"{name!r} is missing" + (f" (there is {near})" if near else ""))
        elif odd := _odd(one):
            wrong.append(f"{name!r} {odd}, and a half takes plain dense tensors")
        elif (one.dtype, one.shape) != (t.dtype, t.shape):
            wrong.append(f"{name!r} is {one.dtype}{list(one.shape)}, the half has {t.dtype}{list(t.shape)}")
        elif first.setdefault(id(t), name) != name and not alike(found[first[id(t)]], one):
            wrong.append(f"{first[id(t)]!r} and {name!r} are one tensor in the model, and are given with two values")
    _refuse(wrong)


def _refuse(wrong: list[str]) -> None:
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise HalfError(
            f"these weights don't fit the half, and nothing was replaced: {wrong[0]}{more}. Give the state dict of "
            f"the model that it is of"
        )


def _odd(t: torch.Tensor) -> str:
    """What about a tensor keeps its numbers from being copied; empty where nothing does."""
    if type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is a {type(t).__name__}"
    if t.is_meta:
        return "is on the meta device and has no data"
    if t.is_nested or t.is_quantized or t.layout is not torch.strided:
        return f"is nested, quantized or of layout {t.layout}"
    return ""


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same numbers, bit for bit."""
    return torch.equal(as_bytes(a), as_bytes(b))


def replace(mine: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    """Write what was given into tensors that it fits: all is read before any is written. `HalfError` where it can't be."""
    unique = {id(t): (name, t) for name, t in mine.items()}
    memories: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, t in unique.values():
        memories.setdefault(t.untyped_storage()._cdata, []).append((name, t))
    staged: list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = []  # target, numbers, tensors that see it
    wrong: list[str] = []
    for held in memories.values():
        name, t = held[0]
        if len(held) == 1 and 0 not in t.stride():
            one = found[name].detach()
            own = one.untyped_storage()._cdata in memories
            staged.append((t.detach(), one.clone() if own else one, [t]))
            continue
        whole = torch.empty(0, dtype=torch.uint8, device=t.device)
        whole.set_(t.untyped_storage(), 0, (t.untyped_storage().nbytes(),), (1,))
        copied = whole.clone()
        for n, view in held:
            _first(_within(copied, view)).copy_(_first(found[n].detach(), view))
        wrong += [
            f"{n!r} shares memory in the half, and is given with numbers that don't go with the others'"
            for n, view in held
            if not alike(_within(copied, view), found[n])
        ]
        staged.append((whole, copied, [t for _, t in held]))
    _refuse(wrong)
    for target, numbers, seen in staged:
        target.copy_(numbers)
        for t in seen:
            increment_version(t)


def _within(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor that lies in copied bytes as another lies in its own."""
    size = like.itemsize
    typed = raw[: raw.numel() // size * size].view(like.dtype)
    return torch.as_strided(typed, like.shape, like.stride(), like.storage_offset())


def _first(t: torch.Tensor, like: Any = None) -> torch.Tensor:
    """The first of each row of elements that lie in one place."""
    for dim, step in enumerate((t if like is None else like).stride()):
        if step == 0 and t.shape[dim] > 1:
            t = t.narrow(dim, 0, 1)
    return t
