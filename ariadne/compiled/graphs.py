"""CUDA graphs of a kernel: what it launches for inputs of one size is recorded once, and played again.

A graph reads and writes memory at addresses that it knows. So inputs are copied to where it reads them, and results out of where it
writes them, in each call: any number of boundaries may be in flight. The model's tensors it reads where they are; where one of them
has moved, or lies otherwise, it is recorded anew.

Not torch's own (`mode="reduce-overhead"` of torch.compile): entering that takes longer than a small model runs, for each of the two
sides, and it knows neither that the boundary is given away nor what the plan says of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ariadne import tree
from ariadne.capture import version
from ariadne.compiled.lift import Lifted, Miss
from ariadne.compiled.modes import libraries, modes
from ariadne.forks import rlock
from ariadne.plan import TraceNode, TracePlan, as_bytes, may_draw

DEVICE = "cuda"
FEW = 64  # elements of a tensor on the CPU that a graph may hold as numbers
MOST = 16  # graphs of one kernel; each takes memory
MOVES = 4  # how often tensors of the model may move before nothing is recorded any more
_SPACES = ("aten", "prims", "torchvision")
_PLAIN = (int, float, bool, complex, type(None), str, torch.dtype, torch.device)
_data_ptr = torch.Tensor.data_ptr


def unrecorded(plan: TracePlan, nodes: Sequence[TraceNode], lifted: Lifted, eager: bool) -> str | None:
    """Why what the ops `nodes` launch, compiled or as `eager` code, can't be played again, as the plan tells it; or None."""
    if may_draw(nodes):
        return "it draws random numbers"
    if eager and any(node.target.startswith("python.") for node in nodes):
        return "it calls Python functions that are no ops"
    given = {plan.values[name].storage for name in lifted.inputs} - {-1}
    for node in nodes:
        if not _is_recordable(node.target):
            return f"{node.target!r} may do what no graph holds"
        for name in node.writes:
            if plan.values[name].storage in given:
                return f"it writes into {name!r}, which it is given"
        for value in map(plan.values.__getitem__, node.outputs):
            sizes = [size for size in value.shape if not isinstance(size, int)]
            if value.dtype is None and value.kind != "scalar":
                return f"{node.name!r} is no tensor"
            if any(not size.names <= {lifted.symbol, *plan.over} for size in sizes):
                return f"the size of {node.name!r} follows data"
    if len({plan.values[o].device for node in nodes for o in node.outputs} - {"", "cpu"}) > 1:
        return "it runs on several devices"
    return None


def _is_recordable(target: str) -> bool:
    """Whether all that an op does at a call is what it launches: an op of torch's own libraries, but for those that say no.

    What Python does in an op of the user's is done in each call. Pinned memory of a call is gone when a graph copies it again.
    """
    space, _, rest = target.partition(".")
    if space == "python":
        return True  # compilers look into it
    if space not in _SPACES or rest.startswith("_pin_memory."):
        return False
    name, _, overload = rest.partition(".")
    op = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
    return getattr(torch.Tag, "cudagraph_unsafe", None) not in op.tags


def writes_state(plan: TracePlan, nodes: Sequence[TraceNode]) -> bool:
    """Whether these ops write into tensors of the model."""
    state = {value.storage for value in plan.values.values() if value.is_state} - {-1}
    return any(plan.values[name].is_state or plan.values[name].storage in state for n in nodes for name in n.writes)


class _Span(NamedTuple):
    """A piece of memory that is copied at once, and which tensors lie in it.

    `first` is one of them; `size` is None where that is copied as it is. Else as many elements are, from `shift` before its own
    first. `lie`: of each tensor in it the position, and where it isn't the piece itself, its sizes, strides and offset there.
    """

    first: int
    size: int | None
    shift: int
    lie: list[tuple[int, tuple[Any, ...] | None]]

    def piece(self, first: torch.Tensor) -> torch.Tensor:
        """The piece, of which this is the first tensor."""
        return first if self.size is None else first.as_strided((self.size,), (1,), first.storage_offset() + self.shift)


def _spans(tensors: Sequence[tuple[int, torch.Tensor]]) -> list[_Span]:
    """The pieces of memory in which tensors lie: those that share memory lie in one."""
    together: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for i, t in tensors:
        together.setdefault(_memory(t) if t.numel() else -1 - i, []).append((i, t))
    found = []
    for group in together.values():
        at, first = group[0]
        if len(group) == 1 and not _overlaps(first):
            found.append(_Span(at, None, 0, [(at, None)]))
            continue
        if len({t.dtype for _, t in group}) > 1:
            raise _Unrecordable("tensors of different types share memory")
        low = min(int(t.storage_offset()) for _, t in group)
        high = max(int(t.storage_offset()) + extent(t) for _, t in group)
        lie: list[tuple[int, tuple[Any, ...] | None]] = [
            (i, (t.shape, t.stride(), t.storage_offset() - low)) for i, t in group
        ]
        found.append(_Span(at, high - low, low - int(first.storage_offset()), lie))
    return found


def _lay(pieces: Sequence[torch.Tensor], spans: Sequence[_Span], into: list[Any]) -> None:
    """Put the tensors that lie in these pieces to their positions."""
    for piece, span in zip(pieces, spans, strict=True):
        for i, lies in span.lie:
            into[i] = piece if lies is None else piece.as_strided(*lies)


def _sharing(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Which of them share memory, and how they lie to each other there."""
    together: dict[int, list[tuple[int, int]]] = {}
    for i, t in enumerate(tensors):
        if t.numel():
            together.setdefault(_memory(t), []).append((i, int(t.storage_offset())))
    return tuple(tuple((i, at - group[0][1]) for i, at in group) for group in together.values() if len(group) > 1)


class _Unrecordable(Exception):
    """Why nothing can be recorded; empty where nobody asks."""


class _Graph:
    """A graph: where it reads its inputs and writes its results, and what it was recorded for.

    `spans` are the pieces of memory of the inputs, which are copied to `places`. `numbers`: what its kernel was given beside
    tensors, by position; `fits` tells inputs that are as those it was recorded for, `stands` tensors of the model that are where
    they were, and lie as they did. `host`: tensors of the model on the CPU, and what they held, which the graph holds as numbers.
    `counted`: those of the model that count how often they are written, and are.
    """

    def __init__(self, replay: Callable[[], None], given: Sequence[Any], spans: list[_Span], places: list[torch.Tensor],
                 results: tuple[Any, ...], state: Sequence[torch.Tensor], modes: tuple[Any, ...],
                 counted: list[int]) -> None:  # fmt: skip
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        self.replay, self.spans, self.places, self.modes, self.counted = replay, spans, places, modes, counted
        self.at = [i for i, t in enumerate(given) if isinstance(t, torch.Tensor)]
        self.numbers = [(i, t) for i, t in enumerate(given) if not isinstance(t, torch.Tensor)]
        self.fits, self.stands, self.sharing = _alike(tensors), _alike(state), _sharing(tensors)
        self.addresses: list[int | None] = [*map(_data_ptr, state)]
        self.indices = [*range(len(state))]
        self.host = [(i, as_bytes(t).clone()) for i, t in enumerate(state) if t.device.type != DEVICE]
        self.inference = any(t.is_inference() for t in places)
        self.device = places[0].device.index if places and DEVICE == "cuda" else None
        # Results that are of the model's memory, or of an input's, are given as such; the others are copied.
        self.results = results
        self.of_state: list[int] = []
        self.of_input: list[tuple[int, _Span, torch.Tensor]] = []
        copied, model, inputs = [], {*map(_memory, state)}, {_memory(t): k for k, t in enumerate(places)}
        for i, t in enumerate(results):
            if isinstance(t, torch.Tensor) and t.numel() and _memory(t) in model:
                self.of_state.append(i)
            elif isinstance(t, torch.Tensor) and t.numel() and _memory(t) in inputs:
                k = inputs[_memory(t)]
                if t.dtype != places[k].dtype:
                    raise _Unrecordable("a result shares memory with an input of another type")
                self.of_input.append((i, spans[k], t))
            elif isinstance(t, torch.Tensor):
                copied.append((i, t))
        self.outs = _spans(copied)
        self.parts = [span.piece(results[span.first]) for span in self.outs]
        self.make = [partial(_empty, t) for t in self.parts]

    def takes(self, given: Sequence[Any], modes: tuple[Any, ...]) -> bool:
        """Whether it was recorded for such inputs, in such modes of torch."""
        tensors = [given[i] for i in self.at]
        return (
            all(tree.identical(given[i], n) for i, n in self.numbers)
            and self.fits(*tensors)
            and (not self.sharing or _sharing(tensors) == self.sharing)
            and modes == self.modes
        )

    def stays(self, state: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors of the model are where they were, and as they were where a graph holds what they are."""
        return (
            torch._C._tensors_data_ptrs_at_indices_equal([*state], self.addresses, self.indices)
            and self.stands(*state)
            and all(as_bytes(state[i]).equal(was) for i, was in self.host)
        )

    def play(self, given: Sequence[Any], state: Sequence[torch.Tensor], copies: bool) -> tuple[Any, ...] | None:
        """Run it for these inputs."""
        pieces = [span.piece(given[span.first]) for span in self.spans]
        if self.inference:  # into what was made in that mode, no write is allowed outside of it
            with torch.inference_mode():
                _copy(self.places, pieces)
        else:
            _copy(self.places, pieces)
        self.replay()
        if self.counted:  # autograd, and boundaries that are in flight, ask it
            increment_version([state[i] for i in self.counted])
        if not copies:
            return self.results or None
        made = [make() for make in self.make]
        _copy(made, self.parts)
        found = [*self.results]
        _lay(made, self.outs, found)
        for i in self.of_state:
            found[i] = found[i].as_strided(found[i].shape, found[i].stride(), found[i].storage_offset())
        for i, span, t in self.of_input:
            first = given[span.first]
            found[i] = first.as_strided(t.shape, t.stride(), first.storage_offset() + span.shift + t.storage_offset())
        return tuple(found) or None


class Graphs:
    """A kernel for inference, played from graphs where it has run before with inputs of these sizes."""

    copies = True  # measurements of what the copies of results cost switch them off

    def __init__(self, run: Callable[..., Any], inputs: int, report: Any, *, eager: bool, writes: bool) -> None:
        self.run, self.inputs, self.report = run, inputs, report
        self.eager = eager  # it may read weights as autocast keeps them cast, for the caller's block alone
        self.writes = writes  # into tensors of the model: then none may be on the CPU, where nothing is recorded
        self.lock = rlock()
        self.graphs: dict[Any, _Graph] = {}
        self.latest: _Graph | None = None
        self.ran: set[Any] = set()
        self.off, self.moves = False, 0
        self.stream: tuple[int, int] | None = None  # the device and the stream on which it was played last
        self.pool: Any = None
        self.side: Any = None  # the stream on which is recorded

    def __call__(self, *args: Any) -> Any:
        """Play what was recorded for such inputs; the second time that they come, record it."""
        given, state = args[: self.inputs], args[self.inputs :]
        if self.off or torch.is_grad_enabled() or not _alone():
            return self.run(*args)
        now = (modes(), libraries())
        if self.eager and now[0][0] is not None:
            return self.run(*args)
        with self.lock:
            graph, key = self.latest, None
            if graph is None or not graph.takes(given, now):
                if (key := _kinds(given)) is None:
                    return self.run(*args)
                key = (*key, now)
                graph = self.latest = self.graphs.get(key)
            if graph is not None and not graph.stays(state):
                key = next(k for k, g in self.graphs.items() if g is graph)
                self._moved(key)
                graph = None
            if graph is None and key in self.ran and len(self.graphs) < MOST and not self.off:
                graph = self.latest = self._recorded(key, given, state, now)
            if graph is not None:
                self._follow(graph)
                return graph.play(given, state, self.copies)
        found = self.run(*args)
        if len(self.ran) < MOST:
            self.ran.add(key)
        return found

    def _forget(self, *keys: Any) -> None:
        if DEVICE == "cuda":
            for device in {self.graphs[key].device for key in keys}:
                torch.cuda.synchronize(device)  # no graph is taken away while it runs
        self.latest = None
        for key in keys:
            del self.graphs[key]

    def _moved(self, key: Any) -> None:
        self._forget(key)
        self.moves += 1
        if self.moves > MOVES:
            self._stop(f"tensors of the model moved {self.moves} times")

    def _stop(self, why: str) -> None:
        self.off = True
        self._forget(*self.graphs)
        if why:
            self.report.notes.append(f"runs without CUDA graphs: {' '.join(why.split())}"[:300])

    def _recorded(self, key: Any, given: Sequence[Any], state: Sequence[Any], now: tuple[Any, ...]) -> _Graph | None:
        """A graph of the kernel for such inputs, not run yet; None where there can't be one, which the report says."""
        try:
            graph = self.graphs[key] = self._record(given, state, now)
        except Miss:  # it is compiled anew first
            self.ran.discard(key)
            return None
        except _Unrecordable as why:
            self._stop(str(why))
            return None
        self.report.recorded += 1
        return graph

    def _record(self, given: Sequence[Any], state: Sequence[Any], now: tuple[Any, ...]) -> _Graph:
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        devices = {t.device for t in tensors} | {t.device for t in state if t.device.type == DEVICE or t.numel() > FEW}
        if self.writes:
            devices |= {t.device for t in state}
        if len(devices) != 1 or {d.type for d in devices} != {DEVICE}:
            kinds = {d.type for d in devices}
            raise _Unrecordable("some of its tensors are on other devices" if DEVICE in kinds else "")
        spans = _spans([(i, t) for i, t in enumerate(given) if isinstance(t, torch.Tensor)])
        places = []
        for span in spans:
            with torch.inference_mode(given[span.first].is_inference()):
                places.append(_empty(span.piece(given[span.first])))
        read = [*given]
        _lay(places, spans, read)
        args = (*read, *state)
        before = [*map(version, state)]
        try:
            replay, found = self._capture(devices.pop(), args)
        except RuntimeError as error:
            raise _Unrecordable(f"recording failed: {type(error).__name__}: {error}") from error
        results = found if isinstance(found, tuple) else ()
        if any(not (_lies(t) if isinstance(t, torch.Tensor) else type(t) in _PLAIN) for t in results):
            raise _Unrecordable("it gives something other than numbers and tensors on that device")
        counted = [i for i, (t, was) in enumerate(zip(state, before, strict=True)) if version(t) != was]
        return _Graph(replay, given, spans, places, results, state, now, counted)

    def _capture(self, device: torch.device, args: tuple[Any, ...]) -> tuple[Callable[[], None], Any]:
        with torch.cuda.device(device):
            if not self.graphs:  # with the last of its graphs a pool is gone
                self.pool = torch.cuda.graph_pool_handle()
            if self.side is None or self.side.device != device:
                self.side = torch.cuda.Stream(device)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(device)
            torch._C._cuda_clearCublasWorkspaces()  # one of this recording's own, in its pool; others may use the stream later
            with torch.cuda.stream(self.side):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    found = self.run(*args)
                except BaseException:
                    _end_failed(graph, device, self.pool)
                    raise
                try:
                    graph.capture_end()
                except BaseException:
                    _settle(device, self.pool)
                    raise
                finally:
                    torch._C._cuda_clearCublasWorkspaces()
        return graph.replay, found

    def _follow(self, graph: _Graph) -> None:
        """Wait for what was played on another stream, since that is still reading and writing the same memory."""
        if graph.device is not None:
            now = graph.device, torch._C._cuda_getCurrentRawStream(graph.device)
            if self.stream not in (None, now):
                other = torch.cuda.ExternalStream(self.stream[1], device=self.stream[0])
                torch.cuda.current_stream(graph.device).wait_stream(other)
            self.stream = now


def _end_failed(graph: Any, device: torch.device, pool: Any) -> None:
    """End a recording in which something was raised, which torch may refuse to do."""
    try:
        graph.capture_end()
    except RuntimeError:
        _settle(device, pool)


def _settle(device: torch.device, pool: Any) -> None:
    """Put right what a recording that failed leaves behind in torch: memory is taken from its pool, and no number can be drawn.

    An end that CUDA refuses stops before torch has let go of both. The next recording that ends well lets go of the generator.
    """
    torch._C._cuda_endAllocateToPool(device.index, pool)
    torch._C._cuda_releasePool(device.index, pool)
    place = torch.zeros(1, device=device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        place.add_(1)
        graph.capture_end()


def _kinds(given: Sequence[Any]) -> tuple[Any, ...] | None:
    """What a graph is recorded for: sizes and types of inputs; None where it can't be."""
    kinds: list[Any] = []
    for t in given:
        if type(t) in (torch.Tensor, torch.nn.Parameter):
            if t.layout is not torch.strided or t.is_nested:
                return None
            kinds.append((t.shape, t.stride(), t.dtype, t.device, t.is_inference()))
        elif type(t) in _PLAIN:
            kinds.append((type(t), repr(t)))
        else:
            return None
    return *kinds, _sharing([t for t in given if isinstance(t, torch.Tensor)])


def _alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that tells whether tensors are of the types and sizes of these, and lie as they do, by torch's own check.

    That takes each tensor once: which are the same one is asked beside it.
    """
    first = {id(t): i for i, t in reversed([*enumerate(tensors)])}
    once = sorted(first.values())
    again = [(i, first[id(t)]) for i, t in enumerate(tensors) if first[id(t)] != i]
    if not once:
        return lambda *found: True
    guards = torch._C._dynamo.guards.TensorGuards(
        *[tensors[i] for i in once], dynamic_dims_sizes=None, dynamic_dims_strides=None
    )
    check: Callable[..., bool] = guards.check
    if not again:
        return check
    return lambda *found: all(found[i] is found[j] for i, j in again) and check(*[found[i] for i in once])


def _alone() -> bool:
    """Whether nothing else looks at or records what is run."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (DEVICE == "cuda" and torch.cuda.is_current_stream_capturing())
    )


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def extent(t: torch.Tensor) -> int:
    """How many elements of memory it spans."""
    return 1 + sum(step * (n - 1) for n, step in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0


def _empty(t: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor that lies as this one does."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def _lies(t: torch.Tensor) -> bool:
    return type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type == DEVICE and t.layout is torch.strided


def _overlaps(t: torch.Tensor) -> bool:
    """Whether elements may share memory, by its strides."""
    extent = 1
    for step, n in sorted((step, n) for n, step in zip(t.shape, t.stride(), strict=True) if n > 1):
        if step < extent:
            return True
        extent += step * (n - 1)
    return False


def _copy(into: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    if len(into) == 1:
        into[0].copy_(of[0])
    elif into:
        torch._foreach_copy_(into, of)
