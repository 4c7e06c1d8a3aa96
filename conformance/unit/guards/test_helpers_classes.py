"""What a helper object's methods put into their own class is seen, however much else the model holds."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from torch import Tensor, nn

import ariadne.guards.roots
from ariadne import prepare_split
from ariadne.errors import AriadneError, UnsupportedError
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)


def counting(spelling: str) -> Any:
    """An object that counts in its class."""

    class Table:
        counts: ClassVar[dict[str, int]] = {}

        def note(self, h: Tensor) -> Tensor:
            self.counts["n"] = self.counts.get("n", 0) + 1
            return h

    class Number:
        calls = 0

        def note(self, h: Tensor) -> Tensor:
            type(self).calls += 1
            return h

    class Deeper:
        state: ClassVar[list[int]] = [0]

        def note(self, h: Tensor) -> Tensor:
            return self.noted(h)

        def noted(self, h: Tensor) -> Tensor:
            self.state[0] += 1
            return h

    return {"a dict": Table, "a number": Number, "by another method": Deeper}[spelling]()


class Net(nn.Module):
    def __init__(self, helper: Any, words: int) -> None:
        super().__init__()
        self.vocabulary = {f"word {i}": [i] for i in range(words)}
        self.first, self.last, self.helper = nn.Linear(4, 4), nn.Linear(4, 4), helper

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.helper.note(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("words", [0, 60])
@pytest.mark.parametrize("spelling", ["a dict", "a number", "by another method"])
def test_what_a_helper_counts_in_its_class_is_refused_and_put_back(
    spelling: str, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary of more words than things may be looked into takes no class out of sight that is met besides."""
    monkeypatch.setattr(ariadne.guards.roots, "_MOST", 50)
    helper = counting(spelling)
    before = {name: repr(value) for name, value in vars(type(helper)).items()}
    with pytest.raises(UnsupportedError, match=r"changes what is in|reads and changes"):
        prepare_split(Net(helper, words), (X,), split="after:first")
    assert {name: repr(value) for name, value in vars(type(helper)).items()} == before


def test_strings_and_numbers_are_none_of_the_things_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ariadne.guards.roots, "_MOST", 50)
    net = Net(counting("a number"), 0)
    net.vocabulary = {f"word {i}": i for i in range(200)}
    search = ariadne.guards.roots._Search()
    search.of_module(net)
    search.all()
    assert 0 < search.left < 50
    with pytest.raises(AriadneError):
        prepare_split(net, (X,), split="after:first")
