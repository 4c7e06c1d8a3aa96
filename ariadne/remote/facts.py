"""Facts: what one side of a split says of itself in the handshake, and whether two sides go together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ariadne.boundary import BoundaryPayload
from ariadne.cut import SIDES
from ariadne.errors import BoundaryError, HandshakeError, PayloadError
from ariadne.half import Half
from ariadne.halves import VERSION
from ariadne.pipeline import LoadedPart
from ariadne.plan import Groups, TracePlan, may_draw, short_dtype
from ariadne.remote.message import PROTOCOL

Facts = dict[str, Any]


def part_of(half: Half) -> LoadedPart | None:
    """The part that a half is of a model in more than two; None for one side of a split."""
    if "pipeline" not in half.__dict__["_data"]:
        return None
    part = LoadedPart(half)
    return part if part.count > 2 else None


def middle_of(half: Half) -> LoadedPart | None:
    """The part that a half is where it is one between two cuts; None for the last part of a model."""
    part = part_of(half)
    return part if part is not None and part.onward else None


def facts_of(half: Half) -> Facts:
    """What a half is: versions, its part, its splits with what crosses them, its weights, and where it runs.

    `place` and `gives` are of a part of several: which it is, of how many, and what goes on from one between two cuts.
    """
    part = part_of(half)
    between = part is not None and part.index > 0
    shared: Any = (
        shared_names(half) if part is None else [[name, *users] for name, users in sorted(part.shared.items())]
    )
    return {
        "place": None if part is None else [part.index, part.count],
        "gives": {k: [o.split_id, [*o.live]] for k, o in part.onward.items()} if part is not None and between else {},
        "protocol": PROTOCOL,
        "ariadne": VERSION,
        "torch": torch.__version__,
        "part": half.part,
        "mode": "training" if half.training else "eval",
        "splits": _splits(half),
        "digest": half.digest,
        "origin": half.origin,
        "device": device_of(half),
        "threads": torch.get_num_threads(),
        "shared": shared,
    }


def device_of(half: Half) -> str:
    """The device of a half's tensors; that of one without is the CPU."""
    first = next((t for t in (*half.parameters(), *half.buffers())), None)
    return "cpu" if first is None else str(first.device)


def named_shared(half: Half) -> dict[str, torch.nn.Parameter]:
    """The parameters that the other side reads too, by the first name that each has, in the order of the names."""
    shared = {id(p) for p in half.shared_parameters() if p.requires_grad}
    return {n: p for n, p in sorted(half.named_parameters()) if id(p) in shared}


def shared_names(half: Half) -> list[str]:
    """The names of the trained parameters that the other side reads too."""
    return [*named_shared(half)]


def _splits(half: Half) -> Facts:
    """What each split of a half needs: of a suffix that may go on on other paths, what any of them does."""
    found: Facts = {}
    for plan, (candidates, _) in half.runtime._plans.items():
        one, apart = _split(plan, candidates[0].live), plan.apart
        others = [p for p in half.runtime._plans if apart and p.apart and apart.number in p.apart.follows]
        if half.part == SIDES[1]:
            one["draws"] |= any(may_draw(p.nodes) for p in others)
            one["writes"] |= any(map(writes_state, others))
        same = found.setdefault(_key(plan, candidates[0].split_id), one)  # at some batches it may send more
        same["dtypes"] |= one["dtypes"]
    return found


def _key(plan: TracePlan, split_id: str) -> str:
    return f"{split_id} of plan {plan.signature}"


def _split(plan: TracePlan, live: tuple[str, ...]) -> Facts:
    values = {name: plan.values[name] for name in live if name in plan.values}
    return {
        "dtypes": {n: short_dtype(v.dtype) for n, v in values.items() if v.dtype is not None},
        "draws": may_draw(plan.nodes),
        "writes": writes_state(plan),
    }


def writes_state(plan: TracePlan) -> bool:
    """Whether running the ops of a plan changes a tensor that stays, as BatchNorm does in training mode."""
    groups = Groups(plan)
    state = {groups.find(n) for n, v in plan.values.items() if v.is_state and n in groups.parent}
    written = (n for node in plan.nodes for n in node.writes)
    return bool(plan.stores) or any(groups.find(n) in state for n in written if n in groups.parent)


def hold_together(mine: Facts, theirs: Facts, address: str) -> None:
    """Raise `HandshakeError` unless a prefix here and a suffix there are of one split, with one set of weights."""

    def refuse(what: str, here: Any, there: Any, todo: str) -> None:
        raise HandshakeError(f"{what} differs: here {here}, at {address} {there}. {todo}")

    behind = None if mine["place"] is None else [mine["place"][0] + 1, mine["place"][1]]
    if theirs["place"] != behind:
        here, there = (
            f"part {p[0]} of {p[1]}" if p else f"the {w}" for p, w in ((f["place"], f["part"]) for f in (mine, theirs))
        )
        refuse("what is run", here, there, "Serve the part behind the one here, of the same model")
    if mine["part"] == theirs["part"]:
        refuse("the part must differ and", mine["part"], theirs["part"], "Serve the suffix, and run the prefix here")
    if mine["mode"] != theirs["mode"]:
        refuse("the mode", mine["mode"], theirs["mode"], "Save both halves in one mode")
    strange = [k for k in mine["splits"] if k not in theirs["splits"]]
    if strange and len(strange) == len(mine["splits"]):
        refuse("the split", _listed(mine["splits"]), _listed(theirs["splits"]), "Save both halves of one split")
    for key in mine["splits"].keys() & theirs["splits"].keys():
        here, there = mine["splits"][key]["dtypes"], theirs["splits"][key]["dtypes"]
        for label in here.keys() & there.keys():
            if here[label] != there[label]:
                refuse(f"the dtype of {label!r}", here[label], there[label], "Move both halves to one dtype")
    if differ(mine["digest"], theirs["digest"]):
        refuse("the digest of the weights", mine["digest"], theirs["digest"], "Save both halves of one model")
    if mine["shared"] != theirs["shared"]:
        refuse("what both sides share", mine["shared"], theirs["shared"], "Save both halves of one model")


def differ(mine: str, theirs: str) -> bool:
    """Whether two digests of weights are known, and are of different ones."""
    return bool(mine and theirs) and mine != theirs


def _listed(splits: Mapping[str, Any]) -> str:
    return ", ".join(splits) or "none"


def split_of(boundary: BoundaryPayload, theirs: Facts, address: str) -> Facts:
    """What the server says of the split of a boundary; `BoundaryError` where the boundary can't be of it: nothing is sent then."""
    key = f"{boundary.split_id} of plan {boundary.plan_signature}"
    split: Facts | None = theirs["splits"].get(key)
    if split is None:
        raise BoundaryError(
            f"this boundary is of {key}; the server at {address} has {_listed(theirs['splits'])}. Run the prefix and the suffix "
            "of the same split: save both halves of one runtime, with the same examples"
        )
    weights = boundary.weights
    if differ(weights, theirs["digest"]):
        raise BoundaryError(
            f"the prefix of this boundary was saved with other weights (of a model with digest {weights}) than the suffix at "
            f"{address} ({theirs['digest']}). Save both halves of one model"
        )
    cast = {getattr(torch, dtype, None) for _, dtype, _ in boundary.autocast or ()}  # the server runs under it, too
    for label, t in zip(boundary.labels, boundary.raw, strict=True):
        wanted = split["dtypes"].get(label)
        if wanted is None or not isinstance(t, torch.Tensor) or t.dtype in cast:
            continue
        if short_dtype(t.dtype) != wanted:
            raise BoundaryError(
                f"{label!r} crosses as {short_dtype(t.dtype)}; the suffix at {address} takes {wanted}. Move both "
                "halves to one dtype"
            )
    return split


@contextlib.contextmanager
def autocast_as(told: Any) -> Iterator[None]:
    """The autocast that a client told of, on for a block; `PayloadError` where it is malformed."""
    rows = told if type(told) is list and len(told) <= 2 else None
    if rows is None or not all(type(r) is list and [*map(type, r)] == [str, str, bool] for r in rows):
        raise PayloadError("the autocast of a message is malformed; refuse the sender")
    with contextlib.ExitStack() as stack:
        for device, dtype, cached in rows:
            kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype)
            if device not in ("cpu", "cuda") or kind is None:
                raise PayloadError(f"no autocast of {device[:20]!r} to {dtype[:20]!r} is known here; refuse the sender")
            stack.enter_context(torch.autocast(device, dtype=kind, cache_enabled=cached))
        yield
