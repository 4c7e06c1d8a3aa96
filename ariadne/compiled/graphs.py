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
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ariadne.compiled.lift import Lifted, Miss
from ariadne.compiled.modes import libraries, modes
from ariadne.forks import rlock
from ariadne.plan import TraceNode, TracePlan, may_draw

DEVICE = "cuda"
FEW = 64  # elements of a tensor on the CPU that a graph may hold as numbers
MOST = 16  # graphs of one kernel; each takes memory
MOVES = 4  # how often tensors of the model may move before nothing is recorded any more
_data_ptr = torch.Tensor.data_ptr


def unrecorded(plan: TracePlan, nodes: Sequence[TraceNode], lifted: Lifted, eager: bool) -> str | None:
    """Why what the ops `nodes` launch, compiled or as `eager` code, can't be played again, as the plan tells it; or None."""
    if may_draw(nodes):
        return "it draws random numbers"
    if eager and any(node.target.startswith("python.") for node in nodes):
        return "it calls Python functions that are no ops"
    given = {plan.values[name].storage for name in lifted.inputs} - {-1}
    for node in nodes:
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


def writes_state(plan: TracePlan, nodes: Sequence[TraceNode]) -> bool:
    """Whether these ops write into tensors of the model."""
    state = {value.storage for value in plan.values.values() if value.is_state} - {-1}
    return any(plan.values[name].is_state or plan.values[name].storage in state for n in nodes for name in n.writes)


class _Unrecordable(Exception):
    """Why nothing can be recorded; empty where nobody asks."""


class _Graph:
    """A graph: where it reads its inputs and writes its results, and what it was recorded for.

    `numbers`: what its kernel was given beside tensors, by position; `fits` tells inputs that are as those it was recorded for,
    `stands` tensors of the model that are where they were, and lie as they did. `host`: tensors of the model on the CPU, and what
    they held, which the graph holds as numbers. `counted`: those of the model that count how often they are written, and are.
    """

    def __init__(self, replay: Callable[[], None], given: Sequence[Any], places: list[torch.Tensor],
                 results: tuple[Any, ...], state: Sequence[torch.Tensor], modes: tuple[Any, ...],
                 counted: list[int]) -> None:  # fmt: skip
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        self.replay, self.places, self.modes, self.counted = replay, places, modes, counted
        self.at = [i for i, t in enumerate(given) if isinstance(t, torch.Tensor)]
        self.numbers = [(i, t) for i, t in enumerate(given) if not isinstance(t, torch.Tensor)]
        self.fits, self.stands = _alike(tensors), _alike(state)
        self.addresses: list[int | None] = [*map(_data_ptr, state)]
        self.indices = [*range(len(state))]
        self.host = [(i, t.clone()) for i, t in enumerate(state) if t.device.type != DEVICE]
        self.apart = [(i, shape) for i, shape in enumerate(map(_apart, tensors)) if shape is not None]
        self.inference = any(t.is_inference() for t in places)
        self.device = places[0].device.index if places and DEVICE == "cuda" else None
        # Of each result that is a tensor, the part that is copied, and how to make the place that it is copied to.
        self.results = results
        self.written = [(i, _part(t, _apart(t))) for i, t in enumerate(results) if isinstance(t, torch.Tensor)]
        self.parts = [part for _, part in self.written]
        self.make = [
            partial(torch.empty_strided, t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in self.parts
        ]
        self.expanded = [(i, results[i]) for i, part in self.written if part is not results[i]]

    def takes(self, given: Sequence[Any], modes: tuple[Any, ...]) -> bool:
        """Whether it was recorded for such inputs, in such modes of torch."""
        return (
            all(type(given[i]) is type(n) and given[i] == n for i, n in self.numbers)
            and self.fits(*[given[i] for i in self.at])
            and modes == self.modes
        )

    def stays(self, state: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors of the model are where they were, and as they were where a graph holds what they are."""
        return (
            torch._C._tensors_data_ptrs_at_indices_equal([*state], self.addresses, self.indices)
            and self.stands(*state)
            and all(torch.equal(state[i], was) for i, was in self.host)
        )

    def play(self, given: Sequence[Any], state: Sequence[torch.Tensor], copies: bool) -> tuple[Any, ...] | None:
        """Run it for these inputs."""
        tensors = [given[i] for i in self.at]
        for i, shape in self.apart:
            tensors[i] = _part(tensors[i], shape)
        if self.inference:  # into what was made in that mode, no write is allowed outside of it
            with torch.inference_mode():
                _copy(self.places, tensors)
        else:
            _copy(self.places, tensors)
        self.replay()
        if self.counted:  # autograd, and boundaries that are in flight, ask it
            increment_version([state[i] for i in self.counted])
        if not copies:
            return self.results or None
        made = [make() for make in self.make]
        _copy(made, self.parts)
        found = [*self.results]
        for (i, _), t in zip(self.written, made, strict=True):
            found[i] = t
        for i, t in self.expanded:
            found[i] = _as(found[i], t)
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
        self.stream: int | None = None  # on which it was played last
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
        if DEVICE == "cuda" and keys:
            torch.cuda.synchronize()  # no graph is taken away while it runs
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
        places = [_place(t, _apart(t)) for t in tensors]
        if any(map(_overlaps, places)):
            raise _Unrecordable("an input has elements that share memory")
        rest = iter(zip(places, tensors, strict=True))
        args = (*(_as(*next(rest)) if isinstance(t, torch.Tensor) else t for t in given), *state)
        before = [*map(_version, state)]
        try:
            replay, found = self._capture(devices.pop(), args)
        except RuntimeError as error:
            raise _Unrecordable(f"recording failed: {type(error).__name__}: {error}") from error
        results = found if isinstance(found, tuple) else ()
        if any(not (_lies(t) if isinstance(t, torch.Tensor) else type(t) in _PLAIN) for t in results):
            raise _Unrecordable("it gives something other than numbers and tensors on that device")
        counted = [i for i, (t, was) in enumerate(zip(state, before, strict=True)) if _version(t) != was]
        return _Graph(replay, given, places, results, state, now, counted)

    def _capture(self, device: torch.device, args: tuple[Any, ...]) -> tuple[Callable[[], None], Any]:
        with torch.cuda.device(device):
            if not self.graphs:  # with the last of its graphs a pool is gone
                self.pool = torch.cuda.graph_pool_handle()
            self.side = self.side or torch.cuda.Stream(device)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(device)
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
        return graph.replay, found

    def _follow(self, graph: _Graph) -> None:
        """Wait for what was played on another stream, since that is still reading and writing the same memory."""
        if graph.device is not None:
            stream = torch._C._cuda_getCurrentRawStream(graph.device)
            if self.stream not in (None, stream):
                other = torch.cuda.ExternalStream(self.stream, device=graph.device)
                torch.cuda.current_stream(graph.device).wait_stream(other)
            self.stream = stream


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


_PLAIN = (int, float, bool, complex, type(None), str, torch.dtype, torch.device)


def _kinds(given: Sequence[Any]) -> tuple[Any, ...] | None:
    """What a graph is recorded for: sizes and types of inputs; None where it can't be."""
    kinds: list[Any] = []
    for t in given:
        if type(t) in (torch.Tensor, torch.nn.Parameter):
            if t.layout is not torch.strided or t.is_nested:
                return None
            kinds.append((t.shape, t.stride(), t.dtype, t.device, t.is_inference()))
        elif type(t) in _PLAIN:
            kinds.append((type(t), t))
        else:
            return None
    return tuple(kinds)


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


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


def _apart(t: torch.Tensor) -> tuple[int, ...] | None:
    """The sizes of a tensor without what it repeats by strides of zero; None where it repeats nothing."""
    if 0 not in t.stride():
        return None
    return tuple(1 if step == 0 and n else n for n, step in zip(t.shape, t.stride(), strict=True))


def _place(t: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    """Memory for a tensor that lies as this one does, or for the part of it that has these sizes."""
    with torch.inference_mode(t.is_inference()):
        return _empty(t, shape)


def _empty(t: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    return torch.empty_strided(t.shape if shape is None else shape, t.stride(), dtype=t.dtype, device=t.device)


def _part(t: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    return t if shape is None else t.as_strided(shape, t.stride())


def _as(place: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """What the kernel reads at a place, as it reads this tensor."""
    return place if place.shape == t.shape else place.as_strided(t.shape, t.stride())


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
