"""Examples of zeros, of small numbers, of NaN: what forward keeps is seen by calls that are unlike them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import prepare_split
from ariadne.capture import ways
from ariadne.capture.example import Example
from ariadne.compare import difference
from ariadne.errors import UnsupportedError

ZEROS, LARGE, THREE = torch.zeros(2, 4), torch.full((2, 4), 9.0), torch.full((3, 4), 7.0)


class Kept(nn.Linear):
    """(B, 4) -> (B, 4), by `way`, which may keep something here; for zeros it gives zeros or less, whatever was kept."""

    def __init__(self, way: Callable[[Any, torch.Tensor, torch.Tensor], Any], **kept: Any) -> None:
        super().__init__(4, 4)
        self.way = way
        self.register_buffer("total", torch.zeros(()))
        for name, value in kept.items():
            setattr(self, name, value)
        with torch.no_grad():
            self.weight.copy_(torch.arange(16.0).view(4, 4) / 9)
            self.bias.fill_(-1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 4) -> (B, 4)."""
        return self.way(self, x, super().forward(x).relu())  # type: ignore[no-any-return]


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 1.0


def a_first_call_that_does_more(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if not net.done:
        net.done, h = True, h.clamp(-2, 2)
    return h


def more_where_the_batch_is_another(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if net.last != x.shape[0]:
        net.last, h = x.shape[0], h.clamp(-2, 2)
    return h


def more_beside_a_table(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if not hasattr(net, "places"):
        net.places, h = torch.arange(4.0), h.clamp(-2, 2)
    return h + net.places


def a_sum_that_begins_at_zero(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    net.table["sum"] = net.table.get("sum", torch.zeros(())) + h.detach().sum()
    return h + net.table["sum"]


def a_view_of_another_kind(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    weight = net.weight if net.done else net.weight.t()
    net.done = True
    return h @ weight


def a_buffer_that_the_first_call_clears(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if not net.done:
        net.done = True
        net.total.zero_()
    net.total += h.detach().sum()
    return h + net.total


def beside_a_scripted_function(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    factor = 3 if net.done else 2
    net.done = True
    return scripted(h) * factor


def a_number_of_the_first_inputs(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if net.last is None:
        net.last = x.abs().max().item()
    return h / (1 + net.last)


WAYS = [
    a_first_call_that_does_more, more_where_the_batch_is_another, more_beside_a_table, a_sum_that_begins_at_zero,
    a_view_of_another_kind, a_buffer_that_the_first_call_clears, beside_a_scripted_function, a_number_of_the_first_inputs,
]  # fmt: skip


def kept(way: Callable[..., Any]) -> nn.Module:
    return nn.Sequential(nn.Identity(), Kept(way, done=False, last=None, table={}), nn.LeakyReLU()).eval()


def held(model: nn.Module, example: torch.Tensor, *calls: torch.Tensor) -> None:
    """The split gives what the model gives, call by call, from the example on."""
    whole, split = model, copy.deepcopy(model)
    runtime = prepare_split(split, (example,), split="after:1")
    for i, x in enumerate((example, *calls)):
        found = difference(whole(x), runtime.run_suffix(runtime.run_prefix(x)))
        assert found is None, (i, found)


EXAMPLES = {"zeros": ZEROS, "not a number": torch.full((2, 4), float("nan")), "one sample": torch.zeros(1, 4)}


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_is_kept_is_seen_whatever_the_example_shows(way: Callable[..., Any], example: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError):
        held(kept(way), example, LARGE, THREE, LARGE)


@pytest.mark.planted
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_without_calls_unlike_the_example_it_would_be_taken_for_a_cache(
    way: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "differs_by_state", lambda *_: None)
    monkeypatch.setattr(Example, "lively", lambda self, sign=1: self.turned())
    example = EXAMPLES["not a number" if way is a_number_of_the_first_inputs else "zeros"]
    with pytest.raises(AssertionError):
        held(kept(way), example, LARGE, LARGE, THREE)


def test_other_floats_lie_on_both_sides_of_zero_and_are_finite_in_every_type() -> None:
    half = torch.full((4, 3), float("inf"), dtype=torch.bfloat16)
    wide = torch.zeros(3, dtype=torch.float64).expand(4, 3)
    example = Example.of((half, wide, torch.ones(4, dtype=torch.int64), torch.zeros(())), {})
    first, second, numbers, alone = example.lively().leaves
    for t in (first, second):
        assert torch.isfinite(t).all()
        assert t.min() < -10 or t.max() > 10
        assert (t < 0).any()
        assert (t > 0).any()
    assert first.dtype is torch.bfloat16
    assert not numbers.is_floating_point()
    assert torch.isfinite(alone)


def test_a_loop_that_waits_for_small_numbers_is_ended() -> None:
    def way(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
        net.table[len(x)] = 1
        while bool((x.abs() > 50).any()):
            x = x + 0
        return h

    held(kept(way), LARGE, LARGE, THREE)


def test_what_raises_for_other_numbers_is_captured_as_before() -> None:
    def way(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
        net.table[len(x)] = 1
        if bool((x < 0).any()):
            raise ValueError("numbers below zero")
        return h

    held(kept(way), LARGE, LARGE, THREE)


# What one path keeps, and another reads


def hot(x: torch.Tensor) -> bool:
    return bool((x > 1).any())


def a_tensor(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if hot(x) and net.last is None:
        net.last = torch.arange(4.0)
    return h if net.last is None else h + net.last


def a_set(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if hot(x):
        net.met.add("hot")
    return h + ("hot" in net.met)


def an_object(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if hot(x):
        net.box.hot = True
    return h + getattr(net.box, "hot", False)


def a_key(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if hot(x):
        net.table["hot"] = 1
    return h + len(net.table)


def a_flag(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if hot(x):
        net.done = True
    return h + net.done


def a_weights_sum(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if hot(x) and net.last is None:
        net.last = net.weight.detach().sum()
    return h if net.last is None else h + net.last


def a_table_of_its_own(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if len(x) not in net.table:
        net.table[len(x)] = torch.arange(4.0) * len(x)
    return h + net.table[len(x)] if hot(x) else h - net.table[len(x)]


def a_list_that_nothing_reads(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if hot(x):
        net.seen.append(1)
    return h * (2 if hot(x) else 3)


class Box:
    """Holds what is set."""


def on_paths(way: Callable[..., Any]) -> nn.Module:
    held_too: dict[str, Any] = {"met": set(), "box": Box(), "seen": []}
    layer = Kept(way, done=False, last=None, table={}, **held_too)
    return nn.Sequential(nn.Identity(), layer, nn.LeakyReLU()).eval()


ORDERS = {"from the cold": (ZEROS, LARGE, ZEROS, THREE), "from the hot": (LARGE, ZEROS, LARGE, ZEROS)}
CROSSING = [a_tensor, a_set, an_object, a_key]
ALONE = [a_flag, a_weights_sum, a_table_of_its_own, a_list_that_nothing_reads]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("way", CROSSING, ids=lambda way: way.__name__)
def test_what_one_path_leaves_and_another_reads_is_refused(way: Callable[..., Any], order: tuple[Any, ...]) -> None:
    with pytest.raises(UnsupportedError, match="on one path, by what it reads in a tensor, that another path's result"):
        held(on_paths(way), *order)


def test_so_it_is_where_the_paths_are_shown_beforehand() -> None:
    with pytest.raises(UnsupportedError, match="that another path's result follows"):
        prepare_split(on_paths(a_set), (ZEROS,), split="after:1", more_examples=[(LARGE,)])


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("way", ALONE, ids=lambda way: way.__name__)
def test_what_plans_put_there_or_each_path_makes_by_itself_is_followed(
    way: Callable[..., Any], order: tuple[Any, ...]
) -> None:
    held(on_paths(way), *order)


@pytest.mark.planted
@pytest.mark.parametrize("way", CROSSING, ids=lambda way: way.__name__)
def test_without_a_call_on_the_other_path_it_would_be_lost(
    way: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "refuse_paths_beside", lambda *_: None)
    with pytest.raises(AssertionError):
        held(on_paths(way), LARGE, ZEROS, LARGE, ZEROS)


# What such calls must not do


def follows(way: Callable[..., Any], *calls: torch.Tensor) -> None:
    held(on_paths(way), *calls)


def test_a_search_that_catches_every_error_is_ended() -> None:
    def way(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
        net.table.setdefault(len(x), torch.ones(len(x), 1))
        y, step = h * net.table[len(x)], 1.0
        while True:
            try:
                z = y - step * y.pow(3)
                if not torch.isfinite(z).all():
                    raise RuntimeError("diverged")
                if (z - y).abs().max() < 1e2:
                    return z
                y = z.clamp(-1e3, 1e3)
            except RuntimeError:
                step /= 1 + 1e-9

    follows(way, ZEROS, ZEROS)


def test_a_flag_that_one_path_sets_and_another_asks_has_a_plan_for_each() -> None:
    def way(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
        if len(x) == 1:
            net.last = 1.0
            return h
        return h * 3 if net.last is not None and x.sum() <= 20 else h

    follows(way, LARGE, ZEROS + 2, LARGE[:1], ZEROS + 2, LARGE)


def test_what_is_looked_at_before_it_is_used_is_none_the_less_a_cache() -> None:
    def way(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
        if net.last is None or not torch.isfinite(net.last).all():
            net.last = torch.arange(4.0).sin()
        return h * net.last

    follows(way, LARGE, THREE, LARGE)


def test_random_numbers_stand_as_they_did_where_other_numbers_lead_to_draws() -> None:
    def way(net: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
        if net.last is None:
            net.last = torch.ones(4)
        if bool(x.abs().max() > 90):
            random.shuffle([1, 2, 3])
        return h * net.last

    before = random.getstate()
    prepare_split(on_paths(way), (LARGE,), split="after:1")
    assert random.getstate() == before
