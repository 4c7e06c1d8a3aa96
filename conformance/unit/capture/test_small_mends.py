"""Small things that once broke capture: names that are no identifiers, and what stands below."""

from __future__ import annotations

import builtins
import enum
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.capture.reach import Reach
from ariadne.capture.recorded import recording
from ariadne.compare import difference
from ariadne.errors import UnsupportedError

HOSTILE = {
    "a line break": "a\nimport os",
    "a carriage return": "a\rimport os",
    "a form feed": "a\x0cimport os",
    "a line separator": "a\u2028import os",
    "a next line": "a\x85import os",
    "text that turns": "a\u202eimport os",
    "half a pair": "a\ud800",
    "a quote": "a'] = 0 #",
    "a ligature": "\ufb01",
    "a raised digit": "a\u00b2\u2460",
    "letters that no name has": "a\u0e33\u2163\u00b9",
}


class Letter(enum.StrEnum):
    A = "a"


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 4, generator=torch.Generator().manual_seed(batch)),)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


def split(model: nn.Module, cut: str = "percent:50") -> Any:
    return prepare_split(model, inputs(2), split=SplitSpec(cut, dynamic_batch=(1, 8)))


def equals_whole(model: nn.Module, left: Callable[[], Any] = lambda: None, cut: str = "percent:50") -> Any:
    """The split gives what the model gives, at several batches, and leaves behind what it leaves behind."""
    runtime = split(model.eval(), cut)
    for batch in (2, 1, 3, 5):
        with torch.no_grad():
            whole = model(*inputs(batch))
            kept = left()
            found = runtime.run_suffix(runtime.run_prefix(*inputs(batch)))
        assert difference(whole, found) is None
        assert difference(kept, left()) is None
    return runtime


# --- names in generated source --------------------------------------------------------------------------------------


class Named(nn.Module):
    """Parameters, a buffer that it writes, and a tensor in an object, all behind one name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.b = name, nn.Linear(4, 4)
        self.add_module(name, nn.Linear(4, 4))
        self.holder = types.SimpleNamespace(**{name: torch.ones(4)})
        self.register_buffer(f"{name}!", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        h = self._modules[self.name](x) + getattr(self.holder, self.name)  # type: ignore[misc]
        getattr(self, f"{self.name}!").add_(1)
        return {self.name: self.b(h.relu())}


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_name_of_a_model_reaches_its_source_as_source(name: str) -> None:
    """A module, a buffer, an attribute and a key of that name: the segments run, and no line of them is the name's own."""
    model = Named(name)
    key = f"{name}!"

    def left() -> torch.Tensor:
        found: torch.Tensor = model._buffers[key].clone()  # type: ignore[union-attr]
        model._buffers[key].zero_()  # type: ignore[union-attr]
        return found

    runtime = equals_whole(model, left)
    for text in (runtime.prefix_source, runtime.suffix_source):
        assert all(c.isprintable() for line in text.split("\n") for c in line)
        assert not any(line.startswith("import") for line in text.splitlines())


@pytest.mark.parametrize("name", [*HOSTILE.values(), "class"], ids=[*HOSTILE, "a keyword"])
def test_what_forward_puts_into_an_attribute_of_any_name_is_put_there(name: str) -> None:
    """`setattr(self.holder, name, tensor)` at each call, whatever the name."""

    class Puts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.holder = types.SimpleNamespace()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            setattr(self.holder, name, h)
            return self.b(h.relu())

    model = Puts()
    equals_whole(model, lambda: model.holder.__dict__.pop(name))


def test_a_key_of_a_class_of_its_own_is_put_back_as_that_key() -> None:
    """A `str` of an Enum as the key of what forward gives: its text is no Python."""

    class Keyed(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return {Letter.A: self.b(self.a(x))}

    runtime = equals_whole(Keyed())
    (key,) = runtime.run_suffix(runtime.run_prefix(*inputs(2)))
    assert key is Letter.A


def test_a_function_that_stood_in_the_place_of_one_of_pythons_holds_no_model() -> None:
    model = nn.Linear(4, 4)
    gone = weakref.ref(model)
    with recording(model, None, Reach(model).snapshot((), {})):
        taken = builtins.len  # as the methods of a named tuple take it, in a module that is imported meanwhile
    del model
    gc.collect()
    assert taken is not len
    assert taken(torch.ones(2, 3)) == taken([1, 2]) == 2
    assert gone() is None


LAID_ANEW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another dim": lambda x: x.unsqueeze_(1).squeeze(1),
    "transposed": lambda x: x.t_().t(),
    "transposed, a square one": lambda x: x.t_(),
}


@pytest.mark.parametrize("name", LAID_ANEW)
def test_an_input_that_forward_lays_out_anew_is_refused_by_name(name: str) -> None:
    class Lays(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(LAID_ANEW[name](x)))

    rows = 4 if "square" in name else 2
    with pytest.raises(
        UnsupportedError, match=r"gives the input 'x' other sizes or strides in place, .*x\.unsqueeze\(1\)"
    ):
        prepare_split(Lays(), inputs(rows), split="after:a")


def test_an_input_that_forward_lays_out_as_it_was_is_followed() -> None:
    class Lays(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x.unsqueeze_(1))
            x.squeeze_(1)
            return self.b(h.relu())

    equals_whole(Lays())
