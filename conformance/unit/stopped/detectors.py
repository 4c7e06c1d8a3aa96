"""Detectors, each cut at its backbone, pyramid or neck: `python -m conformance.unit.stopped.detectors [--zoo] [WORD ...]`.

Small ones of torchvision's and transformers' own classes, in eval with no, one and many detections, and in training with no, one
and many objects. Each is split with `fallback="python"` and `"python-suffix"` and held, bit for bit, against the whole model:
results or losses, gradients, buffers and random numbers. What crosses goes as it is and as bytes, and where the prefix is a graph,
also from its file. A line for each tells what was compared; it ends with 1 where anything differs. With `--zoo` they are
torchvision's twelve as it builds them, on images of 64 by 96 pixels, or larger ones where less is too small. Of words, a line must
have each: `mask eval`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision import models, ops
from transformers import DetrConfig, DetrForObjectDetection, RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig
from transformers import ResNetConfig as ResNetOfTransformers

import ariadne
from ariadne import BoundaryPayload, MixedSplit, PythonSplit, SplitRuntime, SplitSpec, prepare_split
from ariadne.compare import difference
from ariadne.errors import AriadneError

Images, Targets = list[Tensor], list[dict[str, Tensor]]
Mode = Literal["eval", "train"]
Way = Literal["python", "python-suffix"]
CLASSES, KEYPOINTS = 5, 3
_SMALL, _LARGER, _SQUARES = ((64, 96), (96, 64)), ((128, 192), (192, 128)), ((300, 300),) * 2
detection = models.detection


@dataclass(frozen=True)
class Detector:
    """A detector, the module calls that it is cut after, and what it is given: images and targets, or a batch with labels."""

    make: Callable[[], nn.Module]
    cuts: tuple[str, ...]
    of_lists: bool = True
    sizes: tuple[tuple[int, int], ...] = _SMALL

    def given(self, mode: Mode, objects: int, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs with so many objects in each image."""
        images = pictures(*self.sizes, seed=seed)
        if self.of_lists:
            return ((images, targets(images, objects)) if mode == "train" else (images,)), {}
        found = targets(images, objects)
        labels = [{"class_labels": t["labels"], "boxes": _centred(t["boxes"] / 96)} for t in found]
        return (torch.stack([image[:, :64, :64] for image in images]),), {"labels": labels} if mode == "train" else {}


def backbone(extra: nn.Module | None = None) -> nn.Module:
    """A small ResNet with a feature pyramid of three levels, and of what is made of the last."""
    body = models.resnet.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1])
    layers = {"layer2": "0", "layer3": "1", "layer4": "2"}
    made: nn.Module = detection.backbone_utils.BackboneWithFPN(body, layers, [128, 256, 512], 32, extra_blocks=extra)
    return made


def _anchors(sizes: tuple[int, ...], ratios: tuple[float, ...] = (0.5, 1.0, 2.0)) -> nn.Module:
    made: nn.Module = detection.anchor_utils.AnchorGenerator(tuple((s,) for s in sizes), (ratios,) * len(sizes))
    return made


FEW = {"num_classes": CLASSES, "min_size": 64, "max_size": 96}
BOXES = {
    "box_score_thresh": 0.0, "box_detections_per_img": 5, "rpn_pre_nms_top_n_train": 30, "rpn_pre_nms_top_n_test": 30,
    "rpn_post_nms_top_n_train": 20, "rpn_post_nms_top_n_test": 10,
}  # fmt: skip


def _pool(size: int) -> nn.Module:
    made: nn.Module = ops.MultiScaleRoIAlign(["0", "1", "2"], size, 2)
    return made


def _of_regions(name: str, **options: Any) -> nn.Module:
    anchors = _anchors((16, 32, 64, 128))
    made: nn.Module = getattr(detection, name)(
        backbone(), rpn_anchor_generator=anchors, box_roi_pool=_pool(7), **{**FEW, **BOXES, **options}
    )
    return made


def faster(**options: Any) -> nn.Module:
    """Faster R-CNN."""
    return _of_regions("FasterRCNN", **options)


def mask(**options: Any) -> nn.Module:
    """Mask R-CNN."""
    return _of_regions("MaskRCNN", mask_roi_pool=_pool(14), **options)


def keypoint(**options: Any) -> nn.Module:
    """Keypoint R-CNN, whose only objects are persons."""
    return _of_regions("KeypointRCNN", keypoint_roi_pool=_pool(14), num_keypoints=KEYPOINTS, **options)


def retina(**options: Any) -> nn.Module:
    """RetinaNet."""
    return _of_pyramid("RetinaNet", (0.5, 1.0, 2.0), **options)


def fcos(**options: Any) -> nn.Module:
    """FCOS, which has one anchor at each place."""
    return _of_pyramid("FCOS", (1.0,), **options)


def _of_pyramid(name: str, ratios: tuple[float, ...], **options: Any) -> nn.Module:
    pyramid = backbone(ops.feature_pyramid_network.LastLevelP6P7(32, 32))
    anchors = _anchors((16, 32, 64, 128, 256), ratios)
    few = {"score_thresh": 0.0, "detections_per_img": 5}
    made: nn.Module = getattr(detection, name)(pyramid, anchor_generator=anchors, **{**FEW, **few, **options})
    return made


def ssd(**options: Any) -> nn.Module:
    """SSD, on a VGG of few channels up to its fourth level; the fifth and the extra ones are torchvision's."""
    layers = models.vgg.make_layers([8, "M", 16, "M", 32, "M", 512, "M", 512, "M"])
    pyramid = detection.ssd._vgg_extractor(models.VGG(layers, num_classes=2), False, 5)
    anchors = detection.anchor_utils.DefaultBoxGenerator([[2], [2, 3], [2, 3], [2, 3], [2], [2]])
    few = {"score_thresh": 0.0, "detections_per_img": 5}
    made: nn.Module = detection.ssd.SSD(pyramid, anchors, (300, 300), CLASSES, **{**few, **options})
    return made


def ssdlite(**options: Any) -> nn.Module:
    """SSDlite, as torchvision builds it."""
    few: Any = {"score_thresh": 0.0, "detections_per_img": 5, "num_classes": CLASSES, "weights_backbone": None}
    made: nn.Module = detection.ssdlite320_mobilenet_v3_large(weights=None, **{**few, **options})
    return made


def detr() -> nn.Module:
    """DETR of transformers."""
    body = ResNetOfTransformers(
        embedding_size=16,
        hidden_sizes=[16, 16, 32, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = DetrConfig(
        backbone_config=body, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=4, decoder_attention_heads=4, num_queries=10, num_labels=CLASSES, auxiliary_loss=True,
    )  # fmt: skip
    return DetrForObjectDetection(config)


def rt_detr() -> nn.Module:
    """RT-DETR of transformers, which draws noise around the objects in training."""
    body = RTDetrResNetConfig(
        embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = RTDetrConfig(
        backbone_config=body, encoder_hidden_dim=32, encoder_in_channels=[16, 32, 32], encoder_ffn_dim=32,
        encoder_attention_heads=4, d_model=32, num_queries=12, decoder_in_channels=[32, 32, 32], decoder_ffn_dim=32,
        decoder_layers=2, decoder_attention_heads=4, num_denoising=6, num_labels=CLASSES,
    )  # fmt: skip
    return RTDetrForObjectDetection(config)


_PYRAMID = ("backbone.body.layer2", "backbone.fpn", "backbone")
DETECTORS = {
    "faster": Detector(faster, (*_PYRAMID, "rpn.head")),
    "mask": Detector(mask, (*_PYRAMID, "rpn.head")),
    "keypoint": Detector(keypoint, (*_PYRAMID, "rpn.head")),
    "retina": Detector(retina, (*_PYRAMID, "head")),
    "fcos": Detector(fcos, (*_PYRAMID, "head")),
    "ssd": Detector(ssd, ("backbone.features", "backbone", "head"), sizes=_SQUARES),  # less is too small
    "ssdlite": Detector(ssdlite, ("backbone.features.0", "backbone", "head")),
    "detr": Detector(detr, ("model.backbone", "model.encoder", "model.decoder"), of_lists=False),
    "rt_detr": Detector(rt_detr, ("model.backbone", "model.encoder", "model.decoder"), of_lists=False),
}


def as_built(
    name: str, cuts: tuple[str, ...] = _PYRAMID, sizes: tuple[tuple[int, int], ...] = _SMALL, **ours: Any
) -> Detector:
    """A detector of torchvision's at the size that it has there, save for `ours`, with weights that are drawn."""

    def make(**options: Any) -> nn.Module:
        sized = {} if name.startswith("ssd") else {"min_size": min(sizes[0]), "max_size": max(sizes[0])}
        made: nn.Module = getattr(detection, name)(weights=None, weights_backbone=None, **sized, **ours, **options)
        holder: Any = getattr(made, "roi_heads", made)
        holder.score_thresh, holder.detections_per_img = 0.0, 5
        return made

    return Detector(make, cuts, sizes=sizes)


_REGIONS, _WHOLE = (*_PYRAMID, "rpn.head"), (*_PYRAMID, "head")
ZOO = {
    "ssdlite320_mobilenet_v3_large": as_built(
        "ssdlite320_mobilenet_v3_large", ("backbone.features.0", "backbone", "head"), _LARGER
    ),
    "ssd300_vgg16": as_built("ssd300_vgg16", ("backbone.features", "backbone", "head"), _SQUARES),
    **{
        name: as_built(name, ("backbone.body", "backbone.fpn", "backbone", "rpn.head"), _LARGER)
        for name in ("fasterrcnn_mobilenet_v3_large_320_fpn", "fasterrcnn_mobilenet_v3_large_fpn")
    },
    **{name: as_built(name, _WHOLE) for name in ("fcos_resnet50_fpn", "retinanet_resnet50_fpn")},
    "maskrcnn_resnet50_fpn": as_built("maskrcnn_resnet50_fpn", _REGIONS),
    "keypointrcnn_resnet50_fpn": as_built(
        "keypointrcnn_resnet50_fpn", _REGIONS, num_classes=CLASSES, num_keypoints=KEYPOINTS
    ),
    "fasterrcnn_resnet50_fpn": as_built("fasterrcnn_resnet50_fpn", _REGIONS),
    "retinanet_resnet50_fpn_v2": as_built("retinanet_resnet50_fpn_v2", _WHOLE),
    "fasterrcnn_resnet50_fpn_v2": as_built("fasterrcnn_resnet50_fpn_v2", _REGIONS),
    "maskrcnn_resnet50_fpn_v2": as_built("maskrcnn_resnet50_fpn_v2", _REGIONS),
}


def pictures(*sizes: tuple[int, int], seed: int = 0) -> Images:
    """Images of these sizes."""
    generator = torch.Generator().manual_seed(100 * seed + len(sizes))
    return [torch.rand(3, *size, generator=generator) for size in sizes]


def targets(images: Images, objects: int) -> Targets:
    """So many objects for each image: boxes, labels, masks and keypoints."""
    generator, found = torch.Generator().manual_seed(objects), []
    for image in images:
        corner = 20 * torch.rand(objects, 2, generator=generator)
        size = 8 + 20 * torch.rand(objects, 2, generator=generator)
        masks = (torch.rand(objects, *image.shape[1:], generator=generator) > 0.5).to(torch.uint8)
        labels = torch.randint(1, CLASSES, (objects,), generator=generator)
        points = corner[:, None] + size[:, None] * torch.rand(objects, KEYPOINTS, 2, generator=generator)
        seen = torch.cat([points, torch.ones(objects, KEYPOINTS, 1)], 2)
        boxes = torch.cat([corner, corner + size], 1)
        found.append({"boxes": boxes, "labels": labels, "masks": masks, "keypoints": seen})
    return found


def _centred(boxes: Tensor) -> Tensor:
    made: Tensor = ops.box_convert(boxes, "xyxy", "cxcywh")
    return made


def total(output: Any, _: Any = None) -> Tensor:
    """The loss of what a detector gives in training."""
    losses = output if isinstance(output, dict) and "loss" not in output else {"loss": output["loss"]}
    return torch.stack([*losses.values()]).sum()


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that a step moves: gradients, buffers, and where torch's generator stands."""
    gradients = {k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()}
    return {
        "gradients": gradients,
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "rng": torch.get_rng_state(),
    }


def _plain(found: Any) -> Any:
    """What a detector gives as plain containers: transformers' outputs are a class of their own."""
    return dict(found) if isinstance(found, dict) else found


def in_eval(detector: Detector, model: nn.Module, runtime: Any, half: Any) -> Iterator[str]:
    """What differs from the whole model with no, one and many detections; yields what was held against it."""
    holder: Any = getattr(model, "roi_heads", model)
    for seed, (threshold, most) in enumerate(((2.0, 5), (0.0, 1), (0.0, 5))):
        if detector.of_lists:
            holder.score_thresh, holder.detections_per_img = threshold, most
        args, kwargs = detector.given("eval", 0, seed)
        with torch.no_grad():
            theirs = _plain(model(*args, **kwargs))
        sides = [runtime] if half is None else [runtime, half]
        for side in sides:
            boundary = side.run_prefix(*args, **kwargs)
            sent = [BoundaryPayload.from_bytes(boundary.to_bytes())] if not getattr(runtime, "stays", None) else []
            for one in (*([boundary] if side is runtime else []), *sent):
                wrong = difference(theirs, _plain(runtime.run_suffix(one)))
                if wrong:
                    raise AssertionError(f"with score_thresh {threshold}, at most {most}: {wrong}")
        found = sum(len(one["boxes"]) for one in theirs) if detector.of_lists else len(theirs["pred_boxes"][0])
        yield f"{found} found"


def in_training(detector: Detector, model: nn.Module, runtime: Any, counts: tuple[int, ...]) -> Iterator[str]:
    """What differs from the whole model's steps; yields what was held against it."""
    for objects in counts:
        args, kwargs = detector.given("train", objects, objects)
        start = {k: v.clone() for k, v in model.state_dict().items()}
        found = []
        for halves in (False, True):
            model.load_state_dict(start)
            model.zero_grad(set_to_none=True)
            torch.manual_seed(objects)
            if halves:
                boundary = runtime.run_training_prefix(*args, **kwargs)
                loss, gradients = runtime.train_suffix(boundary, loss_fn=total)
                runtime.backward_prefix(boundary, gradients)
            else:
                loss = total(model(*args, **kwargs))
                loss.backward()
            found.append((loss.detach(), state_of(model)))
        wrong = difference(*found)
        if wrong:
            raise AssertionError(f"with {objects} objects an image: {wrong}")
        yield f"{objects} objects"


def held(detector: Detector, mode: Mode, cut: str, way: Way) -> str:
    """One detector, cut and run one way, held against the whole: what was compared; raises where something differs."""
    torch.manual_seed(1)
    fixed = {"_skip_resize": True} if detector.of_lists and (mode, way) == ("train", "python-suffix") else {}
    model = detector.make(**fixed)
    model.train(mode == "train")
    objects = 2
    args, kwargs = detector.given(mode, objects, 9)
    spec = SplitSpec(f"after:{cut}", trainable=mode == "train", max_paths=1)
    runtime = prepare_split(model, args, example_kwargs=kwargs, split=spec, fallback=way)
    kind = {PythonSplit: "Python", MixedSplit: "graph, then Python", SplitRuntime: "graph"}[type(runtime)]
    if mode == "train":
        counts = (
            (0, 1, 6) if isinstance(runtime, PythonSplit) else (objects, objects)
        )  # a graph has the example's sizes
        return f"{kind}: {', '.join(in_training(detector, model, runtime, counts))}"
    half = None
    if isinstance(runtime, MixedSplit):
        with tempfile.TemporaryDirectory() as folder:
            runtime.save(Path(folder) / "prefix.safetensors", side="prefix")
            half = ariadne.load(Path(folder) / "prefix.safetensors")
    stays = getattr(runtime, "stays", None)
    told = f"; in this process alone: {stays}" if stays else ""
    return f"{kind}: {', '.join(in_eval(detector, model, runtime, half))}{told}"


def main(asked: list[str]) -> int:
    """Hold each detector whose line has all of these parts; 1 where one differs."""
    wrong = 0
    ways: tuple[Way, ...] = ("python", "python-suffix")
    modes: tuple[Mode, ...] = ("eval", "train")
    zoo = "--zoo" in asked
    words = [word for word in asked if word != "--zoo"]
    for name, detector in (ZOO if zoo else DETECTORS).items():
        for mode, cut, way in product(modes, detector.cuts, ways):
            line = f"{name} {mode} {cut} {way}"
            if not all(word in line.split(" ") for word in words):
                continue
            start = time.process_time()
            try:
                told = f"equal; {held(detector, mode, cut, way)}"
            except AriadneError as error:
                told = f"refused; {type(error).__name__}: {error}"
            except Exception as error:  # what differs, or whatever the model raises
                told, wrong = f"WRONG; {type(error).__name__}: {error}", 1
            sys.stdout.write(f"{line}: {told} ({time.process_time() - start:.0f} s)\n")
            sys.stdout.flush()
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
