"""Which weights a half has: a digest of all of its model's, made as it is saved, and made again where all are given anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ariadne.halves.atoms import items, mapped, need, text
from ariadne.halves.packed import digest_of, is_told, packed_in
from ariadne.halves.weights import digest, is_plain


@dataclass(frozen=True)
class Whole:
    """The tensors of a whole model: names in its state dict, those of one tensor together; of each other buffer, a digest.

    `packed` has digests, too: of the packed weights of quantized layers, by their names in the state dict.
    """

    names: tuple[tuple[str, ...], ...] = ()
    apart: Mapping[str, str] = field(default_factory=dict)
    packed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Whole:
        """Those of a model as it is now."""
        names: dict[int, list[str]] = {}
        apart: dict[str, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for key, t in (*module._parameters.items(), *module._buffers.items()):
                name = f"{path}.{key}".removeprefix(".")
                if t is None:
                    continue
                if key in module._non_persistent_buffers_set:
                    apart[name] = digest([("", t)])
                else:
                    names.setdefault(id(t), []).append(name)
        return cls(tuple(map(tuple, names.values())), apart, {n: digest_of(p) for n, p in packed_in(model)})

    def told(self) -> dict[str, Any]:
        """The same as JSON-able data."""
        packed = {"packed": dict(self.packed)} if self.packed else {}
        return {"names": [[*each] for each in self.names], "apart": dict(self.apart), **packed}

    def digest(self, found: Mapping[str, Any]) -> str:
        """The digest of a model that has these tensors; empty where they are not all of it, or one is no plain dense tensor.

        Two names of what was one tensor count once, as long as it has one value.
        """
        tensors: list[tuple[str, torch.Tensor]] = []
        for each in self.names:
            first, *others = [n for n in each if n in found] or [""]
            if not first or not all(
                isinstance(found[n], torch.Tensor) and is_plain(found[n]) for n in (first, *others)
            ):
                return ""
            tensors.append((each[0], found[first]))
            one = digest([("", found[first])]) if others else ""
            tensors += [(n, found[n]) for n in others if digest([("", found[n])]) != one]
        if not all(is_told(found.get(n)) for n in self.packed):
            return ""
        return digest(tensors, {**self.apart, **{n: digest_of(found[n]) for n in self.packed}})

    def given(self, found: Mapping[str, torch.Tensor], half: nn.Module) -> str:
        """The digest of weights that a half is given; empty, too, where a buffer of it that none of them is was written."""
        mine = {n: b for n, b in half.named_buffers(remove_duplicate=False) if n in self.apart}
        kept = all(digest([("", b)]) == self.apart[n] for n, b in mine.items())
        return self.digest(found) if kept else ""


def known(value: Any) -> Whole | None:
    """What `Whole.told` wrote; None in a file that was saved before there was such a thing."""
    if value is None:
        return None
    parts = mapped(value, "the whole model's tensors")
    need(parts.keys() - {"packed"} == {"names", "apart"}, "the whole model's tensors are malformed")
    names = tuple(tuple(text(n, "a name") for n in items(each, "names")) for each in items(parts["names"], "the names"))
    need(all(names), "a tensor has no name")
    apart = mapped(parts["apart"], "digests of buffers")
    packed = mapped(parts.get("packed", {}), "digests of packed weights")
    return Whole(
        names, *({text(n, "a name"): text(d, "a digest") for n, d in found.items()} for found in (apart, packed))
    )
