"""Verification: an evaluator of plans that shares nothing with code generation, and the one comparator of results."""

from __future__ import annotations

from typing import Any

import torch

from ariadne import tree


def bits(t: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements as integers, so that NaNs and signed zeros compare by their bits."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    t = t.detach().resolve_conj().resolve_neg()
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.contiguous().view(kind[t.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, wherever they are, hold the same numbers of one type: -0.0 is not 0.0, and a NaN is itself.

    >>> same_bits(torch.zeros(1), -torch.zeros(1)), same_bits(torch.zeros(1) / 0, torch.zeros(1) / 0)
    (False, True)
    """
    if a is b:
        return True
    if (
        a.is_nested and b.is_nested and a.layout is b.layout
    ):  # of which the strided kind has no shape that can be asked for
        one, other = a.detach().unbind(), b.detach().unbind()
        return len(one) == len(other) and all(map(same_bits, one, other))
    if a.is_nested or b.is_nested or a.shape != b.shape or a.dtype is not b.dtype:
        return False
    a = a.to(b.device)
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return _leaf_difference(a, b) is None
    return torch.equal(a, b) if a.is_quantized else torch.equal(bits(a), bits(b))


def difference(whole: Any, split: Any) -> str | None:
    """The first difference between two nested results, in words; None if they are the same, bit for bit.

    Structure, types, dtypes, shapes, strides, devices and every bit of every tensor count.

    >>> difference({"out": torch.zeros(2)}, {"out": torch.ones(2)})
    "['out']: values differ in 2 of 2 elements, by at most 1.0"
    """
    _, spec_a = tree.flatten(whole)
    b, spec_b = tree.flatten(split)
    if spec_a != spec_b:
        return f"structure: {spec_a} against {spec_b}"
    for (where, x), y in zip(tree.paths(whole), b, strict=True):
        found = _leaf_difference(x, y)
        if found:
            return f"{where or 'the result'}: {found}"
    return None


def _leaf_difference(x: Any, y: Any) -> str | None:
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return None if tree.identical(x, y) else f"{x!r} against {y!r}"
    kinds = [tree.subclass_of(t) or torch.Tensor for t in (x, y)]
    if kinds[0] is not kinds[1]:
        return f"class {kinds[0].__name__} against {kinds[1].__name__}"
    for what in ("dtype", "shape", "device", "layout"):
        if getattr(x, what) != getattr(y, what):
            return f"{what} {getattr(x, what)} against {getattr(y, what)}"
    if x.layout is not torch.strided:
        pairs = zip(_parts(x), _parts(y), strict=True)
        return next((f"{name} {wrong}" for (name, a), (_, b) in pairs if (wrong := _leaf_difference(a, b))), None)
    if x.stride() != y.stride():
        return f"stride {x.stride()} against {y.stride()}"
    if x.numel() == 0 or x is y:
        return None
    unequal = bits(x) != bits(y)
    if not bool(unequal.any()):
        return None
    far = largest_difference(x, y)
    return f"values differ in {int(unequal.sum())} of {x.numel()} elements, by at most {far}"


def _parts(t: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The dense tensors that a sparse one, or one in a library's own layout, consists of."""
    if t.layout is torch.sparse_coo:
        return [("indices", t._indices()), ("values", t._values())]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [("rows", t.crow_indices()), ("columns", t.col_indices()), ("values", t.values())]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [("columns", t.ccol_indices()), ("rows", t.row_indices()), ("values", t.values())]
    return [("elements", t.to_dense())]


def largest_difference(whole: Any, split: Any) -> float:
    """The largest absolute difference between two nested results of the same structure; 0.0 where all bits agree."""
    found = 0.0
    for x, y in zip(tree.leaves(whole), tree.leaves(split), strict=True):
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            continue
        if x.layout is not torch.strided:
            x, y = x.to_dense(), y.to_dense()
        if x.numel() and not torch.equal(bits(x), bits(y)):
            wide = torch.complex128 if x.is_complex() else torch.float64
            gap = (x.detach().to(wide) - y.detach().to(wide)).abs().max().item()
            found = max(found, gap if gap == gap else float("inf"))
    return found
