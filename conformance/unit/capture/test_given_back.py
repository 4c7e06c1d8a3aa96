"""An attribute that forward assigns the very object that it holds, as `self.table = self.table.to(x.device)`, does not change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import prepare_split
from ariadne.errors import UnsupportedError

Body = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """A forward that begins with `body`, which gives what its hidden values are multiplied with."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave, self.body = nn.Linear(4, 4), nn.Linear(4, 2), body
        self.table = torch.randn(1, 4)
        self.held = {"table": torch.randn(1, 4)}
        self.rows = [torch.randn(1, 4)]
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(self.enter(x) * self.body(self, x))
        return found


def _attribute(m: Any, x: Tensor) -> Tensor:
    m.table = m.table.to(x.device)
    return m.table  # type: ignore[no-any-return]


def _in_a_row(m: Any, x: Tensor) -> Tensor:
    m.table = m.table.to(x).contiguous()
    m.table = m.table.type_as(x)
    return m.table  # type: ignore[no-any-return]


def _in_a_dict(m: Any, x: Tensor) -> Tensor:
    m.held["table"] = m.held["table"].to(x.device)
    return m.held["table"]  # type: ignore[no-any-return]


def _in_a_list(m: Any, x: Tensor) -> Tensor:
    m.rows[0] = m.rows[0].float()
    return m.rows[0]  # type: ignore[no-any-return]


def _beside_a_store(m: Any, x: Tensor) -> Tensor:
    m.table, m.last = m.table.to(x.device), x * 2
    return m.table  # type: ignore[no-any-return]


@pytest.mark.parametrize("body", [_attribute, _in_a_row, _in_a_dict, _in_a_list, _beside_a_store])
def test_what_an_op_gives_back_as_it_was_may_stand_in_its_own_place(body: Body) -> None:
    model = Net(body).eval()
    whole, table = copy.deepcopy(model), model.table
    runtime = prepare_split(model, (torch.randn(2, 4),), split="after:enter")
    assert runtime.plan.captured_by == "symbolic"
    for batch in (2, 3, 1):
        x = torch.randn(batch, 4)
        with torch.no_grad():
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))
        assert whole.last is None or torch.equal(model.last, whole.last)
    assert model.table is table


def _other_type(m: Any, x: Tensor) -> Tensor:
    m.table = m.table.double()
    return m.table.float()  # type: ignore[no-any-return]


def _other_place(m: Any, x: Tensor) -> Tensor:
    m.table, m.rows[0] = m.rows[0].to(x.device), m.table.to(x.device)
    return m.table  # type: ignore[no-any-return]


@pytest.mark.parametrize("body", [_other_type, _other_place])
def test_another_tensor_in_its_place_is_refused(body: Body) -> None:
    with pytest.raises(UnsupportedError, match="'one tensor' to 'another'"):
        prepare_split(Net(body).eval(), (torch.randn(2, 4),), split="after:enter")
