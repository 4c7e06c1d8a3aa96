"""One job in a fresh process: `python -m benchmarks.child JOB RECORDS`, a job as JSON in, records as JSON lines out.

Stands apart from `jobs` so that what is imported can be timed: nothing but the standard library is loaded here before.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

from benchmarks.resident import peak_rss


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
