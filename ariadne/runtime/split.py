"""The runtime: one pair of segments for inference and training, and the plans that they come from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ariadne import tree
from ariadne.boundary import BoundaryPayload
from ariadne.capture import Example, Snapshot, copied_plan, left_as_found, without_saving_hooks
from ariadne.cut import (
    SIDES,
    CompileOptions,
    ExecutionMode,
    SplitCandidate,
    parse_boundary,
    select,
    with_trainable,
)
from ariadne.errors import (
    AriadneError,
    BoundaryError,
    FrontierError,
    HalfError,
    ModuleError,
    SpecError,
    TrainingError,
    WitnessError,
)
from ariadne.guards import calls_of, copied_model, not_called, references_hold, unread_alike
from ariadne.imports import imported
from ariadne.plan import Value
from ariadne.runtime import casts, taps, training
from ariadne.runtime.alike import together
from ariadne.runtime.owners import NOTHING_OWNED
from ariadne.runtime.told import Told
from ariadne.runtime.variant import OnChange, Variant, told_apart
from ariadne.segment import Halted

if TYPE_CHECKING:
    from ariadne.compiled import CompileReport, Start
    from ariadne.halves import Cut

_is_grad_enabled = torch._C.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled


class SplitRuntime(Told):
    """A model split in two: run it, or train it, as prefix, boundary and suffix.

    Made by `prepare_split`. `run_prefix` and `run_suffix` give what the model gives under `torch.no_grad()`;
    `run_training_prefix`, `train_suffix` and `backward_prefix` what a training step of the whole model gives, bit for bit.
    Parameters and buffers are read from the model at every call, so optimizer steps, `load_state_dict`, `.to(...)` and
    replaced parameters are followed. A condition of the capture that no longer holds raises a `GuardError` before anything is
    computed. It may be used from several threads; boundaries may be in flight in any number.

    >>> runtime = prepare_split(model, (torch.randn(2, 3, 224, 224),), split="after:layer3")
    >>> runtime
    SplitRuntime(ResNet, cut:50 after layer3, 50 + 19 ops, 1 value(s) across, 201 kB per sample, where the input has 602 kB)
    """

    # --- inference ------------------------------------------------------------------------------------------------

    def run_prefix(self, *args: Any, **kwargs: Any) -> BoundaryPayload:
        """Run the prefix without gradients; takes what the model's forward takes, in the form that was captured.

        Any batch in `dynamic_batch` will do. Raises `InputError`, for a batch outside of it `BatchError`, and `ModuleError` where
        the model was changed and that is to be refused; then nothing has run. Where the call needs a plan of its own, it is
        captured now and held against the model, which may raise `CaptureError` and `VerificationError`.

        >>> runtime.run_prefix(torch.randn(8, 3, 224, 224))
        BoundaryPayload(cut:50, batch 8, layer3_1_relu_call2: [8, 256, 14, 14])
        """
        variant = self._now[False]  # here and below, what `enter` and `variant.run` do, without the price of a call
        entered = variant.enter(args, kwargs)
        if entered is None or not variant.guard():
            variant, entered = self._enter_anew(args, kwargs, False)
        if variant.prefix_moves is not None or variant.state.before:
            return self._asking_prefix(variant, entered, (args, kwargs), False)
        enabled = _is_grad_enabled()
        if enabled:
            _set_grad_enabled(False)
        try:
            raw = variant.prefix(*entered)
        except Exception as error:
            variant.refuse_failed(error)
            raise
        finally:
            if enabled:
                _set_grad_enabled(True)
        boundary = BoundaryPayload(variant.key[1], variant.key[0], entered[0], variant.candidate.live, raw)
        boundary._moves = variant.flight.moves
        return variant.leave(boundary) if variant.held or variant.state.both else boundary

    def run_suffix(self, boundary: BoundaryPayload) -> Any:
        """Run the suffix without gradients; returns what the model returns. The boundary stays as it is.

        Raises `BoundaryError` for a boundary of another split, or one whose values were written into since; `ModuleError` where
        the model was changed.

        >>> runtime.run_suffix(runtime.run_prefix(torch.randn(8, 3, 224, 224))).shape
        torch.Size([8, 1000])
        """
        variant = self.accept(boundary)
        if variant.suffix_moves is not None:
            return self._asking_suffix(variant, boundary)
        if len(boundary.labels) != len(variant.candidate.live):
            boundary = self._narrowed(variant, boundary)
        variant.check_suffix(boundary)
        enabled = _is_grad_enabled()
        if enabled:
            _set_grad_enabled(False)
        try:
            return variant.suffix(boundary.batch, *boundary.raw)
        except Exception as error:
            variant.refuse_failed(error)
            raise
        finally:
            if enabled:
                _set_grad_enabled(True)

    def _asking_prefix(
        self, variant: Variant, entered: tuple[Any, ...], call: tuple[Any, Any], trains: bool
    ) -> BoundaryPayload:
        if trains and variant.candidate.inexact:
            raise TrainingError(
                f"a training step across {self.split_id} may differ from the whole model's in the last bits: "
                f"{variant.candidate.inexact}. Cut elsewhere; SplitSpec(trainable=True) takes only cuts that train exactly"
            )
        if trains:
            variant.refuse_graphs()
        begun = None
        if not (trains or variant.state.before or self.settings.mode == "compiled"):  # on its path, it writes no state
            begun = kept, raw = self._begin(variant, entered, call, trains)
            if type(raw) is not Halted:
                boundary = self._boundary(variant, entered, raw, trains)
                boundary._before = self._ran_from(variant, kept, call, entered)
                return boundary
        with variant.flight:
            variant, entered, raw, before = self._run_prefix(variant, entered, call, trains, begun)
            variant.flight.moved(variant.flight.before, variant.state.before)
            boundary = self._boundary(variant, entered, raw, trains)
        boundary._before = before
        return boundary

    def _boundary(
        self, variant: Variant, entered: tuple[Any, ...], raw: tuple[Any, ...], trains: bool
    ) -> BoundaryPayload:
        live = variant.candidate.live
        if not trains:
            boundary = BoundaryPayload(variant.key[1], variant.key[0], entered[0], live, raw)
        else:
            if variant.copied:
                variant.refuse_views(raw)
            carried, wanting = taps.carried(live, raw)
            boundary = BoundaryPayload(variant.key[1], variant.key[0], entered[0], live, carried, wanting, raw)
            boundary._casts = casts.kept()
        return variant.leave(boundary)

    def _asking_suffix(self, variant: Variant, boundary: BoundaryPayload) -> Any:
        before = self._before(boundary)
        if before is not None and before.instead is not None:
            return self.run_suffix(before.instead)

        output, taken = self._run_suffix(variant, boundary, False, self._inferred)
        if before is not None and taken is not boundary:
            before.instead = taken
        return output

    def _inferred(self, variant: Variant, boundary: BoundaryPayload, suffix: Callable[..., Any]) -> Any:
        """What a segment of a suffix gives without gradients, once it may run."""
        if len(boundary.labels) != len(variant.candidate.live):
            boundary = self._narrowed(variant, boundary)
        variant.check_suffix(boundary)
        enabled = _is_grad_enabled()
        _set_grad_enabled(False)
        try:
            return suffix(boundary.batch, *boundary.raw)
        except Exception as error:
            variant.refuse_failed(error)
            raise
        finally:
            _set_grad_enabled(enabled)

    def joined(self, *args: Any, **kwargs: Any) -> Any:
        """Prefix and suffix in one go, in the grad mode of the caller, with one graph through both: as the model would run."""
        grad = _is_grad_enabled()
        variant, entered = self.enter(args, kwargs, grad)
        with variant.flight:
            variant, entered, raw, before = self._run_prefix(variant, entered, (args, kwargs), grad)
            variant.flight.moved(variant.flight.before, variant.state.before)
        boundary = BoundaryPayload(variant.key[1], variant.key[0], entered[0], variant.candidate.live, raw)
        boundary._before = before

        def run(v: Variant, b: BoundaryPayload, suffix: Callable[..., Any]) -> Any:
            v.flight.moved(v.flight.after, v.state.after)
            # On another path than the prefix took, a boundary is one of training.
            return v.run(suffix, b.batch, *(b.raw if b._graph is None else b._graph))

        return self._run_suffix(variant, boundary, grad, run)[0]

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Run both sides, so that whatever is compiled or cached on first use is there; the model stays as it is.

        Once, or three times where CUDA graphs are wanted: the first run of a size compiles, the second records. In mode compiled
        at batch 1 too, and where that was given at 2, with samples of what was given: a batch of one may need code of its own.
        Where forward can't run at that batch, the report says why.

        Sides that are compiled ahead of time are compiled at once, where there are three cores: the C++ compiler builds one while
        the other is lowered and built. On a terminal a line on stderr says what is done; `compile_options={"progress": ...}` has
        it always (True) or never (False).

        >>> runtime.warmup(torch.randn(8, 3, 224, 224))
        """
        s = self.settings
        if s.mode != "compiled":
            with left_as_found(self.model, self.plans, drew=self.draws, others=(args, kwargs)):
                self._run_copies(args, kwargs)
            return
        options = CompileOptions.parse(s.compile_options)
        times = 3 if imported("ariadne.compiled").cuda_graphs(options) else 1
        with (
            imported("ariadne.compiled").Progress(lambda: self._reports, options.progress),
            left_as_found(self.model, self.plans, drew=self.draws, others=(args, kwargs)),
        ):
            self._warm(args, kwargs, options, times)
            self._warm_beside(args, kwargs, options, times)

    def _warm(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: CompileOptions, times: int) -> None:
        """Run both sides; before, where that pays, begin the packages of both in a run in which their kernels are Python."""
        kind: type[Start] = imported("ariadne.compiled").Start
        with kind() as start:
            if (options.ahead or options.chosen) and start.pays():
                self.enter(args, kwargs, False)  # which has the better words for inputs that it does not take
                with start.starting():
                    self._run_copies(args, kwargs)
            for _ in range(times):
                self._run_copies(args, kwargs)

    def _run_copies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run both sides on copies of inputs, which forward may write into or use up."""
        given = Example.of(args, kwargs)
        again, named = tree.unflatten(given.resized(given.batch), given.spec)
        self.run_suffix(self.run_prefix(*again, **named))

    def _warm_beside(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: CompileOptions, times: int) -> None:
        """Run at a batch of one, or where that is what was given, of two; what can't run there is a note in the report."""
        lo, hi = self.settings.spec.batch_range
        example = self._example(args, kwargs, self._now[False].plan, range(lo, hi + 1))
        batch = 1 if example.batch > 1 else 2
        if not lo <= batch <= hi:
            return
        try:
            args, kwargs = tree.unflatten(example.resized(batch), example.spec)
            self._warm(args, kwargs, options, times)
        except Exception as error:  # the model, or a compiler, may refuse a batch that nobody asked for
            why = " ".join(str(error).split())[:200]
            self._reports[0].notes.append(f"not warmed up at batch {batch}: {type(error).__name__}: {why}")

    def report(self) -> CompileReport:
        """How the segments run: for mode compiled, what was compiled, loaded, compiled again or left to eager code.

        It has two segments for each plan that was ever made. What is compiled for a further plan of the same model counts as
        compiled again.
        """
        kind: type[CompileReport] = imported("ariadne.compiled").CompileReport
        return kind.of(self.settings.mode, self.settings.compile_options, tuple(self._reports))

    # --- training -------------------------------------------------------------------------------------------------

    def run_training_prefix(self, *args: Any, **kwargs: Any) -> BoundaryPayload:
        """Run the prefix with gradients; the boundary keeps the prefix's graph for `backward_prefix`.

        Raises what `run_prefix` raises, and `TrainingError` under `torch.inference_mode()` or where the cut is `inexact`;
        where an input was computed from a parameter of the suffix;
        and, after the prefix has run, where at this batch or layout a value that the suffix writes into is a view, but was none.
        """
        if torch.is_inference_mode_enabled():
            raise TrainingError(
                "run_training_prefix was called under torch.inference_mode(), where nothing can be trained; call it outside"
            )
        enabled = _is_grad_enabled()
        _set_grad_enabled(True)
        try:
            variant, entered = self.enter(args, kwargs, True)
            if self._unlisted and variant not in self._listed_all:
                self._refuse_unlisted(variant)
            for given in entered:
                if isinstance(given, torch.Tensor) and given.requires_grad:
                    self._owned_by(variant).refuse_input_of_suffix(given)
            if variant.prefix_moves is not None or variant.state.before or variant.candidate.inexact:
                return self._asking_prefix(variant, entered, (args, kwargs), True)
            return self._boundary(variant, entered, variant.run(variant.prefix, *entered), True)
        finally:
            _set_grad_enabled(enabled)

    def train_suffix(
        self,
        boundary: BoundaryPayload,
        targets: Any = None,
        *,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None,
        scaler: Any = None,
    ) -> tuple[torch.Tensor, taps.Gradients]:
        """Run the suffix, `loss_fn(output, targets)` and the backward pass of both.

        With an `optimizer`: its gradients are cleared before, and it steps after; without one, gradients add up. With a
        `scaler` (`torch.amp.GradScaler`) the loss is scaled, and so are the gradients returned. Returns the loss, and the
        gradient of each boundary tensor by label, None where none arrived. A gradient has the shape of its tensor.

        Raises `TrainingError` where `optimizer` owns a parameter that the prefix uses too, where the loss is not one element or
        depends on nothing that requires grad; `ConsumedError` for a boundary that was trained before; and `BoundaryError` as
        `run_suffix` does.

        >>> boundary = runtime.run_training_prefix(x)
        >>> loss, gradients = runtime.train_suffix(
        ...     boundary, targets, loss_fn=F.cross_entropy, optimizer=suffix_optimizer
        ... )
        >>> runtime.backward_prefix(boundary, gradients, optimizer=prefix_optimizer)
        """
        variant = self.accept(boundary)

        def run(variant: Variant, whole: BoundaryPayload, suffix: Callable[..., Any]) -> Any:
            boundary = self._narrowed(variant, whole)
            variant.check_suffix(boundary)
            owned = self._owned_by(variant)
            if optimizer is not None and boundary._graph is not None:
                variant.before.refuse_memory(optimizer, variant.owned())
            cast = self._cast_twice(variant, owned)
            try:
                return training.train_suffix(suffix, boundary, targets, loss_fn, optimizer, scaler, owned, cast)
            except WitnessError:  # raised before anything was walked back
                boundary.release("train_suffix")
                raise
            except Exception as error:
                variant.refuse_failed(error)
                raise
            finally:
                if boundary is not whole:
                    whole.trained_as(boundary)

        if variant.suffix_moves is None:
            loss, gradients = run(variant, boundary, variant.suffix)
            return loss, gradients
        (loss, gradients), taken = self._run_suffix(variant, boundary, True, run)
        if taken is not boundary and self._before(boundary) is None:
            boundary.trained_as(taken)
        elif taken is not boundary:
            boundary.become(taken)
        boundary._before = None
        return loss, gradients

    def backward_prefix(
        self,
        boundary: BoundaryPayload,
        boundary_grads: Mapping[str, torch.Tensor | None],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: Any = None,
    ) -> None:
        """Take the boundary gradients back through the prefix's graph; nothing is recomputed.

        With an `optimizer`, the gradients of what it owns in the prefix alone are cleared before, and it steps after.
        `boundary_grads`: by label, each of the shape, dtype and device of its tensor; None, or no entry, where there is none.

        Raises `ConsumedError` for a boundary that was walked back before, and `BoundaryError` for one without a graph (made by
        `run_prefix`, or read from bytes) and for gradients that are not of this boundary.

        >>> runtime.backward_prefix(boundary, boundary_grads=gradients, optimizer=prefix_optimizer)
        """
        if not isinstance(boundary_grads, Mapping):
            raise BoundaryError(
                f"boundary_grads is the dict that train_suffix returned; found {type(boundary_grads).__name__}"
            )
        variant = self.accept(boundary, runs=False)
        training.backward_prefix(
            boundary,
            boundary_grads,
            optimizer=optimizer,
            scaler=scaler,
            owned=self._owned_by(variant, known=True) if optimizer is not None else NOTHING_OWNED,
        )

    # --- files ----------------------------------------------------------------------------------------------------

    def save(
        self, path: str | os.PathLike[str], *, side: str, weights: bool = True, examples: Sequence[Any] = ()
    ) -> None:
        """Write one side, "prefix" or "suffix", to a safetensors file, which `ariadne.load` reads without the model's code.

        All plans that this runtime has and that hold for the model as it is are in the file: those of `prepare_split`, and
        those that calls needed since; and those that each of `examples` needs, a tuple of positional inputs or a pair of such a
        tuple and a dict of keywords. Without `weights` the file has the names and types of the tensors alone. The file takes
        its place when it is whole.

        Raises `SpecError` for another side, `HalfError` for what a file can't hold, `FrontierError` where one side writes what the
        other reads.

        >>> runtime.save("edge.safetensors", side="prefix")
        """
        if side not in SIDES:
            raise SpecError(f"side is 'prefix' or 'suffix'; found {side!r}")
        for example in examples:
            self.learn(example)
        spec = self.settings.spec
        imported("ariadne.halves").save(
            path,
            side,
            self.model,
            together(self._cuts(), side),
            {"batches": [*spec.batch_range], "trainable": spec.trainable},
            keep=weights,
        )

    def prefix_state_dict(self) -> dict[str, torch.Tensor]:
        """The part of the model's `state_dict()` that the prefix uses: its parameters and buffers, detached, by name.

        >>> torch.save(runtime.prefix_state_dict(), "edge.pt")
        """
        return self._state_dict("prefix")

    def suffix_state_dict(self) -> dict[str, torch.Tensor]:
        """The part of the model's `state_dict()` that the suffix uses: its parameters and buffers, detached, by name."""
        return self._state_dict("suffix")

    def _state_dict(self, side: str) -> dict[str, torch.Tensor]:
        side_of = imported("ariadne.halves").side_of
        sides = [(side_of(cut, side, self.model), cut) for cut in self._cuts()]
        used = {id(slot.tensor) for slot in imported("ariadne.halves").slots(self.model, sides)}
        return {n: t.detach() for n, t in self.model.state_dict(keep_vars=True).items() if id(t) in used}

    def _cuts(self) -> list[Cut]:
        """All plans, the first one first, with what their sides know of each other."""
        if self.plan.apart is not None:
            raise SpecError(
                "this is a half already, whose tensors are all its own: copy its file, or take its state_dict()"
            )
        variants = (self._main, *(v for v in self._variants if v is not self._main))
        with self._lock:  # as a call is asked: what a guard was not laid out for may be nothing that matters
            found = [[self._difference(guard) for guard in v.guards if not guard()] for v in variants]
        changed = [next(filter(None, errors), None) for errors in found]
        if (error := changed[0]) is not None and None not in changed:
            if self.settings.on_change == "refuse":
                raise error
            raise ModuleError(f"{error}. Or call the split once, which captures the model as it is now") from error
        holding = [v for v, error in zip(variants, changed, strict=True) if error is None]
        holding = [v for v in holding if references_hold(v.plan, self.model, v.baseline)]
        known, holding = holding, [v for v in holding if unread_alike(v.plan, self.model, v.baseline)]
        if known and not holding:
            raise HalfError(
                "no plan of this split holds for the model as it is: a tensor that no op reads, and of which forward asked for the "
                "type or the size, has another now. Call the split once, which captures a plan for it, or save with "
                "examples=[example_inputs]"
            )
        if not holding:
            raise HalfError(
                "no plan of this split holds for the model as it is: another weight was put in the place of one that forward "
                "reaches in two ways, by another name or a list. Call the split once, which captures a plan for it, or save with "
                "examples=[example_inputs]"
            )
        of: type[Cut] = imported("ariadne.halves").Cut
        return [
            of(
                v.plan,
                v.candidate,
                self._plans[v.plan][1],
                told_apart(v.plan, v.candidate),
                {"prefix": v.prefix_guard.modules, "suffix": v.suffix_guard.modules},
            )
            for v in holding
        ]

    def learn(self, example: Any) -> None:
        """Capture what plans a call with these inputs needs, with and without gradients, as this runtime has them.

        `example`: a tuple of positional inputs, or a pair of such a tuple and a dict of keywords. The model and the
        inputs are left as found. Raises what such a call raises; a forward that runs with gradients alone is learnt so.

        >>> runtime.learn((tokens, torch.zeros_like(mask)))
        """
        args, kwargs = example if len(example) == 2 and isinstance(example[1], dict) else (example, {})
        given = Example.of(args, kwargs)
        modes = {v.plan.grad_enabled and v.serves(True) for v in self._variants} | {False}
        for training_now in sorted(modes, reverse=True):  # a plan of training may serve both
            args, kwargs = tree.unflatten(given.resized(given.batch), given.spec)  # which forward may use up
            snapshot, known = Snapshot(self.model, (args, kwargs)), calls_of(self.model)
            snapshot.save_all()
            try:
                with torch.set_grad_enabled(training_now), without_saving_hooks():
                    self.joined(*args, **kwargs)
            except AriadneError:
                raise
            except Exception:
                if training_now or True not in modes:  # the model has no inference, as where forward takes a gradient
                    raise
            finally:
                snapshot.restore(self.draws)
                not_called(self.model, known)

    # --- cutting elsewhere ----------------------------------------------------------------------------------------

    def resplit(
        self,
        boundary: str | SplitCandidate | None = None,
        *,
        mode: ExecutionMode | None = None,
        compile_options: Mapping[str, Any] | None = None,
        on_change: OnChange | None = None,
    ) -> SplitRuntime:
        """The same plan, cut elsewhere or run in another way, as a new runtime; nothing is captured again.

        `boundary` is any boundary string, a candidate of this plan, or its `split_id`; None stays at the cut in use. `mode`,
        `compile_options` and `on_change` are those of `prepare_split`; without them they stay as they are. Raises `SpecError` for a
        string without meaning, a candidate of another plan or options that don't go with the mode, `FrontierError` where there is
        no such cut or it is not safe.

        >>> [runtime.resplit(c).split_id for c in runtime.candidates if c.safe][:2]
        ['cut:1', 'cut:2']
        >>> runtime.resplit(mode="debug_interpreter").run_suffix(runtime.run_prefix(torch.randn(7, 3, 224, 224))).shape
        torch.Size([7, 1000])
        """
        old = self.settings
        mode = old.mode if mode is None else mode
        if compile_options is None and mode == old.mode:
            compile_options = old.compile_options
        if isinstance(boundary, SplitCandidate):
            if boundary.cut > len(self.candidates) or boundary.live != self.candidates[boundary.cut - 1].live:
                raise SpecError(
                    f"{boundary.split_id} is not a candidate of this plan; take one from runtime.candidates"
                )
            boundary = boundary.split_id
        parsed = old.boundary if boundary is None else parse_boundary(boundary)
        trains = partial(_trains, cache(self.model.get_submodule))
        plans = {p: (with_trainable(p, c, trains), b) for p, (c, b) in self._plans.items()}
        change = old.on_change if on_change is None else on_change
        settings = replace(old, boundary=parsed, mode=mode, compile_options=compile_options, on_change=change)
        main = self._main if change == "refuse" else self._as_it_is()
        pick = partial(select, trainable=old.spec.trainable, objective=old.objective)
        here = parse_boundary(main.candidate.split_id) if boundary is None else parsed
        try:
            chosen = pick(main.plan, plans[main.plan][0], here)
        except FrontierError:  # a candidate is one of `candidates`, which the plan of the model as it is now may lack
            if main is self._main:
                raise
            main = self._main
            chosen = pick(main.plan, plans[main.plan][0], here)
        plans = {main.plan: plans[main.plan], **plans}
        return SplitRuntime(self.model, settings, plans, self._recapture, chosen)

    def _as_it_is(self) -> Variant:
        """The plan of the model as it is now: the first one, if that holds; or the newest that does, for training if asked."""
        if self.plan.apart is not None or self._main.guard():
            return self._main
        holding = [v for v in reversed(self._variants) if v.guard()]
        trains = [v for v in holding if v.serves(True)] if self.settings.spec.trainable else []
        return next(iter((*trains, *holding)), self._main)

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitRuntime:
        model = copied_model(self.model, memo)
        again = getattr(self._recapture, "of", None)
        recapture = again(model) if again is not None else self._recapture
        place = self.candidates.index(self._main.candidate)
        made = {p: copied_plan(p, self.model, memo) for p in self._plans}
        plans = {  # tuples of its own tell the boundaries of the copy's prefix from those of this one's
            made[p]: (tuple(replace(c, live=(*c.live,)) for c in candidates), b.of_copy(model, memo))
            for p, (candidates, b) in self._plans.items()
        }
        return SplitRuntime(model, self.settings, plans, recapture, plans[made[self.plan]][0][place])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise HalfError(
            "a split isn't pickled: write each side with runtime.save(path, side=...), and read it with ariadne.load(path); or "
            "pickle the model, and prepare it there"
        )


def _trains(module: Callable[[str], nn.Module], value: Value) -> bool:
    """Whether a parameter of the plan, whose module is found by its path, requires grad now."""
    path, name = value.origin
    try:
        p = module(path)._parameters.get(name)
    except AttributeError:  # the module is gone, which the guards of the new cut say
        return False
    return p is not None and p.requires_grad
