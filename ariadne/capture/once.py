"""Once: what a first call alone writes into tensors, or draws. A plan goes a first call's way, and would do so at each.

A second run finds tensors and generators as the first one did, and Python as that left it. Where it leaves other data in a tensor
of the model's, or generators elsewhere, something in Python decides, such as a flag in a container.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ariadne.capture import generators
from ariadne.capture.copies import Copy
from ariadne.capture.state import Snapshot
from ariadne.compare import same_bits
from ariadne.errors import UnsupportedError, named

_BUFFER, _TENSOR = "buffer", "tensor"
Key = tuple[str, Any]  # the kind, and the id of a tensor; or of a buffer its path and name


@dataclass(frozen=True)
class Moved:
    """What a run left: the data of the model's tensors that it may have written, and of buffers that it replaced; which memory of
    the model's ops wrote, be it the same again; and where generators stand, if no other thread could have moved them."""

    data: Mapping[Key, torch.Tensor]
    written: frozenset[int]
    drew: bool
    generators: Mapping[str, Any] | None

    @classmethod
    def by(cls, snapshot: Snapshot, drew: bool) -> Moved:
        """What the run left that has just ended; `drew`: from torch's generators, whatever other threads did meanwhile."""
        data: dict[Key, torch.Tensor] = {
            (_TENSOR, id(copy.tensor)): Copy.of(copy.tensor).data for copy in snapshot.copies()
        }
        data |= {(_BUFFER, (path, name)): t.detach().clone() for path, name, t in snapshot.replaced_buffers()}
        return cls(
            data, frozenset(snapshot.written), drew, generators.states() if threading.active_count() == 1 else None
        )


def refuse_once(snapshot: Snapshot, first: Moved, second: Moved) -> None:
    """Raise `UnsupportedError` where a second run left something else than the first."""
    before: dict[Key, Any] = {(_TENSOR, id(copy.tensor)): copy.data for copy in snapshot.copies()}
    once = [(_TENSOR, id(t)) for t in snapshot.owning(first.written - second.written)]
    for key in {**first.data, **second.data}:
        one, other = (run.data.get(key, before.get(key)) for run in (first, second))
        if one is None or other is None or not same_bits(one, other) or key in once:
            kind, at = key
            what = f"the buffer {at[1]!r} of {named(at[0])}" if kind == _BUFFER else _name(snapshot, at)
            raise UnsupportedError(
                f"forward writes into {what} at its first call, and otherwise at later ones: something in Python decides, such as "
                "a flag that it sets. A plan goes a first call's way at each call. Run the model once, and prepare then; or keep "
                "the flag in a buffer"
            )
    if first.generators is not None and second.generators is not None:
        moved = generators.differing(first.generators, second.generators)
    else:
        moved = [generators.TORCH] if first.drew and not second.drew else []
    if moved:
        raise UnsupportedError(
            f"forward draws from {moved[0]} at its first call, and otherwise at later ones: something in Python decides, such as a "
            "flag that it sets. A plan goes a first call's way at each call. Run the model once, and prepare then"
        )


def _name(snapshot: Snapshot, at: int) -> str:
    for path, module in snapshot.modules.items():
        for what, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, t in table.items():
                if id(t) == at:
                    return f"the {what} {name!r} of {named(path)}"
    shape = next(list(copy.tensor.shape) for copy in snapshot.copies() if id(copy.tensor) == at)
    return f"a tensor {shape} that the model holds"
