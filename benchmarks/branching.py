"""What plans that branch and skipped prefixes cost: rows of `python -m benchmarks.overhead`, over the same ops without them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, prepare_split
from ariadne.runtime import SplitRuntime


def _dense(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU6(), nn.LayerNorm(width))


def _convolution(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU6())


MODELS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {  # block, how many, the input's shape
    "10 layers of 64": (_dense(64), 10, (8, 64)),
    "10 layers of 256": (_dense(256), 10, (32, 256)),
    "12 layers of 384": (_dense(384), 12, (64, 384)),
    "12 convolutions of 16": (_convolution(16), 12, (1, 16, 48, 48)),
}


class _Blocks(nn.Module):
    """Blocks, half of them before and half after what the model is about."""

    def __init__(self, block: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        half = count // 2
        self.before = nn.Sequential(*(block() for _ in range(half)))
        self.after = nn.Sequential(*(block() for _ in range(count - half)))


class Branching(_Blocks):
    """Blocks, of which one in the middle is chosen by what Python reads out of a tensor, or by `which`, without reading."""

    def __init__(self, block: Callable[[], nn.Module], count: int) -> None:
        super().__init__(block, count)
        self.one, self.two = block(), block()

    def forward(self, x: Tensor, which: bool | None = None) -> tuple[Tensor, Tensor]:
        """(B, ...) to the same, and to the answer, so that it is computed where nobody asks."""
        h = self.before(x)
        asked = h[..., 20].mean() > h[..., 21].mean()
        taken = bool(asked) if which is None else which
        return self.after(self.one(h) if taken else self.two(h)), asked


class _Straight(nn.Module):
    """The same ops on one path, where Python reads nothing."""

    def __init__(self, model: Branching, which: bool) -> None:
        super().__init__()
        self.model, self.which = model, which

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As `Branching` on that path."""
        found: tuple[Tensor, Tensor] = self.model(x, self.which)
        return found


@dataclass(frozen=True)
class Calls:
    """Two calls each: that change path, that stay on one, and the same ops of either without a question."""

    changing: Callable[[], Any]
    straight: Callable[[], Any]
    staying: Callable[[], Any]
    straight_staying: Callable[[], Any]


def paths(name: str, in_prefix: bool) -> Calls:
    """Calls of the model `name`, cut after the question or before it; each equal to the model's own, bit for bit."""
    block, count, shape = MODELS[name]
    model = Branching(block, count).eval()
    with torch.no_grad():
        inputs = {bool(model(x)[1]): x for x in torch.randn(64, *shape)}
        a, b = inputs[True], inputs[False]
        after = "after.0" if in_prefix else "before.1"
        asking = prepare_split(model, (a,), split=f"after:{after}", more_examples=[(b,)])
        one, two = (prepare_split(_Straight(model, w), (a,), split=f"after:model.{after}") for w in (True, False))

        def run(runtime: SplitRuntime, x: Tensor) -> Any:
            return runtime.run_suffix(runtime.run_prefix(x))

        for x, straight in ((a, one), (b, two), (a, one), (b, two)):
            whole = model(x)
            for runtime in (asking, straight):
                assert all(map(torch.equal, run(runtime, x), whole))
    return Calls(
        lambda: (run(asking, a), run(asking, b)),
        lambda: (run(one, a), run(two, b)),
        lambda: (run(asking, a), run(asking, a)),
        lambda: (run(one, a), run(one, a)),
    )


class Counting(_Blocks):
    """Blocks with a count on `self` between them, which no graph holds."""

    def __init__(self, block: Callable[[], nn.Module], count: int) -> None:
        super().__init__(block, count)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) to the same."""
        return self.rest(self.before(x))

    def rest(self, h: Tensor) -> Tensor:
        """What the suffix runs."""
        self.calls += 1
        found: Tensor = self.after(h)
        return found


DETECTORS = {  # after their backbones; SSDlite's suffix is a graph, those of the others are the model's own Python
    "Faster R-CNN, MobileNetV3, 320 px": ("fasterrcnn_mobilenet_v3_large_320_fpn", {}),
    "SSDlite, MobileNetV3, 320 px": ("ssdlite320_mobilenet_v3_large", {}),
    "RetinaNet, ResNet-50, 320 px": ("retinanet_resnet50_fpn", {"min_size": 320, "max_size": 320}),
}


class _Known(nn.Module):
    """Stands for a detector's transform, or its backbone, that has run; `postprocess` is the transform's own."""

    def __init__(self, found: Any, postprocess: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.found, self.postprocess = found, postprocess

    def forward(self, *args: Any) -> Any:
        """What it gave."""
        return self.found


def detector(name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The same as `skipped` of a detector, after its backbone."""
    from torchvision.models import detection  # noqa: PLC0415 - of the zoo, for this alone

    torch.manual_seed(0)
    build, options = DETECTORS[name]
    model: Any = getattr(detection, build)(weights=None, weights_backbone=None, num_classes=5, **options).eval()
    x = [torch.rand(3, 320, 320)]
    runtime = prepare_split(model, (x,), split="after:backbone", fallback="python")
    rest = copy.copy(model)  # which begins where the backbone ends
    rest._modules = dict(model._modules)
    with torch.no_grad():
        found = model.transform(x)
        rest.backbone = _Known(model.backbone(found[0].tensors))
        rest.transform = _Known(found, model.transform.postprocess)
        received = BoundaryPayload.from_bytes(runtime.run_prefix(x).to_bytes())
        for one, two in zip(runtime.run_suffix(received), rest(x), strict=True):
            assert all(torch.equal(one[key], two[key]) for key in ("boxes", "scores", "labels"))
    return lambda: runtime.run_suffix(received), lambda: rest(x)


def skipped(name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The suffix of a Python split from bytes, and the model's own part after the cut."""
    if name in DETECTORS:
        return detector(name)
    block, count, shape = MODELS[name]
    model = Counting(block, count).eval()
    x = torch.randn(shape)
    runtime = prepare_split(model, (x,), split="after:before", fallback="python")
    with torch.no_grad():
        received = BoundaryPayload.from_bytes(runtime.run_prefix(x).to_bytes())
        twin = copy.copy(
            model
        )  # the same weights; its count is no change of the other between the sides, which is refused
        h = twin.before(x)
        assert torch.equal(runtime.run_suffix(received), twin.rest(h))
    return lambda: runtime.run_suffix(received), lambda: twin.rest(h)
