"""The pytest plugin that makes one item of every case in a plan, and has it run under supervision.

`python -m conformance` writes the plan and starts pytest with this plugin and the plan's file; without such a file as an
argument the plugin does nothing. xdist deals out whole models, so that the cases of one run in one process, one after another.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler.loadgroup import LoadGroupScheduling

from conformance.suite import expectations, results
from conformance.suite.cases import Case
from conformance.suite.plan import SUFFIX, Plan
from conformance.suite.statuses import Status
from conformance.suite.supervisor import Supervisor
from conformance.suite.verdict import judge

AS_MEANT = "as meant"  # the property of a report whose outcome is a judgement of a result, and no accident
_SUPERVISOR = pytest.StashKey[Supervisor]()


class ByModel(LoadGroupScheduling):
    """xdist's `--dist loadgroup` with the model as the group.

    Its own way, a suffix to the item's id, goes unseen by pytest 9.2, which keeps ids in another attribute.
    """

    def _split_scope(self, nodeid: str) -> str:
        return Case.parse(nodeid).model


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByModel:
    return ByModel(config, log)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return PlanFile.from_parent(parent, path=file_path) if file_path.name.endswith(SUFFIX) else None


class PlanFile(pytest.File):
    """A plan, as the collector of its cases."""

    def collect(self) -> Iterable[pytest.Item]:
        plan = Plan.read(self.path)
        entries = expectations.load(Path(plan.expectations))
        for name in plan.cases:
            yield CaseItem.from_parent(self, name=name, nodeid=name, plan=plan, entries=entries)


class CaseItem(pytest.Item):
    """One case: it fails when its result is neither a pass nor expected as it is."""

    def __init__(self, *, plan: Plan, entries: list[expectations.Expectation], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan, self.entries, self.case = plan, entries, Case.parse(self.name)

    def runtest(self) -> None:
        finding, seconds = self._supervisor().run(self.case)
        result = results.Result(
            self.name, finding.status, finding.reason, finding.facts, round(seconds, 3), self.plan.environment
        )
        results.append(Path(self.plan.results), result)
        self.user_properties.append((AS_MEANT, str(result.status)))
        problem = judge(result, self.entries, self.plan.facts)
        if result.status == Status.NOT_SELECTED:
            pytest.skip(result.reason)
        if problem:
            pytest.fail(str(problem), pytrace=False)
        if result.status != Status.PASS:
            pytest.xfail(f"{result.status}, as expected: {result.reason}")

    def _supervisor(self) -> Supervisor:
        stash, plan = self.config.stash, self.plan
        if _SUPERVISOR not in stash:
            stash[_SUPERVISOR] = Supervisor(
                plan.target, plan.limits, plan.deadline, plan.runner, plan.facts.get("sources")
            )
        return stash[_SUPERVISOR]

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


def pytest_sessionfinish(session: pytest.Session) -> None:
    supervisor = session.config.stash.get(_SUPERVISOR, None)
    if supervisor:
        supervisor.close()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show at once what went wrong in the suite itself; results are reported at the end of the run, all together."""
    if report.failed and AS_MEANT not in dict(report.user_properties):
        print(f"\n{report.nodeid}: {report.longreprtext}", flush=True)
