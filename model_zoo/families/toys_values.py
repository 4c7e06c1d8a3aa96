"""Toys about what goes in and what comes out: nested, named, None, integers, scalars."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from model_zoo.families.toys_kit import Toys
from model_zoo.sampling import call, floats, integers, same

toy = Toys()


class _Ends(nn.Module):
    """A layer at each end of what the toy is about: 8 -> 16 -> 4."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)


@toy("two_inputs", "", call(floats(8), floats(16)))
class TwoInputs(_Ends):
    """The second input is first read late: before that it is merely alive."""

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        found: Tensor = self.leave(torch.tanh(h) + late)
        return found


@toy("none_input", "none-input", call(floats(8), same(None), floats(16)))
class NoneInput(_Ends):
    """An input that is None, between two that are not."""

    def forward(self, x: Tensor, mask: Tensor | None, late: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        if mask is not None:
            h = h * mask
        found: Tensor = self.leave(h + late)
        return found


@toy("unused_input", "int-input", call(floats(8), floats(3), integers(0, 5, 2)))
class UnusedInput(_Ends):
    """Two of three inputs are never read."""

    def forward(self, x: Tensor, unread: Tensor, also: Tensor) -> Tensor:
        found: Tensor = self.leave(torch.tanh(self.enter(x)))
        return found


@toy("plain_inputs", "plain-input", call(floats(8), same(0.5), same("tanh"), same(True), steps=same(2)))
class PlainInputs(_Ends):
    """A float, a string, a bool and an int among the inputs: they are part of what is computed."""

    def forward(self, x: Tensor, scale: float, activation: str, gated: bool, *, steps: int = 1) -> Tensor:
        h = self.enter(x) * scale
        for _ in range(steps):
            h = torch.tanh(h) if activation == "tanh" else torch.relu(h)
        found: Tensor = self.leave(h * torch.sigmoid(h) if gated else h)
        return found


def _nested(batch: int, generator: Generator) -> dict[str, object]:
    return {"pair": (floats(8)(batch, generator), [floats(8)(batch, generator)]), "mask": None, "scale": 0.5}


@toy("kwargs_nested", "kwargs none-input plain-input", call(floats(8), context=_nested, late=floats(16)))
class KwargsNested(_Ends):
    """Keyword inputs, one of them a dict that holds a tuple, a list, None and a number."""

    def forward(self, x: Tensor, *, context: dict[str, object], late: Tensor | None = None) -> Tensor:
        (first, (second,)), scale = context["pair"], context["scale"]  # type: ignore[misc, has-type]
        h = torch.tanh(self.enter(x + first * scale)) - torch.tanh(self.enter(second))
        found: Tensor = self.leave(h if late is None else h + late)
        return found


class Scored(NamedTuple):
    """What `namedtuple_out` returns."""

    logits: Tensor
    features: Tensor


@toy("namedtuple_out")
class NamedTupleOut(_Ends):
    """The output is a namedtuple."""

    def forward(self, x: Tensor) -> Scored:
        h = torch.tanh(self.enter(x))
        return Scored(features=h, logits=self.leave(h))


@dataclass
class Detected:
    """What `dataclass_out` returns."""

    boxes: Tensor
    extra: dict[str, Tensor]
    count: int = 4
    mask: Tensor | None = None


@toy("dataclass_out")
class DataclassOut(_Ends):
    """The output is a dataclass, with a dict, a number and None in it."""

    def forward(self, x: Tensor) -> Detected:
        h = torch.tanh(self.enter(x))
        return Detected(boxes=self.leave(h), extra={"late": h * 2, "early": h})


@toy("dict_order")
class DictOrder(_Ends):
    """Dicts whose keys are in no alphabetical order, and are integers; one is an OrderedDict."""

    def forward(self, x: Tensor) -> dict[str, object]:
        h = torch.tanh(self.enter(x))
        return {"z": self.leave(h), "a": OrderedDict(y=h, b=h * 2), "m": {3: h + 1, 1: h - 1}}


@toy("scalar_outputs", "rows-mixed")
class ScalarOutputs(_Ends):
    """Outputs without a batch: a mean, a Python number, None, the batch itself and a string."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, float, None, int, str]:
        found = self.leave(torch.tanh(self.enter(x)))
        return found, found.square().mean(), 0.5, None, x.shape[0], "done"


@toy("nested_outputs")
class NestedOutputs(_Ends):
    """Lists in tuples in lists, an empty one among them, and one tensor in two places."""

    def forward(self, x: Tensor) -> list[object]:
        h = torch.tanh(self.enter(x))
        found = self.leave(h)
        return [(found, [h, (found * 2,)]), [], found]


@toy("input_is_output")
class InputIsOutput(_Ends):
    """The input comes back untouched beside the answer, as does a constant of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(0, 1, 5))

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"input": x, "found": self.leave(torch.tanh(self.enter(x))), "size": tuple(self.grid.shape)}


@toy("int_boundary", "int-input", call(integers(0, 64, 6)))
class IntBoundary(nn.Module):
    """Integers and bools alone are alive at the early cuts: nothing there has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.leave = nn.Embedding(32, 16, padding_idx=0), nn.Linear(16, 4)

    def forward(self, indices: Tensor) -> Tensor:
        hashed = (indices * 7 + 3) % 32
        kept = hashed != 5
        found: Tensor = self.leave((self.embed(hashed) * kept.unsqueeze(-1)).sum(1))
        return found


def _flags(batch: int, generator: Generator) -> Tensor:
    return torch.rand(batch, 16, generator=generator) < 0.5


def _bytes(batch: int, generator: Generator) -> Tensor:
    return torch.randint(0, 256, (batch, 8), generator=generator, dtype=torch.uint8)


@toy("bool_int_io", "int-input int-output", call(_bytes, _flags))
class BoolIntIO(_Ends):
    """Bytes and bools go in; bools, bytes and int32 come out beside the answer."""

    def forward(self, image: Tensor, flags: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h = torch.tanh(self.enter(image.to(self.enter.weight.dtype) / 128 - 1)) * flags
        return self.leave(h), h > 0, image.flip(1), (h * 100).to(torch.int32)


@toy("embedding_bag", "int-input", call(integers(0, 32, 6), floats(6)))
class WeightedBag(nn.Module):
    """`embedding_bag` with a weight for each index: one op with four outputs, three of them for its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.leave = nn.EmbeddingBag(32, 16, mode="sum"), nn.Linear(16, 4)

    def forward(self, indices: Tensor, weights: Tensor) -> Tensor:
        found: Tensor = self.leave(torch.tanh(self.bag(indices, per_sample_weights=weights)))
        return found


ENTRIES = tuple(toy.entries)
