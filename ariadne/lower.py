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
from ariadne.errors import UnsupportedError, named
from ariadne.expr import Expr
from ariadne.held import DEPTH, LEAVES, Attribute, held, is_a, is_followed, is_opaque
from ariadne.names import HELPERS, Namespace
from ariadne.plan import (
    Assumption,
    Batches,
    ModuleCall,
    Ref,
    Store,
    TraceNode,
    TracePlan,
    Value,
    check,
    layout,
)
from ariadne.recorder import WHOLE, Event, Recording, bind, simple, tensors_in, written_arguments
from ariadne.state import Snapshot

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
    """One recording on its way to a plan. `symbols` maps sympy symbols to names (the batch to its own)."""

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
        self.backward = ""
        self.crowd: dict[tuple[str, int], int] = {}
        for e in recorded.events:
            self.crowd[e.module, e.call] = self.crowd.get((e.module, e.call), 0) + 1
        leaves_out, _ = tree.flatten(recorded.output)
        self.readers = Counter(id(t) for e in recorded.events for t in tensors_in(e.args))
        self.readers.update(id(t) for t in tensors_in(leaves_out))
        self.written = {
            self._storage_key(t)
            for e in recorded.events
            if isinstance(e.target, OpOverload)
            for i in written_arguments(e.target, e.args)
            for t in tensors_in(e.args[i])
        }
        for i, leaf in enumerate(leaves):
            self._input(i, leaf)

    def _input(self, i: int, leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor) or not (simple(leaf) or isinstance(leaf, complex)):
            self.input_ids.append(id(leaf) if isinstance(leaf, torch.Tensor) else -i - 1)
        if isinstance(leaf, torch.Tensor):
            name = self.names.new(f"x{i}" if i else "x")
            self.inputs.append((i, name))
            self.input_tensors.append(leaf)
            self._define(name, "input", leaf, (i,))
            if i in self.batched:
                value = self.values[name]
                self.values[name] = replace(value, shape=(Expr(self.batch_symbol), *value.shape[1:]))
        elif simple(leaf) or isinstance(leaf, complex):
            self.literals.append((i, leaf))
        else:
            name = self.names.new(f"object{i}")
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
        source = getattr(value, "__ariadne_expr__", None)
        if source is not None:
            return Expr(source)
        if isinstance(value, (list, tuple)):
            return tuple(self.atom(v) for v in value)
        if isinstance(value, _CONSTANTS):
            return value
        if id(value) in self.leaf_objects:
            return Ref(self.leaf_objects[id(value)])
        return self._object(value)

    def _object(self, value: Any) -> Ref:
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
        by_data = self.fake is None and _sized_by_data(target, args)
        for name, out in zip(names, outs, strict=True):
            if isinstance(out, torch.Tensor):
                self._data_dependent_sizes(node, name, out, by_data)

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
            if expr.is_Symbol:
                self.symbols[expr] = name
            self.nodes.append(replace(node, outputs=(name,)))
        else:
            self.nodes.append(replace(node, outputs=(name,), witness=out, is_witness=True))

    def _data_dependent_sizes(self, node: TraceNode, name: str, out: torch.Tensor, by_data: bool) -> None:
        for d, size in enumerate(out.shape):
            if by_data:  # a real run can't show whether Python looked at it: what followed holds for this size
                symbol = self.names.new(f"{name}_size{d}")
                self.values[symbol] = Value(symbol, "scalar")
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
        self.nodes.append(
            TraceNode(
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
        )

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
        """The plan of the whole recording, with the ops whose results nothing uses."""
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
        stores = (*self._buffer_stores(), *self._attribute_stores())
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
            if path in caching or (path, name) not in self.recorded.written:
                continue
            if path in self.snapshot.strays:
                raise UnsupportedError(
                    f"forward assigns attribute {name!r} of {named(path)}, a module that stands in no registry; register it as a "
                    "submodule, or keep what it assigns in a buffer"
                )
            leaves, spec = tree.flatten(now)
            if not all(isinstance(leaf, (torch.Tensor, *_SYMBOLIC, *_CONSTANTS)) for leaf in leaves):
                raise UnsupportedError(
                    f"forward leaves a {type(now).__name__} in attribute {name!r} of {named(path)}, which a plan can't "
                    "hold; return it instead, or keep tensors and numbers"
                )
            yield Store(path, "__dict__", name, spec, tuple(self.atom(leaf) for leaf in leaves))

    def _output(self, leaf: Any) -> Any:
        atom = self.atom(leaf)
        if isinstance(atom, Ref) and atom.name in self.objects:
            raise UnsupportedError(
                f"forward returns an object of type {type(leaf).__name__}, which is neither a tensor, a number, a string, "
                "a known container nor one of the inputs; return its parts, or register the type with torch.utils._pytree"
            )
        return atom

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


_UNTAGGED = ("aten::where", "aten::nonzero_numpy", "aten::argwhere")


def _is_of_all(event: Event) -> bool:
    """Whether the op makes a view of all of a tensor: indexing makes an alias, or a slice of all where sizes are symbols."""
    if event.target is torch.ops.aten.slice.Tensor:
        _, _, start, end, step = event.args
        return start in (None, 0) and isinstance(end, int) and end >= _END and step == 1
    return event.target is torch.ops.aten.alias.default


def _sized_by_data(op: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether the sizes of an op's results depend on the data of its arguments."""
    if op is torch.ops.aten.index.Tensor:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if op._schema.name in _UNTAGGED and len(op._schema.arguments) == 1:
        return True
    return torch.Tag.dynamic_output_shape in op.tags


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(
        a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.dtype == b.dtype
    )


__all__ = ["Lowering", "Namespace", "bind", "state_tensors"]
