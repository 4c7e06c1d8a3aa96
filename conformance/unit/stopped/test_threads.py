"""What Python and the processor keep by thread: forward, in a thread of its own, finds and leaves it as in its caller's."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, SplitSpec, prepare_split
from ariadne.errors import BoundaryError, FrontierError, UnsupportedError
from ariadne.stopped.handed import Handed, look_for_all, registers

PLAIN = threading.local()
LOCK = threading.RLock()


class _Off(threading.local):
    """Made with arguments, which a new thread's are made with, too."""

    def __init__(self, off: bool) -> None:
        self.off = off


OFF = _Off(False)


_autograd: Any = torch._C._autograd
_c: Any = torch._C


@contextmanager
def _without_forward_ad() -> Iterator[None]:
    _c._set_fwd_grad_enabled(False)
    try:
        yield
    finally:
        _c._set_fwd_grad_enabled(True)


@contextmanager
def _casting_to_half() -> Iterator[None]:
    """What `torch.autocast("cpu")` of forward takes, though there is none around the call."""
    was = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cpu", was)
        torch.set_autocast_cache_enabled(True)


# What torch has for each thread: a block, and what forward asks for in it.
MODES: list[tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]] = [
    (
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("none"),
        _autograd._saved_tensors_hooks_get_disabled_error_message,
    ),
    (_without_forward_ad, _c._is_fwd_grad_enabled),
    (_casting_to_half, lambda: (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())),
]
REFUSED: list[tuple[Callable[[], AbstractContextManager[Any]], str]] = [
    (_c._AutoDispatchBelowAutograd, "leaves out other keys"),
    (_c.DisableTorchFunctionSubclass, "torch functions are disabled"),
]


class _Uses(nn.Module):
    """Calls a function before the cut or after it, in a forward that no graph holds."""

    def __init__(self, use: Any, early: bool) -> None:
        super().__init__()
        self.first, self.last, self.use, self.early = nn.Linear(4, 4), nn.Linear(4, 4), use, early

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.use() if self.early else x
        h = self.first(h) * random.random()
        return self.last(h if self.early else h * self.use())


def _split(use: Any, early: bool) -> tuple[_Uses, Any, Tensor]:
    model, x = _Uses(use, early).eval(), torch.randn(2, 4)
    return model, prepare_split(model, (x,), split="after:first", fallback="python"), x


def _whole(model: nn.Module, x: Tensor) -> Tensor:
    random.seed(0)
    with torch.no_grad():
        found: Tensor = model(x)
    random.seed(0)
    return found


def _scale() -> float:
    return float(getattr(PLAIN, "scale", 1.0))


def _unless_off() -> float:
    return 1.0 if OFF.off else 3.0


@contextmanager
def _set(local: threading.local, name: str, value: Any) -> Iterator[None]:
    missing = object()
    was = getattr(local, name, missing)
    setattr(local, name, value)
    try:
        yield
    finally:
        delattr(local, name) if was is missing else setattr(local, name, was)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("use", "local", "name", "value"), [(_scale, PLAIN, "scale", 2.0), (_unless_off, OFF, "off", True)]
)
def test_forward_sees_the_thread_locals_of_its_caller(use: Any, local: Any, name: str, value: Any, early: bool) -> None:
    model, split, x = _split(use, early)
    plainly = _whole(model, x)
    with _set(local, name, value):
        whole = _whole(model, x)
        assert not torch.equal(whole, plainly)
        assert torch.equal(split.run_suffix(split.run_prefix(x)), whole)
    random.seed(0)
    assert torch.equal(split.run_suffix(split.run_prefix(x)), plainly)


@pytest.mark.parametrize("early", [True, False])
def test_what_forward_leaves_in_thread_locals_is_its_callers(early: bool) -> None:
    class Two(threading.local):
        pass

    two = Two()

    def leave() -> float:
        PLAIN.left, two.left = random.random(), "left"
        return 1.0

    model, split, x = _split(leave, early)
    _whole(model, x)
    whole = PLAIN.left
    vars(PLAIN).clear(), vars(two).clear()
    boundary = split.run_prefix(x)
    assert hasattr(PLAIN, "left") is early
    split.run_suffix(boundary)
    assert PLAIN.left == whole
    assert two.left == "left"
    del PLAIN.left


def test_what_forward_leaves_before_it_raises_and_takes_away_is_its_callers() -> None:
    def leave() -> float:
        if getattr(PLAIN, "raises", False):
            del PLAIN.raises
            PLAIN.left = 1
            raise ValueError("asked for")
        return 1.0

    _, split, x = _split(leave, False)
    PLAIN.raises = True
    boundary = split.run_prefix(x)
    with pytest.raises(ValueError, match="asked for"):
        split.run_suffix(boundary)
    assert vars(PLAIN) == {"left": 1}
    del PLAIN.left


def test_a_forward_that_another_thread_goes_on_with_keeps_what_it_began_with() -> None:
    def count() -> float:
        PLAIN.count = getattr(PLAIN, "count", 0) + 1
        return float(PLAIN.count)

    model, split, x = _split(count, False)
    found: list[Any] = []

    def go_on(boundary: Any) -> None:
        found.append((split.run_suffix(boundary), PLAIN.count))

    with _set(PLAIN, "count", 4):
        whole = _whole(model, x)
        PLAIN.count = 4
        thread = threading.Thread(target=go_on, args=(split.run_prefix(x),))
        PLAIN.count = 9  # for this thread's next call
        thread.start()
        thread.join()
        assert PLAIN.count == 9
    assert torch.equal(found[0][0], whole)
    assert found[0][1] == 5


@pytest.mark.parametrize("leads", [True, False])
def test_of_boundaries_in_flight_none_reads_what_another_left_in_a_thread_local(leads: bool) -> None:
    local = threading.local()
    found = (lambda: local) if leads else weakref.ref(local)  # into which nobody looks

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            found().size = float(len(x))
            return self.last(self.first(x) * random.random()) * found().size

    x = torch.randn(2, 4)
    split = prepare_split(Both().eval(), (x,), split="after:first", fallback="python")
    first, second = split.run_prefix(x), split.run_prefix(x[:1])
    with pytest.raises(BoundaryError, match="into which the prefix had put something"):
        split.run_suffix(first)
    split.run_suffix(second)
    with pytest.raises(BoundaryError, match="can't be run from what crossed alone"):  # it would not find the size
        split.run_suffix(BoundaryPayload.from_bytes(split.run_prefix(x).to_bytes()))


def test_a_forward_that_is_let_go_gives_back_what_it_ends() -> None:
    class Within(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with _set(PLAIN, "off", True):
                h = self.first(x) * random.random()
            return self.last(h)

    x = torch.randn(2, 4)
    split = prepare_split(Within().eval(), (x,), split="after:first", fallback="python")
    boundary = split.run_prefix(x)
    assert PLAIN.off
    del boundary
    assert not hasattr(PLAIN, "off")


def test_a_thread_local_to_which_nothing_leads_is_found_where_it_is_used() -> None:
    class Made(threading.local):
        def __init__(self) -> None:
            self.scale = 1.0

    hidden = {"made": Made()}
    look_for_all()

    def reads() -> Any:
        return next(iter(hidden.values())).scale

    handed, seen = Handed(), list[Any]()
    hidden["made"].scale = 2.0

    def forward() -> None:
        handed.take()
        seen.append(reads())
        handed.give()

    for _ in range(2):
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
        if len(seen) == 1:
            with pytest.raises(UnsupportedError, match="to which nothing of the model had led before"):
                handed.settle()
            handed = Handed()
    handed.settle()
    assert seen == [1.0, 2.0]


def test_a_thread_local_that_forwards_thread_can_not_make_is_refused() -> None:
    class Main(threading.local):
        def __init__(self) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("not here")

    local = Main()
    with pytest.raises(UnsupportedError, match=r"Main, a threading\.local, can't be made: RuntimeError: not here"):
        _split(lambda: 1.0 if local is None else 2.0, False)


@pytest.mark.parametrize("early", [True, False])
def test_forward_finds_the_event_loop_that_runs_in_its_caller(early: bool) -> None:
    def loops() -> float:
        try:
            return 2.0 if asyncio.get_running_loop() and asyncio.current_task() else 3.0
        except RuntimeError:
            return 1.0

    model, split, x = _split(loops, early)
    alone = _whole(model, x)
    assert torch.equal(split.run_suffix(split.run_prefix(x)), alone)

    async def serve() -> None:
        whole = _whole(model, x)
        assert not torch.equal(whole, alone)
        boundary = split.run_prefix(x)
        await asyncio.sleep(0)
        assert torch.equal(split.run_suffix(boundary), whole)

    asyncio.run(serve())


def _locked() -> float:
    if not LOCK.acquire(timeout=1):
        raise AssertionError("it waits for its caller")
    LOCK.release()
    return 1.0


@pytest.mark.parametrize("early", [True, False])
def test_a_lock_that_the_caller_holds_and_forward_takes_again_is_refused(early: bool) -> None:
    _, split, x = _split(_locked, early)
    with LOCK, pytest.raises(UnsupportedError, match="this thread holds the RLock \"the global 'LOCK'\""):
        split.run_prefix(x)
    boundary = split.run_prefix(x)
    with LOCK, pytest.raises(UnsupportedError, match="this thread holds the RLock"):
        split.run_suffix(boundary)
    split.run_suffix(boundary)


@pytest.mark.parametrize("place", ["forward", "hook"])
def test_a_lock_of_what_is_called_without_being_named_is_refused_where_it_comes_later(place: str) -> None:
    model, split, x = _split(lambda: 1.0, False)
    first, lock = next(m for m in model.modules() if isinstance(m, nn.Linear)), threading.RLock()
    run = first.forward

    def locked(*given: Any) -> Any:
        if not lock.acquire(timeout=1):
            raise AssertionError("it waits for its caller")
        lock.release()
        return run(*given) if place == "forward" else None

    if place == "forward":
        first.forward = locked  # type: ignore[method-assign]
    else:
        first.register_forward_pre_hook(locked)
    with lock, pytest.raises(UnsupportedError, match=f"this thread holds the RLock .*{place}"):
        split.run_prefix(x)
    split.run_suffix(split.run_prefix(x))


def test_a_lock_of_the_model_that_its_code_does_not_name_may_be_held() -> None:
    model, split, x = _split(lambda: 1.0, False)
    model.serving = threading.RLock()
    with model.serving:
        whole = _whole(model, x)
        assert torch.equal(split.run_suffix(split.run_prefix(x)), whole)


def test_a_cut_at_which_forward_holds_a_lock_is_refused() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with LOCK:
                h = self.first(x) * random.random()
            return self.last(h)

    with pytest.raises(FrontierError, match="forward holds the lock \"the global 'LOCK'\" at the cut"):
        prepare_split(Holds().eval(), (torch.randn(2, 4),), split="after:first", fallback="python")


@pytest.mark.parametrize("early", [True, False])
def test_what_belongs_to_the_callers_thread_is_refused_by_name(early: bool) -> None:
    base = sqlite3.connect(":memory:")
    base.execute("create table prices(v real)")
    base.execute("insert into prices values(2)")
    with pytest.raises(UnsupportedError, match="a thread of its own, and there it raises ProgrammingError") as raised:
        _split(lambda: base.execute("select v from prices").fetchone()[0], early)
    assert isinstance(raised.value.__cause__, sqlite3.ProgrammingError)
    base.close()


def test_the_smallest_numbers_are_zero_in_forward_where_they_are_in_its_caller() -> None:
    _, split, x = _split(lambda: 1e-310 / 1e-310 if registers()[0] is False else 5.0, False)
    boundary = split.run_prefix(x)
    try:
        torch.set_flush_denormal(True)
        with pytest.raises(BoundaryError, match=r"torch\.set_flush_denormal"):
            split.run_suffix(boundary)
        whole = _whole(split.model, x)
        assert torch.equal(split.run_suffix(split.run_prefix(x)), whole)
    finally:
        torch.set_flush_denormal(False)
    _, sets, x = _split(lambda: float(torch.set_flush_denormal(PLAIN.__dict__.get("flush", False))), False)
    try:
        with _set(PLAIN, "flush", True):
            sets.run_suffix(sets.run_prefix(x))
        assert registers()[0]
    finally:
        torch.set_flush_denormal(False)


class _Shuffles(nn.Module):
    """Draws from torch's generator in training mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)[torch.randperm(len(x))] if self.training else self.first(x)
        return self.last(h * random.random())


def test_a_step_is_proved_on_the_numbers_of_training_while_another_thread_lives() -> None:
    model, x, done = _Shuffles().eval(), torch.randn(6, 4), threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        spec = SplitSpec("after:first", trainable=False)
        split = prepare_split(model, (x,), split=spec, fallback="python")
        model.train()
        torch.manual_seed(0), random.seed(0)
        model(x)
        stood = torch.get_rng_state()
        torch.manual_seed(0), random.seed(0)
        boundary = split.run_training_prefix(x)
        split.train_suffix(boundary, loss_fn=lambda out, _: out.sum())
        assert torch.equal(torch.get_rng_state(), stood)
    finally:
        done.set()
        other.join()


def test_ops_of_forward_take_as_many_threads_as_those_of_its_caller() -> None:
    was, seen = torch.get_num_threads(), list[int]()

    def note() -> float:
        seen.append(torch.get_num_threads())
        return 1.0

    try:
        torch.set_num_threads(was + 1)
        _, split, x = _split(note, False)
        other = threading.Thread(target=torch.set_num_threads, args=(was,))  # as a loader does that pins memory
        other.start()
        other.join()
        seen.clear()
        split.run_suffix(split.run_prefix(x))
        assert seen == [was + 1] == [torch.get_num_threads()]
    finally:
        torch.set_num_threads(was)


def test_modes_of_torch_are_in_forward_as_in_its_caller_or_refused() -> None:
    asked: list[Callable[[], Any]] = []
    seen: list[Any] = []

    def ask() -> float:
        seen.extend([one() for one in asked])
        return 1.0

    model, split, x = _split(ask, False)
    for block, one in MODES:
        asked[:] = [one]
        with block():
            _whole(model, x)
            split.run_suffix(split.run_prefix(x))
        _whole(model, x)
        assert seen[0] == seen[1] != seen[2]
        seen.clear()
    asked.clear()
    for block, words in REFUSED:
        with block(), pytest.raises(UnsupportedError, match=words):
            split.run_prefix(x)
