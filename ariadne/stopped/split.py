"""A Python split: what a user calls where no graph holds; the methods of `SplitRuntime`, over a forward that stops and goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Never

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ariadne import tree
from ariadne.boundary import BoundaryPayload, no_boundary
from ariadne.capture import Example, Snapshot
from ariadne.compiled import CompileReport
from ariadne.cut import ExecutionMode, parse_boundary
from ariadne.errors import BoundaryError, ModuleError, SpecError, TrainingError, named
from ariadne.forks import rlock
from ariadne.guards import copied_model, searched_once
from ariadne.runtime import (
    NOTHING_OWNED,
    Gradients,
    NotCalled,
    Owned,
    PrefixMemory,
    Settings,
    backward_prefix,
    carried,
    held_gradients,
    led_to,
    loss_of,
    refuse_hooks_of_both,
    refuse_shared,
    refuse_upstream,
    step,
    train_suffix,
    walks,
    watched_walk,
    with_gradients,
)
from ariadne.stopped.boundary import StoppedBoundary
from ariadne.stopped.calls import WITHIN, CallCandidate, Measured, Parameters, choose, nearby, signature_of
from ariadne.stopped.crossing import Crossing, foreign_of, handed_on, refuse_rejoined, refuse_strays
from ariadne.stopped.ending import refuse_changing_end
from ariadne.stopped.forward import Forward
from ariadne.stopped.handed import NewlyFound, look_for_all
from ariadne.stopped.laid import Laid
from ariadne.stopped.noted import Before, Noting, Wanted
from ariadne.stopped.proof import hold, in_its_thread, isolated, measured_on, prove_step, see_draws
from ariadne.stopped.python import PythonState
from ariadne.stopped.skipped import run_rest
from ariadne.stopped.standing import Stood, unmoved_since
from ariadne.stopped.unseen import unseen
from ariadne.units import size

_OF_A_PLAN = frozenset(
    "plan trace_plan prefix_source suffix_source cache_key visualize save prefix_state_dict suffix_state_dict".split()
)
_MOST_ENDS = 16


class PythonSplit(NotCalled):
    """A model split at the end of a module's call, where no graph holds: its own Python runs, stops there and goes on.

    Made by `prepare_split(..., fallback="python")`, which says in `why` what stood in the way of a graph.
    `run_prefix`, `run_suffix`, `run_training_prefix`, `train_suffix` and `backward_prefix` are those of
    `SplitRuntime`, and so is what they give: what the model gives, bit for bit. Inputs may have any form that forward
    takes. Forward runs in a thread of its own, and what Python does in it happens once. A boundary can be sent to a split of an
    equal model, where forward runs with the part before the cut skipped; `stays` says why, where it can't.

    >>> runtime = prepare_split(detector, ([image],), split="after:backbone", fallback="python")
    >>> runtime.run_suffix(runtime.run_prefix([other_image]))
    [{'boxes': ..., 'labels': ..., 'scores': ...}]
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        example: Example,
        measured: Measured,
        why: str,
        chosen: CallCandidate | None = None,
    ) -> None:
        self.model, self.settings, self.why = model, settings, why
        self._example, self._measured, self._lock = example, measured, rlock()
        self._proved = False  # that training gives what the whole model's gives
        self._known: Parameters | None = None
        self._before = NOTHING_OWNED, PrefixMemory(tuple)
        self.candidates = measured.candidates(model)
        spec = settings.spec
        self.candidate: CallCandidate = chosen or choose(
            self.candidates, settings.boundary, measured.ops, trainable=spec.trainable, objective=settings.objective
        )
        self._modules = [*model.modules()]
        self._signature = signature_of(model, self.candidate, measured)
        self.wanted, self._laid = Wanted(), Laid()
        self._ends: dict[bool, list[Any]] = {
            False: [],
            True: [],
        }  # code whose end at the cut was looked at, with gradients or not
        self.needs_gradients = measured.needs_gradients  # so there is no inference
        self.stays = ""  # why a boundary can be run in this process alone, once; empty where it can be sent

    # --- what it is -----------------------------------------------------------------------------------------------

    @property
    def split_id(self) -> str:
        """The string that names the cut in use: "after:backbone"."""
        return self.candidate.split_id

    @property
    def module(self) -> nn.Module:
        """The module after whose call forward is cut, as it stands in the model now; `ModuleError` where there is none."""
        try:
            return self.model.get_submodule(self.candidate.after)
        except AttributeError:
            raise ModuleError(
                f"{named(self.candidate.after)}, after which this split is cut, is no longer in the model; put a module there, or "
                "call prepare_split again"
            ) from None

    @property
    def draws(self) -> frozenset[str]:
        """The random generators of the process that the examples were seen to draw from."""
        return frozenset(self._measured.drew)

    def note_draws(self, example: Example, grad: bool) -> None:
        """Have `draws` hold what the model draws from on this example, as it is switched now."""
        see_draws(self.model, example, grad, self._measured.drew)

    def prefix_parameters(self) -> list[nn.Parameter]:
        """The parameters of the model that the example used before the cut, each once, and others that stand in their places now.

        Raises `ModuleError` where the model has more by now, of which the example tells nothing.
        """
        return [*self._listed().prefix]

    def suffix_parameters(self) -> list[nn.Parameter]:
        """The parameters of the model that the example used after the cut, or nowhere, each once; raises as `prefix_parameters`."""
        return [*self._listed().suffix]

    def shared_parameters(self) -> list[nn.Parameter]:
        """The parameters of the model that the example used on both sides."""
        return [*self._listed().shared]

    def _listed(self) -> Owned:
        return self._owned().registered(self.model)

    def _owned(self) -> Owned:
        known = self._parameters()
        for name, p in known.came:
            if p.requires_grad:
                raise ModuleError(
                    f"the parameter {name!r} came after the split was prepared, and which side uses it is known of the example "
                    "alone; call prepare_split again"
                )
        return known.owned

    def read_after(self) -> list[nn.Parameter]:
        """What the part after the cut reads, as far as it is known: what it did in the example, and parameters that came since."""
        known = self._parameters()
        return [*known.sides[1], *(p for _, p in known.came)]

    def _parameters(self) -> Parameters:
        """Which parameters there are now, looked for anew where another tensor has come to stand in the model, or is gone."""
        state, known = self._laid.state(self.model), self._known
        if known is None or known.state is not state:
            known = self._known = self._measured.parameters(self.model, self.candidate.cut, state)
        return known

    def report(self) -> CompileReport:
        """How it runs: as Python, with nothing compiled."""
        return CompileReport("python", None)

    def __repr__(self) -> str:
        c = self.candidate
        return (
            f"PythonSplit({type(self.model).__name__}, {c.split_id}, {c.prefix_ops} + {c.suffix_ops} ops, "
            f"{size(c.boundary_bytes)} in the example)"
        )

    def __getattr__(self, name: str) -> Never:
        if name in _OF_A_PLAN:
            raise SpecError(
                f"a Python split has no {name!r}, which is of a plan: its forward runs as the model's own Python. {self.why}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- inference ------------------------------------------------------------------------------------------------

    def run_prefix(self, *args: Any, **kwargs: Any) -> StoppedBoundary:
        """Run forward without gradients up to the cut; takes what forward takes, and raises what it raises.

        Where forward returns before the cut comes, the boundary holds its result.

        >>> runtime.run_prefix([torch.rand(3, 480, 640), torch.rand(3, 320, 240)])
        StoppedBoundary(after:backbone, backbone['0']: [2, 256, 120, 160], ...)
        """
        forward = self._started(args, kwargs, False, known=False)
        return self._boundary(forward, (args, kwargs), forward.halt.output, (), None)

    def run_suffix(self, boundary: BoundaryPayload) -> Any:
        """Go on with the forward of a boundary; returns what the model returns, and raises what it raises.

        A boundary that came from bytes, or was run before, is run from what crossed: forward from its beginning, with the part
        before the cut skipped. Raises `BoundaryError` for a boundary of another split, of training, or one whose values were
        written into, where a mode or a switch was changed since, and where forward needs what did not cross.
        """
        mine = self._accept(boundary)
        mine.refuse_another_autocast()
        if not isinstance(mine, StoppedBoundary):
            return self._run_rest(mine, False)
        if mine._graph is not None:
            raise BoundaryError(
                "this boundary was made by run_training_prefix, whose forward runs with gradients; train_suffix takes it. For "
                "run_suffix make one with run_prefix"
            )
        self._refuse_moved(mine)
        if mine.spent and not self.stays and mine.forward.process == os.getpid():
            return self._run_rest(mine.crossing(), False)
        return mine.stood.unmoved().over(mine.forward.go_on)

    def _run_rest(self, boundary: BoundaryPayload, grad: bool, values: Sequence[Any] | None = None) -> Any:
        """Run forward with the part before the cut skipped, from what crossed; `values` stand for the boundary's."""
        *crossed, told = boundary.raw if values is None else values
        if boundary.labels == ("output",):
            return told  # forward returned before the cut came
        before, model, number = Before.read(told), self.model, self.candidate.call
        with torch.set_grad_enabled(grad):
            return unmoved_since(model, before, self._laid).within(
                lambda: run_rest(
                    model,
                    self.module,
                    number,
                    before,
                    crossed,
                    known=self.wanted.attributes,
                    laid=self._laid,
                    trains=values is not None,
                )[0]
            )

    def joined(self, *args: Any, **kwargs: Any) -> Any:
        """The model itself, in the grad mode of the caller."""
        return self.model(*args, **kwargs)

    def save_written(self, snapshot: Snapshot) -> None:
        """Keep a copy of whatever state running this split may write."""
        snapshot.save_all()

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Run both sides once; the model stays as it is."""
        given = Example.of(args, kwargs)
        self.note_draws(given, torch.is_grad_enabled())
        isolated(self.model, given, torch.is_grad_enabled(), self._joined, self.draws)

    # --- training -------------------------------------------------------------------------------------------------

    def run_training_prefix(self, *args: Any, **kwargs: Any) -> StoppedBoundary:
        """Run forward with gradients up to the cut; the boundary keeps the graph for `backward_prefix`.

        The first call holds a training step against the whole model's, on inputs like these, unless `prepare_split` did.
        """
        if torch.is_inference_mode_enabled():
            raise TrainingError(
                "run_training_prefix was called under torch.inference_mode(), where nothing can be trained; call it outside"
            )
        if not self._proved:
            self.prove_training(Example.of(args, kwargs))
        return self._training_prefix(args, kwargs)

    def _training_prefix(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StoppedBoundary:
        foreign = foreign_of((args, kwargs), self.model.parameters())
        forward = self._started(args, kwargs, True, known=False)
        graph = forward.halt.output
        (bare,), wanting = carried((self._label(forward),), (graph,))
        made = self._boundary(forward, (args, kwargs), bare, wanting, (graph,))
        made.foreign = foreign
        return made

    def train_suffix(
        self,
        boundary: BoundaryPayload,
        targets: Any = None,
        *,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None,
        scaler: Any = None,
    ) -> tuple[torch.Tensor, Gradients]:
        """Go on with forward, run `loss_fn(output, targets)` in its thread, and walk back to the cut; as in `SplitRuntime`.

        The gradients are those of the tensors of the boundary, and of what else forward kept from before the cut and used after it
        ("kept_1", ...). Raises `TrainingError` where a tensor from before is used where that can't be followed.
        """
        mine = self._accept(boundary)
        mine.refuse_another_autocast()
        if not isinstance(mine, StoppedBoundary):
            return self._train_rest(mine, targets, loss_fn, optimizer, scaler)
        graph = mine._graph
        if graph is None:
            raise BoundaryError(
                "this boundary was made by run_prefix, without gradients; make one with run_training_prefix"
            )
        mine.refuse_if_taken("train_suffix")
        self._refuse_moved(mine)
        halt, unmoved = mine.forward.halt, mine.stood.going_on(None if self.stays else mine.before.crossing)
        owned = self._owned()
        prefix = owned.prefix
        refuse_shared([p for p in prefix if p.requires_grad], optimizer, "suffix", True)
        if optimizer is not None:
            if self._before[0] is not owned:
                self._before = owned, PrefixMemory(lambda: prefix)
            self._before[1].refuse_memory(optimizer, owned)
        refuse_hooks_of_both(prefix, owned.suffix)
        mine.consume("train_suffix")
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        else:
            mine._earlier = with_gradients(owned.suffix)
        tensors = {label: t for label, t in tree.paths(graph[0], mine.labels[0]) if isinstance(t, torch.Tensor)}
        crossing = Crossing(halt.made, {id(t): label for label, t in reversed(tensors.items())}, unmoved)

        def lost(output: Any) -> Any:
            with torch._C.DisableTorchFunction():  # what is asked here of tensors is no op of forward's
                before = held_gradients(prefix)
            walked, output = walks(), unmoved.settle(output)
            return loss_of(lambda out, t: crossing.take(loss_fn(out, t)), output, targets), before, walked

        with unmoved.to_the_end():
            loss, before, walked = mine.forward.go_on(crossing, lost)
        if halt.saving is not None and halt.saving.is_split:
            raise TrainingError(
                f"the cut {self.split_id!r} is for inference alone: {WITHIN}. Cut at the end of that part, or outside of it"
            )
        leaves, crossed = crossing.reached(loss)
        leaves = [leaf for leaf in leaves if leaf is not crossing.anchor]
        behind = led_to([one.tensor for one in crossed], None)
        both = behind | {
            id(p) for p in owned.shared
        }  # in this round the prefix may lead to none of these, as under no_grad
        waiting = [leaf for leaf in leaves if id(leaf) in both]
        if halt.autocast and not behind.isdisjoint(map(id, waiting)):
            raise TrainingError(
                "autocast casts a parameter once for both sides of the cut, and the whole model adds their gradients before it "
                "casts back; two halves can't. Use torch.autocast(..., cache_enabled=False), or cut elsewhere"
            )
        refuse_rejoined(loss, crossed, mine.foreign)
        others = [p for p in self._parameters().every if id(p) in behind]  # on another path the prefix uses others
        refuse_shared([*waiting, *others], optimizer, "suffix", True)
        if optimizer is not None:
            refuse_upstream(optimizer, [one.tensor for one in crossed], owned)
        known = owned.of_suffix
        noted = [leaf for leaf in leaves if id(leaf) not in known | behind]
        more = [one for one in crossed if one.label not in tensors]
        mine.labels += tuple(one.label for one in more)
        mine._graph = (graph[0], *(one.tensor for one in more))
        mine.raw += tuple(one.tensor.detach() for one in more)
        mine.requires_grad += tuple(one.label for one in more)
        crossing.walking.append(True)
        watched_walk(loss, mine, scaler, waiting, noted, before, walked)
        if optimizer is not None:
            step(optimizer, scaler)
        return loss.detach(), {
            label: crossing.gradients.get(label) for label in (*tensors, *(one.label for one in more))
        }

    def _train_rest(
        self, boundary: BoundaryPayload, targets: Any, loss_fn: Any, optimizer: Any, scaler: Any
    ) -> tuple[torch.Tensor, Gradients]:
        """`train_suffix` for a boundary that came from bytes."""
        if not self._proved:
            self.prove_training(self._example)
        owned = self._owned()
        shared = ["a parameter"] if owned.shared else []

        def suffix(batch: int, *values: Any) -> Any:
            return self._run_rest(boundary, True, values)

        return train_suffix(suffix, boundary, targets, loss_fn, optimizer, scaler, owned, shared)

    def backward_prefix(
        self,
        boundary: BoundaryPayload,
        boundary_grads: Mapping[str, torch.Tensor | None],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: Any = None,
    ) -> None:
        """Take the boundary gradients back through the prefix's graph; as `SplitRuntime.backward_prefix`."""
        if not isinstance(boundary_grads, Mapping):
            raise BoundaryError(
                f"boundary_grads is the dict that train_suffix returned; found {type(boundary_grads).__name__}"
            )
        mine = self._accept(boundary)
        if isinstance(mine, StoppedBoundary) and "train_suffix" not in mine._consumed:
            mine.hold_kept()
            refuse_strays(mine._graph or (), *self._parameters().sides)
        owned = self._owned()
        shares: list[Any] = [p for p, _ in mine._shared]
        owned = Owned.of([*owned.shared, *shares], owned.suffix)
        backward_prefix(mine, boundary_grads, optimizer=optimizer, scaler=scaler, owned=owned)

    # --- elsewhere ------------------------------------------------------------------------------------------------

    def resplit(
        self,
        boundary: str | CallCandidate | None = None,
        *,
        mode: ExecutionMode | None = None,
        compile_options: Mapping[str, Any] | None = None,
        on_change: str | None = None,
    ) -> PythonSplit:
        """The same model, stopped elsewhere, as a new runtime that is held against the model on the example.

        `on_change` is that of a graph: here each call runs the model as it is.
        """
        if on_change not in (None, "capture", "refuse"):
            raise SpecError(f"on_change is one of 'capture', 'refuse'; found {on_change!r}")
        if mode not in (None, "generated_eager") or compile_options:
            raise SpecError(f"a Python split runs forward as it is, so there is no mode {mode!r}. {self.why}")
        if isinstance(boundary, CallCandidate):
            boundary = boundary.split_id
        parsed = parse_boundary(self.split_id if boundary is None else boundary)
        return self.elsewhere(replace(self.settings, boundary=parsed))

    def elsewhere(self, settings: Settings) -> PythonSplit:
        """The same model under other settings, held against the model on the example."""
        with searched_once():
            made = PythonSplit(self.model, settings, self._example, self._measured, self.why)
            made.prove()
        return made

    def learn(self, example: Any) -> None:
        """Find out what else the suffix uses from before the cut with inputs like these, so that boundaries that are sent hold it.

        `example`: a tuple of positional inputs, or a pair of such a tuple and a dict of keywords. The model is left as found.

        >>> runtime.learn(([image, another],))
        """
        args, kwargs = example if len(example) == 2 and isinstance(example[1], dict) else (example, {})
        for grad in [g for g in (False, True) if (self._proved if g else not self.needs_gradients)]:
            self.note_draws(Example.of(args, kwargs), grad)  # which takes its turn, and that comes before other locks
            with self._lock:
                self._look_for_kept(Example.of(args, kwargs), grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> PythonSplit:
        model = copied_model(self.model, memo)
        known = WeakTensorKeyDictionary()
        for p, q in zip(self.model.parameters(), model.parameters(), strict=True):
            if p in self._measured.known:
                known[q] = self._measured.known[p]
        measured = replace(self._measured, known=known)
        made = PythonSplit(model, self.settings, self._example, measured, self.why, self.candidate)
        made.wanted = replace(self.wanted, sites={*self.wanted.sites}, state={*self.wanted.state})
        made.stays, runs = self.stays, PythonState(self.model, self._laid).runs
        for grad in [grad for grad, known in self._ends.items() if runs in known]:
            made._note_end(grad)
        return made

    # --- proof ----------------------------------------------------------------------------------------------------

    def prove(self) -> None:
        """Hold the split against the model on the example; raises `VerificationError`."""
        with searched_once():
            in_its_thread(self.model, self._example, self.needs_gradients, self.draws, self._prove)

    def _prove(self) -> None:
        if not self.needs_gradients:
            with self._lock:
                self._refuse_changing_end(self._example, False)
                self._look_for_kept(self._example, False)
            hold(self.model, self._example, False, self.model, self._joined, self.split_id, self.draws)
        if self.settings.spec.trainable:
            self._prove_training(self._example)

    def _refuse_changing_end(self, example: Example, grad: bool) -> None:
        others = nearby(self.candidates, self.candidate)
        refuse_changing_end(self.model, example, grad, self._started, self.candidate.after, others, self.draws)
        self._note_end(grad)

    def _note_end(self, grad: bool) -> None:
        """Take the code that may run now as code that changes nothing where it is let go."""
        runs, known = PythonState(self.model, self._laid).runs, self._ends[grad]
        if runs not in known:
            known.append(runs)
            del known[:-_MOST_ENDS]

    def _look_for_kept(self, example: Example, grad: bool) -> None:
        """Find out what the suffix uses from before the cut, by running it on all that there is; `stays` says why none leaves."""
        if self.stays:
            return
        found = Wanted(everything=True)

        def run(*args: Any, **kwargs: Any) -> Any:
            noting = Noting(self.model, (args, kwargs), found)
            forward = Forward(
                self.model,
                args,
                kwargs,
                module=self.module,
                number=self.candidate.call,
                grad=grad,
                python=noting.python,
                noting=noting,
            )
            halt = forward.halt
            forward.end()
            if halt.ended:
                return
            tensors = [t for t in tree.leaves(halt.output) if isinstance(t, torch.Tensor)]
            places = frozenset(place for place, _, _ in halt.before.attributes)
            crossed = handed_on((*tensors, *halt.kept), grad)
            known = self.wanted.attributes | places
            with unseen():
                _, used = run_rest(
                    self.model, self.module, self.candidate.call, halt.before, crossed, known=known, watch=True
                )
            self.wanted.add(used, noting.site_of, places)

        def afar(*args: Any, **kwargs: Any) -> Any:
            forward = self._started(args, kwargs, grad)
            boundary = self._boundary(forward, (args, kwargs), forward.halt.output, (), None).crossing()
            forward.end()
            return self._run_rest(boundary, grad)

        try:
            isolated(self.model, example, grad, run, self.draws)
            hold(self.model, example, grad, self.model, afar, self.split_id, self.draws)
        except NewlyFound:
            raise
        except Exception as error:  # whatever forward raises where it is run in such a way: then it is not
            self.stays = f"{type(error).__name__}: {error}"

    def _joined(self, *args: Any, **kwargs: Any) -> Any:
        output = self.run_suffix(self.run_prefix(*args, **kwargs))
        self._note_end(False)  # with what forward has made for itself
        return output

    def prove_training(self, example: Example) -> None:
        """Hold a training step against the whole model's on an example; raises `VerificationError`."""
        with searched_once():
            self.note_draws(example, True)
            in_its_thread(self.model, example, True, self.draws, lambda: self._prove_training(example))

    def _prove_training(self, example: Example) -> None:
        with self._lock:
            self._refuse_changing_end(example, True)
            self._look_for_kept(example, True)
            was, self._proved = self._proved, True
            try:
                prove_step(self.model, example, self, self.split_id, self.draws)
            except BaseException:
                self._proved = was
                raise

    # --- the parts of a call --------------------------------------------------------------------------------------

    def _started(self, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, known: bool = True) -> Forward:
        noting = None if self.stays else Noting(self.model, (args, kwargs), self.wanted, self._laid)
        python = PythonState(self.model, self._laid) if noting is None else noting.python
        if not (known or python.runs in self._ends[grad]):  # other code has come, which may change something as it ends
            self.note_draws(example := Example.of(args, kwargs), grad)
            with self._lock:
                self._refuse_changing_end(example, grad)
            return self._started(args, kwargs, grad)
        stood = Stood(self.model, noting, self._laid)
        return Forward(
            self.model,
            args,
            kwargs,
            module=self.module,
            number=self.candidate.call,
            grad=grad,
            python=python,
            noting=noting,
            stood=stood,
        )

    def _label(self, forward: Forward) -> str:
        return "output" if forward.halt.ended else self.candidate.after.replace(".", "_")

    def _boundary(
        self, forward: Forward, inputs: Any, raw: Any, wanting: tuple[str, ...], graph: tuple[Any, ...] | None
    ) -> StoppedBoundary:
        made = StoppedBoundary(
            self.split_id, self._signature, self._label(forward), forward, inputs, raw, wanting, graph
        )
        made.flags = self._laid.training(self.model)
        made.owner = self
        if self.stays:
            made.before = Before(refusal=self.stays)
        return made

    def _accept(self, boundary: Any) -> BoundaryPayload:
        if not isinstance(boundary, BoundaryPayload):
            raise no_boundary(boundary)
        sent = boundary.plan_signature == self._signature
        mine = boundary.owner is self if isinstance(boundary, StoppedBoundary) else sent
        if not mine or boundary.split_id != self.split_id:
            raise BoundaryError(
                f"this boundary was made by another split ({boundary.split_id} of {boundary.plan_signature}); this one is "
                f"{self.split_id} of {self._signature}. Run both sides with one runtime, or send the boundary by to_bytes to a "
                "split of an equal model"
            )
        return boundary

    def _refuse_moved(self, boundary: StoppedBoundary) -> None:
        """Raise `BoundaryError` where a forward would go on under other conditions than those it has run under so far."""
        boundary.refuse_if_written()
        boundary.forward.refuse_held()
        began = boundary.forward.ambient
        found = began.changed(type(began).now(began.grad))
        now = self._laid.training(self.model) if found is None else boundary.flags
        if len(now) == len(boundary.flags) and now != boundary.flags:  # of others that came, more is told below
            found = "a module was switched between train and eval"
        if not (found or boundary.forward.taken):  # else it moved on by itself
            moved = next(boundary.forward.halt.left.moved(), None)
            found = moved and f"{moved}, into which the prefix had put something, by another call or by you"
            found = found or boundary.forward.handed.moved()
        if found:
            raise BoundaryError(
                f"since the prefix ran, a condition of its forward was changed: {found}; the whole model would have run under "
                "one. Put it back, or run the prefix again"
            )


def prepared(model: nn.Module, settings: Settings, example: Example, why: str, *, training: bool) -> PythonSplit:
    """Measure one run of the example, choose a cut, and hold the split against the model there."""
    if not training:
        settings = replace(settings, spec=replace(settings.spec, trainable=False))
    with searched_once():
        measured = measured_on(model, example, settings.spec.trainable)
        look_for_all()  # now that a first call has made what it makes
        made = PythonSplit(model, settings, example, measured, why)
        made.prove()
    return made
