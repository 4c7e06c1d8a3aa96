"""Listed: where forward looks through the names that a module has: its attributes, or its parts, parameters and buffers."""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn

from ariadne.capture.recorder import Recorder
from ariadne.capture.refusals import Patches, called_by_torch
from ariadne.guards import BOOKKEEPING, Recording

TABLES = frozenset({"__dict__", "_buffers", "_modules", "_non_persistent_buffers_set", "_parameters"})
_OF_ONE = ("children", "named_children")
_OF_ALL = ("__repr__", "modules", "named_modules", "state_dict")


def patch(recorder: Recorder, paths: Mapping[int, str], patches: Patches) -> None:
    """Note the modules that forward asks for what they hold, by methods of `nn.Module`."""

    def asked(plain: Callable[..., Any], note: Callable[[nn.Module], None], self: nn.Module, given: Any) -> Any:
        if id(self) in paths and recorder.is_mine() and not called_by_torch(3):
            with recorder.aside():
                note(self)
        return plain(self, *given[0], **given[1])

    def watch(name: str, note: Callable[[nn.Module], None]) -> None:
        ask = partial(asked, getattr(nn.Module, name), note)
        patches.set(nn.Module, name, lambda self, *args, **kwargs: ask(self, (args, kwargs)))

    def tables(every: bool, self: nn.Module) -> None:
        found = all_modules(self) if every else [self]
        recorder.recording.tabled |= {paths[id(m)] for m in found if id(m) in paths}

    all_modules = nn.Module.modules
    watch("__dir__", lambda self: recorder.recording.listed.add(paths[id(self)]))
    for name in (*_OF_ONE, *_OF_ALL):
        watch(name, partial(tables, name in _OF_ALL))


def note(
    found: Recording, path: str, name: str, held: Mapping[str, Any], read: Callable[[str], Any], frame: FrameType
) -> None:
    """Note that forward has one of a module's tables at hand: what it looks up in there, and what it misses, nobody sees.

    Save for `self.__dict__.pop("name", None)` and `.get("name")`, in whose code, that of the `frame`, the one name stands, and
    which look for what forward itself did not put there.
    """
    if name != "__dict__":
        found.tabled.add(path)
        return
    alone = asked_alone(frame.f_code, frame.f_lasti)
    if alone is not None and alone not in BOOKKEEPING and (path, alone) not in found.written:
        if alone in held:
            read(alone)
        else:
            found.missing.add((path, alone))
        return
    found.listed.add(path)
    for key in [k for k in held if k not in BOOKKEEPING]:
        read(key)


@lru_cache(maxsize=4096)
def asked_alone(code: CodeType, at: int) -> str | None:
    """The one name that code looks up in what the instruction at this place gives, by `pop` or `get`; None where it does another
    thing with it, and so may keep it."""
    steps = iter([step for step in dis.get_instructions(code) if step.offset >= at and step.opname != "CACHE"])
    first, method = next(steps, None), next(steps, None)
    if first is None or first.argval != "__dict__" or method is None or method.argval not in ("pop", "get"):
        return None
    given = []
    for step in steps:
        if step.opname == "LOAD_CONST":
            given.append(step.argval)
        elif step.opname != "PRECALL":
            called = step.opname == "CALL" and step.argval == len(given)
            return given[0] if called and given and type(given[0]) is str else None
    return None


@cache
def asks_object(cls: Any) -> bool:
    """Whether a method of a module's class asks `object.__getattribute__` for attributes, of which torch's own does not hear."""
    methods = (f for c in cls.__mro__ if c.__module__.partition(".")[0] != "torch" for f in vars(c).values())
    return any("__getattribute__" in f.__code__.co_names for f in methods if isinstance(f, FunctionType))
