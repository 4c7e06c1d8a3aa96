"""Both sides of a split compiled at once: neither waits for the other, all else is as one after the other; shells compile here."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import cpp_builder, exc
from torch._inductor import package as archives

from ariadne import SplitRuntime, prepare_split
from ariadne.compiled import Progress, SegmentReport, Start, ahead
from ariadne.compiled.ahead import Ahead
from ariadne.compiled.builds import Build, Touched, put_off
from ariadne.compiled.kept import Kept
from ariadne.compiled.progress import told
from ariadne.errors import CompileError, SpecError
from ariadne.plan import Batches
from ariadne.segment import load
from conformance.unit.compiled_kit import Conv, compiler, halves, made, near, whole
from conformance.unit.trap_kit import numbers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there one side is compiled after the other")


class Net(nn.Module):
    """Two sides with weights of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 4)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 5) -> (B, 4)."""
        return self.second(self.first(x).tanh())


class Pretended:
    """A compiler whose packages run the kernel's Python, and whose builds are the shell `scripts` of each side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, bool]] = []  # which side was lowered, and whether apart from its build
        self.scripts: dict[str, str] = {}
        self.refused: dict[str, Exception] = {}
        self.given: Callable[[Any], Any] = lambda results: results
        self._made: list[Callable[..., Any]] = []

    def lower(self, ahead: Ahead, layouts: Any, inputs: Any, state: Any, served: Batches, hint: int, path: str,
              apart: Path | None) -> tuple[Batches, Build | None]:  # fmt: skip
        side = ahead.lifted.name
        self.asked.append((side, apart is not None))
        if side in self.refused:
            raise self.refused[side]
        number = len(self._made)
        self._made.append(load(ahead.lifted.kernel(marked=False, checked=False), "pretended"))
        command = ["sh", "-c", f"cd {shlex.quote(str(self.folder))}; {self.scripts.get(side, 'true')}"]
        if apart is None:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise exc.CppCompileError(command, done.stdout)
            Path(path).write_text(str(number))
            return served, None
        build = Build(apart)
        build.commands = [command]
        build._archive = path, [], lambda path, files: Path(path).write_text(str(number))
        return served, build

    def loaded(self, path: str, device: int) -> Callable[..., Any]:
        run = self._made[int(Path(path).read_text())]
        return lambda tensors: self.given(run(*tensors))

    def waits_for(self, side: str, other: str) -> None:
        """Let the build of a side say that it runs, and fail unless the other's runs, too, within ten seconds."""
        tries = f"for i in $(seq 1000); do [ -e {other} ] && exit 0; sleep 0.01; done; exit 1"
        self.scripts[side] = f"touch {side}; {tries}"


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pretended:
    found = Pretended(tmp_path)
    monkeypatch.setenv("ARIADNE_CACHE_DIR", str(tmp_path / "packages"))
    monkeypatch.setattr(Ahead, "_lower", lambda self, *given: found.lower(self, *given))
    monkeypatch.setattr(ahead, "_loaded", found.loaded)
    monkeypatch.setattr(Start, "pays", staticmethod(lambda: True))
    return found


def split(**options: Any) -> SplitRuntime:
    given = {"compile_options": options} if options else {}
    return prepare_split(Net(), (numbers(4, 5),), split="after:first", mode="compiled", **given)


def states(runtime: SplitRuntime) -> list[str]:
    return [s.state for s in runtime.report().segments]


def told_alike(runtime: SplitRuntime) -> str:
    """The report without its seconds."""
    return re.sub(r"\d+\.\d s", "", str(runtime.report()))


# --- at once ----------------------------------------------------------------------------------------------------------


def test_one_side_is_built_while_the_other_is_and_nothing_is_compiled_after(pretended: Pretended) -> None:
    pretended.waits_for("prefix", "suffix")
    pretended.waits_for("suffix", "prefix")
    runtime = split()
    runtime.warmup(numbers(3, 5))
    assert pretended.asked == [("prefix", True), ("suffix", True)]
    for batch in (1, 3, 17):
        x = numbers(batch, 5)
        assert torch.equal(halves(runtime, x), whole(runtime.model, x))
    assert len(pretended.asked) == 2
    assert [s.compiled for s in runtime.report().segments] == [{False: 1, True: 0}] * 2
    assert len(Kept(pretended.folder / "packages").cards()) == 2
    assert [s.stage for s in runtime.report().segments] == ["", ""]


@pytest.mark.parametrize(
    ("where", "bad", "on_error"),
    [
        ("C++", "", "raise"),
        ("C++", "prefix", "raise"),
        ("C++", "suffix", "raise"),
        ("C++", "prefix suffix", "eager"),
        ("lowering", "prefix", "raise"),
        ("lowering", "suffix", "raise"),
        ("lowering", "suffix", "eager"),
    ],
)
def test_what_is_told_and_raised_is_what_one_after_the_other_gives(
    where: str, bad: str, on_error: str, pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in bad.split():
        pretended.scripts[side] = f"echo no header for the {side}; exit 1"
        if where == "lowering":
            pretended.refused[side] = RuntimeError(f"no op for the {side}")
    found = []
    for at_once in (False, True):
        monkeypatch.setattr(Start, "pays", staticmethod(lambda at_once=at_once: at_once))
        runtime = split(backend="aot_inductor", on_compile_error=on_error)
        try:
            runtime.warmup(numbers(3, 5))
            said = None
        except CompileError as error:
            said = str(error)
        found.append((said, told_alike(runtime), states(runtime)))
    (first, one, before), (second, two, after) = found
    assert first == second
    assert (first is None) == (not bad or on_error == "eager")
    if where == "C++" and bad == "prefix":  # then the suffix was not compiled at all, and is there now
        assert (before, after) == (["waiting"] * 2, ["waiting", "compiled"])
    else:
        assert before == after
        assert one == two


def test_the_first_side_to_fail_is_raised_and_the_other_is_told_in_a_note(pretended: Pretended) -> None:
    for side in ("prefix", "suffix"):
        pretended.scripts[side] = f"echo no header for the {side}; exit 1"
    with pytest.raises(CompileError, match="no header for the prefix") as raised:
        split(backend="aot_inductor").warmup(numbers(3, 5))
    assert "no header for the suffix" in raised.value.__notes__[0]
    pretended.scripts["prefix"] = "sleep 0.2; echo no header for the prefix; exit 1"
    pretended.refused["suffix"] = RuntimeError("no op for the suffix")  # while the prefix is built
    with pytest.raises(CompileError, match="no header for the prefix") as raised:
        split(backend="aot_inductor").warmup(numbers(3, 5))
    assert "no op for the suffix" in raised.value.__notes__[0]


def test_the_other_side_of_one_that_failed_is_there_at_the_next_try(pretended: Pretended) -> None:
    pretended.scripts["prefix"] = "exit 1"
    runtime = split(backend="aot_inductor")
    with pytest.raises(CompileError):
        runtime.warmup(numbers(3, 5))
    del pretended.scripts["prefix"]
    runtime.warmup(x := numbers(3, 5))
    assert torch.equal(halves(runtime, x), whole(runtime.model, x))
    assert pretended.asked == [("prefix", True), ("suffix", True), ("prefix", False), ("prefix", True)]


def test_a_build_that_fails_is_made_again_as_torch_does_it(pretended: Pretended) -> None:
    pretended.scripts["suffix"] = "[ -e failed ] || { touch failed; exit 1; }"
    runtime = split(backend="aot_inductor")
    runtime.warmup(x := numbers(3, 5))
    assert pretended.asked == [("prefix", True), ("suffix", True), ("suffix", False)]
    assert torch.equal(halves(runtime, x), whole(runtime.model, x))
    (note,) = runtime.report().segments[1].notes
    assert note.startswith("built again, on its own: CppCompileError: ")


@pytest.mark.parametrize("side", ["prefix", "suffix"])
def test_a_side_for_torch_compile_is_compiled_while_the_other_is_built(
    side: str, pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "suffix" if side == "prefix" else "prefix"
    pretended.refused[side] = CompileError("it writes on the model")
    pretended.waits_for(other, "compiled")

    def backend(module: Any, inputs: Any, **_: Any) -> Any:
        assert [s.stage for s in runtime.report().segments if s.side == other] == ["C++"]
        (pretended.folder / "compiled").touch()
        return module.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **given: compile_(function, **{**given, "backend": backend}))
    runtime = split()
    runtime.warmup(x := numbers(3, 5))
    assert {s.side: s.ways[False] for s in runtime.report().segments} == {side: "torch.compile", other: "ahead of time"}
    assert torch.equal(halves(runtime, x), whole(runtime.model, x))
    assert runtime.report().recompiles == 0


def test_a_suffix_that_was_begun_for_another_layout_than_native_code_gives_is_made_anew(pretended: Pretended) -> None:
    pretended.given = lambda results: [t.t().contiguous().t() for t in results]
    runtime = split(backend="aot_inductor")
    runtime.warmup(numbers(3, 5))
    assert pretended.asked == [("prefix", True), ("suffix", True), ("suffix", False)]
    assert [s.compiled[False] for s in runtime.report().segments] == [1, 1]
    assert runtime.report().recompiles == 0


@pytest.mark.variants  # where both cores are busy, it may begin before the first does
def test_a_call_from_another_thread_waits_for_what_was_begun(pretended: Pretended) -> None:
    pretended.waits_for("prefix", "suffix")
    pretended.scripts["suffix"] = "touch suffix; sleep 0.3"
    runtime, x, found = split(), numbers(2, 5), []
    begun = threading.Event()
    start = Build.start

    def noted(build: Build, *given: Any) -> None:
        start(build, *given)
        begun.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Build, "start", noted)
        warm = threading.Thread(target=runtime.warmup, args=(numbers(3, 5),))
        warm.start()
        assert begun.wait(20)
        other = threading.Thread(target=lambda: found.append(halves(runtime, x)))
        other.start()
        warm.join(30)
        other.join(30)
    assert torch.equal(found[0], whole(runtime.model, x))
    assert sorted(side for side, _ in pretended.asked) == ["prefix", "suffix"]


def test_an_input_that_forward_writes_into_is_left_by_warmup_and_written_once_by_a_call(pretended: Pretended) -> None:
    class Writes(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.add_(1))

    runtime = prepare_split(Writes(), (numbers(4, 5),), split="after:first", mode="compiled")
    runtime.warmup(x := numbers(3, 5))
    assert torch.equal(x, numbers(3, 5))
    runtime.run_prefix(x)
    assert torch.equal(x, numbers(3, 5) + 1)


@pytest.fixture
def interrupted() -> Iterator[None]:
    """Ctrl-C raises `KeyboardInterrupt`, which it does not where tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_ends_all_that_runs_and_the_next_try_begins_anew(pretended: Pretended) -> None:
    for side in ("prefix", "suffix"):
        pretended.scripts[side] = f"sleep 60 & echo $! > {side}.pid; mv {side}.pid {side}; wait"
    runtime = split()

    def interrupt() -> None:
        while not all((pretended.folder / side).exists() for side in ("prefix", "suffix")):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        runtime.warmup(numbers(3, 5))
    assert time.perf_counter() - began < 20
    for side in ("prefix", "suffix"):
        assert ended(int((pretended.folder / side).read_text()))
    assert states(runtime) == ["waiting"] * 2
    pretended.scripts = {}
    runtime.warmup(x := numbers(3, 5))
    assert torch.equal(halves(runtime, x), whole(runtime.model, x))


def ended(process: int) -> bool:
    """Whether a child of a child has ended within two seconds; one that nobody waited for counts."""
    for _ in range(200):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        told = Path(f"/proc/{process}/stat")
        if told.exists() and told.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(("cores", "expected"), [({0, 1}, False), ({0, 1, 2}, True)])
def test_it_pays_where_there_is_a_core_for_another_compiler(
    cores: set[int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores, raising=False)
    assert Start.pays() is expected


def test_where_it_does_not_pay_one_side_is_compiled_after_the_other(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Start, "pays", staticmethod(lambda: False))
    runtime = split()
    runtime.warmup(numbers(3, 5))
    assert pretended.asked == [("prefix", False), ("suffix", False)]


# --- what is put off --------------------------------------------------------------------------------------------------


_JOINS = """#!/bin/sh
for a in "$@"; do [ "$last" = -o ] && out=$a; last=$a; done
for a in "$@"; do case "$a" in "$out" | -*) ;; *) cat "$a" ;; esac; done > "$out"
"""


@pytest.fixture
def torch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as torch's, with a compiler that joins what it is given, and an archive that is a list of what is in it."""
    (cc := tmp_path / "cc").write_text(_JOINS)
    cc.chmod(0o755)
    (folder := tmp_path / "torch").mkdir()

    def archive(path: str, files: list[str]) -> str:
        Path(path).write_text(" ".join(f"{f}={Path(f).read_text()}" for f in files))
        return path

    monkeypatch.setattr(archives, "package_aoti", archive)
    return folder


def lowering(folder: Path, spoils: bool = False) -> None:
    """What AOTInductor does once it has lowered: compile, compile, link, remove, archive."""
    cc = folder.parent / "cc"
    for part in ("a.wrapper", "a.kernel"):
        (folder / f"{part}.cpp").write_text(part)
        cpp_builder.run_compile_cmd(f"{cc} {folder}/{part}.cpp -c -o {folder}/{part}.o", cwd=str(folder))
    cpp_builder.run_compile_cmd(
        f"{cc} {folder}/a.wrapper.o {folder}/a.kernel.o -o {folder}/a.wrapper.so", cwd=str(folder)
    )
    for part in ("a.wrapper", "a.kernel"):
        (folder / f"{part}.o").unlink()
        (folder / f"{part}.cpp").write_text("and a comment")
    if spoils:
        (folder / "a.wrapper.so").write_text("weights")
    archives.package_aoti(str(folder / "p.pt2"), [str(folder / "a.wrapper.so")])


def test_commands_wait_and_then_run_on_copies_of_their_own(torch_folder: Path, tmp_path: Path) -> None:
    before = cpp_builder.run_compile_cmd, archives.package_aoti
    (scratch := tmp_path / "scratch").mkdir()
    with put_off(scratch) as build:
        lowering(torch_folder)
    assert before == (cpp_builder.run_compile_cmd, archives.package_aoti)
    assert sorted(p.name for p in torch_folder.iterdir()) == ["a.kernel.cpp", "a.wrapper.cpp"]
    assert build.whole()
    build.start()
    assert build.finish() > 0
    assert (torch_folder / "p.pt2").read_text() == f"{scratch}/a.wrapper.so=a.wrappera.kernel"


def test_commands_of_other_threads_and_of_other_things_run_at_once(torch_folder: Path, tmp_path: Path) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    (torch_folder / "header.cpp").write_text("a header")
    with put_off(scratch) as build:
        other = threading.Thread(target=lowering, args=(torch_folder,))
        other.start()
        other.join()
        assert (torch_folder / "p.pt2").read_text() == f"{torch_folder}/a.wrapper.so=a.wrappera.kernel"
        cc = torch_folder.parent / "cc"
        cpp_builder.run_compile_cmd(f"{cc} {torch_folder}/header.cpp -c -o {torch_folder}/header.o", cwd="/")
    assert (torch_folder / "header.o").read_text() == "a header"
    assert not build.whole()


def test_a_package_that_torch_touches_while_it_is_put_off_is_not(torch_folder: Path, tmp_path: Path) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    with put_off(scratch) as build:
        lowering(torch_folder, spoils=True)
    with pytest.raises(Touched):
        build.whole()


def test_what_goes_wrong_while_it_is_put_off_is_done_as_torch_does_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tries: list[bool] = []
    plain = cpp_builder.run_compile_cmd

    def compiles(program: Any, package_path: str, **_: Any) -> None:
        tries.append(cpp_builder.run_compile_cmd is plain)
        if not tries[-1]:
            raise RuntimeError("no such file")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiles)
    monkeypatch.setattr(ahead, "_loaded", lambda path, device: lambda tensors: [tensors[0] @ tensors[1].t()])
    monkeypatch.setattr(Start, "pays", staticmethod(lambda: True))
    runtime = made(
        lambda: nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)),
        5,
        boundary="after:0",
        backend="aot_inductor",
    )
    runtime.warmup(numbers(3, 5))
    assert tries == [False, True] * 2
    assert all(s.notes[0].startswith("built again, on its own: ") for s in runtime.report().segments)


@compiler
@pytest.mark.compiler
@pytest.mark.slow  # runs the C++ compiler
def test_packages_that_were_built_at_once_serve_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    start = Build.start

    def counted(build: Build, *given: Any) -> None:
        started.append(len(build.commands))
        start(build, *given)

    monkeypatch.setattr(Build, "start", counted)
    monkeypatch.setattr(Start, "pays", staticmethod(lambda: True))
    runtime = made(Conv, 3, 8, 8, backend="aot_inductor")
    runtime.warmup(numbers(4, 3, 8, 8))
    assert started == [3, 3], "torch compiles otherwise: see builds.py"
    assert [(s.state, s.batches, s.notes) for s in runtime.report().segments] == [("compiled", ("1 to 64",), [])] * 2
    for batch in (2, 1, 17):
        x = numbers(batch, 3, 8, 8, seed=batch)
        found = runtime.run_suffix(runtime.run_prefix(x))
        near(runtime.model, x, found)
    assert runtime.report().recompiles == 0


# --- progress ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A terminal, or none; what it was told."""

    terminal = True

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr("ariadne.compiled.progress._FIRST", 0.01)
    monkeypatch.setattr("ariadne.compiled.progress._EACH", 0.01)
    found = Terminal()
    monkeypatch.setattr("ariadne.compiled.progress.sys", SimpleNamespace(stderr=found))
    return found


def report(side: str, stage: str = "") -> SegmentReport:
    found = SegmentReport(side, "cut:1")
    found.reach(stage)
    return found


def test_the_line_says_which_side_is_at_what_for_how_long() -> None:
    both = [report("prefix", "C++"), report("suffix", "lowering"), report("prefix")]
    assert told(both, both[0].since + 12.2) == "prefix: C++ 12 s, suffix: lowering 12 s"
    assert told(both, None) == "prefix: C++, suffix: lowering"


@pytest.mark.parametrize(
    ("terminal", "shown", "expected"),
    [
        (True, None, "\rariadne: compiling, prefix: C++ 0 s\r{}\r"),
        (True, False, ""),
        (False, None, ""),
        (False, True, "ariadne: compiling, prefix: C++\n"),
    ],
)
def test_a_terminal_has_one_line_that_goes_and_others_only_where_that_is_wanted(
    terminal: bool, shown: bool | None, expected: str, stderr: Terminal
) -> None:
    stderr.terminal = terminal
    with Progress(lambda: [report("prefix", "C++")], shown):
        time.sleep(0.1)
    assert stderr.getvalue() == expected.format(" " * len("ariadne: compiling, prefix: C++ 0 s"))


def test_warm_up_shows_it_and_ends_it_where_it_fails(stderr: Terminal, pretended: Pretended) -> None:
    pretended.scripts = {"prefix": "sleep 0.1; exit 1"}
    with pytest.raises(CompileError):
        split(backend="aot_inductor").warmup(numbers(3, 5))
    assert "prefix: C++ 0 s" in stderr.getvalue()
    assert stderr.getvalue().endswith(" \r")
    assert not [t for t in threading.enumerate() if t.name.startswith("ariadne")]


def test_a_terminal_that_is_gone_stops_nothing(stderr: Terminal) -> None:
    stderr.close()
    stderr.isatty = lambda: True  # type: ignore[method-assign]
    with Progress(lambda: [report("prefix", "C++")]):
        time.sleep(0.05)


def test_progress_is_yes_no_or_none() -> None:
    with pytest.raises(SpecError, match=r"progress is True, False, or None .*; found 'bar'"):
        split(progress="bar")
