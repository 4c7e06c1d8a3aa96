"""All that a half's file says beside its tensors, looked at: when it is read, and before it is written."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ariadne.cut import SIDES
from ariadne.errors import HalfError
from ariadne.halves.atoms import Classes, count, flag, items, mapped, need, text
from ariadne.halves.containers import Container
from ariadne.halves.form import Side, SideReader
from ariadne.halves.known import known
from ariadne.halves.parameters import read_parameters
from ariadne.halves.skeleton import Held, known_places, read_flags, read_state
from ariadne.halves.weights import Row

# 2: it says which suffix may follow which other prefix, and these may send more than their own suffix takes. 3: a dataclass is
# said by all that it has, and a list or a tuple may be of another class.
FORMATS = (1, 2, 3)
VERSION = "0.1.0"
_KEYS = frozenset("format ariadne torch part model weights digest ops state flags plans batches trainable".split())


@dataclass(frozen=True)
class Said:
    """What a file says: tensors, training flags of modules, plans, where their constants lie, containers that forward fills."""

    state: list[Held]
    flags: dict[str, bool]
    sides: list[Side]
    constants: dict[str, tuple[Row, str]]
    weights: bool
    containers: list[Container]
    forward: inspect.Signature | None

    @property
    def stored(self) -> set[str]:
        """The modules in whose attributes forward leaves something."""
        return {store.path for side in self.sides for store in side.plan.stores}


def said(data: Mapping[str, Any], classes: Classes, spaces: frozenset[str]) -> Said:
    """What the data of a file say; `HalfError` for what is no half, or can't be read here."""
    need("format" in data, "it has no format")
    if type(data["format"]) is not int or data["format"] not in FORMATS:
        raise HalfError(
            f"this half has format {str(data['format'])[:20]}, and this Ariadne ({VERSION}) reads formats "
            f"{', '.join(map(str, FORMATS))}. Save it with this version, or load it with the one that saved it"
        )
    classes.tells_all = data["format"] >= 3
    need(data.keys() - {"pipeline", "order", "whole", "forward"} == _KEYS, "its data have other parts than expected")
    order = {
        text(n, "a parameter"): count(i, "a place", 0, 2**31)
        for n, i in mapped(data.get("order", {}), "the order").items()
    }
    need(len({*order.values()}) == len(order), "two parameters have one place")
    part = text(data["part"], "the part")
    need(part in SIDES, f"its part is {part!r}")
    for key, what in (("ariadne", "ariadne"), ("torch", "torch"), ("model", "the model's class"), ("digest", "digest")):
        text(data[key], what)
    known(data.get("whole"))
    forward = read_parameters(data.get("forward"))
    state, flags = read_state(data["state"]), read_flags(data["flags"])
    reader = SideReader(part, known_places(state), mapped(data["ops"], "the ops"), classes, spaces)
    constants: dict[str, tuple[Row, str]] = {}
    sides = [reader.read(plan, constants, i) for i, plan in enumerate(items(data["plans"], "the plans"))]
    need(0 < len(sides) <= 64, "it has no plans, or too many")
    need(len({s.plan.training for s in sides}) == 1, "its plans are of two modes")
    return Said(state, flags, sides, constants, flag(data["weights"], "weights"), reader.containers, forward)
