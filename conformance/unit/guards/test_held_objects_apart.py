"""Objects of a model are copied with its split; what forward reads nothing of is passed over, and none is asked too much."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ariadne.errors import ModuleError, UnsupportedError
from conformance.unit.held_kit import Activation, Config, Net, a_default, agree, split_of, with_strays
from conformance.unit.refusing import prepare_split


def test_a_deep_copy_looks_at_its_own_objects() -> None:
    model, split, x = split_of(lambda: Net(a_default, config=Config()), False)
    again = copy.deepcopy(split)
    agree(again.model, again, x)  # type: ignore[arg-type]
    model.config.gain = 3.0  # type: ignore[union-attr]
    agree(again.model, again, x)  # type: ignore[arg-type]
    again.model.config.gain = 3.0  # type: ignore[union-attr]
    with pytest.raises(ModuleError, match=r"config.gain was missing"):
        again.run_prefix(x)


def test_a_deep_copy_that_would_compute_with_tensors_of_the_original_is_refused() -> None:
    _, split, _ = split_of(with_strays, False)
    with pytest.raises(
        ModuleError, match=r"'aux\[0\]' is a module in no registry.*deep copy would compute with the original's"
    ):
        copy.deepcopy(split)


def test_objects_that_a_bound_method_leads_to_are_left_alone_where_it_is_not_called() -> None:
    trainer = SimpleNamespace(events=[], data=[(i, i) for i in range(1000)])
    owner = Activation()
    owner.trainer = trainer  # type: ignore[attr-defined]
    _, split, _ = split_of(lambda: Net(lambda m, x: x, log=owner.__call__), False)
    held = [keys for _, keys, _ in split._now[False].prefix_guard.attributes]  # type: ignore[attr-defined]
    assert not any("log" in keys for keys in held)


def test_a_hook_for_all_modules_is_refused_at_prepare() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    try:
        with pytest.raises(UnsupportedError, match="a global module hook is registered"):
            split_of(lambda: Net(lambda m, x: x), False)
    finally:
        handle.remove()


def test_a_config_of_a_thousand_labels_costs_no_more_than_one_without() -> None:
    config = SimpleNamespace(gain=2.0, label2id={f"LABEL_{i}": i for i in range(1000)})
    _, split, _ = split_of(lambda: Net(lambda m, x: x * m.config.gain, config=config), False)
    held = [keys for _, keys, _ in split._now[False].prefix_guard.attributes]  # type: ignore[attr-defined]
    assert ("config", "gain") in held
    assert not any("label2id" in keys for keys in held)


def test_a_function_that_makes_up_names_reads_every_object_that_it_is_given() -> None:
    def total(config: Any, count: int) -> float:
        return sum(getattr(config, f"gain{i}") for i in range(count))

    one, other = SimpleNamespace(gain0=2.0), SimpleNamespace(gain0=3.0)
    model, split, x = split_of(
        lambda: Net(lambda m, x: x * total(m.one, 1) * total(m.other, 1), one=one, other=other), False
    )
    agree(model, split, x)
    other.gain0 = 4.0
    with pytest.raises(ModuleError, match=r"'other.gain0' of the model was 3.0"):
        split.run_prefix(x)


class Closed:
    """Lets nobody ask it for anything."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")


def _closed(kind: type, content: Any) -> Any:
    def refuse(self: Any, *args: Any) -> Any:
        raise RuntimeError("asked")

    return type("Closed", (kind,), {"__len__": refuse, "__iter__": refuse})(content)


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
@pytest.mark.parametrize("thing", ["closed_object", "deque", "list", "proxy", "proxy_inside", "set"])
def test_objects_that_raise_when_they_are_looked_at(thing: str, read: bool) -> None:
    alive = [Activation()]
    odd = {
        "closed_object": lambda: [Closed()],
        "deque": lambda: _closed(deque, [1]),
        "list": lambda: _closed(list, [1, 2]),
        "proxy": lambda: weakref.proxy(alive[0]),
        "proxy_inside": lambda: {"proxies": [weakref.proxy(alive[0])]},
        "set": lambda: _closed(set, [1]),
    }[thing]()
    model = Net(lambda m, x: x if read and m.odd is None else x * 2, odd=odd).eval()
    alive.clear()
    x = torch.randn(2, 4)
    agree(model, prepare_split(model, (x,), split="percent:50"), x)
