"""What the schema of an op says of a call: its arguments in order, those that it writes, its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

WHOLE = "ariadne.whole"  # the target of an event by which Python took all of a tensor's data, by `tolist` or `numpy`


def bind(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """All the arguments of a call in the order of the op's schema, defaults filled in."""
    schema = op._schema.arguments
    bound = list(args)
    for arg in schema[len(args) :]:
        if arg.name in kwargs:
            bound.append(kwargs[arg.name])
        else:
            bound.append(arg.default_value)
    return tuple(bound)


def written_arguments(func: OpOverload, bound: tuple[Any, ...]) -> Iterator[int]:
    """The positions of the arguments that an op writes, by its schema.

    Schemas of `batch_norm` and `instance_norm` keep silent about their running statistics: an argument called
    `running_...` counts as written where the op is told to train or to use the statistics of its input.
    """
    names = [a.name for a in func._schema.arguments]
    trains = any(bound[names.index(flag)] for flag in ("training", "train", "use_input_stats") if flag in names)
    for i, arg in enumerate(func._schema.arguments):
        by_schema = arg.alias_info is not None and arg.alias_info.is_write
        if by_schema or (trains and arg.name.startswith("running_") and bound[i] is not None):
            yield i


@cache
def writes_silently(target: str) -> bool:
    """Whether an op, by its name in a plan, may write into a tensor that does not count it: running statistics, of which its
    schema keeps silent; and whatever a function of Python's does."""
    space, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    try:
        arguments = getattr(getattr(getattr(torch.ops, space), name), overload)._schema.arguments
    except AttributeError:
        return True
    return any(a.name.startswith("running_") and not (a.alias_info and a.alias_info.is_write) for a in arguments)


def may_draw(nodes: Iterable[Any]) -> bool:
    """Whether running these ops of a plan may draw random numbers; a schema tells what switches that off."""
    return any(node.seeded and not _is_switched_off(node) for node in nodes)


def _is_switched_off(node: Any) -> bool:
    if not node.target.startswith("aten."):
        return False
    _, name, overload = node.target.split(".")
    op = getattr(getattr(torch.ops.aten, name), overload)
    names = [a.name for a in op._schema.arguments]
    given = dict(zip(names, bind(op, node.args, dict(node.kwargs)), strict=True))
    return given.get("dropout_p") == 0 or given.get("train") is False or given.get("training") is False


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an op's argument or result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors_in(v)
