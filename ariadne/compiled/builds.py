"""The C++ builds of AOTInductor's packages apart from their lowering: put off while a kernel is lowered, then run in a thread.

Lowering is Python, with settings of torch that the whole process shares: two at once would change each other's. The C++ compiler is
a program of its own, takes most of the time, and knows nothing of them. So one package is lowered while another is built.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ariadne.forks import rlock, undone
from ariadne.imports import imported

CORES = 3
_WRITTEN = (
    ".wrapper.cpp",
    ".kernel.cpp",
)  # what AOTInductor writes; all else that it compiles is small, or looked at at once


class Touched(Exception):
    """torch wanted what was put off while it lowered: this package is to be built as torch does it."""


class Build:
    """What is left of a package after its lowering: commands of a C++ compiler, and the archive of what they make.

    All that they read and write lies in `scratch`, a folder of its own: torch's has files of other processes, and torch removes
    and appends to its own after each build.
    """

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.commands: list[list[str]] = []
        self.seconds: float | None = None  # that the commands took, once they have ended
        self._moved: dict[str, str] = {}  # from where torch has a file to where it lies here
        self._linked: tuple[str, Any] | None = None
        self._archive: tuple[Any, Any, Callable[..., Any]] | None = None
        self._error: Exception | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._guard = rlock()
        self._thread: threading.Thread | None = None

    # --- while torch lowers -----------------------------------------------------------------------------------------

    def takes(self, line: str) -> bool:
        """Put a command off, if it builds what AOTInductor wrote; False for all others."""
        command = shlex.split(line)
        if "-o" not in command[:-1]:
            return False
        made = command[command.index("-o") + 1]
        written = [part for part in command if part.endswith(_WRITTEN)]
        if "-c" in command and written:
            self._copy(written)
            Path(made).touch()  # torch removes it once it has linked
        elif any(part in self._moved for part in command):
            self._copy([part for part in command if part.endswith(".o") and part not in self._moved])
            self._linked = made, _stamp(made)
        else:
            return False
        self._moved[made] = str(self.scratch / Path(made).name)
        self.commands.append([self._moved.get(part, part) for part in command])
        return True

    def _copy(self, paths: list[str]) -> None:
        for path in paths:
            self._moved[path] = shutil.copy(path, str(self.scratch))

    def keeps(self, path: Any, files: Any, archive: Callable[..., Any]) -> bool:
        """Put an archive off, if something that goes into it is not built yet."""
        if self.commands:
            self._archive = path, files, archive
        return bool(self.commands)

    def whole(self) -> bool:
        """Whether something was put off; `Touched` where that is not all, or torch wrote into what is to be built."""
        if not self.commands:
            return False
        if self._linked is None or self._archive is None or _stamp(self._linked[0]) != self._linked[1]:
            raise Touched("torch needed what was put off, or builds in another way")
        return True

    # --- afterwards -------------------------------------------------------------------------------------------------

    def start(self, then: Callable[[], object] = bool) -> None:
        """Run the commands, one after the other, in a thread, and `then` this."""
        self._thread = threading.Thread(target=self._run, args=(then,), name="ariadne build", daemon=True)
        self._thread.start()

    def _run(self, then: Callable[[], object]) -> None:
        began = time.perf_counter()
        try:
            for command in self.commands:
                self._call(command)
        except Exception as error:  # raised where it is waited for
            self._error = error
        then()
        self.seconds = time.perf_counter() - began

    def _call(self, command: list[str]) -> None:
        with self._guard:
            if self._stopped:
                return
            # In a group of its own, since a compiler's driver leaves its children behind when it is ended.
            group: dict[str, Any] = {} if sys.platform == "win32" else {"process_group": 0}
            self._process = subprocess.Popen(
                command, cwd=self.scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **group
            )
        told, _ = self._process.communicate()
        if self._process.returncode:
            raise imported("torch._inductor.exc").CppCompileError(command, told.decode(errors="replace"))

    def finish(self) -> float:
        """Wait for the commands, and write the archive; gives their seconds, and raises what the compiler says as torch does."""
        assert self._thread is not None
        assert self._archive is not None
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self.seconds is None:  # in a process that was forked meanwhile the thread is gone
            raise RuntimeError("the process was forked while a package was built")
        path, files, archive = self._archive
        archive(path, [self._moved.get(f, f) if isinstance(f, str) else f for f in files])
        return self.seconds

    def stop(self) -> None:
        """End the commands, and wait for that."""
        with self._guard:
            self._stopped = True
            if self._process is not None and self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    if sys.platform == "win32":
                        self._process.kill()
                    else:
                        os.killpg(self._process.pid, signal.SIGKILL)
        if self._thread is not None:
            self._thread.join()


def _stamp(path: str) -> Any:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


_threads = threading.local()


def starting() -> Start | None:
    """What this thread begins with, while it is in `Start.starting`."""
    return getattr(_threads, "start", None)


class Start:
    """Both sides begun before either is waited for. On the way out each is finished, or ended where the program was interrupted.

    An error leaves as it would if one side were compiled after the other: that of the first side to fail. Another one that fails
    is told in a note of it; one that does not fail is there for the next call.
    """

    def __init__(self) -> None:
        self.sides: list[Any] = []  # those that are begun, in order: they can be settled, and dropped
        self._folders: list[tempfile.TemporaryDirectory[str]] = []

    @staticmethod
    def pays() -> bool:
        """Whether there is a core for another compiler: three in all, since with two, both at work, no gain was shown."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cores >= CORES and sys.platform != "win32"  # where commands are written otherwise

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While it lasts, packages are begun in this thread and not waited for."""
        _threads.start = self
        try:
            yield
        except Exception as error:  # those that were begun before come first
            _threads.start = None
            self._settle(after=error)
            raise
        finally:
            _threads.start = None

    def folder(self) -> Path:
        """A new folder, until the end."""
        self._folders.append(tempfile.TemporaryDirectory())
        return Path(self._folders[-1].name)

    def __enter__(self) -> Start:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None or isinstance(error, Exception):
                self._settle(before=error)
        finally:
            for side in self.sides:
                side.drop()
            for folder in self._folders:
                folder.cleanup()

    def _settle(self, before: Exception | None = None, after: Exception | None = None) -> None:
        """Wait for all; raise the first error, unless one came `before`, and note the others, and one that came `after`."""
        failed = [before] if before is not None else []
        for side in self.sides:
            try:
                side.settle()
            except Exception as found:
                failed.append(found)
        failed += [after] if after is not None and failed else []
        for other in failed[1:]:
            failed[0].add_note(f"The other side failed, too: {other}")
        if failed and failed[0] is not before:
            raise failed[0]


@contextmanager
def put_off(scratch: Path) -> Iterator[Build]:
    """While it lasts, what AOTInductor would build in this thread waits in what this gives; the caller holds torch's lock."""
    build, me = Build(scratch), threading.get_ident()
    cpp_builder: Any = imported("torch._inductor.cpp_builder")
    package: Any = imported("torch._inductor.package")
    run, archive = cpp_builder.run_compile_cmd, package.package_aoti

    def later(cmd_line: str, cwd: str) -> None:
        if threading.get_ident() != me or not build.takes(cmd_line):
            run(cmd_line, cwd=cwd)

    def archived(archive_file: Any, aoti_files: Any) -> Any:
        if threading.get_ident() == me and build.keeps(archive_file, aoti_files, archive):
            return archive_file
        return archive(archive_file, aoti_files)

    def back() -> None:
        cpp_builder.run_compile_cmd, package.package_aoti = run, archive

    done = undone(back)
    cpp_builder.run_compile_cmd, package.package_aoti = later, archived
    try:
        yield build
    finally:
        back()
        done()
