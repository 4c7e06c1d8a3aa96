"""Lifting: a segment's source becomes a kernel, tensors in and tensors out, and the Python around it.

Compilers want functions of tensors. The generated source reads parameters out of modules, assigns buffers, and builds
containers; all that moves into a shell, which calls the kernel. The batch is read from the shape of a tensor, so that no
integer is there to specialise on, and sizes that the plan knows are stated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ariadne.guards import VERSION, stamp
from ariadne.plan import Expr, TracePlan
from ariadne.segment import Source

_ABSENT = object()


class Miss(Exception):
    """Raised by a kernel that runs as Python although it should have been compiled."""


@dataclass(frozen=True)
class Lifted:
    """A segment in two parts.

    `body` is the kernel's body, a function of `arguments`: the segment's own, then `state`, the texts by which the shell
    reads tensors of the model and constants. It returns the tuple of `results`. `after` is what the shell does with them.
    `sizes` holds, for each of the segment's tensor arguments, what the plan knows of its dims. `looked_at` are the results that
    the shell looks at and gives to nobody. `bound`: what its names stand for where it runs as Python, if a compiler gets others.
    """

    source: Source
    symbol: str
    batch: str | None
    body: tuple[str, ...]
    arguments: tuple[str, ...]
    state: tuple[str, ...]
    results: tuple[str, ...]
    after: tuple[str, ...]
    sizes: Mapping[str, tuple[int | Expr, ...]]
    looked_at: tuple[str, ...] = ()
    bound: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """prefix or suffix."""
        return self.source.name

    @property
    def inputs(self) -> tuple[str, ...]:
        """The arguments that come from the caller."""
        return self.arguments[: len(self.arguments) - len(self.state)]

    @property
    def has_witness(self) -> bool:
        """Whether it looks at a number in a tensor, and may raise."""
        return any("broken_witness(" in line for line in self.body)

    @property
    def stores(self) -> bool:
        """Whether the shell assigns something on the model."""
        return len(self.after) > 1

    def read(self) -> tuple[Any, ...]:
        """The state as it is now."""
        return tuple(eval(text, dict(self.source.namespace)) for text in self.state)

    def reader(self) -> Reader | None:
        """What reads the state, and looks for it again once a dict in which it stands was written; None where that is not told."""
        dicts: dict[int, dict[Any, Any]] = {}
        for text in self.state:
            node = ast.parse(text, mode="eval").body
            place = node.value if isinstance(node, ast.Subscript) else node
            table = self.source.namespace.get(place.id) if isinstance(place, ast.Name) else None
            if isinstance(node, ast.Subscript):
                if type(table) is not dict:
                    return None
                dicts[id(table)] = table
            elif table is None:  # neither in a dict nor a constant, which stays
                return None
        if VERSION is None or not dicts:
            return None
        look = eval(f"lambda: ({', '.join(self.state)},)", dict(self.source.namespace))
        return Reader(look, [*dicts.values()])

    def kernel(self, *, marked: bool, checked: bool) -> Source:
        """The kernel's source; `marked`: it raises `Miss` when run as Python; `checked`: it states the sizes that are known."""
        lines = [f"def {self.name}({', '.join(self._taken)}):"]
        lines += ["    if not is_compiling(): raise Miss"] if marked else []
        lines += [f"    {self.symbol} = {self.batch}"] if self.batch else []
        lines += [f"    {line}" for line in self._checks()] if checked else []
        lines += [*self.body, f"    return ({''.join(f'{name}, ' for name in self.results)})"]
        given = {"is_compiling": torch.compiler.is_compiling, "Miss": Miss, "check": torch._check}
        text = "\n".join(lines) + "\n"
        return Source(self.name, text, {**self.source.namespace, **given}, self._taken, self.results)

    def python(self) -> Source:
        """The kernel's source, to be run as Python."""
        source = self.kernel(marked=False, checked=False)
        return replace(source, namespace={**source.namespace, **self.bound})

    def shell(self, call: str, namespace: Mapping[str, Any], first: tuple[str, ...] = (), last: str = "{}",
              read: Reader | None = None) -> Source:  # fmt: skip
        """The Python around the kernel: `call` is formatted with `given`, the arguments, `results` and `batch`.

        `first` are lines to run before, `last` what is done to every tensor result that is given away, `read` is a `reader` of the
        state.
        """
        given = ", ".join((*self.inputs, *(self.state if read is None else ("*_read()",))))
        namespace = namespace if read is None else {**namespace, "_read": read}
        if self.batch is None:
            given = f"{self.symbol}, {given}"
        results = f"({''.join(f'{r}, ' for r in self.results)})" if self.results else "nothing"
        lines = [f"def {self.name}({', '.join((self.symbol, *self.source.parameters))}):", *first]
        lines += call.format(given=given, results=results, batch=self.symbol).splitlines()
        given_away = () if last == "{}" else [r for r in self.results if r not in self.looked_at]
        lines += [f"{r} = {last.format(r)}" for r in given_away]
        text = "\n    ".join([*lines, *self.after]) + "\n"
        return Source(
            self.name, text, {**self.source.namespace, **namespace}, self.source.parameters, self.source.returns
        )

    @property
    def _taken(self) -> tuple[str, ...]:
        return self.arguments if self.batch else (self.symbol, *self.arguments)

    def _checks(self) -> Iterator[str]:
        for name, sizes in self.sizes.items():
            for i, size in enumerate(sizes):
                if f"{name}.shape[{i}]" != self.batch and (isinstance(size, int) or size.names <= {self.symbol}):
                    yield f"check({name}.shape[{i}] == {size})"
        for name, tensor in zip(self.arguments[len(self.inputs) :], self.read(), strict=True):
            if not isinstance(tensor, torch.nn.Parameter):
                yield from (f"check({name}.shape[{i}] == {n})" for i, n in enumerate(tensor.shape))


class Reader:
    """The tensors that `look` finds, looked for again after one of these dicts was written.

    Between two calls the weights push the dicts' tables out of the caches, and a look at each takes as long as to run an op.
    """

    def __init__(self, look: Callable[[], tuple[Any, ...]], dicts: Sequence[dict[Any, Any]]) -> None:
        self.look, self.dicts = look, dicts
        self.last: tuple[int, tuple[Any, ...]] = -1, ()

    def __call__(self) -> tuple[Any, ...]:
        total, (known, found) = stamp(self.dicts), self.last
        if total != known:
            found = self.look()
            self.last = total, found
        return found


def lift(source: Source, plan: TracePlan) -> Lifted:
    """The two parts of a segment of `plan`."""
    function = ast.parse(source.text).body[0]
    assert isinstance(function, ast.FunctionDef)
    text = source.text.splitlines(keepends=True)
    tail = _tail(function, {*source.namespace, *source.parameters} - plan.values.keys())
    body = function.body[: len(function.body) - len(tail)]
    assigned = {
        n.id for part in body for n in ast.walk(part) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    parameters = {*source.parameters, plan.batch_symbol}
    used = [n.id for part in tail for n in ast.walk(part) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    results = tuple(dict.fromkeys(n for n in used if n in assigned))
    state: dict[str, str] = {}
    taken = assigned | parameters | set(source.namespace)
    edits: list[tuple[ast.expr, str]] = []
    for part in body:
        for node in _reads(part, source.namespace):
            where = ast.unparse(node)
            if where not in state:
                state[where] = _fresh(where, taken)
            edits.append((node, state[where]))
    end = body[-1].end_lineno if body else function.lineno
    inputs = tuple(p for p in source.parameters if p in plan.values)
    sizes = {n: plan.values[n].shape for n in inputs if n in plan.values and plan.values[n].dtype is not None}
    return Lifted(
        source,
        plan.batch_symbol,
        _batch(sizes, plan.batch_symbol),
        tuple(_edited(text, edits)[function.lineno : end]),
        (*inputs, *state.values()),
        tuple(state),
        results,
        tuple(ast.get_source_segment(source.text, part) or "" for part in tail),
        sizes,
    )


def _tail(function: ast.FunctionDef, known: Container[str]) -> list[ast.stmt]:
    """The statements at the end that compute nothing: stores on the model, and the return."""
    at = len(function.body)
    while at and (isinstance(part := function.body[at - 1], ast.Return) or _is_store(part, known)):
        at -= 1
    return function.body[at:]


def _is_store(part: ast.stmt, known: Container[str]) -> bool:
    if isinstance(part, ast.Assign):
        root: ast.expr = part.targets[0]
    elif isinstance(part, ast.Expr) and isinstance(part.value, ast.Call) and isinstance(part.value.func, ast.Attribute):
        root = part.value.func
        if isinstance(root.value, ast.Call) and isinstance(root.value.func, ast.Attribute):
            root = root.value.func
        if root.attr not in ("clear", "extend", "pop", "setdefault"):  # no methods of tensors
            return False
    else:
        return False
    if isinstance(root, ast.Name):
        return False
    while isinstance(root, (ast.Subscript, ast.Attribute)) or _is_slots(root):
        root = root.args[0] if isinstance(root, ast.Call) else root.value  # type: ignore[attr-defined]
    return isinstance(root, ast.Name) and root.id in known


def _is_slots(part: ast.expr) -> bool:
    """Whether it is `Slots(thing)`, by which attributes are reached whose names Python does not read."""
    return isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id.startswith("Slots")


def _reads(node: ast.AST, namespace: Mapping[str, Any]) -> Iterator[ast.expr]:
    """The outermost expressions that are a tensor at hand: a constant, or what a table of a module holds."""
    if isinstance(node, (ast.Name, ast.Subscript, ast.Attribute)) and isinstance(
        _resolve(node, namespace), torch.Tensor
    ):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _reads(child, namespace)


def _resolve(node: ast.expr, namespace: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return namespace.get(node.id, _ABSENT)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        holder: Any = _resolve(node.value, namespace)
        if isinstance(holder, (dict, list, tuple)):
            key: Any = node.slice.value
            try:
                return holder[key]
            except (KeyError, IndexError):
                return _ABSENT
    if isinstance(node, ast.Attribute):
        holder = _resolve(node.value, namespace)
        if holder is not _ABSENT and not isinstance(holder, torch.Tensor):
            return getattr(holder, node.attr, _ABSENT)
    return _ABSENT


def _fresh(where: str, taken: set[str]) -> str:
    stem = re.sub(r"\W+", "_", where).strip("_") or "state"
    name, i = stem, 1
    while name in taken:
        name, i = f"{stem}_{i}", i + 1
    taken.add(name)
    return name


def _edited(text: list[str], edits: list[tuple[ast.expr, str]]) -> list[str]:
    """The lines with each of the expressions, all on one line, replaced."""
    lines = [line.rstrip("\n").encode() for line in text]
    for node, name in sorted(edits, key=lambda e: (e[0].lineno, -e[0].col_offset)):
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = line[: node.col_offset] + name.encode() + line[node.end_col_offset :]
    return [line.decode() for line in lines]


def _batch(sizes: Mapping[str, tuple[int | Expr, ...]], symbol: str) -> str | None:
    """How a kernel reads the batch from its arguments' shapes; None where it can't."""
    for name, dims in sizes.items():
        for i, d in enumerate(dims):
            if isinstance(d, Expr) and d.source == symbol:
                return f"{name}.shape[{i}]"
    for name, dims in sizes.items():
        for i, d in enumerate(dims):
            times = re.fullmatch(rf"(\d+) ?\* ?{symbol}|{symbol} ?\* ?(\d+)", d.source) if isinstance(d, Expr) else None
            if times:
                return f"{name}.shape[{i}] // {times[1] or times[2]}"
    return None
