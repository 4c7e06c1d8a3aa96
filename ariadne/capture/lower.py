"""Lowering: a recording, whose values are live tensors, becomes a plan, whose values are names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from ariadne import tree
from ariadne.capture.call import OPAQUE, Call, itself, of_rank, of_type
from ariadne.capture.filled import Slots, filled
from ariadne.capture.foreseen import Dims, Foresight, stands_for
from ariadne.capture.outcome import Outcome
from ariadne.capture.refusals import unpatched
from ariadne.capture.scripted import TARGET, bare
from ariadne.capture.state import Snapshot
from ariadne.capture.values import CONSTANTS, SYMBOLIC, Values, memory_of
from ariadne.errors import UnsupportedError
from ariadne.guards import (
    Event,
    Place,
    Put,
    Recording,
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
    Size,
    TraceNode,
    TracePlan,
    Value,
    check,
    layout,
    tensors_in,
    written_arguments,
)

_END = 2**63 - 1


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
        batched: Mapping[int, int],
        fake: FakeTensorMode | None,
        batch_symbol: str,
        symbols: dict[Any, str],
        called: Sequence[str] = (),
    ) -> None:
        self.model, self.recorded = model, recorded
        ops = {e.target._schema.name.split("::")[1] for e in recorded.events if isinstance(e.target, OpOverload)}
        names = Namespace({batch_symbol, *symbols.values()} | HELPERS | ops)
        self.values = Values(recorded, snapshot, state, batched, fake, batch_symbol, symbols, names)
        self.outcome = Outcome(recorded, snapshot, self.values)
        self.put: dict[tuple[Place, Any], Put] = {}
        self.filled = Slots({}, {})
        self.snapshot = snapshot
        self.foresight = Foresight()
        self.at = 0  # the event that is lowered
        self.unforeseen: set[str] = set()  # sizes of which no fake kernel tells whether they follow data
        self.crowd = Counter((e.module, e.call) for e in recorded.events)
        self.readers = Counter(id(t) for e in recorded.events for t in tensors_in(e.args))
        self.readers.update(id(t) for t in tensors_in(tree.flatten(recorded.output)[0]))
        self.written = {
            memory_of(t)
            for e in recorded.events
            if isinstance(e.target, OpOverload)
            for i in written_arguments(e.target, e.args)
            for t in tensors_in(e.args[i])
        }
        self.written.update(memory_of(t) for e in recorded.events if e.effect for t in e.effect.writes)
        for i, leaf in enumerate(leaves):
            self.values.input(i, leaf, called[i] if i < len(called) else f"x{i}")

    def sizes(self, over: Sequence[Size]) -> None:
        """Make plain values of the plan of the sizes that are symbols, each read off the first input that has it."""
        inputs = dict(self.values.inputs)
        for size in over:  # by its own name, even where forward found that it is twice another
            value = self.values.by_name[inputs[size.leaf]]
            shape = (*value.shape[: size.dim], Expr(size.symbol), *value.shape[size.dim + 1 :])
            self.values.by_name[value.name] = replace(value, shape=shape)
            if size.symbol not in self.values.by_name:
                self.values.by_name[size.symbol] = Value(size.symbol, "scalar")
                args = (Ref(value.name), size.dim)
                self.values.nodes.append(TraceNode("aten.sym_size.int", args, (), (size.symbol,)))

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
            return self._whole_op(event, event.target)
        if not isinstance(event.target, OpOverload):
            return self._python_op(event)
        target, args = event.target, event.args
        if target is torch.ops.aten.lift_fresh.default:
            self.values.constant("constant", args[0])  # made anew in each call, so that no one else writes into it
            target, args = torch.ops.aten.clone.default, (args[0], None)
        if (
            target is torch.ops.aten._reshape_alias.default
        ):  # of a view's derivative; by strides, so no file may name it
            target, args = torch.ops.aten.view.default, args[:2]
        if _is_of_all(event):
            target, args = torch.ops.aten.alias.default, (args[0],)
        op = target._schema.name.split("::")[1]
        if self._changes_nothing(event):
            for out in tensors_in(event.out):
                self.values.known_as(out, self.values.tensor(args[0]).name)
            return None
        positional, keywords = self._arguments(target, args)
        writes = tuple(
            dict.fromkeys(
                self.values.tensor(t).name for i in written_arguments(target, args) for t in tensors_in(args[i])
            )
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
        And of an input or of the model's state, if it is of another class: those are given back as they are.
        """
        if _is_of_all(event):
            made = self.values.by_name[self.values.tensor(event.args[0]).name].kind == "tensor"
            return (
                event.region.grad is not False
                and (made or type(event.out) is type(event.args[0]))
                and self.readers[id(event.args[0])] == 1
                and memory_of(event.args[0]) not in self.written
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
                positional.append((self.values.atom(value), is_default))
            elif not is_default:
                keywords.append((arg.name, self.values.atom(value)))
        while positional and positional[-1][1]:
            positional.pop()
        return tuple(a for a, _ in positional), tuple(keywords)

    def _outputs(self, event: Event, node: TraceNode, target: OpOverload, args: tuple[Any, ...], op: str) -> None:
        returns = target._schema.returns
        label = self._result_name(event, op)
        if not returns or event.out is None:
            self.values.nodes.append(node)
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
            if written is not None and self.values.by_name[written].is_state:
                self.values.known_as(out, written)
                names.append(self.values.names.new("_unused"))
                self.values.by_name[names[-1]] = replace(
                    self.values.by_name[written], name=names[-1], kind="tensor", origin=()
                )
                continue
            name = self.values.names.new(label if not unpack else f"{label}_{i}")
            names.append(name)
            if out is None or not isinstance(out, torch.Tensor):
                self.values.by_name[name] = Value(name, "object")
                continue
            self.values.define(name, "tensor", out)
            aliases += [(name, src) for src in self._alias_sources(ret, target, args)]
        self.values.nodes.append(replace(node, outputs=tuple(names), unpack=unpack, may_alias=tuple(aliases)))
        follows = self._follows_data(target, args, outs)
        for name, out, dims in zip(names, outs, follows, strict=True):
            if isinstance(out, torch.Tensor):
                self._data_dependent_sizes(node, name, out, dims)

    def _follows_data(self, target: OpOverload, args: tuple[Any, ...], outs: Sequence[Any]) -> Sequence[Dims]:
        """For each result and dim, whether its size follows data, in a real run; no fake kernel takes nested tensors."""
        if self.values.fake is not None:
            return [()] * len(outs)
        if any(t.is_nested for t in tensors_in((args, tuple(outs)))):
            return [_dims_of_ragged(out, args) for out in outs]
        if self.recorded.reshaped:
            args, outs = self._as_it_was(args, self.at), self._as_it_was(outs, self.at + 1)
        return self.foresight.follows_data(target, args, outs)

    def _as_it_was(self, value: Any, event: int) -> Any:
        """What an op took or gave, with the tensors in it of the sizes that they had before an event."""
        if isinstance(value, (list, tuple)):
            return [self._as_it_was(v, event) for v in value]
        return self.recorded.before(value, event) if isinstance(value, torch.Tensor) else value

    def _written_source(self, ret: Any, target: OpOverload, args: tuple[Any, ...]) -> str | None:
        if ret.alias_info is None or not ret.alias_info.is_write:
            return None
        for arg, value in zip(target._schema.arguments, args, strict=True):
            same = arg.alias_info is not None and arg.alias_info.before_set & ret.alias_info.before_set
            if same and isinstance(value, torch.Tensor):
                return self.values.tensor(value).name
        return None

    def _alias_sources(self, ret: Any, target: OpOverload, args: tuple[Any, ...]) -> list[str]:
        if ret.alias_info is None:
            return []
        sets = ret.alias_info.before_set | ret.alias_info.after_set
        return [
            self.values.tensor(t).name
            for arg, value in zip(target._schema.arguments, args, strict=True)
            if arg.alias_info is not None and (arg.alias_info.before_set | arg.alias_info.after_set) & sets
            for t in tensors_in(value)
        ]

    def _scalar(self, node: TraceNode, label: str, out: Any) -> None:
        name = self.values.new(label, "scalar")
        if isinstance(out, SYMBOLIC):
            expr = out.node.expr
            if (
                self.values.symbols.get(expr) == self.values.batch_symbol
            ):  # known beforehand, and looked at again in each call
                self.values.nodes.append(
                    replace(node, outputs=(name,), witness=Expr(self.values.batch_symbol), is_witness=True)
                )
                return
            if expr.is_Symbol:
                self.values.symbols[expr] = name
            self.values.nodes.append(replace(node, outputs=(name,)))
        else:
            self.values.nodes.append(replace(node, outputs=(name,), witness=out, is_witness=True))

    def _data_dependent_sizes(self, node: TraceNode, name: str, out: torch.Tensor, follows: Dims) -> None:
        """Name the sizes that follow data, or of which nothing tells whether they do; `follows` is that of a real run."""
        if out.is_nested:
            return
        out = self.recorded.before(out, self.at + 1)
        for d, size in enumerate(out.shape):
            if d < len(follows) and follows[d] is not False:
                # a real run can't show whether Python looked at it: what followed holds for this size
                symbol = self.values.new(f"{name}_size{d}", "scalar")
                if follows[d] is None:
                    self.unforeseen.add(symbol)
                self.values.nodes.append(
                    TraceNode("aten.sym_size.int", (Ref(name), d), (), (symbol,), module=node.module, call=node.call,
                              witness=int(size), is_witness=True)
                )  # fmt: skip
            expr = size.node.expr if isinstance(size, torch.SymInt) else None
            if expr is not None and expr.is_Symbol and expr not in self.values.symbols:
                symbol = self.values.new(f"{name}_size{d}", "scalar")
                self.values.symbols[expr] = symbol
                self.values.nodes.append(
                    TraceNode("aten.sym_size.int", (Ref(name), d), (), (symbol,), module=node.module, call=node.call)
                )
        self.values.by_name[name] = replace(self.values.by_name[name], shape=self.values.dims(out))

    def _taken_out(self, event: Event) -> None:
        """Python took all of a tensor's data: what it did with it holds only while the data are the same."""
        source, data = event.args
        kept = self.values.constant("taken", data)
        args = (self.values.tensor(source), kept)
        self.values.nodes.append(TraceNode(WHOLE, args, (), (), module=event.module, call=event.call, is_witness=True))

    def _python_op(self, event: Event) -> None:
        cls = event.target
        args = tuple(self._opaque_argument(a, cls) for a in event.args)
        callable_name = self.values.names.new(cls.__name__)
        self.values.objects[callable_name] = cls.apply
        self.values.by_name[callable_name] = Value(callable_name, "object")
        unpack = isinstance(event.out, tuple)
        outs = list(event.out) if unpack else [event.out]
        if not all(isinstance(o, torch.Tensor) for o in outs):
            raise UnsupportedError(
                f"{cls.__name__}.apply returns something that is not a tensor, which a plan can't hold; return tensors alone"
            )
        reads = tuple(a.name for a in args if isinstance(a, Ref))
        hidden = self.values.registered(event.effect.writes if event.effect else (), "parameter", "buffer")
        by_itself = self.values.registered(event.within, "parameter")
        names = []
        for i, out in enumerate(outs):
            names.append(
                self.values.names.new(self._result_name(event, f"{cls.__name__}_{i}" if unpack else cls.__name__))
            )
            self.values.define(names[-1], "tensor", out)
        node = TraceNode(
            f"python.{cls.__module__}.{cls.__qualname__}",
            (Ref(callable_name), *args),
            (),
            tuple(names),
            unpack,
            event.module,
            event.call,
            event.region,
            writes=(*(r for r in reads if self.values.by_name[r].kind == "tensor"), *hidden),
            may_alias=tuple(
                (n, r) for n, out in zip(names, outs, strict=True) for r in reads if self._may_be(out, r, event)
            ),
            seeded=True,
            within=tuple(dict.fromkeys(n for n in (*by_itself, *hidden) if n not in reads)),
        )
        self.values.nodes.append(node)
        for name, out in zip(names, outs, strict=True):
            self._data_dependent_sizes(node, name, out, (None,) * out.dim() if self.values.fake is None else ())

    def _may_be(self, out: torch.Tensor, name: str, event: Event) -> bool:
        """Whether what a function gave may share memory with an argument: with a parameter where it does, and with any other."""
        value = self.values.by_name[name]
        if value.kind != "parameter":
            return value.dtype is not None
        given = [t for t in tensors_in(event.args) if self.values.tensor(t).name == name]
        fake = self.values.fake
        return any((memory_of(t) if fake is None else stands_for(fake, t)) == memory_of(out) for t in given)

    def _whole_op(self, event: Event, call: Call) -> None:
        """One op that gives every leaf of the result; of those that are no tensors, each is held against what it was."""
        label, effect = call.name, event.effect
        assert effect is not None
        scripted = isinstance(call.function, torch.jit.ScriptFunction)
        target = f"{TARGET if scripted else OPAQUE}{label}"
        args = tuple(self.values.atom(a) for a in event.args)
        writes = tuple(dict.fromkeys(self.values.tensor(t).name for t in effect.writes))
        aliased = tuple(dict.fromkeys(self.values.tensor(t).name for t in effect.aliases))
        within = self.values.registered(event.within, "parameter", "buffer")
        unpack = not call.one
        names: list[str] = []
        for i, out in enumerate(event.out):
            names.append(self.values.names.new(self._result_name(event, f"{label}_{i}" if unpack else label)))
            if isinstance(out, torch.Tensor):
                self.values.define(names[-1], "tensor", out)
            else:
                self.values.by_name[names[-1]] = Value(names[-1], "scalar")
        callee = self.values.object(bare(call) if scripted else call)
        node = TraceNode(target, (callee, *args), (), tuple(names), unpack, event.module, event.call, event.region, writes,
                         tuple((n, a) for n in names for a in aliased), effect.draws, within=within)  # fmt: skip
        self.values.nodes.append(node)

        def hold(name: str, by: Any, was: Any) -> None:
            held = self.values.new(f"{name}_held", "scalar")
            self.values.nodes.append(
                TraceNode(target, (self.values.object(by), Ref(name)), (), (held,), module=event.module,
                          call=event.call, witness=was, is_witness=True)
            )  # fmt: skip

        for name, out in zip(names, event.out, strict=True):
            if not isinstance(out, torch.Tensor):
                hold(name, itself, self.values.atom(out))
                continue
            known: bool | None = True  # its shapes are its own affair
            if not scripted:  # of a part they are asked in each call
                known, kind = None, of_type if "dtype" in self.recorded.looked else of_rank
                hold(name, kind, kind(out))
            self._data_dependent_sizes(node, name, out, (known,) * out.dim() if self.values.fake is None else ())

    def _opaque_argument(self, value: Any, cls: Any) -> Any:
        if isinstance(value, (torch.Tensor, *CONSTANTS, *SYMBOLIC)):
            return self.values.atom(value)
        if any(isinstance(v, (torch.Tensor, *SYMBOLIC)) for v in tree.leaves(value)):
            raise UnsupportedError(
                f"{cls.__name__}.apply takes tensors inside a container, which a plan can't hold; pass them one by one"
            )
        return self.values.object(unpatched(value))

    def plan(
        self, input_spec: tree.Spec, traced_batch: int, batches: Batches, captured_by: str, grad_enabled: bool
    ) -> TracePlan:
        """The plan of the whole recording, with the ops whose results nothing uses.

        What was put into containers is not in it yet, but in `put`.
        """
        starts = []
        backward = {i: where for start, end, where in self.recorded.backwards for i in range(start, end)}
        for i, event in enumerate(self.recorded.events):
            starts.append(len(self.values.nodes))
            self.values.backward, self.at = backward.get(i, ""), i
            self.event(event)
        starts.append(len(self.values.nodes))
        self.values.backward = ""
        calls = tuple(
            ModuleCall(path, call, starts[start], starts[end], kind)
            for path, call, start, end, kind in self.recorded.calls
            if end >= 0
        )
        output_spec, output = self.outcome.output()
        stores = (*self.outcome.buffer_stores(), *self.outcome.attribute_stores())
        self.put = self.outcome.put()
        self.filled = filled(self.recorded, self.values, self.snapshot)
        return check(
            TracePlan(
                self.values.batch_symbol,
                traced_batch,
                input_spec,
                tuple(self.values.inputs),
                tuple(self.values.literals),
                self.values.by_name,
                self.values.ops(grad_enabled),
                output_spec,
                output,
                calls,
                batches,
                grad_enabled,
                self.model.training,
                captured_by,
                assumption=self._assumption(grad_enabled),
                stores=stores,
                constants=self.values.constants,
                objects=self.values.objects,
                given=self.values.given,
                tied_inputs=tuple(
                    (self.values.inputs[i][0], self.values.inputs[j][0])
                    for i in range(len(self.values.inputs))
                    for j in range(i)
                    if self.values.input_ids[i] == self.values.input_ids[j]
                ),
            )
        )

    def _assumption(self, grad_enabled: bool) -> Assumption:
        looked = self.recorded.looked
        flags = None
        if "requires_grad" in looked:
            held = (*self.model.named_parameters(), *self.model.named_buffers())
            flags = tuple((path, t.requires_grad) for path, t in held)
        written = any(
            isinstance(a, (torch.dtype, torch.device))
            for n in self.values.nodes
            for a in (*n.args, *(v for _, v in n.kwargs))
        )
        autocast = None
        if "dtype" in looked:
            autocast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
        layouts = None
        if "layout" in looked:
            layouts = tuple(layout(t, "strides" in looked) for t in self.values.input_tensors)
        grad = grad_enabled if looked & {"requires_grad", "grad"} else None
        given = tuple(t.requires_grad for t in self.values.input_tensors) if flags is not None else None
        strides, dtypes = "strides" in looked, "dtype" in looked or written
        return Assumption(grad, flags, autocast, layouts, strides, dtypes, "shape" in looked, given)


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
