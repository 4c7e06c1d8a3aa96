"""Each check sees the faults that it is there for, and gives them their exact status."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ariadne.boundary import BoundaryPayload
from conformance import checks
from conformance.suite.bench import Bench, load
from conformance.suite.cases import Case
from conformance.suite.statuses import Status
from conformance.unit.checks_kit import halved_gradients, louder, no_walk_back, training
from conformance.unit.faults import PARAMETERS, after_suffix, entry, run, target
from conformance.unit.trap_kit import Fn

SALT = "conformance.unit.faults:salted"


@pytest.mark.parametrize("check", PARAMETERS)
def test_a_sound_target_passes(check: str) -> None:
    found = run(check)
    assert found.status is Status.PASS, found
    assert check == "left" or found.facts["op"] >= 1


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_sound_target_passes_compiled_training_of_one_step_and_of_no_more(backend: str) -> None:
    found = run("train", mode="train", backend=backend, steps=1)
    assert found.status is Status.PASS, found
    assert "write steps=1" in run("train", backend=backend, steps=3).reason


# --- faults -------------------------------------------------------------------------------------------------------------


def suffix(change: Callable[[Any], Any]) -> Any:
    """The suffix, with its output changed."""
    return {"run_suffix": lambda runtime, boundary: change(runtime.run_suffix(boundary))}


def logits(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return suffix(lambda output: {**output, "logits": change(output["logits"])})


def raising(error: Exception) -> Any:
    def run_suffix(runtime: Any, boundary: Any) -> Any:
        raise error

    return {"run_suffix": run_suffix}


class UnsupportedError(Exception):
    pass


class OwnError(Exception):
    pass


def ulp(t: torch.Tensor) -> torch.Tensor:
    """One element, moved to the next number."""
    t = t.clone()
    t.view(-1)[-1] = torch.nextafter(t.view(-1)[-1], torch.tensor(9e9))
    return t


FORWARD = {
    "a last bit": (logits(ulp), Status.FAIL_ACCURACY),
    "an index": (suffix(lambda o: {**o, "top": o["top"].flip(0) + 1}), Status.FAIL_ACCURACY),
    "another container": (suffix(lambda o: tuple(o.values())), Status.FAIL_STRUCTURE),
    "another order of keys": (suffix(lambda o: dict(reversed(o.items()))), Status.FAIL_STRUCTURE),
    "a missing output": (suffix(lambda o: {"logits": o["logits"]}), Status.FAIL_STRUCTURE),
    "another dtype": (logits(torch.Tensor.double), Status.FAIL_STRUCTURE),
    "other strides": (logits(lambda t: t.t().contiguous().t()), Status.FAIL_STRUCTURE),
    "a graph": (logits(lambda t: t.requires_grad_()), Status.FAIL_STRUCTURE),
    "a number for a tensor": (suffix(lambda o: {**o, "top": o["top"].tolist()}), Status.FAIL_STRUCTURE),
    "statistics moved twice": (after_suffix(lambda m: m.norm.num_batches_tracked.add_(1)), Status.FAIL_STATE),
    "a parameter moved": (after_suffix(lambda m: m.unused.weight.data.add_(1e-6)), Status.FAIL_STATE),
    "a gradient": (after_suffix(lambda m: setattr(m.first.bias, "grad", torch.zeros(6))), Status.FAIL_STATE),
    "an attribute": (after_suffix(lambda m: setattr(m, "seen", 1)), Status.FAIL_STATE),
    "a flag": (after_suffix(lambda m: m.drop.eval()), Status.FAIL_STATE),
    "a draw": (after_suffix(lambda m: torch.rand(1)), Status.FAIL_RNG),
    "a draw of Python's": (after_suffix(lambda m: random.random()), Status.FAIL_RNG),
    "a draw of numpy's": (after_suffix(lambda m: numpy.random.rand()), Status.FAIL_RNG),
    "an error": (raising(RuntimeError("no")), Status.CRASH),
    "an error of its own": (raising(OwnError("no")), Status.CRASH),
    "a refusal": (raising(UnsupportedError("no such op")), Status.UNSUPPORTED),
    "no memory": (raising(MemoryError("no more")), Status.OOM),
}


@pytest.mark.parametrize(("methods", "status"), FORWARD.values(), ids=FORWARD.keys())
def test_forward_sees(methods: Any, status: Status) -> None:
    assert run("forward", target(**methods)).status is status


def writing(runtime: Any, x: torch.Tensor) -> Any:
    boundary = runtime.run_prefix(x)
    x.view(-1)[0] += 1
    return boundary


COMPILED = {
    "a number far off": (logits(lambda t: t * 1.01), Status.FAIL_ACCURACY),
    "statistics moved twice": (after_suffix(lambda m: m.norm.num_batches_tracked.add_(1)), Status.FAIL_STATE),
    "statistics a little off": (after_suffix(lambda m: m.norm.running_mean.mul_(1.01)), Status.FAIL_ACCURACY),
    "a written input": ({"run_prefix": writing}, Status.FAIL_ACCURACY),
}


@pytest.mark.parametrize(("methods", "status"), COMPILED.values(), ids=COMPILED.keys())
def test_forward_sees_what_compiled_code_leaves_behind(methods: Any, status: Status) -> None:
    assert run("forward", target(**methods), mode="train", backend="eager").status is status


def test_a_crash_comes_with_the_last_lines_of_its_traceback_and_a_refusal_with_its_reason() -> None:
    crash = run("forward", target(**raising(OwnError("no"))))
    assert crash.reason.endswith("OwnError: no")
    assert "in run_suffix" in crash.reason
    assert run("forward", target(**raising(UnsupportedError("no such op")))).reason == "UnsupportedError: no such op"


def test_forward_sees_a_fault_at_one_cut_of_every_cut_and_names_the_op() -> None:
    def run_suffix(runtime: Any, boundary: Any) -> Any:
        output = runtime.run_suffix(boundary)
        return {**output, "logits": ulp(output["logits"])} if runtime.candidate.cut == 2 else output

    found = run("forward", target(run_suffix=run_suffix), cut="every")
    assert found.status is Status.FAIL_ACCURACY
    assert "cut after op 2 (" in found.reason
    assert found.facts["op"] == 2


def test_where_the_whole_raises_the_split_must_raise_the_same() -> None:
    found = run("forward", bs=1)
    assert found.status is Status.ERROR_EAGER
    assert "the whole model raises ValueError, as the split does: Expected more than 1 value" in found.reason
    quiet = {"run_prefix": lambda runtime, *_: None, "run_suffix": lambda runtime, boundary: torch.ones(1)}
    assert run("forward", target(**quiet), bs=1).status is Status.FAIL_STRUCTURE
    other = {"run_prefix": lambda runtime, *_: None, **raising(OwnError("no"))}
    assert run("forward", target(**other), bs=1).status is Status.CRASH


DEBUG = {
    "an output": (logits(ulp), Status.FAIL_ACCURACY),
    "statistics": (after_suffix(lambda m: m.norm.running_mean.add_(1)), Status.FAIL_STATE),
    "a draw": (after_suffix(lambda m: torch.rand(1)), Status.FAIL_RNG),
    "gradients": (training(backward_prefix=halved_gradients), Status.FAIL_STATE),
    "a loss": (training(train_suffix=louder), Status.FAIL_ACCURACY),
}


@pytest.mark.parametrize(("methods", "status"), DEBUG.values(), ids=DEBUG.keys())
def test_debug_sees_where_the_interpreter_differs_from_generated_code(methods: Any, status: Status) -> None:
    assert run("debug", target(mode="debug_interpreter", **methods)).status is status
    assert run("debug", target(mode="generated_eager", **methods)).status is status


def forgetful(runtime: Any, x: torch.Tensor) -> Any:
    for p in runtime.model.parameters():
        p.grad = None
    return runtime.run_training_prefix(x)


def untie(model: nn.Module) -> None:
    model.last.weight = nn.Parameter(model.first.weight.detach().clone(), True)


INPUTS = {
    "a written input": (training(run_prefix=writing), Status.FAIL_STATE),
    "a view that became a copy": (suffix(lambda o: {**o, "left": o["left"].clone()}), Status.FAIL_STRUCTURE),
    "outputs apart": (suffix(lambda o: {**o, "logits": o["logits"].clone()}), Status.FAIL_STATE),
    "gradients that were there, gone": (training(run_training_prefix=forgetful), Status.FAIL_STATE),
    "weights no longer tied": (after_suffix(untie), Status.FAIL_STATE),
}


@pytest.mark.parametrize(("methods", "status"), INPUTS.values(), ids=INPUTS.keys())
def test_inputs_sees(methods: Any, status: Status) -> None:
    assert run("inputs", target(**methods)).status is status


def writes_payload(runtime: Any, boundary: Any) -> Any:
    output = runtime.run_suffix(boundary)
    next(t for t in boundary.raw if isinstance(t, torch.Tensor)).add_(1)
    return output


def shared_buffer() -> Any:
    """A prefix that hands out the same memory each time."""
    held: list[Any] = []

    def run_prefix(runtime: Any, *args: Any) -> Any:
        boundary = runtime.run_prefix(*args)
        held[:] = held or [t.clone() for t in boundary.raw]
        for kept, new in zip(held, boundary.raw, strict=True):
            kept.copy_(new)
        boundary.raw = tuple(held)
        return boundary

    return {"run_prefix": run_prefix}


def one_at_a_time() -> Any:
    """A suffix that walks back to the newest prefix, whichever boundary it is given."""
    newest: list[Any] = []

    def run_training_prefix(runtime: Any, *args: Any) -> Any:
        newest.append(runtime.run_training_prefix(*args))
        return newest[-1]

    def train_suffix(runtime: Any, boundary: Any, targets: Any = None, *, loss_fn: Any, **options: Any) -> Any:
        return runtime.train_suffix(newest.pop(0), targets, loss_fn=loss_fn, **options)

    return {"run_training_prefix": run_training_prefix, "train_suffix": train_suffix}


def second_differs() -> Any:
    seen: list[int] = []

    def run_suffix(runtime: Any, boundary: Any) -> Any:
        output = runtime.run_suffix(boundary)
        seen.append(id(boundary))
        return {**output, "logits": ulp(output["logits"])} if seen.count(id(boundary)) > 1 else output

    return {"run_suffix": run_suffix}


TWICE = {
    "a payload that is written": (lambda: {"run_suffix": writes_payload}, Status.FAIL_STATE),
    "a second answer that differs": (second_differs, Status.FAIL_ACCURACY),
    "prefixes that share memory": (shared_buffer, Status.FAIL_ACCURACY),
    "training that knows one boundary": (one_at_a_time, Status.FAIL_ACCURACY),
}


@pytest.mark.parametrize(("make", "status"), TWICE.values(), ids=TWICE.keys())
def test_twice_sees(make: Callable[[], Any], status: Status) -> None:
    assert run("twice", target(**make())).status is status


def leave_fake(model: nn.Module) -> None:
    with FakeTensorMode():
        vars(model)["anchors"] = torch.empty(3)


def replace_parameter(model: nn.Module) -> None:
    old = model.unused.bias
    model.unused.bias = nn.Parameter(old.detach().clone())
    model.unused.bias.grad = old.grad


LEFT = {
    "a fake tensor": (leave_fake, Status.FAIL_STATE),
    "an attribute": (lambda m: vars(m)["a_plain_attribute"]["kept"].append(2), Status.FAIL_STATE),
    "statistics": (lambda m: m.norm.running_mean.add_(1e-6), Status.FAIL_STATE),
    "a gradient gone": (lambda m: setattr(m.first.weight, "grad", None), Status.FAIL_STATE),
    "another gradient": (lambda m: m.first.weight.grad.zero_(), Status.FAIL_STATE),
    "a flag": (lambda m: m.first.bias.requires_grad_(not m.first.bias.requires_grad), Status.FAIL_STATE),
    "a mode": (lambda m: m.drop.eval(), Status.FAIL_STATE),
    "a hook": (lambda m: m.norm.register_forward_hook(lambda *_: None), Status.FAIL_STATE),
    "another parameter": (replace_parameter, Status.FAIL_STATE),
    "a draw": (lambda m: torch.rand(1), Status.FAIL_RNG),
    "a draw of Python's": (lambda m: random.random(), Status.FAIL_RNG),
    "threads": (lambda m: torch.set_num_threads(2), Status.FAIL_STATE),
}


@pytest.mark.parametrize(("act", "status"), LEFT.values(), ids=LEFT.keys())
def test_left_sees(act: Callable[[nn.Module], Any], status: Status) -> None:
    threads = torch.get_num_threads()
    try:
        assert run("left", target(preparing=act)).status is status
    finally:
        torch.set_num_threads(threads)


class Boundary(BoundaryPayload):
    """Where a fault sits in the payload's own methods, the boundary's class must be another."""

    __slots__ = ()
    fault = ""

    def to_bytes(self) -> bytes:
        return super().to_bytes() + (b"" if self.fault != "salted" else bytes([next(_numbers) % 256]))

    @classmethod
    def from_bytes(cls, data: Any, *, device: str = "cpu") -> Any:
        found = super().from_bytes(data, device=device)
        if cls.fault == "rounded":
            found.raw = tuple(t.half().float() if isinstance(t, torch.Tensor) else t for t in found.raw)
        if cls.fault == "relaid":
            found.raw = tuple(t.t().contiguous().t() if isinstance(t, torch.Tensor) else t for t in found.raw)
        return found


_numbers = itertools.count()


@pytest.mark.parametrize(
    ("fault", "status"),
    [("salted", Status.FAIL_STATE), ("rounded", Status.FAIL_ACCURACY), ("relaid", Status.FAIL_STRUCTURE)],
)
def test_payload_sees(fault: str, status: Status) -> None:
    kind = type("Faulted", (Boundary,), {"fault": fault, "__slots__": ()})

    def run_prefix(runtime: Any, *args: Any) -> Any:
        b = runtime.run_prefix(*args)
        return kind(b.split_id, b.plan_signature, b.batch, b.labels, b.raw)

    assert run("payload", target(run_prefix=run_prefix)).status is status


def test_payload_sees_what_the_suffix_makes_of_a_payload_that_it_received() -> None:
    def run_suffix(runtime: Any, boundary: Any) -> Any:
        output = runtime.run_suffix(boundary)
        return {**output, "logits": ulp(output["logits"])}

    assert run("payload", target(run_suffix=run_suffix)).status is Status.FAIL_ACCURACY


@pytest.mark.slow
@pytest.mark.variants
def test_source_sees_text_that_depends_on_the_process() -> None:
    case = Case.parse("source/nn/mlp10x64/cut=q50")  # where nothing is planted it passes in the smoke tier
    found = checks.run(case, Bench("nn/mlp10x64", SALT))
    assert found.status is Status.FAIL_STRUCTURE
    assert "suffix differs in a fresh process" in found.reason


def unguarded(name: str) -> Any:
    """A runtime that takes what it should refuse, in one way."""

    def run_prefix(runtime: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else torch.zeros(3, 6)
        if name == "rank" and x.dim() > 2:
            x = x.squeeze(-1)
        if name == "dtype":
            x = x.float()
        if name == "batch" and x.shape[0] > 8:
            x = x[:8]
        if name == "size" and x.shape[-1] > 6:
            x = x[..., :6]
        more = () if name in ("many", "missing") else args[1:]
        return runtime.run_prefix(*((x, *more) if args or name == "missing" else ()), **kwargs)

    return {"run_prefix": run_prefix}


def takes_any_boundary(runtime: Any, boundary: Any) -> Any:
    runtime = runtime.resplit(boundary.split_id) if boundary.split_id != runtime.split_id else runtime
    return runtime.run_suffix(boundary)


def trains_twice(runtime: Any, boundary: Any, targets: Any = None, *, loss_fn: Any, **options: Any) -> Any:
    boundary._consumed = {}
    return runtime.train_suffix(boundary, targets, loss_fn=loss_fn, **options)


def says_it_otherwise(runtime: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return runtime.run_prefix(*args, **kwargs)
    except ValueError as error:
        raise RuntimeError(str(error)) from error


def breaks_off(runtime: Any, *args: Any, **options: Any) -> None:
    raise OwnError("no gradient for this parameter")


def hookless(runtime: Any, *args: Any, **kwargs: Any) -> Any:
    for m in runtime.model.modules():
        m._forward_hooks.clear()
    return runtime.run_prefix(*args, **kwargs)


GUARDS = {
    "rank": unguarded("rank"),
    "dtype": unguarded("dtype"),
    "batch": unguarded("batch"),
    "size": unguarded("size"),
    "an input too many": unguarded("many"),
    "an input too few": unguarded("missing"),
    "another split's boundary": {"run_suffix": takes_any_boundary},
    "a boundary trained twice": {"train_suffix": trains_twice},
    "a hook that is not run": {"run_prefix": hookless},
    "another class of error": {"run_prefix": says_it_otherwise},
}


@pytest.mark.parametrize("methods", GUARDS.values(), ids=GUARDS.keys())
def test_guards_sees_what_is_not_refused(methods: Any) -> None:
    found = run("guards", target(**methods))
    assert found.status is Status.FAIL_STATE, found


@pytest.mark.parametrize(
    ("walk_back", "status"),
    [(halved_gradients, Status.FAIL_STATE), (breaks_off, Status.CRASH)],
    ids=["other", "raises"],
)
def test_guards_sees_gradients_of_what_it_let_pass(walk_back: Callable[..., Any], status: Status) -> None:
    assert run("guards", target(backward_prefix=walk_back), mode="train").status is status


def test_guards_sees_a_preparation_that_refuses_nothing() -> None:
    def lenient(model: nn.Module, example_inputs: Any, **options: Any) -> Any:
        return load("ariadne:prepare_split")(model, example_inputs, **{**options, "mode": "generated_eager"})

    found = run("guards", lenient)
    assert found.status is Status.FAIL_STATE
    assert "generated_eagre" in found.reason


def test_rows_sees_rows_that_are_mixed_and_a_model_that_mixes_them_itself() -> None:
    mixed = suffix(lambda o: {name: t.flip(0) for name, t in o.items()})
    assert run("rows", target(**mixed)).status is Status.FAIL_ACCURACY

    def make() -> nn.Module:
        return Fn(lambda self, x: self.linear(x - x.mean(0)), linear=nn.Linear(6, 6))

    found = run("rows", made=entry(make))
    assert found.status is Status.NO_REFERENCE
    assert "depend on each other" in found.reason


def test_autocast_sees_halves_that_ignore_it() -> None:
    def outside(runtime: Any, boundary: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return runtime.run_suffix(boundary)

    assert run("autocast", target(run_suffix=outside)).status in (Status.FAIL_STRUCTURE, Status.CRASH)
    assert run("autocast", target(backward_prefix=no_walk_back)).status is Status.FAIL_STATE


class Restless(torch.autograd.Function):
    """The same forward each time, and in bfloat16 another gradient each time."""

    backwards = itertools.count(2)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * next(Restless.backwards) if gradient.dtype is torch.bfloat16 else gradient


def test_autocast_sees_a_model_that_differs_from_itself_in_bfloat16_alone() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return Restless.apply(self.linear(x.relu())) * 2

    found = run("autocast", made=entry(lambda: Fn(forward, linear=nn.Linear(6, 6))))
    assert found.status is Status.NONDETERMINISTIC, found
    assert "autocast" in found.reason
