"""Proof: a plan, cut, is held against the model before it serves a call: outputs and gradients, bit for bit."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ariadne import tree
from ariadne.capture import Captured, Example, Snapshot, drawn_by, is_scripted, left_as_found
from ariadne.compare import difference
from ariadne.errors import ModuleError, UnsupportedError, VerificationError
from ariadne.forks import undone
from ariadne.plan import TracePlan, own
from ariadne.runtime.met import gradients_met
from ariadne.runtime.moved import getter
from ariadne.runtime.variant import Variant
from ariadne.runtime.waiting import leaves_of, without_hooks

Found: TypeAlias = "list[torch.Tensor | None]"
AT_FAULT = (
    "Forward may do what no op shows (such as seeding a generator): write that with torch's ops. If "
    "it does not, gives the same result twice on the same input, and follows nothing outside of itself, such as a variable of an "
    "enclosing function, this is a bug in Ariadne"
)
_AGAIN = 3  # how often a model is held against itself: what differs now and then
_RUNS, _TIMES = 4, 4.0  # of a model whose gradients nothing makes repeat themselves; see `beyond_spread`
_MORE_RUNS = 16  # of it and of the split, until no element is left that few runs show to be steady or close by chance
_SET_BY_DETERMINISTIC = {
    "torch.are_deterministic_algorithms_enabled()",
    "torch.is_deterministic_algorithms_warn_only_enabled()",
    "torch.backends.cudnn.deterministic",
    "torch.backends.cudnn.benchmark",
}
_ANOTHER_SEED, _SEEDS = 86_028_157, 16  # the first, and how many are tried
_ROUNDS = 3  # in which a scripted function must have come to what it stays at, in both


def prove(model: nn.Module, variant: Variant, captured: Captured, example: Example, *, trains: bool) -> None:
    """Raise `VerificationError` unless the variant gives what the model gave while it was captured.

    And, where it `trains`, the gradients that the model has. Both run on inputs like `example`; the model and the generators are
    left as found.
    """
    settings = variant.settings
    if settings.mode == "compiled":  # in its own rounding: what it is made from is held against the model
        plain = replace(settings, mode="generated_eager", compile_options=None)
        plan, candidates, baseline = variant.plan, variant.candidates, captured.baseline
        variant = Variant(plan, candidates, variant.candidate, model, baseline, plain)
    runs = _Runs(model, captured.plan, _draws(captured))
    generators = {id(g): g for g in Snapshot(model).own_generators()}
    strange = [g for g in captured.plan.objects.values() if isinstance(g, torch.Generator) and id(g) not in generators]
    generators |= {id(g): g for g in strange}
    seen = next((seen for seen in captured.evidence if seen.batch in captured.plan.batches), None)
    if (
        strange and seen is not None
    ):  # forward may have made it: then its results differ, for want of what it was seeded with
        _refuse_seeding(runs, variant, seen.example or example, seen.batch, strange)
    for each in captured.evidence:
        if each.batch in captured.plan.batches:
            _prove_output(runs, variant, each.example or example, each.batch, each.output)
    if generators and seen is not None:
        _refuse_seeding(runs, variant, seen.example or example, seen.batch, [*generators.values()])
    if trains:
        _prove_gradients(runs, variant, example)


def _draws(captured: Captured) -> frozenset[str]:
    """The generators that are put back after a run: to rewind what another thread draws from would give it numbers twice.

    Alone in its process, what an op of the model's own, or its backward, may draw is put back as well.
    """
    return captured.drew | (drawn_by([captured.plan]) if threading.active_count() == 1 else frozenset())


def _rounds(plan: TracePlan) -> int:
    return _ROUNDS if any(map(is_scripted, plan.nodes)) else 1


@dataclass(frozen=True)
class _Runs:
    """What runs a model, or the halves of a plan of it, and puts everything back after."""

    model: nn.Module
    plan: TracePlan
    drew: frozenset[str]

    def of(self, run: Callable[..., Any], example: Example, batch: int, grad: bool, then: Callable[[Any], Any]) -> Any:
        """What `then` makes of one run on inputs of a batch."""
        with left_as_found(self.model, [self.plan], drew=self.drew):
            args, kwargs = tree.unflatten(example.resized(batch), example.spec)
            with torch.set_grad_enabled(grad):
                return then(run(*args, **kwargs))


def _prove_output(runs: _Runs, variant: Variant, example: Example, batch: int, output: Any) -> None:
    plan, wrong = variant.plan, None
    for left in reversed(range(_rounds(plan))):
        found = runs.of(variant.joined, example, batch, plan.grad_enabled, _detached)
        wrong = difference(output, found)
        if not wrong:
            return
        if left:
            output = runs.of(runs.model, example, batch, plan.grad_enabled, _detached)
    raise VerificationError(
        f"at batch {batch} the split at {variant.candidate.split_id} differs from the model: {wrong}. {AT_FAULT}"
    )


def _refuse_seeding(
    runs: _Runs, variant: Variant, example: Example, batch: int, generators: Sequence[torch.Generator]
) -> None:
    """Raise `UnsupportedError` where forward seeds a generator of its own or puts it back, which no op shows.

    From wherever the generator stood when the plan was captured, a seed that it had from the start gives the same numbers. So both
    run once more from elsewhere.
    """
    stood = [g.get_state() for g in generators]

    def run(what: Callable[..., Any], seed: int) -> Any:
        def elsewhere(*args: Any, **kwargs: Any) -> Any:
            for g in generators:
                g.manual_seed(seed)
                torch.rand(1, generator=g, device=g.device)  # nor as one who seeds it so would have it
            return what(*args, **kwargs), [g.get_state() for g in generators]

        return runs.of(elsewhere, example, batch, variant.plan.grad_enabled, _detached)

    wrong = None
    for seed in range(_ANOTHER_SEED, _ANOTHER_SEED + _SEEDS):
        try:
            wrong = difference(run(runs.model, seed), run(variant.joined, seed))
        except (
            Exception
        ):  # its draws lead elsewhere, or forward can't do with them: from a seed of these it may go the same way
            continue
        finally:
            for g, state in zip(generators, stood, strict=True):
                g.set_state(state)
        break
    if wrong:
        raise UnsupportedError(
            f"forward seeds a torch.Generator of its own, puts it back or asks how it stands ({wrong}): no op shows that, and a "
            "plan would only draw on. Draw what is to be the same at each call once, into a buffer"
        )


def _detached(output: Any) -> Any:
    return tree.map_leaves(lambda t: own(t.detach()) if isinstance(t, torch.Tensor) else t, output)


def _prove_gradients(runs: _Runs, variant: Variant, example: Example) -> None:
    """Hold which outputs require grad, and the gradients of all parameters, through both halves, against the model's own."""
    model, batch = runs.model, _trained_at(variant.plan, example)
    parameters = [p for p in model.parameters() if p.requires_grad]

    made = edges_of(model, variant.plan)

    def gradients(run: Callable[..., Any]) -> tuple[dict[str, bool], list[torch.Tensor | None]]:
        def walked(output: Any) -> tuple[dict[str, bool], list[torch.Tensor | None]]:
            stood = run is not model and all(guard() for guard in variant.guards)
            found = _gradients(output, parameters, made)
            if stood:
                _refuse_moved(variant)
            return found

        found: tuple[dict[str, bool], list[torch.Tensor | None]] = runs.of(run, example, batch, True, walked)
        return found

    wrong = None
    for _ in range(_rounds(variant.plan)):
        (wanting, mine), (wants, theirs) = gradients(model), gradients(variant.joined)
        unlike = next((at for at in wanting if wanting[at] != wants.get(at)), None)
        if unlike is not None:
            one, other = (
                "one that requires grad" if side.get(unlike) else "one that requires none" for side in (wanting, wants)
            )
            raise VerificationError(
                f"the output{unlike} of the model is {one}, and through the split at {variant.candidate.split_id} {other}: forward "
                "makes tensors or changes what they require in a way that ops don't show. Keep to torch's own ops, or pass "
                "trainable=False if it need not train"
            )
        wrong = difference(mine, theirs)
        if not wrong:
            return
    again = next(filter(None, (difference(mine, gradients(model)[1]) for _ in range(_AGAIN))), None)
    if again:
        _prove_where_deterministic(
            variant.plan, lambda: gradients(model)[1], lambda: gradients(variant.joined)[1], again, batch
        )
        return
    raise VerificationError(
        f"the gradients through the split at {variant.candidate.split_id} differ from the model's at batch {batch}: {wrong}. "
        "Forward may change gradients in a way that ops don't show (hooks on tensors or graph nodes): move it outside, or pass "
        "trainable=False if it need not train"
    )


def _refuse_moved(variant: Variant) -> None:
    """Raise `UnsupportedError` where the backward pass has changed what the guards take for what forward reads."""
    try:
        for guard in variant.guards:
            if not guard():
                guard.explain()
    except ModuleError as error:
        raise UnsupportedError(
            f"the backward pass changes what forward reads or hands on, so that a plan would serve one step ({error}). Hand an "
            "autograd.Function a module or an object whose number it counts up, in place of a list; or pass trainable=False if it "
            "need not train"
        ) from error


def _prove_where_deterministic(
    plan: TracePlan, mine: Callable[[], Found], theirs: Callable[[], Found], again: str, batch: int
) -> None:
    """Hold gradients against a model whose own differ from run to run, as `grid_sample`'s do on CUDA: with torch's deterministic
    algorithms, and where these don't make it repeat itself (or the plan was captured without them, and asks for that), against
    how far its own runs lie apart. A warning says which."""  # fmt: skip
    asked = {name for name, _ in plan.assumption.switches}
    if not asked & _SET_BY_DETERMINISTIC:
        with deterministic():
            first = mine()
            alike = difference(first, theirs())
            repeats = not alike or not difference(first, mine())
        if repeats and alike:
            raise VerificationError(
                f"the gradients through the split differ from the model's at batch {batch} under deterministic algorithms: {alike} "
                f"(without, the model's own differ from run to run: {again}). Pass trainable=False if it need not train"
            )
        if repeats:
            warnings.warn(
                f"the model's own gradients differ from run to run at batch {batch} ({again}); under "
                "torch.use_deterministic_algorithms(True) the split's are equal to them",
                stacklevel=2,
            )
            return
    runs, splits, more = [mine() for _ in range(_RUNS)], [theirs()], _MORE_RUNS
    while (wrong := beyond_spread(runs, splits)) and more > 0:
        more -= 1
        runs, splits = _folded([*runs, mine()]), _folded([*splits, theirs()])
    if wrong:
        raise VerificationError(
            f"the model's own gradients differ from run to run at batch {batch} ({again}), and the split's differ from them by "
            f"more: {wrong}. Pass trainable=False if it need not train"
        )
    warnings.warn(
        f"the model's own gradients differ from run to run at batch {batch} ({again}), and no setting of torch's could make "
        f"them repeat themselves here; element by element the split's lie no further from them than {_TIMES:g} times what they do "
        "from each other, or the split's own runs do, and are equal where both repeat",
        stacklevel=2,
    )


def beyond_spread(runs: Sequence[Found], splits: Sequence[Found]) -> str | None:
    """Where the results of a split lie apart from a model's own by more than either's differ among themselves, in words; None
    where nowhere.

    For each element: from the least to the largest that the runs of one gave to those of the other may be no more than `_TIMES`
    the wider of these two ranges. So what repeats itself in both must be equal. And the split's range of an element may be no more
    than `_TIMES` the widest of the model's in that tensor. Few runs may show an element as steady, or as
    almost so, by chance: before it counts as wrong, more are to be had. Of 16 each that differ as chance has it, all of one lie
    beyond all of the other once in 300 million elements.
    """  # fmt: skip
    for at, (own_values, values) in enumerate(zip(zip(*runs, strict=True), zip(*splits, strict=True), strict=True)):
        every = (*own_values, *values)
        if all(v is None for v in every):
            continue
        first = own_values[0]
        if any(v is None or v.shape != first.shape or v.dtype != first.dtype for v in every):
            return f"[{at}]: {difference(first, values[0]) or 'of other sizes in another run'}"
        (low, high), (least, most) = _range(own_values), _range(values)
        spread = torch.maximum(_between(low, high), _between(least, most))
        apart = torch.where(least > high, _between(high, least), _between(most, low).clamp(min=0))
        own = _between(low, high)
        widest = own.amax() if own.numel() else own.sum()
        loose = _between(least, most) > _TIMES * widest
        unlike = (low.isnan() != least.isnan()) | (apart > _TIMES * spread) | loose
        if bool(unlike.any()):
            if bool(loose.any()):
                by, own_by = float(_between(least, most)[loose].max()), float(widest)
                return f"[{at}]: the split's own runs differ by {by:.3g}, and the model's by {own_by:.3g} at most"
            worst = int((apart / spread.clamp(min=1e-300)).nan_to_num(nan=float("inf")).mul(unlike).argmax())
            by, own_by = (float(t.flatten()[worst]) for t in (apart, spread))
            repeats = "" if bool(spread.any()) else ", which repeats itself"
            return f"[{at}]{repeats}: by {by:.3g}, and its own runs by {own_by:.3g}"
    return None


def _folded(runs: list[Found]) -> list[Found]:
    """Two in the place of all: the least and the largest of each element. As they are where not all are plain tensors alike."""
    for values in zip(*runs, strict=True):
        first = values[0]
        for v in values:
            if first is None or v is None or v.shape != first.shape or v.dtype != first.dtype or v.is_complex():
                return runs
            if v.layout is not torch.strided:
                return runs
    return [[reduce(fold, values) for values in zip(*runs, strict=True)] for fold in (torch.minimum, torch.maximum)]


def _range(values: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest of each element; NaN where any is."""
    dense = torch.stack([t.detach().to_dense() if t.layout is not torch.strided else t.detach() for t in values])
    wide = torch.view_as_real(dense.to(torch.complex128)) if dense.is_complex() else dense.to(torch.float64)
    return wide.amin(0), wide.amax(0)


def _between(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """How far each element is from another one; 0 where both are infinite, or no number."""
    return torch.where(low == high, 0.0, high - low).nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf"))


@contextmanager
def deterministic() -> Iterator[None]:
    """While in the block, torch takes deterministic algorithms where it has them, and says nothing where it has none."""
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    chosen = cudnn.deterministic, cudnn.benchmark

    def put_back() -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark = chosen

    end = undone(put_back)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            torch.use_deterministic_algorithms(True, warn_only=True)
            cudnn.deterministic, cudnn.benchmark = True, False
            yield
    finally:
        put_back()
        end()


def edges_of(model: nn.Module, plan: TracePlan) -> list[GradientEdge]:
    """Where the graphs of the model's own tensors begin that were made elsewhere, as a hypernetwork makes weights.

    These are the caller's, who will walk back through them once.
    """
    held = [getter(value, model)() for value in plan.values.values() if value.is_state and value.requires_grad]
    made = {
        id(t): t for t in (*held, *plan.constants.values()) if isinstance(t, torch.Tensor) and t.grad_fn is not None
    }
    return [get_gradient_edge(t) for t in made.values()]


def _gradients(
    output: Any, parameters: list[nn.Parameter], made: list[GradientEdge]
) -> tuple[dict[str, bool], list[torch.Tensor | None]]:
    """Which tensors of the output require grad; and what `backward` puts on parameters, of a loss in which each element of the
    output has a weight of its own. No hook of theirs sees it; a reentrant checkpoint takes nothing but `backward`.

    Where weights were `made` elsewhere, their gradients count, and the walk ends before them.
    """
    outputs = {at: t for at, t in tree.paths(output) if isinstance(t, torch.Tensor)}
    wanting = {at: t.requires_grad for at, t in outputs.items()}
    losses = [
        (t.float() * torch.arange(t.numel(), device=t.device).view(t.shape).cos()).sum()
        for t in outputs.values()
        if t.requires_grad
    ]
    if not losses:
        return wanting, []
    loss = torch.stack(losses).sum()
    leaves = list({id(p): p for p in (*parameters, *leaves_of(loss, {edge.node for edge in made}))}.values())
    with without_hooks(leaves):
        if made:
            return wanting, gradients_met(loss, leaves, made)
        before = [leaf.grad for leaf in leaves]
        try:
            for leaf in leaves:
                leaf.grad = None
            loss.backward()
            return wanting, [p.grad for p in parameters]
        finally:
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient


def _trained_at(plan: TracePlan, example: Example) -> int:
    """The batch at which gradients are compared: the example's, but above 1 where the plan serves more."""
    served = plan.batches
    if any(node.is_witness for node in plan.nodes) and example.batch in served:
        return example.batch  # at another, Python might read other numbers
    return next(b for b in (max(2, example.batch), example.batch, *reversed(served.ranges[-1])) if b in served)
