"""Reports: what is measured stands in page and summary alike, the same bytes each time; what can't be meant is refused."""

from __future__ import annotations

import gzip
import hashlib
import html
import os
import re
import subprocess
import sys
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.statistics import Interval
from conformance.suite.statuses import Status
from reports import charts, earlier, runs
from reports.build import build
from reports.charts import Dot, between, domain_of, dots, named
from reports.document import Report
from reports.markdown import escaped
from reports.unit import report_kit as kit
from reports.unit.report_kit import CASE, card, rounds, starts, table, write_cases, write_samples
from reports.words import one_line, seconds, seconds_interval, size

ROOT = Path(__file__).resolve().parents[2]


class Texts(HTMLParser):
    """The cells of all tables of a page, row by row, and the elements in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data


def plain(markdown: str) -> str:
    """A Markdown text as a reader sees it."""
    return re.sub(r"\\(.)", r"\1", markdown.replace("<br>", "\n"))


# --- what it says


def test_the_strip_has_a_verdict_for_each_thing(report: tuple[Report, Path]) -> None:
    found, _ = report
    assert card(found, "Equality")[:2] == (
        "3 of 6 pass",
        "1 fail, 1 expected not to be, 0 unexpected, 1 without a result; the suite has 7",
    )
    assert card(found, "Planted bugs")[0] == "82 of 82"
    assert card(found, "Random programs")[0] == "200 run, 0 failed"
    assert card(found, "Split over the model, eager")[0].startswith("0.80")
    assert "faster; geometric mean, batch 1, cpu, 2 of 2 models" in card(found, "Split over the model, eager")[1]
    assert "1 of 2 models" in card(found, "Compiled split over the model")[1]
    assert card(found, "Ahead of time over torch.compile")[0].startswith("0.50")
    assert card(found, "Has it paid?")[0] == "1 of 3 shown to"
    assert re.fullmatch(r"up to \d\.\d%", card(found, "Noise floor")[0])
    assert card(found, "CUDA")[0] == "not measured"


def test_the_line_under_the_title_says_when_where_and_with_what(report: tuple[Report, Path]) -> None:
    assert dict(report[0].facts) == {
        "when": "2026-11-20",
        "device": "a processor",
        "cores, threads": "2, 1",
        "torch": "2.15.0",
        "Python": "3.12.1",
        "commit of the measurements": kit.COMMIT[:12],
        "sources of the suite's cases": "aaaaaaaaaaaa",
    }


def test_break_even_has_three_verdicts_also_in_seconds(report: tuple[Report, Path]) -> None:
    rows = {(r["variant"], r["cache"]): r for r in table(report[0], "break-even", "Verdicts")}
    cold, warm, none = rows["compiled", "cold"], rows["compiled", "warm"], rows["generated", "no cache"]
    low, high = map(
        int, re.fullmatch(r"between ([\d,]+) and ([\d,]+) calls", cold["paid back after"].replace(",", "")).groups()
    )  # type: ignore[union-attr]
    assert low < 12.0 / 0.004 < high  # 10 s of cost, 2 of importing ariadne, 4 ms saved per call
    assert re.fullmatch(r"between .* and .* s", cold["in eager seconds"])
    assert warm["paid back after"] == "never"
    assert none["paid back after"].startswith("not shown (the interval of the saving holds zero)")


def test_a_difference_within_the_noise_is_grey_and_named_so(tmp_path: Path) -> None:
    write_samples(
        tmp_path / "run", rounds("inference", "nn/mlp10x64", 1, {"generated": 0.98, "compiled": 0.5}, noise=0.2)
    )
    found = build([tmp_path / "run"], None, tmp_path / "out")
    rows = {r["variant"]: r["verdict"] for r in table(found, "speed", "Every pair")}
    assert rows["generated"].startswith("no difference shown")
    assert rows["compiled"] == "faster"
    page = (tmp_path / "out" / "index.html").read_text()
    assert re.search(r'<td class="quiet">no difference shown \(', page)


def test_failures_stand_beside_the_mean_of_the_others(report: tuple[Report, Path]) -> None:
    rows = {r["variant"]: r for r in table(report[0], "speed", "Geometric means")}
    assert rows["compiled"]["models"] == "1 of 2"
    assert rows["compiled"]["without a value"] == "toys/residual: failed: RuntimeError: no compiler"


def test_each_cell_of_the_matrix_has_the_line_that_runs_it_again(report: tuple[Report, Path]) -> None:
    page = (report[1] / "index.html").read_text()
    cells = dict(re.findall(r"<summary[^>]*>(. [\d/]+)</summary><code>(.*?)</code>", page))
    assert html.unescape(cells["✗ 1/1"]) == f"python -m conformance --case '{CASE}'"
    assert "python -m conformance --case 'forward/nn/mlp10x64/*'" in html.unescape(page)


def test_the_worst_case_decides_over_a_cell(tmp_path: Path) -> None:
    name = "forward/nn/mlp10x64/cut=q50,bs={},mode=eval,backend=generated"
    cases = {name.format(i): (Status.PASS, "") for i in (1, 2, 3)} | {name.format(5): (Status.CRASH, "signal 11")}
    write_cases(tmp_path / "run", cases)
    build([tmp_path / "run"], None, tmp_path / "out")
    assert "| nn/mlp10x64 | ✗ 1/4 |" in (tmp_path / "out" / "summary.md").read_text()


def test_what_is_expected_counts_apart_and_what_is_not_does_not(tmp_path: Path) -> None:
    case, other = "debug/toys/one/cut=q50,bs=3,mode=eval", "debug/toys/two/cut=q50,bs=3,mode=eval"
    write_cases(tmp_path / "run", {case: (Status.UNSUPPORTED, "no"), other: (Status.UNSUPPORTED, "no")})
    kit.write_suite(tmp_path / "run", [case, other], case)
    found = build([tmp_path / "run"], None, tmp_path / "out")
    assert card(found, "Equality")[1].startswith("0 fail, 1 expected not to be, 1 unexpected, 0 without a result")
    assert card(found, "Equality")[1].endswith("the suite has 2")
    (row,) = table(found, "equality", "Expected not")
    assert row["expected, since"] == "it branches (until 2027-01-01)"


def test_mutants_that_live_are_named(tmp_path: Path) -> None:
    found = build([kit.write_counts(tmp_path / "run", killed=81)], None, tmp_path / "out")
    assert card(found, "Planted bugs")[:2] == ("81 of 82", "10 of 10 rules of the verdict fire; alive: mutant_81")


def test_a_profile_along_the_cut_gives_bytes_shares_and_reasons(report: tuple[Report, Path]) -> None:
    (row,) = table(report[0], "boundary", "Models")
    assert row["auto"] == "cut 3, after layer3"
    assert row["safe cuts"] == "7 of 8"
    assert row["prefix's share of time"] == "33%"  # 3 of 3 + 6 ms
    (unsafe,) = table(report[0], "boundary", "Unsafe")
    assert unsafe["which"] == "6"
    assert unsafe["why"].startswith("a view crosses")


def test_a_run_without_results_says_not_measured_in_every_section(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    found = build([tmp_path / "run"], None, tmp_path / "out")
    for section in found.sections:
        assert any("Not measured" in getattr(block, "text", "") for block in section.blocks), section.name
    assert [c.value.lower() for c in found.cards] == ["not measured"] * len(found.cards)
    assert len(found.cards) == 13


def test_a_run_of_one_process_gives_no_interval_and_no_verdict(tmp_path: Path) -> None:
    samples = rounds("inference", "nn/mlp10x64", 1, {"generated": 0.5}, processes=1)
    found = build([write_samples(tmp_path / "run", samples)], None, tmp_path / "out")
    assert re.fullmatch(r"0\.[45]\d\d", card(found, "Split over the model, eager")[0])
    assert card(found, "Split over the model, eager")[1].startswith("no difference shown")
    (row,) = (r for r in table(found, "speed", "Every pair") if r["variant"] == "generated")
    assert row["verdict"] == "no difference shown (1 of at least 5 processes)"


def test_two_devices_stand_side_by_side(tmp_path: Path) -> None:
    cpu = rounds("inference", "nn/mlp10x64", 1, {"generated": 0.8, "torch.compile": 0.9, "ahead of time": 0.6})
    there = kit.environment(device="cuda", gpu="a large one")
    cuda = rounds("inference", "nn/mlp10x64", 4, {"generated": 0.5, "torch.compile": 0.4}, device="cuda")
    one = write_samples(tmp_path / "cpu", cpu)
    other = write_samples(tmp_path / "cuda", cuda, here=there)
    found = build([one, other], None, tmp_path / "out")
    assert card(found, "CUDA")[:2] == ("measured", "a large one")
    eager = [c for c in found.cards if c.title == "Split over the model, eager"]
    assert [c.detail.split(", ")[1:3] for c in eager] == [["batch 1", "cpu"], ["batch 4", "cuda"]]
    assert sorted(dict(found.facts)["device"].split(" / ")) == ["a large one", "a processor"]
    assert (tmp_path / "out" / "data" / "2" / "benchmarks.jsonl").exists()


def test_two_environments_on_one_device_are_told_apart(tmp_path: Path) -> None:
    samples = rounds("inference", "nn/mlp10x64", 1, {"generated": 0.8})
    one, other = kit.environment(), kit.environment(**{"option threads": "2"})
    run = write_samples(tmp_path / "run", samples, here=one)
    write_samples(run, samples, "benchmarks-2.jsonl", here=other)
    found = build([run], None, tmp_path / "out")
    rows = {r["device"] for r in table(found, "speed", "Geometric means")}
    assert rows == {f"cpu in {one.id}", f"cpu in {other.id}"}
    before = write_samples(tmp_path / "before", samples, here=other)
    assert {verdict for verdict, _ in classes(run, before).values()} == {"noise"}


# --- page and summary


def test_the_summary_has_every_row_of_the_page(report: tuple[Report, Path]) -> None:
    page, summary = ((report[1] / name).read_text() for name in ("index.html", "summary.md"))
    of_page = {tuple(re.sub(r"\s+", "", c) for c in row) for row in Texts(page).rows}
    lines = (line[2:-2].split(" | ") for line in summary.splitlines() if line.startswith("| "))
    of_summary = {tuple(re.sub(r"[\s`]+", "", plain(c)) for c in row) for row in lines}
    squares = re.compile(r"([✓✗!○–])([\d/]+)python.*")  # the page has the command in the cell as well
    downloads = re.compile(r"(data/.*?)↓\.gz")
    of_page = {tuple(downloads.sub(r"\1", squares.sub(r"\1\2", c)) for c in row) for row in of_page}
    assert {r for r in of_page if any(r)} == {r for r in of_summary if any(r)}


def test_the_summary_has_every_verdict_of_the_page(report: tuple[Report, Path]) -> None:
    summary = (report[1] / "summary.md").read_text()
    for found in report[0].measured:
        assert f"**{escaped(found.title)}: {escaped(found.value)}**" in summary
        assert escaped(found.detail) in summary
    assert f"Not measured in these runs: {escaped('; '.join(report[0].missing))}." in summary
    assert {*report[0].missing} == {c.title for c in report[0].cards if c not in report[0].measured}
    for answer in report[0].answers:
        assert f"**{escaped(answer.question)}** {escaped(answer.words)}" in summary


def test_texts_from_data_are_escaped(tmp_path: Path) -> None:
    planted = "<script>alert(1)</script><img src=x onerror=alert(2)> [a](javascript:b) | `c` '\"&"
    write_cases(tmp_path / "run", {CASE: (Status.CRASH, planted)})
    samples = rounds("inference", f"nn/{planted}", 1, {"generated": f"failed: {planted}", "compiled": 0.5})
    samples += starts(f"nn/{planted}", {("compiled", "cold"): (1.0, 0.5)}) + kit.cuts(
        f"nn/{planted}", unsafe={2: planted}
    )
    write_samples(tmp_path / "run", samples, here=kit.environment(cpu=planted))
    build([tmp_path / "run"], tmp_path / "run", tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    elements = Texts(page).elements
    assert [tag for tag, _ in elements].count("script") == 1
    assert "img" not in [tag for tag, _ in elements]
    assert not [name for _, attributes in elements for name in attributes if name.startswith("on")]
    assert not re.search(r"<script>alert", page)
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in (tmp_path / "out" / "summary.md").read_text().replace("\\<script", "")


def test_the_page_asks_for_nothing_from_anywhere(report: tuple[Report, Path]) -> None:
    page = (report[1] / "index.html").read_text()
    for tag, attributes in Texts(page).elements:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img")
        for name in ("src", "href", "action", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data/", "data:application/gzip;base64,")), (tag, value)
    assert not re.findall(r"@import|url\((?!#)", page)


def test_every_id_of_a_page_is_its_own(report: tuple[Report, Path]) -> None:
    ids = [a["id"] for _, a in Texts((report[1] / "index.html").read_text()).elements if "id" in a]
    assert len(ids) == len(set(ids))


def test_every_chart_has_a_name(report: tuple[Report, Path]) -> None:
    charts = [a for tag, a in Texts((report[1] / "index.html").read_text()).elements if tag == "svg"]
    assert charts
    assert all(a["role"] == "img" and a["aria-label"] for a in charts)


# --- raw data


def test_raw_files_are_kept_with_their_digests_and_come_out_of_the_page_whole(
    run: Path, report: tuple[Report, Path]
) -> None:
    page = (report[1] / "index.html").read_text()
    for file in run.glob("*.jsonl"):
        data = file.read_bytes()
        assert (report[1] / "data" / "1" / file.name).read_bytes() == data
        row = re.search(rf'<tr><td data-head="file"><a href="data/1/{file.name}">.*?</tr>', page)
        assert row
        assert hashlib.sha256(data).hexdigest() in row[0]
        uri = re.search(r'href="data:application/gzip;base64,([^"]*)"', row[0])
        assert uri
        assert gzip.decompress(b64decode(html.unescape(uri[1]))) == data


def test_tables_are_kept_as_parquet(report: tuple[Report, Path]) -> None:
    tables = {f.stem: pd.read_parquet(f) for f in (report[1] / "data" / "tables").glob("*.parquet")}
    assert set(tables) == {"cases", "cuts", "means", "speeds", "starts"}
    speeds = tables["speeds"].set_index(["task", "model", "variant"])
    assert speeds.loc[("inference", "nn/mlp10x64", "generated"), "ratio"] == pytest.approx(0.8, rel=0.01)
    assert len(tables["cases"]) == 6


def test_a_report_is_made_again_from_what_it_kept(report: tuple[Report, Path], tmp_path: Path) -> None:
    build([report[1] / "data" / "1"], None, tmp_path / "again")
    for name in ("index.html", "summary.md"):
        assert (tmp_path / "again" / name).read_bytes() == (report[1] / name).read_bytes()


def test_the_same_data_give_the_same_bytes_anywhere(run: Path, report: tuple[Report, Path], tmp_path: Path) -> None:
    elsewhere = {"PYTHONHASHSEED": "7", "TZ": "Asia/Kathmandu", "LC_ALL": "C", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "reports", str(run), "--output", "again"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **elsewhere}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("index.html", "summary.md"):
        assert (tmp_path / "again" / name).read_bytes() == (report[1] / name).read_bytes()
    for file in (report[1] / "data" / "tables").iterdir():
        assert (tmp_path / "again" / "data" / "tables" / file.name).read_bytes() == file.read_bytes()


def test_a_chart_is_the_same_when_it_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> str:
        rows = [Dot("a long name of a variant", 0.9, 0.8, 1.0, "good"), Dot("b", words="failed")]
        points = charts.Line("model", ((1, 0.001), (100_000, 1000.0)))
        curve = charts.lines([points], ("calls", "cumulative time"), x_log=True, y_log=True, units=("", "s"))
        return named(dots(rows, (0.5, 2.0), "time", band=0.05), "one", "a chart") + named(curve, "two", "a curve")

    first = drawn()
    assert drawn() == first
    monkeypatch.setattr(charts, "FONT", "monospace")  # nor do the fonts of a machine matter
    assert drawn() == first
    assert 'id="one-clip0"' in first


# --- an earlier run


def classes(now: Path, before: Path) -> dict[str, tuple[str, str]]:
    found = earlier.pairs(runs.read([now]), runs.read([before]))
    return {pair.what: (pair.verdict, pair.why) for pair in found}


def test_each_pair_with_an_earlier_run_has_its_class(tmp_path: Path) -> None:
    old = {
        "generated": 0.8,
        "compiled": 0.8,
        "debug": 1.5,
        "torch.compile": 0.9,
        "ahead of time": "failed: no compiler",
    }
    new = {"generated": 1.0, "compiled": 0.6, "debug": 1.501, "ahead of time": 0.5, "pipelining": 1.1}
    one, other = rounds("inference", "nn/mlp10x64", 1, new), rounds("inference", "nn/mlp10x64", 1, old)
    found = classes(write_samples(tmp_path / "now", one), write_samples(tmp_path / "old", other))
    short = {what.split(" · ")[4]: verdict for what, (verdict, _) in found.items()}
    assert short == {
        "generated": "regressed",
        "compiled": "improved",
        "debug": "noise",
        "torch.compile": "vanished",
        "pipelining": "new",
        "ahead of time": "improved",
    }
    assert found["cpu · inference · nn/mlp10x64 · batch 1 · generated · over model(x)"][1].startswith("+2")


def test_runs_under_other_conditions_are_not_compared(tmp_path: Path) -> None:
    samples = rounds("inference", "nn/mlp10x64", 1, {"generated": 0.8})
    now = write_samples(tmp_path / "now", samples)
    there = kit.environment(torch="2.14.0", **{"option threads": "4"})
    found = classes(now, write_samples(tmp_path / "old", samples, here=there))
    assert set(found.values()) == {("not comparable", "threads 4 → 1; torch 2.14.0 → 2.15.0")}
    same_but_newer = kit.environment(sources="bbbbbbbbbbbb")
    found = classes(now, write_samples(tmp_path / "older", samples, here=same_but_newer))
    assert {verdict for verdict, _ in found.values()} == {"noise"}


@pytest.mark.parametrize(
    ("before", "now", "floor", "processes", "expected"),
    [
        (Interval(1.0, 0.9, 1.1), Interval(1.05, 0.95, 1.15), 0.0, 5, ("noise", "the intervals overlap")),
        (Interval(1.0, 0.999, 1.001), Interval(1.015, 1.014, 1.016), 0.0, 5, ("noise", "+1.5%, within 2%")),
        (
            Interval(1.0, 0.99, 1.01),
            Interval(1.05, 1.04, 1.06),
            0.08,
            5,
            ("noise", "+5.0%, within the noise floor of 8.0%"),
        ),
        (Interval(1.0, 0.99, 1.01), Interval(1.5, 1.4, 1.6), 0.01, 4, ("noise", "4 of at least 5 processes")),
        (Interval(1.0, 0.99, 1.01), Interval(1.5, 1.4, 1.6), 0.01, 5, ("regressed", "+50.0%")),
        (Interval(1.0, 0.99, 1.01), Interval(0.5, 0.4, 0.6), 0.01, 5, ("improved", "-50.0%")),
    ],
)
def test_a_change_counts_beyond_the_intervals_and_the_noise(
    before: Interval, now: Interval, floor: float, processes: int, expected: tuple[str, str]
) -> None:
    assert earlier.compared(before, now, floor, processes) == expected


def test_costs_at_the_start_are_compared_as_well(tmp_path: Path) -> None:
    now = write_samples(tmp_path / "now", starts("nn/mlp10x64", {("compiled", "cold"): (20.0, 0.3)}))
    old = write_samples(tmp_path / "old", starts("nn/mlp10x64", {("compiled", "cold"): (10.0, 0.3)}))
    assert [verdict for verdict, _ in classes(now, old).values()] == ["regressed"]


def test_cases_that_changed_are_listed_with_their_class(tmp_path: Path) -> None:
    name = "forward/nn/mlp10x64/cut=q50,bs={},mode=eval,backend=generated"
    good, bad = (Status.PASS, ""), (Status.FAIL_RNG, "a generator stands elsewhere")
    now = write_cases(tmp_path / "now", {name.format(1): bad, name.format(2): good, name.format(3): good, CASE: good})
    old = write_cases(
        tmp_path / "old", {name.format(1): good, name.format(2): bad, name.format(3): good, name.format(5): good}
    )
    found = earlier.case_pairs(runs.read([now]), runs.read([old]))
    assert sorted((pair.verdict, pair.what) for pair in found) == [
        ("improved", name.format(2)), ("new", CASE), ("regressed", name.format(1)), ("vanished", name.format(5)),
    ]  # fmt: skip


# --- words and axes


def test_words_of_numbers() -> None:
    assert [seconds(v) for v in (0.0, 2.5e-7, 0.0123, 1.5, 1234.5)] == [
        "0 s",
        "0.250 µs",
        "12.3 ms",
        "1.50 s",
        "1,234 s",
    ]
    assert seconds_interval(Interval(0.02, 0.01, 0.03)) == "20.0 ms (10.0 to 30.0)"
    assert size(999) == "999 B"
    assert size(36_864) == "36.9 kB"
    assert one_line("a\n ~~~^^^^ b") == "a b"
    assert one_line("a" * 200 + " the error", 30) == "a" * 20 + " … e error"


def test_ticks_are_few_and_lie_on_the_axis() -> None:
    for low, high in ((0.95, 1.06), (0.5, 2.0), (0.3, 4.0), (1e-4, 1e3), (1.0, 1e5)):
        ticks = between(low, high)
        assert 2 <= len(ticks) <= 6
        assert all(low <= t <= high for t in ticks)
    assert domain_of([], 1.0)[0] < 1 < domain_of([], 1.0)[1]
    assert domain_of([float("inf"), 0.0]) == (0.5, 2.0)
