"""Which models are measured: names of the zoo, of the larger ones beside it (`sized/…`), and sets of these."""

from __future__ import annotations

from collections.abc import Iterable

import model_zoo
from benchmarks import sized

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
    "cuda": (  # the first four tell what compiling costs, and what takes long to compile comes early
        "sized/resnet50_224",
        "torchvision/mobilenet_v3_large",
        "transformers/llama_tiny",
        "timm/vit_tiny_patch16_224",
        "sized/llama_1b_bf16",
        "sized/swin_tiny_224",
        "rfdetr/nano",
        "sized/yolov8n_640",
        "sized/vit_base_patch16_224",
        "timm/swin_tiny_patch4_window7_224",
        "ultralytics/yolov8n",
        "timm/resnet50",
    ),
}

SETS["sized"] = (*sized.ENTRIES, "rfdetr/nano")  # that one is in the zoo as it comes, at 384 pixels
SETS["toys"] = model_zoo.names("toys")
SETS["zoo"] = tuple(name for name in model_zoo.names() if name not in SETS["toys"])


def meant(names: Iterable[str]) -> tuple[str, ...]:
    """The models that the names, of models and of sets, mean, each once. Raises `model_zoo.UnknownNameError`."""
    found = dict.fromkeys(name for wanted in names for name in SETS.get(wanted, (wanted,)))
    return tuple(sized.entry(name).name for name in found)
