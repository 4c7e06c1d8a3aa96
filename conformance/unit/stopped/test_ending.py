"""A forward that is let go at the cut ends then and there, and one whose end would change the model is refused by name."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ariadne import PythonSplit, SplitSpec
from ariadne.compare import difference
from ariadne.errors import AriadneError, FrontierError
from ariadne.prepare import _settings, example_of
from ariadne.stopped import ending, prepared

X = torch.ones(3, 4)
ENDED: SimpleQueue[str] = SimpleQueue()  # no state that a split looks at


class _Open(nn.Module):
    """Three layers, of which the first two run in a block that `opened` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.n, self.here, self.log = 0, False, list[int]()
        self.register_buffer("count", torch.zeros(1))

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        yield

    def forward(self, x: Tensor) -> Any:
        with self.opened():
            h = self.b(self.a(x)) * random.random()
        return self.c(h.float())


class _Counts(_Open):
    """What counts at the end of a block: an attribute, a list, a buffer, a buffer's data, a random number."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self.what == "n":
                self.n += 1
            elif self.what == "log":
                self.log.append(1)
            elif self.what == "count":
                self.count.add_(1)
            elif self.what == "data":
                self.count.data.add_(1)
            elif self.what == "random":
                random.random()


class _Stack(_Open):
    def forward(self, x: Tensor) -> Any:
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: setattr(self, "n", self.n + 1))
            h = self.b(self.a(x)) * random.random()
        return self.c(h)


class _Bare(_Open):
    def forward(self, x: Tensor) -> Any:
        try:
            h = self.b(self.a(x)) * random.random()
        except:
            self.n += 1
            raise
        return self.c(h)


class _PutsBack(_Open):
    """What a block has changed before the cut it puts back at its end."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        self.here = True
        self.log.append(1)
        self.count.add_(1)
        try:
            yield
        finally:
            self.here = False
            self.log.pop()
            self.count.sub_(1)
            ENDED.put(threading.current_thread().name)


class _Modes(_Open):
    """Blocks of torch's own."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            yield


class _Forks(_Open):
    """Blocks that put a random generator back, in which nothing is drawn before the cut."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        if self.which == "torch":
            with torch.random.fork_rng(devices=[]):
                yield
        elif self.which == "random":
            state = random.getstate()
            try:
                yield
            finally:
                random.setstate(state)
        else:
            numbers: Any = np.random.get_state()
            try:
                yield
            finally:
                np.random.set_state(numbers)


def split(model: nn.Module, **options: Any) -> PythonSplit:
    settings = _settings(SplitSpec("after:b", **options), "generated_eager", None, None)
    return prepared(model, settings, example_of(model, (X,), None, settings.spec), "asked for", training=True)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("n", "changes 'n' as it ends"),
        ("log", "changes log as it ends"),
        ("count", "changes the buffer 'count' as it ends"),
        ("data", "changes the buffer 'count' as it ends"),
        ("random", "changes random as it ends"),
    ],
)
def test_a_block_around_the_cut_that_changes_the_model_as_it_ends_is_refused_by_name(what: str, told: str) -> None:
    model = _Counts(what).eval()
    with pytest.raises(FrontierError, match=told):
        split(model)
    assert (model.n, model.log, float(model.count)) == (0, [], 0.0)


@pytest.mark.parametrize("kind", [_Stack, _Bare])
def test_the_refusal_is_the_same_each_time(kind: type[_Open]) -> None:
    """A callback, or an `except` that catches all; in training, and without."""
    told = Counter[tuple[str, bool]]()
    for turn in range(8):
        model = kind().train(turn % 2 == 0)
        with pytest.raises(AriadneError) as error:
            split(model)
        told[type(error.value).__name__, "changes 'n' as it ends" in str(error.value)] += 1
        assert model.n == 0
    assert told == {("FrontierError", True): 8}


def test_a_block_that_puts_back_what_it_changed_is_taken_and_ends_where_it_is_let_go() -> None:
    model = _PutsBack().eval()
    runtime = split(model)
    for _ in range(25):
        ended = ENDED.qsize()
        boundary = runtime.run_prefix(X)
        assert (model.here, model.log, ENDED.qsize()) == (True, [1], ended)
        del boundary
        assert (model.here, model.log, float(model.count), ENDED.qsize()) == (False, [], 0.0, ended + 1)
    random.seed(1)
    with torch.no_grad():
        whole = model(X)
    random.seed(1)
    assert difference(whole, runtime.run_suffix(runtime.run_prefix(X))) is None


def test_a_change_that_training_alone_makes_is_refused_at_the_first_training_call() -> None:
    class Trains(_Open):
        @contextlib.contextmanager
        def opened(self) -> Iterator[None]:
            try:
                yield
            finally:
                self.n += torch.is_grad_enabled()

    model = Trains()
    runtime = split(model, trainable=False)
    with torch.no_grad():
        runtime.run_suffix(runtime.run_prefix(X))
    with pytest.raises(FrontierError, match="changes 'n' as it ends"):
        runtime.run_training_prefix(X)
    assert model.n == 0


def test_a_cut_within_modes_of_torch_is_taken() -> None:
    model = _Modes().eval()
    runtime = split(model)
    random.seed(1)
    with torch.no_grad():
        whole = model(X)
    random.seed(1)
    assert difference(whole, runtime.run_suffix(runtime.run_prefix(X))) is None


class _Timer:
    """Counts how often it ended."""

    def __init__(self) -> None:
        self.ended = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *raised: object) -> None:
        self.ended += 1


GIVEN: Any = contextlib.nullcontext()


class _Counted:
    """Counts how often one of them ended."""

    ended = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *raised: object) -> None:
        _Counted.ended += 1


class _Given(_Open):
    """The block is given by an attribute, an object in a list, a variable, a method, and a class of it by these two."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.timer, self.timers = where, contextlib.nullcontext(), [contextlib.nullcontext()]
        self.make: Any = contextlib.nullcontext
        self.makes: list[Any] = [contextlib.nullcontext]

    def another(self) -> Any:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        given = {
            "attribute": self.timer, "list": self.timers[0], "variable": GIVEN, "method": None,
            "class": self.make(), "class in a list": self.makes[0](),
        }[self.where]  # fmt: skip
        with self.another() if given is None else given:
            yield


@pytest.mark.parametrize("where", ["attribute", "list", "variable", "method", "class", "class in a list"])
def test_a_block_that_changes_the_model_as_it_ends_is_refused_where_it_comes_later(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, timer = _Given(where).eval(), _Timer()
    runtime = split(model)
    boundary, looked = runtime.run_prefix(X), []
    monkeypatch.setattr(runtime, "_refuse_changing_end", lambda *given: looked.append(given))
    del boundary
    runtime.run_suffix(runtime.run_prefix(X))
    assert not looked  # nothing new is there to look at
    monkeypatch.undo()
    if where == "attribute":
        model.timer = timer  # type: ignore[assignment]
    elif where == "list":
        model.timers[0] = timer  # type: ignore[call-overload]
    elif where == "variable":
        monkeypatch.setitem(globals(), "GIVEN", timer)
    elif where == "class":
        model.make = _Counted
    elif where == "class in a list":
        model.makes[0] = _Counted
    else:
        model.log = timer  # type: ignore[assignment]
        monkeypatch.setattr(_Given, "another", lambda self: self.log)
    for _ in range(2):
        with pytest.raises(FrontierError, match=r"changes .* as it ends"):
            runtime.run_prefix(X)
    assert timer.ended == _Counted.ended == 0


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-a-thread"])
@pytest.mark.parametrize(
    ("which", "told"), [("torch", "torch's random generator"), ("random", "random"), ("numpy", "numpy.random")]
)
def test_a_cut_in_a_block_that_puts_a_generator_back_is_refused_though_nothing_is_drawn_there(
    which: str, told: str, beside: bool
) -> None:
    model, over = _Forks(which).eval(), threading.Event()
    other = threading.Thread(target=over.wait)
    if beside:
        other.start()
    stood = torch.get_rng_state()
    try:
        with pytest.raises(FrontierError, match=f"changes {told} as it ends"):
            split(model)
    finally:
        over.set()
        if beside:
            other.join()
    assert torch.equal(torch.get_rng_state(), stood)


def test_what_another_thread_draws_while_forward_ends_is_not_taken_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    over, values = threading.Event(), ending._values
    other = threading.Thread(target=over.wait)

    def drawn(*given: Any) -> Any:
        found = values(*given)
        random.random()
        return found

    monkeypatch.setattr(ending, "_values", drawn)
    other.start()
    try:
        split(_Modes().eval())
        with pytest.raises(FrontierError, match="changes random as it ends"):
            split(_Counts("random").eval())
    finally:
        over.set()
        other.join()


def test_a_forward_that_was_let_go_is_told_once_and_goes_on_no_more() -> None:
    runtime = split(_PutsBack().eval())
    boundary = runtime.run_prefix(X)
    ended = ENDED.qsize()
    boundary.forward.end()
    boundary.forward.end()
    assert boundary.forward.taken
    assert ENDED.qsize() == ended + 1
    del boundary
    assert ENDED.qsize() == ended + 1


def test_what_ends_a_forward_waits_no_longer_than_told_for_a_lock_that_its_caller_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ariadne.stopped.forward._PATIENCE", 0.05)
    runtime = split(_Locks().eval())
    boundary = runtime.run_prefix(X)
    while not ENDED.empty():
        ENDED.get()
    with LOCK:
        del boundary
        assert ENDED.empty()
    assert ENDED.get(timeout=10) == "ariadne forward"


LOCK = threading.Lock()


class _Locks(_Open):
    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        try:
            yield
        finally:
            with LOCK:
                ENDED.put(threading.current_thread().name)


AT_EXIT = """
    import random, time
    import torch
    from torch import nn
    from ariadne import SplitSpec, prepare_split

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x):
            try:
                h = self.a(x) * random.random()
            finally:
                for _ in range(20 if ending else 0):
                    torch.ones(9).sum()
                    time.sleep(0.005)
                if ending:
                    print("ended", flush=True)
            return self.b(h)

    ending = False
    runtime = prepare_split(Slow().eval(), (torch.ones(2, 4),), split=SplitSpec("after:a", max_paths=1), fallback="python")
    waits, ends = runtime.run_prefix(torch.ones(2, 4)), runtime.run_prefix(torch.ones(2, 4))
    ending = True
    ends.forward._worker.order(None)
"""


@pytest.mark.variants
def test_a_process_ends_well_while_one_forward_waits_and_another_one_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(AT_EXIT)],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ),
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
