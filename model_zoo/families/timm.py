"""Models of timm; where a model is bound to one image size, a smaller one is asked for."""

from functools import partial
from typing import Any

from torch import nn

from model_zoo.definition import Entry
from model_zoo.packages import package
from model_zoo.sampling import dense


def _make(architecture: str, **options: Any) -> nn.Module:
    model: nn.Module = package("timm").create_model(architecture, pretrained=False, **options)
    return model


def _entry(architecture: str, tags: str, image: int, **options: Any) -> Entry:
    make = partial(_make, architecture, **options)
    return Entry(f"timm/{architecture}", frozenset({"classification", *tags.split()}), make, dense(3, image, image))


ENTRIES = (
    _entry("levit_128s", "cheap batchnorm", 224),
    _entry("mobilevit_s", "cheap batchnorm", 64),
    _entry("resnet50", "medium batchnorm", 64),
    _entry("swin_tiny_patch4_window7_224", "medium draws", 112, img_size=112),
    _entry("vit_tiny_patch16_224", "cheap", 96, img_size=96),
    _entry("xcit_nano_12_p16_224", "cheap batchnorm", 64),
)
