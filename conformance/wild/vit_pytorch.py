"""vit-pytorch: variants of the vision transformer."""

from __future__ import annotations

from typing import Any

from conformance.wild.making import entry
from model_zoo.definition import Entry
from model_zoo.sampling import dense

_COMMON = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}


def _entry(module: str, name: str, tags: str = "", size: int = 32, without: str = "", **options: Any) -> Entry:
    given = {k: v for k, v in _COMMON.items() if k not in without.split()} | options
    return entry(f"vit_pytorch.{module}", name, dense(3, size, size), tags, as_name=module, **given)


ENTRIES = (
    _entry("vit", "ViT", "draws", dropout=0.1, emb_dropout=0.1),
    _entry("simple_vit", "SimpleViT"),
    _entry("simple_vit_with_qk_norm", "SimpleViT"),
    _entry("simple_vit_with_register_tokens", "SimpleViT"),
    _entry("simple_vit_with_patch_dropout", "SimpleViT", "draws", patch_dropout=0.25),
    _entry("vit_for_small_dataset", "ViT"),
    _entry("vit_with_patch_dropout", "ViT", "draws", patch_dropout=0.25),
    _entry("vit_with_patch_merger", "ViT", patch_merge_layer=1, patch_merge_num_tokens=4),
    _entry("deepvit", "DeepViT"),
    _entry("cait", "CaiT", "draws", cls_depth=1, layer_dropout=0.05),
    _entry("t2t", "T2TViT", without="patch_size", t2t_layers=((7, 4), (3, 2))),
    _entry("parallel_vit", "ViT", num_parallel_branches=2),
    _entry("learnable_memory_vit", "ViT"),
    _entry("rvt", "RvT"),
    _entry("ats_vit", "ViT", "data-dependent", max_tokens_per_depth=(12, 8)),
    _entry(
        "crossformer",
        "CrossFormer",
        "draws",
        224,
        "image_size patch_size heads mlp_dim",
        dim=(32, 32, 64, 64),
        depth=(1, 1, 1, 1),
        global_window_size=(8, 4, 2, 1),
        local_window_size=7,
    ),
    _entry(
        "max_vit",
        "MaxViT",
        "batchnorm draws",
        64,
        "image_size patch_size heads mlp_dim",
        dim=16,
        depth=(1, 1),
        dim_head=8,
        dim_conv_stem=8,
        window_size=4,
    ),
    _entry(
        "levit",
        "LeViT",
        "batchnorm",
        64,
        "patch_size mlp_dim",
        image_size=64,
        stages=3,
        dim=(16, 32, 32),
        depth=1,
        heads=2,
        mlp_mult=2,
    ),
    _entry(
        "cvt",
        "CvT",
        "batchnorm",
        32,
        "image_size patch_size dim depth heads mlp_dim",
        s1_emb_dim=8,
        s1_heads=1,
        s1_depth=1,
        s2_emb_dim=16,
        s2_heads=1,
        s2_depth=1,
        s3_emb_dim=16,
        s3_heads=2,
        s3_depth=1,
    ),
    _entry(
        "regionvit",
        "RegionViT",
        "",
        56,
        "image_size patch_size heads mlp_dim",
        dim=(8, 16, 16, 32),
        depth=(1, 1, 1, 1),
        window_size=7,
    ),
    _entry(
        "nest", "NesT", "", 32, "mlp_dim depth", image_size=32, patch_size=4, num_hierarchies=2, block_repeats=(1, 1)
    ),
    _entry(
        "mobile_vit",
        "MobileViT",
        "batchnorm",
        64,
        "patch_size dim depth heads mlp_dim image_size",
        image_size=(64, 64),
        dims=[16, 20, 24],
        channels=[8, 8, 16, 16, 16, 16, 24, 24, 32, 32, 64],
    ),
    _entry("xcit", "XCiT", "batchnorm", cls_depth=1),
    _entry("pit", "PiT", "", depth=(1, 1), patch_size=4),
    _entry(
        "scalable_vit",
        "ScalableViT",
        "",
        64,
        "image_size patch_size mlp_dim",
        dim=8,
        heads=(1, 1),
        depth=(1, 1),
        ssa_dim_key=8,
        ssa_dim_value=8,
        reduction_factor=(2, 1),
        window_size=(8, None),
    ),
)
