"""Python that a half calls: functions by their names, and what is handed to it when it is loaded; and generators of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from ariadne.capture import Call
from ariadne.errors import HalfError
from ariadne.halves.atoms import Classes, Handed, count, device, flag, items, need, place, table, text, told_spec
from ariadne.halves.packed import read_packed
from ariadne.plan import TracePlan

_PART = ("at", "name", "given", "gives", "one", "tensors", "unwritten")
_PIECE, _MOST_PIECES = 4096, 16  # of a generator's state: characters, and how many such
_TIED: WeakSet[nn.Module] = WeakSet()  # modules that a half has

Named = Callable[[Any], str | None]


def named_in(model: nn.Module) -> Named:
    """What gives the name of a module of `model`, or of a method of one; None for other things."""
    paths = {id(module): path for path, module in model.named_modules()}

    def name(thing: Any) -> str | None:
        if isinstance(thing, nn.Module):
            return paths.get(id(thing))
        owner = getattr(thing, "__self__", None)
        at = paths.get(id(owner)) if isinstance(thing, MethodType) and isinstance(owner, nn.Module) else None
        if at is None or getattr(owner, thing.__name__, None) != thing:
            return None
        return f"{at}.{thing.__name__}".removeprefix(".")

    return name


def told_object(thing: Any, named: Named) -> list[Any]:
    """What an op calls, or takes, as JSON-able data; `HalfError` for what a file can't hold."""
    owner = getattr(thing, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return ["function", place(owner)]
    if isinstance(thing, torch.Generator):
        return ["generator", str(thing.device), state_of(thing)]
    if isinstance(thing, Call):
        return ["part", _told_part(thing, named)]
    if isinstance(thing, Enum):
        raise HalfError(
            f"forward returns {thing!r}, a member of an enumeration, which can't be kept in a file; return its value, or run this "
            "half in a process that has the model"
        )
    handed = _told_handed(thing, named)
    return ["object", place(thing)] if handed is None else ["handed", handed]


def state_of(generator: torch.Generator) -> list[str]:
    """Where a generator stands, as text in pieces."""
    told = bytes(generator.get_state().tolist()).hex()
    return [told[i : i + _PIECE] for i in range(0, len(told), _PIECE)]


def _told_handed(thing: Any, named: Named) -> list[Any] | None:
    """The name in the model of what whoever loads the file must hand over, with the training flags of its modules."""
    name = named(thing)
    if name is None:
        return None
    modules = (thing if isinstance(thing, nn.Module) else thing.__self__).named_modules()
    return [name, [[path, module.training] for path, module in modules]]


def _told_part(part: Call, named: Named) -> dict[str, Any]:
    handed = _told_handed(part.function, named)
    if part.moves and handed is None:
        raise HalfError(
            f"{part.words} changes something in Python, or draws from Python's own generators, which a file can't hold; keep such "
            "state in tensors that it takes and gives, and draw from torch's RNG"
        )
    given, found = told_spec(part.given), handed or place(part.function)
    return dict(
        zip(
            _PART,
            (found, part.name, given, part.gives, part.one, list(part.tensors), list(part.unwritten)),
            strict=True,
        )
    )


def refuse_kept_by_both(plan: TracePlan, mine: Collection[str], theirs: Collection[str]) -> None:
    """Raise `HalfError` where both sides use what keeps something in Python, or one generator: each half would have its own."""
    for name in sorted({*mine} & {*theirs} & plan.objects.keys()):
        _refuse_kept(plan.objects[name])
    ours = {id(_state_of(plan.objects[n])): plan.objects[n] for n in mine if n in plan.objects}
    for n in theirs:
        if n in plan.objects and (both := ours.get(id(_state_of(plan.objects[n])))) is not None:
            _refuse_kept(both)
            _refuse_kept(plan.objects[n])


def _state_of(thing: Any) -> Any:
    return thing.function if isinstance(thing, Call) else thing


def _refuse_kept(thing: Any) -> None:
    if isinstance(thing, torch.Generator):
        raise HalfError(
            "forward draws from one torch.Generator of the model's own on both sides of the cut, and each half would have another; "
            "cut elsewhere, or draw from torch's own"
        )
    if isinstance(thing, Call) and thing.keeps:
        raise HalfError(
            f"{thing.words} keeps something in Python, and both sides of the cut call it: each half would have its own. Cut "
            "elsewhere, or let it keep that in a buffer"
        )


def read_object(data: Any, classes: Classes) -> Any:
    """What `told_object` wrote; only what `classes` allow is imported."""
    pair = items(data, "an object")
    if pair and pair[0] == "generator":
        return _read_generator(pair)
    if pair and pair[0] == "packed":
        return read_packed(pair)
    need(len(pair) == 2 and pair[0] in ("function", "object", "part", "handed"), "an object is malformed")
    if pair[0] == "part":
        return _read_part(pair[1], classes)
    if pair[0] == "handed":
        return _read_handed(pair[1], classes)
    found = classes.find(pair[1], "a function that forward calls")
    if pair[0] == "object":
        return found
    need(
        isinstance(found, type) and issubclass(found, torch.autograd.Function),
        f"{pair[1]!r} is no autograd.Function",
    )
    return found.apply


def _read_generator(data: list[Any]) -> torch.Generator:
    need(len(data) == 3, "a generator is malformed")
    try:
        pieces = [text(piece, "a generator's state") for piece in items(data[2], "a generator's state")]
        need(0 < len(pieces) <= _MOST_PIECES, "a generator's state is too long, or empty")
        state = bytes.fromhex("".join(pieces))
        found = torch.Generator(device(data[1]))
        return found.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except (ValueError, RuntimeError, TypeError) as error:
        raise HalfError(
            f"a generator of this half can't be made here: {str(error).splitlines()[0][:120]}. Save the half on a device that this "
            "machine has, or refuse who sent it"
        ) from None


def _read_handed(data: Any, classes: Classes) -> Any:
    pair = items(data, "what is handed over")
    need(len(pair) == 2, "what is handed over is malformed")
    flags = {}
    for one in items(pair[1], "the flags"):
        two = items(one, "a flag")
        need(len(two) == 2, "a flag is malformed")
        flags[text(two[0], "a module")] = flag(two[1], "a flag")
    return classes.handed(text(pair[0], "a module"), flags)


def _read_part(data: Any, classes: Classes) -> Call:
    d = table(data, "an opaque part", _PART)
    given = classes.spec(d["given"])
    need(given.kind == "tuple" and [c.kind for c in given.children] == ["tuple", "dict"], "arguments are malformed")
    need(given.size <= 1024, "a part takes too many arguments")
    unwritten = tuple(count(i, "an argument", most=given.size - 1) for i in items(d["unwritten"], "arguments"))
    tensors = tuple(flag(one, "a result") for one in items(d["tensors"], "results"))
    one = flag(d["one"], "a result")
    need(not one or len(tensors) == 1, "a part gives one value and others")
    if isinstance(d["at"], list):
        function = _read_handed(d["at"], classes)
    else:
        function = classes.find(d["at"], "an opaque part that forward calls")
    need(callable(function), f"{d['at']!r} can't be called")
    return Call(function, text(d["name"], "a part"), given, text(d["gives"], "results"), one, tensors, unwritten)


def tie(root: nn.Module, handed: Mapping[str, Handed], plans: Collection[TracePlan]) -> None:
    """Give modules that were handed to a half the half's own tensors, and the training flags that they had in the model.

    Tables are shared, so that whatever is put into the one is in the other. `HalfError` where they hold other tensors.
    """
    for name, one in handed.items():
        if any(module in _TIED for _, module in one.below()):
            raise HalfError(
                f"what was handed over as {name!r} is of another half, whose tensors it has: hand over another, or a copy.deepcopy "
                "that was made before"
            )
    for name, one in handed.items():
        path = name if one.holder is one.thing else name.rpartition(".")[0]
        below = dict(one.below())
        lacking = sorted(one.flags.keys() - below.keys())
        if lacking:
            raise HalfError(f"what was handed over as {name!r} has no module {lacking[0]!r}, which it had in the model")
        for inner, module in below.items():
            at = f"{path}.{inner}".strip(".")
            module.training = one.flags.get(inner, module.training)
            mine = _module(root, at)
            if mine is None:
                continue
            for kind in ("_parameters", "_buffers"):
                ours, theirs = getattr(mine, kind), getattr(module, kind)
                odd = next((k for k, t in ours.items() if not _fits(theirs.get(k), t)), None)
                if odd is not None:
                    raise HalfError(
                        f"what was handed over as {name!r} has no {kind[1:-1]} {f'{inner}.{odd}'.strip('.')!r} of shape "
                        f"{list(ours[odd].shape)}, which it had in the model"
                    )
                module.__dict__[kind] = ours
            module.__dict__["_non_persistent_buffers_set"] = mine._non_persistent_buffers_set
    held = [module for one in handed.values() for _, module in one.below()]
    _TIED.update(held)
    tables = {id(m.__dict__[kind]) for m in held for kind in ("_parameters", "_buffers")}
    for plan in plans:
        for node in plan.nodes:
            for v in (plan.values[n] for n in node.within):
                owner = root.get_submodule(v.origin[0])
                need(
                    {id(owner._parameters), id(owner._buffers)} & tables != set(),
                    f"{v.name!r} is read by nothing that was handed over",
                )


def _module(root: nn.Module, path: str) -> nn.Module | None:
    for step in path.split(".") if path else []:
        found = root._modules.get(step)
        if found is None:
            return None
        root = found
    return root


def _fits(theirs: Any, mine: Any) -> bool:
    return isinstance(theirs, torch.Tensor) and theirs.shape == mine.shape


def copy_kept(plan: TracePlan, memo: dict[int, Any]) -> None:
    """Put a copy of all that a half's plan calls or draws from, and that keeps something, into a memo of `copy.deepcopy`."""
    for thing in plan.objects.values():
        of = thing.function if isinstance(thing, Call) else thing
        of = of.__self__ if isinstance(of, MethodType) else of
        if isinstance(of, torch.Generator) and id(of) not in memo:
            memo[id(of)] = torch.Generator(of.device).set_state(of.get_state())
        elif isinstance(of, nn.Module):
            copy.deepcopy(of, memo)
