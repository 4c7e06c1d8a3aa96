"""Inputs that are shown beforehand stay as they are, also where forward uses up or changes what it is given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import PythonSplit, SplitRuntime, SplitSpec, prepare_split
from ariadne.errors import HalfError


class Net(nn.Module):
    def __init__(self, take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.take = nn.Linear(4, 8), nn.Linear(8, 2), take

    def forward(self, given: Any, beside: Any = None) -> Tensor:
        return self.last(self.first(self.take(given)))


def popped(given: dict[str, Tensor]) -> Tensor:
    return given.pop("x")


def popped_from_list(given: list[Tensor]) -> Tensor:
    return given.pop()


def popped_inside(given: dict[str, list[Tensor]]) -> Tensor:
    return given["parts"].pop(0)


def replaced(given: dict[str, Tensor]) -> Tensor:
    x = given["x"]
    given["x"] = x + 1
    return x


def written(given: Tensor) -> Tensor:
    return given.mul_(2)


def assigned(given: SimpleNamespace) -> Tensor:
    x, given.x = given.x, given.x * 3
    return x


def x(batch: int) -> Tensor:
    return torch.arange(4.0 * batch).view(batch, 4)


CASES: list[tuple[Callable[[Any], Tensor], Callable[[int], Any]]] = [
    (popped, lambda n: {"x": x(n)}),
    (popped_from_list, lambda n: [x(n)]),
    (popped_inside, lambda n: {"parts": [x(n)]}),
    (replaced, lambda n: {"x": x(n)}),
    (written, x),
    (assigned, lambda n: SimpleNamespace(x=x(n))),
]


def split(take: Callable[[Any], Tensor], example: Any, trainable: bool = False, **options: Any) -> Any:
    return prepare_split(Net(take), (example,), split=SplitSpec("after:first", trainable=trainable), **options)


@pytest.mark.parametrize("do", ["learn", "warmup"])
@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize(("take", "make"), CASES)
def test_an_example_is_left_whole(
    take: Callable[[Any], Tensor], make: Callable[[int], Any], trainable: bool, do: str
) -> None:
    runtime: SplitRuntime = split(take, make(2), trainable)
    more = make(1)
    for _ in range(2):
        runtime.learn((more,)) if do == "learn" else runtime.warmup(more)
        assert str(more) == str(make(1))
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(make(1))), runtime.model(make(1)))


@pytest.mark.parametrize("do", ["learn", "warmup"])
@pytest.mark.parametrize(("take", "make"), CASES)
def test_a_python_split_leaves_it_whole(take: Callable[[Any], Tensor], make: Callable[[int], Any], do: str) -> None:
    def counted(given: Any) -> Tensor:
        found = take(given)
        return found * float(torch.rand(1).item() > -1) * float(str(id(given)) != "")

    runtime: PythonSplit = split(counted, make(2), fallback="python")
    more = make(1)
    runtime.learn((more,)) if do == "learn" else runtime.warmup(more)
    assert str(more) == str(make(1))


@pytest.mark.parametrize(("take", "make"), CASES)
def test_saving_leaves_it_whole(take: Callable[[Any], Tensor], make: Callable[[int], Any], tmp_path: Path) -> None:
    """Also where no file can hold what forward does."""
    runtime, more = split(take, make(2)), make(1)
    for side in ("prefix", "suffix"):
        with suppress(HalfError):
            runtime.save(tmp_path / side, side=side, examples=[(more,)])
        assert str(more) == str(make(1))


class Box:
    x: Any = None


@pytest.mark.parametrize("do", ["learn", "warmup"])
def test_an_object_among_the_inputs_is_left_as_it_was(do: str) -> None:
    class Kept(Net):
        def forward(self, given: Any, beside: Any = None) -> Tensor:
            beside.x = given + 1
            return super().forward(given)

    runtime = prepare_split(Kept(lambda t: t), (x(2), Box()), split="after:first")
    box = Box()
    runtime.learn((x(1), box)) if do == "learn" else runtime.warmup(x(1), box)
    assert not vars(box)
