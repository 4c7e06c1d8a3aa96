"""Random numbers in a pipeline: the whole model's, micro-batch after micro-batch.

The whole model draws for all parts of one micro-batch before it draws for the next. The first part runs ahead of the others, so it
draws what they will draw, too, and throws it away: the ops that draw, on ones of the right sizes. The generator's state travels
with the micro-batch, and each part goes on from there; the last one holds its own state against what the first foresaw. That is
the rule "whole". Where what is drawn can't be foreseen, because it follows from data, each micro-batch has a seed of its
own, which the first part draws: the rule "seeded", the same on any number of parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ariadne.capture import Call
from ariadne.errors import PipelineError, UnsupportedError
from ariadne.pipeline.alone import parts_of
from ariadne.plan import Expr, Ref, TraceNode, TracePlan, substitute

State = dict[str, bytes]  # of the generators, by device


class Generators:
    """The generators of the CPU and of one more device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.type == "cuda" else None

    def state(self) -> State:
        """Where they stand."""
        found = {"cpu": bytes(torch.get_rng_state().numpy())}
        if self.device is not None:
            found["cuda"] = bytes(torch.cuda.get_rng_state(self.device).numpy())
        return found

    def set(self, state: Mapping[str, bytes]) -> None:
        """Put them where they stood; a device that the other rank did not have stays."""
        torch.set_rng_state(torch.frombuffer(bytearray(state["cpu"]), dtype=torch.uint8))
        if self.device is not None and "cuda" in state:
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8), self.device)

    @contextmanager
    def at(self, state: Mapping[str, bytes] | None) -> Iterator[None]:
        """While in the block, they go on from `state`; after it, they stand where they stood."""
        before = self.state()
        if state is not None:
            self.set(state)
        try:
            yield
        finally:
            self.set(before)


def digest(state: Mapping[str, bytes]) -> str:
    """What tells one state from another."""
    return hashlib.sha256(state["cpu"]).hexdigest()[:16]


def drawing(nodes: Sequence[TraceNode]) -> tuple[TraceNode, ...]:
    """The ops that draw."""
    return tuple(node for node in nodes if node.seeded)


def behind_first(plan: TracePlan, cuts: Sequence[Any]) -> tuple[TraceNode, ...]:
    """The ops that draw in parts after the first; `UnsupportedError` where such an op has a generator of its own."""
    found = drawing(plan.nodes[cuts[0].cut :])
    held = {
        id(plan.objects[r]): i
        for i, part in enumerate(parts_of(plan, cuts))
        for node in part.nodes(plan)
        for r in node.reads
        if isinstance(plan.objects.get(r), torch.Generator)
    }
    if held:
        raise UnsupportedError(
            "forward draws from a torch.Generator of its own, of which each process of a pipeline would have another; draw "
            "from the default generator"
        )
    _refuse_opaque(plan, cuts)
    return found


def _refuse_opaque(plan: TracePlan, cuts: Sequence[Any]) -> None:
    """Raise `UnsupportedError` where an opaque part shares with others what each process has for itself."""
    kept = dict[int, int]()  # by a part's function that keeps something in Python, where it is called
    for i, part in enumerate(parts_of(plan, cuts)):
        calls = (plan.objects.get(r) for node in part.nodes(plan) for r in node.reads)
        for call in (c for c in calls if isinstance(c, Call) and c.moves):
            if (i and call.draws) or kept.setdefault(id(call.function), i) != i:
                how = (
                    "draws from Python's own generators"
                    if call.draws
                    else "keeps something in Python between two parts"
                )
                raise UnsupportedError(
                    f"{call.words} {how}, and each process of a pipeline has these for itself; draw from torch's generator, keep "
                    "state in tensors, or cut so that it lies in one part"
                )


def foresee(plan: TracePlan, nodes: Sequence[TraceNode], batch: int) -> bool:
    """Draw what some ops of a plan will draw at a batch, and throw it away; False where that follows from data."""
    env = plan.traced | {plan.batch_symbol: batch}

    def stand_in(atom: Ref | Expr) -> Any:
        if isinstance(atom, Expr):
            return atom.evaluate(env)
        value = plan.values[atom.name]
        if value.dtype is None:
            raise KeyError(atom.name)
        shape = [d if isinstance(d, int) else d.evaluate(env) for d in value.shape]
        return torch.ones(shape, dtype=value.dtype, device=value.device or "cpu")

    with torch.no_grad():
        for node in nodes:
            space, name, overload = node.target.split(".", 2)
            if (
                space == "python"
            ):  # most draw nothing; whether this one did is seen where the generators stand after all parts
                continue
            op = getattr(getattr(getattr(torch.ops, space), name), overload)
            try:
                op(*substitute(node.args, stand_in), **{k: substitute(v, stand_in) for k, v in node.kwargs})
            except (NameError, KeyError):
                return False
    return True


def moving(plan: TracePlan, nodes: Sequence[TraceNode], batch: int, generators: Generators) -> tuple[TraceNode, ...]:
    """Of ops that may draw those that do: not attention and dropout at probability 0, which would be computed for nothing.

    It is told by running each once. Where one of the others drew all the same, `refuse_unforeseen` would tell.
    """
    found = []
    with generators.at(None):
        for node in nodes:
            before = generators.state()
            if not batch or not foresee(plan, (node,), batch) or generators.state() != before:
                found.append(node)
    return tuple(found)


def refuse_unforeseen(state: Mapping[str, bytes], foreseen: str) -> None:
    """Raise `PipelineError` where the last part stands elsewhere than the first foresaw."""
    if foreseen and digest(state) != foreseen:
        raise PipelineError(
            "the parts of this micro-batch drew other random numbers than the first part foresaw, so those of the next would "
            "not be the "
            "whole model's; prepare the pipeline with draws='seeded', which gives each micro-batch a seed of its own"
        )


def refuse_drawn(before: State, after: State) -> None:
    """Raise `PipelineError` where loss_fn drew: the whole model would draw that before its next micro-batch."""
    if before != after:
        raise PipelineError(
            "loss_fn draws random numbers, which the whole model would draw before it runs the next micro-batch, on the first "
            "rank's generator. Prepare the pipeline with draws='seeded', where the loss of a micro-batch draws on from the seed "
            "of that, or draw what the loss needs before the step, and pass it in target="
        )


@contextmanager
def microbatch(rule: str, generators: Generators | None) -> Iterator[None]:
    """What a micro-batch is run in: under the rule "seeded" a seed of its own, which is drawn from the generator as it stands."""
    if rule != "seeded":
        yield
        return
    seed = int(torch.empty((), dtype=torch.int64).random_())
    generators = generators or Generators(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with generators.at(None):
        torch.manual_seed(seed)
        yield
