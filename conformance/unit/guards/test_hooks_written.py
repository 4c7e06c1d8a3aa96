"""Hooks that are written into a module's tables, or tables that are put in their place, without torch's own functions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)


def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


CHANGES: dict[str, tuple[bool, Callable[[nn.Module], Any]]] = {
    "written": (False, lambda m: m._forward_hooks.__setitem__(10**6, doubled)),
    "written before": (False, lambda m: m._forward_pre_hooks.__setitem__(10**6, lambda m, x: (x[0] * 2,))),
    "written for gradients": (False, lambda m: m._backward_hooks.__setitem__(10**6, lambda *_: None)),
    "another table": (False, lambda m: setattr(m, "_forward_hooks", OrderedDict({1: doubled}))),
    "an empty table": (True, lambda m: setattr(m, "_forward_hooks", OrderedDict())),
    "cleared": (True, lambda m: m._forward_hooks.clear()),
}


@pytest.mark.parametrize("where", ["", "0", "1", "1.1"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_hook_that_no_registration_told_of_is_noticed(change: str, where: str) -> None:
    hooked, write = CHANGES[change]
    for cut in ("25%", "75%"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
        module = model.get_submodule(where)
        if hooked:
            module.register_forward_hook(doubled)
        runtime = prepare_split(model, (X,), split=cut)
        before = model(X)
        with torch.no_grad():
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), before)
        write(module)
        with pytest.raises(ModuleError, match=r"the hooks of .* changed"):
            runtime.run_suffix(runtime.run_prefix(X))


def test_an_equal_table_in_place_of_another_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    runtime = prepare_split(model, (X,), split="50%")
    model[0]._forward_hooks = OrderedDict()
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))
    model[0]._forward_hooks[1] = doubled
    with pytest.raises(ModuleError, match=r"the hooks of '0' \(forward_hooks\) changed: there came doubled of "):
        runtime.run_prefix(X)


def test_hooks_that_transformers_leaves_are_named_with_the_way_on() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    runtime = prepare_split(model, (X,), split="50%")

    def output_capturing_hook(*args: Any) -> None:
        pass

    output_capturing_hook.__module__ = "transformers.utils.output_capturing"
    handle = model[0].register_forward_hook(output_capturing_hook)
    with pytest.raises(ModuleError, match=r"output_capturing_hook of transformers.*they stay: prepare again"):
        runtime.run_prefix(X)
    handle.remove()
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))
