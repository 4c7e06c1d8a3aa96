"""After a training step of a Python split nothing keeps its graph, though the thread that ran forward may not have ended yet."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.stopped import forward
from ariadne.stopped.crossing import Crossing


class Counting(nn.Module):
    """Counts its calls, which no graph does, and keeps nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Linear(4, 4), nn.Linear(4, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.b(self.a(x).tanh())


def test_what_crosses_is_let_go_of_before_the_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    runtime = prepare_split(
        Counting(), (torch.randn(2, 4),), split=SplitSpec("after:a", trainable=True), fallback="python"
    )
    made: list[weakref.ref[Crossing]] = []
    may_end = threading.Event()
    begin, run = Crossing.__init__, forward._Worker.run

    def noted(self: Crossing, *args: object) -> None:
        begin(self, *args)  # type: ignore[arg-type]
        made.append(weakref.ref(self))

    def lingering(self: forward._Worker) -> None:
        run(self)
        may_end.wait(5)

    monkeypatch.setattr(Crossing, "__init__", noted)
    monkeypatch.setattr(forward._Worker, "run", lingering)
    try:
        boundary = runtime.run_training_prefix(torch.randn(3, 4))
        _, gradients = runtime.train_suffix(boundary, loss_fn=lambda y, _: y.square().sum())
        runtime.backward_prefix(boundary, gradients)
        del boundary, gradients
        assert len(made) == 1
        assert made[0]() is None
    finally:
        may_end.set()
