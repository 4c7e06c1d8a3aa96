"""RF-DETR: the module inside the wrapper, called on a plain image tensor.

The library would fetch DINOv2's weights for a backbone whose patches are of 14 pixels, as "base" has; these have not.
"""

from functools import partial
from typing import Any

from torch import nn

from model_zoo.definition import Entry
from model_zoo.packages import package
from model_zoo.process import quiet
from model_zoo.sampling import dense


def _make(wrapper: str, **options: Any) -> nn.Module:
    made = getattr(package("rfdetr"), wrapper)
    with quiet("rf-detr"):  # it warns that no weights are loaded, which is what is asked for
        model: nn.Module = made(pretrain_weights=None, device="cpu", **options).model.model
    return model


def _entry(name: str, tags: str, image: int, wrapper: str, **options: Any) -> Entry:
    found = frozenset({"detection", "unused", *tags.split()})
    return Entry(f"rfdetr/{name}", found, partial(_make, wrapper, **options), dense(3, image, image))


# Nano is as it comes. The others are for larger images: they get a smaller grid of positions, and fewer queries, which
# are chosen among these.
ENTRIES = (
    # Training mode answers with 13 groups of queries, 3,900 rows in place of 300.
    _entry("nano", "heavy", 384, "RFDETRNano"),
    _entry(
        "seg_nano",
        "segmentation heavy",
        192,
        "RFDETRSegNano",
        resolution=192,
        positional_encoding_size=16,
        num_queries=50,
        num_select=50,
    ),
    _entry(
        "small",
        "heavy",
        192,
        "RFDETRSmall",
        resolution=192,
        positional_encoding_size=12,
        num_queries=50,
        num_select=50,
    ),
)
