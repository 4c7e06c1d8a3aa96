"""Guards: what a plan relies on is checked. A broken condition is refused in the right phase, or followed exactly."""

from __future__ import annotations

import array
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.backends.mha
from torch import nn
from torch.nn.utils import parametrize

from ariadne import PythonSplit, SplitSpec
from conformance.checks.base import PASSED, Check, Outcome, at, hold_moved, hold_outcomes, no_grad, outcome, refuses
from conformance.suite.bench import CAPTURED, LARGEST, REFERENCE, Bench, Split
from conformance.suite.cases import Case
from conformance.suite.compare import difference, frozen, mapped, tensors
from conformance.suite.state import seed_all
from conformance.suite.statuses import Finding, Status, Stop

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
MOST_ATTRIBUTES, OTHER_SEEDS = 24, (101, 102, 103, 104)


@dataclass(frozen=True)
class Probe:
    """One broken condition: what is changed, and the errors that may say so, by phase.

    `within`: a block around the call, for what is changed outside of the model, which it puts back.
    `follows`: a result is fine too, where it equals the whole model's after the same change.
    `form`: so is forward's own error, word for word, since a call of another form is captured, and forward may raise.
    """

    name: str
    expected: dict[str, tuple[str, ...]]
    inputs: Callable[[Inputs], Inputs | None] = lambda given: given
    change: Callable[[nn.Module], bool] = lambda model: True
    follows: bool = True
    form: bool = False
    within: Callable[[nn.Module], AbstractContextManager[Any]] = lambda model: nullcontext()


class Kept(nn.Module):
    """What stands where a module was: it gives what that one gave, times a half."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The inner module's output, halved."""
        return mapped(lambda t: t * 0.5 if t.is_floating_point() else t, self.inner(*args, **kwargs))


def run(bench: Bench, case: Case) -> Finding:
    """Every probe on a split of its own; then the phases of preparing, running and training that must refuse."""
    bench.judge(case.training)
    outcomes: dict[str, str] = {}
    runtime = bench.split("q50", case.training).runtime
    python = isinstance(runtime, PythonSplit)
    if not python:
        bench.facts["guarded_inputs"] = len(runtime.plan.inputs)
    bench.facts["probes"] = outcomes
    trains = case.training and bench.trainable(True)
    for probe in (*PROBES, *_attributes(bench, case), *_numbers_of_classes(bench, case), *_other_data(bench)):
        outcomes[probe.name] = _probe(bench, case, probe)
        if trains:
            outcomes[f"{probe.name}, in training"] = _probe(bench, case, probe, trained=True)
    for name, refusal in REFUSED.items():
        if not (python and name in OF_PLANS):
            outcomes[name] = refusal(bench, case)
    return PASSED


def _probe(bench: Bench, case: Case, probe: Probe, trained: bool = False) -> str:
    """What a call came to after the change; Stop where it went through and gave another result than the whole model.

    Without gradients, or `trained`: then by the functions of training.
    """
    name = f"{probe.name}, in training" if trained else probe.name
    split = bench.split("q50", case.training, "refusing", trained=trained)
    twin = bench.whole(case.training)
    given, ours = probe.inputs(bench.inputs(REFERENCE)), probe.inputs(bench.inputs(REFERENCE))
    told = _told(split)
    owned = {name: p for name, p in split.model.named_parameters(remove_duplicate=False) if id(p) in told}
    sides = {name: told[id(p)] for name, p in owned.items()}
    if given is None or ours is None or not (probe.change(split.model) and probe.change(twin)):
        return "not applicable"
    with probe.within(twin):
        found = _compared(bench, probe, name, split, twin, given, ours, trained)
    if found.startswith("followed"):
        told, now = _told(split), dict(split.model.named_parameters(remove_duplicate=False))
        if not told.keys() <= {id(p) for p in now.values()}:
            raise Stop(
                Status.FAIL_STATE, f"{name}: no guard fired, and a side tells of a parameter that the model has no more"
            )
        lost = [n for n, p in owned.items() if now.get(n, p) is not p and told.get(id(now[n])) != sides[n]]
        if lost:
            raise Stop(
                Status.FAIL_STATE,
                f"{name}: no guard fired, and {lost[0]!r}, which is another one, is told as a parameter of "
                f"{told.get(id(now[lost[0]]), 'no side')}, not of {sides[lost[0]]}",
            )
    return found


def _told(split: Split) -> dict[int, str]:
    """What the two sides say they train, by id, and which of them do."""
    found: dict[int, str] = {}
    for side in ("prefix", "suffix"):
        for p in getattr(split.runtime, f"{side}_parameters", list)():
            found[id(p)] = "both" if id(p) in found else side
    return found


def _compared(
    bench: Bench, probe: Probe, name: str, split: Split, twin: nn.Module, given: Inputs, ours: Inputs, trained: bool
) -> str:
    phase, found, error = _trained(bench, split, given) if trained else _run(split, given)
    if error is not None and phase != "backward":
        if not refuses(error) and (probe.form or isinstance(split.runtime, PythonSplit)):
            whole = outcome(lambda: twin(*ours[0], **ours[1]) if trained else no_grad(twin, ours), REFERENCE)
            words = isinstance(split.runtime, PythonSplit) or str(whole.error) == str(error)
            if type(whole.error) is type(error) and words:
                return f"{phase}: {type(error).__name__}, as the whole model"
        return _held(name, probe.expected, phase, error)
    if not probe.follows:
        raise Stop(Status.FAIL_STATE, f"{name}: no guard fired; expected {_wanted(probe.expected)}")
    seed_all(REFERENCE)
    try:
        output = twin(*ours[0], **ours[1]) if trained else no_grad(twin, ours)
        expected = frozen(output)
    except Exception as raised:
        raise Stop(Status.FAIL_STATE, f"{name}: no guard fired, and the whole raises {raised!r}"[:600]) from raised
    wrong = difference(expected, found)
    if wrong:
        raise Stop(Status.FAIL_STATE, f"{name}: no guard fired, and the result is not the whole's: {wrong}")
    if trained:
        whole = outcome(lambda: bench.entry.loss(output).backward(), REFERENCE)
        if error is not None and type(error) is type(whole.error):
            return f"followed, to {type(error).__name__} in the backward pass of both"
        hold_outcomes(whole, Outcome(None, error, whole.rng))
        ours, theirs = ({"buffers": dict(m.named_buffers()), **dict(m.named_parameters())} for m in (twin, split.model))
        hold_moved(
            ours, theirs, f"{name}: {at(split)}"
        )  # not all that modules hold: LSTMs put their own lists right as they run
    return "followed"


def _run(split: Split, inputs: Inputs) -> tuple[str, Any, Exception | None]:
    """The phase reached, the result, and the error that ended it."""
    seed_all(REFERENCE)
    phase = "prefix"
    try:
        boundary = split.runtime.run_prefix(*inputs[0], **inputs[1])
        phase = "suffix"
        return phase, split.runtime.run_suffix(boundary), None
    except Exception as error:
        return phase, None, error


def _trained(bench: Bench, split: Split, inputs: Inputs) -> tuple[str, Any, Exception | None]:
    """The same by the functions of training; the result is what the loss was given, and then the phase is "backward"."""
    seed_all(REFERENCE)
    phase, outputs = "prefix", []

    def loss(output: Any, _: Any) -> torch.Tensor:
        outputs.append(frozen(output))
        return bench.entry.loss(output)

    try:
        boundary = split.runtime.run_training_prefix(*inputs[0], **inputs[1])
        phase = "suffix"
        _, gradients = split.runtime.train_suffix(boundary, loss_fn=loss)
        split.runtime.backward_prefix(boundary, gradients)
    except Exception as error:
        return ("backward", outputs[0], error) if outputs else (phase, None, error)
    return "backward", outputs[0], None


def _held(name: str, expected: dict[str, tuple[str, ...]], phase: str, error: Exception) -> str:
    classes = [cls.__name__ for cls in type(error).__mro__]
    if not set(expected.get(phase, ())) & set(classes):
        raise Stop(
            Status.FAIL_STATE,
            f"{name}: {type(error).__name__} in the phase {phase}, expected {_wanted(expected)}: {error}"[:600],
        )
    return f"{phase}: {type(error).__name__}"


def _wanted(expected: dict[str, tuple[str, ...]]) -> str:
    return " or ".join(f"{' or '.join(names)} in {phase}" for phase, names in expected.items())


# --- inputs and modules -------------------------------------------------------------------------------------------------


def _first(given: Inputs, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Inputs | None:
    """The inputs with their first tensor changed; None where the change does not apply."""
    args, kwargs = list(given[0]), dict(given[1])
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            changed = change(value)
            args[i] = changed
            return None if changed is None else (tuple(args), kwargs)
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            changed = change(value)
            kwargs[key] = changed
            return None if changed is None else (tuple(args), kwargs)
    return None


def _longer(t: torch.Tensor) -> torch.Tensor | None:
    return torch.cat([t, t], -1) if t.dim() > 1 else None


def _other_dtype(t: torch.Tensor) -> torch.Tensor:
    return t.double() if t.is_floating_point() else t.to(torch.int32 if t.dtype != torch.int32 else torch.int64)


def replaces(model: nn.Module) -> bool:
    """Put another class in the place of the last module that has parameters and no children."""
    named = [(p, m) for p, m in model.named_modules() if p and not list(m.children()) and list(m.parameters())]
    if not named:
        return False
    path, module = named[-1]
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, Kept(module).train(module.training))
    return True


def flips(model: nn.Module) -> bool:
    model.train(not model.training)
    return True


def adds_a_hook(model: nn.Module) -> bool:
    model.register_forward_hook(_doubling)
    return True


def _doubling(module: nn.Module, args: Any, output: Any) -> Any:
    return mapped(lambda t: t * 2 if t.is_floating_point() else t, output)


def _without_one(given: Inputs) -> Inputs | None:
    args, kwargs = given
    if args:
        return args[:-1], kwargs
    return (args, dict(list(kwargs.items())[:-1])) if kwargs else None


def _turned(t: torch.Tensor) -> torch.Tensor | None:
    """The same numbers in another order of memory."""
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else None


def _other_parameter(model: nn.Module) -> bool:
    """Put another parameter, of half the value, in the place of the first."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_floating_point():
                module._parameters[name] = nn.Parameter(p.detach() * 0.5, p.requires_grad)
                return True
    return False


def _turned_weight(model: nn.Module) -> bool:
    """Let the numbers of the first weight of two dims lie in another order."""
    weight = next(
        (p for p in model.parameters() if p.dim() == 2 and p.layout is torch.strided and 1 not in p.shape), None
    )
    if weight is None:
        return False
    weight.data = weight.data.t().contiguous().t()
    return True


def _parametrized(model: nn.Module) -> bool:
    return any(parametrize.is_parametrized(module) for module in model.modules())


def _other_packed_weights(model: nn.Module) -> bool:
    """Give the first layer whose weights torch holds packed another bias."""
    layer: Any = next((m for m in model.modules() if hasattr(m, "set_weight_bias")), None)
    if layer is None:
        return False
    weight, bias = layer._weight_bias()
    layer.set_weight_bias(weight, bias + 1)
    return True


def _one_buffer_more(model: nn.Module) -> bool:
    model.register_buffer("one_more", torch.full((2,), 3.0))
    return True


@contextmanager
def _other_forward(model: nn.Module) -> Iterator[None]:
    """In the class of the whole model stands another forward, which gives the half."""
    cls: Any = type(model)
    own = "forward" in vars(cls)
    original = cls.forward

    @functools.wraps(original)
    def halving(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return mapped(lambda t: t * 0.5 if t.is_floating_point() else t, original(self, *args, **kwargs))

    cls.forward = halving
    try:
        yield
    finally:
        if own:
            cls.forward = original
        else:
            del cls.forward


@contextmanager
def _other_fast_path(model: nn.Module) -> Iterator[None]:
    """Torch's switch for attention's fast path stands the other way."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(not before)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _in_objects(model: nn.Module) -> Iterator[None]:
    """Other numbers stand in the arrays of Python's own that are variables of the file from which the model is."""
    found = [v for v in vars(sys.modules[type(model).__module__]).values() if isinstance(v, array.array)]
    before = [one[0] for one in found]
    for one in found:
        one[0] *= 2
    try:
        yield
    finally:
        for one, was in zip(found, before, strict=True):
            one[0] = was


_INPUT = {"prefix": ("InputError",)}
_MODULE = {"prefix": ("ModuleError",), "suffix": ("ModuleError",)}
_ANY = {"prefix": ("GuardError",), "suffix": ("GuardError",)}
_NO_PLAN = {"prefix": ("GuardError", "UnsupportedError"), "suffix": ("GuardError",)}  # of strides that follow no sizes
PROBES = (
    Probe("wrong rank", _INPUT, lambda given: _first(given, lambda t: t.unsqueeze(-1))),
    Probe("another size", _INPUT, lambda given: _first(given, _longer)),
    Probe("another dtype", _INPUT, lambda given: _first(given, _other_dtype)),
    Probe("an input too few", _INPUT, _without_one, form=True),
    Probe("an input too many", _INPUT, lambda given: ((*given[0], torch.zeros(REFERENCE, 2)), given[1]), form=True),
    Probe(
        "an unknown keyword",
        _INPUT,
        lambda given: (given[0], {**given[1], "no_such_input": torch.zeros(REFERENCE)}),
        form=True,
    ),
    Probe("a module of another class", _MODULE, change=replaces),
    Probe("the other mode", _MODULE, change=flips),
    Probe("a new hook", _MODULE, change=adds_a_hook),
    Probe("another order of memory", _NO_PLAN, lambda given: _first(given, _turned)),
    Probe("another parameter in the place of one", _ANY, change=_other_parameter),
    Probe("another order of a weight's memory", _ANY, change=_turned_weight),
    Probe("other packed weights", _ANY, change=_other_packed_weights),
    Probe("a buffer more", _ANY, change=_one_buffer_more),
    Probe("other numbers in objects", _ANY, within=_in_objects),
    Probe("another forward of the class", _MODULE, within=_other_forward),
    Probe("another setting of the fast path", _ANY, within=_other_fast_path),
    Probe(
        "parametrized weights that are kept from call to call",
        {"prefix": ("UnsupportedError",)},
        change=_parametrized,
        follows=False,
        within=lambda model: parametrize.cached(),
    ),
)


def _attributes(bench: Bench, case: Case) -> Iterator[Probe]:
    """A probe for each plain number on a module, of one module of each class: what forward reads must not change unseen."""
    seen = set()
    for path, module in bench.whole(case.training).named_modules():
        for name, value in vars(module).items():
            kind = (type(module), name)
            if name == "training" or name.startswith("_") or kind in seen or type(value) not in (bool, int, float):
                continue
            if len(seen) == MOST_ATTRIBUTES:
                return
            seen.add(kind)
            yield Probe(
                f"another value of {path + '.' if path else ''}{name}", _ANY, change=partial(_other_value, path, name)
            )


def _other_value(path: str, name: str, model: nn.Module) -> bool:
    held = vars(model.get_submodule(path))
    value = held[name]
    held[name] = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value / 2
    return True


def _numbers_of_classes(bench: Bench, case: Case) -> Iterator[Probe]:
    """A probe for each plain number that stands on a class of the model's, as far as torch did not write that."""
    classes = dict.fromkeys(c for m in bench.whole(case.training).modules() for c in type(m).__mro__)
    own = [c for c in classes if c.__module__.partition(".")[0] not in ("torch", "builtins")]
    found = [(c, n) for c in own for n, v in vars(c).items() if n[0] != "_" and type(v) in (bool, int, float)]
    for cls, name in found[:MOST_ATTRIBUTES]:
        yield Probe(f"another value of {cls.__qualname__}.{name}", _ANY, within=partial(_other_number, cls, name))


@contextmanager
def _other_number(cls: Any, name: str, model: nn.Module) -> Iterator[None]:
    """Another number stands on a class of the model."""
    before = vars(cls)[name]
    setattr(cls, name, not before if isinstance(before, bool) else before + 1)
    try:
        yield
    finally:
        setattr(cls, name, before)


def _other_data(bench: Bench) -> Iterator[Probe]:
    """Inputs with other numbers, which may take forward another way."""
    for seed in OTHER_SEEDS:
        yield Probe(f"inputs of seed {seed}", _ANY, lambda _, seed=seed: bench.inputs(REFERENCE, seed))


# --- what must be refused -----------------------------------------------------------------------------------------------


def _must(name: str, phase: str, classes: tuple[str, ...], action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return _held(name, {phase: classes}, phase, error)
    raise Stop(Status.FAIL_STATE, f"{name}: no guard fired; expected {' or '.join(classes)} in {phase}")


def _batch(size: int) -> Callable[[Bench, Case], str]:
    def refused(bench: Bench, case: Case) -> str:
        split = bench.split("q50", case.training)
        args, kwargs = _resized(bench.inputs(CAPTURED), size)
        return _must(f"batch {size}", "prefix", ("InputError",), lambda: split.runtime.run_prefix(*args, **kwargs))

    return refused


def _resized(given: Inputs, size: int) -> Inputs:
    found = {id(t): t for _, t in tensors(given)}
    memo = {key: t[[0] * size].clone() if t.dim() and t.shape[0] == CAPTURED else t.clone() for key, t in found.items()}
    resized: Inputs = copy.deepcopy(given, memo)
    return resized


def _other_split(bench: Bench, case: Case) -> str:
    ours, other = bench.split("q50", case.training), None
    for cut in ("first", "last"):
        made = bench.split(cut, case.training)
        if made.facts["op"] != ours.facts["op"]:
            other = made
    if other is None:
        return "not applicable"
    args, kwargs = bench.inputs(REFERENCE)
    boundary = other.runtime.run_prefix(*args, **kwargs)
    name = "a boundary of another split"
    return _must(name, "suffix", ("BoundaryError",), lambda: ours.runtime.run_suffix(boundary))


def _consumed(bench: Bench, case: Case) -> str:
    if not bench.trainable(case.training):
        return "not applicable"
    split = bench.split("q50", case.training, trained=True)
    args, kwargs = bench.inputs(REFERENCE)
    seed_all(REFERENCE)
    boundary = split.runtime.run_training_prefix(*args, **kwargs)

    def suffix() -> Any:
        return split.runtime.train_suffix(boundary, loss_fn=lambda output, _: bench.entry.loss(output))

    _, gradients = suffix()
    first = _must("a boundary trained twice", "suffix", ("ConsumedError",), suffix)
    split.runtime.backward_prefix(boundary, gradients)
    back = _must(
        "a boundary walked back twice",
        "prefix",
        ("ConsumedError",),
        lambda: split.runtime.backward_prefix(boundary, gradients),
    )
    return f"{first}, {back}"


def _preparing(**changed: Any) -> Callable[[Bench, Case], str]:
    """A call of the target with an argument that can't be meant."""
    classes = changed.pop("classes")

    def refused(bench: Bench, case: Case) -> str:
        side = bench.side(case.training)
        args, kwargs = bench.inputs(CAPTURED)
        boundary = changed.get("boundary", "percent:50")
        given: dict[str, Any] = {"mode": changed.get("mode", "generated_eager"), "example_kwargs": kwargs}
        if changed.get("no_tensor"):
            args, given["example_kwargs"] = (1.0,), {}

        def prepare() -> Any:
            spec = SplitSpec(boundary, dynamic_batch=(1, LARGEST))
            return bench.asked(side.model, args, spec, compile_options=None, **given)

        return _must(str(changed), "prepare", classes, prepare)

    return refused


REFUSED: dict[str, Callable[[Bench, Case], str]] = {
    "a batch above the range": _batch(LARGEST + 1),
    "an empty batch": _batch(0),
    "a boundary of another split": _other_split,
    "a boundary consumed twice": _consumed,
    "no tensor to prepare with": _preparing(no_tensor=True, classes=("InputError",)),
    "an unknown module to cut after": _preparing(boundary="after:no_such_module", classes=("FrontierError",)),
    "a percentage out of range": _preparing(boundary="percent:101", classes=("SpecError",)),
    "a mode misspelt": _preparing(mode="generated_eagre", classes=("SpecError",)),
}
OF_PLANS = ("a batch above the range", "an empty batch")  # the model's own Python takes what the model takes

CHECK = Check(
    "guards", ("mode",), "what a plan relies on is checked: refused in the right phase, or followed exactly", run
)
