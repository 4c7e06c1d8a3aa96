"""Whether split equals whole on a device: outputs at four batches, three training steps, each bit for bit.

A model whose own results differ from run to run is held under torch's deterministic algorithms, and the record says so.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ariadne import SplitSpec, prepare_split
from ariadne.compare import difference
from ariadne.runtime.proof import deterministic
from benchmarks.device import fix
from benchmarks.sized import entry
from benchmarks.subject import EXAMPLE_BATCH, Subject, sgd, strayed

BATCHES, STEPS, CUTS = (1, 2, 3, 8), 3, ("percent:25", "percent:50", "percent:75")


def equality(job: dict[str, Any], process: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A record for each task: what was compared, what differs, and under which settings."""
    fix(job["device"])
    for task in ("inference", "training"):
        subject = Subject(entry(job["model"]), job["device"], task)
        record = {"model": job["model"], "device": job["device"], "task": task}
        try:
            yield record | _compared(subject)
        except Exception as error:
            words = str(error).strip().split("\n")[0][:500]
            yield record | {"status": "failed", "reason": f"{type(error).__name__}: {words}"}


def _compared(subject: Subject) -> dict[str, Any]:
    training = subject.task == "training"
    model = subject.model()
    whole = copy.deepcopy(model)
    args, kwargs = subject.inputs(EXAMPLE_BATCH)
    spec = SplitSpec(CUTS[0], dynamic_batch=(1, max(BATCHES)), trainable=training)
    runtime = prepare_split(model, args, split=spec, example_kwargs=kwargs)
    found: dict[str, Any] = {"status": "ok", "compared": 0, "deterministic": False, "differs": []}
    start = copy.deepcopy(model.state_dict())
    for cut in CUTS:
        try:
            split = runtime.resplit(cut)
        except Exception as error:
            found["differs"].append(f"{cut}: {type(error).__name__}: {str(error)[:200]}")
            continue
        for at in range(STEPS) if training else BATCHES:
            for settings in (False, True):
                with deterministic() if settings else nullcontext():
                    wrong = (_step if training else _replay)(subject, whole, model, split, start, at)
                if not wrong:
                    found["compared"] += 1
                    found["deterministic"] |= settings
                    break
            else:
                if training and (apart := _own_spread(subject, whole, model, split, start, at)) is not None:
                    found["compared"] += 1
                    found["spread"] = max(apart, found.get("spread", 0.0))
                    continue
                found["differs"].append(f"{cut}, {'steps' if training else 'batch'} {at}: {wrong}")
    found["status"] = "failed" if found["differs"] else "ok"
    return found


def _replay(subject: Subject, whole: Any, model: Any, split: Any, start: Any, batch: int) -> str | None:
    """What differs between the model's outputs and the split's at a batch."""
    args, kwargs = subject.inputs(batch)
    with torch.no_grad():
        torch.manual_seed(batch)
        expected = whole(*args, **kwargs)
        torch.manual_seed(batch)
        return difference(expected, split.run_suffix(split.run_prefix(*args, **kwargs)))


def _step(subject: Subject, whole: Any, model: Any, split: Any, start: Any, steps: int) -> str | None:
    """What differs after so many steps more than one: losses, parameters, buffers, gradients."""
    return difference(*_trained(subject, (whole, model), split, start, steps))


def _own_spread(subject: Subject, whole: Any, model: Any, split: Any, start: Any, steps: int) -> float | None:
    """How far apart two runs of the whole model are, over the largest value, where nothing makes it repeat itself and the split is
    no further from it than four times that; None where it does repeat itself, or the split is."""  # fmt: skip
    with deterministic():
        one, again = _trained(subject, (whole, whole), None, start, steps)
        own = strayed(one, again)
        apart = strayed(one, _trained(subject, (whole, model), split, start, steps)[1])
    return own if own > 0 and apart <= 4 * own else None


def _trained(subject: Subject, models: Any, split: Any, start: Any, steps: int) -> list[Any]:
    """Losses, parameters, buffers and gradients of the whole model, and of the other one, through the split if there is one."""
    losses: list[list[Any]] = [[], []]
    held: list[Any] = []
    for side, one in enumerate(models):
        with torch.no_grad():
            one.load_state_dict(start)
        one.zero_grad()
        optimizer = sgd(list(one.parameters()))
        for step in range(steps + 1):
            args, kwargs = subject.inputs(EXAMPLE_BATCH + step)
            torch.manual_seed(step)
            optimizer.zero_grad()
            if side == 0 or split is None:
                loss = subject.entry.loss(one(*args, **kwargs))
                loss.backward()
            else:
                boundary = split.run_training_prefix(*args, **kwargs)
                loss, gradients = split.train_suffix(
                    boundary, None, loss_fn=lambda output, _: subject.entry.loss(output)
                )
                split.backward_prefix(boundary, gradients)
            optimizer.step()
            losses[side].append(loss.detach())
        held.append(
            pytree.tree_map_only(
                torch.Tensor,
                lambda t: t.detach().cpu().clone(),
                {
                    "losses": losses[side],
                    "state": dict(one.state_dict()),
                    "gradients": {name: p.grad for name, p in one.named_parameters()},
                },
            )
        )
    return held
