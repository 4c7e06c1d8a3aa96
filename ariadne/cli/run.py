"""`ariadne run`: inputs through a prefix here, and through its suffix at an address."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from typing import Any

import torch
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from ariadne import tree
from ariadne.cli.inputs import make, parse
from ariadne.cli.output import Answer, UsageError
from ariadne.half import load
from ariadne.remote import connect
from ariadne.units import size


def run(options: Namespace) -> Answer:
    """Run it, and show what came."""
    if not os.path.isfile(options.file):
        raise UsageError(f"there is no file {options.file}")
    half = load(options.file, plain=True)
    args, kwargs = _inputs(options)
    with connect(options.to, half, timeout=options.timeout, key=options.key, server_key=options.server_key) as remote:
        times = []
        for _ in range(options.count):
            start = time.perf_counter()
            boundary = half.run_prefix(*args, **kwargs)
            here = time.perf_counter() - start
            output = remote.run_suffix(boundary)
            times.append((time.perf_counter() - start, here))
    total, here = min(times)
    outputs = {path or "output": t for path, t in tree.paths(output) if isinstance(t, torch.Tensor)}
    if options.out:
        save_tensors({n: t.contiguous() for n, t in outputs.items()}, options.out)
    lines = [
        f"{boundary!r}: {size(boundary.nbytes)} to {options.to}",
        *(f"{n}  {str(t.dtype).removeprefix('torch.')}{list(t.shape)}{_short(t)}" for n, t in outputs.items()),
        f"took {total * 1e3:.2f} ms, of which {here * 1e3:.2f} ms here"
        + (f" (best of {options.count})" if options.count > 1 else ""),
    ]
    data: dict[str, Any] = {
        "boundary_bytes": boundary.nbytes,
        "outputs": {n: [str(t.dtype).removeprefix("torch."), *t.shape] for n, t in outputs.items()},
        "milliseconds": total * 1e3,
        "milliseconds_here": here * 1e3,
    }
    return Answer("\n".join(lines), data)


def _inputs(options: Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(options.input) == 1 and options.input[0].endswith(".safetensors"):
        if not os.path.isfile(options.input[0]):
            raise UsageError(f"there is no file {options.input[0]}")
        held = load_tensors(options.input[0])
        return tuple(held[n] for n in sorted(held)), {}
    if not options.input:
        raise UsageError(
            "no --input: give the sizes of one sample, such as 3x224x224, or a FILE.safetensors with tensors"
        )
    return make([parse(text) for text in options.input], options.batch, options.seed, torch.device("cpu"))


def _short(t: torch.Tensor) -> str:
    return (
        f"  {t.tolist()}" if t.numel() <= 8 else f"  of mean {t.double().mean():.6g}" if t.is_floating_point() else ""
    )
