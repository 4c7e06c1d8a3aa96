"""Kernels as torch's compilers want them: in one piece, with sizes and strides that they need not guess.

Each piece of a kernel that torch breaks in two forgets the sizes that were stated at its start. So bindings that torch's
tracer does not know are called by another name, and numbers that Python looks at are looked at after the kernel has run. Opaque
parts alone break a kernel: what lies between them is compiled.
"""

from __future__ import annotations

import ast
import copy
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ariadne.capture import Call
from ariadne.compiled.lift import Lifted

_READS = frozenset({"aten.is_nonzero.default", "aten.item.default", "aten._local_scalar_dense.default"})
_READ = re.compile(r"(?P<name>\w+) = (?:\w+\((?P<taken>\w+)\)|(?P<owner>\w+)\.\w+\(\))")

Strides = dict[tuple[str, int], int | None]


def compilable(lifted: Lifted) -> Lifted:
    """The same segment: the shell looks at the witnesses, and torch's tracer knows the functions."""
    namespace = {name: _known(thing) for name, thing in lifted.source.namespace.items()}
    bound = lifted.source.namespace
    return _hoisted(replace(lifted, source=replace(lifted.source, namespace=namespace), bound=bound))


def _known(thing: Any) -> Any:
    """An op of the same meaning, where torch's tracer would break the graph at a binding, or ask for the batch."""
    if thing is torch._C._nn.adaptive_avg_pool2d:
        return _pooled
    if thing is torch.dropout_:
        return _dropped
    if thing is torch._shape_as_tensor:
        return _shape
    if isinstance(thing, Call) and not isinstance(thing.function, torch.jit.ScriptFunction):
        return torch.compiler.disable(thing.__call__)
    if not isinstance(thing, types.BuiltinFunctionType) or isinstance(thing.__self__, types.ModuleType):
        return thing
    if torch._dynamo.trace_rules.lookup(thing) is not torch._dynamo.variables.SkipFunctionVariable:
        return thing
    return getattr(torch.ops.aten, thing.__name__, thing)


def _pooled(x: torch.Tensor, size: int | tuple[int, ...]) -> torch.Tensor:
    """`adaptive_avg_pool2d`. To one pixel it is a mean; then torch lays that out as its input, and asks how that lies."""
    if size == 1 or (not isinstance(size, int) and list(size) == [1, 1]):
        return x.mean((-1, -2), keepdim=True)
    return torch._C._nn.adaptive_avg_pool2d(x, size)


def _dropped(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """`dropout_`. torch traces that as a draw into a contiguous tensor; eager code draws in the order in which `x` lies."""
    return x.copy_(torch.dropout(x, p, train)) if train else x


def _shape(x: torch.Tensor) -> torch.Tensor:
    """`_shape_as_tensor`. torch's tracer takes what it returns for a `torch.Size`."""
    return torch.tensor(x.shape, dtype=torch.int64, device="cpu")


def _hoisted(lifted: Lifted) -> Lifted:
    """Witnesses compared by the shell, from copies that the kernel returns; the kernel goes on with what they should be.

    So a kernel runs to its end before a broken witness raises. What it writes in place is written then.
    """
    body, late, copies, read = list(lifted.body), [], [], set()
    taken = {*re.findall(r"\w+", "\n".join(body)), *lifted.arguments, *lifted.source.namespace}
    texts = dict(zip(lifted.arguments[len(lifted.inputs) :], lifted.state, strict=True))
    for i, line in enumerate(lifted.body):
        if "raise broken_witness(" not in line:
            continue
        test, indent = line.strip(), line[: len(line) - len(line.lstrip())]
        copy = f"seen_{i}"
        while copy in taken:
            copy += "_"
        whole = re.match(r"if not same_data\((\w+), (\w+)\): ", test)
        if whole:
            data = texts.get(whole[2], whole[2])
            body[i] = f"{indent}{copy} = {whole[1]}.detach().clone()"
            late.append(f"if not same_data({copy}, {data}): {test[whole.end() :]}")
        else:
            broken = next(n for n in ast.walk(ast.parse(test)) if isinstance(n, ast.Raise)).exc
            assert isinstance(broken, ast.Call)
            call = _READ.match(lifted.body[i - 1].strip())
            if ast.literal_eval(broken.args[2]) not in _READS or call is None:
                continue
            group = "taken" if call["taken"] else "owner"
            at, end = call.span(group)
            body[i - 1] = f"{indent}{copy} = {call[group]}.detach().clone()"
            body[i] = f"{indent}{call['name']} = {ast.unparse(broken.args[1])}"
            late += [call[0][:at] + copy + call[0][end:], test]
            read.add(call["name"])
        copies.append(copy)
    results = (*(r for r in lifted.results if r not in read), *copies)
    return replace(lifted, body=tuple(body), results=results, after=(*late, *lifted.after), looked_at=tuple(copies))


def odd_strides(lifted: Lifted, args: Sequence[Any], known: Mapping[tuple[str, int], int | None]) -> Strides:
    """The strides of arguments that follow from no size, such as those of a part of a larger tensor.

    torch makes each a symbol, and orders the dims of what is computed from it by guesses. None for what has been seen
    to change.
    """
    found: Strides = dict(known)
    for name, t in zip(lifted.arguments, args[len(args) - len(lifted.arguments) :], strict=True):
        if not isinstance(t, torch.Tensor) or isinstance(t, torch.nn.Parameter) or t.layout != torch.strided:
            continue
        follow = {0, 1}
        for d in sorted(range(t.dim()), key=t.stride):
            stride = t.stride(d)
            if (name, d) in known or (t.shape[d] > 1 and stride not in follow):
                found[name, d] = stride if known.get((name, d), stride) == stride else None
            follow.add(stride * t.shape[d])
    return found


def pinned(lifted: Lifted, strides: Strides) -> Lifted:
    """The same segment, whose kernel states these strides."""
    lines = [f"    check({name}.stride({d}) == {n})" for (name, d), n in strides.items() if n is not None]
    return replace(lifted, body=(*lines, *lifted.body))


@contextmanager
def constant_dims(lifted: Lifted, args: Sequence[Any]) -> Iterator[None]:
    """While it lasts, torch takes dims that are 0 or 1 at every batch for constants.

    As symbols they are taken to be something else, and what is broadcast along them is compiled for the batch at hand.
    """
    marked: list[tuple[torch.Tensor, Any]] = []
    try:
        for name, t in zip(lifted.arguments, args[len(args) - len(lifted.arguments) :], strict=True):
            if not isinstance(t, torch.Tensor):
                continue
            known = lifted.sizes.get(name, t.shape)
            dims = [d for d, n in enumerate(t.shape) if n == 0 or (n == 1 and known[d] == 1)]
            if dims and not any(t is other for other, _ in marked):
                marked.append((t, copy.copy(vars(t).get("_dynamo_static_indices"))))
                torch._dynamo.mark_static(t, dims)
        yield
    finally:
        for t, before in marked:
            vars(t).pop("_dynamo_static_indices", None)
            if before is not None:
                vars(t)["_dynamo_static_indices"] = before
