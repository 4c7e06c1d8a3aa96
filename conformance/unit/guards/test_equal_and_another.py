"""Values that are equal to those of capture and are others: a text and a member of an Enum of texts, 1 and True, 1.0 and 1.00."""

from __future__ import annotations

import decimal
import enum
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ariadne import prepare_split
from ariadne.errors import InputError


class Mode(str, enum.Enum):  # noqa: UP042 - whose members format as others than those of a StrEnum
    TANH = "tanh"


class Name(str):
    """A text that is equal to others than itself."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str(self).lower() == str(other).lower()

    __hash__ = str.__hash__


class Asking(nn.Module):
    """Goes one way or another by what `ask` says of an attribute, of what an object in one holds, or of an input."""

    def __init__(self, ask: Callable[[Any], bool], value: Any = None, place: str = "mode") -> None:
        super().__init__()
        self.a, self.b, self.ask, self.place = nn.Linear(6, 8), nn.Linear(8, 2), ask, place
        self.mode, self.held = value, types.SimpleNamespace(mode=value)

    def stand(self, value: Any) -> None:
        """Have another value stand there."""
        self.mode = self.held.mode = value

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        h = self.a(x)
        asked = {"mode": self.mode, "held": self.held.mode, "given": given}[self.place]
        return self.b(h.tanh() if self.ask(asked) else h)


PAIRS: dict[str, tuple[Any, Any, Callable[[Any], bool]]] = {
    "a text, a member": ("tanh", Mode.TANH, lambda v: isinstance(v, Mode)),
    "a text, numpy's": ("tanh", numpy.str_("tanh"), lambda v: type(v) is str),
    "a class of texts": (Name("ab"), Name("AB"), str.isupper),
    "decimals": (decimal.Decimal("1.0"), decimal.Decimal("1.00"), lambda v: len(str(v)) > 3),
    "memory orders": (numpy.ones((2, 2)), numpy.ones((2, 2), order="F"), lambda v: bool(v.flags["C_CONTIGUOUS"])),
    "keys": ({"tanh": 1.0}, {Mode.TANH: 1.0}, lambda v: isinstance(next(iter(v)), Mode)),
    "numbers as keys": ({1: 1.0}, {True: 1.0}, lambda v: next(iter(v)) is True),
}
BY_THEMSELVES = ("decimals", "memory orders")  # inputs for which no other plan is captured


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
@pytest.mark.parametrize("place", ["mode", "held", "given"])
@pytest.mark.parametrize("name", PAIRS)
def test_what_is_equal_and_another_is_not_taken_for_it(name: str, place: str, back: bool) -> None:
    first, other, ask = PAIRS[name]
    if back:
        first, other = other, first
    model, x = Asking(ask, first, place).eval(), torch.randn(2, 6)
    given = (lambda value: (x, value)) if place == "given" else lambda value: (x,)
    runtime = prepare_split(model, given(first), split="after:a")
    for value in (first, other, first):
        model.stand(value)
        with torch.no_grad():
            expected = model(*given(value))
        if place == "given" and value is other and name in BY_THEMSELVES:
            with pytest.raises(InputError, match=r"at capture, now it is"):
                runtime.run_prefix(*given(value))
            continue
        assert torch.equal(expected, runtime.run_suffix(runtime.run_prefix(*given(value))))


def test_an_input_that_cannot_be_copied_is_refused_by_name() -> None:
    model = Asking(lambda v: bool(v["on"]), None, "given")
    with pytest.raises(InputError, match=r"an input holds a mappingproxy, .* which can't be copied .* Pass a dict"):
        prepare_split(model, (torch.randn(2, 6), types.MappingProxyType({"on": True})), split="after:a")


def _made_here(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that no module has, so that the next call may bring one more."""

    def made(x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    made.__name__ = name
    return made


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (_made_here("tanh"), _made_here("relu"), r"was the function 'tanh' at capture, now it is the function 'relu'"),
        (nn.Tanh(), nn.Tanh(), r"was Tanh\(\) at capture, now it is another one"),
    ],
    ids=["function", "module"],
)
def test_another_function_or_module_is_told_apart_in_words(one: Any, other: Any, words: str) -> None:
    class Acts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            out: torch.Tensor = self.b(act(self.a(x)))
            return out

    x = torch.ones(2, 4)
    split = prepare_split(Acts(), (x, one), split="after:a")
    with pytest.raises(InputError, match=words):
        split.run_prefix(x, other)
