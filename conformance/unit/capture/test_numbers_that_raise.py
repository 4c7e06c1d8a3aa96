"""Numbers that raise at one batch alone, that are a float here and a size there, or that are no batch at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from ariadne import SplitSpec, prepare_split
from ariadne.errors import CaptureError
from conformance.unit.trap_kit import Fn, numbers, same


def shares(s: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        gain = 1 / (x.shape[0] - 4)
    except ZeroDivisionError:
        gain = 9.0
    return s.b(s.a(x) * gain)


def rests(s: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        gain = 7 % (x.size(0) - 4) + 1
    except ZeroDivisionError:
        gain = 9
    return s.b(s.a(x) * gain)


def powers(s: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        gain = (len(x) - 4) ** -1
    except ZeroDivisionError:
        gain = 9.0
    return s.b(s.a(x) * gain)


@pytest.mark.parametrize("forward", [shares, rests, powers])
@pytest.mark.parametrize("example", [3, 4])
def test_a_division_by_zero_that_only_one_batch_makes(
    forward: Callable[[Any, torch.Tensor], torch.Tensor], example: int
) -> None:
    model = Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6)).eval()
    runtime = prepare_split(model, (numbers(example, 6),), split=SplitSpec("50%", dynamic_batch=(1, 8)))
    for batch in (3, 4, 1, 7, 4):
        x = numbers(batch, 6, seed=batch)
        with torch.no_grad():
            same(model(x), runtime.run_suffix(runtime.run_prefix(x)), f"batch {batch}")


def grown(s: Any, x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > s.places.shape[0]:
        s.places = torch.arange(float(x.shape[0]))[:, None]
    return s.b(s.a(x) + s.places[: x.shape[0]])


def test_a_number_that_is_a_float_in_one_place_and_a_size_in_another() -> None:
    whole = Fn(grown, a=nn.Linear(6, 6), b=nn.Linear(6, 6)).eval()
    whole.register_buffer("places", torch.arange(2.0)[:, None], persistent=False)
    model = copy.deepcopy(whole)
    runtime = prepare_split(model, (numbers(2, 6),), split=SplitSpec("50%", dynamic_batch=(1, 8)))
    for batch in (3, 6, 8, 2):
        x = numbers(batch, 6, seed=batch)
        with torch.no_grad():
            same(whole(x), runtime.run_suffix(runtime.run_prefix(x)), f"batch {batch}")


def test_packed_sequences_as_inputs() -> None:
    model = Fn(lambda s, p: s.b(s.r(p)[1][-1]), r=nn.GRU(6, 6), b=nn.Linear(6, 6)).eval()
    packed = pack_sequence([numbers(n, 6, seed=n) for n in (3, 2, 1)])
    runtime = prepare_split(model, (packed,), split=SplitSpec("50%", dynamic_batch=(1, 16)))
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(packed)), model(packed))
    with pytest.raises(CaptureError, match=r"batch, 6, lies outside of dynamic_batch \(1, 4\).* raises RuntimeError"):
        prepare_split(model, (packed,), split=SplitSpec("50%", dynamic_batch=(1, 4)))
