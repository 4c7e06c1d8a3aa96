"""A TorchFunctionMode that the caller enters decides what torch's functions do: no plan is made under one, nor runs under it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ariadne import SplitRuntime, load
from ariadne.errors import GuardError, UnsupportedError
from conformance.unit.refusing import prepare_split

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Leaky(TorchFunctionMode):
    """Has `relu` let a little through."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return F.leaky_relu(args[0]) if function is F.relu else function(*args, **(kwargs or {}))


class Net(nn.Module):
    """(B, 4) to (B, 3), by `relu`, once more under a mode where it has an `inner` one."""

    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.inner = nn.Linear(4, 8), nn.Linear(8, 3), inner

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.inner:
            with Leaky():
                h = F.relu(h)
        found: Tensor = self.b(F.relu(h))
        return found


def split(**options: bool) -> tuple[Net, SplitRuntime]:
    model = Net(**options).eval()
    return model, prepare_split(model, (X,), split="after:a")


RUNS: dict[str, Callable[[SplitRuntime], Any]] = {
    "both": lambda runtime: runtime.run_suffix(runtime.run_prefix(X)),
    "training": lambda runtime: runtime.run_training_prefix(X),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_call_under_a_mode_is_refused_and_the_next_is_served(run: str) -> None:
    model, runtime = split()
    with Leaky(), pytest.raises(UnsupportedError, match=r"Leaky.*enter it in forward"):
        RUNS[run](runtime)
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))


def test_a_suffix_under_a_mode_is_refused() -> None:
    _, runtime = split()
    boundary = runtime.run_prefix(X)
    with Leaky(), pytest.raises(GuardError, match="TorchFunctionModes"):
        runtime.run_suffix(boundary)
    trained = runtime.run_training_prefix(X)
    with Leaky(), pytest.raises(GuardError, match="TorchFunctionModes"):
        runtime.train_suffix(trained, loss_fn=lambda out, _: out.sum())


def test_a_half_from_its_file_refuses_one(tmp_path: Path) -> None:
    split()[1].save(tmp_path / "prefix", side="prefix")
    half = load(tmp_path / "prefix")
    with Leaky(), pytest.raises(GuardError, match="in the modes"):
        half.run_prefix(X)


def test_none_is_prepared_under_a_mode() -> None:
    with Leaky(), pytest.raises(UnsupportedError, match="TorchFunctionMode is entered"):
        split()


def test_one_that_forward_enters_is_part_of_the_plan() -> None:
    model, runtime = split(inner=True)
    with torch.no_grad(), torch.device("cpu"):  # a mode of torch's own
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))
