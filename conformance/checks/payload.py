"""The payload as bytes: written, read and run, and gradients sent back the same way."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from conformance.checks.base import PASSED, Check, at, hold, hold_moved, no_grad
from conformance.checks.tolerance import hold_near
from conformance.suite import device
from conformance.suite.bench import Bench, Split
from conformance.suite.cases import Case
from conformance.suite.compare import difference, sharing, tensors
from conformance.suite.state import seed_all
from conformance.suite.statuses import Finding, Status, Stop

GRADIENTS = ("gradients_to_bytes", "gradients_from_bytes")


def run(bench: Bench, case: Case) -> Finding:
    """In eval mode: a forward over the wire, and a training step with both directions over the wire."""
    bench.judge(False)
    split = bench.split(case["cut"], False)
    _hold_leaves(split)
    twin = bench.whole(False)
    seed_all(case.bs)
    expected = no_grad(twin, bench.inputs(case.bs))
    args, kwargs = bench.inputs(case.bs)
    seed_all(case.bs)
    boundary = split.runtime.run_prefix(*args, **kwargs)
    received = _over_the_wire(boundary, at(split))
    bench.facts["bytes"] = len(boundary.to_bytes())
    hold("output over the wire", expected, split.runtime.run_suffix(received), at(split))
    if bench.trainable(False):
        _train(bench, case)
    return PASSED


def _over_the_wire(boundary: Any, where: str) -> Any:
    """The boundary as another process would get it; Stop where its bytes change, or do not say all."""
    boundary = getattr(boundary, "crossing", lambda: boundary)()  # of a forward that waits: what leaves it
    sent = boundary.to_bytes()
    if not isinstance(sent, bytes):
        raise Stop(Status.FAIL_STRUCTURE, f"to_bytes returns {type(sent).__name__}; {where}")
    if sent != boundary.to_bytes():
        raise Stop(Status.FAIL_STATE, f"the bytes of one boundary differ from call to call; {where}")
    received = type(boundary).from_bytes(sent, device=device.chosen())
    hold("payload over the wire", _detached(boundary.raw), _detached(received.raw), where)
    hold("value tree over the wire", boundary.values, received.values, where)
    # A tensor without elements has no memory to share.
    groups = [sharing([(w, t) for w, t in tensors(b.raw) if t.numel()]) for b in (boundary, received)]
    if groups[0] != groups[1]:
        raise Stop(Status.FAIL_STRUCTURE, f"payload tensors share memory otherwise over the wire: {groups}; {where}")
    for name in ("split_id", "plan_signature", "batch", "labels"):
        hold(f"{name} over the wire", getattr(boundary, name), getattr(received, name), where)
    if received.to_bytes() != sent:
        raise Stop(Status.FAIL_STATE, f"the bytes of a boundary change when it is read and written again; {where}")
    return received


def _hold_leaves(split: Split) -> None:
    """Stop `unsupported` where the runtime says why its boundaries can be used in this process alone."""
    if getattr(split.runtime, "stays", ""):
        raise Stop(Status.UNSUPPORTED, f"no boundary can be sent: {split.runtime.stays}"[:1000])


def _detached(raw: Any) -> list[Any]:
    return [(where, t.detach()) for where, t in tensors(raw)]


def _train(bench: Bench, case: Case) -> None:
    """A step whose boundary and whose gradients travel as bytes, against the whole model's."""
    split = bench.split(case["cut"], False, trained=True)
    twin = bench.whole(False)
    args, kwargs = bench.inputs(case.bs)
    seed_all(case.bs)
    expected = bench.entry.loss(twin(*args, **kwargs))
    expected.backward()
    args, kwargs = bench.inputs(case.bs)
    seed_all(case.bs)
    boundary = split.runtime.run_training_prefix(*args, **kwargs)
    _hold_leaves(split)
    received = _over_the_wire(boundary, at(split))
    loss, gradients = split.runtime.train_suffix(received, loss_fn=lambda output, _: bench.entry.loss(output))
    hold("loss over the wire", expected.detach(), loss, at(split))
    modules = [sys.modules[cls.__module__] for cls in type(boundary).__mro__]
    write, read = (next((f for m in modules if (f := getattr(m, name, None))), None) for name in GRADIENTS)
    if bench.target_name.startswith("ariadne:") and None in (write, read):
        raise Stop(Status.FAIL_STRUCTURE, f"no module of {type(boundary).__qualname__} has {' and '.join(GRADIENTS)}")
    if write is not None and read is not None:
        sent = write(gradients)
        there = {} if device.chosen() == "cpu" else {"device": device.chosen()}  # a target need not take devices
        back = read(sent, **there)
        wrong = difference(gradients, back) or (None if write(back) == sent else "the bytes differ when written again")
        if wrong:
            raise Stop(Status.FAIL_ACCURACY, f"boundary gradients over the wire: {wrong}; {at(split)}")
        gradients = back
    tied = _tied(split)
    split.runtime.backward_prefix(boundary, gradients)
    names = {name: p.grad for name, p in twin.named_parameters()}
    found = {name: p.grad for name, p in split.model.named_parameters()}
    if tied:  # two processes hold a copy each of a tied weight; here the sum is made in another order
        bench.facts["tied_across"] = len(tied)
        _hold_tied(bench, split, tied, names, found, case.bs)
        names = {name: g for name, g in names.items() if name not in tied}
        found = {name: g for name, g in found.items() if name not in tied}
    hold_moved(names, found, f"gradients over the wire, {at(split)}")


def _hold_tied(
    bench: Bench, split: Split, tied: set[str], ours: dict[str, Any], theirs: dict[str, Any], batch: int
) -> None:
    """Stop where the gradient of a parameter of both sides is farther from float64 than eager's error allows."""

    def call(model: nn.Module, inputs: Any) -> dict[str, Any]:
        bench.entry.loss(model(*inputs[0], **inputs[1])).backward()
        return {name: p.grad for name, p in model.named_parameters() if name in tied}

    if "no-double" in bench.entry.tags:
        bench.facts["tied_unchecked"] = "the model does not run in float64"
        return
    expected, found = ({name: g for name, g in given.items() if name in tied} for given in (ours, theirs))
    reference = bench.whole(False), call, bench.inputs(batch), batch
    hold_near(bench, reference, expected, found, f"tied gradients over the wire, {at(split)}")


def _tied(split: Split) -> set[str]:
    """The parameters that both sides use, which no one process of two can own alone."""
    shared = getattr(split.runtime, "shared_parameters", list)()
    ids = {id(p) for p in shared}
    return {name for name, p in split.model.named_parameters() if id(p) in ids}


CHECK = Check("payload", ("cut", "bs"), "a boundary and its gradients survive as bytes", run)
