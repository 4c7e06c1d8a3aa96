"""Peak memory of a forward, whole and split, from the allocator's own record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import model_zoo
from ariadne import prepare_split


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes that the CPU allocator held at once during `run`, above what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


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
