"""Lowering: a recording, whose values are live tensors, becomes a plan, whose values are names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._sympy.printers import PythonPrinter

from ariadne import tree
from ariadne.capture.followed import Spent
from ariadne.capture.foreseen import Dims, Foresight
from ariadne.capture.scripted import TARGET, Call, itself
from ariadne.capture.state import Snapshot
from ariadne.errors import UnsupportedError, named
from ariadne.guards import (
    DEPTH,
    LEAVES,
    SIMPLE,
    Attribute,
    Change,
    Event,
    Place,
    Put,
    Recording,
    held,
    is_a,
    is_followed,
    is_opaque,
    lasts,
    refused,
    simple,
)
from ariadne.plan import (
    HELPERS,
    WHOLE,
    Assumption,
    Batches,
    Expr,
    ModuleCall,
    Namespace,
    Ref,
    Store,
    TraceNode,
    TracePlan,
    Value,
    bind,
    check,
    layout,
    tensors_in,
    written_arguments,
)

_NUMBERS = (bool, int, float, complex)
_CONSTANTS = (type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format, *_NUMBERS)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_END = 2**63 - 1


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
            if name not in ("_parameters", "_buffers", "_modules"):
                inside(value, path, (name,))
    return found


class Lowering:
    """One recording on its way to a plan.

    `symbols` maps sympy symbols to names (the batch to its own); `called` is what forward calls its inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        recorded: Recording,
        snapshot: Snapshot,
        state: Mapping[int, tuple[str, tuple[Any, ...]]],
        leaves: Sequence[Any],
        batched: Sequence[int],
        fake: FakeTensorMode | None,
        batch_symbol: str,
        symbols: dict[Any, str],
        called: Sequence[str] = (),
    ) -> None:
        self.model, self.recorded, self.snapshot, self.state, self.fake = model, recorded, snapshot, state, fake
        self.batch_symbol, self.symbols, self.batched = batch_symbol, symbols, batched
        ops = {e.target._schema.name.split("::")[1] for e in recorded.events if isinstance(e.target, OpOverload)}
        self.names = Namespace({batch_symbol} | HELPERS | ops)
        self.values: dict[str, Value] = {}
        self.ids: dict[int, str] = {}
        self.storages: dict[int, int] = {}
        self.by_storage: dict[int, list[torch.Tensor]] = {}
        self.keep: list[Any] = []
        self.nodes: list[TraceNode] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.objects: dict[str, Any] = {}
        self.leaf_objects: dict[int, str] = {}
        self.inputs: list[tuple[int, str]] = []
        self.input_ids: list[int] = []
        self.given: dict[str, Any] = {}
        self.input_tensors: list[torch.Tensor] = []
        self.literals: list[tuple[int, Any]] = []
        self.put: dict[tuple[Place, Any], Put] = {}
        self.beside_caches: dict[tuple[str, str], Any] = {}  # assigned in modules that keep a cache, too
        self.backward = ""
        self.foresight = Foresight()
        self.unforeseen: set[str] = set()  # sizes of which no fake kernel tells whether they follow data
        self.crowd: dict[tuple[str, int], int] = {}
        for e in recorded.events:
            self.crowd[e.module, e.call] = self.crowd.get((e.module, e.call), 0) + 1
        leaves_out, _ = tree.flatten(recorded.output)
        self.readers = Counter(id(t) for e in recorded.events for t in tensors_in(e.args))
        self.read = {*self.readers}
        self.readers.update(id(t) for t in tensors_in(leaves_out))
        self.written = {
            self._storage_key(t)
            for e in recorded.events
            if isinstance(e.target, OpOverload)
            for i in written_arguments(e.target, e.args)
            for t in tensors_in(e.args[i])
        }
        self.written.update(self._storage_key(t) for e in recorded.events if e.effect for t in e.effect.writes)
        for i, leaf in enumerate(leaves):
            self._input(i, leaf, called[i] if i < len(called) else f"x{i}")

    def _input(self, i: int, leaf: Any, called: str) -> None:
        if isinstance(leaf, torch.Tensor) or not (simple(leaf) or isinstance(leaf, complex)):
            self.input_ids.append(id(leaf) if isinstance(leaf, torch.Tensor) else -i - 1)
        if isinstance(leaf, torch.Tensor):
            name = self.names.new(called)
            self.inputs.append((i, name))
            self.input_tensors.append(leaf)
            self._define(name, "input", leaf, (i,))
            if i in self.batched:
                value = self.values[name]
                self.values[name] = replace(value, shape=(Expr(self.batch_symbol), *value.shape[1:]))
        elif simple(leaf) or isinstance(leaf, complex):
            self.literals.append((i, {*leaf} if isinstance(leaf, set) else leaf))  # a set can change in place
        else:
            name = self.names.new(called)
            self.inputs.append((i, name))
            self.leaf_objects[id(leaf)] = name
            self.given[name] = leaf
            self.values[name] = Value(name, "object", origin=(i,))

    # --- values ---------------------------------------------------------------------------------------------------

    def _storage(self, t: torch.Tensor) -> int:
        return self.storages.setdefault(self._storage_key(t), len(self.storages))

    @staticmethod
    def _storage_key(t: torch.Tensor) -> int:
        try:
            return int(t.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage of their own
            return -id(t)

    def _dims(self, t: torch.Tensor) -> tuple[int | Expr, ...]:
        return tuple(d if isinstance(d, int) else self.atom(d) for d in t.shape)

    def _define(self, name: str, kind: str, t: torch.Tensor, origin: tuple[Any, ...] = ()) -> None:
        seen = t
        if self.fake is not None and not isinstance(t, FakeTensor):
            seen = self.fake.from_tensor(t, static_shapes=True)
            self.keep.append(seen)
            self.ids[id(seen)] = name
        storage = self._storage(seen)
        if seen.is_nested:  # its sizes are data: of a value without a dtype nothing is relied on
            if kind != "tensor":
                raise UnsupportedError(
                    f"forward reads a nested tensor ({kind}) that no op of its own made, which a plan can't hold; use a padded "
                    "tensor and a mask"
                )
            self.values[name] = Value(
                name, kind, device=str(seen.device), requires_grad=t.requires_grad, storage=storage
            )
            self.ids[id(t)] = name
            self.keep.append(t)
            return
        unknown = any(
            isinstance(d, torch.SymInt) and d.node.expr.free_symbols - self.symbols.keys() for d in seen.shape
        )
        shape = () if unknown else self._dims(seen)  # what depends on data is filled in once its sizes have names
        is_view = kind == "tensor" and self.recorded.again.get(id(t), t)._is_view()
        self.values[name] = Value(
            name, kind, shape, seen.dtype, str(seen.device), t.requires_grad, storage, origin, is_view
        )
        self.ids[id(t)] = name
        self.keep.append(t)
        self.by_storage.setdefault(storage, []).append(seen)

    def tensor(self, t: torch.Tensor) -> Ref:
        """The name of a tensor that an op reads, which makes it a value of the plan if it is met for the first time."""
        name = self.ids.get(id(t))
        if name is not None:
            return Ref(name)
        if id(t) in self.state:
            kind, origin = self.state[id(t)]
            name = self.names.new("_".join(str(k) for k in origin))
            self._define(name, kind, t, origin)
            return Ref(name)
        return self._stranger(t)

    def _stranger(self, t: torch.Tensor) -> Ref:
        """A tensor that no recorded op made: another view of a known one (as `.data` gives), or a constant."""
        for known in self._sharing(t):
            if _same_view(known, t):
                ref = self.tensor(known)
                again = self.backward and t.requires_grad == known.requires_grad  # what an op saved, unpacked
                return ref if again else self._detached(ref, t)
        if self.backward:
            raise UnsupportedError(
                f"forward takes gradients in {self.backward} (torch.autograd.grad or backward) through ops that keep tensors to "
                "themselves for it, which a plan can't hold; write the derivative out in torch's ops, or take it outside"
            )
        shares = next((self.ids[id(known)] for known in self._sharing(t)), None)
        if isinstance(t, FakeTensor) or shares is not None:
            raise UnsupportedError(
                f"forward makes a tensor of shape {list(t.shape)} that shares memory with {shares!r}, but by no op that "
                "can be recorded (such as `.data` followed by a view); use detach() and torch's own views"
            )
        name = self.names.new("constant")
        self.constants[name] = t
        self._define(name, "constant", t)
        return Ref(name)

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
        self._define(name, "tensor", t)
        self.nodes.append(TraceNode("aten.detach.default", (source,), (), (name,), may_alias=((name, source.name),)))
        return Ref(name)

    def atom(self, value: Any) -> Any:
        """An argument as the plan keeps it."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, _SYMBOLIC):
            return self._symbolic(value)
        if type(value) is Spent:
            return Expr(value.node.text)
        if isinstance(value, (list, tuple)):
            return tuple(self.atom(v) for v in value)
        if isinstance(value, _CONSTANTS):
            return value
        if id(value) in self.leaf_objects:
            return Ref(self.leaf_objects[id(value)])
        if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            raise UnsupportedError(
                "forward makes a tensor of another one's storage, which takes data out of sight of a plan; use torch's own views"
            )
        return self._object(value)

    def _object(self, value: Any) -> Ref:
        if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            raise UnsupportedError(
                "forward hands a storage to an op (set_, by pickle or by itself), whose data a plan would freeze; keep to tensors"
            )
        for name, known in self.objects.items():
            if known is value:
                return Ref(name)
        name = self.names.new(getattr(value, "__name__", type(value).__name__))
        self.objects[name] = value
        self.values[name] = Value(name, "object")
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

    # --- ops ------------------------------------------------------------------------------------------------------

    def _result_name(self, event: Event, op: str) -> str:
        alone = self.crowd[event.module, event.call] == 1
        again = f"_call{event.call}" if event.call > 1 else ""
        if alone and event.module:
            return f"{event.module}{again}"
        return f"{event.module}{again}_{op}" if event.module else op

    def event(self, event: Event) -> None:
        """Lower one op."""
        if event.target == WHOLE:
            return self._taken_out(event)
        if isinstance(event.target, Call):
            return self._scripted_op(event, event.target)
        if not isinstance(event.target, OpOverload):
            return self._python_op(event)
        target, args = event.target, event.args
        if target is torch.ops.aten.lift_fresh.default:
            target, args = torch.ops.aten.clone.default, (args[0], None)
        if _is_of_all(event):
            target, args = torch.ops.aten.alias.default, (args[0],)
        op = target._schema.name.split("::")[1]
        if self._changes_nothing(event):
            for out in tensors_in(event.out):
                self.ids[id(out)] = self.tensor(args[0]).name
                self.keep.append(out)
            return None
        positional, keywords = self._arguments(target, args)
        writes = tuple(
            dict.fromkeys(self.tensor(t).name for i in written_arguments(target, args) for t in tensors_in(args[i]))
        )
        node = TraceNode(
            f"{target.namespace}.{op}.{target._overloadname}",
            positional,
            keywords,
            module=event.module,
            call=event.call,
            region=event.region,
            writes=writes,
            seeded=torch.Tag.nondeterministic_seeded in target.tags,
        )
        self._outputs(event, node, target, args, op)
        return None

    def _changes_nothing(self, event: Event) -> bool:
        """Dropout that returned its own input; and a view of all of a tensor that nothing else reads.

        Where something else does, or something writes into it, the view stays: gradients that arrive at it are added up before
        they go on to the tensor, and a sum in another order has other bits. Under `no_grad` it stays as well: it cuts the graph.
        """
        if _is_of_all(event):
            return (
                event.region.grad is not False
                and self.readers[id(event.args[0])] == 1
                and self._storage_key(event.args[0]) not in self.written
            )
        seeded = torch.Tag.nondeterministic_seeded in event.target.tags
        writes = next(written_arguments(event.target, event.args), None) is not None
        return seeded and not writes and isinstance(event.out, torch.Tensor) and event.out is event.args[0]

    def _arguments(
        self, target: OpOverload, args: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        schema = target._schema.arguments
        positional, keywords = [], []
        for arg, value in zip(schema, args, strict=True):
            is_default = arg.has_default_value() and tree.identical(value, arg.default_value)
            if not arg.kwarg_only:
                positional.append((self.atom(value), is_default))
            elif not is_default:
                keywords.append((arg.name, self.atom(value)))
        while positional and positional[-1][1]:
            positional.pop()
        return tuple(a for a, _ in positional), tuple(keywords)

    def _outputs(self, event: Event, node: TraceNode, target: OpOverload, args: tuple[Any, ...], op: str) -> None:
        returns = target._schema.returns
        label = self._result_name(event, op)
        if not returns or event.out is None:
            self.nodes.append(node)
            return
        if len(returns) == 1 and not isinstance(event.out, (torch.Tensor, list, tuple)):
            self._scalar(node, label, event.out)
            return
        unpack = not isinstance(event.out, torch.Tensor)
        outs = list(event.out) if unpack else [event.out]
        names: list[str] = []
        aliases: list[tuple[str, str]] = []
        if len(returns) > 1 and any(isinstance(o, (list, tuple)) for o in outs):
            raise UnsupportedError(
                f"{node.target} returns nested sequences, which a plan can't hold; call it once for each sequence"
            )
        for i, out in enumerate(outs):
            ret = returns[i] if len(returns) > 1 else returns[0]
            written = self._written_source(ret, target, args)
            if written is not None and self.values[written].is_state:
                self.ids[id(out)] = written
                self.keep.append(out)
                names.append(self.names.new("_unused"))
                self.values[names[-1]] = replace(self.values[written], name=names[-1], kind="tensor", origin=())
                continue
            name = self.names.new(label if not unpack else f"{label}_{i}")
            names.append(name)
            if out is None or not isinstance(out, torch.Tensor):
                self.values[name] = Value(name, "object")
                continue
            self._define(name, "tensor", out)
            aliases += [(name, src) for src in self._alias_sources(ret, target, args)]
        self.nodes.append(replace(node, outputs=tuple(names), unpack=unpack, may_alias=tuple(aliases)))
        follows = self._follows_data(target, args, outs)
        for name, out, dims in zip(names, outs, follows, strict=True):
            if isinstance(out, torch.Tensor):
                self._data_dependent_sizes(node, name, out, dims)

    def _follows_data(self, target: OpOverload, args: tuple[Any, ...], outs: Sequence[Any]) -> Sequence[Dims]:
        """For each result and dim, whether its size follows data, in a real run; no fake kernel takes nested tensors."""
        if self.fake is not None:
            return [()] * len(outs)
        if any(t.is_nested for t in tensors_in((args, tuple(outs)))):
            return [_dims_of_ragged(out, args) for out in outs]
        return self.foresight.follows_data(target, args, outs)

    def _written_source(self, ret: Any, target: OpOverload, args: tuple[Any, ...]) -> str | None:
        if ret.alias_info is None or not ret.alias_info.is_write:
            return None
        for arg, value in zip(target._schema.arguments, args, strict=True):
            same = arg.alias_info is not None and arg.alias_info.before_set & ret.alias_info.before_set
            if same and isinstance(value, torch.Tensor):
                return self.tensor(value).name
        return None

    def _alias_sources(self, ret: Any, target: OpOverload, args: tuple[Any, ...]) -> list[str]:
        if ret.alias_info is None:
            return []
        sets = ret.alias_info.before_set | ret.alias_info.after_set
        return [
            self.tensor(t).name
            for arg, value in zip(target._schema.arguments, args, strict=True)
            if arg.alias_info is not None and (arg.alias_info.before_set | arg.alias_info.after_set) & sets
            for t in tensors_in(value)
        ]

    def _scalar(self, node: TraceNode, label: str, out: Any) -> None:
        name = self.names.new(label)
        self.values[name] = Value(name, "scalar")
        if isinstance(out, _SYMBOLIC):
            expr = out.node.expr
            if self.symbols.get(expr) == self.batch_symbol:  # known beforehand, and looked at again in each call
                self.nodes.append(replace(node, outputs=(name,), witness=Expr(self.batch_symbol), is_witness=True))
                return
            if expr.is_Symbol:
                self.symbols[expr] = name
            self.nodes.append(replace(node, outputs=(name,)))
        else:
            self.nodes.append(replace(node, outputs=(name,), witness=out, is_witness=True))

    def _data_dependent_sizes(self, node: TraceNode, name: str, out: torch.Tensor, follows: Dims) -> None:
        """Name the sizes that follow data, or of which nothing tells whether they do; `follows` is that of a real run."""
        if out.is_nested:
            return
        for d, size in enumerate(out.shape):
            if d < len(follows) and follows[d] is not False:
                # a real run can't show whether Python looked at it: what followed holds for this size
                symbol = self.names.new(f"{name}_size{d}")
                self.values[symbol] = Value(symbol, "scalar")
                if follows[d] is None:
                    self.unforeseen.add(symbol)
                self.nodes.append(
                    TraceNode("aten.sym_size.int", (Ref(name), d), (), (symbol,), module=node.module, call=node.call,
                              witness=int(size), is_witness=True)
                )  # fmt: skip
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in self.symbols:
                symbol = self.names.new(f"{name}_size{d}")
                self.symbols[size.node.expr] = symbol
                self.values[symbol] = Value(symbol, "scalar")
                self.nodes.append(
                    TraceNode("aten.sym_size.int", (Ref(name), d), (), (symbol,), module=node.module, call=node.call)
                )
        self.values[name] = replace(self.values[name], shape=self._dims(out))

    def _taken_out(self, event: Event) -> None:
        """Python took all of a tensor's data: what it did with it holds only while the data are the same."""
        source, data = event.args
        name = self.names.new("taken")
        self.constants[name] = data
        self._define(name, "constant", data)
        self.nodes.append(
            TraceNode(
                WHOLE, (self.tensor(source), Ref(name)), (), (), module=event.module, call=event.call, is_witness=True
            )
        )

    def _python_op(self, event: Event) -> None:
        cls = event.target
        args = tuple(self._opaque_argument(a, cls) for a in event.args)
        callable_name = self.names.new(cls.__name__)
        self.objects[callable_name] = cls.apply
        self.values[callable_name] = Value(callable_name, "object")
        unpack = isinstance(event.out, tuple)
        outs = list(event.out) if unpack else [event.out]
        if not all(isinstance(o, torch.Tensor) for o in outs):
            raise UnsupportedError(
                f"{cls.__name__}.apply returns something that is not a tensor, which a plan can't hold; return tensors alone"
            )
        reads = tuple(a.name for a in args if isinstance(a, Ref))
        names = []
        for i, out in enumerate(outs):
            names.append(self.names.new(self._result_name(event, f"{cls.__name__}_{i}" if unpack else cls.__name__)))
            self._define(names[-1], "tensor", out)
        node = TraceNode(
            f"python.{cls.__module__}.{cls.__qualname__}",
            (Ref(callable_name), *args),
            (),
            tuple(names),
            unpack,
            event.module,
            event.call,
            event.region,
            writes=tuple(r for r in reads if self.values[r].kind == "tensor"),
            may_alias=tuple((n, r) for n in names for r in reads if self.values[r].dtype is not None),
            seeded=True,
        )
        self.nodes.append(node)
        for name, out in zip(names, outs, strict=True):
            self._data_dependent_sizes(node, name, out, (None,) * out.dim() if self.fake is None else ())

    def _scripted_op(self, event: Event, call: Call) -> None:
        """One op that gives every leaf of the result; of those that are no tensors, each is held against what it was."""
        label, effect = call.function.name, event.effect
        assert effect is not None
        target = f"{TARGET}{label}"
        args = tuple(self.atom(a) for a in event.args)
        writes = tuple(dict.fromkeys(self.tensor(t).name for t in effect.writes))
        aliased = tuple(dict.fromkeys(self.tensor(t).name for t in effect.aliases))
        unpack = not call.one
        names: list[str] = []
        for i, out in enumerate(event.out):
            names.append(self.names.new(self._result_name(event, f"{label}_{i}" if unpack else label)))
            if isinstance(out, torch.Tensor):
                self._define(names[-1], "tensor", out)
            else:
                self.values[names[-1]] = Value(names[-1], "scalar")
        node = TraceNode(target, (self._object(call.bare), *args), (), tuple(names), unpack, event.module, event.call,
                         event.region, writes, tuple((n, a) for n in names for a in aliased), effect.draws)  # fmt: skip
        self.nodes.append(node)
        for name, out in zip(names, event.out, strict=True):
            if isinstance(out, torch.Tensor):
                dims = (True,) * out.dim() if self.fake is None else ()  # its shapes are its own affair
                self._data_dependent_sizes(node, name, out, dims)
                continue
            held = self.names.new(f"{name}_held")
            self.values[held] = Value(held, "scalar")
            self.nodes.append(
                TraceNode(target, (self._object(itself), Ref(name)), (), (held,), module=event.module,
                          call=event.call, witness=self.atom(out), is_witness=True)
            )  # fmt: skip

    def _opaque_argument(self, value: Any, cls: Any) -> Any:
        if isinstance(value, (torch.Tensor, *_CONSTANTS, *_SYMBOLIC)):
            return self.atom(value)
        if any(isinstance(v, (torch.Tensor, *_SYMBOLIC)) for v in tree.leaves(value)):
            raise UnsupportedError(
                f"{cls.__name__}.apply takes tensors inside a container, which a plan can't hold; pass them one by one"
            )
        return self._object(value)

    # --- the plan -------------------------------------------------------------------------------------------------

    def plan(
        self, input_spec: tree.Spec, traced_batch: int, batches: Batches, captured_by: str, grad_enabled: bool
    ) -> TracePlan:
        """The plan of the whole recording, with the ops whose results nothing uses.

        What was put into containers is not in it yet, but in `put`.
        """
        starts = []
        backward = {i: where for start, end, where in self.recorded.backwards for i in range(start, end)}
        for i, event in enumerate(self.recorded.events):
            starts.append(len(self.nodes))
            self.backward = backward.get(i, "")
            self.event(event)
        starts.append(len(self.nodes))
        self.backward = ""
        calls = tuple(
            ModuleCall(path, call, starts[start], starts[end], kind)
            for path, call, start, end, kind in self.recorded.calls
            if end >= 0
        )
        leaves, output_spec = tree.flatten(self.recorded.output)
        output = tuple(self._output(leaf) for leaf in leaves)
        output_spec = self._classed(output_spec, zip(leaves, output, strict=True))
        stores = (*self._buffer_stores(), *self._attribute_stores())
        for (path, name), now in self.beside_caches.items():
            held = Place("held", path, ())
            self.put[held, name] = self._put(held, Change("dict", {}, {name: now}), name)
        for place, change in self.recorded.effects.items():
            for key in () if change.kind == "set" else change.put():
                self.put[place, key] = self._put(place, change, key)
        return check(
            TracePlan(
                self.batch_symbol,
                traced_batch,
                input_spec,
                tuple(self.inputs),
                tuple(self.literals),
                self.values,
                tuple(self.nodes),
                output_spec,
                output,
                calls,
                batches,
                grad_enabled,
                self.model.training,
                captured_by,
                assumption=self._assumption(grad_enabled),
                stores=stores,
                constants=self.constants,
                objects=self.objects,
                given=self.given,
                tied_inputs=tuple(
                    (self.inputs[i][0], self.inputs[j][0])
                    for i in range(len(self.inputs))
                    for j in range(i)
                    if self.input_ids[i] == self.input_ids[j]
                ),
            )
        )

    def _buffer_stores(self) -> Iterator[Store]:
        for path, name, t in self.recorded.stores:
            yield Store(path, "_buffers", name, tree.Spec(tree.LEAF), (self.tensor(t),))

    def _attribute_stores(self) -> Iterator[Store]:
        """What forward assigned to plain attributes without having read them first, or looked for them in vain.

        A module that also changed an attribute after reading it keeps a cache, which is of no use without all its parts:
        nothing of that module is stored. So it is with what forward sets up at its first call.
        """
        reads = self.recorded.read_attributes.keys() | self.recorded.missing
        caching = {path for path, name, _, _ in self.recorded.changed if (path, name) in reads}
        for path, name, _, now in self.recorded.changed:
            plain = isinstance(
                now, (int, torch.SymInt)
            )  # which may be stored though it was read: see `capture.settled`
            if (path, name) not in self.recorded.written and not (plain and path in caching):
                continue
            if path in caching:
                if path in self.snapshot.modules:
                    self.beside_caches[path, name] = now
                continue
            if path in self.snapshot.strays:
                raise UnsupportedError(
                    f"forward assigns attribute {name!r} of {named(path)}, a module that stands in no registry; register it as a "
                    "submodule, or keep what it assigns in a buffer"
                )
            leaves, spec = tree.flatten(now)
            kind = next((cls for cls in map(tree.subclass_of, leaves) if cls is not None), None)
            if kind is not None:
                raise UnsupportedError(
                    f"forward leaves a tensor of class {kind.__name__} in attribute {name!r} of {named(path)}, and a plan keeps "
                    "plain tensors there; keep it as a plain tensor (.as_subclass(torch.Tensor)), or return it"
                )
            if not all(isinstance(leaf, (torch.Tensor, *_SYMBOLIC, *_CONSTANTS)) for leaf in leaves):
                raise UnsupportedError(
                    f"forward leaves a {type(now).__name__} in attribute {name!r} of {named(path)}, which a plan can't "
                    "hold; return it instead, or keep tensors and numbers"
                )
            yield Store(path, "__dict__", name, spec, tuple(self.atom(leaf) for leaf in leaves))

    def _put(self, place: Place, change: Change, key: Any) -> Put:
        """What was put into a container at one key; or the error that says why no plan can put it there."""
        value = change.after[key]
        before = change.before.get(key) if isinstance(change.before, dict) else (*change.before[key : key + 1], None)[0]
        leaves, spec = tree.flatten(value)
        given = {*map(id, self.input_tensors)}  # these are read anew at each call
        if any(id(t) in self.read - given for t in tree.leaves(before) if isinstance(t, torch.Tensor)):
            return refused(
                place, key, "in place of a tensor that it reads, which a plan can't follow; keep it in a buffer"
            )
        if not is_a(key, SIMPLE) and not lasts(key):
            return refused(place, key, f"under a key that is a {type(key).__name__}; use strings and numbers as keys")
        if place.path in self.snapshot.strays:
            return refused(place, key, "of a module that stands in no registry; register it as a submodule")
        if not all(isinstance(leaf, (torch.Tensor, *_SYMBOLIC, *_CONSTANTS)) for leaf in leaves):
            kind = next(type(v).__name__ for v in leaves if not isinstance(v, (torch.Tensor, *_SYMBOLIC, *_CONSTANTS)))
            return refused(
                place, key, f"that a plan can't hold, a {kind}; keep tensors and numbers there, or return it"
            )
        try:
            return spec, tuple(self.atom(leaf) for leaf in leaves)
        except UnsupportedError as error:
            return error

    def _output(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            raise UnsupportedError(
                "forward returns a nested tensor, which a plan can't hold; return to_padded_tensor(0.0, size) of it, and the mask"
            )
        atom = self.atom(leaf)
        if isinstance(atom, Ref) and atom.name in self.objects:
            raise UnsupportedError(
                f"forward returns an object of type {type(leaf).__name__}, which is neither a tensor, a number, a string, "
                "a known container nor one of the inputs; return its parts, or register the type with torch.utils._pytree"
                + (
                    ". Where it is a cache of keys and values, pass use_cache=False"
                    if "Cache" in type(leaf).__name__
                    else ""
                )
            )
        return atom

    def _classed(self, spec: tree.Spec, found: Iterator[tuple[Any, Any]]) -> tree.Spec:
        """The structure of the output, with the classes of the tensors that ops made; those of inputs and state are as they are.

        Ops on tensors of a class may give tensors of that class, so where there are any, plain ones are told, too.
        """
        around = any(tree.subclass_of(t) for e in self.recorded.events for t in tensors_in(e.args))

        def walk(spec: tree.Spec) -> tree.Spec:
            if spec.kind != tree.LEAF:
                return replace(spec, children=tuple([walk(c) for c in spec.children]))
            leaf, atom = next(found)
            made = isinstance(atom, Ref) and atom.name in self.values and self.values[atom.name].kind == "tensor"
            if not made or not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
                return spec
            cls = tree.subclass_of(leaf)
            if cls is None and not (around and type(leaf) is torch.Tensor):
                return spec
            if cls is not None and vars(leaf):
                raise UnsupportedError(
                    f"forward returns a {cls.__name__} with attributes of its own ({', '.join(sorted(vars(leaf)))}), which a plan "
                    "can't hold; return a plain tensor and the attributes beside it, and make the object outside"
                )
            return tree.Spec("subclass", cls or torch.Tensor, children=(spec,))

        return walk(spec)

    def _assumption(self, grad_enabled: bool) -> Assumption:
        looked = self.recorded.looked
        flags = None
        if "requires_grad" in looked:
            flags = tuple((path, p.requires_grad) for path, p in self.model.named_parameters())
        written = any(
            isinstance(a, (torch.dtype, torch.device)) for n in self.nodes for a in (*n.args, *(v for _, v in n.kwargs))
        )
        autocast = None
        if "dtype" in looked:
            autocast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
        layouts = None
        if "layout" in looked:
            layouts = tuple(layout(t) for t in self.input_tensors)
        grad = grad_enabled if looked & {"requires_grad", "grad"} else None
        given = tuple(t.requires_grad for t in self.input_tensors) if flags is not None else None
        return Assumption(grad, flags, autocast, layouts, "dtype" in looked or written, "shape" in looked, given)


def _is_of_all(event: Event) -> bool:
    """Whether the op makes a view of all of a tensor: indexing makes an alias, or a slice of all where sizes are symbols."""
    if event.target is torch.ops.aten.slice.Tensor:
        _, _, start, end, step = event.args
        return start in (None, 0) and isinstance(end, int) and end >= _END and step == 1
    return event.target is torch.ops.aten.alias.default


def _dims_of_ragged(out: Any, args: tuple[Any, ...]) -> Dims:
    """Of what is made of nested tensors all sizes follow data, unless an argument says them, as `output_size` does."""
    if not isinstance(out, torch.Tensor) or out.is_nested:
        return ()
    told = any(isinstance(a, (list, tuple)) and len(a) and tuple(a) == tuple(out.shape) for a in args)
    return (not told,) * out.dim()


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(
        not (a.is_nested or b.is_nested)
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.dtype == b.dtype
    )


__all__ = ["Lowering", "Namespace", "bind", "state_tensors"]
