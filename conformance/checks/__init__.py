"""The checks, one file for each group, and the one way to run a case: `run`, which never raises."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Mapping
from types import MappingProxyType

from conformance.checks import (
    autocast,
    changes,
    debug,
    forward,
    guards,
    halves,
    inputs,
    left,
    parts,
    payload,
    rows,
    source,
    train,
    twice,
)
from conformance.checks.base import Check, refuses
from conformance.suite.bench import Bench
from conformance.suite.cases import Case
from conformance.suite.oracle import is_out_of_memory
from conformance.suite.state import undisturbed
from conformance.suite.statuses import Finding, Status, Stop

_MODULES = (autocast, changes, debug, forward, guards, halves, inputs, left, parts, payload, rows, source, train, twice)
CHECKS: Mapping[str, Check] = MappingProxyType({module.CHECK.name: module.CHECK for module in _MODULES})
LAST_LINES = 12


def run(case: Case, bench: Bench) -> Finding:
    """Run one case on the bench of its model; whatever happens becomes a finding.

    The bench's facts are added to those of the finding. The process's random generators are left as they were.
    """
    bench.begin(case.check)
    with undisturbed():
        try:
            if case.model != bench.model_name:
                raise ValueError(f"{case} is no case of {bench.model_name}, whose bench this is")
            found = CHECKS[case.check].run(bench, case)
        except Exception as error:
            found = finding(error)
        if found.status.is_failure:
            found = _unless_nondeterministic(case, bench, found)
    return Finding(found.status, found.reason, {**bench.facts, **found.facts})


def finding(error: BaseException) -> Finding:
    """What an exception that ended a check comes to."""
    if isinstance(error, Stop):
        return error.finding
    words = f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        return Finding(Status.OOM, words[:1000])
    if refuses(error):
        return Finding(Status.UNSUPPORTED, words[:1000])
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return Finding(Status.CRASH, "\n".join(lines[-LAST_LINES:])[-2000:])


def _unless_nondeterministic(case: Case, bench: Bench, found: Finding) -> Finding:
    """The finding itself, unless the whole model differs from itself at this very batch."""
    if case.get("bs") is not None:
        with contextlib.suppress(Exception):
            facts = dict(bench.facts)
            try:
                bench.judge(case.training, gradients="steps" in dict(case.parameters), batch=case.bs)
            except Stop as stop:
                if stop.finding.status is Status.NONDETERMINISTIC:
                    return stop.finding
            finally:
                bench.facts = facts
    return found


__all__ = ["CHECKS", "Check", "finding", "run"]
