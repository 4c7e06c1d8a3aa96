"""The strip at the top: one card for each thing that a reader asks first."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.break_even import BETWEEN
from benchmarks.findings import Mean, Speed, Start
from benchmarks.variants import AHEAD, COMPILE, DEFAULT, EAGER, NOISE
from reports import compared
from reports.document import NOT_MEASURED, Card
from reports.earlier import REGRESSED, Pair, counted
from reports.equality import Judged, counts
from reports.outcomes import EXPECTED, FAIL, MISSING, PASS, UNEXPECTED
from reports.payback import WHY_UNJUDGED, failed, judged, unjudged
from reports.payback import counted as verdicts_of
from reports.runs import Run
from reports.speed import NOT_TRIED, Graphs, floor_of, mean_tone, mean_words, tried
from reports.startup import loading
from reports.words import plural, ratio

ABSENT = "quiet"
GRAPHS = ("compiled reduce-overhead", "compiled reduce-overhead fixed")
OWN = ("compiled", DEFAULT, *GRAPHS, AHEAD)


def strip(
    run: Run, found: list[Judged], speeds: list[Speed], means: list[Mean], against: list[Mean], starts: list[Start],
    graphs: Graphs, pairs: list[Pair] | None, cases: list[Pair],
) -> Iterator[Card]:  # fmt: skip
    """The cards, in order; what was not measured says so."""
    yield from _steps(run)
    if found or not run.compared:
        yield _equality(run, found)
    yield from compared.card(run)
    yield _mutants(run)
    yield _fuzz(run)
    yield from _speed("Split over the model, eager", "generated", speeds, means)
    if any(m.variant == DEFAULT and tried(m) for m in means):
        yield from _speed("Compiled by default over the model", DEFAULT, speeds, means)
        yield from _speed("Compiled by default over torch.compile", f"{DEFAULT} over {COMPILE}", speeds, against)
    yield from _speed("Compiled split over the model", "compiled", speeds, means)
    recorded = next((g for g in GRAPHS if any(m.variant == g and tried(m) for m in means)), None)
    if recorded is not None:
        yield from _speed("Compiled split with CUDA graphs over the model", recorded, speeds, means)
        yield from _speed(
            "The same over torch.compile's", f"{recorded} over {COMPILE} reduce-overhead", speeds, against
        )
    yield from _speed("Compiled split over torch.compile", f"compiled over {COMPILE}", speeds, against)
    yield from _speed("Ahead of time over torch.compile", f"{AHEAD} over {COMPILE}", speeds, against)
    yield from _speed("Training, split over the model", "generated", speeds, means, "training")
    yield from _loading(starts)
    yield _recompiled(speeds, starts, graphs)
    yield _break_even(starts)
    yield _noise(speeds)
    yield _cuda(run)
    if pairs is not None:
        yield _earlier(pairs, cases)


def _steps(run: Run) -> Iterator[Card]:
    """A run made by commands that did not all end as they should holds less than it seems to."""
    failed = [str(line["step"]) for line in run.steps if line["failed"]]
    if failed:
        cut_off = all(line.get("failures") == 0 for line in run.steps if line["failed"])
        became = "did not end in the time there was" if cut_off else "failed"
        value = f"{len(failed)} of {plural(len(run.steps), 'step')} {became}"
        yield Card("This run is not whole", value, f"{'; '.join(failed)}: what they did not do is missing here", "bad")


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
    there, unsound = run.selftest.get("of", total), run.selftest.get("unsound", [])
    detail = "; ".join(
        [
            f"{rules.get('fire')} of {rules.get('of')} rules of the verdict fire",
            *([f"alive: {', '.join(alive)}"] if alive else []),
            *([f"{plural(len(unsound), 'case')} failed without any bug"] if unsound else []),
            *([f"only {total} of {there} bugs were planted"] if total != there else []),
        ]
    )
    good = killed == total and rules.get("fire") == rules.get("of") and not unsound
    return Card(title, f"{killed} of {total}", detail, ("warn" if total != there else "good") if good else "bad")


def _fuzz(run: Run) -> Card:
    title = "Random programs"
    if not run.fuzz:
        return Card(title, NOT_MEASURED, tone=ABSENT)
    failed, total = (sum(line[name] for line in run.fuzz) for name in ("failures", "programs"))
    detail = "; ".join(f"{line['kind']}, {line['profile']}: {line['programs']:,}" for line in run.fuzz)
    return Card(title, f"{total:,} run, {failed:,} failed", detail, "bad" if failed else "good")


def _speed(title: str, variant: str, speeds: list[Speed], means: list[Mean], task: str = "inference") -> Iterator[Card]:
    """A card for the smallest batch of each device, with what the others came to; their figures stand in the section."""
    target = "training" if task == "training" else "speed"
    mine = [m for m in means if m.place.task == task and variant == m.variant and tried(m)]
    if not mine:
        yield Card(title, NOT_MEASURED, tone=ABSENT, target=target)
    for environment in dict.fromkeys(m.place.environment for m in mine):
        here = sorted((m for m in mine if m.place.environment == environment), key=lambda m: m.place.batch)
        m, *larger = here
        told = "".join(f"; batch {o.place.batch}: {_outcome(o, speeds)}" for o in larger)
        floor = floor_of(speeds, m.place)
        tone = mean_tone(m, floor)
        if tone == "good" and any(mean_tone(o, floor_of(speeds, o.place)) in ("bad", "warn") for o in larger):
            tone = "warn"
        if m.geomean.ratio is None:
            detail = f"no value; batch {m.place.batch}, {m.place.device}{told}"
            yield Card(title, f"failed on all {plural(tried(m), 'model')}", detail, "bad", target)
            continue
        models = f"{m.geomean.n} of {m.geomean.total} models"
        detail = f"{mean_words(m, floor)}; geometric mean, batch {m.place.batch}, {m.place.device}, {models}{told}"
        yield Card(title, ratio(m.geomean.ratio), detail, tone, target)


def _outcome(m: Mean, speeds: list[Speed]) -> str:
    """What a mean came to, in short."""
    if m.geomean.ratio is None:
        return "failed on all"
    return f"{m.geomean.ratio.estimate:.3f}, {mean_words(m, floor_of(speeds, m.place))}"


def _loading(starts: list[Start]) -> Iterator[Card]:
    """What kept packages leave of the time to the first result, for each device."""
    title = "Loading kept packages over compiling"
    found = [loaded for loaded in loading(starts) if loaded.where[0] == "inference" and loaded.where[-1] == AHEAD]
    if not found:
        yield Card(title, NOT_MEASURED, tone=ABSENT, target="start")
    for loaded in found:
        _, batch, device, _ = loaded.where
        whole = loaded.whole
        models = f"{whole.n} of {whole.total} models, {plural(whole.processes, 'pair')} of processes"
        detail = f"preparation and first call; geometric mean, batch {batch}, {device}, {models}"
        if whole.ratio is None:
            yield Card(title, "no value", f"{detail}: {next(iter(whole.failures.values()))}", "bad", "start")
        else:
            yield Card(title, ratio(whole.ratio), detail, "warn" if whole.failures else "", "start")


def _recompiled(speeds: list[Speed], starts: list[Start], graphs: Graphs) -> Card:
    """What Ariadne's compiled variants compiled after their first call: in processes of their own, at later batches, in rounds.

    Rounds count together, whatever variant of them compiled.
    """
    title = "Compiled again after the first call"
    mine = [s for s in starts if s.variant in OWN and s.failure is None]
    later = [(p, by_batch) for p, name, by_batch in graphs if name in OWN]
    rounds = {s.place: s.recompilations for s in speeds if s.variant in OWN and s.failure is None}
    if not mine and not rounds:
        return Card(title, NOT_MEASURED, tone=ABSENT, target="speed")
    own = max(0, *(s.recompilations for s in mine), *(c.again for _, by in later for c in by.values()), 0)
    most = max(own, *rounds.values(), 0)
    batches = sorted({p.batch for p in rounds})
    told = f"batch {', '.join(map(str, batches))}" if batches else "no rounds"
    detail = f"compiled split and ahead of time, on {plural(len(mine), 'start')} and in the rounds ({told})"
    return Card(title, plural(most, "graph"), detail, "bad" if own else "warn" if most else "good", "speed")


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
    if all(map(unjudged, found)):
        return Card(title, "not judged", f"{detail}; {WHY_UNJUDGED}", ABSENT, "break-even")
    shown = sum(s.calls is not None and s.calls.verdict == BETWEEN for s in found)
    return Card(title, f"{shown} of {len(found)} shown to", detail, target="break-even")


def _noise(speeds: list[Speed]) -> Card:
    title = "Noise floor, model against itself"
    floors = [s.against_model.floor for s in speeds if s.variant == NOISE and s.against_model]
    if not floors:
        return Card(title, NOT_MEASURED, tone=ABSENT, target="speed")
    places = f"over {plural(len(floors), 'place')} of model, task and batch"
    detail = f"{min(floors):.1%} at best, {places}; where it is so, a smaller difference is none"
    return Card(title, f"up to {max(floors):.1%}", detail, target="speed")


def _cuda(run: Run) -> Card:
    there = [s for s in run.records.samples.values() if s["device"].startswith("cuda")]
    failures = [s for s in there if s["status"] not in ("ok", *NOT_TRIED)]
    fine = [s for s in there if s["status"] == "ok"]
    if fine:
        names = {run.records.environments[s["environment"]].facts.get("gpu", "unknown") for s in fine}
        detail = ", ".join(sorted(names))
        if failures:
            detail += f"; {len(failures)} of {plural(len(fine) + len(failures), 'sample')} failed"
        if not any(s["job"] in ("rounds", "start") and s["variant"] not in (EAGER, NOISE) for s in fine):
            return Card(
                "CUDA", "measured in part", f"{detail}; no speed of a split or compiled model", "warn", "boundary"
            )
        return Card("CUDA", "measured", detail, "warn" if failures else "", "speed")
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
