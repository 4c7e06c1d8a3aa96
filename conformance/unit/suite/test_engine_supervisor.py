"""The supervisor: whatever becomes of a child process is a finding, and the next case gets a new child."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.suite.cases import Case
from conformance.suite.environment import ROOT, sources
from conformance.suite.statuses import Finding, Status
from conformance.suite.supervisor import Limit, Supervisor, resident
from conformance.unit.engine_kit import RUNNER

LIMITS = {
    "build": Limit(2.0, 2.5),
    "cheap": Limit(1.5, 2.5),
    "medium": Limit(20.0, 1.0),
    "heavy": Limit(20.0, 2.5),
    "inductor": Limit(3.0, 2.5),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Supervisor]:
    supervisor = Supervisor("ariadne", LIMITS, None, RUNNER)
    yield supervisor
    supervisor.close()


@pytest.fixture
def supervisor(shared: Supervisor) -> Supervisor:
    shared.deadline = None
    return shared


def run(supervisor: Supervisor, name: str) -> Finding:
    return supervisor.run(Case.parse(name))[0]


def pid(supervisor: Supervisor, model: str = "nn/a") -> int:
    found: int = run(supervisor, f"process/{model}/").facts["pid"]
    return found


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_finding_comes_back_with_its_facts(supervisor: Supervisor) -> None:
    assert run(supervisor, "passes/nn/a/") == Finding(Status.PASS)
    assert run(supervisor, "fails/nn/a/bs=3") == Finding(Status.FAIL_ACCURACY, "values differ", {"op": 3})
    assert run(supervisor, "process/nn/a/").facts["inf"] == "inf"


def test_a_model_keeps_its_process_and_another_gets_another(supervisor: Supervisor) -> None:
    first = pid(supervisor)
    assert first not in (os.getpid(), pid(supervisor, "nn/b"))
    assert not alive(first)
    second = pid(supervisor)
    assert second == pid(supervisor)


@pytest.mark.parametrize(
    ("check", "status", "words"),
    [
        ("exits", Status.CRASH, "ended with exit status 3: last words"),
        ("segfaults", Status.CRASH, "ended of SIGSEGV: Fatal Python error"),
        ("killed", Status.OOM, "the system killed its process"),
    ],
)
def test_a_dead_process_is_a_finding_and_the_next_case_runs(
    supervisor: Supervisor, check: str, status: Status, words: str
) -> None:
    before = pid(supervisor)
    found = run(supervisor, f"{check}/nn/a/")
    assert found.status == status
    assert words in found.reason
    assert not alive(before)
    assert pid(supervisor) != before


def test_a_crash_tells_where(supervisor: Supervisor) -> None:
    log = run(supervisor, "segfaults/nn/a/").facts["log"]
    assert any("engine_kit.py" in line and "segfaults" in line for line in log)


def test_a_case_that_takes_too_long_is_ended_and_tells_where_it_was(supervisor: Supervisor) -> None:
    before = pid(supervisor)
    start = time.monotonic()
    found = run(supervisor, "hangs/nn/a/")
    assert 1.5 <= time.monotonic() - start < 10
    assert (found.status, found.reason) == (Status.TIMEOUT, "it ran past its limit of 1.5 s")
    assert "engine_kit.py" in found.facts["stack"][0]
    assert not alive(before)
    assert pid(supervisor) != before


def test_a_backend_may_take_longer_than_its_model(supervisor: Supervisor) -> None:
    assert run(supervisor, "hangs/nn/a/backend=inductor").reason == "it ran past its limit of 3 s"


def test_a_case_that_holds_too_much_is_ended(supervisor: Supervisor) -> None:
    found = run(supervisor, "allocates/nn/medium/")
    assert found.status == Status.OOM
    assert found.reason.endswith("GiB, over its limit of 1")
    assert run(supervisor, "passes/nn/medium/").status == Status.PASS


def test_a_model_that_can_not_be_opened_answers_for_all_its_cases(supervisor: Supervisor) -> None:
    found = run(supervisor, "passes/nn/stops/")
    assert found == Finding(Status.NOT_INSTALLED, "timm is not installed", {"package": "timm"})
    found = run(supervisor, "passes/nn/raises/")
    assert found.status == Status.CRASH
    assert found.reason.startswith("while its model was built: its process ended with exit status 1: ArithmeticError")
    assert run(supervisor, "passes/nn/hangs/").reason == "while its model was built: it ran past its limit of 2 s"
    start = time.monotonic()
    assert run(supervisor, "fails/nn/hangs/").status == Status.TIMEOUT
    assert time.monotonic() - start < 1, "it is not tried again"


def test_after_the_deadline_nothing_runs_and_what_runs_is_ended(supervisor: Supervisor) -> None:
    before = pid(supervisor)
    supervisor.deadline = time.time() + 0.5
    found = run(supervisor, "hangs/nn/a/")
    assert found == Finding(Status.NOT_SELECTED, "time: the tier's clock ran out before this case")
    assert not alive(before)
    found, seconds = supervisor.run(Case.parse("passes/nn/a/"))
    assert (found.status, seconds) == (Status.NOT_SELECTED, 0.0)
    supervisor.deadline = None
    assert run(supervisor, "passes/nn/a/").status == Status.PASS


def test_what_a_case_started_ends_with_it(supervisor: Supervisor) -> None:
    found = run(supervisor, "starts/nn/a/")
    child = found.facts["child"]
    assert alive(child)
    assert run(supervisor, "hangs/nn/a/").status == Status.TIMEOUT
    deadline = time.monotonic() + 10
    while (state := Path(f"/proc/{child}/stat")).exists() and time.monotonic() < deadline:
        if state.read_text().rpartition(")")[2].split()[0] == "Z":  # nobody waits for it
            break
        time.sleep(0.05)
    assert time.monotonic() < deadline


def test_no_model_is_opened_once_the_sources_are_others(supervisor: Supervisor) -> None:
    supervisor.code = sources(ROOT)
    assert run(supervisor, "passes/nn/c/").status == Status.PASS
    supervisor.code = "of another day"
    assert run(supervisor, "passes/nn/c/").status == Status.PASS, "it was opened before"
    found = run(supervisor, "passes/nn/b/")
    assert found == Finding(Status.NOT_SELECTED, "edited: the sources are others than when the run began")
    supervisor.code = None
    assert run(supervisor, "passes/nn/b/").status == Status.PASS


def test_a_server_that_died_is_started_again(supervisor: Supervisor) -> None:
    pid(supervisor)
    assert supervisor._server is not None
    supervisor._server.process.kill()
    supervisor._server.process.wait()
    with pytest.raises(RuntimeError, match="the fork server with torch ended with exit status -9"):
        pid(supervisor, "nn/b")
    assert pid(supervisor, "nn/b")


def test_closing_ends_the_processes() -> None:
    supervisor = Supervisor("ariadne", LIMITS, None, RUNNER)
    child = pid(supervisor)
    assert supervisor._server is not None
    server = supervisor._server.process
    supervisor.close()
    assert server.poll() is not None
    assert not alive(child)


def test_the_memory_of_a_process_is_seen() -> None:
    assert 0.01 < resident(os.getpid()) < 100
    assert resident(2**22 + 1) == 0.0
