"""Packed sequences on fake tensors: how many steps there are follows the lengths, how many sequences does not.

Torch has no fake kernels for recurrent layers over packed sequences, and a wrong one for packing; and its own Python makes plain
numbers of data on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

from ariadne.capture.refusals import Patches

_aten: Any = torch.ops.aten
_FACTORIES = ("zeros", "ones", "empty", "full", "rand", "randn")


def _unknown(like: torch.Tensor, most: Any = None) -> Any:
    """A size of at least 1 that follows data."""
    assert isinstance(like, FakeTensor)
    env = like.fake_mode.shape_env
    if env is None:
        raise NotImplementedError("sizes that follow data")
    size = env.create_unbacked_symint()
    _constrain_range_for_size(size, min=1, max=most if type(most) is int else None)
    return size


def _made(like: torch.Tensor, shape: Iterable[Any], sources: Iterable[torch.Tensor]) -> torch.Tensor:
    """A tensor of this shape that has a gradient if one of its sources has."""
    parts = [t.sum() for t in sources if t.requires_grad]
    blank = like.new_zeros(tuple(shape))
    return blank + torch.stack([p.to(like.dtype) for p in parts]).sum() if parts and torch.is_grad_enabled() else blank


def _pack(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    batch, time = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
    data = _made(x, (_unknown(x), *x.shape[2:]), [x])
    sizes: Any = torch.empty((_unknown(x, time),), dtype=torch.int64, device="cpu")
    sizes.sequences = batch  # no length may be 0, so all of them are there at the first step
    return data, sizes


def _select(x: torch.Tensor, dim: int, index: Any) -> torch.Tensor:
    found: Any = _aten.select.int(x, dim, index)
    sequences = getattr(x, "sequences", None)
    if sequences is not None and type(index) is int and index == 0:
        found.item_memo = sequences
    return found  # type: ignore[no-any-return]


def _pad(
    data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, padding: Any, steps: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    batch = getattr(sizes, "sequences", None)
    if batch is None:
        batch = _unknown(data)
    shape = (batch, steps) if batch_first else (steps, batch)
    padded = _made(data, (*shape, *data.shape[1:]), [data])
    return padded, torch.empty((batch,), dtype=torch.int64, device="cpu")


def _recur(data: torch.Tensor, sizes: torch.Tensor, hx: Any, params: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    states = [hx] if isinstance(hx, torch.Tensor) else list(hx)
    sources = [data, *states, *params]
    width = states[0].shape[-1] * (2 if rest[-1] else 1)
    return tuple(_made(t, s, sources) for t, s in ((data, (data.shape[0], width)), *((t, t.shape) for t in states)))


RULES: dict[OpOverload, Callable[..., Any]] = {
    _aten._pack_padded_sequence.default: _pack,
    _aten._pad_packed_sequence.default: _pad,
    _aten.select.int: _select,
    **{op.data: _recur for op in (_aten.gru, _aten.lstm, _aten.rnn_tanh, _aten.rnn_relu)},
}


class _Of:
    """Stands for a batch of so many sequences where nothing but that is asked."""

    def __init__(self, sequences: Any) -> None:
        self.sequences = sequences

    def size(self, dim: int) -> Any:
        return self.sequences


def patch(mine: Callable[[], bool], run: Callable[[OpOverload, tuple[Any, ...]], Any], patches: Patches) -> None:
    """Let torch's own Python go through packed sequences of fake tensors, without making plain numbers of their data.

    `run` runs an op on fake tensors and notes it.
    """

    def number(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(number, value)) if type(value) in (tuple, list, torch.Size) else value
        whole = isinstance(value, FakeTensor) and not value.dim() and not value.is_floating_point()
        return value.item() if whole else value

    def taking_tensors(factory: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            return factory(*map(number, args), **kwargs) if mine() else factory(*args, **kwargs)

        return make

    def expecting(original: Callable[..., Any]) -> Callable[..., Any]:
        def expected(self: nn.RNNBase, input: Any, batch_sizes: Any) -> Any:
            if isinstance(batch_sizes, FakeTensor) and mine():
                return original(self, _Of(batch_sizes[0].item()), None)
            return original(self, input, batch_sizes)

        return expected

    plain_pad: Any = torch._VF._pad_packed_sequence

    def pad(*args: Any) -> Any:
        if isinstance(args[0], FakeTensor) and mine():
            return run(_aten._pad_packed_sequence.default, args)
        return plain_pad(*args)

    for name in _FACTORIES:
        patches.set(torch, name, taking_tensors(getattr(torch, name)))
    patches.set(torch._VF, "_pad_packed_sequence", pad)
    patches.set(nn.RNNBase, "get_expected_hidden_size", expecting(nn.RNNBase.get_expected_hidden_size))
    patches.set(nn.LSTM, "get_expected_cell_size", expecting(nn.LSTM.get_expected_cell_size))
