"""Halves of the zoo in other runtimes: `python -m conformance.unit.halves.exports [MODEL ...]`.

Each half is written as `.pt2` and as `.onnx`, and run at batches 1, 2 and 7, or those of them that it serves: torch's
exported program gives the half's numbers bit for bit, ONNX Runtime gives them within 1e-4. Each file has the weights of its
half alone. A line for each half; one that can't go out is told with the op that stands in the way. It ends with 1 where a
number or a file is wrong, and takes onnx, onnxscript and onnxruntime.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ariadne
import model_zoo
from ariadne import tree
from ariadne.errors import HalfError

SIDES = ("prefix", "suffix")
BATCHES = (1, 2, 7)
NEAR = 1e-4
# Those that the tests run; the command takes them and others.
TEN = ("nn/mlp10x64", "torchvision/resnet18", "torchvision/mobilenet_v3_small", "torchvision/squeezenet1_1", "timm/test_vit",
       "timm/test_convnext", "timm/test_efficientnet", "timm/test_resnet", "timm/levit_128s", "timm/test_mambaout")  # fmt: skip
OTHERS = ("torchvision/densenet121", "torchvision/swin_t", "torchvision/vit_b_16", "transformers/vit_tiny", "ultralytics/yolov8n",
          "transformers/bert_tiny", "transformers/gpt2_tiny", "nn/lstm_classifier")  # fmt: skip


def tensors(value: Any) -> list[Tensor]:
    """The tensors of nested values."""
    return [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor)]


def expected(runtime: Any, side: str, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What goes into a side, and what comes out of it."""
    boundary = runtime.run_prefix(*args, **kwargs)
    if side == "prefix":
        return tensors((args, kwargs)), [*boundary.tensors.values()]
    return [*boundary.tensors.values()], tensors(runtime.run_suffix(boundary))


def session(path: Path) -> Any:
    """An ONNX model, ready to run."""
    runtime: Any = importlib.import_module("onnxruntime")
    return runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def hold(entry: Any, runtime: Any, side: str, half: Any, folder: Path) -> str:
    """Export a half in both forms, and hold them against the split; what there is to say, `AssertionError` for what is wrong."""
    schema = half.export(folder / "half.pt2")
    program = torch.export.load(folder / "half.pt2")
    held = {**program.state_dict, **{k: t for k, t in program.constants.items() if isinstance(t, Tensor)}}
    own = {
        *dict(half.named_parameters(remove_duplicate=False)),
        *dict(half.named_buffers(remove_duplicate=False)),
    }
    assert {n for n, t in held.items() if t.numel() > 64} <= own, "the .pt2 has other tensors than the half"
    weights = sum(t.nbytes for t in {id(t): t for t in (*half.parameters(), *half.buffers())}.values())
    module, (low, high) = program.module(), schema.batches
    batches = sorted({min(max(low, b), high) for b in BATCHES})
    for batch in batches:
        given, wanted = expected(runtime, side, *entry.inputs(batch, seed=batch))
        found = tensors(module(*given))
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b), (
                f"the .pt2, read again, is off by {(a - b).abs().max().item():.1g} at batch {batch}"
            )
    said = f"pt2 equal at batches {batches}, {(folder / 'half.pt2').stat().st_size:,} bytes for {weights:,} of weights"
    try:
        assert half.export(folder / "half.onnx") == schema
    except HalfError as error:
        return f"{said}; onnx refused: {error}"
    size = (folder / "half.onnx").stat().st_size
    assert size <= 1.05 * weights + 250_000, f"the .onnx has {size:,} bytes for {weights:,} bytes of weights"
    onnx, far = session(folder / "half.onnx"), 0.0
    for batch in batches:
        given, wanted = expected(runtime, side, *entry.inputs(batch, seed=batch))
        arrays = onnx.run([*schema.outputs], {n: t.numpy() for n, t in zip(schema.inputs, given, strict=True)})
        for a, b in zip(arrays, wanted, strict=True):
            assert a.shape == tuple(b.shape), (
                f"the .onnx gives {a.shape} at batch {batch}, where there is {tuple(b.shape)}"
            )
            off = (torch.from_numpy(a).double() - b.double()).abs().max().item() / max(1.0, b.abs().max().item())
            far = max(far, off)
    assert far <= NEAR, f"the .onnx is {far:.1g} off"
    return f"{said}; onnx within {far:.1g}, {size:,} bytes"


def exported(name: str, folder: Path) -> list[str]:
    """A line for each half of a model."""
    entry = model_zoo.entry(name)
    torch.manual_seed(0)
    args, kwargs = entry.inputs(2, seed=0)
    runtime = ariadne.prepare_split(entry.build().eval(), args, example_kwargs=kwargs, split="50%")
    said = []
    for side in SIDES:
        runtime.save(folder / side, side=side)
        half = ariadne.load(folder / side, plain=True)
        try:
            said.append(f"{name} {side}: {hold(entry, runtime, side, half, folder)}")
        except HalfError as error:
            said.append(f"{name} {side}: refused: {error}")
        except AssertionError as error:
            said.append(f"{name} {side}: WRONG: {error}")
    return said


def main() -> int:
    """Export, run and compare; a line for each half."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("models", nargs="*", default=[*TEN, *OTHERS])
    options = asked.parse_args()
    warnings.simplefilter("ignore")
    wrong = 0
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            for line in exported(name, Path(folder)):
                wrong += "WRONG" in line
                print(line, flush=True)
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
