"""The models of the tier by name."""

from __future__ import annotations

from conformance.wild import (
    diffusers,
    monai,
    open_clip,
    segmentation_models,
    timm_others,
    torchaudio,
    transformers_others,
    vit_pytorch,
    x_transformers,
)
from model_zoo.definition import Entry

_MODULES = (
    segmentation_models,
    monai,
    diffusers,
    torchaudio,
    open_clip,
    vit_pytorch,
    x_transformers,
    timm_others,
    transformers_others,
)
_ENTRIES: dict[str, Entry] = {made.name: made for module in _MODULES for made in module.ENTRIES}


def names() -> tuple[str, ...]:
    """All names, a package after the other."""
    return tuple(_ENTRIES)


def entry(name: str) -> Entry:
    """The entry of that name; ValueError lists what there is otherwise."""
    if name not in _ENTRIES:
        raise ValueError(f"no program {name!r}; there are {', '.join(_ENTRIES)}")
    return _ENTRIES[name]
