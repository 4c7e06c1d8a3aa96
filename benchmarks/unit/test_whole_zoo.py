"""The whole zoo in one figure: what it says of its models, which are profiled, and what is named as the cause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import model_zoo
from benchmarks import parts, whole_zoo
from benchmarks.__main__ import main
from benchmarks.parts import CHECKS, MODEL, OPS, SPLIT, cause
from benchmarks.records import Record, append, read
from benchmarks.runner import Options, Runner
from benchmarks.subject import Subject
from benchmarks.variants import EAGER
from reports import whole_zoo as page
from reports.document import Figures, Prose, Table
from reports.unit import report_kit as kit

RATIOS = {"a/one": 0.55, "a/two": 0.75, "a/three": 0.93, "a/four": 1.3}
WHERE = {MODEL: 100e-6, SPLIT: 130e-6, OPS: 105e-6, CHECKS: 25e-6}


def seconds(**other: float) -> dict[str, list[float]]:
    return {name: [value] * 3 for name, value in (WHERE | other).items()}


def measured(path: Path, *more: Record, processes: int = 5) -> Path:
    here = kit.environment()
    found: list[Record] = []
    for model, ratio in RATIOS.items():
        found += kit.rounds("inference", model, 1, {"generated": ratio}, noise=1e-3, processes=processes)
    for s in found:
        s["token"] = f"{s['model']} {s['process']}"
    append(path, [here, *({"environment": here.id, **kit.MOMENT, **s} for s in (*found, *more))])
    return path


def profiled(model: str, **other: float) -> Record:
    return {"job": "parts", "task": "inference", "device": "cpu", "model": model, "batch": 1, "variant": "generated", "process": 0,
            "status": "ok", "seconds": seconds(**other)}  # fmt: skip


def test_the_figure_the_spread_and_what_is_slow_with_its_cause(tmp_path: Path) -> None:
    records = read(measured(tmp_path / "zoo.jsonl", profiled("a/four")))
    (zoo,) = whole_zoo.zoos(records, least=4)
    expected = (0.55 * 0.75 * 0.93 * 1.3) ** (1 / 4)
    assert zoo.mean.geomean.ratio is not None
    assert zoo.mean.geomean.ratio.estimate == pytest.approx(expected, rel=2e-3)
    assert [n for _, n in zoo.spread()] == [0, 1, 0, 1, 0, 1, 0, 0, 1]
    assert [s.place.model for s in zoo.slow] == ["a/four"]
    text = whole_zoo.text(records, least=4)
    assert f"Geometric mean over 4 of 4 models: {zoo.mean.geomean.ratio.estimate:.3f}" in text
    assert (
        "what is checked at each call: its ops take 105 µs and its checks 25 µs, where the model takes 100 µs" in text
    )
    assert whole_zoo.text(records) == "", "four models are no zoo"


def test_every_model_lies_between_two_edges_and_one_at_an_edge_below_it() -> None:
    place = whole_zoo.Place("e", "cpu", "inference", None, 1)
    speeds = [whole_zoo.Speed(place, "generated", ratios={0: r}) for r in (0.5, 0.501, 1.0, 1.019, 1.0201, 7.0)]
    zoo = whole_zoo.Zoo(place, None, speeds, {})  # type: ignore[arg-type]
    assert zoo.spread() == [("up to 0.5", 1), ("0.5 to 0.6", 1), ("0.6 to 0.7", 0), ("0.7 to 0.8", 0), ("0.8 to 0.9", 0),
                            ("0.9 to 0.95", 0), ("0.95 to 1", 1), ("1 to 1.02", 1), ("above 1.02", 2)]  # fmt: skip
    assert [zoo.quantile(share) for share in (0.0, 0.5, 1.0)] == pytest.approx([0.5, 1.0, 7.0])
    assert [whole_zoo.estimate(s) for s in zoo.slow] == [pytest.approx(7.0), pytest.approx(1.0201)]


def test_one_process_gives_no_interval_and_its_figure_all_the_same(tmp_path: Path) -> None:
    (zoo,) = whole_zoo.zoos(read(measured(tmp_path / "zoo.jsonl", processes=1)), least=4)
    assert "95 %" not in zoo.words()
    assert "1 above 1.02" in zoo.words()
    assert whole_zoo.zoo_row(zoo)(zoo.slow[0])[-1] == "not profiled"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, "what is checked at each call: "),
        ({OPS: 120e-6}, "the ops: its ops take 120 µs"),
        ({OPS: 101e-6, CHECKS: 3e-6}, "what a call costs beside checks and ops"),
        ({SPLIT: 99e-6}, r"not so when it was profiled (0.99)"),
    ],
)
def test_the_cause_is_where_most_of_the_difference_goes(other: dict[str, float], words: str) -> None:
    assert cause(seconds(**other)).startswith(words)


def test_where_python_runs_in_place_of_a_graph_that_is_the_cause() -> None:
    assert cause({MODEL: [1.0], SPLIT: [2.0]}).startswith("the model's own Python runs")


def test_a_model_is_taken_apart() -> None:
    (record,) = parts.parts({"job": "parts", "device": "cpu", "model": "nn/mlp10x64", "batches": [1]}, {})
    assert record["status"] == "ok", record
    assert {name: len(found) for name, found in record["seconds"].items()} == dict.fromkeys(WHERE, parts.PAIRS)


def test_a_failure_of_the_profile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Subject) -> Any:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(Subject, "model", fails)
    (record,) = parts.parts({"job": "parts", "device": "cpu", "model": "nn/mlp10x64", "batches": [1]}, {})
    assert (record["status"], record["reason"]) == ("failed", "RuntimeError: no such luck")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The jobs that were run alone; nothing else is run, and each is answered at once."""
    jobs: list[tuple[str, str]] = []

    def answer(self: Runner, job: str, model: str, folder: Path, limit: float, **more: Any) -> list[Record]:
        jobs.append((job, model))
        return [profiled(model), {"task": "training", "status": "crashed", "reason": ""}]

    def run(self: Runner) -> int:
        self.done = read(self.output).samples
        return 0

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(Runner, "alone", answer)
    return jobs


def test_what_is_slow_is_profiled_once(tmp_path: Path, alone: list[tuple[str, str]]) -> None:
    path = measured(tmp_path / "zoo.jsonl")
    lines: list[str] = []
    for _ in range(2):
        assert whole_zoo.run(Options(tuple(RATIOS)), path, lines.append) == 0
    assert alone == [("parts", "a/four")]
    (kept,) = read(path).of("parts")
    assert cause(kept["seconds"]) in lines[-1]


def test_without_options_the_command_measures_every_model_in_eager_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Options] = []

    def run(options: Options, output: Path, progress: Any) -> int:
        asked.append(options)
        measured(output)
        return 0

    monkeypatch.setattr(whole_zoo, "run", run)
    assert main(["zoo", "--output", str(tmp_path / "zoo.jsonl")]) == 0
    (options,) = asked
    assert set(options.models) == set(model_zoo.names())
    assert (options.variants, options.batches, options.start_processes) == ((EAGER, "generated"), (1,), 0)
    assert "Steady state" in capsys.readouterr().out


def blocks(records: Any) -> Iterator[Any]:
    (section,) = page.sections(records, least=4)
    yield from section.blocks


def test_the_page_shows_it(tmp_path: Path) -> None:
    records = read(measured(tmp_path / "zoo.jsonl", profiled("a/four")))
    prose, figures, spread, slow = blocks(records)
    assert isinstance(prose, Prose)
    assert "Geometric mean over 4 of 4 models" in prose.text
    assert isinstance(figures, Figures)
    assert "<svg" in figures.figures[0].svg
    assert isinstance(spread, Table)
    assert sum(int(row[1].text) for row in spread.rows) == 4
    assert isinstance(slow, Table)
    assert [row[0].text for row in slow.rows] == ["a/four"]
    assert page.sections(records) == ()
