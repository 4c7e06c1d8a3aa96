"""The strip at the top: one card for each thing that a reader asks first."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.break_even import BETWEEN
from benchmarks.findings import Mean, Speed, Start
from benchmarks.variants import NOISE
from reports.document import NOT_MEASURED, Card
from reports.earlier import REGRESSED, Pair, counted
from reports.equality import Judged, counts
from reports.outcomes import EXPECTED, FAIL, MISSING, PASS, UNEXPECTED
from reports.payback import counted as verdicts_of
from reports.payback import failed, judged
from reports.runs import Run
from reports.speed import NOT_TRIED, floor_of, mean_tone, mean_words, tried
from reports.words import plural, ratio

ABSENT = "quiet"


def strip(
    run: Run, found: list[Judged], speeds: list[Speed], means: list[Mean], against: list[Mean], starts: list[Start],
    pairs: list[Pair] | None, cases: list[Pair],
) -> Iterator[Card]:  # fmt: skip
    """The cards, in order; what was not measured says so."""
    yield _equality(run, found)
    yield _mutants(run)
    yield _fuzz(run)
    yield from _speed("Split over the model, eager", "generated", speeds, means)
    yield from _speed("Compiled split over the model", "compiled", speeds, means)
    yield from _speed("Ahead of time over torch.compile", None, speeds, against)
    yield _break_even(starts)
    yield _noise(speeds)
    yield _cuda(run)
    if pairs is not None:
        yield _earlier(pairs, cases)


def _equality(run: Run, found: list[Judged]) -> Card:
    title = "Equality, split against whole"
    if not found:
        return Card(title, NOT_MEASURED, tone=ABSENT, target="equality")
    n = counts(found)
    tone = "bad" if n[FAIL] else "warn" if n[UNEXPECTED] or n[MISSING] else "good"
    detail = f"{n[FAIL]:,} fail, {n[EXPECTED]:,} expected not to be, {n[UNEXPECTED]:,} unexpected, {n[MISSING]:,} without a result"
    return Card(
        title, f"{n[PASS]:,} of {len(found):,} pass", f"{detail}; the suite has {run.suite:,}", tone, "equality"
    )


def _mutants(run: Run) -> Card:
    title = "Planted bugs noticed"
    if run.selftest is None:
        return Card(title, NOT_MEASURED, tone=ABSENT)
    killed, total, rules = run.selftest["killed"], run.selftest["mutants"], run.selftest["rules"]
    alive = [str(o.get("mutant")) for o in run.selftest["outcomes"] if not o.get("killed")]
    detail = f"{rules.get('fire')} of {rules.get('of')} rules of the verdict fire" + (
        f"; alive: {', '.join(alive)}" if alive else ""
    )
    good = killed == total and rules.get("fire") == rules.get("of")
    return Card(title, f"{killed} of {total}", detail, "good" if good else "bad")


def _fuzz(run: Run) -> Card:
    title = "Random programs"
    if not run.fuzz:
        return Card(title, NOT_MEASURED, tone=ABSENT)
    failed, total = (sum(line[name] for line in run.fuzz) for name in ("failures", "programs"))
    detail = "; ".join(f"{line['kind']}, {line['profile']}: {line['programs']:,}" for line in run.fuzz)
    return Card(title, f"{total:,} run, {failed:,} failed", detail, "bad" if failed else "good")


def _speed(title: str, variant: str | None, speeds: list[Speed], means: list[Mean]) -> Iterator[Card]:
    """A card for the smallest batch of each device; the others stand in the section."""
    mine = [m for m in means if m.place.task == "inference" and variant in (None, m.variant) and tried(m)]
    if not mine:
        yield Card(title, NOT_MEASURED, tone=ABSENT, target="speed")
    for environment in dict.fromkeys(m.place.environment for m in mine):
        here = [m for m in mine if m.place.environment == environment]
        m = min(here, key=lambda m: (m.geomean.ratio is None, m.place.batch))
        floor = floor_of(speeds, m.place)
        if m.geomean.ratio is None:
            detail = f"no value; batch {m.place.batch}, {m.place.device}"
            yield Card(title, f"failed on all {plural(tried(m), 'model')}", detail, "bad", "speed")
            continue
        models = f"{m.geomean.n} of {m.geomean.total} models"
        detail = f"{mean_words(m, floor)}; geometric mean, batch {m.place.batch}, {m.place.device}, {models}"
        yield Card(title, ratio(m.geomean.ratio), detail, mean_tone(m, floor), "speed")


def _break_even(starts: list[Start]) -> Card:
    title = "Has it paid?"
    found = judged(starts)
    if not found:
        return Card(title, NOT_MEASURED, tone=ABSENT, target="break-even")
    caches = [c for c in ("cold", "warm", "none") if any(s.cache == c for s in found)]
    words = {"cold": "cold cache", "warm": "warm cache", "none": "without a cache"}
    detail = "; ".join(f"{words[c]}: {verdicts_of(starts, c)}" for c in caches)
    if all(map(failed, found)):
        return Card(title, f"failed on all {len(found)}", detail, "bad", "break-even")
    shown = sum(s.calls is not None and s.calls.verdict == BETWEEN for s in found)
    return Card(title, f"{shown} of {len(found)} shown to", detail, target="break-even")


def _noise(speeds: list[Speed]) -> Card:
    title = "Noise floor, model against itself"
    floors = [s.against_model.floor for s in speeds if s.variant == NOISE and s.against_model]
    if not floors:
        return Card(title, NOT_MEASURED, tone=ABSENT, target="speed")
    places = f"over {plural(len(floors), 'place')} of model, task and batch"
    detail = f"{min(floors):.1%} at best, {places}; a smaller difference is none"
    return Card(title, f"up to {max(floors):.1%}", detail, target="speed")


def _cuda(run: Run) -> Card:
    there = [s for s in run.records.samples.values() if s["device"].startswith("cuda")]
    environments = {s["environment"] for s in there if s["status"] == "ok"}
    if environments:
        names = {run.records.environments[e].facts.get("gpu", "unknown") for e in environments}
        return Card("CUDA", "measured", ", ".join(sorted(names)), target="speed")
    failures = [s for s in there if s["status"] not in NOT_TRIED]
    if failures:
        return Card("CUDA", f"failed on all {plural(len(failures), 'sample')}", tone="bad", target="speed")
    return Card("CUDA", NOT_MEASURED.lower(), "no sample of these runs was taken on a CUDA device", ABSENT)


def _earlier(pairs: list[Pair], cases: list[Pair]) -> Card:
    value, detail = plural(len(pairs), "pair"), counted(pairs)
    if cases:
        value += f", {plural(sum(p.cases for p in cases), 'changed case')}"
        detail += f"; cases: {counted(cases)}"
    bad = any(p.verdict == REGRESSED for p in (*pairs, *cases))
    return Card("Against the earlier run", value, detail, "bad" if bad else "", "earlier")
