"""What a case can come to, in the exact words that results and expectations use."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """The outcome of one case. Only `PASS` says that split and whole were compared and are equal."""

    PASS = "pass"
    FAIL_STRUCTURE = "fail_structure"  # containers, types, dtypes, shapes, strides, requires_grad
    FAIL_ACCURACY = "fail_accuracy"  # numbers
    FAIL_STATE = "fail_state"  # parameters, buffers, gradients, attributes, inputs; or a guard that did not fire
    FAIL_RNG = "fail_rng"  # a random generator of torch, numpy or Python stands elsewhere
    CRASH = "crash"  # an exception nobody meant, or the process died
    TIMEOUT = "timeout"
    OOM = "oom"
    UNSUPPORTED = "unsupported"  # the target refused, with an error that names the reason
    NONDETERMINISTIC = "nondeterministic"  # the whole model differs from itself
    NO_REFERENCE = "no_reference"  # there is no result to hold this one against, such as a float64 run
    DEGENERATE = "degenerate"  # the whole model's outputs would hide a difference
    ERROR_EAGER = "error_eager"  # the whole model itself raises
    ERROR_BUILD = "error_build"  # the entry can't be built
    NOT_INSTALLED = "not_installed"  # its package is missing
    NOT_SELECTED = "not_selected"  # the run stopped before it, or its tier leaves it out

    @property
    def is_failure(self) -> bool:
        """Whether split and whole were compared, and differ."""
        return self.name.startswith("FAIL_")


@dataclass(frozen=True)
class Finding:
    """What a check found: a status, the reason in words (empty for a pass), and facts that go into the result.

    `facts` are JSON values: the resolved op of the cut (`op`, `label`), the plan's signature (`plan`), how it was
    captured (`captured`), measured errors and bounds, and what else a reader of the result would ask.
    """

    status: Status
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class Stop(Exception):
    """Ends a check early with a finding: raised by what several checks share, caught where a case is run."""

    def __init__(self, status: Status, reason: str, **facts: Any) -> None:
        super().__init__(f"{status}: {reason}")
        self.finding = Finding(status, reason, facts)
