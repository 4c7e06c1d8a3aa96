"""What forward's functions read outside of the model is guarded: a global that changed is an error, not another result."""

from __future__ import annotations

import argparse
import cProfile
import dis
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitRuntime
from ariadne.errors import ModuleError, UnsupportedError
from ariadne.guards.steps import Chain, chains, plain_steps
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

SCALE, NAME, FACTORS, TABLE, CALLS = 2.0, "relu", (1.0, 3.0), {"scale": 2.0, "other": 1}, 0
TOLD = 0
LATE = 2.0
ARGS = argparse.Namespace(scale=2.0)
SETTINGS = types.ModuleType("settings_of_a_test")
SETTINGS.scale = 2.0


class Config:
    scale = 2.0


class Box:
    def __init__(self) -> None:
        self.scale = 2.0


class Slotted:
    __slots__ = ("scale",)


class Keys(dict):
    def __getattr__(self, name: str) -> Any:
        return self[name]


ALL: dict[str, Any] = {"parts": [{"scale": 2.0}, Box()], "keys": Keys(model=Keys(scale=2.0))}
SLOTTED, HEIR = Slotted(), Config()
SLOTTED.scale = 2.0


def told_once(x: torch.Tensor) -> torch.Tensor:
    global TOLD
    if x.shape[-1] == 5:
        TOLD += 1
    return x


def of_a_module(scale: float) -> dict[str, Any]:
    names: dict[str, Any] = {"SCALE": scale, "__name__": "ops"}
    exec(compile("def scaled(x):\n    return x * SCALE\n", "ops.py", "exec"), names)
    return names


ONE, OTHER = of_a_module(2.0), of_a_module(3.0)


class Row(list):
    @property
    def scale(self) -> float:
        return self[1]

    @scale.setter
    def scale(self, value: float) -> None:
        self[1] = value


BOX, ROW = Box(), Row([1.0, 5.0])


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


def counting(x: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return x


def put(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setitem(globals(), name, value)


READS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[pytest.MonkeyPatch], None], str]] = {
    "an attribute of a class": (lambda x: x * Config.scale, lambda p: p.setattr(Config, "scale", 3.0), "Config.scale"),
    "an attribute of a module": (lambda x: x * SETTINGS.scale, lambda p: p.setattr(SETTINGS, "scale", 3.0), "SETTINGS.scale"),
    "an attribute of an object": (lambda x: x * BOX.scale, lambda p: p.setattr(BOX, "scale", 3.0), "BOX.scale"),
    "an attribute in a slot": (lambda x: x * SLOTTED.scale, lambda p: p.setattr(SLOTTED, "scale", 3.0), "SLOTTED.scale"),
    "an attribute of parsed arguments": (lambda x: x * ARGS.scale, lambda p: p.setattr(ARGS, "scale", 3.0), "ARGS.scale"),
    "an attribute that hides the class's": (lambda x: x * HEIR.scale, lambda p: p.setattr(HEIR, "scale", 3.0), "HEIR.scale"),
    "equal code in another module": (
        lambda x: ONE["scaled"](x) + OTHER["scaled"](x), lambda p: p.setitem(OTHER, "SCALE", 4.0), "ops.SCALE was 3.0"
    ),
    "an index": (lambda x: x * ROW[1], lambda p: p.setattr(ROW, "scale", 3.0), r"ROW\[1\]"),
    "another container": (lambda x: x * TABLE["scale"], put("TABLE", dict(TABLE)), "TABLE was .* now it is another"),
    "a key": (lambda x: x * TABLE["scale"], lambda p: p.setitem(TABLE, "scale", 3.0), r"TABLE\['scale'\]"),
    "a key that goes": (lambda x: x * TABLE["scale"], lambda p: p.delitem(TABLE, "scale"), "now it is gone"),
    "a key of an index of a key": (
        lambda x: x * ALL["parts"][0]["scale"], lambda p: p.setitem(ALL["parts"][0], "scale", 3.0),
        r"ALL\['parts'\]\[0\]\['scale'\]"
    ),
    "a key that is read as an attribute": (
        lambda x: x * ALL["keys"].model.scale, lambda p: p.setitem(ALL["keys"].model, "scale", 3.0),
        "keys'\\].model.scale was 2.0"
    ),
    "an attribute of an index": (
        lambda x: x * ALL["parts"][1].scale, lambda p: p.setattr(ALL["parts"][1], "scale", 3.0), r"parts'\]\[1\].scale"
    ),
    "another thing on the way": (
        lambda x: x * ALL["keys"].model.scale, lambda p: p.setitem(ALL["keys"], "model", Keys(scale=3.0)),
        "model was .* now it is another"
    ),
    "a number": (lambda x: x * SCALE, put("SCALE", 3.0), "SCALE was 2.0 .*, now it is 3.0"),
    "a number of another type": (lambda x: x * SCALE, put("SCALE", 2), "SCALE was 2.0 .*, now it is 2;"),
    "a number, in a helper": (helper, put("SCALE", 3.0), "SCALE"),
    "a string": (lambda x: getattr(x, NAME)(), put("NAME", "tanh"), "NAME was 'relu'"),
    "a tuple": (lambda x: x * sum(FACTORS), put("FACTORS", (1.0, 4.0)), "FACTORS"),
}  # fmt: skip


class Reads(nn.Module):
    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(4, 4), nn.Linear(4, 2), middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def split_of(middle: Callable[[torch.Tensor], torch.Tensor], cut: str = "cut:1") -> SplitRuntime:
    torch.manual_seed(0)
    return prepare_split(Reads(middle).eval(), (numbers(2, 4),), split=cut)


def agree(runtime: SplitRuntime) -> None:
    x = numbers(3, 4)
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), runtime.model(x))


@pytest.mark.parametrize("name", sorted(READS))
def test_a_global_that_changed_is_an_error_until_it_is_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    middle, change, words = READS[name]
    runtime = split_of(middle)
    agree(runtime)
    boundary = runtime.run_prefix(numbers(3, 4))
    with monkeypatch.context() as patch:
        change(patch)
        with pytest.raises(ModuleError, match=f"(?s)the global .*{words}"):
            runtime.run_prefix(numbers(3, 4))
        with pytest.raises(ModuleError, match="the global"):
            runtime.run_suffix(boundary)
    agree(runtime)


def test_what_nothing_read_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = split_of(lambda x: x * TABLE["scale"])
    monkeypatch.setitem(TABLE, "other", 5)
    monkeypatch.setitem(globals(), "SCALE", 7.0)
    agree(runtime)


def test_a_global_that_forward_counts_in_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError, match=r"forward changes what is in the globals of .*in a first call and something else"
    ):
        split_of(counting)


def test_what_a_function_counts_for_itself_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = split_of(told_once)
    monkeypatch.setitem(globals(), "TOLD", 7)
    agree(runtime)


def test_an_equal_value_in_its_place_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = split_of(helper)
    monkeypatch.setitem(globals(), "SCALE", float("2.0"))
    agree(runtime)


def test_what_a_module_reads_that_torch_imports_where_it_needs_it_first_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `torch.cond` imports a library that counts as it is imported, and whose counter no guard can see."""
    counts = "from itertools import count\n_NUMBERS = count()\ndef number(): return next(_NUMBERS)\nFIRST = number()\n"
    (tmp_path / "needed_by_torch.py").write_text(counts)
    monkeypatch.syspath_prepend(tmp_path)
    lazy: dict[str, Any] = {"__name__": "torch._lazy"}
    exec("def lazily(x):\n    import needed_by_torch\n    return x * 2.0", lazy)

    class Lazy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = lazy["lazily"](super().forward(x))
            return found

    runtime = prepare_split(Lazy(4, 4), (torch.randn(2, 4),), split="50%")
    assert "needed_by_torch" in sys.modules
    x = torch.randn(3, 4)
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), runtime.model(x))


def test_what_prepares_can_be_profiled_by_cprofile() -> None:
    def later() -> int:
        return sum(range(3))

    profiler = cProfile.Profile()
    profiler.enable()
    try:
        split_of(helper)
        later()
    finally:
        profiler.disable()
    assert any(entry.code is later.__code__ for entry in profiler.getstats())


def test_a_profiler_that_was_there_is_there_afterwards() -> None:
    seen: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        seen.append(event)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        split_of(helper)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(before)
    assert seen


def reads(self: Any, x: Any) -> Any:
    config = self.config
    return x * config.table["scale"] * getattr(config, "gain", 1)


EXPECTED = [
    Chain("self", (("attribute", "config"),), True),
    Chain("self", (("attribute", "config"), ("attribute", "table"), ("item", "scale")), True),
    Chain("getattr"),
    Chain("self", (("attribute", "config"), ("asked", "gain")), True),
]
# The steps of the same function in Pythons that are not at hand, as dis shows them: (name, argument, what it is shown as).
STEPS: dict[str, list[tuple[str, Any, str]]] = {
    "3.13": [
        ("RESUME", 0, ""),
        ("LOAD_FAST", "self", "self"),
        ("LOAD_ATTR", "config", "config"),
        ("STORE_FAST", "config", "config"),
        ("LOAD_FAST_LOAD_FAST", ("x", "config"), "x, config"),
        ("LOAD_ATTR", "table", "table"),
        ("LOAD_CONST", "scale", "'scale'"),
        ("BINARY_SUBSCR", None, ""),
        ("BINARY_OP", 5, "*"),
        ("LOAD_GLOBAL", "getattr", "getattr + NULL"),
        ("LOAD_FAST", "config", "config"),
        ("LOAD_CONST", "gain", "'gain'"),
        ("LOAD_CONST", 1, "1"),
        ("CALL", 3, ""),
        ("BINARY_OP", 5, "*"),
        ("RETURN_VALUE", None, ""),
    ],
    "3.14": [
        ("RESUME", 0, ""),
        ("LOAD_FAST_BORROW", "self", "self"),
        ("LOAD_ATTR", "config", "config"),
        ("STORE_FAST", "config", "config"),
        ("LOAD_FAST_BORROW_LOAD_FAST_BORROW", ("x", "config"), "x, config"),
        ("LOAD_ATTR", "table", "table"),
        ("LOAD_CONST", "scale", "'scale'"),
        ("BINARY_OP", 26, "[]"),
        ("BINARY_OP", 5, "*"),
        ("LOAD_GLOBAL", "getattr", "getattr + NULL"),
        ("LOAD_FAST_BORROW", "config", "config"),
        ("LOAD_CONST", "gain", "'gain'"),
        ("LOAD_SMALL_INT", 1, ""),
        ("CALL", 3, ""),
        ("BINARY_OP", 5, "*"),
        ("RETURN_VALUE", None, ""),
    ],
    "a variable that is used at once": [
        ("LOAD_FAST", "self", "self"),
        ("LOAD_ATTR", "config", "config"),
        ("STORE_FAST_LOAD_FAST", ("config", "config"), "config, config"),
        ("LOAD_ATTR", "table", "table"),
        ("LOAD_CONST", "scale", "'scale'"),
        ("BINARY_SUBSCR", None, ""),
        ("LOAD_GLOBAL", "getattr", "getattr + NULL"),
        ("LOAD_FAST", "config", "config"),
        ("LOAD_CONST", "gain", "'gain'"),
        ("CALL", 2, ""),
    ],
}


def test_reads_are_found_in_the_code_of_this_python() -> None:
    assert list(chains(["self"], list(plain_steps(dis.get_instructions(reads))))) == EXPECTED


@pytest.mark.parametrize("python", sorted(STEPS))
def test_reads_are_found_in_the_code_of_another_python(python: str) -> None:
    steps: list[Any] = [types.SimpleNamespace(opname=n, argval=a, argrepr=r) for n, a, r in STEPS[python]]
    assert list(chains(["self"], list(plain_steps(steps)))) == EXPECTED


def test_a_sum_with_a_constant_is_no_subscript_and_a_variable_of_two_values_no_chain() -> None:
    def adds(self: Any) -> Any:
        config = self.config
        if config:
            config = self.other
        return config.scale + 1

    found = list(chains(["self"], list(plain_steps(dis.get_instructions(adds)))))
    assert found == [Chain("self", (("attribute", name),), True) for name in ("config", "other")]


@torch.library.custom_op("ariadne_surroundings::jittered", mutates_args=())
def jittered(x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


@jittered.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Jitters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(jittered(self.first(x)))
        return found


def test_what_an_op_written_in_python_draws_is_noticed_while_ops_are_recorded_unseen() -> None:
    with pytest.raises(UnsupportedError, match="forward draws from random"):
        prepare_split(Jitters(), (torch.randn(2, 4),), split="after:first")


def test_a_profile_that_is_on_before_is_on_after_and_a_global_read_after_an_op_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.last(scaled(self.first(x).relu()))
            return found

    def profile(frame: Any, event: str, argument: Any) -> None:
        return None

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * LATE

    monkeypatch.setitem(globals(), "LATE", 2.0)
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        runtime = prepare_split(Late(), (torch.randn(2, 4),), split="after:first")
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(before)
    monkeypatch.setitem(globals(), "LATE", 3.0)
    with pytest.raises(ModuleError, match="LATE"):
        runtime.run_suffix(runtime.run_prefix(torch.randn(2, 4)))
