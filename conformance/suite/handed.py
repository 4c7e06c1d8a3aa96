"""What a half calls of Python: functions that a file names only with leave, and modules that are handed to it when it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.plan import TracePlan


def _called(plans: Iterable[TracePlan]) -> Iterator[Any]:
    for plan in plans:
        for thing in plan.objects.values():
            yield getattr(thing, "function", thing)


def modules_called(plans: Iterable[TracePlan], model: nn.Module, other: nn.Module) -> dict[str, Any]:
    """The modules of `model`, and methods of modules, that its plans call, by their names, as they are in another such model.

    In that one their tensors get other numbers: a half is to put its own in their place.
    """
    names, found = {id(m): path for path, m in model.named_modules()}, {}
    for called in _called(plans):
        owner = getattr(called, "__self__", called)
        path = names.get(id(owner))
        if path is None:
            continue
        module = other.get_submodule(path)
        with torch.no_grad():
            for t in (*module.parameters(), *module.buffers()):
                t.add_(1)
        if owner is called:
            found[path] = module
        else:
            found[f"{path}.{called.__name__}".removeprefix(".")] = getattr(module, called.__name__)
    return found


def functions_called(plans: Iterable[TracePlan]) -> list[str]:
    """What a file needs leave for: functions that the plans call, settings that they change, classes of tensors."""
    plans = [*plans]
    found = {setting for plan in plans for node in plan.nodes for setting, _ in node.region.switches}
    found |= {_name(cls) for plan in plans for cls in _classes(plan.output_spec)}
    for called in _called(plans):
        owner = getattr(called, "__self__", called)
        if callable(owner) and not isinstance(
            owner, nn.Module
        ):  # not a container that a plan stores in, nor what is handed over
            found.add(_name(owner))
    return sorted(found)


def _classes(spec: tree.Spec) -> Iterator[Any]:
    """The classes of tensors that a structure has."""
    if spec.kind == "subclass":
        yield spec.cls
    for child in spec.children:
        yield from _classes(child)


def _name(function: Any) -> str:
    if isinstance(function, torch.jit.ScriptFunction):  # "__torch__.package.module.name"
        module, _, name = function.qualified_name.removeprefix("__torch__.").rpartition(".")
        return f"{module}:{name}"
    return f"{function.__module__}:{function.__qualname__}"
