"""Peak memory of a forward, whole and split, from the allocator's own record."""

from __future__ import annotations

import torch

import model_zoo
from ariadne import prepare_split
from benchmarks.allocations import peak_bytes


def peak(name: str, batch: int = 8) -> tuple[int, int]:
    """Peak bytes of a forward without gradients of a zoo model: whole, and split at half of its ops."""
    entry = model_zoo.entry(name)
    model = entry.build().eval()
    runtime = prepare_split(model, entry.inputs(2)[0], split="percent:50")
    args, _ = entry.inputs(batch)
    with torch.no_grad():
        whole, split = (lambda: model(*args)), (lambda: runtime.run_suffix(runtime.run_prefix(*args)))
        whole(), split()
        return peak_bytes(whole), peak_bytes(split)
