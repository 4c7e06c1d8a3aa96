"""Sizes that follow the model's own tensors, such as a buffer that grows: asked of them, or of what ops make of them."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ariadne.guards.baseline
from ariadne.errors import BoundaryError, ModuleError
from conformance.unit.refusing import prepare_split

ASKS: dict[str, Callable[[Tensor], Any]] = {
    "len": len,
    "len of a view": lambda q: len(q[:3]),
    "len of all in one dim": lambda q: len(q.view(-1)),
    "len of data": lambda q: len(q.data),
    "len of detach": lambda q: len(q.detach()),
    "len of what is joined": lambda q: len(torch.cat([q, q])),
    "len of unbind": lambda q: len(q.unbind()),
    "len of columns": lambda q: len(q.t().unbind(1)),
    "len of split": lambda q: len(q.split(2)),
    "len of chunk along a dim": lambda q: len(q.t().chunk(5, 1)),
    "rows, the last first": lambda q: len([*reversed(q)]),
    "numel": lambda q: torch.numel(q),
    "nbytes": lambda q: q.nbytes,
    "shape of what is joined": lambda q: torch.cat([q, q]).shape[0],
    "size of a product": lambda q: (q @ q.t()).size(1),
    "size of a linear": lambda q: F.linear(q.new_ones(2, 16), q).size(-1),
    "numel of a mean": lambda q: q.mean(1).numel(),
    "shape of a softmax": lambda q: (q.new_ones(2, 16) @ q.t()).softmax(-1).shape[-1],
    "shape of a sum with numbers": lambda q: (q.sum(1) + 1).exp().shape[0],
    "shape of an embedding": lambda q: F.embedding(torch.arange(q.size(0)), q).shape[0],
    "shape of rows set side by side": lambda q: q[:, None].expand(-1, 2, -1).permute(1, 0, 2).shape[1],
    "shape of a window": lambda q: q[1:].shape[0] if q.shape[0] else 0,
    "shape of a convolution": lambda q: F.conv1d(q.new_ones(1, 16, 4), q[:, :, None]).shape[1],
    "shape of attention": lambda q: F.scaled_dot_product_attention(q[None], q[None], q[None]).shape[1],
    "shape of what is picked": lambda q: torch.stack([q, q], 2).select(2, 0).shape[0],
    "shape of what is squeezed in place": lambda q: F.linear(q, q.new_ones(1, 16)).squeeze_(-1).shape[0],
    "shape of rows by a vector": lambda q: F.linear(q, q.new_ones(16)).shape[0],
    "shape of a product that broadcasts": lambda q: (q.new_ones(1, 1, 16) @ q[:, :, None]).shape[0],
    "shape of a target that broadcasts": lambda q: torch.zeros(1, 16).masked_scatter(q > 9, q).shape[0],
    "stride of what is turned": lambda q: (q * 1).t().contiguous().stride(0),
    "offset of a row": lambda q: F.linear(q.new_ones(2, 16), q)[1:].storage_offset(),
    "dim sizes in a loop": lambda q: next(iter(q.sum(1).shape)),
    "an index that may be none": lambda q: picked(q * 2, 5),
    "a slice that a view may not have": lambda q: picked((q * 2).sum(1), 5),
}


def picked(t: Tensor, at: int) -> Any:
    try:
        return t[at].sum()
    except IndexError:
        return 3.0


class Remembering(nn.Module):
    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("q", torch.ones(2, 16))
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h * self.ask(self.q)
        self.q = torch.cat([self.q, h.detach()])[-9:]
        out: Tensor = self.c(h)
        return out


@pytest.mark.parametrize("name", sorted(ASKS))
def test_a_buffer_that_grows_has_the_size_that_it_has_now(name: str) -> None:
    torch.manual_seed(0)
    model = Remembering(ASKS[name]).eval()
    whole = copy.deepcopy(model)
    runtime = prepare_split(model, (torch.randn(3, 8),), split="after:a")
    for _ in range(3):
        x = torch.randn(3, 8)
        with torch.no_grad():
            theirs = whole(x)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), theirs)
        assert torch.equal(model.q, whole.q)


BESIDE: dict[str, Callable[[Any], float]] = {
    "another size": lambda model: float(model.a.weight.shape[0] > 9),
    "a dtype": lambda model: float(model.a.weight.dtype is torch.float32),
    "an index that may be none": lambda model: picked(model.q + 1, 20),
    "nothing": lambda model: 1.0,
}


@pytest.mark.parametrize("beside", sorted(BESIDE))
def test_sizes_of_a_tensor_that_no_op_of_the_plan_reads_count_beside_whatever_else_is_asked(beside: str) -> None:
    torch.manual_seed(0)
    model = Remembering(lambda q: len(torch.cat([q[:, 0], q[:, 0]])) + BESIDE[beside](model)).eval()
    model.forward = types.MethodType(lambda self, x: self.c(self.a(x) * self.ask(self.q)), model)
    runtime = prepare_split(model, (torch.randn(3, 8),), split="after:a")
    for rows in (3, 2, 25, 12):
        model.q = torch.ones(rows, 16)
        x = torch.randn(3, 8)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x)), rows


def scores(self: Any, x: Tensor) -> Tensor:
    found = self.a(x) @ self.p.t()
    return found / found.shape[1]


def best(self: Any, x: Tensor) -> Tensor:
    found = F.linear(self.a(x), self.p)
    return found.topk(min(5, found.size(-1)))[0]


def rows(self: Any, x: Tensor) -> Tensor:
    found = (self.a(x) @ self.p.t()).t()
    return torch.stack([row * (i + 1) for i, row in enumerate(found)])


class Prototypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.p = nn.Linear(8, 16), nn.Parameter(torch.randn(3, 16))


@pytest.mark.parametrize("forward", [scores, best, rows], ids=lambda f: f.__name__)
def test_a_head_of_more_classes_takes_the_place_of_one_with_few(forward: Callable[..., Tensor]) -> None:
    model = type("Model", (Prototypes,), {"forward": forward})().eval()
    runtime = prepare_split(model, (torch.randn(4, 8),), split="after:a")
    for classes in (3, 7, 2):
        model.p, x = nn.Parameter(torch.randn(classes, 16)), torch.randn(4, 8)
        with torch.no_grad():
            theirs = model(x)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), theirs)


class Cached(nn.Module):
    """A block whose keys and values grow at each call, and which asks sizes of what comes of them: none is their length."""

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        self.qkv, self.o, self.written_out = nn.Linear(16, 48), nn.Linear(16, 16), written_out
        self.register_buffer("k", torch.zeros(2, 2, 0, 8))
        self.register_buffer("v", torch.zeros(2, 2, 0, 8))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (t.view(b, n, 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        if self.written_out:
            y = (q @ self.k.transpose(-2, -1) / 8**0.5).softmax(-1) @ self.v
        else:
            y = F.scaled_dot_product_attention(q, self.k, self.v)
        out: Tensor = x + self.o(y.transpose(1, 2).reshape(b, n, d))
        return out


@pytest.mark.parametrize("written_out", [False, True])
def test_a_cache_whose_length_shows_nowhere_needs_no_other_plan_as_it_grows(written_out: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Cached(written_out) for _ in range(2))).eval()
    whole = copy.deepcopy(model)
    runtime = prepare_split(model, (torch.randn(2, 1, 16),), split="after:0")
    for _ in range(3):
        x = torch.randn(2, 1, 16)
        with torch.no_grad():
            theirs = whole(x)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), theirs)
    assert len(runtime.plans) == 1


@pytest.mark.parametrize("how", ["data", "swap", "assign"])
def test_a_size_that_changes_between_the_halves_is_refused(how: str) -> None:
    model = Remembering(len).eval()
    runtime = prepare_split(model, (torch.randn(3, 8),), split="after:a")
    for _ in range(2):
        model.q = torch.ones(2, 16)
        runtime.run_suffix(runtime.run_prefix(torch.randn(3, 8)))
    model.q = torch.ones(2, 16)
    boundary = runtime.run_prefix(torch.randn(3, 8))
    if how == "data":
        model.q.data = torch.ones(5, 16)
    elif how == "swap":
        torch.utils.swap_tensors(model.q, torch.ones(5, 16))
    else:
        model.q = torch.ones(5, 16)
    with pytest.raises((ModuleError, BoundaryError), match="'q' of the model"):
        runtime.run_suffix(boundary)


def test_without_the_sizes_that_decide_a_smaller_head_is_divided_by_the_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ariadne.guards.baseline.Baseline._facts
    monkeypatch.setattr(
        ariadne.guards.baseline.Baseline,
        "_facts",
        lambda self, asked: {} if asked is getattr(self, "_deciding", None) else plain(self, asked),
    )
    model = type("Model", (Prototypes,), {"forward": scores})().eval()
    runtime = prepare_split(model, (torch.randn(4, 8),), split="after:a")
    model.p, x = nn.Parameter(torch.randn(2, 16)), torch.randn(4, 8)
    with torch.no_grad():
        assert not torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
