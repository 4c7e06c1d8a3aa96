"""What a report may conclude: of few processes, of failures, of mixed runs, and of an earlier run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.findings import means, speeds, starts
from benchmarks.variants import EAGER
from conformance.suite.statuses import Status
from reports import boundary, charts, earlier, payback, runs
from reports.build import build
from reports.speed import mean_tone, mean_words
from reports.unit import report_kit as kit
from reports.unit.report_kit import card, rounds, write_cases, write_samples

MODEL = "nn/mlp10x64"
CASE = "forward/nn/mlp10x64/cut=q50,bs={},mode=eval,backend=generated"
GOOD, BAD, LEFT = (Status.PASS, ""), (Status.FAIL_RNG, "elsewhere"), (Status.NOT_SELECTED, "the time was up")


def suite(folder: Path, *outcomes: tuple[Status, str]) -> Path:
    """A run whose cases of batch 1, 2, … came to these."""
    cases = {CASE.format(i): outcome for i, outcome in enumerate(outcomes, start=1)}
    return kit.write_suite(write_cases(folder, cases), [*cases], CASE.format(99))


# --- few processes, failures


@pytest.mark.parametrize(
    ("processes", "tone", "words"),
    [(5, "good", "faster"), (4, "quiet", "no difference shown (4 of at least 5 processes)")],
)
def test_a_mean_of_fewer_than_five_processes_shows_no_difference(
    tmp_path: Path, processes: int, tone: str, words: str
) -> None:
    samples = rounds("inference", MODEL, 1, {"generated": 0.5}) + rounds(
        "inference", "toys/residual", 1, {"generated": 0.5}, processes=processes
    )
    run = runs.read([write_samples(tmp_path, samples)])
    (mean,) = means(speeds(run.records))
    assert mean.geomean.processes == processes
    assert (mean_tone(mean, 0.01), mean_words(mean, 0.01)) == (tone, words)


def test_a_mean_takes_the_same_processes_of_all_models(tmp_path: Path) -> None:
    one = rounds("inference", MODEL, 1, {"generated": 0.5}, processes=6)
    other = rounds("inference", "toys/residual", 1, {"generated": 0.5}, processes=7)
    samples = [s for s in one if s["process"] != 5] + [s for s in other if s["process"] >= 2]
    (mean,) = means(speeds(runs.read([write_samples(tmp_path, samples)]).records))
    assert mean.geomean.processes == 3  # 2 to 4


def test_what_failed_everywhere_is_said_to_have_failed(tmp_path: Path) -> None:
    failures = {"generated": "failed: no", "compiled": "crashed: no", "ahead of time": "not applicable: no"}
    samples = [s for name in (MODEL, "toys/residual") for s in rounds("inference", name, 1, failures)]
    head = {"job": "start", "task": "inference", "device": "cpu", "model": MODEL, "batch": 1, "process": 0}
    for cache in ("cold", "warm"):
        samples.append({**head, "variant": "compiled", "cache": cache, "status": "timed out", "reason": "after 1 s"})
    found = build([write_samples(tmp_path / "run", samples)], None, tmp_path / "out")
    assert card(found, "Split over the model")[::2] == ("failed on all 2 models", "bad")
    assert card(found, "Compiled split over the model")[::2] == ("failed on all 2 models", "bad")
    assert card(found, "Ahead of time")[0] == "Not measured"
    assert card(found, "Has it paid?")[::2] == ("failed on all 2", "bad")
    (section,) = (s for s in found.sections if s.name == "break-even")
    assert "timed out: after 1 s" in str(section.blocks)


def test_failures_count_among_those_that_might_have_paid(tmp_path: Path) -> None:
    run = kit.whole_run(tmp_path / "run")
    head = {"job": "start", "task": "inference", "device": "cpu", "model": MODEL, "batch": 1, "process": 0}
    failed = {**head, "variant": "torch.compile", "cache": "cold", "status": "failed", "reason": "no"}
    absent = {**head, "variant": "reference", "cache": "none", "status": "absent", "reason": "no"}
    write_samples(run, [failed, absent], "benchmarks-2.jsonl")
    value, detail, _ = card(build([run], None, tmp_path / "out"), "Has it paid?")
    assert value == "1 of 4 shown to"
    assert "cold cache: 1 paid, 0 not shown, 0 never, 1 failed" in detail


def test_cuda_is_measured_where_a_sample_came_from_it(tmp_path: Path) -> None:
    there = kit.environment(device="cuda", gpu="a large one")
    failed = rounds("inference", MODEL, 1, {EAGER: "failed: no", "model again": "failed: no"}, device="cuda")
    found = build([write_samples(tmp_path / "one", failed, here=there)], None, tmp_path / "out")
    assert card(found, "CUDA")[::2] == ("failed on all 10 samples", "bad")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "benchmarks.jsonl").write_text(json.dumps(there.record()) + "\n")
    assert card(build([tmp_path / "two"], None, tmp_path / "out"), "CUDA")[0] == "not measured"


def test_every_line_of_a_chart_crosses_the_models_where_it_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {("compiled", "cold"): (10.0, 0.5), ("compiled", "warm"): (4.0, 0.5)}
    samples = kit.starts(MODEL, costs)
    for s in samples:
        if s["cache"] == "warm":  # taken while the machine was slower by a third
            s["seconds"] = {name: [1.3 * t for t in times] for name, times in s["seconds"].items()}
    found = starts(runs.read([write_samples(tmp_path, samples)]).records)
    drawn: list[charts.Line] = []

    def lines(some: list[charts.Line], *_: Any, **__: Any) -> str:
        drawn.extend(some)
        return '<svg width="9" height="9"></svg>'

    monkeypatch.setattr(charts, "lines", lines)
    payback._figure(0, [s for s in found if s.calls], {"compiled": "blue"})
    model, *others = drawn
    assert {line.label for line in others} == {"compiled, cold", "compiled, warm"}
    for line in others:
        (start,) = (s for s in found if s.cache in line.label and s.variant == "compiled")
        assert start.cost is not None
        assert start.saving is not None
        crossing = start.cost.estimate / start.saving.estimate
        whole = dict(model.points)
        assert all((seconds < whole[n]) == (n > crossing) for n, seconds in line.points)


# --- mixed runs


def test_results_of_two_environments_are_refused(tmp_path: Path) -> None:
    run = suite(tmp_path / "run", GOOD)
    lines = (run / "conformance.jsonl").read_text().splitlines()
    there = kit.environment(torch="2.14.0")
    other = [json.dumps(there.record()), json.dumps(json.loads(lines[1]) | {"environment": there.id})]
    (run / "conformance-2.jsonl").write_text("\n".join(other) + "\n")
    with pytest.raises(ValueError, match="Give files of one environment"):
        runs.read([run])


@pytest.mark.parametrize("names", [("cuts.jsonl", "cuts-2.jsonl"), ("cuts-2.jsonl", "cuts.jsonl")])
def test_of_two_profiles_of_a_model_the_newer_counts(tmp_path: Path, names: tuple[str, str]) -> None:
    for name, count, day in zip(names, (8, 6), (20, 21), strict=True):
        samples = [s | {"date": f"2026-11-{day}T10:00:00+00:00"} for s in kit.cuts(MODEL, count)]
        write_samples(tmp_path, samples, name, kit.environment(sources=f"{day}" * 6))
    found = boundary.cuts(runs.read([tmp_path]).records)
    assert [c.cut for c in found] == [1, 2, 3, 4, 5, 6]


def test_of_two_files_the_newer_sample_counts_whatever_their_names(tmp_path: Path) -> None:
    for name, ratio, day in (("benchmarks.jsonl", 0.5, 19), ("benchmarks-2.jsonl", 0.8, 21)):
        samples = rounds("inference", MODEL, 1, {"generated": ratio})
        write_samples(tmp_path, [s | {"date": f"2026-11-{day}T10:00:00+00:00"} for s in samples], name)
    (mean,) = means(speeds(runs.read([tmp_path]).records))
    assert mean.geomean.ratio is not None
    assert mean.geomean.ratio.estimate == pytest.approx(0.8, rel=0.02)


# --- an earlier run


def test_a_case_without_a_result_vanished_and_one_that_has_a_result_again_is_new(tmp_path: Path) -> None:
    now = runs.read([suite(tmp_path / "now", LEFT, GOOD, LEFT, BAD)])
    old = runs.read([suite(tmp_path / "old", GOOD, LEFT, BAD, GOOD)])
    found = {pair.what: pair.verdict for pair in earlier.case_pairs(now, old)}
    assert found[CASE.format(2)] == "new"
    assert {found[CASE.format(i)] for i in (1, 3)} == {"vanished"}
    assert found[CASE.format(4)] == "regressed"


def test_the_card_of_an_earlier_run_counts_cases_and_is_red_for_them(tmp_path: Path) -> None:
    now, old = suite(tmp_path / "now", BAD, BAD, GOOD), suite(tmp_path / "old", GOOD, GOOD, BAD)
    found = card(build([now], old, tmp_path / "out"), "Against")
    assert found[0] == "0 pairs, 3 changed cases"
    assert "; cases: 2 regressed, 1 improved" in found[1]
    assert found[2] == "bad"
    assert card(build([now], now, tmp_path / "same"), "Against")[::2] == ("0 pairs", "")


@pytest.mark.parametrize(
    ("pace", "verdict", "why"),
    [
        (0.010, "regressed", "+1"),
        (0.013, "noise", ", within the change of the model's own pace of 30"),
    ],
)
def test_a_cost_that_grew_with_the_machines_pace_is_noise(tmp_path: Path, pace: float, verdict: str, why: str) -> None:
    cost = {("compiled", "cold"): (11.5, 0.3)}
    now = write_samples(tmp_path / "now", kit.starts(MODEL, cost, pace=pace))
    old = write_samples(tmp_path / "old", kit.starts(MODEL, {("compiled", "cold"): (10.0, 0.3)}))
    (pair,) = earlier.pairs(runs.read([now]), runs.read([old]))
    assert pair.verdict == verdict
    assert why in pair.why
