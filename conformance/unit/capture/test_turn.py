"""Who waits for a turn that never comes: threads that forward waits for, and processes that were forked within another's turn."""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import prepare_split
from ariadne.capture import capturing
from ariadne.errors import UnsupportedError
from ariadne.guards.versions import VERSION

X = torch.ones(2, 4)
PATIENCE = 20.0  # seconds; what is tested takes a tenth of one


class Signals:
    """Signals through a pipe: a queue that forward reaches, preparing would put back."""

    def __init__(self) -> None:
        self.reads, self.writes = os.pipe()

    def put(self, signal: bytes = b".") -> None:
        os.write(self.writes, signal)

    def empty(self) -> bool:
        return not select.select([self.reads], [], [], 0)[0]

    def get(self, timeout: float = 0.0) -> bytes:
        assert select.select([self.reads], [], [], timeout)[0], "nobody has sent a signal"
        return os.read(self.reads, 1)


ASKED, ANSWERED = Signals(), Signals()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.between(self.a(x)))
        return found


def prepares(**options: Any) -> Any:
    return prepare_split(Net(), (X,), split="after:a", **options)


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it waits for the thread that waits for it"


def noted(work: Callable[[], object]) -> object:
    try:
        return work()
    except UnsupportedError as error:
        return error


@pytest.mark.parametrize("deep", [1, 2])
@pytest.mark.parametrize("fallback", ["refuse", "python"])
def test_a_thread_that_forward_starts_and_joins_does_not_wait_for_forwards_turn(deep: int, fallback: Any) -> None:
    found, waits = Signals(), b"w"  # for each try whether it was refused, since the two would wait for each other

    def deeper(left: int) -> None:
        if left:
            in_a_thread(lambda: deeper(left - 1))
        else:
            error = noted(lambda: prepares(fallback=fallback))
            refused = isinstance(error, UnsupportedError)
            assert not refused or "they would wait for each other" in str(error)
            found.put(waits if refused else b".")

    class Joins(Net):
        def between(self, h: Tensor) -> Tensor:
            deeper(deep)
            return h * random.random()

    model = Joins()
    split = prepare_split(model, (X,), split="after:a", fallback="python")
    told = [found.get() for _ in iter(found.empty, True)]
    assert waits in told
    assert told.count(waits) < len(told), "where forward is proved, no turn is taken"
    with torch.no_grad():
        random.seed(0)
        whole = model(X)
        random.seed(0)
        assert torch.equal(split.run_suffix(split.run_prefix(X)), whole)
    assert waits not in [found.get() for _ in iter(found.empty, True)]


class ByRows(Net):
    """As many ops as the batch has rows, so that each batch has a plan of its own."""

    def between(self, h: Tensor) -> Tensor:
        for _ in range(h.shape[0]):
            h = torch.relu(h)
        return h


def test_a_python_split_that_forward_has_another_thread_call_may_not_wait_for_forwards_turn_either() -> None:
    inner = prepare_split(ByRows(), (X,), split="after:a")
    rows = [2]

    class Calls(Net):
        def between(self, h: Tensor) -> Tensor:
            inner.run_prefix(torch.ones(rows[0], 4))
            return h * random.random()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    stopped = prepare_split(Calls(), (X,), split="after:b", fallback="python")
    told: SimpleQueue[object] = SimpleQueue()
    rows[0] = 3

    class Outer(Net):
        def between(self, h: Tensor) -> Tensor:
            in_a_thread(lambda: told.put(noted(lambda: stopped.run_prefix(X))))
            return h

    # Without versions of dicts a split lays out its model's tables anew at each call, which is told as a change.
    moves = pytest.raises(UnsupportedError, match="changes what is in the variable 'stopped' around between")
    with nullcontext() if VERSION is not None else moves:
        prepare_split(Outer(), (X,), split="after:a")
    assert any("they would wait for each other" in str(told.get()) for _ in range(told.qsize()))


class Asks(Net):
    def between(self, h: Tensor) -> Tensor:
        ASKED.put()
        ANSWERED.get(timeout=PATIENCE)
        return h


class AsksAndDraws(Asks):
    def between(self, h: Tensor) -> Tensor:
        return super().between(h) * random.random()


def in_a_child(work: Callable[[], bool]) -> int:
    """Whether `work` held in a process forked now: 0; 1 where it did not, -9 where it hung."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: there are other threads
        pid = os.fork()
    if not pid:
        status = 1
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.parametrize(("kind", "by"), [(Asks, "ariadne.capture"), (AsksAndDraws, "ariadne.stopped.calls")])
def test_a_process_that_is_forked_while_another_thread_prepares_prepares_itself(kind: type[Asks], by: str) -> None:
    called = nn.Module.__call__.__module__

    def holds() -> bool:
        split, x = prepares(), torch.randn(5, 4)
        with torch.no_grad():
            same = torch.equal(split.run_suffix(split.run_prefix(x)), split.model(x))
        plain: Any = torch._ops.mode_stack_state_for_pre_dispatch  # type: ignore[attr-defined]
        functions = (plain, torch._ops.OpOverload._get_dispatch)
        return same and nn.Module.__call__.__module__ == called and {f.__module__ for f in functions} == {"torch._ops"}

    other = threading.Thread(
        target=lambda: prepare_split(kind(), (X,), split="after:a", fallback="python"), daemon=True
    )
    other.start()
    status = None
    while other.is_alive():
        ASKED.get(timeout=PATIENCE) if status is None else time.sleep(1e-3)
        if status is None and nn.Module.__call__.__module__.startswith(by):
            status = in_a_child(holds)
        ANSWERED.put()
    while not ANSWERED.empty():
        ANSWERED.get()
    while not ASKED.empty():
        ASKED.get()
    assert status == 0


def test_the_collector_leaves_old_objects_until_the_turn_ends() -> None:
    before = gc.get_threshold()
    with capturing(), capturing():
        young, old = gc.get_threshold()[:2], gc.get_threshold()[2]
        assert young == before[:2]
        assert old > 1_000_000
    assert gc.get_threshold() == before


def test_what_forward_sets_of_the_collector_stands() -> None:
    before = gc.get_threshold()
    try:
        with capturing():
            gc.set_threshold(701, 11, 12)
        assert gc.get_threshold() == (701, 11, 12)
    finally:
        gc.set_threshold(*before)
