"""A variant: one plan of a model, cut at one place, with its guards and its two segments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ariadne.boundary import BoundaryPayload, Memo
from ariadne.capture import is_opaque_call
from ariadne.cut import (
    MODES,
    SIDES,
    Boundary,
    CompileOptions,
    ExecutionMode,
    Objective,
    Slot,
    SplitCandidate,
    SplitSpec,
    State,
    held_by_itself,
    others_read,
    parameters_read,
    parts,
)
from ariadne.errors import (
    AriadneError,
    GuardError,
    InputError,
    ModuleError,
    SpecError,
    TrainingError,
    named,
)
from ariadne.guards import (
    Baseline,
    ModuleGuard,
    StateGuard,
    entrance,
    follow,
    has_grown,
    refuse_pushed_out,
    shown,
    switches,
    telling_batch,
)
from ariadne.imports import imported
from ariadne.plan import Apart, Groups, TraceNode, TracePlan, Value, as_bytes, uses
from ariadne.runtime.caught import refuse_caught
from ariadne.runtime.moved import Getter, Moves, getter, refuse_resized
from ariadne.runtime.owners import Owned, PrefixMemory, SideSlots
from ariadne.runtime.shared import rest
from ariadne.runtime.standing import flight_of, refuse_filled
from ariadne.segment import Interpreter, Source, emit, halting, load

if TYPE_CHECKING:
    from ariadne.compiled import SegmentReport


OnChange = Literal["capture", "refuse"]  # what a call does that finds the model changed
ON_CHANGE = ("capture", "refuse")


@dataclass(frozen=True)
class Settings:
    """How a runtime was asked to be: kept so that it can cut, capture and copy itself again."""

    spec: SplitSpec
    boundary: Boundary
    mode: ExecutionMode
    objective: Objective | None
    compile_options: Mapping[str, Any] | None
    on_change: OnChange = "refuse"

    def __post_init__(self) -> None:
        """Raises `SpecError` for a mode that there is not, and for options that don't go with it; they are copied."""
        if self.on_change not in ON_CHANGE:
            raise SpecError(f"on_change is one of {', '.join(map(repr, ON_CHANGE))}; found {self.on_change!r}")
        if self.mode not in MODES:
            raise SpecError(f"mode must be one of {', '.join(map(repr, MODES))}; found {self.mode!r}")
        if self.compile_options is not None and not isinstance(self.compile_options, Mapping):
            raise SpecError(f"compile_options is a mapping of options of torch.compile; found {self.compile_options!r}")
        if self.compile_options and self.mode != "compiled":
            raise SpecError(f"compile_options go with mode='compiled'; the mode here is {self.mode!r}")
        if self.mode == "compiled":
            CompileOptions.parse(self.compile_options)
        if self.compile_options is not None:
            object.__setattr__(self, "compile_options", dict(self.compile_options))


class Absent:
    """Stands for a side of a cut that is not here: whatever is asked of it raises `SpecError`."""

    def __init__(self, here: str) -> None:
        self.here, self.there = here, SIDES[here == SIDES[0]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise SpecError(
            f"this is the {self.here} alone, and that call needs the {self.there}: load it from its own file, here or where it runs"
        )

    def __getattr__(self, name: str) -> Any:
        return self()


class Variant:
    """One plan, cut: its guards, its segments, and what it assumes. Where the plan holds one side alone, the other is `Absent`."""

    def __init__(self, plan: TracePlan, candidates: tuple[SplitCandidate, ...], candidate: SplitCandidate,
                 model: nn.Module, baseline: Baseline, settings: Settings) -> None:  # fmt: skip
        self.plan, self.candidates, self.candidate, self.model = plan, candidates, candidate, model
        self.settings, self.baseline = settings, baseline
        self.key = (plan.signature, candidate.split_id)
        self.moved, self.modules = baseline.types, baseline.modules
        self.parts = {
            p.name: p for p in parts(plan, (candidate,), SIDES) if plan.apart is None or plan.apart.part == p.name
        }
        nobody: Any = Absent(plan.apart.part) if plan.apart is not None else None
        guards = {p.name: ModuleGuard(plan, range(p.start, p.stop), baseline) for p in self.parts.values()}
        self.prefix_guard, self.suffix_guard = (guards.get(name, nobody) for name in SIDES)
        # What a call asks at its door: where a change gets a plan of its own, of the suffix too, since the prefix is to run by it.
        follows = settings.on_change == "capture" and len(guards) == len(SIDES)
        self.guard = (
            ModuleGuard(plan, range(plan.first, plan.first + len(plan.nodes)), baseline)
            if follows
            else self.prefix_guard
        )
        self.enter, self.suffix_state = nobody, nobody
        try:
            if "suffix" in guards:
                nodes, paths = self.parts["suffix"].nodes(plan), guards["suffix"].modules
                self.suffix_state = StateGuard(plan, candidate.cut, nodes, model, baseline, paths)
            if "prefix" in guards:
                self.enter = telling_batch(entrance(plan, model, baseline), baseline)
            sources = {p.name: emit(plan, p, model) for p in self.parts.values()}
            self.prefix_source, self.suffix_source = (sources.get(name, nobody) for name in SIDES)
            self.reads = {p.name: parameters_read(plan, p) for p in self.parts.values()}
            module = cache(model.get_submodule)
            slots = {
                side: [
                    *((module(path)._parameters, key) for path, key in found),
                    *(_slot(v, plan, model) for v in others_read(plan, self.parts[side])),
                ]
                for side, found in self.reads.items()
            }
        except (AttributeError, LookupError, TypeError):  # a module or a tensor of the plan is gone: say which
            for guard in guards.values():
                guard.explain()
            raise
        written = (name for name in candidate.written if plan.values[name].differentiable)
        self.copied = tuple((candidate.live.index(name), name) for name in written)
        known = plan.apart or told_apart(plan, candidate)
        self.cast, self.sized_by_data = known.cast, known.sized_by_data
        end = self.parts["prefix"].stop if "prefix" in self.parts else candidate.cut
        self.flight, self.state = flight_of(model), State(plan, Groups(plan)).sides(end, candidate.live)
        self.kept = frozenset(map(candidate.live.index, self.state.crossing))
        self.held = tuple(sorted({*known.reachable} | self.kept))  # positions of what others may write into
        silent = self.state.silent
        self.quiet = tuple(i for i in sorted(self.kept) if candidate.live[i] in silent)
        self._watched: list[tuple[Getter, bool]] = [
            (getter(v, model) if v.is_state else partial(plan.constants.__getitem__, v.name), v.name in silent)
            for v in self.state.watched
        ]
        read = dict.fromkeys(self.parts["prefix"].reads(plan)) if "prefix" in self.parts else ()
        getters = [getter(plan.values[n], model) for n in read if n in plan.values and plan.values[n].is_state]
        self.before = PrefixMemory(lambda: [get() for get in getters])
        self._ungraphed = [(name, getter(plan.values[name], model)) for name in candidate.ungraphed]
        apart = [(module(path)._parameters, key) for path, key in known.shared] if plan.apart else []
        # Of a side that is not here, those that it shares.
        self._slots = SideSlots([slots.get(side, apart) for side in SIDES])
        self._fills: list[tuple[Slot, dict[str, Any]]] = [
            ((s.path, s.name), baseline.modules[s.path]._buffers) for s in plan.stores if baseline.is_filled_by(s)
        ]
        self.opaque = any(map(is_opaque_call, plan.nodes))
        self._switches = switches.readers(plan.assumption.switches)
        self.taken = Memo()  # the kinds of boundaries from elsewhere that fit
        label = f"{candidate.split_id} of {type(model).__name__}"
        self.reports: list[SegmentReport] = []

        def segment(source: Source) -> Callable[..., Any]:
            part = self.parts[source.name]
            if settings.mode == "debug_interpreter":
                return Interpreter(plan, part, model)
            if settings.mode == "compiled":
                self.reports.append(imported("ariadne.compiled").SegmentReport(source.name, candidate.split_id))
                made: Callable[..., Any] = imported("ariadne.compiled").compiled(
                    source, plan, part.nodes(plan), label, settings.compile_options, self.reports[-1]
                )
                return made
            return load(source, label)

        self.prefix_moves, self.suffix_moves = self._moves(model)
        self._load: Callable[[Source], Callable[..., Any]] = lambda source: load(source, label)
        self.spared: dict[str, set[str]] = {}  # by side, the values that other paths need of this one
        segments = {name: segment(source) for name, source in sources.items()}
        self.prefix, self.suffix = (segments.get(name, nobody) for name in SIDES)

    def keep(self, side: str, names: Collection[str]) -> None:
        """Write a side anew, so that these values, which another path needs, are there to its end."""
        self.spared.setdefault(side, set()).update(names)
        setattr(self, side, self._load(emit(self.plan, self.parts[side], self.model, self.spared[side])))

    def rest(self, at: int, other: Variant, side: str) -> tuple[Callable[..., Any], tuple[str, ...]] | None:
        """How this side goes on on the path of another plan after op `at`, and the values that it takes; None where it can't.

        It takes the batch and a dict, and its values out of that, so that each is let go after its last use; may return `Halted`.
        """
        (a, b), (c, d) = ((v.parts["prefix"], v.parts["suffix"]) for v in (self, other))
        found = rest(self.plan, (a, b), at, other.plan, (c, d), SIDES.index(side))
        if found is None:
            return None
        run = halting(other._load(emit(other.plan, found, other.model, other.spared.get(side, ()))))
        taken = "".join(f", there.pop({name!r})" for name in found.takes)
        go: Callable[..., Any] = eval(f"lambda batch, there: run(batch{taken})", {"run": run})
        return go, found.takes

    def _moves(self, model: nn.Module) -> tuple[Moves | None, Moves | None]:
        """What each side moves, where Python's answers may call for another path and it has to be put back; else None."""
        asked = [i for i, node in enumerate(self.plan.nodes) if node.is_witness]
        if not asked:
            return None, None
        last = self.plan.first + asked[-1] + 1
        if self.plan.apart is not None:  # the other side's questions are asked elsewhere
            moves = Moves(self.plan, self.plan.first, last, (), model)
            return (moves, None) if self.plan.apart.part == SIDES[0] else (None, moves)
        if last <= self.parts["prefix"].stop:  # a question in the prefix comes before all that is stored
            return Moves(self.plan, 0, last, (), model), None
        return self.moved_by_prefix, Moves(self.plan, self.parts["suffix"].start, last, (), model)

    @cached_property
    def moved_by_prefix(self) -> Moves:
        """All that the prefix moves, whether something is asked in it or not."""
        prefix = self.parts["prefix"]
        return Moves(self.plan, 0, prefix.stop, prefix.stores(self.plan), self.model)

    @property
    def guards(self) -> list[ModuleGuard]:
        """The guards of the sides that are here."""
        return [g for g in (self.prefix_guard, self.suffix_guard) if not isinstance(g, Absent)]

    def is_past(self) -> bool:
        """Whether what it rests on has gone on, as it does by itself, and later calls find that.

        A buffer was None, which forward fills at its first call, and is there now; a dict of modules has more of them, such as
        another adapter; or a dict outside of the model, such as a registry of classes, has more entries.
        """
        filled = any(buffers.get(name) is not None for (_, name), buffers in self._fills)
        base = self.baseline
        return filled or base.has_more_parts() or any(has_grown(outside.kept) for outside in base.outside)

    def serves(self, training: bool) -> bool:
        """Whether it may be used for training (or for inference, if not `training`).

        A plan captured without gradients does not show where forward switches them off, so it never serves training.
        """
        if training and not self.plan.grad_enabled:
            return False
        return self.plan.assumption.grad is None or self.plan.assumption.grad == training

    def joined(self, *args: Any, **kwargs: Any) -> Any:
        """Prefix and suffix in one go, in the grad mode of the caller; raises what a call that it does not serve is told."""
        entered = self.enter(args, kwargs)
        if entered is None or not self.prefix_guard():
            self.prefix_guard.explain()
            if self.plan.assumption.layouts is not None:  # at batch 1 every tensor is contiguous
                raise InputError(
                    "forward asks how tensors lie in memory, and these inputs lie otherwise at one batch than at another: they "
                    "were cut from larger tensors, or transposed. Pass input.contiguous()"
                )
            refuse_resized(self.plan, self.model)
            refuse_pushed_out(self.baseline.remembered)
            raise AriadneError(
                "a plan does not accept the inputs that it was captured from; please report this as a bug"
            )
        return self.suffix(entered[0], *self.prefix(*entered))

    def check_suffix(self, boundary: BoundaryPayload) -> None:
        """Raise `ModuleError` where the model is not what the suffix relies on, `GuardError` where a setting of torch is not, and
        `BoundaryError` where another call has moved what it uses."""
        flight = self.flight
        if self.held or self.state.both or boundary._moves != flight.moves:
            flight.refuse_moved(boundary, self.state, self.made(boundary), self.stand() if self.state.both else ())
            boundary.put_back_quiet()
        for ask, was in self._switches:
            if ask() != was:
                raise GuardError(
                    f"{switches.changed(self.plan.assumption.switches)}: the suffix was captured under that setting. Run both "
                    "sides under one, or prepare again"
                )
        if not self.suffix_guard():
            refuse_filled(boundary, self._fills, self.suffix_guard.absent)
            self.suffix_guard.explain()
        if self.suffix_state.asks and not self.suffix_state(here := self.made(boundary)):
            self.suffix_state.explain(here)
        if self.state.after:
            flight.moved(flight.after, self.state.after)

    def leave(self, boundary: BoundaryPayload) -> BoundaryPayload:
        """A boundary whose prefix has just run, with note taken of how the state stands that its suffix is to find."""
        boundary._moves = self.flight.moves
        if self.held:
            boundary.hold(self.held, self.kept)
            if self.kept:
                self.flight.out.add(boundary)
            if self.quiet:
                boundary.quieten(self.quiet)
        if self.state.both:
            boundary._stood = self.stand()
        return boundary

    def stand(self) -> list[Any]:
        """Which tensors stand where both sides use state, and how often each was written into; of those that don't count it, what
        they hold."""
        found = [(get(), silent) for get, silent in self._watched]
        return [(id(t), 0 if t.is_inference() else t._version, _bytes(t) if silent else b"") for t, silent in found]

    def run(self, segment: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """What a segment gives, or what runs it; `ModuleError` where that fails since a tensor that the plan reads is gone."""
        try:
            return segment(*given, **options)
        except Exception as error:
            self.refuse_failed(error)
            raise

    def refuse_failed(self, error: Exception) -> None:
        """Raise what a side that raised `error` should raise instead: a tensor is gone, or forward may catch what an op raised."""
        if isinstance(error, (KeyError, TypeError, AttributeError)) or type(error) is RuntimeError:
            self._refuse_if_gone(error)  # an op that takes a tensor or none, as batch norm does, raises a RuntimeError
        refuse_caught(error, self.modules)

    def _refuse_if_gone(self, error: Exception) -> None:
        """Raise `ModuleError` where a side raised `error` and a tensor that the plan reads is gone.

        To look for each tensor at each call would take as long as all else that is checked, so it shows when it is read.
        """
        for value in self.plan.values.values():
            if value.is_state:
                path, name, *steps = value.origin
                tables = self.modules[path].__dict__ if path in self.modules else {}
                where = {"parameter": "_parameters", "buffer": "_buffers"}.get(value.kind)
                holder = (tables.get(where, {}) if where else tables).get(name)
                if _is_gone(holder, steps):
                    kinds = {"_parameters": "a parameter", "_buffers": "a buffer", "_modules": "a submodule"}
                    found = next((k for t, k in kinds.items() if tables.get(t, {}).get(name) is not None), None)
                    found = "a plain attribute" if found is None and tables.get(name) is not None else found
                    if holder is not None:
                        found, name = "", shown((name, *steps))
                    raise ModuleError(
                        f"the {value.kind} {name!r} of {named(path)}, which the plan reads, is gone"
                        f"{f', and {found} stands there now' if found else ''}; undo that, or call prepare_split again. Ops before "
                        "the one that reads it have run"
                    ) from error

    def made(self, boundary: BoundaryPayload) -> bool:
        """Whether the prefix of this very variant made a boundary; it may have come over a wire otherwise."""
        return boundary.labels is self.candidate.live

    def refuse_graphs(self) -> None:
        """Raise `TrainingError` where state has a graph as a step begins, had none at capture, and would hand it on."""
        for name, get in self._ungraphed:
            if get().requires_grad:
                raise TrainingError(
                    f"a training step across {self.candidate.split_id} may differ from the whole model's in the last bits: "
                    f"{name!r}, which the model holds, requires a gradient or has a graph now, and had none at capture: what is "
                    "made of it is written into what the model holds, and read after the cut. Detach it, or prepare again"
                )

    def refuse_views(self, raw: Sequence[Any]) -> None:
        """Raise `TrainingError` where a value that the suffix writes into is a view, and was none at capture.

        Not where a compiler wrote the prefix: it makes views of its own, and what it computes is near the model's, not the same.
        """
        if any(report.side == "prefix" and not report.trains_eagerly for report in self.reports):
            return
        for i, name in self.copied:
            if raw[i]._is_view():
                raise TrainingError(
                    f"a training step across {self.candidate.split_id} may differ from the whole model's in the last bits: at this "
                    f"batch, or with inputs laid out so, {name!r} is a view of another tensor, which it was not at capture, and "
                    "the suffix writes into it. Cut elsewhere. The prefix has run: what it moves in the model has moved"
                )

    def owned(self) -> Owned:
        """The parameters that the ops of each side read now; laid out again only where one was replaced."""
        return self._slots.owned()


def _slot(value: Value, plan: TracePlan, model: nn.Module) -> tuple[dict[str, Any], str]:
    """A dict, and where in it a tensor stands that is no parameter."""
    if not value.is_state:
        return dict(plan.constants), value.name
    path, *keys = value.origin
    if len(keys) > 1:  # in a container, of which another may come to hold another
        return {value.name: getter(value, model)()}, value.name
    owner = model.get_submodule(path)
    return (owner._buffers if value.kind == "buffer" else owner.__dict__), keys[0]


def told_apart(plan: TracePlan, candidate: SplitCandidate, part: str = "", first: int = 0) -> Apart:
    """What a side of a cut has to know of the other, save for the parameters that both read, which only the model shows."""
    sized = frozenset(
        (node.args[0].name, node.args[1])
        for node in plan.nodes
        if node.is_witness and node.target == "aten.sym_size.int"
    )
    cast, reachable = tuple(_cast_twice(plan, candidate)), tuple(_reachable(plan, candidate))
    return Apart(part, first, plan.signature, (), cast, reachable, sized)


def keeps_sides(plan: TracePlan, candidate: SplitCandidate, main: Mapping[str, Mapping[tuple[str, str], None]]) -> bool:
    """Whether every parameter that another cut of the same model has on one side alone stays on that side."""
    here = {p.name: parameters_read(plan, p) for p in parts(plan, (candidate,), SIDES)}
    known = {p for side in main for p in main[side]}
    return all(p not in known or p in main[side] for side in main for p in here[side])


class Nobody(Variant):
    """Stands where no plan serves yet: it takes no call, so that one is captured; all else is as in the plan at hand."""

    def __init__(self, other: Variant) -> None:
        self.__dict__.update(other.__dict__)
        self.enter = lambda args, kwargs: None


def _casts(node: TraceNode) -> bool:
    return node.has_kernel("AutocastCPU") or (node.has_kernel("CompositeImplicitAutograd") and not node.may_alias)


def _cast_twice(plan: TracePlan, candidate: SplitCandidate) -> Iterator[str]:
    """The parameters that autocast may cast for ops on both sides, going by which ops it has kernels for."""
    sides: list[set[str]] = [set(), set()]
    for i, node in enumerate(plan.nodes):
        wanted = [r for r in node.reads if r in plan.values and plan.values[r].kind == "parameter"]
        if wanted and node.target.startswith("aten.") and not node.region.autocast and _casts(node):
            sides[i >= candidate.cut].update(wanted)
    yield from sorted(sides[0] & sides[1])


def _reachable(plan: TracePlan, candidate: SplitCandidate) -> Iterator[int]:
    """The positions of the crossing tensors that may share memory with what others may write: inputs, outputs, state.

    Not with state that an op writes, of which copies are made in time, or which is watched (see `State`).
    """
    groups = Groups(plan)

    def shared(names: Iterable[str]) -> set[str]:
        return {groups.find(n) for n in names if n in groups.parent}

    state = [n for n, v in plan.values.items() if held_by_itself(v)]
    ends = shared((*(n for _, n in plan.inputs), *uses(plan.output), *state))
    ends -= shared(n for node in plan.nodes for n in node.writes) & shared(state)
    for i, name in enumerate(candidate.live):
        if groups.find(name) in ends and plan.values[name].dtype is not None:
            yield i


def _bytes(t: torch.Tensor) -> bytes:
    """What a tensor holds."""
    found: bytes = as_bytes(t).numpy().tobytes()
    return found


def _is_gone(holder: Any, steps: Sequence[Any]) -> bool:
    """Whether nothing, or None, stands where these steps lead from what an attribute holds."""
    try:
        return follow(holder, tuple(steps)) is None
    except (LookupError, AttributeError, TypeError):
        return True
