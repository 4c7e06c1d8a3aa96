"""The calls of modules that a forward makes: one run is measured, and each call at whose end it may be cut becomes a candidate."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from ariadne import tree
from ariadne.capture import TORCH, Looking, Patches, capturing, noted
from ariadne.cut import Boundary, Objective, around, best
from ariadne.errors import FrontierError, named, nearest
from ariadne.runtime import Owned
from ariadne.stopped.ambient import Saving, switched, switches

WITHIN = (
    "it lies within torch.utils.checkpoint, whose part the backward pass runs again from its beginning: once in the whole model, "
    "and once for each half"
)


@dataclass(frozen=True, slots=True)
class CallCandidate:
    """The end of one call of a module, where forward can be stopped.

    `cut`: the ops that ran before, as counted for the example. `after`, `call`: the module's path and which of its calls;
    `calls`: how many there were. `boundary_bytes`: of all tensors that were made before and used after. `trainable`: a parameter
    that requires grad was used after, `trainable_prefix`: before. `reason` says why it is not `safe`, and is empty where it is.
    `untrained`: why it does for inference alone.
    """

    cut: int
    after: str
    call: int
    calls: int
    boundary_bytes: float
    prefix_ops: int
    suffix_ops: int
    trainable: bool
    trainable_prefix: bool
    reason: str
    untrained: str = ""

    @property
    def split_id(self) -> str:
        """The string that names this cut of its model."""
        return f"after:{self.after}" + (f"#{self.call}" if self.calls > 1 else "")

    @property
    def safe(self) -> bool:
        """Whether forward can be stopped there."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a model while its tensors are in this `state`: all, those that `came` since, and by side."""

    state: object
    every: list[nn.Parameter]
    came: list[tuple[str, nn.Parameter]]
    sides: tuple[list[nn.Parameter], list[nn.Parameter]]
    owned: Owned


@dataclass
class Measured:
    """What one run of a forward did: its result, its calls, and where each parameter was used, by op."""

    output: Any = None
    ops: int = 0
    ends: list[tuple[int, str, int, str]] = field(default_factory=list)  # ops so far, module, which call, why not there
    counts: Counter[str] = field(default_factory=Counter)
    uses: dict[str, list[int]] = field(default_factory=dict)  # each parameter, by all of its names: ops that read it
    known: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)  # the same parameters, with a name
    spans: list[tuple[int, int, int]] = field(default_factory=list)  # of other memory: made, last read, bytes
    drew: set[str] = field(default_factory=set)  # the random generators of the process that it drew from
    needs_gradients: bool = False  # forward raises without, as where it calls torch.autograd.grad
    saving: dict[tuple[str, int], Saving] = field(
        default_factory=dict
    )  # the calls that end within torch.utils.checkpoint

    def splits(self, path: str, call: int) -> bool:
        """Whether a cut there would have a part under `torch.utils.checkpoint` run again for each side."""
        saving = self.saving.get((path, call))
        return saving is not None and saving.is_split

    def sides(self, model: nn.Module, cut: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters that were used before a cut, and those after: the same ones, and others that stand in their places."""
        sides: tuple[dict[int, nn.Parameter], ...] = {}, {}
        for name, p in model.named_parameters(remove_duplicate=False):
            for op in self.uses.get(name if name in self.uses else self.known.get(p, name), ()):
                sides[op > cut][id(p)] = p
        before, after = sides
        return [*before.values()], [*after.values()]

    def parameters(self, model: nn.Module, cut: int, state: object) -> Parameters:
        """Which there are now, with a cut there."""
        every, sides = [*model.named_parameters()], self.sides(model, cut)
        came = [(name, p) for name, p in every if not self.knows(name, p)]
        return Parameters(state, [p for _, p in every], came, sides, Owned.of(*sides))

    def knows(self, name: str, p: nn.Parameter) -> bool:
        """Whether a parameter of this name was there, or this one by another."""
        return name in self.uses or p in self.known

    def candidates(self, model: nn.Module) -> tuple[CallCandidate, ...]:
        """Every call of a module that ended with ops before and after it, in order."""
        found = []
        for cut, path, call, reason in self.ends:
            weight = sum(size for made, last, size in self.spans if made <= cut < last)
            before, after = ([p for p in side if p.requires_grad] for side in self.sides(model, cut))
            rest = self.ops - cut
            if not reason and not (cut and rest):
                reason = f"no op runs {'after' if cut else 'before'} that point, so one side would be empty"
            untrained = WITHIN if self.splits(path, call) else "" if after else "no parameter after it requires grad"
            made = CallCandidate(
                cut,
                path,
                call,
                self.counts[path],
                float(weight),
                cut,
                rest,
                bool(after),
                bool(before),
                reason,
                untrained,
            )
            found.append(made)
        return tuple(found)


class _Counting(Looking):
    """Counts ops, and notes what memory each reads and makes."""

    def __init__(self, found: Measured, model: nn.Module, inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found
        self.parameters: dict[int, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            found.uses[name] = []
            found.known[p] = name
            self.parameters.setdefault(_memory(p), []).append(name)
        self.at_hand = {_memory(t) for t in (*model.parameters(), *model.buffers())}
        self.made: dict[int, tuple[int, int]] = {}  # memory: when, bytes
        self.read: dict[int, int] = {}
        for t in tree.leaves(inputs):
            if isinstance(t, torch.Tensor):
                self.made[_memory(t)] = 0, _bytes(t)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.found.ops += 1
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.found.drew.add(TORCH)
        now = self.found.ops
        given = {_memory(t) for t in tree.leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for memory in given:
            for parameter in self.parameters.get(memory, ()):
                self.found.uses[parameter].append(now)
            if memory in self.made:
                self.read[memory] = now
        output = func(*args, **kwargs)
        for t in tree.leaves(output):
            if isinstance(t, torch.Tensor) and (memory := _memory(t)) not in given and memory not in self.at_hand:
                self._close(memory)
                self.made[memory] = now, _bytes(t)
        return output

    def _close(self, memory: int) -> None:
        """Memory is given to another tensor now."""
        if memory in self.made:
            made, size = self.made.pop(memory)
            if memory in self.read:
                self.found.spans.append((made, self.read.pop(memory), size))

    def finish(self, output: Any) -> None:
        """What is returned is used at the end."""
        for t in tree.leaves(output):
            if isinstance(t, torch.Tensor) and _memory(t) in self.made:
                self.read[_memory(t)] = self.found.ops + 1
        for memory in [*self.made]:
            self._close(memory)


def measure(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], drew: set[str], *, plainly: bool = False
) -> Measured:
    """Run forward, and note where the calls of its modules end, and in `drew` what it draws from, also where it raises.

    `plainly`: classes of tensors are called, as `Marked(x)`, past all that counts: torch raises there in a `TorchDispatchMode`.
    """
    with capturing():
        return _measured(model, args, kwargs, drew, plainly)


def _measured(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], drew: set[str], plainly: bool
) -> Measured:
    found, paths = Measured(drew=drew), {id(m): path for path, m in reversed([*model.named_modules()]) if path}
    began, patches, me = switches(), Patches(), get_ident()
    counting = _Counting(found, model, (args, kwargs))
    original: Callable[..., Any] = nn.Module.__call__

    def call(self: nn.Module, *given: Any, **options: Any) -> Any:
        path = paths.get(id(self))
        if path is None or get_ident() != me or torch._C._len_torch_dispatch_stack() == 0:
            return original(self, *given, **options)
        found.counts[path] += 1
        number = found.counts[path]
        output = original(self, *given, **options)
        reason = ""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            reason = "it lies within a transform of torch.func, which can't be left and entered again"
        elif moved := switched(began, switches()):
            reason = f"forward has changed a switch of the whole process there, and puts it back later: {moved}"
        if (saving := Saving.now()) is not None:
            found.saving[path, number] = saving
        found.ends.append((found.ops, path, number, reason))
        return output

    patches.set(nn.Module, "__call__", call)
    if plainly:
        patches.set(torch.Tensor, "__new__", staticmethod(_made_plainly))
    torch.clear_autocast_cache()  # a weight that it has cast already would not be seen to be read
    try:
        with counting, noted(drew):
            found.output = model(*args, **kwargs)
            counting.finish(found.output)
    finally:
        patches.restore()
    return found


_make: Callable[..., Any] = torch.Tensor.__new__


def _made_plainly(cls: Any, *args: Any, **kwargs: Any) -> Any:
    with _disable_current_modes():
        return _make(cls, *args, **kwargs)


def choose(
    found: Sequence[CallCandidate], boundary: Boundary, ops: int, *, trainable: bool, objective: Objective | None
) -> CallCandidate:
    """The candidate that a boundary string means; raises `FrontierError` with the reason and the nearest ones."""
    if boundary.kind == "cut":
        raise FrontierError(
            f"'cut:{boundary.cut}' counts ops of a plan, and this split has none: its forward runs as Python. Take "
            f"'after:<module>', a percentage, or one of runtime.candidates"
        )
    pool = [c for c in found if c.safe and not (trainable and c.untrained)]
    if boundary.kind == "after":
        return _named(found, pool, boundary, trainable)
    if not pool:
        raise FrontierError(
            f"none of the {len(found)} calls of modules that forward makes will do"
            + (f"; the first: {found[0].reason or found[0].untrained}" if found else "")
            + ". Split a larger model, or pass trainable=False"
        )
    if boundary.kind == "percent":
        return around(ops, pool, boundary.percent)
    return best(ops, pool, objective)


def _named(
    found: Sequence[CallCandidate], pool: Sequence[CallCandidate], boundary: Boundary, trainable: bool
) -> CallCandidate:
    mine = [c for c in found if c.after == boundary.module]
    asked = f"cannot split after {boundary.module!r}"
    if not mine:
        near = nearest(boundary.module, [c.after for c in found])
        raise FrontierError(f"{asked}: forward calls no module of that name" + (f". Nearest: {near}" if near else ""))
    if boundary.call is None and len(mine) > 1:
        raise FrontierError(
            f"{asked}: forward calls it {len(mine)} times; say which, from 'after:{boundary.module}#1' to "
            f"'after:{boundary.module}#{len(mine)}'"
        )
    number = boundary.call or 1
    chosen = next((c for c in mine if c.call == number), None)
    if chosen is None:
        raise FrontierError(
            f"cannot split after call {number} of {named(boundary.module)}: forward calls it {len(mine)} time(s); write "
            f"'after:{boundary.module}#{len(mine)}' for the last"
        )
    if chosen not in pool:
        names = nearby(pool, chosen)
        why = chosen.reason or f"{chosen.untrained}, and trainable=True"
        raise FrontierError(f"{asked}: {why}. " + (f"Nearest: {names}" if names else "No call will do"))
    return chosen


def nearby(found: Sequence[CallCandidate], chosen: CallCandidate) -> str:
    """The names of the other safe cuts that are nearest to one."""
    others = (c for c in found if c.safe and c != chosen)
    return ", ".join(repr(c.split_id) for c in sorted(others, key=lambda c: abs(c.cut - chosen.cut))[:3])


def signature_of(model: nn.Module, candidate: CallCandidate, measured: Measured) -> str:
    """What is one for two splits of models that are alike, in any process: modules, their tensors, the calls of the example."""
    told = [
        (
            path,
            type(m).__qualname__,
            [(n, str(t.dtype), tuple(t.shape)) for n, t in m._parameters.items() if t is not None],
        )
        for path, m in model.named_modules()
    ]
    text = repr((told, candidate.split_id, [end[1:3] for end in measured.ends]))
    return f"python-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _memory(t: torch.Tensor) -> int:
    try:
        return int(t.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, or in a library's own layout
        return id(t)


def _bytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()
