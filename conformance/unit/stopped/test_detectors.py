"""torchvision's detectors, cut after their backbone: lists of images of different sizes, in eval and in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ariadne import PythonSplit, SplitSpec
from ariadne.compare import difference
from ariadne.prepare import _settings, example_of
from ariadne.stopped import prepared

pytestmark = pytest.mark.zoo


@pytest.fixture(scope="module")
def detectors() -> Any:
    return pytest.importorskip("conformance.unit.stopped.detectors")


def cut(detectors: Any, model: nn.Module) -> PythonSplit:
    settings = _settings(SplitSpec("after:backbone"), "generated_eager", None, None)
    example = example_of(model, (detectors.pictures((40, 60), (50, 50)),), None, settings.spec)
    return prepared(model.eval(), settings, example, "a detector", training=True)


@pytest.mark.parametrize("name", ["faster", pytest.param("mask", marks=pytest.mark.variants), "retina"])
def test_a_detector_finds_the_same_in_images_of_any_sizes_whether_it_finds_any_or_none(
    detectors: Any, name: str
) -> None:
    torch.manual_seed(1)
    model, pictures = getattr(detectors, name)(), detectors.pictures
    runtime = cut(detectors, model)
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


@pytest.mark.parametrize("name", ["faster", "retina"])
def test_a_detector_trains_as_the_whole_does_with_no_object_and_with_many(detectors: Any, name: str) -> None:
    torch.manual_seed(1)
    model, total = getattr(detectors, name)(), detectors.total
    runtime = cut(detectors, model)
    model.train()
    images = detectors.pictures((40, 60), (50, 50))
    for objects in (0, 2, 6):
        found = []
        state = {k: v.clone() for k, v in model.state_dict().items()}
        for halves in (False, True):
            model.load_state_dict(state)
            model.zero_grad(set_to_none=True)
            torch.manual_seed(objects)
            given = detectors.targets(images, objects)
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
