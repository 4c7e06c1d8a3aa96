"""What forward asks the machine, the time or what a file holds, may be told otherwise in the next call: no plan holds it."""

from __future__ import annotations

import contextlib
import datetime
import gc
import logging
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ariadne.guards.around
from ariadne import opaque, prepare_split
from ariadne.errors import UnsupportedError

time_of_the_process = time.time
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def time_itself() -> float:
    return time.time()


class Asking(nn.Module):
    """Two layers, and between them a number that something outside gives."""

    def __init__(self, ask: Callable[[], float]) -> None:
        super().__init__()
        self.a, self.b, self.ask = nn.Linear(4, 4), nn.Linear(4, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(torch.relu(self.a(x)) * self.ask())
        return found


class Timed(Asking):
    """It tells how long it takes, by a clock that it knows under some name."""

    def forward(self, x: Tensor) -> Tensor:
        began = self.ask()
        found: Tensor = self.b(torch.relu(self.a(x)))
        print(f"{self.ask() - began:.6f} s")
        return found


def _file(folder: Path) -> Path:
    file = folder / "scale"
    file.write_text("1.0")
    return file


def _by_open(folder: Path) -> Callable[[], float]:
    file = _file(folder)

    def ask() -> float:
        with open(file) as lines:
            return float(lines.read())

    return ask


def _by_path(folder: Path) -> Callable[[], float]:
    file = _file(folder)
    return lambda: float(file.read_text())


def _whether_it_is_there(folder: Path) -> Callable[[], float]:
    return lambda: 2.0 if (folder / "other").exists() else 1.0


def _how_many(folder: Path) -> Callable[[], float]:
    return lambda: float(len(os.listdir(folder)) + 1)


def _clock(folder: Path) -> Callable[[], float]:
    since = time.monotonic() if folder.exists() else 0.0
    return lambda: 2.0 if time.monotonic() - since > 3600 else 1.0


def _date(folder: Path) -> Callable[[], float]:
    until = datetime.datetime(2100 if folder.exists() else 0, 1, 1)
    return lambda: 2.0 if datetime.datetime.now() > until else 1.0


WAYS = {
    "open": _by_open,
    "a path's own": _by_path,
    "whether it is there": _whether_it_is_there,
    "how many are there": _how_many,
    "the clock": _clock,
    "the date": _date,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_plan_is_refused_by_name(way: Callable[[Path], Callable[[], float]], tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"forward asks [\w.]+ in '(ask|<lambda>)', which may tell something else"
    ):
        prepare_split(Asking(way(tmp_path)), (X,), split="after:a", fallback="refuse")


@pytest.mark.parametrize("way", [_by_open, _whether_it_is_there, _how_many], ids=["in a file", "a file", "files"])
def test_the_models_own_python_follows_it(way: Callable[[Path], Callable[[], float]], tmp_path: Path) -> None:
    model = Asking(way(tmp_path))
    split = prepare_split(model, (X,), split="after:a", fallback="python")
    for name, text in (("other", "x"), ("scale", "3.0"), ("third", "x")):
        (tmp_path / name).write_text(text)
        assert torch.equal(split.run_suffix(split.run_prefix(X)), model(X))


def test_a_time_that_is_only_told_has_a_plan() -> None:
    model = Timed(lambda: time.perf_counter() + monotonic() + time.time_ns() / 1e9)
    split = prepare_split(model, (X,), split="after:a", fallback="refuse")
    assert torch.equal(split.run_suffix(split.run_prefix(X)), model(X))
    assert torch.equal(split.run_suffix(split.run_prefix(X[:1])), model(X[:1]))


def test_a_forward_that_draws_and_keeps_something_may_tell_the_time_too() -> None:
    class Kept(Timed):
        def __init__(self) -> None:
            super().__init__(time.perf_counter)
            self.drop = nn.Dropout()
            self.mask: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            began = time.perf_counter()
            if self.mask is None:
                self.mask = torch.ones(4)
            self.last = x.shape
            found: Tensor = self.b(self.drop(self.a(x)) * self.mask)
            minutes, seconds = divmod(time.perf_counter() - began, 60)
            print(f"{minutes:.0f}:{round(seconds, 3)}, {len(x) / (time.perf_counter() - began):.1f} per second")
            return found

    model = Kept()
    split = prepare_split(model, (X,), split="after:a", fallback="refuse")
    torch.manual_seed(0)
    found = split.run_suffix(split.run_prefix(X))
    torch.manual_seed(0)
    assert torch.equal(found, model(X))


def _slot() -> float:
    return 1.0 + int(time.time()) % 7


def _longer() -> float:
    began = time.perf_counter()
    torch.ones(8).sum()
    return 2.0 if time.perf_counter() - began > 3600 else 1.0


def _wave() -> float:
    return 1.0 + 0 * math.sin(time.monotonic())


def _times() -> Any:
    return 1.0 + 0 * (time.monotonic() * torch.ones(1))


def _into_a_buffer() -> float:
    SLOTS[time.time_ns() % 5] += 1
    return 1.0


def _known() -> float:
    return {True: 1.0}.get(time.time() == 0.0, 1.0)


SLOTS = torch.zeros(5)


@pytest.mark.parametrize("ask", [_slot, _longer, _wave, _times, _into_a_buffer, _known])
def test_a_time_of_which_anything_is_asked_counts(ask: Callable[[], float]) -> None:
    with pytest.raises(UnsupportedError, match=r"forward asks time\.\w+ in"):
        prepare_split(Asking(ask), (X,), split="after:a", fallback="refuse")


def test_a_time_that_is_kept_counts() -> None:
    class Keeping(Timed):
        def forward(self, x: Tensor) -> Tensor:
            began = self.ask()
            found: Tensor = self.b(torch.relu(self.a(x)))
            self.took = self.ask() - began
            return found

    with pytest.raises(UnsupportedError):
        prepare_split(Keeping(time.perf_counter), (X,), split="after:a", fallback="refuse")


def _rows(file: Path) -> Iterator[float]:
    for line in file.read_text().splitlines():
        yield float(line)


@pytest.mark.variants
def test_what_a_generator_asks_that_a_progress_bar_goes_through_counts(tmp_path: Path) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    file = _file(tmp_path)
    with pytest.raises(UnsupportedError, match="forward asks open in '_rows'"):
        prepare_split(Asking(lambda: sum(tqdm(_rows(file)))), (X,), split="after:a", fallback="refuse")
    model = Asking(lambda: sum(tqdm([1.0, 2.0])))
    split = prepare_split(model, (X,), split="after:a", fallback="refuse")
    assert torch.equal(split.run_suffix(split.run_prefix(X)), model(X))


def test_who_logs_meanwhile_is_told_the_time() -> None:
    told: list[float] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.created)
            record.getMessage()

    logger = logging.getLogger("ariadne.test.timed")
    logger.addHandler(handler := Handler())
    logger.propagate = False  # to handlers of pytest's, which keep the records

    def ask() -> float:
        began = time.monotonic()
        logger.error("%.3f", time.monotonic() - began)
        return 1.0

    prepare_split(Asking(ask), (X,), split="after:a", fallback="refuse")
    logger.removeHandler(handler)
    assert told
    assert all(type(one) is float and abs(one - time.time()) < 1000 for one in told)


def test_who_measures_the_collecting_of_garbage_asks_for_himself() -> None:
    def measured(phase: str, info: dict[str, int]) -> None:
        asked.append(time.perf_counter())

    def ask() -> float:
        gc.collect()
        return 1.0

    asked: list[float] = []
    gc.callbacks.append(measured)
    try:
        prepare_split(Asking(ask), (X,), split="after:a", fallback="refuse")
    finally:
        gc.callbacks.remove(measured)
    assert asked


def test_a_profiler_of_forwards_own_is_told_of() -> None:
    def ask() -> float:
        sys.setprofile(lambda *_: None)  # as cProfile does, before Python 3.12
        sys.setprofile(None)
        return 1.0

    with pytest.raises(UnsupportedError, match="forward starts a profiler of its own"):
        prepare_split(Asking(ask), (X,), split="after:a", fallback="refuse")


def test_a_clock_that_no_run_can_set_is_refused() -> None:
    def ask(clock: Callable[[], float] = time.monotonic) -> float:
        return clock()

    with pytest.raises(UnsupportedError, match=r"forward asks time\.monotonic"):
        prepare_split(Timed(ask), (X,), split="after:a", fallback="refuse")


def test_clocks_are_told_as_they_are_meanwhile_to_others_and_after() -> None:
    told: list[float] = []
    over = threading.Event()

    def other() -> None:
        while not over.is_set():
            told.append(time.time())

    thread = threading.Thread(target=other)
    thread.start()
    prepare_split(Timed(time_itself), (X,), split="after:a", fallback="refuse")
    over.set()
    thread.join()
    assert max(told) - min(told) < 1000
    assert time.time is time_of_the_process
    assert monotonic is time.monotonic


def test_without_that_question_the_split_goes_on_with_what_it_was_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ariadne.guards.around, "ASKED", {})
    model = Asking(_by_path(tmp_path))
    split = prepare_split(model, (X,), split="after:a")
    (tmp_path / "scale").write_text("3.0")
    assert not torch.equal(split.run_suffix(split.run_prefix(X)), model(X))


class Once(nn.Module):
    """What a file holds goes into a buffer at the first call."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.a, self.b, self.file = nn.Linear(4, 4), nn.Linear(4, 4), file
        self.scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = float(self.file.read_text())
        found: Tensor = self.b(torch.relu(self.a(x)) * self.scale)
        return found


@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran"])
def test_what_the_first_call_alone_asks_is_kept_as_the_model_keeps_it(ran: bool, tmp_path: Path) -> None:
    model = Once(_file(tmp_path))
    if ran:
        model(X)
    split = prepare_split(model, (X,), split="after:a", fallback="refuse")
    expected = model(X)
    (tmp_path / "scale").write_text("3.0")
    assert torch.equal(split.run_suffix(split.run_prefix(X)), expected)
    assert torch.equal(model(X), expected)


def test_another_batch_that_asks_is_refused_in_its_own_call(tmp_path: Path) -> None:
    class Larger(Asking):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.b(torch.relu(self.a(x)) * (self.ask() if x.shape[0] > 5 else 1.0))
            return found

    split = prepare_split(Larger(_by_path(tmp_path)), (X,), split="after:a", fallback="refuse")
    split.run_suffix(split.run_prefix(X))
    with pytest.raises(UnsupportedError, match=r"forward asks open in '<lambda>'"):
        split.run_prefix(torch.randn(6, 4))


def test_messages_imports_and_parts_taken_as_they_are_ask_for_no_results_sake() -> None:
    class Telling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            import this_is_nowhere  # type: ignore[import-not-found] # noqa: F401, PLC0415

            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            logging.getLogger("ariadne.test").error("one")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.warn("two", stacklevel=1)
            with contextlib.suppress(ImportError):
                Telling()(x)
            found: Tensor = self.b(timed(self.a(x)))
            return found

    def by_the_clock(h: Tensor) -> Tensor:
        time.monotonic()
        return torch.relu(h)

    timed = opaque(by_the_clock)
    model = Model()
    split = prepare_split(model, (X,), split="after:a", fallback="refuse")
    assert torch.equal(split.run_suffix(split.run_prefix(X)), model(X))
