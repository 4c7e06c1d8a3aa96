"""Imports go one way, by the rooms' doors, in the order that the docstrings state; and to nothing heavier than capturing needs."""

from __future__ import annotations

import ast
import gc
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ariadne
from ariadne import prepare
from ariadne.imports import imported
from ariadne.runtime import plans, split, told, variant

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "ariadne"
ROOMS = sorted(p.parent.name for p in PACKAGE.glob("*/__init__.py"))
ORDERED = ("ariadne", *(f"ariadne.{room}" for room in ROOMS))
HEAVY = ("torch._dynamo", "torch._inductor", "triton")
# Which an eager split does without: each is imported where it is first asked for.
LATER = {"benchmark", "check", "cli", "compiled", "half", "halves", "pipeline", "remote", "stopped", "visualization"}


def folder(package: str) -> Path:
    return ROOT.joinpath(*package.split("."))


def stated(package: str) -> list[str]:
    """The modules of a package in the order of its docstring: the words before the wide gap of each indented line."""
    docstring = ast.get_docstring(ast.parse((folder(package) / "__init__.py").read_text())) or ""
    table = docstring.partition("::\n")[2]
    lines = re.findall(r"^ {4}([a-z_]+(?:, [a-z_]+)*) {2,}\S", table, re.MULTILINE)
    return [name for line in lines for name in line.split(", ")]


def present(package: str) -> set[str]:
    """The modules and packages that lie in a package's folder."""
    inside = folder(package).iterdir()
    names = {
        p.stem if p.suffix == ".py" else p.name for p in inside if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    return {name for name in names if not name.startswith("__")}


@cache
def imports(source: str) -> list[str]:
    """What a module imports, inside functions too; `from a.b import c` counts as `a.b.c`, and so does `imported("a.b").c`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and (module := asked_for(node.value)):
            found.append(f"{module}.{node.attr}")
    return found


def asked_for(node: ast.AST) -> str | None:
    """The module of `imported("a.b")`."""
    match node:
        case ast.Call(func=ast.Name(id="imported"), args=[ast.Constant(value=str(name))]):
            return name
    return None


def backward(package: str, module: str, source: str) -> list[str]:
    """The imports of a module, or of a file within it, that go to its own package or to what stands at or after it."""
    order = stated(package)
    earlier = (
        order[: order.index(module)] if module in order else order
    )  # one that is not stated fails a test of its own
    wrong = []
    for name in imports(source):
        inside = name.removeprefix(f"{package}.").split(".")[0]
        if name.startswith(f"{package}.{module}."):
            continue  # among the files of one package; their own order is held beside this
        if name == package or (name.startswith(f"{package}.") and inside not in earlier):
            wrong.append(name)
    return wrong


def foreign(source: str) -> list[str]:
    """The imports from anywhere but Python, torch, safetensors and Ariadne."""
    known = {*sys.stdlib_module_names, "torch", "safetensors", "ariadne"}
    return [n for n in imports(source) if n.split(".")[0] not in known]


SOURCES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
}


@pytest.mark.parametrize("package", ORDERED)
def test_the_docstring_of_a_package_names_each_of_its_modules_once(package: str) -> None:
    assert sorted(stated(package)) == sorted(present(package))


def past_the_door(path: str, source: str) -> list[str]:
    """The imports of a file that reach into another room, past its `__init__`."""
    here = path.split(".")[1] if path.count(".") else ""
    found = []
    for node in ast.walk(ast.parse(source)):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        modules += [module] if (module := asked_for(node)) else []
        found += [m for m in modules if m.count(".") > 1 and m.startswith("ariadne.") and m.split(".")[1] != here]
    return found


def test_nobody_imports_past_the_door_of_a_room() -> None:
    found = {path: past for path, source in SOURCES.items() if (past := past_the_door(path, source))}
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "from ariadne.plan.trace import Value",
        "import ariadne.plan.trace",
        "def f():\n    from ariadne.cut.spec import MODES",
        'def f():\n    imported("ariadne.halves.writing").save()',
    ],
)
def test_a_planted_import_past_the_door_is_noticed(line: str) -> None:
    assert len(past_the_door("ariadne.runtime.split", line)) == 1
    assert not past_the_door("ariadne.plan.solve", "from ariadne.plan.trace import Value")


def handed_out(room: str) -> set[str]:
    """What a door names in `__all__`; without one, all that it imports of its own room."""
    module = importlib.import_module(f"ariadne.{room}")
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(SOURCES[f"ariadne.{room}.__init__"]))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"ariadne.{room}.")
        for alias in node.names
    }
    return set(getattr(module, "__all__", imported))


@pytest.mark.parametrize("room", ROOMS)
def test_a_door_hands_out_what_others_use_and_no_more(room: str) -> None:
    """What `ariadne` itself asks for; tests may go past a door, and do not count."""
    handed = handed_out(room)
    asked = {
        name.removeprefix(f"ariadne.{room}.")
        for path, source in SOURCES.items()
        if not path.startswith(f"ariadne.{room}.")
        for name in imports(source)
        if name.rpartition(".")[0] == f"ariadne.{room}"
    }
    assert asked - {p.stem for p in (PACKAGE / room).glob("*.py")} <= handed
    assert handed - asked <= SHOWN.get(room, set())


SHOWN = {  # what users, and the API pages, come for
    "pipeline": {"Layout", "LoadedPart", "Part", "finish", "load_part", "schedule"},
    "boundary": {"gradients_from_bytes", "gradients_to_bytes"},
    "check": {"CheckResult", "check", "frontier_profile", "passed"},
    "cli": {"main", "parser"},
    "remote": {"Edge", "Limits", "Pending", "Remote", "Server", "Training", "serve"},
    "runtime": {"RuntimeCacheKey", "SplitRuntime"},
    "visualization": {"CandidatesTable", "export_split_candidates_table", "export_split_dot", "export_trace_dot"},
}


def test_the_picture_of_the_rooms_and_the_lines_of_the_tour_are_those_of_the_code() -> None:
    command = [sys.executable, "docs/site/rooms.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ORDERED)
def test_nothing_imports_backwards(package: str) -> None:
    found = {}
    for path, source in SOURCES.items():
        module = path.removeprefix(f"{package}.").split(".")[0]
        if path.startswith(f"{package}.") and not module.startswith("__"):
            wrong = backward(package, module, source)
            if wrong:
                found[path] = wrong
    assert not found


@pytest.mark.parametrize("path", SOURCES)
def test_the_runtime_imports_python_torch_safetensors_and_itself_only(path: str) -> None:
    found = {name.split(".")[0] for name in foreign(SOURCES[path])}
    assert found <= (
        {"zmq"} if path == "ariadne.remote.link" else set()
    )  # an extra, without which that file imports too


@pytest.mark.parametrize(
    ("package", "module", "line", "wrong"),
    [
        ("ariadne", "plan", "from ariadne.capture import capture", "ariadne.capture.capture"),
        ("ariadne", "plan", "def f():\n    from ariadne import runtime", "ariadne.runtime"),
        ("ariadne", "plan", "def f():\n    imported('ariadne.halves').save()", "ariadne.halves.save"),
        ("ariadne", "check", "import ariadne.cli.output", "ariadne.cli.output"),
        ("ariadne", "prepare", "from ariadne import SplitSpec", "ariadne.SplitSpec"),
        ("ariadne", "prepare", "import ariadne", "ariadne"),
        ("ariadne.cli", "options", "from ariadne.cli.entry import main", "ariadne.cli.entry.main"),
        ("ariadne.visualization", "fold", "from ariadne.visualization import page", "ariadne.visualization.page"),
    ],
)
def test_a_planted_backward_import_is_noticed(package: str, module: str, line: str, wrong: str) -> None:
    assert backward(package, module, line) == [wrong]


@pytest.mark.parametrize(
    "name", ["model_zoo", "conformance.suite.cases", "benchmarks", "reports", "ultralytics", "numpy"]
)
def test_a_planted_import_of_what_is_in_no_wheel_is_noticed(name: str) -> None:
    assert foreign(f"import torch, os\ndef f():\n    import {name}") == [name]


def loaded(code: str) -> set[str]:
    """The modules that a fresh process holds after some code."""
    report = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", report]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=280)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_ariadne_loads_nothing_and_reading_a_boundary_nothing_but_torch() -> None:
    own = loaded("import ariadne")
    assert not [n for n in own - {"ariadne.imports"} if n.startswith(("torch", "sympy", "ariadne."))]
    beyond = loaded("from ariadne import BoundaryPayload, ReplayBoundary, AriadneError") - loaded("import torch")
    assert {name.split(".")[0] for name in beyond} - sys.stdlib_module_names <= {"ariadne", "torch"}
    assert not [name for name in beyond if name.startswith((*HEAVY, "torch.fx"))]


def test_importing_what_captures_loads_no_compiler_and_no_package_but_those_that_hold_sizes() -> None:
    own = loaded("from ariadne import prepare_split") - loaded("import torch")
    assert not [name for name in own if name.startswith(HEAVY)]
    # torch's symbolic sizes are sympy's expressions, and every capture asks for them.
    # Python's own, too, whose name says what it was built for, and so is not in the list.
    found = {name.split(".")[0] for name in own if not name.startswith("_sysconfigdata_")}
    assert found - sys.stdlib_module_names <= {"ariadne", "torch", "sympy", "mpmath"}
    assert {n.split(".")[1] for n in own if n.startswith("ariadne.")}.isdisjoint(LATER)


def test_an_eager_split_is_prepared_and_run_without_the_rooms_that_are_imported_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} was asked for")

    for module in (prepare, plans, split, told, variant):
        monkeypatch.setattr(module, "imported", refuse, raising=False)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4)
    runtime = prepare.prepare_split(model, (x,), split="after:1")
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
    with pytest.raises(AssertionError, match=r"ariadne\.visualization was asked for"):
        runtime.visualize(return_dot=True)


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_off_while_modules_are_imported_and_then_as_it_was(
    on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "seen_by_gc.py").write_text("import gc\nseen = gc.isenabled()\n")
    (tmp_path / "not_to_import.py").write_text("raise ValueError('no')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "seen_by_gc", raising=False)
    before = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        assert imported("seen_by_gc").seen is False
        assert gc.isenabled() is on
        with pytest.raises(ValueError, match="no"):
            imported("not_to_import")
        assert gc.isenabled() is on
    finally:
        (gc.enable if before else gc.disable)()
        sys.modules.pop("seen_by_gc", None)


@pytest.fixture
def young_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that makes an object which the collector looks at; the collector is on."""
    (tmp_path / "made_young.py").write_text("made = [[]]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = gc.isenabled()
    gc.enable()
    yield "made_young"
    sys.modules.pop("made_young", None)
    (gc.enable if before else gc.disable)()


def is_old(thing: Any) -> bool:
    return not any(one is thing for one in gc.get_objects(generation=0))


def test_what_was_imported_is_old_for_the_collector_and_what_comes_after_it_is_not(young_module: str) -> None:
    assert is_old(imported(young_module).made)
    assert gc.get_freeze_count() == 0
    young: list[Any] = [[]]
    imported(young_module)
    assert not is_old(young), "nothing was imported, and what is young dies young"


def test_what_the_user_froze_stays_frozen(young_module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    thawed: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    monkeypatch.setattr(gc, "unfreeze", lambda: thawed.append(1))
    imported(young_module)
    assert not thawed


def test_each_public_name_and_each_module_is_found_when_it_is_asked_for() -> None:
    tree = ast.parse(SOURCES["ariadne.__init__"])
    stated = {
        alias.name: (node.module or "").removeprefix("ariadne.")
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert stated == ariadne._HOMES
    assert sorted(stated) == sorted(ariadne.__all__)
    assert all(
        getattr(ariadne, name) is getattr(importlib.import_module(f"ariadne.{home}"), name)
        for name, home in stated.items()
    )
    assert set(ariadne.__all__) <= set(dir(ariadne))
    assert ariadne.visualization is importlib.import_module("ariadne.visualization")
    with pytest.raises(AttributeError, match="module 'ariadne' has no attribute 'prepare_spilt'"):
        ariadne.prepare_spilt  # noqa: B018
    with pytest.raises(AttributeError):
        ariadne.__getattr__("__main__")
    assert not hasattr(ariadne, "boundary.x")
