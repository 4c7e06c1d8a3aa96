"""Changes: a model that is changed between calls is followed. After each change the split gives what the whole model gives now."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from torch import nn

from ariadne import PythonSplit
from conformance.checks.base import PASSED, Check, at, hold, hold_outcomes, hold_rng, hold_state, no_grad, outcome
from conformance.checks.guards import adds_a_hook, flips, replaces
from conformance.suite.bench import CAPTURED, REFERENCE, Bench, Split
from conformance.suite.cases import Case
from conformance.suite.statuses import Finding, Status, Stop

Change = Callable[[nn.Module], bool]
SIZES = (REFERENCE, CAPTURED)


def run(bench: Bench, case: Case) -> Finding:
    """One change after the other on one split and its twin; the last takes one back, for which no plan is captured."""
    bench.judge(case.training)
    trains = bench.trainable(case.training)
    split, twin = bench.split("q50", case.training, trained=trains), bench.whole(case.training)
    done = bench.facts["changes"] = list[str]()
    for name, change in _changes(bench, case):
        if _runs(bench, twin, change) and change(split.model) and change(twin):
            done.append(name)
            _compare(bench, split, twin, name, trains)
    if isinstance(split.runtime, PythonSplit):
        return PASSED
    if bench.entry.has_graph(not case.training):
        plans = []
        for turn in ("there", "back", "there again", "back again"):
            flips(split.model), flips(twin)
            _compare(bench, split, twin, f"the other mode, {turn}", trains, (True, False))
            plans.append(len(split.runtime.plans))
        asks = any(node.is_witness for plan in split.runtime.plans for node in plan.nodes)  # else each count is a path
        if plans[-1] != plans[1] and not asks:
            raise Stop(Status.FAIL_STRUCTURE, f"a mode that is known had a plan captured: {plans} plans; {at(split)}")
        done.append("the other mode")
    return PASSED


def _changes(bench: Bench, case: Case) -> Iterator[tuple[str, Change]]:
    """The first and the last float of a module, such as a dropout's rate; then a module, and a hook around all."""
    modules = bench.whole(case.training).named_modules()
    floats = [(p, n) for p, m in modules for n, v in vars(m).items() if type(v) is float and not n.startswith("_")]
    for path, name in dict.fromkeys((*floats[:1], *floats[-1:])):
        yield f"another value of {f'{path}.{name}'.lstrip('.')}", partial(_halves, path, name)
    yield "a module of another class and a hook", lambda model: [replaces(model), adds_a_hook(model)] != [False, False]


def _runs(bench: Bench, twin: nn.Module, change: Change) -> bool:
    """Whether the whole model, a copy of it, still runs after the change."""
    tried = copy.deepcopy(twin)
    if not change(tried):
        return False

    def runs(mode: bool) -> bool:
        return outcome(lambda: no_grad(tried.train(mode), bench.inputs(REFERENCE)), REFERENCE).error is None

    return runs(True) and runs(False)


def _halves(path: str, name: str, model: nn.Module) -> bool:
    held = vars(model.get_submodule(path))
    held[name] /= 2
    return True


def _compare(bench: Bench, split: Split, twin: nn.Module, name: str, trains: bool, modes: Iterable[bool] = ()) -> None:
    """A call at two batch sizes, and a step where it trains; all that they give and leave."""
    where = f"after {name}, {at(split)}"
    for size in SIZES:
        ours, theirs = bench.inputs(size), bench.inputs(size)
        whole = outcome(lambda given=theirs: no_grad(twin, given), size)
        mine = outcome(
            lambda given=ours: split.runtime.run_suffix(split.runtime.run_prefix(*given[0], **given[1])), size
        )
        hold_outcomes(whole, mine)
        hold("output", whole.value, mine.value, where)
        hold_rng(whole, mine, where)
    if trains:
        ours, theirs = bench.inputs(REFERENCE), bench.inputs(REFERENCE)

        def step() -> None:
            boundary = split.runtime.run_training_prefix(*ours[0], **ours[1])
            _, gradients = split.runtime.train_suffix(boundary, loss_fn=lambda output, _: bench.entry.loss(output))
            split.runtime.backward_prefix(boundary, gradients)

        whole = outcome(lambda: bench.entry.loss(twin(*theirs[0], **theirs[1])).backward(), REFERENCE)
        hold_outcomes(whole, outcome(step, REFERENCE))
    hold_state(twin, split, bench, where, modes)


CHECK = Check("changes", ("mode",), "a model that is changed between calls is followed, each change by a plan", run)
