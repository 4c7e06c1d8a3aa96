"""One program held against every promise: cut everywhere, replayed at several batches in both modes, and trained."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import partial

import torch

from ariadne import SplitRuntime
from ariadne.errors import CaptureError, FrontierError, InputError
from conformance.random_networks.compare import Different, copied
from conformance.random_networks.counts import Counts, allowed
from conformance.random_networks.extent import ALL, Extent
from conformance.random_networks.program import Program, apart
from conformance.random_networks.session import Session
from conformance.random_networks.twins import Invalid, Twins, loss_of

BATCHES, TRAINED, STEPS = (2, 1, 6), (2, 3), 2  # 6: no capture runs it, unless the program's own is near


REFUSED_BY_MODELS = (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError)
FILLED = {"by_first_call", "by_shape_table"}  # steps that keep what a call made
GROWN = {"by_length"}  # steps after which a model is another one: its buffer has more rows


def trial(program: Program, extent: Extent = ALL) -> Counts:
    """Hold a program's split against the whole, in eval and in training mode; or replay its session, if it has one.

    Raises `Different` where a promise is broken, and `Invalid` where the whole model can't run at all.
    """
    if program.script:
        return Session(program).replay()
    counts = Counts()
    for training, trains in modes(program, extent):
        _hold(program, training, trains, counts, extent.cuts)
    return counts


def modes(program: Program, extent: Extent) -> Iterator[tuple[bool, bool]]:
    """The modes in which a program is asked: whether it trains in it, and whether there is anything to train there."""
    for training in (False, True):
        if extent.both_modes or training == (len(program.steps) % 2 == 1):
            yield training, whole_runs(program, training)


def whole_runs(program: Program, training: bool) -> bool:
    """Whether there is anything to train; `Invalid` where the whole model can't run, or its backward pass can't."""
    trains = False
    twins = Twins(program, training)
    for grad in (False, True):
        args, kwargs = copied(twins.inputs(program.batch))
        try:
            with torch.set_grad_enabled(grad):
                loss = loss_of(copy.deepcopy(twins.whole)(*args, **kwargs))
                if loss.requires_grad:
                    trains = True
                    loss.backward()
        except Exception as error:
            raise Invalid(f"{type(error).__name__}: {error}") from error
    return trains


def _hold(program: Program, training: bool, trains: bool, counts: Counts, most: int) -> None:
    twins, mode = Twins(program, training), "train" if training else "eval"
    try:
        runtime = twins.trace(mode)
    except FrontierError:
        counts.uncut += 1  # the random test bounds how many such programs there may be
        return
    except (CaptureError, InputError) as error:
        if not program.refusable:
            raise Different(f"{mode}: no step of this program may be refused, but: {error}") from error
        counts.refuse(error, program)
        return
    except Exception as error:
        raise Different(f"{mode}: prepare_split raises {type(error).__name__}: {error}") from error
    done = {step["do"] for step in program.steps}
    if done & FILLED and not done & GROWN:
        _ran_before(twins, runtime, mode)
    steps = STEPS if trains else 0
    batches = list(dict.fromkeys((program.batch, *([0] if program.least == 0 else []), *BATCHES)))
    _cut(
        program, twins, runtime, mode, counts, batches, steps
    )  # captures what batches of other plans need, for all cuts after it
    for k, cut in enumerate(runtime.candidates):
        if not cut.safe:
            counts.unsafe += 1
            if not cut.reason or (cut.live and not program.writes):
                raise Different(f"{mode}, {cut.split_id} is not safe, with no cause in the program: {cut.reason!r}")
            continue
        if most and cut.split_id != runtime.split_id and k % max(1, len(runtime.candidates) // most) == 0:
            batches.append(batches.pop(0))
            _cut(program, twins, runtime.resplit(cut), mode, counts, batches[:2], steps)


def _ran_before(twins: Twins, runtime: SplitRuntime, mode: str) -> None:
    """Raise `Different` where a model that ran at other batches has another plan than one that did not."""
    fresh, plan = twins.split, runtime.plan.signature
    twins.split = apart(copy.deepcopy(fresh))
    try:
        with torch.no_grad():
            for batch in BATCHES:
                args, kwargs = twins.inputs(batch)
                with contextlib.suppress(REFUSED_BY_MODELS):  # as the whole model does at such a batch
                    twins.split(*args, **kwargs)
        found = twins.trace(f"{mode}, after calls").plan.signature
    except Different:
        raise
    except Exception as error:
        raise Different(f"{mode}, after calls of the model itself: {type(error).__name__}: {error}") from error
    finally:
        twins.split = fresh
    if found != plan:
        raise Different(f"{mode}: a model that ran before has another plan, {found}, than one that did not, {plan}")


def _cut(
    program: Program, twins: Twins, runtime: SplitRuntime, mode: str, counts: Counts, batches: list[int], steps: int
) -> None:
    where = f"{mode}, {runtime.split_id}"
    counts.cuts += 1
    for k, batch in enumerate(batches):
        act = partial(twins.replay, runtime, batch, f"{where}, batch {batch}", wire=k % 2 == 1)
        counts.replays += allowed(act, twins, runtime, batch, program.refusable, counts)
    for step in range(steps):
        batch, seed = TRAINED[step % len(TRAINED)], step + 2 * (len(program.steps) % 3)
        act = partial(twins.train, runtime, batch, f"{where}, batch {batch}, step {seed}", seed=seed)
        stepped = allowed(act, twins, runtime, batch, program.refusable, counts, seed)
        counts.steps += stepped
        counts.penalised += stepped and step % 2 == 1
