"""Models of torchvision, at the smallest image that keeps every stage alive; its detectors have a file of their own."""

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


def _maxvit() -> nn.Module:
    """A MaxViT with windows of 2 and fewer channels: the builder's are for 224 pixels, and can't be changed."""
    channels, layers = [32, 64, 96, 128], [1, 1, 2, 1]
    model: nn.Module = package("torchvision.models").MaxVit((64, 64), 32, 2, channels, layers, 32, 0.2)
    return model


def _mvit_v2() -> nn.Module:
    """A MViTv2 of four blocks over four small frames: the builder's sixteen are for 224 pixels."""
    video = package("torchvision.models.video.mvit")
    widths, strides = [24, 48, 48, 96], [(1, 4), (2, 2), (1, 2), (2, 1)]
    blocks = [
        video.MSBlockConfig(
            num_heads=width // 24,
            input_channels=before,
            output_channels=width,
            kernel_q=[3, 3, 3],
            kernel_kv=[3, 3, 3],
            stride_q=[1, query, query],
            stride_kv=[1, key, key],
        )
        for before, width, (query, key) in zip([24, *widths], widths, strides, strict=False)
    ]
    model: nn.Module = video.MViT(
        (64, 64),
        8,
        blocks,
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
        stochastic_depth_prob=0.2,
    )
    return model


def _s3d() -> nn.Module:
    """S3D with its last pooling over what is left of 64 pixels, not of 224."""
    model: nn.Module = _make("s3d")
    model.avgpool = nn.AvgPool3d((2, 2, 2), stride=1)
    return model


ENTRIES = (
    _entry("alexnet", "classification medium draws", dense(3, 64, 64)),
    _entry("convnext_tiny", "classification medium draws", dense(3, 64, 64)),
    _entry(
        "deeplabv3_mobilenet_v3_large", "segmentation cheap batchnorm draws", dense(3, 64, 64), weights_backbone=None
    ),
    # The auxiliary head is what its published weights have; its output is a dict of two.
    _entry(
        "deeplabv3_resnet50",
        "segmentation medium batchnorm draws",
        dense(3, 64, 64),
        weights_backbone=None,
        aux_loss=True,
    ),
    _entry("densenet121", "classification cheap batchnorm", dense(3, 64, 64)),
    _entry("efficientnet_b0", "classification cheap batchnorm draws", dense(3, 64, 64)),
    _entry("efficientnet_v2_s", "classification medium batchnorm draws", dense(3, 64, 64)),
    _entry("fcn_resnet50", "segmentation medium batchnorm draws", dense(3, 64, 64), weights_backbone=None),
    # Two auxiliary heads in training mode, none in eval mode. The initialisation of its own is slow.
    _entry(
        "googlenet",
        "classification cheap batchnorm draws",
        dense(3, 64, 64),
        aux_logits=True,
        init_weights=False,
    ),
    # Its auxiliary head needs 299 pixels.
    _entry(
        "inception_v3",
        "classification cheap batchnorm draws",
        dense(3, 80, 80),
        aux_logits=False,
        init_weights=False,
    ),
    _entry("lraspp_mobilenet_v3_large", "segmentation cheap batchnorm", dense(3, 64, 64), weights_backbone=None),
    Entry(
        "torchvision/maxvit_t",
        frozenset({"classification", "cheap", "batchnorm", "draws"}),
        _maxvit,
        dense(3, 64, 64),
    ),
    _entry("mc3_18", "classification video medium batchnorm", dense(3, 8, 48, 48)),
    _entry("mnasnet0_5", "classification cheap batchnorm draws", dense(3, 64, 64)),
    _entry("mobilenet_v2", "classification cheap batchnorm draws", dense(3, 64, 64)),
    _entry("mobilenet_v3_large", "classification cheap batchnorm draws", dense(3, 96, 96)),
    _entry("mobilenet_v3_small", "classification cheap batchnorm draws compiled", dense(3, 96, 96)),
    # Of its last block only the class token is read, to which no relative position applies.
    Entry(
        "torchvision/mvit_v2_s",
        frozenset({"classification", "video", "cheap", "draws", "unused"}),
        _mvit_v2,
        dense(3, 8, 64, 64),
    ),
    _entry("r2plus1d_18", "classification video medium batchnorm", dense(3, 4, 48, 48)),
    _entry("r3d_18", "classification video medium batchnorm no-autocast", dense(3, 8, 48, 48)),
    # 128 is the least that its four-level correlation pyramid takes; it returns a list of 12 refined flows.
    _entry("raft_small", "flow medium no-double", dense(3, 128, 128, count=2)),
    _entry("regnet_x_400mf", "classification cheap batchnorm", dense(3, 64, 64)),
    _entry("regnet_y_400mf", "classification cheap batchnorm", dense(3, 64, 64)),
    _entry("resnet18", "classification cheap batchnorm compiled", dense(3, 64, 64)),
    _entry("resnext50_32x4d", "classification medium batchnorm", dense(3, 64, 64)),
    Entry(
        "torchvision/s3d",
        frozenset({"classification", "video", "medium", "batchnorm", "draws"}),
        _s3d,
        dense(3, 14, 64, 64),
    ),
    _entry("shufflenet_v2_x1_0", "classification cheap batchnorm compiled", dense(3, 64, 64)),
    _entry("squeezenet1_1", "classification cheap draws", dense(3, 64, 64)),
    _entry("swin3d_t", "classification video cheap draws", dense(3, 4, 32, 32)),
    _entry("swin_t", "classification medium draws", dense(3, 112, 112)),
    _entry("swin_v2_t", "classification medium draws", dense(3, 64, 64)),
    _entry("vgg11", "classification medium draws", dense(3, 64, 64)),
    # nn.MultiheadAttention takes a fused fast path where nothing needs a gradient.
    _entry("vit_b_16", "classification medium grad-mode", dense(3, 64, 64), image_size=64),
    _entry("wide_resnet50_2", "classification medium batchnorm", dense(3, 64, 64)),
)
