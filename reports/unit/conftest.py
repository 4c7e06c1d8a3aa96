"""What tests of reports run under: one thread, and no network; and a report of results of all kinds."""

from __future__ import annotations

import conformance.suite.offline  # noqa: F401 - before torch, which reads its settings as it is imported

# isort: split
from pathlib import Path

import pytest

from reports.build import build
from reports.document import Report
from reports.unit import report_kit as kit


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.whole_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def report(run: Path) -> tuple[Report, Path]:
    output = run.parent / "report"
    return build([run], None, output), output
