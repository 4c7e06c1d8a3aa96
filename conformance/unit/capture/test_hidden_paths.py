"""Ways by which a forward slips past an op recorder, each followed or refused; and what a capture must put back."""

from __future__ import annotations

import contextlib
import copy
import enum
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.compare import difference
from ariadne.errors import InputError, UnsupportedError, WitnessError


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -3 * gradient


saved_apply = Reverse.apply


class Net(nn.Module):
    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.body = nn.Linear(4, 4), nn.Linear(4, 4), body
        self.register_buffer("one", torch.ones(()))

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        if more:
            return self.b(self.body(self, self.a(x), *more))  # type: ignore[call-arg]
        return self.b(self.body(self, self.a(x)))


def split(body: Callable[..., torch.Tensor], *more: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = Net(body).eval()
    runtime = prepare_split(model, (torch.randn(2, 4), *more), split=SplitSpec("cut:1", dynamic_batch=(1, 16)))
    return model, runtime


@pytest.mark.parametrize("apply", [lambda x: Reverse.apply(x), lambda x: saved_apply(x)], ids=["by its class", "saved"])
def test_an_autograd_function_keeps_its_backward(apply: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, runtime = split(lambda m, x: apply(x))
    x = torch.randn(3, 4)
    whole = copy.deepcopy(model)
    whole(x).sum().backward()
    boundary = runtime.run_training_prefix(x)
    _, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.sum())
    runtime.backward_prefix(boundary, gradients)
    expected = {n: p.grad for n, p in whole.named_parameters()}
    assert difference(expected, {n: p.grad for n, p in model.named_parameters()}) is None


FORMULAS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows // 8": lambda x: x * (x.shape[0] // 8 + 1),
    "a multiple of 8": lambda x: x.roll((-x.shape[0]) % 8, 0),
    "xor": lambda x: x * (x.shape[0] ^ 8),
    "shift": lambda x: x * ((x.shape[0] >> 3) + 1),
    "abs": lambda x: x + 1 if abs(x.shape[0] - 9) < 2 else x,
    "bits": lambda x: x * x.shape[0].bit_length(),
    "log2": lambda x: x * math.floor(math.log2(x.shape[0])),
    "nbytes": lambda x: x * (x.nbytes // 100 + 1),
    "divmod": lambda x: x * (divmod(x.shape[0], 8)[0] + 1),
    "text": lambda x: x * len(str(x.shape[0])),
    "affine": lambda x: x.reshape(-1)[: 2 * x.shape[0] + 2].sum() + x,
}


AROUND = (1, 2, 3, 7, 8, 9, 15, 16)  # where the answers of these formulas change, and their neighbours


@pytest.mark.parametrize("observed", [False, True], ids=["symbolic", "observed"])
@pytest.mark.parametrize("name", FORMULAS)
def test_what_forward_computes_from_its_batch_is_right_at_every_batch(name: str, observed: bool) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return FORMULAS[name](x) if not observed or m.one.item() > 0 else x

    model, runtime = split(body)
    for batch in AROUND:
        x = torch.randn(batch, 4)
        with torch.no_grad():
            assert difference(model(x), runtime.run_suffix(runtime.run_prefix(x))) is None, batch


class Kind(enum.Enum):
    PLUS = 1
    MINUS = 2


def _halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _less(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x - by


@pytest.mark.parametrize("prepared", [_doubled, _halved], ids=["the example's", "another"])
def test_a_function_that_was_given_and_has_other_code_now_is_another(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runtime = split(_by_kind, prepared)
    x = torch.randn(3, 4)
    for given in (_doubled, _less):
        monkeypatch.setattr(_doubled, "__code__", given.__code__)
        monkeypatch.setattr(_doubled, "__defaults__", given.__defaults__)
        with torch.no_grad():
            try:
                found = runtime.run_suffix(runtime.run_prefix(x, _doubled))
            except InputError:
                assert given is _less
            else:
                assert difference(model(x, _doubled), found) is None


def _by_kind(m: Any, x: torch.Tensor, k: Any) -> torch.Tensor:
    if isinstance(k, slice):
        return x * x[:, k].sum()
    if isinstance(k, Kind):
        return x + k.value
    found: torch.Tensor = k(x) if callable(k) else x * int(k)
    return found


@pytest.mark.parametrize(
    ("then", "now"),
    [(slice(0, 2), slice(1, 3)), (Kind.PLUS, Kind.MINUS), (torch.relu, torch.tanh), (_halved, _doubled), (2, 3)],
    ids=["slice", "enum", "of C", "function", "number"],
)
def test_another_input_that_is_no_tensor_has_a_plan_of_its_own(then: Any, now: Any) -> None:
    model, runtime = split(_by_kind, then)
    x = torch.randn(3, 4)
    with torch.no_grad():
        for given in (then, now, then):
            assert difference(model(x, given), runtime.run_suffix(runtime.run_prefix(x, given))) is None


@pytest.mark.parametrize(
    ("then", "now"),
    [(np.int64(2), np.int64(3)), (torch.relu, 2), (lambda x: x * 2, lambda x: x * 3)],
    ids=["numpy", "number", "lambda"],
)
def test_an_input_that_is_no_tensor_is_part_of_the_plan(then: Any, now: Any) -> None:
    model, runtime = split(_by_kind, then)
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert difference(model(x, then), runtime.run_suffix(runtime.run_prefix(x, then))) is None
    with pytest.raises(InputError, match=r"was .* at capture, now it is"):
        runtime.run_prefix(x, now)


def test_one_tensor_given_twice_is_not_two_tensors() -> None:
    model, runtime = split(lambda m, x, y, z: x * 2 if y is z else x * 3, torch.ones(2, 4), torch.ones(2, 4))
    x, y = torch.randn(3, 4), torch.ones(3, 4)
    for args in ((x, y, y), (x, y, y.clone())):
        with torch.no_grad():
            assert difference(model(*args), runtime.run_suffix(runtime.run_prefix(*args))) is None


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: torch.from_dlpack(x.detach()) + x,
        lambda m, x: copy.deepcopy(x.detach()) + x,
        lambda m, x: torch.as_tensor(np.tanh(x.detach().numpy())) + x,
    ],
    ids=["dlpack", "deepcopy", "numpy"],
)
def test_data_that_leave_torch_and_come_back_are_followed_or_refused(body: Callable[..., torch.Tensor]) -> None:
    try:
        model, runtime = split(body)
    except UnsupportedError:
        return
    x = torch.randn(2, 4)
    try:
        found = runtime.run_suffix(runtime.run_prefix(x))
    except WitnessError:
        return
    with torch.no_grad():
        assert difference(model(x), found) is None


def test_reseeding_in_forward_is_refused() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return x + torch.rand(4)

    with pytest.raises(UnsupportedError, match="seed before the call"):
        split(body)


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.a.weight.data.clamp_(-0.1, 0.1),
        lambda m: m.a.weight.detach().clamp_(-0.1, 0.1),
        lambda m: setattr(m.a.weight, "data", m.a.weight.data / 2),
        lambda m: m.a.weight.requires_grad_(False),
    ],
    ids=["data", "detach", "assigned", "flag"],
)
def test_prepare_puts_parameters_back_whatever_forward_does_to_them(write: Callable[[Any], Any]) -> None:
    torch.manual_seed(3)
    model = Net(lambda m, x: (write(m), x)[1]).eval()
    before = copy.deepcopy(model.state_dict())
    flags = [p.requires_grad for p in model.parameters()]
    with contextlib.suppress(UnsupportedError, RuntimeError):  # whether it may be split or not
        prepare_split(model, (torch.randn(2, 4),), split="cut:1")
    assert difference(dict(before), dict(model.state_dict())) is None
    assert flags == [p.requires_grad for p in model.parameters()]
    assert not any(p.is_meta for p in model.parameters())


def test_a_module_list_that_grew_gets_another_plan() -> None:
    torch.manual_seed(3)
    model = Net(lambda m, x: x).eval()
    model.extra = nn.ModuleList()
    model.body = lambda m, x: sum((torch.tanh(x @ q.weight) for q in m.extra), x)
    runtime = prepare_split(model, (torch.randn(2, 4),), split="cut:1")
    model.extra.append(nn.Linear(4, 4))
    with torch.no_grad():
        x = torch.randn(2, 4)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 16])
def test_len_of_a_tensor_follows_the_batch(batch: int) -> None:
    model, runtime = split(lambda m, x: x + torch.arange(len(x)).unsqueeze(1))
    assert runtime.plan.batches.ranges == ((1, 16),)
    x = torch.randn(batch, 4)
    with torch.no_grad():
        assert difference(model(x), runtime.run_suffix(runtime.run_prefix(x))) is None


def test_where_fake_tensors_lose_the_batch_real_runs_show_more_of_it() -> None:
    model, runtime = split(
        lambda m, x: x.reshape(int(x.shape[0]), 2, 2).sum(1, keepdim=True).expand(-1, 2, 2).flatten(1)
    )
    assert runtime.plan.captured_by == "observed"
    assert [way for way, _ in runtime.plan.not_captured_by] == ["symbolic"]
    for batch in range(1, 17):
        x = torch.randn(batch, 4)
        with torch.no_grad():
            assert difference(model(x), runtime.run_suffix(runtime.run_prefix(x))) is None
