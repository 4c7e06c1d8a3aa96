"""The memory of this process, read with the standard library alone: imports are timed after it is loaded."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_rss() -> int:
    """The most bytes of memory that this process has had so far."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent had when it started this process
        line = next(text for text in status.read_text().splitlines() if text.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
