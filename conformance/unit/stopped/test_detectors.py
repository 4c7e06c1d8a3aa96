"""torchvision's detectors, cut after their backbone: lists of images of different sizes, in eval and in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import PythonSplit, SplitSpec
from ariadne.compare import difference
from ariadne.prepare import _settings, example_of
from ariadne.stopped import prepared

models = pytest.importorskip("torchvision.models")
ops = pytest.importorskip("torchvision.ops")
detection = models.detection
Images, Targets = list[Tensor], list[dict[str, Tensor]]


def backbone(extra: nn.Module | None = None) -> nn.Module:
    body = models.resnet.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1])
    layers = {"layer2": "0", "layer3": "1", "layer4": "2"}
    made: nn.Module = detection.backbone_utils.BackboneWithFPN(body, layers, [128, 256, 512], 32, extra_blocks=extra)
    return made


def anchors(sizes: tuple[int, ...], ratios: tuple[float, ...] = (0.5, 1.0, 2.0)) -> nn.Module:
    made: nn.Module = detection.anchor_utils.AnchorGenerator(tuple((s,) for s in sizes), (ratios,) * len(sizes))
    return made


FEW = {"num_classes": 5, "min_size": 64, "max_size": 96}
BOXES = {
    "box_score_thresh": 0.0, "box_detections_per_img": 5, "rpn_pre_nms_top_n_train": 30, "rpn_pre_nms_top_n_test": 30,
    "rpn_post_nms_top_n_train": 20, "rpn_post_nms_top_n_test": 10,
}  # fmt: skip


def pool(size: int) -> nn.Module:
    made: nn.Module = ops.MultiScaleRoIAlign(["0", "1", "2"], size, 2)
    return made


def faster() -> nn.Module:
    made: nn.Module = detection.FasterRCNN(
        backbone(), rpn_anchor_generator=anchors((16, 32, 64, 128)), box_roi_pool=pool(7), **FEW, **BOXES
    )
    return made


def mask() -> nn.Module:
    made: nn.Module = detection.MaskRCNN(
        backbone(), rpn_anchor_generator=anchors((16, 32, 64, 128)), box_roi_pool=pool(7), mask_roi_pool=pool(14),
        **FEW, **BOXES,
    )  # fmt: skip
    return made


def retina() -> nn.Module:
    made: nn.Module = detection.RetinaNet(
        backbone(ops.feature_pyramid_network.LastLevelP6P7(32, 32)), anchor_generator=anchors((16, 32, 64, 128, 256)),
        score_thresh=0.0, detections_per_img=5, **FEW,
    )  # fmt: skip
    return made


def pictures(*sizes: tuple[int, int]) -> Images:
    generator = torch.Generator().manual_seed(len(sizes))
    return [torch.rand(3, *size, generator=generator) for size in sizes]


def targets(images: Images, objects: int) -> Targets:
    generator, found = torch.Generator().manual_seed(objects), []
    for image in images:
        corner = 20 * torch.rand(objects, 2, generator=generator)
        size = 8 + 20 * torch.rand(objects, 2, generator=generator)
        masks = (torch.rand(objects, *image.shape[1:], generator=generator) > 0.5).to(torch.uint8)
        labels = torch.randint(1, 5, (objects,), generator=generator)
        found.append({"boxes": torch.cat([corner, corner + size], 1), "labels": labels, "masks": masks})
    return found


def cut(model: nn.Module) -> PythonSplit:
    settings = _settings(SplitSpec("after:backbone"), "generated_eager", None, None)
    example = example_of(model, (pictures((40, 60), (50, 50)),), None, settings.spec)
    return prepared(model.eval(), settings, example, "a detector", training=True)


@pytest.mark.parametrize("make", [faster, mask, retina])
def test_a_detector_finds_the_same_in_images_of_any_sizes_whether_it_finds_any_or_none(
    make: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(1)
    model = make()
    runtime = cut(model)
    holder: Any = getattr(model, "roi_heads", model)
    counts = set()
    for threshold in (0.0, 2.0):
        holder.score_thresh = threshold
        for images in (pictures((40, 60), (50, 50)), pictures((70, 30)), pictures((40, 60), (64, 64), (33, 90))):
            with torch.no_grad():
                theirs = model(images)
            assert difference(theirs, runtime.run_suffix(runtime.run_prefix(images))) is None
            counts |= {len(found["boxes"]) for found in theirs}
    assert {0, 5} <= counts


def total(losses: dict[str, Tensor], _: Any = None) -> Tensor:
    return torch.stack([*losses.values()]).sum()


@pytest.mark.parametrize("make", [faster, retina])
def test_a_detector_trains_as_the_whole_does_with_no_object_and_with_many(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    model = make()
    runtime = cut(model)
    model.train()
    images = pictures((40, 60), (50, 50))
    for objects in (0, 2, 6):
        found = []
        state = {k: v.clone() for k, v in model.state_dict().items()}
        for halves in (False, True):
            model.load_state_dict(state)
            model.zero_grad(set_to_none=True)
            torch.manual_seed(objects)
            given = targets(images, objects)
            if halves:
                boundary = runtime.run_training_prefix(images, given)
                loss, gradients = runtime.train_suffix(boundary, loss_fn=total)
                runtime.backward_prefix(boundary, gradients)
            else:
                loss = total(model(images, given))
                loss.backward()
            kept = {k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()}
            buffers = {k: v.clone() for k, v in model.state_dict().items()}
            found.append((loss.detach(), kept, buffers, torch.get_rng_state()))
        assert difference(*found) is None
