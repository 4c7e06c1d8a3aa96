"""How it was measured, under what conditions, and the raw files: the end of a report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks.findings import STRAYED
from benchmarks.records import Record
from benchmarks.statistics import CONFIDENCE, FEWEST_PROCESSES, LEAST_DIFFERENCE, samples_needed
from benchmarks.variants import ALL
from conformance.suite.environment import Environment
from reports.document import Block, Commands, Download, Downloads, Prose, Section, Table, cells
from reports.runs import Run
from reports.words import plural

RULES = (
    (
        "process",
        "Samples of one process share its memory layout, its threads and its moment. Each process gives one number, the median "
        "over its pairs, and every interval is Student's over those numbers, with a confidence of {confidence:.0%}.",
    ),
    (
        "pairs",
        "All variants run in the same process, in rounds of random order; the k-th samples of two make a pair. What costs "
        "something at the start is measured in fresh processes, one variant each.",
    ),
    (
        "noise",
        "The model runs twice in every round, the second time as a copy of its own. The noise floor of a place is the furthest "
        "that this pair strayed from 1 in any of its processes.",
    ),
    (
        "a difference",
        "It counts only with at least {processes} processes, an interval clear of 1, and an estimate beyond {least:.0%} and "
        "beyond the noise floor. A geometric mean takes as many processes, and is held against the largest floor of its models.",
    ),
    (
        "percentiles",
        "Of the samples of all processes together, so that a slow process is in them, too. p90 takes at least {p90} samples and "
        "p99 at least {p99}; with fewer none is given.",
    ),
    (
        "means",
        "Geometric, over a fixed set of models that is the same for all variants; those without a value are listed beside "
        "the mean, and n of N is shown.",
    ),
    (
        "break-even",
        "Cost X is the excess of preparation and first calls over as many steady ones, less the same for the model. What a "
        "variant imports beside torch counts as preparation, for torch.compile imports its own parts when it is called. The "
        "payback rate, saving per call over X, has Fieller's interval over processes: above zero it is 'between', below it "
        "'never', else 'not shown'; so too where a steady call differs from the model's by no more than {least:.0%} or the noise "
        "floor of the same processes; at least {processes} processes.",
    ),
    (
        "cold and warm",
        "A cold process gets an empty compile cache; the warm one after it the cache that this cold one left.",
    ),
    (
        "batches",
        "All batches of a model run in the same process, in ascending order. torch.compile(model) may therefore have one kernel "
        "for all batches after the first, as it would for a user who calls it so; costs at the start are those of one batch.",
    ),
    (
        "medians",
        "The median of a variant is that over processes of each one's median. Ratios are of pairs, one number for each process, so "
        "that the ratio of two medians may be another.",
    ),
    (
        "splits",
        "Every split that is timed against the model is cut at half of the plan's ops, prefix and suffix in one process. What "
        "crosses is handed over in memory; encoding it for a wire is not in these times.",
    ),
    (
        "outputs",
        "Each variant's outputs are held against the model's, for training the loss; what is off by more than {strayed:.1%} of the "
        "largest value is said to be off, and is never called faster.",
    ),
    ("cuts", "Prefix, suffix and model in rounds of random order in a single process; medians, and no interval."),
    (
        "equality",
        "Bit for bit in eager mode, in types, strides, numbers, state and random generators, on the same device and batch; "
        "what a check compares, and what an expectation may excuse, is in docs/decisions/0003 and 0006.",
    ),
    (
        "earlier runs",
        "A change counts where the intervals of both runs lie apart and it is beyond {least:.0%} and the noise floors of both, "
        "or for costs at the start beyond the change of the model's own pace.",
    ),
)


def section(run: Run, baseline: Run | None, downloads: Iterable[Download]) -> Section:
    """Rules, variants, conditions, environments and raw data."""
    return Section("methods", "Methods, conditions, raw data", tuple(_blocks(run, baseline, tuple(downloads))))


def _blocks(run: Run, baseline: Run | None, downloads: tuple[Download, ...]) -> Iterator[Block]:
    numbers = {
        "confidence": CONFIDENCE, "processes": FEWEST_PROCESSES, "least": LEAST_DIFFERENCE,
        "p90": samples_needed(0.9), "p99": samples_needed(0.99), "strayed": STRAYED,
    }  # fmt: skip
    yield Table(
        "How it was measured", ("what", "rule"), tuple(cells(n, t.format(**numbers)) for n, t in RULES), stacked=True
    )
    used = {s["variant"] for s in run.records.samples.values()}
    variants = tuple(cells(v.name, v.about, ", ".join(v.tasks)) for v in ALL if v.name in used)
    if variants:
        yield Table("Variants", ("name", "what runs", "for"), variants)
    yield from _conditions(run)
    both = [("", run), *([("earlier run, ", baseline)] if baseline else [])]
    for prefix, one in both:
        for environment in one.environments:
            yield _environment(prefix, environment)
    if not run.environments:
        yield Prose("Not measured: the runs name no environment.", "quiet")
    if downloads:
        folders = [f"data/{number}" for number, files in enumerate(run.folders, start=1) if files]
        before = " --baseline data/baseline" if baseline else ""
        again = f"python -m reports {' '.join(folders)}{before} --output again"
        yield Commands("The same page, byte for byte, from its folder with a clone on the import path", (again,))
        yield Downloads(downloads)
    else:
        yield Prose("No raw data: the runs are empty.", "quiet")


def _conditions(run: Run) -> Iterator[Block]:
    samples = list(run.records.samples.values())
    if not samples:
        return
    loads = [s["load"][0] for s in samples if s.get("load")]
    dates = sorted(s["date"] for s in samples if s.get("date"))
    commits = sorted({str(s["commit"]) for s in samples if s.get("commit")})
    rows = [("samples", plural(len(samples), "record"))]
    if dates:
        rows.append(("taken", f"{dates[0]} to {dates[-1]}"))
    if loads:
        rows.append(("load before each job, one minute's mean", f"{min(loads):.2f} to {max(loads):.2f}"))
    several = len({s["environment"] for s in samples}) > 1
    for environment, share in _withheld(samples).items():
        where = f", in environment {environment}" if several else ""
        rows.append((f"processor time that the host withheld{where}", f"{share:.1%}"))
    rows.append(("commits", ", ".join(commits) or "unknown"))
    if len(commits) > 1:
        rows.append(
            ("", "the samples are of several commits, whose sources are the same where they share an environment")
        )
    yield Table("Conditions", ("what", "found"), tuple(cells(*row) for row in rows))


def _withheld(samples: list[Record]) -> dict[str, float]:
    """The share of the processors' busy time that a virtual machine's host gave to others, over each environment's samples."""
    clocks: dict[str, dict[str, list[int]]] = {}
    for s in samples:
        if s.get("processors"):
            clocks.setdefault(s["environment"], {})[s["date"]] = s["processors"]
    found = {}
    for environment, by_date in clocks.items():
        (busy, stolen), (busy_last, stolen_last) = by_date[min(by_date)], by_date[max(by_date)]
        if busy_last > busy and stolen_last >= stolen:  # else another start of the machine
            found[environment] = (stolen_last - stolen) / (busy_last - busy)
    return found


def _environment(prefix: str, environment: Environment) -> Table:
    rows = tuple(cells(name, value) for name, value in sorted(environment.facts.items()))
    title = f"Environment, {prefix}{environment.id}, {environment.date}"
    return Table(title, ("fact", "value"), rows, folded=True)
