"""Deciding sizes: which of the model's tensors decide, by their own sizes, those that forward's Python asks of what ops made.

`logits.shape[1]` of `h @ self.prototypes.t()` is the number of prototypes: another number calls for another plan, though nothing
asked the prototypes themselves. Followed is each dim by itself, so that a cache that grows counts only where its length shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from ariadne.guards import Event
from ariadne.plan import storage_of, tensors_in

_Dim = tuple[torch.Tensor, int]
# Ops whose result has the sizes of their first argument.
_KEEP = frozenset(
    "clone contiguous detach alias lift_fresh to _to_copy dropout native_dropout softmax _softmax log_softmax _log_softmax cumsum "
    "cumprod flip roll tril triu batch_norm native_batch_norm cudnn_batch_norm layer_norm native_layer_norm group_norm "
    "native_group_norm instance_norm rms_norm zeros_like ones_like empty_like full_like rand_like randn_like bernoulli "
    "index_put index_fill index_add index_copy scatter scatter_add scatter_reduce copy sort argsort".split()
)
_POOLS = frozenset(
    f"{name}{n}d{more}"
    for name in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
    for n in (1, 2, 3)
    for more in ("", "_with_indices")
) | {"_adaptive_avg_pool2d", "_adaptive_avg_pool3d"}
_CONVOLUTIONS = frozenset({"convolution", "conv1d", "conv2d", "conv3d", "_convolution"})
_PRODUCTS = frozenset({"mm", "bmm", "matmul"})
_ATTENTION = "scaled_dot_product"
_PIECES = frozenset(
    {"unbind", "split", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk"}
)  # as many as a size says
_RESHAPE_IN_PLACE = frozenset(
    {"resize_", "resize_as_", "set_", "squeeze_", "unsqueeze_", "transpose_", "t_", "as_strided_"}
)


def deciding(
    events: Collection[Event], asked: Iterable[torch.Tensor], state: Collection[int | None]
) -> set[int | None]:
    """The storages, of those in `state`, of the tensors that decide the sizes of those `asked`, and how many pieces ops make."""
    made, by_storage = (
        defaultdict[int, list[tuple[Event, str]]](list),
        defaultdict[int | None, list[torch.Tensor]](list),
    )
    todo: list[_Dim] = [*_all(asked)]
    reshaped = set[int]()  # of these only the last sizes can be asked, and no rule holds
    for event in events:
        name = _name(event)
        if name in _RESHAPE_IN_PLACE:
            reshaped.add(id(event.args[0]))
        if name in _PIECES:
            todo += _cut(event)
        first = event.args[0] if event.args else None
        for out in tensors_in(event.out):
            if out is not first or name in _RESHAPE_IN_PLACE:
                made[id(out)].append((event, name))
                by_storage[storage_of(out)].append(out)
    found, seen = set[int | None](), set[tuple[int, int]]()
    while todo:
        t, dim = todo.pop()
        if (id(t), dim) in seen:
            continue
        seen.add((id(t), dim))
        for event, name in made.get(id(t), ()):
            known = reshaped.isdisjoint(map(id, (t, *tensors_in(event.args))))
            todo += _of(event, name, t, dim) if known else _all([*tensors_in(event.args), *event.within])
        if (key := storage_of(t)) in state and key is not None and (id(t) not in made or id(t) in reshaped):
            found.add(key)
        elif key is not None and id(t) not in made:  # made by an op, and seen by forward as another object
            todo += _all(by_storage.get(key, ()))
    return found


def _name(event: Event) -> str:
    """The name of one of torch's own ops; nothing for those of others."""
    space, _, name = event.target._schema.name.partition("::") if isinstance(event.target, OpOverload) else ("", "", "")
    return str(name) if space == "aten" else ""


def _all(tensors: Iterable[torch.Tensor]) -> Iterator[_Dim]:
    return ((t, dim) for t in tensors if not t.is_nested for dim in range(max(1, t.dim())))


def _cut(event: Event) -> Iterable[_Dim]:
    """The dim that an op cuts into pieces: which it is, stands in its arguments where it is not the first."""
    t, *rest = event.args
    at = rest[-1] if rest and (len(rest) > 1 or _name(event) == "unbind") else 0
    return [(t, at % t.dim())] if isinstance(at, int) and t.dim() else _all([t])


def _of(event: Event, name: str, out: torch.Tensor, dim: int) -> Iterable[_Dim]:
    """The dims that a dim of what an op made follows; all of all that it is given, where nothing is known of the op."""
    target, args = event.target, event.args
    if not name or not out.dim():
        return _all([*tensors_in(args), *event.within])
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if torch.Tag.pointwise in target.tags:
        return _aligned([*tensors_in(args)], out, dim)
    if first is None:
        if name in ("cat", "concat", "concatenate") and isinstance(args[0], (list, tuple)):
            return _joined(args[0], (args[1] if len(args) > 1 else 0) % out.dim(), dim)
        return _all(tensors_in(args))
    last = out.dim() - 1
    if (name in _KEEP or name in _POOLS or name == "slice") and first.dim() == out.dim():
        return [(first, dim)]
    if name == "linear" and args[1].dim() == 2 and first.dim() == out.dim():
        return [(args[1], 0)] if dim == last else [(first, dim)]
    if name == "addmm":
        return [(args[1], 0) if dim == 0 else (args[2], 1)]
    if name in _PRODUCTS and first.dim() == args[1].dim() == out.dim():
        return [(args[1], dim)] if dim == last else [(first, dim)] if dim == last - 1 else _aligned(args[:2], out, dim)
    if name == "embedding":
        return [(first, 1)] if dim == last else [(args[1], dim)]
    if name in _CONVOLUTIONS and first.dim() == out.dim():
        crossed = name.endswith("convolution") and args[6] is True
        return [(first, 0)] if dim == 0 else [(args[1], int(crossed))] if dim == 1 else [(first, dim), (args[1], dim)]
    if _ATTENTION in name and out.dim() == first.dim():
        return [(args[2], dim)] if dim == last else [(first, dim)] if dim == last - 1 else _aligned(args[:3], out, dim)
    return _moved(name, args, dim) or _all(tensors_in(args))


def _moved(name: str, args: tuple[Any, ...], dim: int) -> list[_Dim]:
    """The same for an op that puts dims elsewhere, or adds or takes one; nothing for other ops."""
    t = args[0]
    n = t.dim()
    if name == "t" and n == 2:
        return [(t, 1 - dim)]
    if name == "transpose":
        one, other = (at % n for at in args[1:3])
        return [(t, {one: other, other: one}.get(dim, dim))]
    if name == "permute":
        return [(t, args[1][dim] % n)]
    if name == "select":
        return [(t, dim + (dim >= args[1] % n))]
    if name == "unsqueeze" and dim != (at := args[1] % (n + 1)):
        return [(t, dim - (dim > at))]
    return []


def _aligned(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> list[_Dim]:
    """Where a size of what is computed number by number comes from: one that is not 1 decides by itself, else all do."""
    at = [(t, d) for t in tensors if (d := dim - out.dim() + t.dim()) >= 0]
    wide = [(t, d) for t, d in at if t.shape[d] == out.shape[dim] != 1]
    return wide[:1] or at


def _joined(tensors: Iterable[torch.Tensor], along: int, dim: int) -> list[_Dim]:
    """The same of what is joined: along its dim all count; in others all are alike, and one that an op made tells of it."""
    some = [t for t in tensors if t.dim() > dim]
    return [(t, dim) for t in some] if dim == along else [(t, dim) for t in some[-1:]]
