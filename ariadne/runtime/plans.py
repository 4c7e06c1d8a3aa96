"""The plans of a split, all cut alike, and which of them serves a call; one that is needed and missing is captured."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ariadne import tree
from ariadne.boundary import BoundaryPayload, no_boundary
from ariadne.capture import Captured, Example, capturing, dims_named, drawn_by, sizes_named, without_saving_hooks
from ariadne.cut import SIDES, Boundary, SplitCandidate, frontiers, select
from ariadne.errors import (
    AriadneError,
    BatchError,
    BoundaryError,
    FrontierError,
    InputError,
    ModuleError,
    TrainingError,
)
from ariadne.forks import rlock
from ariadne.guards import (
    Baseline,
    as_before,
    differ_in_keys_alone,
    explain,
    matched,
    other_structure,
    searched_once,
    state_types,
    undisturbed,
)
from ariadne.plan import TracePlan, sizes_at, sizes_in
from ariadne.runtime.owners import NO_SLOTS, SideSlots
from ariadne.runtime.proof import prove
from ariadne.runtime.taken import check_values, other_device
from ariadne.runtime.variant import Nobody, Settings, Variant, keeps_sides

if TYPE_CHECKING:
    from ariadne.compiled import SegmentReport
    from ariadne.guards import ModuleGuard

MOST_PLANS = 16
MANY_CHANGES = 16  # of a model, each of which had a plan captured: then something changes at each call

_MISTAKEN = (TypeError, AttributeError, LookupError, ValueError)  # what Python raises of inputs of another structure

_DONE = "_ariadne_done"  # an attribute of an error of forward's: what it had done stands


def has_done(error: BaseException) -> bool:
    """Whether an error is forward's own, and what forward had done until then stands: it is not to be put back."""
    return getattr(error, _DONE, False) is True


class Plans:
    """The plans of one model, each cut in two, with guards and segments: what `SplitRuntime` runs.

    The first is that of `prepare_split`. Others are captured when a call needs them, at most `_room()` in all; then the one
    used longest ago makes way.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        plans: Mapping[TracePlan, tuple[tuple[SplitCandidate, ...], Baseline]],
        recapture: Callable[[Example, bool, TracePlan | None], Captured],
        chosen: SplitCandidate | None = None,
    ) -> None:
        self.model, self.settings, self._recapture = model, settings, recapture
        self._lock = rlock()
        self._plans = dict(plans)
        self._variants: list[Variant] = []
        self._change = ""  # what the plans that would serve the call find changed
        self._changes = 0  # calls that were captured for one
        self._unlisted: dict[int, Callable[[], Any]] = {}  # parameters that neither side read when these were asked for
        self._listed_all: set[Variant] = set()  # plans that read none of them
        self._dropped: set[tuple[str, str]] = set()  # the keys of variants that made way for others
        self._rests: dict[Any, Any] = {}  # how a call goes on from a question of one plan in another
        self._answered: dict[Any, Any] = {}  # the same, by a question's answer
        self._alike: dict[Any, Any] = {}  # what crosses by one plan and must be the same by another
        self._same: dict[Any, bool] = {}  # whether the prefix of one does what that of another does
        self._placed: dict[str, dict[tuple[str, str], None]] | None = None  # parameters that no plan has read, by side
        # Where parameters stood when a round last asked: in which plans, the dicts of submodules and their versions.
        self._slots: tuple[list[Variant], list[Any], int, SideSlots] = [], [], -1, NO_SLOTS
        self._reports: list[SegmentReport] = []  # of all plans that there ever were
        self._by_key: dict[tuple[str, str], list[Variant]] = {}  # they differ in what they rest on
        for plan, (candidates, baseline) in [*self._plans.items()]:
            try:
                self._add(self._cut(plan, candidates, baseline, chosen))
            except ModuleError:  # of a model as it was once
                if settings.on_change == "refuse" or len(self._plans) == 1:
                    raise
                del self._plans[plan]
            except FrontierError:  # of a further plan, which another cut had: a call that needs it is told
                if not self._variants:
                    raise
                del self._plans[plan]
        self._main = self._variants[0]
        by_questions = sorted(self._variants, key=self._asked, reverse=True)
        self._now = {
            flag: next((v for v in by_questions if v.serves(flag)), Nobody(self._main)) for flag in (False, True)
        }
        self._prepared = [v for v in self._variants if v is self._main or v in self._now.values()]  # these stay

    @property
    def plan(self) -> TracePlan:
        """The plan that was captured when the split was prepared."""
        return self._main.plan

    @property
    def candidate(self) -> SplitCandidate:
        """The cut that is in use."""
        return self._main.candidate

    @property
    def candidates(self) -> tuple[SplitCandidate, ...]:
        """Every cut of the plan, in order."""
        return self._main.candidates

    @property
    def plans(self) -> tuple[TracePlan, ...]:
        """All plans that it has."""
        return tuple(self._plans)

    @property
    def draws(self) -> frozenset[str]:
        """The random generators of the process that a run of any of its plans may draw from."""
        return drawn_by(self._plans)

    def variant_of(self, plan: TracePlan) -> Variant:
        """The variant of one of its plans."""
        return next(v for v in self._variants if v.plan is plan)

    def _cut(
        self,
        plan: TracePlan,
        candidates: tuple[SplitCandidate, ...],
        baseline: Baseline,
        chosen: SplitCandidate | None = None,
    ) -> Variant:
        if chosen is not None and chosen in candidates:
            chosen = candidates[candidates.index(chosen)]  # this plan's own, by which its boundaries are known
        else:
            chosen = candidates[0] if plan.apart is not None else self._choose(plan, candidates)
        return Variant(plan, candidates, chosen, self.model, baseline, self.settings)

    def _add(self, variant: Variant) -> None:
        self._variants.append(variant)
        self._by_key.setdefault(variant.key, []).append(variant)
        for report in variant.reports:
            report.earlier = next((r for r in reversed(self._reports) if r.side == report.side), None)
        self._reports += variant.reports
        if len(self._variants) > self._room():
            oldest = next(v for v in self._variants if v not in self._prepared and v not in self._now.values())
            self._variants.remove(oldest)
            self._by_key[oldest.key].remove(oldest)
            self._plans.pop(oldest.plan, None)
            self._forget(oldest, begun=True)
            self._listed_all.discard(oldest)
            self._alike = {pair: same for pair, same in self._alike.items() if oldest not in pair}
            self._same = {pair: same for pair, same in self._same.items() if oldest not in pair}
            self._dropped.add(oldest.key)

    def _forget(self, variant: Variant, *, begun: bool) -> None:
        """Look anew for the ways that calls go on in this one from a question; with `begun`, for those from its own, too."""
        for known in (self._rests, self._answered):
            for key in [k for k, step in known.items() if step.other is variant or (begun and step.one is variant)]:
                del known[key]

    def _room(self) -> int:
        """How many plans are kept: more where inputs of one kind may take several paths, in training and without.

        A half keeps all of its file: it has no model from which one that made way could be captured again.
        """
        if any(v.plan.apart is not None for v in self._variants):
            return len(self._plans)
        asks = any(v.prefix_moves is not None for v in self._variants)
        return max(MOST_PLANS, 2 * self.settings.spec.max_paths) if asks else MOST_PLANS

    def _choose(self, plan: TracePlan, candidates: tuple[SplitCandidate, ...]) -> SplitCandidate:
        """Where to cut a plan: as asked; a further plan of the same model so that each side keeps its parameters."""
        trainable, objective = self.settings.spec.trainable, self.settings.objective
        asked = self.settings.boundary
        if not self._variants:
            return select(plan, candidates, asked, trainable=trainable, objective=objective)
        main = self._variants[0]
        share = main.candidate.cut / len(main.plan.nodes)
        sides = self.sides()
        alike = [c for c in candidates if c.safe and keeps_sides(plan, c, sides)]
        if asked.kind == "after":
            try:
                named = select(plan, candidates, asked, trainable=trainable, objective=objective)
                alike = [c for c in alike if c.cut == named.cut] or alike
            except FrontierError:  # this plan has no such cut: take one like it
                pass
        if alike:
            return min(
                alike, key=lambda c: (c.after != main.candidate.after, abs(c.cut - share * len(plan.nodes)), c.cut)
            )
        if plan.grad_enabled and main.plan.grad_enabled:
            raise FrontierError(
                "for these inputs forward runs in another way than at capture, and can't be cut there so that each side keeps "
                "its parameters; prepare a split of its own for them"
            )
        near = Boundary("percent", percent=100 * share)
        return select(plan, candidates, near, trainable=trainable, objective=objective)

    def sides(self, *, complete: bool = False) -> dict[str, dict[tuple[str, str], None]]:
        """The parameters that each side reads in any plan, as (module path, name).

        Where Python's answers decide what runs, a path that no call has taken may read more. Once the sides are asked to be
        `complete`, since an optimizer is made for each, they stay: what no plan reads goes where the one before it stands.
        """
        found = {side: {p: None for v in self._variants for p in v.reads.get(side, ())} for side in SIDES}
        branches = self.settings.spec.max_paths > 1 and any(v.prefix_moves is not None for v in self._variants)
        if complete and self._placed is None and branches:
            self._placed, side = {s: {} for s in SIDES}, SIDES[0]
            for name, _ in self.model.named_parameters():
                path, _, key = name.rpartition(".")
                read = next((s for s in reversed(SIDES) if (path, key) in found[s]), None)
                side = side if read is None else read
                if read is None:
                    self._placed[side][path, key] = None
        for side, more in (self._placed or {}).items():
            found[side].update((p, None) for p in more if not any(p in found[s] for s in SIDES))
        return found

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> tuple[Variant, tuple[Any, ...]]:
        """The plan that serves this call, that of the last call if it does, and the inputs of its prefix."""
        variant = self._now[training]
        entered = variant.enter(args, kwargs)
        if entered is None or not variant.guard():
            return self._enter_anew(args, kwargs, training)
        return variant, entered

    def _enter_anew(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> tuple[Variant, tuple[Any, ...]]:
        """The plan that serves this call, captured now if none does; or the error that says why none can."""
        found = self._known(args, kwargs, training)
        if found is None:
            self._main.flight.keep()  # forward runs, for a capture
            with capturing():
                # Another thread may have captured it meanwhile.
                found = self._known(args, kwargs, training) or self._captured(args, kwargs, training)
        return found

    def _known(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> tuple[Variant, tuple[Any, ...]] | None:
        """The plan that serves this call, if there is one; where the model was changed and that is to be refused, it raises."""
        changed: ModuleError | None = None
        with self._lock:
            latest = self._variants[::-1]
            for variant in sorted(latest, key=self._asked, reverse=True):
                if not variant.serves(training):
                    continue
                entered = variant.enter(args, kwargs)
                if entered is not None:
                    if not variant.guard():
                        if variant.is_past():
                            continue
                        if (found := self._difference(variant.guard)) is not None:
                            changed = changed or found
                            continue
                    self._use(variant, training)
                    return variant, entered
            if self.settings.on_change == "refuse":
                if changed is not None:
                    raise changed
                if not self._now[training].is_past():
                    for guard in self._now[training].guards:
                        if not guard():
                            guard.explain(serving=False)
        self._change = str(changed or "")
        return None

    def _difference(self, guard: ModuleGuard) -> ModuleError | None:
        """The error that says in what the model is another than a guard relies on, if in anything that matters."""
        try:
            guard.explain()
        except ModuleError as error:
            return error
        return None

    def _use(self, variant: Variant, training: bool) -> None:
        """Take a plan for the next call, too; of those that may make way for others, the one used last goes last."""
        if variant.plan.apart is None and (variant in self._prepared or variant is self._variants[-1]):
            self._now[training] = variant  # which stands where it would be put
            return
        with self._lock:
            if variant not in self._prepared and variant in self._variants:
                self._variants.remove(variant)
                self._variants.append(variant)
            if self._asked(variant) >= self._asked(self._now[training]):
                self._now[training] = variant

    @staticmethod
    def _asked(variant: Variant) -> int:
        """How many questions a prefix that is alone asks: of several, that which asks most is to begin.

        Where paths differ in length, so do the places of their cuts. A question that one of them asks before its cut may come
        after that of another, and a boundary of that one would be sent off unasked.
        """
        apart = variant.plan.apart
        return len(variant.plan.questions) if apart is not None and apart.part == SIDES[0] else 0

    def _captured(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> tuple[Variant, tuple[Any, ...]]:
        """A plan that is captured from this call, held against the model, and kept.

        What forward itself raises comes through, and what it had done until then is done, as by a call of the model: it may have
        moved statistics or drawn random numbers before it found bad data.
        """
        try:
            return self._captured_for(args, kwargs, training)
        except AriadneError as error:
            if outdated := next(filter(None, (g.baseline.outdated() for v in [*self._variants] for g in v.guards)), ""):
                raise ModuleError(outdated) from error
            raise
        except Exception as error:  # the capture has put everything back
            raised = error
        try:
            with torch.set_grad_enabled(training):
                self.model(*args, **kwargs)
        except Exception as error:
            raised = self._of_structure(args, kwargs, training, error)
        setattr(raised, _DONE, True)
        raise raised

    def _captured_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> tuple[Variant, tuple[Any, ...]]:
        # `_lock` is held for moments alone: calls that have a plan go on.
        with capturing(), searched_once(), without_saving_hooks():
            lo, hi = self.settings.spec.batch_range
            args, kwargs, example = self._as_example(args, kwargs, training, range(lo, hi + 1))
            sizes = sizes_in(example.sizes, example.leaves)
            mine = (
                v.plan
                for v in [*self._variants]
                if v.serves(training)
                and v.plan.input_spec == example.spec
                and v.plan.captured_by == "observed"
                and sizes == dict(v.plan.traced_sizes)
                and all(tree.identical(example.leaves[i], value) for i, value in v.plan.literals)
            )
            change, begun = self._change, time.monotonic()
            with undisturbed(self.model):
                captured = self._recapture(example, training, next(mine, None))
            plan, candidates = captured.plan, frontiers(captured.plan)
            with self._lock:
                variant = self._cut(plan, candidates, captured.baseline)
            if not variant.guard():  # of what forward keeps from its first call, the model goes on with another
                variant.guard.explain()
            with undisturbed(self.model):
                self._prove(variant, captured, example, training)
            if change:
                self._count(change, time.monotonic() - begun)
            with self._lock:
                self._add(variant)
                self._plans[plan] = candidates, captured.baseline
                entered = variant.enter(args, kwargs)
                if entered is None:
                    explain(plan, self.model, args, kwargs, range(lo, hi + 1))
                    raise AriadneError(
                        "the plan captured for this call does not accept it; please report this as a bug"
                    )
                self._now[training] = variant
            return variant, entered

    def _as_example(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool, batches: range
    ) -> tuple[tuple[Any, ...], dict[str, Any], Example]:
        """A call in the form of the plan that is nearest to it, and the example of a plan of its own.

        Raises what that plan has against it. One of another structure may be another plan's, with more of what is new.
        """
        refused: Exception | None = None
        for base in self._nearest(args, kwargs, training):
            call = as_before(self.model, base.plan, args, kwargs)
            try:
                if state_types(self.model) == base.moved:
                    explain(base.plan, self.model, *call, batches, plain=base.plan.apart is not None)
                return *call, self._example(*call, base.plan, batches)
            except (InputError, BatchError) as error:
                refused = refused or error
                if tree.flatten(call)[1] == base.plan.input_spec:
                    break
        assert refused is not None
        raise refused

    def _nearest(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> list[Variant]:
        """The plans, first those whose structure of inputs a call has, or most of it, and that of the last call."""

        def found(variant: Variant) -> tuple[bool, int, int]:
            known = variant.plan.input_spec
            spec = tree.flatten(as_before(self.model, variant.plan, args, kwargs))[1]
            return spec == known, sum(i is not None for i in matched(spec, known)), -known.size

        return sorted((self._now[training], *self._variants[::-1]), key=found, reverse=True)

    def _of_structure(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool, raised: Exception
    ) -> Exception:
        """What forward `raised`; an `InputError` where that is since it takes no call of this structure, which no plan has."""
        base = self._nearest(args, kwargs, training)[0]
        spec = tree.flatten(as_before(self.model, base.plan, args, kwargs))[1]
        if not isinstance(raised, _MISTAKEN) or differ_in_keys_alone(spec, base.plan.input_spec):
            return raised
        error = InputError(other_structure(spec, base.plan.input_spec, raised))
        error.__cause__ = raised
        return error

    def _count(self, change: str, seconds: float) -> None:
        """Count a call that was captured since the model was changed; warn where there come to be many."""
        self._changes += 1
        if self._changes == MANY_CHANGES:
            warnings.warn(
                f"the model was changed between calls {MANY_CHANGES} times, and each time a plan was captured for it; the last one "
                f"took {seconds:.1f} s. The change was: {change.partition('; ')[0]}. A number that changes at each call is "
                "followed without a capture where it stands in a buffer, or is an input",
                stacklevel=2,
            )

    def _refuse_unlisted(self, variant: Variant) -> None:
        """Raise `TrainingError` where a plan reads a parameter before the cut that was told as one of the suffix's."""
        unlisted = False
        for path, name in variant.reads["prefix"]:
            p = self.model.get_submodule(path)._parameters.get(name)
            if p is not None and self._unlisted.get(id(p), lambda: None)() is p:
                unlisted = True
                if p.requires_grad:
                    where = f"{path}.{name}".lstrip(".")
                    raise TrainingError(
                        f"forward reads the parameter {where!r} before the cut now, and read it nowhere when the parameters of "
                        "both sides were asked for: it was among the suffix's, whose optimizer would step it too early. Run "
                        "runtime.learn(example_inputs), ask for prefix_parameters() and suffix_parameters() again, and make the "
                        "optimizers anew"
                    )
        if not unlisted:
            self._listed_all.add(variant)

    def _prove(self, variant: Variant, captured: Captured, example: Example, trains: bool) -> None:
        """Hold a plan that was captured for a call against the model, before it serves one."""
        prove(self.model, variant, captured, example, trains=trains)

    def _example(self, args: tuple[Any, ...], kwargs: dict[str, Any], plan: TracePlan, batches: range) -> Example:
        args, kwargs = as_before(self.model, plan, args, kwargs)
        leaves, spec = tree.flatten((args, kwargs))
        at = matched(spec, plan.input_spec)
        along, asked = plan.batched, self.settings.spec
        batched = {i: along[k] for i, k in enumerate(at) if k in along and isinstance(leaves[i], torch.Tensor)}
        new = {None, *(k for k, _ in plan.literals)}  # where a tensor stands that the plan has none for
        came = [i for i, k in enumerate(at) if k in new and isinstance(leaves[i], torch.Tensor)]
        sizes = tuple(size for size in sizes_at(plan.sizes, at) if leaves[size.leaf] is not None)
        sizes += sizes_named(self.model, leaves, spec, came, asked.dynamic or {}, asked.ranges)
        sizes_in(sizes, leaves)
        dims = dims_named(self.model, leaves, spec, came, asked.batch_dim or {}, sizes)
        batch = next((leaves[i].shape[dim] for i, dim in batched.items()), plan.traced_batch)
        if dims and along and not batched:
            batch = next(leaves[i].shape[dim] for i, dim in dims.items())
        batched |= {i: dim for i, dim in dims.items() if leaves[i].shape[dim] == batch}
        if batched and batch not in batches:
            raise BatchError(f"batch {batch} lies outside dynamic_batch ({batches.start}, {batches.stop - 1})")
        return Example(tuple(leaves), spec, batched, batch, sizes)

    def accept(self, boundary: BoundaryPayload, runs: bool = True) -> Variant:
        """The variant whose suffix takes this boundary; `BoundaryError` for one of another split, or of other types or sizes.

        `runs`: the suffix is about to run, so the autocast of the prefix counts, too.
        """
        if not isinstance(boundary, BoundaryPayload):
            raise no_boundary(boundary)
        key = (boundary.plan_signature, boundary.split_id)
        variants = self._by_key.get(key)
        if not variants and key in self._dropped:
            raise BoundaryError(
                f"this boundary (batch {boundary.batch}) was made by this split, whose plan for it ({boundary.plan_signature}) was "
                f"dropped since: calls came that need more than {self._room()} plans in all, and the one used longest ago made "
                "way. Run the prefix again, and the suffix soon after; or prepare a split of its own for each kind of input"
            )
        if not variants:
            raise BoundaryError(
                f"this boundary was made by another split ({boundary.split_id} of plan {boundary.plan_signature}); this one is "
                f"{self.candidate.split_id} of plan {self.plan.signature}. Run the prefix and the suffix of the same split: in two "
                "processes prepare both by the same function from the same model, with the same cut, inputs, batch range and "
                "frozen parameters; and run a batch that gets a plan of its own on both"
            )
        if runs:
            boundary.refuse_another_autocast()
        variant = variants[-1]
        if len(variants) > 1:
            variant = next((v for v in variants if v.made(boundary)), None) or self._holding(variants, boundary)
        if not variant.made(boundary):
            check_values(self._narrowed(variant, boundary), variant)
        return variant

    def _holding(self, variants: Sequence[Variant], boundary: BoundaryPayload) -> Variant:
        """Of some with one key, the newest whose suffix holds for the model as it is; the newest of all, where none does."""
        fit = [v for v in reversed(variants) if not other_device(boundary, v) and v.suffix_state(False)]
        holding = next((v for v in fit if v.suffix_guard()), None)
        # A guard that was laid out when the model stood otherwise is asked in full.
        return holding or next((v for v in fit if self._difference(v.suffix_guard) is None), variants[-1])

    def _narrowed(self, variant: Variant, boundary: BoundaryPayload) -> BoundaryPayload:
        """The boundary without what a prefix from a file sent for the sake of other paths."""
        live = variant.candidate.live
        if len(self._plans) == 1 or len(boundary.labels) <= len(live) or not {*live} <= {*boundary.labels}:
            return boundary
        boundary.refuse_if_written()
        return boundary.narrowed(*variant.key, live)
