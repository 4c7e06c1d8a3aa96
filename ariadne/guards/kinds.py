"""Kinds: what abstract classes say is derived from them, which others can be registered with later."""

from __future__ import annotations

import abc
from types import CodeType, FrameType

from ariadne.guards import switches
from ariadne.guards.outside import Kinds, Outside

ASKING: dict[CodeType, str] = {  # and the argument that they ask of
    abc.ABCMeta.__instancecheck__.__code__: "instance",
    abc.ABCMeta.__subclasscheck__.__code__: "subclass",
}


def asked_kind(frame: FrameType) -> list[Outside]:
    """That a question whether something is of an abstract class was answered by no, where it is not torch's own business.

    A yes stays: nothing takes back what was registered.
    """
    caller, cls = frame.f_back, frame.f_locals.get("cls")
    if caller is None or switches.is_torchs_business(caller.f_globals.get("__name__")):
        return []
    argument = ASKING[frame.f_code]
    thing = frame.f_locals.get(argument)
    kind = thing if argument == "subclass" else type(thing)
    if not isinstance(cls, type) or not isinstance(kind, type):
        return []
    kinds = Kinds(cls)
    return (
        [] if kinds[kind] else [Outside(kinds, kind, False, f"whether a {kind.__qualname__} is a {cls.__qualname__}")]
    )
