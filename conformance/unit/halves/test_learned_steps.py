"""Quantisers that learn their step, label caches by device and scripted functions of a script: each is cut and kept in a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne.halves.atoms import fetch, place


class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x, step)
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, step = ctx.saved_tensors
        return grad, (grad * x).sum().view_as(step)


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.o, self.step = nn.Linear(4, 6), nn.Linear(6, 2), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(Step.apply(self.a(x), self.step))
        return out


class Stepping(torch.autograd.Function):
    """Writes into a parameter that it is given, as no plan may overlook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        step.mul_(0.5)
        return x * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Halved(Quantised):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor(8.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(Stepping.apply(self.a(x), self.step) * self.step)
        return out


def _by_data(step: Tensor) -> None:
    step.data.mul_(0.5)


def _by_detach(step: Tensor) -> None:
    step.detach().mul_(0.5)


def _by_view(step: Tensor) -> None:
    with torch.no_grad():
        step.view(1).mul_(0.5)


class Unseen(nn.Module):
    """A function halves a parameter that it is given through another tensor of its memory."""

    def __init__(self, write: Callable[[Tensor], None], before: bool) -> None:
        super().__init__()
        self.a, self.m, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.step, self.before = nn.Parameter(torch.tensor(-1.0)), before

        class Halving(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
                write(step)
                return x * step

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
                return grad, None

        self.halve = Halving.apply

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        if self.before:
            return self.b(self.halve(self.m(h * self.step) * 1, self.step))
        return self.b(self.m(self.halve(h * 1, self.step)))


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 6)
        self.rows, self.labels = 0, dict[torch.device, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        if self.rows != len(h) or h.device not in self.labels:
            self.labels[h.device], self.rows = torch.arange(len(h)), len(h)
        return nn.functional.cross_entropy(h @ h.T, self.labels[h.device])


def made(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return cls()


def numbers(rows: int) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("rows", [2, 3])
def test_a_step_that_is_passed_as_a_parameter_is_learned_across_the_cut_before_it(rows: int) -> None:
    model, whole = made(Quantised), made(Quantised)
    spec = ariadne.SplitSpec(boundary="after:a", trainable=True)
    split = ariadne.prepare_split(model, (numbers(2),), split=spec, fallback="refuse")
    boundary = split.run_training_prefix(numbers(rows))
    loss, gradients = split.train_suffix(boundary, torch.zeros(rows, 2), loss_fn=nn.functional.mse_loss)
    split.backward_prefix(boundary, gradients)
    expected = nn.functional.mse_loss(whole(numbers(rows)), torch.zeros(rows, 2))
    expected.backward()
    assert torch.equal(loss, expected)
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)


@pytest.mark.parametrize("cls", [Quantised, Labelled])
def test_the_half_after_the_cut_is_kept_in_a_file(cls: type[nn.Module], tmp_path: Path) -> None:
    model = made(cls).eval()
    split = ariadne.prepare_split(model, (numbers(2),), split="after:a", fallback="refuse")
    split.save(tmp_path / "suffix.safetensors", side="suffix")
    half = ariadne.load(tmp_path / "suffix.safetensors", allow=[place(Step)])
    assert torch.equal(half.run_suffix(split.run_prefix(numbers(2))), model(numbers(2)))


@pytest.mark.parametrize("allow", [[Step], place(Step)], ids=["a class", "a name alone"])
def test_what_is_allowed_is_named_in_a_list(allow: Any, tmp_path: Path) -> None:
    split = ariadne.prepare_split(made(Quantised).eval(), (numbers(2),), split="after:a", fallback="refuse")
    split.save(tmp_path / "suffix.safetensors", side="suffix")
    with pytest.raises(ariadne.errors.SpecError, match="allow= takes a list of names"):
        ariadne.load(tmp_path / "suffix.safetensors", allow=allow)


def test_a_parameter_that_a_function_writes_is_written_once_on_one_side() -> None:
    model, whole = made(Halved).eval(), made(Halved).eval()
    split = ariadne.prepare_split(model, (numbers(2),), split="percent:50", fallback="refuse")
    for rows in (2, 3):
        with torch.no_grad():
            assert torch.equal(split.run_suffix(split.run_prefix(numbers(rows))), whole(numbers(rows)))
    assert torch.equal(model.step, whole.step)


@pytest.mark.parametrize("before", [False, True], ids=["first", "after it was read"])
@pytest.mark.parametrize("write", [_by_data, _by_detach, _by_view])
def test_a_parameter_that_a_function_writes_unseen_is_written_by_each_call(write: Any, before: bool) -> None:
    torch.manual_seed(0)
    model = Unseen(write, before).eval()
    torch.manual_seed(0)
    whole = Unseen(write, before).eval()
    for cut in ("after:a", "after:m", "percent:50"):
        split = ariadne.prepare_split(model, (numbers(2),), split=cut, fallback="refuse")
        assert torch.equal(model.step, whole.step), "preparing leaves the model as it was"
        for rows in (2, 3):
            with torch.no_grad():
                assert torch.equal(split.run_suffix(split.run_prefix(numbers(rows))), whole(numbers(rows)))
        assert torch.equal(model.step, whole.step)


def test_a_scripted_function_of_the_script_itself_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def quick_gelu(x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)

    quick_gelu.__module__, quick_gelu.__qualname__ = "__main__", "quick_gelu"
    scripted = torch.jit.script(quick_gelu)
    monkeypatch.setattr(sys.modules["__main__"], "quick_gelu", scripted, raising=False)
    assert place(scripted) == "__main__:quick_gelu"
    assert fetch(place(scripted)) is scripted
