"""A session: what a user does to one model over time, done to whole and split alike, all state compared after each action.

Every action takes one small number. A script of actions is plain data, so it stands in a program's JSON.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ariadne import SplitRuntime
from ariadne.errors import CaptureError, FrontierError, InputError, ModuleError
from conformance.random_networks import around, changes, outside
from conformance.random_networks.compare import Different
from conformance.random_networks.counts import Counts, allowed
from conformance.random_networks.held_steps import MADE
from conformance.random_networks.program import Program
from conformance.random_networks.python_steps import SCALES
from conformance.random_networks.twins import BATCHES, Twins

WIRE = 3  # every third run goes over the wire
WRITTEN = -1  # under which a hook is written into a module's table


def doubled(module: nn.Module, args: Any, output: Any) -> Any:
    """What such a hook makes of a tensor."""
    return output * 2 if isinstance(output, torch.Tensor) and output.is_floating_point() else output


class Session:
    """One program in use. `do` raises `Different` where whole and split part ways."""

    def __init__(self, program: Program) -> None:
        self.twins = Twins(program, training=False)
        self.runtime: SplitRuntime | None = None
        self.program, self.batch, self.counts = program, program.batch, Counts()
        self.stale = ""  # why a call may be refused now: what was handed in when the split was prepared, and is another
        self.script: list[list[Any]] = []
        outside.put_back()

    def do(self, action: str, number: int = 0) -> None:
        """Do one thing to both, and compare all state."""
        self.script.append([action, number])
        ACTIONS[action](self, number)
        self.twins.equal(f"after {action} {number}")

    def replay(self) -> Counts:
        """Do all that the program's script says."""
        try:
            for action, number in self.program.script:
                self.do(action, number)
        finally:
            outside.put_back()
        return self.counts

    def _trace(self, number: int) -> None:
        self.stale = ""
        for model in self.models():  # a split's calls leave it to the model to have a first one
            for name in MADE:
                model.__dict__.pop(name, None)
                model.parts.__dict__.pop(name, None)
        try:
            self.runtime = self.twins.trace("trace")
        except FrontierError:
            self.runtime = None
            self.counts.uncut += 1
        except (CaptureError, InputError) as error:
            if not self.program.refusable:
                raise Different(f"trace: no step of this program may be refused, but: {error}") from error
            self.runtime = None
            self.counts.refuse(error, self.program)

    def _split(self, number: int) -> None:
        safe = [c for c in self.runtime.candidates if c.safe] if self.runtime else []
        if safe:
            self.runtime = self.runtime.resplit(safe[number % len(safe)])
            self.counts.cuts += 1

    def _resplit(self, number: int) -> None:
        if self.runtime:
            self.runtime = self.runtime.resplit(f"{10 + 10 * (number % 9)}%")
            self.counts.cuts += 1

    def _run(self, number: int) -> None:
        if self.runtime:
            act = partial(
                self.twins.replay, self.runtime, self.batch, f"run {number}", wire=number % WIRE == 0, seed=number
            )
            self.counts.replays += self._allowed(act)

    def _two_in_flight(self, number: int) -> None:
        if self.runtime and not self.program.in_turn:
            act = partial(self.twins.two_in_flight, self.runtime, self.batch, f"two in flight {number}", seed=number)
            self.counts.replays += self._allowed(act)

    def _step(self, number: int) -> None:
        if self.runtime:
            act = partial(self.twins.train, self.runtime, self.batch, f"step {number}", seed=number)
            stepped = self._allowed(act, number)
            self.counts.steps += stepped
            self.counts.penalised += stepped and number % 2 == 1

    def _allowed(self, act: Callable[[], bool], seed: int = 0) -> bool:
        refusable = self.stale or self.program.refusable
        return allowed(act, self.twins, self.runtime, self.batch, refusable, self.counts, seed)

    def _flip(self, number: int) -> None:
        for model in self.models():
            model.train(not model.training)

    def _new_batch(self, number: int) -> None:
        lo, hi = BATCHES
        self.batch = lo + number % (hi - lo + 1)

    def _load_weights(self, number: int) -> None:
        drawn = self.drawn(number)
        for model in self.models():
            model.load_state_dict(copy.deepcopy(drawn))

    def drawn(self, number: int) -> dict[str, torch.Tensor]:
        """Other weights for the model."""
        drawn = copy.deepcopy(self.twins.whole.state_dict())
        generator = torch.Generator().manual_seed(number)
        for t in drawn.values():
            if t.is_floating_point():
                t.add_(torch.rand(t.shape, generator=generator), alpha=0.25)
        return drawn

    def _deep_copy(self, number: int) -> None:
        twins = self.twins
        if self.runtime:
            try:
                copied = copy.deepcopy(self.runtime)
            except ModuleError as error:
                if not any(part.get("kind") == "listed" for part in self.program.parts.values()):
                    raise
                # a module in no registry, of which the plan has the original's tensors
                self.counts.refuse(error, self.program)
                return
        twins.whole = copy.deepcopy(twins.whole)
        if self.runtime:
            self.runtime = copied
            if self.runtime.model is twins.split:
                raise Different("a deep copy of the runtime holds the same model")
            twins.split = self.runtime.model
        else:
            twins.split = copy.deepcopy(twins.split)
        twins.optimizers()

    def _slot(self, number: int) -> Iterator[tuple[nn.Module, str]]:
        """The same parameter of both models, by its owner and name."""
        for model in self.models():
            slots = [(m, n) for m in model.modules() for n, p in m._parameters.items() if p is not None]
            if slots:
                yield slots[number % len(slots)]

    def _replace_parameter(self, number: int) -> None:
        for module, name in self._slot(number):
            old = module._parameters[name]
            new = torch.randn(old.shape, generator=torch.Generator().manual_seed(number))
            module._parameters[name] = nn.Parameter(new * 0.5, requires_grad=old.requires_grad)
        self.twins.optimizers()

    def _freeze(self, number: int) -> None:
        for module, name in self._slot(number):
            p = module._parameters[name]
            p.requires_grad_(not p.requires_grad)
            p.grad = None
        self.twins.optimizers()

    def _hook(self, number: int) -> None:
        """A hook that cuts the gradient of a parameter off at a bound, which one that saw shares of it would do otherwise."""
        for module, name in self._slot(number):
            p = module._parameters[name]
            if p.requires_grad:
                p.register_hook(lambda g: g.clamp(-0.25, 0.25))

    def _replace_function(self, number: int) -> None:
        outside.replace_function(number)

    def _flip_switch(self, number: int) -> None:
        outside.flip_switch(number)

    def _set_variable(self, number: int) -> None:
        outside.set_variable(number)

    def _write_hook(self, number: int) -> None:
        """A hook in the very table in which torch keeps those of a module, or out of it again."""
        for model in self.models():
            hooks = [*model.modules()][number % len([*model.modules()])]._forward_hooks
            if hooks.pop(WRITTEN, None) is None:
                hooks[WRITTEN] = doubled

    def _renew_list(self, number: int) -> None:
        """Another list on the class, into which what comes is to go."""
        for model in self.models():
            type(model).seen = []

    def _set_class_number(self, number: int) -> None:
        for model in self.models():
            type(model).scale = SCALES[number % len(SCALES)]

    def models(self) -> tuple[nn.Module, nn.Module]:
        """The whole and the split model."""
        return self.twins.whole, self.twins.split


ACTIONS: dict[str, Callable[[Session, int], None]] = {
    "trace": Session._trace,
    "split": Session._split,
    "run": Session._run,
    "two_in_flight": Session._two_in_flight,
    "step": Session._step,
    "flip": Session._flip,
    "load_weights": Session._load_weights,
    "new_batch": Session._new_batch,
    "deep_copy": Session._deep_copy,
    "resplit": Session._resplit,
    "replace_parameter": Session._replace_parameter,
    "freeze": Session._freeze,
    "hook": Session._hook,
    "replace_function": Session._replace_function,
    "flip_switch": Session._flip_switch,
    "set_variable": Session._set_variable,
    "write_hook": Session._write_hook,
    "renew_list": Session._renew_list,
    "set_class_number": Session._set_class_number,
    "under_casts": around.under_casts,
    "kept_weights": around.kept_weights,
    "draws_beside": around.draws_beside,
    "from_files": around.from_files,
    "turn_keywords": changes.turn_keywords,
    "change_tensor": changes.change_tensor,
    "change_teacher": changes.change_teacher,
    "change_value": changes.change_value,
    "change_beside": changes.change_beside,
    "change_object": changes.change_object,
    "change_kept": changes.change_kept,
    "replace_held_function": changes.replace_held_function,
    "assign_weights": changes.assign_weights,
    "shake_referred": changes.shake_referred,
}
