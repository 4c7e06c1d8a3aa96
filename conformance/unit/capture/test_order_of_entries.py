"""What forward puts into a dict stands there in the order in which forward put it, whichever side puts it."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import prepare_split

X = torch.ones(4, 4)
Fill = Callable[[Any, Tensor, Tensor], None]


class Logs(nn.Module):
    """(B, 4) to (B, 2), with what `fill` logs of both halves."""

    def __init__(self, logs: Any, fill: Fill) -> None:
        super().__init__()
        self.a, self.b, self.logs, self.fill = nn.Linear(4, 4), nn.Linear(4, 2), logs, fill

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        found: Tensor = self.b(h)
        self.fill(self.logs, h.detach(), found.detach())
        return found


def late_first(logs: Any, h: Tensor, out: Tensor) -> None:
    logs["out"].append(out)
    logs["h"].append(h)
    logs["n"].append(3)


def a_number_last(logs: Any, h: Tensor, out: Tensor) -> None:
    logs["mean"].append(h.mean().item())
    logs["n"].append(len(h))


def by_setdefault(logs: Any, h: Tensor, out: Tensor) -> None:
    logs.setdefault("out", []).append(out)
    logs.setdefault("n", []).append(1)
    logs["out"].append(2)


@pytest.mark.parametrize(
    ("kind", "fill"),
    [
        (lambda: defaultdict(list), late_first),
        (lambda: defaultdict(list), a_number_last),
        (dict, by_setdefault),
        (OrderedDict, by_setdefault),
    ],
)
def test_entries_come_in_the_order_of_forward(kind: Callable[[], Any], fill: Fill) -> None:
    model = Logs(kind(), fill).eval()
    whole = copy.deepcopy(model)
    runtime = prepare_split(model, (X,), split="after:a")
    for _ in range(2):
        with torch.no_grad():
            whole(X)
        runtime.run_suffix(runtime.run_prefix(X))
        assert [(k, len(v)) for k, v in model.logs.items()] == [(k, len(v)) for k, v in whole.logs.items()]
