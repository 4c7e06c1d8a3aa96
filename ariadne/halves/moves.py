"""A half on another device or in another dtype: whether its plans hold there, and what they are then."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from ariadne.errors import HalfError
from ariadne.halves.packed import is_packed
from ariadne.halves.skeleton import plain_tensors
from ariadne.plan import WHOLE, TracePlan, Value


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


_TABLES = attrgetter("_parameters", "_buffers", "_modules")


class Seal:
    """A module's tensors as they are now; `holds` tells whether none was written or replaced since. Asked at every call."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._modules, self._tensors = module, [*module.modules()], tensors_of(module)
        self._tables, self._held = self._now()
        self._versions = [t._version for t in self._tensors]

    def _now(self) -> tuple[list[dict[str, Any]], list[Any]]:
        tables = [*chain.from_iterable(map(_TABLES, self._modules))]
        return tables, [*chain.from_iterable(map(dict.values, tables))]

    def holds(self) -> bool:
        """Whether the tensors are the same ones, and as they were; the tables tell that faster than torch walks over them."""
        tables, held = self._now()
        if not (_are(tables, self._tables) and _are(held, self._held)):
            return _are(tensors_of(self._module), self._tensors) and self._unwritten()
        return self._unwritten()

    def _unwritten(self) -> bool:
        return [t._version for t in self._tensors] == self._versions


def _is_cast(dtype: torch.dtype) -> bool:
    """Whether `.to()` of a model casts tensors of that dtype."""
    return dtype.is_floating_point or dtype.is_complex


def _are(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


@dataclass(frozen=True)
class Moves:
    """What moving a half's tensors does to their dtypes and devices: from which to which."""

    dtypes: Mapping[torch.dtype, torch.dtype]
    devices: Mapping[str, str]

    @classmethod
    def of(cls, half: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], plans: Iterable[TracePlan] = ()) -> Moves:
        """What a function of tensors, such as `.to()` hands to `_apply`, does to those of a half.

        A half without weights follows the other one, which computes what its `plans` take.
        """
        dtypes, devices = {}, {}
        held = tensors_of(half)
        if not any(_is_cast(t.dtype) for t in held):
            values = (v for plan in plans for v in plan.values.values())
            kinds = {(v.dtype, v.device) for v in values if v.dtype is not None and _is_cast(v.dtype) and v.device}
            held += [torch.empty(0, dtype=dtype, device=device) for dtype, device in sorted(kinds, key=str)]
        for t in held:
            now = fn(torch.empty(0, dtype=t.dtype, device=t.device))
            if now.device.type == "meta":
                raise HalfError(
                    "a half can't go to the meta device, where its weights would be lost: drop it, and load it again"
                )
            if now.dtype != t.dtype:
                dtypes[t.dtype] = now.dtype
            if now.device.type != t.device.type:
                devices[t.device.type] = now.device.type
        return cls(dtypes, devices)

    def __bool__(self) -> bool:
        return bool(self.dtypes or self.devices)

    def digest(self, was: str) -> str:
        """The digest of weights that were moved so: the same for both halves, and another than that of what they were."""
        if not was or not self.dtypes:
            return was
        told = sorted(f"{a} {b}" for a, b in self.dtypes.items())
        return hashlib.sha256(json.dumps([was, told]).encode()).hexdigest()[: len(was)]

    def plan(self, plan: TracePlan, root: nn.Module) -> TracePlan:
        """The plan for tensors of the other dtypes and devices; `HalfError` where the model's own may be others there."""
        if not self:
            return plan
        if why := self._stays(plan, root):
            what = ", ".join(f"{a} to {b}" for a, b in (*self.dtypes.items(), *self.devices.items()))
            raise HalfError(
                f"this half can't go from {what}: {why}. Move the model, prepare the split there, and save the half again"
            )

        def moved(value: Value) -> Value:
            if value.dtype is None or value.kind == "constant":
                return value
            kind = value.device.partition(":")[0]
            return replace(
                value, dtype=self.dtypes.get(value.dtype, value.dtype), device=self.devices.get(kind, value.device)
            )

        return replace(plan, values={n: moved(v) for n, v in plan.values.items()})

    def _stays(self, plan: TracePlan, root: nn.Module) -> str:
        """Why the model may run otherwise on such tensors; empty where it does what the plan does."""
        if plan.assumption.dtypes or any(n.region.autocast for n in plan.nodes):
            return "forward reads or names dtypes or devices, and may run otherwise there"
        if any(n.target == WHOLE for n in plan.nodes):
            return "forward takes all of a tensor's data out of torch, by numpy() or as text, which shows its dtype"
        if any(map(is_packed, plan.objects.values())):
            return "a quantized layer has packed weights, which no .to() of the model moves"
        constants = [v for v in plan.values.values() if v.kind == "constant"]
        if any(v.dtype in self.dtypes for v in constants) or (self.devices and any(v.shape for v in constants)):
            return "forward makes tensors of its own, which no .to() of the model moves"
        if any(t.dtype in self.dtypes or t.device.type in self.devices for t in plain_tensors(root)):
            return "the model keeps tensors in plain attributes, which its .to() leaves as they are. Register them as buffers"
        return ""
