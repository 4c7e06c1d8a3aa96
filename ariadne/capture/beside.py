"""Sizes beside the batch: one symbolic plan over them all, held against real runs at the example's sizes and at others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from ariadne.capture.example import Evidence, Example
from ariadne.capture.generalize import disagreement, with_views_of, without_slices_of_all
from ariadne.capture.observed import Observation, observe
from ariadne.capture.symbolic import above_1, symbolic
from ariadne.errors import UnsupportedError
from ariadne.guards import Effects, Recording
from ariadne.plan import TracePlan, sizes_in

_NEAR = 64  # how many sizes above and below the example's may be taken for the symbolic run
_OTHERS = 8  # how many of each are tried for a real run


@dataclass(frozen=True)
class Ranging:
    """A plan over sizes, what it rests on, the real runs that it was held against, and inputs of the other sizes."""

    plan: TracePlan
    recordings: list[Recording]
    evidence: list[Evidence]
    elsewhere: Example


class _NoRangeError(Exception):
    """Why no plan over these sizes holds."""


def over_sizes(
    model: nn.Module, example: Example, real: Observation, batch_symbol: str, batches: range, grad: bool, effects: Effects,
    reasons: list[tuple[str, str]],
) -> Ranging | None:  # fmt: skip
    """One plan whose declared sizes are symbols and that serves the example; None where there is none, with the reasons.

    It is held, op by op, against real runs at the example's sizes, which `real` may be, and at others, unequal where they can be.
    """
    here = sizes_in(example.sizes, example.leaves)
    way = f"symbolic in {', '.join(here)}"
    at = next((b for b in (real.evidence.batch, *above_1(batches)) if b > 1), real.evidence.batch)

    def run(inputs: Example) -> Observation:
        return observe(model, inputs, at, batch_symbol, grad, effects=effects)

    try:
        base = real if at == real.evidence.batch else run(example)
        plan, recordings = _found(model, example, base, batches, grad, effects, here, batch_symbol)
        others = _others(plan, example, here, at)
        elsewhere = example.of_sizes(others)
        seen = run(elsewhere)
        differs = differs_from(plan, seen)
        if differs:
            raise _NoRangeError(f"not what a real run does at {_told(others)}: {differs}")
    except _NoRangeError as error:
        reasons.append((way, str(error)))
    except UnsupportedError as error:
        reasons.append((way, str(error)))
    except Exception as error:  # whatever torch's fake tensors raise, or the model at sizes that nobody asked it to run
        reasons.append((way, first_line(error)))
    else:
        more = [] if base is real else [base]
        evidence = [o.evidence for o in more] + [replace(seen.evidence, example=elsewhere)]
        return Ranging(plan, [*recordings, *(o.recorded for o in (*more, seen))], evidence, elsewhere)
    return None


def _found(
    model: nn.Module, example: Example, base: Observation, batches: range, grad: bool, effects: Effects,
    here: dict[str, int], batch_symbol: str,
) -> tuple[TracePlan, list[Recording]]:  # fmt: skip
    """The first plan of a symbolic run that serves the example's own sizes, and agrees with a real run at them."""
    why = "a size of 1 broadcasts"
    for hinted in _hints(model, example, max(example.batch, 2)) if 1 not in here.values() else ():
        recordings: list[Recording] = []
        inputs = example.of_sizes(hinted)
        try:
            plan = symbolic(model, inputs, batch_symbol, batches, grad, effects, recordings, over=example.sizes)
        except UnsupportedError:
            raise
        except Exception as error:  # the model may refuse these sizes; or torch's fake tensors raise
            why = f"at {_told(hinted)}, {first_line(error)}"
            continue
        unmet = plan.unmet({batch_symbol: base.evidence.batch, **here})
        if not unmet:
            plan, differs = held_against(plan, base)
            if differs:
                raise _NoRangeError(f"not what a real run does: {differs}")
            return plan, recordings
        why = f"forward goes on from {unmet}, which does not hold at {_told(here)}"
    raise _NoRangeError(why)


def _others(plan: TracePlan, example: Example, here: dict[str, int], batch: int) -> dict[str, int]:
    """Sizes near the example's, other than those and one another where there are such, that the plan serves at this batch."""
    pools = []
    for symbol, within in {s.symbol: s.within for s in example.sizes}.items():
        near = (n for n in _around(within, here[symbol]) if n not in (1, here[symbol]))
        pools.append([*itertools.islice(near, _OTHERS)] or [here[symbol]])
    served = [
        found
        for sizes in itertools.product(*pools)
        if not plan.unmet((found := dict(zip(here, sizes, strict=True))) | {plan.batch_symbol: batch})
    ]
    if not served or served == [here]:
        raise _NoRangeError(f"it holds for no sizes near {_told(here)} but these")
    return max(served, key=lambda found: len({*found.values()}))


def _told(sizes: dict[str, int]) -> str:
    return ", ".join(f"{symbol} {size}" for symbol, size in sizes.items())


def _around(within: range, size: int) -> list[int]:
    """The sizes of a range, as far as they are near one of them, the nearest first."""
    at = within.index(size)
    return sorted(within[max(0, at - _NEAR) : at + _NEAR + 1], key=lambda n: abs(n - size))


def held_against(plan: TracePlan, real: Observation) -> tuple[TracePlan, str | None]:
    """A symbolic plan with what a real run shows of it, and where that run did something else; None if nowhere."""
    seen = next((s for s in real.plans if not disagreement(without_slices_of_all(plan, s), s)), real.plan)
    plan = without_slices_of_all(plan, seen)
    differs = disagreement(plan, seen)
    return (plan, differs) if differs else (with_views_of(plan, seen), None)


def differs_from(plan: TracePlan, seen: Observation) -> str | None:
    """Where a real run does not do what a plan of other runs says; None if nowhere."""
    plans = seen.plans if plan.captured_by == "symbolic" else (seen.plan,)
    found = [disagreement(plan, one) for one in plans]
    return None if None in found else found[0]


def first_line(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def _hints(model: nn.Module, example: Example, batch: int) -> Iterator[dict[str, int]]:
    """Sizes to run symbolically with, by symbol, near the example's, each once.

    A question may part those above from those below; and a model may take multiples of 2 to the n alone, as the example's are. They
    differ from the batch and each other, and where they can, from all that stands in the model and in its inputs.
    """
    here = sizes_in(example.sizes, example.leaves)
    within = {s.symbol: s.within for s in example.sizes}
    free = {(s.leaf, s.dim) for s in example.sizes}
    inputs = [(i, leaf) for i, leaf in enumerate(example.leaves) if isinstance(leaf, torch.Tensor)]
    common = {n for t in (*model.parameters(), *model.buffers()) for n in t.shape}
    common |= {n for i, leaf in inputs for d, n in enumerate(leaf.shape) if (i, d) not in free}
    seen: list[dict[str, int]] = []
    for above, aligned in ((1, False), (-1, False), (1, True)):
        found: dict[str, int] = {}
        for symbol, size in here.items():
            step = size & -size if aligned else 1
            near = sorted(_around(within[symbol], size), key=lambda n: (abs(n - size), -above * n))
            near = [n for n in near if n > 1 and n != batch and n not in found.values() and n % step == 0]
            found[symbol] = next((n for n in near if n not in common), near[0] if near else 0)
        if all(found.values()) and found not in seen:
            seen.append(found)
            yield found
