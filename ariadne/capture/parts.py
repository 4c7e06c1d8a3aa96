"""Parts: what `ariadne.opaque` was told of is run as it is, and noted as one op.

A real run shows what the part gives, which tensors it reads of the model and which it writes into, and what it changes in Python:
that is its own affair, as long as nothing else of forward reads or changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload

from ariadne import tree
from ariadne.capture.call import Call, marks_of, version
from ariadne.capture.followed import plain
from ariadne.capture.recorder import Recorder, profiled, runs_again
from ariadne.capture.refusals import refuse_transforms
from ariadne.capture.state import Snapshot, Spot
from ariadne.capture.values import CONSTANTS, SYMBOLIC
from ariadne.capture.wanted import tell
from ariadne.capture.written import Looking
from ariadne.compare import same_bits
from ariadne.errors import UnsupportedError, named
from ariadne.guards import LEAVES, Effect, Recording, held, is_a, is_array, refill
from ariadne.plan import storage_of, tensors_in

_DEEP = 8  # so many steps into what forward reads, what a part changes is looked for


class _Reads(Looking):
    """Notes the memory of the model's tensors that ops read, and keeps the data of those that they may write into."""

    def __init__(self, state: set[int], snapshot: Snapshot) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state, self.snapshot, self.found = state, snapshot, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for t in tensors_in((args, tuple(kwargs.values()))):
            if (key := storage_of(t)) in self.state and key is not None:
                self.found.add(key)
                if isinstance(func, OpOverload) and func._schema.is_mutable:
                    self.snapshot.save_owners(t)
        return func(*args, **kwargs)


class Parts:
    """Runs the parts of one recorded forward."""

    def __init__(self, recorder: Recorder, call: Callable[..., Any]) -> None:
        self.recorder, self.call = recorder, call
        self.last: Snapshot = recorder.snapshot  # how Python stood when a part had run

    def module(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """One call of a module."""
        with self.recorder.aside():
            own, inner = [*module.parameters(), *module.buffers()], [*module.modules()]
        return self._run(module, type(module).__name__, partial(self.call, module), args, kwargs, own, inner)

    def function(self, whole: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a function."""
        if not self.recorder.is_mine():
            return function(*args, **kwargs)
        given = [m for leaf in tree.leaves((args, kwargs)) if isinstance(leaf, nn.Module) for m in leaf.modules()]
        return self._run(whole, getattr(whole, "__name__", "part"), function, args, kwargs, (), given)

    def _run(
        self, part: Any, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        own: Sequence[torch.Tensor], modules: Sequence[nn.Module],
    ) -> Any:  # fmt: skip
        recorder, recording, snapshot = self.recorder, self.recorder.recording, self.recorder.snapshot
        told = self._told(name)
        if recorder.fake is not None:
            recording.read_size = f"{told} shows what it makes in real runs alone"
            raise UnsupportedError(recording.read_size)
        refuse_transforms(recorder.where())
        leaves, given = tree.flatten((args, kwargs))
        given = tree.of_any(given, snapshot.holds)
        self._refuse_objects(name, leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        recorder._keep(tensors)
        tell(recorder, leaves)
        with recorder.aside(), recorder.unlooked() as profile:
            before = snapshot.anew()
            self._refuse_before(name, self.last.spots(), modules)
            alone = not snapshot.moved_rng(recording.numbers)
            seen = _Seen(tensors, self._known())
            own_before = before.kept_memory()
            marks = _Marks((*tensors, *snapshot.all_tensors()))
            args, kwargs = tree.unflatten([plain(leaf) for leaf in leaves], given)
            stood, reads = tree.flatten((args, kwargs)), _Reads(recorder.state, snapshot)
            with recorder.drawing(), torch._C._DisablePythonDispatcher(), reads:
                try:
                    out = profiled(profile, partial(run, *args, **kwargs))
                except Exception as error:
                    recorder.note_failure(f"the opaque part {name!r}", error)
                    raise
            now = tree.flatten((args, kwargs))
            if stood[1] != now[1] or any(a is not b for a, b in zip(stood[0], now[0], strict=True)):
                raise UnsupportedError(
                    f"{told} changes a list or dict that it is given, which a plan can't "
                    "hold; return what it puts there"
                )
            results, gives = self._results(name, out, tensors)
            written = seen.written()
            hidden = next((t for t in written if id(t) not in seen.given and storage_of(t) not in recorder.state), None)
            if hidden is not None:
                raise UnsupportedError(
                    f"{told} writes into a tensor {list(hidden.shape)} of forward's that it "
                    "was not given; pass it to the part"
                )
            recorder.refuse_kept(written)
            changed = marks.changed()
            if changed is not None:
                raise UnsupportedError(
                    f"{told} registers a hook on, or sets an attribute of, a tensor {list(changed.shape)} that it was given or "
                    "that the model holds, which a plan can't hold; do so before the model is prepared, or on one of the part's own"
                )
            self.last = snapshot.anew()
            left = dict.fromkeys(self.last.kept_memory() - own_before, told)
            recorder.kept |= left
            recording.left_by_parts |= left
            snapshot.inside |= before.spots()
            moved_on = before.moved_rng()
            drew = bool(moved_on)
            if alone:
                recording.numbers = self.last.rng
            snapshot.draws_inside.update(moved_on)
            recording.drew.update(moved_on)
            recording.opaque = True
        unwritten = tuple(
            i for i, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and not any(leaf is t for t in written)
        )  # fmt: skip
        kinds = tuple(isinstance(r, torch.Tensor) for r in results)
        keeps = bool(before.spots())
        moves = drew or keeps
        if runs_again() and (moves or any(storage_of(t) in recorder.state for t in written)):
            raise UnsupportedError(
                f"{told} keeps something, or draws from Python's generators, within torch.utils.checkpoint: the backward pass runs "
                "it again, which a plan does not. Leave it out of the checkpoint"
            )
        call = Call(part, name, given, str(gives), gives.kind == tree.LEAF, kinds, unwritten, moves, drew, keeps)
        aliases = tuple(t for t in tensors if not t.is_nested)
        within = {id(t): t for t in (*own, *snapshot.owning(reads.found), *written)}
        recorder.add(call, (*leaves,), results, Effect(tuple(written), aliases, True), within=within)
        return tree.unflatten(results, gives)

    def _told(self, name: str) -> str:
        return f"the opaque part {name!r} in {self.recorder.where()}"

    def _refuse_before(self, name: str, changed: set[Spot], modules: Sequence[nn.Module]) -> None:
        """Raise `UnsupportedError` if forward `changed` something in Python that the part may read: a plan does so only later."""
        recorder = self.recorder
        recorder.recording.outside_of_parts |= changed
        others = {at for m in recorder.snapshot.modules.values() for at in _tables(m)}
        others -= {at for m in modules for at in _tables(m)}
        found = next((key for at, key in recorder.recording.outside_of_parts if at not in others), recorder)
        if found is not recorder:
            told = f"the attribute {found!r}" if isinstance(found, str) else "something in a container"
            raise UnsupportedError(
                f"forward changes {told} before it calls {self._told(name)}, which may read that; pass it to "
                "the part as an argument"
            )

    def _refuse_objects(self, name: str, leaves: Sequence[Any]) -> None:
        """Raise `UnsupportedError` for an argument that a plan would freeze: an object that forward makes."""
        snapshot = self.recorder.snapshot
        for leaf in leaves:
            if isinstance(leaf, (torch.Tensor, *CONSTANTS, *SYMBOLIC)) or is_a(leaf, type) or snapshot.holds(leaf):
                continue
            raise UnsupportedError(
                f"{self._told(name)} takes an object of type {type(leaf).__name__}, which a plan "
                "would freeze; pass tensors, numbers and strings, in lists, tuples and dicts, or what the model holds"
            )

    def _known(self) -> Iterator[torch.Tensor]:
        """The tensors that a plan knows."""
        yield from self.recorder.snapshot.owning(self.recorder.state)
        for event in self.recorder.recording.events:
            yield from tensors_in((event.args, event.out))

    def _results(self, name: str, out: Any, given: Sequence[torch.Tensor]) -> tuple[list[Any], tree.Spec]:
        """The leaves of what a part gave, those that are known already as tensors of their own."""
        recorder, told = self.recorder, self._told(name)
        leaves, spec = tree.flatten(out)
        odd = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *CONSTANTS))), None)
        if odd is not None:
            raise UnsupportedError(
                f"{told} gives an object of type {type(odd).__name__}, which a plan can't "
                "hold; let it return tensors, numbers and strings, in lists, tuples and dicts"
            )
        mine = {id(t) for t in given}
        known = {id(t): t for t in self._known()}
        memory = {key for t in known.values() if id(t) not in mine and (key := storage_of(t)) is not None}
        memory -= {storage_of(t) for t in given} | recorder.state
        through = {_node_of(t) for t in given}
        nodes = {node for t in known.values() if (node := _node_of(t)) is not None} - through
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                continue
            if storage_of(leaf) in memory or (leaf.grad_fn is not None and _leads_to(leaf.grad_fn, nodes, through)):
                raise UnsupportedError(
                    f"{told} gives a tensor that it had from elsewhere in this call, and not "
                    "as an argument; pass it to the part"
                )
        found = {**known, **{id(t): t for t in given}}
        return [recorder._named_anew(leaf) if id(leaf) in found else leaf for leaf in leaves], spec


def _node_of(t: torch.Tensor) -> Any:
    """What made a tensor, for autograd; None for a view under `no_grad` of what was written since: torch follows none of these."""
    try:
        return t.grad_fn
    except RuntimeError:
        return None


def _tables(module: nn.Module) -> Iterator[int]:
    """What tells the dicts of a module's attributes from others."""
    own = module.__dict__
    yield id(own)
    yield from (id(own[name]) for name in ("_parameters", "_buffers", "_modules") if name in own)


class _Marks:
    """The hooks and attributes of tensors before a part runs."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.found = [(t, marks_of(t), {**vars(t)}) for t in {id(t): t for t in tensors}.values()]

    def changed(self) -> torch.Tensor | None:
        """The first that has others now; all of them are put back."""
        first = None
        for t, (hooks, after, retains), own in self.found:
            same = vars(t).keys() == own.keys() and all(vars(t)[k] is v for k, v in own.items())
            if marks_of(t) != (hooks, after, retains) or not same:
                first = t if first is None else first
                for table, known in ((t._backward_hooks or {}, hooks), (t._post_accumulate_grad_hooks or {}, after)):
                    for key in [k for k in table if k not in known]:
                        del table[key]
                refill(vars(t), own)
        return first


class _Seen:
    """Tensors before a part runs: how often they were written into, and of those `given` their data."""

    def __init__(self, given: Sequence[torch.Tensor], known: Iterator[torch.Tensor]) -> None:
        self.tensors = {id(t): t for t in (*given, *known)}
        self.versions = {at: version(t) for at, t in self.tensors.items()}
        self.given = {id(t) for t in given}
        self.data = {id(t): t.detach().clone() for t in given if not t.is_nested}

    def written(self) -> list[torch.Tensor]:
        """Those that hold other data now; of others in the same memory, those that were given."""
        moved = {at for at, t in self.tensors.items() if version(t) != self.versions[at]}
        moved |= {at for at, data in self.data.items() if not same_bits(self.tensors[at], data)}
        memory = {storage_of(self.tensors[at]) for at in moved & self.given}
        return [
            t for at, t in self.tensors.items() if at in moved and (at in self.given or storage_of(t) not in memory)
        ]


def _leads_to(node: Any, others: set[Any], through: set[Any]) -> bool:
    """Whether a graph leads to one of these nodes by another way than `through` those."""
    todo, seen = [node] if node not in through else [], {node, *through}
    while todo:
        one = todo.pop()
        if one in others:
            return True
        new = {n for n, _ in one.next_functions if n is not None} - seen
        seen |= new
        todo += new
    return False


def refuse_shared(found: Recording, snapshot: Snapshot) -> None:
    """Raise `UnsupportedError` where forward reads or changes, outside of opaque parts, what one of them changes in Python."""
    inside = snapshot.inside
    if not inside:
        return
    left = found.left_by_parts
    events = found.events if left else ()
    made = {storage_of(t) for e in events for t in tensors_in(e.out)}
    for event in events:
        for t in tensors_in((event.args, *event.within)):
            key = storage_of(t)
            if key in left and key not in made and not isinstance(event.target, Call):
                raise UnsupportedError(
                    f"forward reads a tensor {list(t.shape)} that {left[key]} put in Python in this call; {_OWN}"
                )
    both = inside & found.outside_of_parts
    if both:
        name = next((k for _, k in both if isinstance(k, str)), "a container")
        raise UnsupportedError(f"forward changes {name!r} in an opaque part and outside of it, too; {_OWN}")
    for (path, name), (module, _, _) in found.read_attributes.items():
        value = module.__dict__.get(name)
        if snapshot.is_inside(module.__dict__, name) or _holds(value, snapshot.is_inside):
            raise UnsupportedError(
                f"forward reads the attribute {name!r} of {named(path)}, which an opaque part changes; {_OWN}"
            )
    for one in found.outside:
        if snapshot.is_inside(_thing(one.table), one.key) or _holds(one.value, snapshot.is_inside):
            raise UnsupportedError(f"forward reads {one.name}, which an opaque part changes; {_OWN}")


_OWN = "what such a part changes in Python must be its own: let it return what forward needs"


def _thing(table: Any) -> Any:
    return getattr(table, "thing", table)


def _holds(value: Any, inside: Callable[..., bool]) -> bool:
    """Whether something that a part changes stands in a value."""
    todo, seen = [(value, 0)], set[int]()
    while todo:
        one, depth = todo.pop()
        if type(one) in LEAVES or id(one) in seen or depth > _DEEP:
            continue
        seen.add(id(one))
        own = getattr(one, "__dict__", None) if not isinstance(one, (nn.Module, Mapping)) else None
        if inside(one) or (isinstance(own, dict) and any(inside(own, key) for key in own)):
            return True
        if is_array(one):
            continue
        todo += [(thing, depth + 1) for _, thing in held(one)]
    return False
