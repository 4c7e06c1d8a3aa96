"""The benchmarks' runs: failures are results, a run can be continued, and what it found is what is said."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import competitors, environment, splits
from benchmarks.__main__ import main
from benchmarks.findings import means, recompilations, speeds, starts
from benchmarks.records import Record, Records, append, key, read
from benchmarks.runner import Options, Runner, reference_folder, units
from benchmarks.summary import text
from benchmarks.variants import ALL, EAGER, NOISE, REFERENCE, SHORT, find
from conformance.suite.environment import Environment
from reports.unit import report_kit as kit

MODEL = "nn/mlp10x64"
ROOT = Path(__file__).parents[2]


# --- units and the runner ---------------------------------------------------------------------------------------------

OPTIONS = Options((MODEL,), (1, 4), (EAGER, "torch.compile", "generated"), processes=2, start_processes=1, pairs=8)


def test_the_units_are_starts_cold_then_warm_and_rounds_process_by_process() -> None:
    found = list(units(OPTIONS))
    assert [(u.job, u.process) for u in found] == [*[("start", 0)] * 6, ("rounds", 0), ("rounds", 1)]
    assert {(u.variants[0], u.batches, u.caches) for u in found[:6]} == {
        (name, (batch,), ("cold", "warm") if name == "torch.compile" else ("none",))
        for name in OPTIONS.variants
        for batch in (1, 4)
    }
    assert found[6].variants == (EAGER, NOISE, "torch.compile", "generated")
    assert found[6].batches == (1, 4)


def test_what_does_not_apply_or_is_absent_is_a_unit_too() -> None:
    options = replace(OPTIONS, variants=(EAGER, SHORT["reduce-overhead"], REFERENCE), processes=1, start_processes=0)
    rounds, cuda, reference = units(options)
    assert rounds.variants == (EAGER, NOISE)
    assert cuda.refusal == "torch.compile reduce-overhead is for CUDA; the device is cpu"
    assert reference.refusal == "no environment with ariadne-split was given (--reference)"
    (_, there) = units(replace(options, variants=(EAGER, REFERENCE), reference="somewhere"))
    assert (there.job, there.variants, there.refusal) == ("reference", (EAGER, NOISE, REFERENCE), None)


def times(job: dict[str, Any], variant: str, batch: int) -> list[float]:
    """Made-up samples: a compiled call takes half of the model's time, a generated one 0.8 of it."""
    rng = random.Random(f"{job['process']} {variant} {batch}")
    pace = {"torch.compile": 0.5, "generated": 0.8}.get(variant, 1.0)
    return [pace * rng.uniform(0.0099, 0.0101) for _ in range(job["pairs"])]


def answer(job: dict[str, Any]) -> Iterator[Record]:
    """What a child would write."""
    base = {name: job[name] for name in ("job", "task", "device", "model", "process")}
    if job["job"] == "start":
        name, batch = job["variant"], job["batches"][0]
        first = {"cold": 20.0, "warm": 3.0, "none": 0.02}[job["cache"]]
        seconds = {n: times(job, n, batch) for n in (name, EAGER)}
        fast = seconds[name][0]
        yield {
            **base, "variant": name, "batch": batch, "cache": job["cache"], "status": "ok",
            "imports": {"torch": 2.0}, "prepare_seconds": 0.1, "calls_seconds": [first, fast, fast],
            "graphs": [0, 0, 1, 1, 1], "graphs_in_rounds": 0, "seconds": seconds, "rss_bytes": {"called": 2**20},
            "tensor_peak_bytes": 1024,
        }  # fmt: skip
        return
    for batch in job["batches"]:
        for name in job["variants"]:
            yield {
                **base, "variant": name, "batch": batch, "status": "ok", "strayed": 0.0, "graphs": int("compile" in name),
                "graphs_in_rounds": 0, "seconds": times(job, name, batch),
            }  # fmt: skip


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The jobs that were started; each is answered at once, without a process."""
    jobs: list[dict[str, Any]] = []

    def start(self: Runner, job: dict[str, Any], records: Path, environ: dict[str, str]) -> tuple[str, str]:
        jobs.append({**job, "inductor": environ["TORCHINDUCTOR_CACHE_DIR"]})
        if job["variant"] == "debug" and job["job"] == "start":
            return "timed out", "after 1 s"
        token = {"token": f"{len(jobs)}"}
        records.write_text("".join(json.dumps(r | token) + "\n" for r in answer(job)))
        return "crashed", "exit status 0: no message"

    def here(device: str, options: dict[str, Any], variables: dict[str, str]) -> Environment:
        facts = {f"option {name}": str(value) for name, value in options.items()}
        return Environment("2026-11-20T09:00:00+00:00", kit.FACTS | facts)

    monkeypatch.setattr(Runner, "_start", start)
    monkeypatch.setattr(environment, "here", here)
    return jobs


def test_a_run_is_continued_where_it_stopped(started: list[dict[str, Any]], tmp_path: Path) -> None:
    output, said = tmp_path / "results.jsonl", []
    assert Runner(OPTIONS, output, said.append).run() == 0
    assert len(started) == 10  # torch.compile starts twice at either batch
    assert any(
        re.match(r"\[8/8 +\d+ s\] rounds inference nn/mlp10x64, batch 1, 4, 4 variants, process 1", s) for s in said
    )
    lines = output.read_text().splitlines()
    Runner(OPTIONS, output, said.append).run()
    assert len(started) == 10
    output.write_text("\n".join(lines[:-8]) + "\n" + lines[-1][:50])  # killed in the middle of its last job
    Runner(OPTIONS, output, said.append).run()
    assert [j["job"] for j in started[10:]] == ["rounds"]
    assert len(read(output).samples) == len(lines) - 1
    Runner(replace(OPTIONS, processes=3), output, said.append).run()
    assert [j["process"] for j in started[11:]] == [2]
    Runner(replace(OPTIONS, pairs=9), output, said.append).run()  # what means another thing is measured anew
    assert len(started) == 22


def test_compiled_by_default_is_held_against_torch_compile_and_keeps_what_was_compiled(
    started: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    options = ["--models", MODEL, "--processes", "5", "--pairs", "9", "--cache", str(cache)]
    assert main(["compiled", *options, "--output", str(tmp_path / "r.jsonl")]) == 0
    assert {j["inductor"] for j in started} == {str(cache / "kept-rounds" / "inductor")}
    assert [j["variants"] for j in started] == [[EAGER, NOISE, "torch.compile", "compiled by default"]] * 5
    out = capsys.readouterr().out
    for other in ("torch.compile", "the faster of model and torch.compile"):
        row = rf"\| inference \| 1 +\| compiled by default over {other} +\| (2\.0|1\.9)\d+ +\| .* \| 1 of 1 "
        assert re.search(row, out)


def test_cold_has_a_cache_of_its_own_and_warm_has_that_of_cold(started: list[dict[str, Any]], tmp_path: Path) -> None:
    Runner(replace(OPTIONS, batches=(1,), start_processes=2), tmp_path / "r.jsonl", lambda _: None).run()
    caches = [(j["process"], j["cache"], j["inductor"]) for j in started if j["variant"] == "torch.compile"]
    assert [c[:2] for c in caches] == [(0, "cold"), (0, "warm"), (1, "cold"), (1, "warm")]
    assert caches[0][2] == caches[1][2] != caches[2][2] == caches[3][2]


def test_a_variant_whose_own_process_died_is_left_out_of_the_rounds(
    started: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(find.__globals__["BY_NAME"], "debug", replace(find("debug"), start=True))
    options = replace(OPTIONS, variants=(EAGER, "debug", "generated"), batches=(1,), processes=1)
    output = tmp_path / "r.jsonl"
    assert Runner(options, output, lambda _: None).run() == 2
    assert started[-1]["variants"] == [EAGER, NOISE, "generated"]
    (found,) = (s for s in read(output).of("rounds") if s["variant"] == "debug")
    assert (found["status"], found["reason"]) == ("failed", "left out: its own process timed out: after 1 s")


def test_after_a_cold_process_that_came_to_nothing_no_warm_one_runs(
    started: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(find.__globals__["BY_NAME"], "debug", replace(find("debug"), start=True, caches=True))
    output = tmp_path / "r.jsonl"
    Runner(replace(OPTIONS, variants=(EAGER, "debug"), batches=(1,), processes=1), output, lambda _: None).run()
    assert [j["cache"] for j in started if j["variant"] == "debug"] == ["cold"]
    found = {s["cache"]: (s["status"], s["reason"]) for s in read(output).of("start") if s["variant"] == "debug"}
    assert found == {
        "cold": ("timed out", "after 1 s"),
        "warm": ("failed", "left out: the cold process timed out: after 1 s"),
    }


def test_variants_that_were_measured_are_measured_again_beside_the_models_new_samples(
    started: list[dict[str, Any]], tmp_path: Path
) -> None:
    output = tmp_path / "r.jsonl"
    options = replace(OPTIONS, processes=1, start_processes=0)
    Runner(options, output, lambda _: None).run()
    Runner(replace(options, variants=(EAGER, "debug"), batches=(4,)), output, lambda _: None).run()
    assert started[-1]["variants"] == [EAGER, NOISE, "debug", "torch.compile", "generated"]
    tokens = {(s["batch"], s["variant"]): s["token"] for s in read(output).of("rounds")}
    assert {token for (batch, _), token in tokens.items() if batch == 1} == {"1"}
    assert {token for (batch, _), token in tokens.items() if batch == 4} == {"2"}


def test_a_run_stops_where_the_code_changes_and_keeps_what_was_measured_before(
    started: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, output = environment.here, tmp_path / "r.jsonl"

    def here(*given: Any) -> Environment:
        found = before(*given)
        return found if len(started) < 2 else Environment(found.date, found.facts | {"sources": "b" * 12})

    monkeypatch.setattr(environment, "here", here)
    options = replace(OPTIONS, variants=(EAGER,), batches=(1,), processes=3, start_processes=0)
    with pytest.raises(
        ValueError, match=r"changed while this was measured: sources a{12} → b{12}\. The last job is left out"
    ):
        Runner(options, output, lambda _: None).run()
    assert len(started) == 2
    assert {s["process"] for s in read(output).of("rounds")} == {0}


def test_the_load_is_taken_before_a_job_and_the_references_version_is_kept(
    started: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "moment", lambda: {"load": [len(started), 0, 0]})
    (tmp_path / "folder" / "ariadne").mkdir(parents=True)
    there, output = tmp_path / "folder" / "ariadne_split-0.1.2.dist-info", tmp_path / "r.jsonl"
    there.mkdir()
    options = replace(OPTIONS, variants=(EAGER, REFERENCE), processes=1, start_processes=0, batches=(1,))
    options = replace(options, reference=str(tmp_path / "folder"))

    def found() -> list[tuple[str, int, str | None]]:
        Runner(options, output, lambda _: None).run()
        return [(s["job"], s["load"][0], s.get("reference")) for s in read(output).samples.values()]

    rounds, reference = [("rounds", 0, None)] * 2, ("reference", 1, "0.1.2")
    assert found() == [*rounds, *[reference] * 3]
    there.rename(there.with_name("ariadne_split-0.1.3.dist-info"))
    assert found() == [*rounds, *[("reference", 2, "0.1.3")] * 3]  # another version is measured anew
    assert found() == [*rounds, *[("reference", 2, "0.1.3")] * 3]


def test_the_nox_session_goes_on_after_a_failure_and_fails_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nox = pytest.importorskip("nox")
    monkeypatch.chdir(ROOT)
    noxfile: Any = SimpleNamespace(**runpy.run_path(str(ROOT / "noxfile.py")))
    ran, said = [], []

    def run(*command: str, env: dict[str, str]) -> None:
        ran.append(command[2])
        if command[2] == "benchmarks":
            raise nox.command.CommandFailed("exit status 1")

    def error(words: str) -> None:
        raise RuntimeError(words)

    session = SimpleNamespace(
        run=run, log=said.append, error=error, install=lambda *_, **__: None, posargs=[], env_dir=tmp_path
    )
    with pytest.raises(RuntimeError, match="not as expected: speeds and costs"):
        noxfile.measure(session, tmp_path / "run", "cpu")
    assert ran == ["benchmarks", "benchmarks.cut_profile", "pytest"]
    steps = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert {s["step"]: s["failed"] for s in steps} == {
        "speeds and costs": True,
        "profiles along the cut": False,
        "suites of one process": False,
    }
    assert [s["failed"] for s in steps] == [True, True, False, True, False]  # each counts as failed while it runs
    assert said[0].startswith("for a page: nox -s report -- ")


def test_a_child_that_dies_or_hangs_is_a_result(tmp_path: Path) -> None:
    def samples(model: str, timeout: float) -> list[tuple[str, str]]:
        options = Options((model,), (1,), (EAGER,), processes=1, start_processes=0, pairs=1, settle=1, timeout=timeout)
        output = tmp_path / f"{timeout}.jsonl"
        assert Runner(options, output, lambda _: None).run() == 2
        return [(s["status"], s["reason"]) for s in read(output).of("rounds")]

    assert samples(MODEL, 0.05) == [("timed out", "after 0.05 s")] * 2
    ((status, reason), _) = samples("nn/no_such", 250.0)
    assert status == "crashed"
    assert reason.startswith("exit status 1: model_zoo.errors.UnknownNameError")


@pytest.mark.compiler
@pytest.mark.slow
def test_a_run_in_processes_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results.jsonl"
    variants = ["model", "generated", "reference", "reduce-overhead"]
    options = ["--batches", "1", "2", "--start-batches", "1", "--processes", "1", "--pairs", "3", "--settle", "2"]
    assert main(["run", "--models", MODEL, "--variants", *variants, *options, "--output", str(output)]) == 0
    captured = capsys.readouterr()
    assert "[2/5" in captured.err
    assert "no difference shown (1 of at least 5 processes)" in captured.out
    records = read(output)
    (start,) = (s for s in records.of("start") if s["variant"] == "generated")
    assert start["imports"].keys() == {"torch", "ariadne"}
    assert min(start["imports"]["torch"], start["prepare_seconds"]) > 0
    assert (len(start["calls_seconds"]), start["graphs"]) == (2, [0, 0, 0, 0])
    assert {name: len(t) for name, t in start["seconds"].items()} == {"generated": 3, EAGER: 3, NOISE: 3}
    assert start["token"]
    rss = [start["rss_bytes"][k] for k in ("python", "imported", "ready", "prepared", "called")]
    assert rss == sorted(rss)
    assert 1e6 < rss[0] < rss[1]
    assert start["tensor_peak_bytes"] > 0
    rounds = {(s["variant"], s["batch"]): s for s in records.of("rounds")}
    assert {name for name, _ in rounds} == {EAGER, NOISE, "generated", SHORT["reduce-overhead"]}
    assert rounds["generated", 2]["strayed"] == 0
    assert rounds[SHORT["reduce-overhead"], 1]["status"] == "not applicable"
    assert {s["status"] for s in records.of("reference")} == {"absent"}
    facts = next(iter(records.environments.values())).facts
    assert {"torch", "cpu", "cores", "compiler", "kernel", "sources", "option pairs", "option threads"} <= facts.keys()


def test_cuda_is_refused_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for option in (["--require-cuda"], ["--device", "cuda"]):
        with pytest.raises(SystemExit, match="2"):
            main(["run", *option, "--output", str(tmp_path / "r.jsonl")])
        assert "torch finds no CUDA device; measure with --device cpu" in capsys.readouterr().err
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--models", "nn/mlp10x65"], "no model named 'nn/mlp10x65' in the zoo"),
        (["--variants", "fast"], "no variant named 'fast'; there are model, compile, "),
        (["--models", MODEL, "--reference", "/nowhere/at/all"], "No such file"),
        (["--batches", "0"], "at least 1; found 0"),
    ],
)
def test_what_can_not_be_meant_is_refused(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", *options, "--output", str(tmp_path / "r.jsonl")])
    assert words in capsys.readouterr().err


def test_the_reference_is_a_folder_or_a_python_that_has_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not hold the package ariadne-split; make it with pip install --target"):
        reference_folder(str(tmp_path))
    (tmp_path / "ariadne").mkdir()
    (tmp_path / "ariadne_split-0.1.2.dist-info").mkdir()
    assert reference_folder(str(tmp_path)) == tmp_path.resolve()


def test_every_variant_has_a_builder_that_is_there() -> None:
    modules = {"benchmarks.competitors": competitors, "benchmarks.splits": splits}
    for variant in ALL:
        module, _, function = variant.builder.partition(":")
        assert callable(getattr(modules[module], function))
    assert {find(short).name for short in SHORT} == {v.name for v in ALL}


# --- records, findings, tables ----------------------------------------------------------------------------------------


def test_records_are_read_back_and_broken_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    here = environment.here("cpu", {"pairs": 3})
    sample = {
        "environment": here.id,
        "job": "rounds",
        "model": "m",
        "variant": "v",
        "status": "ok",
        "seconds": [1.0, 2.0],
    }
    append(path, [here, sample])
    append(path, [sample | {"seconds": [3.0]}])
    assert read(path).samples == {key(sample): sample | {"seconds": [3.0]}}
    for line, words in [
        (json.dumps(sample | {"status": "fine"}), "status 'fine' is none of ok, failed"),
        (json.dumps(sample | {"environment": "x"}), "its environment 'x' does not stand before it"),
        ("[1]", "no record"),
    ]:
        broken = tmp_path / "broken.jsonl"
        broken.write_text(path.read_text() + line + "\n")
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            read(broken)
        assert f"{broken}:4: " in str(error.value)


@pytest.fixture
def measured(started: list[dict[str, Any]], tmp_path: Path) -> Records:
    """Five processes of made-up samples."""
    output = tmp_path / "r.jsonl"
    Runner(replace(OPTIONS, processes=5, start_processes=5, pairs=20), output, lambda _: None).run()
    return read(output)


def test_speeds_are_judged_against_the_noise_of_the_same_processes(measured: Records) -> None:
    found = {(s.variant, s.place.batch): s for s in speeds(measured)}
    compiled = found["torch.compile", 4].against_model
    assert compiled is not None
    assert compiled.ratio.estimate == pytest.approx(0.5, rel=0.01)
    assert (compiled.verdict, compiled.processes) == ("faster", 5)
    noise = found[NOISE, 4].against_model
    assert noise is not None
    assert noise.verdict == "no difference shown"
    assert found[EAGER, 1].against_model is None
    assert (found[EAGER, 1].p90 is not None, found[EAGER, 1].p99) == (True, None)  # 100 samples
    by_batch = {name: {b: c.graphs for b, c in found.items()} for _, name, found in recompilations(measured)}
    assert by_batch == {"torch.compile": {1: 1, 4: 1}}


def test_break_even_tells_cold_from_warm(measured: Records) -> None:
    found = {(s.variant, s.place.batch, s.cache): s for s in starts(measured)}
    cold, warm = (found["torch.compile", 1, cache] for cache in ("cold", "warm"))
    assert cold.calls is not None
    assert warm.calls is not None
    # prepared in 0.1 s; the first call, less a steady one; less the model's own preparation and first call
    assert cold.calls.low <= (0.1 + 20 - 0.005 - 0.11) / 0.005 <= cold.calls.high
    assert warm.calls.low <= (0.1 + 3 - 0.005 - 0.11) / 0.005 <= warm.calls.high
    assert cold.seconds is not None
    assert cold.seconds.low <= 40 <= cold.seconds.high
    assert cold.balance[0][1].high < 0 < cold.balance[-1][1].low
    assert (cold.compilations, cold.recompilations) == (1, 0)
    assert found[EAGER, 1, "none"].calls is None


def test_a_failure_in_one_process_is_a_failure_and_stands_beside_the_mean(measured: Records) -> None:
    sample = next(s for s in measured.of("rounds") if (s["variant"], s["batch"]) == ("generated", 4))
    rounds = [s for s in measured.of("rounds") if s["batch"] == 4]
    for broken in ("x/other", "x/third"):
        for other in rounds:
            copied = other | {"model": broken}
            if (other["variant"], broken, other["process"]) == ("generated", "x/other", sample["process"]):
                copied |= {"status": "failed", "reason": "CompileError: no"}
            measured.samples[key(copied)] = copied
    found = {(m.variant, m.place.batch): m.geomean for m in means(speeds(measured))}
    generated = found["generated", 4]
    assert (generated.n, generated.total) == (2, 3)
    assert generated.failures == {"x/other": "failed: CompileError: no"}
    assert found["generated", 1].total == 1
    assert "2 of 3" in text(measured)
    assert "x/other: failed: CompileError: no" in text(measured)


def test_the_summary_prints_intervals_and_verdicts(
    measured: Records, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["summary", str(tmp_path / "r.jsonl")]) == 0
    out = capsys.readouterr().out
    row = next(
        line for line in out.splitlines() if re.match(r"\| inference \| nn/mlp10x64 \| 4 +\| torch.compile ", line)
    )
    assert re.search(r"\| 0\.(49|50)\d +\| 0\.(49|50)\d to 0\.50\d +\| \d\.\d% +\| faster", row)
    assert re.search(r"torch.compile \| cold .* \| between 3,9\d\d and 4,0\d\d calls", out)
    assert "option" not in out.splitlines()[0]
    assert text(Records()) == "no samples yet"


# --- the suites of pytest-benchmark -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.variants
def test_the_suites_write_json(tmp_path: Path) -> None:
    output = tmp_path / "suites.json"
    command = [sys.executable, "-m", "pytest", "benchmarks", "-q", "-k", "mlp10x64", f"--benchmark-json={output}"]
    alone = {
        k: v for k, v in os.environ.items() if "XDIST" not in k
    }  # else pytest-benchmark takes itself for one of several
    done = subprocess.run(command, cwd=ROOT, env=alone | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    names = {found["fullname"].partition("[")[0] for found in json.loads(output.read_text())["benchmarks"]}
    assert names == {
        *(f"benchmarks/test_prepare.py::test_{what}" for what in ("prepare", "resplit", "frontiers")),
        "benchmarks/test_inference.py::test_forward",
        *(f"benchmarks/test_training.py::test_{what}" for what in ("step", "part")),
        *(f"benchmarks/test_payload.py::test_{what}" for what in ("to_bytes", "from_bytes")),
    }
