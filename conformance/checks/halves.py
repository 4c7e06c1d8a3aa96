"""Halves as files: saved, loaded where the model's libraries can't be imported, run and trained, against the whole model."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn

import ariadne
from ariadne import tree
from ariadne.errors import AriadneError, BoundaryError, HalfError
from conformance.checks.base import PASSED, Check, at, hold, hold_moved, no_grad
from conformance.suite import device
from conformance.suite.bench import REFERENCE, Bench, Split
from conformance.suite.cases import Case
from conformance.suite.compare import frozen, sharing
from conformance.suite.handed import functions_called, modules_called
from conformance.suite.state import rng_moved, rng_state, seed_all
from conformance.suite.statuses import Finding, Status, Stop

LIBRARIES = ("torchvision", "timm", "ultralytics", "transformers", "rfdetr")
BATCHES, STEPS, MOMENTUM = (1, 2, 3, 8), 3, 0.9


def run(bench: Bench, case: Case) -> Finding:
    """Both halves from their files: at four batches; moved to double precision; three training steps; all that crosses as bytes."""
    bench.judge(case.training)
    split = bench.split(case["cut"], case.training, trained=True)
    trains = bench.trainable(case.training)
    batches = [b for b in BATCHES if _runs(bench, split, case.training, b)]
    examples = [bench.inputs(b) for b in (*batches, *([REFERENCE] if trains else ()))]
    _show_paths(bench, split, batches, trains)
    bench.side(case.training)
    with tempfile.TemporaryDirectory() as folder:
        halves = [_half(bench, split, side, examples, Path(folder)) for side in ("prefix", "suffix")]
        bench.facts["file_bytes"] = [(Path(folder) / side).stat().st_size for side in ("prefix", "suffix")]
        for batch in batches:
            _hold_forward(bench, case, split, halves, batch)
        if batches:
            _hold_replaced(bench, case, split, Path(folder), batches[-1])
        if not case.training and batches:
            _hold_double(bench, split, Path(folder), batches[-1])
        if not trains:
            return PASSED
        if halves[0].shared_parameters() or halves[1].shared_parameters():
            bench.facts["tied_across"] = len(halves[0].shared_parameters())
            return PASSED
        halves = [_loaded(bench, split, Path(folder) / side) for side in ("prefix", "suffix")]
        _hold_training(bench, case, split, halves)
    return PASSED


def _runs(bench: Bench, split: Split, training: bool, batch: int) -> bool:
    """Whether the whole model runs at a batch, and the split in one process, which is all that halves can be asked for."""
    try:
        seed_all(batch)
        no_grad(bench.whole(training), bench.inputs(batch))
    except Exception:  # the check `forward` says what it is
        return False
    args, kwargs = bench.inputs(batch)
    bench.side(training)
    split.forward(*args, **kwargs)
    bench.side(training)
    return True


def _show_paths(bench: Bench, split: Split, batches: list[int], trains: bool) -> None:
    """Where Python branches on data or draws, have the split know each path that its halves will be asked for."""
    if not any(plan.questions for plan in split.runtime.plans):
        return
    calls = [(b, bench.inputs(b)) for b in batches]
    calls += [(step, bench.inputs(REFERENCE, 10 + step)) for step in range(STEPS if trains else 0)]
    for seed, inputs in calls:
        seed_all(seed)
        split.runtime.learn(inputs)
    bench.facts["paths"] = len(split.runtime.plans)


def _half(bench: Bench, split: Split, side: str, examples: list[Any], folder: Path) -> Any:
    split.runtime.save(folder / side, side=side, examples=examples)
    return _loaded(bench, split, folder / side)


def _loaded(bench: Bench, split: Split, path: Path) -> Any:
    plans = [*split.runtime._plans]
    handed = modules_called(plans, split.model, bench.whole(split.model.training))  # of a model that never ran
    with hidden(LIBRARIES):
        return ariadne.load(path, device=device.chosen(), allow=functions_called(plans), plain=True, modules=handed)


@contextmanager
def hidden(libraries: tuple[str, ...]) -> Iterator[None]:
    """Make libraries unimportable: what was imported of them is not found, and nothing can be."""
    kept = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in libraries}
    for name in kept:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(libraries))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in libraries:
            del sys.modules[name]
        sys.modules.update(kept)


def _hold_forward(bench: Bench, case: Case, split: Split, halves: list[Any], batch: int) -> None:
    twin = bench.whole(case.training)
    seed_all(batch)
    expected = no_grad(twin, bench.inputs(batch))
    after = rng_state()
    plans = [plan for half in halves for plan in half.runtime._plans]
    if case.training or any(plan.objects or plan.stores for plan in plans):
        halves = [_fresh(half) for half in halves]
    args, kwargs = bench.inputs(batch)
    seed_all(batch)
    with hidden(LIBRARIES):
        sent = halves[0].run_prefix(*args, **kwargs).to_bytes()
        found = halves[1].run_suffix(ariadne.BoundaryPayload.from_bytes(sent, device=device.chosen()))
    where = f"batch {batch}, {at(split)}"
    hold("output of the halves", expected, _as(expected, found), where)
    _hold_state(twin, halves, where)
    _hold_records(split, twin, halves, where)
    moved = rng_moved(after, rng_state())
    if moved:
        raise Stop(Status.FAIL_RNG, f"{where}: {moved}")


def _hold_records(split: Split, twin: nn.Module, halves: list[Any], where: str) -> None:
    """Stop where the containers that the halves filled are not, together, what one call of the model put into its own."""
    filled = {(s.path, s.steps[0]) for plan in split.runtime.plans for s in plan.stores if s.table == "held"}
    for path, key in sorted(filled):
        name = f"{path}.{key}".removeprefix(".")
        mine = [half.attributes[name] for half in halves if name in half.attributes]
        if not mine:
            raise Stop(Status.FAIL_STRUCTURE, f"no half has the {name!r} that forward fills; {where}")
        theirs = twin.get_submodule(path).__dict__[key]
        hold(f"what forward left in {name!r}", _plainly(theirs), _together([_plainly(m) for m in mine]), where)


def _plainly(thing: Any) -> Any:
    """Deques as lists, plain objects as dicts."""
    if isinstance(thing, SimpleNamespace):
        thing = vars(thing)
    if isinstance(thing, dict):
        return {k: _plainly(v) for k, v in thing.items()}
    return [*thing] if isinstance(thing, deque) else thing


def _together(parts: list[Any]) -> Any:
    """What the halves have put into one container: lists one after the other, dicts as one."""
    if all(isinstance(p, list) for p in parts):
        return [thing for p in parts for thing in p]
    if all(isinstance(p, dict) for p in parts):
        return {k: _together([p[k] for p in parts if k in p]) for k in {k: None for p in parts for k in p}}
    return parts[-1]


def _hold_double(bench: Bench, split: Split, folder: Path, batch: int) -> None:
    """In double precision: the halves refuse to go there, or give what the model gives that was moved alike."""
    try:
        with hidden(LIBRARIES):
            halves = [_loaded(bench, split, folder / side).double() for side in ("prefix", "suffix")]
    except HalfError as error:
        bench.facts["double"] = str(error)[:80]
        return
    twin, inputs = bench.whole(False).double(), tree.map_leaves(_double, bench.inputs(batch))
    try:
        seed_all(batch)
        expected = no_grad(twin, inputs)
    except Exception as error:
        bench.facts["double"] = f"the whole model raises {type(error).__name__}"
        return
    seed_all(batch)
    args, kwargs = inputs
    with hidden(LIBRARIES):
        try:
            sent = halves[0].run_prefix(*args, **kwargs).to_bytes()
            found = halves[1].run_suffix(ariadne.BoundaryPayload.from_bytes(sent, device=device.chosen()))
        except AriadneError as error:
            bench.facts["double"] = f"{type(error).__name__}: {error}"[:80]
            return
    bench.facts["double"] = "equal"
    hold("output of the halves", expected, _as(expected, found), f"in double precision, {at(split)}")


def _hold_replaced(bench: Bench, case: Case, split: Split, folder: Path, batch: int) -> None:
    """Halves that are given their own weights anew go together as before; one given others goes with its like alone."""
    prefix, suffix = (_loaded(bench, split, folder / side) for side in ("prefix", "suffix"))
    twin, known = bench.whole(case.training), prefix.digest
    state, params = twin.state_dict(), dict(twin.named_parameters())
    last = next((n for n in reversed(params) if params[n].is_floating_point() and params[n].numel()), None)
    if not known or last is None or params.keys() - state.keys():
        return
    tied = [n for n, p in twin.named_parameters(remove_duplicate=False) if p is params[last]]
    others = {**state, **dict.fromkeys(tied, state[last] + 1)}
    try:
        prefix.replace_weights(state)
        suffix.replace_weights(state)
        if not prefix.digest == suffix.digest == known:
            _differ("given its own weights anew", known, prefix, suffix)
        suffix.replace_weights(others)
        args, kwargs = bench.inputs(batch)
        seed_all(batch)
        with hidden(LIBRARIES):
            boundary = prefix.run_prefix(*args, **kwargs)
            if boundary.weights:  # empty where forward wrote some
                with suppress(BoundaryError):
                    suffix.run_suffix(boundary)
                    raise Stop(
                        Status.FAIL_STATE,
                        f"a suffix given another {last!r} takes what a prefix with the first one sent; {at(split)}",
                    )
        prefix = _loaded(bench, split, folder / "prefix")
        prefix.replace_weights(others)
    except HalfError as error:
        bench.facts["replaced"] = str(error)[:80]
        return
    if not prefix.digest or prefix.digest != suffix.digest:
        _differ("given others", known, prefix, suffix)


def _differ(what: str, known: str, *halves: Any) -> NoReturn:
    found = ", ".join(f"the {half.part} has digest {half.digest or 'none'}" for half in halves)
    raise Stop(Status.FAIL_STATE, f"{what}, {found}; in their files it is {known}")


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _fresh(half: Any) -> Any:
    """A copy of a half, so that what a call moves in it is not there for the next."""
    return copy.deepcopy(half)


def _as(whole: Any, plain: Any) -> Any:
    """What halves gave as dicts and tuples, in the containers of the model."""
    leaves, spec = [*tree.leaves(plain)], tree.flatten(whole)[1]
    if len(leaves) != spec.size:
        raise Stop(Status.FAIL_STRUCTURE, f"the halves give {len(leaves)} values, the whole model {spec.size}")
    return tree.unflatten(leaves, spec)


def _hold_state(twin: nn.Module, halves: list[Any], where: str) -> None:
    """Stop where a half's parameter, buffer or gradient is not the model's of that name."""
    tensors = {
        **dict(twin.named_parameters(remove_duplicate=False)),
        **dict(twin.named_buffers(remove_duplicate=False)),
    }
    for half in halves:
        mine = half.state_dict(keep_vars=True)
        strange = sorted(mine.keys() - tensors.keys())
        if strange:
            raise Stop(Status.FAIL_STATE, f"the {half.part} holds {strange[0]!r}, which the model has not; {where}")
        theirs = {n: tensors[n] for n in mine}
        shared = [_sharing(found) for found in (theirs, mine)]
        if shared[0] != shared[1]:
            raise Stop(Status.FAIL_STATE, f"the {half.part}'s names share tensors otherwise: {shared}; {where}"[:600])
        hold_moved(frozen({n: tensors[n] for n in mine}), frozen(dict(mine)), f"the {half.part}'s tensors, {where}")


def _sharing(found: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """Which names are one tensor, and which tensors lie in one memory."""
    named: dict[int, list[str]] = {}
    for name, t in found.items():
        named.setdefault(id(t), []).append(name)
    return [*named.values()], sharing([(n, t) for n, t in found.items() if t.numel()])


def _hold_training(bench: Bench, case: Case, split: Split, halves: list[Any]) -> None:
    twin, rate = bench.whole(case.training), bench.rate(case.training)
    whole = torch.optim.SGD(twin.parameters(), lr=rate, momentum=MOMENTUM)
    optimizers = [
        torch.optim.SGD(p, lr=rate, momentum=MOMENTUM) if (p := [*half.parameters()]) else None for half in halves
    ]
    prefix, suffix = halves
    for step in range(STEPS):
        where = f"step {step}, {at(split)}"
        kept: list[Any] = []
        whole.zero_grad()
        args, kwargs = bench.inputs(REFERENCE, 10 + step)
        seed_all(step)
        try:
            output = twin(*args, **kwargs)
            expected = bench.entry.loss(output)
            expected.backward()
        except Exception as error:
            if not step:
                raise
            bench.facts["whole_ends"] = f"{type(error).__name__} in step {step}"
            return
        whole.step()
        after = rng_state()
        args, kwargs = bench.inputs(REFERENCE, 10 + step)

        def loss_of(found: Any, _: Any, output: Any = output, kept: list[Any] = kept) -> Any:
            kept.append(_as(output, found))
            return bench.entry.loss(kept[0])

        seed_all(step)
        with hidden(LIBRARIES):
            boundary = prefix.run_training_prefix(*args, **kwargs)
            received = ariadne.BoundaryPayload.from_bytes(boundary.to_bytes(), device=device.chosen())
            loss, gradients = suffix.train_suffix(received, loss_fn=loss_of, optimizer=optimizers[1])
            prefix.backward_prefix(boundary, gradients, optimizer=optimizers[0])
        hold("output of the halves", frozen(output), frozen(kept[0]), where)
        hold("loss", expected.detach(), loss, where)
        _hold_state(twin, halves, where)
        moved = rng_moved(after, rng_state())
        if moved:
            raise Stop(Status.FAIL_RNG, f"{where}: {moved}")


CHECK = Check(
    "halves",
    ("cut", "mode"),
    "both halves, from files and without the model's code, equal it",
    run,
    of_plans=True,
)
