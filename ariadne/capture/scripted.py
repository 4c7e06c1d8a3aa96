"""Functions under `torch.jit.script` or `torch.jit.trace`: one call of one, kept whole as an op of the plan.

What runs them is the graph executor. Once warm it differentiates by itself, so that the ops inside, as a recorder sees them, are
detached; and it may fuse. Replay therefore calls the function itself. What it writes, draws and gives back again is read from its
graph, by the schemas of its ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch.jit._state import _try_get_jit_cached_function

from ariadne import tree
from ariadne.capture.call import Call
from ariadne.capture.refusals import Patches
from ariadne.errors import UnsupportedError
from ariadne.plan import TraceNode

TARGET = "python.torch.jit."
_HARMLESS = frozenset(  # of the executor's own ops: they compute nothing, and do nothing to what is outside
    "Constant If Loop ListConstruct ListUnpack TupleConstruct TupleUnpack TupleIndex DictConstruct NumToTensor device dtype "
    "is_cuda layout requires_grad unchecked_cast Uninitialized rangelist min max abs unchecked_unwrap_optional isinstance".split()
)


@dataclass(frozen=True)
class Effects:
    """What a function may do, as its graph tells: by parameter which it `writes` into, and which of them results may `alias`.

    `draws`: it may draw random numbers, or do what no schema tells.
    """

    writes: tuple[bool, ...]
    aliases: tuple[bool, ...]
    draws: bool

    @classmethod
    def of(cls, function: Any) -> Effects:
        """Those of a scripted function."""
        graph = function.inlined_graph
        inputs, outputs = list(graph.inputs()), list(graph.outputs())
        roots, nodes = _Roots(inputs), list(_nodes(graph))
        written = {i for node in nodes for value in _written(node) for i in roots.of(value)}
        given = {i for value in outputs for i in roots.of(value)}
        ops = [_overload(node) for node in nodes]
        return cls(
            tuple(i in written for i in range(len(inputs))),
            tuple(i in given for i in range(len(inputs))),
            any(op is None or torch.Tag.nondeterministic_seeded in op.tags for op in ops),
        )


class _Roots:
    """For each value in a graph the inputs, by number, whose memory it may share."""

    def __init__(self, inputs: list[Any]) -> None:
        self.found: dict[int, frozenset[int]] = {v.unique(): frozenset({i}) for i, v in enumerate(inputs)}
        self.all = frozenset(range(len(inputs)))

    def of(self, value: Any) -> frozenset[int]:
        """Those of one value."""
        at = value.unique()
        if at not in self.found:
            node = value.node()
            if node.kind() == "prim::Param":  # of a loop's block: what it gets it may have from any turn
                self.found[at] = self.all
            elif _makes_new(node):
                self.found[at] = frozenset()
            else:
                sources = [*node.inputs(), *(v for block in node.blocks() for v in block.outputs())]
                self.found[at] = frozenset(i for source in sources for i in self.of(source))
        return self.found[at]


def _makes_new(node: Any) -> bool:
    """Whether what an op gives is no memory of what it got. Composite ops say nothing of it: `einsum` may be a view."""
    op = _overload(node)
    if op is None or torch.Tag.nondeterministic_seeded in op.tags:  # `dropout` may give back its input
        return False
    if any(r.alias_info is not None for r in op._schema.returns):
        return False
    if not torch._C._dispatch_has_kernel(op.name()):  # it is the executor's own, for numbers and containers
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def _written(node: Any) -> list[Any]:
    """The values that a node may write into; schemas of normalisations keep silent about their running statistics."""
    op = _overload(node)
    if op is None:
        return list(node.inputs())
    pairs = zip(op._schema.arguments, node.inputs(), strict=False)
    return [
        v for a, v in pairs if a.name.startswith("running_") or (a.alias_info is not None and a.alias_info.is_write)
    ]


@lru_cache(maxsize=256)
def _effects(function: Any) -> Effects:
    return Effects.of(function)


def _nodes(block: Any) -> Iterator[Any]:
    """The nodes of a graph and of the blocks inside it, those of the executor that are harmless left out."""
    for node in block.nodes():
        for inner in node.blocks():
            yield from _nodes(inner)
        space, _, name = node.kind().partition("::")
        if space != "prim" or name not in _HARMLESS:
            yield node


def _overload(node: Any) -> Any:
    """The op of a node as torch's dispatcher knows it; None where it is none."""
    space, _, name = node.kind().partition("::")
    text = node.schema()
    overload = text.partition("(")[0].partition(".")[2] or "default"
    try:
        return getattr(getattr(getattr(torch.ops, space), name), overload)
    except AttributeError:
        return None


@dataclass(frozen=True)
class Running:
    """One call of a scripted function while forward is recorded."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def effects(self) -> Effects:
        """What it may do."""
        return _effects(self.function)

    def tensors(self, which: tuple[bool, ...]) -> list[torch.Tensor]:
        """The tensors in those of its arguments."""
        names = [a.name for a in self.function.schema.arguments]
        given = [*zip(names, self.args, strict=False), *self.kwargs.items()]
        wanted = {name for name, yes in zip(names, which, strict=True) if yes}
        return [t for name, v in given if name in wanted for t in tree.leaves(v) if isinstance(t, torch.Tensor)]

    def result(self, run: Callable[..., Any], fake: bool) -> Any:
        """What it gives; of `fake` tensors that is told by the Python that it was made from, for the executor can't run on them.

        Raises `UnsupportedError` where there is no such Python, or it was traced and may do something else.
        """
        if not fake:
            with torch._C._DisablePythonDispatcher():
                return run(self.function, *self.args, **self.kwargs)
        python: Any = getattr(self.function, "_torchdynamo_inline", None)
        script: Any = _try_get_jit_cached_function(python) if python is not None else None
        if script is None or script.qualified_name != self.function.qualified_name:
            raise UnsupportedError(
                f"the function {self.function.name!r} was traced to TorchScript, so that what it makes shows in real runs alone"
            )
        with _scripting():
            return python(*self.args, **self.kwargs)

    def call(self, out: Any) -> tuple[Call, list[Any], list[Any]]:
        """The op that it is in the plan, its arguments and its results, for what it gave."""
        leaves, given = tree.flatten((self.args, self.kwargs))
        results, gives = tree.flatten(out)
        tensors = tuple(isinstance(r, torch.Tensor) for r in results)
        call = Call(self.function, self.function.name, given, str(gives), gives.kind == tree.LEAF, tensors)
        return call, leaves, results


@contextmanager
def _scripting() -> Iterator[None]:
    """While in the block, Python is told that it is being compiled by TorchScript."""
    patches = Patches()
    patches.set(torch.jit, "is_scripting", lambda: True)
    try:
        yield
    finally:
        patches.restore()


def is_scripted(node: TraceNode) -> bool:
    """Whether an op of a plan is a call of a scripted function."""
    return node.target.startswith(TARGET)


def bare(call: Call) -> Any:
    """The function itself where it takes and gives the same, and can't give anything else."""
    takes = all(c.kind == tree.LEAF for c in call.given.children[0].children) and not call.given.children[1].keys
    (result,) = call.function.schema.returns
    parts = [result.type] if call.one else list(result.type.containedTypes())
    flat = call.one or call.gives == f"({', '.join('*' * len(parts))}{',' if len(parts) == 1 else ''})"
    return call.function if takes and flat and all(p.kind() == "TensorType" for p in parts) else call
