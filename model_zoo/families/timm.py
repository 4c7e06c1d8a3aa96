"""Models of timm, one or two of an architecture, at small images.

Where a model is bound to one image size, a smaller one is asked for; where the smallest of its kind is large, fewer
blocks or channels are. All are in timm 1.0.31.
"""

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
    _entry("beit_base_patch16_224", "cheap grad-mode", 64, img_size=64, depth=2, embed_dim=192, num_heads=3),
    _entry("botnet26t_256", "cheap batchnorm", 64, img_size=64),
    _entry("cait_xxs24_224", "cheap", 64, img_size=64, depth=4),
    _entry("coat_lite_tiny", "cheap tied", 64, img_size=64),
    _entry("convit_tiny", "cheap", 64, img_size=64),
    _entry("convnext_atto", "cheap", 64),
    _entry("crossvit_9_240", "cheap", 120, img_size=120),
    _entry("cs3darknet_focus_s", "cheap batchnorm", 64),
    _entry("davit_tiny", "cheap", 64, depths=(1, 1, 2, 1), embed_dims=(32, 64, 128, 256), num_heads=(1, 2, 4, 8)),
    _entry("deit_tiny_distilled_patch16_224", "cheap", 64, img_size=64, depth=4),
    _entry("densenetblur121d", "cheap batchnorm", 64, block_config=(2, 2, 2, 2), growth_rate=16),
    _entry("dla46_c", "cheap batchnorm", 64),
    _entry("dpn48b", "cheap batchnorm", 64),
    _entry("edgenext_xx_small", "cheap", 64),
    _entry("efficientvit_b0", "cheap batchnorm", 64),
    _entry("efficientvit_m0", "cheap batchnorm caches-graph", 128, img_size=128),
    _entry("ese_vovnet19b_slim_dw", "cheap batchnorm", 64),
    _entry("eva02_tiny_patch14_224", "cheap", 56, img_size=56, depth=4),
    _entry("fasternet_t0", "cheap batchnorm", 64),
    _entry("fastvit_t8", "medium batchnorm", 64),
    _entry("focalnet_tiny_srf", "medium draws", 64),
    _entry("gcvit_xxtiny", "medium", 64, img_size=64),
    _entry("ghostnet_050", "cheap batchnorm draws", 64),
    _entry("ghostnetv2_100", "cheap batchnorm draws", 128),
    _entry("gmlp_ti16_224", "cheap", 64, img_size=64),
    _entry("hardcorenas_a", "cheap batchnorm", 64),
    # Some of its ReLUs are dead, and with them the affine layers behind.
    _entry("hgnetv2_b0", "cheap batchnorm unused", 64),
    _entry("hiera_tiny_224", "cheap", 64, img_size=(64, 64), stages=(1, 1, 2, 1), embed_dim=48),
    _entry("hrnet_w18_small", "cheap batchnorm", 64),
    _entry("inception_next_atto", "cheap batchnorm", 64),
    _entry("lambda_resnet26t", "cheap batchnorm no-autocast", 64),
    _entry("lcnet_035", "cheap batchnorm", 64),
    _entry("legacy_seresnet18", "cheap batchnorm draws", 64),
    _entry("levit_128s", "cheap batchnorm caches-graph", 224),
    _entry("mixer_s32_224", "cheap", 64, img_size=64),
    _entry("mobileone_s0", "cheap batchnorm", 64),
    _entry("mobilevit_s", "cheap batchnorm", 64),
    _entry("mobilevitv2_050", "cheap batchnorm", 64),
    _entry("mvitv2_tiny", "medium", 64, img_size=64),
    _entry("naflexvit_base_patch16_gap", "cheap", 64, img_size=64, depth=2, embed_dim=192, num_heads=3),
    _entry("nest_tiny", "cheap draws", 64, img_size=64),
    _entry("pit_ti_224", "cheap", 64, img_size=64),
    _entry("poolformer_s12", "cheap", 64),
    _entry("pvt_v2_b0", "cheap", 64),
    _entry("regnetx_002", "cheap batchnorm", 64),
    _entry("repghostnet_050", "cheap batchnorm draws", 64),
    _entry("repvit_m0_9", "cheap batchnorm", 64),
    _entry("res2net50_14w_8s", "cheap batchnorm", 64, layers=(1, 1, 1, 1)),
    _entry("resmlp_12_224", "cheap", 64, img_size=64),
    _entry("resnest14d", "cheap batchnorm", 64),
    _entry("resnet50", "medium batchnorm", 64),
    _entry("resnetv2_18", "cheap batchnorm", 64),
    _entry("rexnet_100", "cheap batchnorm draws", 64),
    _entry("sam2_hiera_tiny", "medium", 64),
    _entry("samvit_base_patch16", "cheap grad-mode", 64, img_size=64, depth=2, embed_dim=192, num_heads=3),
    _entry(
        "sequencer2d_s",
        "cheap",
        64,
        img_size=64,
        layers=(1, 1, 2, 1),
        embed_dims=(48, 96, 96, 96),
        hidden_sizes=(12, 24, 24, 24),
    ),
    _entry("shvit_s1", "cheap batchnorm", 128),
    _entry("skresnet18", "cheap batchnorm", 64),
    _entry("starnet_s050", "cheap batchnorm", 64),
    _entry("swiftformer_xs", "cheap batchnorm", 64),
    _entry("swin_tiny_patch4_window7_224", "medium draws", 112, img_size=112),
    _entry("swinv2_cr_tiny_ns_224", "cheap draws", 64, img_size=64, depths=(1, 1, 2, 1), embed_dim=48),
    _entry("swinv2_tiny_window8_256", "cheap draws", 64, img_size=64, depths=(1, 1, 2, 1), embed_dim=48),
    _entry("test_byobnet", "cheap batchnorm", 64),
    _entry("test_coatnet", "cheap batchnorm grad-mode", 64, img_size=64),
    _entry("test_convnext", "cheap compiled", 64),
    _entry("test_efficientnet", "cheap batchnorm compiled", 64),
    _entry("test_efficientnet_evos", "cheap", 64),
    _entry("test_efficientnet_gn", "cheap", 64),
    _entry("test_mambaout", "cheap", 64),
    _entry("test_maxvit", "cheap batchnorm grad-mode", 64, img_size=64),
    _entry("test_nfnet", "cheap", 64),
    _entry("test_resnet", "cheap batchnorm", 64),
    _entry("test_vit", "cheap", 64),
    _entry("test_vit2", "cheap", 64),
    _entry("test_vit3", "cheap", 64, img_size=64),
    _entry("test_vit4", "cheap", 64),
    _entry("test_vit_relpos", "cheap draws grad-mode", 64, img_size=64),
    _entry("tnt_s_patch16_224", "cheap", 64, img_size=64, depth=4),
    _entry("twins_svt_small", "cheap", 64, depths=(1, 1, 2, 1)),
    _entry("visformer_tiny", "cheap batchnorm", 64, img_size=64),
    _entry("vit_tiny_patch16_224", "cheap compiled", 96, img_size=96),
    _entry("vit_tiny_r_s16_p8_224", "cheap", 64, img_size=64, depth=4),
    _entry("volo_d1_224", "medium batchnorm", 64, img_size=64),
    _entry("xcit_nano_12_p16_224", "cheap batchnorm", 64),
)
