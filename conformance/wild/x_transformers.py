"""x-transformers: one decoder or encoder with one feature after the other."""

from __future__ import annotations

from typing import Any

from torch import nn

from model_zoo.definition import Entry
from model_zoo.packages import package
from model_zoo.sampling import Sampler, call, dense, integers

_TOKENS = call(integers(0, 64, 16))


def _make(wrapper: str, layers: str, options: dict[str, Any], features: dict[str, Any]) -> nn.Module:
    library = package("x_transformers")
    made: nn.Module = getattr(library, wrapper)(
        **options, attn_layers=getattr(library, layers)(dim=32, depth=2, heads=4, attn_dim_head=8, **features)
    )
    return made


def _entry(
    name: str,
    sample: Sampler = _TOKENS,
    layers: str = "Decoder",
    wrapper: str = "TransformerWrapper",
    tags: str = "int-input",
    options: dict[str, Any] | None = None,
    **features: Any,
) -> Entry:
    given = options or {"num_tokens": 64, "max_seq_len": 32}
    return Entry(
        f"wild/x_transformers/{name}",
        frozenset({"medium", *tags.split()}),
        lambda: _make(wrapper, layers, given, features),
        sample,
    )


ENTRIES = (
    _entry("decoder"),
    _entry("encoder", layers="Encoder"),
    _entry("rotary", rotary_pos_emb=True),
    _entry("alibi", alibi_pos_bias=True),
    _entry("t5_bias", rel_pos_bias=True),
    _entry("dynamic_bias", dynamic_pos_bias=True),
    _entry("rms_norm_glu", use_rmsnorm=True, ff_glu=True, ff_swish=True),
    _entry("qk_norm", attn_qk_norm=True),
    _entry("talking_heads", attn_pre_talking_heads=True, attn_post_talking_heads=True),
    _entry("sparse_topk", attn_sparse_topk=4),
    _entry("multi_query", attn_kv_heads=1),
    _entry("memory_keys", attn_num_mem_kv=4),
    _entry("macaron", macaron=True),
    _entry("sandwich", sandwich_norm=True),
    _entry("gated_residual", gate_residual=True),
    _entry("shift_tokens", shift_tokens=1),
    _entry("dropout", tags="int-input draws", attn_dropout=0.1, ff_dropout=0.1),
    _entry("layer_dropout", tags="int-input draws", layer_dropout=0.2),
    _entry("flash", attn_flash=True),
    _entry("memory_tokens", options={"num_tokens": 64, "max_seq_len": 32, "num_memory_tokens": 4}),
    _entry("tied", tags="int-input tied", options={"num_tokens": 64, "max_seq_len": 32, "tie_embedding": True}),
    _entry(
        "continuous",
        dense(16, 8),
        "Encoder",
        "ContinuousTransformerWrapper",
        "",
        {"dim_in": 8, "dim_out": 4, "max_seq_len": 32},
    ),
    _entry(
        "vit",
        dense(3, 32, 32),
        "Encoder",
        "ViTransformerWrapper",
        "",
        {"image_size": 32, "patch_size": 8, "num_classes": 5},
    ),
    _entry("hyper_connections", num_residual_streams=2),
)
