"""The supervisor of child processes: one model at a time, limits on time and memory, a new child after a crash."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.suite import device
from conformance.suite.cases import Case
from conformance.suite.environment import ROOT, sources
from conformance.suite.statuses import Finding, Status

SILENCE = 300  # seconds that a fork server may take to import its library
POLL = 0.1  # seconds between looks at the clock and at the child's memory
RUNNER = "conformance.suite.one_model:open_model"
# What a family's builders import, once for all of its models.
PRELOADED = {
    "torchvision": "torchvision.models",
    "timm": "timm",
    "ultralytics": "ultralytics.nn.tasks",
    "rfdetr": "rfdetr",
    "transformers": "transformers",
}
_PAGE = os.sysconf("SC_PAGE_SIZE")
# What a process may map beyond what it holds: allocators reserve more than they use, and stacks count in full.
_SLACK = 4 << 30


@dataclass(frozen=True)
class Limit:
    """How long a case may take, and how much memory its process may hold."""

    seconds: float
    gib: float


class Supervisor:
    """Runs cases, each in a child process that holds its model; what becomes of the child is the case's finding.

    A child is kept while cases of its model follow each other. `limits` are by cost tag, with "build" for making the model
    before its cost is known, and by backend where one needs more. After `deadline` (in `time.time()`) nothing runs any more, and
    no model is opened once the sources are others than those of the digest `code`, as whose results they would count.
    """

    def __init__(
        self, target: str, limits: Mapping[str, Limit], deadline: float | None = None, runner: str = RUNNER,
        code: str | None = None,
    ):  # fmt: skip
        self.target, self.limits, self.deadline, self.runner, self.code = target, limits, deadline, runner, code
        self._server: _Server | None = None
        self._child: _Child | None = None
        self._unbuildable: dict[str, Finding] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="ariadne-conformance-")

    def run(self, case: Case) -> tuple[Finding, float]:
        """The finding for a case and the seconds that it took."""
        start = time.perf_counter()
        if self.deadline is not None and time.time() > self.deadline:
            return OUT_OF_TIME, 0.0
        if case.model in self._unbuildable:
            return self._unbuildable[case.model], 0.0
        try:
            child = self._opened(case)
            child.send(str(case))
            answer = child.receive(self._limit(case, child.cost), self.deadline)
        except _Lost as lost:
            self._drop()
            if lost.building and lost.finding is not OUT_OF_TIME:
                self._unbuildable[case.model] = lost.finding
            return lost.finding, time.perf_counter() - start
        found = Finding(Status(answer["status"]), answer["reason"], answer["facts"])
        return found, answer["seconds"]

    def close(self) -> None:
        """End the child, the server and their files."""
        self._drop()
        if self._server:
            self._server.close()
            self._server = None
        self._folder.cleanup()

    def _limit(self, case: Case, cost: str) -> Limit:
        limit = self.limits[cost]
        more = self.limits.get(case.get("backend") or "")
        return Limit(max(limit.seconds, more.seconds), max(limit.gib, more.gib)) if more else limit

    def _opened(self, case: Case) -> _Child:
        """A child that has this case's model ready."""
        if self._child and self._child.model == case.model:
            return self._child
        self._drop()
        if self.code is not None and sources(ROOT) != self.code:
            raise _Lost(EDITED)
        library = PRELOADED.get(case.family, "")
        if self._server and (self._server.library != library or self._server.process.poll() is not None):
            self._server.close()
            self._server = None
        if not self._server:
            self._server = _Server(library, self.runner, Path(self._folder.name))
        most = max(limit.gib for limit in self.limits.values())
        self._child = _Child(self._server, case.model, self.target, Path(self._folder.name) / "child.log", most)
        try:
            self._child.cost = self._child.receive(self.limits["build"], self.deadline)["ready"]
        except _Lost as lost:
            raise _Lost(lost.finding, building=True) from lost
        return self._child

    def _drop(self) -> None:
        if self._child:
            self._child.end()
            self._child = None


EDITED = Finding(Status.NOT_SELECTED, "edited: the sources are others than when the run began")
OUT_OF_TIME = Finding(Status.NOT_SELECTED, "time: the tier's clock ran out before this case")


class _Lost(Exception):
    """The child is of no more use; the finding says why."""

    def __init__(self, finding: Finding, building: bool = False) -> None:
        super().__init__(finding.reason)
        self.finding = finding if not building else _while_building(finding)
        self.building = building


def _while_building(finding: Finding) -> Finding:
    if finding is OUT_OF_TIME:
        return finding
    return Finding(finding.status, f"while its model was built: {finding.reason}", finding.facts)


class _Server:
    """A fork server that has imported one library, or none."""

    def __init__(self, library: str, runner: str, folder: Path) -> None:
        self.library = library
        self.control, theirs = socket.socketpair()
        # A session of its own: an interrupt at the terminal reaches the supervisor alone, which then ends the server.
        with theirs:
            command = [sys.executable, "-m", "conformance.suite.forkserver", str(theirs.fileno()), library, runner]
            path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            environment = os.environ | {"PYTHONPATH": path, "YOLO_CONFIG_DIR": str(folder)}
            environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def ask(self, request: dict[str, Any], fds: tuple[int, ...] = ()) -> dict[str, Any]:
        """The answer to a request; RuntimeError if the server is gone, or is ended for its silence."""
        data = b""
        self.control.settimeout(SILENCE)  # it imports a library before it answers first
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            socket.send_fds(self.control, [json.dumps(request).encode() + b"\n"], fds)
            while not data.endswith(b"\n"):
                more = self.control.recv(4096)
                if not more:
                    break
                data += more
        if not data.endswith(b"\n"):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            if self.process.poll() is None:
                self.process.kill()
                raise RuntimeError(f"the fork server with {self.library or 'torch'} said nothing for {SILENCE} s")
            raise RuntimeError(
                f"the fork server with {self.library or 'torch'} ended with exit status {self.process.wait(5)}"
            )
        answer: dict[str, Any] = json.loads(data)
        return answer

    def close(self) -> None:
        """End the server, which ends its children."""
        self.control.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _Child:
    """A child process, its socket and its log."""

    def __init__(self, server: _Server, model: str, target: str, log: Path, gib: float) -> None:
        self.server, self.model, self.log, self.cost = server, model, log, ""
        self._socket, theirs = socket.socketpair()
        self._buffer = b""
        # CUDA maps more than it uses, and what it uses is not this memory.
        memory = int(gib * (1 << 30)) + _SLACK if sys.platform == "linux" and device.chosen() == "cpu" else None
        start = {"model": model, "target": target, "log": str(log), "memory": memory}
        with theirs:
            self.pid = server.ask({"start": start}, (theirs.fileno(),))["pid"]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def send(self, name: str) -> None:
        """Give it a case; a child that is gone is noticed as its answer is awaited."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(name.encode() + b"\n")

    def receive(self, limit: Limit, deadline: float | None) -> dict[str, Any]:
        """Its next message; _Lost when it dies, or is ended since it takes too long or holds too much."""
        start = time.monotonic()
        while b"\n" not in self._buffer:
            if self._selector.select(POLL):
                more = self._read()
                if not more:
                    raise _Lost(self._death())
                self._buffer += more
                continue
            held = resident(self.pid)
            if held > limit.gib:
                self._kill()
                raise _Lost(Finding(Status.OOM, f"it held {held:.1f} GiB, over its limit of {limit.gib:g}"))
            if deadline is not None and time.time() > deadline:
                self._kill()
                raise _Lost(OUT_OF_TIME)
            if time.monotonic() - start > limit.seconds:
                stack = self._stack()
                self._kill()
                raise _Lost(Finding(Status.TIMEOUT, f"it ran past its limit of {limit.seconds:g} s", {"stack": stack}))
        text, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(text)
        return message

    def _read(self) -> bytes:
        with suppress(ConnectionResetError):
            return self._socket.recv(65536)
        return b""

    def _death(self) -> Finding:
        """Why the child died, by itself."""
        code = os.waitstatus_to_exitcode(self._wait())
        last = self.last_words()
        if code == -signal.SIGKILL:
            return Finding(Status.OOM, "the system killed its process, which is what Linux does when memory runs out")
        what = f"of {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        return Finding(Status.CRASH, f"its process ended {what}" + (f": {last[-1]}" if last else ""), {"log": last})

    def last_words(self, count: int = 12) -> list[str]:
        """The last lines that it printed, or the first ones of the stack on which it died."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        fatal = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
        return lines[-count:] if fatal is None else [*lines[fatal + 1 : fatal + count], lines[fatal]]

    def _stack(self) -> list[str]:
        """Where it is now, innermost call first."""
        before = self.log.stat().st_size if self.log.exists() else 0
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.3)
        if not self.log.exists():
            return []
        lines = self.log.read_bytes()[before:].decode(errors="replace").splitlines()
        return [line.strip().replace(str(ROOT) + os.sep, "") for line in lines if re.match(r"\s+File", line)][:8]

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it started ends with it, such as a compiler
        self._wait()

    def _wait(self) -> int:
        pid, self.pid = self.pid, 0
        status: int = self.server.ask({"wait": pid})["status"] if pid else 0
        return status

    def end(self) -> None:
        """Let it go: it ends as its socket closes, or is ended."""
        self._selector.close()
        self._socket.close()
        if self.pid:
            self._kill()


def resident(pid: int) -> float:
    """The memory that a process holds, in GiB; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / (1 << 30)
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0.0
