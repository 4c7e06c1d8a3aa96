"""What stands on a class: forward reads it, changes it, puts things into it; another may come to stand there between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitRuntime, SplitSpec
from ariadne.errors import ModuleError, UnsupportedError
from conformance.unit.refusing import prepare_split

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    seen: ClassVar[list[Tensor]] = []
    last: Any = None
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class Elsewhere:
    seen: ClassVar[list[Tensor]] = []


def by_itself(s: Any, h: Tensor) -> Tensor:
    s.seen.append(h)
    return h


def by_its_class(s: Any, h: Tensor) -> Tensor:
    type(s).seen.append(h)
    return h


def by_name(s: Any, h: Tensor) -> Tensor:
    Elsewhere.seen.append(h)
    return h


def made(keep: Callable[[Any, Tensor], Tensor]) -> tuple[type[Base], nn.Module, SplitRuntime]:
    """A class of its own, a model of it, and its split."""
    name = {"keep": keep, "forward": lambda s, x: s.b(s.keep(s.a(x)))}
    cls: Any = type("Net", (Base,), {**name, "seen": [], "last": None, "scale": 1.0})
    model = cls().eval()
    return cls, model, prepare_split(model, (X[:2],), split=SplitSpec("50%", dynamic_batch=(1, 8)))


def called(runtime: SplitRuntime, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        found: Tensor = runtime.run_suffix(runtime.run_prefix(x))
    return found


@pytest.mark.parametrize("keep", [by_itself, by_its_class, by_name], ids=lambda f: f.__name__)
def test_what_goes_into_a_list_of_a_class_goes_into_the_one_that_stands_there_now(keep: Any) -> None:
    cls, model, runtime = made(keep)
    holder: Any = Elsewhere if keep is by_name else cls
    for _ in range(2):  # once with the list of the capture, and then with another
        called(runtime)
        assert len(holder.seen) == 1
        assert torch.equal(holder.seen[0], model.a(X))
        holder.seen = []


def test_a_list_that_comes_to_hide_the_one_of_the_class_is_refused() -> None:
    cls, model, runtime = made(by_itself)
    model.seen = []
    with pytest.raises(ModuleError, match="'seen' of the model came from its class, now the module has one of its own"):
        called(runtime)
    del model.seen
    called(runtime)
    assert len(cls.seen) == 1


def test_a_list_in_a_class_nearer_to_the_model_is_refused() -> None:
    _, _, whole = made(by_itself)
    called(whole)
    kind: Any = type("Heir", (type(whole.model),), {})
    heir = kind().eval()
    runtime = prepare_split(heir, (X[:2],), split="50%")
    kind.seen = []
    with pytest.raises(ModuleError, match=r"Heir\.seen was missing when a function that forward calls read it"):
        called(runtime)


@pytest.mark.parametrize("spelling", ["name", "type", "class"])
def test_what_forward_binds_to_its_class_is_bound_by_each_call(spelling: str) -> None:
    def bind(s: Any, h: Tensor) -> Tensor:
        if spelling == "name":
            cls.last = h.shape[0], h
        elif spelling == "type":
            type(s).last = h.shape[0], h
        else:
            s.__class__.last = h.shape[0], h
        return h

    cls: Any = None
    cls, model, _ = made(by_itself)
    cls.keep = bind
    runtime = prepare_split(model, (X[:2],), split=SplitSpec("50%", dynamic_batch=(1, 8)))
    assert cls.last is None
    for batch in (3, 1):
        called(runtime, X[:batch])
        assert cls.last[0] == batch
        assert torch.equal(cls.last[1], model.a(X[:batch]))


@pytest.mark.parametrize("spelling", ["itself", "class", "super"])
def test_a_number_of_the_class_that_changes_is_noticed(spelling: str) -> None:
    read = {"itself": lambda s: s.scale, "class": lambda s: type(s).scale, "super": lambda s: super(cls, s).scale}
    cls: Any = None
    cls, model, _ = made(by_itself)
    cls.keep = lambda s, h: h * read[spelling](s)
    runtime = prepare_split(model, (X[:2],), split=SplitSpec("50%", dynamic_batch=(1, 8)))
    called(runtime)
    holder: Any = Base if spelling == "super" else cls
    before, holder.scale = holder.scale, 2.0
    try:
        with pytest.raises(ModuleError, match=r"scale"):
            called(runtime)
    finally:
        holder.scale = before
    assert torch.equal(called(runtime), model(X))


def test_a_number_of_the_class_that_counts_calls_is_refused() -> None:
    class Counts(Base):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            found: Tensor = self.b(self.a(x))
            return found

    with pytest.raises(UnsupportedError, match="Counts, which is 1 in a first call and something else in a second"):
        prepare_split(Counts(), (X,), split="50%")
    assert Counts.calls == 0


def test_what_a_function_out_of_a_table_binds_to_the_class_is_bound_by_each_call() -> None:
    def bind(s: Any, h: Tensor) -> Tensor:
        type(s).last = h
        return h

    table = {"bind": {"by": bind}}  # two steps away, where no one looks for code
    cls, model, _ = made(by_itself)
    cls.keep = lambda s, h: table["bind"]["by"](s, h)
    runtime = prepare_split(model, (X[:2],), split=SplitSpec("50%", dynamic_batch=(1, 8)))
    assert cls.last is None
    called(runtime)
    assert torch.equal(cls.last, model.a(X))
