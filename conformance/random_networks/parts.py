"""The modules that a program can hold, by kind: how each is made, and with which arguments it takes a given tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from conformance.random_networks.python_steps import counting


class Lookup(nn.Module):
    """An embedding of integers of any size."""

    def __init__(self, rows: int, width: int, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=sparse)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids.remainder(self.table.num_embeddings))


class Gain(nn.Module):
    """One number, read without a module of its own around the op."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


class Tick(nn.Module):
    """A buffer that counts its calls in place, and a part in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.calls


class Average(nn.Module):
    """A buffer that follows the mean of what passes in training; with `replaced` by another tensor each time."""

    def __init__(self, replaced: bool) -> None:
        super().__init__()
        self.replaced = replaced
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.replaced:
            self.mean = self.mean * 0.5 + x.detach().sum() * 0.125
        elif self.training:
            self.mean.mul_(0.5).add_(x.detach().sum(), alpha=0.125)
        return x - self.mean


class Delay(nn.Module):
    """Two buffers that hand on to each other: what passed two calls ago is added; with `swapped` they change places instead.

    `seen` holds the one that comes next.
    """

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.swapped = swapped
        self.seen = {"next": torch.full((), 2.0)}
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("before", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.swapped:
            self.last, self.before = self.before, self.last
        else:
            self.before, self.last = self.last, x.detach().sum() * 0.125
        self.seen["next"] = self.last
        return x + self.before


class Block(nn.Module):
    """Modules within a module: norm, linear, an activation in place, and the way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Recorder:
    """Writes down what passes; of a copy nothing is written down yet, as torch copies no tensors that have a graph."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """As a forward hook does."""
        self.found["output"] = output
        self.found["detached"] = output.detach()

    def __getstate__(self) -> dict[str, Any]:
        return {"found": {}}


class Recorded(nn.Linear):
    """Everybody's way to see activations: a hook that writes them into a dict outside of the model."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.recorder = Recorder()
        self.register_forward_hook(self.recorder.note)


class Listed(nn.Module):
    """A part in a plain list that asks for shapes, and a list of parameters with its weights: as Keras has its layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ops = [nn.Linear(width, width)]
        self.ops[0].gain = torch.full((width,), 2.0)
        self.kept = nn.ParameterList(self.ops[0].parameters())

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.ops[0]
        if layer.gain.size(0) != x.shape[-1] or layer.weight.shape[1] != x.shape[-1]:
            raise ValueError("another width")
        return layer(x) * layer.gain


class Encoder(nn.TransformerEncoder):
    """An encoder with a padding mask: in eval mode its layers run on nested tensors."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.TransformerEncoderLayer(width, 2, 4, dropout=0.0, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if x.is_meta:  # for which torch has no nested tensors
            return super().forward(x)
        padded = torch.zeros(x.shape[:2], dtype=torch.bool)
        padded[1:, -1] = x.detach()[1:, -1, 0] > 0
        return super().forward(x, src_key_padding_mask=padded)


@dataclass(frozen=True)
class Kind:
    """A kind of module: `make(*args)`, and `fit(shape, pick)`, the arguments for an operand of that shape or None.

    `pick` is a small number by which a fit chooses among several. `takes` is the operand's letter, as in `steps.Step`;
    `writes`: its forward may write in place.
    """

    make: Callable[..., nn.Module]
    fit: Callable[[tuple[int, ...], int], tuple[Any, ...] | None]
    takes: str = "f"
    writes: bool = False


def _last(shape: tuple[int, ...], pick: int) -> tuple[Any, ...] | None:
    return (shape[-1],) if shape else None


def _linear(shape: tuple[int, ...], pick: int) -> tuple[Any, ...] | None:
    return (shape[-1], (shape[-1], 4, shape[-1], 1, 3, 0)[pick % 6], pick % 4 < 2) if shape else None


def _channels(shape: tuple[int, ...], pick: int) -> tuple[Any, ...] | None:
    return (shape[1], (0.1, 0.5)[pick % 2], pick % 3 != 2) if len(shape) in (2, 3) else None


def _conv(shape: tuple[int, ...], pick: int) -> tuple[Any, ...] | None:
    return (shape[1], (2, 3)[pick % 2], 1 + pick % 2) if len(shape) == 3 and shape[1] else None


def _of_sequence(*widths: int) -> Callable[[tuple[int, ...], int], tuple[Any, ...] | None]:
    return lambda shape, pick: (shape[-1], *widths) if len(shape) == 3 and shape[-1] and shape[1] else None


def _of_even_sequence(shape: tuple[int, ...], pick: int) -> tuple[Any, ...] | None:
    return (shape[-1],) if len(shape) == 3 and shape[-1] and shape[-1] % 2 == 0 and shape[1] > 1 else None


def _always(*choices: tuple[Any, ...]) -> Callable[[tuple[int, ...], int], tuple[Any, ...] | None]:
    return lambda shape, pick: choices[pick % len(choices)]


class Attention(nn.MultiheadAttention):
    """Self-attention: query, key and value are one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


def _batch_norm(channels: int, momentum: float, tracks: bool) -> nn.Module:
    return nn.BatchNorm1d(channels, momentum=momentum, track_running_stats=tracks)


KINDS: Mapping[str, Kind] = {
    "linear": Kind(nn.Linear, _linear),
    "batch_norm": Kind(_batch_norm, _channels, writes=True),
    "layer_norm": Kind(nn.LayerNorm, _last),
    "dropout": Kind(nn.Dropout, _always((0.5,), (0.25, True), (0.0,)), writes=True),
    "relu": Kind(nn.ReLU, _always((True,), (False,)), writes=True),
    "prelu": Kind(nn.PReLU, _always((1,))),
    "conv": Kind(nn.Conv1d, _conv),
    "lookup": Kind(Lookup, _always((3, 4), (2, 3), (4, 1)), "i"),
    "sparse": Kind(lambda rows, width: Lookup(rows, width, sparse=True), _always((3, 4), (2, 3)), "i"),
    "lstm": Kind(lambda i, h: nn.LSTM(i, h, batch_first=True), _of_sequence(3)),
    "gru": Kind(lambda i, h: nn.GRU(i, h, batch_first=True), _of_sequence(2)),
    "attention": Kind(Attention, _of_sequence()),
    "encoder": Kind(Encoder, _of_even_sequence, writes=True),
    "recorded": Kind(Recorded, _last),
    "listed": Kind(Listed, lambda shape, pick: (shape[-1],) if shape and shape[-1] else None),
    "block": Kind(Block, _last, writes=True),
    "gain": Kind(Gain, _always(())),
    "tick": Kind(Tick, _always(()), writes=True),
    "opaque": Kind(counting, _last, writes=True),
    "weight_norm": Kind(lambda width: weight_norm(nn.Linear(width, width)), _last),
    "average": Kind(Average, _always((False,), (True,)), writes=True),
    "delay": Kind(Delay, _always((False,), (True,)), writes=True),
}


def make(declared: Mapping[str, Mapping[str, Any]]) -> nn.ModuleDict:
    """The modules of a program. `tied` gives the weight of an earlier one, `same` means an earlier one itself."""
    made = nn.ModuleDict()
    for name, part in declared.items():
        if "same" in part:
            made[name] = made[part["same"]]
            continue
        made[name] = KINDS[part["kind"]].make(*part.get("args", ()))
        if "tied" in part:
            theirs, mine = (weight_of(made[n]) for n in (part["tied"], name))
            if theirs[0]._parameters[theirs[1]].shape != mine[0]._parameters[mine[1]].shape:
                raise ValueError(f"{name!r} and {part['tied']!r} have weights of other shapes")
            mine[0].register_parameter(mine[1], theirs[0]._parameters[theirs[1]])
        for parameter in part.get("frozen", ()):
            made[name].get_parameter(parameter).requires_grad_(False)
    return made


def weight_of(module: nn.Module) -> tuple[nn.Module, str]:
    """Where the weight stands that ties can share: a module and the parameter's name; KeyError where there is none."""
    for owner in (module, getattr(module, "table", None)):
        if isinstance(owner, nn.Module) and "weight" in owner._parameters and owner.weight is not None:
            return owner, "weight"
    raise KeyError("no weight")


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Give parameters and running statistics reproducible numbers, so that nothing passes on zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            if t.is_floating_point():
                drawn = torch.randn(t.shape, generator=generator)
                t.copy_(drawn.abs() + 0.5 if name.endswith("running_var") else drawn * 0.5)
