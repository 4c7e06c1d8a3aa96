"""A part as a stage of torch's pipeline engine: what its schedules ask of a stage, answered by the part.

torch's own stage fixes the sizes of what crosses at its first step, sends tensors alone, turns gradients that are not there
into zeros, and lays gradients out anew. This one sends a header before each micro-batch, of any size, dtype and number of
values, and passes gradients on as they arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from ariadne import tree
from ariadne.boundary import BoundaryPayload, autocast_in
from ariadne.errors import PipelineError, SpecError
from ariadne.pipeline import draws
from ariadne.pipeline.channel import Channel
from ariadne.pipeline.flight import Flight, asked, back
from ariadne.pipeline.later import Later, back_to_inputs, halves_well
from ariadne.pipeline.message import Message, Room, packed
from ariadne.pipeline.part import Part
from ariadne.plan import TraceNode, TracePlan

if TYPE_CHECKING:
    from ariadne.pipeline.loaded import LoadedPart
    from ariadne.pipeline.pipeline import Pipeline


@dataclass
class _Box:
    """What has come to a stage, by micro-batch: as it was on this rank, else as room that a receive fills."""

    room: dict[int, Room] = field(default_factory=dict)
    here: dict[int, Message] = field(default_factory=dict)

    def take(self, chunk: int) -> Message:
        """What came for a micro-batch."""
        return self.here.pop(chunk) if chunk in self.here else self.room.pop(chunk).message()


@dataclass
class _Drawn:
    """Where the generators stand behind a part, and a digest of where the first part foresaw them to stand behind the last."""

    state: draws.State
    foreseen: str = ""


@dataclass
class Given:
    """What a part gave for one micro-batch."""

    boundary: BoundaryPayload
    drawn: _Drawn | None = None


class Stage(PipelineStage):
    """A part of a pipeline as `torch.distributed.pipelining.PipelineStage`, for any of torch's schedules. Made by `pipeline.stage`.

    `submod` is the part. After a step by a schedule that `pipeline.schedule` did not make, call `finish` of one stage on each rank
    where parts share parameters; it completes their gradients.
    """

    submod: Part

    def __init__(self, part: Part, device: torch.device, channel: Channel, pipeline: Pipeline | LoadedPart) -> None:
        super().__init__(part, part.index, part.count, device, group=channel.group)
        self.pipeline, self.channel = pipeline, channel
        self._generators = draws.Generators(device)
        self._flights: dict[int, Flight] = {}
        self._given: dict[int, Given] = {}
        self._coming, self._returning = _Box(), _Box()  # boundaries, and gradients
        self._answers: dict[int, Message] = {}  # gradients that wait to be sent back
        self._kept: dict[int, int] = {}
        self._later: dict[int, Later] = {}
        self._moving: dict[str, tuple[TraceNode, ...]] = {}  # by plan, the ops behind the first part that draw
        self._behind: dict[int, draws.State] = {}  # where the generators stand behind the last part, for the loss
        self.batches: dict[int, int] = {}
        self._signatures: dict[int, str] = {}
        self.compared: set[str] = (
            set()
        )  # of the shared parameters those whose numbers were held against the other ranks'

    @contextmanager
    def told(self, doing: str) -> Iterator[None]:
        """An error in the block ends all ranks."""
        try:
            yield
        except BaseException as error:
            found = self.channel.fail(error, f"part {self.stage_index} ({doing})")
            if found is error:
                raise
            raise found from error

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
        if self.channel.broken:
            raise PipelineError(
                "an earlier step of this pipeline failed, and its connections are closed; make stages and schedule anew"
            )
        super().clear_runtime_states()
        with self.told("waiting for the last step"):
            self.channel.flush()
        for held in (
            self._flights,
            self._given,
            self._answers,
            self._kept,
            self._later,
            self._behind,
            self.batches,
            self._signatures,
        ):
            held.clear()
        self._coming, self._returning = _Box(), _Box()

    # --- forward --------------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of what the part before gives for a micro-batch."""
        return [] if self.is_first else self._receive(self._coming, fwd_chunk_id, self.stage_index - 1, 0)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """What a stage on this rank gave."""
        self._coming.here[mb_index] = _told(prev_stage_outputs)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run one micro-batch forward; `args` and `kwargs` are the model's, and only the first part reads them."""
        with self.told(f"forward of micro-batch {fwd_chunk_id}"):
            flight, drawn = self._first(args, kwargs or {}) if self.is_first else self._next(fwd_chunk_id)
            if self.has_backward:
                self._flights[fwd_chunk_id] = flight
            if flight.gives is not None:
                self._given[fwd_chunk_id] = Given(flight.gives, drawn)
                return self._given[fwd_chunk_id]
            if save_forward_output:
                self._kept[fwd_chunk_id] = len(self.output_chunks)
                self.output_chunks.append(flight.output)
            return flight.output

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Flight, _Drawn | None]:
        pipeline, trains = self.pipeline, self.has_backward
        with pipeline.microbatch(self._generators):
            flight = pipeline.enter(args, kwargs, trains)
            assert flight.gives is not None
            plan, drawing = pipeline.drawing(flight.gives.plan_signature)
            if not drawing and pipeline.draws != "seeded":
                return flight, None
            drawn = _Drawn(self._generators.state())
            if pipeline.draws == "whole":
                batch, signature = flight.gives.batch, plan.signature
                if signature not in self._moving:
                    self._moving[signature] = draws.moving(plan, drawing, batch, self._generators)
                draws.foresee(plan, self._moving[signature], batch)
                drawn.foreseen = draws.digest(self._generators.state())
            return flight, drawn

    def _next(self, chunk: int) -> tuple[Flight, _Drawn | None]:
        boundary, drawn = self._read(self._coming.take(chunk))
        self.batches[chunk], self._signatures[chunk] = boundary.batch, boundary.plan_signature
        if drawn is None:
            return self.submod.fly((boundary,), {}, self.has_backward), None
        with self._generators.at(drawn.state):
            flight = self.submod.fly((boundary,), {}, self.has_backward)
            state = self._generators.state()
        if self.is_last:
            draws.refuse_unforeseen(state, drawn.foreseen)
            if self.pipeline.draws == "seeded":
                self._behind[chunk] = state
        return flight, _Drawn(state, drawn.foreseen)

    @contextmanager
    def losing(self, chunk: int) -> Iterator[None]:
        """What loss_fn is called in: under the rule "seeded" it draws on from the micro-batch's seed, else it may not draw."""
        part = self.submod
        with self.told("loss_fn"), asked(self._flights.get(chunk), [*part.foreign(), *part.tied.values()]):
            if (state := self._behind.pop(chunk, None)) is not None:
                with self._generators.at(state):
                    yield
                return
            before = self._generators.state()
            yield
            draws.refuse_drawn(before, self._generators.state())

    def plans(self) -> list[TracePlan]:
        """The plans that the micro-batches of the last step ran by."""
        return [self.pipeline.drawing(signature)[0] for signature in dict.fromkeys(self._signatures.values())]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of what this part gave for a micro-batch."""
        given = self._given.pop(fwd_chunk_id, None)
        return [] if given is None else self._send(_told(given), self.stage_index + 1, 0)

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
        if self.has_backward:
            self._returning.here[mb_index] = next_stage_bwd_outputs

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The gradients for a stage on this rank."""
        return self._answers.pop(mb_index) if self.has_backward else None

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Walk back through one micro-batch; where not `full_backward`, to what came in alone, if that can be told apart."""
        if not self.has_backward:
            return
        with self.told(f"backward of micro-batch {bwd_chunk_id}"), unwritten():
            part, flight = self.submod, self._flights.pop(bwd_chunk_id)
            gradients: dict[str, torch.Tensor | None] = {}
            shares: dict[str, torch.Tensor] = {}
            if not self.is_last:
                message = self._returning.take(bwd_chunk_id)
                for kind, label in message.data:
                    t = message.tensors.get(f"{kind} {label}")
                    if kind == "share" and t is not None:
                        shares[label] = t
                    else:
                        gradients[label] = t
            if not full_backward and halves_well(part, flight, loss, shares):
                arrived, self._later[bwd_chunk_id] = back_to_inputs(flight, loss, gradients, part)
                onwards: dict[str, torch.Tensor] = {}
            else:
                parameters, foreign = list(part.parameters()), part.foreign()
                arrived, onwards = back(flight, loss, gradients, shares, part.tied, part.owned, parameters, foreign)
            self._answers[bwd_chunk_id] = _answer(arrived, onwards)
            if bwd_chunk_id in self._kept:
                at = self._kept.pop(bwd_chunk_id)
                self.output_chunks[at] = tree.map_leaves(_bare, self.output_chunks[at])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """What `backward_one_chunk` left to do: the gradients of the part's parameters."""
        if (later := self._later.pop(bwd_chunk_id, None)) is not None:
            with self.told(f"backward of micro-batch {bwd_chunk_id}"), unwritten():
                later.finish()

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The sends of the gradients of what came in for a micro-batch."""
        if not self.has_backward or self.is_first:
            return []
        return self._send(self._answers.pop(bwd_chunk_id), self.stage_index - 1, 1)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients of the part's parameters; of those that parts share, the sum, where it is."""
        if grad_scale_factor != 1:
            others = {id(p) for name, p in self.submod.tied.items() if name not in self.submod.owned}
            for p in self.submod.parameters():
                if p.grad is not None and id(p) not in others:
                    p.grad.div_(grad_scale_factor)

    # --- messages -------------------------------------------------------------------------------------------------------

    def _send(self, message: Message, to: int, way: int) -> list[dist.P2POp]:
        with self.told("sending"):
            header, memory = packed(message)
            self.channel.send(header, self.stage_index_to_group_rank[to], 2 * to + way)
            peer = dist.get_global_rank(self.channel.group, self.stage_index_to_group_rank[to])
            return [dist.P2POp(dist.isend, t, peer, self._p2p(self.stage_index, to)) for t in memory]

    def _receive(self, box: _Box, chunk: int, source: int, way: int) -> list[dist.P2POp]:
        with self.told("receiving"):
            header = self.channel.receive(self.stage_index_to_group_rank[source], 2 * self.stage_index + way)
            room = box.room[chunk] = Room(header, torch.device(self.device))
            peer = dist.get_global_rank(self.channel.group, self.stage_index_to_group_rank[source])
            return [dist.P2POp(dist.irecv, t, peer, self._p2p(source, self.stage_index)) for t in room.memory]

    def _p2p(self, source: int, destination: int) -> dist.ProcessGroup | None:
        edge = getattr(self, "_get_p2p_group", None)  # newer torch may have a communicator for each edge
        return edge(source, destination) if edge is not None else self.group

    def _read(self, message: Message) -> tuple[BoundaryPayload, _Drawn | None]:
        """The boundary that a message tells of, and where the generators stood."""
        split_id, signature, batch, labels, wanting, values, drawn, autocast = message.data
        if not self.pipeline.serves(signature):
            self.pipeline.extend_to(batch, self.has_backward)
        raw = tuple(_filled(value, message.tensors) for value in values)
        boundary = BoundaryPayload(split_id, signature, batch, tuple(labels), raw, tuple(wanting))
        boundary.autocast = autocast_in({"autocast": autocast})  # that of the rank before: all run under one
        return boundary, None if drawn is None else _Drawn(*drawn)


@contextmanager
def unwritten() -> Iterator[None]:
    """A backward pass; `PipelineError` where it needs what the forward of a later micro-batch has written since."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise PipelineError(
            "this backward pass needs a tensor that was written in place since its forward pass, such as a buffer that each "
            "forward counts up. A schedule such as GPipe runs the forwards of all micro-batches before the first backward: use "
            f"1F1B, or put a new tensor in its place, self.n = self.n + 1. torch says: {str(error)[:200]}"
        ) from error


def _answer(arrived: Mapping[str, torch.Tensor | None], onwards: Mapping[str, torch.Tensor]) -> Message:
    named = {("gradient", n): t for n, t in arrived.items()} | {("share", n): t for n, t in onwards.items()}
    return Message([*named], {f"{kind} {n}": t for (kind, n), t in named.items() if t is not None})


def _bare(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _told(given: Given) -> Message:
    """What a part gave as a message: each tensor once, though it may cross under several labels."""
    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    boundary, drawn = given.boundary, given.drawn

    def told(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = names.setdefault(id(value), str(len(names)))
            tensors[name] = value
            return "t", name
        if isinstance(value, (list, tuple)):
            return "l" if isinstance(value, list) else "u", [told(v) for v in value]
        return "v", value

    data = (
        *(boundary.split_id, boundary.plan_signature, boundary.batch, boundary.labels, boundary.requires_grad),
        [told(value) for value in boundary.raw],
        None if drawn is None else (drawn.state, drawn.foreseen),
        boundary.autocast,
    )
    return Message(data, tensors)


def _filled(told: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    kind, value = told
    if kind == "t":
        return tensors[value]
    if kind in "lu":
        found = [_filled(v, tensors) for v in value]
        return found if kind == "l" else tuple(found)
    return value


def stage_of(part: Part, device: torch.device | str | None, group: Any, pipeline: Pipeline | LoadedPart) -> Stage:
    """A stage that runs a part."""
    if not dist.is_initialized():
        raise SpecError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    held = [*part.parameters(), *part.buffers()]
    if device is None:
        device = held[0].device if held else torch.device("cpu")
    device = torch.device(device)
    if any(t.device != device for t in held):
        part.to(device)
    return Stage(part, device, Channel.of(group), pipeline)
