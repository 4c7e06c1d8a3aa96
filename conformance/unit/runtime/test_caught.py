"""An op that raises where forward may catch it: no plan has that clause, so the error is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne import PythonSplit, prepare_split
from ariadne.errors import UnsupportedError, WitnessError
from ariadne.runtime.caught import _has_clause

FULL, SINGULAR = torch.eye(6)[:, :4] * 2, torch.zeros(6, 4)


class Factor(nn.Module):
    """Raises for a singular matrix; a `with` is no clause."""

    def forward(self, x: Tensor) -> Tensor:
        with nullcontext():
            return torch.linalg.cholesky(x.t() @ x)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.factor, self.head = nn.Linear(4, 4), Factor(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        return self.head(h @ self.factor(x))  # type: ignore[no-any-return]


class Catches(Bare):
    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        try:
            factor = self.factor(x)
        except RuntimeError:
            factor = torch.eye(4)
        return self.head(h @ factor)  # type: ignore[no-any-return]


class CatchesAll(Bare):
    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        try:
            factor = self.factor(x)
        except:  # noqa: E722 - as some do
            factor = torch.eye(4)
        return self.head(h @ factor)  # type: ignore[no-any-return]


class Suppresses(Bare):
    def forward(self, x: Tensor) -> Tensor:
        h, factor = self.encoder(x), torch.eye(4)
        with suppress(RuntimeError):
            factor = self.factor(x)
        return self.head(h @ factor)  # type: ignore[no-any-return]


class Helped(Bare):
    def safe(self, x: Tensor) -> Tensor:
        try:
            return self.factor(x)  # type: ignore[no-any-return]
        except RuntimeError:
            return torch.eye(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x) @ self.safe(x))  # type: ignore[no-any-return]


class Quiet:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> bool:
        return True


class SuppressesByItsOwn(Bare):
    def forward(self, x: Tensor) -> Tensor:
        h, factor = self.encoder(x), torch.eye(4)
        with Quiet():
            factor = self.factor(x)
        return self.head(h @ factor)  # type: ignore[no-any-return]


class Solver:
    """An object that is no module."""

    def safe(self, x: Tensor) -> Tensor:
        try:
            return torch.linalg.cholesky(x.t() @ x)
        except RuntimeError:
            return torch.eye(4)


class HelpedByAnObject(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.solver = Solver()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x) @ self.solver.safe(x))  # type: ignore[no-any-return]


HELPERS = ModuleType("helpers")
HELPERS.__dict__["safe"] = FunctionType(Solver.safe.__code__, {**globals(), "__name__": "helpers"})


class HelpedByAModule(Bare):
    """One of Python's: `import helpers`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x) @ HELPERS.safe(self, x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "kind", [CatchesAll, Suppresses, SuppressesByItsOwn, Helped, HelpedByAnObject, HelpedByAModule]
)
def test_clauses_of_other_forms_are_seen(kind: type[Bare]) -> None:
    runtime = prepare_split(kind(), (FULL,), split="50%")
    with pytest.raises(WitnessError, match="has an except clause"):
        runtime.run_suffix(runtime.run_prefix(SINGULAR))


@pytest.mark.parametrize(
    ("value", "may_go_on"),
    [("True", True), ("1", True), ("error", True), ("error and True", True), ("None", False), ("False", False)],
)
def test_a_with_that_ends_in_something_true_goes_on(value: str, may_go_on: bool) -> None:
    made: dict[str, Any] = {}
    exec(f"def __exit__(self, *error):\n    return {value}", made)
    assert _has_clause(made["__exit__"].__code__) == may_go_on


@pytest.mark.parametrize("cut", ["after:encoder", "after:factor"])
def test_an_error_that_forward_may_catch_is_refused_by_name(cut: str) -> None:
    model = Catches()
    runtime = prepare_split(model, (FULL,), split=cut)
    told = r"an op of 'factor' raised _LinAlgError .*, and the forward of the model has an except clause"
    with pytest.raises(WitnessError, match=told) as found:
        runtime.run_suffix(runtime.run_prefix(SINGULAR))
    assert isinstance(found.value.__cause__, torch.linalg.LinAlgError)
    with pytest.raises(WitnessError, match=told):
        runtime.train_suffix(runtime.run_training_prefix(SINGULAR), loss_fn=lambda out, _: out.sum())
    assert runtime.run_suffix(runtime.run_prefix(FULL)).shape == (6, 2)


@pytest.mark.parametrize("cut", ["after:encoder", "after:factor"])
def test_an_error_that_nothing_catches_is_the_models_own(cut: str) -> None:
    runtime = prepare_split(Bare(), (FULL,), split=cut)
    with pytest.raises(torch.linalg.LinAlgError):
        runtime.run_suffix(runtime.run_prefix(SINGULAR))


def test_a_path_on_which_an_op_has_failed_is_no_plan() -> None:
    """It would hold for inputs for which the op does not fail, too."""
    with pytest.raises(
        UnsupportedError, match=r"goes on after an error: aten.linalg_cholesky.default in 'factor' raised"
    ):
        prepare_split(Catches(), (SINGULAR,), split="after:encoder")
    for given in ({"example_inputs": (SINGULAR,)}, {"example_inputs": (FULL,), "more_examples": [(SINGULAR,)]}):
        split = prepare_split(Catches(), split="after:encoder", fallback="python", **given)
        assert isinstance(split, PythonSplit)
        with torch.no_grad():
            for x in (FULL, SINGULAR):
                assert torch.equal(split.run_suffix(split.run_prefix(x)), split.model(x))


class _Positive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.sum() < 0:
            raise ValueError("negative")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads


@torch.library.custom_op("ariadne_test_caught::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    """It has no fake kernel, which could tell that sizes are not what it raises for."""
    if x.sum() < 0:
        raise ValueError("negative")
    return x.clone()


class _Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return positive(x)  # type: ignore[no-any-return]


class Asking(nn.Module):
    def __init__(self, ask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder, self.head, self.ask = nn.Linear(4, 4), nn.Linear(4, 2), ask

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        try:
            h = h + self.ask(x)
        except ValueError:
            h = h - 1
        return self.head(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "ask", [_Positive.apply, positive, ariadne.opaque(_Part())], ids=["a function of autograd", "an op", "a part"]
)
def test_what_raises_by_itself_and_is_caught_is_no_plan(ask: Callable[[Tensor], Tensor]) -> None:
    model = Asking(ask)
    with pytest.raises(UnsupportedError, match=r"goes on after an error: .* raised ValueError"):
        prepare_split(model, (-torch.ones(2, 4),), split="after:encoder")
    runtime = prepare_split(model, (torch.ones(2, 4),), split="after:encoder")
    with pytest.raises(WitnessError, match="has an except clause"):
        runtime.run_suffix(runtime.run_prefix(-torch.ones(2, 4)))


class Narrow(Bare):
    """The sizes decide whether its op fails: that holds for all data."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            h = torch.linalg.cholesky(x)
        except RuntimeError:
            h = x
        return self.head(self.encoder(h))  # type: ignore[no-any-return]


def test_an_error_that_sizes_decide_is_followed() -> None:
    runtime = prepare_split(Narrow(), (FULL,), split="after:encoder")
    with torch.no_grad():
        for x in (FULL, SINGULAR, torch.ones(5, 4)):
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), runtime.model(x))
