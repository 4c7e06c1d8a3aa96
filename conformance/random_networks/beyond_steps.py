"""Steps beyond torch's own tensors: classes of the user's own, and data that leave torch by a way that an op shows, or none."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Marked(Tensor):
    """Only a name; torch copies no such tensor that has a graph."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)


def marked(frame: Any, x: Tensor) -> Tensor:
    """The same tensor, of a class of the user's own, as what ops make of it is."""
    return x.as_subclass(Marked)


def bare(frame: Any, x: Tensor) -> Tensor:
    """The same tensor as one of torch's own."""
    return x.as_subclass(Tensor)


def _plain(x: Tensor) -> Tensor:
    return x.detach().as_subclass(Tensor).contiguous()


def _lent(x: Tensor) -> Tensor:
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(_plain(x))).tanh()


def _by_pointer(x: Tensor) -> float:
    h = _plain(x)  # which may be a copy, and is to be there as it is read
    return float(ctypes.c_float.from_address(h.data_ptr()).value)


def _by_a_thread(x: Tensor) -> float:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: float(_plain(x).sum())).result()


def _seen_as_array(x: Tensor) -> Tensor:
    return torch.from_numpy(np.tanh(_plain(x).numpy()))


def _listed(x: Tensor) -> float:
    return sum(_plain(x).flatten().tolist()) / 8


def _stored(x: Tensor) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that typed storages are deprecated; code goes on using them
        return float(_plain(x).storage()[0])


def _told(x: Tensor) -> float:
    return 2.0 if "-" in repr(_plain(x).sum().sign()) else 3.0


def _apart(x: Tensor) -> float:
    h = _plain(x).flatten()
    return (h[1:].data_ptr() - h.data_ptr()) / 8


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "dlpack": _lent,
    "pointer": _by_pointer,
    "thread": _by_a_thread,
    "array": _seen_as_array,
    "list": _listed,
    "storage": _stored,
    "text": _told,
    "pointers": _apart,
}


def left_torch(frame: Any, x: Tensor, by: str) -> Tensor:
    """Times what comes back of the data."""
    return x * WAYS[by](x) if x.numel() else x * 1
