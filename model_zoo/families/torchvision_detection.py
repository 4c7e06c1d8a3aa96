"""Detectors of torchvision, which take a list of images and in training mode a list of targets.

The targets are passed in eval mode too, where they only have to be valid. Images come in one fixed size, which the
model keeps, and everything that is found is returned, up to ten a picture: with random weights few scores are high.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from model_zoo.definition import Entry
from model_zoo.packages import package
from model_zoo.sampling import Inputs, Sampler, floats

_TAGS = frozenset(
    {"detection", "batchnorm", "list-input", "int-input", "int-output", "data-dependent", "varying-output", "no-graph"}
)
_CLASSES = 5


def _pictures(
    size: int, more: Callable[[Tensor, Generator], dict[str, Tensor]] = lambda boxes, generator: {}
) -> Sampler:
    """A list of images and one of targets, each with two boxes and what `more` makes of these."""

    def target(generator: Generator) -> dict[str, Tensor]:
        corner = size / 2 * torch.rand(2, 2, generator=generator)
        boxes = torch.cat([corner, corner + size / 4 + size / 5 * torch.rand(2, 2, generator=generator)], 1)
        labels = torch.randint(1, _CLASSES, (2,), generator=generator)
        return {"boxes": boxes, "labels": labels, **more(boxes, generator)}

    def draw(batch: int, generator: Generator) -> Inputs:
        images = [image.sigmoid() for image in floats(3, size, size)(batch, generator)]
        return (images, [target(generator) for _ in images]), {}

    return draw


def _masks(size: int) -> Callable[[Tensor, Generator], dict[str, Tensor]]:
    def filled(box: Tensor) -> Tensor:
        left, top, right, bottom = box.long().tolist()
        mask = torch.zeros(size, size, dtype=torch.uint8)
        mask[top:bottom, left:right] = 1
        return mask

    return lambda boxes, generator: {"masks": torch.stack([filled(box) for box in boxes])}


def _keypoints(boxes: Tensor, generator: Generator) -> dict[str, Tensor]:
    where = torch.rand(2, 17, 2, generator=generator)
    points = boxes[:, None, :2] + where * (boxes[:, None, 2:] - boxes[:, None, :2])
    return {"keypoints": torch.cat([points, torch.ones(2, 17, 1)], 2)}


def _make(builder: str, **options: Any) -> nn.Module:
    models = package("torchvision.models.detection")
    model: nn.Module = getattr(models, builder)(weights=None, weights_backbone=None, **options)
    return model


def _entry(builder: str, tags: str, sample: Sampler, **options: Any) -> Entry:
    make = partial(_make, builder, **options)
    return Entry(f"torchvision/{builder}", _TAGS | frozenset(tags.split()), make, sample)


_FEW = {"num_classes": _CLASSES, "detections_per_img": 10, "score_thresh": 0.0}
_FEW_BOXES = {
    "num_classes": _CLASSES,
    "box_detections_per_img": 10,
    "box_score_thresh": 0.0,
    "rpn_pre_nms_top_n_train": 200,
    "rpn_pre_nms_top_n_test": 100,
    "rpn_post_nms_top_n_train": 100,
    "rpn_post_nms_top_n_test": 50,
}
_FIXED = {"min_size": 128, "max_size": 128}

ENTRIES = (
    _entry(
        "fasterrcnn_mobilenet_v3_large_320_fpn",
        "medium draws",
        _pictures(160),
        **_FEW_BOXES,
        min_size=160,
        max_size=160,
    ),
    _entry("fcos_resnet50_fpn", "medium draws", _pictures(128), **_FEW, **_FIXED),
    _entry(
        "keypointrcnn_resnet50_fpn", "heavy pose draws no-double", _pictures(128, _keypoints), **_FEW_BOXES, **_FIXED
    ),
    _entry("maskrcnn_resnet50_fpn", "heavy segmentation draws", _pictures(128, _masks(128)), **_FEW_BOXES, **_FIXED),
    _entry("retinanet_resnet50_fpn", "medium draws", _pictures(128), **_FEW, **_FIXED),
    # Its own transform brings every image to 320 pixels.
    _entry("ssdlite320_mobilenet_v3_large", "medium draws unused", _pictures(128), **_FEW),
)
