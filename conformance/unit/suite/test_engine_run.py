"""Runs from the command line to the exit status, over fake checks; and what is selected."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.suite import lock, results, run, tiers
from conformance.suite.cases import Case
from conformance.suite.environment import ROOT, Environment, sources
from conformance.suite.run import Options, running_order, select
from conformance.suite.statuses import Status
from conformance.unit.engine_kit import RUNNER

Run = Callable[..., tuple[int, str]]
MODELS = ("nn/a", "nn/b", "toys/c")
CASES = [Case.parse(f"{c}/{model}/bs={bs}") for c in ("fails", "passes") for model in MODELS for bs in (1, 2)]
TIERS = """
[smoke]
minutes = 1
[[smoke.select]]
checks = ["passes"]
models = ["nn/*"]
[[smoke.select]]
models = ["toys/c"]
bs = ["2"]
[limits]
build = { seconds = 30, gib = 4 }
cheap = { seconds = 30, gib = 4 }
medium = { seconds = 30, gib = 4 }
heavy = { seconds = 30, gib = 4 }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "some.lock").write_text(lock.text(CASES))
    (tmp_path / "tiers.toml").write_text(TIERS)
    (tmp_path / "expectations").mkdir()
    return tmp_path


def arguments(folder: Path, *more: str) -> list[str]:
    files = {"lock": "some.lock", "tiers": "tiers.toml", "expectations": "expectations"}
    given = [text for name, file in files.items() for text in (f"--{name}-from", str(folder / file))]
    return [*given, "--runner", RUNNER, "--results", str(folder / "r.jsonl"), *more]


def process(folder: Path, *more: str) -> tuple[int, str]:
    """The command as a user starts it: its exit status and what it prints."""
    command = [sys.executable, "-m", "conformance", *arguments(folder, *more)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def conformance(folder: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The same in this process, which has imported torch already."""

    def run_here(*more: str) -> tuple[int, str]:
        capfd.readouterr()
        code = main(arguments(folder, "--processes", "1", *more))
        found = capfd.readouterr()
        return code, found.out + found.err

    return run_here


def selected(folder: Path, *queries: str, **more: object) -> list[str]:
    options = Options(queries, lock=folder / "some.lock", tiers=folder / "tiers.toml", **more)  # type: ignore[arg-type]
    return [str(case) for case in select(options, lock.read(options.lock))]


def test_a_tier_a_query_a_family_and_a_shard_all_narrow_the_selection(folder: Path) -> None:
    assert len(selected(folder)) == 12
    smoke = ["passes/nn/a/bs=1", "passes/nn/a/bs=2", "passes/nn/b/bs=1", "passes/nn/b/bs=2"]
    assert selected(folder, tier="smoke") == [*smoke, "fails/toys/c/bs=2", "passes/toys/c/bs=2"]
    assert selected(folder, "passes/nn/b*", tier="smoke") == smoke[2:]
    assert selected(folder, "passes/{nn,toys}/*", families=("toys",)) == ["passes/toys/c/bs=1", "passes/toys/c/bs=2"]
    shards = [selected(folder, tier="smoke", shard=(i, 2)) for i in (1, 2)]
    assert sorted(shards[0] + shards[1]) == sorted(selected(folder, tier="smoke"))


def test_a_case_named_in_full_need_not_be_in_the_lock(folder: Path) -> None:
    assert selected(folder, "passes/nn/a/cut=rand:7", "passes/toys/*") == [
        "passes/nn/a/cut=rand:7",
        "passes/toys/c/bs=1",
        "passes/toys/c/bs=2",
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--case", "passes/jax/*"), "the query 'passes/jax/*' means no case"),
        (("--case", "passes/nn"), "not a case"),
        (("--tier", "weekly"), "there is no tier 'weekly'; there are smoke"),
        (("--case", "*", "--family", "jax"), "no cases of jax"),
        (("--tier", "smoke", "--case", "fails/nn/*"), "no case is meant by tier, queries and families together"),
        (("--case", "*", "--update-expectations", "elsewhere.toml"), "is not in"),
    ],
)
def test_a_command_that_can_not_be_meant_exits_with_2(
    folder: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], words: str
) -> None:
    assert main(arguments(folder, *more)) == 2
    assert words in capsys.readouterr().err


def test_without_a_selection_nothing_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments(folder))
    assert "say which cases" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(arguments(folder, "--shard", "3/2"))
    assert "is not I/N" in capsys.readouterr().err


def test_list_prints_the_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(folder, "--list", "--tier", "smoke", "--family", "toys")) == 0
    assert capsys.readouterr().out == "fails/toys/c/bs=2\npasses/toys/c/bs=2\n"


def test_merge_prints_one_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "r.jsonl"
    environment = run.Environment.here("identity", "2026-01-01T00:00:00Z")
    results.append(path, environment)
    assert main(["merge", str(path), str(path)]) == 0
    assert capsys.readouterr().out == results.line(environment) + "\n"


def test_a_run_of_passes_on_two_processes_is_green_and_resumed_at_no_cost(folder: Path, conformance: Run) -> None:
    before = sources(ROOT)
    code, said = process(folder, "--case", "passes/nn/*", "--case", "process/nn/a/bs=9")
    assert code == 0, said
    assert "conformance: 5 pass; 0 problems;" in said
    found = results.read(folder / "r.jsonl")
    assert len(found.by_case) == 5
    assert all(r.status == Status.PASS for r in found.by_case.values())
    code, said = conformance("--case", "passes/nn/*", "--resume", str(folder / "r.jsonl"))
    assert code == 0, said
    if sources(ROOT) != before:
        pytest.skip("somebody edited the code meanwhile, so it is another environment")
    assert "4 cases, 4 of them done before" in said


def test_a_run_with_failures_says_what_and_how_to_repeat_it(folder: Path, conformance: Run) -> None:
    code, said = conformance("--case", "{fails,passes}/nn/a/*", "--case", "exits/nn/a/bs=1")
    assert code == 1
    assert "conformance: 2 pass, 2 fail_accuracy, 1 crash; 3 problems;" in said
    assert "> python -m conformance --case 'fails/nn/a/bs=1'" in said
    assert "> nox -s 'conformance(nn)' -- --case 'exits/nn/a/bs=1'" in said
    assert said.rstrip().endswith("not green")
    code, said = conformance(
        "--case", "{fails,passes}/nn/a/*", "--resume", str(folder / "r.jsonl"),
        "--update-expectations", str(folder / "expectations" / "a.toml"),
    )  # fmt: skip
    assert code == 1, said  # nobody has read the new entries yet
    assert "1 new ones that want a reason" in said
    assert 'query = "fails/nn/a/*"' in (folder / "expectations" / "a.toml").read_text()
    held = (folder / "r.jsonl").read_bytes()
    code, said = conformance("--case", "{fails,passes}/nn/a/*")
    assert code == 2, said
    assert "r.jsonl holds results; go on with them by --resume" in said
    assert (folder / "r.jsonl").read_bytes() == held
    (folder / "r.jsonl").unlink()
    code, said = conformance("--case", "{fails,passes}/nn/a/*")
    assert code == 0, said
    assert "conformance: 2 pass, 2 fail_accuracy; 0 problems;" in said


def test_a_resumed_run_takes_no_older_result_for_one_that_did_not_run(folder: Path, conformance: Run) -> None:
    file = folder / "r.jsonl"
    elsewhere = Environment("2026-01-01T00:00:00Z", {"target": "ariadne", "sources": "older"})
    results.append(file, elsewhere)
    results.append(file, results.Result("naps/nn/a/bs=1", Status.PASS, "", {}, 0.1, elsewhere.id))
    resume = ("--case", "naps/nn/a/bs=1", "--resume", str(file), "--minutes", "0.001")
    code, said = conformance(*resume)
    assert code == 1, said
    assert "no_result: 1" in said
    assert {r.status for r in results.read(file).by_case.values()} <= {Status.PASS, Status.NOT_SELECTED}


def test_shards_are_judged_together_and_a_missing_one_is_missed(
    folder: Path, conformance: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    made = [
        conformance("--tier", "smoke", "--shard", f"{i}/2", "--results", str(folder / f"{i}.jsonl")) for i in (1, 2)
    ]
    assert {code for code, _ in made} == {0, 1}  # fails/toys/c fails
    files = [str(folder / f"{i}.jsonl") for i in (1, 2)]
    hidden = arguments(folder)[:6]
    (folder / "expectations" / "a.toml").write_text(
        '[[expect]]\nquery = "fails/toys/c/bs=2"\nstatus = "fail_accuracy"\nsays = "differ"\n'
        'reason = "it is made to"\nuntil = 2099-01-01\n'
    )
    assert main(["judge", *files, "--tier", "smoke", *hidden]) == 0
    assert "conformance: 5 pass, 1 fail_accuracy; 0 problems" in capfd.readouterr().out
    assert main(["judge", files[0], "--tier", "smoke", *hidden]) == 1
    assert "no_result" in capfd.readouterr().out


def test_a_tier_out_of_time_marks_the_rest_and_is_not_green(folder: Path, conformance: Run) -> None:
    naps = [text for i in range(1, 60) for text in ("--case", f"naps/nn/a/bs={i}")]
    code, said = conformance(*naps, "--minutes", "0.03")
    assert code == 1
    assert "not_selected" in said
    statuses = [r.status for r in results.read(folder / "r.jsonl").by_case.values()]
    assert len(statuses) == 59
    assert set(statuses) <= {Status.PASS, Status.NOT_SELECTED}
    assert statuses[-1] == Status.NOT_SELECTED


def test_the_tiers_of_this_repository_can_be_meant() -> None:
    found, limits = tiers.load()
    assert {name: tier.minutes for name, tier in found.items()} == {"smoke": 12, "full": 60, "nightly": 75}
    assert limits["cheap"].seconds < limits["heavy"].seconds
    known = lock.read()
    for name, tier in found.items():
        for number, selection in enumerate(tier.selections, start=1):
            assert any(map(selection.means, known)), f"table {number} of {name} selects nothing"
        for model in sorted({m for selection in tier.selections for m in selection.models}):
            naming = [dataclasses.replace(s, models=(model,)) for s in tier.selections if model in s.models]
            assert any(s.means(case) for s in naming for case in known), f"{name} selects nothing of {model}"


def test_heavy_models_come_first_and_the_rest_stays_in_order() -> None:
    cases = [
        f"left/{model}/mode=eval" for model in ("nn/mlp10x64", "torchvision/vgg11", "rfdetr/nano", "nn/lstm_classifier")
    ]
    first = [case.partition("/")[2].rpartition("/")[0] for case in running_order([*cases, "left/else/where/mode=eval"])]
    assert first == ["rfdetr/nano", "torchvision/vgg11", "nn/mlp10x64", "nn/lstm_classifier", "else/where"]


def test_cases_that_differ_in_the_cut_alone_run_one_after_another() -> None:
    cases = [
        f"{check}/nn/{model}/cut={cut},bs={bs},mode=eval"
        for model in ("b", "a")
        for check in ("forward", "train")
        for cut in ("q25", "q50")
        for bs in (1, 3)
    ]
    ordered = running_order(cases)
    assert sorted(ordered) == sorted(cases)
    assert [case.partition(",")[0] for case in ordered[:4]] == [
        "forward/nn/b/cut=q25", "forward/nn/b/cut=q50", "forward/nn/b/cut=q25", "forward/nn/b/cut=q50"
    ]  # fmt: skip
    parts = [(model, check) for model in ("b", "a") for check in ("forward", "train")]
    assert [tuple(case.split("/")[2::-2]) for case in ordered[::4]] == parts


def test_a_group_stands_for_its_models_and_an_unknown_one_is_refused(folder: Path) -> None:
    file = folder / "tiers.toml"
    file.write_text(
        TIERS.replace("[smoke]", '[groups]\nsome = ["toys/c"]\n[smoke]', 1).replace('["toys/c"]\nbs', '["@some"]\nbs')
    )
    assert [s.models for s in tiers.load(file)[0]["smoke"].selections] == [("nn/*",), ("toys/c",)]
    file.write_text(TIERS.replace('["toys/c"]\nbs', '["@some"]\nbs'))
    with pytest.raises(ValueError, match=r"smoke: there is no group '@some'; there are \[\]"):
        tiers.load(file)
