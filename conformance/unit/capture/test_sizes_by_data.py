"""Sizes that follow data: each is followed, or looked at again in each call; none is taken as known from a run that had it so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from ariadne import SplitSpec, prepare_split
from ariadne.capture.foreseen import Foresight
from ariadne.errors import WitnessError
from conformance.unit.trap_kit import Twins
from conformance.unit.trap_kit import numbers as seeded


class Recurrent(nn.Module):
    """(B, 5, 4) and B lengths -> (B, 4): `use` is given the layer, the head and a packed sequence."""

    def __init__(self, kind: str, use: Callable[..., Any], in_order: bool, **options: Any) -> None:
        super().__init__()
        self.enter, self.use, self.in_order = nn.Linear(4, 4), use, in_order
        self.r: nn.RNNBase = getattr(nn, kind)(4, 4, batch_first=True, **options)
        self.leave = nn.Linear(8 if options.get("bidirectional") else options.get("proj_size", 4), 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = pack_padded_sequence(self.enter(x), lengths, batch_first=True, enforce_sorted=self.in_order)
        return self.use(self.r, self.leave, packed)


def padded(packed: PackedSequence, **options: Any) -> torch.Tensor:
    return pad_packed_sequence(packed, batch_first=True, **options)[0]


def of_lengths(r: nn.RNNBase, o: nn.Module, p: PackedSequence) -> torch.Tensor:
    states, lengths = pad_packed_sequence(r(p)[0], batch_first=True)
    return o(states.sum(1)) / lengths[:, None]


PACKED = {
    "the mean over steps": lambda r, o, p: o(padded(r(p)[0]).mean(1)),
    "up to a total length": lambda r, o, p: o(padded(r(p)[0], total_length=5).mean(1)),
    "up to a longer one": lambda r, o, p: o(padded(r(p)[0], total_length=7).mean(1)),
    "by the lengths that come back": of_lengths,
    "the steps themselves": lambda r, o, p: o(padded(r(p)[0])),
    "the first states": lambda r, o, p: o(padded(r(p)[0])[:, 0]),
    "the packed data": lambda r, o, p: o(r(p)[0].data).mean(0),
    "the number of steps": lambda r, o, p: o(padded(r(p)[0]).sum(1)) / p.batch_sizes.shape[0],
    "the number of states": lambda r, o, p: o(padded(r(p)[0]).sum(1)) / p.data.shape[0],
    "a loop of two layers": lambda r, o, p: o(padded(r(r(p)[0])[0]).mean(1)),
}
SHAPES = {
    "GRU": ("GRU", {}),
    "LSTM": ("LSTM", {"num_layers": 2}),
    "RNN": ("RNN", {"nonlinearity": "relu", "bias": False}),
    "both directions": ("LSTM", {"bidirectional": True}),
    "projected": ("LSTM", {"proj_size": 2}),
}
LENGTHS = ([5, 3, 2], [5, 4, 2], [4, 4, 1], [3, 1], [5, 5, 4, 2, 1, 1], [2], [1, 1, 1])


@pytest.mark.parametrize("in_order", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("use", PACKED)
def test_a_packed_sequence_is_followed_at_other_lengths(use: str, in_order: bool) -> None:
    def build() -> nn.Module:
        return Recurrent("GRU", PACKED[use], in_order)

    twins = Twins(build, seeded(3, 5, 4), torch.tensor(LENGTHS[0]))
    assert twins.runtime.plan.captured_by == "symbolic"
    for found in LENGTHS:
        lengths = torch.tensor(found if in_order else found[::-1])
        twins.replay(seeded(len(lengths), 5, 4, seed=len(found)), lengths)
    twins.train(seeded(3, 5, 4), torch.tensor([4, 4, 1]))


@pytest.mark.parametrize(
    "shape", [s if s in ("LSTM", "RNN") else pytest.param(s, marks=pytest.mark.variants) for s in SHAPES]
)
def test_every_recurrent_layer_follows_a_packed_sequence(shape: str) -> None:
    kind, options = SHAPES[shape]
    twins = Twins(
        lambda: Recurrent(kind, PACKED["the mean over steps"], False, **options),
        seeded(3, 5, 4),
        torch.tensor([2, 5, 3]),
    )
    assert twins.runtime.plan.captured_by == "symbolic"
    for found in LENGTHS:
        twins.replay(seeded(len(found), 5, 4), torch.tensor(found))
    twins.train(seeded(3, 5, 4), torch.tensor([4, 4, 1]))


def test_the_last_states_of_a_packed_sequence_are_followed() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.r, self.leave = nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor, h: torch.Tensor) -> Any:
            packed = pack_padded_sequence(self.enter(x).transpose(0, 1), lengths.cpu(), enforce_sorted=False)
            start = h[None]
            states, (hidden, cell) = self.r(packed, (start, start * 2))
            return self.leave(hidden[-1] + x.mean(1)), cell, pad_packed_sequence(states)[0].shape[0]

    twins = Twins(Last, seeded(3, 5, 4), torch.tensor([2, 5, 3]), seeded(3, 4))
    for found in LENGTHS:
        twins.replay(seeded(len(found), 5, 4), torch.tensor(found), seeded(len(found), 4))


class Sized(nn.Module):
    """(B, 4) -> (B, 4), by a size that `by` gives of its input."""

    def __init__(self, by: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.by, self.a, self.b = by, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) * self.by(x)


@torch.library.custom_op("ariadne_test::kept", mutates_args=())
def kept(x: torch.Tensor) -> torch.Tensor:
    """The positive numbers; the op has no tag and no fake kernel."""
    return x[x > 0].clone()


@torch.library.custom_op("ariadne_test::foretold", mutates_args=())
def foretold(x: torch.Tensor) -> torch.Tensor:
    """The positive numbers, of an op with a fake kernel."""
    return x[x > 0].clone()


@foretold.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


class Kept(torch.autograd.Function):
    """The positive numbers, by Python that a plan keeps whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x[x > 0].clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise NotImplementedError


def boxes(x: torch.Tensor) -> torch.Tensor:
    corner = x[:, :2]
    return torch.cat([corner, corner + 1], 1)


def nms(x: torch.Tensor) -> torch.Tensor:
    return torchvision.ops.nms(boxes(x.repeat(4, 1)), x[:, 0].repeat(4), 0.5)


BY_DATA = {
    "an op without a tag": lambda x: kept(x).shape[0],
    "an op with a fake kernel": lambda x: foretold(x).shape[0],
    "a function of Python": lambda x: Kept.apply(x).shape[0],
    "torchvision's nms": lambda x: nms(x).shape[0],
    "repeat_interleave": lambda x: torch.repeat_interleave(x[:, 0], (x[:, 0] > 0).long()).numel(),
    "its form with repeats alone": lambda x: torch.repeat_interleave((x[:, 0] > 0).long() + 1).numel(),
    "nonzero": lambda x: len(x.clamp(min=0).nonzero()),
    "nonzero as a tuple": lambda x: x.clamp(min=0).nonzero(as_tuple=True)[0].shape[0],
    "where": lambda x: torch.where(x > 0)[0].numel(),
    "argwhere": lambda x: torch.argwhere(x > 0).size(0),
    "a mask": lambda x: x[x > 0].numel(),
    "masked_select": lambda x: x.masked_select(x > 0).size()[0],
    "unique": lambda x: torch.unique(x > 0).numel(),
    "unique_consecutive": lambda x: torch.unique_consecutive((x > 0).flatten()).shape[0],
    "bincount": lambda x: torch.bincount((x > 0).sum(1)).shape[0],
    "one_hot": lambda x: nn.functional.one_hot((x > 0).sum(1)).shape[1],
    "a sparse tensor": lambda x: x.clamp(min=0).to_sparse().values().shape[0],
    "the steps of a packed sequence": lambda x: pack_padded_sequence(
        x[:, :, None], (x > 0).sum(1) + 1 - (x > 0).all(1).long(), True, False
    ).batch_sizes.numel(),
    "tensor_split": lambda x: torch.tensor_split(x.flatten(), (x > 0).sum()[None].cpu())[0].shape[0] + 1,
}


def sign_patterns() -> list[torch.Tensor]:
    return [*(seeded(2, 4, seed=k) for k in range(6)), torch.ones(2, 4), -torch.ones(2, 4)]


@pytest.mark.parametrize("by", BY_DATA)
def test_a_size_that_follows_data_is_followed_or_looked_at_again(by: str) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torchvision's own fake kernel of nms
        warnings.simplefilter("ignore", UserWarning)
        model = Sized(BY_DATA[by]).eval()
        x = seeded(2, 4)
        runtime = prepare_split(model, (x,), split=SplitSpec("50%", dynamic_batch=(1, 8), max_paths=1))
        right = 0
        for other in [x, *sign_patterns()]:
            expected = model(other)
            try:
                found = runtime.run_suffix(runtime.run_prefix(other))
            except WitnessError:
                continue
            assert torch.equal(found, expected)
            right += 1
        assert right
        for batch in (1, 3, 8):
            other = seeded(batch, 4, seed=batch)
            try:
                found = runtime.run_suffix(runtime.run_prefix(other))
            except WitnessError:
                continue
            assert torch.equal(found, model(other))


def test_sizes_that_follow_from_sizes_are_known() -> None:
    aten = torch.ops.aten
    x = torch.randn(3, 4)
    told = Foresight().follows_data
    assert told(aten.relu.default, (x,), [x.relu()]) == [(False, False)]
    assert told(aten.nonzero.default, (x,), [x.nonzero()]) == [(True, False)]
    assert told(torch.ops.ariadne_test.kept.default, (x,), [x[x > 0]]) == [(None,)]
    assert told(torch.ops.ariadne_test.foretold.default, (x,), [x[x > 0]]) == [(True,)]
    packed = pack_sequence([x[0], x[1], x[2, :2]])
    rows, lengths = x[:, :, None], torch.tensor([4, 4, 2])
    outs = [packed.data[:, None], packed.batch_sizes]
    assert told(aten._pack_padded_sequence.default, (rows, lengths, True), outs) == [(True, False), (True,)]


def test_an_op_without_a_fake_kernel_serves_every_batch_where_its_sizes_follow_the_batch() -> None:
    torch.manual_seed(0)
    model = Rows().eval()
    runtime = prepare_split(model, (torch.randn(2, 4),), split=SplitSpec("50%", dynamic_batch=(1, 8)))
    for batch in (2, 1, 3, 5):
        x = torch.randn(batch, 4)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))


@torch.library.custom_op("ariadne_test::shifted", mutates_args=())
def shifted(x: torch.Tensor) -> torch.Tensor:
    """As many rows as there are; the op has no fake kernel."""
    return x + 1


class Rows(nn.Module):
    """(B, 4) -> (B, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(shifted(self.a(x).detach()))
