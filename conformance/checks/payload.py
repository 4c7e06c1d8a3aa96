"""The payload as bytes: written, read and run, and gradients sent back the same way."""

from __future__ import annotations

import sys
from typing import Any

from conformance.bench import Bench, Split
from conformance.cases import Case
from conformance.checks.base import PASSED, Check, at, hold, hold_moved, no_grad
from conformance.compare import difference, sharing, tensors
from conformance.state import seed_all
from conformance.statuses import Finding, Status, Stop


def run(bench: Bench, case: Case) -> Finding:
    """In eval mode: a forward over the wire, and a training step with both directions over the wire."""
    bench.judge(False)
    split = bench.split(case["cut"], False)
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
        _train(bench, case, split)
    return PASSED


def _over_the_wire(boundary: Any, where: str) -> Any:
    """The boundary as another process would get it; Stop where its bytes change, or do not say all."""
    sent = boundary.to_bytes()
    if not isinstance(sent, bytes):
        raise Stop(Status.FAIL_STRUCTURE, f"to_bytes returns {type(sent).__name__}; {where}")
    if sent != boundary.to_bytes():
        raise Stop(Status.FAIL_STATE, f"the bytes of one boundary differ from call to call; {where}")
    received = type(boundary).from_bytes(sent)
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


def _detached(raw: Any) -> list[Any]:
    return [(where, t.detach()) for where, t in tensors(raw)]


def _train(bench: Bench, case: Case, split: Split) -> None:
    """A step whose boundary and whose gradients travel as bytes, against the whole model's."""
    split = bench.split(case["cut"], False)
    twin = bench.whole(False)
    args, kwargs = bench.inputs(case.bs)
    seed_all(case.bs)
    expected = bench.entry.loss(twin(*args, **kwargs))
    expected.backward()
    args, kwargs = bench.inputs(case.bs)
    seed_all(case.bs)
    boundary = split.runtime.run_training_prefix(*args, **kwargs)
    received = _over_the_wire(boundary, at(split))
    loss, gradients = split.runtime.train_suffix(received, loss_fn=lambda output, _: bench.entry.loss(output))
    hold("loss over the wire", expected.detach(), loss, at(split))
    module = sys.modules[type(boundary).__module__]
    write, read = (getattr(module, f"gradients_{way}_bytes", None) for way in ("to", "from"))
    if write is not None and read is not None:
        sent = write(gradients)
        back = read(sent)
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
        names = {name: g for name, g in names.items() if name not in tied}
        found = {name: g for name, g in found.items() if name not in tied}
    hold_moved(names, found, f"gradients over the wire, {at(split)}")


def _tied(split: Split) -> set[str]:
    """The parameters that both sides use, which no one process of two can own alone."""
    shared = getattr(split.runtime, "shared_parameters", list)()
    ids = {id(p) for p in shared}
    return {name for name, p in split.model.named_parameters() if id(p) in ids}


CHECK = Check("payload", ("cut", "bs"), "a boundary and its gradients survive as bytes", run)
