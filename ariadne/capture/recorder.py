"""Recording: the pre-dispatch ATen ops that a forward runs, with the modules, modes and values around them.

Ops are seen above autograd and autocast, so composite ones stay whole and what acts on them acts again at replay. The
tensors underneath may be real or fake. What Python looks at besides tensors' data is noted by patched attributes, not by
a torch function mode: while one of those is on, models such as `nn.TransformerEncoder` leave their fast path.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from ariadne import tree
from ariadne.capture.followed import own_numbers, plain
from ariadne.capture.foreseen import faked, memory_without_data, on_fake, raised_by_data, stands_for
from ariadne.capture.generators import TORCH
from ariadne.capture.predispatch import silent_thread
from ariadne.capture.refusals import Patches, refuse_transforms
from ariadne.capture.scripted import Running
from ariadne.capture.sizes import Watch
from ariadne.capture.state import Snapshot, Spot
from ariadne.capture.written import Writes, plainly
from ariadne.errors import AriadneError, UnsupportedError
from ariadne.guards import Effect, Event, Recording, switches
from ariadne.plan import PLAIN, Region, bind, storage_of, tensors_in, written_arguments

AUTOCAST_DEVICES = ("cpu", "cuda")

_plain_shape: Any = torch._C.TensorBase.shape.__get__  # type: ignore[attr-defined]
_ENCODER = torch.ops.aten._transformer_encoder_layer_fwd.default
_COMPOSITE = "CompositeImplicitAutograd"
_OF_DENSE = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")
_OPENED: ContextVar[bool] = ContextVar("opened", default=False)


@contextmanager
def opened() -> Iterator[None]:
    """While in the block, a composite op is recorded as the ops that it calls, what these keep for a backward pass among it."""
    token = _OPENED.set(True)
    try:
        yield
    finally:
        _OPENED.reset(token)


def is_opened() -> bool:
    """Whether composite ops are recorded as those that they call."""
    return _OPENED.get()


class Within(dict[int, torch.Tensor]):
    """The tensors that the ops of a function that is kept whole read, by their ids; `wrote`: those of the model, if they write."""

    def __init__(self) -> None:
        super().__init__()
        self.wrote: dict[int, torch.Tensor] = {}


class Recorder(ProxyTorchDispatchMode):
    """The dispatch mode that records; torch lets only its own kinds of mode stand at the pre-dispatch key."""

    def __init__(
        self,
        recording: Recording,
        fake: FakeTensorMode | None,
        snapshot: Snapshot,
        patches: Patches,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(None, "symbolic" if fake else "real", pre_dispatch=True)  # type: ignore[arg-type]
        self.tracer = SimpleNamespace(enable_thunkify=False)  # type: ignore[assignment]  # nested tensors ask the mode for one
        self.recording, self.fake, self.snapshot, self.patches, self.watch = recording, fake, snapshot, patches, watch
        self.thread = threading.get_ident()
        self.profile: Any = None  # what looks at each Python function that starts
        self.stack: list[tuple[str, int]] = [("", 1)]
        self.depth = 0
        self.running: tuple[OpOverload, tuple[Any, ...]] | None = None  # the op that fake tensors go through
        self.own: set[int] = set()
        self.made_in: dict[Any, Any] = {}  # memory that was made in a part which runs again, and which part that was
        self.writes = Writes(snapshot)
        self.within: Within | None = None  # what the ops of a function that is kept whole read
        self.ambient, self.settings, self.opened = modes(), switches.settings(), is_opened()
        self.state = snapshot.storages()  # those of the model's tensors
        self.kept: dict[int, str] = {}  # those that opaque parts left in Python in this call, and which part
        self.autocast: list[str] = []
        self.scope = 0
        # What parts that the backward pass runs again changed, and all as they left it.
        self.rerun: list[tuple[set[Spot], Snapshot]] = []
        self.drawn: torch.Tensor = snapshot.rng["torch"]  # how forward left torch's generator when it drew last

    def is_mine(self) -> bool:
        """Whether it is forward's own Python that runs: in the thread that records, and outside of any op."""
        return not self.depth and silent_thread() == self.thread

    def forget(self) -> None:
        """Let go of the model, and of all that was seen.

        What was imported meanwhile may hold what stood in the place of one of Python's own functions, in the methods of a named
        tuple, for as long as the process lives.
        """
        self.depth, self.thread, self.running = (
            1,
            0,
            None,
        )  # nothing is `mine` any more, as other threads may ask at any moment
        for name in self.__dict__.keys() - {"depth", "thread", "running"}:
            del self.__dict__[name]

    def leave(self) -> None:
        """In a child that another thread forked meanwhile: put the settings back, and forget."""
        switches.put_back(self.settings)
        self.forget()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While in the block, what runs is not `mine`."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    @contextmanager
    def unlooked(self) -> Iterator[Any]:
        """While in the block, no function that starts is looked at; what looks at them is given, or None where nothing does."""
        profile = sys.getprofile()
        if profile is None or profile is not self.profile:  # another thread, or a profiler of forward's own
            yield None
            return
        sys.setprofile(None)
        try:
            yield profile
        finally:
            sys.setprofile(profile)

    @contextmanager
    def whole(self) -> Iterator[Within]:
        """While in the block, what runs is `aside`, and the tensors that its ops read are noted, by their ids."""
        before, self.within = self.within, Within()
        lists = self.snapshot.lengths() if self.fake is None else None
        try:
            with self.aside(), self.drawing():
                yield self.within
        finally:
            self.within = before
            if lists is not None:
                self.recording.repeated |= self.snapshot.grown(lists)

    def where(self) -> str:
        """The module that runs, for an error message."""
        path, _ = self.stack[-1]
        return repr(path) if path else "the model itself"

    def note_failure(self, what: str, error: Exception) -> None:
        """Note that something raised for reasons that no guard holds: where forward goes on, another call may not."""
        self.recording.raised = True
        if self.fake is None and not isinstance(error, AriadneError):
            self.recording.failed = self.recording.failed or f"{what} in {self.where()} raised {type(error).__name__}"

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
        return self.dispatched(func, args, kwargs or {})

    def dispatched(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What an op gives, which is noted."""
        profile = sys.getprofile()
        if profile is None or profile is not self.profile:  # another thread, or a profiler of forward's own
            return self._dispatch(func, args, kwargs, None)
        sys.setprofile(None)  # none of what records is forward's own
        try:
            return self._dispatch(func, args, kwargs, profile)
        finally:
            sys.setprofile(profile)

    def _dispatch(self, func: Any, args: Any, kwargs: Any, profile: Any) -> Any:
        """Run an op and note it; while it runs, the profile that is looked with is on."""
        if func.namespace == "prim" or self.depth:
            if self.within is not None:
                self.within.update((id(t), t) for t in tensors_in((args, tuple(kwargs.values()))))
                if isinstance(func, OpOverload) and func._schema.is_mutable:  # among fake tensors, too, of real ones
                    with unset_fake_temporarily():
                        self._keep_what_is_written(func, args, kwargs)
                    bound = bind(func, args, kwargs)
                    written = [t for i in written_arguments(func, bound) for t in tensors_in(bound[i])]
                    mine = {key for t in written if (key := storage_of(t)) is not None and key in self.state}
                    self.within.wrote |= {id(t): t for t in self.snapshot.owning(mine)}
                    faked_ones = {memory_without_data(t) for t in written if isinstance(t, FakeTensor)}
                    if faked_ones:  # as those that stand for `weight.data` and views of it
                        mode: Any = self.fake
                        stood = (t for t in self.snapshot.owning(self.state) if stands_for(mode, t) in faked_ones)
                        self.within.wrote |= {id(t): t for t in stood}
            if profile is not None:
                sys.setprofile(profile)
            return func(*args, **kwargs)
        refuse_transforms(self.where())
        if self.opened and _is_composite(func):
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if func is _ENCODER and torch._C._is_any_autocast_enabled():
            raise UnsupportedError(
                f"forward takes the fast path of nn.TransformerEncoderLayer in {self.where()} under autocast, where torch casts no "
                "weights once its ops are recorded. Call torch.backends.mha.set_fastpath_enabled(False), here and where the split "
                "is called; or leave autocast around that layer"
            )
        if torch.Tag.inplace_view in func.tags:
            self.recording.reshapes(args[0])
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
                    plainly(func),
                    torch._C._DisablePythonDispatcher(),
                ):  # else composite ops such as lstm run as Python decompositions
                    run = partial(func, *plain(args), **plain(kwargs)) if self.watch else partial(func, *args, **kwargs)
                    out = profiled(profile, run)
            except Exception as error:
                self.recording.raised = True
                if not self.recording.failed and raised_by_data(func, plain(args), plain(kwargs), error):
                    self.note_failure(str(func), error)
                given = {id(t): t for t in tensors_in((args, tuple(kwargs.values())))}  # whose sizes may be why
                self.recording.asked |= {*map(storage_of, given.values())} & self.state
                self.recording.sized |= given
                raise
            finally:
                self.depth -= 1
        else:
            lifted = func is torch.ops.aten.lift_fresh.default
            self.depth += 1  # what torch asks of a tensor that it makes a fake of, forward did not ask
            try:
                run_args, run_kwargs = (args, kwargs) if lifted else self._faked((args, kwargs))
                self.running = func, run_args
                self.patches.lift(True)
                out = on_fake(func)(*run_args, **run_kwargs)
                if run_args and out is run_args[0] and out is not args[0]:
                    self.recording.unchanged[id(out)] = args[0]
            except Exception:
                self.recording.raised = True
                raise
            finally:
                self.patches.lift(False)
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
            and out.layout is torch.strided  # of others no op makes a view
            and torch.Tag.nondeterministic_seeded not in func.tags
            and next(written_arguments(func, bound), None) is None
        )

    def add(
        self, target: Any, args: tuple[Any, ...], out: Any, effect: Effect | None = None, region: Region | None = None,
        within: Mapping[int, torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Note one op; `region`: the modes that it ran under, where they are not those of this moment; `within`: see `whole`."""
        path, call = self.stack[-1]
        args = own_numbers(args) if self.watch is not None else args
        if isinstance(within, Within) and within.wrote:
            effect = Effect(tuple(within.wrote.values()), (), True)
        self.recording.events.append(
            Event(target, args, out, path, call, region or self.region(), effect, tuple((within or {}).values()))
        )
        made = list(tensors_in(out))
        if any(t.layout is torch.jagged for t in made):
            raise UnsupportedError(
                f"forward makes a nested tensor of layout torch.jagged in {self.where()}, which a plan can't hold; use a padded "
                "tensor and a mask"
            )
        self.own.update(map(id, made))
        if runs_again():
            given = {*map(storage_of, tensors_in(args))}
            self.made_in.update({at: _saving_hooks() for t in made if (at := storage_of(t)) not in given})
        self.writes.made(args, out)
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
                self.recording.drew.add(TORCH)
                self.recording.disturbed |= not torch.equal(before, self.drawn)
                self.drawn = after

    def scripted(self, running: Running, run: Callable[..., Any]) -> Any:
        """Run a scripted function, and note it as one op: `Call` as the target, leaves as arguments and result."""
        if self.watch is not None:
            self.watch.lose("a scripted function branches on sizes, if it does, in no Python")
        refuse_transforms(self.where())
        written = running.tensors(running.effects.writes)
        self.refuse_kept(written)
        runs = running
        if self.fake is None:
            self._keep(written)
        else:  # what is below an op is not made fake, and would be written into
            runs = replace(running, args=self._faked(running.args), kwargs=self._faked(running.kwargs))
        with self.aside():
            try:
                with self.drawing(running.effects.draws):
                    out = runs.result(run, self.fake is not None)
            except Exception as error:
                self.note_failure("a function under torch.jit.script", error)
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

    def region(self) -> Region:
        """The modes of this moment, as far as forward set them."""
        grad, inference = torch._C.is_grad_enabled(), torch._C.is_inference_mode_enabled()
        settings = switches.settings()
        if not self.autocast and (grad, inference) == self.ambient[:2] and settings == self.settings:
            return PLAIN  # most ops: autocast, which takes longest to ask for, counts where forward entered it
        autocast = modes()[2:]
        if inference != self.ambient[1]:
            raise UnsupportedError("forward enters torch.inference_mode() by itself; use torch.no_grad() there instead")
        switched = tuple(a for a in autocast if a[0] in self.autocast)
        changed = grad if grad != self.ambient[0] else None
        return Region(changed, switched, self.scope if switched else 0, switches.between(self.settings, settings))

    def _faked(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, FakeTensor) else faked(self.fake, value)  # type: ignore[arg-type]
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._faked(v) for v in value)
        if type(value) is dict:
            return {k: self._faked(v) for k, v in value.items()}
        return value

    def _keep_what_is_written(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        """Keep the data of what an op is about to write; returns what of it no op has made, with its sizes."""
        strangers: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        if func is torch.ops.aten.batch_norm.default and not args[0].numel():
            return strangers  # statistics of nothing are not written
        for i in written_arguments(func, bound := bind(func, args, kwargs)):
            written = list(tensors_in(bound[i]))
            self.refuse_kept(written)
            mine = any(storage_of(t) in self.state for t in written)
            strangers += (others := self._keep(written))
            if not self.depth and (mine or others) and runs_again() and (mine or not self._made_again(others)):
                raise UnsupportedError(
                    f"forward writes into a tensor {'of the model' if mine else 'that it did not make'} within "
                    f"torch.utils.checkpoint in {self.where()}: the backward pass runs that part again, and writes again, which a "
                    "plan does not. Pass use_reentrant=True, which keeps the part whole; or leave what writes out of it"
                )
        return strangers

    def _made_again(self, strangers: Iterable[tuple[torch.Tensor, Any]]) -> bool:
        """Whether the part that runs again makes the memory of all of these: what `torch.zeros` returns is another tensor than
        its op's."""
        now = _saving_hooks()
        return all(self.made_in.get(storage_of(t)) is now for t, _ in strangers)

    def refuse_kept(self, written: Iterable[torch.Tensor]) -> None:
        """Raise `UnsupportedError` for a write into what an opaque part keeps: where a cut lies between, it would miss it."""
        told = (
            next((self.kept[key] for t in written if (key := storage_of(t)) in self.kept), None) if self.kept else None
        )
        if told is not None:
            raise UnsupportedError(
                f"forward writes in {self.where()} into a tensor that {told} keeps in Python; let the part keep a clone() of it"
            )

    def _keep(self, written: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        strangers = []
        with self.aside():  # it is not forward that looks at these
            for t in written:
                if isinstance(t, FakeTensor):
                    continue
                self.writes.keep(t)
                if id(t) not in self.own:
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


def _is_composite(func: OpOverload) -> bool:
    """Whether an op is nothing but calls of others, on every device; `silu_backward`, for one, is so on some alone."""
    has: Callable[[str, Any], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(func.name(), _COMPOSITE) and not any(has(func.name(), key) for key in _OF_DENSE)


def profiled(profile: Any, run: Callable[[], Any]) -> Any:
    """What a function gives under a profile, if there is one: an op may be written in Python."""
    if profile is None:
        return run()
    sys.setprofile(profile)
    try:
        return run()
    finally:
        sys.setprofile(None)


def _saving_hooks() -> Any:
    """What packs the tensors that ops save now, for each part under `torch.utils.checkpoint` another; None where nothing does."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def runs_again() -> bool:
    """Whether what runs now will run once more in the backward pass."""
    hooks = _saving_hooks()
    return hooks is not None and getattr(hooks, "__module__", "") == "torch.utils.checkpoint"


def modes() -> tuple[Any, ...]:
    """Whether gradients and inference mode are on, and the state of autocast for each device type."""
    cache = torch.is_autocast_cache_enabled()
    return (
        torch._C.is_grad_enabled(),
        torch._C.is_inference_mode_enabled(),
        *((d, torch._C.is_autocast_enabled(d), torch._C.get_autocast_dtype(d), cache) for d in AUTOCAST_DEVICES),
    )


def sizes_in(t: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a tensor, without telling that they were read; of a nested one, which has many, none."""
    return () if t.is_nested else tuple(_plain_shape(t))
