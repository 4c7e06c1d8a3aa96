"""Left as found: preparing moves nothing, in the model, in its inputs or in the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from conformance.checks.base import PASSED, Check, hold_moved, no_grad, outcome, refuses
from conformance.suite import device
from conformance.suite.bench import CAPTURED, Bench
from conformance.suite.cases import Case
from conformance.suite.compare import difference, leaves, model_difference, sharing
from conformance.suite.cuts import cut_facts
from conformance.suite.state import rng_moved, rng_state, seed_all
from conformance.suite.statuses import Finding, Status, Stop

SEED, PAUSE = 11, 2e-4
RUN_AGAIN = ("toys/checkpoint", "toys/reentrant")  # while such a part runs as it is, nobody can tell who draws


def run(bench: Bench, case: Case) -> Finding:
    """Prepare a model that has gradients, a frozen parameter and a history; compare it with a twin, deeply, by identity too."""
    bench.judge(case.training)
    model, twin = bench.whole(case.training), bench.whole(case.training)
    ours, theirs = (bench.given(CAPTURED, CAPTURED, case.training, held=0.25) for _ in range(2))
    for one in (model, twin):
        _unsettle(one)
    before, process = _identities(model), _process()
    seed_all(SEED)
    stood = rng_state()
    runtime = bench.prepare(model, theirs, mode="generated_eager", compile_options=None)
    moved = rng_moved(stood, rng_state())
    if moved:
        raise Stop(Status.FAIL_RNG, moved.replace("after the whole model", "before preparing"))
    _hold_left(model, twin, before, "after preparing")
    hold_moved(ours, theirs, "the example inputs after preparing")
    changed = {key: now for key, now in _process().items() if now != process[key]}
    if changed:
        raise Stop(Status.FAIL_STATE, f"preparing left the process with {changed}, which was {process}")
    _hold_still_whole(bench, case, model, twin)
    if bench.entry.has_graph(case.training) and not case.model.startswith(RUN_AGAIN):
        _hold_draws_of_others(bench, case)
    bench.facts["prepared"] = cut_facts(runtime)["plan"]
    return PASSED


def _hold_draws_of_others(bench: Bench, case: Case) -> None:
    """What another thread draws while a model is prepared comes once: the generator stands where that thread left it.

    Where forward may draw too, it is refused that anybody else does.
    """
    model, given = bench.whole(case.training), bench.given(CAPTURED, CAPTURED, case.training)
    done, drawn = threading.Event(), 0

    def draw() -> None:
        nonlocal drawn
        while not (done.wait(PAUSE) and drawn):
            torch.rand(1, dtype=torch.float32)
            drawn += 1

    thread = threading.Thread(target=draw)
    seed_all(SEED)
    thread.start()
    try:
        bench.prepare(model, given, mode="generated_eager", compile_options=None)
    except Exception as error:
        if not refuses(error):
            raise
        bench.facts["draws_of_others"] = str(error)[:80]
        return
    finally:
        done.set()
        thread.join()
    found = torch.rand(1)
    seed_all(SEED)
    for _ in range(drawn):
        torch.rand(1, dtype=torch.float32)
    if not torch.equal(found, torch.rand(1)):
        raise Stop(
            Status.FAIL_RNG, f"another thread drew {drawn} numbers while the model was prepared, and some come again"
        )


def _unsettle(model: nn.Module) -> None:
    """Give a model what a user's may have: gradients, a frozen parameter, a hook on its registries, an attribute."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable[::2]:
        p.grad = torch.linspace(-1, 1, p.numel(), dtype=p.dtype, device=p.device).reshape(p.shape)
    if len(trainable) > 2:
        trainable[1].requires_grad_(False)
    vars(model)["a_plain_attribute"] = {"kept": [torch.arange(3.0), 1]}


def _identities(model: nn.Module) -> dict[str, int]:
    """The objects that a model is made of: a replaced parameter or module is another, even with the same data."""
    things: Iterator[tuple[str, Any]] = (
        (f"{kind} {name}", thing)
        for kind, named in (
            ("module", model.named_modules(remove_duplicate=False)),
            ("parameter", model.named_parameters(remove_duplicate=False)),
            ("buffer", model.named_buffers(remove_duplicate=False)),
        )
        for name, thing in named
    )
    found = {name: id(thing) for name, thing in things}
    found |= {f"gradient {name}": id(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"class {path}": id(type(module)) for path, module in model.named_modules()}
    found |= {f"memory {name}": p.data_ptr() for name, p in model.named_parameters()}
    return found


def _process() -> dict[str, Any]:
    """Flags of the process that a tracer may set."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "autocast": tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device.DEVICES),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "nn.Module.__call__": nn.Module.__call__,
        "Tensor.__getattribute__": torch.Tensor.__getattribute__,
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
    }


def _hold_left(model: nn.Module, twin: nn.Module, before: dict[str, int], when: str) -> None:
    for where, leaf in leaves(model):
        if isinstance(leaf, FakeTensor):
            raise Stop(Status.FAIL_STATE, f"{when}, {where.removeprefix('.')} is a fake tensor")
    found = model_difference(twin, model)
    if found:
        raise Stop(Status.FAIL_STATE, f"{when}, {found} (as it was against as it is)")
    for name, now in _identities(model).items():
        if before.get(name) != now:
            raise Stop(Status.FAIL_STATE, f"{when}, {name} is another object than before")
    named = [sharing(list(one.named_parameters(remove_duplicate=False))) for one in (twin, model)]
    if named[0] != named[1]:
        raise Stop(Status.FAIL_STATE, f"{when}, the tied weights are {named[1]}; they were {named[0]}")


def _hold_still_whole(bench: Bench, case: Case, model: nn.Module, twin: nn.Module) -> None:
    """The model, called as it always was, still gives what its twin gives."""
    expected, found = (outcome(lambda m=m: no_grad(m, bench.inputs(3)), SEED) for m in (twin, model))  # type: ignore[misc]
    wrong = difference(expected.value, found.value) if found.error is None else repr(found.error)
    if wrong and expected.error is None:
        raise Stop(Status.FAIL_STATE, f"the model itself gives something else after preparing: {wrong}")


CHECK = Check("left", ("mode",), "preparing leaves the model, its inputs and the process as they were", run)
