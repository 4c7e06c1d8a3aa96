"""One model twice: a system captures one of them, the other stays whole, and every step holds the two against each other."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import re
import statistics
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from conformance.scoreboard.programs import program
from conformance.scoreboard.questions import EXAMPLE, Question
from conformance.suite.compare import difference_at, largest_gap, opened, tensors, values_differ
from conformance.targets import target
from conformance.targets.base import Captured, Target

RIGHT, ROUNDED, REFUSED, WRONG, NOT_ASKED, TIMEOUT = "right", "rounded", "refused", "wrong", "not_asked", "timeout"
WARNED = "warned"  # wrong, but a warning had been given
OUTCOMES = (RIGHT, ROUNDED, REFUSED, WRONG, WARNED, TIMEOUT, NOT_ASKED)
_FOLDERS = re.compile(r"(?<![\w.:~/])(?:/[\w.+-]+)+/")
_OF_AGE = (
    DeprecationWarning,
    PendingDeprecationWarning,
    FutureWarning,
    ResourceWarning,
)  # they say nothing of the result


@dataclass(frozen=True)
class Answer:
    """What a step or a question came to, in one of `OUTCOMES`, and in words."""

    outcome: str
    words: str = ""

    def __str__(self) -> str:
        return f"{self.outcome}: {self.words}" if self.words else self.outcome


class Pair:
    """A program's model and its twin, and what a target captured of the former.

    >>> pair = Pair("jit_trace", "one/branch_on_data", training=False)
    >>> pair.capture()
    >>> print(pair.outputs(4, 1))
    wrong: the result: values differ in 16 of 16 elements, by at most …
    """

    def __init__(self, target_: str | Target, name: str, training: bool = False) -> None:
        self.target = target(target_) if isinstance(target_, str) else target_
        self.program = program(name)
        self.training = training
        # Built twice: a copy would lose what Python set on a parameter, and share what closures hold.
        self.model, self.twin = (self.program.build().train(training) for _ in range(2))
        self.captured: Captured | None = None
        self.warnings: list[str] = []
        self.seconds, self.has_called = 0.0, False  # of the capture and the first call
        self.found_after: Answer | None = None
        self.buffers: dict[str, torch.Tensor] = {}

    def capture(self) -> Answer:
        """The target captures the model, on an example of batch 4."""
        args, kwargs = self.program.inputs(EXAMPLE, 0)
        seed(0)
        generator = torch.get_rng_state()
        begin = time.perf_counter()
        with self._listening():
            made = attempt(lambda: self.target.capture(self.model, args, kwargs))
        self.seconds = time.perf_counter() - begin
        if isinstance(made, Answer):
            return Answer(REFUSED, f"at capture: {made.words}")
        self.captured = made
        self.found_after = self._found_after(generator)
        # What capturing moved is asked about by `left`, and nowhere else.
        held_by = dict((made.owner or self.model).named_buffers())
        with torch.no_grad():
            for name, buffer in self.twin.named_buffers():
                if name in held_by and held_by[name].shape == buffer.shape:
                    buffer.copy_(held_by[name].to(buffer.device))
        self.buffers = copy.deepcopy(dict(self.twin.named_buffers()))
        return Answer(RIGHT)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Keep what the system warns of."""
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            yield
        found = [
            said(w.message) for w in heard if isinstance(w.message, Warning) and not isinstance(w.message, _OF_AGE)
        ]
        self.warnings += [words for words in found if words not in self.warnings]

    def _found_after(self, generator: torch.Tensor) -> Answer:
        found = moved(self.twin, self.model)
        if found:
            return Answer(WRONG, f"capturing left {found}"[:300])
        if not torch.equal(generator, torch.get_rng_state()):
            return Answer(WRONG, "capturing moved torch's random generator")
        return Answer(RIGHT)

    def change(self, name: str) -> Answer:
        """Both models are changed in the same way, after the capture."""
        for model in (self.model, self.twin):
            CHANGES[name](model)
        return Answer(RIGHT)

    def outputs(self, batch: int, number: int) -> Answer:
        """One call of each, without gradients, from the same seed."""
        assert self.captured is not None
        call = self.captured.call
        whole = attempt(lambda: called(self.twin, self.program.inputs(batch, number), number))
        if isinstance(whole, Answer):
            return Answer(NOT_ASKED, f"the model itself raises {whole.words}")
        begin = time.perf_counter()
        with self._listening():
            found = attempt(lambda: called(call, self.program.inputs(batch, number), number))
        if not self.has_called:  # who captures lazily does it in the first call
            self.has_called, self.seconds = True, self.seconds + time.perf_counter() - begin
        if isinstance(found, Answer):
            return found
        same = attempt(lambda: held(whole[0], found[0], self.target.tolerance, self.captured.flat))
        unread = same.outcome == REFUSED  # such as a tensor without data
        return Answer(WRONG, f"the result can't be read: {same.words}") if unread else same

    def gradients(self, batch: int, number: int) -> Answer:
        """A training step of each, up to the gradients of all parameters."""
        captured = self.captured
        assert captured is not None

        def whole() -> None:
            args, kwargs = self.program.inputs(batch, number)
            seed(number)
            self.program.loss(self.twin(*args, **kwargs)).backward()

        def split() -> None:
            args, kwargs = self.program.inputs(batch, number)
            seed(number)
            captured.train(self.program.loss, args, kwargs)

        owner = captured.owner or self.model
        for model in (self.twin, self.model, owner):
            model.zero_grad(set_to_none=True)
        error = attempt(whole)
        if error is not None:
            return Answer(NOT_ASKED, f"the model itself raises {error.words}")
        with self._listening():
            refused = attempt(split)
        if refused is not None:
            return refused
        expected = {n: p.grad for n, p in self.twin.named_parameters() if p.grad is not None}
        given = {n: p.grad for n, p in owner.named_parameters() if p.grad is not None}
        without = [n for n in expected if n not in given]
        if without:
            return Answer(WRONG, f"no gradient for {', '.join(without)}"[:300])
        return held(expected, {n: given[n] for n in expected}, self.target.tolerance)

    def state(self) -> Answer:
        """What the calls left: in the buffers, and where the system uses the model itself, in all that it holds."""
        assert self.captured is not None
        owner = self.captured.owner
        if owner is None:
            found = moved(self.twin, self.model, buffers=False)
            if found:
                return Answer(WRONG, f"afterwards {found}"[:300])
            owner = self.model
        given = dict(owner.named_buffers())
        # A graph need not keep what no call writes or reads.
        expected = {
            n: b
            for n, b in self.twin.named_buffers()
            if n in given or n not in self.buffers or values_differ(b, self.buffers[n])
        }
        given = {n: b for n, b in given.items() if n in expected}
        return held(expected, given, self.target.tolerance)

    def left(self) -> Answer:
        """Capturing alone: the model holds what its twin does, and the generator stands where it stood."""
        assert self.found_after is not None
        return self.found_after

    def answer(self, question: Question) -> Answer:
        """The question's steps in turn, up to the first that is not right; a capture that is there is not made again."""
        result = Answer(RIGHT)
        for name, *given in question.steps:
            if name == "capture" and self.captured is not None:
                continue
            found: Answer = getattr(self, name)(*given)
            if found.outcome == ROUNDED:
                result = found
            elif found.outcome == WRONG and self.warnings and name != "left":
                return Answer(WARNED, f"{found.words}; it had warned: {self.warnings[0]}")
            elif found.outcome != RIGHT:
                return found
        return result

    def timed(self) -> dict[str, float]:
        """What captured models cost: seconds of the capture with its first call, time and memory of a call beside the model's own.

        Times are medians over rounds in which the two take turns. `peak_over_eager`: the most bytes that torch's allocator lent
        at a time, over the model's own; what a system allocates by itself is not in it.
        """
        captured = self.captured
        assert captured is not None
        args, kwargs = self.program.inputs(EXAMPLE, 0)
        spent: dict[str, list[float]] = {"eager": [], "replay": []}
        calls = {"eager": partial(self.twin, *args, **kwargs), "replay": partial(captured.call, *args, **kwargs)}
        with torch.no_grad():
            slower = max(elapsed(call) for call in calls.values())
            repeat = max(1, min(50, int(0.01 / max(slower, 1e-5))))
            rounds = 9 if slower < 0.1 else 3
            for turn in range(rounds + 1):
                for name, call in calls.items():
                    seconds = elapsed(call, repeat)
                    if turn:  # the first is to warm up
                        spent[name].append(seconds)
            peaks = {name: peak(call) for name, call in calls.items()}
        ratio = statistics.median(r / e for r, e in zip(spent["replay"], spent["eager"], strict=True))
        eager = statistics.median(spent["eager"])
        found = {"capture_s": self.seconds, "eager_s": eager, "replay_over_eager": ratio, "graphs": captured.graphs()}
        return found | ({"peak_over_eager": peaks["replay"] / peaks["eager"]} if all(peaks.values()) else {})


def elapsed(call: Callable[[], Any], repeat: int = 1) -> float:
    begin = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - begin) / repeat


def peak(call: Callable[[], Any]) -> int:
    """The most bytes that torch's CPU allocator had lent at a time during a call, beyond what it had lent before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        call()
    events = watched.profiler.kineto_results.events()
    lent = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((size for _, size in lent), initial=0))


def attempt(run: Callable[[], Any]) -> Any:
    """The result, or an Answer that says what was raised."""
    try:
        return run()
    except OutOfTimeError:
        raise
    except Exception as error:
        return Answer(REFUSED, said(error))


class OutOfTimeError(BaseException):
    """The alarm rang; no `except Exception` of a system may take it for its own."""


def said(error: BaseException) -> str:
    """An error in one line: its type and the first words that it says, files without the folders that they lie in.

    >>> said(ValueError("no loop in /opt/lib/net.py, line 3"))
    'ValueError: no loop in net.py, line 3'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {_FOLDERS.sub('', ' '.join(lines[:2]))}"[:240]


def called(call: Callable[..., Any], inputs: tuple[tuple[Any, ...], dict[str, Any]], number: int) -> tuple[Any]:
    args, kwargs = inputs
    seed(number)
    with torch.no_grad():
        return (call(*args, **kwargs),)  # in a tuple, so that no result is taken for an Answer


def seed(number: int) -> None:
    """All generators that a forward may draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def held(whole: Any, found: Any, tolerance: float, flat: bool = False) -> Answer:
    """Whether two results are the same: right to the bit, rounded within the tolerance, or wrong."""
    whole, found = unnamed(whole), unnamed(found)
    a, b = (tensors(value, every_path=True) for value in (whole, found))
    if not flat:  # the order of a mapping's keys is no matter
        a, b = (sorted(named, key=lambda pair: pair[0]) for named in (a, b))
    else:
        b = [(where, t) for (where, _), (_, t) in zip(a, b, strict=True)] if len(a) == len(b) else b
    if not flat and not same_form(whole, found):
        return Answer(WRONG, f"a result of another form: {form(whole)} against {form(found)}"[:300])
    if [w for w, _ in a] != [w for w, _ in b]:
        return Answer(WRONG, f"tensors at {[w for w, _ in a]} against {[w for w, _ in b]}"[:300])
    worst = ""
    for (where, x), (_, there) in zip(a, b, strict=True):
        y = there.to(x.device)  # a system may have a device of its own
        if x.dtype != y.dtype or x.shape != y.shape:
            kinds = " against ".join(f"{t.dtype} {list(t.shape)}" for t in (x, y))
            return Answer(WRONG, f"{where or 'the result'}: {kinds}")
        words = values_differ(x, y)
        if words is None:
            continue
        size = x.detach().abs().max().item() if x.is_floating_point() or x.is_complex() else 0.0
        if not largest_gap(x, y) <= tolerance * max(1.0, size):
            return Answer(WRONG, f"{where or 'the result'}: {words}")
        worst = f"{where or 'the result'}: {words}"
    return Answer(ROUNDED, worst) if worst else Answer(RIGHT)


def unnamed(value: Any) -> Any:
    """Named tuples as tuples: who asks one for a name that it has not will hear of it."""
    if isinstance(value, Mapping) and type(value) in (dict, OrderedDict):
        return {key: unnamed(v) for key, v in value.items()}
    if type(value) is list or isinstance(value, tuple):
        return type(value)(map(unnamed, value)) if type(value) is list else tuple(map(unnamed, value))
    return value


def moved(twin: nn.Module, model: nn.Module, *, buffers: bool = True) -> str:
    """What a model holds otherwise than its twin, of all that the twin holds; what a system notes down beside that is its own."""
    others = dict(model.named_modules())
    for path, module in twin.named_modules():
        for name, value in vars(module).items():
            if name == "_modules" or (name == "_buffers" and not buffers):
                continue
            other = vars(others[path]).get(name) if path in others else None
            if name.endswith("_hooks") and isinstance(value, dict) and isinstance(other, dict):
                value, other = len(value), len(other)  # each is numbered over the whole process
            found = attempt(partial(difference_at, f"{path}.{name}".lstrip("."), value, other, gradients=True))
            if found is not None:
                return found.words if isinstance(found, Answer) else str(found)
    return ""


def form(value: Any) -> str:
    return type(value).__name__


def same_form(a: Any, b: Any) -> bool:
    """Whether containers agree, down to plain leaves; a list may stand for a tuple, and any mapping for another."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return set(a) == set(b) and all(same_form(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_form, a, b))
    if type(a) is not type(b):
        return False
    x, y = opened(a), opened(b)
    if x is None or y is None:
        return x is None and y is None and (a is b or callable(a) or bool(a == b) or (a != a and b != b))
    return len(x[1]) == len(y[1]) and all(same_form(i, j) for (_, i), (_, j) in zip(x[1], y[1], strict=True))


def layer(model: nn.Module) -> nn.Module:
    """The first linear layer or convolution."""
    return next(m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))


def load(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(9)
    moved = {
        n: t + 0.1 * torch.rand(t.shape, generator=generator).to(t.device) if t.is_floating_point() else t
        for n, t in model.state_dict().items()
    }
    model.load_state_dict(moved)


def replace(model: nn.Module) -> None:
    found = layer(model)
    found.weight = nn.Parameter(found.weight.detach() * 2)


CHANGES: Mapping[str, Callable[[nn.Module], Any]] = {
    "flag": lambda model: model.train(),
    "loaded": load,
    "replaced": replace,
    "hook": lambda model: layer(model).register_forward_hook(lambda module, args, output: output * 2),
}
