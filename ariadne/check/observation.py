"""Observation: inputs and a loss for any model, and all that a run of it returns or moves, in words where two differ."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.capture import Example
from ariadne.compare import difference
from ariadne.errors import TrainingError
from ariadne.plan import own, sizes_in

Given = tuple[tuple[Any, ...], dict[str, Any]]
Inputs = Callable[[int, int], Given]
Loss = Callable[[Any], torch.Tensor]
_NEAR = 32  # how many sizes above and below the example's are taken


def seed_all(seed: int) -> None:
    """Seed the global generators of torch and Python, and numpy's where numpy is loaded."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def generators() -> dict[str, Any]:
    """Where the global random generators stand, as plain values that compare with `==`."""
    found: dict[str, Any] = {"torch": torch.get_rng_state().tolist(), "Python's random": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["CUDA"] = [t.tolist() for t in torch.cuda.get_rng_state_all()]
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = (kind, keys.tolist(), *rest)
    return found


def held(model: nn.Module) -> dict[str, Any]:
    """Copies of a model's parameters, gradients, buffers and flags."""
    found: dict[str, Any] = {
        "parameters": dict(model.named_parameters()),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
    }
    flags = {
        "training": {path: module.training for path, module in model.named_modules()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
    }
    return {name: copied(part) for name, part in found.items()} | flags


def copied(value: Any) -> Any:
    """The same nested value, each tensor with memory of its own, laid out as it was, and without a graph."""
    return tree.map_leaves(lambda t: own(t.detach()) if isinstance(t, torch.Tensor) else t, value)


def requires_grad(value: Any) -> tuple[bool, ...]:
    """Of each tensor of a nested value, whether it requires grad."""
    return tuple(t.requires_grad for t in tree.leaves(value) if isinstance(t, torch.Tensor))


def is_blank(value: Any) -> bool:
    """Whether a nested value holds floating tensors, and in them nothing but numbers that are not finite."""
    found = [t for t in tree.leaves(value) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel()]
    return bool(found) and not any(bool(t.isfinite().any()) for t in found)


def first_difference(whole: Mapping[str, Any], split: Mapping[str, Any]) -> str | None:
    """The first difference between what two runs gave, by the names of its parts; None if all bits are the same.

    Where a part is a dict, its keys are parts of it; None differs from a tensor of zeros.

    >>> first_difference({"gradients": {"fc.bias": None}}, {"gradients": {"fc.bias": torch.zeros(2)}})
    "gradients of 'fc.bias': None against a tensor"
    """
    for name, expected in whole.items():
        found = split.get(name)
        if name == "generators":
            moved = [g for g in expected if expected[g] != found.get(g)] if isinstance(found, dict) else ["?"]
            if moved:
                return f"the generator of {' and '.join(moved)} stands elsewhere"
            continue
        if type(expected) is dict and type(found) is dict and list(expected) == list(found) and expected:
            pairs = [(f"{name} of {key!r}", expected[key], found[key]) for key in expected]
        else:
            pairs = [(name, expected, found)]
        for what, a, b in pairs:
            wrong = _none_against(a, b) or difference(a, b)
            if wrong:
                return f"{what}: {wrong.removeprefix('the result: ')}"
    return None


def _none_against(a: Any, b: Any) -> str | None:
    shown = ["None" if v is None else "a tensor" if isinstance(v, torch.Tensor) else "something else" for v in (a, b)]
    return " against ".join(shown) if (a is None) != (b is None) else None


def rippled(output: Any) -> torch.Tensor:
    """A scalar that depends on every element of every floating tensor of an output, on each in a way of its own.

    The k-th tensor counts sqrt(4k + 2) times, its elements by the cosine of their position: a mean would be blind to a
    permutation, and constant over what BatchNorm returns.
    """
    found = [t for t in tree.leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel()]
    if not found:
        raise TrainingError("the output holds no floating tensor to make a loss of; pass a loss")
    terms = []
    for k, t in enumerate(found):
        wide = torch.promote_types(t.dtype, torch.float32)
        ripple = torch.arange(t.numel(), device=t.device, dtype=wide).cos().view(t.shape)
        terms.append(math.sqrt(4 * k + 2) * (t * ripple).mean())
    return torch.stack([term.to(terms[0]) for term in terms]).sum()


def varied(example: Example) -> Inputs:
    """Inputs of any batch, from the samples of an example: rows repeated and turned; floats shrunk, each row by another factor.

    Zeros, signs and ranges stay, and so does the layout; the result is a function of batch and seed.
    """

    def inputs(batch: int, seed: int) -> Given:
        found, seen = example.resized(batch), set()
        generator = torch.Generator().manual_seed(seed)
        for i, dim in example.batched.items():
            t = found[i]
            if id(t) in seen:
                continue
            seen.add(id(t))
            with torch.no_grad():
                t.copy_(t.roll(seed, dim))
                if t.is_floating_point():
                    factors = 1 - torch.rand(batch, generator=generator) / 2
                    t.mul_(factors.to(t).view([batch if d == dim else 1 for d in range(t.dim())]))
        if not example.batched:  # of one sample, another one
            factor = 1 - float(torch.rand((), generator=generator)) / 2
            for t in {id(t): t for t in found if isinstance(t, torch.Tensor) and t.is_floating_point()}.values():
                with torch.no_grad():
                    t.mul_(factor)
        args, kwargs = tree.unflatten(found, example.spec)
        return args, kwargs

    return inputs


def of_many_sizes(inputs: Inputs, example: Example) -> Inputs:
    """The same inputs, where sizes beside the batch may change with one that the seed chooses for each, near the example's."""
    if not example.sizes:
        return inputs
    within = {s.symbol: s.within for s in example.sizes}
    pools = []
    for symbol, size in sizes_in(example.sizes, example.leaves).items():
        at = within[symbol].index(size)
        pools.append((symbol, [n for n in within[symbol][max(0, at - _NEAR) : at + _NEAR] if n <= 2 * size]))

    def resized(batch: int, seed: int) -> Given:
        args, kwargs = inputs(batch, seed)
        sizes = {symbol: near[(7 * seed + 3 * i + batch) % len(near)] for i, (symbol, near) in enumerate(pools)}
        found = replace(Example.of(args, kwargs), sizes=example.sizes).of_sizes(sizes)
        args, kwargs = tree.unflatten(found.leaves, found.spec)
        return args, kwargs

    return resized
