"""What forward makes of its first inputs and keeps is refused where later calls go on with it, be its numbers alike by chance."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.compare import difference
from ariadne.errors import UnsupportedError

Body = Callable[[Any, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """A forward of which `body` makes a part, of hidden values and of tokens."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave, self.embed = nn.Linear(4, 8), nn.Linear(8, 3), nn.Embedding(20, 8)
        self.body = body
        self.kept: Any = None
        self.key: Any = None
        self.cache: dict[Any, Any] = {}

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        found: Tensor = self.leave(self.body(self, self.enter(x), tokens))
        return found


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(5, 4, generator=numbers), torch.randint(0, 20, (8,), generator=numbers)


def once(make: Callable[[Any, Tensor, Tensor], Any], use: Callable[[Any, Any, Tensor], Tensor]) -> Body:
    """A body that makes something at its first call and uses it in each."""

    def body(m: Any, h: Tensor, tokens: Tensor) -> Tensor:
        if m.kept is None:
            m.kept = make(m, h, tokens)
        return use(m, h, m.kept)

    return body


def times(m: Any, h: Tensor, kept: Tensor) -> Tensor:
    return (h * kept).relu()


def _in_a_dict(m: Any, h: Tensor, tokens: Tensor) -> Tensor:
    return h.masked_fill(m.cache.setdefault("mask", tokens > 9), 0.0)


def _asked(m: Any, h: Tensor, kept: Tensor) -> Tensor:
    return h * 2 if kept.sum() > 76 else h


CARRIED: dict[str, Body] = {
    "embedded tokens": once(lambda m, h, t: m.embed(t).mean(0).detach(), times),
    "the tokens themselves": once(lambda m, h, t: t, lambda m, h, kept: h + m.embed(kept).mean(0)),
    "a mask in a dict": _in_a_dict,
    "in an object": once(lambda m, h, t: SimpleNamespace(at=(t > 9,)), lambda m, h, kept: h * kept.at[0]),
    "the largest channels": once(lambda m, h, t: h.abs().mean(0).topk(4)[1], lambda m, h, at: h.index_fill(1, at, 0.0)),
    "where the largest is": once(lambda m, h, t: h.flatten().argmax(), lambda m, h, at: h + m.embed(at % 20)),
    "a question about it": once(lambda m, h, t: t.clone(), _asked),
    "written in part": once(
        lambda m, h, t: t.float(), lambda m, h, kept: h * kept[:8].index_fill_(0, kept.new_zeros(1).long(), 1.0)
    ),
}


def split(model: Net) -> Any:
    return prepare_split(model, inputs(9), split=SplitSpec("after:enter", batch_dim="none"))


@pytest.mark.parametrize("name", CARRIED)
def test_what_later_calls_take_from_the_first_is_refused_until_it_is_there(name: str) -> None:
    model = Net(CARRIED[name]).eval()
    with pytest.raises(UnsupportedError, match=r"sets up .*(kept|cache).* when it first runs.*Run the model once"):
        split(model)
    model(*inputs(9))
    runtime = split(model)
    for seed in (0, 1):
        with torch.no_grad():
            whole = model(*inputs(seed))
        assert difference(whole, runtime.run_suffix(runtime.run_prefix(*inputs(seed)))) is None


def _equal_keys(m: Any, h: Tensor, tokens: Tensor) -> Tensor:
    if m.key is None or not torch.equal(m.key, tokens):
        m.key, m.kept = tokens.clone(), m.embed(tokens).mean(0).detach()
    return times(m, h, m.kept)


def _plain_keys(m: Any, h: Tensor, tokens: Tensor) -> Tensor:
    key = tuple(tokens.tolist())
    if key not in m.cache:
        m.cache[key] = m.embed(tokens).mean(0).detach()
    return times(m, h, m.cache[key])


def _scratch(m: Any, h: Tensor, tokens: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = torch.empty(8)
    return times(m, h, m.kept.copy_(tokens))


def _first_seen(m: Any, h: Tensor, tokens: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = (h.detach(), tokens)
    return times(m, h, m.embed(tokens).mean(0))


TAKEN: dict[str, Body] = {
    "positions": once(lambda m, h, t: torch.arange(t.shape[0]).expand_as(t), times),
    "of its form": once(lambda m, h, t: torch.ones_like(t).cumsum(0) + t.new_full((8,), 2), times),
    "of its type": once(lambda m, h, t: torch.ones(8).type_as(h).to(t), times),
    "of a weight": once(lambda m, h, t: m.embed.weight[:1].detach() * 2, times),
    "asked by its equal": _equal_keys,
    "asked by plain keys": _plain_keys,
    "written over in each call": _scratch,
    "used by no call": _first_seen,
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_follows_sizes_alone_or_is_made_anew_for_other_inputs_is_taken(name: str) -> None:
    model, whole = Net(TAKEN[name]).eval(), Net(TAKEN[name]).eval()
    runtime = split(model)
    for seed in (0, 1, 0):
        with torch.no_grad():
            expected = whole(*inputs(seed))
        assert difference(expected, runtime.run_suffix(runtime.run_prefix(*inputs(seed)))) is None
