"""What crosses in training: tensors of the prefix's graph, as the suffix meets them, and what its backward pass reaches.

Forward goes on as one call in one thread, so Python may hand any tensor from before the cut to an op after it. Under `Crossing`
such an op gets a tap of it in its place: the same data without the prefix's graph, which keeps the gradient that arrives. What an
op takes otherwise (`autograd.Function`, scripted functions) shows in the graph of the loss, by the numbers of its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ariadne import tree
from ariadne.errors import TrainingError
from ariadne.runtime import TAPS, Gradients, Tap, led_to, rejoins
from ariadne.stopped.standing import Unmoved
from ariadne.stopped.unseen import Unseen

_AccumulateGrad = torch._C._functions.AccumulateGrad
_PLAIN = (
    "grad",
    "grad_fn",
    "is_leaf",
    "requires_grad",
    "output_nr",
    "_backward_hooks",
    "_base",
    "_version",
    "shape",
    "dtype",
    "device",
)
_Tensor: Any = torch.Tensor
_innermost: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
# What looks at a tensor itself, or hangs something on it, which then sees the whole gradient.
_KEEPS: frozenset[Any] = frozenset(
    {
        *(
            getattr(_Tensor, name)
            for name in ("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "dim", "size")
        ),
        *(getattr(getattr(_Tensor, name), part) for name in _PLAIN for part in ("__get__",)),
        # Torch sets it while it makes the node of a view that was written into, and holds the lock that `grad_fn` waits for.
        _Tensor._backward_hooks.__set__,
    }
)
_DETACHES: frozenset[Any] = frozenset({torch.detach_, _Tensor.detach_})
_WALKS: frozenset[Any] = frozenset({torch.autograd.grad, torch.autograd.backward, _Tensor.backward})


@dataclass
class _Crossed:
    """A tensor of the prefix, and what stands for it in the suffix; `version`: how often that was written into, as far as told."""

    tensor: torch.Tensor
    tap: torch.Tensor
    label: str
    version: int
    written: bool = False


class Crossing(Unseen):
    """Has each op take taps in place of tensors whose graph was made `before` so many nodes, in the thread that runs forward.

    `labels` are those of tensors known beforehand, by id; another gets one when it is met.
    """

    def __init__(self, before: int, labels: dict[int, str], unmoved: Unmoved) -> None:
        super().__init__()
        self.unmoved = unmoved
        self.before, self.labels = before, labels
        self.crossed: dict[int, _Crossed] = {}
        self.gradients: Gradients = {}
        self.walking: list[bool] = []
        self.anchor = torch.zeros((), requires_grad=True)
        self._originals: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _KEEPS:
            return func(*args, **kwargs)
        if self.unmoved.memories:
            self.unmoved.look((args, kwargs))
        if func in _DETACHES and args and self._is_from_before(args[0]):
            if id(args[0]) in self.crossed:
                raise self._refusal(
                    self.crossed[id(args[0])].label, "is used after the cut, and then detached in place"
                )
            return func(*args, **kwargs)  # from now on it is a tensor of the suffix, with no graph from before
        used: list[_Crossed] = []
        taken = [self._take(a, used) for a in args]
        given = {k: self._take(v, used) for k, v in kwargs.items()} if kwargs else kwargs
        if func in _WALKS:
            self._refuse_share(args, kwargs)
        if not used:
            return func(*args, **kwargs)
        if func in _WALKS:
            raise TrainingError(
                f"forward, or loss_fn, runs a backward pass of its own after the cut, by {func.__name__}, with a tensor from "
                f"before it ({used[0].label!r}): half of the graph would be walked twice. Cut after that, or before "
                "that tensor is made"
            )
        found = func(*taken, **given)
        for one in used:
            self._note_write(one)
        return self._originals.get(id(found), found) if isinstance(found, torch.Tensor) else found

    def _refuse_share(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `TrainingError` where a pass of forward's or loss_fn's own asks for the gradient of a leaf of the prefix.

        What it walks from is the first argument; what it asks for the second of `torch.autograd.grad`, or is called so.
        """
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else None)
        outputs = tree.leaves(args[0] if args else kwargs.get("outputs", kwargs.get("tensors")))
        wanted = [t for t in tree.leaves(inputs) if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
        if not wanted:
            return
        roots = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
        crossed = [one.tensor for root in roots for one in self.reached(root)[1]]
        if led_to(crossed, wanted):
            raise TrainingError(
                "forward after the cut, or loss_fn, asks torch.autograd.grad for the gradient of a leaf from before the cut, and "
                "would get the suffix's share alone, or none. Take gradients with respect to the output, or to parameters of the "
                "suffix alone, or train the whole model with such a loss"
            )

    def take(self, value: Any) -> Any:
        """A value with taps in place of the tensors of the prefix."""
        return self._take(value, [])

    def _take(self, value: Any, used: list[_Crossed]) -> Any:
        if isinstance(value, torch.Tensor):
            if value.requires_grad and self._is_from_before(value):
                one = self._tapped(value)
                used.append(one)
                return one.tap
            return value
        kind = type(value)
        if kind is list or kind is tuple:
            taken = [self._take(v, used) for v in value]
            return value if all(a is b for a, b in zip(taken, value, strict=True)) else kind(taken)
        if kind is dict:
            return {k: self._take(v, used) for k, v in value.items()}
        return value

    def _is_from_before(self, t: torch.Tensor) -> bool:
        """Whether a tensor is of the prefix's graph.

        A view whose memory was written into gets its node when it is first asked for one, and gradients are added in the order of
        nodes. So a view of what the suffix made is not asked: an op that needs no gradient would not ask it either.
        """
        base = t._base
        if base is not None and (made := base.grad_fn) is not None and made._sequence_nr() >= self.before:
            return False
        node = t.grad_fn
        return node is not None and node._sequence_nr() < self.before

    def _tapped(self, t: torch.Tensor) -> _Crossed:
        one = self.crossed.get(id(t))
        if one is not None:
            if one.tap._version != one.version:
                raise self._refusal(one.label, "is written into after the cut by way of another tensor")
            return one
        label = self.labels.get(id(t)) or f"kept_{len(self.crossed)}"
        if any(other.written and _shares(other.tensor, t) for other in self.crossed.values()):
            raise self._refusal(label, "shares memory with one that is written into after the cut")
        given = self.anchor, label, self.gradients, self.walking
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and _innermost() is None:
            tap = Tap.apply(t.detach(), *given)
        else:  # under a transform, too, it is a tensor from outside of it
            with temporarily_clear_interpreter_stack(), torch.inference_mode(False), torch.enable_grad():
                tap = Tap.apply(t.detach(), *given)
        self.gradients.setdefault(label, None)
        one = self.crossed[id(t)] = _Crossed(t, tap, label, tap._version)
        self._originals[id(tap)] = t
        return one

    def _note_write(self, one: _Crossed) -> None:
        if one.tap._version == one.version:
            return
        if one.tensor._is_view():
            raise self._refusal(one.label, "is a view that is written into after the cut")
        one.version, one.written = one.tap._version, True

    def _refusal(self, label: str, what: str) -> TrainingError:
        return TrainingError(
            f"a tensor from before the cut ({label!r}) {what}, and gradients across it might differ from the whole model's. Cut "
            "elsewhere, or use an op that makes a new tensor"
        )

    def reached(self, loss: torch.Tensor) -> tuple[list[torch.Tensor], list[_Crossed]]:
        """The leaves, and the tensors that cross, to which the graph of `loss` leads; `TrainingError` where it passes the cut."""
        by_label = {one.label: one for one in self.crossed.values()}
        leaves, crossed = [], []
        ahead: list[Any] = [loss.grad_fn]
        seen: set[Any] = set()
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if isinstance(node, _AccumulateGrad):
                leaves.append(node.variable)
            elif isinstance(node, TAPS):
                crossed.append(by_label[node.label])  # type: ignore[attr-defined]
            elif node._sequence_nr() < self.before:
                raise TrainingError(
                    f"after the cut forward uses a tensor from before it, made by {node.name()}, where that can't be followed: an "
                    "autograd.Function, a scripted function or a transform such as vmap takes it, autocast keeps a cast weight, "
                    "or it is a view of what was written into. Cut elsewhere, or pass it through an op of torch's, such as "
                    "t.view_as(t), before"
                )
            else:
                ahead += [n for n, _ in node.next_functions]
        return leaves, crossed


def handed_on(tensors: Iterable[torch.Tensor], grad: bool) -> list[torch.Tensor]:
    """What a suffix elsewhere gets for tensors of the prefix: without their graph; no leaves, since forward may write into it."""
    anchor = torch.zeros((), requires_grad=True)
    return [Tap.apply(t.detach(), anchor, "", {}, [True]) if grad and t.requires_grad else t.detach() for t in tensors]


def refuse_strays(graph: Iterable[Any], prefix: Iterable[torch.Tensor], suffix: Iterable[torch.Tensor]) -> None:
    """Raise `TrainingError` where the graph of what crosses leads to a parameter that is the suffix's alone, trained elsewhere."""
    before = {id(p) for p in prefix}
    if led_to(graph, [p for p in suffix if id(p) not in before]):
        raise TrainingError(
            "on the path that this call took, the prefix uses a parameter that the suffix alone used in the example, and that is "
            "stepped where the suffix is trained. Train both halves in one process with one optimizer, or cut elsewhere"
        )


def foreign_of(inputs: Any, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs that have a graph of their own; raises `TrainingError` where its order among forward's would be another.

    Autograd numbers the nodes of each thread, and walks back by these numbers. Forward has a thread of its own.
    """
    found = {id(t): t for t in tree.leaves(inputs) if isinstance(t, torch.Tensor) and t.grad_fn is not None}
    roots = [*found.values()]
    if roots and led_to(roots, parameters):
        raise TrainingError(
            "an input was computed from parameters of this model, with gradients, outside of it; the order in which their "
            "gradients are added can't be kept. Compute it inside of forward, or detach it"
        )
    if any(rejoins(t, (), [other]) for i, t in enumerate(roots) for other in roots[:i]):
        raise TrainingError(
            "two inputs were computed from one another, or from the same thing, with gradients, outside of the model; the order in "
            "which their gradients are added can't be kept in a forward of its own thread. Compute them inside of forward, or "
            "detach one"
        )
    return roots


def refuse_rejoined(loss: torch.Tensor, crossed: Iterable[_Crossed], foreign: Sequence[torch.Tensor]) -> None:
    """Raise `TrainingError` where a loss leads to the graph of an input otherwise than through what crosses."""
    if foreign and rejoins(loss, [node for one in crossed if (node := one.tap.grad_fn) is not None], foreign):
        raise TrainingError(
            "after the cut forward, or loss_fn, uses an input that was computed outside of the model, with gradients: its graph "
            "would be walked twice. Compute it inside of forward, detach it, or cut where it is not used any more"
        )


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.layout is b.layout is torch.strided and a.untyped_storage()._cdata == b.untyped_storage()._cdata
