"""A model cut in several parts: run them in one process, or each as a stage of torch's pipeline engine."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ariadne import tree
from ariadne.capture import Captured, Example, capturing, left_as_found, without_saving_hooks
from ariadne.cut import SIDES, BatchDim, ExecutionMode, SplitCandidate, SplitSpec, frontiers, parse_boundary
from ariadne.errors import AriadneError, SpecError
from ariadne.guards import Baseline
from ariadne.halves import Cut, save
from ariadne.pipeline import choice
from ariadne.pipeline.alone import alone, parts_of, until
from ariadne.pipeline.balance import Balance, Costs, balanced, even, op_times
from ariadne.pipeline.draws import Generators, behind_first, digest, drawing, foresee, microbatch
from ariadne.pipeline.flight import Flight, Onward, back
from ariadne.pipeline.micro import parted
from ariadne.pipeline.part import ModelPart, Unserved
from ariadne.plan import TraceNode, TracePlan
from ariadne.prepare import Recapture, captured_for, example_of
from ariadne.runtime import Settings, SplitRuntime, prove, refuse_resized, told_apart

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


def _unserved(example: Example, trains: bool, like: TracePlan | None) -> Captured:
    raise Unserved(example, trains)


@dataclass(frozen=True)
class _Chain:
    """All parts in one go, with one graph through them, as `prove` takes it."""

    plan: TracePlan
    candidate: SplitCandidate
    settings: Settings
    variants: tuple[Any, ...]

    @property
    def guards(self) -> list[Any]:
        """Those of all parts."""
        return [guard for variant in self.variants for guard in variant.guards]

    def joined(self, *args: Any, **kwargs: Any) -> Any:
        """What the model would give."""
        one, *others = self.variants
        entered = one.enter(args, kwargs)
        if entered is None or not one.prefix_guard():
            one.prefix_guard.explain()
            refuse_resized(self.plan, one.model)
            raise AriadneError(
                "a plan does not accept the inputs that it was captured from; please report this as a bug"
            )
        values = one.prefix(*entered)
        for variant in others:
            values = variant.suffix(entered[0], *values)
        return values


class Pipeline:
    """A model cut in several parts, made by `prepare_pipeline`.

    `parts[i]` is part i as a module; called one after the other in one process, they give what the model gives. `stage(i)`
    is part i as a `torch.distributed.pipelining.PipelineStage`, for any of torch's schedules. `cuts` are the cuts between them.

    >>> pipeline = prepare_pipeline(model, (torch.randn(4, 3, 224, 224),), parts=2)
    >>> pipeline
    Pipeline(ResNet, 2 parts of 35 + 34 ops)
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        settings: Settings,
        boundaries: Sequence[str],
        plans: Mapping[TracePlan, tuple[choice.Cuts, Baseline]],
        recapture: Recapture,
        draws: str = "whole",
    ) -> None:
        self.model, self.example, self.settings = model, example, settings
        self._boundaries, self._recapture = tuple(boundaries), recapture
        self._plans = dict(plans)
        self._main = next(iter(self._plans))
        self._runtimes: dict[int, SplitRuntime] = {}
        self._onwards: dict[int, dict[str, Onward]] = {}
        self._drawing: dict[TracePlan, tuple[TraceNode, ...]] = {}
        self.draws = draws

    @property
    def plan(self) -> TracePlan:
        """The plan that was captured first."""
        return self._main

    @property
    def cuts(self) -> tuple[SplitCandidate, ...]:
        """The cuts between the parts, in order."""
        return self._plans[self._main][0]

    @cached_property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """The parameters that more than one part uses, by name, with the numbers of these parts."""
        return choice.users(self.model, {p: cuts for p, (cuts, _) in self._plans.items()})

    @cached_property
    def parts(self) -> tuple[ModelPart, ...]:
        """The parts, in order."""
        return tuple(self._part(i) for i in range(len(self)))

    def __len__(self) -> int:
        return len(self.cuts) + 1

    def __repr__(self) -> str:
        ops = " + ".join(str(p.stop - p.start) for p in parts_of(self._main, self.cuts))
        return f"Pipeline({type(self.model).__name__}, {len(self)} parts of {ops} ops)"

    # --- in one process -----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all parts in this process, without gradients."""
        flights = self._fly(args, kwargs, False)
        return flights[-1].output

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Flight]]:
        """Run all parts in this process with gradients; the output, and what `backward` takes."""
        flights = self._fly(args, kwargs, True)
        return flights[-1].output, flights

    def backward(self, flights: Sequence[Flight], loss: torch.Tensor) -> None:
        """Walk back from a loss through all parts, the last one first, as their processes would."""
        gradients: Any = {}
        shares: Any = {}
        for part, flight in zip(reversed(self.parts), reversed(flights), strict=True):
            gradients, shares = back(
                flight, loss, gradients, shares, part.tied, part.owned, list(part.parameters()), part.foreign()
            )

    def _fly(self, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool) -> list[Flight]:
        flights = [self.enter(args, kwargs, trains)]
        for part in self.parts[1:]:
            flights.append(part.fly((flights[-1].gives,), {}, trains))
        return flights

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool) -> Flight:
        """The first part on a call's inputs; a plan is captured for it if none serves it yet."""
        return self.parts[0].fly(args, kwargs, trains)

    # --- across processes ---------------------------------------------------------------------------------------------

    def stage(self, index: int, *, device: torch.device | str | None = None, group: Any = None) -> PipelineStage:
        """Part `index` as a stage for torch's schedules, once `torch.distributed` is initialised.

        `device`: where it runs; None means where its parameters are, and else they are moved. `group`: the process group of the
        pipeline; None means all processes. Raises `SpecError` for a part that there is not.

        >>> stage = pipeline.stage(rank)
        >>> schedule = torch.distributed.pipelining.Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
        """
        self._refuse_absent(index)
        found: PipelineStage = importlib.import_module("ariadne.pipeline.stage").stage_of(
            self.parts[index], device, group, self
        )
        return found

    def schedule(
        self,
        name: str,
        *,
        microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        device: torch.device | str | None = None,
        group: Any = None,
        **options: Any,
    ) -> Any:
        """One of torch's schedules, with the stages that it wants on this rank; its `step` and `eval` are torch's.

        `name`: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV. `options` go to
        torch's class, as `scale_grads`. Beyond torch's own: inputs are parted along the batch alone, and the last micro-batches
        may be smaller; an error on one rank is raised on all; parameters that parts share get the whole gradient on each rank;
        `schedule.losses` has the losses of the last step on every rank; `schedule.stages` are this rank's, and
        `schedule.parameters()` what its optimizer steps, each once.

        >>> schedule = pipeline.schedule("1F1B", microbatches=8, loss_fn=F.cross_entropy)
        >>> optimizer = torch.optim.SGD(schedule.parameters(), lr=0.1)
        >>> schedule.step(x) if rank == 0 else schedule.step(target=y)
        """
        if not torch.distributed.is_initialized():
            raise SpecError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
        made = importlib.import_module("ariadne.pipeline.steps")
        rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        mine = made.stages_of(name, len(self), rank, world)
        stages = [self.stage(i, device=device, group=group) for i in mine]
        return made.scheduled(name, stages, microbatches, loss_fn, **options)

    def parted(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Inputs parted along the batch in so many micro-batches, the first ones larger where it does not come out even.

        What has no batch goes to each of them. Raises `BatchError` for fewer samples than micro-batches.
        """
        return parted(self.plan, args, kwargs, count)

    # --- random numbers -------------------------------------------------------------------------------------------------

    @contextmanager
    def microbatch(self, generators: Generators | None = None) -> Iterator[None]:
        """What the whole model must run a micro-batch in, to draw what the pipeline draws; only under the rule "seeded" is
        it anything.

        >>> with pipeline.microbatch():
        ...     loss = loss_fn(model(x), y)
        """
        with microbatch(self.draws, generators):
            yield

    @property
    def any_draws(self) -> bool:
        """Whether any op of any plan draws random numbers."""
        return any(drawing(plan.nodes) for plan in self._plans)

    def drawing(self, signature: str) -> tuple[TracePlan, tuple[TraceNode, ...]]:
        """The plan of this signature, and its ops behind the first part that draw."""
        plan = next(p for p in self._plans if p.signature == signature)
        if plan not in self._drawing:
            self._drawing[plan] = behind_first(plan, self._plans[plan][0])
        return plan, self._drawing[plan]

    # --- files ----------------------------------------------------------------------------------------------------------

    def save_part(self, index: int, path: str | os.PathLike[str]) -> None:
        """Write part `index` to a file as a half is written, for a rank that has it alone: `ariadne.pipeline.load_part` reads it.

        The file has the plans that were captured so far. From files a micro-batch that draws has a seed of its own (the rule
        "seeded"). Raises `SpecError` for a part that there is not, and what `SplitRuntime.save` raises.

        >>> pipeline.save_part(1, "part1.safetensors")
        """
        self._refuse_absent(index)
        cuts = []
        for plan, (places, baseline) in self._plans.items():
            end = places[index] if 0 < index < len(self) - 1 else None
            start = places[max(0, index - 1)]
            variant = self.runtime(index).variant_of(self._alone[plan, index])
            guard = variant.suffix_guard if index else variant.prefix_guard
            guarded = {"suffix" if index else "prefix": guard.modules}
            cuts.append(Cut(until(plan, end), start, baseline, told_apart(plan, start), guarded))
        told: dict[str, Any] = {
            "index": index,
            "count": len(self),
            "tied": {name: [*users] for name, users in self.tied.items()},
            "onward": {key: [o.split_id, o.live, o.copied] for key, o in self.onward(index).items()},
            "draws": self.any_draws or self.draws == "seeded",
        }
        side = SIDES[0] if index == 0 else SIDES[1]
        about = {"batches": [*self.settings.spec.batch_range], "trainable": False, "pipeline": told}
        save(path, side, self.model, cuts, about)

    def _refuse_absent(self, index: Any) -> None:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self):
            raise SpecError(f"this pipeline has parts 0 to {len(self) - 1}; there is no part {index!r}")

    # --- plans --------------------------------------------------------------------------------------------------------

    def serves(self, signature: str) -> bool:
        """Whether there is a plan of this signature."""
        return any(p.signature == signature for p in self._plans)

    def extend(self, example: Example, trains: bool) -> None:
        """Capture a plan for other inputs, and cut it as the first one is."""
        with capturing(), without_saving_hooks():
            captured = self._recapture(example, trains)
            self.take(captured, example, trains)

    def extend_to(self, batch: int, trains: bool) -> None:
        """Capture a plan for a batch that another rank has captured one for: that of the example, resized."""
        leaves = tuple(self.example.resized(batch))
        self.extend(replace(self.example, leaves=leaves, batch=batch), trains)

    def take(self, captured: Captured, example: Example, trains: bool) -> None:
        """Take in a further plan: cut as the first one is, and held against the model."""
        plan = captured.plan
        cuts = choice.alike(plan, frontiers(plan), self._main, self.cuts, self._boundaries)
        choice.refuse_moved(plan, cuts)
        self._plans[plan] = cuts, captured.baseline
        self._runtimes.clear()
        self._onwards.clear()
        self.__dict__.pop("tied", None)
        try:
            self.prove(captured, example, trains)
        except AriadneError:
            del self._plans[plan]
            self._runtimes.clear()
            self._onwards.clear()
            raise

    def prove(self, captured: Captured, example: Example, trains: bool) -> None:
        """Hold the parts, one after the other, against the model: outputs, and gradients where it `trains`."""
        plan, cuts = captured.plan, self._plans[captured.plan][0]
        variants = tuple(self.runtime(i).variant_of(self._alone[plan, i]) for i in range(len(self)))
        chain: Any = _Chain(plan, cuts[0], self.settings, variants)
        prove(self.model, chain, captured, example, trains=trains)

    def foreseeable(self) -> bool:
        """Whether what all parts but the first draw is what `foresee` draws in their place."""
        plan, nodes = self.drawing(self.plan.signature)
        if not nodes:
            return True
        generators = Generators(torch.device(self.plan.values[self.plan.inputs[0][1]].device))
        batch = next(b for b in (self.example.batch, *plan.batches) if b in plan.batches)
        with left_as_found(self.model, [plan]):
            args, kwargs = tree.unflatten(self.example.resized(batch), self.example.spec)
            boundary = self.parts[0](*args, **kwargs)
            with generators.at(None):
                for part in self.parts[1:]:
                    boundary = part(boundary)
                real = digest(generators.state())
            return foresee(plan, nodes, batch) and digest(generators.state()) == real

    def runtime(self, index: int) -> SplitRuntime:
        """What runs one part here."""
        if index not in self._runtimes:
            plans = {}
            for plan, (cuts, baseline) in self._plans.items():
                mine = self._alone[plan, index] = alone(plan, cuts, index)
                plans[mine] = ((cuts[max(0, index - 1)],), baseline)
            spec = self.settings.spec
            text = next(iter(plans.values()))[0][0].split_id
            spec = SplitSpec(text, spec.batch_symbol, spec.batch_range)
            settings = Settings(spec, parse_boundary(text), self.settings.mode, None, self.settings.compile_options)
            self._runtimes[index] = SplitRuntime(self.model, settings, plans, _unserved)
        return self._runtimes[index]

    @cached_property
    def _alone(self) -> dict[tuple[TracePlan, int], TracePlan]:
        return {}

    def _part(self, index: int) -> ModelPart:
        used: dict[int, None] = {}
        for plan, (cuts, _) in self._plans.items():
            used |= choice.placed(self.model, plan, cuts, index)
        places = [
            (table, name.rpartition(".")[0], name.rpartition(".")[2])
            for table, tensors in (
                ("_parameters", self.model.named_parameters(remove_duplicate=False)),
                ("_buffers", self.model.named_buffers(remove_duplicate=False)),
            )
            for name, t in tensors
            if id(t) in used
        ]
        return ModelPart(index, len(self), self.model, self.tied, places, self.runtime, self.onward, self.extend)

    def onward(self, index: int) -> dict[str, Onward]:
        """What goes on from a part to the next, by the signature of the plan."""
        if index == len(self) - 1:
            return {}
        if index not in self._onwards:
            self._onwards[index] = {p.signature: _onward(p, cuts[index]) for p, (cuts, _) in self._plans.items()}
        return self._onwards[index]


def _onward(plan: TracePlan, cut: SplitCandidate) -> Onward:
    copied = tuple((cut.live.index(name), name) for name in cut.written if plan.values[name].differentiable)
    return Onward(cut.split_id, cut.live, copied)


def _spread(
    model: nn.Module, plan: TracePlan, candidates: Sequence[SplitCandidate], example: Example, count: int,
    balance: Balance | None, times: Sequence[float] | None,
) -> choice.Cuts:  # fmt: skip
    """The cuts of so many parts: even, or balanced."""
    pool = choice.usable(plan, candidates)
    if balance is None:
        return even(pool, len(plan.nodes), count)
    if balance == "time" and times is None:
        found = torch.tensor(op_times(model, plan, example), dtype=torch.float64)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.broadcast(found, 0)
        times = found.tolist()
    return balanced(pool, Costs.of(balance, model, plan, candidates, example, times), count)


def prepare_pipeline(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    parts: int | None = None,
    boundaries: Sequence[str] | None = None,
    balance: Balance | None = None,
    times: Sequence[float] | None = None,
    dynamic_batch: tuple[int, int] | None = (1, 64),
    batch_dim: BatchDim | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    mode: ExecutionMode = "generated_eager",
    draws: Literal["whole", "seeded"] | None = None,
) -> Pipeline:
    """Capture `model` once and cut it in several parts, ready to run and to train on torch's pipeline schedules.

    Either `parts`, a number of 2 or more, or `boundaries`, the N - 1 cuts as boundary strings in the order of forward
    ("after:layer1"). With `parts`, `balance` says what the dearest part is to have least of: "time" (measured here, of each op; or
    `times`, seconds of each op of the plan), "parameters", "memory" (bytes of parameters and of what ops make) or "boundary_bytes";
    None makes parts of equal numbers of ops. All ranks must come to the same cuts: where `torch.distributed` is initialised, the
    times of rank 0 count, and all ranks must call this. `dynamic_batch` are the sizes that a micro-batch may have.
    `batch_dim` says which dim of an input is its batch, as in `SplitSpec`: inputs are parted along it, targets along dim 0. `draws`
    says: "whole" draws the random numbers of the whole model, "seeded" gives each micro-batch a seed of its own (see
    `Pipeline.microbatch`), None takes the first where it is possible. Inputs, `example_kwargs` and `mode` are those of
    `prepare_split`. All parts
    together are held against the model: outputs and gradients, bit for bit. The model is left as found.

    Raises what `prepare_split` raises; `FrontierError` too where boundaries don't ascend, where there are fewer usable cuts
    than asked for, and where one part would write what another uses.

    >>> pipeline = prepare_pipeline(model, (torch.randn(4, 3, 224, 224),), parts=4)
    >>> torch.equal(pipeline(x), model(x))
    True
    """
    if (parts is None) == (boundaries is None):
        raise SpecError(
            "say either parts=, a number of parts, or boundaries=, where to cut; found "
            + ("neither" if parts is None else "both")
        )
    texts = [] if boundaries is None else [boundaries] if isinstance(boundaries, str) else [*boundaries]
    if boundaries is not None and not texts:
        raise SpecError("boundaries names no cut; name one or more, such as ['after:layer1', 'after:layer2']")
    spec = SplitSpec(texts[0] if texts else "auto", dynamic_batch=dynamic_batch, batch_dim=batch_dim)
    settings = Settings(spec, parse_boundary(spec.boundary), mode, None, None)
    example = example_of(model, example_inputs, example_kwargs, spec)
    if not example.batched:
        raise SpecError(
            "a pipeline parts its inputs along the batch, and batch_dim says that none has one; use prepare_split"
        )
    recapture, captures = captured_for(model, example, spec, True)
    captures.sort(key=lambda c: not c.plan.grad_enabled)
    first = captures[0]
    found, trains = frontiers(first.plan), first.plan.grad_enabled
    cuts = (
        choice.named(first.plan, found, texts)
        if texts
        else _spread(model, first.plan, found, example, choice.counted(parts), balance, times)
    )
    choice.refuse_moved(first.plan, cuts)
    pipeline = Pipeline(model, example, settings, texts, {first.plan: (cuts, first.baseline)}, recapture)
    if draws not in (None, "whole", "seeded"):
        raise SpecError(f"draws is 'whole' or 'seeded'; found {draws!r}")
    with capturing(), without_saving_hooks():
        pipeline.prove(first, example, trains and any(p.requires_grad for p in model.parameters()))
        for captured in captures[1:]:
            pipeline.take(captured, example, False)
    pipeline.draws = draws or ("whole" if pipeline.foreseeable() else "seeded")
    return pipeline
