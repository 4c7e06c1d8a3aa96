"""What a report may not claim: without noise to hold it against, of wrong outputs, of survivors, of another run than was meant."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import jobs, variants
from benchmarks.findings import means, recompilations, speeds, starts, versus
from benchmarks.records import Records, read
from benchmarks.runner import ROOT, Options, Runner, units
from benchmarks.summary import text
from benchmarks.unit.test_benchmark_jobs import PROCESS, built, job
from benchmarks.variants import EAGER, NOISE, REFERENCE
from reports.__main__ import main
from reports.build import build
from reports.document import Report, Table
from reports.unit import report_kit as kit
from reports.unit.report_kit import card, rounds, table, write_samples

__all__ = ["built"]  # a fixture
MODEL, OTHER = "nn/mlp10x64", "toys/residual"


def run(folder: Path, samples: list[dict[str, Any]]) -> Records:
    return read(write_samples(folder, samples) / "benchmarks.jsonl")


def sample_of(folder: Path) -> dict[str, Any]:
    """What all samples of a file say of where and when."""
    sample = json.loads((folder / "benchmarks.jsonl").read_text().splitlines()[1])
    return {name: sample[name] for name in ("environment", "date", "load", "commit") if name in sample}


def page(tmp_path: Path, samples: list[dict[str, Any]]) -> Report:
    return build([write_samples(tmp_path / "run", samples)], None, tmp_path / "out")


# --- noise, wrong outputs, survivors


@pytest.mark.parametrize("processes", [1, 5])
def test_a_ratio_without_noise_from_its_own_processes_is_no_figure(tmp_path: Path, processes: int) -> None:
    samples = rounds("inference", MODEL, 1, {"generated": 0.9})
    lacking = [s for s in samples if s["variant"] == NOISE and s["process"] < processes]
    for s in lacking:
        s |= {"status": "failed", "reason": "out of memory"}
        del s["seconds"]
    found = page(tmp_path, samples)
    value, _, tone = card(found, "Split over the model, eager")
    assert (value, tone) == ("failed on all 1 model", "bad")
    (row,) = (r for r in table(found, "speed", "Every pair") if r["variant"] == "generated")
    assert row["over model(x) (95 %)"] == ""
    assert row["verdict"] == f"no eager-against-eager pair in {processes} of 5 processes to hold it against"


def test_a_variant_with_other_outputs_has_no_speed(tmp_path: Path) -> None:
    samples = rounds("inference", MODEL, 1, {"ahead of time": 0.5, "torch.compile": 0.8})
    for s in samples:
        s["strayed"] = "inf" if s["variant"] == "ahead of time" else 0.0
    found = page(tmp_path, samples)
    assert card(found, "Ahead of time over torch.compile")[::2] == ("failed on all 1 model", "bad")
    (mean,) = (m for m in means(speeds(run(tmp_path / "again", samples))) if m.variant == "ahead of time")
    assert "unlike the model's" in mean.geomean.failures[MODEL]


@pytest.mark.parametrize(("own", "tone"), [(0.0, "warn"), (0.5, "good")])
def test_a_variant_whose_outputs_are_off_is_named_unless_the_models_are_too(
    tmp_path: Path, own: float, tone: str
) -> None:
    samples = rounds("inference", MODEL, 1, {"compiled": 0.5}) + rounds("inference", OTHER, 1, {"compiled": 0.5})
    for s in samples:
        if s["model"] == OTHER:
            s["strayed"] = {"compiled": 0.1, NOISE: own}.get(s["variant"], 0.0)
    value, detail, found = card(page(tmp_path, samples), "Compiled split over the model")
    assert value.startswith("0.499")
    assert found == tone
    assert (f"but off from the model on {OTHER}" in detail) == (tone == "warn")
    records = run(tmp_path / "again", samples)
    assert (f"compiled on {OTHER} at batch 1 is off from the model" in text(records)) == (tone == "warn")
    samples = [s | {"variant": "generated"} for s in samples if s["variant"] == "compiled"] + samples
    (mean,) = versus(run(tmp_path / "both", samples), "generated", "compiled")
    assert mean.off == ((OTHER,) if tone == "warn" else ())


def test_what_failed_on_most_models_is_not_good(tmp_path: Path) -> None:
    samples = rounds("inference", MODEL, 1, {"compiled": 0.7})
    samples += rounds("inference", OTHER, 1, {"compiled": "crashed: exit status -11"})
    _, detail, tone = card(page(tmp_path, samples), "Compiled split over the model")
    assert tone == "warn"
    assert "faster, but failed on 1 model;" in detail


# --- costs at the start


def test_a_cost_is_beyond_the_models_own_or_is_none(tmp_path: Path) -> None:
    samples = kit.starts(MODEL, {("ahead of time", "cold"): (10.0, 0.3)}, processes=6)
    with_imports = next(s for s in starts(run(tmp_path / "all", samples)) if s.variant == "ahead of time")
    assert with_imports.cost is not None
    assert with_imports.cost.estimate == pytest.approx(12.0, abs=0.5)  # ariadne's import is part of it, torch's is not
    few = [s for s in samples if s["variant"] != EAGER or s["process"] == 0]
    (one,) = (s for s in starts(run(tmp_path / "few", few)) if s.variant == "ahead of time")
    assert one.calls is not None
    assert one.calls.words() == "not shown (1 of at least 5 processes)"
    none = [s for s in samples if s["variant"] != EAGER]
    (alone,) = starts(run(tmp_path / "none", none))
    assert (alone.cost, alone.calls, alone.failure) == (None, None, None)
    (row,) = table(page(tmp_path, none), "start", "Costs at the start")
    assert row["cost X (95 %)"] == "not known: no start of the model"


def test_the_models_own_start_is_measured_where_any_is() -> None:
    options = Options((MODEL,), (1,), ("ahead of time",), processes=1, start_processes=2)
    begun = [u.variants[0] for u in units(options) if u.job == "start"]
    assert sorted(begun) == sorted([EAGER, "ahead of time"] * 2)


def test_without_a_compiler_what_takes_one_is_not_applicable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants.shutil, "which", lambda name: None)
    monkeypatch.setenv("CXX", "ccache my-own-compiler")
    for name in ("torch.compile", "compiled", "ahead of time"):
        assert variants.find(name).refusal("inference", "cpu") == f"{name} takes a C++ compiler; there is no ccache"
    assert variants.find("generated").refusal("inference", "cpu") is None


# --- failures of one variant, at one batch


def test_what_raises_at_one_batch_is_tried_at_the_next(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    build = jobs._build

    def picky(name: str, subject: Any, batch: int) -> Any:
        step = build(name, subject, batch)

        def call(args: Any, kwargs: Any) -> Any:
            if name in ("generated", EAGER) and args[0].shape[0] == 1:
                raise ValueError("more than one, please")
            return step(args, kwargs)

        return call

    monkeypatch.setattr(jobs, "_build", picky)
    wanted = job("rounds", EAGER, NOISE, "generated") | {"batches": [1, 3]}
    found = {(r["variant"], r["batch"]): r["status"] for r in jobs.side_by_side(wanted, PROCESS)}
    assert {found[name, 1] for name in (EAGER, NOISE, "generated")} == {"failed"}
    assert {found[name, 3] for name in (EAGER, NOISE, "generated")} == {"ok"}


def test_what_raises_in_the_rounds_leaves_the_others_as_they_are(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = jobs._build

    def late(name: str, subject: Any, batch: int) -> Any:
        step, calls = build(name, subject, batch), [0]

        def call(args: Any, kwargs: Any) -> Any:
            calls[0] += 1
            if name == "compiled" and calls[0] > 4:  # one to compare, two to settle, one round
                raise RuntimeError("out of memory")
            return step(args, kwargs)

        return call

    monkeypatch.setattr(jobs, "_build", late)
    found = {r["variant"]: r for r in jobs.side_by_side(job("rounds", EAGER, NOISE, "compiled", "generated"), PROCESS)}
    assert {name: r["status"] for name, r in found.items()} == {
        EAGER: "ok", NOISE: "ok", "compiled": "failed", "generated": "ok",
    }  # fmt: skip
    assert found["compiled"]["reason"] == "RuntimeError: out of memory"
    assert {len(found[name]["seconds"]) for name in (EAGER, NOISE, "generated")} == {3}


def test_what_died_at_one_batch_was_not_tried_at_another_and_is_tried_again_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options((MODEL,), (1, 4), ("generated",), processes=1, start_processes=1, start_batches=(4,), pairs=3)
    asked: list[tuple[str, Any]] = []
    dies = [True]

    def start(self: Runner, wanted: dict[str, Any], records: Path, environ: dict[str, str]) -> tuple[str, str]:
        asked.append((wanted["job"], wanted["variant"] if wanted["job"] == "start" else tuple(wanted["variants"])))
        if wanted["job"] == "start" and wanted["variant"] == "generated" and dies[0]:
            return "timed out", "after 1 s"
        head = {name: wanted[name] for name in ("job", "task", "device", "model", "process")} | {"status": "ok"}
        some = [{**head, "variant": v, "batch": b} for b in wanted["batches"] for v in wanted["variants"]]
        if wanted["job"] == "start":
            some = [s | {"cache": wanted["cache"]} for s in some]
        records.write_text("".join(json.dumps(s) + "\n" for s in some))
        return "crashed", "exit status 0"

    monkeypatch.setattr(Runner, "_start", start)
    output = tmp_path / "r.jsonl"
    Runner(options, output, lambda _: None).run()
    found = {(s["batch"], s["variant"]): (s["status"], s["reason"]) for s in read(output).of("rounds") if "reason" in s}
    died = "left out: its own process timed out: after 1 s"
    assert found == {
        (1, "generated"): ("absent", f"not tried at this batch, for at batch 4 it was {died}"),
        (4, "generated"): ("failed", died),
    }
    asked.clear()
    Runner(options, output, lambda _: None).run()
    assert asked == [("start", "generated")]  # dies again, so that the rounds stay without it
    asked.clear()
    dies[0] = False
    Runner(options, output, lambda _: None).run()
    assert asked == [("start", "generated"), ("rounds", (EAGER, NOISE, "generated"))]
    assert {s["status"] for s in read(output).of("rounds")} == {"ok"}
    asked.clear()
    Runner(options, output, lambda _: None).run()
    assert not asked


def test_what_was_measured_beside_the_reference_is_kept_where_the_next_shell_names_none(tmp_path: Path) -> None:
    options = Options((MODEL,), (1,), (REFERENCE,), processes=1, start_processes=0)
    output = tmp_path / "r.jsonl"
    ran: list[str] = []
    Runner(options, output, ran.append).run()
    records = read(output)
    (sample,) = records.of("reference")
    assert sample["status"] == "absent"
    measured = {k: v for k, v in sample.items() if k != "reason"}
    measured |= {
        "status": "ok",
        "seconds": [1.0],
        "strayed": 0.0,
        "graphs": 0,
        "graphs_in_rounds": 0,
        "reference": "0.1",
    }
    with output.open("a") as file:
        file.write(json.dumps(measured) + "\n")
    ran.clear()
    Runner(options, output, ran.append).run()
    assert not [line for line in ran if "reference" in line]
    (sample,) = read(output).of("reference")
    assert sample["status"] == "ok"


# --- graphs, earlier runs, commands


def test_graphs_compiled_at_each_batch_are_on_the_page(tmp_path: Path) -> None:
    samples = []
    for batch, graphs in ((1, 1), (2, 1), (8, 0)):
        some = rounds("inference", MODEL, batch, {"torch.compile": 0.9, "compiled": 0.8})
        for s in some:
            s["graphs"] = {"torch.compile": graphs, "compiled": 2 if batch == 1 else 0}.get(s["variant"], 0)
            s["graphs_in_rounds"] = 3 * (batch == 8)
        samples += some
    found = page(tmp_path, samples)
    told = {r["variant"]: (r["batch 1"], r["batch 2"], r["batch 8"]) for r in table(found, "speed", "Graphs compiled")}
    assert told == {"torch.compile": ("1", "1 (1 again)", "0"), "compiled": ("2", "0", "0")}
    (section,) = (s for s in found.sections if s.name == "speed")
    assert "batch 8, cpu: compiled up to 3 graphs in the rounds of a process" in str(section.blocks)


def test_what_a_process_compiles_for_its_first_batch_is_no_recompilation(tmp_path: Path) -> None:
    samples = []
    for token, batch in (("one", 4), ("two", 1), ("two", 2)):  # measured in two runs, each from a batch of its own
        some = rounds("inference", MODEL, batch, {"compiled": 0.8})
        samples += [s | {"token": f"{token} {s['process']}", "graphs": 2 * (s["variant"] == "compiled")} for s in some]
    kept = write_samples(tmp_path / "both", samples)
    later = [
        s | {"token": "three", "graphs": 2} for b in (1, 4) for s in rounds("inference", MODEL, b, {"compiled": 0.8})
    ]
    with (kept / "benchmarks.jsonl").open("a") as file:  # one process ran all of it anew
        file.writelines(json.dumps({**sample_of(kept), **s}) + "\n" for s in later if s["variant"] == "compiled")
    (found,) = (found for _, _, found in recompilations(read(kept / "benchmarks.jsonl")))
    assert (found[1].again, found[4].again) == (0, 2)
    told = {b: (c.graphs, c.again) for _, _, found in recompilations(run(tmp_path, samples)) for b, c in found.items()}
    assert told == {4: (2, 0), 1: (2, 0), 2: (2, 2)}
    assert "batch 4: 2, batch 1: 2, batch 2: 2 (2 again)" in text(run(tmp_path, samples))
    (row,) = next(
        b.rows
        for s in page(tmp_path, samples).sections
        for b in s.blocks
        if isinstance(b, Table) and b.title.startswith("Graphs compiled")
    )
    assert [(cell.text, cell.tone) for cell in row[3:]] == [("2", ""), ("2", ""), ("2 (2 again)", "warn")]


def test_loading_is_held_against_compiling_in_pairs_of_processes(tmp_path: Path) -> None:
    samples = []
    for model, warm in ((MODEL, 2.0), (OTHER, 0.5)):
        costs = {("ahead of time", "cold"): (20.0, 0.3), ("ahead of time", "warm"): (warm, 0.3)}
        samples += kit.starts(model, costs, pace=1e-6)
    told = {
        r["model"]: [
            float(r[f"{what}, warm over cold (95 %)"].split()[0])
            for what in ("first call", "preparation and first call")
        ]
        for r in table(page(tmp_path, samples), "start", "Loading over compiling")
    }
    assert told[MODEL] == pytest.approx([0.1, 0.1], rel=0.02)
    assert told[OTHER] == pytest.approx([0.025, 0.025], rel=0.02)
    assert told["geometric mean of 2"] == pytest.approx([0.05, 0.05], rel=0.02)
    for s in samples:
        s["process"] += 10 * (s["cache"] == "warm")  # of a process whose cold one is not there
    again = page(tmp_path / "apart", samples)
    assert "Loading over compiling" not in str(again.sections)


def test_what_lies_beside_the_raw_results_is_told_by_the_command_and_is_no_part_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_samples(tmp_path / "run", rounds("inference", MODEL, 1, {"generated": 0.9}))
    pages = []
    for note in (False, True):
        if note:
            (folder / "notes.md").write_text("mine")
        assert main([str(folder), "--output", str(tmp_path / "out")]) == 0
        assert ("left aside, for it holds no raw results: 1/notes.md" in capsys.readouterr().out) == note
        pages.append((tmp_path / "out" / "index.html").read_bytes())
    assert pages[0] == pages[1]


def test_what_a_variant_imports_is_not_imported_before_its_clock_starts() -> None:
    code = "import sys, benchmarks.jobs, benchmarks.competitors; print(*(m for m in sys.modules if m in sys.argv))"
    late = ["torch._dynamo", "torch._inductor", "torch.distributed.pipelining", "ariadne"]
    done = subprocess.run([sys.executable, "-c", code, *late], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def test_of_two_environments_the_newer_is_compared_whatever_its_files_name(tmp_path: Path) -> None:
    older, newer = (replace(kit.environment(sources=name), date="2026-11-19T08:00:00Z") for name in ("one", "two"))
    for folder, ratio in ((tmp_path / "before", 0.8), (tmp_path / "now", 0.5)):
        for name, here, day, mine in (
            ("benchmarks.jsonl", newer, 22, ratio),
            ("benchmarks-2.jsonl", older, 21, 0.8),  # stands before the other
        ):
            samples = [
                s | {"date": f"2026-11-{day}T08:00:00Z"} for s in rounds("inference", MODEL, 1, {"generated": mine})
            ]
            write_samples(folder, samples, name, here)
    found = build([tmp_path / "now"], tmp_path / "before", tmp_path / "out")
    assert card(found, "Against the earlier run")[1].startswith("0 regressed, 1 improved")


def test_a_report_given_in_place_of_its_raw_results_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_samples(tmp_path / "run", rounds("inference", MODEL, 1, {"generated": 0.9}))
    assert main([str(tmp_path / "run")]) == 0
    made = tmp_path / "run" / "report"
    assert (made / "index.html").exists()
    for given in ([str(made)], [str(tmp_path / "run"), "--baseline", str(made)]):
        assert main([*given, "--output", str(tmp_path / "other")]) == 2
        assert f"found a report; what it was made from lies in {made / 'data' / '1'}" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "run"), "--baseline", str(tmp_path / "empty")]) == 2
    assert "found a folder without raw results" in capsys.readouterr().err
