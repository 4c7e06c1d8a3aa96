"""A split whose prefix is a graph and whose suffix is the model's own Python: forward is captured up to the cut.

What is captured is forward, left at the end of a module's call; it gives what crosses. So the prefix is generated code, may be
saved to a file, and its boundaries are run wherever the model is, with the part before the cut skipped.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Never

import torch
from torch import nn

from ariadne import tree
from ariadne.boundary import BoundaryPayload
from ariadne.capture import NUMPY, PYTHON, Example, noted
from ariadne.cut import parse_boundary
from ariadne.errors import BoundaryError, FrontierError, HalfError, InputError, SpecError, UnsupportedError, named
from ariadne.forks import rlock
from ariadne.guards import other_structure, searched_once
from ariadne.plan import TracePlan
from ariadne.runtime import TAPS, Gradients, NotCalled, SplitRuntime
from ariadne.stopped.calls import CallCandidate
from ariadne.stopped.forward import Forward
from ariadne.stopped.gate import Awaited
from ariadne.stopped.noted import Before, Made, Name, Noting, place_of_call, state_of
from ariadne.stopped.proof import hold, isolated, prove_step
from ariadne.stopped.skipped import run_rest
from ariadne.stopped.split import PythonSplit
from ariadne.stopped.standing import unmoved_since
from ariadne.stopped.unseen import Unseen, enter, leave

Make = Callable[[nn.Module, str], SplitRuntime]
OF_PYTHON = {"random": PYTHON, "numpy": NUMPY}


class _Reached(BaseException):
    """Leaves forward at the cut."""


class _Picking(Unseen):
    """Keeps the tensors that are made at some places in Python: by place, and which of those made there, from 0.

    The capture calls torch in ways of its own, so calls can't be counted; what each place makes can.
    """

    def __init__(self, wanted: Collection[Made], known: Iterable[Any]) -> None:
        super().__init__()
        self.wanted, self.counts = wanted, Counter[Any]()
        self.seen = {id(t): t for t in known}
        self.found: dict[Made, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for t in tree.leaves(found):
            if isinstance(t, torch.Tensor) and id(t) not in self.seen:
                self.seen[id(t)] = t
                place = place_of_call(2)
                made = place, self.counts[place]
                self.counts[place] += 1
                if made in self.wanted:
                    self.found[made] = t
        return found


def up_to(
    model: nn.Module,
    path: str,
    number: int,
    crossing: Sequence[Name],
    made_at: Mapping[Name, Made],
    known: tree.Spec | None = None,
) -> nn.Module:
    """The model, all of it shared, with a forward that ends with that call of that module and gives what crosses.

    It takes inputs of the `known` structure alone: the suffix runs on the example's, with the tensors that cross put in.
    """
    whole = type(model)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        reached: list[Any] = []

        def stop(output: Any) -> Never:
            reached.append(output)
            raise _Reached

        given, form = tree.flatten((args, kwargs))
        if known is not None and form != known:
            raise InputError(f"{other_structure(form, known)}, or with fallback='python'")
        picking = None
        if made_at:
            picking = _Picking({*made_at.values()}, [*given, *(t for _, t in state_of(self))])
        awaited = Awaited(self.get_submodule(path), number, stop)
        if picking is not None:
            enter(picking)
        try:
            whole.forward(self, *args, **kwargs)
        except _Reached:
            pass
        finally:
            if picking is not None:
                leave(picking)
            awaited.close()
        tensors = [t for t in tree.leaves(reached[0]) if isinstance(t, torch.Tensor)]
        for name in crossing:
            if name[0] == "input":
                tensors.append(given[name[1]])
            else:
                assert picking is not None
                found = picking.found.get(made_at[name])
                if found is None:  # Python's own code holds it, such as sum(), or another call of torch made it
                    raise UnsupportedError(
                        "forward can't be captured up to the cut: a tensor from before it that the suffix uses is made in another "
                        "way where forward is captured. Cut elsewhere, or use fallback='python'"
                    )
                tensors.append(found)
        # Views with the very same strides, gradients too: view_as lays a dim of size one anew, select a whole gradient.
        return tuple([t.transpose(-1, -1) for t in tensors])

    made: nn.Module = object.__new__(
        type(whole.__name__, (whole,), {"forward": forward, "__module__": whole.__module__})
    )
    made.__dict__ = model.__dict__
    return made


def _at_the_cut(t: torch.Tensor) -> torch.Tensor:
    """What a view stands for that the graph's suffix made: hooks and gradients asked of that are seen to be of what crosses."""
    base = t._base
    if base is None or not isinstance(base.grad_fn, TAPS) or (base.shape, base.stride()) != (t.shape, t.stride()):
        return t
    return base


class MixedSplit(NotCalled):
    """A model split at the end of a module's call: a graph before it, the model's own Python after it.

    Made by `prepare_split(..., fallback="python-suffix")`; `why` says why the whole is no graph. The methods are those of
    `SplitRuntime`, and so is what they give. `graph` is the split that makes the boundaries: `save(..., side="prefix")` writes
    its prefix to a file, and `run_suffix` takes the boundaries of such a half. Inputs have the form and, but for the batch, the
    sizes of the example.

    >>> runtime = prepare_split(detector, ([image],), split="after:backbone", fallback="python-suffix")
    >>> runtime.save("edge.safetensors", side="prefix")
    >>> runtime.run_suffix(ariadne.load("edge.safetensors").run_prefix([image]))
    [{'boxes': ..., 'labels': ..., 'scores': ...}]
    """

    def __init__(self, python: PythonSplit, make: Make, example: Example) -> None:
        self.model, self.why, self.python = python.model, python.why, python
        self.settings, self.candidate, self.candidates = python.settings, python.candidate, python.candidates
        self._make, self._example, self._lock = make, example, rlock()
        self._tables: dict[Any, Before] = {}
        self._laid = python._laid
        self._proved = False
        self._trained = tuple([m.training for m in self.model.modules()])
        if self.model._forward_hooks or self.model._forward_pre_hooks:
            raise UnsupportedError(
                "the model itself has forward hooks, which would see a forward that ends at the cut; remove them, or use "
                "fallback='python'"
            )
        self._made_at: dict[Name, Made] = {}
        names = self._before(example.batch, False).crossing
        if any(name[0] == "state" for name in names):
            raise UnsupportedError(f"the suffix uses {names[0][1]!r}, into which the prefix writes. Cut elsewhere")
        self.crossing = names
        prefix = up_to(self.model, self.candidate.after, self.candidate.call, names, self._made_at, example.spec)
        try:
            self.graph = make(prefix, self.candidate.split_id)
        except FrontierError as error:
            raise FrontierError(
                f"the part up to {self.candidate.split_id!r} is no prefix of its own: {error}"
            ) from error
        self.graph.rest_reads = self.python.read_after
        self._plans = self.graph.plans  # whose answers are the example's
        for plan in self._plans:
            self._refuse_other_answers(plan, example.batch)

    @property
    def split_id(self) -> str:
        """The string that names the cut: "after:backbone"."""
        return self.candidate.split_id

    @property
    def prefix_source(self) -> str:
        """The prefix's generated code."""
        return self.graph.prefix_source

    def prefix_parameters(self) -> list[nn.Parameter]:
        """The parameters that the prefix uses, each once."""
        return self.graph.prefix_parameters()

    def suffix_parameters(self) -> list[nn.Parameter]:
        """The parameters that the example used after the cut, each once."""
        return self.python.suffix_parameters()

    def shared_parameters(self) -> list[nn.Parameter]:
        """The parameters of both sides."""
        ids = {id(p) for p in self.suffix_parameters()}
        return [p for p in self.prefix_parameters() if id(p) in ids]

    def __repr__(self) -> str:
        return f"MixedSplit({type(self.model).__name__}, {self.split_id}, {self.graph.candidate.cut} ops as a graph)"

    # --- running --------------------------------------------------------------------------------------------------

    def run_prefix(self, *args: Any, **kwargs: Any) -> BoundaryPayload:
        """Run the prefix without gradients; as `SplitRuntime.run_prefix`."""
        return self.graph.run_prefix(*args, **kwargs)

    def run_suffix(self, boundary: BoundaryPayload) -> Any:
        """Run the rest of forward from a boundary, of this split or of a half; returns what the model returns.

        The first boundary of a batch size runs the part before the cut once more, on the example's numbers, to see what it does.
        """
        tensors = self.graph.run_suffix(boundary)
        self._refuse_other_answers(self.graph.accept(boundary).plan, boundary.batch)
        return self._rest(tensors, boundary.batch, False)

    def run_training_prefix(self, *args: Any, **kwargs: Any) -> BoundaryPayload:
        """Run the prefix with gradients; as `SplitRuntime.run_training_prefix`."""
        if not self._proved:
            self.prove_training()
        self._look_first((args, kwargs))
        return self.graph.run_training_prefix(*args, **kwargs)

    def _look_first(self, inputs: Any) -> None:
        """See what forward does before the cut at the batch of these inputs: later that may write what the prefix's graph saved."""
        leaves = [*tree.leaves(inputs)]
        for i, dim in self._example.batched.items():
            if (
                i < len(leaves)
                and isinstance(leaves[i], torch.Tensor)
                and leaves[i].dim() > dim
                and leaves[i].shape[dim]
            ):
                self._before(leaves[i].shape[dim], True)
                return

    def train_suffix(
        self,
        boundary: BoundaryPayload,
        targets: Any = None,
        *,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None,
        scaler: Any = None,
    ) -> tuple[torch.Tensor, Gradients]:
        """Run the rest of forward and the loss, and walk back to the cut; as `SplitRuntime.train_suffix`."""
        self._refuse_other_answers(self.graph.accept(boundary).plan, boundary.batch)
        batch = boundary.batch

        def rest(tensors: Any, asked: Any) -> torch.Tensor:
            return loss_fn(self._rest([*map(_at_the_cut, tensors)], batch, True), asked)

        return self.graph.train_suffix(boundary, targets, loss_fn=rest, optimizer=optimizer, scaler=scaler)

    def backward_prefix(
        self,
        boundary: BoundaryPayload,
        boundary_grads: Mapping[str, torch.Tensor | None],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: Any = None,
    ) -> None:
        """Walk back through the prefix; as `SplitRuntime.backward_prefix`."""
        self.graph.backward_prefix(boundary, boundary_grads, optimizer=optimizer, scaler=scaler)

    def joined(self, *args: Any, **kwargs: Any) -> Any:
        """The model itself, in the grad mode of the caller."""
        return self.model(*args, **kwargs)

    def save(self, path: str | os.PathLike[str], *, side: str, weights: bool = True) -> None:
        """Write the prefix to a file, as `SplitRuntime.save`; the suffix is Python, and stays where the model is."""
        if side == "suffix":
            raise HalfError(
                f"the suffix of this split runs the model's own Python ({self.why}), for which a file has no form; save the "
                "prefix, and run its boundaries where the model is"
            )
        self.graph.save(path, side=side, weights=weights)

    def resplit(self, boundary: str | CallCandidate, *, on_change: str | None = None) -> MixedSplit:
        """The same model, cut at the end of another call: captured up to there, and held against the model.

        `on_change` can't be but "refuse" here.
        """
        if on_change not in (None, "refuse"):
            raise SpecError(
                f"a graph beside the model's own Python refuses a changed model; found on_change={on_change!r}"
            )
        if isinstance(boundary, CallCandidate):
            boundary = boundary.split_id
        settings = replace(self.settings, boundary=parse_boundary(boundary))
        return beside(self.python.elsewhere(settings), self._make, self._example)

    def __deepcopy__(self, memo: dict[int, Any]) -> MixedSplit:
        python = copy.deepcopy(self.python, memo)
        made: MixedSplit = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.model, made.python, made.candidates = python.model, python, python.candidates
        made._lock, made._tables, made._laid = rlock(), {}, python._laid
        prefix = object.__new__(type(self.graph.model))
        prefix.__dict__ = python.model.__dict__
        memo[id(self.graph.model)] = prefix
        made.graph = copy.deepcopy(self.graph, memo)
        made.graph.rest_reads = python.read_after
        pairs = zip(self.graph.plans, made.graph.plans, strict=True)
        made._plans = tuple([new for old, new in pairs if old in self._plans])
        return made

    # --- the parts of a call --------------------------------------------------------------------------------------

    def _before(self, batch: int, grad: bool) -> Before:
        """What forward does before the cut at a batch size, seen once."""
        key = batch, grad, self._laid.training(self.model)
        found = self._tables.get(key)
        if found is not None:
            return found
        held = frozenset(self._before(batch, False).crossing) if grad else None

        def run(*args: Any, **kwargs: Any) -> Before:
            wanted = replace(self.python.wanted, small=0, names=held)
            noting = Noting(self.model, (args, kwargs), wanted, self._laid)
            forward = Forward(
                self.model,
                args,
                kwargs,
                module=self.python.module,
                number=self.candidate.call,
                grad=grad,
                python=noting.python,
                noting=noting,
            )
            forward.end()
            if forward.halt.ended:
                raise BoundaryError(
                    "forward returns before the cut comes, for the example's numbers at this batch size"
                )
            made_at = {n: noting.made_at[n] for n in forward.halt.before.crossing if n[0] == "call"}
            if grad and made_at != self._made_at:
                raise BoundaryError(self._others_cross(batch, grad))
            self._made_at = self._made_at or made_at
            before, state = forward.halt.before, noting.state
            read = (n for n in noting.used - {*before.written} if not isinstance(state[n], nn.Parameter))
            return replace(before, used=dict.fromkeys(read, ""))  # of no origin: the prefix may run anywhere

        with self._lock:
            draws = self.python.draws
            before: Before = isolated(self.model, self._example, grad, run, draws, batch)
            if before.generators and threading.active_count() > 1:  # which may be the others' doing
                drew = isolated(self.model, self._example, grad, self._drawn, draws, batch)
                mine = {name: state for name, state in before.generators.items() if OF_PYTHON[name] in drew}
                before = replace(before, generators=mine)
        moved = [*(place[2] for place, _, _ in before.attributes), *before.generators]
        if before.refusal or moved:
            raise UnsupportedError(
                "forward can't be captured up to the cut: "
                + (before.refusal or f"it changes {moved[0]!r} before it")
                + ". Cut elsewhere, or use fallback='python'"
            )
        self._tables[key] = before
        return before

    def _drawn(self, *args: Any, **kwargs: Any) -> set[str]:
        """The random generators of Python and numpy that forward draws from before the cut, whoever else draws meanwhile."""
        drew = set[str]()
        with noted(drew):
            up_to(self.model, self.candidate.after, self.candidate.call, (), {})(*args, **kwargs)
        return drew

    def _rest(self, tensors: Sequence[torch.Tensor], batch: int, grad: bool) -> Any:
        before = self._before(batch, grad)
        if before.crossing != self.crossing:
            raise BoundaryError(self._others_cross(batch, grad))
        with torch.set_grad_enabled(grad):
            module, number, known = self.python.module, self.candidate.call, frozenset[Any]()
            return unmoved_since(self.model, before, self._laid).within(
                lambda: run_rest(
                    self.model, module, number, before, tensors, known=known, laid=self._laid, trains=grad
                )[0]
            )

    def _others_cross(self, batch: int, grad: bool) -> str:
        """What to say of a suffix that needs other tensors than cross: what is other than in the example, as far as is known."""
        paths = [path for path, _ in self.model.named_modules()]
        now = [m.training for m in self.model.modules()]
        path = next((p for p, was, is_now in zip(paths, self._trained, now, strict=False) if was != is_now), None)
        if path is not None or len(now) != len(self._trained):
            what = f"{named(path)} was switched between train and eval" if path is not None else "modules came or went"
        elif batch != self._example.batch:
            what = f"the batch is {batch}, where the example has {self._example.batch}"
        else:
            what = f"a hook or an attribute was changed, or forward runs {'with' if grad else 'without'} gradients"
        return (
            f"the suffix needs other tensors from before the cut than with the example, so what crosses would not do: {what}. Undo "
            "that, or call prepare_split with the model and inputs as they are now"
        )

    def _refuse_other_answers(self, plan: TracePlan, batch: int) -> None:
        """Raise `UnsupportedError` where the prefix read other numbers out of tensors than with the example, as far as is known.

        What Python does before the cut is seen on the example alone, and follows the answers that it got there.
        """
        if not plan.questions:
            return
        asked = next((node for _, node in plan.questions if node.target == "aten.sym_size.int"), plan.questions[0][1])
        if asked.target == "aten.sym_size.int" or plan not in self._plans or batch != self._example.batch:
            raise UnsupportedError(
                f"before the cut forward reads numbers out of a tensor ({asked.target} in {named(asked.module)}) on which its way "
                "depends, and a suffix in Python knows what it does for those of the example alone. Cut before that, prepare with "
                "inputs like these, or use fallback='python'"
            )

    # --- proof ----------------------------------------------------------------------------------------------------

    def prove(self) -> None:
        """Hold the split against the model on the example; raises `VerificationError`."""

        def split(*args: Any, **kwargs: Any) -> Any:
            return self.run_suffix(self.run_prefix(*args, **kwargs))

        with searched_once():
            hold(self.model, self._example, False, self.model, split, self.split_id, self.python.draws)
            if self.settings.spec.trainable:
                self.prove_training()

    def prove_training(self) -> None:
        """Hold a training step on the example against the whole model's; raises `VerificationError`."""
        self.python.note_draws(self._example, True)
        with searched_once(), self._lock:
            self._proved = True
            try:
                prove_step(self.model, self._example, self, self.split_id, self.python.draws)
            except BaseException:
                self._proved = False
                raise

    def __getattr__(self, name: str) -> Never:
        if name in ("plan", "trace_plan", "suffix_source", "visualize", "suffix_state_dict", "cache_key"):
            raise SpecError(
                f"this split has no {name!r}: its suffix is the model's own Python. Its prefix is in runtime.graph"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def beside(python: PythonSplit, make: Make, example: Example) -> MixedSplit:
    """A graph up to the cut of a Python split, held against the model there; raises what capturing it raises."""
    if python.stays:
        raise UnsupportedError(
            f"the suffix can't be run from what crosses alone: {python.stays}. Use fallback='python', for one process"
        )
    with searched_once():
        made = MixedSplit(python, make, example)
        made.prove()
    return made
