"""Hung: what forward sets on the model's own tensors, as `self.weight.last = h`, and on a teacher's. No plan does that.

A plain value that it sets once, such as a flag, is a cache: a split may leave it out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ariadne import tree
from ariadne.capture.state import Snapshot
from ariadne.errors import UnsupportedError
from ariadne.guards import MISSING, is_a, lasts

Hung = dict[tuple[int, str], Any]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def hung(snapshot: Snapshot) -> Hung:
    """What stands on the tensors now and did not before, by the tensor's number and the attribute's name."""
    return {
        (i, name): vars(t).get(name, MISSING)
        for i, (t, was) in enumerate(snapshot.marks)
        for name in {**was, **vars(t)}
        if not name.startswith("_dynamo")  # torch's own marks, as torch.cond leaves them
        if vars(t).get(name, MISSING) is not was.get(name, MISSING)
    }


def refuse_hung(snapshot: Snapshot) -> Hung:
    """What forward has set, which no further call may change; `UnsupportedError` for what a later call may use, or a user read."""
    found = hung(snapshot)
    for (i, name), now in found.items():
        if name in snapshot.marks[i][1] or not lasts(now):
            raise _refusal(snapshot, i, name)
    return found


def attributes_set(value: Any) -> list[dict[str, Any]]:
    """What Python has set on each tensor of a value, but for those of a class of its own, which keep their parts there."""
    return [{**vars(t)} if is_a(t, torch.Tensor) and type(t) in _PLAIN else {} for t in tree.leaves(value)]


def refuse_hung_on_results(
    output: Any, inputs: Sequence[Any], were: Sequence[Mapping[str, Any]], model: Collection[int]
) -> None:
    """Raise `UnsupportedError` where forward has set an attribute on a tensor that it gives, or was given; `were`: those before."""
    given = {id(t): was for t, was in zip(inputs, were, strict=True)}
    found = [(t, own, "was given" if id(t) in given else "gives") for value in (inputs, output)
             for t, own in zip(tree.leaves(value), attributes_set(value), strict=True)]  # fmt: skip
    for t, own, how in found:
        new = [name for name, value in own.items() if given.get(id(t), {}).get(name, MISSING) is not value]
        new = [name for name in new if own[name] is not None and not name.startswith("_dynamo")]
        name = next(iter(new), None) if id(t) not in model else None
        if name is not None:
            raise UnsupportedError(
                f"forward sets the attribute {name!r} on a tensor {list(t.shape)} that it {how}, which no plan does; return what "
                "stands there beside the tensor"
            )


def refuse_hung_again(snapshot: Snapshot, first: Hung) -> None:
    """Raise `UnsupportedError` where a second call set another value than the first."""
    for (i, name), now in hung(snapshot).items():
        if (i, name) not in first or type(now) is not type(first[i, name]) or now != first[i, name]:
            raise _refusal(snapshot, i, name)


def _refusal(snapshot: Snapshot, i: int, name: str) -> UnsupportedError:
    mine: torch.Tensor = snapshot.marks[i][0]
    at = (
        f"{path}.{key}".lstrip(".")
        for path, module in (*snapshot.modules.items(), *snapshot.strays.items())
        for table in (module._parameters, module._buffers, module.__dict__)
        for key, t in table.items()
        if t is mine
    )
    name_of = next(at, "")
    where = f"the tensor {name_of!r} of the model" if name_of else "a tensor that the model's code leads to"
    return UnsupportedError(
        f"forward sets the attribute {name!r} on {where}, which no plan does; keep it in an attribute of "
        "the module, or in a buffer"
    )
