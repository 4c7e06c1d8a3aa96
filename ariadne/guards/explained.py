"""Explained: what a model that a guard refuses has otherwise than at capture, in words."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import nn

from ariadne import tree
from ariadne.errors import ModuleError, named
from ariadne.guards.attributes import SIMPLE, is_a, is_ours, own_of, simple
from ariadne.guards.baseline import HOOKS, Baseline, global_hooks, keeps_its_weights, reach, shown
from ariadne.guards.classes import stands_in
from ariadne.guards.first_calls import AsFilled, told_of_graph, untold
from ariadne.guards.kept import Kept, Same
from ariadne.guards.last_size import AsLast
from ariadne.guards.left import AsLeft
from ariadne.guards.marks import tabled
from ariadne.guards.stood import AsStood
from ariadne.guards.watched import is_known


def refuse_changes(
    base: Baseline,
    modules: Mapping[str, nn.Module],
    own_dicts: Sequence[dict[str, Any]],
    attributes: Sequence[tuple[str, tuple[Any, ...], Any]],
    absent: Mapping[str, Sequence[tuple[str, str]]],
) -> None:
    """Raise `ModuleError` with the first difference of these modules, if there is one that matters.

    `own_dicts`: the `__dict__` of each when it was prepared. `attributes`: what forward read of them, as in `Baseline`.
    `absent`: (table, name) of the parameters and buffers of each that were None.
    """
    again = "; undo that, or call prepare_split again"
    for (path, module), own_dict in zip(modules.items(), own_dicts, strict=True):
        where = named(path)
        if module.__dict__ is not own_dict:
            raise ModuleError(f"the __dict__ of {where} was replaced, and the new one is not followed{again}")
        kind: type = type(module)
        if kind is not base.classes[path]:
            raise ModuleError(
                f"{where} was a {base.classes[path].__name__} at capture, now it is a {kind.__name__}{again}"
            )
        if path in base.training and module.training != base.training[path]:
            old, new = ("train", "eval") if base.training[path] else ("eval", "train")
            raise ModuleError(
                f"{where} was captured in {old} mode and is now in {new} mode; call .{old}() on it, or prepare again in "
                f"{new} mode"
            )
        if module.__dict__.get("forward") is not base.forwards[path]:
            raise ModuleError(f"{where} has another forward of its own{again}")
        if not base.keeps_its_tables(path):
            raise ModuleError(
                f"the dict of parameters or that of buffers of {where} was replaced, and the new one is not followed{again}"
            )
        now, was = list(module._modules.items()), base.children[path]
        if not base.keeps_its_children(path):
            changed = [n for n, m in now if (n, m) not in was] + [n for n, m in was if (n, m) not in now]
            what = repr(f"{path}.{changed[0]}".removeprefix(".")) if changed else f"the order of the parts of {where}"
            raise ModuleError(f"{what} was replaced, added or removed{again}")
        for h in HOOKS:
            if (hooks := base.hooks_now(module, h)) != base.hooks[path, h]:
                how = _difference(base.hooks[path, h], hooks)
                raise ModuleError(f"the hooks of {named(path)} ({h.strip('_')}) changed: {how}{again}")
        if isinstance(module, nn.RNNBase) and not keeps_its_weights(module):
            raise ModuleError(f"the weights that {where} lists (_flat_weights) are not its parameters{again}")
        for table, name, tensor in base.tensors.get(path, ()):
            if module.__dict__[table].get(name) is not tensor:
                raise ModuleError(
                    f"{name!r} of {where}, which stands in no registry of the model, is another tensor now{again}"
                )
        for table, name in absent[path]:
            if module.__dict__[table].get(name) is not None:
                raise ModuleError(f"{name!r} of {where} was None at capture, now it is a tensor{again}")
    for path, keys, value in attributes:
        if isinstance(value, AsFilled) and value.lacks_graph():
            raise ModuleError(told_of_graph(keys[0]) + untold(value))
        if isinstance(value, AsFilled) and not value.is_same():
            raise ModuleError(
                f"forward makes {keys[0]} of {value!r} at its first call, and keeps it; that was changed since, and the model goes "
                f"on with what it made of the old one{untold(value)}{again}"
            )
        if isinstance(value, AsStood) and not value.is_same():
            raise ModuleError(
                f"an earlier call of the model put {value!r} there, and something else stands there since: the model goes on with "
                f"that, and a plan makes it anew as a first call does{again}"
            )
        if isinstance(value, AsLast) and not value.asked():
            raise ModuleError(value.told(keys[0]))
        if isinstance(value, AsLeft) and (other := value.other()) is not None:
            where, now_it_is, left = other
            raise ModuleError(
                f"forward fills {where} at its first call, and keeps it: by {now_it_is}, where the first call of this plan "
                f"would have left {left}; the model goes on with the first. Let forward ask anew in each call, or set it "
                f"beforehand, as a call of the model itself does{again}"
            )
        if isinstance(value, Kept):
            if not value.is_same():
                raise ModuleError(
                    f"{shown(keys)!r} of {named(path)} was {value!r} when forward read it, now it is {value.now()}{again}"
                )
            continue
        found = reach(modules[path], keys)
        if (
            found is not value.thing
            if isinstance(value, Same)
            else not simple(found) or not tree.identical(found, value)
        ):
            now_it_is = "gone" if found is modules[path] else reprlib.repr(found)
            raise ModuleError(
                f"attribute {shown(keys)!r} of {named(path)} was {reprlib.repr(value)} when forward "
                f"read it, now it is {now_it_is}{again}"
            )
    for path, name, before, now_flag, beside in base.flags:
        tables = [(base.modules[p].__dict__, n) for p, n in beside]
        own = modules[path].__dict__ if path in modules else {name: before}
        if not is_known(own, name, before, now_flag, tables):
            raise ModuleError(
                f"attribute {name!r} of {named(path)} was {before!r} when forward read it, and is {own.get(name)!r} now, with "
                f"what a first call fills beside it as no call leaves it{again}"
            )
    for path, was_there in base.tabled.items():
        there = tabled(modules[path])
        if there != was_there:
            raise ModuleError(
                f"forward looked through the parameters and buffers of {named(path)}, which were "
                f"{_listed(was_there)} and are {_listed(there)} now{again}"
            )
    for path, name in sorted(base.inherited):
        own = modules[path].__dict__ if path in modules else {}
        if name in own and not is_ours(type(own[name])):  # ours is there for a moment, and calls the class's
            raise ModuleError(
                f"{name!r} of {named(path)} came from its class, now the module has one of its own{again}"
            )
    for path, name in sorted(base.handed_on):
        if path in modules and stands_in(modules[path], name):
            raise ModuleError(
                f"forward found {name!r} of {named(path)} by the module's own __getattr__, now it has one itself{again}"
            )
    for path, name in sorted(base.missing):
        if path in modules and hasattr(modules[path], name):
            raise ModuleError(f"forward found no attribute {name!r} on {named(path)}, now there is one{again}")
    for outside in base.outside:
        if not outside.is_same():
            raise ModuleError(f"{outside.told()}{again}")
    if global_hooks():
        raise ModuleError(
            f"a global module hook was added ({global_hooks()[0]!r}), which a captured plan does not run; remove it"
        )


def _difference(was: Sequence[Any], now: Sequence[Any]) -> str:
    """Which hooks came and went, in words."""
    came, gone = [f for f in now if f not in was], [f for f in was if f not in now]
    told = [
        f"{verb} {', '.join(map(_called, some))}" for verb, some in (("there came", came), ("there went", gone)) if some
    ]
    late = any(str(getattr(f, "__module__", "")).startswith("transformers.") for f in came)
    left = (
        " (transformers leaves such hooks at the first call that asks for hidden states or attentions, and they stay: prepare "
        "again)"
    )
    return (" and ".join(told) or "they run in another order") + (left if late else "")


def _called(hook: Any) -> str:
    """What a hook is called, and where it is from."""
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    return f"{str(name).replace('<locals>.', '')} of {getattr(hook, '__module__', None) or type(hook).__module__}"


def _listed(names: tuple[list[str], list[str]]) -> str:
    """The names of parameters, and of buffers."""
    parameters, buffers = (", ".join(some) or "none" for some in names)
    return f"{parameters} (parameters), {buffers} (buffers)"


def beside(value: Any) -> str:
    """The attributes that a number, a text or a container has beside what it shows, for an error; nothing where it has none."""
    own = own_of(value) if is_a(value, (*SIMPLE, tuple, list, dict)) else None
    return f" with the attributes {reprlib.repr(own)}" if own else ""


def unlike(was: Any, now: Any) -> str:
    """That an input that is no tensor is another one than at capture, in words for both."""
    one, other = (_shortly(thing) + beside(thing) for thing in (was, now))
    return f"was {one} at capture, now it is {'another one' if one == other else other}"


def _shortly(thing: Any) -> str:
    """A function by its name, of which `reprlib` would leave out the middle; anything else as that has it."""
    named_so = type(thing) in (FunctionType, BuiltinFunctionType, MethodType)
    return f"the function {thing.__name__!r}" if named_so else reprlib.repr(thing)


def other_structure(found: tree.Spec, known: tree.Spec, raised: Exception | None = None) -> str:
    """That a call has another structure than the example, for an error; and what forward `raised` when it was given that."""
    expected, call = (f"args {spec.children[0]}, kwargs {spec.children[1]}" for spec in (known, found))
    tried = "" if raised is None else f". Given these, forward raises {type(raised).__name__}: {raised}"
    return (
        f"the inputs have another structure than at capture: expected {expected}; found {call}. Pass them as "
        f"example_inputs and example_kwargs had them, or prepare again{tried}"
    )
