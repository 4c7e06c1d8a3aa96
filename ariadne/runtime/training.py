"""Training across a cut: two functions over the same segments that inference uses.

The whole model's backward pass runs the suffix's ops first and then the prefix's. So does this: the suffix is trained from
copies that carry no graph, the gradients that arrive there are taken as they are, and start the walk back through the
prefix's graph, which is still alive. Nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from ariadne import tree
from ariadne.boundary import BoundaryPayload
from ariadne.errors import BoundaryError, TrainingError
from ariadne.plan import short_dtype
from ariadne.runtime.waiting import caught, ends, leaves_of, led_to, without_hooks

Gradients = dict[str, torch.Tensor | None]


class Tap(torch.autograd.Function):
    """Gives a boundary tensor to the suffix, and keeps the gradient that comes back just as it came.

    A leaf would do too, but accumulating into a leaf lays its gradient out anew, and kernels may follow the layout.
    """

    @staticmethod
    def forward(
        ctx: Any, t: torch.Tensor, anchor: torch.Tensor, label: str, kept: Gradients, walking: list[bool]
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.label, ctx.kept, ctx.walking = label, kept, walking
        return t.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None, None, None, None]:
        if not ctx.walking:
            raise TrainingError(
                "loss_fn runs a backward pass of its own, which reaches the boundary: in the whole model it would go on into the "
                "prefix, whose gradients would be there at once. Return the sum of the losses instead, and let train_suffix walk "
                "back once; or take gradients by torch.autograd.grad with respect to the output"
            )
        ctx.kept[ctx.label] = gradient
        return None, None, None, None, None


def carried(labels: tuple[str, ...], raw: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """What a training boundary holds: the values without their graph, and the labels of those that want a gradient.

    One tensor under several labels (`to` and `contiguous` may give back what they got) stays one tensor.
    """
    values, wanting = [], []
    bare: dict[int, torch.Tensor] = {}

    def detached(t: Any) -> Any:
        return bare.setdefault(id(t), t.detach()) if isinstance(t, torch.Tensor) else t

    for label, value in zip(labels, raw, strict=True):
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                wanting.append(label)
            values.append(detached(value))
        else:
            wanting += [label + at for at, t in tree.paths(value) if isinstance(t, torch.Tensor) and t.requires_grad]
            values.append(tree.map_leaves(detached, value))
    return tuple(values), tuple(wanting)


def tapped(boundary: BoundaryPayload, walking: list[bool]) -> tuple[list[Any], Gradients]:
    """The boundary's values for a training run of the suffix, and the dict that its gradients will be put into.

    Until `walking` holds something, none may come. The gradient of a tensor that crosses under several labels comes under the
    first: autograd adds up as for one tensor.
    """
    kept: Gradients = {}
    taps: dict[int, torch.Tensor] = {}
    wanting = set(boundary.requires_grad)
    anchor = torch.zeros((), requires_grad=True)

    def take(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        kept[name] = None
        if name not in wanting:
            return value
        if id(value) not in taps:
            taps[id(value)] = Tap.apply(value, anchor, name, kept, walking)
        return taps[id(value)]

    values = []
    for label, value in zip(boundary.labels, boundary.raw, strict=True):
        if isinstance(value, torch.Tensor):
            values.append(take(label, value))
        else:
            leaves, spec = tree.flatten(value)
            names = [label + at for at, _ in tree.paths(value)]
            values.append(tree.unflatten([take(n, v) for n, v in zip(names, leaves, strict=True)], spec))
    return values, kept


def train_suffix(
    suffix: Callable[..., Any],
    boundary: BoundaryPayload,
    targets: Any,
    *,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    scaler: Any,
    prefix: Sequence[torch.nn.Parameter],
    suffix_parameters: Sequence[torch.nn.Parameter],
    cast: Sequence[str],
) -> tuple[torch.Tensor, Gradients]:
    """Run the suffix, its loss and its backward pass; step `optimizer` if there is one.

    Returns the loss, detached, and the gradient of each boundary tensor by label, None where none arrived. Gradients of
    what the prefix uses too, or what the loss alone takes from it, wait in the boundary until `backward_prefix` adds its own;
    where the boundary came over a wire, those of shared parameters stay, as one share of two. `prefix`: the prefix's parameters.
    """
    here, theirs = boundary._graph is not None, {id(p) for p in prefix}
    shared = [p for p in suffix_parameters if id(p) in theirs and p.requires_grad]
    if shared:
        refuse_shared(shared, optimizer, "suffix", here)
    autocast = cast and shared and any(torch.is_autocast_enabled(d) for d in ("cpu", "cuda"))
    if autocast and torch.is_autocast_cache_enabled():
        raise TrainingError(
            f"autocast casts the parameter {cast[0]!r} once for both sides of the cut, and the whole model adds their gradients "
            "before it casts back; two halves can't. Use torch.autocast(..., cache_enabled=False), or cut elsewhere"
        )
    boundary.consume("train_suffix")
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    with torch.enable_grad():
        walking: list[bool] = []
        values, kept = tapped(boundary, walking)
        output = suffix(boundary.batch, *values)
        stops, before, walked = ends(output), held_gradients(prefix), walks()
        loss = loss_of(loss_fn, output, targets)
        boundary._disturbed = walked == walks() and disturbed(before)
        waiting, noted = _reached(leaves_of(loss, stops), boundary, optimizer, theirs, suffix_parameters)
        del output, values, stops, before
        waiting += [p for p in shared if here and not any(p is w for w in waiting)]
        walking.append(True)
        walk_back(loss, boundary, scaler, waiting, noted)
    if optimizer is not None:
        step(optimizer, scaler)
    return loss.detach(), kept


def walk_back(
    loss: torch.Tensor,
    boundary: BoundaryPayload,
    scaler: Any,
    waiting: Sequence[torch.Tensor],
    noted: Sequence[torch.Tensor],
) -> None:
    """The backward pass of a loss down to the boundary, which keeps the gradients of leaves that wait and of those noted."""
    with no_autocast():
        root = loss if scaler is None else scaler.scale(loss)
        if waiting or noted:
            with caught(root, waiting, noted) as (boundary._shared, boundary._noted):
                root.backward()
        else:
            root.backward()


def loss_of(loss_fn: Callable[[Any, Any], torch.Tensor], output: Any, targets: Any) -> torch.Tensor:
    """What a loss function gives; raises `TrainingError` where that is no loss to walk back from."""
    try:
        loss = loss_fn(output, targets)
    except RuntimeError as error:
        if "appears to not have been used in the graph" not in str(error):
            raise
        raise TrainingError(
            "loss_fn asks torch.autograd.grad for gradients with respect to something that the graph of the loss does not hold. "
            "That graph ends at the boundary: inputs of the model and parameters of the prefix lie behind it. Take gradients with "
            "respect to the output or to runtime.suffix_parameters(), or train the whole model with such a loss"
        ) from error
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


_walks = [0]  # how many walks back through a prefix have begun or ended, in any thread


def walks() -> int:
    """How many walks back through a prefix have begun or ended, in any thread: what moves gradients that is no loss_fn's doing."""
    return _walks[0]


def held_gradients(parameters: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor | None, int]]:
    """The gradients of some parameters, and how often they were written into."""
    return [(p, g, 0 if g is None else g._version) for p in parameters for g in (p.grad,)]


def disturbed(before: Iterable[tuple[torch.Tensor, torch.Tensor | None, int]]) -> bool:
    """Whether something was added to gradients since."""
    return any((g := p.grad) is not None and (g is not old or g._version != version) for p, old, version in before)


def _reached(
    leaves: Sequence[torch.Tensor],
    boundary: BoundaryPayload,
    optimizer: torch.optim.Optimizer | None,
    prefix: set[int],
    suffix_parameters: Iterable[torch.nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of the leaves that a loss reaches by itself, those whose gradients must wait for the prefix's, and those of neither side.

    Raises `TrainingError` where such a gradient can't wait.
    """
    if not leaves:
        return [], []
    suffix = {id(p) for p in suffix_parameters}
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
    unknown = sorted(gradients.keys() - held.keys())
    if unknown:
        raise BoundaryError(
            f"there is a gradient for {unknown[0]!r}, but the boundary holds {', '.join(sorted(held))}; pass what train_suffix "
            "returned for this boundary"
        )
    roots, given = [], []
    for label, t in held.items():
        gradient = gradients.get(label)
        if gradient is None or not t.requires_grad:
            continue
        _refuse_another_kind(label, gradient, t)
        if _leads_on(t):
            roots.append(t)
            given.append(gradient)
    return roots, given


def backward_prefix(
    boundary: BoundaryPayload,
    gradients: Mapping[str, torch.Tensor | None],
    *,
    optimizer: torch.optim.Optimizer | None,
    scaler: Any,
    suffix_parameters: Iterable[torch.nn.Parameter],
    shared: Iterable[torch.nn.Parameter],
) -> None:
    """Walk back through the prefix's graph from the boundary gradients; step `optimizer` if there is one."""
    if boundary._graph is None:
        raise BoundaryError(
            "this boundary has no prefix graph: it was made by run_prefix, or came over the wire. Use the one that "
            "run_training_prefix returned"
        )
    boundary.refuse_if_taken("backward_prefix")
    roots, given = roots_of(boundary, gradients)
    shared = list(shared)
    if "train_suffix" not in boundary._consumed:  # the suffix was trained elsewhere
        refuse_shared(shared, optimizer, "prefix", False)
    if optimizer is not None and boundary._disturbed:
        raise TrainingError(
            "loss_fn ran a backward pass of its own, which put gradients on parameters of the prefix; backward_prefix with an "
            "optimizer would clear them. Return the sum of the losses from loss_fn; or pass optimizer=None, and step and clear "
            "the gradients yourself"
        )
    boundary.consume("backward_prefix")
    waiting, noted = boundary._shared, boundary._noted
    boundary._graph, boundary._shared, boundary._noted = (), [], []
    if optimizer is not None:
        _clear(optimizer, {id(p) for p in suffix_parameters} - {id(p) for p in shared}, noted)
    roots += [p for p, _ in waiting]
    given += [g for _, g in waiting]
    _walks[0] += 1
    try:
        if roots:
            with no_autocast():
                torch.autograd.backward(roots, given)
    finally:
        _walks[0] += 1
    if optimizer is not None:
        step(optimizer, scaler)
    if scaler is not None and optimizer is not None:
        scaler.update()


def _clear(
    optimizer: torch.optim.Optimizer, keep: Collection[int], noted: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Clear the gradients of what an optimizer owns, save what this round's suffix has put there."""
    cleared = set()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in keep:
                p.grad = None
                cleared.add(id(p))
    again = [(p, g) for p, g in noted if id(p) in cleared]
    if again:
        with without_hooks([p for p, _ in again]):  # they have run
            torch.autograd.backward([p for p, _ in again], [g for _, g in again])


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


def step(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """Step an optimizer, by way of the scaler if there is one."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)


def refuse_shared(
    shared: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer | None, side: str, here: bool
) -> None:
    """Raise `TrainingError` if a side's optimizer owns a parameter whose gradient the other side has yet to complete."""
    if optimizer is None:
        return
    ids = {id(p) for p in shared}
    owned = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) in ids]
    if owned and here:
        raise TrainingError(
            f"the optimizer of the suffix owns {len(owned)} parameter(s) that the prefix uses too (shape {owned[0]}), and would "
            "step before the prefix has added its gradient. Call train_suffix with optimizer=None, then backward_prefix, and "
            "step one optimizer that owns them; or leave them to the optimizer of the prefix alone"
        )
    if owned:
        raise TrainingError(
            f"the optimizer of the {side} owns {len(owned)} parameter(s) that both sides use (shape {owned[0]}). Prefix and suffix "
            "are trained in two processes, so the gradient here is one share of two: leave runtime.shared_parameters() out of the "
            "optimizers, add the shares of both processes, step both copies by the sum, then clear both gradients"
        )


def _describe(thing: Any) -> str:
    return f"a tensor of shape {list(thing.shape)}" if isinstance(thing, torch.Tensor) else type(thing).__name__
