"""Numbers that Python reads out of a weight at the first call alone, and what it makes of them and keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne.errors import ModuleError
from conformance.unit.filled_kit import double, split_in_the_middle


class Keeps(nn.Module):
    """Makes something of a weight when there is no table yet, and goes on with it whatever becomes of the weight."""

    def __init__(self, makes: Callable[[Any, torch.Tensor], Any], uses: Callable[[Any], Any], where: str) -> None:
        super().__init__()
        self.enter, self.leave, self.part = nn.Linear(4, 4), nn.Linear(4, 4), nn.Module()
        self.makes, self.uses, self.where = makes, uses, where
        self.table: torch.Tensor | None = None
        self.kept: Any = None
        self.part.kept = None  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        keeper: Any = self if self.where == "itself" else self.part
        if self.table is None:
            self.table = torch.arange(4.0)
            keeper.kept = self.makes(self, self.leave.weight.detach())
        result: torch.Tensor = self.leave(h + self.table) * self.uses(keeper.kept)
        return result


def _itself(kept: Any) -> Any:
    return kept


MADE: dict[str, tuple[Callable[[Any, torch.Tensor], Any], Callable[[Any], Any]]] = {
    "item": (lambda m, w: w.sum().item(), _itself),
    "float": (lambda m, w: float(w.sum()), _itself),
    "float, computed with": (lambda m, w: float(w.sum()) * 2 + 1, _itself),
    "int": (lambda m, w: int((w * 10).sum()), _itself),
    "int, computed with": (lambda m, w: int((w * 10).abs().sum()) % 7 + 1, _itself),
    "bool": (lambda m, w: bool(w.abs().sum() > 6), lambda kept: 2 if kept else 3),
    "text": (lambda m, w: f"{float(w.sum()):.2f}", float),
    "list": (lambda m, w: w.tolist(), lambda kept: kept[0][1]),
    "array": (lambda m, w: w.numpy().copy() * 2, lambda kept: torch.from_numpy(kept).sum()),
    "number of an array": (lambda m, w: float(w.numpy().sum() * 2), _itself),
    "dict": (lambda m, w: {"a": float(w.sum()) + 1}, lambda kept: kept["a"]),
    "tensor of a number": (lambda m, w: torch.tensor([float(w.sum()) + 1]), _itself),
    "filled tensor": (lambda m, w: torch.full((4,), float(w.sum()) + 1), _itself),
}


@pytest.mark.parametrize(
    ("made", "where"),
    [(made, where) for made in MADE for where in ("itself", "a part") if (made, where) != ("array", "a part")],
    ids=lambda value: value,
)
def test_a_weight_that_changes_after_the_first_call_is_never_taken_for_the_old_one(made: str, where: str) -> None:
    torch.manual_seed(0)
    model, x = Keeps(*MADE[made], where), torch.randn(3, 4)
    whole = copy.deepcopy(model)
    runtime = split_in_the_middle(model, x)
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))
    double(model, whole)
    if made == "filled tensor":  # whose op has the number: it is told of both, or what changed has a plan of its own
        try:
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))
        except ModuleError as error:
            assert "'leave.weight' at its first call" in str(error)  # noqa: PT017
        return
    with pytest.raises(ModuleError, match=r"makes the attribute '\w+' of .* of 'leave\.weight' at its first call"):
        runtime.run_suffix(runtime.run_prefix(x))


@pytest.mark.parametrize("where", ["itself", "a part"])
@pytest.mark.parametrize("made", MADE)
def test_a_model_that_ran_before_goes_on_with_what_it_keeps(made: str, where: str) -> None:
    torch.manual_seed(0)
    model, x = Keeps(*MADE[made], where), torch.randn(3, 4)
    model(x)
    whole = copy.deepcopy(model)
    runtime = split_in_the_middle(model, x)
    for batch in (3, 2):
        x = torch.randn(batch, 4)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))
        double(model, whole)


class ReadsAgain(nn.Module):
    """Reads a number out of a weight in each call, and keeps another thing that the first one made of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 4)
        self.wide: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wide is None:
            self.wide = x.shape[1]
        y: torch.Tensor = self.leave(self.enter(x)) * float(self.leave.weight.detach().sum()) * self.wide
        return y


def test_what_is_read_in_each_call_is_followed() -> None:
    torch.manual_seed(0)
    model, x = ReadsAgain(), torch.randn(3, 4)
    whole = copy.deepcopy(model)
    runtime = split_in_the_middle(model, x)
    for _ in range(3):
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))
        with torch.no_grad():
            for one in (model, whole):
                one.leave.weight.mul_(1.5)
