"""Peak memory of tensors, from the allocator's own record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
