"""A half from a file takes its inputs by position and by name, with defaults left out or passed, as its model does."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch
from torch import nn

import ariadne
from ariadne.errors import HalfError, InputError
from ariadne.halves.parameters import read_parameters, told_parameters

X, MASK = torch.randn(2, 4), torch.rand(2, 8)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0) -> Any:
        h = self.a(x).relu()
        return self.b((h if mask is None else h * mask) * scale)


def prefix_of(model: nn.Module, folder: Any, *examples: Any, **options: Any) -> Any:
    split = ariadne.prepare_split(model.eval(), examples[0], split="after:a", more_examples=examples[1:], **options)
    split.save(folder / "prefix.safetensors", side="prefix")
    split.save(folder / "suffix.safetensors", side="suffix")
    return ariadne.load(folder / "prefix.safetensors"), ariadne.load(folder / "suffix.safetensors")


@pytest.mark.parametrize("examples", [((X,), (X, MASK)), ((X, MASK), (X, None))], ids=["left out", "as None"])
def test_a_call_means_the_same_in_each_form(examples: Any, tmp_path: Any) -> None:
    model = Masked()
    prefix, suffix = prefix_of(model, tmp_path, *examples)
    for args, kwargs in (
        *(((X,), {}), ((X, None), {}), ((X,), {"mask": None}), ((), {"x": X})),
        *(((X, MASK), {}), ((X,), {"mask": MASK}), ((), {"mask": MASK, "x": X})),
    ):
        with torch.no_grad():
            assert torch.equal(model(*args, **kwargs), suffix.run_suffix(prefix.run_prefix(*args, **kwargs)))
    for args, kwargs in (((X, MASK, 1.0), {}), ((), {"mask": MASK}), ((X,), {"scale": 2.0}), ((X,), {"masks": MASK})):
        with pytest.raises(InputError, match=r"another structure|no plan in this half"):
            prefix.run_prefix(*args, **kwargs)


def test_a_number_that_was_passed_is_asked_for(tmp_path: Any) -> None:
    """The default of `scale` is another than what the plan has in it."""

    class Scaled(Masked):
        def forward(self, x: torch.Tensor, scale: int = 1) -> Any:
            return self.b(self.a(x) * scale)

    model = Scaled()
    prefix, suffix = prefix_of(model, tmp_path, (X, 2))
    with torch.no_grad():
        assert torch.equal(model(X, 2), suffix.run_suffix(prefix.run_prefix(x=X, scale=2)))
    with pytest.raises(InputError):
        prefix.run_prefix(X)


def test_what_a_decorator_or_a_hook_makes_of_a_call_is_not_guessed() -> None:
    class Open(Masked):
        def forward(self, *args: Any) -> Any:
            return self.b(self.a(args[0]))

    hooked = Masked()
    hooked.register_forward_pre_hook(lambda module, args: None)
    assert told_parameters(Open()) is told_parameters(hooked) is None


def test_parameters_are_read_as_they_were_told() -> None:
    told = json.loads(json.dumps(told_parameters(Masked())))
    assert told == [["x", 1, False], ["mask", 1, True, None], ["scale", 2, True]]
    found = read_parameters(told)
    assert found is not None
    assert [*found.parameters] == ["x", "mask", "scale"]
    assert found.parameters["scale"].default not in (1.0, inspect.Parameter.empty)


@pytest.mark.parametrize(
    "told",
    [
        *([["x", 1]], [["x", 3, False]], [["x", True, False]], [["x", 1, False, 2]], [["x", 1, True, [1]]], [["x y", 1, False]]),
        *([["x", 1, False]] * 2, [["x", 2, False], ["y", 1, False]], [["x", 1, True, 1], ["y", 1, False]], {}, "x"),
        [[f"x{i}", 1, False] for i in range(257)],
    ],
)  # fmt: skip
def test_parameters_that_no_function_has_are_refused(told: Any) -> None:
    with pytest.raises(HalfError):
        read_parameters(told)
