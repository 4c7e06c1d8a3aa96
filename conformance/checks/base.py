"""What a check is, and what the checks share: runs that may raise, comparisons that say which promise broke."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import model_zoo
from conformance.suite.bench import Bench, Split
from conformance.suite.cases import Case
from conformance.suite.compare import difference, frozen, model_difference, tensors
from conformance.suite.oracle import is_out_of_memory
from conformance.suite.state import rng_moved, rng_state, seed_all
from conformance.suite.statuses import Finding, Status, Stop

PASSED = Finding(Status.PASS)
# Classes by which a target refuses what it can't do, by name: a target need not be Ariadne. A boundary or an argument that it
# does not take, or a split that it found to be wrong itself, is no refusal.
REFUSALS = frozenset(
    {"CaptureError", "UnsupportedError", "FrontierError", "GuardError", "CompileError", "TrainingError", "HalfError"}
)


@dataclass(frozen=True)
class Check:
    """One kind of comparison: its name, the keys that its cases have, and how to run one.

    `applies` says of which models it can be asked, from the facts that their tags state. `of_plans`: it looks at what a plan gives,
    such as source or files, so it is not asked where the model's own Python is split. `run` compares, and returns a
    finding or raises a Stop; what else it raises is the target's doing.
    """

    name: str
    keys: tuple[str, ...]
    about: str
    run: Callable[[Bench, Case], Finding]
    applies: Callable[[model_zoo.Entry], bool] = lambda entry: True
    of_plans: bool = False


@dataclass
class Outcome:
    """How a run ended: its value or the error that it raised, and where the random generators stand after it."""

    value: Any
    error: Exception | None
    rng: dict[str, Any]


def outcome(run: Callable[[], Any], seed: int) -> Outcome:
    """Seed every generator, run, and say how it ended."""
    seed_all(seed)
    try:
        value, error = run(), None
    except Exception as raised:
        if is_out_of_memory(raised):
            raise
        value, error = None, raised
    return Outcome(value, error, rng_state())


def refuses(error: BaseException) -> bool:
    """Whether a target says with this error that it can't do what was asked."""
    return any(cls.__name__ in REFUSALS for cls in type(error).__mro__)


def hold_outcomes(whole: Outcome, split: Outcome, names: tuple[str, str] = ("the whole model", "the split")) -> None:
    """Return where both gave a result. Stop where the first alone raised, or both, so that there is nothing to compare.

    Another error of the split is raised as it is.
    """
    if whole.error is None:
        if split.error is not None:
            raise split.error
        return
    kind = type(whole.error).__name__
    if split.error is None:
        raise Stop(Status.FAIL_STRUCTURE, f"{names[0]} raises {kind} ({whole.error}), {names[1]} gives a result"[:600])
    if type(split.error) is not type(whole.error):
        raise split.error
    raise Stop(Status.ERROR_EAGER, f"{names[0]} raises {kind}, as {names[1]} does: {whole.error}"[:600])


def hold(what: str, whole: Any, split: Any, where: str) -> None:
    """Stop with the difference of two results, as one of structure or of numbers."""
    found = difference(whole, split)
    if found:
        raise Stop(found.status, f"{what}{found.where}: {found.what}; {where}")


def hold_state(whole: nn.Module, split: Split, bench: Bench, where: str, modes: Iterable[bool] = ()) -> None:
    """Stop `fail_state` where the two models differ in anything that they hold, to any depth, gradients included.

    A cache (see `Bench.caches`) may also be as it was before the call; in which `modes` calls were made, where not in this alone.
    """
    found, caches = model_difference(whole, split.model), bench.caches(whole.training)
    if found:
        for mode in modes:
            caches = bench.caches(mode) | caches
        found = model_difference(whole, split.model, caches)
    if found:
        raise Stop(Status.FAIL_STATE, f"the model after it, {where}: {found}")
    if caches:
        bench.facts["caches"] = len(caches)


def left(model: nn.Module, inputs: Any, output: Any) -> dict[str, Any]:
    """What a call leaves that has numbers: output, buffers, generators, inputs, and the gradients of parameters and inputs."""
    own = [
        (f"{at}.{name}", g)
        for at, m in model.named_modules()
        for name, g in vars(m).items()
        if isinstance(g, torch.Generator)
    ]
    return frozen(
        {
            "output": output,
            "gradients": {name: p.grad for name, p in model.named_parameters()},
            "buffers": dict(model.named_buffers()),
            "generators": {name: g.get_state() for name, g in own},
            "inputs": inputs,
            "input gradients": {where: t.grad for where, t in tensors(inputs) if t.is_leaf},
        }
    )


def hold_counts(whole: dict[str, Any], split: dict[str, Any], where: str) -> None:
    """Stop `fail_state` where, of what two calls `left`, integers differ that no rounding moves: counters, generators, inputs."""

    def counts(found: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        held = tensors({name: found[name] for name in ("buffers", "generators", "inputs")})
        return [(at, t) for at, t in held if not (t.is_floating_point() or t.is_complex())]

    hold_moved(counts(whole), counts(split), where)


def hold_moved(whole: Any, split: Any, where: str) -> None:
    """Stop `fail_state` where what a run may move differs: inputs, optimizer state, with gradients."""
    found = difference(whole, split, gradients=True)
    if found:
        raise Stop(Status.FAIL_STATE, f"{where}: {found}")


def hold_rng(whole: Outcome, split: Outcome, where: str) -> None:
    """Stop `fail_rng` where a random generator stands elsewhere."""
    moved = rng_moved(whole.rng, split.rng)
    if moved:
        raise Stop(Status.FAIL_RNG, f"{where}: {moved}")


def under(mode: Callable[[], Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function's result under a context manager, such as torch.no_grad."""
    with mode():
        return function(*args, **kwargs)


def no_grad(model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """What the whole model gives without gradients."""
    with torch.no_grad():
        return model(*inputs[0], **inputs[1])


def at(split: Split) -> str:
    """Where a split is cut, for the words of a finding."""
    return f"cut after op {split.facts['op']} ({split.facts['label']})"
