"""Kinds: what abstract classes say is derived from them, which others can be registered with later."""

from __future__ import annotations

import abc
from types import CodeType, FrameType
from typing import Protocol

import torch

from ariadne.guards import switches
from ariadne.guards.outside import Kinds, Member, Outside

ASKING: dict[CodeType, str] = {  # and the argument that they ask of
    abc.ABCMeta.__instancecheck__.__code__: "instance",
    abc.ABCMeta.__subclasscheck__.__code__: "subclass",
    type(Protocol).__instancecheck__.__code__: "instance",
}


def asked_kind(frame: FrameType) -> list[Outside]:
    """That a question whether something is of an abstract class was answered by no, where it is not torch's own business.

    A yes of such a class stays: nothing takes back what was registered. A protocol looks at what the thing holds, which may come
    and go; so both answers of it count.
    """
    caller, cls = frame.f_back, frame.f_locals.get("cls")
    if caller is None or switches.is_torchs_business(caller.f_globals.get("__name__")):
        return []
    argument = ASKING[frame.f_code]
    thing = frame.f_locals.get(argument)
    kind = thing if argument == "subclass" else type(thing)
    if not isinstance(cls, type) or not isinstance(kind, type) or issubclass(kind, torch.Tensor):
        return []
    asked = f"whether a {kind.__qualname__} is a {cls.__qualname__}"
    member = argument == "instance" and getattr(cls, "_is_protocol", False)
    try:
        if member:
            return [Outside(table := Member(thing), cls, table[cls], asked, owner=thing)]
        return [] if (kinds := Kinds(cls))[kind] else [Outside(kinds, kind, False, asked)]
    except Exception:  # a class that can't be asked so: what it raises is forward's business
        return []
