"""What containers, bound methods and Python's own objects hold is told again, put back after preparing, or refused by name."""

from __future__ import annotations

import collections
import contextvars
import decimal
import functools
import hashlib
import io
import itertools
import os
import queue
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ariadne import BoundaryPayload, PythonSplit, prepare_split
from ariadne.errors import BoundaryError, UnsupportedError
from ariadne.stopped.held import Held

X = torch.linspace(-1, 1, 8).view(2, 4)


class _Slotted:
    __slots__ = ("inside",)

    def __init__(self) -> None:
        self.inside = [0]


class _Counts:
    n = 0

    def step(self) -> int:
        self.n += 1
        return self.n


DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)
_KEPT = _Counts()
_Pair = collections.namedtuple("_Pair", "first second")


def _event() -> tuple[Any, Callable[[], object]]:
    event = threading.Event()
    return event, lambda: (event.is_set(), event.set())[0]


def _semaphore() -> tuple[Any, Callable[[], object]]:
    semaphore = threading.Semaphore(1)
    return semaphore, lambda: semaphore.acquire(blocking=False)


def _by_key() -> tuple[Any, Callable[[], object]]:
    counts = weakref.WeakKeyDictionary({_KEPT: 0})
    return counts, lambda: (counts[_KEPT], counts.update({_KEPT: counts[_KEPT] + 1}))[0]


def _set() -> tuple[Any, Callable[[], object]]:
    seen = weakref.WeakSet[_Counts]()
    return seen, lambda: (_KEPT in seen, seen.add(_KEPT))[0]


def _called(made: Any) -> tuple[Any, Callable[[], object]]:
    return made, made


def _text() -> tuple[Any, Callable[[], object]]:
    text = io.StringIO("a\nb", newline="\r\n")
    return text, lambda: (text.getvalue(), text.write("c\n"))[0]


def _bytes() -> tuple[Any, Callable[[], object]]:
    held = io.BytesIO(b"abc")
    return held, lambda: (held.read(1), held.getvalue())


def _file() -> tuple[Any, Callable[[], object]]:
    file = Path(__file__).open("rb")  # noqa: SIM115 - it stays open, as that of a model
    return file, lambda: file.read(5)


def _queue(made: Any) -> tuple[Any, Callable[[], object]]:
    for number in range(3):
        made.put(number)
    return made, lambda: (first := made.get(), made.put(first + 5))[0]


def _ordered() -> tuple[Any, Callable[[], object]]:
    order = collections.OrderedDict(a=1, b=2)
    return order, lambda: (next(iter(order)), order.move_to_end(next(iter(order))))[0]


def _plain_order() -> tuple[Any, Callable[[], object]]:
    order = {"a": 1, "b": 1}
    return order, lambda: (name := next(iter(order)), order.update({name: order.pop(name)}))[0]


def _marked() -> tuple[Any, Callable[[], object]]:
    t = torch.zeros(1)
    return [t], lambda: (vars(t).get("n", 0), setattr(t, "n", vars(t).get("n", 0) + 1))[0]


def _list_of_own() -> tuple[Any, Callable[[], object]]:
    made = type("Own", (list,), {"n": 0})()
    return made, lambda: (made.n, setattr(made, "n", made.n + 1))[0]


def _inside(made: Any, counts: list[int]) -> tuple[Any, Callable[[], object]]:
    return made, lambda: (counts[0], counts.append(counts.pop() + 1))[0]


def _slotted() -> tuple[Any, Callable[[], object]]:
    return _inside(made := _Slotted(), made.inside)


def _pair() -> tuple[Any, Callable[[], object]]:
    return _inside(made := _Pair([0], 1), made.first)


def _on_function() -> tuple[Any, Callable[[], object]]:
    @functools.singledispatch
    def counted(x: object) -> int:
        counted.n += 1  # type: ignore[attr-defined]
        return int(counted.n)  # type: ignore[attr-defined]

    counted.n = 0  # type: ignore[attr-defined]
    return counted, lambda: counted(1)


def _environment() -> tuple[Any, Callable[[], object]]:
    return os.environ, lambda: (os.getenv("ARIADNE_TRIED"), os.environ.update(ARIADNE_TRIED="yes"))[0]


def _seen(wrap: Callable[[_Counts], Any]) -> tuple[Any, Callable[[], object]]:
    counts = _Counts()
    return (wrap(counts), counts) if wrap is weakref.ref else wrap(counts), counts.step


MOVING: dict[str, Callable[[], tuple[Any, Callable[[], object]]]] = {
    "Event": _event,
    "Semaphore": _semaphore,
    "WeakKeyDictionary": _by_key,
    "WeakSet": _set,
    "a bound method of random.Random": lambda: _called(random.Random(0).random),
    "a partial of such": lambda: _called(functools.partial(random.Random(0).choice, range(99))),
    "a bound method of numpy's": lambda: _called(np.random.default_rng(0).random),
    "a bound method of numpy's older": lambda: _called(np.random.RandomState(0).random_sample),
    "a torch.Generator in a partial": lambda: _called(
        functools.partial(lambda g: float(torch.rand((), generator=g)), g=torch.Generator().manual_seed(0))
    ),
    "StringIO": _text,
    "BytesIO": _bytes,
    "a file": _file,
    "Queue": lambda: _queue(queue.Queue()),
    "PriorityQueue": lambda: _queue(queue.PriorityQueue()),
    "SimpleQueue": lambda: _queue(queue.SimpleQueue()),
    "the order of an OrderedDict": _ordered,
    "the order of a dict": _plain_order,
    "an attribute of a tensor": _marked,
    "an attribute of a list": _list_of_own,
    "a list in a slot": _slotted,
    "a list in a named tuple": _pair,
    "an object by its method": lambda: _seen(lambda counts: counts.step),
    "an object by a partial": lambda: _seen(lambda counts: functools.partial(_Counts.step, counts)),
    "an object by a proxy": lambda: _seen(weakref.proxy),
    "an object as a key": lambda: _seen(lambda counts: {counts: 1}),
    "an object in a frozenset": lambda: _seen(lambda counts: frozenset({counts})),
    "an attribute of a function": _on_function,
    "the environment": _environment,
    "a dict by its view": lambda: (d := {"n": 0}, (d.items(), lambda: d.update(n=d["n"] + 1) or d["n"]))[1],
}


@pytest.mark.parametrize("what", MOVING)
def test_what_a_thing_holds_is_told_again_and_put_back(what: str) -> None:
    thing, move = MOVING[what]()
    held = Held()
    held.note("thing", thing)
    assert held.changed() is None
    first = move()
    assert held.changed() == "thing"
    assert held.put_back(alone=True) is None
    assert held.changed() is None
    assert move() == first
    held.put_back(alone=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: (h := hashlib.sha256(), lambda: h.update(b"x")), "the HASH in 'thing'"),
        (lambda: _called(itertools.cycle([1, 2]).__next__), "the cycle in 'thing'"),
        (lambda: _called((i for i in range(9)).__next__), "the generator in 'thing'"),
    ],
)
def test_what_cannot_be_put_back_is_named(make: Callable[[], Any], words: str) -> None:
    thing, move = make()
    held = Held()
    held.note("thing", thing)
    assert held.put_back(alone=True) is None
    move()
    assert held.put_back(alone=True) == words


@pytest.mark.parametrize("what", ["Event", "Semaphore", "Queue", "SimpleQueue"])
def test_where_other_threads_are_what_they_wait_at_is_left_as_it_is_and_named(what: str) -> None:
    thing, move = MOVING[what]()
    held = Held()
    held.note("thing", thing)
    assert held.put_back(alone=False) is None
    move()
    assert "'thing'" in str(held.put_back(alone=False))
    assert held.changed() == "thing"


def test_what_is_put_into_a_queue_for_another_thread_is_taken_out_again_where_there_is_none() -> None:
    line = queue.SimpleQueue[int]()
    held = Held()
    held.note("line", line)
    line.put(1)
    assert held.changed() is None
    assert held.put_back(alone=False) is None
    assert line.qsize() == 1
    assert held.put_back(alone=True) is None
    assert line.qsize() == 0


def test_the_generators_of_the_process_are_no_things_of_a_models() -> None:
    held = Held()
    held.note("draws", [random.random, random.choice, np.random.rand, random.getstate])
    random.random()
    np.random.rand()
    assert held.changed() is None


def test_a_variable_of_the_context_is_told_again() -> None:
    held = Held()
    held.note("depth", [DEPTH])
    assert held.changed() is None
    token = DEPTH.set(1)
    assert held.changed() == "depth"
    DEPTH.reset(token)
    assert held.changed() is None


class Asks(nn.Module):
    """Three layers; the output of the second is scaled by what `ask` says, given the model."""

    def __init__(self, made: Callable[[], Any], ask: Callable[[Any], float]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.held, self.ask = made(), ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.ask(self)
        y: torch.Tensor = self.c(self.b(self.a(x)) * scale)
        return y


EVENT = threading.Event()


def once(event: threading.Event) -> float:
    found = 2.0 if event.is_set() else 1.0
    event.set()
    return found


def set_on(thing: Any) -> float:
    thing.n = vars(thing).get("n", 0) + 1
    return 2.0 if thing.n > 6 else 1.0


def turned(order: Any) -> float:
    first = next(iter(order))
    order.move_to_end(first)
    return float(order[first])


def wrapped() -> Any:
    @functools.singledispatch
    def asked(x: object) -> float:
        asked.n += 1  # type: ignore[attr-defined]
        return 2.0 if asked.n > 2 else 1.0  # type: ignore[attr-defined]

    asked.n = 0  # type: ignore[attr-defined]
    return asked


def told_again() -> float:
    found = os.environ.get("ARIADNE_TOLD", "")
    os.environ["ARIADNE_TOLD"] = found + "x"
    return drawn(2.0 if found else 1.0)


def drawn(scale: float) -> float:
    """The same, of which no graph holds."""
    return scale if random.random() < 2 else 0.0


def drawing() -> Callable[[], float]:
    numbers = random.Random(0)
    return lambda: numbers.random()


WAYS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "an event": (threading.Event, lambda model: once(model.held)),
    "an event outside": (EVENT.clear, lambda model: once(EVENT)),
    "the environment": (str, lambda model: told_again()),
    "a generator by its method": (lambda: random.Random(0).random, lambda model: model.held()),
    "a generator in a closure": (drawing, lambda model: model.held()),
    "an attribute of a parameter": (int, lambda model: set_on(model.b.weight)),
    "the order of a dict": (
        lambda: collections.OrderedDict(a=1.0, b=2.0, c=3.0),
        lambda model: turned(model.held),
    ),
    "an attribute of a module in a list": (lambda: [nn.Identity()], lambda model: drawn(set_on(model.held[0]))),
    "an attribute of a function that another one wraps": (wrapped, lambda model: drawn(model.held(1))),
    "a lock as a flag": (threading.Lock, lambda model: 1.0 if model.held.acquire(blocking=False) else 2.0),
    "an attribute": (int, lambda model: drawn(set_on(model))),
}


SENT = {
    "an attribute",
    "a lock as a flag",
}  # of the second, what another run of the part before the cut finds is not used


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no other thread runs; there are some where tests are shared out to workers."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("way", WAYS)
def test_preparing_leaves_it_as_found_and_a_suffix_from_bytes_changes_it_once_or_is_refused(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh() -> Asks:
        torch.manual_seed(0)
        monkeypatch.setenv("ARIADNE_TOLD", "")
        return Asks(*WAYS[way]).eval()

    with torch.no_grad():
        whole = fresh()
        wanted = [whole(X) for _ in range(4)]
    runtime = prepare_split(fresh(), (X,), split="after:b", fallback="python")
    assert isinstance(runtime, PythonSplit)
    runtime.warmup(X)
    for one in wanted[:2]:
        boundary = runtime.run_prefix(X)
        assert torch.equal(runtime.run_suffix(boundary), one)
    assert bool(runtime.stays) == (way != "an attribute")
    boundary = runtime.run_prefix(X)
    if runtime.stays:
        with pytest.raises(BoundaryError, match="no bytes can be made of it"):
            boundary.to_bytes()
        return
    for one in wanted[2:]:
        assert torch.equal(runtime.run_suffix(BoundaryPayload.from_bytes(boundary.to_bytes())), one)
        boundary = runtime.run_prefix(X)


@pytest.mark.parametrize("way", ["an event", "an event outside", "a lock as a flag"])
def test_what_threads_meet_at_is_refused_by_name_while_others_run(way: str) -> None:
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        with pytest.raises(UnsupportedError, match="which nothing can put back"):
            prepare_split(Asks(*WAYS[way]).eval(), (X,), split="after:b", fallback="python")
    finally:
        ended.set()
        other.join()


def hashed(model: Any) -> float:
    model.held.update(b"x")
    return float(model.held.digest()[0])


def flagged(model: Any) -> float:  # which sets it once, and the first run of all is that of the capture
    found = 2.0 if model.held[0].flags[decimal.Inexact] else 1.0
    model.held[0].divide(decimal.Decimal(1), decimal.Decimal(3))
    return drawn(found)


@pytest.mark.parametrize(
    ("make", "ask", "words"),
    [(hashlib.sha256, hashed, "the HASH in"), (lambda: [decimal.Context()], flagged, "the Context in")],
)
def test_a_model_that_preparing_would_move_on_for_good_is_refused_by_name(
    make: Callable[[], Any], ask: Callable[[Any], float], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=rf"forward moves on {words} 'held'.*made anew"):
        prepare_split(Asks(make, ask).eval(), (X,), split="after:b", fallback="python")


class Told(io.StringIO):
    """Text in memory whose class tells of itself in another way."""

    def __getstate__(self) -> Any:
        return {"text": self.getvalue()}


class Stream(io.RawIOBase):
    """A stream of a library, which does not tell where it is."""

    def seekable(self) -> bool:
        raise NotImplementedError


class Lazy:
    """It answers nothing before it is set up."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("kind", [Told, Stream, Lazy])
def test_what_tells_nothing_is_let_be(kind: type) -> None:
    one = kind()
    held = Held()
    held.note("one", [one])
    assert held.put_back(alone=True) is None
