"""The grammar of the command line: it answers without torch, and what it offers is what there is."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from typing import get_args

import pytest

from ariadne.check import CHECKS
from ariadne.check.model import Kind
from ariadne.check.profile import FORMATS
from ariadne.cli import completion, cuts, grammar, options
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
