"""The plan: a forward as frozen data - values, ops over them, the output, and what the capture relied on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ariadne import tree
from ariadne.errors import named
from ariadne.plan.atoms import as_data, digest, show, show_tree, uses
from ariadne.plan.batches import Batches
from ariadne.plan.expr import Expr
from ariadne.plan.names import one_line
from ariadne.plan.sized import Size

Dim = int | Expr


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of one value.

    `kind`: input, parameter, buffer, attribute (a tensor in a plain attribute), constant (outside of the model, or made in forward
    from no tensor), tensor, sequence (a list whose length may depend on the batch), scalar (a Python number) or object.
    `origin`: the position among the input leaves; or the module's path, then the keys that lead to the tensor; or empty.
    `storage`: values with the same number shared memory when the forward ran. `is_view`: to autograd it was a view at capture, of a
    value of the plan or of a tensor that a composite op, such as einsum, keeps to itself. `is_outside`: others may write into it.
    """

    name: str
    kind: str
    shape: tuple[Dim, ...] = ()
    dtype: torch.dtype | None = None
    device: str = ""
    requires_grad: bool = False
    storage: int = -1
    origin: tuple[Any, ...] = ()
    is_view: bool = False
    is_outside: bool = False

    @property
    def is_state(self) -> bool:
        """Whether it is read from the model."""
        return self.kind in ("parameter", "buffer", "attribute")

    def stands_in(self, places: Container[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Those of the places, each as `Store.stands_at` has it, in which this tensor of the model stands."""
        steps = tuple(key[1] if type(key) is tuple and key[:1] == (".",) else key for key in self.origin)
        for n in range(2, len(steps) + 1) if self.is_state else ():
            if steps[:n] in places:
                yield steps[:n]

    @property
    def differentiable(self) -> bool:
        """Whether it is a tensor of a type that can have gradients."""
        return self.dtype is not None and (self.dtype.is_floating_point or self.dtype.is_complex)

    @property
    def is_nested(self) -> bool:
        """Whether it is a nested tensor, whose sizes are data: it has neither dtype nor shape here, so nothing relies on them."""
        return self.kind == "tensor" and self.dtype is None and not self.shape

    def describe(self) -> str:
        """Its type as the printed plan shows it: `f32[B, 64]`."""
        if self.dtype is None:
            return "nested" if self.is_nested else self.kind
        return f"{short_dtype(self.dtype)}[{', '.join(str(d) for d in self.shape)}]"

    def nbytes(self, env: Mapping[str, Any]) -> int:
        """Bytes of a dense tensor of this type, where the batch and other symbols are as in `env`; unknown sizes count 1."""
        if self.dtype is None:
            return 0
        total = self.dtype.itemsize
        for d in self.shape:
            total *= d if isinstance(d, int) else int(d.evaluate(env)) if d.names <= env.keys() else 1
        return total


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def short_dtype(dtype: torch.dtype) -> str:
    """`torch.float32` as `f32`."""
    text = str(dtype).removeprefix("torch.")
    head = text.rstrip("0123456789")
    return _SHORT[head] + text[len(head) :] if head in _SHORT and head != text else text


@dataclass(frozen=True, slots=True)
class Region:
    """What was switched inside forward, against the mode of the caller, when an op ran.

    `grad`: True or False where forward itself switched gradients; `autocast`: (device type, enabled, dtype, cache)
    for each device whose autocast forward itself switched; `scope` tells one entry into autocast from the next, since each
    has a cache of cast weights of its own. `switches`: settings of torch that forward itself set, by the words for them.
    """

    grad: bool | None = None
    autocast: tuple[tuple[str, bool, torch.dtype, bool], ...] = ()
    scope: int = 0
    switches: tuple[tuple[str, Any], ...] = ()


PLAIN = Region()


@dataclass(frozen=True, slots=True)
class TraceNode:
    """One op: `outputs = target(*args, **kwargs)`.

    `target` names an ATen overload (`aten.conv2d.default`), or `python.<name>` for a callable kept in `plan.objects`.
    `args` and `kwargs` are trees of tuples over `Ref`, `Expr` and constants. Where `unpack` is false the op has one
    output; else it returns a sequence of known length, unpacked into `outputs`.
    `writes`: values whose memory it writes. `witness`: what it returned at capture, where Python looked at that.
    `within`: parameters that the Python of its callable reads by itself. `reads`: the names of the values and symbols that it
    uses, each once, in order.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[str, ...] = ()
    unpack: bool = False
    module: str = ""
    call: int = 1
    region: Region = PLAIN
    writes: tuple[str, ...] = ()
    may_alias: tuple[tuple[str, str], ...] = ()
    seeded: bool = False
    witness: Any = None
    is_witness: bool = False
    within: tuple[str, ...] = ()
    reads: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = dict.fromkeys(uses((self.args, tuple(v for _, v in self.kwargs))))
        object.__setattr__(self, "reads", tuple(found | dict.fromkeys(self.within)))

    @property
    def name(self) -> str:
        """The name of its first output."""
        return self.outputs[0] if self.outputs else self.target

    def has_kernel(self, key: str) -> bool:
        """Whether it is an op of torch's dispatcher with a kernel of its own for a key of it, as `AutocastCPU`."""
        space, _, rest = self.target.partition(".")
        name = f"{space}::{rest.removesuffix('.default')}"
        return space not in ("python", "ariadne") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of one module: its ops are `nodes[start:end]`, those of its children included."""

    path: str
    call: int
    start: int
    end: int
    kind: str


@dataclass(frozen=True, slots=True)
class Store:
    """Something that forward leaves behind: `atoms`, in the structure `spec`, are put at `name` of the module `path`.

    `table` says where: `_buffers` for a buffer replaced by assignment, `__dict__` for a plain attribute; and for what is put
    into a container, `held` for one that an attribute holds, `input` for one that is handed in, `outside` for one that the
    object `path` of the plan holds. There, `steps` lead to it: from the module, from (args, kwargs), from that object; and
    `name` says it in words. `how` is set (at the last of the steps), append, grow (append, to a new list where there is none),
    contents (in place of all that a list holds) or remove. `needs`: what goes into the same container before.
    """

    path: str
    table: str
    name: str
    spec: tree.Spec
    atoms: tuple[Any, ...]
    steps: tuple[Any, ...] = ()
    how: str = "set"
    needs: tuple[Any, ...] = ()

    @property
    def where(self) -> str:
        """Where it is put, in words."""
        return self.name if self.inside else f"{self.name!r} of {named(self.path)}"

    @property
    def container(self) -> tuple[Any, ...]:
        """The steps to the container that it goes into."""
        return self.steps[:-1] if self.how in ("set", "remove", "grow") else self.steps

    @property
    def stands_at(self) -> tuple[Any, ...]:
        """The module and the steps in it to where this goes; none where that is not in the model."""
        if self.table == "held":
            return (self.path, *self.steps)
        return () if self.inside else (self.path, self.name)

    @property
    def inside(self) -> bool:
        """Whether it goes into a container."""
        return self.table in ("held", "input", "outside")


@dataclass(frozen=True, slots=True)
class Assumption:
    """What the model's Python looked at besides tensors' shapes, so that the plan holds only where it is the same.

    A field is None where Python did not look. `grad`: gradients enabled; `requires_grad`: flags of the parameters, by
    path, and `inputs_require_grad` those of the inputs; `autocast`: (device type, enabled, dtype) per device; `layouts`: memory
    formats of the inputs, and with `strides` whether their strides follow from their sizes. `dtypes` is true where Python read a
    dtype, or a dtype or device is written in the plan, and `shapes` where it read the shape of a parameter or buffer: then
    `model.to(...)`, or another tensor there, calls for a new capture.
    `classes`: those of the tensor inputs, where any was of a subclass of torch's; inputs of another call for a new capture.
    `switches`: settings of torch that it asked for, and how they stood; with the default dtype and device, which always count.
    `order`: the names of inputs that go into forward's `**kwargs`, where there are several: it may walk through them.
    """

    grad: bool | None = None
    requires_grad: tuple[tuple[str, bool], ...] | None = None
    autocast: tuple[tuple[str, bool, torch.dtype], ...] | None = None
    layouts: tuple[tuple[bool, ...], ...] | None = None
    strides: bool = False
    dtypes: bool = False
    shapes: bool = False
    inputs_require_grad: tuple[bool, ...] | None = None
    classes: tuple[type | None, ...] | None = None
    switches: tuple[tuple[str, Any], ...] = ()
    order: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Apart:
    """What a plan that holds one part of another's ops has to know of that one.

    `part`: prefix or suffix. `first`: how many ops came before. `signature`: that of the whole plan. `shared`: its parameters, as
    (module path, name), that another part reads too; `cast` those of them that autocast may cast for both. `reachable`: the
    positions of the crossing values that may share memory with an input or an output of the model; `sized_by_data`: (label, dim)
    of the crossing sizes that follow data. `number`: which of the plans of a file it is, where one's suffix may follow another's
    prefix (else -1), and `follows` the numbers of those that its suffix may follow.
    """

    part: str
    first: int
    signature: str
    shared: tuple[tuple[str, str], ...] = ()
    cast: tuple[str, ...] = ()
    reachable: tuple[int, ...] = ()
    sized_by_data: frozenset[tuple[str, int]] = frozenset()
    number: int = -1
    follows: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class TracePlan:
    """A captured forward: `nodes` over `values`, from input leaves to the output tree, for every batch in `batches`.

    `inputs` names the input leaves that are tensors, by their position among all leaves; `literals` are the other leaves, which
    calls must repeat. `output_spec` with `output` (a tuple of `Ref`, `Expr` or constants) gives the result. `stores`: what
    forward assigns to buffers and attributes, and that outlives the call. `given`: the inputs that are neither tensors nor
    plain values, which calls must repeat. `tied_inputs`: pairs of input leaves that were one and the same tensor. `captured_by`
    is symbolic, observed or observed-per-batch; `not_captured_by` says why the earlier ways did not serve. `apart`: where it
    holds one part of another plan's ops alone, what it has to know of that plan. `sizes`: the dims of inputs that were declared to
    change, `traced_sizes` what they were when it was captured, by symbol. A shape has the symbol where the plan serves other sizes,
    too: those at which all `conditions`, which read the batch and the symbols, are true.
    """

    batch_symbol: str
    traced_batch: int
    input_spec: tree.Spec
    inputs: tuple[tuple[int, str], ...]
    literals: tuple[tuple[int, Any], ...]
    values: Mapping[str, Value]
    nodes: tuple[TraceNode, ...]
    output_spec: tree.Spec
    output: tuple[Any, ...]
    calls: tuple[ModuleCall, ...]
    batches: Batches
    grad_enabled: bool
    training: bool
    captured_by: str
    not_captured_by: tuple[tuple[str, str], ...] = ()
    assumption: Assumption = Assumption()
    excluded: tuple[str, ...] = ()
    stores: tuple[Store, ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    objects: Mapping[str, Any] = field(default_factory=dict, repr=False)
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)
    tied_inputs: tuple[tuple[int, int], ...] = ()
    apart: Apart | None = None
    sizes: tuple[Size, ...] = ()
    traced_sizes: tuple[tuple[str, int], ...] = ()
    conditions: tuple[Expr, ...] = ()

    @cached_property
    def traced(self) -> dict[str, int]:
        """The batch and the other sizes that it was captured with, by symbol."""
        return {self.batch_symbol: self.traced_batch, **dict(self.traced_sizes)}

    @cached_property
    def batched(self) -> dict[int, int]:
        """Which input leaves have the batch, and along which dim."""
        symbol = Expr(self.batch_symbol)
        shapes = {i: self.values[name].shape for i, name in self.inputs}
        return {i: shape.index(symbol) for i, shape in shapes.items() if symbol in shape}

    @property
    def first(self) -> int:
        """The index of its first op: not 0 where it holds a later part of another plan's ops, which keep their numbers."""
        return 0 if self.apart is None else self.apart.first

    def between(self, start: int, stop: int) -> tuple[TraceNode, ...]:
        """The ops of these indices."""
        return self.nodes[start - self.first : stop - self.first]

    @cached_property
    def definitions(self) -> dict[str, int]:
        """For each value that an op makes, the index of that op."""
        return {name: i for i, node in enumerate(self.nodes, self.first) for name in node.outputs}

    @cached_property
    def questions(self) -> tuple[tuple[int, TraceNode], ...]:
        """The ops by which Python reads numbers out of tensors, with their indices."""
        return tuple((i, node) for i, node in enumerate(self.nodes, self.first) if node.is_witness)

    def node(self, name: str) -> TraceNode:
        """The op that makes the value `name`."""
        return self.nodes[self.definitions[name] - self.first]

    def stored_before(self, cut: int, store: Store) -> bool:
        """Whether a prefix of so many ops does a store: it has all that the store needs. Else the suffix does it.

        What carries gradients while the model trains is the suffix's, where the loss may add it. What goes into a container that is
        handed in is the prefix's: no cut that lies before is safe.
        """
        return store.table == "input" or cut >= self.stored_from(store)

    def stored_from(self, store: Store) -> int:
        """The least number of ops with which a prefix does a store; that of all ops where only a suffix may."""
        made = 1 + max((self.definitions.get(n, -1) for n in uses((store.atoms, store.needs))), default=-1)
        carries = self.training and self.grad_enabled and store.table != "input"
        names = {*uses((store.atoms, store.needs))} if carries else set()
        if any(n in self.definitions and self.values[n].requires_grad for n in names):
            return self.first + len(self.nodes)
        return made

    @property
    def keeps_inputs(self) -> bool:
        """Whether something is put into a container that is handed in."""
        return any(store.table == "input" for store in self.stores)

    @cached_property
    def stored_from_sizes(self) -> frozenset[tuple[str, str]]:
        """The path and name of each attribute in which forward stores what follows from sizes alone."""
        return frozenset((s.path, s.name) for s in self.stores if not s.inside and self._follows_from_sizes(s))

    def _follows_from_sizes(self, store: Store) -> bool:
        """Whether what is stored is the same in every call of these sizes: no input, state or random number is in it."""
        pending, seen = [*uses(store.atoms)], set[str]()
        while pending:
            name = pending.pop()
            value = self.values.get(name)
            if name in seen or value is None or value.kind == "constant":
                continue
            seen.add(name)
            if name not in self.definitions:
                return False
            held = {n for n, v in self.values.items() if v.storage == value.storage and v.storage >= 0}
            for node in (self.node(name), *(n for n in self.nodes if held & {*n.writes})):
                if node.seeded or node.witness is not None:
                    return False
                pending += node.reads
        return True

    @cached_property
    def signature(self) -> str:
        """A digest of everything that decides what the plan computes; the same in every process, and on every device.

        The device of the inputs is any: halves that are prepared on an edge's CPU and a server's GPU are halves of one split,
        unless forward runs other ops there, or makes tensors on the CPU wherever its inputs are. Which values were views is left
        out, too: it decides how gradients are added up, and not what the ops are.
        """
        if self.apart is not None:
            return self.apart.signature
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-able data, to be kept, read and compared; `signature` is its digest.

        Nothing reads it back: constants appear by digest, Python callables and containers by name, and the device of the inputs is
        "any". Prepare again instead.
        """
        home = self.values[self.inputs[0][1]].device

        def told(atom: Any) -> Any:
            return as_data(atom, home)

        def switched(region: Region) -> Any:
            return [["any" if kind == home.partition(":")[0] else kind, *told(rest)] for kind, *rest in region.autocast]

        return {
            "version": 2,
            "batch": [self.batch_symbol, [list(r) for r in self.batches.ranges]],
            "input_spec": str(self.input_spec),
            "inputs": [[i, n] for i, n in self.inputs],
            "literals": [[i, told(v)] for i, v in self.literals],
            "values": [
                [
                    v.name,
                    v.kind,
                    told(v.shape),
                    told(v.dtype),
                    "any" if v.device == home else v.device,
                    v.requires_grad,
                    told(v.origin),
                ]
                for v in self.values.values()
            ],
            "nodes": [
                [
                    *(n.target, told(n.args), told(n.kwargs), list(n.outputs), n.unpack, n.module, n.call),
                    *(told(n.region.grad), switched(n.region), n.region.scope, told(n.witness)),
                    *([[k, str(v)] for k, v in n.region.switches]),
                ]
                for n in self.nodes
            ],
            "stores": [
                [s.path, s.table, s.name, str(s.spec), told(s.atoms), *([s.how, repr(s.steps)] if s.inside else ())]
                for s in self.stores
            ],
            "output_spec": str(self.output_spec),
            "output": told(self.output),
            "constants": {k: digest(v) for k, v in self.constants.items()},
            "grad": self.assumption.grad,
            **(
                {"sizes": [s.told for s in self.sizes], "conditions": [c.source for c in self.conditions]}
                if self.sizes
                else {}
            ),
        }

    def unmet(self, sizes: Mapping[str, int]) -> str:
        """The first condition that does not hold where the batch and the other sizes, by symbol, are these; empty if all do."""
        return next((condition.source for condition in self.conditions if not condition.holds(sizes)), "")

    @cached_property
    def over(self) -> tuple[str, ...]:
        """The symbols, beside the batch's, in which its shapes are written: it serves other sizes, too."""
        named = {s for _, n in self.inputs for d in self.values[n].shape if isinstance(d, Expr) for s in d.names}
        return tuple(dict.fromkeys(s.symbol for s in self.sizes if s.symbol in named))

    def __str__(self) -> str:
        args = ", ".join(f"{n}: {self.values[n].describe()}" for _, n in self.inputs)
        lines = [f"# captured by {self.captured_by}; {self.for_batches}"]
        lines += [f"# not {way}: {why}" for way, why in self.not_captured_by]
        lines += [f"# not at {reason}" for reason in self.excluded]
        lines += [f"# size {line}" for line in self.served]
        lines += [f"def forward({args}):"]
        for i, node in enumerate(self.nodes):
            lines.append(f"    {self.show(node)}  # {i}: {one_line(node.module) or 'the model itself'}")
        lines.append(f"    return {show_tree(self.output_spec, [show(o) for o in self.output])}")
        return "\n".join(lines)

    @property
    def for_batches(self) -> str:
        """The batches that it serves, in words."""
        if not self.batched and self.captured_by != "observed-per-batch":
            return "no input has a batch"
        return f"batch {self.batch_symbol} in {self.batches}"

    @property
    def served(self) -> list[str]:
        """The sizes beside the batch that it serves, of those that were declared, and under what conditions, in words."""
        found = []
        for symbol, size in {s.symbol: s for s in self.sizes}.items():
            one = size.range if symbol in self.over else f"{self.traced[symbol]} in this plan, of {size.range}"
            found.append(f"{symbol} in {one}")
        return [*found, *([f"where {' and '.join(map(str, self.conditions))}"] if self.conditions else [])]

    def show(self, node: TraceNode) -> str:
        """One op as a line of Python, with the types of its results."""
        args = [show(a) for a in node.args] + [f"{k}={show(v)}" for k, v in node.kwargs]
        names = ", ".join(f"{n}: {self.values[n].describe()}" if not node.unpack else n for n in node.outputs)
        return f"{names or '_'} = {node.target.removeprefix('aten.')}({', '.join(args)})"

    def with_nodes(self, nodes: tuple[TraceNode, ...], **changes: Any) -> TracePlan:
        """This plan with other ops (same order of modules), values that no op makes any more left out."""
        made = {n for node in nodes for n in node.outputs}
        used = {n for node in nodes for n in node.reads} | {n for _, n in self.inputs} | set(uses(self.output))
        used |= {n for store in self.stores for n in uses(store.atoms)}
        kept = {k: v for k, v in self.values.items() if k in made or (k not in self.definitions and k in used)}
        constants = {k: t for k, t in self.constants.items() if k in kept}
        return replace(self, nodes=nodes, **{"values": kept, "constants": constants, **changes})


def check(plan: TracePlan) -> TracePlan:
    """The plan itself, if it is well formed: every use follows its definition, every name is unique and known."""
    known = {name for name, v in plan.values.items() if name not in plan.definitions}
    for i, node in enumerate(plan.nodes):
        missing = [r for r in node.reads if r not in known and r != plan.batch_symbol]
        if missing:
            raise AssertionError(f"op {i} ({node.target}) reads {missing[0]!r} before it is made")
        for name in node.outputs:
            if name in known:
                raise AssertionError(f"op {i} ({node.target}) makes {name!r} a second time")
            known.add(name)
    missing = [r for r in uses(plan.output) if r not in known and r != plan.batch_symbol]
    if missing:
        raise AssertionError(f"the output reads {missing[0]!r}, which nothing makes")
    return plan
