"""What forward asks of tensors beside values and sizes: attributes that Python set on them, strides, their very class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitRuntime
from ariadne.errors import ModuleError, UnsupportedError
from ariadne.plan import layout
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers, same

Read = Callable[[nn.Linear, torch.Tensor], Any]


class Asks(nn.Linear):
    """What a function reads of the weight or of the input scales the result."""

    def __init__(self, read: Read) -> None:
        super().__init__(4, 4)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.read(self, x)


def split_of(read: Read, x: torch.Tensor) -> tuple[nn.Module, SplitRuntime]:
    model = nn.Sequential(Asks(read), nn.Tanh(), nn.Linear(4, 2)).eval()
    model[0].weight.kept = {"scale": 2.0}
    return model, prepare_split(model, (x,), split="after:0")


def turned(model: Any) -> None:
    model[0].weight.data = model[0].weight.data.t().contiguous().t()


CHANGES: dict[str, tuple[Read, Callable[[Any], Any], str]] = {
    "an attribute": (lambda m, x: m.weight.kept["scale"], lambda m: m[0].weight.kept.update(scale=3.0), "stands on its tensors"),
    "one that is new": (
        lambda m, x: getattr(m.weight, "rate", 1.0), lambda m: setattr(m[0].weight, "rate", 3.0), "stands on its tensors"
    ),
    "one of all": (
        lambda m, x: max(getattr(p, "rate", 1.0) for p in m.parameters()), lambda m: setattr(m[0].bias, "rate", 3.0), "bias.rate"
    ),
    "strides": (lambda m, x: m.weight.stride(0), turned, "the strides of its tensors"),
    "whether it is contiguous": (lambda m, x: 2.0 if m.weight.is_contiguous() else 1.0, turned, "weight = "),
    "whether a view of it is": (lambda m, x: 2.0 if m.weight.T.is_contiguous() else 1.0, turned, "weight = "),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_what_was_asked_of_a_weight_must_not_change_unseen(name: str) -> None:
    read, change, says = CHANGES[name]
    x = numbers(2, 4)
    model, runtime = split_of(read, x)
    with torch.no_grad():
        same(model(x), runtime.run_suffix(runtime.run_prefix(x)))
        change(model)
        with pytest.raises(ModuleError, match=says):
            runtime.run_suffix(runtime.run_prefix(x))


def marked(x: torch.Tensor) -> torch.Tensor:
    x.scale = 3.0  # type: ignore[attr-defined]
    return x


INPUTS: dict[str, tuple[Read, Callable[[torch.Tensor], torch.Tensor]]] = {
    "an attribute": (lambda m, x: getattr(x, "scale", 1.0), marked),
    "whether there is one": (lambda m, x: 2.0 if hasattr(x, "scale") else 1.0, marked),
    "whether it is a parameter": (lambda m, x: 2.0 if isinstance(x, nn.Parameter) else 1.0, lambda x: nn.Parameter(x, False)),
    "its very class": (lambda m, x: 2.0 if type(x) is torch.Tensor else 1.0, lambda x: nn.Parameter(x, False)),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(INPUTS))
def test_an_input_of_which_forward_asks_more_is_followed(name: str) -> None:
    read, other = INPUTS[name]
    x = numbers(2, 4)
    model, runtime = split_of(read, x)
    with torch.no_grad():
        for given in (x, other(numbers(2, 4, seed=1)), numbers(3, 4)):
            same(model(given), runtime.run_suffix(runtime.run_prefix(given)))


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda m, x: x.storage_offset(), "storage_offset"),
        (lambda m, x: 1.0 + x[1:].storage_offset(), "storage_offset"),
        (lambda m, x: x.untyped_storage().nbytes(), "UntypedStorage.nbytes"),
    ],
)
def test_the_place_of_an_input_in_its_memory_is_refused_by_name(read: Read, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        split_of(read, numbers(2, 4))


def test_strides_that_follow_from_no_sizes_are_refused_and_others_followed() -> None:
    x = numbers(2, 4)
    model, runtime = split_of(lambda m, x: x.stride(0), x)
    with torch.no_grad():
        same(model(x), runtime.run_suffix(runtime.run_prefix(x)))
        cut = numbers(6, 9)[1:, 1:5]
        with pytest.raises(UnsupportedError, match="strides"):
            runtime.run_prefix(cut)
    assert layout(numbers(3, 8)[:1, :4], True) == (False,)
    assert layout(numbers(3, 8)[:1, :4], False) == (True,)
    assert layout(numbers(1, 4), True) == (True,)


def test_what_torch_asks_of_a_tensor_that_it_makes_a_fake_of_is_not_asked_at_each_call() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    runtime = prepare_split(model, (numbers(2, 3, 8, 8),), split="after:1")
    assert not [keys for _, keys, _ in runtime._now[False].prefix_guard.attributes if "tensors" in str(keys[0])]


class Renews(nn.Module):
    """(B, 4) to (B, 2), with a running mean that each call replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.ema, self.other = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        self.ema = self.ema * 0.5 + h.detach().mean(0)
        found: torch.Tensor = self.b(h + self.ema * self.other)
        return found


class GoesByClass(Renews):
    """The same without that: what class `other` is of decides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.b(self.a(x)) * (2.0 if isinstance(self.other, nn.Buffer) else 1.0)
        return found


def test_a_buffer_that_forward_replaces_needs_no_mark_of_torchs_own() -> None:
    """`nn.Buffer` marks what it makes, and `nn.Module` asks for that as a tensor is assigned: no answer that forward hears."""
    torch.manual_seed(0)
    model = Renews().eval()
    whole, x = copy.deepcopy(model), torch.ones(2, 4)
    runtime = prepare_split(model, (x,), split="after:a")
    for scale in (1.0, 2.0, 3.0):
        with torch.no_grad():
            same(runtime.run_suffix(runtime.run_prefix(x * scale)), whole(x * scale))
    same(model.ema, whole.ema)


def test_whether_a_buffer_is_marked_counts_where_forward_asks() -> None:
    model = GoesByClass().eval()
    runtime = prepare_split(model, (torch.ones(2, 4),), split="after:a")
    model.other = torch.ones(4)
    with pytest.raises(ModuleError, match="_is_buffer"):
        runtime.run_suffix(runtime.run_prefix(torch.ones(2, 4)))
