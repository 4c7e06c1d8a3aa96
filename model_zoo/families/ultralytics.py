"""Models of ultralytics for every task, from the configurations it ships: the module inside, called on a plain image tensor."""

import atexit
import os
import shutil
import tempfile
from functools import partial
from typing import Any

from torch import nn

from model_zoo.definition import Entry
from model_zoo.packages import package
from model_zoo.sampling import dense


def _ultralytics() -> Any:
    """The library, kept from the network, from installing packages and from the user's settings file."""
    os.environ.setdefault("YOLO_OFFLINE", "true")  # "1" and "0" are unknown to older releases
    os.environ.setdefault("YOLO_AUTOINSTALL", "false")
    os.environ.setdefault("YOLO_VERBOSE", "false")
    if "YOLO_CONFIG_DIR" not in os.environ:
        os.environ["YOLO_CONFIG_DIR"] = settings = tempfile.mkdtemp(prefix="model_zoo_yolo_")
        atexit.register(shutil.rmtree, settings, ignore_errors=True)
    return package("ultralytics")


def _make(wrapper: str, configuration: str) -> nn.Module:
    model: nn.Module = getattr(_ultralytics(), wrapper)(configuration).model
    return model


def _entry(name: str, tags: str, image: int, wrapper: str = "YOLO") -> Entry:
    make = partial(_make, wrapper, f"{name}.yaml")
    return Entry(f"ultralytics/{name}", frozenset({"batchnorm", *tags.split()}), make, dense(3, image, image))


ENTRIES = (
    # In training mode without targets it leaves out the denoising queries (and adds 0 * their embedding).
    # 128 pixels give 336 positions for its top 300; at 96 there is nothing to choose.
    _entry("rtdetr-l", "detection heavy unused", 128, wrapper="RTDETR"),
    _entry("yolo11n", "detection cheap data-dependent", 96),
    _entry("yolo11n-cls", "classification cheap", 64),
    _entry("yolo11n-obb", "detection cheap data-dependent", 96),
    _entry("yolo11n-pose", "pose cheap data-dependent", 96),
    _entry("yolo11n-seg", "segmentation cheap data-dependent", 96),
    _entry("yolo12n", "detection cheap data-dependent", 96),
    _entry("yolo12n-cls", "classification cheap", 64),
    _entry("yolo12n-obb", "detection cheap data-dependent", 96),
    _entry("yolo12n-pose", "pose cheap data-dependent", 96),
    _entry("yolo12n-seg", "segmentation cheap data-dependent", 96),
    _entry("yolo26n", "detection cheap data-dependent", 96),
    # Two heads: one for training alone, and one without duplicates, whose input is detached.
    _entry("yolov10n", "detection cheap data-dependent", 96),
    _entry("yolov5n", "detection cheap data-dependent", 96),
    _entry("yolov8n", "detection cheap data-dependent", 96),
    _entry("yolov8n-cls", "classification cheap", 64),
    _entry("yolov8n-obb", "detection cheap data-dependent", 96),
    _entry("yolov8n-pose", "pose cheap data-dependent", 96),
    _entry("yolov8n-seg", "segmentation cheap data-dependent", 96),
    _entry("yolov9c-seg", "segmentation medium data-dependent", 96),
    _entry("yolov9t", "detection cheap data-dependent", 96),
)
