"""Models at the sizes that people run, beside those of the zoo, which are small enough for a suite of thousands of cases.

Named `sized/…`, with the zoo's random weights; they are measured, not held to the suite.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import model_zoo
from model_zoo.definition import Entry
from model_zoo.packages import package
from model_zoo.process import quiet
from model_zoo.sampling import Draw, Sampler, call, dense, integers


def _timm(architecture: str) -> nn.Module:
    model: nn.Module = package("timm").create_model(architecture, pretrained=False)
    return model


def _zoo(name: str) -> nn.Module:
    return model_zoo.entry(name).make()


def _llama() -> nn.Module:
    """The shape of Llama 3.2 1B, with bfloat16 weights: 1.24 thousand million of them, embedding and head tied."""
    transformers = package("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=2048, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    with quiet("transformers"):
        model: nn.Module = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return model


def _entry(name: str, make: partial[nn.Module], sample: Sampler) -> Entry:
    return Entry(f"sized/{name}", frozenset({"heavy"}), make, sample)


_TOKENS: Draw = integers(1, 128256, 128)
ENTRIES = {
    e.name: e
    for e in (
        _entry("llama_1b_bf16", partial(_llama), call(input_ids=_TOKENS)),
        _entry("swin_tiny_224", partial(_timm, "swin_tiny_patch4_window7_224"), dense(3, 224, 224)),
        _entry("vit_base_patch16_224", partial(_timm, "vit_base_patch16_224"), dense(3, 224, 224)),
        _entry("yolov8n_640", partial(_zoo, "ultralytics/yolov8n"), dense(3, 640, 640)),
        _entry("resnet50_224", partial(_timm, "resnet50"), dense(3, 224, 224)),
    )
}


def entry(name: str) -> Entry:
    """The entry of this name, here or in the zoo. Raises `model_zoo.UnknownNameError`."""
    return ENTRIES.get(name) or model_zoo.entry(name)
