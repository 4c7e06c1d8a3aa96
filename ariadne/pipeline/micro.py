"""Micro-batches: inputs parted along the batch, and outputs put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ariadne import tree
from ariadne.capture import Example
from ariadne.errors import BatchError, SpecError
from ariadne.plan import TracePlan


def parted(
    plan: TracePlan, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Inputs parted along the batch in so many micro-batches, the first ones larger where it does not come out even.

    What has no batch goes to each of them. Raises `BatchError` for fewer samples than micro-batches,
    `SpecError` where the batch is not dim 0.
    """
    leaves, spec = tree.flatten((args, kwargs))
    if spec == plan.input_spec:
        batched = plan.batched
    else:
        batched = dict(Example.of(args, kwargs).batched)
    other = next((dim for dim in batched.values() if dim), None)
    if other is not None:
        raise SpecError(
            f"dim {other} of an input is its batch, and a pipeline parts inputs, and joins outputs, along dim 0; run the halves by "
            "run_prefix and run_suffix, or let forward take the batch as dim 0 and transpose"
        )
    tensors = [leaves[i] for i in batched if isinstance(leaves[i], torch.Tensor)]
    if any(t.shape[0] < count for t in tensors):
        raise BatchError(
            f"a batch of {tensors[0].shape[0]} can't be parted in {count} micro-batches; pass a larger one, or fewer micro-batches"
        )
    columns = [leaf.tensor_split(count) if i in batched else (leaf,) * count for i, leaf in enumerate(leaves)]
    return [tree.unflatten(row, spec) for row in zip(*columns, strict=True)]


def merged(chunks: Sequence[Any], batches: Sequence[int]) -> Any:
    """The outputs of micro-batches as one: tensors that have the batch as their first size are joined, others listed.

    >>> merged([torch.zeros(3, 2), torch.ones(2, 2)], [3, 2]).shape
    torch.Size([5, 2])
    """
    if not chunks:
        return None
    spec = tree.flatten(chunks[0])[1]
    rows = [tree.flatten(chunk)[0] for chunk in chunks]
    found: list[Any] = []
    for column in zip(*rows, strict=True):
        sized = zip(column, batches, strict=True)
        if all(isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == b for t, b in sized):
            found.append(torch.cat(column))
        elif any(isinstance(t, torch.Tensor) or not tree.identical(t, column[0]) for t in column):
            found.append([*column])
        else:
            found.append(column[0])
    return tree.unflatten(found, spec)
