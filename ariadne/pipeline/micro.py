"""Micro-batches: inputs parted along the batch, and outputs put together again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ariadne import tree
from ariadne.capture import Example
from ariadne.errors import BatchError, SpecError
from ariadne.plan import Expr, Ref, TracePlan


def parted(
    plan: TracePlan, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Inputs parted along the batch in so many micro-batches, the first ones larger where it does not come out even.

    What has no batch goes to each of them. Raises `BatchError` for fewer samples than micro-batches,
    `SpecError` where the plan can't tell which dim of an input is its batch.
    """
    leaves, spec = tree.flatten((args, kwargs))
    if spec == plan.input_spec:
        batched: Mapping[int, int] = plan.batched
    elif any(plan.batched.values()):
        raise SpecError(
            "these inputs have another form than the example, whose batch is not dim 0 of each; call the pipeline once with inputs "
            "of this form, or pass them as the example was passed"
        )
    else:
        batched = Example.of(args, kwargs).batched
    tensors = [(leaves[i], dim) for i, dim in batched.items() if isinstance(leaves[i], torch.Tensor)]
    if any(t.shape[dim] < count for t, dim in tensors):
        t, dim = tensors[0]
        raise BatchError(
            f"a batch of {t.shape[dim]} can't be parted in {count} micro-batches; pass a larger one, or fewer micro-batches"
        )
    columns = [
        leaf.tensor_split(count, dim=batched[i]) if i in batched else (leaf,) * count for i, leaf in enumerate(leaves)
    ]
    return [tree.unflatten(row, spec) for row in zip(*columns, strict=True)]


def merged(chunks: Sequence[Any], batches: Sequence[int], plans: Iterable[TracePlan] = ()) -> Any:
    """The outputs of micro-batches as one: tensors are joined along the dim that is the batch, others listed.

    Which dim that is the plans tell that made them. Where each of them serves one batch alone, it is the first, if it is as large
    as its micro-batch.

    >>> merged([torch.zeros(3, 2), torch.ones(2, 2)], [3, 2]).shape
    torch.Size([5, 2])
    """
    if not chunks:
        return None
    spec = tree.flatten(chunks[0])[1]
    rows = [tree.flatten(chunk)[0] for chunk in chunks]
    known = next((dims for plan in plans if (dims := _along(plan)) is not None), None)
    found: list[Any] = []
    for i, column in enumerate(zip(*rows, strict=True)):
        dim = known[i] if known is not None else 0
        sized = zip(column, batches, strict=True)
        if dim is not None and all(
            isinstance(t, torch.Tensor) and t.dim() > dim and t.shape[dim] == b for t, b in sized
        ):
            found.append(torch.cat(column, dim))
        elif any(isinstance(t, torch.Tensor) or not tree.identical(t, column[0]) for t in column):
            found.append([*column])
        else:
            found.append(column[0])
    return tree.unflatten(found, spec)


def _along(plan: TracePlan) -> list[int | None] | None:
    """Along which dim each leaf of the output has the batch; None for a plan of one batch, where sizes are numbers.

    What has a further size that follows the batch, such as a table of all pairs of samples, can't be put together.
    """
    if not plan.batched:
        return None
    symbol = Expr(plan.batch_symbol)
    shapes = [plan.values[one.name].shape if isinstance(one, Ref) else () for one in plan.output]
    follow = [[i for i, size in enumerate(shape) if isinstance(size, Expr)] for shape in shapes]
    return [
        dims[0] if len(dims) == 1 and shape[dims[0]] == symbol else None
        for shape, dims in zip(shapes, follow, strict=True)
    ]
