"""Training: steps of SGD with momentum, in lockstep with a twin; after each, all that a step may move is compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ariadne.errors import ModuleError
from conformance.checks.base import (
    PASSED,
    Check,
    Outcome,
    at,
    hold,
    hold_counts,
    hold_moved,
    hold_outcomes,
    hold_rng,
    hold_state,
    left,
    outcome,
)
from conformance.checks.tolerance import hold_near
from conformance.suite import device
from conformance.suite.bench import Bench, Split, wanting_gradient
from conformance.suite.cases import Case
from conformance.suite.compare import frozen, mapped, tensors
from conformance.suite.oracle import LIVE_SHARE
from conformance.suite.statuses import Finding, Status, Stop

MOMENTUM = 0.9
BITWISE, KEEPING_DRAWS = ("generated", "debug"), ("eager", "aot_eager")


def run(bench: Bench, case: Case) -> Finding:
    """Outputs and loss, every gradient (None told from zero), parameters, buffers, optimizer state, generators."""
    bench.judge_first_step(case.training)
    ended = None
    for split in bench.splits(case, trained=True):
        try:
            _hold(bench, case, split)
        except Stop as stop:  # where the whole model raises in a later step, the steps before it are held, at every cut
            if stop.finding.status is not Status.ERROR_EAGER:
                raise
            ended = stop
    if ended:
        raise ended
    return PASSED


class Trained:
    """One of the twins, with its optimizer; `step` trains it once, whole or split, and keeps what came of it."""

    def __init__(
        self, bench: Bench, model: nn.Module, runtime: Any = None, sides: bool = False, compiled: bool = False
    ) -> None:
        self.bench, self.model, self.runtime, self.rate = bench, model, runtime, bench.rate(model.training)
        self.compiled = compiled  # then there is but one step
        self.sends = False  # the boundary of the next step, as bytes
        self.prefix, self.suffix, self.rest = self._optimizers(sides)
        owned = sides and hasattr(runtime, "prefix_parameters")  # the identity target has no sides
        read = {id(p) for p in (*runtime.prefix_parameters(), *runtime.suffix_parameters())} if owned else set()
        self.of_neither = [p for p in model.parameters() if owned and id(p) not in read]
        self.output: Any = None
        self.inputs: Any = None

    def _optimizers(self, sides: bool) -> tuple[torch.optim.Optimizer | None, ...]:
        """One for the prefix, one for the suffix and one for the rest; with `sides` off, one for all, as the whole has."""
        prefix, suffix = (
            list(getattr(self.runtime, f"{side}_parameters", list)()) if sides else [] for side in ("prefix", "suffix")
        )
        shared = {id(p) for p in prefix} & {id(p) for p in suffix}
        owned = [[p for p in side if id(p) not in shared] for side in (prefix, suffix)]
        taken = {id(p) for side in owned for p in side}
        owned.append([p for p in self.model.parameters() if id(p) not in taken])
        return tuple(torch.optim.SGD(side, lr=self.rate, momentum=MOMENTUM) if side else None for side in owned)

    def step(self, batch: int, step: int) -> Outcome:
        """One step on the inputs of that number; every other step, or the only one, asks for the gradients of the inputs too."""
        seed, wanting = 10 + step, step % 2 == 1 or self.compiled
        self.inputs = self.bench.given(batch, seed, self.model.training) if wanting else self.bench.inputs(batch, seed)
        return outcome(self._step, step)

    def _step(self) -> torch.Tensor:
        if self.rest:
            self.rest.zero_grad(set_to_none=True)
        args, kwargs = self.inputs
        targets = object()

        def loss_of(output: Any, given: Any) -> torch.Tensor:
            if given is not targets:
                raise Stop(Status.FAIL_STRUCTURE, "loss_fn was not given the targets")
            self.output = frozen(output)
            return self.bench.entry.loss(output)

        if self.runtime is None:
            loss = loss_of(self.model(*args, **kwargs), targets)
            loss.backward()
        else:
            boundary = self.runtime.run_training_prefix(*args, **kwargs)
            sends = self.sends and not self.runtime.stays  # which the first training call finds out
            given = type(boundary).from_bytes(boundary.to_bytes(), device=device.chosen()) if sends else boundary
            loss, gradients = self.runtime.train_suffix(given, targets, loss_fn=loss_of, optimizer=self.suffix)
            self.runtime.backward_prefix(boundary, gradients, optimizer=self.prefix)
        if self.rest:
            self.rest.step()
        return loss.detach()

    def moved(self) -> dict[str, Any]:
        """What a step moved outside of the model; gradients count with the tensors that hold them."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        kept = {names[id(p)]: s for o in (self.prefix, self.suffix, self.rest) if o for p, s in o.state.items() if s}
        return {"inputs": self.inputs, "optimizer": dict(sorted(kept.items()))}


def _hold(bench: Bench, case: Case, split: Split) -> None:
    sides = case.bs % 2 == 0  # with an even batch each half has an optimizer of its own, and steps it itself
    compiled = case["backend"] not in BITWISE
    whole = Trained(bench, bench.whole(case.training), compiled=compiled)
    mine = Trained(bench, split.model, split.runtime, sides, compiled)
    bench.facts["losses"] = losses = []
    for step in range(int(case["steps"])):
        where = f"step {step}, {at(split)}"
        # Elsewhere each side adds up its own share of a parameter that both use.
        mine.sends = split.leaves and (case.bs + step) % 2 == 1 and not split.runtime.shared_parameters()
        expected, found = whole.step(case.bs, step), mine.step(case.bs, step)
        # The split makes anew what the model keeps of its first call, or says that it would.
        goes_on = not found.error or isinstance(found.error, ModuleError)
        if step and expected.error and goes_on and bench.caches(case.training):
            reason = f"{type(expected.error).__name__} in step {step}, over what it keeps of the calls before: {expected.error}"
            raise Stop(Status.ERROR_EAGER, f"the whole model raises {reason}"[:1000])
        hold_outcomes(expected, found)
        if any(p.grad is not None for p in mine.of_neither):
            raise Stop(
                Status.FAIL_STRUCTURE, f"a parameter has a gradient, and is of neither side's parameters: {where}"
            )
        if not bool(torch.isfinite(expected.value)):
            raise Stop(Status.DEGENERATE, f"the whole model's loss is {expected.value.item()} at step {step}")
        if compiled:
            if int(case["steps"]) > 1:
                raise ValueError("compiled training is held against float64 after one step: write steps=1")
            hold_near_step(bench, case, split, (whole, expected), (mine, found))
            return
        hold("output", whole.output, mine.output, where)
        hold("loss", expected.value, found.value, where)
        hold_state(whole.model, split, bench, where)
        hold_moved(whole.moved(), mine.moved(), where)
        hold_rng(expected, found, where)
        losses.append(expected.value.item())
    hold_steps(whole)
    bench.facts["input_gradients"] = any(t.grad is not None for _, t in tensors(whole.inputs))


def hold_steps(trained: Trained) -> None:
    """Stop `degenerate` where the steps moved few parameters by a bit or more: a stale one would not show."""
    before = trained.bench.parameters()
    moved = [not torch.equal(before[n], p) for n, p in trained.model.named_parameters() if p.grad is not None]
    if sum(moved) < LIVE_SHARE * len(moved):
        raise Stop(
            Status.DEGENERATE, f"only {sum(moved)} of {len(moved)} parameters with a gradient moved in all steps"
        )
    trained.bench.facts["parameters_moved"] = f"{sum(moved)} of {len(moved)}"


def hold_near_step(
    bench: Bench, case: Case, split: Split, eager: tuple[Trained, Outcome], compiled: tuple[Trained, Outcome]
) -> None:
    """Stop where a compiled step's outputs, gradients or buffers are farther from float64 than eager's error allows.

    Its loss must be that of its outputs, and its optimizers must have stepped by the gradients that it has, to the bit. A loss by
    itself says little against float64: it is one number, on which eager's own error may be small by luck.
    """
    (whole, expected), (mine, found) = eager, compiled
    ours, theirs = (left(t.model, t.inputs, t.output) for t in (whole, mine))
    hold("loss", bench.entry.loss(mine.output).detach(), found.value, at(split))
    missing = [n for n, g in ours["gradients"].items() if (g is None) != (theirs["gradients"][n] is None)]
    if missing:
        raise Stop(Status.FAIL_STATE, f"{missing[0]}.grad: None against a tensor, {at(split)}")

    def call(model: nn.Module, inputs: Any) -> Any:
        inputs = mapped(wanting_gradient, inputs) if bench.takes_gradients(case.training) else inputs
        output = model(*inputs[0], **inputs[1])
        bench.entry.loss(output).backward()
        return left(model, inputs, output)

    stepped = frozen(bench.parameters())
    for name, p in mine.model.named_parameters():
        stepped[name].grad = p.grad
    torch.optim.SGD(stepped.values(), lr=mine.rate, momentum=MOMENTUM).step()
    hold_moved(_bare(stepped), _bare(dict(mine.model.named_parameters())), f"parameters after a step, {at(split)}")
    if case["backend"] in KEEPING_DRAWS:
        hold_rng(expected, found, at(split))
    hold_counts(ours, theirs, f"after a step, {at(split)}")
    hold_near(bench, (bench.whole(case.training), call, whole.inputs, 0), ours, theirs, f"after a step, {at(split)}")


def _bare(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in parameters.items()}


CHECK = Check(
    "train", ("cut", "bs", "mode", "backend", "steps"), "split training moves all that whole training moves", run
)
