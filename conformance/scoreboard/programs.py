"""The models of the scoreboard: toys that isolate one difficulty each, and models of the zoo and of the tier `wild` by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import model_zoo
from conformance import wild
from model_zoo.losses import loss as zoo_loss

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

# What may be difficult about a model; the keys that a target may disclaim.
DIFFICULTIES: Mapping[str, str] = {
    "plain": "nothing",
    "batchnorm": "batch norm",
    "dropout": "dropout",
    "branch-on-data": "Python decides by the data",
    "branch-on-batch": "Python decides by the batch",
    "branch-on-mode": "Python decides by a mode of torch",
    "branch-on-capture": "Python asks torch whether it is being captured",
    "random": "draws random numbers",
    "python-random": "draws from Python's or numpy's generator",
    "writes": "writes in place",
    "views": "views and aliases",
    "nested": "nested inputs",
    "nested-output": "nested outputs",
    "keyword": "keyword inputs",
    "none": "an input is None",
    "python-state": "forward changes Python state",
    "cache": "forward keeps what it made once",
    "buffers": "forward writes a buffer",
    "tied": "tied weights",
    "device": "names or asks its device",
}


@dataclass(frozen=True)
class Program:
    """A model by name. `stateful`: what a call gives may depend on the calls before it; `changes`: changes are asked for, too."""

    name: str
    difficulties: frozenset[str]
    build: Callable[[], nn.Module] = field(repr=False)
    inputs: Callable[[int, int], Inputs] = field(repr=False)
    stateful: bool = False
    changes: bool = False

    def loss(self, output: Any) -> Tensor:
        """A scalar that depends on every floating tensor of an output, on each element in another way."""
        return zoo_loss(output)


def numbers(batch: int, seed: int, width: int = 8) -> Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(seed))


def dense(batch: int, seed: int) -> Inputs:
    return (numbers(batch, seed),), {}


class Net(nn.Module):
    """8 -> 16 -> 4; what a toy is about stands in `between`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class Skip(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(torch.relu(h * 2) + h)


class BatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Dropout(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.first(x))))


class FunctionalDropout(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(torch.relu(self.first(x)), 0.5, self.training))


class BranchOnData(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.sum() > 0:
            h = h * 3
        return self.last(torch.relu(h))


class BranchOnBatch(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        if x.shape[0] > 5:
            h = h * 3
        return self.last(h)


class BatchAsNumber(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x)) / float(len(x))
        return self.last(h)


class ItemOfData(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return self.last(h * (1.0 + float(h.max().item())))


class Draws(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return self.last(h + torch.randn(16))


class DrawsLike(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return self.last(h + torch.rand_like(h))


class WritesInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.mul_(2).relu_()
        h[:, :4] = 1.0
        return self.last(h)


class WritesThroughView(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x)) * 1.0
        left = h.view(-1, 2, 8)[:, 0]
        left += 1.0
        return self.last(h)


class GivesAlias(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.first(x))
        return self.last(h), h.view(-1, 4, 4).transpose(1, 2)


class Nested(Net):
    def forward(self, parts: dict[str, Tensor], rest: list[Tensor]) -> Tensor:
        return self.last(torch.relu(self.first(parts["a"] + parts["b"]) + self.first(rest[0])))


class NestedOutput(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.first(x))
        return {"features": h, "scores": self.last(h)}


class Keyword(Net):
    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x) * scale))


class MayBeNone(Net):
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        h = self.first(x)
        if bias is not None:
            h = h + bias
        return self.last(torch.relu(h))


class Counts(Net):
    """The number of calls so far is a Python number, and scales the output."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1.0
        return self.last(torch.relu(self.first(x))) * self.calls


class Averages(Net):
    """A buffer is written in place at each call, and read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.mean.mul_(0.5).add_(h.detach().mean(0) * 0.5)
        return self.last(torch.relu(h) + self.mean)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(16, 8)
        self.back.weight = nn.Parameter(self.first.weight.detach().T.contiguous())
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.again(self.back(torch.relu(self.first(x))))))


def nested(batch: int, seed: int) -> Inputs:
    return ({"a": numbers(batch, seed), "b": numbers(batch, seed + 100)}, [numbers(batch, seed + 200)]), {}


def keyword(batch: int, seed: int) -> Inputs:
    return (numbers(batch, seed),), {"scale": numbers(batch, seed + 100, 16)}


def with_none(batch: int, seed: int) -> Inputs:
    return (numbers(batch, seed), None), {}


def branching(batch: int, seed: int) -> Inputs:
    """An odd seed gives the negative of the even one before it, so that the two go to different sides."""
    return (numbers(batch, seed // 2) * (10.0 if seed % 2 else -10.0),), {}


_TOYS: dict[str, tuple[type[Net], str, Callable[[int, int], Inputs]]] = {
    "plain": (Net, "plain", dense),
    "skip": (Skip, "plain", dense),
    "batchnorm": (BatchNorm, "batchnorm", dense),
    "dropout": (Dropout, "dropout", dense),
    "functional_dropout": (FunctionalDropout, "dropout", dense),
    "branch_on_data": (BranchOnData, "branch-on-data", branching),
    "item_of_data": (ItemOfData, "branch-on-data", dense),
    "branch_on_batch": (BranchOnBatch, "branch-on-batch", dense),
    "batch_as_number": (BatchAsNumber, "branch-on-batch", dense),
    "draws": (Draws, "random", dense),
    "draws_like": (DrawsLike, "random", dense),
    "writes_in_place": (WritesInPlace, "writes", dense),
    "writes_through_view": (WritesThroughView, "views", dense),
    "gives_alias": (GivesAlias, "views nested-output", dense),
    "nested": (Nested, "nested", nested),
    "nested_output": (NestedOutput, "nested-output", dense),
    "keyword": (Keyword, "keyword", keyword),
    "none": (MayBeNone, "none", with_none),
    "counts": (Counts, "python-state", dense),
    "averages": (Averages, "buffers", dense),
    "tied": (Tied, "tied", dense),
}
STATEFUL = {"counts", "averages"}
CHANGED = {"plain", "skip", "batchnorm", "dropout", "functional_dropout"}
# What the zoo's tags say in the scoreboard's words.
_TAGS = {
    "batchnorm": "batchnorm",
    "draws": "dropout",
    "data-dependent": "branch-on-data",
    "draws-in-eval": "random",
    "own-generator": "random",
    "inplace": "writes",
    "writes-input": "writes",
    "views": "views",
    "list-input": "nested",
    "kwargs": "keyword",
    "none-input": "none",
    "state": "python-state",
    "tied": "tied",
}
_BY_NAME = {
    "branch-on-batch": (
        "toys/batch_",
        "toys/branch_on_batch",
        "toys/loop_over_batch",
        "toys/arange_batch",
        "toys/chunk_of",
        "toys/asks_element_size",
        "toys/shape_in_words",
        "toys/size_by_identity",
    ),
    "branch-on-mode": ("toys/grad_mode_branch",),
    "branch-on-capture": ("toys/is_compiling_branch",),
    "python-random": ("toys/numpy_draw", "toys/python_draw"),
    "device": ("toys/asks_type", "toys/autocast_inside"),
    "cache": ("toys/cache_beside_record", "toys/cached_attribute", "toys/first_call_flag", "toys/mask_of_the_longest"),
}

QUICK = tuple(f"one/{name}" for name in _TOYS)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def program(name: str) -> Program:
    """The program of that name: `one/…` a toy of this file, `wild/…` of packages beyond the zoo, else a model of the zoo."""
    family, _, rest = name.partition("/")
    if family == "one":
        if rest not in _TOYS:
            raise ValueError(f"no program {name!r}; there are {', '.join(QUICK)}, and the models of the zoo")
        made, difficulties, inputs = _TOYS[rest]
        tags = frozenset(difficulties.split())
        return Program(name, tags, lambda: seeded(made), inputs, rest in STATEFUL, rest in CHANGED)
    entry = wild.entry(name) if family == "wild" else model_zoo.entry(name)
    tags = {word for tag, word in _TAGS.items() if tag in entry.tags}
    tags |= {word for word, beginnings in _BY_NAME.items() if name.startswith(beginnings)}
    stateful = bool(entry.tags & {"state", "own-generator"})
    changes = name.startswith("nn/")
    return Program(name, frozenset(tags or {"plain"}), entry.build, entry.inputs, stateful, changes)
