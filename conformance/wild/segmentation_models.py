"""Decoders of segmentation-models-pytorch, each over a small encoder."""

from __future__ import annotations

from functools import partial

from conformance.wild.making import entry
from model_zoo.definition import Entry
from model_zoo.sampling import dense

_smp = partial(entry, "segmentation_models_pytorch", encoder_weights=None, classes=3)


def _decoder(name: str, encoder: str = "resnet18", size: int = 64, **options: object) -> Entry:
    short = f"{name}_{encoder}" if encoder != "resnet18" else name
    return _smp(name, dense(3, size, size), "batchnorm", as_name=short, encoder_name=encoder, **options)


ENTRIES = (
    _decoder("Unet"),
    _decoder("UnetPlusPlus"),
    _decoder("MAnet"),
    _decoder("Linknet"),
    _decoder("FPN"),
    _decoder("PSPNet"),
    _decoder("PAN", size=128),
    _decoder("DeepLabV3"),
    _decoder("DeepLabV3Plus"),
    _decoder("UPerNet"),
    _decoder("Segformer"),
    _decoder("Unet", "mobilenet_v2"),
    _decoder("Unet", "mit_b0"),
    _decoder("FPN", "timm-efficientnet-b0"),
    _decoder("Unet", "densenet121", decoder_attention_type="scse"),
    _decoder("Unet", "resnet34", aux_params={"classes": 4, "dropout": 0.2}),
)
