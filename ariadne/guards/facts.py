"""Facts about the model's own tensors that a plan relies on: their dtypes, devices and shapes, compared at each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter, getitem, is_
from typing import Any

import torch

from ariadne.guards.versions import VERSION, stamp


class _Whatever:
    """Equal to all: what stands where a fact of one tensor does not count."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


WHATEVER = _Whatever()
# torch's own compiler checks the type, dtype, device, sizes and strides of many tensors in one call of C++ code, in a quarter of
# the time that it takes to ask each from Python.
_guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


class Facts:
    """What `names`, attributes of tensors, are to be for the tensors in slots: (table, key, one value for each name).

    `WHATEVER` is the value of what does not count.

    >>> table = {"weight": torch.zeros(2)}
    >>> facts = Facts(("dtype", "shape"), [(table, "weight", (torch.float32, (2,)))])
    >>> facts.hold()
    True
    >>> table["weight"] = torch.zeros(3)
    >>> facts.hold()
    False
    """

    def __init__(self, names: Sequence[str], slots: Iterable[tuple[Any, Any, Any]]) -> None:
        slots = list(slots)
        self._ask = attrgetter(*names)
        self._tables: list[Any] = [table for table, _, _ in slots]
        self._keys: list[Any] = [key for _, key, _ in slots]
        self._wanted = [values if len(names) > 1 else values[0] for _, _, values in slots]
        self._alike: Callable[..., bool] = never
        # Tables that tell when they are written need not be looked into: between two calls the model's weights have pushed them
        # out of the caches.
        tables = {id(table): table for table in self._tables}
        told = VERSION is not None and all(type(table) is dict for table in tables.values())
        self._dicts: list[dict[Any, Any]] = [*tables.values()] if told else []
        self._last: tuple[int, Callable[[], bool]] = (
            -1,
            never,
        )  # the stamp of these, and whether what stood there is alike

    def hold(self) -> bool:
        """Whether all are there, and so."""
        total, (known, unchanged) = stamp(self._dicts) if self._dicts else None, self._last
        if total == known and unchanged():  # as they were when they were last looked at one by one
            return True
        try:
            tensors: list[Any] = [*map(getitem, self._tables, self._keys)]
            if not self._alike(*tensors):
                self._alike, self._last = never, (-1, never)  # which lets go of those that it knew
                if [*map(self._ask, tensors)] != self._wanted:
                    return False
                self._alike = alike(tensors)
        except (LookupError, AttributeError, TypeError):  # a slot is gone, or holds no tensor
            return False
        if total is not None:
            self._last = total, partial(self._alike, *tensors)
        return True


def never(*tensors: torch.Tensor | None) -> bool:
    """What `alike` gives where nothing is known."""
    return False


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that tells whether tensors are these, and in all that can be asked of their types and sizes as they are now.

    It may say no of such tensors. torch's check ends the process where a tensor has no strides, and is only shown what it knows.
    """
    if _guards is None or any(t.layout is not torch.strided or t.is_nested for t in tensors):
        return never
    known = [*tensors]
    check = _guards(*known, dynamic_dims_sizes=None, dynamic_dims_strides=None).check if known else None

    def same(*found: torch.Tensor) -> bool:
        return check is None or (all(map(is_, found, known)) and check(*found))

    return same
