"""The command line: models and inputs as they are typed, each command's answer, errors and exit statuses."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import random
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from ariadne.cli import doctor, main, parser
from ariadne.cli.bench import Ratio, break_even, ratio
from ariadne.cli.inputs import Input, make, parse
from ariadne.cli.output import UsageError, table
from ariadne.errors import CompileError
from ariadne.units import size

ROOT = Path(__file__).resolve().parents[3]

MODELS = """
import torch
from torch import nn

print("this model talks as it is imported")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Linear(5, 2)
    def forward(self, x, scale=None):
        out = self.head(self.body(x))
        return out if scale is None else out * scale

def net():
    return Net()

def with_args():
    return Net(), (torch.randn(4, 3),)

def with_kwargs():
    return Net(), (torch.randn(4, 3),), {"scale": torch.ones(4, 1)}

class Shared(nn.Module):
    def forward(self, x):
        base = x * 2
        view = base[:, :2]
        view.add_(1)
        return base * 3 + view.sum()

def shared():
    return Shared(), (torch.randn(2, 3),)

class Fixed(nn.Module):
    def forward(self, x):
        return torch.cat([row * 2 for row in x]).reshape(x.shape) + 1

def fixed():
    return Fixed(), (torch.randn(2, 3),)

class Branch(nn.Module):
    def forward(self, x):
        x = x * 2
        return x + 1 if x.sum() > 0 else x * 3

def branch():
    return Branch(), (torch.ones(2, 3),)

ready = Net()
number = 3

def broken():
    raise ValueError("no weights here")

def listed():
    return Net(), [torch.randn(2, 3)], "kwargs"
"""


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "models_of_mine.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "models_of_mine", raising=False)
    return "models_of_mine.py"


def answered(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    """What a command prints on stdout."""
    assert main(argv) == status
    return capsys.readouterr().out


def found(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> Any:
    """What a command prints with --json."""
    return json.loads(answered(capsys, *argv, "--json", status=status))


# --- the model and its inputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "more", "batch"),
    [
        ("models_of_mine.py:net", ["--input", "3"], 2),
        ("models_of_mine.py:Net", ["--input", "3", "--batch", "5"], 5),
        ("models_of_mine.py:ready", ["--input", "3"], 2),
        ("models_of_mine.py:with_args", [], 4),
        ("models_of_mine.py:with_args", ["--batch", "6"], 6),
        ("models_of_mine.py:with_args", ["--input", "3"], 2),
        ("models_of_mine.py:with_kwargs", [], 4),
        ("models_of_mine:net", ["--input", "3", "--input", "scale=1:float32:0..1"], 2),
        ("toys/hourglass", ["--batch", "3"], 3),
    ],
)
def test_a_model_is_named_in_several_ways(
    model: str, more: list[str], batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    data = found(capsys, "plan", model, *more)
    assert data["traced_batch"] == batch
    assert data["batches"] == [[1, 64]]


def test_inputs_are_read_and_made_as_they_are_typed() -> None:
    assert parse("3x224x224") == Input("", (3, 224, 224))
    assert parse("mask=16:bool") == Input("mask", (16,), torch.bool)
    assert parse("16:int64:0..1000") == Input("", (16,), torch.int64, 0, 1000)
    assert parse(":int64") == Input("", (), torch.int64)
    assert parse("4x4:fixed") == Input("", (4, 4), fixed=True)
    wanted = [parse(text) for text in ("2x3", "4:int64:5..7", "m=2:bool", ":int32", "3:fixed", "2:bfloat16:-1..1")]
    args, kwargs = make(wanted, 7, 0, torch.device("cpu"))
    assert [(t.dtype, tuple(t.shape)) for t in (*args, kwargs["m"])] == [
        (torch.float32, (7, 2, 3)),
        (torch.int64, (7, 4)),
        (torch.int32, (7,)),
        (torch.float32, (3,)),
        (torch.bfloat16, (7, 2)),
        (torch.bool, (7, 2)),
    ]
    assert set(args[1].unique().tolist()) == {5, 6}
    assert args[4].abs().max() <= 1
    again, _ = make(wanted, 7, 0, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(args, again, strict=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("3x", "no input reads '3x'"),
        ("3:int65", "'int65' is neither a dtype"),
        ("3:5..2", "LOW below HIGH"),
        ("3:int64:0..1.5", "whole numbers"),
        ("3:bool:0..1", "takes no range"),
    ],
)
def test_an_input_that_can_not_be_meant_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(text)


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ("plan models_of_mine.py", 2, "write models_of_mine.py:NAME. It has Net, net, with_args"),
        ("plan models_of_mine.py:nett --input 3", 2, "there is no 'nett' in models_of_mine.py. Nearest: 'net', 'Net'"),
        ("plan models_of_mine.py:net", 2, "needs example inputs: give --input"),
        ("plan models_of_mine.py:number", 2, "is of type int; name a model, or a function that returns one"),
        ("plan models_of_mine.py:listed", 2, "gave kwargs of type str"),
        ("plan models_of_mine.py:broken", 3, "models_of_mine.py:broken() failed: ValueError: no weights here"),
        ("plan nowhere.py:net", 2, "there is no file 'nowhere.py'"),
        ("plan nowhere.module:net", 2, "no module 'nowhere.module' is installed, or in this folder"),
        ("plan toys/hourglas", 2, "no model named 'toys/hourglas' in the zoo. Nearest: 'toys/hourglass'"),
        ("plan models_of_mine.py:net --input 4", 3, "the model can't run on these inputs: RuntimeError: "),
        ("plan toys/python_draw --train", 3, "forward draws from "),
        ("show models_of_mine.py:with_args after:boddy", 3, "forward calls no module of that name. Nearest: 'body'"),
        ("show models_of_mine.py:with_args body", 2, "no boundary reads 'body'; write 'after:<module>'"),
        ("show models_of_mine.py:with_args 50% --batch 0", 2, "--batch: must be a whole number above 0"),
        ("check models_of_mine.py:with_args --only all", 2, "there is no check 'all'; there are twice, left"),
        ("check models_of_mine.py:with_args --mode compiled", 2, "no equality of bits"),
        ("cuts models_of_mine.py:with_args --dynamic-batch 8..2", 2, "LOW..HIGH with LOW not above HIGH"),
        ("cuts models_of_mine.py:with_args --sort size", 2, "invalid choice: 'size'"),
        (
            "profile models_of_mine.py:net after:body",
            2,
            "unrecognized arguments: after:body (see ariadne profile --help)",
        ),
        ("cuts", 2, "the following arguments are required: MODEL"),
        ("", 2, "the following arguments are required: COMMAND"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_error_is_one_line_and_a_status(
    argv: str, status: int, words: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([*shlex.split(argv), *(more if argv else [])])
    except SystemExit as stopped:  # argparse's own
        code = int(stopped.code or 0)
    out, err = capsys.readouterr()
    said = err.replace("this model talks as it is imported\n", "")
    assert (code, out) == (status, "")
    assert words in said
    assert re.fullmatch(r"ariadne: .*\n", said)


def test_the_traceback_of_an_error_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "models_of_mine.py:broken", "--traceback"]) == 3
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert 'raise ValueError("no weights here")' in err


# --- commands ---------------------------------------------------------------------------------------------------------


def test_plan_shows_ops_capture_batches_and_guards(capsys: pytest.CaptureFixture[str]) -> None:
    text = answered(capsys, "plan", "models_of_mine.py:with_args", "--dynamic-batch", "2..8")
    assert "def forward(x: f32[B, 3]):" in text
    assert "captured  symbolic, in eval mode, at batch 4" in text
    assert "batches   B in 2 to 8, of the 2 to 8 that were asked for" in text
    assert "fixed     sizes of inputs that are not the batch, and so must repeat:\n  x: f32[B, 3]\n" in text
    assert re.search(r"\d+ modules have the classes and hooks that they had, \d+ of them the training flags", text)
    brief = answered(capsys, "plan", "models_of_mine.py:with_args", "--brief", "--train")
    assert "def forward" not in brief
    assert "in training mode" in brief
    assert "this model talks" not in text + brief


def test_plan_says_what_could_not_be_made_dynamic_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    text = answered(capsys, "plan", "models_of_mine.py:fixed", "--brief")
    assert "batches   B in 2, of the 1 to 64 that were asked for" in text
    assert "  not observed: at batch 2 forward runs 6 ops, at batch 3 it runs 7" in text
    assert "  not batch 3: op 0 makes 3 tensor(s) there, 2 in the plan" in text
    assert "a batch that is not covered is captured when it first comes, as a plan of its own" in text
    data = found(capsys, "plan", "models_of_mine.py:branch")
    assert data["captured_by"] == "observed"
    assert list(data["not_captured_by"]) == ["symbolic"]
    assert any("Python reads it out of a tensor" in guard for guard in data["guards"])


def test_cuts_are_sorted_filtered_and_written_as_csv_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    model = "models_of_mine.py:with_args"
    text = answered(capsys, "cuts", model)
    assert text.splitlines()[0].split("  ")[0] == "cut"
    assert "cut:2  body" in text
    assert "2 cuts, 2 of them safe; 2 shown" in text
    rows = found(capsys, "cuts", "models_of_mine.py:shared", "--sort", "bytes")["candidates"]
    assert [r["boundary_bytes"] for r in rows] == sorted(r["boundary_bytes"] for r in rows)
    safe = found(capsys, "cuts", "models_of_mine.py:shared", "--safe", "--top", "1")["candidates"]
    assert [r["safe"] for r in safe] == [True]
    assert found(capsys, "cuts", "models_of_mine.py:shared", "--trainable")["candidates"] == []
    lines = list(csv.DictReader(io.StringIO(answered(capsys, "cuts", model, "--csv", "--sort", "ops"))))
    assert {line["split_id"] for line in lines} == {"cut:1", "cut:2"}
    assert {line["trainable_suffix"] for line in lines} == {"True"}


def test_why_explains_a_rejected_cut_and_names_the_nearest_safe_ones(capsys: pytest.CaptureFixture[str]) -> None:
    model = "models_of_mine.py:shared"
    unsafe = next(r for r in found(capsys, "cuts", model)["candidates"] if not r["safe"])
    text = answered(capsys, "cuts", model, "--why", unsafe["split_id"].removeprefix("cut:"))
    assert f"{unsafe['split_id']} is not safe: between " in text
    assert f"cannot split at '{unsafe['split_id']}': {unsafe['reason']}. Nearest safe splits: 'cut:" in text
    assert "f32[B, 2]" in text
    data = found(capsys, "cuts", "models_of_mine.py:with_args", "--why", "after:body")
    assert (data["split_id"], data["safe"], data["message"]) == ("cut:2", True, "")
    assert [v["type"] for v in data["values"]] == ["f32[B, 5]"]
    assert main(["cuts", model, "--why", "99"]) == 3
    assert "there is no 'cut:99': this plan has cuts 1 to " in capsys.readouterr().err


def test_show_prints_the_source_of_both_sides_or_one(capsys: pytest.CaptureFixture[str]) -> None:
    model = "models_of_mine.py:with_args"
    text = answered(capsys, "show", model, "after:body")
    assert "def prefix(B, x):" in text
    assert "def suffix(B, " in text
    compile(text, "shown", "exec")
    data = found(capsys, "show", model, "2", "--side", "suffix")
    assert "prefix" not in data
    assert data["suffix"].startswith("def suffix(B, ")
    assert (data["split_id"], data["after"]) == ("cut:2", "body")


def test_draw_writes_a_picture_of_the_model_or_of_a_cut(capsys: pytest.CaptureFixture[str]) -> None:
    model = "models_of_mine.py:with_args"
    assert "whole, 3 ops: trace_graph.dot" in answered(capsys, "draw", model, "--format", "dot")
    assert Path("trace_graph.dot").read_text().startswith("digraph")
    Path("pictures").mkdir()
    data = found(capsys, "draw", model, "after:body", "--out", "pictures/cut.dot", "--operations", "--depth", "all")
    assert data == {"model": model, "view": "split", "split_id": "cut:2", "path": "pictures/cut.dot"}
    assert "PREFIX" in Path("pictures/cut.dot").read_text()


@pytest.mark.parametrize("name", ["draw", "profile"])
def test_a_folder_that_is_not_there_is_not_made(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "models_of_mine.py:with_args", "--out", "not_there/cut.svg"]) == 2
    assert "there is no folder not_there; make it first" in capsys.readouterr().err
    assert not Path("not_there").exists()


def test_a_model_that_can_not_be_cut_is_drawn_whole(capsys: pytest.CaptureFixture[str]) -> None:
    Path("one.py").write_text("from torch import nn\n\n\ndef one():\n    return nn.Linear(4, 4)\n")
    data = found(capsys, "draw", "one.py:one", "--input", "4", "--format", "dot")
    assert data == {"model": "one.py:one", "view": "trace", "split_id": None, "path": "trace_graph.dot"}
    assert main(["draw", "one.py:one", "50%", "--input", "4", "--format", "dot"]) == 3
    assert "nothing to cut" in capsys.readouterr().err


def test_a_picture_that_can_not_be_drawn_is_status_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["draw", "models_of_mine.py:with_args", "--out", "picture.png"]) == 3
    assert "the Graphviz program 'dot' is not on PATH" in capsys.readouterr().err
    assert Path("picture.dot").is_file()


def test_parts_shows_the_balanced_cuts_beside_the_even_ones(capsys: pytest.CaptureFixture[str]) -> None:
    model = "models_of_mine.py:with_args"
    text = answered(capsys, "parts", model, "--into", "2", "--balance", "parameters")
    assert "balanced by parameters" in text
    assert "even in ops" in text
    assert "1F1B" in text
    assert len(found(capsys, "parts", model, "--into", "2")["layouts"]) == 2


def test_profile_writes_a_chart_or_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    model = "models_of_mine.py:with_args"
    assert "2 cuts, 2 of them safe; cut:1 is marked" in answered(capsys, "profile", model, "--split", "1")
    assert Path("frontier_profile.svg").read_text().startswith("<svg")
    given = ["--measure", "--places", "2", "--iterations", "1", "--out", "page.html"]
    assert found(capsys, "profile", model, *given)["path"] == "page.html"
    assert "def suffix(B" in Path("page.html").read_text()


def test_bench_times_model_and_split_and_says_what_one_process_is_worth(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["bench", "models_of_mine.py:with_args", "--rounds", "2", "--iterations", "2", "--seconds", "1"]
    text = answered(capsys, *given)
    assert "nothing is claimed within that. This is one process" in text
    assert re.search(r"split at \S+, generated_eager", text)
    data = found(capsys, *given)
    assert [r["what"] for r in data["rows"]][:2] == ["model, eager", "model, eager, again"]
    row = data["rows"][2]
    assert row["median"] > 0
    assert row["preparation"] > 0
    assert (row["break_even"] is None) == row["never"] or row["words"] == "no difference shown"
    low, high = row["interval"]
    assert low <= row["ratio"] <= high
    assert data["rounds"] >= 2


def test_an_interval_of_ratios_holds_its_median_as_often_as_it_says() -> None:
    draw = random.Random(0)
    held = 0
    for _ in range(400):
        sample = [math.exp(draw.gauss(0.0, 0.3)) for _ in range(15)]  # of a median of 1
        found = ratio(sample, [1.0] * 15)
        held += found.low <= 1.0 <= found.high
    assert 0.93 <= held / 400 <= 1.0
    assert ratio([3.0], [2.0]) == Ratio(1.5, 1.5, 1.5)


def test_within_the_noise_of_the_model_against_itself_nothing_is_claimed() -> None:
    assert [Ratio(0.72, 0.6, 0.9).verdict(floor) for floor in (0.02, 0.1, 0.3)] == ["faster", "", ""]
    assert [Ratio(1.4, 1.2, 1.9).verdict(floor) for floor in (0.02, 0.3)] == ["slower", ""]


def test_rounds_go_on_while_an_interval_is_wide_and_no_longer_than_allowed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr("ariadne.cli.bench.time.perf_counter", lambda: float(next(clock)))
    line = ("bench", "models_of_mine.py:with_args", "--rounds", "3", "--iterations", "1", "--seconds", "30")
    monkeypatch.setattr("ariadne.cli.bench.NARROW", math.inf)
    assert found(capsys, *line)["rounds"] == 3
    monkeypatch.setattr("ariadne.cli.bench.NARROW", -1.0)
    assert 3 < found(capsys, *line)["rounds"] <= 30


def test_bench_leaves_out_what_the_compiler_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **given: Any) -> Any:
        raise CompileError("no compiler here")

    monkeypatch.setattr("ariadne.cli.bench.measure_split", refused)
    data = found(capsys, "bench", "models_of_mine.py:with_args", "--rounds", "1", "--iterations", "1", "--seconds", "1")
    assert data["rows"][2]["failed"] == "CompileError: no compiler here"
    assert data["rows"][2]["median"] is None


def test_break_even_is_cost_over_saving_or_never() -> None:
    assert break_even(2.0, 0.5) == 4
    assert break_even(-1.0, 0.5) == 0
    assert break_even(2.0, 0.0) is None
    assert break_even(2.0, -0.5) is None


def test_doctor_reports_and_tries(capsys: pytest.CaptureFixture[str]) -> None:
    data = found(capsys, "doctor")
    states = {row["what"]: row["state"] for row in data["rows"]}
    assert states["torch"] == states["split and train"] == "ok"
    assert states["compile"] == "not tried"
    assert data["failed"] == []


def test_doctor_names_what_a_missing_package_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ariadne.cli.doctor._version", lambda name: None)
    assert ("pyzmq", "none", "optional, for two machines") in [*doctor._packages()]


@pytest.mark.parametrize(
    ("version", "state", "words"), [(len, "ok", "after a write"), (None, "slower", "compares everything")]
)
def test_doctor_says_whether_each_call_compares_everything(
    version: Any, state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ariadne.cli.doctor.VERSION", version)
    _, found, detail = next(row for row in doctor._torch() if row[0] == "guards")
    assert found == state
    assert words in detail


def test_doctor_fails_where_a_needed_thing_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> str:
        raise OSError("c++: command not found")

    monkeypatch.setattr("ariadne.cli.doctor._compiles", fails)
    text = answered(capsys, "doctor", "--compile", status=1)
    assert "OSError: c++: command not found" in text
    assert text.endswith("ariadne does not work here: compile\n")


@pytest.mark.compiler
def test_doctor_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    data = found(capsys, "doctor", "--compile")
    assert {row["what"]: row["state"] for row in data["rows"]}["compile"] == "ok"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_that_the_shell_takes(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = answered(capsys, "completion", shell)
    assert "check" in script
    assert "dynamic-batch" in script
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        (["ch"], {"check"}),
        (["cuts", "--so"], {"--sort"}),
        (["cuts", "x", "--sort", "b"], {"bytes"}),
        (["completion", "f"], {"fish"}),
    ],
)
def test_bash_completes(typed: list[str], wanted: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    if not shutil.which("bash"):
        pytest.skip("there is no bash")
    script = answered(capsys, "completion", "bash")
    words = " ".join(map(shlex.quote, ["ariadne", *typed]))
    ask = f"{script}\nCOMP_WORDS=({words}); COMP_CWORD={len(typed)}; _ariadne; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "--norc"], input=ask, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == wanted


# --- around it --------------------------------------------------------------------------------------------------------


def test_the_script_and_the_module_are_the_same_and_help_says_what_statuses_mean() -> None:
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert script == {"ariadne": "ariadne.cli:main"}
    code = (
        "import ariadne, sys, runpy\n"
        "assert not {m for m in sys.modules if m.startswith(('ariadne.cli', 'ariadne.check.model', 'ariadne.check.twins'))}\n"
        "sys.argv = ['ariadne', '--help']\n"
        "runpy.run_module('ariadne', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: ariadne " in done.stdout
    assert "exit status:" in done.stdout
    assert re.search(r"^  3 +the model can't be made or run", done.stdout, re.MULTILINE)


def test_every_line_of_the_page_is_one_that_the_parser_takes() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    root = parser()
    (commands,) = (a for a in root._actions if hasattr(a, "choices") and isinstance(a.choices, dict))
    lines = [line.removeprefix("$ ") for line in re.findall(r"^(?:\$ )?ariadne .*$", page, re.MULTILINE)]
    shown = {root.parse_args(shlex.split(line, comments=True)[1:]).command for line in lines if "--help" not in line}
    assert shown == set(commands.choices)
    assert all(f"## `ariadne {name}" in page for name in commands.choices)


def test_tables_and_sizes_read_well() -> None:
    assert table(["name", "n"], [("a", 1), ("bcd", 20_000)]) == "name       n\na          1\nbcd   20,000"
    assert [size(n) for n in (12, 2048, 3 * 2**20, 5 * 2**30)] == ["12 B", "2.05 kB", "3.15 MB", "5.37 GB"]
