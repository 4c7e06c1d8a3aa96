"""The grammar of the command line: it answers without torch, and what it offers is what there is."""

from __future__ import annotations

import argparse
import gc
import importlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from ariadne.check import CHECKS
from ariadne.check.model import Kind
from ariadne.check.profile import FORMATS
from ariadne.cli import completion, cuts, grammar, main, options
from ariadne.cli.options import batch_dim, dynamic, sizes
from ariadne.cli.output import Answer, UsageError
from ariadne.cut import MODES
from ariadne.pipeline.balance import BALANCES
from ariadne.remote import Limits


@pytest.mark.parametrize("line", [["--help"], ["check", "--help"], ["draw", "m:f", "--out"], ["nothing"]], ids=" ".join)
def test_help_and_wrong_lines_are_answered_without_importing_torch(line: list[str]) -> None:
    code = f"""
import sys
from ariadne.cli import main
try:
    main({line!r})
finally:
    assert not {{"torch", "sympy", "numpy"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "AssertionError" not in done.stderr
    assert done.returncode == (0 if "--help" in line else 2)


def test_a_command_is_imported_without_the_collector(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def note(name: str) -> Any:
        seen.append((name, gc.isenabled()))
        return SimpleNamespace(run=lambda options: Answer("done", {}, 0))

    monkeypatch.setattr("importlib.import_module", note)
    assert main(["doctor"]) == 0
    assert (capsys.readouterr().out, seen) == ("done\n", [("ariadne.cli.doctor", False)])


def test_choices_are_those_that_there_are() -> None:
    assert options.MODES == MODES
    assert tuple(grammar.MEANINGS) == CHECKS
    assert set(CHECKS) == set(get_args(Kind))
    assert grammar.CHARTS == FORMATS
    assert grammar.BALANCES == BALANCES
    assert tuple(cuts.ORDERS) == grammar.ORDERS
    assert tuple(completion._HOW) == grammar.SHELLS


def test_every_command_has_a_module_of_its_name_that_runs_it() -> None:
    (commands,) = (a for a in grammar.parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name in commands.choices:
        assert callable(importlib.import_module(f"ariadne.cli.{name}").run)


def test_limits_of_a_server_are_those_of_its_room() -> None:
    given = grammar.parser().parse_args(["serve", "half.safetensors"])
    most = Limits()
    assert (given.max_bytes, given.inflight, given.waiting) == (most.bytes, most.inflight, most.waiting)


@pytest.mark.parametrize(
    ("typed", "dims", "ranges"),
    [
        (["x:2"], {"x": {2: "x_2"}}, None),
        (["x:2=64..512/32", "x:3=8..9"], {"x": {2: "x_2", 3: "x_3"}}, {"x_2": (64, 512, 32), "x_3": (8, 9)}),
        (["ids:1=L:1..512", "mask:1=L"], {"ids": {1: "L"}, "mask": {1: "L"}}, {"L": (1, 512)}),
    ],
)
def test_sizes_beside_the_batch(typed: list[str], dims: dict[str, dict[int, str]], ranges: Any) -> None:
    assert sizes([dynamic(text) for text in typed], []) == {"dynamic": dims, "sizes": ranges, "batch_dim": None}


def test_where_the_batch_is() -> None:
    typed = [batch_dim("x=1"), batch_dim("table=none")]
    assert sizes([], typed) == {"dynamic": None, "sizes": None, "batch_dim": {"x": 1, "table": None}}


@pytest.mark.parametrize("typed", ["x", "x=", "x=-1", "x=None", "1=x", "x:1"])
def test_a_batch_dim_that_means_nothing(typed: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be INPUT=DIM or INPUT=none"):
        batch_dim(typed)


@pytest.mark.parametrize("typed", ["x", "x:", "x:2=", "x:2=5", "x:2=L:", "x:2=64..", "x:-1=2..3", "x:2=1..2/"])
def test_sizes_that_mean_nothing(typed: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be INPUT:DIM, INPUT:DIM="):
        dynamic(typed)


def test_a_size_has_one_range() -> None:
    with pytest.raises(UsageError, match="L has another range already"):
        sizes([dynamic("ids:1=L:1..512"), dynamic("mask:1=L:1..64")], [])
