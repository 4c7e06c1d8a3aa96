"""Rows: whether a stretch of a plan computes each sample from that sample alone. Only there may a batch be padded.

Every value is followed through rules about the ops. A value stands for the batch along one dim, `Along(dim, each)`: that dim is
`each * B` long, and sample i lies in its i-th stretch of `each`. None stands for a value that is the same whatever the batch.
An op without a rule is taken to mix samples: what these rules let through is shown, what they don't is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ariadne.plan import Expr, Groups, Ref, TraceNode, TracePlan, bind, uses


class Along(NamedTuple):
    """Where the samples lie in a tensor: along `dim`, `each` elements of it for one sample."""

    dim: int
    each: int = 1


class Mixed(Exception):
    """An op may compute one sample from others; its words say which."""


Size = int | Expr


def rows(plan: TracePlan, nodes: Sequence[TraceNode], inputs: Iterable[str]) -> dict[str, Along | None]:
    """Where the samples lie in every value that `nodes` compute from `inputs`; `Mixed` where they may meet.

    An input that has the batch as a size, once, is taken to hold a sample in each part of that dim.
    """
    groups = Groups(plan)
    outside = {groups.find(name) for _, name in plan.inputs if name in groups.parent}
    written = next((n for node in plan.nodes for n in node.writes if groups.find(n) in outside), None)
    if written is not None:
        raise Mixed(f"{written}, which it writes, is memory of an input: a padded copy would be written instead")
    found = {name: _given(plan, name) for name in inputs}
    for node in nodes:
        op = _Op(plan, node, found)
        try:
            along = op.after()
        except Mixed as why:
            raise Mixed(f"{node.name} = {node.target}: {why}") from None
        found.update(along)
    return found


def _given(plan: TracePlan, name: str) -> Along | None:
    value = plan.values[name]
    if value.dtype is None:
        raise Mixed(f"{name} is a {value.kind}, not a tensor")
    return _only(plan, name, value.shape)


def _only(plan: TracePlan, name: str, shape: Sequence[Size]) -> Along | None:
    """The one dim of a shape that grows with the batch."""
    grown = [i for i, size in enumerate(shape) if isinstance(size, Expr)]
    if not grown:
        return None
    each = _multiple(shape[grown[0]], plan.batch_symbol)
    if len(grown) > 1 or each is None:
        raise Mixed(f"{name} has the sizes [{', '.join(map(str, shape))}], not the batch along one dim")
    return Along(grown[0], each)


def _multiple(size: Size, symbol: str) -> int | None:
    """k where a size is k times the batch."""
    if isinstance(size, int) or size.names != {symbol}:
        return None
    k = size.evaluate({symbol: 1})
    return int(k) if k > 0 and all(size.evaluate({symbol: b}) == k * b for b in (2, 3, 5, 7, 64)) else None


class _Op:
    """One op, with its arguments by name, and what is known of those that are tensors."""

    def __init__(self, plan: TracePlan, node: TraceNode, found: dict[str, Along | None]) -> None:
        self.plan, self.node, self.found = plan, node, found
        self.arguments: dict[str, Any] = {}
        self.name, self.tags = node.target, frozenset[Any]()
        if node.target.startswith("aten."):
            _, name, overload = node.target.split(".")
            target = getattr(getattr(torch.ops.aten, name), overload)
            bound = bind(target, node.args, dict(node.kwargs))
            self.arguments = dict(zip((a.name for a in target._schema.arguments), bound, strict=True))
            self.name, self.tags = name.rstrip("_"), frozenset(target.tags)

    def after(self) -> dict[str, Along | None]:
        """Where the samples lie in each of the outputs."""
        node, symbol = self.node, self.plan.batch_symbol
        sizes = any(symbol in e.names for e in _expressions((node.args, tuple(v for _, v in node.kwargs))))
        if not sizes and all(a is None for a in self.taken().values()):
            if self.draws:
                raise Mixed("it draws random numbers")
            return dict.fromkeys(node.outputs)
        if not node.target.startswith("aten."):
            raise Mixed("it is a function of its own, about which nothing is known")
        if self.name not in _RULES and torch.Tag.pointwise not in self.tags:
            raise Mixed("there is no rule about it")
        if self.draws:
            raise Mixed("it draws random numbers, as many as there are samples")
        if sizes and self.name not in _BY_SIZE:
            raise Mixed("it takes the batch as a number")
        try:
            result = _RULES.get(self.name, _pointwise)(self)
        except KeyError as key:
            raise Mixed(f"there is no rule about a form of it without {key}") from None
        along = result if isinstance(result, list) else [result] * len(node.outputs)
        for name, there in zip(node.outputs, along, strict=True):
            self.agree(name, there)
        for name in node.writes:
            if self.along(Ref(name)) != along[0]:
                raise Mixed(f"it writes samples into {name}, which holds none there")
        return dict(zip(node.outputs, along, strict=True))

    def agree(self, name: str, along: Along | None) -> None:
        """Hold what a rule says against the shape in the plan."""
        expected = _only(self.plan, name, self.plan.values[name].shape)
        if expected != along:
            raise Mixed(f"samples would lie {along}, and the shape says {expected}")

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, which are then others for those who come after it."""
        dropping = self.arguments.get("dropout_p") != 0 and self.arguments.get("train") is not False
        return self.node.seeded and dropping

    def taken(self) -> dict[str, Along | None]:
        """The tensors that it takes."""
        reads = dict.fromkeys(uses((self.node.args, tuple(v for _, v in self.node.kwargs))))
        return {name: self.along(Ref(name)) for name in reads if name in self.plan.values}

    def along(self, atom: Any) -> Along | None:
        """Where the samples lie in an argument; None where it is no tensor."""
        if not isinstance(atom, Ref):
            return None
        value = self.plan.values.get(atom.name)
        return None if value is None or value.is_state else self.found.get(atom.name)

    def shape(self, atom: Any) -> tuple[Size, ...]:
        """The sizes of an argument."""
        return self.plan.values[atom.name].shape

    @property
    def result(self) -> tuple[Size, ...]:
        """The sizes of the first output."""
        return self.plan.values[self.node.outputs[0]].shape

    @property
    def first(self) -> tuple[Along, int]:
        """Where the samples lie in the first argument, and its rank; they must lie there, and in no other."""
        atom = next(iter(self.arguments.values()))
        along = self.along(atom)
        others = [name for name, a in self.taken().items() if a is not None and name != getattr(atom, "name", None)]
        if along is None or others:
            raise Mixed(f"samples lie in {' and '.join(others)}, its second argument or a later one")
        return along, len(self.shape(atom))

    def dims(self, key: str, rank: int) -> list[int]:
        """The dims that an argument names; all of them where it names none."""
        given = self.arguments[key]
        listed = [given] if isinstance(given, int) else list(given or range(rank))
        return [d % rank for d in listed]


def _expressions(atoms: Any) -> Iterator[Expr]:
    if isinstance(atoms, Expr):
        yield atoms
    elif isinstance(atoms, tuple):
        for a in atoms:
            yield from _expressions(a)
    elif isinstance(atoms, slice):
        yield from _expressions((atoms.start, atoms.stop, atoms.step))


def _pointwise(op: _Op) -> Along:
    """Sizes are matched from the last dim on; so are the dims of the samples."""
    rank = len(op.result)
    ends = set()
    for name, along in op.taken().items():
        if along is not None:
            ends.add((len(op.shape(Ref(name))) - along.dim, along.each))
    if len(ends) != 1:
        raise Mixed("its arguments hold the samples along different dims")
    ((end, each),) = ends
    return Along(rank - end, each)


def _same(op: _Op) -> Along:
    return op.first[0]


def _beside(*keys: str) -> Callable[[_Op], Along]:
    """Ops that go along the dims that they name, and leave all others as they are."""

    def rule(op: _Op) -> Along:
        along, rank = op.first
        key = next(k for k in keys if k in op.arguments)
        if along.dim in op.dims(key, rank):
            raise Mixed("it goes along the batch")
        return along

    return rule


def _reduced(*keys: str) -> Callable[[_Op], Along]:
    """Ops that shorten the dims that they name to nothing, or to 1."""

    def rule(op: _Op) -> Along:
        along, rank = op.first
        key = next((k for k in keys if k in op.arguments), None)
        gone = op.dims(key, rank) if key else list(range(rank))
        if along.dim in gone:
            raise Mixed("it goes along the batch")
        kept = op.arguments.get("keepdim", False)
        return along if kept else Along(along.dim - sum(d < along.dim for d in gone), along.each)

    return rule


def _removed(op: _Op) -> Along:
    along, rank = op.first
    (dim,) = op.dims("dim", rank)
    if dim == along.dim:
        raise Mixed("it goes along the batch")
    return Along(along.dim - (dim < along.dim), along.each)


def _leading(spatial: int) -> Callable[[_Op], Along]:
    """Ops on (N, C, …): the samples lie along dim 0, and none of the other arguments holds any."""

    def rule(op: _Op) -> Along:
        along, rank = op.first
        if along.dim != 0 or (spatial and rank != spatial + 2) or op.arguments.get("training"):
            raise Mixed("samples must lie along dim 0 there, and be normalised each by itself")
        return along

    return rule


def _layer_norm(op: _Op) -> Along:
    along, rank = op.first
    if along.dim >= rank - len(op.arguments["normalized_shape"]):
        raise Mixed("it normalises along the batch")
    return along


def _linear(op: _Op) -> Along:
    along, rank = op.first
    if along.dim == rank - 1:
        raise Mixed("it adds along the batch")
    return along


def _embedding(op: _Op) -> Along | None:
    if op.along(op.arguments["weight"]) is not None or op.arguments["scale_grad_by_freq"]:
        raise Mixed("its table holds samples, or its gradient counts them")
    return op.along(op.arguments["indices"])


def _product(a: str, b: str) -> Callable[[_Op], Along]:
    """Matrix products: the samples may not lie along the dim that is added up; in both they must lie along the same one."""

    def rule(op: _Op) -> Along:
        sides = [(op.along(op.arguments[k]), op.shape(op.arguments[k])) for k in (a, b)]
        if any(op.along(atom) for key, atom in op.arguments.items() if key not in (a, b)):
            raise Mixed("samples lie in what is added to the product")
        if any(len(shape) < 2 for _, shape in sides):
            raise Mixed("it multiplies with a vector")
        ends = {(len(shape) - along.dim, along.each) for along, shape in sides if along is not None}
        (left, one), (right, other) = sides
        summed = (left is not None and left.dim == len(one) - 1) or (right is not None and right.dim == len(other) - 2)
        if summed or len(ends) != 1:
            raise Mixed("it adds along the batch")
        ((end, each),) = ends
        if left is not None and right is not None and end < 3:
            raise Mixed("it multiplies samples with one another")
        return Along(len(op.result) - end, each)

    return rule


def _attention(op: _Op) -> Along:
    query = op.along(op.arguments["query"])
    rank = len(op.shape(op.arguments["query"]))
    for key in ("query", "key", "value"):
        if op.along(op.arguments[key]) != query or len(op.shape(op.arguments[key])) != rank:
            raise Mixed("query, key and value hold the samples along different dims")
    if query is None or query.dim > rank - 3:
        raise Mixed("samples attend to one another")
    mask = op.arguments.get("attn_mask")
    there = op.along(mask)
    if there is not None and (len(op.shape(mask)) - there.dim, there.each) != (rank - query.dim, query.each):
        raise Mixed("its mask holds the samples along another dim")
    return query


def _reshaped(op: _Op) -> Along:
    """A view of the same elements in the same order: as many lie before the samples, and as many belong to each."""
    atom = next(iter(op.arguments.values()))
    along = op.along(atom)
    if along is None:
        raise Mixed("the batch comes out of a size that is fixed")
    shape: tuple[Any, ...] = op.shape(atom)
    result: tuple[Any, ...] = op.result
    before, each = prod(shape[: along.dim]), along.each * prod(shape[along.dim + 1 :])
    there = _only(op.plan, op.node.outputs[0], result)
    if there is None or (prod(result[: there.dim]), there.each * prod(result[there.dim + 1 :])) != (before, each):
        raise Mixed("samples do not stay in one piece")
    return there


def _permuted(op: _Op) -> Along:
    along, rank = op.first
    order = list(range(rank))
    if "dims" in op.arguments:
        order = [d % rank for d in op.arguments["dims"]]
    elif "dim0" in op.arguments or "axis0" in op.arguments:
        a, b = ("dim0", "dim1") if "dim0" in op.arguments else ("axis0", "axis1")
        i, j = op.arguments[a] % rank, op.arguments[b] % rank
        order[i], order[j] = order[j], order[i]
    else:  # t, numpy_T, mT and the like
        order[-2:] = reversed(order[-2:])
        if rank > 2 and op.name in ("numpy_T", "t"):
            raise Mixed("it turns all dims around")
    return Along(order.index(along.dim), along.each)


def _unsqueezed(op: _Op) -> Along:
    along, rank = op.first
    dim = op.arguments["dim"] % (rank + 1)
    return Along(along.dim + (dim <= along.dim), along.each)


def _squeezed(op: _Op) -> Along:
    along, rank = op.first
    shape = op.shape(next(iter(op.arguments.values())))
    named = op.dims("dim", rank) if "dim" in op.arguments else range(rank)
    gone = [d for d in named if shape[d] == 1]
    return Along(along.dim - sum(d < along.dim for d in gone), along.each)


def _expanded(op: _Op) -> Along | None:
    """Sizes are matched from the last dim on. What held no samples holds the same for each."""
    atom = next(iter(op.arguments.values()))
    along = op.along(atom)
    if along is None:
        return _only(op.plan, op.node.outputs[0], op.result)
    return Along(len(op.result) - (len(op.shape(atom)) - along.dim), along.each)


def _repeated(op: _Op) -> Along | None:
    """Each part is a whole copy. What held no samples is one for each."""
    along, rank = op.along(op.arguments["self"]), len(op.shape(op.arguments["self"]))
    if along is None:
        return _only(op.plan, op.node.outputs[0], op.result)
    if op.arguments["repeats"][along.dim - rank] != 1:
        raise Mixed("it goes along the batch")
    return Along(len(op.result) - (rank - along.dim), along.each)


def _made(op: _Op) -> Along | None:
    """New tensors that hold the same for every sample. `arange` does not: what it numbers beyond the batch no model has seen."""
    number = op.arguments.get("fill_value")
    if isinstance(number, Expr) and op.plan.batch_symbol in number.names:
        raise Mixed("it takes the batch as a number")
    return _only(op.plan, op.node.outputs[0], op.result)


def _joined(op: _Op) -> Along:
    tensors = op.arguments["tensors"]
    found = {(op.along(t), len(op.shape(t))) for t in tensors}
    if len(found) != 1:
        raise Mixed("its tensors hold the samples along different dims")
    ((along, rank),) = found
    assert along is not None
    if op.name == "stack":
        dim = op.arguments["dim"] % (rank + 1)
        return Along(along.dim + (dim <= along.dim), along.each)
    if op.arguments["dim"] % rank == along.dim:
        raise Mixed("it goes along the batch")
    return along


def _padded(op: _Op) -> Along:
    along, rank = op.first
    if along.dim >= rank - len(op.arguments["pad"]) // 2:
        raise Mixed("it goes along the batch")
    return along


def _gathered(op: _Op) -> Along:
    taken = set(op.taken().values())
    along = op.along(op.arguments["self"])
    if along is None or taken != {along}:
        raise Mixed("its index holds the samples elsewhere")
    if op.arguments["dim"] % len(op.shape(op.arguments["self"])) == along.dim:
        raise Mixed("it goes along the batch")
    return along


def _indexed(op: _Op) -> Along:
    """Indices without samples, on dims behind that of the samples."""
    along, _ = op.first
    indices = op.arguments["indices"]
    if any(atom is not None for atom in indices[: along.dim + 1]):
        raise Mixed("it picks along the batch, or moves it")
    return along


def _sampled(op: _Op) -> Along:
    if any(along != Along(0) for along in (op.along(op.arguments["input"]), op.along(op.arguments["grid"]))):
        raise Mixed("picture and grid must hold the samples along dim 0")
    return Along(0)


def _recurrent(op: _Op) -> list[Along | None]:
    hidden, dim = op.arguments["hx"], 0 if op.arguments["batch_first"] else 1
    held = [op.along(h) for h in (hidden if isinstance(hidden, tuple) else (hidden,))]
    if op.along(op.arguments["input"]) != Along(dim) or any(h != Along(1) for h in held):
        raise Mixed("its input does not hold the samples where it looks for them")
    return [Along(dim), *(Along(1) for _ in op.node.outputs[1:])]


_RULES: dict[str, Callable[[_Op], Any]] = {
    **dict.fromkeys(
        "alias clone contiguous detach dropout feature_dropout alpha_dropout lift_fresh to _to_copy zeros_like ones_like "
        "full_like empty_like fill zero".split(),
        _same,
    ),
    **dict.fromkeys("copy hardswish prelu masked_fill floor_divide log_sigmoid __and__ __or__ __xor__".split(), _pointwise),
    **dict.fromkeys("softmax log_softmax _softmax _log_softmax cumsum cumprod sort argsort topk glu".split(), _beside("dim")),
    **dict.fromkeys("flip roll".split(), _beside("dims")),
    **dict.fromkeys("slice narrow split split_with_sizes chunk tensor_split".split(), _beside("dim")),
    **dict.fromkeys("sum mean amax amin argmax argmin max min any all prod std var logsumexp norm".split(), _reduced("dim")),
    "linalg_vector_norm": _reduced("dim"),
    **dict.fromkeys("select unbind".split(), _removed),
    **dict.fromkeys("conv1d conv_transpose1d max_pool1d avg_pool1d adaptive_avg_pool1d".split(), _leading(1)),
    **dict.fromkeys(
        "conv2d conv_transpose2d max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d "
        "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d pixel_shuffle pixel_unshuffle "
        "channel_shuffle".split(),
        _leading(2),
    ),
    **dict.fromkeys("conv3d conv_transpose3d max_pool3d avg_pool3d adaptive_avg_pool3d".split(), _leading(3)),
    **dict.fromkeys("batch_norm group_norm".split(), _leading(0)),
    **dict.fromkeys("layer_norm rms_norm native_layer_norm".split(), _layer_norm),
    "linear": _linear,
    "embedding": _embedding,
    **dict.fromkeys("matmul".split(), _product("self", "other")),
    **dict.fromkeys("mm bmm".split(), _product("self", "mat2")),
    **dict.fromkeys("addmm".split(), _product("mat1", "mat2")),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys("view reshape _unsafe_view reshape_as view_as flatten unflatten".split(), _reshaped),
    **dict.fromkeys("permute transpose swapaxes swapdims t mT".split(), _permuted),
    "type_as": lambda op: op.along(op.arguments["self"]),
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    **dict.fromkeys("expand expand_as".split(), _expanded),
    "repeat": _repeated,
    **dict.fromkeys("zeros ones empty full new_zeros new_ones new_empty new_full".split(), _made),
    **dict.fromkeys("cat concat stack".split(), _joined),
    **dict.fromkeys("pad constant_pad_nd reflection_pad2d replication_pad2d".split(), _padded),
    "gather": _gathered,
    "index": _indexed,
    "grid_sampler": _sampled,
    "lstm": _recurrent,
    "gru": _recurrent,
}  # fmt: skip
_BY_SIZE = frozenset(
    "view reshape _unsafe_view reshape_as view_as flatten unflatten expand expand_as repeat zeros ones empty full new_zeros "
    "new_ones new_empty new_full".split()
)
