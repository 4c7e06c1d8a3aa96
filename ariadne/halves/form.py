"""A plan of one side as data, and back: every name, number and op is looked at before anything is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.cut import SplitCandidate
from ariadne.errors import HalfError
from ariadne.guards import SETTERS, SWITCHES
from ariadne.halves import ops
from ariadne.halves.atoms import (
    Classes,
    Reader,
    constant,
    count,
    device,
    flag,
    items,
    mapped,
    name,
    need,
    spec_of,
    table,
    text,
    told,
    told_spec,
)
from ariadne.halves.called import read_object
from ariadne.halves.containers import Container, is_free, read_containers, told_containers
from ariadne.halves.packed import Packed
from ariadne.halves.parameters import told_value
from ariadne.halves.sized import NO_SIZES, told_sizes, with_sizes
from ariadne.halves.together import held_together
from ariadne.halves.weights import Row, row
from ariadne.plan import WHOLE, Apart, Assumption, Batches, Ref, Region, Store, TraceNode, TracePlan, Value

KINDS = ("input", "parameter", "buffer", "constant", "tensor", "sequence", "scalar", "object")
_DEFAULTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # what torch takes as its default dtype
_LISTED = ("append", "grow", "contents")  # how several things at once are put into a list
_SIZES = frozenset(("aten.sym_size.int", WHOLE))  # targets that stand for no op of their own


@dataclass(frozen=True)
class Side:
    """One plan of a half: the ops of one side of a cut, and the cut."""

    plan: TracePlan
    candidate: SplitCandidate


def told_side(side: Side, constants: Mapping[str, Row], objects: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The plan and the cut as JSON-able data; `constants` says where in the file each constant of the plan is.

    `objects` is what the file says of objects that ops call or take; `model` has the containers that forward fills.
    """
    plan, cut = side.plan, side.candidate
    assert plan.apart is not None
    apart, assumed = plan.apart, plan.assumption
    handed = {n for n, o in objects.items() if o[0] == "handed" or (o[0] == "part" and type(o[1]["at"]) is list)}
    return {
        "signature": apart.signature,
        "first": apart.first,
        "shared": [list(s) for s in apart.shared],
        "cast": list(apart.cast),
        "reachable": list(apart.reachable),
        "sized_by_data": sorted(list(s) for s in apart.sized_by_data),
        "cut": {f.name: told(getattr(cut, f.name)) for f in fields(cut)},
        "batch": plan.batch_symbol,
        "traced_batch": plan.traced_batch,
        "batches": [list(r) for r in plan.batches.ranges],
        "grad_enabled": plan.grad_enabled,
        "training": plan.training,
        "captured_by": plan.captured_by,
        "input_spec": spec_of(plan.input_spec, "the inputs"),
        "inputs": [[i, n] for i, n in plan.inputs],
        "literals": [[i, told_value(v)] for i, v in plan.literals],
        "tied_inputs": [list(p) for p in plan.tied_inputs],
        "values": [
            [
                *(v.name, v.kind, told(v.shape), None if v.dtype is None else str(v.dtype), v.device, v.requires_grad),
                *(v.storage, told(v.origin), v.is_view),
            ]
            for v in plan.values.values()
        ],
        "nodes": [_told_node(n, handed) for n in plan.nodes],
        "stores": [
            [
                s.path,
                s.table,
                s.name,
                told_spec(s.spec),
                told_value(s.atoms),
                *(told_containers(s, model) if s.inside else ()),
            ]
            for s in plan.stores
        ],
        "output_spec": spec_of(plan.output_spec, "forward's output"),
        "output": told_value(plan.output),
        "constants": {n: [*constants[n].told(), str(t.device)] for n, t in plan.constants.items()},
        "objects": {**objects},
        "assumption": {f.name: told(getattr(assumed, f.name)) for f in fields(assumed)},
        "sizes": told_sizes(plan),
        **({"number": apart.number, "follows": list(apart.follows)} if apart.number >= 0 else {}),
    }


def _told_node(node: TraceNode, handed: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"op": node.target, "args": told(node.args), "out": list(node.outputs)}
    region = node.region
    if node.within and handed & {*node.reads}:
        found["within"] = list(node.within)
    elif node.within:
        raise HalfError(
            f"a function that forward calls ({node.target.removeprefix('python.')}) reads parameters by itself "
            f"({node.within[0]!r}), which a file can't hold; pass them to it as arguments, or write it in torch's ops"
        )
    if node.kwargs:
        found["kwargs"] = [[k, told(v)] for k, v in node.kwargs]
    if node.module:
        found["module"], found["call"] = node.module, node.call
    if region != Region():
        found["region"] = [region.grad, [[d, on, str(t), c] for d, on, t, c in region.autocast], region.scope]
    if region.switches:
        found["region"].append(_told_set(region.switches))
    if node.writes:
        found["writes"] = list(node.writes)
    if node.may_alias:
        found["may_alias"] = [list(p) for p in node.may_alias]
    if node.is_witness:
        found["witness"] = told(node.witness)
    found |= {key: True for key in ("unpack", "seeded") if getattr(node, key)}
    return found


_PLAN_KEYS = (
    "signature first shared cast reachable sized_by_data cut batch traced_batch batches grad_enabled training captured_by "
    "input_spec inputs literals tied_inputs values nodes stores output_spec output constants objects assumption "
    "sizes number follows"
).split()
_NODE_KEYS = frozenset("op args out kwargs module call region writes may_alias witness unpack seeded within".split())


class SideReader:
    """Reads sides of one file. `state` says which tensors the file has, by (kind, module path, name)."""

    def __init__(
        self, part: str, state: Mapping[tuple[str, str, str], Any], schemas: Mapping[str, Any], classes: Classes,
        spaces: frozenset[str],
    ) -> None:  # fmt: skip
        self.part, self.state, self.classes, self.spaces = part, state, classes, spaces
        self.containers: list[Container] = []  # of all the sides that it has read
        self.ops = {target: self._op(target, schema) for target, schema in schemas.items()}

    def _op(self, target: str, schema: Any) -> Any:
        """The op of that name here, if its schema is what it was where the file was made, or has grown arguments with defaults."""
        op = ops.find(text(target, "an op"), self.spaces)
        was, now = text(schema, "a schema"), ops.schema_of(op)
        if was != now and not _has_grown(was, now):
            raise HalfError(
                f"the op {target!r} is another one here (torch {torch.__version__}): where the half was saved it was {was!r}, "
                f"here it is {now!r}. Save the half with this version of torch"
            )
        return op

    def read(self, data: Any, file_rows: dict[str, tuple[Row, str]], index: int) -> Side:
        """One side; where its constants lie is noted in `file_rows`, under names that start with the number of the plan."""
        d = table({"sizes": NO_SIZES, "number": -1, "follows": [], **mapped(data, "a plan")}, "a plan", _PLAN_KEYS)
        reader = Reader()
        symbol = name(d["batch"], "the batch's symbol")
        rows = [items(v, "a value") for v in items(d["values"], "the values")]
        need(all(len(v) == 9 for v in rows), "a value is malformed")
        reader.batch = symbol
        reader.symbols = {symbol} | {name(v[0], "a value") for v in rows if v[1] == "scalar"}
        values = {v.name: v for v in (self._value(v) for v in rows)}
        need(len(values) == len(rows) and symbol not in values, "a value appears twice")
        objects = {
            name(k, "an object"): read_object(v, self.classes) for k, v in mapped(d["objects"], "the objects").items()
        }
        nodes = tuple(self._node(n, reader, values, objects) for n in items(d["nodes"], "the ops"))
        for node in nodes:
            called = node.target.startswith("python.")
            for i, ref in enumerate(_refs((node.args, tuple(v for _, v in node.kwargs)))):
                thing = objects.get(ref.name)
                right = callable(thing) if called and i == 0 else called or isinstance(thing, (torch.Generator, Packed))
                need(ref.name not in objects or right, f"an op {node.target!r} takes what it can't")
        constants = {}
        for k, v in mapped(d["constants"], "the constants").items():
            parts = items(v, "a constant")
            need(len(parts) == 6 and k in values and values[k].kind == "constant", "a constant is malformed")
            at, where = row(parts[:5]), str(device(parts[5]))
            file_rows[f"{index} {k}"] = at, where
            constants[k] = torch.empty(0)  # until the tensors are read
        candidate = self._candidate(d["cut"])
        apart = Apart(
            self.part,
            count(d["first"], "the first op"),
            text(d["signature"], "a signature"),
            tuple(self._pairs(d["shared"], "a shared parameter")),
            tuple(text(c, "a parameter") for c in items(d["cast"], "parameters")),
            tuple(
                count(i, "a position", most=max(0, len(candidate.live) - 1)) for i in items(d["reachable"], "positions")
            ),
            frozenset(self._sized(s) for s in items(d["sized_by_data"], "sizes")),
            count(d["number"], "a path", -1, 2**31),
            tuple(count(i, "a path", most=2**31) for i in items(d["follows"], "paths")),
        )
        for path, key in apart.shared:
            need(("parameter", path, key) in self.state, f"a shared parameter {key!r} is not in the file")
        stores = tuple(self._store(s, reader) for s in items(d["stores"], "what is stored"))
        input_spec, output_spec = self.classes.spec(d["input_spec"]), self.classes.spec(d["output_spec"])
        output = reader.atom(d["output"])
        need(
            isinstance(output, tuple) and len(output) == output_spec.size,
            "the output has not as many leaves as its structure",
        )
        plan = TracePlan(
            symbol,
            count(d["traced_batch"], "a batch", 0, 2**31),
            input_spec,
            tuple(
                (count(i, "an input", most=2**31), name(n, "an input")) for i, n in self._two(d["inputs"], "an input")
            ),
            tuple((count(i, "an input", most=2**31), reader.atom(v)) for i, v in self._two(d["literals"], "a literal")),
            values,
            nodes,
            output_spec,
            output,
            (),
            Batches.joined(
                (count(a, "a batch", 0, 2**31), count(b, "a batch", a, 2**31))
                for a, b in self._two(d["batches"], "batches")
            ),
            flag(d["grad_enabled"], "grad_enabled"),
            flag(d["training"], "training"),
            text(d["captured_by"], "captured_by"),
            assumption=self._assumption(d["assumption"], reader),
            stores=stores,
            constants=constants,
            objects=objects,
            tied_inputs=tuple(
                (count(i, "an input", most=2**31), count(j, "an input", most=2**31))
                for i, j in self._two(d["tied_inputs"], "inputs")
            ),
            apart=apart,
        )
        plan = with_sizes(plan, d["sizes"])
        return Side(held_together(plan, candidate), candidate)

    @staticmethod
    def _two(value: Any, what: str) -> list[list[Any]]:
        found = [items(v, what) for v in items(value, what)]
        need(all(len(v) == 2 for v in found), f"{what} is malformed")
        return found

    def _pairs(self, value: Any, what: str) -> list[tuple[str, str]]:
        return [(text(a, what), text(b, what)) for a, b in self._two(value, what)]

    @staticmethod
    def _sized(value: Any) -> tuple[str, int]:
        pair = items(value, "a size")
        need(len(pair) == 2, "a size is malformed")
        return name(pair[0], "a value"), count(pair[1], "a dim", most=63)

    def _value(self, data: list[Any]) -> Value:
        label, kind, shape, dtype, where, requires_grad, storage, origin, is_view = data
        found = name(label, "a value")
        need(kind in KINDS, f"the value {found!r} is of no kind")
        sizes = tuple(Reader.dim(s) for s in items(shape, "a shape"))
        need(len(sizes) <= 64, "a value has more than 64 dims")
        steps = Reader().atom(origin)
        need(isinstance(steps, tuple) and len(steps) <= 2, f"the value {found!r} comes from nowhere")
        need(all(type(s) in (str, int) for s in steps), f"the value {found!r} comes from nowhere")
        if kind in ("parameter", "buffer"):
            need(len(steps) == 2 and (kind, *steps) in self.state, f"{found!r} is not in the file")
        need(kind not in ("input", "parameter", "buffer", "constant") or dtype is not None, f"{found!r} has no dtype")
        return Value(
            found,
            kind,
            sizes,
            None if dtype is None else constant("dtype", dtype),
            "" if where == "" else str(device(where)),
            flag(requires_grad, "requires_grad"),
            count(storage, "a storage", -1),
            steps,
            flag(is_view, "is_view"),
        )

    def _node(self, data: Any, reader: Reader, values: dict[str, Value], objects: Mapping[str, Any]) -> TraceNode:
        need(type(data) is dict and {"op", "args", "out"} <= data.keys() <= _NODE_KEYS, "an op is malformed")
        d = data
        target = text(d["op"], "an op")
        region = Region()
        if "region" in d:
            parts = items(d["region"], "a region")
            need(len(parts) in (3, 4), "a region is malformed")
            grad, casts, scope, *set_here = parts
            need(grad is None or type(grad) is bool, "a region is malformed")
            entries = [items(c, "autocast") for c in items(casts, "autocast")]
            need(all(len(c) == 4 for c in entries), "autocast is malformed")
            autocast = tuple(
                (device(e[0]).type, flag(e[1], "autocast"), constant("dtype", e[2]), flag(e[3], "autocast"))
                for e in entries
            )
            switches = self._read_set(reader.atom(set_here[0])) if set_here else ()
            region = Region(grad, autocast, count(scope, "a scope"), switches)
        args = reader.atom(items(d["args"], "arguments"))
        kwargs = tuple((text(k, "a keyword"), reader.atom(v)) for k, v in self._two(d.get("kwargs", []), "keywords"))
        node = TraceNode(
            target,
            args,
            kwargs,
            tuple(name(n, "a result") for n in items(d["out"], "results")),
            flag(d.get("unpack", False), "unpack"),
            text(d.get("module", ""), "a module"),
            count(d.get("call", 1), "a call", most=2**31),
            region,
            tuple(name(n, "what is written") for n in items(d.get("writes", []), "what is written")),
            tuple((name(a, "an alias"), name(b, "an alias")) for a, b in self._two(d.get("may_alias", []), "aliases")),
            flag(d.get("seeded", False), "seeded"),
            reader.atom(d["witness"]) if "witness" in d else None,
            "witness" in d,
            tuple(name(n, "what is read") for n in items(d.get("within", []), "what is read")),
        )
        need(
            all(n in values and values[n].is_state for n in node.within)
            and (not node.within or target.startswith("python.")),
            f"an op {target!r} reads what is no tensor of the model",
        )
        need(
            {*node.reads, *node.outputs} <= {*values, *reader.symbols},
            f"an op {target!r} names a value that is not there",
        )
        refs = _refs((args, tuple(v for _, v in kwargs)))
        need(all(r.name in values for r in refs), f"an op {target!r} names a value that is not there")
        self._check(node, values, objects)
        return node

    def _read_set(self, found: Any) -> tuple[tuple[str, Any], ...]:
        """The settings of torch that forward sets around an op, where the caller allows it: they are the process's."""
        switches = _switches(found)
        for setting, value in switches:
            need(_may_set(setting, value), f"an op is to run where {setting} is {value!r}")
            self.classes.refuse_setting(setting)
        return switches

    def _check(self, node: TraceNode, values: dict[str, Value], objects: Mapping[str, Any]) -> None:
        if node.target == WHOLE:
            need(
                len(node.args) == 2 and not node.kwargs and all(isinstance(a, Ref) for a in node.args),
                "an op is malformed",
            )
        elif node.target == "aten.sym_size.int":
            right = (
                len(node.args) == 2 and isinstance(node.args[0], Ref) and type(node.args[1]) is int and not node.kwargs
            )
            need(right and 0 <= node.args[1] < 64 and len(node.outputs) == 1, "a size is malformed")
            need(values[node.outputs[0]].kind == "scalar", "a size is no number")
        elif node.target.startswith("python."):
            first = node.args[0] if node.args else None
            need(
                isinstance(first, Ref) and values[first.name].kind == "object" and not node.kwargs,
                "a call is malformed",
            )
        else:
            need(node.target in self.ops, f"the op {node.target[:80]!r} has no schema")
            ops.check(node, self.ops[node.target], values, objects)

    def _store(self, data: Any, reader: Reader) -> Store:
        parts = items(data, "what is stored")
        inside = len(parts) > 1 and parts[1] == "held"
        need(
            len(parts) == (8 if inside else 5) and parts[1] in ("_buffers", "__dict__", "held"),
            "what is stored is malformed",
        )
        path, where, key = text(parts[0], "a module"), parts[1], text(parts[2], "an attribute")
        above = path.split(".") if path else []
        need(all(above) and len(above) <= 64, "what is stored is of no module")
        need(
            any(path == p for _, p, _ in self.state) or where != "_buffers" or path == "",
            f"there is no module {path!r}",
        )
        spec, atoms = self.classes.spec(parts[3]), reader.atom(parts[4])
        need(isinstance(atoms, tuple) and len(atoms) == spec.size, "what is stored is malformed")
        sets_flag = where == "__dict__" and key == "training" and spec.kind == "leaf" and type(atoms[0]) is bool
        need(inside or sets_flag or is_free(key), f"nothing is stored at {key[:80]!r}")
        if not inside:
            return Store(path, where, key, spec, atoms)
        how, steps, containers = read_containers(parts[5:], path)
        need(how not in _LISTED or spec.kind in ("list", "tuple"), "what is stored is malformed")
        self.containers += containers
        return Store(path, where, key, spec, atoms, steps, how)

    def _candidate(self, data: Any) -> SplitCandidate:
        d = table(data, "a cut", [f.name for f in fields(SplitCandidate)])
        weight = Reader().atom(d["boundary_bytes"])
        need(isinstance(weight, (int, float)), "a cut is malformed")
        return SplitCandidate(
            count(d["cut"], "a cut", most=2**31),
            tuple(name(n, "a label") for n in items(d["live"], "labels")),
            tuple(name(n, "a label") for n in items(d["written"], "labels")),
            weight,
            count(d["prefix_ops"], "ops"),
            count(d["suffix_ops"], "ops"),
            flag(d["trainable"], "trainable"),
            flag(d["trainable_prefix"], "trainable"),
            text(d["after"], "a module"),
            text(d["reason"], "a reason"),
            text(d["inexact"], "a reason"),
        )

    def _assumption(self, data: Any, reader: Reader) -> Assumption:
        d = table(data, "what it assumes", [f.name for f in fields(Assumption)])

        def flags(value: Any) -> bool:
            return isinstance(value, tuple) and all(type(v) is bool for v in value)

        grad, wanting, autocast, layouts, given = (
            reader.atom(d[k]) for k in ("grad", "requires_grad", "autocast", "layouts", "inputs_require_grad")
        )
        need(grad is None or type(grad) is bool, "what it assumes is malformed")
        need(all(isinstance(v, (tuple, type(None))) for v in (wanting, autocast)), "what it assumes is malformed")
        for pair in wanting or ():
            need(isinstance(pair, tuple) and len(pair) == 2, "what it assumes is malformed")
            path, on = pair
            owner, _, key = text(path, "a parameter").rpartition(".")
            need(type(on) is bool and ("parameter", owner, key) in self.state, "what it assumes is malformed")
        for entry in autocast or ():
            need(isinstance(entry, tuple) and len(entry) == 3, "what it assumes is malformed")
            kind, on, dtype = entry
            need(
                kind in ("cpu", "cuda") and type(on) is bool and isinstance(dtype, torch.dtype),
                "what it assumes is malformed",
            )
        need(
            layouts is None or (isinstance(layouts, tuple) and all(map(flags, layouts))), "what it assumes is malformed"
        )
        need(given is None or flags(given), "what it assumes is malformed")
        need(d["classes"] is None, "what it assumes is malformed")
        return Assumption(
            grad,
            wanting,
            autocast,
            layouts,
            flag(d["strides"], "strides"),
            flag(d["dtypes"], "dtypes"),
            flag(d["shapes"], "shapes"),
            given,
            switches=_switches(reader.atom(d["switches"])),
            order=_names(reader.atom(d["order"])),
        )


def _names(found: Any) -> tuple[str, ...]:
    need(isinstance(found, tuple) and all(type(name) is str for name in found), "what it assumes is malformed")
    return found  # type: ignore[no-any-return]


def _switches(found: Any) -> tuple[tuple[str, Any], ...]:
    """The settings of torch that a half relies on; `HalfError` for one that this torch does not have."""
    need(isinstance(found, tuple), "what it assumes is malformed")
    for pair in found:
        need(isinstance(pair, tuple) and len(pair) == 2, "what it assumes is malformed")
        name, was = pair
        need(type(was) in (bool, int, str, torch.dtype, torch.device), "what it assumes is malformed")
        if text(name, "a setting of torch") not in SWITCHES:
            raise HalfError(f"this half relies on {name}, a setting that torch {torch.__version__} does not have")
    return tuple((str(name), was) for name, was in found)


def _told_set(switches: tuple[tuple[str, Any], ...]) -> Any:
    """The settings of torch that forward sets around an op; `HalfError` for one that a file may not set."""
    for setting, value in switches:
        if not _may_set(setting, value):
            raise HalfError(f"forward sets {setting} by itself, which a file can't hold; set it outside of the model")
    return told(switches)


def _may_set(setting: str, value: Any) -> bool:
    """Whether a file may set this: what a switch that can be set takes, and can't fail over."""
    now = SWITCHES[setting]() if setting in SETTERS else None
    if isinstance(now, torch.dtype):
        return isinstance(value, torch.dtype) and value in _DEFAULTS
    return type(now) is bool and type(value) is bool


def _refs(atoms: Any) -> list[Ref]:
    if isinstance(atoms, Ref):
        return [atoms]
    return [r for a in atoms for r in _refs(a)] if isinstance(atoms, tuple) else []


def _has_grown(was: str, now: str) -> bool:
    """Whether a schema has the arguments that it had, with the same defaults, and then others that have defaults."""
    if was.partition(") -> ")[2] != now.partition(") -> ")[2]:
        return False
    old, new = (s.partition(") -> ")[0] for s in (was, now))
    grown = new.removeprefix(old).split(", ")[1:] if new.startswith(f"{old}, ") else []
    return bool(grown) and all("=" in a or a == "*" for a in grown)


NOTHING = tree.flatten(((), {}))[1]
