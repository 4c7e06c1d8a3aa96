"""One job in a fresh process: `python -m benchmarks.child JOB RECORDS`, a job as JSON in, records as JSON lines out.

Stands apart from `jobs` so that what is imported can be timed: nothing but the standard library is loaded here before.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any


def peak_rss() -> int:
    """The most bytes of memory that this process has had so far."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent had when it started this process
        line = next(text for text in status.read_text().splitlines() if text.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def timed_imports(names: list[str]) -> dict[str, float]:
    """Import modules in order; the seconds that each took on top of those before."""
    found = {}
    for name in names:
        start = time.perf_counter()
        importlib.import_module(name)
        found[name] = time.perf_counter() - start
    return found


def main(job: dict[str, Any], path: str) -> None:
    """Do the job and append its records as they come, so that those before a crash are kept."""
    started = peak_rss()
    imports = timed_imports(job["imports"])
    process = {"imports": imports, "rss_bytes": {"python": started, "imported": peak_rss()}}
    token = os.urandom(6).hex()  # whose samples are of one process
    perform = importlib.import_module("benchmarks.jobs").JOBS[job["job"]]
    with open(path, "a", encoding="utf-8") as file:
        for record in perform(job, process):
            file.write(json.dumps({**record, "token": token}, allow_nan=False) + "\n")
            file.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
