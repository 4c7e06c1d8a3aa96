"""The identity target splits nothing: every check that compares values passes, or the suite raises false alarms."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import model_zoo
from conformance import checks
from conformance.suite import matrix
from conformance.suite.bench import Bench
from conformance.suite.statuses import Status

TARGET = "conformance.identity:prepare_split"
ASKS_FOR_A_PLAN = {"guards", "halves", "parts", "payload", "source"}


@pytest.mark.parametrize("name", model_zoo.names(family="nn"))
def test_what_compares_values_passes_and_what_asks_for_a_plan_is_refused(name: str) -> None:
    bench, counts = Bench(name, TARGET), Counter[Status]()
    for case in matrix.cases(name):
        found = checks.run(case, bench)
        if found.status is Status.ERROR_EAGER and case.check == "autocast":
            assert not runs_in_bfloat16(name), (str(case), found)  # an LSTM does not, on a CPU without AVX-512
            continue
        wanted = Status.UNSUPPORTED if case.check in ASKS_FOR_A_PLAN else Status.PASS
        assert found.status is wanted, (str(case), found)
        counts[found.status] += 1
    assert counts[Status.PASS] > 50
    assert counts[Status.UNSUPPORTED] >= len(ASKS_FOR_A_PLAN)


def runs_in_bfloat16(name: str) -> bool:
    """Whether the model itself, whole, runs under autocast on this machine."""
    entry = model_zoo.entry(name)
    args, kwargs = entry.inputs(2)
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            entry.build().eval()(*args, **kwargs)
    except RuntimeError:
        return False
    return True


def test_its_refusals_say_what_is_missing() -> None:
    bench = Bench("nn/mlp10x64", TARGET)
    found = {
        case.check: checks.run(case, bench).reason
        for case in matrix.cases("nn/mlp10x64")
        if case.check in ASKS_FOR_A_PLAN
    }
    assert found["source"] == "UnsupportedError: the identity target has no source"
    assert found["payload"] == "UnsupportedError: the identity target has no wire format"
    assert found["guards"].startswith("UnsupportedError: the identity target has no plan")
