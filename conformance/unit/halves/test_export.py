"""Halves for other runtimes: what they compute, what is in their files, and what stands in the way."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne.errors import BoundaryError, HalfError, ModuleError, SpecError
from ariadne.halves.export import Schema
from conformance.unit.halves.exports import SIDES, TEN, expected, exported, session, tensors

ONNX = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs onnx, onnxscript and onnxruntime: pip install 'ariadne-runtime[export]' onnxruntime",
)


def halves(folder: Path, model: nn.Module, args: Any, kwargs: Any = None, split: str = "50%") -> Any:
    """The split of a model, and its halves from files."""
    runtime = ariadne.prepare_split(model, args, example_kwargs=kwargs, split=split)
    found = []
    for side in SIDES:
        runtime.save(folder / side, side=side)
        found.append(ariadne.load(folder / side, plain=True))
    return runtime, *found


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(144, 5)
    ).eval()


IMAGE = torch.randn(2, 3, 8, 8)


@ONNX
@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize("name", TEN)
def test_halves_of_the_zoo_run_in_onnx_runtime_and_as_exported_programs(name: str, tmp_path: Path) -> None:
    for said in exported(name, tmp_path):
        assert "onnx within" in said, said


def test_an_exported_program_takes_and_gives_what_the_boundary_names(tmp_path: Path) -> None:
    _, prefix, suffix = halves(tmp_path, net(), (IMAGE,), split="after:2")
    given = prefix.export(tmp_path / "edge.pt2")
    served = given.batches
    assert given == Schema(("input",), tuple(prefix.run_prefix(IMAGE).labels), served)
    assert served == (1, 64)
    assert suffix.export(tmp_path / "server.pt2") == Schema(given.outputs, ("output",), served)
    extra = {"ariadne.json": ""}
    program = torch.export.load(tmp_path / "edge.pt2", extra_files=extra)
    told = json.loads(extra["ariadne.json"])
    assert {k: told[k] for k in ("split_id", "plan_signature", "weights")} == prefix.boundary_key
    assert [*program.state_dict] == [*prefix.state_dict()]
    for batch in (1, 2, 5):
        x = torch.randn(batch, 3, 8, 8)
        found = program.module()(x)
        assert [*found] == [*given.outputs]
        boundary = ariadne.ReplayBoundary.from_tensors(found, **prefix.boundary_key)
        assert torch.equal(suffix.run_suffix(boundary), suffix.run_suffix(prefix.run_prefix(x)))


class Outputs(nn.Module):
    """Two inputs, and results in a dict with a list."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3)
        self.two_again = self.two
        self.plain = torch.arange(3.0)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Any]:
        h = self.one(left).reshape(-1, 2) + right.repeat_interleave(2, 0)
        h = h.reshape(left.shape[0], 4)
        return {"logits": self.two(h) * self.plain, "parts": [h * 2, self.two_again(h).sum(1)]}


@pytest.mark.parametrize("ending", ["pt2", pytest.param("onnx", marks=ONNX)])
def test_structures_ties_and_sizes_that_are_multiples_of_the_batch_are_exported(tmp_path: Path, ending: str) -> None:
    args = torch.randn(3, 4), torch.randn(3, 2)
    runtime = ariadne.prepare_split(Outputs().eval(), args, split="50%")
    safe = [candidate for candidate in runtime.candidates if candidate.safe]
    for candidate in safe[:: 3 if ending == "onnx" else 1]:  # a program takes seconds to become ONNX
        made = runtime.resplit(candidate)
        for side in SIDES:
            made.save(tmp_path / side, side=side)
            schema = ariadne.load(tmp_path / side).export(tmp_path / f"half.{ending}")
            if side == "suffix":
                assert schema.outputs == ("output_logits", "output_parts_0", "output_parts_1")
            assert schema.batches in ((1, 64), (2, 64))
            for batch in (schema.batches[0], 2, 7):
                given, wanted = expected(made, side, (torch.randn(batch, 4), torch.randn(batch, 2)), {})
                if ending == "pt2":
                    found = tensors(torch.export.load(tmp_path / "half.pt2").module()(*given))
                    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
                else:
                    ins = {n: t.numpy() for n, t in zip(schema.inputs, given, strict=True)}
                    arrays = session(tmp_path / "half.onnx").run([*schema.outputs], ins)
                    assert all(np.allclose(a, b.numpy(), atol=1e-5) for a, b in zip(arrays, wanted, strict=True))


class Reads(nn.Module):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.one, self.two, self.what = nn.Linear(4, 4), nn.Linear(4, 4), what

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.what(self.one(x)))


def _branch(h: Tensor) -> Tensor:
    return h * 2 if bool((h.abs().sum() >= 0).item()) else h


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (_branch, r"Python reads what aten\.\w+\.\w+ \(in the model itself\) gives"),
        (lambda h: h + torch.rand_like(h), r"aten\.rand_like\.default \(in the model itself\) draws random numbers"),
        (lambda h: torch.dropout(h, 0.5, True), r"aten\.dropout\.default \(in the model itself\) draws random numbers"),
        (lambda h: h * len(h.detach()[:0].tolist()), "Python reads what .* gives"),
    ],
)
def test_what_stands_in_the_way_of_an_export_is_named(tmp_path: Path, what: Any, says: str) -> None:
    _, _, suffix = halves(tmp_path, Reads(what).eval(), (torch.randn(2, 4),), split="after:one")
    for ending in ("pt2", "onnx") if importlib.util.find_spec("onnxscript") else ("pt2",):
        with pytest.raises(HalfError, match=says):
            suffix.export(tmp_path / f"half.{ending}")
        assert not (tmp_path / f"half.{ending}").exists()


@ONNX
@pytest.mark.variants
def test_an_op_that_onnx_has_no_words_for_is_named(tmp_path: Path) -> None:
    _, _, suffix = halves(tmp_path, Reads(torch.special.bessel_j0).eval(), (torch.randn(2, 4),), split="after:one")
    suffix.export(tmp_path / "half.pt2")
    with pytest.raises(HalfError, match=r"torch\.onnx can't write this half: .*bessel_j0"):
        suffix.export(tmp_path / "half.onnx")


def test_a_half_in_train_mode_or_of_a_changed_state_is_not_exported(tmp_path: Path) -> None:
    _, prefix, _ = halves(tmp_path, net().train(), (IMAGE,), split="after:2")
    with pytest.raises(HalfError, match="a half in train mode isn't exported"):
        prefix.export(tmp_path / "half.pt2")
    _, prefix, _ = halves(tmp_path, net(), (IMAGE,), split="after:2")
    with pytest.raises(ModuleError, match="was captured in eval mode"):
        prefix.train().export(tmp_path / "half.pt2")


def test_endings_folders_and_packages_that_are_not_there_are_said(tmp_path: Path) -> None:
    _, prefix, _ = halves(tmp_path, net(), (IMAGE,), split="after:2")
    with pytest.raises(SpecError, match=r"a file that ends in \.onnx, \.pt2, \.pte; found"):
        prefix.export(tmp_path / "half.tflite")
    with pytest.raises(SpecError, match="there is no folder"):
        prefix.export(tmp_path / "none" / "half.pt2")
    if importlib.util.find_spec("executorch") is None:
        with pytest.raises(HalfError, match=r"as \.pte takes the package executorch, .* pip install executorch"):
            prefix.export(tmp_path / "half.pte")


def test_what_was_moved_or_trained_since_is_exported_as_it_is(tmp_path: Path) -> None:
    _, prefix, _ = halves(tmp_path, net(), (IMAGE,), split="after:2")
    prefix.double()
    with torch.no_grad():
        next(prefix.parameters()).mul_(2)
    prefix.export(tmp_path / "half.pt2")
    module = torch.export.load(tmp_path / "half.pt2").module()
    found = tensors(module(IMAGE.double()))[0]
    assert torch.equal(found, prefix.run_prefix(IMAGE.double()).raw[0])
    assert prefix.boundary_key["weights"] == ""
    prefix.run_training_prefix(IMAGE.double())  # the half itself is as it was


def test_a_boundary_of_arrays_is_held_against_the_cut(tmp_path: Path) -> None:
    _, prefix, suffix = halves(tmp_path, net(), (IMAGE,), split="after:2")
    right = {label: t.numpy() for label, t in prefix.run_prefix(IMAGE).tensors.items()}
    (label,) = right
    made = ariadne.ReplayBoundary.from_tensors
    key = suffix.boundary_key
    assert torch.equal(suffix.run_suffix(made(right, **key)), suffix.run_suffix(prefix.run_prefix(IMAGE)))
    wrong: list[tuple[Any, str]] = [
        (lambda: made({"other": right[label]}, **key), "the boundary holds other; this split needs"),
        (lambda: made({label: right[label][:, 0]}, **key), f"{label!r} must be"),
        (lambda: made({label: right[label].astype("float64")}, **key), f"{label!r} must be"),
        (lambda: made({label: object()}, **key), "which torch makes no tensor of"),
        (lambda: made(right, batch=0, **key), "batch 0 is not one that this plan serves"),
        (lambda: made(right, **{**key, "plan_signature": "x"}), "was made by another split"),
        (lambda: made(right, **{**key, "weights": "x"}), "was saved with other weights"),
    ]
    for make, says in wrong:
        with pytest.raises(BoundaryError, match=says):
            suffix.run_suffix(make())
