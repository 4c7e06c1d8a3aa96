"""Compiled segments: torch.compile over kernels, one artefact for every batch, and an account of what was compiled.

A kernel that has been compiled is called without leave to compile again: where torch's guards don't hold, the Python body
would run, and its first line raises. So every compilation goes through `_Jit.cold`, which sets torch up for a batch that may be
1, counts, times, and takes the blame.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ariadne.capture import is_opaque_call
from ariadne.compiled.ahead import Ahead
from ariadne.compiled.buckets import Bucketed
from ariadne.compiled.compilable import Strides, compilable, constant_dims, odd_strides, pinned
from ariadne.compiled.graphs import Graphs, unrecorded, writes_state
from ariadne.compiled.lift import Lifted, Miss, lift
from ariadne.compiled.rows import Mixed
from ariadne.compiled.tracing import batch_free_layouts, lock, tracing, whenever_compiled
from ariadne.cut import CompileOptions
from ariadne.errors import AriadneError, CompileError, SpecError
from ariadne.plan import TraceNode, TracePlan
from ariadne.segment import Source, load


@dataclass
class SegmentReport:
    """What became of one segment: how often it was compiled or loaded, in which time, and for which batches.

    `state` is waiting, compiled, loaded, or eager (it fell back). `compiled` counts by whether gradients were on; what goes
    beyond one of each is a recompilation, or beyond none for inference that `began_loaded`, or of a side that was compiled or
    loaded before, for an `earlier` plan. `seconds` is the time of all calls that compiled,
    backward passes included. `recorded` counts CUDA graphs. `ways` says by
    what inference (False) and training (True) run: ahead of time, torch.compile or eager. `notes` says why, where something fell
    back, was refused, not kept, or made anew.
    """

    side: str
    split_id: str
    state: str = "waiting"
    compiled: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    loaded: int = 0
    recorded: int = 0
    began_loaded: bool = False
    seconds: float = 0.0
    batches: tuple[str, ...] = ()
    ways: dict[bool, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    earlier: SegmentReport | None = field(default=None, repr=False, compare=False)
    stage: str = field(default="", repr=False, compare=False)
    since: float = field(default=0.0, repr=False, compare=False)

    def reach(self, stage: str) -> None:
        """Note what is done for it from now on."""
        self.stage, self.since = stage, time.monotonic()

    @property
    def recompiles(self) -> int:
        """Compilations after the first of a kind, or after a package that was loaded."""
        first = {grad: 0 if self._was_there(grad) or (self.began_loaded and not grad) else 1 for grad in self.compiled}
        return sum(max(0, n - first[grad]) for grad, n in self.compiled.items())

    @property
    def trains_eagerly(self) -> bool:
        """Whether training runs the segment as eager code; not before it did so once."""
        return self.state == "eager" or self.ways.get(True) == "eager"

    def _was_there(self, grad: bool) -> bool:
        """Whether this side was compiled, or for inference loaded, for an earlier plan."""
        before = self.earlier
        while before is not None and not (before.compiled[grad] or (before.loaded and not grad)):
            before = before.earlier
        return before is not None


@dataclass(frozen=True)
class CompileReport:
    """How a runtime's segments run: its mode and backend, and a report for each segment of each plan."""

    mode: str
    backend: str | None
    segments: tuple[SegmentReport, ...] = ()

    @classmethod
    def of(cls, mode: str, options: Mapping[str, Any] | None, segments: tuple[SegmentReport, ...]) -> CompileReport:
        """The report of a runtime that was prepared with these options."""
        if mode != "compiled":
            return cls(mode, None)
        backend = (
            "chosen by task" if CompileOptions.parse(options).chosen else (options or {}).get("backend", "inductor")
        )
        return cls(mode, backend if isinstance(backend, str) else getattr(backend, "__name__", repr(backend)), segments)

    @property
    def seconds(self) -> float:
        """Time that the segments took to compile or load; sides that are compiled at once count each."""
        return sum(s.seconds for s in self.segments)

    @property
    def recompiles(self) -> int:
        """Compilations after the first of a kind, of all segments."""
        return sum(s.recompiles for s in self.segments)

    @property
    def fell_back(self) -> bool:
        """Whether a segment runs eagerly because it could not be compiled."""
        return any(s.state == "eager" for s in self.segments)

    def __str__(self) -> str:
        lines = [
            f"{self.mode}{f', {self.backend}' if self.backend else ''}: {self.seconds:.1f} s, {self.recompiles} recompiled"
        ]
        for s in self.segments:
            counts = (
                f"{sum(s.compiled.values())} compiled, {s.loaded} loaded, {s.recompiles} recompiled, {s.seconds:.1f} s"
            )
            counts += f", {s.recorded} CUDA graphs" if s.recorded else ""
            lines.append(f"  {s.side} at {s.split_id}: {s.state}; {counts}")
            lines += [f"    for batch {', '.join(s.batches)}"] if s.batches else []
            ways = [f"{('inference', 'training')[grad]}: {way}" for grad, way in sorted(s.ways.items())]
            lines += [f"    {', '.join(ways)}"] if ways else []
            lines += [f"    {note}" for note in s.notes]
        return "\n".join(lines)


def jit(source: Source, plan: TracePlan, nodes: Sequence[TraceNode], label: str, options: CompileOptions,
        report: SegmentReport) -> Callable[..., Any]:  # fmt: skip
    """A segment under `torch.compile`; it is compiled when it is first called, once for inference and once for training."""
    kernel = _kernel(source, plan, nodes, label, options, report)
    lifted = kernel.lifted
    call = "try: {results} = hot({given})\nexcept Miss: {results} = cold({given})"
    namespace: dict[str, Any] = {"hot": kernel.hot, "cold": kernel.cold, "Miss": Miss}
    if options.buckets:
        try:
            namespace["padded"] = Bucketed.of(kernel.run, lifted, plan, nodes, options.buckets)
            call = "{results} = padded({batch}, {given})"
        except Mixed as why:
            report.notes.append(f"not padded to batch_buckets, since its samples may depend on each other: {why}")
    function = load(lifted.shell(call, namespace), f"{label}, compiled")
    kernel.shell = function.__globals__
    return function


def _kernel(source: Source, plan: TracePlan, nodes: Sequence[TraceNode], label: str, options: CompileOptions,
            report: SegmentReport) -> _Jit:  # fmt: skip
    lifted = compilable(lift(source, plan))
    parts = any(map(is_opaque_call, nodes))
    eager = options.given.get("backend") == "cudagraphs"
    why = unrecorded(plan, nodes, lifted, eager) if cuda_graphs(options) else None
    seeded, writes = any(node.seeded for node in plan.nodes), writes_state(plan, nodes)
    return _Jit(lifted, label, options, report, seeded, parts, why, writes)


class _Jit:
    """A kernel under torch.compile: `hot` runs what is compiled, `cold` compiles."""

    def __init__(
        self,
        lifted: Lifted,
        label: str,
        options: CompileOptions,
        report: SegmentReport,
        seeded: bool,
        parts: bool = False,
        unrecorded: str | None = None,
        writes: bool = False,
    ) -> None:
        self.parts = parts  # whether it calls what no compiler may look into
        self.unrecorded = unrecorded  # why it can't be recorded as a CUDA graph, where one is wanted
        self.writes = writes  # whether it writes into tensors of the model
        self.lifted, self.label, self.options, self.report = lifted, label, options, report
        self.shell: dict[str, Any] = {}
        self.seeded = seeded
        self.strides: Strides = {}
        self.now = threading.local()  # the call of a kernel in pieces that runs in this thread
        self._prepare()

    def _prepare(self) -> None:
        self.shapes = [t.shape for t in self.lifted.read()]
        graphs = cuda_graphs(self.options)
        given = _without_graphs(self.options.given) if graphs else dict(self.options.given)
        given.setdefault("dynamic", True)
        breaks = (self.lifted.has_witness or self.parts) and not given.get("fullgraph")
        lifted = pinned(self.lifted, self.strides) if given["dynamic"] else self.lifted
        function = load(lifted.kernel(marked=not breaks, checked=bool(given["dynamic"])), f"{self.label}, kernel")
        try:
            self.inner = torch.compile(function, **given)
        except Exception as error:  # an unknown backend or mode
            raise SpecError(f"torch.compile does not take {given}: {error}") from error
        self.lazy = breaks and whenever_compiled(self.inner, self._compiling)
        if given.get("disable"):
            self.hot = load(self.lifted.python(), f"{self.label}, kernel")
        else:
            self.hot = self.watched if breaks else torch._dynamo.run(function)
        if graphs:
            self.hot = self._recorded(self.hot)
        self.shell["hot"] = self.hot

    def _recorded(self, hot: Callable[..., Any]) -> Callable[..., Any]:
        """The kernel played from CUDA graphs, where it can be, for inference; with backend "cudagraphs" it is eager code."""
        eager = self.options.given.get("backend") == "cudagraphs"
        run = hot
        if eager:
            plain = load(self.lifted.python(), f"{self.label}, kernel")
            self.report.state, self.report.ways[False] = "compiled", "CUDA graphs of eager code"

            def run(*args: Any) -> Any:
                return (hot if torch.is_grad_enabled() else plain)(*args)

        why = "it is compiled in pieces" if run == self.watched else self.unrecorded
        if why is not None:
            note = f"runs without CUDA graphs: {why}"
            if note not in self.report.notes:  # it may be prepared again
                self.report.notes.append(note)
            return run
        inputs = len(self.lifted.inputs) + (self.lifted.batch is None)
        return Graphs(run, inputs, self.report, eager=eager, writes=self.writes)

    def run(self, *args: Any) -> Any:
        """Run what is compiled, and compile what is missing."""
        try:
            return self.hot(*args)
        except Miss:
            return self.cold(*args)

    def cold(self, *args: Any) -> Any:
        """Compile for what these arguments are, and run."""
        with lock:
            try:
                return self.hot(*args)  # it fell back, or another thread has compiled it by now
            except Miss:
                grad, start = torch.is_grad_enabled(), time.perf_counter()
            strides = odd_strides(self.lifted, args, self.strides)
            if strides != self.strides or [t.shape for t in args[len(args) - len(self.lifted.state) :]] != self.shapes:
                self.strides = strides
                self._prepare()
            before = _written(args)
            self.report.reach("torch.compile")
            try:
                with tracing(self.seeded), constant_dims(self.lifted, args):
                    result = self.inner(*args)
            except Miss:
                return self._failed(self._gave_up(grad), None, args)
            except (AriadneError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # what compilers raise, and what they made, is anybody's guess
                return self._failed(_told(error), error, args, moved=_written(args) != before)
            finally:
                self.report.reach("")
            self._note(grad, time.perf_counter() - start)
        return result

    def watched(self, *args: Any) -> Any:
        """Run a kernel that torch compiles in pieces, since it looks at numbers in tensors; compile what is missing."""
        grad = torch.is_grad_enabled()
        self.now.call = call = _Call(args, None if self.options.on_error == "raise" else _written(args))
        with lock:  # torch.compile changes a setting at each call, and two threads are to compile nothing twice
            try:
                with nullcontext() if self.lazy else self._compiling():
                    result = self.inner(*args)
            except (AriadneError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
                    return self._failed(self._gave_up(grad), error, args, moved=call.moved)
                if not call.pieces and not isinstance(error, torch._dynamo.exc.TorchDynamoException):
                    raise  # nothing was compiled
                return self._failed(_told(error), error, args, moved=call.moved)
            finally:
                self.now.call = None  # which would keep the arguments alive
            if call.pieces:
                self._note(grad, time.perf_counter() - call.start)
            elif not self.report.compiled[grad]:
                why = "no part of it was compiled: torch.compile is switched off, or takes none of its ops"
                if self.options.on_error != "eager":
                    raise refused(self.lifted, self.options, why)
                self._fall_back(why)  # what ran was Python, so its result is right
        return result

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """What has to hold while a piece of a kernel is compiled in a call of `watched`."""
        call: _Call = self.now.call
        with tracing(self.seeded), _no_giving_up():
            pieces, call.start = _pieces(), call.start or time.perf_counter()
            call.before = _written(call.args) if call.before is None else call.before
            self.report.reach("torch.compile")
            try:
                yield
            finally:
                self.report.reach("")
                call.pieces += _pieces() - pieces

    def _gave_up(self, grad: bool) -> str:
        count = self.report.compiled[grad]
        return (
            "it would run the segment as Python: its tracer stopped at an op (TORCH_LOGS='+dynamo' shows where), it gave up "
            f"(after {count} compilations; torch._dynamo.config.recompile_limit), or it is switched off"
        )

    def _note(self, grad: bool, seconds: float) -> None:
        self.report.state = "compiled"
        self.report.compiled[grad] += 1
        self.report.seconds += seconds
        self.report.ways[grad] = "torch.compile"

    def _failed(self, why: str, error: Exception | None, args: tuple[Any, ...], moved: bool = False) -> Any:
        if moved:
            why = f"{why}\nIt had written into its arguments by then, so nothing can be run in its place"
        failure = refused(self.lifted, self.options, why)
        if self.options.on_error != "eager" or moved:
            raise failure from error
        self._fall_back(why or type(error).__name__)
        return self.hot(*args)

    def _fall_back(self, why: str) -> None:
        self.report.state = "eager"
        self.report.notes.append(" ".join(why.split())[:300])
        self.hot = load(self.lifted.python(), f"{self.label}, kernel")
        self.shell["hot"] = self.hot


@dataclass
class _Call:
    """A call of a kernel in pieces: how often its arguments were `written` into `before` it compiled any, and what it compiled."""

    args: tuple[Any, ...]
    before: list[int] | None
    pieces: int = 0
    start: float = 0.0

    @property
    def moved(self) -> bool:
        """Whether arguments were written into since."""
        return self.before is not None and _written(self.args) != self.before


_CPP_STACK = re.compile(r"(\n|\\n)Exception raised from .*?(?=\n  Hint|\n\nfrom user code|\Z)", re.DOTALL)


def _told(error: Exception) -> str:
    """What a compiler, or the first run of what it made, says, without the stack of torch's C++."""
    text = _CPP_STACK.sub("", str(error))
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):
        return text
    return (
        f"the first run of what was compiled raises {type(error).__name__}: {text}\n"
        "(if the model raises that too, the inputs are at fault)"
    )


def _written(args: Sequence[Any]) -> list[int]:
    """How often each tensor was written, where it counts that."""
    return [t._version for t in args if isinstance(t, torch.Tensor) and not t.is_inference()]


def refused(lifted: Lifted, options: CompileOptions, why: str) -> CompileError:
    """The error for a segment that can't be compiled, with its source and what to try."""
    who = "AOTInductor" if options.ahead else "torch.compile"
    ways = ["compile_options={'on_compile_error': 'eager'} to run this segment eagerly", "mode='generated_eager'"]
    if options.ahead:
        ways.append("another cut")
    elif options.given.get("backend") != "aot_eager":
        ways.append("another backend, such as 'aot_eager', to see which stage fails")
    return CompileError(
        f"{who} refused {lifted.name!r} with {dict(options.given)}: {why.strip()}\nTry {', '.join(ways[:-1])}, or {ways[-1]}. "
        f"The segment:\n\n{lifted.source.text}"
    )


def _pieces() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@contextmanager
def _no_giving_up() -> Iterator[None]:
    """Let torch raise where it would run Python from here on, after too many compilations.

    By hand: what config.patch puts back torch 2.11 finds no more.
    """
    config: Any = torch._dynamo.config
    before, config.fail_on_recompile_limit_hit = config.fail_on_recompile_limit_hit, True
    try:
        yield
    finally:
        config.fail_on_recompile_limit_hit = before


def cuda_graphs(options: CompileOptions) -> bool:
    """Whether what runs on CUDA is to run as CUDA graphs: by a mode, an option, the backend, or inductor's own setting."""
    if options.ahead or not torch.cuda.is_available():
        return False
    if options.chosen:
        return True
    given = options.given
    if (backend := given.get("backend", "inductor")) != "inductor":
        return bool(backend == "cudagraphs")
    return bool(_inductor_options(given).get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))


def _without_graphs(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same options for torch.compile, without CUDA graphs."""
    found = dict(given)
    if found.get("backend") == "cudagraphs":
        return found | {"backend": "aot_eager"}
    found.pop("mode", None)
    return found | {"options": {**_inductor_options(given), "triton.cudagraphs": False}}


def _inductor_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a mode stands for, and those that are given by name; what torch.compile refuses stands for none."""
    mode, named = given.get("mode") or "default", given.get("options")
    return {**torch._inductor.list_mode_options().get(mode, {}), **(named if isinstance(named, Mapping) else {})}


def ahead(source: Source, plan: TracePlan, label: str, options: CompileOptions, report: SegmentReport,
          instead: Callable[[], Callable[..., Any]] | None = None) -> Callable[..., Any]:  # fmt: skip
    """A segment for inference, compiled ahead of time when it is first called, or loaded from where packages are kept.

    What can't be a package is run by what `instead` makes.
    """
    given = options.given.get("options") or {}
    unknown = sorted(given.keys() - {*torch._inductor.list_options()}) if given else []
    if unknown:
        raise SpecError(
            f"compile_options: inductor has no setting {', '.join(map(repr, unknown))}; torch._inductor.list_options() names all"
        )
    lifted = compilable(lift(source, plan))
    kernel = Ahead(lifted, plan, label, options, report, batch_free_layouts, lambda why: refused(lifted, options, why), lock,
                   instead)  # fmt: skip
    call = "{results} = kernel({batch}, {given})" if lifted.batch else "{results} = kernel({given})"
    return load(lifted.shell(call, {"kernel": kernel}, read=lifted.reader()), f"{label}, compiled")


EAGER_TRAINING = (
    "training runs as eager code: on a CPU compiled training took longer in most of what was measured (geometric mean 1.11 of an "
    "eager step). compile_options={'backend': 'inductor'} compiles it"
)


def best(source: Source, plan: TracePlan, nodes: Sequence[TraceNode], label: str, options: CompileOptions,
         report: SegmentReport, *, in_pieces: bool) -> Callable[..., Any]:  # fmt: skip
    """A segment run by what is known to serve best: on a CPU ahead of time for inference and eagerly for training; on CUDA by
    torch.compile, from CUDA graphs for inference."""  # fmt: skip
    eager = load(source, label)
    native = (
        jit(source, plan, nodes, label, options, report)
        if in_pieces
        else ahead(
            source, plan, label, options, report, lambda: _kernel(source, plan, nodes, label, options, report).run
        )
    )
    later: list[Callable[..., Any]] = []

    def segment(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return native(*args)
        if not any(isinstance(t, torch.Tensor) and t.is_cuda for t in args):
            if True not in report.ways:
                report.ways[True] = "eager"
                report.notes.append(EAGER_TRAINING)
            return eager(*args)
        with lock:
            if not later:
                later.append(jit(source, plan, nodes, label, options, report))
        return later[0](*args)

    return segment


def compiled(source: Source, plan: TracePlan, nodes: Sequence[TraceNode], label: str, options: Mapping[str, Any] | None,
             report: SegmentReport) -> Callable[..., Any]:  # fmt: skip
    """The ops `nodes`, a side of a cut of `plan`, as a callable that compiles itself as `options` say; its account is `report`."""
    chosen = CompileOptions.parse(options)
    part = next(filter(is_opaque_call, nodes), None)
    whole = chosen.ahead or chosen.given.get("fullgraph")  # and a part that has run can't be run again
    if part is not None and (whole or chosen.on_error == "eager"):
        why = (
            f"{source.name!r} calls the opaque part {part.target.rpartition('.')[2]!r}, into which no compiler may look"
        )
        if chosen.on_error != "eager":
            raise CompileError(
                f"{why}, and it was asked to compile in one piece; use mode='generated_eager', another backend, or "
                "compile_options={'on_compile_error': 'eager'} to run that side eagerly"
            )
        report.state = "eager"
        report.notes.append(why)
        return load(source, label)
    if chosen.chosen:
        return best(source, plan, nodes, label, chosen, report, in_pieces=part is not None)
    if chosen.ahead:
        return ahead(source, plan, label, chosen, report)
    return jit(source, plan, nodes, label, chosen, report)
