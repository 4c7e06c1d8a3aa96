"""Halves from one version of torch in another: `python -m conformance.unit.halves.versions save|load FOLDER`.

`save` writes both halves of each model, with inputs, the boundary as bytes, and what came out; `load`, run where another torch is
installed, loads them, and holds them bit for bit against the whole model of that torch with the same weights. It tells what differs
from the numbers that were saved: kernels round otherwise from one version to the next. It ends with 1 where a half gives other
numbers than the whole model, and with 0 where each is equal or refused with its reason. Install one version of the models' own
libraries on both sides: where they differ, the whole model may be another one, and nothing is compared.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ariadne
import model_zoo
from ariadne import tree
from ariadne.errors import AriadneError

EVAL = (
    "torchvision/resnet18", "torchvision/mobilenet_v3_small", "timm/test_vit", "transformers/vit_tiny", "transformers/gpt2_tiny",
    "ultralytics/yolov8n", "nn/lstm_classifier", "nn/mlp10x64", "toys/lstm", "toys/complex_fft", "toys/none_input",
    "toys/nested_outputs", "toys/dataclass_out", "toys/constants_from_lists", "toys/tied_embedding", "toys/bf16",
    "toys/causal_sdpa", "toys/mha_fastpath", "toys/plain_tensors", "toys/view_crosses",
)  # fmt: skip
TRAIN = ("nn/mlp10x64", "torchvision/resnet18", "timm/test_vit", "ultralytics/yolov8n", "toys/lstm", "toys/dropout")
CASES = tuple((name, mode) for mode, names in (("eval", EVAL), ("train", TRAIN)) for name in names)
BATCH = 3


def _plain(value: Any) -> list[Any]:
    """The leaves of what came out, as data: tensors, and other things as text."""
    return [v.detach() if isinstance(v, torch.Tensor) else repr(v) for v in tree.leaves(value)]


def _step(run: Any, parameters: list[tuple[str, nn.Parameter]]) -> list[Any]:
    """A training step's loss and gradients."""
    for _, p in parameters:
        p.grad = None
    torch.manual_seed(1)
    loss = run()
    wanted = [p for _, p in parameters if p.requires_grad]
    return [loss.detach(), *(repr(None) if p.grad is None else p.grad.clone() for p in wanted)]


def _library(name: str) -> str:
    """The package that a model of the zoo is of, with its version: another one may build another model."""
    family = name.partition("/")[0]
    return f"{family} {metadata.version(family)}" if family not in ("nn", "toys") else ""


def _whole(entry: Any, model: nn.Module, args: Any, kwargs: Any) -> list[Any]:
    """What the whole model gives: its output, or in train mode a step."""
    if not model.training:
        with torch.no_grad():
            return _plain(model(*args, **kwargs))

    def run() -> torch.Tensor:
        loss: torch.Tensor = entry.loss(model(*args, **kwargs))
        loss.backward()
        return loss

    return _step(run, sorted(model.named_parameters()))


def _halves(entry: Any, halves: list[Any], args: Any, kwargs: Any, like: Any) -> list[Any]:
    """What both halves give, all that crosses as bytes."""
    prefix, suffix = halves
    if not prefix.training:
        return _plain(
            suffix.run_suffix(ariadne.BoundaryPayload.from_bytes(prefix.run_prefix(*args, **kwargs).to_bytes()))
        )

    def run() -> torch.Tensor:
        boundary = prefix.run_training_prefix(*args, **kwargs)
        sent = ariadne.BoundaryPayload.from_bytes(boundary.to_bytes())
        loss, grads = suffix.train_suffix(
            sent, loss_fn=lambda y, _: entry.loss(tree.unflatten([*tree.leaves(y)], like))
        )
        prefix.backward_prefix(boundary, grads)
        return loss  # type: ignore[no-any-return]

    return _step(run, sorted((*prefix.named_parameters(), *suffix.named_parameters())))


def _inputs(entry: Any, leaves: list[Any] | None = None) -> tuple[Any, Any]:
    """The inputs of a model; with the numbers that were saved, if they are given."""
    given = entry.inputs(BATCH, seed=3)
    found: tuple[Any, Any] = given if leaves is None else tree.unflatten(leaves, tree.flatten(given)[1])
    return found


def save(name: str, mode: str, folder: Path) -> str:
    """Write the halves of a model, and what they are held against; returns what there is to say."""
    entry = model_zoo.entry(name)
    torch.manual_seed(0)
    model = entry.build().train(mode == "train")
    args, kwargs = _inputs(entry)
    spec = ariadne.SplitSpec("50%", dynamic_batch=(1, 8), trainable=mode == "train")
    runtime = ariadne.prepare_split(model, args, example_kwargs=kwargs, split=spec)
    folder.mkdir(parents=True, exist_ok=True)
    for side in ("prefix", "suffix"):
        runtime.save(folder / side, side=side)
    record: dict[str, Any] = {
        "torch": str(torch.__version__),
        "library": _library(name),
        "inputs": _flat((args, kwargs)),
        "state": model.state_dict(),
    }
    if mode == "eval":
        sent = runtime.run_prefix(*args, **kwargs).to_bytes()
        record["sent"] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
    record["state"] = {k: t.clone() for k, t in record["state"].items()}
    record["answers"] = _whole(entry, model, args, kwargs)
    torch.save(record, folder / "record")
    return "saved"


def _flat(value: Any) -> list[Any]:
    return [*tree.flatten(value)[0]]


def load(name: str, mode: str, folder: Path) -> str:
    """Load the halves of a model, and tell how they run here; `AssertionError` where they are not the whole model."""
    record = torch.load(folder / "record", weights_only=True)
    entry = model_zoo.entry(name)
    try:
        halves = [ariadne.load(folder / side, plain=True) for side in ("prefix", "suffix")]
    except AriadneError as error:
        return f"refused: {error}"
    torch.manual_seed(0)
    model = entry.build().train(mode == "train")
    if record["library"] != _library(name):
        return f"not compared: {record['library']} built the model, and here is {_library(name)}"
    model.load_state_dict(record["state"])
    args, kwargs = _inputs(entry, record["inputs"])
    like = tree.flatten(model(*args, **kwargs))[1] if mode == "train" else None
    model.load_state_dict(record["state"])  # what a forward in train mode moved
    expected = _whole(entry, model, args, kwargs)
    found = _halves(entry, halves, args, kwargs, like)
    assert not (other := differs(expected, found)), f"not the whole model of torch {torch.__version__}: {other}"
    if mode == "eval":
        crossed = halves[1].run_suffix(ariadne.BoundaryPayload.from_bytes(record["sent"].numpy().tobytes()))
        assert len(_plain(crossed)) == len(found), "the boundary of the other torch gives other outputs"
    other = differs(record["answers"], found)
    return f"equal to the whole model here; from what torch {record['torch']} gave: {other or 'equal'}"


def differs(expected: list[Any], found: list[Any]) -> str:
    """What differs, in words; empty where all are equal bit for bit."""
    if len(expected) != len(found):
        return f"{len(found)} values where there were {len(expected)}"
    far, count = 0.0, 0
    for a, b in zip(expected, found, strict=True):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or a != b:
                return f"{b!r} where there was {a!r}"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{b.dtype}{list(b.shape)} where there was {a.dtype}{list(a.shape)}"
        elif not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
            count, far = count + 1, max(far, (a.to(torch.complex128) - b).abs().max().item())
    return f"{count} of {len(found)} tensors differ, by {far:.1g} at most" if count else ""


def main() -> int:
    """Save, or load and compare; a line for each model."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("what", choices=("save", "load"))
    asked.add_argument("folder", type=Path)
    options = asked.parse_args()
    warnings.simplefilter("ignore")
    failed = 0
    print(f"torch {torch.__version__}: {options.what}", flush=True)
    for name, mode in CASES:
        folder = options.folder / f"{name.replace('/', '_')}_{mode}"
        try:
            said = save(name, mode, folder) if options.what == "save" else load(name, mode, folder)
        except Exception as error:  # of any class: it is told, and the next model goes on
            failed += 1
            said = f"WRONG: {type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
        print(f"{name} {mode}: {said}", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
