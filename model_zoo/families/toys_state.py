"""Toys that keep or draw something from call to call: statistics, generators, attributes."""

import random

import torch
from torch import Tensor, nn

from model_zoo.families.toys_kit import Toys
from model_zoo.sampling import dense

toy = Toys()
_IMAGE = dense(3, 6, 6)


@toy("batchnorm_once", "batchnorm", _IMAGE)
def _batchnorm_once() -> nn.Module:
    """Statistics and `num_batches_tracked` that move once a step, on whichever side of the cut they lie."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))


@toy("batchnorm_cumulative", "batchnorm data-dependent", _IMAGE)
def _batchnorm_cumulative() -> nn.Module:
    """`momentum=None`: Python reads the number of batches out of a buffer, and divides by it."""
    norm = nn.BatchNorm2d(8, momentum=None)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 4, 3))


@toy("batchnorm_without_statistics", "rows-mixed", _IMAGE)
def _batchnorm_without_statistics() -> nn.Module:
    """Normalised by the batch itself in eval mode too: rows are never independent."""
    norm = nn.BatchNorm2d(8, track_running_stats=False)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 4, 3))


@toy("instancenorm_tracked", "state", _IMAGE)
def _instancenorm_tracked() -> nn.Module:
    """Instance statistics that are tracked: the op is told to normalise by batch or by buffer."""
    norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 4, 3))


@toy("dropout", "draws")
def _dropout() -> nn.Module:
    """Dropout before and after the middle, with a feature-wise one between: the draws are in the order of the ops."""
    block = nn.Sequential(nn.Linear(16, 16), nn.AlphaDropout(0.3), nn.Tanh(), nn.Dropout(0.3))
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), block, nn.Linear(16, 4))


@toy("stochastic_depth", "draws")
class StochasticDepth(nn.Module):
    """In training, each row of a residual branch is kept by a draw of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.branch, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        branch = self.branch(h)
        if self.training:
            branch = branch * branch.new_empty(x.shape[0], 1).bernoulli_(0.8) / 0.8
        found: Tensor = self.leave(h + branch)
        return found


@toy("layer_drop", "draws data-dependent")
class LayerDrop(nn.Module):
    """In training, a draw that Python reads decides which of two formulas a layer's output goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.branch, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        branch = self.branch(h)
        h = h + torch.sigmoid(branch) if self.training and torch.rand(()) < 0.5 else h + torch.tanh(branch)
        found: Tensor = self.leave(h)
        return found


@toy("randn_in_forward", "draws draws-in-eval rows-mixed")
class RandnInForward(nn.Module):
    """Noise is added in both modes, of the batch's size; one more draw is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        h = h + 0.1 * torch.randn(x.shape[0], 16)
        torch.rand(3)
        found: Tensor = self.leave(torch.tanh(h) + 0.1 * torch.rand_like(h))
        return found


@toy("own_generator", "state own-generator rows-mixed")
class OwnGenerator(nn.Module):
    """Noise from a generator that the model owns: the global one stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        h = h + 0.1 * torch.randn(h.shape, generator=self.generator)
        found: Tensor = self.leave(torch.tanh(h))
        return found


@toy("python_draw", "draws no-graph-in-training")
class PythonDraw(nn.Module):
    """In training, Python's own generator decides the noise's scale."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        if self.training:
            h = h * random.uniform(0.5, 1.5)
        found: Tensor = self.leave(torch.tanh(h))
        return found


@toy("numpy_draw", "draws no-graph-in-training")
class NumpyDraw(nn.Module):
    """In training, numpy's global generator draws the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        if self.training:
            import numpy as np

            h = h + torch.from_numpy(np.random.standard_normal(16)).to(h)
        found: Tensor = self.leave(torch.tanh(h))
        return found


@toy("nonpersistent_buffer")
class NonPersistentBuffer(nn.Module):
    """A table that no `state_dict` holds, and a buffer that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("table", torch.linspace(-1, 1, 16), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) + self.table
        found: Tensor = self.leave(torch.tanh(h)) + self.table[:4]
        return found


@toy("tensor_attribute")
class TensorAttribute(nn.Module):
    """A tensor in a plain attribute: neither a parameter nor a buffer, and not moved with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.shift = torch.linspace(-1, 1, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(torch.tanh(self.enter(x) + self.shift))
        return found


@toy("tensors_in_dict")
class TensorsInDict(nn.Module):
    """Tensors in a dict and a list of lists on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.tables = {"shift": torch.linspace(-1, 1, 16), "scales": [[torch.linspace(1, 2, 16)], torch.tensor(0.7)]}

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x) * self.tables["scales"][0][0] + self.tables["shift"]
        found: Tensor = self.leave(torch.tanh(h)) * self.tables["scales"][1]
        return found


@toy("attribute_counter", "state no-graph")
class AttributeCounter(nn.Module):
    """A number on the model counts the calls, and nothing reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        self.calls += 1
        found: Tensor = self.leave(h)
        return found


@toy("attribute_schedule", "state no-graph-in-training")
class AttributeSchedule(nn.Module):
    """A number on the model counts the calls in training, and the output depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        if self.training:
            self.steps += 1
        found: Tensor = self.leave(h) / (1 + self.steps)
        return found


@toy("cached_attribute", "state", dense(4, 8))
class CachedAttribute(nn.Module):
    """A table is made in the first forward and again where the input's shape changes, as YOLO's anchors are."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.shape: torch.Size | None = None
        self.anchors = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        if self.shape != x.shape:
            self.shape = x.shape
            self.anchors = torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(-1) / 4
        found: Tensor = self.leave(h + self.anchors)
        return found


ENTRIES = tuple(toy.entries)
