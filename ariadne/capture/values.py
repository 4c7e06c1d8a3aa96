"""The values of a plan in the making: each live tensor and object that forward met, by its name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._sympy.printers import PythonPrinter

from ariadne.capture.followed import Spent
from ariadne.capture.foreseen import faked
from ariadne.capture.state import Snapshot
from ariadne.errors import UnsupportedError
from ariadne.guards import (
    DEPTH,
    LEAVES,
    Attribute,
    Recording,
    held,
    is_a,
    is_followed,
    is_opaque,
    simple,
)
from ariadne.plan import Expr, Namespace, Ref, TraceNode, Value

_NUMBERS = (bool, int, float, complex)
CONSTANTS = (type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format, *_NUMBERS)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class SavedByOpError(UnsupportedError):
    """A backward pass of forward's own reads what an op made beside its result, as a composite one's own ops do."""


def state_tensors(snapshot: Snapshot) -> dict[int, tuple[str, tuple[Any, ...]]]:
    """Where each tensor of the model is kept, by id: its kind, and (module path, key, ...)."""
    found: dict[int, tuple[str, tuple[Any, ...]]] = {}
    seen: dict[int, int] = {}  # objects, and the least depth at which they were looked into

    def inside(value: Any, path: str, keys: tuple[Any, ...]) -> None:
        if is_a(value, torch.Tensor):
            origin = tuple((".", str(key)) if isinstance(key, Attribute) else key for key in keys[1:])
            found.setdefault(id(value), ("attribute", (path, keys[0], *origin)))
        elif type(value) not in LEAVES and seen.get(id(value), DEPTH) >= len(keys) and not is_opaque(value):
            seen[id(value)] = len(keys)
            for step, thing in held(value):
                far = not is_followed((*keys, step))
                if not far and (type(thing) not in LEAVES or is_a(thing, torch.Tensor)):
                    inside(thing, path, (*keys, step))

    for kind, table in (("parameter", "_parameters"), ("buffer", "_buffers")):
        for path, module in snapshot.modules.items():
            for name, t in module.__dict__[table].items():
                if t is not None:
                    found.setdefault(id(t), (kind, (path, name)))
    for path, module in snapshot.modules.items():
        for name, value in module.__dict__.items():
            # Most of what a module has are its ten tables of hooks, in which nothing stands.
            bare = type(value) is OrderedDict and not OrderedDict.__len__(value) and not value.__dict__
            if not bare and name not in ("_parameters", "_buffers", "_modules"):
                inside(value, path, (name,))
    return found


def memory_of(t: torch.Tensor) -> int:
    """What tells the memory of a tensor, fake ones too, from that of others."""
    try:
        return int(t.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage of their own
        return -id(t)


class Values:
    """What the ops of a recording read and make, as the plan names it.

    `symbols` maps sympy symbols to names (the batch to its own); `nodes` are the ops so far: what is met by no op of forward's own
    adds one. `backward` names the module whose gradients are taken just now.
    """

    def __init__(
        self,
        recorded: Recording,
        snapshot: Snapshot,
        state: Mapping[int, tuple[str, tuple[Any, ...]]],
        batched: Mapping[int, int],
        fake: FakeTensorMode | None,
        batch_symbol: str,
        symbols: dict[Any, str],
        names: Namespace,
    ) -> None:
        self.again, self.snapshot, self.state, self.fake = recorded.again, snapshot, state, fake
        self.data_of = recorded.data_of
        self.batch_symbol, self.symbols, self.batched, self.names = batch_symbol, symbols, batched, names
        self.by_name: dict[str, Value] = {}
        self.ids: dict[int, str] = {}
        self.storages: dict[int, int] = {}
        self.by_storage: dict[int, list[torch.Tensor]] = {}
        self.keep: list[Any] = []
        self.nodes: list[TraceNode] = []
        self.of_data = set[str]()  # what no op gave that was recorded, as `.data` does
        self.constants: dict[str, torch.Tensor] = {}
        self.objects: dict[str, Any] = {}
        self.leaf_objects: dict[int, str] = {}
        self.inputs: list[tuple[int, str]] = []
        self.input_ids: list[int] = []
        self.given: dict[str, Any] = {}
        self.input_tensors: list[torch.Tensor] = []
        self.literals: list[tuple[int, Any]] = []
        self.backward = ""

    def input(self, i: int, leaf: Any, called: str) -> None:
        """Take a leaf of the inputs, by what forward calls it."""
        if isinstance(leaf, torch.Tensor) or not (simple(leaf) or isinstance(leaf, complex)):
            self.input_ids.append(id(leaf) if isinstance(leaf, torch.Tensor) else -i - 1)
        if isinstance(leaf, torch.Tensor):
            name = self.names.new(called)
            self.inputs.append((i, name))
            self.input_tensors.append(leaf)
            self.define(name, "input", leaf, (i,))
            if i in self.batched:
                value = self.by_name[name]
                shape, dim = value.shape, self.batched[i]
                self.by_name[name] = replace(value, shape=(*shape[:dim], Expr(self.batch_symbol), *shape[dim + 1 :]))
        elif simple(leaf) or isinstance(leaf, complex):
            self.literals.append((i, {*leaf} if isinstance(leaf, set) else leaf))  # a set can change in place
        else:
            name = self.names.new(called)
            self.inputs.append((i, name))
            self.leaf_objects[id(leaf)] = name
            self.given[name] = leaf
            self.by_name[name] = Value(name, "object", origin=(i,))

    def new(self, wanted: str, kind: str) -> str:
        """The name of a new value that is no tensor."""
        name = self.names.new(wanted)
        self.by_name[name] = Value(name, kind)
        return name

    def known_as(self, t: torch.Tensor, name: str) -> None:
        """From here on a tensor goes by the name of a value that there is."""
        self.ids[id(t)] = name
        self.keep.append(t)

    def _storage(self, t: torch.Tensor) -> int:
        return self.storages.setdefault(memory_of(t), len(self.storages))

    def dims(self, t: torch.Tensor) -> tuple[int | Expr, ...]:
        """Its sizes as the plan writes them."""
        return tuple(d if isinstance(d, int) else self.atom(d) for d in t.shape)

    def define(self, name: str, kind: str, t: torch.Tensor, origin: tuple[Any, ...] = ()) -> None:
        """A live tensor becomes the value of this name; one that is not fake stands for a fake one where the run is symbolic."""
        seen = t
        if self.fake is not None and not isinstance(t, FakeTensor):
            seen = faked(self.fake, t)
            self.known_as(seen, name)
        storage = self._storage(seen)
        if seen.is_nested:  # its sizes are data: of a value without a dtype nothing is relied on
            if kind != "tensor":
                raise UnsupportedError(
                    f"forward reads a nested tensor ({kind}) that no op of its own made, which a plan can't hold; use a padded "
                    "tensor and a mask"
                )
            self.by_name[name] = Value(
                name, kind, device=str(seen.device), requires_grad=t.requires_grad, storage=storage
            )
            self.known_as(t, name)
            return
        unknown = any(
            isinstance(d, torch.SymInt) and d.node.expr.free_symbols - self.symbols.keys() for d in seen.shape
        )
        shape = () if unknown else self.dims(seen)  # what depends on data is filled in once its sizes have names
        is_view = kind == "tensor" and self.again.get(id(t), t)._is_view()
        self.by_name[name] = Value(
            name, kind, shape, seen.dtype, str(seen.device), t.requires_grad, storage, origin, is_view
        )
        self.known_as(t, name)
        self.by_storage.setdefault(storage, []).append(seen)

    def tensor(self, t: torch.Tensor) -> Ref:
        """The name of a tensor that an op reads, which makes it a value of the plan if it is met for the first time."""
        name = self.ids.get(id(t))
        if name is not None:
            return Ref(name)
        if id(t) in self.state:
            kind, origin = self.state[id(t)]
            name = self.names.new("_".join(str(k) for k in origin))
            self.define(name, kind, t, origin)
            return Ref(name)
        return self._stranger(t)

    def registered(self, tensors: Iterable[torch.Tensor], *kinds: str) -> tuple[str, ...]:
        """The names of those tensors that are parameters, or other state of these kinds, of the model."""
        return tuple(self.tensor(t).name for t in tensors if self.state.get(id(t), ("",))[0] in kinds)

    def _stranger(self, t: torch.Tensor) -> Ref:
        """A tensor that no recorded op made: another view of a known one (as `.data` gives), or a constant.

        Two that stand outside may share memory, as the elements of one tensor do that a loop made: each is a constant.
        """
        if id(t) in self.data_of:  # the tensor itself may have other data by the next call
            return self._detached(self.tensor(self.data_of[id(t)][1]), t)
        for known in self._sharing(t):
            if _same_view(known, t):
                ref = self.tensor(known)
                again = self.backward and t.requires_grad == known.requires_grad  # what an op saved, unpacked
                return ref if again else self._detached(ref, t)
        if self.backward:
            raise SavedByOpError(
                f"forward takes gradients in {self.backward} (torch.autograd.grad or backward) through ops that keep tensors to "
                "themselves for it, which a plan can't hold; write the derivative out in torch's ops, or take it outside"
            )
        shares = next((self.ids[id(known)] for known in self._sharing(t)), None)
        if isinstance(t, FakeTensor) or (shares is not None and not self._is_outside(t)):
            raise UnsupportedError(
                f"forward makes a tensor of shape {list(t.shape)} that shares memory with {shares!r}, but by no op that "
                "can be recorded (such as `.data` followed by a view); use detach() and torch's own views"
            )
        return self.constant("constant", t, outside=True)

    def constant(self, wanted: str, t: torch.Tensor, outside: bool = False) -> Ref:
        """A tensor that the plan keeps: a copy of its own, or one that stands outside of the model."""
        name = self.names.new(wanted)
        self.constants[name] = t
        self.define(name, "constant", t)
        self.by_name[name] = replace(self.by_name[name], is_outside=outside)
        return Ref(name)

    def _is_outside(self, t: torch.Tensor) -> bool:
        """Whether the memory of a tensor is that of a constant which stands outside of the model."""
        at = self._storage(t)
        return any(value.is_outside and value.storage == at for value in self.by_name.values())

    def _sharing(self, t: torch.Tensor) -> Iterator[torch.Tensor]:
        """The state and the known values that share memory with a tensor."""
        if not isinstance(t, FakeTensor):
            for known_id in self.state:
                owner = self._owner(known_id)
                if owner is not None and owner.untyped_storage()._cdata == t.untyped_storage()._cdata:
                    self.tensor(owner)
                    yield owner
        yield from self.by_storage.get(self._storage(t), ())

    def _owner(self, known_id: int) -> torch.Tensor | None:
        kind, origin = self.state[known_id]
        module = self.snapshot.modules[origin[0]]
        if kind == "attribute":
            return None
        table = module._parameters if kind == "parameter" else module._buffers
        t = table.get(origin[1])
        return t if t is not None and id(t) == known_id else None

    def _detached(self, source: Ref, t: torch.Tensor) -> Ref:
        name = self.names.new("detach")
        self.of_data.add(name)
        self.define(name, "tensor", t)
        self.nodes.append(TraceNode("aten.detach.default", (source,), (), (name,), may_alias=((name, source.name),)))
        return Ref(name)

    def ops(self, grad: bool) -> tuple[TraceNode, ...]:
        """All ops; what `.data` gave of memory that forward writes comes from an op that counts no such write, where gradients do.

        So autograd lets it pass for the split as for the model, which `detach` would not.
        """
        if not grad or not self.of_data:
            return tuple(self.nodes)
        written = {self.by_name[name].storage for node in self.nodes for name in node.writes}
        written &= {value.storage for value in self.by_name.values() if value.requires_grad}
        quiet = {name for name in self.of_data if self.by_name[name].storage in written}
        return tuple(
            replace(n, target="aten.data.default") if not quiet.isdisjoint(n.outputs) else n for n in self.nodes
        )

    def atom(self, value: Any) -> Any:
        """An argument as the plan keeps it."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, SYMBOLIC):
            return self._symbolic(value)
        if type(value) is Spent:
            return Expr(value.node.text)
        if isinstance(value, (list, tuple)):
            return tuple(self.atom(v) for v in value)
        if isinstance(value, CONSTANTS):
            return value
        if id(value) in self.leaf_objects:
            return Ref(self.leaf_objects[id(value)])
        if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            raise UnsupportedError(
                "forward makes a tensor of another one's storage, which takes data out of sight of a plan; use torch's own views"
            )
        return self.object(value)

    def object(self, value: Any) -> Ref:
        """The name of an object that an op is called with, or that is called itself."""
        if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            raise UnsupportedError(
                "forward hands a storage to an op (set_, by pickle or by itself), whose data a plan would freeze; keep to tensors"
            )
        for name, known in self.objects.items():
            if known is value:
                return Ref(name)
        try:  # past what the class itself answers for a name that it has not, as dicts do whose items are attributes
            called = object.__getattribute__(value, "__name__")
        except AttributeError:
            called = None
        name = self.new(called if type(called) is str else type(value).__name__, "object")
        self.objects[name] = value
        return Ref(name)

    def _symbolic(self, value: Any) -> Any:
        expr = value.node.expr
        if expr.is_number and not expr.free_symbols:
            return value.node.pytype(expr)
        unknown = [s for s in expr.free_symbols if s not in self.symbols]
        if unknown:
            raise UnsupportedError(
                f"a size in the forward, {expr}, depends on data in a way that no op's result shows; read it "
                "from a tensor that an op made"
            )
        import_free = expr.xreplace({s: type(s)(self.symbols[s], **s.assumptions0) for s in expr.free_symbols})
        return Expr(PythonPrinter().doprint(import_free))


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(
        not (a.is_nested or b.is_nested)
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.dtype == b.dtype
    )
