"""Architectures of timm that the zoo does not have."""

from __future__ import annotations

from functools import partial
from typing import Any

from conformance.wild.making import made
from model_zoo.definition import Entry
from model_zoo.sampling import dense


def _entry(architecture: str, image: int = 64, tags: str = "batchnorm", **options: Any) -> Entry:
    make = partial(
        made, "timm", "create_model", {"model_name": architecture, "pretrained": False, "num_classes": 10, **options}
    )
    return Entry(f"wild/timm/{architecture}", frozenset({"medium", *tags.split()}), make, dense(3, image, image))


ENTRIES = (
    _entry("convmixer_768_32"),
    _entry("cpubone_nano"),
    _entry("csatv2"),
    _entry("cspnext_tiny"),
    _entry("efficientformer_l1", 224),
    _entry("efficientformerv2_s0", 224),
    _entry("efficientvim_m1"),
    _entry("iformer_t"),
    _entry("inception_v3", 96, aux_logits=False),
    _entry("lcnetv2_small"),
    _entry("lowformer_b0"),
    _entry("nextvit_small"),
    _entry("rdnet_tiny", 64, ""),
    _entry("selecsls42"),
    _entry("tiny_vit_5m_224", 224),
    _entry("tresnet_m"),
    _entry("vitamin_small_224", 64, "", img_size=64),
    _entry("xception41"),
    _entry("legacy_xception"),
    _entry("qwen3_vit_88m", 64, "", depth=2, embed_dim=64, num_heads=4),
)
