"""Preparation: the whole pipeline, from a model to a runtime that was checked against it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ariadne import tree
from ariadne.capture import (
    Captured,
    Example,
    batch_dims,
    capture,
    capturing,
    declared,
    left_as_found,
    swallowed,
    without_saving_hooks,
)
from ariadne.compare import difference
from ariadne.cut import ExecutionMode, Objective, SplitSpec, frontiers, parse_boundary
from ariadne.errors import (
    AriadneError,
    BatchError,
    CaptureError,
    InputError,
    SpecError,
    TrainingError,
    UnsupportedError,
    VerificationError,
    named,
)
from ariadne.guards import is_a, not_called, searched_once
from ariadne.imports import imported
from ariadne.plan import TracePlan, uses
from ariadne.runtime import AT_FAULT, OnChange, Settings, SplitRuntime, prove

if TYPE_CHECKING:
    from ariadne.stopped import MixedSplit, PythonSplit

Fallback = Literal["refuse", "python", "python-suffix"]
_MOST_SHOWN = 4  # examples of paths that are kept, for another path to be held against
_FALLBACKS = ("refuse", "python", "python-suffix")
_WAY_OUT = (
    'Or run the model\'s own Python in place of a graph, in this process: prepare_split(..., split="after:<module>", '
    'fallback="python")'
)
_WAY_OUT_OF_A_CALL = (
    "Or show it such inputs when it is prepared, where the model's own Python can be taken for all calls: prepare_split(..., "
    'split="after:<module>", fallback="python", more_examples=[...])'
)


@overload
def prepare_split(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    split: SplitSpec | str,
    mode: ExecutionMode = "generated_eager",
    objective: Objective | None = None,
    compile_options: Mapping[str, Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    more_examples: Sequence[Any] = (),
    fallback: Literal["refuse"] = "refuse",
    on_change: OnChange = "capture",
) -> SplitRuntime: ...
@overload
def prepare_split(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    split: SplitSpec | str,
    mode: ExecutionMode = "generated_eager",
    objective: Objective | None = None,
    compile_options: Mapping[str, Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    more_examples: Sequence[Any] = (),
    fallback: Fallback,
    on_change: OnChange = "capture",
) -> SplitRuntime | PythonSplit | MixedSplit: ...
def prepare_split(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    split: SplitSpec | str,
    mode: ExecutionMode = "generated_eager",
    objective: Objective | None = None,
    compile_options: Mapping[str, Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    more_examples: Sequence[Any] = (),
    fallback: Fallback = "refuse",
    on_change: OnChange = "capture",
) -> SplitRuntime | PythonSplit | MixedSplit:
    """Capture `model` once and split it at `split`, ready to run and to train on any batch in the range.

    `example_inputs` are positional inputs of forward, `example_kwargs` keywords; dim 0 of the first tensor is the batch,
    and so is dim 0 of every other tensor that has the same size there, unless `SplitSpec(batch_dim=...)` says otherwise.
    `mode`: generated_eager, compiled (then `compile_options` go to torch.compile) or debug_interpreter. `objective` weighs cuts
    for "auto": a mapping with any of
    boundary_bytes, prefix_ops, suffix_ops (weights), max_boundary_bytes and min_share (limits), or a callable that takes a
    candidate. `more_examples`: inputs for which plans are made beforehand, each a tuple of positional inputs or a pair of such a
    tuple and a dict of keywords: of other paths, where Python branches on data, or of batches that need a plan of their own; else
    the first call that needs one waits for it. `fallback`: what to do where no graph holds forward: "refuse" raises the error that
    says why; "python" gives a `PythonSplit`, which stops the model's own Python at the end of a module's call and goes on with it;
    "python-suffix" gives a `MixedSplit`, whose prefix is a graph and whose suffix is the model's own Python. `on_change`: what a
    call does that finds the model otherwise than it was captured, such as in eval mode now, with another dropout rate or with a
    module replaced: "capture" makes a plan of the model as it is now; "refuse" raises `ModuleError`, which says what changed. The
    model is left as found, training flags, buffers, gradients and RNG state included.

    Raises `SpecError` and `InputError` for invalid arguments, `CaptureError` where forward can't be held in a
    plan, `FrontierError` where there is no such cut, `VerificationError` where split and whole differ on the example.

    >>> runtime = prepare_split(model, (torch.randn(2, 3, 224, 224),), split="after:layer3")
    >>> output = runtime.run_suffix(runtime.run_prefix(torch.randn(7, 3, 224, 224)))
    """
    settings = _settings(split, mode, objective, compile_options, on_change)
    example = example_of(model, example_inputs, example_kwargs, settings.spec)
    return copy_context().run(_with_fallback, model, example, settings, True, fallback, more_examples)


@overload
def prepare_split_replay(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    split: SplitSpec | str,
    mode: ExecutionMode = "generated_eager",
    objective: Objective | None = None,
    compile_options: Mapping[str, Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    more_examples: Sequence[Any] = (),
    fallback: Literal["refuse"] = "refuse",
    on_change: OnChange = "capture",
) -> SplitRuntime: ...
@overload
def prepare_split_replay(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    split: SplitSpec | str,
    mode: ExecutionMode = "generated_eager",
    objective: Objective | None = None,
    compile_options: Mapping[str, Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    more_examples: Sequence[Any] = (),
    fallback: Fallback,
    on_change: OnChange = "capture",
) -> SplitRuntime | PythonSplit | MixedSplit: ...
def prepare_split_replay(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    split: SplitSpec | str,
    mode: ExecutionMode = "generated_eager",
    objective: Objective | None = None,
    compile_options: Mapping[str, Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    more_examples: Sequence[Any] = (),
    fallback: Fallback = "refuse",
    on_change: OnChange = "capture",
) -> SplitRuntime | PythonSplit | MixedSplit:
    """As `prepare_split`, for inference only: what training alone would need is not captured until it is asked for.

    Gradients of the two halves are not held against the model's either. Arguments and errors are those of `prepare_split`.

    >>> runtime = prepare_split_replay(model, (torch.randn(2, 3, 224, 224),), split="50%")
    >>> runtime.run_suffix(runtime.run_prefix(torch.randn(7, 3, 224, 224))).shape
    torch.Size([7, 1000])
    """
    settings = _settings(split, mode, objective, compile_options, on_change)
    example = example_of(model, example_inputs, example_kwargs, settings.spec)
    return copy_context().run(_with_fallback, model, example, settings, False, fallback, more_examples)


def _settings(
    split: SplitSpec | str,
    mode: ExecutionMode,
    objective: Objective | None,
    compile_options: Mapping[str, Any] | None,
    on_change: OnChange = "capture",
) -> Settings:
    spec = split if isinstance(split, SplitSpec) else SplitSpec(boundary=split)
    return Settings(spec, parse_boundary(spec.boundary), mode, objective, compile_options, on_change)


@dataclass(frozen=True)
class Recapture:
    """Captures a model again for a call that no plan serves yet."""

    model: nn.Module
    batch_symbol: str
    batches: range
    # Of paths that have a plan, by what Python read on them; and whether forward keeps something on these.
    shown: dict[str, tuple[Example, bool]] = field(default_factory=dict)

    def __call__(self, example: Example, training: bool, like: TracePlan | None = None) -> Captured:
        symbol, batches = self.batch_symbol, self.batches
        captured = partial(
            capture, self.model, example, batch_symbol=symbol, batches=batches, grad=training, needed=True, like=like,
            beside=[*self.shown.values()],
        )  # fmt: skip
        try:
            with (
                capturing(),
                searched_once(),
                without_saving_hooks(),
            ):  # what forward sets in context variables, it sets in none of the caller's
                found: Captured = copy_context().run(captured)
        except CaptureError as error:
            raise type(error)(f"{error}. {_WAY_OUT_OF_A_CALL}") from error
        except RuntimeError as error:
            if training and (made := _of_inference(self.model, error)):
                raise TrainingError(f"nothing can be trained here: {made}") from error
            raise
        self.note(found, example)
        return found

    def note(self, found: Captured, example: Example) -> None:
        """Keep an example of a path that is new, for those of other paths to be held against."""
        if (asked := found.plan.questions) and len(self.shown) < _MOST_SHOWN:
            path = repr([(node.target, node.module, node.call, node.witness) for _, node in asked])
            kept = replace(example, leaves=tuple(example.resized(example.batch)))
            self.shown.setdefault(path, (kept, found.keeps))

    def of(self, model: nn.Module) -> Recapture:
        """The same for another model."""
        return Recapture(model, self.batch_symbol, self.batches)


def _with_fallback(
    model: nn.Module,
    example: Example,
    settings: Settings,
    training: bool,
    fallback: Fallback,
    more: Sequence[Any] = (),
) -> SplitRuntime | PythonSplit | MixedSplit:
    """A graph, cut; where none holds, what `fallback` says."""
    if fallback not in _FALLBACKS:
        raise SpecError(f"fallback is one of {', '.join(map(repr, _FALLBACKS))}; found {fallback!r}")
    if fallback == "refuse" or settings.mode != "generated_eager":
        try:
            return _prepare(model, example, settings, training, more)
        except (CaptureError, VerificationError) as error:
            raise type(error)(f"{error}. {_WAY_OUT}") from error
    try:
        # Where no graph holds, forward may have run.
        with imported("ariadne.stopped").held_as_found(model) as refuse_moved:
            made = _prepare(model, example, settings, training, more)
        read = next((n for n in made.plan.nodes if n.is_witness), None)
        if read is None or settings.spec.max_paths > 1:
            return made
        where = f"{read.target} in {named(read.module)}"
        why = f"forward reads numbers out of a tensor in Python ({where}), and with max_paths=1 a graph holds only for them"
    except SpecError:
        raise
    except (
        Exception
    ) as error:  # at another batch forward may raise whatever it likes; if it does on the example, it will again
        why = f"no graph holds it: {type(error).__name__}: {error}"
    stopped: PythonSplit = imported("ariadne.stopped").prepared(model, settings, example, why, training=training)
    refuse_moved()
    for inputs in more:
        stopped.learn(inputs)
    if fallback == "python":
        return stopped
    if stopped.needs_gradients:
        raise UnsupportedError(
            "forward runs with gradients alone, and fallback='python-suffix' gives a prefix for inference; pass "
            "fallback='python', which trains"
        )
    if settings.spec.dynamic:
        raise SpecError(
            "fallback='python-suffix' takes images and inputs of the example's sizes alone; leave dynamic out"
        )

    def prefix(part: nn.Module, boundary: str) -> SplitRuntime:
        spec = replace(settings.spec, boundary=boundary, trainable=False, max_paths=1)
        cut = replace(settings, spec=spec, boundary=parse_boundary(boundary), on_change="refuse")
        return _prepare(part, example, cut, training)

    mixed: MixedSplit = imported("ariadne.stopped").beside(stopped, prefix, example)
    return mixed


def _prepare(
    model: nn.Module, example: Example, settings: Settings, training: bool, more: Sequence[Any] = ()
) -> SplitRuntime:
    not_called(model)  # of an earlier split's calls nothing stands in the model
    compiles = settings.mode == "compiled"  # in its own rounding: what it is made from is held against the model
    plain = replace(settings, mode="generated_eager", compile_options=None) if compiles else settings
    with capturing(), searched_once(), without_saving_hooks():
        recapture, captures = captured_for(model, example, settings.spec, training)
        first = captures[-1] if len(captures) > 1 and not settings.spec.trainable else captures[0]
        plans = {c.plan: (frontiers(c.plan), c.baseline) for c in captures}
        runtime = SplitRuntime(model, plain, plans, recapture)
        trains = settings.spec.trainable and training
        for captured in captures:
            not_called(model)  # each of them may serve the first call
            prove(model, runtime.variant_of(captured.plan), captured, example, trains=trains and captured is first)
    for inputs in more:  # each capture of theirs waits for its turn by itself: calls take locks of their own
        runtime.learn(inputs)
    not_called(model)  # the proof's count for nothing
    return runtime.resplit(mode="compiled", compile_options=settings.compile_options) if compiles else runtime


def _warn_of_unread(model: nn.Module, example: Example, plan: TracePlan) -> None:
    """Name the inputs that forward takes by `**kwargs` and that no op reads: they may be misspelt."""
    read = {*uses(plan.output), *(r for node in plan.nodes for r in node.reads), *uses([s.atoms for s in plan.stores])}
    open_ended = swallowed(model, example.spec)
    given = [id(leaf) for leaf in example.leaves]  # one tensor that is given twice is read by its first name
    unread = [n for i, n in plan.inputs if i in open_ended and n not in read and given.count(given[i]) == 1]
    if not unread:
        return
    taken = [
        p
        for p in inspect.signature(model.forward).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if taken:  # else forward hands on what it is given, and no name of its own can be meant
        warnings.warn(
            f"forward takes {', '.join(map(repr, unread))} by its **kwargs, and no op reads it: is the name misspelt? By name it "
            f"takes {', '.join(p.name for p in taken)}",
            stacklevel=4,
        )


def captured_for(
    model: nn.Module, example: Example, spec: SplitSpec, training: bool
) -> tuple[Recapture, list[Captured]]:
    """The plans of a model that are captured before any call: one for training, if asked for, and one for inference.

    That which is used first comes first; they are one where forward is the same with gradients and without.
    """
    lo, hi = spec.batch_range
    recapture = Recapture(model, spec.batch_symbol, range(lo, hi + 1))
    try:
        captures = [_capture(recapture, example, training)]
    except AriadneError:
        raise
    except Exception as error:  # the model's own, which may be one of gradients alone
        if not training:
            raise
        captures = [_without_gradients(recapture, example, error)]
        if spec.trainable:
            made = _of_inference(model, error) or (
                f"forward runs without gradients alone, with them it raises {type(error).__name__}: {error}"
            )
            raise SpecError(f"trainable=True asks for what can't be: {made}") from error
        training = False
    _warn_of_unread(model, example, captures[0].plan)
    if training and captures[0].plan.assumption.grad is not None:
        try:
            captures.append(_capture(recapture, example, False))
        except AriadneError:
            raise
        except Exception:  # the model's own: it runs with gradients alone, and calls without say so
            return recapture, captures
        if not spec.trainable:
            captures.reverse()
    return recapture, captures


def _without_gradients(recapture: Recapture, example: Example, error: Exception) -> Captured:
    """The plan of a forward that raised `error` with gradients; that error, where it raises without them, too."""
    try:
        return _capture(recapture, example, False)
    except AriadneError:
        raise
    except Exception:
        raise error from None


def _of_inference(model: nn.Module, error: Exception) -> str:
    """What is wrong, where torch raised since the model's tensors were made for inference alone; else empty."""
    named_ones = (*model.named_parameters(), *model.named_buffers())
    name = next((n for n, t in named_ones if t.is_inference()), None)
    if name is None or "inference tensor" not in str(error).lower():
        return ""
    return (
        f"the model's {name!r} is an inference tensor, made under torch.inference_mode(), and no graph of gradients holds such. "
        "Build or load the model outside of that, or take a copy made outside of it, copy.deepcopy(model); without gradients it "
        "runs as it is"
    )


def _capture(recapture: Recapture, example: Example, grad: bool) -> Captured:
    with capturing(), without_saving_hooks():
        found = capture(
            recapture.model, example, batch_symbol=recapture.batch_symbol, batches=recapture.batches, grad=grad
        )
    recapture.note(found, example)
    return found


def validate_dynamic_batches(
    runtime: SplitRuntime,
    example_inputs: Sequence[Any],
    batch_sizes: Sequence[int],
    example_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Any, ...]:
    """Run split and model at each batch size and compare them bit for bit; returns the outputs of the split.

    `batch_sizes` count samples. Inputs of each size are made from the samples of `example_inputs`, repeated or cut. The model is
    left as found. Raises `VerificationError` for the first size at which they differ, and what a call of the split raises:
    `BatchError` for a size outside `dynamic_batch`.

    >>> outputs = validate_dynamic_batches(runtime, (torch.randn(2, 3, 224, 224),), batch_sizes=(1, 4, 20))
    >>> [output.shape[0] for output in outputs]
    [1, 4, 20]
    """
    if runtime.settings.mode == "compiled":
        raise SpecError(
            "compiled code rounds in its own way, so there is no equality of bits to validate; validate a runtime in mode "
            "'generated_eager', from which it is made"
        )
    example = example_of(runtime.model, example_inputs, example_kwargs, runtime.settings.spec)
    if not example.batched:
        raise SpecError(
            "no input has a batch, so there are no batch sizes to validate; compare with the model, or call check"
        )

    def whole(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return runtime.model(*args, **kwargs)

    def halves(*args: Any, **kwargs: Any) -> Any:
        return runtime.run_suffix(runtime.run_prefix(*args, **kwargs))

    outputs = []
    for size in batch_sizes:
        results = []
        for run in (whole, halves):
            with left_as_found(runtime.model, runtime.plans, drew=runtime.draws):
                args, kwargs = tree.unflatten(example.resized(size), example.spec)
                results.append(run(*args, **kwargs))
        wrong = difference(*results)
        if wrong:
            raise VerificationError(
                f"at batch {size} the split at {runtime.split_id} differs from the model: {wrong}. {AT_FAULT}"
            )
        outputs.append(results[1])
    return tuple(outputs)


def captured(
    model: nn.Module, example_inputs: Sequence[Any], *, spec: SplitSpec, example_kwargs: Mapping[str, Any] | None = None
) -> Captured:
    """What `prepare_split` captures first, before it looks for a cut: the plan of the model's forward, gradients enabled."""
    lo, hi = spec.batch_range
    recapture = Recapture(model, spec.batch_symbol, range(lo, hi + 1))
    return _capture(recapture, example_of(model, example_inputs, example_kwargs, spec), True)


def refuse_wrapper(model: nn.Module) -> None:
    """Raise `SpecError` for a module that only wraps another: what `torch.compile` made, or one whose `train` is no switch.

    ultralytics' `YOLO(...)` is one of these: calling its `eval()` starts a training. Nothing of the object is called here.
    """
    if "_orig_mod" in model._modules and type(model).__name__ == "OptimizedModule":
        raise SpecError(
            "a compiled model was given, as torch.compile(model) makes it, and what the compiler does can't be recorded; pass the "
            "model inside of it, model._orig_mod, and compile the two sides: prepare_split(..., mode='compiled')"
        )
    if type(model).train is nn.Module.train:
        return
    _, *parameters = inspect.signature(type(model).train).parameters.values()
    inner = next((name for name, child in model._modules.items() if child is not None), None)
    if inner and parameters and parameters[0].default is None:
        raise SpecError(
            f"{type(model).__name__}.train({parameters[0].name}=None, ...) does not switch a module to training mode but is a "
            f"method of its own, which eval() would call; this is a wrapper. Pass the network inside of it, .{inner}"
        )


def example_of(model: nn.Module, args: Sequence[Any], given: Mapping[str, Any] | None, spec: SplitSpec) -> Example:
    """The example inputs, looked at before anything runs; raises `SpecError` and `InputError` for what can't be split."""
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"the model must be a torch.nn.Module; found {type(model).__name__}. Wrap a function in a module"
        )
    refuse_wrapper(model)
    tensors_of = [*model.named_parameters(), *model.named_buffers()]
    lazy = next((n for n, t in tensors_of if torch.nn.parameter.is_lazy(t)), None)
    if lazy is not None:
        raise SpecError(
            f"{lazy!r} is lazy and not initialised, so its shape is not known; run the model once, model(*example_inputs), and "
            "prepare then"
        )
    meta = next((n for n, t in tensors_of if t.is_meta), None)
    if meta is not None:
        raise SpecError(
            f"{meta!r} is on the meta device, so there is nothing to run; load or initialise the model first"
        )
    for path, module in model.named_modules():
        stale = next((k for k, v in module.__dict__.items() if is_a(v, FakeTensor)), None)
        if stale is not None:
            raise SpecError(
                f"attribute {stale!r} of {named(path)} is a fake tensor, left there by an earlier torch.export or "
                "tracer; the model can't run with it. Set it anew, or build the model again"
            )
    if isinstance(args, torch.Tensor) or not isinstance(args, (tuple, list)):
        raise InputError(
            f"example_inputs is a tuple of forward's positional inputs; found {type(args).__name__}. Write (x,)"
        )
    if given is not None and not isinstance(given, Mapping):
        raise InputError(
            f"example_kwargs is a mapping of forward's keyword inputs; found {type(given).__name__}. Write {{'mask': m}}"
        )
    kwargs = dict(given or {})
    leaves = [*tree.leaves((tuple(args), kwargs))]
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    if not tensors:
        raise InputError(
            "example inputs hold no tensor, and a split begins with the tensors that forward is given; pass at least one (found "
            f"{', '.join(type(x).__name__ for x in leaves[:4]) or 'nothing'}). An object that holds some may be passed as "
            "dict(thing). Where forward makes its first tensor itself, let it take that as an argument, such as a default that "
            "None stands for"
        )
    if any(t.is_nested and (t is tensors[0] or t.layout is torch.strided) for t in tensors):
        raise InputError(
            "an example input is nested, and has no batch, or no sizes, to be read; pass it padded, with a mask, or as a list of "
            "tensors"
        )
    if any(t.is_meta for t in tensors):
        raise InputError("example inputs are on the meta device, so there is nothing to run; pass tensors with data")
    along = batch_dims(model, args, kwargs, spec.batch_dim)
    dims = ((leaf, along.get(i, 0)) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    first = next(((leaf, dim) for leaf, dim in dims if dim is not None), None)
    if first and first[0].dim() == 0:
        raise InputError(
            "the first tensor of the example inputs has no dims; its dim 0 must be the batch: unsqueeze it, put another first, or "
            "say that it has no batch, by SplitSpec(batch_dim={name: None}), or by batch_dim='none' where no input has one"
        )
    batch = first[0].shape[first[1]] if first else 1
    if batch < 1:
        raise BatchError(
            "the example inputs have batch 0, of which nothing is learnt for others; pass at least one sample"
        )
    if spec.trace_batch_mode == "batch_1" and batch != 1:
        raise BatchError(f"trace_batch_mode 'batch_1' needs example inputs of batch 1; found batch {batch}")
    if spec.trace_batch_mode == "batch_gt1" and batch < 2:
        raise BatchError("trace_batch_mode 'batch_gt1' needs example inputs of batch 2 or more; found batch 1")
    return Example.of(args, kwargs, declared(model, args, kwargs, spec.dynamic, spec.ranges, along), along)
