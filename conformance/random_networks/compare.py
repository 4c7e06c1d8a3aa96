"""Equal, bit for bit: a comparator of its own, so that a fault in the runtime's can't hide another."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from conformance.random_networks.parts import Delay, Recorded
from conformance.random_networks.python_steps import Counting
from conformance.suite.state import seed_torch

ON_CLASS = ("seen", "latest", "scale")  # what steps use on a network's class


class Different(AssertionError):
    """Split and whole differ, or a promise is broken; the message says where."""


def same(whole: Any, split: Any, where: str) -> None:
    """Raise `Different` unless two nested results are equal in structure, types, layout and every bit."""
    found = next(differences(whole, split, ""), None)
    if found:
        raise Different(f"{where}: {found}")


def differences(a: Any, b: Any, path: str) -> Iterator[str]:
    """What differs, in words."""
    if type(a) is not type(b) and {type(a), type(b)} != {Tensor, nn.Parameter}:
        yield f"{path or 'it'} is {_short(a)} against {_short(b)}"
    elif isinstance(a, Tensor):
        yield from (f"{path or 'it'}: {d}" for d in _of_tensors(a, b))
    elif isinstance(a, dict):
        if list(a) != list(b):
            yield f"{path or 'it'} has the keys {list(a)} against {list(b)}"
        else:
            for k in a:
                yield from differences(a[k], b[k], f"{path}[{k!r}]")
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            yield f"{path or 'it'} has {len(a)} items against {len(b)}"
        else:
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                yield from differences(x, y, f"{path}[{i}]")
    elif a != b and not (isinstance(a, float) and math.isnan(a) and math.isnan(b)):
        yield f"{path or 'it'} is {_short(a)} against {_short(b)}"


def _short(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]


def _of_tensors(a: Tensor, b: Tensor) -> Iterator[str]:
    if a.is_sparse and b.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    if a.is_nested and b.is_nested:
        a, b = a.to_padded_tensor(0.0), b.to_padded_tensor(0.0)
    for what in ("dtype", "layout", "shape", "requires_grad"):
        if getattr(a, what) != getattr(b, what):
            yield f"{what} {getattr(a, what)} against {getattr(b, what)}"
            return
    if a.stride() != b.stride():
        yield f"stride {a.stride()} against {b.stride()}"
    elif a.numel() and a is not b:
        x, y = (torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()).view(-1).view(torch.uint8) for t in (a, b))
        if not torch.equal(x, y):
            gap = (a.detach().double() - b.detach().double()).abs().max().item()
            yield f"values differ, by at most {gap}"


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of a nested value, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for v in value:
            yield from leaves(v)
    else:
        yield value


def tensors(value: Any) -> list[Tensor]:
    """The tensors of a nested value, in order."""
    return [t for t in leaves(value) if isinstance(t, Tensor)]


def copied(value: Any, memo: dict[int, Tensor] | None = None) -> Any:
    """A nested value whose tensors are copies with the same strides; what was one tensor stays one."""
    memo = {} if memo is None else memo
    if isinstance(value, Tensor):
        if value.is_sparse:
            return value.detach().clone()
        if id(value) not in memo:
            repeats = any(s == 0 and n > 1 for s, n in zip(value.stride(), value.shape, strict=True))
            plain = value.detach().as_subclass(Tensor)
            made = torch.empty_like(plain) if repeats else plain.new_empty_strided(value.shape, value.stride())
            made.copy_(plain)  # no view of another, of which torch says otherwise whether a part of it wants a gradient
            cls = Tensor if type(value) is nn.Parameter else type(value)
            memo[id(value)] = (made if cls is Tensor else made.as_subclass(cls)).requires_grad_(value.requires_grad)
        return memo[id(value)]
    if isinstance(value, dict):
        return {k: copied(v, memo) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        made = [copied(v, memo) for v in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


def bare(value: Any) -> Any:
    """A nested value whose tensors want no gradient."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {k: bare(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        made = [bare(v) for v in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


def aliases(value: Any) -> list[tuple[int, int]]:
    """Which tensors of a nested value share memory, as pairs of positions."""
    held = [t.untyped_storage()._cdata if t.numel() else None for t in tensors(value)]
    return [(i, j) for i, a in enumerate(held) for j in range(i) if a is not None and a == held[j]]


def seed_all(seed: int) -> None:
    """Set torch's, numpy's and Python's generators."""
    seed_torch(seed)
    np.random.seed(seed)
    random.seed(seed)


def generators() -> dict[str, Any]:
    """Where torch's, numpy's and Python's generators stand."""
    _, keys, position, *_ = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "numpy": (hash(keys.tobytes()), position),
        "python": hash(random.getstate()),
    }


def state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """All that a call or a step may move, copied; a gradient that isn't there is None."""
    named = dict(model.named_parameters())
    remembered = {n: dict(optimizer.state.get(p, {})) for n, p in named.items()} if optimizer else {}
    return copied(
        {
            "parameters": {n: p.detach() for n, p in named.items()},
            "gradients": {n: p.grad for n, p in named.items()},
            "wanted": {n: p.requires_grad for n, p in named.items()},
            "buffers": dict(model.named_buffers()),
            "flags": {n: m.training for n, m in model.named_modules()},
            "optimizer": remembered,
            "generators": generators(),
            "records": list(getattr(model, "records", ())),
            "notes": dict(getattr(model, "notes", {})),
            "class": {n: getattr(type(model), n, None) for n in ON_CLASS},
            "recorded": {n: dict(m.recorder.found) for n, m in model.named_modules() if isinstance(m, Recorded)},
            "calls": {n: m.calls for n, m in model.named_modules() if isinstance(m, Counting)},
            "delayed": {n: dict(m.seen) for n, m in model.named_modules() if isinstance(m, Delay)},
        }
    )
