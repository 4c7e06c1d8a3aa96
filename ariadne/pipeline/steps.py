"""torch's schedules, with what a step of several processes needs around them.

What runs when is torch's. Around a step: inputs are parted as the plan says, errors end all ranks, parameters that parts
share get the whole gradient on each rank, and losses are handed to all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import schedules

from ariadne.errors import PipelineError, SpecError
from ariadne.halves import digest
from ariadne.pipeline.channel import Channel
from ariadne.pipeline.message import Message, Room, packed
from ariadne.pipeline.micro import merged
from ariadne.pipeline.stage import Stage

NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_V = ("ZBVZeroBubble", "DualPipeV")
_TIES, _LOSSES = 1 << 14, 1 << 15  # rows of messages


def class_of(name: str) -> type:
    """torch's schedule of a name, upper or lower case."""
    known = {n.lower(): n for n in NAMES}
    if not isinstance(name, str) or name.lower() not in known:
        raise SpecError(f"there is no schedule {name!r}; there are {', '.join(map(repr, NAMES))}")
    found: type = schedules.get_schedule_class(known[name.lower()])
    return found


def stages_of(name: str, count: int, rank: int, world: int) -> list[int]:
    """Which parts a rank runs under a schedule; `SpecError` where there can't be so many."""
    cls = class_of(name)
    if issubclass(cls, schedules.PipelineScheduleSingle):
        if count != world:
            raise SpecError(f"{name} runs one part on each rank: {count} parts need {count} ranks, there are {world}")
        return [rank]
    if name.lower() in [n.lower() for n in _V]:
        if count != 2 * world:
            raise SpecError(
                f"{name} runs two parts on each rank: {world} ranks need {2 * world} parts, there are {count}"
            )
        return [rank, count - 1 - rank]
    if count % world:
        raise SpecError(f"{name} runs as many parts on each rank: {count} parts don't go into {world} ranks")
    return list(range(rank, count, world))


class Together:
    """What is around a step of one of torch's schedules; mixed into it.

    `stages` are those of this rank; `losses` the losses of the last step's micro-batches, detached, on every rank.
    """

    stages: list[Stage]
    losses: list[torch.Tensor]

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of this rank's parts, for its optimizer: each once, also where two of its parts share it.

        >>> optimizer = torch.optim.SGD(schedule.parameters(), lr=0.1)
        """
        return list({id(p): p for stage in self.stages for p in stage.submod.parameters()}.values())

    def step(self, *args: Any, losses: list[Any] | None = None, **kwargs: Any) -> Any:
        """As the schedule's own `step`; `losses`, on any rank, is filled with the losses of the micro-batches."""
        one = self.stages[0]
        with one.told("a step"):
            own: list[Any] = []
            result = super().step(*args, losses=own, **kwargs)  # type: ignore[misc]
            if self._has_backward:  # type: ignore[attr-defined]
                finish(self.stages)
            self.losses = handed_on(self.stages, own)
            if losses is not None:
                losses[:] = self.losses
            one.channel.flush()
        return result

    def _maybe_compute_loss(self, stage: Stage, output: Any, target_mbs: Any, mb_index: int, *rest: Any) -> None:
        if not stage.is_last or (target_mbs is None and not self._has_backward):  # type: ignore[attr-defined]
            return
        if target_mbs is None and self._loss_fn is not None:  # type: ignore[attr-defined]
            raise SpecError("the rank of the last part must pass target=, which loss_fn is called with")
        with stage.losing(mb_index):
            super()._maybe_compute_loss(stage, output, target_mbs, mb_index, *rest)  # type: ignore[misc]

    def _update_losses(self, stages: Any, losses: list[Any] | None) -> None:
        if self._internal_losses:  # type: ignore[attr-defined]
            super()._update_losses(stages, losses)  # type: ignore[misc]

    def _split_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[list[Any], list[Any]]:
        pipeline, n = self.stages[0].pipeline, self._n_microbatches  # type: ignore[attr-defined]
        asked = self._args_chunk_spec is not None or self._kwargs_chunk_spec is not None  # type: ignore[attr-defined]
        if asked or not (args or kwargs):
            found: tuple[list[Any], list[Any]] = super()._split_inputs(args, kwargs)  # type: ignore[misc]
            return found
        parted = pipeline.parted(args, kwargs or {}, n)
        return [a for a, _ in parted], [k for _, k in parted]

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        if self._output_merge_spec is not None:  # type: ignore[attr-defined]
            return super()._merge_outputs(output_chunks)  # type: ignore[misc]
        last = next(stage for stage in self.stages if stage.is_last)
        return merged(output_chunks, [last.batches[i] for i in sorted(last.batches)], last.plans())


def scheduled(
    name: str, stages: Sequence[Stage], microbatches: int, loss_fn: Callable[..., torch.Tensor] | None, **options: Any
) -> Any:
    """One of torch's schedules over the stages of this rank."""
    cls = class_of(name)
    kind = type(cls.__name__, (Together, cls), {})
    single = issubclass(cls, schedules.PipelineScheduleSingle)
    found = kind(stages[0] if single else [*stages], microbatches, loss_fn=loss_fn, **options)
    found.stages, found.losses = [*stages], []
    return found


def finish(stages: Sequence[Stage]) -> None:
    """Give each rank the whole gradient of the parameters that its parts share with others.

    The part that uses a parameter first has summed it up; it goes from there to the other parts. All ranks of the pipeline
    do so after
    each step. At the first the numbers of the parameter are held against each other, too: they must be one and the same.
    """
    channel, ranks = stages[0].channel, stages[0].stage_index_to_group_rank
    here = {stage.stage_index: stage for stage in stages}
    for name, users in sorted(stages[0].submod.shared.items()):
        owner, others = users[0], users[1:]
        first = name not in stages[0].compared
        stages[0].compared.add(name)
        mine = here[owner].submod.get_parameter(name) if owner in here else None
        for other in others:
            p = here[other].submod.get_parameter(name) if other in here else None
            if mine is not None and p is not None:
                _put(p, mine, mine.grad)
            elif mine is not None:
                held = {} if mine.grad is None else {"": mine.grad}
                _send(channel, Message(_digest(mine) if first else "", held), ranks[other], _TIES)
            elif p is not None:
                message = _received(channel, ranks[owner], _TIES, p.device)
                if first and message.data != _digest(p):
                    raise PipelineError(
                        f"{name!r} is one parameter of parts {', '.join(map(str, users))}, and its numbers on rank "
                        f"{channel.rank} are "
                        f"others than on rank {ranks[owner]}; build the model from one seed, or load one state dict on all ranks"
                    )
                _put(p, None, message.tensors.get(""))


def _put(into: torch.Tensor, of: torch.Tensor | None, gradient: torch.Tensor | None) -> None:
    if into is not of:
        into.grad = gradient.clone() if gradient is not None and of is not None else gradient


def _digest(p: torch.Tensor) -> str:
    return digest([("", p)])


def handed_on(stages: Sequence[Stage], losses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The losses of the last part's rank, on every rank."""
    channel, one = stages[0].channel, stages[0]
    home = one.stage_index_to_group_rank[one.num_stages - 1]
    if home != channel.rank:
        return [t for _, t in sorted(_received(channel, home, _LOSSES, one.device).tensors.items())]
    mine = [loss.detach() for loss in losses]
    for rank in range(one.group_size):
        if rank != home:
            _send(channel, Message(None, {f"{i:06d}": t for i, t in enumerate(mine)}), rank, _LOSSES)
    return mine


def _send(channel: Channel, message: Message, rank: int, tag: int) -> None:
    header, memory = packed(message)
    channel.send(header, rank, tag)
    for t in memory:
        channel.send_memory(t, rank)


def _received(channel: Channel, rank: int, tag: int, device: torch.device) -> Message:
    room = Room(channel.receive(rank, tag), torch.device(device))
    for t in room.memory:
        channel.receive_memory(t, rank)
    return room.message()
