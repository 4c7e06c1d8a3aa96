"""What forward keeps or finds where no registry of a module has it: nothing fake stays there, and ordinary Python is no alarm."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ariadne import SplitRuntime
from ariadne.errors import ModuleError
from ariadne.guards.roots import outside_of
from ariadne.guards.steps import Code
from conformance.unit.refusing import prepare_split

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, middle: Callable[[Any, torch.Tensor], torch.Tensor], **held: Any) -> None:
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(4, 4), nn.Linear(4, 4), middle
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self, self.a(x)))

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x)


def agree(split: SplitRuntime, batch: int = 3) -> None:
    x = torch.randn(batch, 4)
    with torch.no_grad():
        assert torch.equal(split.run_suffix(split.run_prefix(x)), split.model(x))


@lru_cache
def remembered(n: int) -> torch.Tensor:
    return torch.arange(4.0) * n


KEPT: dict[int, torch.Tensor] = {}
COUNTS: defaultdict[str, int] = defaultdict(int)


def kept(n: int) -> torch.Tensor:
    return KEPT.setdefault(n, torch.arange(4.0) * n)


@pytest.mark.parametrize("weights", [kept, remembered])
@pytest.mark.parametrize("example", [1, 2])
def test_no_fake_tensor_stays_in_a_cache_outside_of_the_model(
    weights: Callable[[int], torch.Tensor], example: int
) -> None:
    remembered.cache_clear()
    KEPT.clear()
    model = Net(lambda self, x: x * weights(int(x.shape[0]))).eval()
    split = prepare_split(model, (X[:example],), split="after:a")
    for batch in (1, 2, 3, 5):
        assert not isinstance(model(torch.randn(batch, 4)), FakeTensor)
        agree(split, batch)


class Keys(dict):
    __getattr__ = dict.__getitem__


CONFIG = Keys(scale=2.0)


class Strict(nn.Module):
    """Delegates what it has not to what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def cyclic() -> dict[str, Any]:
    tree: dict[str, Any] = {"scale": 2.0, "child": {}}
    tree["child"]["parent"] = tree
    return tree


def deep() -> list[Any]:
    found: list[Any] = [2.0]
    for _ in range(100):
        found = [found]
    return found


ORDINARY: dict[str, Callable[[], nn.Module]] = {
    "a cyclic dict": lambda: Net(lambda self, x: x * self.tree["scale"], tree=cyclic()),
    "a deep list": lambda: Net(lambda self, x: x * len(self.tree), tree=deep()),
    "a dict whose keys are attributes": lambda: Net(lambda self, x: x * self.config.scale, config=Keys(scale=2.0)),
    "a global dict whose keys are attributes": lambda: Net(
        lambda self, x: x * CONFIG.scale + (CONFIG.shift if "shift" in CONFIG else 0)
    ),
    "a wrapper that delegates": lambda: Strict(Net(lambda self, x: x, scale=2.0)),
}


@pytest.mark.parametrize("name", sorted(ORDINARY))
def test_ordinary_python_is_prepared_copied_and_run(name: str) -> None:
    split = prepare_split(ORDINARY[name]().eval(), (X,), split="50%")
    agree(split)
    try:
        copy.deepcopy(split.model)
    except KeyError:  # by its class, which takes `__deepcopy__` for a key
        return
    agree(copy.deepcopy(split))


def test_a_key_that_no_call_asked_for_is_not_made() -> None:
    COUNTS.clear()
    prepare_split(Net(lambda self, x: x * COUNTS["steps"] if x.shape[1] > 4 else x).eval(), (X,), split="after:a")
    assert not COUNTS


def test_compiling_the_model_itself_is_no_change() -> None:
    model = Net(lambda self, x: x).eval()
    split = prepare_split(model, (X,), split="after:a")
    model.compile(backend="eager")
    split.run_suffix(split.run_prefix(X))


def test_a_method_that_an_instance_gets_of_its_own_is_named_until_it_goes() -> None:
    split = prepare_split(Net(lambda self, x: x).eval(), (X,), split="after:a")
    split.model.head = lambda x: x
    with pytest.raises(ModuleError, match="'head' of the model came from its class, now the module has one of its own"):
        split.run_prefix(X)
    del split.model.head
    agree(split)


def test_preparing_leaves_the_statistics_of_a_module_in_a_list_alone() -> None:
    model = Net(lambda self, x: self.parts[0](x), parts=[nn.BatchNorm1d(4)])
    prepare_split(model, (X,), split="after:a")
    assert model.parts[0].num_batches_tracked == 0
    assert torch.equal(model.parts[0].running_mean, torch.zeros(4))


class Forgetful:
    def __init__(self) -> None:
        self.table = np.ones(3)

    def __getstate__(self) -> dict[str, Any]:
        return {"table": None}


def test_a_copy_that_lost_what_forward_read_is_refused_and_the_original_goes_on() -> None:
    split = prepare_split(
        Net(lambda self, x: x * float(self.held.table[0]), held=Forgetful()).eval(), (X,), split="after:a"
    )
    copied = copy.deepcopy(split)
    with pytest.raises(ModuleError, match="table"):
        copied.run_prefix(X)
    agree(split)


def asserts(self: Any, h: torch.Tensor) -> torch.Tensor:
    assert h.dim() == 2
    return h


def test_what_a_tool_keeps_under_a_name_that_no_source_can_hold_is_not_walked_through() -> None:
    tool = next(
        name for name in asserts.__code__.co_names if not name.isidentifier()
    )  # pytest's, which leads to all of it
    model = Net(asserts)
    assert tool in asserts.__globals__
    assert not any(tool in root.name for root in outside_of({"": model}).roots)
    code = Code.of(asserts.__code__, False, __name__)
    assert {chain.start for chain in code.chains}.isdisjoint({tool})
    agree(prepare_split(model, (X,), split="50%"))
