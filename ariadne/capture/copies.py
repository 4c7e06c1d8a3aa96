"""Copies: the data of a tensor, and whether autograd knew nothing of it, kept before it is written, and put back after."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ariadne.errors import UnsupportedError


@dataclass(frozen=True)
class Copy:
    """A tensor of the model with a copy of its data; `plain` where it did not require grad."""

    tensor: torch.Tensor
    data: torch.Tensor
    plain: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Copy:
        """One of a tensor as it is now."""
        return cls(tensor, _once(tensor.detach()).clone(), not tensor.requires_grad)

    def put_back(self) -> None:
        """Give the tensor its data back, and make it a leaf again where a value that carries gradients was written into it.

        Else it would lead to the graph of a run that is over, for the next backward pass to run into.
        """
        tensor, data = self.tensor, self.data
        if self.plain and tensor.requires_grad:
            _forget_graph(tensor)
        if not data.is_nested and _once(tensor.detach()).shape != data.shape:  # by an `out=`, or by `resize_`
            with torch.no_grad():
                tensor.resize_(data.shape)
        if tensor.is_inference():
            with torch.inference_mode():
                _once(tensor).copy_(data)
        else:
            _once(tensor.data).copy_(data)


def _once(t: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that holds each of its numbers once: `expand` shows one many times, and such can't be written."""
    if t.layout is torch.strided and not t.is_meta and not t.is_nested:
        for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
            if stride == 0 and size > 1:
                t = t.narrow(dim, 0, 1)
    return t


def _forget_graph(t: torch.Tensor) -> None:
    """Make a tensor one that requires no grad; a view, which torch can't detach in place, becomes a view of its base anew."""
    base = t._base if t._is_view() else None
    if base is None:
        t.detach_()
        return
    if not base.is_leaf:
        base.detach_()
    with torch.enable_grad():  # into a view that `no_grad` makes no such value could be written again
        anew = base.as_strided(t.size(), t.stride(), t.storage_offset())
    try:
        torch.utils.swap_tensors(t, anew)
    except RuntimeError as error:  # there are weak references to it
        raise UnsupportedError(
            f"forward writes a value that carries gradients into a view that the model holds, of sizes {list(t.shape)}, and it "
            f"can't be put back as it was ({error}). Keep a tensor of its own there (.clone()), or write value.detach() into it"
        ) from error
