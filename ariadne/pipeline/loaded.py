"""A part from its file: a rank of a pipeline without the model's code and without the other parts."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ariadne.errors import HalfError, SpecError
from ariadne.half import Half, load
from ariadne.halves import count, flag, items, mapped, need, text
from ariadne.pipeline.draws import Generators, microbatch
from ariadne.pipeline.flight import Flight, Onward
from ariadne.pipeline.micro import parted
from ariadne.pipeline.part import Part
from ariadne.plan import TraceNode, TracePlan
from ariadne.runtime import SplitRuntime


class LoadedPart(Part):
    """A part that `load_part` read: it has the part's tensors and plans, and nothing else of the model."""

    def __init__(self, half: Half) -> None:
        told = mapped(half.__dict__["_data"].get("pipeline", {}), "what it says of its pipeline")
        if not told:
            raise HalfError(
                "this is a half, not a part of a pipeline: load it with ariadne.load, or write it with pipeline.save_part"
            )
        need(told.keys() == {"index", "count", "tied", "onward", "draws"}, "what it says of its pipeline is malformed")
        of = count(told["count"], "the number of parts", 2, 2**16)
        index = count(told["index"], "the part", 0, of - 1)
        need((half.part == "prefix") == (index == 0), "it is another part than it says")
        tied = {
            text(name, "a parameter"): tuple(count(i, "a part", 0, of - 1) for i in items(users, "parts"))
            for name, users in mapped(told["tied"], "the shared parameters").items()
        }
        super().__init__(index, of, half.__dict__["_root"], tied)
        onward = {text(k, "a signature"): _onward(v) for k, v in mapped(told["onward"], "what goes on").items()}
        need(bool(onward) == (index < of - 1), "what goes on is malformed")
        for name, users in tied.items():
            need(len(users) > 1 and users == tuple(sorted(set(users))), "the shared parameters are malformed")
            need(
                index not in users or name in dict(self.named_parameters(remove_duplicate=False)),
                f"{name[:80]!r} is not in it",
            )
        self.__dict__.update(_half=half, _onward=onward, _draws="seeded" if flag(told["draws"], "draws") else "whole")

    @property
    def side(self) -> Half:
        """What `ariadne.load` makes of its file."""
        found: Half = self.__dict__["_half"]
        return found

    @property
    def runtime(self) -> SplitRuntime:
        """What runs it."""
        return self.side.runtime

    @property
    def onward(self) -> Mapping[str, Onward]:
        """What goes on to the next part, by the signature of the plan; empty for the last part."""
        found: Mapping[str, Onward] = self.__dict__["_onward"]
        return found

    def train(self, mode: bool = True) -> LoadedPart:
        """As `nn.Module.train`. What was captured holds for one mode only."""
        super().train(mode)
        self.__dict__["_half"].train(mode)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LoadedPart:
        self.__dict__["_half"]._apply(fn, recurse)
        return self

    def __repr__(self) -> str:
        return f"Part({self.index} of {self.count}, from a file)"

    # --- what a stage asks of a pipeline ----------------------------------------------------------------------------------

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool) -> Flight:
        """Run the first part on a call's inputs."""
        return self.fly(args, kwargs, trains)

    def serves(self, signature: str) -> bool:
        """Whether a plan needs to be captured: never here, where none can be."""
        return True

    def extend_to(self, batch: int, trains: bool) -> None:
        """Nothing can be captured without the model."""
        raise SpecError(f"no plan of this file serves batch {batch}; run the pipeline at it before the parts are saved")

    def drawing(self, signature: str) -> tuple[TracePlan, tuple[TraceNode, ...]]:
        """The plan of this signature; from a file nothing is foreseen."""
        return next(p for p in self.runtime.plans if p.signature == signature), ()

    @property
    def draws(self) -> str:
        """By which rule micro-batches draw."""
        found: str = self.__dict__["_draws"]
        return found

    def parted(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> list[Any]:
        """Inputs parted in micro-batches."""
        return parted(self.runtime.plan, args, kwargs, count)

    @contextmanager
    def microbatch(self, generators: Generators | None = None) -> Iterator[None]:
        """What a micro-batch is run in."""
        with microbatch(self.draws, generators):
            yield


def _onward(value: Any) -> Onward:
    told = items(value, "what goes on")
    need(len(told) == 3, "what goes on is malformed")
    live = tuple(text(n, "a value") for n in items(told[1], "the values"))
    copied = tuple((count(i, "a position", 0, len(live) - 1), text(n, "a value")) for i, n in items(told[2], "copies"))
    return Onward(text(told[0], "a cut"), live, copied)


def load_part(path: str | os.PathLike[str], **options: Any) -> LoadedPart:
    """Read a part that `pipeline.save_part` wrote: it needs neither the model's code nor the other parts.

    `options` are those of `ariadne.load`: `weights`, `device`, `dtype`, `allow`. Raises `HalfError` as it does, and for a
    half that is not a part of a pipeline.

    >>> part = load_part("part1.safetensors")
    >>> schedule = ariadne.pipeline.schedule("1F1B", [part], microbatches=8, loss_fn=loss_fn)
    """
    return LoadedPart(load(path, **options))


def schedule(
    name: str,
    parts: Sequence[LoadedPart],
    *,
    microbatches: int,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    device: torch.device | str | None = None,
    group: Any = None,
    **options: Any,
) -> Any:
    """As `Pipeline.schedule`, over the parts of this rank, which were read from their files.

    >>> schedule = ariadne.pipeline.schedule("1F1B", [part], microbatches=8, loss_fn=loss_fn)
    """
    if not torch.distributed.is_initialized():
        raise SpecError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    made, stages = (importlib.import_module(f"ariadne.pipeline.{m}") for m in ("steps", "stage"))
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    wanted = made.stages_of(name, parts[0].count if parts else 0, rank, world)
    if sorted(p.index for p in parts) != sorted(wanted):
        raise SpecError(f"under {name} rank {rank} of {world} runs part(s) {wanted}; found {[p.index for p in parts]}")
    ordered = [next(p for p in parts if p.index == i) for i in wanted]
    return made.scheduled(
        name, [stages.stage_of(p, device, group, p) for p in ordered], microbatches, loss_fn, **options
    )


def finish(stages: Sequence[Any]) -> None:
    """Complete the gradients of parameters that parts share, after a step of a schedule that you made yourself.

    `stages` are this rank's; every rank of the pipeline calls it, after each step and before its optimizer steps. Schedules that
    `Pipeline.schedule` made do it by themselves.

    >>> schedule = torch.distributed.pipelining.Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
    >>> schedule.step(x)
    >>> ariadne.pipeline.finish([stage])
    """
    importlib.import_module("ariadne.pipeline.steps").finish(stages)
