"""A half for other runtimes: as an ONNX model, as torch's exported program, and for ExecuTorch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.cut import Part
from ariadne.errors import HalfError, SpecError
from ariadne.halves.given import alike
from ariadne.halves.ops import resolve
from ariadne.plan import WHOLE, Expr, TraceNode, TracePlan, Value
from ariadne.segment import emit, load

KINDS = {".onnx": ("onnx", "onnxscript"), ".pt2": (), ".pte": ("executorch",)}
_MOST = 64  # of a refusal's own words from elsewhere, in lines
FROM_ONE = 2  # torch takes a size of 1 for a constant, so that programs are traced at this batch or above


@dataclass(frozen=True)
class Schema:
    """The names of a half's inputs and outputs, in order, and the smallest and the largest batch that the file takes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batches: tuple[int, int]


class Exported(nn.Module):
    """A half as torch's exporter wants it: tensors in, tensors out, the tensors that it computes with under the model's names."""

    def __init__(self, root: nn.Module, run: Callable[..., Any], batch: Callable[..., Any]) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = root._parameters, root._buffers, root._modules
        self._non_persistent_buffers_set = root._non_persistent_buffers_set
        self.__dict__.update(training=False, _run=run, _batch=batch)

    def forward(self, *given: torch.Tensor) -> Any:
        """The half's own function; the batch is read off the sizes."""
        run, batch = self.__dict__["_run"], self.__dict__["_batch"]
        return run(batch(*given), *given)


def write(
    path: str | os.PathLike[str], plan: TracePlan, part: Part, root: nn.Module, about: Mapping[str, str]
) -> Schema:
    """Write one part of a plan in the form that the path's ending names: `.onnx`, `.pt2` or `.pte`. Returns its schema.

    `about` is text that stands in the file beside it, where its form has a place for that. Raises `SpecError` for another ending
    or a folder that is not there, `HalfError` for what an exporter can't take, with the op that stands in the way.
    """
    target = Path(path)
    kind = target.suffix
    if kind not in KINDS:
        raise SpecError(f"a half is exported to a file that ends in {', '.join(KINDS)}; found {str(path)!r}")
    if not target.parent.is_dir():
        raise SpecError(f"{str(target)!r} can't be made: there is no folder {str(target.parent)!r}. Make it first")
    missing = [name for name in KINDS[kind] if importlib.util.find_spec(name) is None]
    if missing:
        raise HalfError(
            f"to export a half as {kind} takes the package {' and '.join(missing)}, which can't be found here; install it, with "
            f"pip install {' '.join(missing)}"
        )
    _refuse(plan, part)
    program, schema = traced(plan, part, root)
    told = {**about, **{key: json.dumps(value) for key, value in asdict(schema).items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an exporter's own, about its own insides
        {".onnx": _to_onnx, ".pt2": _to_pt2, ".pte": _to_pte}[kind](program, target, schema, told)
    return schema


def traced(plan: TracePlan, part: Part, root: nn.Module) -> tuple[Any, Schema]:
    """One part as `torch.export`'s program, for all batches that the plan serves in one go, and its schema.

    It is run at two batches, and held against the half bit for bit.
    """
    batch, low, high = _batches(plan)
    program, names = _program(plan, part, root, batch, low, high)
    if low < FROM_ONE <= high and not _agrees(program, plan, part, root, low):  # some sizes are never taken to be 1
        low = min(FROM_ONE, high)
        program, names = _program(plan, part, root, batch, low, high)
    for at in {low, batch}:
        if not _agrees(program, plan, part, root, at):
            raise HalfError(f"what torch.export made of this half gives other numbers at batch {at}; cut elsewhere")
    return program, Schema(_entering(part), names, (low, high))


def _program(
    plan: TracePlan, part: Part, root: nn.Module, batch: int, low: int, high: int
) -> tuple[Any, tuple[str, ...]]:
    """The program, traced at one batch for all from `low` to `high`, and the names of its outputs."""
    takes = [plan.values[name] for name in part.takes]
    dim: Any = torch.export.Dim("batch", min=low, max=high) if low < high else batch
    plain = replace(plan, output_spec=_plain(plan.output_spec))
    function = load(emit(plain, part, root), "exported")
    labels = part.gives

    def run(size: Any, *given: torch.Tensor) -> Any:
        found = function(size, *given)
        return found if labels is None else dict(zip(labels, found, strict=True))

    model = Exported(root, run, _batch_of(plan, takes))
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in _entering(part)]
    model.__dict__["forward"] = _named(model.forward, inspect.Signature(parameters))
    examples = tuple(_example(v, plan.batch_symbol, batch) for v in takes)
    shapes = tuple(_shape(v, plan.batch_symbol, dim) for v in takes) if low < high else None
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, examples, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # of any class: what torch.export can't follow
        raise HalfError(f"torch.export can't take this half: {_first(error)}. Cut elsewhere") from error
    return program, tuple(labels) if labels is not None else tuple(_names(plain.output_spec))


def _agrees(program: Any, plan: TracePlan, part: Part, root: nn.Module, batch: int) -> bool:
    """Whether the program takes a batch, and gives what the half itself gives."""
    given = tuple(_example(plan.values[name], plan.batch_symbol, batch) for name in part.takes)
    function = load(emit(plan, part, root), "exported")
    with torch.no_grad():
        wanted = [leaf for leaf in tree.leaves(function(batch, *given)) if isinstance(leaf, torch.Tensor)]
        try:
            found = [leaf for leaf in tree.leaves(program.module()(*given)) if isinstance(leaf, torch.Tensor)]
        except (AssertionError, RuntimeError):  # its guards
            return False
    return len(found) == len(wanted) and all(map(alike, found, wanted))


def _entering(part: Part) -> tuple[str, ...]:
    """The names of the inputs: those of the plan, but where an input crosses as it is, and its label names an output."""
    leaving = {*(part.gives or ())}
    return tuple(f"{name}_in" if name in leaving else name for name in part.takes)


def _named(forward: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """The same function under the names of the inputs, by which exporters go."""

    def named(*given: torch.Tensor) -> Any:
        return forward(*given)

    named.__signature__ = signature  # type: ignore[attr-defined]
    return named


def _refuse(plan: TracePlan, part: Part) -> None:
    """Raise `HalfError` for what no exported program does as the model does it."""
    if plan.training:
        raise HalfError("a half in train mode isn't exported: put the model into eval mode, prepare and save it again")
    for node in part.nodes(plan):
        where = f"{node.target} (in {node.module or 'the model itself'})"
        if node.target == WHOLE or (node.is_witness and node.target != "aten.sym_size.int"):
            raise HalfError(
                f"the model's Python reads what {where} gives, which an exported program can't; cut elsewhere"
            )
        if node.seeded and _draws(node):
            raise HalfError(f"{where} draws random numbers, which another runtime draws otherwise; cut elsewhere")
        if node.target.startswith("python."):
            raise HalfError(f"{where} is a function of Python, which an exported program can't call; cut elsewhere")
    symbols = {s.symbol for s in plan.sizes}
    if any(isinstance(d, Expr) and d.names & symbols for name in part.takes for d in plan.values[name].shape):
        raise HalfError(
            f"this half serves several sizes of {', '.join(sorted(symbols))}, and a program is exported for one: prepare the split "
            "without dynamic, at the size that is to be exported"
        )
    stores = part.stores(plan)
    if stores:
        raise HalfError(
            f"forward stores something in {stores[0].name!r} of {stores[0].path or 'the model'!r}, which an exported program "
            "can't; cut elsewhere"
        )
    others = [n for n in (*part.takes, *(part.gives or ())) if plan.values[n].dtype is None]
    if others:
        raise HalfError(f"{others[0]!r} crosses the cut and is no tensor, which exported programs take; cut elsewhere")


def _draws(node: TraceNode) -> bool:
    """Whether an op that may draw random numbers does so, by what its schema says of its arguments."""
    if node.target.startswith("python."):
        return True
    schema = resolve(node.target)._schema.arguments
    given = {**{a.name: a.default_value for a in schema if a.has_default_value()}, **dict(node.kwargs)}
    given |= {a.name: v for a, v in zip(schema, node.args, strict=False)}
    off = [
        given.get(name) in (0, 0.0, False)
        for name in ("p", "dropout", "dropout_p", "train", "training")
        if name in given
    ]
    return not any(off)


def _batches(plan: TracePlan) -> tuple[int, int, int]:
    """A batch to trace at, and the range that it lies in of those that the plan serves."""
    low, high = max(plan.batches.ranges, key=lambda r: r[1] - r[0])
    return min(max(plan.traced_batch, low, FROM_ONE), high), min(max(low, 1), high), high


def _example(value: Value, symbol: str, batch: int) -> torch.Tensor:
    sizes = [d if isinstance(d, int) else int(d.evaluate({symbol: batch})) for d in value.shape]
    found = torch.zeros(sizes, dtype=value.dtype, device=value.device)
    if found.is_floating_point() or found.is_complex():
        found.normal_(generator=torch.Generator(found.device).manual_seed(0))
    return found


def _shape(value: Value, symbol: str, dim: Any) -> dict[int, Any]:
    """Which dims of a value follow the batch, as torch.export is told."""
    found = {}
    for i, d in enumerate(value.shape):
        if isinstance(d, Expr):
            step, start = _linear(d, symbol)
            scaled = dim if step == 1 else step * dim
            found[i] = scaled if start == 0 else scaled + start
    return found


def _linear(size: Expr, symbol: str) -> tuple[int, int]:
    """How often the batch is in a size, and what is added; `HalfError` for a size that follows it otherwise."""
    try:
        first, second, tenth = (size.evaluate({symbol: n}) for n in (1, 2, 10))
    except NameError:
        first = second = tenth = 0
    step = second - first
    if step < 1 or tenth != first + 9 * step:
        raise HalfError(
            f"a tensor that crosses has a size {size.source}, which torch.export can't follow; cut elsewhere"
        )
    return int(step), int(first - step)


def _batch_of(plan: TracePlan, takes: list[Value]) -> Callable[..., Any]:
    """Reads the batch off the inputs."""
    sized = [
        (i, d, *_linear(s, plan.batch_symbol))
        for i, v in enumerate(takes)
        for d, s in enumerate(v.shape)
        if isinstance(s, Expr)
    ]
    if not sized:
        raise HalfError("no tensor that comes in has the batch among its sizes; cut elsewhere")
    at, dim, step, start = min(sized, key=lambda s: (s[2], s[3] != 0))

    def batch(*given: torch.Tensor) -> Any:
        size = given[at].shape[dim]
        return size if (step, start) == (1, 0) else (size - start) // step

    return batch


def _plain(spec: tree.Spec) -> tree.Spec:
    """The same structure of dicts, lists and tuples alone."""
    children = tuple(_plain(c) for c in spec.children)
    if spec.kind in (tree.LEAF, "list", "tuple", "dict"):
        return replace(spec, children=children)
    if spec.kind in ("fields", "mapping"):
        return tree.Spec("dict", dict, spec.keys, children)
    return tree.Spec("tuple", tuple, (), children)


def _names(spec: tree.Spec, above: str = "output") -> Iterator[str]:
    """A name for each leaf of a structure: `output`, `output_logits`, `output_0`."""
    if spec.kind == tree.LEAF:
        yield above
    keys = spec.keys if spec.kind == "dict" else range(len(spec.children))
    for key, child in zip(keys, spec.children, strict=True):
        yield from _names(child, f"{above}_{key}")


def _to_onnx(program: Any, path: Path, schema: Schema, about: Mapping[str, str]) -> None:
    onnx = importlib.import_module("torch.onnx")
    try:
        made = onnx.export(
            program, input_names=[*schema.inputs], output_names=[*schema.outputs], dynamo=True, verbose=False
        )
    except Exception as error:  # of any class: what an exporter can't take
        raise HalfError(f"torch.onnx can't write this half: {_first(_cause(error))}. Cut elsewhere") from error
    _apart(made.model.graph)
    made.model.metadata_props.update({f"ariadne.{key}": value for key, value in about.items()})
    made.save(str(path), external_data=False if _size(program) < 2**31 - 2**20 else None)


def _apart(graph: Any) -> None:
    """Give values within a graph other names than those that were chosen for its inputs and outputs: the exporter does not look."""
    ends = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
    taken, known = {value.name for value in ends}, {id(value) for value in ends}
    for node in graph.all_nodes():
        for value in node.outputs:
            if id(value) in known:
                continue
            number, name = 0, value.name
            while value.name in taken:
                number += 1
                value.name = f"{name}_{number}"
            taken.add(value.name)


def _to_pt2(program: Any, path: Path, schema: Schema, about: Mapping[str, str]) -> None:
    torch.export.save(program, str(path), extra_files={"ariadne.json": json.dumps(dict(about))})


def _to_pte(program: Any, path: Path, schema: Schema, about: Mapping[str, str]) -> None:
    exir = importlib.import_module("executorch.exir")
    try:
        buffer = exir.to_edge(program).to_executorch().buffer
    except Exception as error:  # of any class: what an exporter can't take
        raise HalfError(f"executorch can't write this half: {_first(_cause(error))}. Cut elsewhere") from error
    path.write_bytes(buffer)


def _size(program: Any) -> int:
    return sum(t.numel() * t.itemsize for t in program.state_dict.values())


def _cause(error: BaseException) -> BaseException:
    """What an error came from at first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _first(error: BaseException) -> str:
    """The first line of an error that says something, with its class."""
    lines = [line.strip() for line in str(error).splitlines()[:_MOST] if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no reason given'}"
