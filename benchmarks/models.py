"""Which models are measured: names of the zoo, and sets of them."""

from __future__ import annotations

from collections.abc import Iterable

import model_zoo

SETS = {
    "quick": ("nn/mlp10x64", "torchvision/mobilenet_v3_small"),
    "cpu": (
        "nn/mlp10x64",
        "torchvision/mobilenet_v3_small",
        "torchvision/resnet18",
        "timm/vit_tiny_patch16_224",
        "ultralytics/yolov8n",
        "transformers/bert_tiny",
    ),
    "small": (
        "nn/mlp10x64",
        "nn/lstm_classifier",
        "nn/transformer_encoder",
        "torchvision/mobilenet_v3_small",
        "torchvision/squeezenet1_1",
        "torchvision/resnet18",
        "timm/lcnet_035",
        "timm/test_vit",
        "transformers/bert_tiny",
        "transformers/gpt2_tiny",
    ),
    "cuda": (
        "timm/resnet50",
        "torchvision/mobilenet_v3_large",
        "timm/vit_tiny_patch16_224",
        "timm/swin_tiny_patch4_window7_224",
        "ultralytics/yolov8n",
        "rfdetr/nano",
        "ultralytics/rtdetr-l",
        "transformers/llama_tiny",
    ),
}

SETS["toys"] = model_zoo.names("toys")
SETS["zoo"] = tuple(name for name in model_zoo.names() if name not in SETS["toys"])


def meant(names: Iterable[str]) -> tuple[str, ...]:
    """The models that the names, of models and of sets, mean, each once. Raises `model_zoo.UnknownNameError`."""
    found = dict.fromkeys(name for wanted in names for name in SETS.get(wanted, (wanted,)))
    return tuple(model_zoo.entry(name).name for name in found)
