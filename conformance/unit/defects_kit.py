"""What the tests of defects share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ariadne import SplitRuntime, SplitSpec, prepare_split
from ariadne.compare import difference
from conformance.unit.trap_kit import Fn, numbers


def prepared(function: Callable[..., Any], batch: int = 2, upto: int = 12) -> tuple[nn.Module, SplitRuntime]:
    torch.manual_seed(0)
    model = Fn(function, a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
    return model, prepare_split(model, (numbers(batch, 4),), split=SplitSpec("50%", dynamic_batch=(1, upto)))


def equal_at(batches: Iterable[int], model: nn.Module, runtime: SplitRuntime) -> None:
    for batch in batches:
        x = numbers(batch, 4, seed=batch)
        with torch.no_grad():
            expected = model(x)
        assert difference(expected, runtime.run_suffix(runtime.run_prefix(x))) is None, batch


# Sizes that follow the batch in steps


def parts(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(torch.stack([p.sum(0) for p in m.a(x).split(5)]))


def first_six(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = m.a(x)[:6]
    return m.b(kept.sum(0) / kept.shape[0])


# Writes between the prefix and the suffix


def skips(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = m.a(x)
    return m.b(y.relu()) + x.t().t(), y
