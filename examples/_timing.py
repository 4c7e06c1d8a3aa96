"""What the timing examples share: their options, the device, and models of the zoo split on it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from _common import REAL_MODELS, entries
from torch import nn
from torch.utils import _pytree as pytree

import model_zoo
from ariadne import SplitRuntime, SplitSpec, prepare_split, prepare_split_replay
from model_zoo import Entry

BACKENDS = {
    "torch_compile": None,
    "reduce_overhead": {"mode": "reduce-overhead"},  # CUDA graphs, where there is CUDA
    "aot_inductor": {"backend": "aot_inductor"},
}
LARGEST_BATCH = 64  # of the range, where no larger one is asked for


def parser(description: str | None, iterations: int, warmup: int) -> argparse.ArgumentParser:
    """The options that all have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="+", default=["all"], help=f"all, {', '.join(REAL_MODELS)}, or a zoo name")
    made.add_argument("--iterations", type=int, default=iterations, help=f"timed calls ({iterations})")
    made.add_argument("--warmup", type=int, default=warmup, help=f"calls before them ({warmup})")
    made.add_argument("--boundary", default="percent:50", help="where to cut (percent:50)")
    made.add_argument("--device", help="cpu or cuda; CUDA where there is one")
    made.add_argument("--require-cuda", action="store_true", help="refuse to measure anything but CUDA")
    return made


def chosen(made: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[list[Entry], str]:
    """The models and the device that were asked for; exits with status 2 and the reason where there is no such."""
    if min([options.iterations, *getattr(options, "batches", [])]) < 1 or options.warmup < 0:
        made.error("--iterations and --batches are at least 1, --warmup at least 0")
    device = "cuda" if options.require_cuda else options.device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        made.error("CUDA was asked for, and torch finds no CUDA device; leave out --require-cuda, or measure elsewhere")
    try:
        return entries(options.models), device
    except model_zoo.UnknownNameError as error:
        made.error(str(error))


def inputs(entry: Entry, batch: int, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs on the device."""
    moved: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(device), entry.inputs(batch)
    )
    return moved


def split(
    entry: Entry,
    model: nn.Module,
    options: argparse.Namespace,
    device: str,
    mode: str,
    *,
    batches: Sequence[int] = (),
    trainable: bool = False,
    compile_options: dict[str, Any] | None = None,
) -> SplitRuntime:
    """The model, captured at batch 2 and split for all of these batches."""
    args, kwargs = inputs(entry, 2, device)
    spec = SplitSpec(options.boundary, dynamic_batch=(1, max(LARGEST_BATCH, *batches, 1)), trainable=trainable)
    door = prepare_split if trainable else prepare_split_replay
    return door(model, args, example_kwargs=kwargs, split=spec, mode=mode, compile_options=compile_options)


def conditions(options: argparse.Namespace, device: str) -> str:
    """What the figures below it hold for."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} thread(s)"
    return f"torch {torch.__version__}, {name}, {options.iterations} calls after {options.warmup}, one process"
