"""Memory of tensors: whose it is, and copies that keep their strides, where `clone()` lays out anew what has gaps or repeats."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor's numbers, one after the other, on the CPU.

    >>> as_bytes(torch.zeros(3, 6).diagonal()[:1]).shape
    torch.Size([4])
    """
    close = t.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return close.as_strided((close.numel(),), (1,)).view(torch.uint8)  # the stride of a single number may be any


def own(t: torch.Tensor) -> torch.Tensor:
    """A differentiable copy of `t` with memory of its own and the same strides.

    >>> own(torch.zeros(3, 6)[:, ::2]).stride()
    (6, 2)
    """
    copy = t.clone()
    if t.is_nested or t.layout is not torch.strided or copy.stride() == t.stride():
        return copy
    narrow = [0 if s == 0 and n > 1 else slice(None) for n, s in zip(t.shape, t.stride(), strict=True)]
    if 0 in narrow:
        kept = t[tuple(slice(0, 1) if k == 0 else k for k in narrow)]
        return own(kept).expand(t.shape)
    return t.new_empty_strided(t.shape, t.stride()).copy_(t)


def storage_of(t: torch.Tensor) -> int | None:
    """What tells the memory of a dense tensor from that of others."""
    if t.layout is not torch.strided or isinstance(t, FakeTensor):
        return None
    while torch._C._functorch.is_functorch_wrapped_tensor(
        t
    ):  # by a transform such as vmap: the memory is of what is inside
        t = torch._C._functorch.get_unwrapped(t)
    found: int = torch._C.TensorBase.untyped_storage(t)._cdata  # not the method, whose use in forward is noted
    return found


def layout(t: torch.Tensor, strides: bool) -> tuple[bool, ...]:
    """Which memory formats a tensor is contiguous in; where `strides` count, the plain one only with those that torch gives it."""
    formats = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}.get(t.dim(), ())
    return (t.is_contiguous() and not (strides and not _usual(t)), *(t.is_contiguous(memory_format=f) for f in formats))


def other_layout(t: torch.Tensor) -> str:
    """How a tensor holds its numbers if not as most do, in words: that it is sparse, nested or of a library's own layout."""
    if t.is_nested:
        return "nested"
    return "" if t.layout is torch.strided else f"of layout {t.layout}"


def _usual(t: torch.Tensor) -> bool:
    """Whether a contiguous tensor's strides follow from its sizes: those of dims of size 1 may be any."""
    step = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        if type(size) is not int or type(stride) is not int:  # a symbol, which torch itself made
            return True
        if stride != step:
            return False
        step *= max(size, 1)
    return True
