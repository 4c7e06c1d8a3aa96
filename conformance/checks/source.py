"""Source: the same text and the same plan signature in a fresh process with other hashes.

    python -m conformance.checks.source torchvision/resnet18 q50 ariadne:prepare_split

prints both as JSON.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

from conformance.checks.base import PASSED, Check, at
from conformance.suite.bench import Bench
from conformance.suite.cases import Case
from conformance.suite.statuses import Finding, Status, Stop

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600


def run(bench: Bench, case: Case) -> Finding:
    """In eval mode, at one cut: both sides' source and the plan's signature."""
    split = bench.split(case["cut"], False)
    ours = described(bench, case["cut"])
    hashes = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "conformance.checks.source", bench.model_name, case["cut"], bench.target_name],
        env=os.environ | {"PYTHONHASHSEED": hashes, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        raise Stop(Status.CRASH, f"the fresh process: {done.stderr.strip()[-1500:]}")
    theirs = json.loads(done.stdout.splitlines()[-1])
    for what in ("prefix", "suffix", "signature"):
        if ours[what] != theirs[what]:
            change = difflib.unified_diff(ours[what].splitlines(), theirs[what].splitlines(), "here", "there", n=0)
            text = "\n".join(list(change)[:8])
            raise Stop(Status.FAIL_STRUCTURE, f"{what} differs in a fresh process, {at(split)}:\n{text}"[:1500])
    bench.facts["lines"] = {side: len(ours[side].splitlines()) for side in ("prefix", "suffix")}
    return PASSED


def described(bench: Bench, cut: str) -> dict[str, str]:
    """Both sources and the signature of a split in eval mode."""
    runtime = bench.split(cut, False).runtime
    return {
        "prefix": runtime.prefix_source,
        "suffix": runtime.suffix_source,
        "signature": runtime.plan.signature,
    }


CHECK = Check(
    "source", ("cut",), "generated source and plan signature are the same in every process", run, of_plans=True
)

if __name__ == "__main__":
    print(json.dumps(described(Bench(sys.argv[1], sys.argv[3]), sys.argv[2])))
