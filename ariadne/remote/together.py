"""One step by gradients that lie in two processes: unscaled, measured and clipped as if they lay in one.

`torch.amp.GradScaler` skips a step where any gradient is not finite, and `torch.nn.utils.clip_grad_norm_` takes one norm of all
gradients: each side tells the other what it has, and both do what torch does with the whole.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from ariadne import tree
from ariadne.errors import PayloadError, SpecError, TrainingError
from ariadne.half import Half

Norms = dict[
    int, tuple[torch.Tensor, torch.dtype, str]
]  # by place in the whole model: of a gradient, its dtype and device


def unscaled(scaler: Any, optimizer: torch.optim.Optimizer | None) -> torch.Tensor:
    """Unscale the gradients of an optimizer, unless that was done; more than zero where one of them is not finite."""
    found = torch.zeros(())
    if scaler is None or optimizer is None:
        return found
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    for t in state["found_inf_per_device"].values():
        found = found + t.cpu()
    return found


def step(scaler: Any, optimizer: torch.optim.Optimizer | None, found: torch.Tensor | None) -> None:
    """Step an optimizer, or skip the step where a gradient of either side is not finite."""
    if scaler is None:
        if optimizer is not None:
            optimizer.step()
        return
    state = scaler._per_optimizer_states[0 if optimizer is None else id(optimizer)]
    device = scaler._scale.device
    state["found_inf_per_device"] = {device: torch.zeros((), device=device) if found is None else found.to(device)}
    if optimizer is not None:
        scaler.step(optimizer)


def refuse_fused(scaler: Any, optimizer: torch.optim.Optimizer | None, fused_there: bool) -> None:
    """Raise `TrainingError` where torch would unscale within a fused step, and to do it before rounds otherwise."""
    fused = fused_there or getattr(optimizer, "_step_supports_amp_scaling", False)
    if scaler is not None and fused and math.frexp(scaler.get_scale())[0] != 0.5:
        raise TrainingError(
            f"a fused optimizer divides by the scale itself, and {scaler.get_scale()} is no power of two: gradients that are "
            "unscaled before would be rounded otherwise. Use factors and a first scale that are powers of two, or fused=False"
        )


def options_told(
    optimizer: torch.optim.Optimizer, shared: Mapping[str, torch.nn.Parameter]
) -> dict[str, dict[str, str]]:
    """What an optimizer steps each of these parameters by, as text; nothing for one that it does not have."""
    owners = _owners(optimizer)
    return {n: _options_of(optimizer, owners[id(p)]) for n, p in shared.items() if id(p) in owners}


def told_now(optimizer: torch.optim.Optimizer | None, shared: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
    """For the header of an answer: what the next step of each of these parameters goes by, where there are any."""
    return {"options": options_told(optimizer, shared)} if shared and optimizer is not None else {}


def rates_told(scheduler: Any) -> dict[str, str]:
    """The options that a scheduler was made with, as text, as far as they are numbers and the like."""
    names = inspect.signature(type(scheduler).__init__).parameters.keys() - {"self", "optimizer", "last_epoch"}
    held = {name: vars(scheduler).get(name) for name in names}
    plain = {name: sorted(v.items()) if isinstance(v, dict) else v for name, v in held.items()}
    return {
        name: repr(tree.map_leaves(_as_float, v)) for name, v in plain.items() if all(map(_is_plain, tree.leaves(v)))
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def _as_float(value: Any) -> Any:
    return float(value) if type(value) is int else value


def _owners(optimizer: torch.optim.Optimizer) -> dict[int, Mapping[str, Any]]:
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}


def _options_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, str]:
    given = {k: group.get(k) for k in (*optimizer.defaults, _BEGUN) if k not in _WITHOUT_EFFECT}
    return {
        k: repr(float(v) if isinstance(v, torch.Tensor) or type(v) is int else v)
        for k, v in given.items()
        if v is not None
    }


def refuse_other_optimizer(
    shared: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    trains: Mapping[str, Any],
    scheduler: Any,
    now: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Raise `TrainingError` where the two copies of a parameter that both sides have would be stepped in two ways.

    `trains`: what the server told of its optimizer when it was connected to; what a scheduler moves is not compared by it, but
    which scheduler that is, and its options. `now`: what it told at this very step, where all of it is.
    """
    kind, told = type(optimizer).__name__, trains.get("options") if now is None else now
    if not shared or told is None:
        return
    moving = trains["scheduler"] is not None and now is None
    owners = _owners(optimizer)
    for name, p in shared.items():
        group, there = owners.get(id(p)), told.get(name)
        if group is None:
            why = "the optimizer here does not have it"
        elif kind != trains["optimizer"]:
            why = f"{kind} steps it here, {trains['optimizer']} there"
        elif there is None:
            why = "the optimizer there does not have it"
        else:
            here = _options_of(optimizer, group)
            other = {k for k in here.keys() | there.keys() if here.get(k) != there.get(k)}
            if moving:
                other -= _SCHEDULED
            if not {_BEGUN} <= here.keys() & there.keys():
                other -= {_BEGUN}
            if not other:
                continue
            key = min(other)
            why = f"{kind} has {key}={here.get(key)} here, and {key}={there.get(key)} there"
        raise TrainingError(
            f"{name!r} is one parameter of both sides, of which each has a copy, and they would drift apart: {why}. Give both "
            "sides the same optimizer with the same options, and the same scheduler if there is one"
        )
    if scheduler is not None:
        _refuse_other_scheduler(next(iter(shared)), scheduler, trains)


def _refuse_other_scheduler(name: str, scheduler: Any, trains: Mapping[str, Any]) -> None:
    here, there = type(scheduler).__name__, trains["scheduler"] or "nothing"
    if here == there:
        mine, theirs = rates_told(scheduler), trains.get("rates", {})
        other = min((k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)), default=None)
        if other is None:
            return
        here, there = f"{here} with {other}={mine.get(other)}", f"one with {other}={theirs.get(other)}"
    raise TrainingError(
        f"both sides have a copy of {name!r}, and {here} moves the rate here, {there} there, so they would drift apart. Give both "
        "sides the same scheduler with the same options"
    )


_BEGUN = "initial_lr"  # of a group whose rate a scheduler moves
_SCHEDULED = {"lr", "momentum", "betas"}
_WITHOUT_EFFECT = {"foreach", "capturable", "differentiable"}


def refuse_unplaced(half: Half) -> None:
    """Raise `SpecError` for a half whose file does not say where its parameters stand."""
    places = half.places()
    if any(p not in places for p in half.parameters()):
        raise SpecError(
            "this half's file does not say where its parameters stand in the whole model, in whose order norms are added up. Save "
            "both halves again with this version"
        )


def norms_of(half: Half, norm_type: float) -> Norms:
    """The norm of each gradient of a half, by where its parameter stands in the whole model."""
    places = half.places()
    held = [p for p in half.parameters() if p.grad is not None]
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for p in sorted(held, key=lambda p: places[p]):
        assert p.grad is not None
        kinds.setdefault((p.grad.dtype, p.grad.device), []).append(p)
    found: Norms = {}
    with torch.no_grad():
        for (dtype, device), ps in kinds.items():
            norms = torch._foreach_norm([p.grad for p in ps if p.grad is not None], norm_type)
            found |= {places[p]: (n, dtype, str(device)) for p, n in zip(ps, norms, strict=True)}
    return found


def total_norm(norms: Norms, norm_type: float) -> torch.Tensor:
    """The norm of all gradients, added up as `torch.nn.utils.get_total_norm` does over the whole model."""
    if not norms:
        return torch.tensor(0.0)
    ordered = [norms[i] for i in sorted(norms)]
    if len({row[1:] for row in ordered}) > 1:  # torch groups them, in an order of its own
        stand_ins: Any = [torch.empty(0, dtype=dtype, device=_here(device)) for _, dtype, device in ordered]
        groups: Any = _group_tensors_by_device_and_dtype([stand_ins], with_indices=True)
        first = ordered[0][0].device
        ordered = [ordered[i] for _, places in groups.values() for i in places]
    else:
        first = ordered[0][0].device
    found: torch.Tensor = torch.linalg.vector_norm(torch.stack([n.to(first) for n, _, _ in ordered]), norm_type)
    return found


def _here(device: str) -> str:
    return device if device.partition(":")[0] != "cuda" or torch.cuda.is_available() else "cpu"


def clip(parameters: list[torch.nn.Parameter], most: float, total: torch.Tensor) -> None:
    """Scale gradients of one device down, as `torch.nn.utils.clip_grad_norm_` does."""
    torch.nn.utils.clip_grads_with_norm_(parameters, most, total)


def read_norms(told: Any, device: str) -> Norms:
    """Norms that the other side sent; `PayloadError` for what is none."""

    def fits(place: Any, row: Any) -> bool:
        return (
            type(place) is int and type(row) is tuple and [*map(type, row)] == [torch.Tensor, torch.dtype, str]
            and row[0].dim() == 0
        )  # fmt: skip

    if type(told) is not dict or not all(fits(place, row) for place, row in told.items()):
        raise PayloadError("the norms of gradients are malformed; refuse the sender")
    return {place: (n.to(device), dtype, where) for place, (n, dtype, where) in told.items()}


def refuse_overlap(mine: Mapping[int, Any], theirs: Mapping[int, Any]) -> None:
    """Raise `TrainingError` where both sides have a gradient of one parameter."""
    both = mine.keys() & theirs.keys()
    if both:
        raise TrainingError(
            f"both sides have a gradient of parameter {min(both)} of the model, which counts once. Walk back through the prefix "
            "with remote.backward_prefix before the step"
        )
