"""A Python split is measured and proven under the modes that it is prepared in, and that its forward can run in."""

import copy
import random

import torch
from torch import nn

from ariadne import PythonSplit, SplitSpec, prepare_split

X = torch.linspace(-1, 1, 8).view(2, 4)


def trained(runtime: PythonSplit, x: torch.Tensor) -> None:
    """One step, whose loss is the output's mean square."""
    boundary = runtime.run_training_prefix(x)
    _, gradients = runtime.train_suffix(boundary, None, loss_fn=lambda out, _: out.float().square().mean())
    runtime.backward_prefix(boundary, gradients)


def assert_trained_alike(model: nn.Module, whole: nn.Module) -> None:
    """The two have equal gradients, on all parameters."""
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        assert torch.equal(p.grad, q.grad), name


class Scaled(nn.Module):
    """Two layers, on an input that Python's own random numbers scale."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x * (1 + random.random())).relu())
        return y


def test_weights_that_autocast_keeps_cast_are_seen_to_be_used_after_the_cut() -> None:
    model = Scaled()
    whole = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(X)  # casts are kept while the block lasts
        spec = SplitSpec("after:a", trainable=True)
        runtime = prepare_split(model, (X,), split=spec, fallback="python")
    assert isinstance(runtime, PythonSplit)
    assert [len(runtime.prefix_parameters()), len(runtime.suffix_parameters())] == [2, 2]
    for run in (lambda: trained(runtime, X), lambda: whole(X).float().square().mean().backward()):
        random.seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            run()
    assert_trained_alike(model, whole)
