"""Inputs and outputs that are a `SimpleNamespace`, a `UserDict` or a member of an enumeration."""

from __future__ import annotations

import enum
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ariadne
from ariadne import prepare_split
from ariadne.compare import difference
from ariadne.errors import HalfError, InputError


class Way(enum.Enum):
    UP, DOWN = 1, 2


class Number(enum.IntEnum):
    ONE = 1


class Options(UserDict[str, Any]):
    """One whose constructor does what must not be done again."""

    def __init__(self, *args: Any, scale: int) -> None:
        super().__init__(*args)
        self.scale = scale
        self.data = {f"{key}_": value for key, value in self.data.items()}


class Space(SimpleNamespace):
    pass


class Net(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(4, 8), nn.Linear(8, 3), [call]

    def forward(self, *args: Any) -> Any:
        return self.calls[0](self, *args)


def batch(n: int) -> torch.Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(n))


def equals_whole(call: Callable[..., Any], *given: Callable[[int], Any]) -> Any:
    """Two batches, over bytes."""
    model = Net(call).eval()
    runtime = prepare_split(model, tuple(make(2) for make in given), split="after:a")
    for n in (2, 3):
        with torch.no_grad():
            whole = model(*(make(n) for make in given))
            boundary = runtime.run_prefix(*(make(n) for make in given))
            found = runtime.run_suffix(ariadne.BoundaryPayload.from_bytes(boundary.to_bytes()))
        assert type(whole) is type(found)
        assert difference(whole, found) is None
    return runtime


@pytest.mark.parametrize("kind", [SimpleNamespace, Space])
def test_a_namespace_goes_in_and_comes_out(kind: Any) -> None:
    equals_whole(
        lambda m, o: kind(y=m.b(m.a(o.inner.x)) * o.k, names=["y"], way=Way.UP),
        lambda n: kind(inner=kind(x=batch(n)), k=2, way=Way.UP),
    )


def test_a_user_dict_goes_in_and_comes_out_and_no_constructor_runs() -> None:
    def call(m: Net, o: Options) -> Options:
        return Options({"y": m.b(m.a(o["x_"])) * o.scale}, scale=3)

    equals_whole(call, lambda n: Options({"x": batch(n)}, scale=2))


def test_what_forward_puts_on_one_is_there_after_the_call() -> None:
    def call(m: Net, o: Any, u: Any) -> Any:
        o.h, u["n"] = m.a(o.x), 3
        return m.b(o.h)

    model = Net(call).eval()
    runtime = prepare_split(model, (SimpleNamespace(x=batch(2)), UserDict(z=1)), split="after:a")
    one, other = ((SimpleNamespace(x=batch(3)), UserDict(z=1)) for _ in range(2))
    with torch.no_grad():
        assert torch.equal(model(*one), runtime.run_suffix(runtime.run_prefix(*other)))
    assert difference(one, other) is None


def test_all_attributes_of_one_are_looked_at() -> None:
    """Also those that are no leaves of other containers, such as a set."""
    model = Net(lambda m, o: m.b(m.a(o.x)) * len(o.names)).eval()
    runtime = prepare_split(model, (SimpleNamespace(x=batch(2), names={"a"}),), split="after:a")
    with pytest.raises(InputError, match=r"\.names was \{'a'\} at capture, now it is \{'b'\}"):
        runtime.run_prefix(SimpleNamespace(x=batch(2), names={"b"}))


def test_a_member_of_an_enumeration_comes_out_as_itself() -> None:
    runtime = equals_whole(lambda m, x: (m.b(m.a(x)), Way.DOWN), batch)
    assert runtime.run_suffix(runtime.run_prefix(batch(2)))[1] is Way.DOWN


def test_another_member_of_an_enumeration_has_a_plan_of_its_own() -> None:
    model = Net(lambda m, x, way: (m.b(m.a(x)) * (2 if way is Way.UP else 3), way)).eval()
    runtime = prepare_split(model, (batch(2), Way.UP), split="after:a")
    for way in (Way.UP, Way.DOWN, Way.UP):
        with torch.no_grad():
            found = runtime.run_suffix(runtime.run_prefix(batch(3), way))
            assert difference(model(batch(3), way), found) is None
        assert found[1] is way


def test_files_keep_namespaces(tmp_path: Any) -> None:
    model = Net(lambda m, o: UserDict(y=m.b(m.a(o.x)), k=o.k)).eval()
    runtime = prepare_split(model, (SimpleNamespace(x=batch(2), k=1),), split="after:a")
    for side in ("prefix", "suffix"):
        runtime.save(tmp_path / f"{side}.safetensors", side=side)
    prefix, suffix = (ariadne.load(tmp_path / f"{side}.safetensors") for side in ("prefix", "suffix"))
    given = SimpleNamespace(x=batch(3), k=1)
    with torch.no_grad():
        assert difference(model(given), suffix.run_suffix(prefix.run_prefix(given))) is None


@pytest.mark.parametrize("member", [Way.UP, Number.ONE])
def test_files_keep_no_members_of_enumerations(member: Any, tmp_path: Any) -> None:
    runtime = prepare_split(Net(lambda m, x: (m.b(m.a(x)), member)).eval(), (batch(2),), split="after:a")
    with pytest.raises(HalfError, match="can't be kept in a file"):
        runtime.save(tmp_path / "suffix.safetensors", side="suffix")
