"""Words of a drawing: shapes, sizes, parameters and ops, as short as they can be and still be understood."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ariadne import tree
from ariadne.plan import PLAIN, Dim, Expr, TraceNode, TracePlan, Value, short_dtype

MOST_NAMES = 3  # of parameters, ops or targets in one row; the rest is counted


def some(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """The first few, and how many more there are."""
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} +{len(names) - most} more"


def ending(name: str, most: int = 26) -> str:
    """A long name by its end, which tells it from others: `…_m_1_cv2_act`."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def counted(number: int, noun: str) -> str:
    """`1 op`, `2 ops`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shape(dims: Iterable[Dim]) -> str:
    """`Bx64x32x32`; one dim is `x64`, none is `scalar`; an expression with an operator stands in parentheses."""
    found = [f"({d})" if isinstance(d, Expr) and not d.source.isidentifier() else str(d) for d in dims]
    if not found:
        return "scalar"
    return "x".join(found) if len(found) > 1 else f"x{found[0]}"


def per_sample(plan: TracePlan, value: Value) -> float:
    """Bytes of a value: of one sample where a size follows the batch, of the whole where none does."""
    size = value.nbytes(plan.traced)
    return size / (plan.traced_batch or 1) if follows_batch(value) else float(size)


def follows_batch(value: Value) -> bool:
    """Whether some size of a value is not the same in every batch."""
    return any(isinstance(d, Expr) for d in value.shape)


def megabytes(size: float) -> str:
    """Bytes as MB of 10^6 bytes, with two or three digits that count."""
    mb = size / 1e6
    if 0 < mb < 0.001:
        return "<0.001 MB"
    return f"{mb:.3g} MB" if mb < 1000 else f"{mb:,.0f} MB"


def count(number: int) -> str:
    """`74.0K` for 73,984."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return str(number)


def result(plan: TracePlan, names: Sequence[str]) -> str:
    """The row of shape and size of what a box makes."""
    values = [plan.values[n] for n in names if n in plan.values]
    tensors = [v for v in values if v.dtype is not None]
    if not tensors:
        return ", ".join(dict.fromkeys(v.kind for v in values))
    shapes: dict[str, int] = {}
    for v in tensors:
        shapes[shape(v.shape)] = shapes.get(shape(v.shape), 0) + 1
    words = some([s if n == 1 else f"{n} of {s}" for s, n in shapes.items()], 2)
    return f"{words}, {megabytes(sum(per_sample(plan, v) for v in tensors))}"


def parameters(plan: TracePlan, nodes: Iterable[TraceNode], inside: str, total: bool) -> str:
    """The row of parameters that ops read: `params: weight(64x3x7x7), bias(x64)`, frozen ones as `weight[64x3x7x7]`.

    Of a module whose parts are not shown it is their number: `params: 74.0K`, and `[1.2K]` those of it that are frozen.
    """
    found = _state(plan, nodes, "parameter")
    if not found:
        return ""
    if not total:
        words = [f"{_local(v, inside)}{'(' if v.requires_grad else '['}{shape(v.shape)}{')' if v.requires_grad else ']'}"
                 for v in found]  # fmt: skip
        return f"params: {some(words)}"
    trained, frozen = (sum(elements(v) for v in found if v.requires_grad is flag) for flag in (True, False))
    return "params: " + " + ".join(
        [*([count(trained)] if trained else []), *([f"[{count(frozen)}]"] if frozen else [])]
    )


def buffers(plan: TracePlan, nodes: Iterable[TraceNode], inside: str) -> str:
    """The row of buffers that ops read; shown with the debug markers."""
    found = [f"{_local(v, inside)}[{shape(v.shape)}]" for v in _state(plan, nodes, "buffer")]
    return f"buffers: {some(found)}" if found else ""


def elements(value: Value) -> int:
    """How many numbers a tensor of the model has."""
    total = 1
    for d in value.shape:
        total *= d if isinstance(d, int) else 1
    return total


def _state(plan: TracePlan, nodes: Iterable[TraceNode], kind: str) -> list[Value]:
    names = dict.fromkeys(r for node in nodes for r in node.reads if r in plan.values)
    found = [v for v in map(plan.values.__getitem__, names) if v.kind == kind]
    return sorted(found, key=lambda v: -len(v.shape))  # a weight before its bias, whatever the op's order


def local(path: str, inside: str) -> str:
    """A module's path as seen from the module `inside`: `.conv1` within `layer1.0`.

    It is the whole path where it is kept elsewhere, and where a bare number would be left of it: `layer1.0` within `layer1`.
    """
    rest = path.removeprefix(f"{inside}.")
    return f".{rest}" if inside and rest != path and not rest.isdigit() else path


def _local(value: Value, inside: str) -> str:
    """The name of a tensor of the model, as seen from the module `inside`."""
    full = ".".join(str(part) for part in value.origin if part != "")
    return full.removeprefix(f"{inside}.") if inside else full


def op(node: TraceNode) -> str:
    """What an op does, in one word: `conv2d`, `add`."""
    name = node.target.split(".")[1] if node.target.count(".") else node.target
    return name.rstrip("_") or name


def ops(plan: TracePlan, nodes: Sequence[TraceNode]) -> str:
    """A few ops in a few words: those that compute something before those that only look at memory in another way."""
    looks = {node.name: _only_looks(plan, node) for node in nodes}
    names = list(dict.fromkeys(op(node) for node in sorted(nodes, key=lambda n: looks[n.name])))
    return names[0] if len(nodes) == 1 else f"{some(names)} ({len(nodes)} ops)"


def _only_looks(plan: TracePlan, node: TraceNode) -> bool:
    """Whether all that an op returns is memory that it read, and it writes none."""
    read = {plan.values[r].storage for r in node.reads if r in plan.values}
    made = {plan.values[n].storage for n in node.outputs if n in plan.values}
    return not node.writes and bool(made) and -1 not in made and made <= read


def targets(nodes: Sequence[TraceNode]) -> str:
    """The row of ATen targets."""
    return some(list(dict.fromkeys(node.target for node in nodes)))


def markers(plan: TracePlan, nodes: Sequence[TraceNode], results: Sequence[str]) -> list[str]:
    """The rows for who looks into the plan itself: types and bytes, what is written, drawn, aliased, looked at, switched."""
    rows = []
    tensors = [v for v in (plan.values[n] for n in results if n in plan.values) if v.dtype is not None]
    if tensors:
        types = ", ".join(dict.fromkeys(short_dtype(v.dtype) for v in tensors if v.dtype is not None))
        rows.append(f"{types}, {sum(per_sample(plan, v) for v in tensors):,.0f} bytes")
    written = dict.fromkeys(w for node in nodes for w in node.writes)
    shared = dict.fromkeys(b for node in nodes for a, b in node.may_alias if b not in written)
    regions = dict.fromkeys(_region(node) for node in nodes if node.region != PLAIN)
    rows += [f"writes {some(list(written))}"] if written else []
    rows += [f"may share memory with {some(list(shared))}"] if shared else []
    rows += ["draws random numbers"] if any(node.seeded for node in nodes) else []
    rows += [f"Python saw {node.witness!r}" for node in nodes if node.is_witness][:2]
    return rows + list(regions)


def _region(node: TraceNode) -> str:
    words = [] if node.region.grad is None else [f"gradients {'on' if node.region.grad else 'off'}"]
    words += [f"autocast {d} {short_dtype(t) if on else 'off'}" for d, on, t, _ in node.region.autocast]
    words += [f"{switch} {value}" for switch, value in node.region.switches]
    return ", ".join(words)


def inputs(plan: TracePlan) -> dict[str, str]:
    """For each input of the plan, how a caller names it: a keyword, or the name that the plan gave it."""
    leaves = list(range(plan.input_spec.size))
    where = {i: path for path, i in tree.paths(tree.unflatten(leaves, plan.input_spec))}
    found = {}
    for position, name in plan.inputs:
        path = where.get(position, "")
        key = path.removeprefix("[1]")
        is_keyword = path.startswith("[1]['")
        found[name] = key[2:].replace("']", "", 1) if is_keyword else name
    return found
