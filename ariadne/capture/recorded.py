"""Recorded: a block in which all that forward does and looks at is noted, by what stands in the place of torch's own."""

from __future__ import annotations

import builtins
import copy
import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from ariadne.capture import applied, listed, packed, repeated, setters, taken, threads, wanted
from ariadne.capture.deciding import deciding
from ariadne.capture.disguise import disguised
from ariadne.capture.flags import FLAG
from ariadne.capture.followed import plain
from ariadne.capture.measured import patch_sizes
from ariadne.capture.outsiders import Outsiders
from ariadne.capture.parts import Parts
from ariadne.capture.predispatch import modes_of_its_own, silent_getattr, silent_id, silent_length, silent_thread
from ariadne.capture.recorder import Recorder
from ariadne.capture.refusals import Patches, Run, called_by_torch, minds_its_own, refuse_history, refusing
from ariadne.capture.scripted import Running
from ariadne.capture.sizes import Watch
from ariadne.capture.state import Snapshot
from ariadne.capture.turn import capturing
from ariadne.errors import UnsupportedError
from ariadne.forks import undone
from ariadne.guards import BOOKKEEPING, MARK, Recording, Taken, is_a, may_get_fields, simple, surroundings, switches
from ariadne.plan import storage_of, tensors_in

ATOMS = frozenset({int, float, bool, str, type(None)})
CONTAINERS = frozenset({tuple, list, dict, set, frozenset, str, bytes, range})
UNWATCHED = BOOKKEEPING - listed.TABLES
_REGISTRIES = ("_parameters", "_buffers", "_modules")
HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks")
# What tells how autocast stands, under its older names, too.
_AUTOCAST = "is_autocast_enabled get_autocast_dtype is_autocast_cpu_enabled get_autocast_cpu_dtype get_autocast_gpu_dtype".split()
_OLD_TYPES = {f"{kind}Tensor" for kind in "BFloat16 Bool Byte Char Double Float Half Int Long Short".split()}
SPARSE = ("layout", "is_sparse", "is_sparse_csr", "is_mkldnn")  # how a tensor holds its numbers
ASKED_BY_TORCH = frozenset({"layout", "strides", "shape", "dtype", "sparse"})
HISTORY = ("is_leaf", "grad", "_version", "_base", "_is_view", "is_inference", "is_conj", "is_neg", "is_shared")


def _patch(recorder: Recorder, paths: dict[int, str], strays: Collection[str], patches: Patches) -> None:
    recording, mine = recorder.recording, recorder.is_mine
    counts: dict[str, int] = {}
    outsiders, is_made_here = Outsiders(recorder, paths), _MadeHere(recording)

    original_call: Any = nn.Module.__call__
    parts = Parts(recorder, original_call)
    patches.set(Taken, "run", staticmethod(parts.function))

    # Each call from these is an event for the profile that looks on, and none of forward's functions are called as often: so they
    # call as few as they can, and of C's those of which no profile hears.
    plain_length, plain_type, original_read = builtins.len, builtins.type, nn.Module.__getattribute__
    thread = recorder.thread

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if recorder.depth or silent_thread() != thread:
            return original_call(self, *args, **kwargs)
        whole = MARK in original_read(self, "__dict__") or silent_getattr(plain_type(self), MARK, False)
        run = parts.module if whole else original_call
        me = silent_id(self)
        if me not in paths or (path := paths[me]) in strays:
            return run(self, *args, **kwargs)
        counts[path] = counts[path] + 1 if path in counts else 1
        entry = [path, counts[path], silent_length(recording.events), -1, plain_type(self).__name__]
        recording.calls += [entry]
        recorder.stack += [(path, counts[path])]
        try:
            return run(self, *args, **kwargs)
        finally:
            del recorder.stack[-1]
            entry[3] = silent_length(recording.events)

    def length(thing: Any) -> Any:
        if plain_type(thing) in CONTAINERS or not (isinstance(thing, torch.Tensor) and thing.dim() and mine()):
            return plain_length(thing)
        note_size(thing)
        # `__len__` itself may only return a plain int, and the batch would be lost
        return plain_length(thing) if thing.is_nested else thing.shape[0]

    patches.set(builtins, "len", length)

    used, foreign, written, read_before = (
        recording.used,
        recording.foreign,
        recording.written,
        recording.read_attributes,
    )

    def read(self: nn.Module, name: str) -> Any:
        value = original_read(self, name)
        if name in UNWATCHED or recorder.depth or silent_thread() != thread:
            return value
        me = silent_id(self)
        if me not in paths and not outsiders.knows(self):
            return value
        path = paths[me]
        if name in listed.TABLES:
            if not minds_its_own():
                again = partial(nn.Module.__getattribute__, self)  # this very function
                listed.note(recording, path, name, value, again, sys._getframe(1))
            if path in strays:  # a list of parts may be gone through and not called
                used.add(path)
            return value
        if path not in used:
            used.add(path)
        if path not in foreign and recorder.stack and recorder.stack[-1][0] != path:
            foreign.add(path)
        key = (path, name)
        if key not in written and key not in read_before:
            kind = plain_type(value)
            fixed = kind in ATOMS or (kind is tuple and ATOMS.issuperset(map(plain_type, value)))
            holds = not fixed and is_a(value, (list, dict, set, tuple)) and simple(value)
            kept = copy.deepcopy(value) if holds and not may_get_fields(value) else value
            read_before[key] = self, kept, silent_id(value)
        return value

    listed.patch(recorder, paths, patches)
    original_write = nn.Module.__setattr__

    def write(self: nn.Module, name: str, value: Any) -> None:
        if (name == FLAG and id(self) in paths and mine()) or outsiders.knows(self):
            key = (paths[id(self)], name)
            if key not in recording.read_attributes:
                recording.written.add(key)
        original_write(self, name, value)

    original_find = nn.Module.__getattr__
    tables = _REGISTRIES if original_find.__module__ == nn.Module.__module__ else ()  # else it is no longer torch's own

    def find(self: nn.Module, name: str) -> Any:
        if recorder.depth or silent_thread() != thread:
            return original_find(self, name)
        me = silent_id(self)
        if me not in paths and not outsiders.knows(self):
            return original_find(self, name)
        path = paths[me]
        if path not in used:
            used.add(path)
        recorder.depth += 1  # it reads the module's tables, and none of that is forward's own
        try:
            holders = original_read(self, "__dict__")
            for table in tables:
                if table in holders and name in holders[table]:
                    found = holders[table][name]
                    break
            else:
                found = original_find(self, name)
        except AttributeError:
            recording.missing.add((path, name))
            raise
        finally:
            recorder.depth -= 1
        place = plain_type(self), name
        if place not in recording.registered:
            recording.registered.add(place)
        return found

    members: Any = nn.Module._named_members

    def named_members(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(self) in paths and mine():
            recording.looked.add("members")
        return members(self, *args, **kwargs)

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

    read_grad: Any = vars(torch._C.TensorBase)["grad"].__get__

    def is_ungraded(t: torch.Tensor) -> bool:
        """Whether it is a buffer without a gradient that wants none, so that no training gives it one."""
        tables = (m._buffers.values() for m in recorder.snapshot.modules.values())
        return not t.requires_grad and read_grad(t) is None and any(t is b for table in tables for b in table)

    def ask_history(t: torch.Tensor, name: str) -> None:
        if mine() and not called_by_torch(3):
            if name == "grad" and is_ungraded(t):
                recording.ungraded.add(storage_of(t))
                return
            refuse_history(t, name, recording, recorder.where())
            if name == "is_leaf":  # so is all that needs no gradient
                recording.looked.add("requires_grad")

    def of_history(name: str) -> Any:
        base = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any) -> Any:
            ask_history(self, name)
            return base(self, *args)

        def get(self: torch.Tensor) -> Any:
            ask_history(self, name)
            return base.__get__(self)

        def put(self: torch.Tensor, value: Any) -> None:
            base.__set__(self, value)

        def remove(self: torch.Tensor) -> None:
            base.__delete__(self)

        return method if callable(base) else property(get, put, remove)

    def offset(self: torch.Tensor) -> Any:
        note_size(self)
        if mine() and not called_by_torch() and not is_made_here(self):
            raise UnsupportedError(
                f"forward asks where in its memory an input, or a tensor of the model, starts (Tensor.storage_offset) in "
                f"{recorder.where()}: that follows what it was cut from, which no guard sees. Ask before the call, and pass the "
                "answer as an argument; or use contiguous()"
            )
        return plain_offset(self)

    plain_offset: Any = torch.Tensor.storage_offset

    def unmarked(self: torch.Tensor, name: str) -> Any:
        if mine() and not called_by_torch() and not (_is_registered() and is_made_here(self)):
            recording.marks.add((name, storage_of(self)))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def noted(fact: str, name: str) -> Callable[..., Any]:
        base = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            note_size(self)  # where its numbers lie follows how many there are
            if mine() and not called_by_torch():
                recording.looked.add(fact)
                if name != "is_contiguous":
                    recording.looked.add("strides")
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
                note_size(self)
                raise

        return method

    read_shape = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
    state: Collection[int | None] = recorder.state
    measured: set[int | None] = set()

    def note_size(t: torch.Tensor) -> None:
        if not mine() or (key := storage_of(t)) in measured or called_by_torch(3):
            return
        if key in state:
            recording.looked.add("shape")
            recording.asked.add(key)
            measured.add(key)
        else:
            recording.sized[id(t)] = t

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

    read_bytes: Any = torch.Tensor.nbytes.__get__  # type: ignore[attr-defined]

    def nbytes(self: torch.Tensor) -> Any:
        note_size(self)
        if mine() and not called_by_torch():
            recording.looked.add("dtype")
        return read_bytes(self)

    def note_type(t: torch.Tensor) -> None:
        recording.looked.add("dtype")
        if (key := storage_of(t)) in state:
            recording.asked.add(key)

    def typed(name: str, of_state: bool = False) -> Callable[..., Any]:
        base = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if "storage" in name:  # which has a length
                note_size(self)
            if mine() and not called_by_torch() and (not of_state or storage_of(self) in state):
                note_type(self)
            return base(self, *args, **kwargs)

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
    for name in ("size", "numel", "nelement", "dim", "ndim", "ndimension", "__len__", "__iter__"):
        patches.set(torch.Tensor, name, sized(name))
    for name in ("__getitem__", "__setitem__"):
        patches.set(torch.Tensor, name, indexed(name))
    patches.set(builtins, "print", unseen(builtins.print))
    patches.set(logging.Logger, "handle", unseen(logging.Logger.handle))
    for name in ("element_size", "type", "new", "new_tensor", "storage", "untyped_storage", "storage_type"):
        patches.set(torch.Tensor, name, typed(name))
    for name in ("is_complex", "is_floating_point"):  # the same for all dtypes that a model is moved to
        patches.set(torch.Tensor, name, typed(name, of_state=True))
    for fact, names in (("dtype", ("dtype", "itemsize")), ("sparse", SPARSE)):
        for name in names:
            patches.set(torch.Tensor, name, watched(fact, name))
    patches.set(torch.Tensor, "nbytes", property(nbytes))
    patches.set(torch, "numel", sized("numel"))
    patches.set(torch.Tensor, "storage_offset", offset)
    if "__getattr__" not in torch.Tensor.__dict__:
        patches.set(torch.Tensor, "__getattr__", unmarked)
    if recorder.watch is not None:
        patch_sizes(recorder.watch, mine, patches, note_type)
    for name in HISTORY:
        patches.set(torch.Tensor, name, of_history(name))
    patches.set(nn.Module, "__getattribute__", read)
    patches.set(nn.Module, "__setattr__", write)
    patches.set(nn.Module, "__getattr__", find)
    patches.set(nn.Module, "_named_members", named_members)
    patches.set(torch, "is_grad_enabled", is_grad_enabled)
    patches.set(torch.Tensor, "requires_grad", watched("requires_grad", "requires_grad"))
    wanted.patch(recorder, patches)
    patches.set(torch.Tensor, "contiguous", contiguous)
    patches.set(autocast, "__enter__", enter)
    patches.set(autocast, "__exit__", leave)
    patches.set(torch.Tensor, "is_contiguous", noted("layout", "is_contiguous"))
    for name in ("stride", "dim_order"):
        patches.set(torch.Tensor, name, noted("layout", name))
    for part in (applied, repeated, setters, taken, threads):
        part.patch(recorder, patches)
    for name in _AUTOCAST:
        patches.set(torch, name, watched_call("dtype", getattr(torch, name)))


def _is_registered() -> bool:
    """Whether it is `nn.Module` that asks `isinstance(value, nn.Buffer)`, as a tensor is assigned."""
    return bool(sys._getframe(3).f_globals.get("__name__") == "torch.nn.modules.module")


class _MadeHere:
    """Whether the memory of a tensor was made by an op of a recording; each op is looked at once, however often this is asked."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.seen = recording, 0
        self.made: dict[int | None, bool] = {}

    def __call__(self, t: torch.Tensor) -> bool:
        key = storage_of(t)
        if key is None:
            return True
        events = self.recording.events
        for event in events[self.seen :] if key not in self.made else ():
            given = {storage_of(one) for one in tensors_in(event.args)}
            for made in tensors_in(event.out):
                at = storage_of(made)
                self.made.setdefault(at, at not in given)
            self.seen += 1
        return self.made.get(key, False)


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
    found, patches = Recording(), Patches()
    recorder = Recorder(found, fake, snapshot, patches, watch)
    read, state = None, recorder.state
    with capturing(), ExitStack() as stack:
        stack.callback(recorder.forget)
        stack.callback(undone(recorder.leave))
        try:
            _patch(recorder, paths, snapshot.strays, patches)
            run = Run(model, recorder.is_mine, recorder.where, recorder.backward, patches)
            stack.enter_context(refusing(run, found))
            if fake is not None:
                packed.patch(recorder.is_mine, recorder.run_on_fake, patches)
                stack.enter_context(disguised(recorder.is_mine, patches, recorder.refuse_reading))
                stack.enter_context(fake)
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(modes_of_its_own(recorder))
            stack.enter_context(recorder)
            if fake is None and watch is None:
                read = stack.enter_context(surroundings(recorder.is_mine, snapshot.holds, recorder.aside))
                recorder.profile = sys.getprofile()
            with repeated.ended():
                yield found, recorder
            if recorder.rerun:
                with recorder.aside():
                    found.overtaken = repeated.overtaken(recorder.rerun, snapshot)
            with recorder.aside():
                recorder.writes.refuse_written()
            left = switches.between(recorder.settings, switches.settings())
            if left:
                raise UnsupportedError(
                    f"forward leaves {left[0][0]} at {left[0][1]!r} when it returns, which no plan does; put it back, or set it "
                    "outside"
                )
        finally:
            if read is not None:
                found.drew |= read.drew
            switches.put_back(recorder.settings)
            patches.restore()
            if watch is not None:
                watch.close()
    snapshot.stand_again({**found.again, **found.unchanged})
    for at, before, now in snapshot.changed_containers():
        found.moved.add(at)
        found.containers.append((before, now))
    found.stands = dict(snapshot.standing())
    found.moved.update(snapshot.changed_classes())
    found.defaults = dict(snapshot.filled_by_default())
    found.remembered = snapshot.memories.asked_again()
    if read:
        hooks = [hook for m in snapshot.modules.values() for kind in HOOK_TABLES for hook in m.__dict__[kind].values()]
        values = [value for _, value, _ in found.read_attributes.values()]
        found.outside = read.lasting(values, hooks, found.moved, found.defaults)
        found.unseen, found.deaf, found.moving = read.unseen, read.deaf, read.moving()
        found.names, found.whole, found.switches = read.names, read.whole, read.switches
        found.by_name, found.reads = read.by_name, read.reads
        found.codes, found.compared, found.world = read.codes, read.compared, read.world
        found.assigned, found.filled = read.assigned, read.filled
        found.looked |= read.which
        if not _OLD_TYPES.isdisjoint(found.names):  # `isinstance(h, torch.FloatTensor)` asks for a dtype
            found.looked.add("dtype")
    for path in found.used & snapshot.modules.keys():
        module = snapshot.modules[path]
        kind: Any = type(module)
        if listed.asks_object(kind) or "static" in found.looked:
            found.listed.update((path,) if "static" in found.looked else ())
            for name, value in module.__dict__.items():
                if name not in BOOKKEEPING and (path, name) not in found.written:
                    found.read_attributes.setdefault((path, name), (module, value, id(value)))
    if found.failed:
        raise UnsupportedError(
            f"forward goes on after an error: {found.failed}, for what is in the tensors of these inputs, and with others it may "
            "not. Ask before the op"
        )
    if found.raised:  # and forward went on: whether an op can run follows all that it sees of types, sizes and strides
        found.looked |= ASKED_BY_TORCH
    if found.backwards:  # nor do formulas of derivatives show what they ask: that of `mm` goes by strides
        found.looked |= ASKED_BY_TORCH | {"requires_grad"}
    found.decided_by_size = deciding(found.events, found.sized.values(), state)
    found.stores = list(snapshot.replaced_buffers())
    found.changed = list(snapshot.changes())
    # What was not there may have been looked for in a table, where nobody hears of it.
    for path, name, *_ in found.changed:
        if path in found.listed and (path, name) not in found.read_attributes:
            found.missing.add((path, name))
