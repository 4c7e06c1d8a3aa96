"""Training across a cut: two functions over the same segments that inference uses.

The whole model's backward pass runs the suffix's ops first and then the prefix's. So does this: the suffix is trained from
copies that carry no graph, the gradients that arrive there are taken as they are, and start the walk back through the
prefix's graph, which is still alive. Nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from operator import attrgetter, is_not
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from ariadne import tree
from ariadne.boundary import BoundaryPayload
from ariadne.errors import BoundaryError, TrainingError
from ariadne.forks import rlock
from ariadne.plan import short_dtype
from ariadne.runtime.asked import NOT_HELD, KeptWhole, refuse_hooked, watch_hooks
from ariadne.runtime.casts import casts_of_both, refuse_other_casts
from ariadne.runtime.casts import kept as kept_casts
from ariadne.runtime.hooked import refuse_hooks_of_both
from ariadne.runtime.optimizers import clear, clear_but, refuse_other, step
from ariadne.runtime.owners import BY_A_LOSS, Owned, refuse_earlier, refuse_of_loss, refuse_shared, refuse_upstream
from ariadne.runtime.taps import ANCHOR, Gradients, Tap, tapped
from ariadne.runtime.turns import TURNS
from ariadne.runtime.waiting import Ends, arrivals, caught, leaves_behind, leaves_of, led_to, rejoins

Held = tuple[
    Sequence[torch.Tensor], list[torch.Tensor | None], list[int]
]  # parameters, their gradients, their versions
_run_engine = torch.autograd.Variable._execution_engine.run_backward
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_grad_of, _is_leaf = attrgetter("grad"), attrgetter("is_leaf")
_is_grad_enabled, _set_grad_enabled = torch._C.is_grad_enabled, torch._C._set_grad_enabled


TAPS: type = Tap._backward_cls  # the class of the nodes at which a suffix's graph ends
watch_hooks(TAPS)
_PAST_THE_CUT = (
    "the loss takes something that the part before the cut computed, or an input was computed from, otherwise than through the "
    "boundary: a loss kept on the model, for one. Its graph"
)


def train_suffix(
    suffix: Callable[..., Any],
    boundary: BoundaryPayload,
    targets: Any,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    scaler: Any,
    owned: Owned,
    cast: Sequence[str],
) -> tuple[torch.Tensor, Gradients]:
    """Run the suffix, its loss and its backward pass; step `optimizer` if there is one.

    Returns the loss, detached, and the gradient of each boundary tensor by label, None where none arrived. Gradients of
    what the prefix uses too, or what the loss alone takes from it, wait in the boundary until `backward_prefix` adds its own;
    where the boundary came over a wire, those of shared parameters stay, as one share of two.
    """
    here = boundary._graph is not None
    shared = [p for p in owned.shared if p.requires_grad]
    if optimizer is not None:
        early = [p for p in owned.prefix if p.requires_grad] if here and boundary.requires_grad else shared
        refuse_shared(early, optimizer, "suffix", here)
        if here:
            refuse_upstream(optimizer, boundary._graph or (), owned)
    if here:
        owned.refuse_common_source()
    refuse_hooks_of_both(owned.prefix, owned.suffix)
    casting = kept_casts()
    if cast and shared and casting is not None and casting is not boundary._casts:
        refuse_other_casts(cast[0], here)
    boundary.consume("train_suffix")
    if optimizer is not None:
        clear(optimizer)
    elif here:
        boundary._earlier = with_gradients(owned.suffix)
    enabled = _is_grad_enabled()
    _set_grad_enabled(True)
    try:
        walking: list[bool] = []
        values, kept = tapped(boundary, walking)
        output = suffix(boundary.batch, *values)
        stops, before, walked = Ends(output), held_gradients(owned.prefix), walks()
        with KeptWhole(boundary, TAPS, owned.prefix) if boundary.requires_grad else _NOTHING:
            loss = loss_of(loss_fn, output, targets)
            if boundary.requires_grad:
                refuse_hooked(boundary, values, TAPS)
        leaves = [
            leaf for leaf in leaves_of(loss, stops) if leaf.requires_grad and leaf is not ANCHOR
        ]  # loss_fn may freeze
        waiting, noted = _reached(leaves, boundary, optimizer, owned)
        graph = boundary._graph or ()
        casts = casts_of_both(loss, graph) if casting is not None and here else ()
        if waiting and boundary.requires_grad and rejoins(loss, stops, graph, [c.node for c in casts]):
            raise TrainingError(f"{_PAST_THE_CUT} would be walked twice. Have forward return it")
        if waiting and boundary.requires_grad:
            _refuse_added_otherwise(loss, waiting, boundary, values)
        if owned.guessed:
            _refuse_strays(stops, values, boundary, owned)
        del output, values, stops, leaves, graph
        waiting += [p for p in shared if here and p.requires_grad and not any(p is w for w in waiting)]
        walking.append(True)
        watched_walk(loss, boundary, scaler, waiting, noted, before, walked, casts)
        del before
    finally:
        _set_grad_enabled(enabled)
    if optimizer is not None:
        step(optimizer, scaler)
    return loss.detach(), kept


def _refuse_added_otherwise(
    loss: torch.Tensor, waiting: Sequence[torch.Tensor], boundary: BoundaryPayload, values: Sequence[Any]
) -> None:
    """Raise `TrainingError` where an input that crosses as it came is in the loss, too, and used several times after the cut.

    The whole model adds each of these gradients to that of the loss; here they arrive at the boundary as one sum.
    """
    ids = {id(leaf) for leaf in waiting}
    for t, value in zip(tree.leaves(tuple(boundary._graph or ())), tree.leaves(tuple(values)), strict=True):
        if (
            isinstance(t, torch.Tensor)
            and id(t) in ids
            and value.grad_fn is not None
            and arrivals(loss, value.grad_fn) > 1
        ):
            raise TrainingError(
                f"the loss takes an input (shape {tuple(t.shape)}) that crosses the cut and is used several times after it: its "
                "gradient may differ from the whole model's in the last bits. Cut where it does not cross, have forward return "
                "that part of the loss, or give the loss a detached input"
            )


def _refuse_strays(stops: Ends, values: Any, boundary: BoundaryPayload, owned: Owned) -> None:
    """Raise `TrainingError` where an opaque part used a parameter that was the other side's alone when the model was prepared."""
    taps = [v.grad_fn for v in tree.leaves(tuple(values)) if isinstance(v, torch.Tensor) and v.grad_fn is not None]
    graph = [t for t in tree.leaves(tuple(boundary._graph or ())) if isinstance(t, torch.Tensor)]
    before = [t.grad_fn for t in graph if t.grad_fn is not None]
    found = [
        leaf
        for nodes, until, others in (
            (stops, taps, owned.of_prefix - owned.of_suffix),
            (before, (), owned.of_suffix - owned.of_prefix),
        )
        for leaf in leaves_behind(nodes, until)
        if id(leaf) in others
    ]
    if found:
        raise TrainingError(
            f"an opaque part used a parameter (shape {tuple(found[0].shape)}) of the other side of the cut, which it did not use "
            "when the model was prepared: its gradient would come in two shares. Prepare with inputs for which it uses it"
        )


def watched_walk(
    loss: torch.Tensor,
    boundary: BoundaryPayload,
    scaler: Any,
    waiting: Sequence[torch.Tensor],
    noted: Sequence[torch.Tensor],
    before: Held,
    walked: int | None,
    casts: Sequence[GradientEdge] = (),
) -> None:
    """`walk_back`, which notes whether loss_fn put gradients on the prefix by itself since `before`, after `walked` walks."""
    by_itself = bool(waiting) and disturbed(before)
    walk_back(loss, boundary, scaler, waiting, noted, casts)
    # A reentrant checkpoint in loss_fn walks back within this walk, to leaves that the loss's graph does not show.
    by_itself = by_itself or disturbed(before, {id(p) for p in waiting})
    boundary._disturbed = by_itself and walked is not None and walked == walks()


def walk_back(
    loss: torch.Tensor,
    boundary: BoundaryPayload,
    scaler: Any,
    waiting: Sequence[torch.Tensor],
    noted: Sequence[torch.Tensor],
    casts: Sequence[GradientEdge] = (),
) -> None:
    """The backward pass of a loss down to the boundary, which keeps the gradients of what waits and of leaves noted."""
    if scaler is None and not (waiting or noted) and type(loss) is torch.Tensor and loss.dtype.is_floating_point:
        return walk([loss], [torch.ones_like(loss)])
    with no_autocast():
        root = loss if scaler is None else scaler.scale(loss)
        if waiting or noted:
            with caught(root, waiting, noted, casts) as (boundary._shared, boundary._noted):
                root.backward()
            return
        TURNS.enter()
        try:
            root.backward()
        finally:
            TURNS.leave()


def walk(roots: Sequence[torch.Tensor | GradientEdge], gradients: Sequence[torch.Tensor]) -> None:
    """`torch.autograd.backward` outside of autocast, for gradients that are known to be of the shape and type of their roots.

    To ask that again, as torch does, takes 11 µs: a tenth of a small model's backward pass.
    """
    TURNS.enter()
    try:
        if _is_any_autocast_enabled() or torch._C._are_functorch_transforms_active():
            with no_autocast():
                torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
        else:
            _run_engine(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)
    finally:
        TURNS.leave()


def loss_of(loss_fn: Callable[[Any, Any], torch.Tensor], output: Any, targets: Any) -> torch.Tensor:
    """What a loss function gives; raises `TrainingError` where that is no loss to walk back from."""
    try:
        loss = loss_fn(output, targets)
    except RuntimeError as error:
        if "appears to not have been used in the graph" not in str(error):
            raise
        raise TrainingError(NOT_HELD) from error
    if not (isinstance(loss, torch.Tensor) and loss.numel() == 1):
        raise TrainingError(
            f"loss_fn must return a tensor with one element; found {_describe(loss)}. Reduce it, by sum() or mean()"
        )
    if not loss.requires_grad:
        raise TrainingError(
            "the loss does not depend on anything that requires grad: no parameter of the suffix does, nor any boundary "
            "tensor. Unfreeze a parameter, or cut elsewhere"
        )
    return loss


_walks = [0, 0]  # how many walks back through a prefix have begun, and how many have ended, in any thread
_COUNTING = rlock()


def walks() -> int | None:
    """How many walks back through a prefix there have been in all threads, which move gradients that are no loss_fn's doing;
    None while there is one."""
    begun, ended = _walks
    return begun if begun == ended else None


def held_gradients(parameters: Sequence[torch.Tensor]) -> Held:
    """The gradients of some parameters, and how often they were written into."""
    if not all(map(_is_leaf, parameters)):  # what is computed holds none
        parameters = [p for p in parameters if p.is_leaf]
    gradients: list[torch.Tensor | None] = list(map(_grad_of, parameters))
    return parameters, gradients, [-1 if g is None else g._version for g in gradients]


def disturbed(before: Held, waiting: Collection[int] = ()) -> bool:
    """Whether something was added to gradients since, other than those of leaves that are `waiting`, by id."""
    parameters, old, versions = before
    now: list[torch.Tensor | None] = list(map(_grad_of, parameters))
    if not any(map(is_not, now, old)) and versions == [-1 if g is None else g._version for g in now]:
        return False
    return any(
        g is not None and (o is None or g is not o or g._version != v) and id(p) not in waiting
        for p, g, o, v in zip(parameters, now, old, versions, strict=True)
    )


def _reached(
    leaves: Sequence[torch.Tensor],
    boundary: BoundaryPayload,
    optimizer: torch.optim.Optimizer | None,
    owned: Owned,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of the leaves that a loss reaches by itself, those whose gradients must wait for the prefix's, and those of neither side.

    Raises `TrainingError` where such a gradient can't wait.
    """
    if not leaves:
        return [], []
    prefix, suffix = owned.of_prefix, owned.of_suffix
    others = [leaf for leaf in leaves if id(leaf) not in prefix | suffix]
    if boundary._graph is None:
        alone = [leaf for leaf in leaves if id(leaf) in prefix - suffix]
        if alone:
            raise TrainingError(
                f"the loss reaches {len(alone)} parameter(s) that only the prefix uses (shape {tuple(alone[0].shape)}), as a "
                "penalty over all parameters does, and this boundary came over a wire: the prefix is trained in another process, "
                "where its gradients are. Leave runtime.prefix_parameters() out of the loss here; there, call backward() on "
                "their penalty after backward_prefix with optimizer=None, then step"
            )
        BY_A_LOSS.update({id(leaf): leaf for leaf in others})
        return [], others
    behind = led_to(boundary._graph, others)
    waiting = [leaf for leaf in leaves if id(leaf) in prefix or id(leaf) in behind]
    refuse_shared(waiting, optimizer, "suffix", True)
    return waiting, [leaf for leaf in others if id(leaf) not in behind]


def roots_of(
    boundary: BoundaryPayload, gradients: Mapping[str, torch.Tensor | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Where a walk back through a boundary's graph begins, and the gradient for each; `BoundaryError` for one that is not
    its own."""
    assert boundary._graph is not None
    held: dict[str, torch.Tensor] = {}
    for label, value in zip(boundary.labels, boundary._graph, strict=True):
        if isinstance(value, torch.Tensor):
            held[label] = value
        else:
            held.update((label + at, t) for at, t in tree.paths(value) if isinstance(t, torch.Tensor))
    roots, given, known = [], [], 0
    for label, t in held.items():
        known += label in gradients
        gradient = gradients.get(label)
        if gradient is None or not t.requires_grad:
            continue
        _refuse_another_kind(label, gradient, t)
        if _leads_on(t):
            roots.append(_behind_its_hooks(t) if t._backward_hooks else t)
            given.append(gradient)
    if known < len(gradients):
        raise BoundaryError(
            f"there is a gradient for {min(gradients.keys() - held.keys())!r}, but the boundary holds {', '.join(sorted(held))}; "
            "pass what train_suffix returned for this boundary"
        )
    return roots, given


def backward_prefix(
    boundary: BoundaryPayload,
    gradients: Mapping[str, torch.Tensor | None],
    *,
    optimizer: torch.optim.Optimizer | None,
    scaler: Any,
    owned: Owned,
) -> None:
    """Walk back through the prefix's graph from the boundary gradients; step `optimizer` if there is one."""
    if boundary._graph is None:
        raise BoundaryError(
            "this boundary has no prefix graph: it was made by run_prefix, or came over the wire. Use the one that "
            "run_training_prefix returned"
        )
    if optimizer is not None:
        refuse_other(optimizer)
    boundary.refuse_if_taken("backward_prefix")
    roots, given = roots_of(boundary, gradients)
    shared = [p for p in owned.shared if p.requires_grad]
    if "train_suffix" not in boundary._consumed:  # the suffix was trained elsewhere
        refuse_shared(shared, optimizer, "prefix", False)
        if optimizer is not None:
            refuse_of_loss(optimizer, owned)
    if optimizer is not None and boundary._disturbed:
        raise TrainingError(
            "loss_fn ran a backward pass of its own, as a reentrant checkpoint does too, which put gradients on parameters of the "
            "prefix; backward_prefix with an optimizer would clear them. Return the sum of the losses from loss_fn; or pass "
            "optimizer=None, and step and clear the gradients yourself"
        )
    if optimizer is not None and boundary._earlier:
        refuse_earlier(optimizer, boundary._earlier.difference(map(id, owned.shared)))
    boundary.consume("backward_prefix")
    waiting, noted = boundary._shared, boundary._noted
    boundary._graph, boundary._shared, boundary._noted = (), (), ()
    if optimizer is not None:
        clear_but(optimizer, owned.of_suffix.difference(map(id, owned.shared)), noted)
    if waiting:
        roots += [p for p, _ in waiting]
        given += [g for _, g in waiting]
    with _COUNTING:
        _walks[0] += 1
    try:
        if roots:
            walk(roots, given)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise TrainingError(  # the suffix was trained from bytes, and did not see this graph
            f"{_PAST_THE_CUT} was walked by train_suffix already, or by a pass of yours. Have forward return what the loss "
            "takes; clear the gradients of this round, which are not whole"
        ) from error
    finally:
        with _COUNTING:
            _walks[1] += 1
    if optimizer is not None:
        step(optimizer, scaler)
    if scaler is not None and optimizer is not None:
        scaler.update()


def with_gradients(parameters: Iterable[torch.Tensor]) -> frozenset[int]:
    """The ids of those that hold a gradient now."""
    return frozenset([id(p) for p in parameters if p.is_leaf and p.grad is not None])


def _refuse_another_kind(label: str, gradient: Any, t: torch.Tensor) -> None:
    """Raise `BoundaryError` unless the gradient is one that can have arrived at `t`: autograd gives it the same type."""
    if not isinstance(gradient, torch.Tensor):
        raise BoundaryError(f"the gradient of {label!r} must be a tensor or None; found {type(gradient).__name__}")
    if gradient.dtype is t.dtype and gradient.shape == t.shape and gradient.device == t.device:
        return
    found, wanted = (f"{short_dtype(x.dtype)}{list(x.shape)} on {x.device}" for x in (gradient, t))
    if found != wanted:
        raise BoundaryError(
            f"the gradient of {label!r} is {found}; the boundary tensor is {wanted}. Pass what train_suffix returned for this "
            "boundary, converted back if it was sent in another form"
        )


def _behind_its_hooks(t: torch.Tensor) -> torch.Tensor:
    """A view of a tensor with hooks: what `register_multi_grad_hook` makes is not called for the node at which a walk begins."""
    if t.layout is not torch.strided or t.is_nested:
        return t
    with torch.enable_grad():
        return t.view_as(t)


def _leads_on(t: torch.Tensor) -> bool:
    """Whether a gradient can go on from a tensor: a view made under no_grad says that it requires one, but keeps no way back."""
    if t.grad_fn is not None or not t._is_view():
        return True
    with torch.enable_grad():
        node = t.view_as(t).grad_fn
    return node is not None and node.next_functions[0][0] is not None


def no_autocast() -> AbstractContextManager[Any]:
    """Backward passes run outside of autocast, as torch's documentation has it, wherever the halves are called from."""
    enabled = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not enabled:
        return _NOTHING
    stack = ExitStack()
    for device in enabled:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


_NOTHING: AbstractContextManager[Any] = nullcontext()


def _describe(thing: Any) -> str:
    return f"a tensor of shape {list(thing.shape)}" if isinstance(thing, torch.Tensor) else type(thing).__name__
