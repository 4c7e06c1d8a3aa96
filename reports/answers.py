"""The three answers at the top: is it right, is it faster, does compiling pay; plain sentences, computed from the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from benchmarks.break_even import BETWEEN, NEVER
from benchmarks.findings import Mean, Speed, Start
from benchmarks.statistics import doubt
from benchmarks.variants import AHEAD, COMPILE, DEFAULT
from reports import compared
from reports.document import Answer
from reports.equality import Judged, counts
from reports.outcomes import EXPECTED, FAIL, MISSING, PASS, UNEXPECTED
from reports.payback import judged, unjudged
from reports.runs import Run
from reports.speed import floor_of, mean_tone, tried
from reports.words import plural

TOYS = "toys/"
SPLITS = {
    "generated": "the split as plain Python",
    "compiled": "the split compiled by torch.compile",
    DEFAULT: "the split compiled without options",
    AHEAD: "the split compiled ahead of time",
    "compiled reduce-overhead fixed": "the split compiled for each batch, with CUDA graphs",
    "CUDA graphs": "the split as CUDA graphs of plain Python",
}


def answers(
    run: Run, found: list[Judged], speeds: list[Speed], means: list[Mean], starts: list[Start]
) -> tuple[Answer, ...]:
    """One answer to each question, in the order in which they are asked; what was not measured says so."""
    return (
        Answer("Is it right?", " ".join(_right(run, found)), "equality"),
        Answer("Is it faster?", " ".join(_faster(speeds, means)), "speed"),
        Answer("Does compiling pay?", " ".join(_pays(starts)), "break-even"),
    )


def _right(run: Run, found: list[Judged]) -> Iterator[str]:
    if run.compared:
        bad = sum(r["status"] != "ok" for r in run.compared)
        yield f"{'No' if bad else 'Yes, in all that was compared'} on this device: {compared.counted(run)}."
    if not found:
        yield f"{'T' if run.compared else 'Not measured: t'}hese runs hold no results of the suite."
        return
    n = counts(found)
    toys = sum(j.case.model.startswith(TOYS) for j in found)
    models = {j.case.model for j in found if not j.case.model.startswith(TOYS)}
    wrong = n[FAIL] + n[UNEXPECTED] + n[MISSING]
    start = "Yes, in all that was compared" if not wrong else "No" if n[FAIL] else "Not shown everywhere"
    differed = f"in {n[FAIL]:,} it did not" if n[FAIL] else "none differed"
    yield (
        f"{start}: in {n[PASS]:,} of {plural(len(found), 'check')} the split gave what the whole model gives, bit for bit, and "
        f"{differed}. {_of_the_suite(run, found)}"
    )
    if n[EXPECTED]:
        yield f"{n[EXPECTED]:,} could not be compared or were refused with a reason, as was known before."
    if n[UNEXPECTED] + n[MISSING]:
        yield f"{n[UNEXPECTED] + n[MISSING]:,} have no result, or not the expected one."
    yield (
        f"{toys:,} of the checks are of toys, small programs that isolate one difficulty each; {len(found) - toys:,} are of "
        f"{plural(len(models), 'whole model')}{_most(found)}."
    )
    if compiled := sum(j.case.get("backend") not in (None, *PLAIN, "debug") for j in found):
        yield f"{compiled} of the checks ran compiled code, which may round in its own way, and compared within a tolerance."
    if run.selftest is not None:
        yield f"Of {run.selftest['mutants']} planted bugs the checks noticed {run.selftest['killed']}."


def _of_the_suite(run: Run, found: list[Judged]) -> str:
    """How many checks there are in all: whoever ran these chose them by name, before there were results."""
    left = run.suite - len({str(j.case) for j in found})
    if not left:
        return "That is the whole suite."
    return f"The suite has {run.suite:,} checks; whoever made the run chose these (conformance/tiers.toml has the usual parts)."


def _most(found: list[Judged]) -> str:
    """The whole model with the most checks, where it has a quarter of them or more: a count of models hides it."""
    counted = Counter(j.case.model for j in found if not j.case.model.startswith(TOYS))
    (name, n), *others = counted.most_common() or [("", 0)]
    return f", {n:,} of them of {name} alone" if others and 4 * n >= counted.total() else ""


def _faster(speeds: list[Speed], means: list[Mean]) -> Iterator[str]:
    """For each device, at the smallest batch: each kind of split beside the model, and the fastest of them; then in training."""
    mine = [m for m in means if m.variant in SPLITS and tried(m)]
    if not any(m.place.task == "inference" for m in mine):
        yield "Not measured: these runs hold no speeds of inference."
    for environment in dict.fromkeys(m.place.environment for m in mine):
        here, training = (_at_smallest(mine, environment, task) for task in ("inference", "training"))
        if here:
            yield from _inference(here, speeds)
        if training:
            told = "; ".join(_compared(m, speeds) for m in training)
            yield f"In training, a step of batch {training[0].place.batch}: {told}."


def _at_smallest(means: list[Mean], environment: str, task: str) -> list[Mean]:
    found = [m for m in means if (m.place.environment, m.place.task) == (environment, task)]
    batch = min((m.place.batch for m in found), default=0)
    return sorted((m for m in found if m.place.batch == batch), key=lambda m: list(SPLITS).index(m.variant))


def _inference(here: list[Mean], speeds: list[Speed]) -> Iterator[str]:
    place = here[0].place
    told = [_compared(m, speeds) for m in here]
    many = plural(max(m.geomean.total for m in here), "model")
    start = _whether([mean_tone(m, floor_of(speeds, m.place)) for m in here if not m.off])
    yield (
        f"{start} Compared with the model itself, both halves in one process, so without a network. On {place.device}, "
        f"batch {place.batch}, in the geometric mean of {many}: {'; '.join(told)}."
    )
    known = [(m.geomean.ratio, m.variant) for m in here if m.geomean.ratio is not None and not m.off]
    if len(known) > 1:
        yield f"Of these, {SPLITS[min((r.estimate, name) for r, name in known)[1]]} is the fastest here."
    plain = next((r for r, name in known if name == "generated"), None)
    worse = [SPLITS[name] for r, name in known if plain is not None and r.low > plain.high]
    if worse:
        yield f"{' and '.join(worse).capitalize()} {'is' if len(worse) == 1 else 'are'} slower than as plain Python."


def _whether(tones: list[str]) -> str:
    """The answer in a word, of how each kind of split compares with the model."""
    faster = sum(tone in ("good", "warn") for tone in tones)
    if faster:
        return "Yes." if faster == len(tones) else "Partly."
    return "No." if "bad" in tones else "No difference is shown."


def _compared(m: Mean, speeds: list[Speed]) -> str:
    name, r = SPLITS[m.variant], m.geomean.ratio
    if r is None:
        return f"{name} failed on all {plural(tried(m), 'model')}"
    models = "" if m.geomean.n == m.geomean.total else f" (on {m.geomean.n} of {plural(m.geomean.total, 'model')})"
    if m.off:
        return f"{name} takes {r.estimate:.2f}x the model's time, but gave other numbers than the model on {', '.join(m.off)}"
    tone = mean_tone(m, floor_of(speeds, m.place))
    if tone in ("good", "warn") and r.estimate < 1:
        return f"{name} takes {r.estimate:.2f}x the model's time, {1 - r.estimate:.0%} less{models}"
    if tone == "bad":
        return f"{name} is slower, {r.estimate:.2f}x the model's time{models}"
    why = doubt(r, m.geomean.processes, floor_of(speeds, m.place))
    return f"{name} shows no difference from the model ({r.estimate:.2f}x; {why})"


def _pays(starts: list[Start]) -> Iterator[str]:
    """Of each way of compiling, with an empty cache and with a kept one: on how many models, after how many calls."""
    found = [s for s in judged(starts) if s.place.task == "inference"]
    known = [s for s in found if s.calls is not None and not unjudged(s)]
    if not found:
        yield "Not measured: these runs hold no costs at the start."
        return
    if not known:
        yield "Not judged: too few processes were started for a verdict."
        return
    compiled = [s for s in known if s.variant not in PLAIN]
    if compiled:
        paid = len(_paying(compiled))
        start = (
            "Not shown"
            if not paid
            else "Yes"
            if paid == len(compiled)
            else f"In {paid} of {len(compiled)} cases of inference"
        )
        if 0 < paid < len(compiled):
            start += " (a case is a model, a way of compiling, and an empty or a kept cache)"
        told = (
            ", in a process that makes enough calls; what it must pay off against is the model itself, uncompiled"
            if paid
            else ""
        )
        yield f"{start}{told}."
    for variant in dict.fromkeys(s.variant for s in known):
        told = [
            _paid([s for s in known if s.variant == variant and s.cache == c], words) for c, words in CACHES.items()
        ]
        yield f"{NAMES.get(variant, variant)}: {'; '.join(filter(None, told))}."


PLAIN = ("generated",)
NAMES = {
    "generated": "For comparison, the split as plain Python, where nothing is compiled",
    "compiled": "The split compiled by torch.compile",
    AHEAD: "The split compiled ahead of time",
    COMPILE: "torch.compile of the whole model",
}
CACHES = {
    "cold": "compiled from nothing",
    "warm": "with what an earlier process kept",
    "none": "counting its preparation",
}


def _paying(some: list[Start]) -> list[Start]:
    return [s for s in some if s.calls is not None and s.calls.verdict == BETWEEN]


def _paid(some: list[Start], when: str) -> str:
    """On how many models it has paid; and, of the one in the middle by calls, after how many and after how long."""
    if not some:
        return ""
    paid = _paying(some)
    never = sum(s.calls is not None and s.calls.verdict == NEVER for s in some)
    if not paid:
        return f"{when}, {'never' if never == len(some) else 'not shown to have paid'} on {plural(len(some), 'model')}"
    found = [(s.cost.estimate / s.saving.estimate, s) for s in paid if s.cost and s.saving and s.pace]
    calls, one = sorted(found, key=lambda pair: pair[0])[(len(found) - 1) // 2]
    seconds = calls * one.pace.estimate if one.pace else 0.0
    after = (
        "from the first call on"
        if calls <= 1
        else f"after about {_rounded(calls)} calls, which take the model itself {_duration(seconds)}"
    )
    median = f"; on the median one, {(one.place.model or '').rpartition('/')[2]}," if len(paid) > 1 else ""
    return f"{when}, it has paid on {len(paid)} of {plural(len(some), 'model')}{median} {after}"


def _rounded(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}"


def _duration(seconds: float) -> str:
    """Seconds in words that can be pictured.

    >>> _duration(4.21), _duration(500), _duration(9000)
    ('4.2 s', '8.3 minutes', '2.5 hours')
    """
    unit, scale = ("s", 1) if seconds < 120 else ("minutes", 60) if seconds < 7200 else ("hours", 3600)
    return f"{float(f'{seconds / scale:.2g}'):g} {unit}"
