"""Examples: the inputs that a model is captured with, and what a capture gives."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ariadne import tree
from ariadne.errors import SpecError
from ariadne.guards import Baseline
from ariadne.plan import Size, TracePlan, own, sizes_in

_SEED = 2654435761  # of the floats of `lively`, which are the same each time
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


@dataclass(frozen=True)
class Example:
    """Example inputs: leaves, their structure, which tensor leaves carry the batch along which dim, and the batch they have."""

    leaves: tuple[Any, ...]
    spec: tree.Spec
    batched: Mapping[int, int]
    batch: int
    sizes: tuple[Size, ...] = ()

    @classmethod
    def of(
        cls,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sizes: Sequence[Size] = (),
        along: Mapping[int, int | None] | None = None,
    ) -> Example:
        """Those of a call. `along` says for some leaves along which dim the batch lies, or that they have none."""
        leaves, spec = tree.flatten((tuple(args), dict(kwargs)))
        of_their_own = {(size.leaf, size.dim) for size in sizes}  # as large as the batch by accident
        dims = {i: (along or {}).get(i, 0) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        batch = next((leaves[i].shape[d] for i, d in dims.items() if d is not None and leaves[i].dim() > d), 1)
        batched = {
            i: dim
            for i, dim in dims.items()
            if dim is not None
            and (i, dim) not in of_their_own
            and leaves[i].dim() > dim
            and leaves[i].shape[dim] == batch
        }
        return cls(tuple(leaves), spec, batched, batch, tuple(sizes))

    def within(self, batches: range) -> range:
        """Of a range, the batches that it can be cut or repeated to: its own alone where no input has a batch, or no samples."""
        return batches if self.batched and self.batch else range(self.batch, self.batch + 1)

    def resized(self, batch: int, perturbed: bool = False) -> list[Any]:
        """Fresh leaves with `batch` samples: copies of those given, repeated or cut; `perturbed`: with other numbers."""
        out: list[Any] = []
        made: dict[int, torch.Tensor] = {}
        for i, leaf in enumerate(self.leaves):
            if id(leaf) in made:
                out.append(made[id(leaf)])
                continue
            if not isinstance(leaf, torch.Tensor):
                out.append(leaf)
                continue
            with torch.no_grad():
                resize = i in self.batched and batch != self.batch
                t = _samples(leaf.detach(), self.batched[i], batch) if resize else own(leaf.detach())
            if perturbed and t.is_floating_point():
                _memory(t).mul_(0.875).add_(0.0078125)
            made[id(leaf)] = t = _given_as(t, leaf)
            out.append(t)
        return out

    def of_sizes(self, sizes: Mapping[str, int]) -> Example:
        """One with other sizes beside the batch, by symbol: of what is given, repeated or cut."""
        changes: dict[int, dict[int, int]] = {}
        for size in self.sizes:
            if self.leaves[size.leaf].shape[size.dim] != sizes[size.symbol]:
                changes.setdefault(id(self.leaves[size.leaf]), {})[size.dim] = sizes[size.symbol]
        made = {}
        for leaf in self.leaves:
            if id(leaf) in changes and id(leaf) not in made:
                with torch.no_grad():
                    t = leaf.detach()
                    for dim, now in changes[id(leaf)].items():
                        t = _along(t, dim, now)
                made[id(leaf)] = _given_as(t, leaf)
        return replace(self, leaves=tuple(made.get(id(leaf), leaf) for leaf in self.leaves))

    def scaled(self, factor: float) -> Example:
        """One of floats that are so many times as large."""
        leaves = self.resized(self.batch)
        with torch.no_grad():
            for t in {id(t): t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()}.values():
                _memory(t).mul_(factor)
        return replace(self, leaves=tuple(leaves))

    def lively(self, sign: int = 1) -> Example:
        """One of other floats: half of them are those of the other half, a hundred times as large and below zero where these are
        above, so that few of them are lost behind a relu, and fewer with the other `sign`; of other tensors as `turned`.
        """
        turned, draws = self.turned(), torch.Generator().manual_seed(_SEED)
        for t in {id(t): t for t in turned.leaves if isinstance(t, torch.Tensor) and t.is_floating_point()}.values():
            memory = _memory(t)
            drawn = torch.rand(memory.numel(), generator=draws) * 4 - 2
            numbers = (drawn + drawn.sign()) * sign  # from 1 to 3, or from -3 to -1
            half = memory.numel() // 2
            numbers[memory.numel() - half :] = numbers[:half] * -100
            with torch.no_grad():
                memory.copy_(numbers.view(memory.shape))
        return turned

    def turned(self) -> Example:
        """One of other numbers: floats perturbed; of other tensors the samples or all in reverse, without the largest."""
        leaves = self.resized(self.batch, perturbed=True)
        dims = {id(leaves[i]): dim for i, dim in self.batched.items()}
        others = {id(t): t for t in leaves if isinstance(t, torch.Tensor) and not t.is_floating_point()}
        for t in others.values():
            dim = dims.get(id(t))
            if t.dtype in _INTEGERS and t.layout is torch.strided and not t.is_nested and t.numel():
                _memory(t).copy_(_turned(_memory(t), dim))
            elif dim is not None:
                _memory(t).copy_(_memory(t).flip(dim))
        return replace(self, leaves=tuple(leaves))


def declared(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: Mapping[str, Mapping[int, str]] | None,
    ranges: Mapping[str, range], along: Mapping[int, int | None],
) -> tuple[Size, ...]:  # fmt: skip
    """What `SplitSpec.dynamic` says of these inputs; `SpecError` where they have no such input or dim."""
    if not dynamic:
        return ()
    leaves, spec = tree.flatten((tuple(args), dict(kwargs)))
    inputs = _tensors(model, leaves, spec, dynamic, "dynamic")
    first = next((i for i in inputs.values() if along.get(i, 0) is not None), None)
    sizes = []
    for name, dims in ((name, dims) for name, dims in dynamic.items() if name in inputs):
        rank = leaves[inputs[name]].dim()
        for dim, symbol in sorted(dims.items()):
            if dim >= rank:
                raise SpecError(
                    f"dynamic names dim {dim} of {name!r}, which has dims 0 to {rank - 1} in the example inputs"
                )
            if inputs[name] == first and dim == along.get(first, 0):
                raise SpecError(
                    f"dim {dim} of {name!r}, the first input, is the batch: dynamic_batch says how far it goes"
                )
            sizes.append(Size(inputs[name], dim, symbol, ranges[symbol], name))
    sizes_in(sizes, leaves)
    return tuple(sizes)


def batch_dims(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], named: Mapping[str, int | None] | str | None
) -> dict[int, int | None]:
    """What `SplitSpec.batch_dim` says of these inputs, by leaf; `SpecError` where they have no such input, dim or size."""
    if not named:
        return {}
    leaves, spec = tree.flatten((tuple(args), dict(kwargs)))
    if isinstance(named, str):
        return {i: None for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    inputs = _tensors(model, leaves, spec, named, "batch_dim")
    named = {name: dim for name, dim in named.items() if name in inputs}
    along = {inputs[name]: dim for name, dim in named.items()}
    for name, dim in named.items():
        rank = leaves[inputs[name]].dim()
        if dim is not None and dim >= rank:
            raise SpecError(f"batch_dim names dim {dim} of {name!r}, which has {rank} dims in the example inputs")
    first = next((name for name, i in inputs.items() if along.get(i, 0) is not None), None)
    if first is None:
        return along
    i = inputs[first]
    batch = leaves[i].shape[along.get(i, 0) or 0] if leaves[i].dim() else None
    for name, dim in named.items():
        size = None if dim is None else leaves[inputs[name]].shape[dim]
        if size not in (None, batch):
            raise SpecError(
                f"batch_dim says that dim {dim} of {name!r} is the batch, and its size is {size}; that of {first!r} is {batch}. "
                "Inputs share one batch: name another dim, or None for an input without a batch"
            )
    return along


def sizes_named(
    model: torch.nn.Module, leaves: Sequence[Any], spec: tree.Spec, new: Iterable[int],
    dynamic: Mapping[str, Mapping[int, str]], ranges: Mapping[str, range],
) -> tuple[Size, ...]:  # fmt: skip
    """What `SplitSpec.dynamic` says of those inputs of a call that no plan at hand has."""
    names = called(model, spec) if dynamic and new else [""] * len(leaves)
    found = ((i, dim, symbol) for i in new for dim, symbol in sorted(dynamic.get(names[i], {}).items()))
    return tuple(Size(i, dim, s, ranges[s], names[i]) for i, dim, s in found if dim < leaves[i].dim())


def dims_named(
    model: torch.nn.Module, leaves: Sequence[Any], spec: tree.Spec, new: Iterable[int],
    named: Mapping[str, int | None] | str, sizes: Sequence[Size],
) -> dict[int, int]:  # fmt: skip
    """Along which dim the batch may lie in those inputs of a call that no plan at hand has, going by `SplitSpec.batch_dim`."""
    if isinstance(named, str):
        return {}
    names = called(model, spec) if named and new else [""] * len(leaves)
    taken = {(size.leaf, size.dim) for size in sizes}
    dims = {i: named.get(names[i], 0) for i in new}
    return {i: d for i, d in dims.items() if d is not None and d < leaves[i].dim() and (i, d) not in taken}


def _tensors(
    model: torch.nn.Module, leaves: Sequence[Any], spec: tree.Spec, named: Iterable[str], option: str
) -> dict[str, int]:
    """The leaves that are tensors, by forward's names for them; `SpecError` where an option names another.

    It may name what lies in an argument that these inputs leave out, or in which they have no tensor: other calls may have some.
    """
    inputs = {name: i for i, name in enumerate(called(model, spec)) if isinstance(leaves[i], torch.Tensor)}
    try:
        arguments = [*inspect.signature(model.forward).parameters]
    except (TypeError, ValueError):  # forward is no function of Python's
        arguments = []
    empty = [a for a in arguments if not any(_lies_in(name, a) for name in inputs)]
    unknown = next((n for n in named if n not in inputs and not any(_lies_in(n, a) for a in empty)), None)
    if unknown is not None:
        raise SpecError(
            f"{option} names an input {unknown!r}; the tensors that forward is given are {', '.join(inputs)}"
        )
    return inputs


def _lies_in(name: str, argument: str) -> bool:
    return name == argument or name.startswith(f"{argument}_")


def called(model: torch.nn.Module, spec: tree.Spec) -> list[str]:
    """What forward calls each of its input leaves: `mask`, or `batch_image` for what lies inside of `batch`.

    >>> called(model, tree.flatten(((x,), {"mask": mask}))[1])
    ['hidden', 'mask']
    """
    bound = _bound(model, spec)
    names = {leaf: re.sub(r"\W+", "_", path).strip("_") for path, leaf, _ in bound}
    return [names.get(i, f"x{i}" if i else "x") for i in range(spec.size)]


def swallowed(model: torch.nn.Module, spec: tree.Spec) -> frozenset[int]:
    """The input leaves that forward takes by `**kwargs` alone, as it would take a misspelt name."""
    return frozenset(leaf for _, leaf, open_ended in _bound(model, spec) if open_ended)


def _bound(model: torch.nn.Module, spec: tree.Spec) -> list[tuple[str, int, bool]]:
    """Each input leaf: the path to it from forward's parameters, its number, and whether `**kwargs` takes it."""
    args, kwargs = tree.unflatten(range(spec.size), spec)
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # forward is no function of Python's, or will refuse these inputs by itself
        return []
    found = []
    for name, value in bound.arguments.items():
        open_ended = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        found += [(path, leaf, open_ended) for path, leaf in tree.paths(value, "" if open_ended else name)]
    return found


def _given_as(t: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """A fresh tensor, with the graph that the caller's wants, or has: what an op made may be written into, and a leaf not.

    And of its class, of which ops may make plain tensors, as those of torchvision's `Image` do.
    """
    cls = tree.subclass_of(leaf)
    if cls is not None and type(t) is not cls:
        t = t.as_subclass(cls)
    t.requires_grad_(leaf.requires_grad)
    if type(leaf) is torch.nn.Parameter:
        t = torch.nn.Parameter(t, leaf.requires_grad)
    elif leaf.grad_fn is not None and t.layout is torch.strided:
        with torch.enable_grad():
            made = t.clone()
        t = made if made.stride() == t.stride() else t
    vars(t).update(vars(leaf))  # what Python set on it
    return t


def _memory(t: torch.Tensor) -> torch.Tensor:
    """An expanded tensor without its repetitions, so that it can be written."""
    for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        t = t.narrow(dim, 0, 1) if size > 1 and not stride else t
    return t


def _turned(t: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Other numbers of the same range, so that an index stays one; of what rises, as offsets do, the samples alone are turned."""
    found = t.contiguous().clone() if dim is None else t.contiguous().flip(dim)
    flat, known = t.flatten(), t.unique()
    if known.numel() == 1:  # such as a mask of ones
        found.view(-1)[-1] = not known.item()
    elif bool((flat[1:] < flat[:-1]).any()):
        found = t.flip(tuple(range(t.dim()))) if torch.equal(found, t) else found
        if known.numel() > 2:
            found[found == known[-1]] = known[0]
    return found


def _in_order(there: int, wanted: int, device: torch.device) -> torch.Tensor:
    """Which of the rows that are there stand for so many: the first ones, or all, some repeated where they are.

    What rises stays so, as offsets and the numbers of graphs have to; so does what falls, such as the lengths of packed sequences.
    """
    return (torch.arange(wanted, device=device) % there).sort().values


def _samples(t: torch.Tensor, dim: int, batch: int) -> torch.Tensor:
    """A copy of `t` with so many samples along a dim, repeated or cut."""
    return _rows(t.movedim(dim, 0), batch).movedim(0, dim) if dim else _rows(t, batch)


def _rows(t: torch.Tensor, batch: int) -> torch.Tensor:
    """A copy of `t` with so many rows, repeated or cut, laid out as a caller's tensor of that batch would be."""
    found = t[_in_order(t.shape[0], batch, t.device)]
    if t.layout is not torch.strided or t.shape[0] == 1 or 0 in t.stride() or t.numel() == 0:
        return found.contiguous(memory_format=_format(t))
    inner = t.stride(0)
    strides = [s if n == 1 or s <= inner else s // t.shape[0] * batch for n, s in zip(t.shape, t.stride(), strict=True)]
    if any(s > inner and s % t.shape[0] for n, s in zip(t.shape, t.stride(), strict=True) if n > 1):
        return found.contiguous(memory_format=_format(t))
    return t.new_empty_strided(found.shape, strides).copy_(found)


def _along(t: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """A copy of `t` with another size at one dim, repeated or cut, and its dims in memory in the same order."""
    found = t.index_select(dim, _in_order(t.shape[dim], size, t.device))
    strides = t.stride()
    order = sorted(range(t.dim()), key=lambda d: -strides[d])
    return found.permute(order).contiguous().permute([order.index(d) for d in range(t.dim())])


def _format(t: torch.Tensor) -> torch.memory_format:
    for dims, fmt in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if t.dim() == dims and t.is_contiguous(memory_format=fmt) and not t.is_contiguous():
            return fmt
    return torch.contiguous_format


@dataclass(frozen=True)
class Evidence:
    """One real run of the model, made during capture: its batch, what it returned, and its inputs where their sizes are others."""

    batch: int
    output: Any
    example: Example | None = None


@dataclass(frozen=True)
class Captured:
    """A plan, the real runs that it was held against, the model as it was, and the random generators that forward was
    seen to draw from. `keeps`: forward leaves something in Python that the plan does not put there.
    """

    plan: TracePlan
    evidence: tuple[Evidence, ...]
    baseline: Baseline
    drew: frozenset[str]
    keeps: bool = False
