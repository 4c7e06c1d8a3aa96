"""Checks: a model's split held against the model itself, bit for bit, over cuts, batch sizes and training steps.

What the whole model gives is computed anew here, by the model alone; all that a run returns or moves is compared: outputs,
inputs, losses, gradients, parameters, buffers, the optimizers' state and the random generators.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from torch import nn

from ariadne.capture import Snapshot, left_as_found
from ariadne.check.observation import Inputs, Loss, first_difference, generators, held, of_many_sizes, rippled, varied
from ariadne.check.twins import Comparison, Status
from ariadne.cut import BatchDim, ExecutionMode, SplitSpec, parse_boundary, select
from ariadne.errors import SpecError, VerificationError, named
from ariadne.prepare import example_of, prepare_split
from ariadne.runtime import SplitRuntime

Kind = Literal["twice", "left", "forward", "replay", "train"]
SPLIT_CHECKS: tuple[Kind, ...] = ("forward", "replay", "train")  # in which a split is held against the model
CHECKS: tuple[Kind, ...] = ("twice", "left", *SPLIT_CHECKS)
QUANTILES = {"q25": "percent:25", "q50": "percent:50", "q75": "percent:75"}


@dataclass(frozen=True)
class CheckResult:
    """What one check came to.

    `check`: "twice" (the model itself gives the same answer twice), "left" (preparing leaves it as found), "forward" (the split
    equals it, on two inputs), "replay" (the suffix, run twice on one boundary with another in flight between), "train" (`steps`
    training steps equal those of a copy). `split_id` and `after` say where it was cut, `batch` on how many samples.
    `status`: "fail" where a difference showed; "refused" where the split raised an error of its own; "nondeterministic" where
    the model differs from itself, so that nothing can be shown; "skipped" where the model itself can't run or train so; "left out"
    where the time was up.
    `detail` says why it is not "pass".
    """

    check: Kind
    status: Status
    training: bool
    batch: int
    split_id: str = ""
    after: str = ""
    steps: int = 0
    detail: str = ""
    seconds: float = 0.0


def passed(results: Sequence[CheckResult]) -> bool:
    """Whether what was asked for was shown: all that could be compared was equal, and something was.

    Where a split was to be held against the model, one of these checks must have passed.

    >>> passed(check(model, (torch.randn(2, 3, 224, 224),)))
    True
    """
    compared = [r for r in results if r.check in SPLIT_CHECKS] or [r for r in results if r.check == "left"] or results
    return any(r.status == "pass" for r in compared) and all(
        r.status in ("pass", "skipped", "left out") for r in results
    )


def check(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    cuts: Sequence[str] = ("q25", "q50", "q75"),
    batches: Sequence[int] = (1, 2, 3, 5),
    steps: int = 3,
    only: Sequence[Kind] = CHECKS,
    dynamic_batch: tuple[int, int] | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    sizes: Mapping[str, tuple[int, ...]] | None = None,
    batch_dim: BatchDim | None = None,
    mode: ExecutionMode = "generated_eager",
    seed: int = 0,
    seconds: float | None = None,
    loss_fn: Loss | None = None,
    inputs: Inputs | None = None,
    on_result: Callable[[CheckResult, int], None] | None = None,
) -> list[CheckResult]:
    """Hold splits of `model`, in the training mode that it has, against the model itself; returns a result for each check.

    `args` and `kwargs` are example inputs, as for `prepare_split`. `cuts`: boundary strings, or "q25", "q50", "q75", or ("every",)
    for every safe cut. `inputs(batch, seed)` makes other inputs, a function of the two numbers; without it they are made from
    the samples of the example. `dynamic`, `sizes` and `batch_dim` are those of `SplitSpec`: with sizes each seed gives
    others, repeated or cut.
    `loss_fn(output)`; without it, a loss that depends on every element of every floating tensor.
    `seconds`: after so long no further check is begun, save the first of each kind; the others are "left out". Batches that
    preparing has not seen come first, at every cut. `on_result` is called with each result, and how many are still to come (0
    until that is known). Model and random generators are left as found.

    Raises what `prepare_split` raises, save that a split which differs from the model is a failed check; `SpecError` for
    invalid arguments; and what the model itself raises on the example.

    >>> [r for r in check(model, (torch.randn(2, 16),), cuts=("every",)) if r.status == "fail"]
    []
    """
    if mode == "compiled":
        raise SpecError(
            "compiled code rounds in its own way, so there is no equality of bits to check; check 'generated_eager', from which "
            "it is made, or 'debug_interpreter'"
        )
    unknown = next((kind for kind in only if kind not in CHECKS), None)
    if unknown is not None:
        raise SpecError(f"there is no check {unknown!r}; there are {', '.join(map(repr, CHECKS))}")
    if any(b < 0 for b in batches) or not batches or steps < 1 or not cuts:
        raise SpecError(
            f"a check takes at least one cut, one batch of 0 or more, and 1 step; found {cuts=}, {batches=}, {steps=}"
        )
    end = math.inf if seconds is None else time.perf_counter() + seconds
    named = [QUANTILES.get(cut, cut) for cut in cuts]
    for cut in named:
        if cut != "every":
            parse_boundary(cut)
    first = "percent:50" if "every" in named else named[0]
    spec = SplitSpec(
        first,
        dynamic_batch=dynamic_batch or (min(1, *batches), max(64, *batches)),
        dynamic=dynamic,
        sizes=sizes,
        batch_dim=batch_dim,
    )
    example = example_of(model, args, kwargs, spec)
    batches = batches if example.batched else (example.batch,)
    run = Comparison(model, of_many_sizes(inputs or varied(example), example), seed, loss_fn or rippled, steps)
    results = []

    def prepare() -> SplitRuntime:
        return prepare_split(model, args, split=spec, mode=mode, example_kwargs=kwargs)

    with left_as_found(model, buffers=True):
        for result, left in _results(run, example.batch, prepare, named, batches, only, end):
            results.append(result)
            if on_result is not None:
                on_result(result, left)
    return results


def _results(
    run: Comparison,
    batch: int,
    prepare: Callable[[], SplitRuntime],
    cuts: Sequence[str],
    batches: Sequence[int],
    only: Sequence[Kind],
    end: float,
) -> Iterator[tuple[CheckResult, int]]:
    """Each result, and how many are still to come."""
    start, training = time.perf_counter(), run.model.training
    moved = run.differs_from_itself(batch)
    status: Status = "nondeterministic" if moved else "pass"
    if moved or "twice" in only:
        took = time.perf_counter() - start
        yield CheckResult("twice", status, training, batch, detail=moved or "", seconds=took), 0
    if moved or set(only) <= {"twice"}:
        return
    start = time.perf_counter()
    runtime, wrong = _prepared(run.model, prepare)
    if wrong or "left" in only:
        where = ("", "") if runtime is None else (runtime.split_id, runtime.candidate.after)
        took = time.perf_counter() - start
        yield CheckResult("left", "fail" if wrong else "pass", training, batch, *where, 0, wrong or "", took), 0
    if runtime is None:
        return
    chosen = [select(runtime.plan, runtime.candidates, parse_boundary(cut)) for cut in cuts if cut != "every"]
    chosen += [c for c in runtime.candidates if c.safe and "every" in cuts]
    kinds = [kind for kind in CHECKS[2:] if kind in only]
    splits = list(dict.fromkeys(chosen))
    cut = {c: runtime.resplit(c.split_id) for c in splits}
    asked = [*product(sorted(batches, key=lambda size: size in (1, batch)), splits, kinds)]
    for number, (size, c, kind) in enumerate(asked):
        start, detail = time.perf_counter(), ""
        status = "left out"
        if start < end or number < len(kinds):
            status, detail = run.of(cut[c], kind, size)
        steps, took = run.steps if kind == "train" else 0, time.perf_counter() - start
        found = CheckResult(kind, status, training, size, c.split_id, c.after, steps, detail, took)
        yield found, len(asked) - number - 1


def _prepared(model: nn.Module, prepare: Callable[[], SplitRuntime]) -> tuple[SplitRuntime | None, str | None]:
    """The split, and how preparing it moved the model or a generator; no split where it and the whole differ already."""
    before, snapshot, stood = held(model), Snapshot(model), generators()
    try:
        runtime = prepare()
    except VerificationError as error:
        return None, f"VerificationError: {error}"
    changed = next((f"attribute {name!r} of {named(path)}" for path, name, *_ in snapshot.changes()), None)
    wrong = first_difference({**before, "generators": stood}, {**held(model), "generators": generators()})
    wrong = wrong or (f"{changed} is another object" if changed else None)
    return runtime, wrong and f"after preparing, {wrong}"
