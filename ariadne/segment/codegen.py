"""Code generation: one side of a cut becomes straight-line Python, and the objects that it names."""

from __future__ import annotations

import functools
import keyword
import math
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.compare import same_bits
from ariadne.cut import Part, held_by_itself
from ariadne.errors import WitnessError
from ariadne.guards import Attribute, Slots, Switched
from ariadne.plan import (
    FUNCTIONS,
    HELPERS,
    PLAIN,
    WHOLE,
    Expr,
    Namespace,
    Ref,
    Region,
    Store,
    TraceNode,
    TracePlan,
    Value,
    one_line,
    own,
    uses,
)
from ariadne.segment.bindings import Binder, Binding


@dataclass(frozen=True)
class Source:
    """A function as text, and the objects that its text names.

    The function takes the batch, then the values named in `parameters`, and returns the tuple of `returns` (the prefix)
    or the model's output (the suffix). `halting`: the same function, line for line, which returns a `Halted` where the other raises
    since a question has another answer; empty where nothing is asked.
    """

    name: str
    text: str
    namespace: Mapping[str, Any]
    parameters: tuple[str, ...]
    returns: tuple[str, ...]
    halting: str = ""


def emit(plan: TracePlan, part: Part, model: nn.Module, keep: Collection[str] = ()) -> Source:
    """The source of one part of a plan; the values to `keep` are there to its end."""
    return _Writer(plan, model).write(part, keep)


def broken_witness(
    found: Any, expected: Any, target: str, module: str, at: int = -1, plan: TracePlan | None = None
) -> WitnessError:
    """The error for a number that Python read out of a tensor at capture, by op `at` of `plan`, and that has changed."""
    error = WitnessError()
    error.plan, error.at, error.found, error.asked = plan, at, found, (expected, target, module)
    return error


class Halted:
    """Where a call left the path of a side: what `broken_witness` takes, and the values that stood there, which it alone holds.

    `there` is None where they are not known: the side raised, as does that of a compiler.
    """

    __slots__ = ("asked", "error", "there")

    def __init__(self, asked: tuple[Any, Any, str, str, int], there: dict[str, Any] | None) -> None:
        self.asked, self.there = asked, there
        self.error: WitnessError | None = None

    @classmethod
    def by(cls, error: WitnessError) -> Halted:
        """Of a side that raised this."""
        found = cls((error.found, *(error.asked or (None, "", "")), error.at), None)
        found.error = error
        return found

    def question(self, plan: TracePlan) -> WitnessError:
        """The same as an error."""
        return self.error or broken_witness(*self.asked, plan=plan)


def _is_name(name: Any) -> bool:
    """Whether Python reads a name in source as just that name."""
    return (
        isinstance(name, str)
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and unicodedata.normalize("NFKC", name) == name
    )


class _Writer:
    def __init__(self, plan: TracePlan, model: nn.Module) -> None:
        self.plan = plan
        self.submodule = functools.cache(model.get_submodule)
        self.namespace: dict[str, Any] = {}
        self.names = Namespace(set(plan.values) | {plan.batch_symbol} | HELPERS)
        self.binder = Binder(plan)
        self.bound: dict[Any, str] = {}
        self.lines: list[str] = []
        self.taken: tuple[str, ...] = ()  # what comes in, state of the model among it
        self.handed_in = ""  # the name of (args, kwargs), where something is put into what they hold

    def use(self, thing: Any, wanted: str, key: Any = None) -> str:
        """The name under which the source reaches an object."""
        key = ("id", id(thing)) if key is None else key
        if key not in self.bound:
            self.bound[key] = self.names.new(wanted)
            self.namespace[self.bound[key]] = thing
        return self.bound[key]

    def write(self, part: Part, keep: Collection[str] = ()) -> Source:
        nodes, parameters, final, stores = (
            part.nodes(self.plan),
            part.takes,
            part.final(self.plan),
            part.stores(self.plan),
        )
        self.taken, self.stood = parameters, {}
        kept = {*final, *keep} | {name for store in stores for name in uses(store.atoms)}
        made_here = set(parameters) | {n for node in nodes for n in node.outputs}
        last: dict[str, int] = {}
        for i, node in enumerate(nodes):
            for name in (*node.reads, *node.outputs):
                if name in made_here:
                    last[name] = i
        symbol = self.plan.batch_symbol
        if part.start == 0 and self.plan.keeps_inputs:
            self.handed_in = self.names.new("handed_in")
            parameters = (*parameters, self.handed_in)
        head = f"def {part.name}({', '.join((symbol, *parameters))}):"
        body: list[tuple[Region, str]] = []
        asks: list[tuple[int, str]] = []  # which of these lines ask a question, and what stands there in `halting`
        there = dict.fromkeys(part.takes)
        for name in part.written:
            body.append((PLAIN, f"{name} = own({name})  # the {part.name} writes into it; the boundary keeps its own"))
        dead = [n for n in parameters if n not in last and n not in kept and n != self.handed_in]
        if dead and nodes:
            body.append((PLAIN, f"del {', '.join(dead)}"))
            there = dict.fromkeys(name for name in there if name not in dead)
        for i, node in enumerate(nodes):
            there.update(dict.fromkeys(node.outputs))
            body += [(node.region, line) for line in self._node(node)]
            if (question := self._question(node, part.stop - len(nodes) + i)) is not None:
                test, asked = question
                standing = ", ".join(f"{name!r}: {name}" for name in there)
                asks.append((len(body), f"if {test}: return Halted(({asked}), {{{standing}}})"))
                body.append((node.region, f"if {test}: raise broken_witness({asked})"))
            gone = [n for n in dict.fromkeys((*node.reads, *node.outputs)) if last.get(n) == i and n not in kept]
            if gone:
                body.append((node.region, f"del {', '.join(gone)}"))
            for name in gone:
                there.pop(name, None)
        replaced = {store.stands_at for store in stores if store.stands_at}
        after = (*(() if part.gives is not None else self.plan.output), *(store.atoms for store in stores))
        for name in dict.fromkeys(uses(after)):
            value = self.plan.values.get(name)  # not that of the batch
            if value is not None and name not in self.taken and any(value.stands_in(replaced)):
                local = self.names.new(name)
                body.append((PLAIN, f"{local} = {self._state(value)}  # before something else stands there"))
                self.stood[name] = local
        for store in stores:
            if store.inside:
                body.append((PLAIN, self._put(store)))
                continue
            module, letter = self.submodule(store.path), "b" if store.table == "_buffers" else "a"
            holder = module.__dict__ if letter == "a" else module._buffers
            table = self.use(holder, f"{letter}_{store.path or 'model'}", (letter, store.path))
            body.append((PLAIN, f"{table}[{self._constant(store.name)}] = {self._nested(store.spec, store.atoms)}"))
        if part.gives is not None:
            for value in map(self.plan.values.__getitem__, part.gives):
                if held_by_itself(value) and value.name not in self.taken:
                    body.append((PLAIN, f"{value.name} = {self._state(value)}  # as this call leaves it"))
            body.append((PLAIN, f"return ({''.join(f'{n}, ' for n in part.gives)})"))
        else:
            body.append((PLAIN, f"return {self._nested(self.plan.output_spec, self.plan.output)}"))
        text = "\n".join([head, *self._regions(body)]) + "\n"
        for i, line in asks:
            body[i] = body[i][0], line
        halting = "\n".join([head, *self._regions(body)]) + "\n" if asks else ""
        broken = functools.partial(broken_witness, plan=self.plan)
        self.namespace.update(broken_witness=broken, identical=tree.identical, same_data=same_bits, own=own)
        self.namespace.update(FUNCTIONS, Halted=Halted)
        return Source(part.name, text, self.namespace, parameters, part.gives or (), halting)

    def _put(self, store: Store) -> str:
        """The statement that puts something into a container."""
        if store.table == "input":
            text = self.handed_in
        elif store.table == "held":
            text = self.use(self.submodule(store.path).__dict__, f"a_{store.path or 'model'}", ("a", store.path))
        else:
            text = self.use(self.plan.objects[store.path], "outside", ("outside", store.path))
        *steps, last = store.steps if store.how in ("set", "remove", "grow") else (*store.steps, None)
        for step in steps:
            text = self._step(text, step)
        value = self._nested(store.spec, store.atoms)
        if store.how == "set":
            return f"{self._step(text, last)} = {value}"
        if store.how == "remove":
            return f"{text}.pop({self._atom(last)}, None)"
        if store.how == "grow":
            return f"{text}.setdefault({self._atom(last)}, []).extend({value})"
        return f"{text}.extend({value})" if store.how == "append" else f"{text}.clear(); {text}.extend({value})"

    def _regions(self, body: Sequence[tuple[Region, str]]) -> list[str]:
        lines, current = [], PLAIN
        for region, line in body:
            if region != current:
                if region != PLAIN:
                    managers = []
                    if region.grad is not None:
                        name = self.use(torch.set_grad_enabled, "set_grad_enabled", "grad")
                        managers.append(f"{name}({region.grad})")
                    for device, enabled, dtype, cache in region.autocast:
                        name = self.use(torch.autocast, "autocast", "autocast")
                        managers.append(
                            f"{name}({device!r}, {self._constant(dtype)}, enabled={enabled}, cache_enabled={cache})"
                        )
                    if region.switches:
                        name = self.use(Switched, "Switched", "switched")
                        stood = (f"({k!r}, {self._constant(v)})" for k, v in region.switches)
                        managers.append(f"{name}({', '.join(stood)})")
                    lines.append(f"    with {', '.join(managers)}:")
                current = region
            lines.append(f"    {'    ' if current != PLAIN else ''}{line}")
        return lines

    def _node(self, node: TraceNode) -> list[str]:
        if node.target == WHOLE:
            return []
        call = self._call(node)
        comment = f"  # {one_line(node.module)}" if node.module else ""
        if not node.outputs:
            return [call + comment]
        targets = ", ".join(node.outputs) + ("," if node.unpack and len(node.outputs) == 1 else "")
        return [f"{targets} = {call}{comment}"]

    def _question(self, node: TraceNode, at: int) -> tuple[str, str] | None:
        """Where Python reads what op `at` gives: the test whether it is otherwise now, and what `broken_witness` takes."""
        if node.target == WHOLE:
            taken, known = (self._atom(a) for a in node.args)
            told = f"'other data', 'the same data', 'tolist or numpy', {node.module!r}, {at}"
            return f"not same_data({taken}, {known})", told
        if not (node.is_witness and node.outputs):
            return None
        name, expected, asked = node.outputs[0], self._atom(node.witness), node.target
        plain = isinstance(node.witness, (int, Expr)) and not node.target.startswith(
            "python."
        )  # of one type, by its op
        differs = f"{name} != {expected}" if plain else f"not identical({name}, {expected})"
        if asked == "aten.sym_size.int":
            maker = self.plan.definitions.get(node.args[0].name)
            asked = f"size {node.args[1]} of {self.plan.node(node.args[0].name).target if maker is not None else 'an input'}"
        return differs, f"{name}, {expected}, {asked!r}, {node.module!r}, {at}"

    def _call(self, node: TraceNode) -> str:
        if node.target.startswith("python."):
            function, *args = node.args
            return f"{self._atom(function)}({', '.join(self._atom(a) for a in args)})"
        if node.target == "aten.sym_size.int":
            return f"{self._atom(node.args[0])}.shape[{node.args[1]}]"
        binding = self.binder.find(node)
        keywords = [f"{k}={self._atom(v)}" for k, v in node.kwargs]
        args = [self._atom(a) for a in node.args]
        if binding.style == "index":
            return f"{args[0]}[{self._subscript(node, binding, args)}]"
        if binding.style == "method":
            return f"{args[0]}.{binding.name}({', '.join(args[1:] + keywords)})"
        return f"{self.use(binding.function, binding.name)}({', '.join(args + keywords)})"

    @staticmethod
    def _subscript(node: TraceNode, binding: Binding, args: list[str]) -> str:
        dim = node.args[1] if len(node.args) > 1 else 0
        start, stop, step = ([*args[2:5]] + ["None"] * 3)[:3]
        part = ":".join("" if b == "None" else b for b in ((start, stop) if step == "None" else (start, stop, step)))
        return ", ".join([":"] * dim + [part or ":"])

    def _atom(self, atom: Any) -> str:
        if isinstance(atom, Ref):
            value = self.plan.values[atom.name]
            at_hand = value.is_state or value.kind == "constant" or atom.name in self.plan.objects
            text = self._state(value) if at_hand and atom.name not in self.taken else atom.name
            text = self.stood.get(atom.name, text)
            return text if atom.item is None else f"{text}[{atom.item}]"
        if isinstance(atom, Expr):
            return atom.source if atom.source.isidentifier() else f"({atom.source})"
        if type(atom) is tuple:
            return f"({', '.join(self._atom(a) for a in atom)}{',' if len(atom) == 1 else ''})"
        return self._constant(atom)

    def _state(self, value: Value) -> str:
        """How the source reads a tensor or an object that is at hand on both sides."""
        if value.name in self.plan.objects:
            return self.use(self.plan.objects[value.name], value.name, ("object", value.name))
        if value.kind == "constant":
            return self.use(self.plan.constants[value.name], value.name, ("constant", value.name))
        path, *keys = value.origin
        module = self.submodule(path)
        table, letter = {
            "parameter": (module._parameters, "p"),
            "buffer": (module._buffers, "b"),
            "attribute": (module.__dict__, "a"),
        }[value.kind]
        name = self.use(table, f"{letter}_{path or 'model'}", (letter, path))
        for key in keys:
            name = self._step(name, Attribute(key[1]) if isinstance(key, tuple) and key[0] == "." else key)
        return name

    def _step(self, text: str, step: Any) -> str:
        """What an attribute, an item or a key of `text` is written as."""
        if not isinstance(step, Attribute):
            return f"{text}[{self._atom(step)}]"
        return f"{text}.{step}" if _is_name(step) else f"{self.use(Slots, 'Slots')}({text})[{str(step)!r}]"

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (bool, str, int):
            return repr(value)
        if type(value) is float:  # one of a class of its own, as numpy's, is used as it is
            return (
                repr(value)
                if math.isfinite(value)
                else self.use(value, repr(value).replace("-", "minus_"), repr(value))
            )
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return self.use(value, str(value).removeprefix("torch."), ("torch", str(value)))
        if isinstance(value, torch.device):
            return self.use(value, str(value).replace(":", "_"), ("device", str(value)))
        return self.use(value, type(value).__name__)

    def _nested(self, spec: tree.Spec, atoms: tuple[Any, ...]) -> str:
        leaves = iter([self._atom(a) for a in atoms])

        def walk(spec: tree.Spec) -> str:
            if spec.kind == tree.LEAF:
                return next(leaves)
            inner = [walk(c) for c in spec.children]
            if spec.kind == "list":
                return f"[{', '.join(inner)}]"
            if spec.kind == "tuple":
                return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
            if spec.kind == "dict" and all(type(k) in (str, int, bool) for k in spec.keys):
                return "{" + ", ".join(f"{k!r}: {v}" for k, v in zip(spec.keys, inner, strict=True)) + "}"
            cls = spec.cls
            assert cls is not None
            level = replace(spec, children=())
            build = self.use(_Rebuild(level), f"rebuild_{cls.__name__}")
            return f"{build}(({', '.join(inner)}{',' if len(inner) == 1 else ''}))"

        return walk(spec)


@dataclass(frozen=True)
class _Rebuild:
    spec: tree.Spec

    def __call__(self, children: tuple[Any, ...]) -> Any:
        return tree.build(self.spec, children)
