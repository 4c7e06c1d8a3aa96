"""A part as a stage of torch's pipeline engine: what its schedules ask of a stage, answered by the part.

torch's own stage fixes the sizes of what crosses at its first step, sends tensors alone, turns gradients that are not there into zeros,
and lays gradients out anew. This one sends a header before each micro-batch, of any size, dtype and number of values, and passes
gradients on as they arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from ariadne import tree
from ariadne.boundary import BoundaryPayload
from ariadne.errors import BoundaryError
from ariadne.pipeline.channel import Channel
from ariadne.pipeline.flight import Flight, back
from ariadne.pipeline.message import Message, Room, packed
from ariadne.pipeline.part import Part

if TYPE_CHECKING:
    from ariadne.pipeline.pipeline import Pipeline


@dataclass
class _Box:
    """What goes to a stage or has come to it, by micro-batch: as it is on one rank, else as room that a receive fills."""

    room: dict[int, Room] = field(default_factory=dict)
    here: dict[int, Message] = field(default_factory=dict)

    def take(self, chunk: int) -> Message:
        """What came for a micro-batch."""
        return self.here.pop(chunk) if chunk in self.here else self.room.pop(chunk).message()


class Stage(PipelineStage):
    """A part of a pipeline as `torch.distributed.pipelining.PipelineStage`, for any of torch's schedules. Made by `pipeline.stage`."""

    submod: Part

    def __init__(self, part: Part, device: torch.device, group: Any, pipeline: Pipeline | None) -> None:
        super().__init__(part, part.index, part.count, device, group=group)
        self.pipeline = pipeline
        self.channel = Channel.of(group)
        self._flights: dict[int, Flight] = {}
        self._coming, self._returning = _Box(), _Box()  # boundaries, and gradients
        self._answers: dict[int, Message] = {}  # gradients that wait to be sent back
        self._kept: dict[int, int] = {}

    # --- what the engine prepares ---------------------------------------------------------------------------------------

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        self.act_send_info = {}

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _pre_metadata_inference_backup(self) -> None:
        """Nothing is run before the first micro-batch."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing was."""

    def clear_runtime_states(self) -> None:
        """Forget the last step."""
        super().clear_runtime_states()
        self._flights.clear()
        self._kept.clear()
        self._coming, self._returning = _Box(), _Box()

    # --- forward --------------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of what the part before gives for a micro-batch."""
        return [] if self.is_first else self._receive(self._coming, fwd_chunk_id, self.stage_index - 1, 0)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """What a stage on this rank gave."""
        self._coming.here[mb_index] = _told(prev_stage_outputs)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Any:
        """Run one micro-batch forward; `args` and `kwargs` are the model's, and only the first part reads them."""
        if not self.is_first:
            args, kwargs = (self._read(self._coming.take(fwd_chunk_id)),), {}
        if self.is_first and self.pipeline is not None:
            flight = self.pipeline.enter(args, kwargs or {}, self.has_backward)
        else:
            flight = self.submod.fly(args, kwargs or {}, self.has_backward)
        self._flights[fwd_chunk_id] = flight
        if flight.gives is not None:
            return flight.gives
        if save_forward_output:
            self._kept[fwd_chunk_id] = len(self.output_chunks)
            self.output_chunks.append(flight.output)
        return flight.output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of what this part gave for a micro-batch."""
        flight = self._flights[fwd_chunk_id]
        if not self.has_backward:
            del self._flights[fwd_chunk_id]
        return [] if flight.gives is None else self._send(_told(flight.gives), self.stage_index + 1, 0)

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """The engine holds what it sends; the graph is needed until backward."""

    # --- backward -------------------------------------------------------------------------------------------------------

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of the gradients that the next part has for a micro-batch."""
        if not self.has_backward or self.is_last:
            return []
        return self._receive(self._returning, bwd_chunk_id, self.stage_index + 1, 1)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """The gradients of a stage on this rank."""
        self._returning.here[mb_index] = next_stage_bwd_outputs

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The gradients for a stage on this rank."""
        return self._answers.pop(mb_index)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Walk back through one micro-batch."""
        if not self.has_backward:
            return
        part, flight = self.submod, self._flights.pop(bwd_chunk_id)
        gradients: dict[str, torch.Tensor | None] = {}
        shares: dict[str, torch.Tensor] = {}
        if not self.is_last:
            message = self._returning.take(bwd_chunk_id)
            for label, kind in message.data:
                t = message.tensors.get(f"{kind} {label}")
                if kind == "share" and t is not None:
                    shares[label] = t
                else:
                    gradients[label] = t
        arrived, onwards = back(
            flight, loss, gradients, shares, part.tied, part.owned, list(part.parameters()), part.foreign()
        )
        named = [("gradient", n, t) for n, t in arrived.items()] + [("share", n, t) for n, t in onwards.items()]
        self._answers[bwd_chunk_id] = Message(
            [(n, kind) for kind, n, _ in named], {f"{kind} {n}": t for kind, n, t in named if t is not None}
        )
        if bwd_chunk_id in self._kept:
            at = self._kept.pop(bwd_chunk_id)
            self.output_chunks[at] = tree.map_leaves(_bare, self.output_chunks[at])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """What `backward_one_chunk` left to do."""

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of the gradients of what came in for a micro-batch."""
        if not self.has_backward or self.is_first:
            return []
        return self._send(self._answers.pop(bwd_chunk_id), self.stage_index - 1, 1)

    # --- messages -------------------------------------------------------------------------------------------------------

    def _send(self, message: Message, to: int, way: int) -> list[dist.P2POp]:
        header, memory = packed(message)
        self.channel.send(header, self.stage_index_to_group_rank[to], 2 * to + way)
        peer = dist.get_global_rank(self._group, self.stage_index_to_group_rank[to])
        return [dist.P2POp(dist.isend, t, peer, self._p2p(self.stage_index, to)) for t in memory]

    def _receive(self, box: _Box, chunk: int, source: int, way: int) -> list[dist.P2POp]:
        header = self.channel.receive(self.stage_index_to_group_rank[source], 2 * self.stage_index + way)
        room = box.room[chunk] = Room(header, torch.device(self.device))
        peer = dist.get_global_rank(self._group, self.stage_index_to_group_rank[source])
        return [dist.P2POp(dist.irecv, t, peer, self._p2p(source, self.stage_index)) for t in room.memory]

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self.group or dist.group.WORLD
        assert group is not None
        return group

    def _p2p(self, source: int, destination: int) -> dist.ProcessGroup | None:
        edge = getattr(self, "_get_p2p_group", None)  # newer torch may have a communicator for each edge
        return edge(source, destination) if edge is not None else self.group

    def _read(self, message: Message) -> BoundaryPayload:
        """The boundary that a message tells of."""
        split_id, signature, batch, labels, wanting, values = message.data
        runtime, pipeline = self.submod.runtime, self.pipeline
        if pipeline is not None and not pipeline.serves(signature, self.has_backward):
            pipeline.extend_to(batch, self.has_backward)
        raw = tuple(_filled(value, message.tensors) for value in values)
        del runtime
        return BoundaryPayload(split_id, signature, batch, tuple(labels), raw, tuple(wanting))


def _bare(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _told(boundary: BoundaryPayload) -> Message:
    """A boundary as a message: each tensor once, though it may cross under several labels."""
    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}

    def told(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = names.setdefault(id(value), str(len(names)))
            tensors[name] = value
            return "t", name
        if isinstance(value, (list, tuple)):
            return "l" if isinstance(value, list) else "u", [told(v) for v in value]
        return "v", value

    values = [told(value) for value in boundary.raw]
    data = boundary.split_id, boundary.plan_signature, boundary.batch, boundary.labels, boundary.requires_grad, values
    return Message(data, tensors)


def _filled(told: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    kind, value = told
    if kind == "t":
        return tensors[value]
    if kind in "lu":
        found = [_filled(v, tensors) for v in value]
        return found if kind == "l" else tuple(found)
    return value


def stage_of(part: Part, device: torch.device | str | None, group: Any, pipeline: Pipeline | None) -> Stage:
    """A stage that runs a part."""
    held = [*part.parameters(), *part.buffers()]
    if device is None:
        device = held[0].device if held else torch.device("cpu")
    device = torch.device(device)
    if any(t.device != device for t in held):
        part.to(device)
    if not dist.is_initialized():
        raise BoundaryError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    return Stage(part, device, group, pipeline)
