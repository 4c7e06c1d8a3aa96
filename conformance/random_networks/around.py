"""Around a call: other threads' draws, autocast on one side or both, weights that are kept from call to call, halves from files.

Each is an action of a session: it takes the session, and a small number.
"""

from __future__ import annotations

import copy
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

import ariadne
from ariadne.errors import AriadneError, BoundaryError
from conformance.random_networks.compare import (
    ON_CLASS,
    Different,
    bare,
    copied,
    differences,
    generators,
    same,
    seed_all,
    state,
    tensors,
)
from conformance.suite.handed import functions_called, modules_called

PAUSE = 2e-4
# While such a step runs, nobody can tell who draws.
TAKEN_WHOLE = ("checkpointed", "opaque", "scripted")


def _lowered(cached: bool = True) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cached)


SIDES = ((nullcontext, _lowered), (_lowered, nullcontext), (_lowered, _lowered), (_lowered, partial(_lowered, False)))


def under_casts(session: Any, number: int) -> None:
    """Both halves under one autocast, which is the whole's; or one of them under another, which must be refused."""
    runtime, twins, batch = session.runtime, session.twins, session.batch
    before, after = SIDES[number % len(SIDES)]
    if not runtime:
        return
    if before is after:

        def lowered() -> bool:
            with before():
                ran: bool = twins.replay(runtime, batch, f"under autocast {number}", seed=number)
                return ran

        session.counts.replays += session._allowed(lowered)
        return
    args, kwargs = copied(twins.inputs(batch, number))
    seed_all(number)
    try:
        with before():
            boundary = runtime.run_prefix(*args, **kwargs)
    except Exception:  # the whole may raise at this batch, too: that is held by what runs both
        twins.reset()
        return
    try:
        with after():
            runtime.run_suffix(boundary)
    except BoundaryError as error:
        if "autocast" not in str(error):
            raise Different(f"another autocast for the suffix: {error!r}") from error
    else:
        raise Different("a suffix ran under another autocast than its prefix")
    twins.reset()


def kept_weights(session: Any, number: int) -> None:
    """A call while parametrized weights are kept from one call to the next: equal, or refused where there are any."""
    if not session.runtime:
        return
    act = partial(session.twins.replay, session.runtime, session.batch, f"kept weights {number}", seed=number)
    with parametrize.cached():
        if not any(parametrize.is_parametrized(m) for m in session.twins.split.modules()):
            session.counts.replays += session._allowed(act)
            return
        try:
            ran = act()
        except Different:
            raise
        except AriadneError as error:
            session.counts.refuse(error, session.program)
            session.twins.reset()
            return
    if ran:
        raise Different("a call went through while parametrized weights are kept from call to call")


DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1, dtype=torch.float32),
    "python": random.random,
    "numpy": np.random.rand,
}


@contextmanager
def another(once: Callable[[], object] = DRAWS["torch"]) -> Iterator[list[int]]:
    """While in the block another thread draws from a generator, at least once; how often."""
    drawn, done = [0], threading.Event()

    def draw() -> None:
        while not (done.wait(PAUSE) and drawn[0]):
            once()
            drawn[0] += 1

    thread, count = threading.Thread(target=draw), threading.active_count
    thread.start()
    threading.active_count = lambda: 2  # tests let every program think that it is alone in the process
    try:
        yield drawn
    finally:
        threading.active_count = count
        done.set()
        thread.join()


def draws_beside(session: Any, number: int) -> None:
    """A call while another thread draws: its numbers come once, and where forward draws none, the result is the whole's.

    It draws from torch's generator, Python's or numpy's, of which a call may be a capture, too.
    """
    runtime, twins, program = session.runtime, session.twins, session.program
    whole = any(s["do"].startswith(TAKEN_WHOLE) for s in program.steps)
    if not runtime or whole or any(p.get("kind") == "opaque" for p in program.parts.values()):
        return
    mine, theirs = copied(twins.inputs(session.batch, number)), copied(twins.inputs(session.batch, number))
    seed_all(number)
    stood = generators()
    try:
        with torch.no_grad():
            expected = twins.whole(*mine[0], **mine[1])
    except Exception:
        twins.reset()
        return
    after, moved = state(twins.whole, twins.whole_step), generators()
    if any(moved[n] != stood[n] for n in ("python", "numpy")) or not torch.equal(moved["torch"], stood["torch"]):
        twins.reset()
        return
    kind = [*DRAWS][number // 2 % len(DRAWS)]
    seed_all(number)
    try:
        with another(DRAWS[kind]) as drawn:
            found = runtime.run_suffix(runtime.run_prefix(*theirs[0], **theirs[1]))
    except AriadneError as error:
        if not (session.stale or program.refusable or "another thread drew" in str(error)):
            raise Different(f"while another thread draws: {error!r}") from error
        session.counts.refuse(error, session.program)
        twins.reset()
        return
    now = generators()
    seed_all(number)
    for _ in range(drawn[0]):
        DRAWS[kind]()
    if next(differences(now, generators(), ""), None):
        raise Different(
            f"another thread drew {drawn[0]} numbers from {kind}'s generator during a call, and some come again"
        )
    seed_all(number)
    same(expected, found, f"beside another thread {number}")
    twins.alike(f"beside another thread {number}", after)
    session.counts.replays += 1


def from_files(session: Any, number: int) -> None:
    """Both halves from files, with the modules that they call handed to them: equal to the whole, or refused."""
    runtime, twins = session.runtime, session.twins
    if not runtime:
        return
    whole, other = copy.deepcopy(twins.whole), copy.deepcopy(twins.whole)
    args, kwargs = copied(twins.inputs(session.batch, number))
    try:
        halves = _loaded(runtime, other)
        seed_all(number)
        sent = halves[0].run_prefix(*args, **kwargs).to_bytes()
        found = halves[1].run_suffix(ariadne.BoundaryPayload.from_bytes(sent))
    except AriadneError as error:
        session.counts.refuse(error, session.program)
        return
    except Exception as error:
        found = error
    args, kwargs = copied(twins.inputs(session.batch, number))
    seed_all(number)
    try:
        with torch.no_grad(), _class_as_found(type(whole)):  # a copy has the class of the one that it was made of
            expected = whole(*args, **kwargs)
    except Exception as error:
        if type(found) is not type(error):
            raise Different(
                f"from files {number}: the whole model raises {error!r}, the halves give {found!r}"
            ) from error
        return
    if isinstance(found, Exception):
        raise Different(f"from files {number}: the halves raise {found!r}") from found
    same(bare(tensors(expected)), bare(tensors(found)), f"from files {number}")
    held = whole.state_dict()
    for half in halves:
        mine = half.state_dict()
        same({n: held[n] for n in mine}, dict(mine), f"from files {number}, the {half.part}'s tensors")
    session.counts.replays += 1


@contextmanager
def _class_as_found(cls: type) -> Iterator[None]:
    was = {name: copy.copy(getattr(cls, name)) for name in ON_CLASS}
    try:
        yield
    finally:
        for name, value in was.items():
            setattr(cls, name, value)


def _loaded(runtime: Any, other: nn.Module) -> list[Any]:
    plans = [*runtime._plans]
    allow, handed = functions_called(plans), modules_called(plans, runtime.model, other)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / side for side in ("prefix", "suffix")]
        for path in paths:
            runtime.save(path, side=path.name)
        return [ariadne.load(path, allow=allow, plain=True, modules=handed) for path in paths]
