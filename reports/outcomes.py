"""What a status counts as: five outcomes, told apart by a glyph as well as by a colour."""

from __future__ import annotations

from conformance.suite.statuses import Status
from conformance.suite.verdict import Problem

PASS, FAIL, UNEXPECTED, MISSING, EXPECTED = "pass", "fail", "unexpected", "no result", "expected"
WORST_FIRST = (FAIL, UNEXPECTED, MISSING, EXPECTED, PASS)
GLYPHS = {PASS: "✓", FAIL: "✗", UNEXPECTED: "!", MISSING: "–", EXPECTED: "○"}
TONES = {PASS: "good", FAIL: "bad", UNEXPECTED: "warn", MISSING: "quiet", EXPECTED: ""}
MEANINGS = {
    PASS: "split and whole were compared, and are equal",
    FAIL: "they differ, or the process crashed, ran out of time or of memory",
    UNEXPECTED: "refused, or could not be compared, and no expectation says so; or it passes, against one",
    MISSING: "the case did not run",
    EXPECTED: "refused, or could not be compared, exactly as an expectation with a reason says",
}
_FAILED = {Status.CRASH, Status.TIMEOUT, Status.OOM}
_NOT_RUN = {Status.NOT_SELECTED, Status.NOT_INSTALLED}


def outcome(status: Status, problem: Problem | None) -> str:
    """What a result counts as; `problem` is what the suite's own verdict has against it. A known failure still fails."""
    if status in _NOT_RUN:
        return MISSING
    if status in _FAILED or status.startswith("fail_"):
        return FAIL
    if problem is not None:
        return UNEXPECTED
    return PASS if status == Status.PASS else EXPECTED
