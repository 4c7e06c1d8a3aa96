"""A half's file is read: plans of one side, and the modules that hold its tensors; nothing that the file says is run."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ariadne.errors import HalfError, SpecError
from ariadne.halves.atoms import Classes, need
from ariadne.halves.called import tie
from ariadne.halves.containers import make
from ariadne.halves.form import Side
from ariadne.halves.given import Weights, given, refuse_unfit
from ariadne.halves.given import replace as replace_by
from ariadne.halves.packed import Packed, packed_anew
from ariadne.halves.parameters import stand_in
from ariadne.halves.skeleton import Held, named, skeleton
from ariadne.halves.weights import File, Row, blank, parsed
from ariadne.halves.whole import VERSION, said
from ariadne.plan import TracePlan


def read(
    path: str | os.PathLike[str],
    weights: Weights | None,
    allow: Collection[str],
    plain: bool,
    modules: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], nn.Module, list[Side], list[nn.Module]]:
    """What a file says, its tensors in modules, its plans, and which of the `modules` handed over they call.

    `HalfError` for what is no half, or can't be read here.
    """
    if isinstance(allow, str) or not all(isinstance(a, str) for a in allow):
        raise SpecError(f'allow= takes a list of names, as ["module:qualname", "library::*"]; found {allow!r}')
    file = File(path)
    data = parsed(file)
    spaces = frozenset(a.removesuffix("::*") for a in allow if a.endswith("::*"))
    classes = Classes(allow, plain, handed=modules)
    told = said(data, classes, spaces)
    _tell(data)
    if not told.weights and weights is None:
        raise HalfError(
            "this half was saved without weights; pass weights=, a state dict of its model or the path of a safetensors file"
        )
    tensors = dict(_tensors(told.state, file if told.weights else None, weights))
    root = skeleton(told.state, tensors, told.sides[0].plan.training, told.flags, told.stored)
    if told.forward is not None:
        root.__dict__["forward"] = stand_in(told.forward)
    make(root, told.containers)
    packed = {o: packed_anew(o, file) for s in told.sides for o in s.plan.objects.values() if isinstance(o, Packed)}
    need(
        len({o.rows[0] for o in packed}) == len(packed), "one weight is packed twice"
    )  # a small file could take all memory
    for i, side in enumerate(told.sides):
        for n, thing in side.plan.objects.items():
            if isinstance(thing, Packed):
                side.plan.objects[n] = packed[thing]  # type: ignore[index]
        mine = {n.partition(" ")[2]: at for n, at in told.constants.items() if n.partition(" ")[0] == str(i)}
        _fill(side.plan, mine, file)
    tie(root, classes.used, [side.plan for side in told.sides])
    return data, root, told.sides, [one.holder for one in classes.used.values()]


def _tensors(state: list[Held], file: File | None, weights: Weights | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a half by their number: from its file, or those of its state dict from elsewhere."""
    rows = {str(i): held.row for i, held in enumerate(state)}
    if weights is None:
        assert file is not None
        yield from file.tensors(rows)
        return
    names = {str(i): [named(place) for place in held.places] for i, held in enumerate(state) if held.persistent}
    found = given(weights, {n for each in names.values() for n in each})
    wanted = {i: torch.empty(at.shape, dtype=at.dtype, device="meta") for i, at in rows.items()}
    refuse_unfit({n: wanted[i] for i, each in names.items() for n in each}, found)
    distinct = Counter(at.key for at in {*rows.values()})
    aliased = {i: at for i, at in rows.items() if distinct[at.key] > 1 or 0 in at.strides}
    others = {i: at for i, at in rows.items() if i not in names}
    if others and file is None:
        raise HalfError(
            "this half was saved without weights, and has tensors that no state dict holds; save it with them"
        )
    made = dict(blank(aliased) if file is None else file.tensors({**aliased, **others}))
    replace_by({n: made[i] for i in aliased if i in names for n in names[i]}, found)
    yield from made.items()
    for i in names.keys() - made.keys():
        at, t = rows[i], found[names[i][0]].detach()
        fits = t.stride() == at.strides and t.device.type == "cpu" and not isinstance(weights, Mapping)
        yield i, t if fits else torch.empty_strided(at.shape, at.strides, dtype=at.dtype).copy_(t)


def _tell(made_by: Mapping[str, str]) -> None:
    """Warn where another version made the file: ops are what they were, but kernels may round in another way."""
    here = {"ariadne": VERSION, "torch": torch.__version__}
    other = [f"{who} {made_by[who]} (here {here[who]})" for who in here if _minor(made_by[who]) != _minor(here[who])]
    if other:
        warnings.warn(
            f"this half was saved with {' and '.join(other)}; all its ops are here as they were, but results may differ in the "
            "last bits",
            stacklevel=3,
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _fill(plan: TracePlan, rows: Mapping[str, tuple[Row, str]], file: File) -> None:
    """Read a plan's constants."""
    for name, t in file.tensors({n: at for n, (at, _) in rows.items()}):
        value = plan.values[name]
        need((value.dtype, value.shape) == (t.dtype, tuple(t.shape)), f"the constant {name!r} is another")
        where = rows[name][1]
        try:
            plan.constants[name] = t.to(where)  # type: ignore[index]
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise HalfError(
                f"the constant {name!r} of this half is on {where!r}, a device that this process can't use: "
                f"{(str(error).splitlines() or [''])[0][:120]}. Load it where there is one, or save the half on another device"
            ) from None
