"""The one walker of nested inputs and outputs."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested mappings, sequences and dataclasses, in order, with the path that leads to it.

    A leaf is a tensor, None, or a plain Python value; TypeError for anything else. An empty container has no leaves.

    >>> list(leaves({"a": [1, None]}, "kwargs"))
    [("kwargs['a'][0]", 1), ("kwargs['a'][1]", None)]
    """
    match value:
        case Tensor() | None | bool() | int() | float() | complex() | str() | bytes():
            yield path, value
        case Mapping():  # before the dataclasses: transformers' ModelOutput is both
            for key, item in value.items():
                yield from leaves(item, f"{path}[{key!r}]")
        case tuple() | list():
            for index, item in enumerate(value):
                yield from leaves(item, f"{path}[{index}]")
        case _ if is_dataclass(value):
            for field in fields(value):
                yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
        case _:
            raise TypeError(f"cannot look for tensors in a {type(value).__name__}; teach model_zoo.values about it")
