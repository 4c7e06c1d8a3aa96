"""Recording: the pre-dispatch ATen ops that a forward runs, with the modules, modes and values around them.

Ops are seen above autograd and autocast, so composite ones stay whole and what acts on them acts again at replay. The
tensors underneath may be real or fake. What Python looks at besides tensors' data is noted by patched attributes, not by
a torch function mode: while one of those is on, models such as `nn.TransformerEncoder` leave their fast path.
"""

from __future__ import annotations

import builtins
import copy
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from ariadne import tree
from ariadne.capture import packed
from ariadne.capture.disguise import disguise_type, disguised
from ariadne.capture.followed import Real, Size, following, own_numbers, plain
from ariadne.capture.foreseen import on_fake
from ariadne.capture.refusals import PATCHING, Patches, called_by_torch, refuse, refuse_transforms
from ariadne.capture.scripted import Running
from ariadne.capture.sizes import Watch
from ariadne.capture.state import Snapshot
from ariadne.errors import UnsupportedError
from ariadne.guards import BOOKKEEPING, Effect, Event, Recording, is_a, simple, surroundings
from ariadne.plan import PLAIN, WHOLE, Region, bind, storage_of, tensors_in, written_arguments

AUTOCAST_DEVICES = ("cpu", "cuda")
HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks")


class Recorder(ProxyTorchDispatchMode):
    """The dispatch mode that records; torch lets only its own kinds of mode stand at the pre-dispatch key."""

    def __init__(
        self, recording: Recording, fake: FakeTensorMode | None, snapshot: Snapshot, watch: Watch | None = None
    ) -> None:
        super().__init__(None, "symbolic" if fake else "real", pre_dispatch=True)  # type: ignore[arg-type]
        self.tracer = SimpleNamespace(enable_thunkify=False)  # type: ignore[assignment]  # nested tensors ask the mode for one
        self.recording, self.fake, self.snapshot, self.watch = recording, fake, snapshot, watch
        self.thread = threading.get_ident()
        self.stack: list[tuple[str, int]] = [("", 1)]
        self.depth = 0
        self.running: tuple[OpOverload, tuple[Any, ...]] | None = None  # the op that fake tensors go through
        self.own: set[int] = set()
        self.ambient = modes()
        self.state: set[int] = set()  # the storages of the model's tensors
        self.autocast: list[str] = []
        self.scope = 0
        self.drawn: torch.Tensor = snapshot.rng["torch"]  # how forward left torch's generator when it drew last

    def is_mine(self) -> bool:
        """Whether it is forward's own Python that runs: in the thread that records, and outside of any op."""
        return threading.get_ident() == self.thread and not self.depth

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While in the block, what runs is not `mine`."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def where(self) -> str:
        """The module that runs, for an error message."""
        path, _ = self.stack[-1]
        return repr(path) if path else "the model itself"

    def run_on_fake(self, func: OpOverload, args: tuple[Any, ...]) -> Any:
        """Run and note an op that fake tensors can't reach by the dispatcher."""
        self.depth += 1
        self.running = func, args
        try:
            out = on_fake(func)(*args)
        finally:
            self.depth -= 1
            self.running = None
        self.add(func, args, out)
        return out

    def refuse_reading(self, how: str) -> NoReturn:
        """Raise `UnsupportedError`, as capture does again if forward catches it."""
        self.recording.read_size = (
            f"forward makes {how} of a size that follows the batch in {self.where()}, so that a symbolic plan would hold for "
            "one batch"
        )
        raise UnsupportedError(self.recording.read_size)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Note the events in the block as those of a backward pass."""
        start = len(self.recording.events)
        yield
        self.recording.backwards.append((start, len(self.recording.events), self.where()))

    def __sym_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **(kwargs or {}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or self.depth:
            return func(*args, **kwargs)
        refuse_transforms(self.where())
        if func is torch.ops.aten.lift_fresh.default:
            self.depth += 1
            with unset_fake_temporarily():
                kept = args[0].clone()  # the forward may write into what it gets
            self.depth -= 1
        strangers: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        if self.fake is None:
            strangers = self._keep_what_is_written(func, args, kwargs)
            self.depth += 1
            seeded = torch.Tag.nondeterministic_seeded in func.tags
            try:
                with (
                    self.drawing(seeded),
                    torch._C._DisablePythonDispatcher(),
                ):  # else composite ops such as lstm run as Python decompositions
                    out = func(*plain(args), **plain(kwargs)) if self.watch else func(*args, **kwargs)
            except Exception:
                self.recording.raised = True
                raise
            finally:
                self.depth -= 1
        else:
            lifted = func is torch.ops.aten.lift_fresh.default
            run_args, run_kwargs = (args, kwargs) if lifted else self._faked((args, kwargs))
            self.depth += 1
            self.running = func, run_args
            try:
                out = on_fake(func)(*run_args, **run_kwargs)
            except Exception:
                self.recording.raised = True
                raise
            finally:
                self.depth -= 1
                self.running = None
        for t, sizes in strangers:
            if sizes_in(t) != sizes:
                self._made_before_it_was_resized(t, sizes)
        bound = bind(func, args, kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            bound = (kept,)
        elif isinstance(out, torch.Tensor) and self._is_argument_again(func, bound, out):
            self.depth += 1
            try:
                out = torch.ops.aten.alias.default(out)
            finally:
                self.depth -= 1
            self.recording.again[id(out)] = self.recording.again.get(id(bound[0]), bound[0])
        self.add(func, bound, out)
        return out

    @staticmethod
    def _is_argument_again(func: OpOverload, bound: tuple[Any, ...], out: torch.Tensor) -> bool:
        """Whether an op such as `contiguous` or `to` had nothing to do here: elsewhere it may, so its result gets a name."""
        return (
            bound[0] is out
            and torch.Tag.nondeterministic_seeded not in func.tags
            and next(written_arguments(func, bound), None) is None
        )

    def add(self, target: Any, args: tuple[Any, ...], out: Any, effect: Effect | None = None) -> None:
        """Note one op."""
        path, call = self.stack[-1]
        args = own_numbers(args) if self.watch is not None else args
        self.recording.events.append(Event(target, args, out, path, call, self._region(), effect))
        made = list(tensors_in(out))
        if any(t.layout is torch.jagged for t in made):
            raise UnsupportedError(
                f"forward makes a nested tensor of layout torch.jagged in {self.where()}, which a plan can't hold; use a padded "
                "tensor and a mask"
            )
        self.own.update(map(id, made))
        if self.watch is not None:
            self.watch.learn(len(self.recording.events) - 1, made)

    @contextmanager
    def drawing(self, may: bool = True) -> Iterator[None]:
        """Note whether what runs in the block draws from torch's generator, if it `may`; and whether another thread did before."""
        if not may or self.fake is not None:
            yield
            return
        before = torch.get_rng_state()
        try:
            yield
        finally:
            after = torch.get_rng_state()
            on_device = "cuda" in self.snapshot.rng
            if on_device or not torch.equal(before, after):
                self.recording.drew = True
                self.recording.disturbed |= not torch.equal(before, self.drawn)
                self.drawn = after

    def scripted(self, running: Running, run: Callable[..., Any]) -> Any:
        """Run a scripted function, and note it as one op: `Call` as the target, leaves as arguments and result."""
        if self.watch is not None:
            self.watch.lose("a scripted function branches on sizes, if it does, in no Python")
        refuse_transforms(self.where())
        written = running.tensors(running.effects.writes)
        runs = running
        if self.fake is None:
            self._keep(written)
        else:  # what is below an op is not made fake, and would be written into
            runs = replace(running, args=self._faked(running.args), kwargs=self._faked(running.kwargs))
        with self.aside():
            try:
                with self.drawing(running.effects.draws):
                    out = runs.result(run, self.fake is not None)
            except Exception:
                self.recording.raised = True
                raise
            given = {id(t) for one in (running, runs) for t in tensors_in(tree.leaves((one.args, one.kwargs)))}
            out = tree.map_leaves(lambda leaf: self._named_anew(leaf) if id(leaf) in given else leaf, out)
        self.recording.scripted = True
        call, leaves, results = running.call(out)
        aliased = running.tensors(running.effects.aliases)
        self.add(call, (*leaves,), results, Effect(tuple(written), tuple(aliased), running.effects.draws))
        return out

    def _named_anew(self, leaf: Any) -> Any:
        """Another tensor with the memory of one that a scripted function gave back as it was; numbers stay."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        out = torch.ops.aten.alias.default(leaf)
        self.recording.again[id(out)] = self.recording.again.get(id(leaf), leaf)
        return out

    def _region(self) -> Region:
        now = modes()
        if now == self.ambient and not self.autocast:
            return PLAIN
        grad, inference, *autocast = now
        if inference != self.ambient[1]:
            raise UnsupportedError("forward enters torch.inference_mode() by itself; use torch.no_grad() there instead")
        switched = tuple(a for a in autocast if a[0] in self.autocast)
        return Region(grad if grad != self.ambient[0] else None, switched, self.scope if switched else 0)

    def _faked(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, FakeTensor) else self.fake.from_tensor(value, static_shapes=True)  # type: ignore[union-attr]
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._faked(v) for v in value)
        if type(value) is dict:
            return {k: self._faked(v) for k, v in value.items()}
        return value

    def _keep_what_is_written(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        """Keep the data of what an op is about to write; returns what of it no op has made, with its sizes."""
        strangers = []
        for i in written_arguments(func, bound := bind(func, args, kwargs)):
            strangers += self._keep(tensors_in(bound[i]))
        return strangers

    def _keep(self, written: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        strangers = []
        for t in written:
            self.snapshot.save_owners(t)
            if id(t) not in self.own:
                self.snapshot.save(t)
                strangers.append((t, sizes_in(t)))
        return strangers

    def _made_before_it_was_resized(self, t: torch.Tensor, sizes: tuple[int, ...]) -> None:
        """Note where a tensor came from that an `out=` has given other sizes: what `torch.empty(0)` returns is another tensor of
        the memory that its op made, and by its sizes it is known no more."""  # fmt: skip
        key = storage_of(t)
        made = (o for e in reversed(self.recording.events) for o in tensors_in(e.out))
        source = next((o for o in made if sizes_in(o) == sizes and storage_of(o) == key), None)
        if source is not None:
            self.add(torch.ops.aten.detach.default, (source,), t)


def modes() -> tuple[Any, ...]:
    """Whether gradients and inference mode are on, and the state of autocast for each device type."""
    cache = torch.is_autocast_cache_enabled()
    return (
        torch._C.is_grad_enabled(),
        torch._C.is_inference_mode_enabled(),
        *((d, torch._C.is_autocast_enabled(d), torch._C.get_autocast_dtype(d), cache) for d in AUTOCAST_DEVICES),
    )


def sizes_in(t: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a tensor; of a nested one, which has many, none."""
    return () if t.is_nested else tuple(t.shape)


def _patch(recorder: Recorder, paths: Mapping[int, str], strays: Collection[str], patches: Patches) -> None:
    recording, mine = recorder.recording, recorder.is_mine
    counts: dict[str, int] = {}

    original_call = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(self))
        if path is None or path in strays or not mine():
            return original_call(self, *args, **kwargs)
        counts[path] = counts.get(path, 0) + 1
        entry = [path, counts[path], len(recording.events), -1, type(self).__name__]
        recording.calls.append(entry)
        recorder.stack.append((path, counts[path]))
        try:
            return original_call(self, *args, **kwargs)
        finally:
            recorder.stack.pop()
            entry[3] = len(recording.events)

    plain_length = builtins.len

    def length(thing: Any) -> Any:
        if isinstance(thing, torch.Tensor) and thing.dim() and mine() and not thing.is_nested:
            return thing.shape[0]  # `__len__` itself may only return a plain int, and the batch would be lost
        return plain_length(thing)

    patches.set(builtins, "len", length)

    original_read = nn.Module.__getattribute__

    def read(self: nn.Module, name: str) -> Any:
        value = original_read(self, name)
        if name not in BOOKKEEPING and id(self) in paths and mine():
            key = (paths[id(self)], name)
            recording.used.add(key[0])
            if recorder.stack and recorder.stack[-1][0] != key[0]:
                recording.foreign.add(key[0])
            if key not in recording.written and key not in recording.read_attributes:
                kept = copy.deepcopy(value) if is_a(value, (list, dict, set, tuple)) and simple(value) else value
                recording.read_attributes[key] = self, kept, id(value)
        return value

    original_write = nn.Module.__setattr__

    def write(self: nn.Module, name: str, value: Any) -> None:
        if id(self) in paths and mine():
            key = (paths[id(self)], name)
            if key not in recording.read_attributes:
                recording.written.add(key)
        original_write(self, name, value)

    original_find = nn.Module.__getattr__

    def find(self: nn.Module, name: str) -> Any:
        here = id(self) in paths and mine()
        if here:
            recording.used.add(paths[id(self)])
        try:
            found = original_find(self, name)
            if here:
                recording.registered.add((type(self), name))
            return found
        except AttributeError:
            if here:
                recording.missing.add((paths[id(self)], name))
            raise

    original_grad = torch.is_grad_enabled

    def is_grad_enabled() -> bool:
        if mine() and not called_by_torch():
            recording.looked.add("grad")
        return original_grad()

    def watched_call(fact: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            if mine() and not called_by_torch():
                recording.looked.add(fact)
            return original(*args, **kwargs)

        return ask

    def watched(fact: str, name: str) -> property:
        base = getattr(torch._C.TensorBase, name)

        def get(self: torch.Tensor) -> Any:
            if mine() and not called_by_torch():
                recording.looked.add(fact)
                if (key := storage_of(self)) in state:
                    recording.asked.add(key)
            return base.__get__(self)

        def put(self: torch.Tensor, value: Any) -> None:
            base.__set__(self, value)

        return property(get, put)

    def noted(fact: str, name: str) -> Callable[..., Any]:
        base = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if mine() and not called_by_torch():
                recording.looked.add(fact)
                if recorder.watch is not None and fact == "layout" and name != "is_contiguous":
                    recorder.watch.lose("it reads strides, which follow it in ways of their own")
            return base(self, *args, **kwargs)

        return method

    def indexed(name: str) -> Callable[..., Any]:
        base = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any) -> Any:
            try:
                return base(self, *args)
            except Exception:  # of an index that is none, no op hears
                recording.raised = recording.raised or mine()
                raise

        return method

    read_shape = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
    state: Collection[int | None] = recorder.state
    measured: set[int | None] = set()

    def note_size(t: torch.Tensor) -> None:
        if mine() and (key := storage_of(t)) in state and key not in measured and not called_by_torch(3):
            recording.looked.add("shape")
            recording.asked.add(key)
            measured.add(key)

    def shape(self: torch.Tensor) -> torch.Size:
        note_size(self)
        found: torch.Size = read_shape(self)
        return found

    def sized(name: str) -> Any:
        base = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            note_size(self)
            if self.is_nested and name not in ("dim", "__iter__") and mine():
                raise UnsupportedError(
                    f"forward asks a nested tensor for its sizes (Tensor.{name}) in {recorder.where()}, which are data that no op "
                    "shows; ask the padded tensor that it was made from, or its mask"
                )
            return base(self, *args, **kwargs)

        def get(self: torch.Tensor) -> Any:
            note_size(self)
            return base.__get__(self)

        return method if callable(base) else property(get)

    def typed(name: str) -> Callable[..., Any]:
        base = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if mine() and (key := storage_of(self)) in state and not called_by_torch():
                recording.looked.add("dtype")
                recording.asked.add(key)
            return base(self, *args, **kwargs)

        return method

    def taken_out(name: str) -> Callable[..., Any]:
        base = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not mine():
                return base(self, *args, **kwargs)
            recorder.depth += 1
            try:
                out = base(self, *args, **kwargs)
                seen = self.detach().clone()
            finally:
                recorder.depth -= 1
            recorder.add(WHOLE, (self, seen), None)
            return out

        return method

    def told(name: str) -> Callable[..., Any]:
        by_data = taken_out(name)
        base = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not mine() or called_by_torch():
                return base(self, *args, **kwargs)
            if isinstance(self, FakeTensor):
                raise UnsupportedError(
                    f"forward makes text of a tensor's data in {recorder.where()}, and here it has none"
                )
            return by_data(self, *args, **kwargs)

        return method

    def unseen(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not mine():
                return original(*args, **kwargs)
            with recorder.aside():  # what is shown to people comes back to no op
                return original(*args, **kwargs)

        return call

    def contiguous(self: torch.Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        if mine():  # torch's own method never reaches the dispatcher where the tensor is contiguous already
            out: torch.Tensor = torch.ops.aten.contiguous.default(self, memory_format=memory_format)
            return out
        return torch._C.TensorBase.contiguous(self, memory_format=memory_format)

    autocast = torch.autocast
    enter_autocast: Any = autocast.__enter__
    exit_autocast: Any = autocast.__exit__

    def enter(self: torch.autocast) -> Any:
        if mine():
            recorder.scope += not recorder.autocast
            recorder.autocast.append(self.device)
        return enter_autocast(self)

    def leave(self: torch.autocast, *exception: Any) -> Any:
        if mine() and recorder.autocast:
            recorder.autocast.pop()
        return exit_autocast(self, *exception)

    owner = next(c for c in torch.autograd.Function.__mro__ if "apply" in c.__dict__)
    original_apply = owner.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not mine():
            return original_apply.__get__(None, cls)(*args, **kwargs)
        if recorder.watch is not None and any(isinstance(a, (Size, Real)) for a in tree.leaves((args, kwargs))):
            recorder.watch.lose(f"{cls.__name__} takes the number")
        with recorder.aside(), recorder.drawing():
            out = original_apply.__get__(None, cls)(*args, **kwargs)
        if kwargs:
            raise UnsupportedError(
                f"forward calls {cls.__name__}.apply with keywords in {recorder.where()}; pass all of its arguments by position"
            )
        recorder.add(cls, args, out)
        return out

    run_script: Any = torch.jit.ScriptFunction.__call__

    def scripted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not mine():
            return run_script(self, *args, **kwargs)
        if recorder.watch is not None:
            args, kwargs = plain(args), plain(kwargs)
        return recorder.scripted(Running(self, args, kwargs), run_script)

    patches.set(torch.jit.ScriptFunction, "__call__", scripted)
    plain_subclass = torch.Tensor.as_subclass

    def as_subclass(self: torch.Tensor, cls: Any) -> torch.Tensor:
        out: torch.Tensor = plain_subclass(self, cls)
        if mine():  # no op hears of it, and gradients go on through it
            recorder.add(torch.ops.aten.alias.default, (self,), out)
        return out

    patches.set(nn.Module, "__call__", call)
    patches.set(torch.Tensor, "as_subclass", as_subclass)
    patches.set(torch.Tensor, "shape", property(shape))
    for name in ("size", "numel", "nelement", "dim", "ndim", "__len__", "__iter__"):
        patches.set(torch.Tensor, name, sized(name))
    for name in ("__getitem__", "__setitem__"):
        patches.set(torch.Tensor, name, indexed(name))
    for name in ("tolist", "numpy", "__array__"):
        patches.set(torch.Tensor, name, taken_out(name))
    for name in ("__repr__", "__format__"):
        patches.set(torch.Tensor, name, told(name))
    patches.set(builtins, "print", unseen(builtins.print))
    patches.set(logging.Logger, "handle", unseen(logging.Logger.handle))
    if recorder.watch is not None:
        _patch_sizes(recorder.watch, mine, patches)
    patches.set(nn.Module, "__getattribute__", read)
    patches.set(nn.Module, "__setattr__", write)
    patches.set(nn.Module, "__getattr__", find)
    patches.set(torch, "is_grad_enabled", is_grad_enabled)
    patches.set(torch.Tensor, "requires_grad", watched("requires_grad", "requires_grad"))
    patches.set(torch.Tensor, "dtype", watched("dtype", "dtype"))
    for name in ("element_size", "is_complex", "is_floating_point", "type"):
        patches.set(torch.Tensor, name, typed(name))
    patches.set(torch.Tensor, "contiguous", contiguous)
    patches.set(autocast, "__enter__", enter)
    patches.set(autocast, "__exit__", leave)
    patches.set(torch.Tensor, "is_contiguous", noted("layout", "is_contiguous"))
    for name in ("stride", "dim_order"):
        patches.set(torch.Tensor, name, noted("layout", name))
    patches.set(torch.autograd.Function, "apply", classmethod(apply))
    patches.set(torch, "is_autocast_enabled", watched_call("dtype", torch.is_autocast_enabled))
    patches.set(torch, "get_autocast_dtype", watched_call("dtype", torch.get_autocast_dtype))


def _patch_sizes(watch: Watch, mine: Callable[[], bool], patches: Patches) -> None:
    disguise_type(patches)
    read_shape = torch.Tensor.shape.__get__  # type: ignore[attr-defined]

    def shape(self: torch.Tensor) -> torch.Size:
        return watch.shape(self, read_shape(self)) if mine() else read_shape(self)

    def size(self: torch.Tensor, dim: int | None = None) -> Any:
        return shape(self) if dim is None else shape(self)[dim]

    def numel(self: torch.Tensor) -> Any:
        return math.prod(shape(self))

    plain_length: Any = torch.Tensor.__len__

    def length(self: torch.Tensor) -> int:
        if mine() and self.dim() and isinstance(shape(self)[0], Size):
            watch.lose("__len__ makes a plain int of whatever it gets")
        return int(plain_length(self))

    def told_of(name: str) -> Callable[..., Any]:
        base = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if mine() and not called_by_torch():
                watch.lose(f"it reads {name}, which follows it in ways of its own")
            return base(self, *args, **kwargs)

        return method

    get_item: Any = torch.Tensor.__getitem__
    set_item: Any = torch.Tensor.__setitem__

    def item(self: torch.Tensor, index: Any) -> Any:
        if mine() and isinstance(index, (tuple, list)):  # a slice alone is never skipped when it is read
            watch.asks(self, read_shape(self), index)
        return get_item(self, index)

    def put_item(self: torch.Tensor, index: Any, value: Any) -> None:
        if mine():
            watch.asks(self, read_shape(self), index if isinstance(index, (tuple, list)) else (index,))
        set_item(self, index, value)

    plain_data: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]

    def data(self: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = plain_data(self)
        if mine():
            watch.same(self, found)
        return found

    patches.set(torch.Tensor, "data", property(data, torch.Tensor.data.__set__))  # type: ignore[attr-defined]
    for name in ("storage_offset", "untyped_storage", "storage"):
        patches.set(torch.Tensor, name, told_of(name))
    patches.set(torch.Tensor, "__getitem__", item)
    patches.set(torch.Tensor, "__setitem__", put_item)
    patches.set(torch, "numel", numel)
    patches.set(torch.Tensor, "shape", property(shape))
    patches.set(torch.Tensor, "__len__", length)
    patches.set(torch.Tensor, "size", size)
    patches.set(torch.Tensor, "numel", numel)
    patches.set(torch.Tensor, "nelement", numel)
    patches.set(torch.Tensor, "nbytes", property(lambda self: numel(self) * self.element_size()))
    for name in ("log", "log2", "log10", "sqrt", "isqrt", "gcd", "lcm", "pow", "exp"):
        patches.set(math, name, following(name, getattr(math, name)))


@contextmanager
def recording(
    model: nn.Module, fake: FakeTensorMode | None, snapshot: Snapshot, watch: Watch | None = None
) -> Iterator[tuple[Recording, Recorder]]:
    """Record everything that runs in the block; one thread of the process records at a time.

    The model is not restored: that is for the `snapshot`, which holds the data of all that was written.
    """
    paths: dict[int, str] = {}
    for path, module in (*snapshot.modules.items(), *snapshot.strays.items()):
        paths.setdefault(id(module), path)
    found = Recording()
    recorder = Recorder(found, fake, snapshot, watch)
    recorder.state = snapshot.storages()
    patches = Patches()
    with PATCHING, ExitStack() as stack:
        try:
            _patch(recorder, paths, snapshot.strays, patches)
            refuse(model, recorder.is_mine, recorder.where, recorder.backward, patches)
            if fake is not None:
                packed.patch(recorder.is_mine, recorder.run_on_fake, patches)
                stack.enter_context(disguised(recorder.is_mine, patches, recorder.refuse_reading))
                stack.enter_context(fake)
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(recorder)
            read = None
            if fake is None and watch is None:
                read = stack.enter_context(surroundings(recorder.is_mine, snapshot.holds, recorder.aside))
            yield found, recorder
        finally:
            patches.restore()
            if watch is not None:
                watch.close()
    if read:
        hooks = (hook for m in snapshot.modules.values() for kind in HOOK_TABLES for hook in m.__dict__[kind].values())
        found.outside = read.lasting([*(value for _, value, _ in found.read_attributes.values()), *hooks])
        found.names, found.whole, found.switches = read.names, read.whole, read.switches
        found.drew_python = read.drew
        found.drew = found.drew or read.drew
        found.assigned, found.filled = read.assigned, read.filled
    found.stores = list(snapshot.replaced_buffers())
    found.changed = list(snapshot.changes())
    for at, before, now in snapshot.changed_containers():
        found.moved.add(at)
        found.containers.append((before, now))
