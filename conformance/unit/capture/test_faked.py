"""Tensors without data that are made by shorter ways than torch's: they must be what torch would have made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher

from ariadne import prepare_split
from ariadne.capture.foreseen import fake_mode, faked, on_fake
from ariadne.capture.shapes import Sizes, with_symbols

WEIGHTS: dict[str, Callable[[], torch.Tensor]] = {
    "parameter": lambda: nn.Parameter(torch.randn(3, 4)),
    "frozen": lambda: nn.Parameter(torch.randn(3, 4), requires_grad=False),
    "buffer": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).t().contiguous().t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "scalar": lambda: torch.tensor(3),
    "empty": lambda: torch.empty(0, 4),
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "part of another": lambda: torch.randn(6, 4)[2:4],
    "data of a part": lambda: nn.Parameter(torch.randn(6, 4)[2:4]),
    "complex": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "made by a graph": lambda: nn.Parameter(torch.randn(3, 4)) * 2,
    "with a gradient": lambda: _with_gradient(nn.Parameter(torch.randn(3, 4))),
}


def _with_gradient(t: torch.Tensor) -> torch.Tensor:
    t.grad = torch.ones_like(t)
    return t


def told(t: torch.Tensor) -> dict[str, Any]:
    """All that tells a fake tensor from another, symbols by what they stand for."""
    one: Any = t
    kept = {k: v for k, v in vars(t).items() if k != "fake_mode"}
    storage = t.untyped_storage()
    return {
        "sizes": (*map(int, t.shape), *map(int, t.stride()), int(t.storage_offset()), int(storage.nbytes())),
        "kind": (type(t), t.dtype, one.fake_device, t.layout, isinstance(t, nn.Parameter), kept),
        "graph": (t.requires_grad, t.is_leaf, t._is_view(), not t.is_leaf or t.grad is None),
        "keys": torch._C._dispatch_keys(t).raw_repr(),
    }


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_weight_without_data_is_what_torch_makes_of_it(kind: str) -> None:
    t = WEIGHTS[kind]()
    ours, theirs = fake_mode(Sizes()), fake_mode(Sizes())
    with ours:
        found = faked(ours, t)
        assert faked(ours, t) is found
        assert ours.from_tensor(t, static_shapes=True) is found
    with theirs:
        assert told(found) == told(theirs.from_tensor(t, static_shapes=True))


def test_two_that_share_memory_share_it_without_data_whichever_comes_first() -> None:
    whole = nn.Parameter(torch.randn(3, 4))
    part = whole.detach()[1:]
    for first, second in ((whole, part), (part, whole)):
        mode = fake_mode(Sizes())
        with mode:
            one, other = faked(mode, first), faked(mode, second)
        assert one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _both(op: Any, x: torch.Tensor, args: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What torch makes of an op on fake tensors whose batch is a symbol, and what is made in its place."""
    found = []
    for run in (op, on_fake(op)):
        mode = fake_mode(Sizes())
        one = with_symbols(mode, x, "x", {0})
        with torch.enable_grad(), enable_python_dispatcher(), mode:
            out = run(one, *(faked(mode, a) if isinstance(a, torch.Tensor) else a for a in args))
            assert isinstance(out.shape[0], torch.SymInt)
            found.append(told(out))
    return found[0], found[1]


IMAGES: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(2, 8, 5, 7),
    "channels last": lambda: torch.randn(2, 8, 5, 7).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(2, 8, 7, 5).transpose(2, 3),
    "every other channel": lambda: torch.randn(2, 16, 5, 7)[:, ::2],
    "expanded": lambda: torch.randn(2, 8, 1, 7).expand(2, 8, 5, 7),
    "rows": lambda: torch.randn(2, 8),
    "volumes": lambda: torch.randn(2, 8, 3, 4, 5),
    "half": lambda: torch.randn(2, 8, 5, 7, dtype=torch.float16),
    "needs a gradient": lambda: torch.randn(2, 8, 5, 7, requires_grad=True),
}
FROZEN = [(), ("weight",), ("bias",), ("weight", "bias")]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("frozen", FROZEN, ids=str)
@pytest.mark.parametrize("kind", IMAGES)
def test_a_batch_norm_without_data_is_what_torch_makes_of_it(
    kind: str, frozen: tuple[str, ...], training: bool
) -> None:
    norm = nn.BatchNorm2d(8)
    for name in frozen:
        getattr(norm, name).requires_grad_(False)
    rest = [norm.weight, norm.bias, norm.running_mean, norm.running_var, training, 0.1, 1e-5, True]
    theirs, ours = _both(torch.ops.aten.batch_norm.default, IMAGES[kind](), rest)
    assert ours == theirs


TOKENS: dict[str, Callable[[], torch.Tensor]] = {
    "rows": lambda: torch.randn(2, 8),
    "plain": lambda: torch.randn(2, 5, 8),
    "transposed": lambda: torch.randn(2, 8, 5).transpose(1, 2),
    "expanded": lambda: torch.randn(2, 3, 1, 8).expand(2, 3, 4, 8),
    "half": lambda: torch.randn(2, 5, 8, dtype=torch.float16),
}


@pytest.mark.parametrize("frozen", FROZEN, ids=str)
@pytest.mark.parametrize("kind", TOKENS)
def test_a_layer_norm_without_data_is_what_torch_makes_of_it(kind: str, frozen: tuple[str, ...]) -> None:
    norm = nn.LayerNorm(8)
    for name in frozen:
        getattr(norm, name).requires_grad_(False)
    theirs, ours = _both(torch.ops.aten.layer_norm.default, TOKENS[kind](), [[8], norm.weight, norm.bias, 1e-5, True])
    assert ours == theirs


@pytest.mark.parametrize("frozen", FROZEN, ids=str)
@pytest.mark.parametrize("kind", TOKENS)
def test_a_linear_layer_without_data_is_what_torch_makes_of_it(kind: str, frozen: tuple[str, ...]) -> None:
    x = TOKENS[kind]()
    layer = nn.Linear(x.shape[-1], 3).to(x.dtype)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    theirs, ours = _both(torch.ops.aten.linear.default, x, [layer.weight, layer.bias])
    assert ours == theirs


def test_a_linear_layer_without_data_is_made_by_fewer_ops() -> None:
    layer, x = nn.Linear(8, 3), TOKENS["rows"]()
    op, made = torch.ops.aten.linear.default, list[list[str]]()
    for run in (op, on_fake(op)):
        with fake_mode(Sizes()) as mode, enable_python_dispatcher(), torch.profiler.profile() as seen:
            run(with_symbols(mode, x, "x", {0}), faked(mode, layer.weight), faked(mode, layer.bias))
        made.append([event.name for event in seen.events()])
    theirs, ours = made
    assert "aten::addmm" in theirs, "torch writes it out as products and sums"
    assert "aten::addmm" not in ours
    assert len(ours) < len(theirs)


ELEMENTWISE: dict[str, list[Any]] = {
    "dropout": [0.5, True],
    "elu": [],
    "gelu": [],
    "hardswish": [],
    "hardtanh": [-2.0, 2.0],
    "leaky_relu": [0.1],
    "mish": [],
    "relu": [],
    "silu": [],
    "softplus": [],
    "tanh": [],
}


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_is_made_of_each_element_without_data_is_what_torch_makes_of_it(name: str, kind: str) -> None:
    theirs, ours = _both(getattr(torch.ops.aten, name).default, IMAGES[kind](), ELEMENTWISE[name])
    assert ours == theirs


@pytest.mark.parametrize(("name", "args"), [("dropout", [0.5, False]), ("dropout", [0.0, True]), ("relu", [])])
def test_what_gives_back_its_input_or_is_no_number_with_a_point_is_torchs(name: str, args: list[Any]) -> None:
    x = torch.ones(2, 3, dtype=torch.float32 if args else torch.int64)
    theirs, ours = _both(getattr(torch.ops.aten, name).default, x, args)
    assert ours == theirs


class AsksData(nn.Module):
    """Goes on from whether its input has a positive mean."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.runs = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.enter(x)
        return y.relu() if (x.mean() > -100).all() else y


class AsksConstants(AsksData):
    """The same of what it makes of constants alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.enter(x)
        return y.relu() if torch.tensor([1.0]).all() else y


def test_a_forward_that_asks_whether_data_are_true_is_not_run_without_them() -> None:
    runtime = prepare_split(AsksData(), (torch.randn(2, 4),), split="cut:1")
    assert runtime.plan.captured_by == "observed"
    why = "forward asks in the model whether data are true, and fake tensors have none"
    assert runtime.plan.not_captured_by == (("symbolic", why),)


def test_one_that_asks_it_of_constants_is() -> None:
    runtime = prepare_split(AsksConstants(), (torch.randn(2, 4),), split="cut:1")
    assert "symbolic" in (runtime.plan.captured_by, *(way for way, _ in runtime.plan.not_captured_by))
    assert not any("whether data are true" in why for _, why in runtime.plan.not_captured_by)
