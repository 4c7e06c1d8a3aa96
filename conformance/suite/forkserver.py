"""A process that has imported what runs cases and a model library, and forks a child for each model: a start takes milliseconds.

Started by `conformance.suite.supervisor` as `python -m conformance.suite.forkserver FD LIBRARY RUNNER`. Over the socket it takes
lines of JSON, and answers each with one::

    {"start": {"model", "target", "log", "memory"}}, and a socket for the child  ->  {"pid": …}
    {"wait": pid}                                                                ->  {"status": …}, as of os.waitpid

Its end of file ends it and its children. A child says `{"ready": cost}`, then takes names of cases and answers each with
`{"status", "reason", "facts", "seconds"}`. multiprocessing's own fork server would do, but for its preloading one list
of modules for good, and its reading of the parent's main module, which under xdist is no file.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import conformance.suite.offline  # noqa: F401 - before torch and the model libraries

# isort: split
from conformance.suite.cases import Case
from conformance.suite.results import plain
from conformance.suite.statuses import Finding, Stop
from model_zoo.errors import MissingPackageError

Runner = Callable[[str, str], tuple[str, Callable[[Case], Finding]]]


def serve(control: socket.socket, run: Runner) -> None:
    """Answer requests until the other side closes, then end the children that are left."""
    living: set[int] = set()
    try:
        while request := _receive(control):
            message, fds = request
            if "start" in message:
                (fd,) = fds
                pid = os.fork()
                if pid == 0:
                    os.setpgid(0, 0)
                    control.close()
                    _child(socket.socket(fileno=fd), run, **message["start"])
                os.close(fd)
                with suppress(
                    ProcessLookupError, PermissionError
                ):  # a group of its own, whichever of the two comes first
                    os.setpgid(pid, pid)
                living.add(pid)
                answer = {"pid": pid}
            else:
                pid = message["wait"]
                answer = {"status": os.waitpid(pid, 0)[1]}
                living.discard(pid)
            control.sendall(json.dumps(answer).encode() + b"\n")
    finally:
        for pid in living:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request and the file descriptors that came with it; None at the end."""
    data, fds, _, _ = socket.recv_fds(control, 65536, 1)
    while data and not data.endswith(b"\n"):
        data += control.recv(65536)
    return (json.loads(data), fds) if data else None


def _child(channel: socket.socket, run: Runner, *, model: str, target: str, log: str, memory: int | None) -> None:
    """Open a model and answer for its cases; never returns."""
    code = 1
    try:
        _redirect(log)
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # the supervisor asks where it hangs
        cost, answer = _open(run, model, target)
        lines = channel.makefile("rwb")
        _send(lines, {"ready": cost})
        while name := lines.readline():
            start = time.perf_counter()
            found = answer(Case.parse(name.decode().strip()))
            seconds = time.perf_counter() - start
            _send(
                lines, {"status": found.status, "reason": found.reason, "facts": plain(found.facts), "seconds": seconds}
            )
        code = 0
    except BaseException:  # nothing of the server's may run in the child, whatever ended it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _open(run: Runner, model: str, target: str) -> tuple[str, Callable[[Case], Finding]]:
    """The runner's cost and answer; where it stops, that finding is the answer for every case."""
    try:
        return run(model, target)
    except Stop as stop:
        finding = stop.finding
        return "cheap", lambda case: finding


def _send(lines: Any, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message, allow_nan=False).encode() + b"\n")
    lines.flush()


def _redirect(log: str) -> None:
    """Send what the child prints, and what the C library prints as it dies, to a file."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def main(fd: str, library: str, runner: str) -> None:
    module, _, name = runner.partition(":")
    run = getattr(import_module(module), name)
    if library:
        from model_zoo.packages import package  # noqa: PLC0415 - it brings torch, which tests of the engine do without

        with suppress(MissingPackageError):  # the child that builds the model says so
            package(library)
    gc.collect()
    gc.freeze()  # what is here now is not walked in children, so that its pages stay shared
    serve(socket.socket(fileno=int(fd)), run)
    sys.stdout.flush()
    os._exit(0)  # no library's farewell: nothing here is worth a word or the time


if __name__ == "__main__":
    main(*sys.argv[1:])
