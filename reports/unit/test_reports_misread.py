"""What a reader must not be led to believe: by an old excuse, a broken run, a good figure of wrong outputs, a chosen batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.findings import starts, versus_each
from benchmarks.records import read
from benchmarks.variants import EAGER
from conformance.suite.statuses import Status
from reports import charts, runs
from reports.build import build
from reports.document import Report, Table
from reports.unit import report_kit as kit
from reports.unit.report_kit import card, rounds, table, write_cases, write_samples

MODEL, OTHER = "nn/mlp10x64", "toys/residual"
CASE = f"forward/{MODEL}/cut=q50,bs=1,mode=eval,backend=generated"
REFUSED = "debug/toys/branch_on_data/cut=q50,bs=3,mode=eval"


def page(tmp_path: Path, samples: list[dict[str, Any]]) -> Report:
    return build([write_samples(tmp_path / "run", samples)], None, tmp_path / "out")


# --- the suite


@pytest.mark.parametrize(
    ("status", "reason", "outcome", "tone"),
    [
        (Status.UNSUPPORTED, "WitnessError: it branches", "1 expected not to be, 0 unexpected", "good"),
        (Status.UNSUPPORTED, "CaptureError: another thing", "0 expected not to be, 1 unexpected", "warn"),
        (Status.PASS, "", "0 expected not to be, 1 unexpected", "warn"),
    ],
)
def test_an_excuse_holds_for_its_own_status_and_words_only(
    tmp_path: Path, status: Status, reason: str, outcome: str, tone: str
) -> None:
    run = write_cases(tmp_path / "run", {CASE: (Status.PASS, ""), REFUSED: (status, reason)})
    kit.write_suite(run, [CASE, REFUSED], REFUSED, says="it branches")
    found = build([run], None, tmp_path / "out")
    assert card(found, "Equality")[1].startswith(f"0 fail, {outcome}")
    assert card(found, "Equality")[2] == tone
    if tone == "warn":
        (row,) = table(found, "equality", "Every case that failed or was not expected")
        assert row["expected, since"].startswith("not so: unsupported was expected, it branches")


def test_results_of_two_codes_are_refused(tmp_path: Path) -> None:
    run = write_cases(tmp_path, {CASE: (Status.PASS, "")})
    there = kit.environment(sources="bbbbbbbbbbbb", target="ariadne")
    line = json.loads((run / "conformance.jsonl").read_text().splitlines()[1])
    other = [json.dumps(there.record()), json.dumps({**line, "case": REFUSED, "environment": there.id})]
    (run / "conformance-2.jsonl").write_text("\n".join(other) + "\n")
    with pytest.raises(
        ValueError, match=r"different code can't stand side by side: sources aaaaaaaaaaaa and bbbbbbbbbbbb"
    ):
        runs.read([run])


def test_a_part_of_the_selftest_or_an_unsound_one_is_not_green(tmp_path: Path) -> None:
    run = kit.write_counts(tmp_path / "run", killed=1, mutants=1)
    line = json.loads((run / "selftest.jsonl").read_text())
    for more, tone, words in (
        ({"of": 85}, "warn", "only 1 of 85 bugs were planted"),
        ({"of": 1, "unsound": [{"case": CASE}]}, "bad", "1 case failed without any bug"),
        ({"of": 1, "unsound": []}, "good", "10 of 10 rules of the verdict fire"),
    ):
        (run / "selftest.jsonl").write_text(json.dumps(line | more) + "\n")
        found = card(build([run], None, tmp_path / "out"), "Planted bugs")
        assert (found[2], words in found[1]) == (tone, True)


def test_random_programs_that_ran_twice_count_once(tmp_path: Path) -> None:
    run = kit.write_counts(tmp_path / "run", failures=1)
    mended = json.loads((run / "fuzz.jsonl").read_text()) | {"failures": 0}
    with (run / "fuzz.jsonl").open("a") as file:
        file.write(json.dumps(mended) + "\n")
    assert card(build([run], None, tmp_path / "out"), "Random programs")[0] == "200 run, 0 failed"


def test_what_failed_in_one_folder_is_not_hidden_by_another(tmp_path: Path) -> None:
    one, two = kit.write_counts(tmp_path / "one", killed=80, failures=1), kit.write_counts(tmp_path / "two")
    for folder, failed in ((one, True), (two, False)):
        (folder / "steps.jsonl").write_text(json.dumps({"step": "speeds", "failed": failed}) + "\n")
    for folders in ([one, two], [two, one]):
        found = build(folders, None, tmp_path / "out")
        assert found.cards[0].value == "1 of 2 steps failed"
        assert card(found, "Random programs")[0] == "400 run, 1 failed"
        assert card(found, "Planted bugs")[0] == "80 of 82"


def test_a_step_that_failed_or_never_ended_is_the_first_card(tmp_path: Path) -> None:
    run = write_cases(tmp_path / "run", {CASE: (Status.PASS, "")})
    steps = [("suite", True), ("suite", False), ("speeds", True)]
    (run / "steps.jsonl").write_text("".join(json.dumps({"step": s, "failed": f}) + "\n" for s, f in steps))
    found = build([run], None, tmp_path / "out").cards[0]
    assert (found.title, found.value, found.tone) == ("This run is not whole", "1 of 2 steps failed", "bad")
    assert found.detail.startswith("speeds:")
    (run / "steps.jsonl").write_text(json.dumps({"step": "suite", "failed": False}) + "\n")
    assert build([run], None, tmp_path / "out").cards[0].title.startswith("Equality")
    (run / "steps.jsonl").write_text(json.dumps({"step": "suite"}) + "\n")
    with pytest.raises(ValueError, match=r"steps\.jsonl:1: expected 'failed' to be bool, found no such field"):
        runs.read([run])


# --- speeds


def off(samples: list[dict[str, Any]], variant: str) -> list[dict[str, Any]]:
    """The samples, the outputs of one variant off from the model's by a tenth."""
    return [s | {"strayed": 0.1} if s["variant"] == variant else s for s in samples]


def test_a_variant_with_wrong_outputs_is_nowhere_faster_and_never_pays(tmp_path: Path) -> None:
    cost = {("compiled", "cold"): (10.0, 0.5), ("torch.compile", "cold"): (10.0, 0.5)}
    samples = off(rounds("inference", MODEL, 1, {"compiled": 0.5, "torch.compile": 0.5}), "compiled")
    found = page(tmp_path, samples + kit.starts(MODEL, cost))
    words = {r["variant"]: r["verdict"] for r in table(found, "speed", "Every pair")}
    assert (words["compiled"], words["torch.compile"]) == ("faster, but off by 1.0e-01", "faster")
    paid = {r["variant"]: r["paid back after"] for r in table(found, "break-even", "Verdicts")}
    assert paid["compiled"] == "not shown (its outputs are not the model's)"
    assert paid["torch.compile"].startswith("between")
    assert card(found, "Has it paid?")[0] == "1 of 2 shown to"
    assert card(found, "Compiled split over the model")[2] == "warn"
    (section,) = (s for s in found.sections if s.name == "speed")
    rows = [row for b in section.blocks if isinstance(b, Table) for row in b.rows if row[2].text == "compiled"]
    rows += [row for b in section.blocks if isinstance(b, Table) for row in b.rows if row[3].text == "compiled"]
    assert len(rows) == 2  # in the means and among the pairs
    assert all(cell.tone != "good" for row in rows for cell in row)
    before = write_samples(tmp_path / "before", rounds("inference", MODEL, 1, {"compiled": 0.7}))
    again = build([tmp_path / "run"], before, tmp_path / "out")
    (row,) = (r for r in table(again, "earlier", "Speeds and costs, changed") if "compiled · over" in r["what"])
    assert (row["class"], row["change, or why"]) == ("regressed", "its outputs are off from the model's now")


def test_a_card_is_of_the_smallest_batch_whatever_it_came_to(tmp_path: Path) -> None:
    good = rounds("inference", MODEL, 4, {"generated": 0.8})
    found = page(tmp_path / "one", rounds("inference", MODEL, 1, {"generated": "failed: no"}) + good)
    value, detail, tone = card(found, "Split over the model, eager")
    assert (value, tone) == ("failed on all 1 model", "bad")
    assert "batch 4: 0.8" in detail
    found = page(
        tmp_path / "two",
        rounds("inference", MODEL, 1, {"generated": 0.8}) + rounds("inference", MODEL, 4, {"generated": 1.3}),
    )
    value, detail, tone = card(found, "Split over the model, eager")
    assert float(value.split()[0]) == pytest.approx(0.8, rel=0.02)
    assert tone == "warn"
    assert "batch 4: 1.3" in detail
    assert detail.endswith("slower")


def test_training_has_a_card(tmp_path: Path) -> None:
    found = page(tmp_path, rounds("training", MODEL, 1, {"generated": 1.4}))
    value, detail, tone = card(found, "Training, split over the model")
    assert value.startswith("1.4")
    assert (detail.split(";")[0], tone) == ("slower", "bad")
    assert card(found, "Split over the model, eager")[0] == "Not measured"


def test_a_reader_of_one_model_finds_the_compiled_split_over_torch_compile(tmp_path: Path) -> None:
    ratios = {"compiled": 0.6, "torch.compile": 0.8}
    samples = rounds("inference", MODEL, 1, ratios) + rounds("training", OTHER, 1, ratios)
    samples += rounds("inference", OTHER, 1, {"compiled": "failed: no", "torch.compile": 0.8})
    found = page(tmp_path, samples)
    words = {
        r["model"]: (r["ratio (95 %)"].split()[:1], r["verdict"])
        for r in table(found, "speed", "One variant over another, by model")
    }
    assert float(words[MODEL][0][0]) == pytest.approx(0.75, rel=0.02)
    assert words[MODEL][1] == "faster"
    assert words[OTHER] == ([], "compiled: failed: no")
    (row,) = table(found, "training", "One variant over another, by model")
    assert row["variants"] == "compiled over torch.compile"
    value, detail, _ = card(found, "Compiled split over torch.compile")
    assert float(value.split()[0]) == pytest.approx(0.75, rel=0.02)
    assert "1 of 2 models" in detail


def test_two_variants_of_other_processes_have_no_ratio(tmp_path: Path) -> None:
    samples = [s | {"token": "one"} for s in rounds("inference", MODEL, 1, {"compiled": 0.6})]
    samples += [
        s | {"token": "two"} for s in rounds("inference", MODEL, 1, {"torch.compile": 0.8}) if s["variant"] != EAGER
    ]
    records = read(write_samples(tmp_path, samples) / "benchmarks.jsonl")
    (found,) = versus_each(records, "compiled", "torch.compile")
    assert (found.against_model, found.failure) == (None, "compiled: not measured in the same process as torch.compile")


def test_what_is_compiled_after_the_first_call_has_a_card(tmp_path: Path) -> None:
    some = kit.starts(MODEL, {("compiled", "cold"): (10.0, 0.5)})
    title = "Compiled again after the first call"
    assert card(page(tmp_path / "none", some), title)[::2] == ("0 graphs", "good")
    for s in some:
        if s["variant"] == "compiled" and s["process"] == 3:
            s["graphs"] = [0, 0, 2, 2, 4]
    assert card(page(tmp_path / "some", some), title)[::2] == ("2 graphs", "bad")
    assert card(page(tmp_path / "other", rounds("inference", MODEL, 1, {"generated": 0.9})), title)[0] == "Not measured"


def test_kept_packages_have_a_card(tmp_path: Path) -> None:
    costs = {("ahead of time", "cold"): (20.0, 0.3), ("ahead of time", "warm"): (1.0, 0.3)}
    samples = kit.starts(MODEL, costs, pace=1e-6)
    value, detail, tone = card(page(tmp_path / "one", samples), "Loading kept packages")
    assert float(value.split()[0]) == pytest.approx(0.05, rel=0.02)
    assert "1 of 1 models, 5 pairs of processes" in detail
    assert tone == ""
    samples += [s | {"model": OTHER, "status": "failed", "reason": "no"} for s in samples if s["cache"] == "warm"]
    assert card(page(tmp_path / "two", samples), "Loading kept packages")[2] == "warn"


# --- the cost at the start


def test_a_single_process_is_no_word_against_compiling(tmp_path: Path) -> None:
    samples = kit.starts(MODEL, {("compiled", "cold"): (10.0, 0.5)}, processes=1)
    value, detail, tone = card(page(tmp_path, samples), "Has it paid?")
    assert (value, tone) == ("not judged", "quiet")
    assert detail == "cold cache: 0 paid, 0 not shown, 0 never, 1 not judged; a verdict takes 5 processes of each"
    (row,) = table(page(tmp_path, samples), "break-even", "Verdicts")
    assert row["paid back after"] == row["in eager seconds"] == "not judged (1 of at least 5 processes)"


def test_a_cost_counts_the_processes_that_have_one(tmp_path: Path) -> None:
    samples = kit.starts(MODEL, {("compiled", "cold"): (10.0, 0.5)})
    kept = ("job", "task", "device", "model", "batch", "process", "variant", "cache")
    some = [
        {**{k: s[k] for k in kept}, "status": "failed", "reason": "no"}
        if s["variant"] == EAGER and s["process"] >= 3 else s
        for s in samples
    ]  # fmt: skip
    (found,) = (
        s for s in starts(read(write_samples(tmp_path / "run", some) / "benchmarks.jsonl")) if s.variant == "compiled"
    )
    assert (found.processes, found.paired) == (5, 3)
    told = build([tmp_path / "run"], None, tmp_path / "out")
    (row,) = (r for r in table(told, "start", "Costs at the start") if r["variant"] == "compiled")
    assert row["processes"] == "3 of 5 for X"
    (pair,) = (
        r
        for r in table(
            build([tmp_path / "run"], tmp_path / "run", tmp_path / "again"), "earlier", "Speeds and costs, the rest"
        )
        if "compiled" in r["what"]
    )
    assert (pair["class"], pair["change, or why"]) == ("noise", "3 of at least 5 processes")


def test_without_a_start_of_the_model_the_variant_is_still_listed(tmp_path: Path) -> None:
    samples = [s for s in kit.starts(MODEL, {("compiled", "cold"): (10.0, 0.5)}) if s["variant"] != EAGER]
    (row,) = table(page(tmp_path, samples), "break-even", "Verdicts")
    assert row["cost X (95 %)"] == "not known: no start of the model"


# --- CUDA, earlier runs, charts, folders


def test_cuda_that_was_only_cut_is_measured_in_part(tmp_path: Path) -> None:
    there = kit.environment(device="cuda", gpu="a large one")
    cuts = [s | {"device": "cuda"} for s in kit.cuts(MODEL)]
    found = build([write_samples(tmp_path / "one", cuts, "cuts.jsonl", there)], None, tmp_path / "out")
    assert card(found, "CUDA") == ("measured in part", "a large one; no speed of a split or compiled model", "warn")
    half = rounds("inference", MODEL, 1, {"generated": 0.5, "compiled": "failed: no"}, device="cuda")
    found = build([write_samples(tmp_path / "two", half, here=there)], None, tmp_path / "out")
    assert card(found, "CUDA") == ("measured", "a large one; 5 of 20 samples failed", "warn")


def test_a_case_that_fails_in_another_way_is_told_and_the_conditions_too(tmp_path: Path) -> None:
    def run(name: str, status: Status, torch: str) -> Path:
        folder = kit.write_suite(write_cases(tmp_path / name, {CASE: (status, "no")}), [CASE], REFUSED)
        lines = [json.loads(line) for line in (folder / "conformance.jsonl").read_text().splitlines()]
        here = kit.environment(torch=torch, target="ariadne")
        written = [here.record(), *({**line, "environment": here.id} for line in lines[1:])]
        (folder / "conformance.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
        return folder

    now, before = run("now", Status.CRASH, "2.15.0"), run("before", Status.FAIL_ACCURACY, "2.14.0")
    found = build([now], before, tmp_path / "out")
    (row,) = table(found, "earlier", "Cases of the suite, the rest")
    assert (row["class"], row["before"], row["now"]) == ("not comparable", "fail_accuracy", "crash")
    (section,) = (s for s in found.sections if s.name == "earlier")
    assert "Between the cases of the two runs differ: torch 2.14.0 → 2.15.0." in str(section.blocks)


def test_labels_keep_the_state_of_the_cache_and_whiskers_from_below_zero_stay() -> None:
    cold, warm = (charts._label(0, f"compiled reduce-overhead, {c}") for c in ("cold", "warm"))
    assert cold.endswith("…, cold")
    assert warm.endswith("…, warm")
    assert len(cold) == len(warm) == 4 + charts.LONGEST
    plain, bounded = (
        charts.dots([charts.Dot("a", 2.0, low, high)], (1.0, 4.0), "x")
        for low, high in ((float("-inf"), float("inf")), (-1.0, 3.0))
    )
    assert bounded.count("<line") > plain.count("<line")


def test_a_page_that_is_no_report_is_not_overwritten(tmp_path: Path) -> None:
    run = write_cases(tmp_path / "run", {CASE: (Status.PASS, "")})
    site = tmp_path / "site"
    (site / "data").mkdir(parents=True)
    (site / "index.html").write_text("<title>a site</title>")
    (site / "data" / "kept").write_text("kept")
    with pytest.raises(ValueError, match="holds no report to replace"):
        build([run], None, site)
    assert (site / "data" / "kept").read_text() == "kept"
    build([run], None, tmp_path / "out")
    build([run], None, tmp_path / "out")


def test_the_line_that_makes_the_page_again_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, before = kit.whole_run(tmp_path / "run"), kit.whole_run(tmp_path / "before")
    found = build([run], before, tmp_path / "out")
    lines = [
        line for s in found.sections for b in s.blocks for line in getattr(b, "lines", ()) if " -m reports " in line
    ]
    assert lines == ["python -m reports data/1 --baseline data/baseline --output again"]
    monkeypatch.chdir(tmp_path / "out")
    build([Path("data/1")], Path("data/baseline"), Path("again"))
    for name in ("index.html", "summary.md"):
        assert (tmp_path / "out" / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
