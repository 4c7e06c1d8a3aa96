"""`ariadne check`: the split held against the model, on this machine, over cuts, batches and training steps."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from ariadne.check import CHECKS, SPLIT_CHECKS, CheckResult, Kind, check, passed
from ariadne.cli.options import again, boundary, sizes
from ariadne.cli.output import FAILED, OK, Answer, Progress, progress, table
from ariadne.cli.subject import Subject, load
from ariadne.errors import SpecError

MOST = 10  # of what went wrong, in words
CUTS, BATCHES, SECONDS = ("q25", "q50", "q75"), (1, 2, 3, 5), 30  # where the options do not say


def run(options: Namespace) -> Answer:
    """Check in eval mode all but training, and training in training mode; with --train, all in training mode."""
    unknown = next((kind for kind in options.only if kind not in CHECKS), None)
    if unknown is not None:
        raise SpecError(f"there is no check {unknown!r}; there are {', '.join(CHECKS)}")
    subject = load(options)
    results: list[CheckResult] = []
    end = time.perf_counter() + _seconds(options)
    with progress(f"checking {subject.name} ...") as line:
        passes = _passes(options)
        for number, (training, kinds) in enumerate(passes):
            subject.model.train(training)
            share = (end - time.perf_counter()) / (len(passes) - number)
            results += _check(subject, options, kinds, share, line)
    good = passed(results)
    counts = Counter(r.status for r in results)
    data = {
        "model": subject.name,
        "inputs": subject.given,
        "passed": good,
        "counts": dict(counts),
        "results": [{**asdict(r), "again": "" if r.status == "pass" else _again(options, r)} for r in results],
    }
    return Answer(_text(subject, options, results, good), data, OK if good else FAILED)


def _passes(options: Namespace) -> list[tuple[bool, list[Kind]]]:
    """What is checked in which training mode: a plan of eval mode says nothing of training."""
    only: list[Kind] = options.only
    if options.train:
        return [(True, only)]
    training: list[Kind] = [k for k in only if k in ("twice", "left", "train")] if "train" in only else []
    passes: list[tuple[bool, list[Kind]]] = [(False, [k for k in only if k != "train"]), (True, training)]
    return [found for found in passes if found[1]]


def _seconds(options: Namespace) -> float:
    """How long to check: as asked; else all that was named; else half a minute."""
    if options.seconds:
        return float(options.seconds)
    return math.inf if options.cuts or options.every or options.batches else SECONDS


def _check(
    subject: Subject, options: Namespace, kinds: Sequence[Kind], seconds: float, line: Progress
) -> list[CheckResult]:
    def note(result: CheckResult, left: int) -> None:
        rest = f"; {left} to come" if left else ""
        line(f"{subject.name}: {result.check} {result.split_id}, batch {result.batch}: {result.status}{rest}")

    cuts = ["every"] if options.every else [boundary(cut) for cut in options.cuts or CUTS]
    return subject.owning(
        lambda: check(
            subject.model, subject.args, subject.kwargs, cuts=cuts, batches=options.batches or BATCHES, steps=options.steps,
            only=kinds, dynamic_batch=options.dynamic_batch, mode=options.mode, seed=options.seed, seconds=seconds,
            loss_fn=subject.loss, inputs=subject.inputs, on_result=note, **sizes(options.dynamic, options.batch_dim),
        )
    )  # fmt: skip


def _text(subject: Subject, options: Namespace, results: Sequence[CheckResult], good: bool) -> str:
    """A table with a row for each check and cut, and a column for each batch; below it what went wrong."""
    seen = sorted({r.batch for r in results})
    rows: dict[tuple[str, ...], dict[int, str]] = {}
    for r in results:
        where = r.split_id if r.check in ("forward", "replay", "train") else ""
        after = r.after if where else ""
        key = (r.check, "train" if r.training else "eval", where, after)
        rows.setdefault(key, {})[r.batch] = "FAIL" if r.status == "fail" else r.status
    lines = [(*key, *(found.get(b, "") for b in seen)) for key, found in rows.items()]
    heads = ["check", "mode", "cut", "after module", *(f"batch {b}" for b in seen)]
    said: dict[tuple[str, str], list[CheckResult]] = {}
    for r in results:
        if r.detail:
            said.setdefault((r.status, r.detail), []).append(r)
    notes = []
    for (status, detail), found in [*said.items()][:MOST]:
        head = found[0]
        where = f" at {head.split_id}" if head.split_id else ""
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        notes += ["", f"{status}: {head.check}{where}, batch {head.batch}{more}: {detail}"]
        if status != "skipped":
            notes.append(f"  again: {_again(options, head)}")
    if len(said) > MOST:
        notes += ["", f"{len(said) - MOST} more of these; --json has all"]
    counts = ", ".join(f"{n} {status}" for status, n in Counter(r.status for r in results).items())
    verdict = _verdict(results, good)
    seconds = sum(r.seconds for r in results)
    inputs = f"inputs, at batch {subject.batch}: {subject.given}"
    return "\n".join(
        [inputs, "", table(heads, lines), *notes, "", f"{subject.name}: {counts} in {seconds:.1f} s: {verdict}"]
    )


def _verdict(results: Sequence[CheckResult], good: bool) -> str:
    found = {r.status for r in results}
    if good and not any(r.check in SPLIT_CHECKS for r in results):
        shown = sorted({r.check for r in results if r.status == "pass"})
        words = {
            "left": "preparing a split leaves the model as found",
            "twice": "the model gives the same answer twice",
        }
        return f"{' and '.join(words[check] for check in shown)}; that split and model are equal was not asked"
    if good:
        skipped = ", in all that could be compared; what was skipped is not shown" if "skipped" in found else ""
        late = "; time was up for what is left out, --seconds N gives it more" if "left out" in found else ""
        return f"the split equals the model, bit for bit{skipped}{late}"
    if "fail" in found:
        return "split and model differ"
    if "nondeterministic" in found:
        return "the model differs from itself, so that nothing can be shown of a split of it"
    if "refused" in found:
        return "the split refused calls that the model takes"
    return "nothing could be compared"


def _again(options: Namespace, r: CheckResult) -> str:
    """The command line that repeats this one check."""
    more = ["--only", r.check]
    if r.check not in ("twice",) and r.split_id:
        more = ["--cuts", r.split_id, *more]
    if r.check in ("forward", "replay", "train"):
        more += ["--batches", str(r.batch)]
    if r.check == "train":
        more += ["--steps", str(r.steps)]
    if options.mode != "generated_eager":
        more += ["--mode", options.mode]
    mine = Namespace(**{**vars(options), "train": options.train or (r.training and r.check != "train")})
    return again(mine, *more)
