"""Paths: where Python branches on what it reads out of tensors, each path has a plan; a call goes on in the one that it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from ariadne import tree
from ariadne.boundary import BoundaryPayload
from ariadne.compare import difference
from ariadne.errors import WitnessError
from ariadne.guards import Further, enter_alike
from ariadne.plan import TracePlan
from ariadne.runtime.alike import serves
from ariadne.runtime.moved import Kept, Moves, Numbers, alike, numbers
from ariadne.runtime.plans import Plans, has_done
from ariadne.runtime.shared import Going, made_alike
from ariadne.runtime.taken import check_values
from ariadne.runtime.variant import Variant
from ariadne.segment import Halted, halting

_is_grad_enabled = torch._C.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled


Run = Callable[[Variant, BoundaryPayload, Callable[..., Any]], Any]  # what runs a segment of a suffix on a boundary


class Before:
    """What a prefix ran from, kept by a boundary whose suffix asks: the call, what stood before, and what stood after."""

    __slots__ = ("after", "call", "entered", "instead", "kept", "moves", "seen")

    def __init__(self, moves: Moves, kept: Kept, call: Any, entered: tuple[Any, ...]) -> None:
        self.moves, self.kept, self.call, self.entered = moves, kept, call, entered
        self.after: Numbers = numbers(python=moves.python) if kept.numbers else []
        self.seen = moves.seen(entered[1:], call)
        self.instead: BoundaryPayload | None = None  # the boundary of the path that the suffix turned out to take

    def moved(self) -> bool:
        """Whether something that the prefix reads or moves has been moved since."""
        return not self.seen.stands(self.moves.seen(self.entered[1:], self.call))


class Step:
    """How a side of one variant goes on in another: what is asked of it, what it moves, the function and what that takes."""

    __slots__ = ("enters", "go", "holds", "moves", "needed", "one", "other")

    def __init__(self, one: Variant, other: Variant, side: str, going: Going | None) -> None:
        self.one, self.other = one, other
        self.go: Callable[..., Any] | None = going[0] if going else None
        self.needed: frozenset[str] = frozenset(going[1] if going else ())
        self.moves = other.prefix_moves if side == "prefix" else other.suffix_moves
        guards = [v.prefix_guard if side == "prefix" else v.suffix_guard for v in (other, one)]
        # An opaque part may have changed what the guard of this side was asked about.
        self.holds: Callable[[], bool] = guards[0] if one.opaque else Further(*guards)
        # Whether what entered `one`, at a batch that `other` takes, enters that too, in the same form.
        self.enters = not one.opaque and enter_alike(one.enter, other.enter)


class Paths(Plans):
    """Plans among which a call finds its path: by what its prefix, or its suffix, reads out of tensors."""

    _rests: dict[tuple[Variant, int, str, Variant], Step]
    _answered: dict[tuple[Variant, int, str, str | bool, int], Step]
    _alike: dict[tuple[Variant, Variant], Collection[str]]
    _same: dict[tuple[Variant, Variant], bool]

    def _run_prefix(
        self,
        variant: Variant,
        entered: tuple[Any, ...],
        call: Any,
        training: bool,
        begun: tuple[Kept, Any] | None = None,
    ) -> tuple[Variant, tuple[Any, ...], tuple[Any, ...], Before | None]:
        """What the prefix gives, on the path that it takes: the variant, its inputs, the values and what it ran from.

        `begun` is what `_begin` gave of this call, where that ran already.
        """
        if variant.prefix_moves is None or self.settings.mode == "compiled":
            return variant, entered, self._values(variant, entered, training), None
        kept, raw = begun or self._begin(variant, entered, call, training)
        if type(raw) is Halted:
            went = self._go_on("prefix", variant, raw, entered, call, kept)
            if went is None:
                kept.put_back()
                went = self._prefix_of_another(variant, raw.question(variant.plan), call, training)
            variant, entered, raw, kept = went
        return variant, entered, raw, self._ran_from(variant, kept, call, entered)

    def _begin(self, variant: Variant, entered: tuple[Any, ...], call: Any, training: bool) -> tuple[Kept, Any]:
        """What stood before a prefix that asks, and what it gives: its values, or the question where its call leaves its path."""
        assert variant.prefix_moves is not None
        kept = variant.prefix_moves.keep(entered[1:], call)
        stays = training or variant.plan.apart is not None  # then it begins anew on another path
        segment = variant.prefix if stays else halting(variant.prefix)
        return kept, self._asked_of(variant, segment, entered, training)

    @staticmethod
    def _ran_from(variant: Variant, kept: Kept, call: Any, entered: tuple[Any, ...]) -> Before | None:
        """What a prefix ran from, where its suffix may take the call to another path."""
        if variant.suffix_moves is None or variant.prefix_moves is None:
            return None
        return Before(variant.prefix_moves, kept, call, entered)

    @staticmethod
    def _asked_of(variant: Variant, segment: Callable[..., Any], given: tuple[Any, ...], grad: bool) -> Any:
        """What a side gives, or the question in which its call leaves its path."""
        enabled = _is_grad_enabled()
        _set_grad_enabled(grad)
        try:
            return segment(*given)
        except WitnessError as error:
            if error.plan is not variant.plan:
                raise
            return Halted.by(error)
        except Exception as error:
            variant.refuse_failed(error)
            raise
        finally:
            _set_grad_enabled(enabled)

    def _prefix_of_another(
        self, variant: Variant, question: WitnessError, call: Any, training: bool
    ) -> tuple[Variant, tuple[Any, ...], tuple[Any, ...], Kept]:
        """What the prefix gives on another path, run from its start; and what stood before."""
        for other, entered in self._others(call, training, variant, question):
            kept = other.prefix_moves.keep(entered[1:], call) if other.prefix_moves is not None else Kept()
            try:
                return other, entered, self._values(other, entered, training), kept
            except WitnessError as error:
                if error.plan is not other.plan:
                    raise
                question = error
                kept.put_back()
        raise question

    def _go_on(
        self, side: str, variant: Variant, halted: Halted, entered: tuple[Any, ...], call: Any, kept: Kept
    ) -> tuple[Variant, tuple[Any, ...], Any, Kept] | None:
        """What a side gives without gradients, from its question on, on known paths; None where it must run from its start.

        `kept` is what to put back then, and holds more and more.
        """
        while halted.there is not None:
            found, at = halted.asked[0], halted.asked[-1]
            asked = variant, at, side, found if type(found) is bool else repr(found), entered[0]
            step = self._answered.get(asked) or self._step(asked, halted.question(variant.plan), call)
            if step is None or step.go is None or step.moves is None:
                return None
            other = step.other
            entered_there = entered if step.enters else other.enter(*call)
            if entered_there is None or not step.holds() or not (side == "prefix" or other.suffix_state(True)):
                return None
            there = halted.there
            if not step.needed <= there.keys():
                variant.keep(side, step.needed - there.keys())
                self._forget(variant, begun=False)
                return None
            if not step.moves.nothing:
                kept.then(step.moves.keep(entered_there[1:], call))
            self._use(other, False)
            variant, entered = other, entered_there
            for name in there.keys() - step.needed:
                del there[name]
            raw = self._asked_of(variant, step.go, (entered[0], there), False)
            if type(raw) is not Halted:
                return variant, entered, raw, kept
            halted = raw
        return None

    def _step(self, asked: tuple[Variant, int, str, str | bool, int], question: WitnessError, call: Any) -> Step | None:
        """How a call goes on from a question that has this answer, looked for once; None where no known plan has it."""
        variant, at, side, *_ = asked
        others = (v for v in reversed(self._variants) if v is not variant and v.serves(False))
        likely = (v for v in others if _answers(variant.plan, question, v.plan) == 1)
        other = next((v for v in likely if v.enter(*call) is not None), None)
        if other is None:
            return None
        key = variant, at, side, other
        if key not in self._rests:
            self._rests[key] = Step(variant, other, side, variant.rest(at, other, side))
        self._answered[asked] = step = self._rests[key]
        return step

    @staticmethod
    def _values(variant: Variant, entered: tuple[Any, ...], training: bool) -> tuple[Any, ...]:
        enabled = _is_grad_enabled()
        _set_grad_enabled(training)
        try:
            found: tuple[Any, ...] = variant.run(variant.prefix, *entered)
            return found
        finally:
            _set_grad_enabled(enabled)

    def _run_suffix(
        self,
        variant: Variant,
        boundary: BoundaryPayload,
        training: bool,
        run: Run,
    ) -> tuple[Any, BoundaryPayload]:
        """What `run` makes of the suffix of this boundary, or of that of the path which its call takes; and that one."""
        if variant.suffix_moves is None or self.settings.mode == "compiled":
            return run(variant, boundary, variant.suffix), boundary
        before = self._before(boundary)
        # What the suffix itself writes, and is put back, counts as written too: so that is asked before.
        moved = before.moved() if before is not None and variant.suffix_moves.writes else None
        kept = variant.suffix_moves.keep(())
        goes_on = before is not None and not training
        try:
            output = run(variant, boundary, halting(variant.suffix) if goes_on else variant.suffix)
        except WitnessError as error:
            if error.plan is not variant.plan:
                raise
            output = Halted.by(error)
        if type(output) is not Halted:
            return output, boundary
        if before is not None and not training:
            went = self._go_on("suffix", variant, output, before.entered, before.call, kept)
            if went is not None:
                return went[2], boundary
        question = output.question(variant.plan)
        kept.put_back()
        if before is None:
            ways = self._suffixes(variant, boundary, training, question)
        else:
            ways = self._boundaries(variant, boundary, training, question, moved)
        for other, again in ways:
            kept = other.suffix_moves.keep(()) if other.suffix_moves is not None else Kept()
            try:
                return run(other, again, other.suffix), again
            except WitnessError as error:
                if error.plan is not other.plan:
                    raise
                question = error
                kept.put_back()
        raise question

    def _boundaries(
        self, variant: Variant, boundary: BoundaryPayload, training: bool, question: WitnessError, moved: bool | None
    ) -> Iterator[tuple[Variant, BoundaryPayload]]:
        """The boundaries that this call has on other paths; what its prefix moved is moved by one of them instead.

        `moved`: whether what the prefix ran from was written into before the suffix ran, where that was asked.
        """
        before: Before = boundary._before
        if before.moved() if moved is None else moved:
            raise WitnessError(
                f"{question}. The prefix must run again on the other path, and its inputs, or state that it reads, were written "
                "into since. Run each suffix before that; or show the path beforehand, prepare_split(..., more_examples=[...])"
            ) from question
        assert variant.prefix_moves is not None
        now = numbers(python=before.moves.python) if before.kept.numbers else []
        drawn = bool(now) and not alike(now, before.after)  # by something else, since the prefix ran
        undone = variant.prefix_moves.keep(before.entered[1:], before.call)
        kept = before.kept
        try:
            kept.put_back()
            for other, entered in self._others(before.call, training, variant, question):
                if not self._comparable(variant, other):
                    raw = self._values(variant, before.entered, training)
                    self._refuse_another(variant, boundary, variant, raw, question, before.kept)
                    before.kept.put_back()
                kept = other.moved_by_prefix.keep(entered[1:], before.call)
                try:
                    raw = self._values(other, entered, training)
                except WitnessError as error:
                    if error.plan is not other.plan:
                        raise
                    kept.put_back()
                    continue
                self._refuse_another(variant, boundary, other, raw, question, kept)
                again = self._boundary(other, entered, raw, training)
                again._before = Before(other.moved_by_prefix, kept, before.call, entered)
                for put, state in now if drawn else ():
                    put(state)
                yield other, again
                kept.put_back()
        except BaseException as error:
            if not (isinstance(error, GeneratorExit) or has_done(error)):
                undone.put_back()
            raise
        undone.put_back()

    def _before(self, boundary: BoundaryPayload) -> Before | None:
        """What the prefix of a boundary ran from, where that was here and is both sides' model."""
        found: Before | None = boundary._before if self.plan.apart is None else None
        return found

    def _suffixes(
        self, variant: Variant, boundary: BoundaryPayload, training: bool, question: WitnessError
    ) -> Iterator[tuple[Variant, BoundaryPayload]]:
        """The suffixes of other known paths that a boundary serves whose prefix ran elsewhere: those that may follow it."""
        missing, likely = "", list[tuple[int, Variant]]()
        for other in reversed(self._variants):
            if other is variant or not other.serves(training) or boundary.batch not in other.plan.batches:
                continue
            fits = _answers(variant.plan, question, other.plan)
            told = (
                fits >= 0 or self.plan.apart is not None
            )  # of halves, one may have asked before its cut what another asks after
            if not told or not self._may_follow(variant, other):
                continue
            lacking = [name for name in other.candidate.live if name not in boundary.labels]
            if lacking:
                missing = f" One that is known for its answer needs {lacking[0]!r}, which this prefix does not send."
            else:
                likely.append((fits, other))
        for _, other in sorted(likely, key=lambda found: -found[0]):
            again = boundary.narrowed(*other.key, other.candidate.live)
            check_values(again, other)
            yield other, again
        raise WitnessError(
            f"{question}. The suffix asks, and what its prefix ran from is not here: the boundary came over a wire, or this "
            f"is half of a model. It knows {1 + len(likely)} path(s) that go on from such a boundary.{missing} Run the prefix "
            "where the model is with more_examples that show this path, and send both sides anew"
        ) from question

    def _may_follow(self, variant: Variant, other: Variant) -> bool:
        """Whether the boundary of one plan's prefix serves another's suffix, where it holds what that takes."""
        a, b = variant.plan.apart, other.plan.apart
        if a is not None and b is not None:
            return a.number in b.follows
        pair = variant, other
        if pair not in self._same:
            self._same[pair] = serves(*((v.plan, v.candidate, v.baseline) for v in pair))
        return self._same[pair]

    def _comparable(self, variant: Variant, other: Variant) -> Collection[str]:
        """The labels of a boundary that another plan's prefix makes, too, and must make alike."""
        if (variant, other) not in self._alike:
            ends = [v.parts["prefix"].stop for v in (variant, other)]
            same = made_alike(variant.plan, ends[0], other.plan, ends[1]) & {*other.candidate.live}
            self._alike[variant, other] = same.intersection(variant.candidate.live) - {*variant.candidate.written}
        return self._alike[variant, other]

    def _refuse_another(
        self,
        variant: Variant,
        boundary: BoundaryPayload,
        other: Variant,
        raw: tuple[Any, ...],
        question: WitnessError,
        kept: Kept,
    ) -> None:
        """Raise `WitnessError` where a prefix that ran again made another value than what crossed, by the same op."""
        now, comparable = dict(zip(other.candidate.live, raw, strict=True)), self._comparable(variant, other)
        for label, was in zip(boundary.labels, boundary.raw, strict=True):
            if label in comparable and difference(was, now[label]):
                kept.put_back()
                raise WitnessError(
                    f"{question}. The prefix had to run again, and gives another {label!r}: its inputs, or state that it reads, "
                    "were written into since. Run each suffix before that; or show the path beforehand, prepare_split(..., "
                    "more_examples=[...])"
                ) from question

    def _boundary(
        self, variant: Variant, entered: tuple[Any, ...], raw: tuple[Any, ...], training: bool
    ) -> BoundaryPayload:
        raise NotImplementedError

    def _others(
        self, call: tuple[tuple[Any, ...], dict[str, Any]], training: bool, variant: Variant, question: WitnessError
    ) -> Iterator[tuple[Variant, tuple[Any, ...]]]:
        """The known plans of other paths that may be that of this call, likely ones first; then one that is captured for it."""
        asked, paths, likely = variant, 1, list[tuple[int, Variant, tuple[Any, ...]]]()
        with self._lock:
            for other in reversed(self._variants):
                if other is variant or not other.serves(training):
                    continue
                entered = other.enter(*call)
                if entered is None:
                    continue
                if not other.guard():
                    continue
                paths += 1
                likely.append((_answers(asked.plan, question, other.plan), other, entered))
        for fits, other, entered in sorted(likely, key=lambda found: (-found[0], -self._asked(found[1]))):
            if fits >= 0:
                self._use(other, training)
                yield other, entered
        if variant.plan.apart is not None:
            raise WitnessError(
                f"{question}. {paths} path(s) of such inputs are in this half's file, and a half can't capture another: it has no "
                "model. Show this one where the model is, by more_examples or save(..., examples=...), and save both halves anew"
            ) from question
        if paths >= self.settings.spec.max_paths:
            raise WitnessError(
                f"{question}. {paths} path(s) of such inputs have a plan, and that is max_paths: raise it in SplitSpec, or, where "
                'each call takes a path of its own, run the model\'s own Python, prepare_split(..., fallback="python") with '
                "max_paths=1"
            ) from question
        yield self._captured(*call, training)


def _answers(asked: TracePlan, question: WitnessError, other: TracePlan) -> int:
    """1 if a plan has the answer that a question found, 0 if nothing tells, and -1 if it has another.

    The same answers lead Python to the same question. So where all before it are alike, so is it, and its answer decides.
    """
    mine = [node for i, node in asked.questions if i <= question.at]
    theirs = [node for _, node in other.questions[: len(mine)]]
    same = [(a.target, a.module, a.call) == (b.target, b.module, b.call) for a, b in zip(mine, theirs, strict=False)]
    if len(theirs) < len(mine) or not all(same) or not mine:
        return 0
    plain = [isinstance(n.witness, (bool, int, float)) for n in (*mine, *theirs)]
    if not all(plain):
        return 0
    *before, last = zip(mine, theirs, strict=True)
    if not all(tree.identical(a.witness, b.witness) for a, b in before):
        return -1
    return 1 if tree.identical(last[1].witness, question.found) else -1
