"""Towers of OpenCLIP, images against texts."""

from __future__ import annotations

from functools import partial

from conformance.wild.making import entry
from model_zoo.sampling import call, dense, floats, integers

_clip = partial(entry, "open_clip.model")
_pair = call(floats(3, 32, 32), integers(1, 60, 16))
_vision = {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32}
_text = {"context_length": 16, "vocab_size": 64, "width": 32, "heads": 4, "layers": 2}

ENTRIES = (
    _clip("CLIP", _pair, "int-input", embed_dim=16, vision_cfg=_vision, text_cfg=_text),
    _clip(
        "CLIP",
        _pair,
        "int-input",
        as_name="clip_quick_gelu",
        embed_dim=16,
        vision_cfg=_vision | {"ls_init_value": 0.1},
        text_cfg=_text,
        quick_gelu=True,
    ),
    _clip(
        "CLIP",
        call(floats(3, 64, 64), integers(1, 60, 16)),
        "int-input batchnorm",
        as_name="clip_resnet",
        embed_dim=16,
        vision_cfg={"layers": [1, 1, 1, 1], "width": 8, "image_size": 64},
        text_cfg=_text,
    ),
    _clip(
        "CustomTextCLIP",
        _pair,
        "int-input",
        embed_dim=16,
        vision_cfg=_vision | {"attentional_pool": True, "attn_pooler_heads": 4},
        text_cfg=_text | {"embed_cls": True, "pad_id": 0},
    ),
    entry(
        "open_clip.coca_model",
        "CoCa",
        _pair,
        "int-input",
        embed_dim=32,
        multimodal_cfg={
            "width": 32,
            "heads": 4,
            "layers": 2,
            "context_length": 16,
            "dim_head": 8,
            "n_queries": 4,
            "attn_pooler_heads": 4,
        },
        text_cfg=_text | {"embed_cls": True, "output_tokens": True, "vocab_size": 64},
        vision_cfg=_vision | {"attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True},
    ),
    entry(
        "open_clip.transformer",
        "VisionTransformer",
        dense(3, 32, 32),
        image_size=32,
        patch_size=8,
        width=32,
        layers=2,
        heads=4,
        mlp_ratio=2.0,
        patch_dropout=0.0,
    ),
)
