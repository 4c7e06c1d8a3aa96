"""What was seen of one forward: the ops that ran, and all that Python looked at, wrote and changed beside them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import nn

from ariadne.guards.effects import Change, Place
from ariadne.guards.opened import State
from ariadne.guards.outside import Outside
from ariadne.guards.readers import Reads
from ariadne.guards.world import Question
from ariadne.plan import Region


@dataclass(slots=True)
class Event:
    """One op as it ran: `target` an OpOverload, or a Python callable kept whole; tensors in `args` are live objects.

    `within`: the model's own tensors that ops in a callable read, besides its arguments.
    """

    target: Any
    args: tuple[Any, ...]
    out: Any
    module: str
    call: int
    region: Region
    effect: Effect | None = None
    within: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Effect:
    """What a function that is kept whole may do: the tensors that it may write into or give back, and whether it may draw."""

    writes: tuple[torch.Tensor, ...]
    aliases: tuple[torch.Tensor, ...]
    draws: bool


# The path of a module and an attribute's name, its value before a first call and after, and what that call fills beside it.
Flag = tuple[str, str, bool, bool, tuple[tuple[str, str], ...]]


@dataclass(slots=True)
class Recording:
    """All that was seen of one forward. `backwards`: the events of each backward pass inside it, and the module's name."""

    events: list[Event] = field(default_factory=list)
    calls: list[list[Any]] = field(default_factory=list)
    left_by_parts: dict[int, str] = field(default_factory=dict)  # the memory that opaque parts left in Python
    read_attributes: dict[tuple[str, str], tuple[nn.Module, Any, int]] = field(default_factory=dict)
    written: set[tuple[str, str]] = field(default_factory=set)
    missing: set[tuple[str, str]] = field(default_factory=set)
    listed: set[str] = field(default_factory=set)  # modules whose names it looked through
    tabled: set[str] = field(default_factory=set)  # modules whose parts, parameters and buffers it did
    looked: set[str] = field(default_factory=set)
    asked: set[int | None] = field(default_factory=set)  # storages of the model's tensors whose type it asked
    sized: dict[int, torch.Tensor] = field(default_factory=dict)  # by its id, what ops made and it asked for a size
    decided_by_size: set[int | None] = field(
        default_factory=set
    )  # storages of the model's tensors that decide such sizes
    raised: bool = False  # an op has, and forward may have gone on
    failed: str = ""  # what raised by the data that it was given, in words
    opaque: bool = False  # parts ran that are taken as they are
    outside_of_parts: set[tuple[int, Any]] = field(default_factory=set)  # what Python changed outside of such parts
    numbers: dict[str, Any] | None = None  # how the last such part left Python's own generators
    scripted: bool = False  # functions under torch.jit.script ran
    drew: set[str] = field(
        default_factory=set
    )  # the generators of the process it drew from, as `capture.generators` names them
    disturbed: bool = False  # another thread drew from torch's while forward drew
    beside: bool | None = None  # whether another thread draws from numpy's, once that was asked
    elsewhere: str = ""  # what another thread did for it that no plan does, in words
    repeated: set[tuple[int, Any]] = field(default_factory=set)  # and inside of parts that the backward pass runs again
    overtaken: str = ""  # what such a part puts somewhere, and forward something else later, in words
    read_size: str = ""  # why a symbolic plan would hold for one batch, should forward go on after it was told
    output: Any = None
    stores: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)
    changed: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    containers: list[tuple[Any, Any]] = field(default_factory=list)
    effects: dict[Place, Change] = field(default_factory=dict)  # what it did to containers
    made_of: dict[str, Any] | None = None  # what a first call filled, and of what; of a real run
    left: dict[Any, Any] = field(default_factory=dict)  # what stands where it filled something, as plain values
    decided: frozenset[tuple[str, str]] = frozenset()  # attributes for which what a first call left there decides
    remembered: list[Any] = field(default_factory=list)  # what functions had kept before, and were asked again
    called_before: frozenset[tuple[str, str]] = frozenset()  # attributes that an earlier call had filled
    # What stood in those, and in others that are filled with them.
    stood: dict[tuple[str, str], Any] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)
    stands: dict[int, set[Any]] = field(default_factory=dict)  # by the id of a dict that moved, what it holds as before
    backwards: list[tuple[int, int, str]] = field(default_factory=list)
    outside: list[Outside] = field(default_factory=list)
    defaults: dict[int, dict[Any, Any]] = field(
        default_factory=dict
    )  # by a dict's id, what it put there where it found nothing
    marks: set[tuple[str, int | None]] = field(
        default_factory=set
    )  # attributes that tensors of these storages don't have
    ungraded: set[int | None] = field(
        default_factory=set
    )  # storages of buffers of which it heard that they have no gradient
    unseen: str = ""  # of a real run: what Python read that no guard can see, in words
    moving: list[tuple[str, State]] = field(
        default_factory=list
    )  # things of Python's own that it changed, by their names
    outsiders: dict[str, nn.Module] = field(default_factory=dict)  # outside of the model, by what messages call them
    foreign: set[str] = field(default_factory=set)  # modules that another module's code looked at
    used: set[str] = field(default_factory=set)  # modules of which anything was read
    names: set[str] = field(default_factory=set)  # of a real run: those in the code that ran
    assigned: set[str] = field(default_factory=set)  # of a real run: attributes that the code that ran assigns
    filled: set[str] = field(default_factory=set)  # and those it reads where it puts something into a container
    whole: dict[int, Any] = field(default_factory=dict)  # objects of which it may have read any
    by_name: set[str] = field(default_factory=set)  # of a real run: names by which it asked, and which stand in no code
    reads: Reads | None = None  # of a real run: what it read of objects whose class tells
    switches: set[str] = field(default_factory=set)  # settings of torch that Python asked for
    codes: set[CodeType] = field(default_factory=set)  # of a real run: those of functions of the user's that ran
    compared: str = ""  # the function that compares by `is` what may be a size
    deaf: bool = False  # it ran a profiler of its own, and nobody looked on
    world: dict[str, Question] = field(default_factory=dict)  # what it asked the machine
    registered: set[tuple[type, str]] = field(default_factory=set)  # found in a registry of a module of this class
    flags: list[Flag] = field(default_factory=list)  # of a first call
    again: dict[int, torch.Tensor] = field(default_factory=dict)  # by an alias of it, what an op gave back as it was
    unchanged: dict[int, torch.Tensor] = field(default_factory=dict)  # the same by a fake tensor of it

    # By a tensor's id, what it was before ops changed its sizes in place, each with the event that did.
    reshaped: dict[int, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)

    # By the id of what `t.data` gave, that and the tensor it was asked of, where no op made it.
    data_of: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def reshapes(self, t: torch.Tensor) -> None:
        """Take note of a tensor whose sizes the next event changes in place."""
        self.reshaped.setdefault(id(t), []).append((len(self.events), t.detach()))

    def before(self, t: torch.Tensor, event: int) -> torch.Tensor:
        """A tensor of the sizes that it had before an event ran."""
        return next((was for at, was in self.reshaped.get(id(t), ()) if at >= event), t)

    def forget_tensors(self) -> None:
        """Let go of what the ops took and gave."""
        self.events.clear()
        self.reshaped.clear()
        self.sized.clear()
        self.again.clear()
        self.unchanged.clear()
        self.data_of.clear()
        self.effects.clear()


def flags_set(recordings: Collection[Recording]) -> set[str]:
    """The modules whose training flag forward sets before it reads it, or of which results don't follow what it was."""
    before = {path for recorded in recordings for path, name in recorded.read_attributes if name == "training"}
    first = {path for recorded in recordings for path, name in recorded.written if name == "training"} - before
    return first | {path for recorded in recordings for path, name, *_ in recorded.flags if name == "training"}
