"""Python state in objects that are no plain containers is guarded; what no protocol shows is refused by name."""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import ctypes
import decimal
import enum
import functools
import importlib
import io
import itertools
import logging
import operator
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ariadne import SplitRuntime
from ariadne.errors import ModuleError, UnsupportedError
from ariadne.guards.opened import State, home_of, is_closed
from ariadne.guards.versions import VERSION
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers, same

Read = Callable[[torch.Tensor], Any]
Case = Callable[[], tuple[Read, Callable[[], Any]]]
SETTINGS: Any = types.ModuleType("settings_that_a_function_imports")
SETTINGS.scale = 2.0
sys.modules[SETTINGS.__name__] = SETTINGS


class Scale:
    """A factor as users keep it: in an object of a class of their own."""

    scale = 2.0

    def get(self) -> float:
        return self.scale

    @classmethod
    def of_class(cls) -> float:
        return cls.scale


OWNER = Scale()


class Descriptor:
    def __init__(self) -> None:
        self.value = 2.0

    def __get__(self, thing: Any, kind: Any = None) -> float:
        return self.value


class Layer(nn.Linear):
    """What a function reads scales the result."""

    def __init__(self, read: Read) -> None:
        super().__init__(4, 4)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.read(x)


def split_of(read: Read) -> tuple[nn.Module, SplitRuntime]:
    model = nn.Sequential(nn.Tanh(), Layer(read)).eval()
    return model, prepare_split(model, (numbers(2, 4),), split="after:0")


def a_proxy() -> tuple[Read, Callable[[], Any]]:
    proxy = weakref.proxy(OWNER)
    return lambda x: proxy.scale, lambda: setattr(OWNER, "scale", OWNER.scale + 1)


def a_reference() -> tuple[Read, Callable[[], Any]]:
    reference = weakref.ref(OWNER)
    return lambda x: reference().scale, lambda: setattr(OWNER, "scale", OWNER.scale + 1)  # type: ignore[union-attr]


def a_reference_in_a_list() -> tuple[Read, Callable[[], Any]]:
    kept = [weakref.ref(OWNER)]
    return lambda x: kept[0]().scale, lambda: setattr(OWNER, "scale", OWNER.scale + 1)  # type: ignore[union-attr]


def a_weak_set() -> tuple[Read, Callable[[], Any]]:
    kept: Any = weakref.WeakSet()
    thing = Scale()
    return lambda x: 2.0 if thing in kept else 1.0, lambda: kept.add(thing)


def a_weak_dict() -> tuple[Read, Callable[[], Any]]:
    thing = Scale()
    kept = weakref.WeakValueDictionary(key=thing)
    return lambda x: kept["key"].scale, lambda: setattr(thing, "scale", 3.0)


def of_a_thread() -> tuple[Read, Callable[[], Any]]:
    kept = threading.local()
    return lambda x: getattr(kept, "scale", 1.0), lambda: setattr(kept, "scale", 3.0)


def an_event() -> tuple[Read, Callable[[], Any]]:
    event = threading.Event()
    return lambda x: 3.0 if event.is_set() else 1.0, event.set


def a_queue() -> tuple[Read, Callable[[], Any]]:
    kept: queue.Queue[int] = queue.Queue()
    return lambda x: 1.0 + kept.qsize(), lambda: kept.put(1)


def a_user_dict() -> tuple[Read, Callable[[], Any]]:
    kept = collections.UserDict(scale=2.0)
    return lambda x: kept["scale"], lambda: kept.update(scale=3.0)


def a_chain_map() -> tuple[Read, Callable[[], Any]]:
    inner = {"scale": 2.0}
    kept = collections.ChainMap({}, inner)
    return lambda x: kept["scale"], lambda: inner.update(scale=3.0)


def a_view_of_a_dict() -> tuple[Read, Callable[[], Any]]:
    inner = {"deep": {"scale": 2.0}}
    kept = types.MappingProxyType(inner)
    return lambda x: kept["deep"]["scale"], lambda: inner["deep"].update(scale=3.0)


def an_array() -> tuple[Read, Callable[[], Any]]:
    kept = array.array("d", [2.0])
    return lambda x: kept[0], lambda: operator.setitem(kept, 0, 3.0)


def bytes_that_change() -> tuple[Read, Callable[[], Any]]:
    kept = bytearray(b"\x02")
    view = memoryview(kept)
    return lambda x: float(view[0]), lambda: operator.setitem(kept, 0, 3)


def a_number_of_c() -> tuple[Read, Callable[[], Any]]:
    kept = ctypes.c_float(2.0)
    return lambda x: kept.value, lambda: setattr(kept, "value", 3.0)


def an_array_of_objects() -> tuple[Read, Callable[[], Any]]:
    kept = np.array([{"scale": 2.0}], dtype=object)
    return lambda x: kept[0]["scale"], lambda: kept[0].update(scale=3.0)


def text_in_memory() -> tuple[Read, Callable[[], Any]]:
    kept = io.StringIO("2.")
    return lambda x: float(kept.getvalue()), lambda: (kept.seek(0), kept.write("3."))


def a_logger() -> tuple[Read, Callable[[], Any]]:
    logger = logging.getLogger("ariadne.test_opened.deep")
    logging.getLogger("ariadne.test_opened").setLevel(40)
    return lambda x: 3.0 if logger.isEnabledFor(20) else 1.0, lambda: logger.setLevel(20)


def a_method_of_a_class() -> tuple[Read, Callable[[], Any]]:
    kind = type("Kind", (Scale,), {})
    return lambda x: kind.of_class(), lambda: setattr(kind, "scale", 3.0)


def a_class_that_is_chosen() -> tuple[Read, Callable[[], Any]]:
    one, other = type("One", (), {"scale": 2.0}), type("Other", (), {"scale": 3.0})
    return lambda x: (other if x.dim() > 5 else one).scale, lambda: setattr(one, "scale", 5.0)  # type: ignore[attr-defined]


def a_descriptor() -> tuple[Read, Callable[[], Any]]:
    kept = Descriptor()
    thing = type("Thing", (), {"scale": kept})()
    return lambda x: thing.scale, lambda: setattr(kept, "value", 3.0)


def a_single_dispatch() -> tuple[Read, Callable[[], Any]]:
    @functools.singledispatch
    def scale(x: Any) -> float:
        return 1.0

    return lambda x: scale(x), lambda: scale.register(torch.Tensor, lambda x: 3.0)


def all_variables_of_an_object() -> tuple[Read, Callable[[], Any]]:
    thing, name = Scale(), "sca"
    thing.scale = 2.0
    return lambda x: vars(thing)[name + "le"], lambda: setattr(thing, "scale", 3.0)


def an_attribute_by_its_getter() -> tuple[Read, Callable[[], Any]]:
    thing, get = Scale(), operator.attrgetter("scale")
    return lambda x: get(thing), lambda: setattr(thing, "scale", 3.0)


def objects_in_a_loop() -> tuple[Read, Callable[[], Any]]:
    things = [Scale(), Scale()]
    return lambda x: sum(thing.scale for thing in things), lambda: setattr(things[1], "scale", 3.0)


def an_object_that_is_chosen() -> tuple[Read, Callable[[], Any]]:
    one, other = Scale(), Scale()
    return lambda x: (other if x.dim() > 5 else one).scale, lambda: setattr(one, "scale", 3.0)


def an_object_by_default() -> tuple[Read, Callable[[], Any]]:
    one = Scale()

    def scale(thing: Scale = one) -> float:
        return thing.scale

    return lambda x: scale(), lambda: setattr(one, "scale", 3.0)


def an_object_in_a_context() -> tuple[Read, Callable[[], Any]]:
    one = Scale()
    kept = contextvars.ContextVar("kept", default=one)
    return lambda x: kept.get().scale, lambda: setattr(one, "scale", 3.0)


def a_module_that_is_imported_inside() -> tuple[Read, Callable[[], Any]]:
    def read(x: torch.Tensor) -> Any:
        import settings_that_a_function_imports as settings  # type: ignore[import-not-found]  # noqa: PLC0415 what is tested

        return settings.scale

    return read, lambda: setattr(SETTINGS, "scale", SETTINGS.scale + 1)


def a_name_that_is_imported_inside() -> tuple[Read, Callable[[], Any]]:
    def read(x: torch.Tensor) -> Any:
        from settings_that_a_function_imports import scale  # noqa: PLC0415 what is tested

        return scale

    return read, lambda: setattr(SETTINGS, "scale", SETTINGS.scale + 1)


def a_module_that_is_asked_for() -> tuple[Read, Callable[[], Any]]:
    return (
        lambda x: importlib.import_module("settings_that_a_function_imports").scale,
        lambda: setattr(SETTINGS, "scale", SETTINGS.scale + 1),
    )


def a_module_among_all() -> tuple[Read, Callable[[], Any]]:
    return (
        lambda x: sys.modules["settings_that_a_function_imports"].scale,
        lambda: setattr(SETTINGS, "scale", SETTINGS.scale + 1),
    )


def a_default_dict() -> tuple[Read, Callable[[], Any]]:
    kept: Any = collections.defaultdict(lambda: 2.0)
    return lambda x: kept["scale"], lambda: kept.update(scale=3.0)


def an_attribute_of_a_member() -> tuple[Read, Callable[[], Any]]:
    member: Any = enum.Enum("Kind", "ONE").ONE  # type: ignore[attr-defined]
    member.scale = 2.0
    return lambda x: member.scale, lambda: setattr(member, "scale", 3.0)


CASES: list[Case] = [
    a_proxy, a_reference, a_reference_in_a_list, a_weak_set, a_weak_dict, of_a_thread, an_event, a_queue, a_user_dict,
    a_chain_map, a_view_of_a_dict, an_array, bytes_that_change, a_number_of_c, an_array_of_objects, text_in_memory, a_logger,
    a_method_of_a_class, a_class_that_is_chosen, a_descriptor, all_variables_of_an_object,
    an_attribute_by_its_getter, objects_in_a_loop, an_object_that_is_chosen, an_object_by_default, an_object_in_a_context,
    a_module_that_is_imported_inside, a_name_that_is_imported_inside, a_module_that_is_asked_for, a_module_among_all,
    a_default_dict, an_attribute_of_a_member,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_what_an_object_holds_must_not_change_unseen(case: Case) -> None:
    read, change = case()
    model, runtime = split_of(read)
    x = numbers(3, 4)
    with torch.no_grad():
        same(model(x), runtime.run_suffix(runtime.run_prefix(x)))
        change()
        with pytest.raises(ModuleError, match=r"was .* now it is"):
            runtime.run_suffix(runtime.run_prefix(x))


def test_a_function_that_is_registered_later_is_found() -> None:
    read, change = a_single_dispatch()
    model, runtime = split_of(read)
    x = numbers(3, 4)
    with torch.no_grad():
        same(model(x), runtime.run_suffix(runtime.run_prefix(x)))
        change()
        same(model(x), runtime.run_suffix(runtime.run_prefix(x)))


def a_lock() -> Read:
    lock = threading.Lock()
    return lambda x: 2.0 if lock.locked() else 1.0


def a_generator() -> Read:
    made = (float(i) for i in range(100))
    return lambda x: next(made)


def a_count() -> Read:
    count = itertools.count()
    return lambda x: float(next(count) > 30)


def random_numbers_of_its_own() -> Read:
    drawn = random.Random(3)
    return lambda x: float(drawn.random() < 0.05)


def random_numbers_of_numpy() -> Read:
    drawn = np.random.default_rng(3)
    return lambda x: float(drawn.random() < 0.05)


def numbers_that_wait() -> Read:
    kept: queue.Queue[float] = queue.Queue()
    for i in range(100):
        kept.put(float(i))
    return lambda x: kept.get()


@pytest.mark.parametrize(
    "case", [a_lock, a_generator, a_count, random_numbers_of_its_own, random_numbers_of_numpy, numbers_that_wait]
)
def test_what_no_guard_can_see_is_refused_by_name(case: Callable[[], Read]) -> None:
    with pytest.raises(
        UnsupportedError, match=r"whose state no guard can see|changes what is in|keeps state in Python"
    ):
        split_of(case())


def held_while_it_runs() -> Read:
    lock = threading.Lock()

    def read(x: torch.Tensor) -> float:
        with lock:
            return 2.0

    return read


def taken_and_given_back() -> Read:
    lock = threading.RLock()

    def read(x: torch.Tensor) -> float:
        lock.acquire()
        lock.release()
        return 2.0

    return read


def told_to_a_logger() -> Read:
    logger = logging.getLogger("ariadne.test_opened.told")

    def read(x: torch.Tensor) -> float:
        logger.debug("called with %s", "numbers" if x.dim() else "a number")
        return 2.0

    return read


@pytest.mark.parametrize("case", [held_while_it_runs, taken_and_given_back, told_to_a_logger])
def test_what_decides_nothing_is_neither_refused_nor_guarded(case: Callable[[], Read]) -> None:
    model, runtime = split_of(case())
    logging.getLogger("ariadne.test_opened").setLevel(logging.DEBUG)
    try:
        with torch.no_grad():
            same(model(x := numbers(3, 4)), runtime.run_suffix(runtime.run_prefix(x)))
    finally:
        logging.getLogger("ariadne.test_opened").setLevel(logging.NOTSET)


def asked_by_its_own(logger: logging.Logger) -> Callable[..., float]:
    return lambda x: 3.0 if logger.isEnabledFor(20) else 1.0


def asked_by_attribute(logger: logging.Logger) -> Callable[..., float]:
    return lambda x: 3.0 if logger.level == 20 or logger.isEnabledFor(20) else 1.0


@pytest.mark.parametrize(("asked", "level", "taken"), [(asked_by_its_own, 40, True), (asked_by_its_own, 20, False),
                                                       (asked_by_attribute, 40, False)])  # fmt: skip
def test_a_loggers_level_may_change_while_its_answers_stay(asked: Any, level: int, taken: bool) -> None:
    logger = logging.getLogger("ariadne.test_opened.answers")
    logger.setLevel(30)
    model, runtime = split_of(asked(logger))
    try:
        logger.setLevel(level)
        with (
            torch.no_grad(),
            nullcontext() if taken else pytest.raises(ModuleError, match=r"a logger that of|level was 30"),
        ):
            same(model(x := numbers(3, 4)), runtime.run_suffix(runtime.run_prefix(x)))
    finally:
        logger.setLevel(logging.NOTSET)


def test_decimal_numbers_follow_their_context() -> None:
    one = decimal.Decimal(1)
    _, runtime = split_of(lambda x: float(one / 7))
    with decimal.localcontext(prec=3), torch.no_grad(), pytest.raises(ModuleError, match="decimal's context"):
        runtime.run_suffix(runtime.run_prefix(numbers(3, 4)))


def test_a_state_tells_what_it_holds_and_what_it_is_made_on() -> None:
    kept = array.array("i", [1, 2])
    state = State(kept)
    assert state.is_same()
    assert "array" in repr(state)
    kept.append(3)
    assert not state.is_same()
    assert home_of(Scale()) is object
    assert home_of(threading.Lock()) is type(threading.Lock())
    assert is_closed(iter_of_a_function())
    assert not is_closed(random.Random(1))
    assert not is_closed(Scale())


def iter_of_a_function() -> Any:
    yield 1


def test_a_copy_of_the_model_is_guarded_by_its_own_state() -> None:
    class Kept(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.kept = array.array("d", [2.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.kept[0]

    model = nn.Sequential(nn.Tanh(), Kept()).eval()
    runtime = prepare_split(model, (numbers(2, 4),), split="after:0")
    other = copy.deepcopy(runtime)
    model[1].kept[0] = 3.0
    with torch.no_grad():
        other.run_suffix(other.run_prefix(numbers(2, 4)))
        with pytest.raises(ModuleError):
            runtime.run_suffix(runtime.run_prefix(numbers(2, 4)))


@functools.lru_cache
def remembered(x: torch.Tensor | None, by: Callable[[int], float] | str, *sizes: int | None) -> dict[str, Any]:
    return {"sizes": sizes}


def test_a_function_that_keeps_results_is_looked_into_again_only_when_it_was_written_to() -> None:
    """einops keeps its recipes so, with rows of types in the annotations, which cost 0.3 ms at each call."""
    state = State(remembered)
    assert state.watched.loose is (VERSION is None)
    held = state.watched
    assert state.is_same()
    assert (state.watched is held) is (VERSION is not None)  # no new look, where dicts have versions
    was = remembered.__wrapped__
    remembered.scale = 2.0  # type: ignore[attr-defined]
    try:
        assert not state.is_same()
    finally:
        del remembered.scale  # type: ignore[attr-defined]
    assert state.is_same()
    remembered.__wrapped__ = lambda *_: {}  # type: ignore[method-assign]
    try:
        assert not state.is_same()
    finally:
        remembered.__wrapped__ = was  # type: ignore[method-assign]
    assert state.is_same()


def test_a_context_variable_is_asked_for_its_value_and_not_taken_apart_at_each_call() -> None:
    holder: Any = Scale()
    holder.kept = contextvars.ContextVar("kept", default=1.0)
    state = State(holder)
    assert state.watched.loose is (VERSION is None)
    holder.kept = contextvars.ContextVar("kept", default=1.0)
    assert not state.is_same()
