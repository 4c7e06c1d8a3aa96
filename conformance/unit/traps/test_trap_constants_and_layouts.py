"""Trap 26: constants, tensors kept in odd places, layouts, autocast and bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ariadne.errors import GuardError, UnsupportedError
from conformance.unit.trap_nets import Body
from conformance.unit.trap_twins import Twins, either, same, seeded, state

CONSTANTS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], Callable[[], dict[str, Any]]]] = {
    "a list": (lambda m, x: m.b(x) * torch.tensor([1.0, 2, 3, 4, 5, 6]), dict),
    "a number": (lambda m, x: m.b(x) * torch.tensor(2.5), dict),
    "a list of the model": (lambda m, x: m.b(x) * torch.tensor(m.kept), lambda: {"kept": [1.0, 2, 3, 4, 5, 6]}),
    "numpy": (lambda m, x: m.b(x) * torch.from_numpy(np.arange(6, dtype=np.float32)), dict),
    "numpy of the model": (lambda m, x: m.b(x) * torch.from_numpy(m.kept), lambda: {"kept": np.ones(6, "float32")}),
    "as_tensor": (lambda m, x: m.b(x) * torch.as_tensor(m.kept), lambda: {"kept": np.ones(6, "float32")}),
    "a list by the batch": (lambda m, x: m.b(x) * torch.tensor([float(i) for i in range(x.shape[0])])[:, None], dict),
    "a written constant": (lambda m, x: m.b(x) * torch.tensor([1.0, 2, 3, 4, 5, 6]).add_(1), dict),
    "new_tensor": (lambda m, x: m.b(x) * x.new_tensor([1.0, 2, 3, 4, 5, 6]), dict),
    "an attribute": (lambda m, x: m.b(x) * m.kept, lambda: {"kept": torch.arange(6.0)}),
    "in a dict": (lambda m, x: m.b(x) * m.kept["k"], lambda: {"kept": {"k": torch.arange(6.0)}}),
    "in a list": (lambda m, x: m.b(x) * m.kept[1], lambda: {"kept": [0, torch.arange(6.0)]}),
    "in a tuple in a dict": (lambda m, x: m.b(x) * m.kept["k"][0], lambda: {"kept": {"k": (torch.arange(6.0),)}}),
    "in an object": (lambda m, x: m.b(x) * m.kept.t, lambda: {"kept": Holder(torch.arange(6.0))}),
    "a view of an attribute": (lambda m, x: m.b(x) * m.kept[0], lambda: {"kept": torch.arange(12.0).view(2, 6)}),
    "written in forward": (lambda m, x: m.b(x) * m.kept.add_(1), lambda: {"kept": torch.arange(6.0)}),
}  # fmt: skip


class Holder:
    def __init__(self, t: torch.Tensor) -> None:
        self.t = t


@pytest.mark.parametrize("constant", CONSTANTS)
def test_constants_born_in_forward_or_kept_on_the_model(constant: str) -> None:
    middle, kept = CONSTANTS[constant]
    Twins(lambda: Body(middle, **kept()), seeded((2, 6))).hold(6)


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "the list": ("a list of the model", lambda m: m.kept.__setitem__(0, 9.0)),
    "another list": ("a list of the model", lambda m: setattr(m, "kept", [9.0] * 6)),
    "the array": ("numpy of the model", lambda m: m.kept.__setitem__(0, 9.0)),
    "another array": ("numpy of the model", lambda m: setattr(m, "kept", np.full(6, 9, dtype=np.float32))),
    "the array, as_tensor": ("as_tensor", lambda m: m.kept.__setitem__(0, 9.0)),
    "the attribute": ("an attribute", lambda m: m.kept.fill_(9)),
    "another attribute": ("an attribute", lambda m: setattr(m, "kept", torch.full((6,), 9.0))),
    "in the dict": ("in a dict", lambda m: m.kept["k"].fill_(9)),
    "another in the dict": ("in a dict", lambda m: m.kept.update(k=torch.full((6,), 9.0))),
    "another dict": ("in a dict", lambda m: setattr(m, "kept", {"k": torch.full((6,), 9.0)})),
    "another in the list": ("in a list", lambda m: m.kept.__setitem__(1, torch.full((6,), 9.0))),
    "another in the object": ("in an object", lambda m: setattr(m.kept, "t", torch.full((6,), 9.0))),
    "the base of the view": ("a view of an attribute", lambda m: m.kept.fill_(9)),
    "another base": ("a view of an attribute", lambda m: setattr(m, "kept", torch.full((2, 6), 9.0))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_constant_of_the_model_that_changed_is_followed_or_refused(change: str) -> None:
    constant, act = CHANGES[change]
    middle, kept = CONSTANTS[constant]
    twins = Twins(lambda: Body(middle, **kept()), seeded((2, 6)))
    cuts = twins.cuts()
    for model in (twins.whole, twins.split):
        act(model)
    for cut in cuts:
        either(lambda cut=cut: twins.replay(seeded((3, 6)), cuts=[cut]), GuardError, "kept", "prepare")
        either(lambda cut=cut: twins.train(seeded((3, 6)), steps=1, cuts=[cut]), GuardError, "kept", "prepare")
        twins.sync()


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.relu(self.norm(self.a(x)))
        y = x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4).transpose(1, 2)
        return {"map": self.b(x), "rows": y, "flat": x.flatten(1), "sum": x.reshape(x.shape[0], 2, -1) * 2}


def every_other(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t, t], -1)[..., 0]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "batch last": lambda t: t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "every other": every_other,
    "expanded": lambda t: t[:, :1].expand(-1, 3, -1, -1),
    "a slice": lambda t: torch.cat([t, t])[: t.shape[0]],
    "flipped memory": lambda t: t.flip(0).flip(0),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("example", ["contiguous", "channels_last", "transposed"])
def test_inputs_of_any_layout_give_the_same_bits_and_strides(example: str, layout: str, train: bool) -> None:
    twins = Twins(Conv, LAYOUTS[example](seeded((2, 3, 4, 4))), train=train)
    cuts = twins.cuts()
    for b in (1, 3):
        x = LAYOUTS[layout](seeded((b, 3, 4, 4)))
        for runtime in cuts[:: len(cuts) // 3]:
            with torch.no_grad():
                want = twins.whole(x)
            same(want, runtime.run_suffix(runtime.run_prefix(x)))
            same(state(twins.whole), state(twins.split))


class Laid(nn.Module):
    """Asks how its input lies in memory."""

    def __init__(self, how: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Conv2d(3, 3, 1), nn.Conv2d(3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x * 1))
        return self.b(y * 2 if self.how(y) else y + 1)


WAYS_TO_ASK_FOR_LAYOUT: dict[str, Callable[[torch.Tensor], bool]] = {
    "is_contiguous": lambda t: t.is_contiguous(),
    "channels_last": lambda t: t.is_contiguous(memory_format=torch.channels_last),
    "stride(1)": lambda t: t.stride(1) == 1,
    "stride()": lambda t: t.stride()[1] == 1,
    "dim_order": lambda t: t.dim_order() == (0, 1, 2, 3),
    "storage_offset": lambda t: t.storage_offset() == 0 and t.stride()[3] == 1,
}


@pytest.mark.parametrize("how", WAYS_TO_ASK_FOR_LAYOUT.values(), ids=WAYS_TO_ASK_FOR_LAYOUT)
def test_python_that_looks_at_the_layout_sees_that_of_the_call(how: Callable[[torch.Tensor], bool]) -> None:
    twins, refused = Twins(lambda: Laid(how), seeded((2, 3, 4, 4))), list[tuple[str, str]]()
    for layout in ("contiguous", "channels_last", "transposed", "contiguous"):
        x = LAYOUTS[layout](seeded((3, 3, 4, 4)))
        for runtime in twins.cuts():
            with torch.no_grad():
                want = twins.whole(x)
            try:
                found = runtime.run_suffix(runtime.run_prefix(x))
            except UnsupportedError as error:  # strides that do not follow from sizes, where forward asks for them
                refused.append((layout, str(error)))
            else:
                same(want, found)
    assert all(layout == "transposed" and "asks for strides" in text for layout, text in refused)


def test_a_reshape_that_copies_or_not_by_the_layout_is_written_as_in_the_model() -> None:
    """`reshape` of a contiguous tensor is a view, of another a copy; a write shows which."""

    class Reshapes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x) * 2
            flat = y.reshape(y.shape[0], -1)
            z = torch.sin(flat)
            flat.add_(1)
            return y.sum((1, 2, 3))[:, None] * z

    twins = Twins(Reshapes, seeded((2, 3, 4, 4)))
    for layout in ("contiguous", "channels_last", "transposed"):
        twins.runtime.run_prefix(LAYOUTS[layout](seeded((3, 3, 4, 4))))
        for runtime in twins.cuts():
            x = LAYOUTS[layout](seeded((3, 3, 4, 4)))
            with torch.no_grad():
                want = twins.whole(x)
            same(want, runtime.run_suffix(runtime.run_prefix(x)))


@contextmanager
def bfloat(on: bool) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        yield


class LooksAtTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y = y.float() * 2 if torch.is_autocast_enabled("cpu") else y + 1
        return self.b(y if y.dtype == x.dtype else y.to(x.dtype) * 3)


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("build", [sequence, LooksAtTypes])
def test_captured_in_or_out_of_autocast_it_replays_in_and_out(build: Callable[[], nn.Module], captured: bool) -> None:
    with bfloat(captured):
        twins = Twins(build, seeded((2, 6)))
    for now in (captured, not captured, captured):
        for runtime in twins.cuts():
            with bfloat(now):
                twins.replay(seeded((3, 6)), cuts=[runtime])
                twins.train(seeded((3, 6)), steps=1, cuts=[runtime])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_a_model_in_another_dtype_is_held_to_the_bit(dtype: torch.dtype) -> None:
    twins = Twins(lambda: sequence().to(dtype), seeded((2, 6)).to(dtype))
    for b in (1, 3):
        twins.replay(seeded((b, 6)).to(dtype))
        twins.train(seeded((b, 6)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_moved_to_another_dtype_is_followed_at_every_cut(dtype: torch.dtype) -> None:
    twins = Twins(sequence, seeded((2, 6)))
    for model in (twins.whole, twins.split):
        model.to(dtype)
    twins.replay(seeded((3, 6)).to(dtype))
