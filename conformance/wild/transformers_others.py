"""Families of transformers that the zoo does not have: each by its configuration's own fields, set small wherever it has them."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from model_zoo.definition import Entry
from model_zoo.packages import package
from model_zoo.process import quiet
from model_zoo.sampling import Sampler, call, floats, tokens

VOCABULARY, LENGTH = 128, 16
# By the names that configurations give to sizes. What a configuration has no field for is not set.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "embed_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_head", "n_heads", "num_heads"),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(
        (
            "intermediate_size",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "ffn_dim",
            "d_ff",
            "d_inner",
            "hidden_dim",
            "moe_intermediate_size",
        ),
        64,
    ),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "rotary_dim", "attention_head_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok",), 2),
    "vocab_size": VOCABULARY,
    "image_size": 32,
    "patch_size": 8,
    "use_cache": False,
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
}


def _make(model: str, configuration: str, options: dict[str, Any]) -> nn.Module:
    transformers = package("transformers")
    with quiet("transformers"):
        kind = getattr(transformers, configuration)
        plain = {name for name, value in kind().to_dict().items() if not isinstance(value, (list, tuple))}
        fields = {name: value for name, value in _SMALL.items() if name in plain}
        made: nn.Module = getattr(transformers, model)(kind(**(fields | options)))
    return made


def _entry(stem: str, model: str, sample: Sampler, tags: str, **options: Any) -> Entry:
    make = partial(_make, f"{stem}{model}", f"{stem}Config", options)
    return Entry(f"wild/transformers/{stem.lower()}", frozenset({"kwargs", "medium", *tags.split()}), make, sample)


_text = partial(_entry, sample=tokens(LENGTH, VOCABULARY), tags="int-input draws")
_causal, _encoder = partial(_text, model="ForCausalLM"), partial(_text, model="Model")
_pair = partial(
    _entry, model="ForConditionalGeneration", sample=tokens(LENGTH, VOCABULARY, 10), tags="int-input draws tied"
)


def _image(stem: str, model: str = "ForImageClassification", size: int = 32, tags: str = "", **options: Any) -> Entry:
    return _entry(stem, model, call(pixel_values=floats(3, size, size)), tags, **options)


def _audio(stem: str, samples: int = 640, **options: Any) -> Entry:
    small = {
        "conv_dim": [16, 16],
        "conv_stride": [5, 2],
        "conv_kernel": [10, 3],
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "apply_spec_augment": False,
        "layerdrop": 0.0,
    }
    return _entry(stem, "ForCTC", call(input_values=floats(samples)), "draws", **(small | options))


ENTRIES = (
    *map(
        _causal,
        (
            "Mistral",
            "Gemma",
            "Gemma2",
            "Qwen2",
            "Qwen3",
            "Qwen2Moe",
            "Qwen3Moe",
            "Phi",
            "Phi3",
            "StableLm",
            "Starcoder2",
            "OPT",
            "Bloom",
            "GPTNeoX",
            "GPTJ",
            "CodeGen",
            "Falcon",
            "Olmo",
            "Olmo2",
            "Olmoe",
            "Cohere",
            "Granite",
            "GraniteMoe",
            "FalconMamba",
            "Persimmon",
            "Mpt",
            "BioGpt",
            "XGLM",
            "Helium",
            "Glm",
            "Nemotron",
            "SmolLM3",
            "Arcee",
            "RecurrentGemma",
            "Rwkv",
            "Jamba",
        ),
    ),
    _causal("Mamba2", head_dim=16, n_groups=2),
    _causal(
        "DeepseekV3",
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        q_lora_rank=16,
        kv_lora_rank=16,
        n_group=1,
        topk_group=1,
        num_key_value_heads=4,
    ),
    _causal("GPTNeo", num_layers=2, attention_types=[[["global", "local"], 1]], window_size=4),
    *map(
        _encoder,
        (
            "Roberta",
            "DistilBert",
            "Electra",
            "Deberta",
            "DebertaV2",
            "XLMRoberta",
            "Camembert",
            "MPNet",
            "Funnel",
            "ConvBert",
            "RoFormer",
            "SqueezeBert",
            "MegatronBert",
            "BigBird",
            "Longformer",
            "Nystromformer",
            "FNet",
            "ModernBert",
            "Ernie",
            "Splinter",
            "XLNet",
            "RemBert",
            "Esm",
            "CTRL",
            "XLM",
            "Canine",
            "MobileBert",
        ),
    ),
    *map(
        _pair,
        (
            "Bart",
            "MBart",
            "Pegasus",
            "Blenderbot",
            "M2M100",
            "MT5",
            "UMT5",
            "LongT5",
            "PLBart",
            "ProphetNet",
            "LED",
            "SwitchTransformers",
        ),
    ),
    *map(
        _image,
        (
            "DeiT",
            "Beit",
            "Dinov2",
            "ViTMSN",
            "MobileNetV2",
            "ResNet",
            "RegNet",
            "Bit",
            "PoolFormer",
            "FocalNet",
            "PvtV2",
            "MobileViT",
            "SwiftFormer",
        ),
    ),
    _image("Swin", embed_dim=16, patch_size=2, window_size=4, depths=[2, 2], num_heads=[2, 4]),
    _image("Swinv2", embed_dim=16, hidden_size=32, patch_size=2, window_size=4, depths=[2, 2], num_heads=[2, 4]),
    _image("ConvNext", size=64),
    _image("ConvNextV2", size=64),
    *map(_audio, ("Hubert", "WavLM", "UniSpeech", "SEW", "Wav2Vec2Conformer", "Data2VecAudio")),
)
