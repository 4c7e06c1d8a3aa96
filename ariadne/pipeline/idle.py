"""What a schedule leaves idle: torch's own order of actions, played through with the times of parts, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

from ariadne.errors import SpecError
from ariadne.pipeline.steps import class_of, stages_of

_FORWARD, _BACK, _INPUT, _WEIGHT = (
    "FORWARD",
    "FULL_BACKWARD",
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
)  # as torch calls them


@dataclass(frozen=True)
class Played:
    """A step of a schedule: on how many ranks, how long it takes, and the share of that in which ranks wait."""

    name: str
    ranks: int
    seconds: float
    idle: float


def ranks_of(name: str, parts: int) -> int:
    """On how many ranks a schedule runs so many parts: as many, or half of them where it wants several on each."""
    return parts if issubclass(class_of(name), schedules.PipelineScheduleSingle) else max(1, parts // 2)


def played(
    name: str, parts: Sequence[float], microbatches: int, backward: float = 2.0, cores: int | None = None
) -> Played:
    """A step in which parts take so long forward for a micro-batch, what they send included, and `backward` times that back.

    Walks to inputs and to parameters take half of that each. Each action begins as soon as its rank has done those before it, and
    what it needs of other ranks is there. `cores`: how many ranks can work at a time, where they share one machine; those that
    work share the cores evenly. Raises `SpecError` where the schedule can't run so many parts or micro-batches.
    """
    ranks = ranks_of(name, len(parts))
    order, last = _order(name, len(parts), ranks, microbatches), len(parts) - 1
    cost = {_FORWARD: 1.0, _BACK: backward, _INPUT: backward / 2, _WEIGHT: backward / 2}
    done: set[tuple[str, int, int]] = set()
    at, now, busy = [0] * ranks, 0.0, 0.0
    left: dict[int, float] = {}  # of the ranks that work: seconds of work until their action is done
    while True:
        for rank in range(ranks):
            if rank not in left and at[rank] < len(order[rank]) and _needs(*order[rank][at[rank]], last) <= done:
                kind, part, _ = order[rank][at[rank]]
                left[rank] = parts[part] * cost[kind]
                busy += left[rank]
        if not left:
            break
        first = min(left.values())
        now += first * max(1.0, len(left) / (cores or len(left)))
        for rank in [*left]:
            if left[rank] <= first * (1 + 1e-9):
                kind, part, chunk = order[rank][at[rank]]
                done.add(("back" if kind in (_BACK, _INPUT) else kind, part, chunk))
                at[rank] += 1
                del left[rank]
            else:
                left[rank] -= first
    if any(a < len(mine) for a, mine in zip(at, order, strict=True)):
        raise SpecError(
            f"{name} can't run {len(parts)} parts with {microbatches} micro-batches: it waits for what does not come"
        )
    return Played(name, ranks, now, 1 - busy / (ranks * now) if now else 0.0)


def _needs(kind: str, part: int, chunk: int, last: int) -> set[tuple[str, int, int]]:
    """What must be done before an action, on whichever rank."""
    if kind == _FORWARD:
        return {(_FORWARD, part - 1, chunk)} if part else set()
    if kind == _WEIGHT:
        return set()
    return {(_FORWARD, part, chunk), *([("back", part + 1, chunk)] if part < last else [])}


def _order(name: str, parts: int, ranks: int, microbatches: int) -> list[list[tuple[str, int, int]]]:
    """What each rank does, by torch's own schedule: (kind, part, micro-batch)."""
    cls, mine = class_of(name), stages_of(name, parts, 0, ranks)
    homes = {part: rank for rank in range(ranks) for part in stages_of(name, parts, rank, ranks)}
    stages: list[Any] = [
        SimpleNamespace(stage_index=i, num_stages=parts, group_size=ranks, group_rank=0, is_first=i == 0,
                        is_last=i == parts - 1, has_backward=True, submod=None, stage_index_to_group_rank=homes)
        for i in mine
    ]  # fmt: skip
    try:
        made = cls(
            stages[0] if issubclass(cls, schedules.PipelineScheduleSingle) else stages,
            microbatches,
            loss_fn=lambda *_: None,
        )
    except ValueError as error:
        raise SpecError(f"{name}: {error}") from None
    if cls is schedules.Schedule1F1B:  # torch lists the last rank's forwards from 1 on, and runs what follows
        return [_one_and_one(part, parts, microbatches) for part in range(parts)]
    return [[*_flat(made.pipeline_order[rank])] for rank in range(ranks)]


def _one_and_one(part: int, parts: int, microbatches: int) -> list[tuple[str, int, int]]:
    """What `Schedule1F1B` runs on a rank: so many forwards ahead, then one back and one forward in turn."""
    ahead = min(microbatches, parts - part)
    found = [(_FORWARD, part, i) for i in range(ahead)]
    for i in range(microbatches):
        found.append((_BACK, part, i))
        found += [(_FORWARD, part, i + ahead)] if i + ahead < microbatches else []
    return found


def _flat(actions: Any) -> Iterator[tuple[str, int, int]]:
    for action in actions:
        if action is None:
            continue
        if getattr(action, "sub_actions", None):
            yield from _flat(action.sub_actions)
        elif action.computation_type.name in (_BACK, _FORWARD, _INPUT, _WEIGHT):
            yield action.computation_type.name, action.stage_index, action.microbatch_index
