"""Mutants of halves as files: what is written is not what the split holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ariadne.halves import state_of
from ariadne.halves.known import Whole
from conformance.mutants.planted import Planted
from conformance.suite.halves_fuzz import closed, opened


class _InFile(Planted):
    """A file that is written right, and then changed by `in_half`."""

    def save(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().save(path, **options)
        header, half, body = opened(Path(path).read_bytes())
        self.in_half(half)
        Path(path).write_bytes(closed(header, half, body))

    def in_half(self, half: dict[str, Any]) -> None:
        """Change the half in the file's metadata."""


class SwappedWeights(_InFile):
    """Two weights of one shape are in the file under each other's name."""

    piece = "halves"

    def in_half(self, half: dict[str, Any]) -> None:
        for i, one in enumerate(half["state"]):
            for other in half["state"][:i]:
                if one[4:] == other[4:] and one[0][0][0] == "parameter":
                    one[3], other[3] = other[3], one[3]
                    return


class StaleAlias(_InFile):
    """A tensor that stands under several names is several tensors once it is loaded."""

    piece = "halves"

    def in_half(self, half: dict[str, Any]) -> None:
        half["state"] = [[[place], *rest] for places, *rest in half["state"] for place in places]


class LostBatches(_InFile):
    """That a plan holds for some batches only is not in the file."""

    piece = "halves"

    def in_half(self, half: dict[str, Any]) -> None:
        for plan in half["plans"]:
            plan["batches"] = [half["batches"]]


class MisplacedConstant(_InFile):
    """A tensor that forward makes of no tensor comes back on another device."""

    piece = "halves"

    def in_half(self, half: dict[str, Any]) -> None:
        for plan in half["plans"]:
            for constant in plan["constants"].values():
                constant[-1] = "meta"


class RestartedGenerator(_InFile):
    """A generator of the model's own is in the file as one that was just made."""

    piece = "halves"

    def in_half(self, half: dict[str, Any]) -> None:
        for plan in half["plans"]:
            for told in plan["objects"].values():
                if told[0] == "generator":
                    told[2] = state_of(torch.Generator(told[1]))


class SwitchedModule(_InFile):
    """A module that is handed to a half runs in the other mode than in the model."""

    piece = "halves"

    def in_half(self, half: dict[str, Any]) -> None:
        for plan in half["plans"]:
            for told in plan["objects"].values():
                if told[0] == "part" and isinstance(told[1]["at"], list):
                    told[1]["at"][1] = [[path, not on] for path, on in told[1]["at"][1]]


class UntiedModule(_InFile):
    """A module that is handed to a half runs on its own tensors, and not on the half's."""

    piece = "halves.called"

    def in_half(self, half: dict[str, Any]) -> None:
        for plan in half["plans"]:
            within = {name for node in plan["nodes"] for name in node.pop("within", ())}
            owners = {tuple(v[7]) for v in plan["values"] if v[0] in within}
            plan["values"] = [v for v in plan["values"] if v[0] not in within]
            half["state"] = [one for one in half["state"] if not owners & {tuple(place[1:]) for place in one[0]}]


class UnheardPath(_InFile):
    """Of several paths whose prefixes do the same, a half has the first one's suffix in the place of each."""

    piece = "runtime.paths"

    def in_half(self, half: dict[str, Any]) -> None:
        first, *others = half["plans"]
        if half["part"] == "suffix":
            for plan in others:
                plan["nodes"] = [{k: v for k, v in node.items() if k != "witness"} for node in first["nodes"]]
                plan["values"], plan["output"] = first["values"], first["output"]
                plan["constants"], plan["cut"] = first["constants"], first["cut"]
                plan["first"] = first["first"]


class LostRecord(_InFile):
    """What forward puts into the second of two containers, or the second time into one, is not in the file."""

    piece = "halves"

    def in_half(self, half: dict[str, Any]) -> None:
        for plan in half["plans"]:
            held = [store for store in plan["stores"] if store[1] == "held"]
            plan["stores"] = [store for store in plan["stores"] if store not in held[1:]]


class SettingOutside(_InFile):
    """A setting of torch that forward sets around an op is not set in the half."""

    piece = "halves"

    def in_half(self, half: dict[str, Any]) -> None:
        for plan in half["plans"]:
            for node in plan["nodes"]:
                node["region"] = node.get("region", [None, [], 0])[:3]


class UnknownWeights(_InFile):
    """A half that is given the weights of another version of its model does not know of which they are."""

    piece = "halves.known"

    def in_half(self, half: dict[str, Any]) -> None:
        del half["whole"]


class OwnWeightsAlone(_InFile):
    """The digest of weights that a half is given is of those that it uses, not of its whole model's."""

    piece = "halves.known"

    def in_half(self, half: dict[str, Any]) -> None:
        mine = {f"{path}.{key}".removeprefix(".") for places, *_ in half["state"] for _, path, key in places}
        half["whole"]["names"] = [each for each in half["whole"]["names"] if mine & {*each}]


class UnseenWeight(_InFile):
    """A half that is given another last weight keeps its old digest."""

    piece = "halves.known"

    def in_half(self, half: dict[str, Any]) -> None:
        last = [name for name, _ in self.model.named_parameters()][-1]
        whole = Whole.of(self.model)
        whole = Whole(tuple(each for each in whole.names if last not in each), whole.apart)
        half["whole"], half["digest"] = whole.told(), whole.digest(self.model.state_dict())
