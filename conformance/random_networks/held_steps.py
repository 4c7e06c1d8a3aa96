"""Steps by which a network is reached beside its attributes: keywords as they came, a weight by another reference, what a first
call keeps, functions by the names of those that hold them; and the steps that read what stands outside of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.random_networks import outside

MADE = ("made_once", "made_of_weight", "made_beside", "made_in_part")  # what first calls make


def by_keywords(frame: Any, x: Tensor) -> Tensor:
    """By the first of the keywords, as `**kwargs` has them."""
    return x * 2 if frame.keywords[:1] == ("y0",) else x - 1


def by_reference(frame: Any, x: Tensor, asked: str) -> Tensor:
    """By the first weight, which a list and a dict beside the registries hold, too; the network goes on with that one."""
    held = frame.net.referred
    if not held:  # as the network has at its first call, or after it was copied
        return x * 1
    weight = held[0] if asked == "list" else held[1]["weight"]
    return x * weight.float().sum()


def by_first_call(frame: Any, x: Tensor) -> Tensor:
    """By a tensor that the first call makes and keeps."""
    if not hasattr(frame.net, "made_once"):
        frame.net.made_once = torch.tensor([0.5, 2.0]).cumsum(0)
    return x * frame.net.made_once[1]


def by_first_weight(frame: Any, x: Tensor) -> Tensor:
    """By what the first call makes of a weight, and keeps."""
    if not hasattr(frame.net, "made_of_weight"):
        frame.net.made_of_weight = next(frame.net.parts.parameters()).detach().float().sum() * 2
    return x * frame.net.made_of_weight


def by_first_in_part(frame: Any, x: Tensor) -> Tensor:
    """By what the first call makes of a weight, and keeps in a part, where it looks for nothing: it asks the network alone."""
    if not hasattr(frame.net, "made_beside"):
        frame.net.made_beside = torch.tensor([0.5, 2.0]).cumsum(0)
        frame.net.parts.made_in_part = next(frame.net.parts.parameters()).detach().float().sum() * 2
    return x * frame.net.made_beside[1] * frame.net.parts.made_in_part


def by_shape_table(frame: Any, x: Tensor, how: str) -> Tensor:
    """By what was made for this size, as anchors of detectors are; an attribute has that of the last size alone."""
    size = tuple(x.shape[1:]) if how == "dict" else tuple(x.shape)
    if how == "dict":
        if size not in frame.net.tables:
            frame.net.tables[size] = torch.linspace(1, 2, 3)[1] * (1 + len(size))
        return x * frame.net.tables[size]
    if frame.net.anchored != size:
        frame.net.anchored, frame.net.anchors = size, torch.linspace(1, 2, 3)[1] * len(size)
    return x * frame.net.anchors


def by_length(frame: Any, x: Tensor, asked: str) -> Tensor:
    """By how many rows a buffer has, which each call gives one more; after four, it lets go of the first."""
    kept = frame.net.rows
    if asked == "pieces":
        rows = len(kept.split(1))
    elif asked == "product":
        rows = (kept @ kept.t()).size(1)
    else:
        rows = len(kept) if asked == "own" else torch.cat([kept, kept]).shape[0]
    frame.net.rows = torch.cat([kept, kept.new_ones(1, 2)])[-4:]
    return x * rows


def by_held_function(frame: Any, x: Tensor, asked: str) -> Tensor:
    """By a function of the network's class, of the module `outside`, of an object, or on another function."""
    if asked == "class":
        return type(frame.net).turned(x)
    holder = {"module": outside, "object": outside.box, "function": outside.called}[asked]
    return holder.bent(x)


def by_number(frame: Any, x: Tensor, asked: str) -> Tensor:
    """By a tensor out there, as the argument of an op or as a number of Python's."""
    tau = outside.tau
    return x * (tau if asked == "tensor" else float(tau) if asked == "number" else 2 if tau > 1 else 3)


def by_teacher(frame: Any, x: Tensor) -> Tensor:
    """By a frozen module out there, which has a mode of its own."""
    return x * outside.taught(x.detach())


def by_cache(frame: Any, x: Tensor) -> Tensor:
    """By the results that a function keeps."""
    return x * outside.remembered(2)


def by_object(frame: Any, x: Tensor, asked: str) -> Tensor:
    """By an object out there whose class has Python's protocols; or by a number in a dict, and how many there are."""
    if asked == "table":
        return x * outside.table["a"] * len(outside.table)
    box = outside.box
    if asked == "len":
        return x * len(box)
    if asked == "iter":
        return x * sum(box)
    if asked == "contains":
        return x * 2 if "b" in box else x - 1
    return x * (box["a"] if asked == "item" else box.a)
