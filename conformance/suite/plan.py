"""What a run is to do, decided before it starts: a file that every pytest process of the run reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from conformance.suite.supervisor import RUNNER, Limit

SUFFIX = ".plan.json"


@dataclass(frozen=True)
class Plan:
    """The cases to run, in order, against which target, under which limits, and where their results go.

    `deadline`, in `time.time()`, is one for all processes; `environment` is the id of the record in the results.
    """

    cases: tuple[str, ...]
    target: str
    results: str
    environment: str
    facts: dict[str, str]
    limits: dict[str, Limit]
    expectations: str
    deadline: float | None = None
    runner: str = RUNNER

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """The plan in such a file."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        limits = {name: Limit(**limit) for name, limit in fields["limits"].items()}
        return cls(**fields | {"cases": tuple(fields["cases"]), "limits": limits})
