"""Models of torchvision, at the smallest image that keeps every stage alive."""

from functools import partial
from typing import Any

from torch import nn

from model_zoo.definition import Entry
from model_zoo.packages import package
from model_zoo.sampling import Sampler, dense


def _make(builder: str, **options: Any) -> nn.Module:
    model: nn.Module = package("torchvision.models").get_model(builder, weights=None, **options)
    return model


def _entry(builder: str, tags: str, sample: Sampler, **options: Any) -> Entry:
    return Entry(f"torchvision/{builder}", frozenset(tags.split()), partial(_make, builder, **options), sample)


ENTRIES = (
    _entry("convnext_tiny", "classification medium draws", dense(3, 64, 64)),
    # The auxiliary head is what its published weights have; its output is a dict of two.
    _entry(
        "deeplabv3_resnet50",
        "segmentation medium batchnorm draws",
        dense(3, 64, 64),
        weights_backbone=None,
        aux_loss=True,
    ),
    _entry("densenet121", "classification cheap batchnorm", dense(3, 64, 64)),
    # Two auxiliary heads in training mode, none in eval mode. The initialisation of its own is slow.
    _entry(
        "googlenet",
        "classification cheap batchnorm draws",
        dense(3, 64, 64),
        aux_logits=True,
        init_weights=False,
    ),
    _entry("mobilenet_v3_large", "classification cheap batchnorm draws", dense(3, 96, 96)),
    _entry("mobilenet_v3_small", "classification cheap batchnorm draws", dense(3, 96, 96)),
    _entry("r3d_18", "classification video medium batchnorm", dense(3, 8, 48, 48)),
    # 128 is the least that its four-level correlation pyramid takes; it returns a list of 12 refined flows.
    _entry("raft_small", "flow medium", dense(3, 128, 128, count=2)),
    _entry("resnet18", "classification cheap batchnorm", dense(3, 64, 64)),
    _entry("shufflenet_v2_x1_0", "classification cheap batchnorm", dense(3, 64, 64)),
    _entry("swin_t", "classification medium draws", dense(3, 112, 112)),
    _entry("swin_v2_t", "classification medium draws", dense(3, 64, 64)),
    _entry("vgg11", "classification medium draws", dense(3, 64, 64)),
    # nn.MultiheadAttention takes a fused fast path where nothing needs a gradient.
    _entry("vit_b_16", "classification medium grad-mode", dense(3, 64, 64), image_size=64),
)
