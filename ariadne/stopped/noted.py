"""What forward did before the cut, noted as it runs: what each call of torch gave, so that it can be skipped elsewhere."""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn

from ariadne import tree
from ariadne.compare import same_bits
from ariadne.errors import BoundaryError, PayloadError
from ariadne.guards import simple
from ariadne.stopped.absent import ADDRESSES, ANSWERED, Absent
from ariadne.stopped.laid import Laid
from ariadne.stopped.plain import Told, told_of
from ariadne.stopped.python import MISSING, Place, PythonState, generators, plainly
from ariadne.stopped.unseen import Unseen

_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parent.parent))
CONTAINERS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    **{name: kind for name, kind in vars(torch.return_types).items() if isinstance(kind, type)},
}
_NAMES = {kind: name for name, kind in CONTAINERS.items()}
_PLAIN = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size})
_INDEX = re.compile(r"\[\d+\]")
Made = tuple[Any, int]  # a place in Python, and which of the tensors made there
Name = tuple[Any, ...]  # ("call", number, leaf), ("input", leaf), ("state", name)


@dataclass
class Wanted:
    """What the suffix uses from before the cut, as far as examples showed it, besides what the cut's module returns.

    `sites`: where in Python tensors were made, or where in the inputs they stand. `state`: names of the model's tensors that the
    prefix writes. `attributes`: those that it changes. `everything` keeps all, to find out. Tensors of so few bytes as `small`
    come too: another path may need them. `names`: nothing but these, where a run without gradients told what Python holds at the
    cut; a graph holds more, made at the same places.
    """

    sites: set[Any] = field(default_factory=set)
    state: set[str] = field(default_factory=set)
    attributes: frozenset[Place] = frozenset()
    everything: bool = False
    small: int = 1 << 12
    names: frozenset[Name] | None = None

    def add(self, used: Iterable[Name], sites: Mapping[Name, Any], attributes: frozenset[Place]) -> None:
        """What one run used, and where that was made."""
        for name in used:
            if name[0] == "state":
                self.state.add(name[1])
            else:
                self.sites.add(sites[name])
        self.attributes |= attributes


@dataclass
class Before:
    """The part before the cut, as data: what stands for each call of torch in it, and what Python changed.

    `calls`: for each, the index of the kind of the new tensor that it gave; or ("is", leaf of its arguments), ("was", name),
    ("plain", value), ("many", class, such entries), ("lost", what it was). `names`: a checksum of the functions' names.
    `attributes`: (place, value at the beginning, value at the cut). `crossing`: which tensors follow those of the module's output.
    `used`: how the state stood that it only reads, by name, as `Stood.told` has it, and `origin` the model where it did.
    `entry`: calls of torch and their checksum before the call of the cut's module, and what `told_of` tells of that; only where
    that call gives one new tensor and leaves nothing else behind, so that what crossed may stand for it unrun.
    `refusal` says why it can't be skipped elsewhere, and is empty where it can.
    """

    kinds: tuple[Absent, ...] = ()
    calls: tuple[Any, ...] = ()
    names: int = 0
    inputs: Any = None
    attributes: tuple[tuple[Place, Any, Any], ...] = ()
    generators: dict[str, Any] = field(default_factory=dict)
    crossing: tuple[Name, ...] = ()
    shared: tuple[int, ...] = ()  # of all that crosses, positions of what shares memory
    written: tuple[str, ...] = ()
    used: dict[str, str] = field(default_factory=dict)
    origin: str = ""
    entry: tuple[Any, ...] = ()
    refusal: str = ""

    def told(self) -> tuple[Any, ...]:
        """As nested plain values; raises `BoundaryError` for what has no such form."""
        lost = next((leaf.what for leaf in tree.leaves(self.inputs) if isinstance(leaf, Lost)), "")
        if self.refusal or lost:
            raise BoundaryError(_STAYS.format(self.refusal or f"forward takes {lost}"))
        return tuple(getattr(self, f.name) for f in fields(self) if f.name != "refusal")

    @classmethod
    def read(cls, told: Any) -> Before:
        """From what `told` gave, which a stranger may have written; raises `PayloadError` for anything else."""
        shape = (tuple, tuple, int, tuple, tuple, dict, tuple, tuple, tuple, dict, str, tuple)
        if type(told) is not tuple or tuple(map(type, told)) != shape:
            raise PayloadError("the payload does not tell what the part before the cut did; refuse the sender")
        found = cls(*told)
        places = [p[0] if type(p) is tuple and len(p) == 3 else None for p in found.attributes]
        names = [*found.crossing, *places]
        sound = (
            all(type(kind) is Absent for kind in found.kinds)
            and all(type(name) is tuple and {*map(type, name)} <= {str, int} and name for name in names)
            and len(found.inputs) == 2
            and type(found.inputs[0]) is tuple
            and type(found.inputs[1]) is dict
            and all(type(name) is str for name in (*found.written, *found.used, *found.used.values()))
            and all(type(i) is int for i in found.shared)
            and found.generators.keys() <= {"random", "numpy"}
            and all(_is_entry(entry, len(found.kinds)) for entry in found.calls)
            and (not found.entry or [*map(type, found.entry)] == [int, int, tuple])
        )
        if not sound:
            raise PayloadError("what the payload tells of the part before the cut is malformed; refuse the sender")
        return found


_STAYS = (
    "this boundary is a forward of the model's own Python that waits in this process, and no bytes can be made of it: {}. Run its "
    "suffix here, once; or cut elsewhere"
)


def _is_entry(entry: Any, kinds: int, depth: int = 8) -> bool:
    """Whether something is an entry of `Before.calls`."""
    if type(entry) is int:
        return 0 <= entry < kinds
    if type(entry) is not tuple or not entry or depth == 0:
        return False
    kind, *rest = entry
    if kind == "many":
        known = len(rest) == 2 and type(rest[0]) is str and rest[0] in CONTAINERS and type(rest[1]) is tuple
        return known and all(_is_entry(e, kinds, depth - 1) for e in rest[1])
    wanted = {"is": int, "was": tuple, "lost": str, "plain": object}.get(kind) if type(kind) is str else None
    return wanted is not None and len(rest) == 1 and isinstance(rest[0], wanted)


class Noting(Unseen):
    """Notes each call of torch until `finish`, in the thread that runs forward."""

    def __init__(self, model: nn.Module, inputs: Any, wanted: Wanted, laid: Laid | None = None) -> None:
        """`laid`: what was laid out of the model before."""
        super().__init__()
        self.wanted, self.names, self.strange = wanted, 0, ""
        self.calls: list[Any] = []
        self.kinds: dict[Absent, int] = {}
        self.made_at: dict[Name, Made] = {}
        self.counts: Counter[Any] = Counter()
        self.made: dict[int, tuple[Any, Name, Any]] = {}  # by id: a weak reference, the name, where it was made
        self.told_inputs = tree.map_leaves(self._input, inputs)
        self.state = dict(state_of(model, laid))
        self.ids = {id(t): name for name, t in self.state.items()}
        self.marks = marks_of(model, self.state, laid)
        self.used: set[str] = set()  # which state a call took
        self.memories: dict[int, str] | None = None  # of that state, by name
        self.views: dict[
            int, tuple[Any, str]
        ] = {}  # by id: a weak reference to what shows state, as `.data` does; its name
        self.behind: set[str] = set()  # state that was written by such, of which its version does not tell
        self.entered: tuple[int, int, Told] | None = None  # as in `Before.entry`, where the module is plain
        self.python = PythonState(model, laid)
        for at, (path, t) in enumerate(tree.paths(inputs)):
            if isinstance(t, torch.Tensor):
                self.made.setdefault(id(t), (weakref.ref(t), ("input", at), _INDEX.sub("[]", path)))

    def begins(self, module: nn.Module) -> None:
        """Note that the call of the cut's module begins."""
        told = told_of(module)
        self.entered = None if told is None else (len(self.calls), self.names, told)

    def _entry_of(self, output: Any) -> tuple[Any, ...]:
        """`Before.entry`, of a call that gave this: where nothing else moved before the cut, and all in it made one new tensor."""
        known = self.made.get(id(output)) if type(output) is torch.Tensor else None
        if self.entered is None or known is None or known[0]() is not output:
            return ()
        kind, at, *_ = known[1]
        return self.entered if kind == "call" and at >= self.entered[0] else ()

    def _knows(self, t: torch.Tensor) -> bool:
        """Whether a call of torch made it here, or it came in."""
        known = self.made.get(id(t))
        return known is not None and known[0]() is t

    def _input(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return Absent.of(leaf) or Lost(f"an input of layout {leaf.layout}, or of a class of its own")
        return leaf if type(leaf) in _PLAIN else Lost(f"an input that is a {type(leaf).__name__}")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ANSWERED or (func in ADDRESSES and not self._knows(args[0])):
            return func(*args, **kwargs)
        at = len(self.calls)
        self.calls.append(("lost", f"what {_name(func)} raises"))
        self.names = crc32(_name(func).encode(), self.names)
        given = [t for t in tree.leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.used.update([self.ids[id(t)] for t in given if id(t) in self.ids])
        strangers = [(t, version_of(t)) for t in given if id(t) not in self.ids and not self._knows(t)]
        shown = [(t, version_of(t)) for t in given if id(t) in self.views and self.views[id(t)][0]() is t]
        found = func(*args, **kwargs)
        self.behind.update([self.views[id(t)][1] for t, was in shown if version_of(t) != was])
        if isinstance(found, torch.Tensor) and (shown or any(id(t) in self.ids for t in given)):
            self._note_view(found)
        if any(version_of(t) != was for t, was in strangers):
            self.strange = (
                self.strange or f"before the cut {_name(func)} writes into a tensor that no call of torch made there"
            )
        self.calls[at] = self._entry(found, func, args, kwargs, at, [0])
        return found

    def _note_view(self, found: torch.Tensor) -> None:
        """Note what shows memory of the model's state, and counts its writes by itself."""
        if self.memories is None:
            self.memories = {memory_of(t): name for name, t in self.state.items()}
        name = self.memories.get(memory_of(found))
        if name is not None and id(found) not in self.ids:
            self.views[id(found)] = weakref.ref(found), name

    def _entry(self, found: Any, func: Any, args: Any, kwargs: Any, at: int, leaf: list[int]) -> Any:
        if isinstance(found, torch.Tensor):
            given = next((i for i, a in enumerate(tree.leaves((args, kwargs))) if a is found), None)
            if given is not None:
                return "is", given
            if id(found) in self.ids:
                return "was", ("state", self.ids[id(found)])
            known = self.made.get(id(found))
            if known is not None and known[0]() is found:
                return "was", known[1]
            kind = Absent.of(found)
            if kind is None:
                return "lost", f"a tensor of layout {found.layout}, or of a class of its own, made by {_name(func)}"
            number, leaf[0] = leaf[0], leaf[0] + 1
            place = place_of_call(3)
            self.made[id(found)] = weakref.ref(found), ("call", at, number), (func, place)
            self.made_at["call", at, number] = place, self.counts[place]
            self.counts[place] += 1
            return self.kinds.setdefault(kind, len(self.kinds))
        if func in ADDRESSES:
            return "lost", "where in memory a tensor's data lie"
        kind_of = type(found)
        if kind_of in _PLAIN:
            return "plain", found
        if kind_of in _NAMES:
            return "many", _NAMES[kind_of], tuple([self._entry(f, func, args, kwargs, at, leaf) for f in found])
        return "lost", f"a {kind_of.__name__}, which {_name(func)} gives"

    def finish(self, output: Any) -> tuple[Before, list[torch.Tensor]]:
        """What was done, and the tensors that cross after those of the module's output."""
        wanted = self.wanted
        of_output = [t for t in tree.leaves(output) if isinstance(t, torch.Tensor)]
        ids = {id(t) for t in of_output}
        alive = [
            (name, site, t)
            for ref, name, site in self.made.values()
            if (t := ref()) is not None and id(t) not in ids and (wanted.names is None or name in wanted.names)
        ]
        used = [(name, t) for name, site, t in alive if wanted.everything or site in wanted.sites]
        taken = {memory_of(t) for t in (*of_output, *self.state.values(), *(t for _, t in used))}
        for name, site, t in alive:
            if site not in wanted.sites and memory_of(t) not in taken and t.numel() * t.element_size() <= wanted.small:
                taken.add(memory_of(t))
                used.append((name, t))
        crossing: list[Name] = [name for name, _ in used]
        tensors = [t for _, t in used]
        self.site_of = {name: site for _, name, site in self.made.values()}
        written = [n for n, t in self.state.items() if n in self.behind or not stands(t, self.marks[n])]
        for of_model in written:
            if wanted.everything or of_model in wanted.state:
                crossing.append(("state", of_model))
                tensors.append(self.state[of_model].detach().clone())
        refusal = self._refusal(of_output, tensors)
        attributes = []
        for place, _, before, after in self.python.changes():
            if not (_known(before) and _known(after)):
                refusal = (
                    refusal or f"forward changes the attribute {place[2]!r} of {place[0] or 'the model'} before the cut"
                )
            attributes.append((place, _told(before), _told(after)))
        began, now = plainly(self.python.generators), plainly(generators())
        moved = {name: state for name, state in began.items() if state != now[name]}
        entry = () if attributes or moved or written or refusal else self._entry_of(output)
        return Before(
            tuple(self.kinds), tuple(self.calls), self.names, self.told_inputs, tuple(attributes), moved, tuple(crossing),
            _sharing([*of_output, *tensors]), tuple(written), entry=entry, refusal=refusal,
        ), tensors  # fmt: skip

    def _refusal(self, output: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> str:
        if self.strange:
            return self.strange
        where = self.python.changed_inside()
        if where is not None:
            return f"before the cut forward changes what {where.lstrip('.')!r} holds"
        own = {memory_of(t): name for name, t in self.state.items()}
        name = next(
            (own[memory_of(t)] for t in (*output, *kept) if memory_of(t) in own and id(t) not in self.ids), None
        )
        return "" if name is None else f"a view of {name!r}, a tensor of the model, crosses"


class Lost:
    """An input leaf that has no form as data; `what` it is, in words."""

    def __init__(self, what: str) -> None:
        self.what = what


def state_of(model: nn.Module, laid: Laid | None = None) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a model by name, those in plain attributes too, each once."""
    return (laid or Laid()).state(model)


def marks_of(model: nn.Module, state: Mapping[str, torch.Tensor], laid: Laid | None = None) -> dict[str, Any]:
    """What tells by `stands` whether each of these tensors of a model was written into.

    Running statistics don't count their writes, nor do tensors made under inference mode, so of them a copy is kept.
    """
    if not state:
        return {}
    averages = (laid or Laid()).averages(model)
    marks: dict[str, Any] = {}
    for name, t in state.items():
        untold = id(t) in averages or (t.is_inference() and not isinstance(t, nn.Parameter))
        marks[name] = version_of(t), t.detach().clone() if untold else None
    return marks


def stands(t: torch.Tensor, mark: Any) -> bool:
    """Whether a tensor holds what it held."""
    version, was = mark
    return version_of(t) == version and (was is None or same_bits(t, was))


def place_of_call(depth: int) -> Any:
    """The place in Python, outside of torch and of this package, from where torch is called, so many frames further out."""
    frame = sys._getframe(depth)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def _name(func: Any) -> str:
    return getattr(func, "__name__", None) or type(func).__name__


def version_of(t: torch.Tensor) -> int:
    """How often a tensor was written into; 0 for those made under inference mode, which don't count it."""
    return 0 if t.is_inference() else t._version


def memory_of(t: torch.Tensor) -> int:
    """What tells the memory of a tensor from that of others."""
    try:
        return int(t.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(t)


def _sharing(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The positions of tensors that share memory with another one of these."""
    memories = [memory_of(t) for t in tensors]
    return tuple(i for i, m in enumerate(memories) if memories.count(m) > 1)


def _known(value: Any) -> bool:
    return value is MISSING or simple(value) or all(isinstance(v, torch.Tensor) for v in tree.leaves(value))


def _told(value: Any) -> Any:
    """A value that an attribute had: nothing, the value in a tuple of one, or "tensors", which each side has for itself."""
    if value is MISSING:
        return ()
    return (value,) if simple(value) else "tensors"
