"""What raw records come to: speeds against the model, costs at the start, break-even; plain data for tables and pages."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.break_even import (
    NOT_SHOWN,
    BreakEven,
    break_even,
    break_even_seconds,
    curve,
    excess,
    grid,
    held_against,
)
from benchmarks.records import Record, Records
from benchmarks.statistics import (
    Comparison,
    Geomean,
    Interval,
    TooFewSamplesError,
    compare,
    geometric_mean,
    interval,
    percentile,
    ratio_of_pairs,
)
from benchmarks.variants import EAGER, NOISE, REFERENCE

APART = f"not measured in the same process as the {EAGER}"
STRAYED = 1e-3  # off by more than this share of the largest value, an output is no more taken for the model's


@dataclass(frozen=True)
class Place:
    """Where a finding holds: the environment's id, the device, the task, the model (None over all of them) and the batch."""

    environment: str
    device: str
    task: str
    model: str | None
    batch: int

    @property
    def overall(self) -> Place:
        """The same place, over all models."""
        return replace(self, model=None)


@dataclass(frozen=True)
class Speed:
    """A variant at steady state, side by side with the model; `failure` says why there is no value.

    `ratios` holds one number for each process, by its number; `p90` and `p99` pool the samples of all, None where too few.
    `strayed`: the largest difference from the model's output, over its largest value; `off`: that is more than `STRAYED`, and the
    model's own from call to call is not.
    """

    place: Place
    variant: str
    failure: str | None = None
    seconds: float | None = None
    p90: float | None = None
    p99: float | None = None
    ratios: Mapping[int, float] = field(default_factory=dict)
    against_model: Comparison | None = None
    recompilations: int = 0
    strayed: float | None = None
    off: bool = False


@dataclass(frozen=True)
class Start:
    """What a variant costs at the start, with a cold cache, a warm one or none ("none"), and when that is paid back.

    `cost` is X, `saving` what a steady call saves, `pace` what a steady call of the model takes, all in seconds. X has what the
    variant imports beside torch, and is beyond the model's own: without a start of the model in a process of the same number it
    is None, and so are `calls` and `seconds`; `paired` counts the processes that have both. With a warm cache,
    `first_over_cold` is the first call's time over that of the cold process, and `whole_over_cold` that of preparation and
    first call, both by process.
    """

    place: Place
    variant: str
    cache: str
    failure: str | None = None
    processes: int = 0
    paired: int = 0
    prepare: Interval | None = None
    first_call: Interval | None = None
    cost: Interval | None = None
    saving: Interval | None = None
    pace: Interval | None = None
    calls: BreakEven | None = None
    seconds: BreakEven | None = None
    balance: tuple[tuple[int, Interval], ...] = ()
    first_over_cold: Mapping[int, float] = field(default_factory=dict)
    whole_over_cold: Mapping[int, float] = field(default_factory=dict)
    compilations: int = 0
    recompilations: int = 0
    imports: dict[str, float] | None = None
    rss_bytes: dict[str, int] | None = None
    tensor_peak_bytes: int | None = None


@dataclass(frozen=True)
class Compiled:
    """The most graphs that any process compiled at a batch; `again`: of those, the most after the first batch of a process."""

    graphs: int
    again: int


@dataclass(frozen=True)
class Mean:
    """A variant against the model over the fixed set of all models that were measured at this batch.

    `off`: the models on which its outputs are not the model's.
    """

    place: Place
    variant: str
    geomean: Geomean
    off: tuple[str, ...] = ()


def _place(sample: Record) -> Place:
    return Place(sample["environment"], sample["device"], sample["task"], sample["model"], sample["batch"])


def _placed(records: Records, job: str) -> dict[Place, defaultdict[str, list[Record]]]:
    """The samples of a job, by place and variant; a variant that was not measured has none."""
    groups: dict[Place, defaultdict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for sample in records.of(job):
        groups[_place(sample)][sample["variant"]].append(sample)
    return groups


def _failure(samples: list[Record]) -> str | None:
    """The words of the first sample that is not "ok": where one process failed, the variant failed."""
    bad = next((s for s in samples if s["status"] != "ok"), None)
    return None if bad is None else f"{bad['status']}: {bad['reason']}"


def speeds(records: Records) -> list[Speed]:
    """Every variant at every place, in the order in which they were measured."""
    own = _placed(records, "reference")
    found = []
    for place, variants in _placed(records, "rounds").items():
        found += [_speed(place, name, samples, variants) for name, samples in variants.items()]
        if place in own:  # against the model in its own processes
            found.append(_speed(place, REFERENCE, own[place][REFERENCE], own[place]))
    return found


def _speed(place: Place, name: str, samples: list[Record], beside: dict[str, list[Record]]) -> Speed:
    failure = _failure(samples)
    if failure is not None:
        return Speed(place, name, failure)
    model = beside.get(EAGER, [])
    ratios, noise = _ratios(samples, model), _ratios(beside.get(NOISE, []), model)
    if not ratios:
        return Speed(place, name, APART)
    lone = len(ratios.keys() - noise.keys())
    if lone:
        return Speed(
            place, name, f"no eager-against-eager pair in {lone} of {len(ratios)} processes to hold it against"
        )
    times = [s["seconds"] for s in samples]
    pooled = [t for process in times for t in process]
    again = beside.get(NOISE, [])
    if _unlike(samples, again):
        return Speed(
            place,
            name,
            "its outputs are unlike the model's: of other shapes or types, or not finite where the model's are",
        )
    return Speed(
        place,
        name,
        seconds=statistics.median(map(statistics.median, times)),
        p90=_tail(pooled, 0.9),
        p99=_tail(pooled, 0.99),
        ratios=ratios,
        against_model=compare([*ratios.values()], [*noise.values()]) if name != EAGER else None,
        recompilations=max(s["graphs_in_rounds"] for s in samples),
        strayed=_strayed(samples),
        off=_off(samples, again),
    )


def _strayed(samples: list[Record]) -> float:
    """How far the outputs of these samples were off from the model's, at most."""
    return max((float(s["strayed"]) for s in samples if s["status"] == "ok"), default=0.0)


def _unlike(samples: list[Record], noise: list[Record]) -> bool:
    """Whether the outputs are of other shapes or types, or not finite, though the model's own are alike from call to call."""
    return math.isinf(_strayed(samples)) and math.isfinite(_strayed(noise))


def _off(samples: list[Record], noise: list[Record]) -> bool:
    """Whether the outputs are not the model's, though the model's own are the same from call to call."""
    return _strayed(samples) > STRAYED >= _strayed(noise)


def _ratios(above: list[Record], below: list[Record]) -> dict[int, float]:
    """A ratio for each process that ran both, by its number.

    That they ran in one is told by the token of the process; records that are older than the tokens have none.
    """
    ok = {(s["process"], s.get("token")): s["seconds"] for s in below if s["status"] == "ok"}
    found = ((s, ok.get((s["process"], s.get("token")))) for s in above if s["status"] == "ok")
    return {s["process"]: ratio_of_pairs(s["seconds"], other) for s, other in found if other is not None}


def _tail(samples: list[float], quantile: float) -> float | None:
    try:
        return percentile(samples, quantile)
    except TooFewSamplesError:
        return None


def means(found: list[Speed]) -> list[Mean]:
    """The geometric means over models, for each variant at each batch; the set of models is the same for all variants."""
    groups: dict[Place, dict[str, dict[str, Speed]]] = defaultdict(lambda: defaultdict(dict))
    for speed in found:
        groups[speed.place.overall][speed.variant][str(speed.place.model)] = speed
    result = []
    for place, variants in groups.items():
        models = sorted({model for by_model in variants.values() for model in by_model})
        for name, by_model in variants.items():
            if name in (EAGER, NOISE):
                continue
            values: dict[str, Mapping[int, float] | str] = {}
            for model in models:
                speed = by_model.get(model, Speed(place, name, "not measured"))
                values[model] = speed.failure or speed.ratios
            off = tuple(m for m in models if m in by_model and by_model[m].off)
            result.append(Mean(place, name, geometric_mean(values), off))
    return result


def versus(records: Records, name: str, other: str) -> list[Mean]:
    """One variant against another that ran in the same rounds, over all models; `Mean.variant` is "name over other"."""
    groups: dict[Place, dict[str, defaultdict[str, list[Record]]]] = defaultdict(dict)
    for place, variants in _tried(records, name, other):
        groups[place.overall][str(place.model)] = variants
    found = []
    for place, models in groups.items():
        geomean = geometric_mean({m: _against(v, name, other) for m, v in models.items()})
        off = tuple(m for m, v in models.items() if _off(v[name] + v[other], v[NOISE]))
        found.append(Mean(place, f"{name} over {other}", geomean, off))
    return found


def versus_faster(records: Records, name: str, others: Sequence[str]) -> list[Mean]:
    """One variant against whichever of others was the faster in the same process, over all models."""
    groups: dict[Place, dict[str, Mapping[int, float] | str]] = defaultdict(dict)
    for place, variants in _placed(records, "rounds").items():
        if not variants[name]:
            continue
        each = [_against(variants, name, other) for other in others]
        ratios = [found for found in each if not isinstance(found, str)]
        worst = next((found for found in each if isinstance(found, str)), None)
        shared = set.intersection(*map(set, ratios)) if ratios else ()
        groups[place.overall][str(place.model)] = worst or {p: max(found[p] for found in ratios) for p in shared}
    words = f"{name} over the faster of {' and '.join(others)}"
    return [Mean(place, words, geometric_mean(models)) for place, models in groups.items()]


def versus_each(records: Records, name: str, other: str) -> list[Speed]:
    """One variant against another that ran in the same rounds, on each model; `Speed.variant` is "name over other"."""
    found = []
    for place, variants in _tried(records, name, other):
        pair, ratios = f"{name} over {other}", _against(variants, name, other)
        noise = _ratios(variants[NOISE], variants[EAGER])
        if isinstance(ratios, str) or not noise:
            found.append(Speed(place, pair, ratios if isinstance(ratios, str) else APART))
            continue
        both = variants[name] + variants[other]
        found.append(
            Speed(
                place,
                pair,
                ratios=ratios,
                against_model=compare([*ratios.values()], [*noise.values()]),
                strayed=_strayed(both),
                off=_off(both, variants[NOISE]),
            )
        )
    return found


def _tried(records: Records, name: str, other: str) -> Iterator[tuple[Place, defaultdict[str, list[Record]]]]:
    """The places at which either of two variants was measured, with all samples there."""
    for place, variants in _placed(records, "rounds").items():
        if variants[name] or variants[other]:
            yield place, variants


def _against(variants: dict[str, list[Record]], name: str, other: str) -> Mapping[int, float] | str:
    """A ratio for each process, or the words of the failure of either."""
    for one in (name, other):
        failure = _failure(variants[one]) if variants[one] else "not measured"
        if failure is not None:
            return f"{one}: {failure}"
        if _unlike(variants[one], variants[NOISE]):
            return f"{one}: its outputs are unlike the model's"
    return _ratios(variants[name], variants[other]) or f"{name}: not measured in the same process as {other}"


def recompilations(records: Records) -> Iterator[tuple[Place, str, dict[int, Compiled]]]:
    """For each variant that compiled: what was compiled at each batch, in the order in which batches were measured.

    What a process compiled after its first batch, and in rounds (which `Speed` has), are recompilations.
    """
    groups: dict[tuple[Place, str], dict[int, Compiled]] = defaultdict(dict)
    first: dict[Any, int] = {}
    for sample in records.of("rounds"):
        if sample["status"] == "ok" and sample["variant"] not in (EAGER, NOISE):
            place, batch, count = _place(sample), sample["batch"], sample["graphs"]
            whole = Place(place.environment, place.device, place.task, place.model, 0)
            process = whole, sample["variant"], sample["process"], sample.get("token")
            again = count if first.setdefault(process, batch) != batch else 0
            found = groups[whole, sample["variant"]]
            known = found.get(batch, Compiled(0, 0))
            found[batch] = Compiled(max(known.graphs, count), max(known.again, again))
    for (place, name), found in groups.items():
        if any(c.graphs for c in found.values()):
            yield place, name, found


def starts(records: Records) -> list[Start]:
    """Every variant that costs something at the start, cold and warm apart."""
    groups: dict[tuple[Place, str, str], list[Record]] = defaultdict(list)
    for sample in records.of("start"):
        groups[_place(sample), sample["variant"], sample["cache"]].append(sample)
    pairs = _placed(records, "rounds")
    noise = {place: [*_ratios(beside[NOISE], beside[EAGER]).values()] for place, beside in pairs.items()}
    wrong = {
        (place, name)
        for place, beside in pairs.items()
        for name, samples in beside.items()
        if _failure(samples) is None and (_unlike(samples, beside[NOISE]) or _off(samples, beside[NOISE]))
    }
    return [
        _start(*where, samples, groups, noise.get(where[0], []), where[:2] in wrong)
        for where, samples in groups.items()
    ]


def _start(
    place: Place, name: str, cache: str, samples: list[Record], groups: dict[tuple[Place, str, str], list[Record]],
    noise: list[float], wrong: bool,
) -> Start:  # fmt: skip
    """One row. `noise`: the eager-against-eager ratios of the rounds, for starts that were measured without such a pair.

    `wrong`: in the rounds of this place its outputs were not the model's, so that nothing it saves pays for anything.
    """
    failure = _failure(samples)
    if failure is not None:
        return Start(place, name, cache, failure)
    eager = {s["process"]: _excess(s) for s in groups.get((place, EAGER, "none"), []) if s["status"] == "ok"}
    shared: dict[str, Any] = {
        "processes": len(samples),
        "prepare": interval([s["prepare_seconds"] for s in samples]),
        "first_call": interval([s["calls_seconds"][0] for s in samples]),
        "compilations": max(s["graphs"][2] for s in samples),
        "recompilations": max(s["graphs"][-1] - s["graphs"][2] + s["graphs_in_rounds"] for s in samples),
        "imports": {k: statistics.median(s["imports"][k] for s in samples) for k in samples[0]["imports"]},
        "rss_bytes": {k: max(s["rss_bytes"][k] for s in samples) for k in samples[0]["rss_bytes"]},
        "tensor_peak_bytes": samples[0]["tensor_peak_bytes"],
    }
    if cache == "warm":
        cold = {s["process"]: s for s in groups.get((place, name, "cold"), []) if s["status"] == "ok"}
        pairs = [(s["process"], s, cold[s["process"]]) for s in samples if s["process"] in cold]
        shared["first_over_cold"] = {p: s["calls_seconds"][0] / c["calls_seconds"][0] for p, s, c in pairs}
        shared["whole_over_cold"] = {p: _to_first_result(s) / _to_first_result(c) for p, s, c in pairs}
    if name == EAGER:
        return Start(place, name, cache, **shared)
    samples = [s for s in samples if s["process"] in eager]
    if not samples:
        return Start(place, name, cache, **shared)
    costs = [_excess(s) - eager[s["process"]] for s in samples]
    savings = [
        statistics.median(a - b for a, b in zip(s["seconds"][EAGER], s["seconds"][name], strict=True)) for s in samples
    ]
    paces = [statistics.median(s["seconds"][EAGER]) for s in samples]
    ratios = [ratio_of_pairs(s["seconds"][name], s["seconds"][EAGER]) for s in samples]
    own = [ratio_of_pairs(s["seconds"][NOISE], s["seconds"][EAGER]) for s in samples if NOISE in s["seconds"]]
    calls, seconds = (
        held_against(own or noise, ratios, found)
        for found in (break_even(costs, savings), break_even_seconds(costs, savings, paces))
    )
    if calls.verdict == NOT_SHOWN != seconds.verdict:  # one is the other in another unit: it can't be shown alone
        seconds = BreakEven(NOT_SHOWN, reason=calls.reason)
    if wrong:
        calls, seconds = (BreakEven(NOT_SHOWN, reason="its outputs are not the model's") for _ in range(2))
    last = 10 * calls.high if calls.high < 1e9 else 1e5
    return Start(
        place,
        name,
        cache,
        **shared,
        paired=len(costs),
        cost=interval(costs),
        saving=interval(savings),
        pace=interval(paces),
        calls=calls,
        seconds=seconds,
        balance=tuple(curve(costs, savings, grid(last))),
    )


def _to_first_result(sample: Record) -> float:
    return float(sample["prepare_seconds"] + sample["calls_seconds"][0])


def _excess(sample: Record) -> float:
    """X of one process, over the median of its steady calls.

    What the variant imports counts as preparation: torch.compile imports its own parts when it is called, within the clock.
    """
    steady = statistics.median(sample["seconds"][sample["variant"]])
    imports = math.fsum(seconds for name, seconds in sample["imports"].items() if name != "torch")
    return excess(imports + sample["prepare_seconds"], sample["calls_seconds"], steady)
