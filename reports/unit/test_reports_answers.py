"""The three answers at the top of a report, and the page over all published runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.suite.statuses import Status
from reports import index
from reports.build import build
from reports.document import Report
from reports.unit.report_kit import rounds, starts, write_cases, write_samples

PUBLISHED = Path(__file__).resolve().parents[1] / "published"
CASE = "forward/{},bs={},mode=eval,backend=generated"
MODEL, TOY = "nn/mlp10x64/cut=q50", "toys/residual/cut=q50"


def answer(report: Report, question: str) -> str:
    """The answer to a question."""
    return next(a.words for a in report.answers if a.question == question)


def made(tmp_path: Path, samples: list[dict[str, object]], status: Status | None = Status.PASS) -> Report:
    """A report of these samples, and of a case of a toy that passes and one of a model that came to this."""
    run = tmp_path / "run"
    if status is not None:
        write_cases(run, {CASE.format(TOY, 1): (Status.PASS, ""), CASE.format(MODEL, 2): (status, "elsewhere")})
    return build([write_samples(run, samples)], None, tmp_path / "out")


@pytest.mark.parametrize(
    ("status", "begins", "passed"),
    [
        (Status.PASS, "Yes, in all that was compared", 2),
        (Status.FAIL_RNG, "No", 1),
        (Status.NOT_SELECTED, "Not shown", 1),
    ],
)
def test_whether_it_is_right_is_what_the_cases_came_to_and_toys_are_told_apart(
    tmp_path: Path, status: Status, begins: str, passed: int
) -> None:
    words = answer(made(tmp_path, rounds("inference", "nn/mlp10x64", 1, {"generated": 0.5}), status), "Is it right?")
    assert words.startswith(begins)
    assert f"in {passed} of 2 checks" in words
    assert "1 of the checks are of toys" in words


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({"generated": 0.5, "compiled": 0.7}, "Of these, the split as plain Python is the fastest here."),
        ({"generated": 0.7, "compiled": 0.5}, "Of these, the split compiled by torch.compile is the fastest here."),
        ({"generated": 2.0}, "the split as plain Python is slower, 2.00x the model's time"),
        (
            {"generated": 1.0},
            "the split as plain Python shows no difference from the model (1.00x; the interval holds 1)",
        ),
        ({"generated": "failed: no"}, "the split as plain Python failed on all 1 model"),
    ],
)
def test_whether_it_is_faster_compares_each_kind_of_split_with_the_model_and_with_the_others(
    tmp_path: Path, times: dict[str, float | str], said: str
) -> None:
    assert said in answer(made(tmp_path, rounds("inference", "nn/mlp10x64", 1, times)), "Is it faster?")


def test_whether_compiling_pays_counts_models_and_calls(tmp_path: Path) -> None:
    samples = rounds("inference", "nn/mlp10x64", 1, {"compiled": 0.5})
    samples += starts("nn/mlp10x64", {("compiled", "cold"): (1.0, 0.5)})
    words = answer(made(tmp_path, samples), "Does compiling pay?")
    assert words.startswith(("Yes, in a process that makes enough calls;", "Not shown."))
    assert "The split compiled by torch.compile: compiled from nothing, " in words
    assert "it has paid on 1 of 1 model after about" in words or "not shown to have paid on 1 model" in words


def test_what_was_not_measured_is_not_answered(tmp_path: Path) -> None:
    report = made(tmp_path, rounds("training", "nn/mlp10x64", 1, {"generated": 0.5}), None)
    for question in ("Is it right?", "Is it faster?", "Does compiling pay?"):
        assert answer(report, question).startswith("Not measured")


def test_the_index_names_every_published_run_newest_first_and_is_current() -> None:
    found = index.published(PUBLISHED)
    assert [p.name for p in found] == sorted((p.name for p in PUBLISHED.iterdir() if p.is_dir()), reverse=True)
    page = (PUBLISHED / "index.html").read_text()
    assert page == index.index_html(found), "stale; run python -m reports --index reports/published"
    for p in found:
        assert f'href="{p.name}/index.html"' in page


@pytest.mark.parametrize("folder", sorted(p for p in PUBLISHED.iterdir() if p.is_dir()), ids=lambda p: p.name)
def test_a_published_page_is_what_its_own_data_give(folder: Path, tmp_path: Path) -> None:
    build([folder / "data/1"], None, tmp_path / "again")
    for name in ("index.html", "summary.md"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), (
            f"{folder.name}/{name} is stale"
        )
