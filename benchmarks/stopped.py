"""What a suffix in the model's own Python costs: rows of `python -m benchmarks.overhead`, over the model's part after the cut."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split


class Scaled(nn.Module):
    """Two parts, and after them a number that Python draws, which no graph holds."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) to what `second` gives of what `first` gives, times a number."""
        return self.rest(self.first(x))

    def rest(self, h: Tensor) -> Tensor:
        """What the suffix runs."""
        found: Tensor = self.second(h)
        return found * (1.0 + random.random())


def _mlp() -> tuple[Scaled, Tensor]:
    first, second = (
        nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.ReLU()))) for _ in "ab"
    )
    return Scaled(first, second), torch.randn(2, 64)


def _transformer() -> tuple[Scaled, Tensor]:
    first, second = (
        nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True) for _ in range(2)))
        for _ in "ab"
    )
    return Scaled(first, second), torch.randn(2, 16, 32)


def _mobilenet() -> tuple[Scaled, Tensor]:
    from torchvision.models import mobilenet_v3_small  # noqa: PLC0415 - of the zoo, for this alone

    model = mobilenet_v3_small(weights=None)
    blocks = [*model.features]
    rest = nn.Sequential(*blocks[7:], model.avgpool, nn.Flatten(), model.classifier[0])
    return Scaled(nn.Sequential(*blocks[:7]), rest), torch.randn(2, 3, 64, 64)


MODELS: dict[str, Callable[[], tuple[Scaled, Tensor]]] = {
    "MLP, 10 layers of 64": _mlp,
    "transformer, 4 layers of 32": _transformer,
    "mobilenet_v3_small, 64 px": _mobilenet,
}
Fallback = Literal["python", "python-suffix"]
BEFORE: dict[Fallback, str] = {"python": "a forward that waits", "python-suffix": "a graph"}
ROWS = [(name, fallback, trains) for name in MODELS for fallback in BEFORE for trains in (False, True)]


def _loss(output: Tensor, _: Any) -> Tensor:
    return output.square().sum()


def sides(name: str, fallback: Fallback, trains: bool) -> tuple[Callable[[], float], Callable[[], float]]:
    """The seconds that the model takes for its part after the cut, and that the split's suffix takes, each in a call of its own.

    With `trains`, of forward after the cut, the loss, and the backward pass to the cut. Both give the same, bit for bit.
    """
    torch.manual_seed(0)
    model, x = MODELS[name]()
    model.train(trains)
    spec = SplitSpec("after:first", trainable=trains, max_paths=1)
    split: Any = prepare_split(model, (x,), split=spec, fallback=fallback)
    whole = copy.deepcopy(model)

    def own() -> float:
        if not trains:
            with torch.no_grad():
                h = whole.first(x)
                start = time.perf_counter()
                found.append(whole.rest(h))
                return time.perf_counter() - start
        whole.zero_grad(set_to_none=True)
        h = whole.first(x).detach().requires_grad_()
        start = time.perf_counter()
        loss = _loss(whole.rest(h), None)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(loss.detach())
        return time.perf_counter() - start

    def suffix() -> float:
        if not trains:
            boundary = split.run_prefix(x)
            start = time.perf_counter()
            found.append(split.run_suffix(boundary))
            return time.perf_counter() - start
        model.zero_grad(set_to_none=True)
        boundary = split.run_training_prefix(x)
        start = time.perf_counter()
        loss, gradients = split.train_suffix(boundary, loss_fn=_loss)
        spent = time.perf_counter() - start
        split.backward_prefix(boundary, gradients)
        found.append(loss)
        return spent

    found: list[Tensor] = []
    for run in (own, suffix):
        random.seed(0)
        run()
    assert torch.equal(*found)

    def alone(run: Callable[[], float]) -> float:
        found.clear()
        return run()

    return lambda: alone(own), lambda: alone(suffix)
