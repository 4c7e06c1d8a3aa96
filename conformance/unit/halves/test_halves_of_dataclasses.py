"""Dataclasses and lists of other classes in files: by all that they have, from format 3 on."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne import tree
from ariadne.errors import HalfError
from ariadne.halves.atoms import Classes, told_spec
from conformance.unit.halves.test_halves import rewritten
from conformance.unit.trap_kit import numbers


@dataclass
class Plain:
    y: Tensor


@dataclass
class Halved:
    y: Tensor
    made: Any = field(init=False)

    def __post_init__(self) -> None:
        self.y, self.made, self.lock = self.y / 2, [self.y], threading.Lock()


class Items(list):  # type: ignore[type-arg]
    pass


class Gives(nn.Module):
    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.a, self.b, self.cls = nn.Linear(4, 4), nn.Linear(4, 4), cls

    def forward(self, x: Tensor) -> Any:
        return self.cls(self.b(self.a(x).relu()))


def written(cls: Any, folder: Path) -> tuple[Any, list[str]]:
    split = ariadne.prepare_split(Gives(cls).eval(), (numbers(2, 4),), split="after:a")
    split.save(folder / "half", side="suffix")
    return split, [f"{__name__}:{cls.__name__}"]


def test_a_file_makes_what_forward_made(tmp_path: Path) -> None:
    split, allow = written(Halved, tmp_path)
    half = ariadne.load(tmp_path / "half", allow=allow)
    want, found = (s.run_suffix(split.run_prefix(numbers(3, 4))) for s in (split, half))
    assert torch.equal(want.y, found.y)
    assert torch.equal(want.made[0], found.made[0])
    assert isinstance(found.lock, type(threading.Lock()))


def test_an_older_file_is_read_where_it_says_all(tmp_path: Path) -> None:
    split, allow = written(Plain, tmp_path)
    rewritten(tmp_path / "half", lambda h: h.update(format=1) if h["format"] == 3 else None)
    half = ariadne.load(tmp_path / "half", allow=allow)
    want, found = (s.run_suffix(split.run_prefix(numbers(3, 4))) for s in (split, half))
    assert torch.equal(want.y, found.y)


def test_an_older_file_is_refused_where_a_class_had_to_make_the_rest(tmp_path: Path) -> None:
    _, allow = written(Halved, tmp_path)
    rewritten(tmp_path / "half", lambda h: h.update(format=2))
    with pytest.raises(HalfError, match=r"kept no more of a Halved than its constructor takes.*save it again"):
        ariadne.load(tmp_path / "half", allow=allow)


def test_lists_of_another_class_come_back() -> None:
    spec = tree.flatten(Items([1, 2]))[1]
    assert Classes(allow=[f"{__name__}:Items"]).spec(told_spec(spec)) == spec
    assert str(Classes(plain=True).spec(told_spec(spec))) == "(*, *)"


@pytest.mark.parametrize(
    "said",
    [
        {"kind": "fields", "class": f"{__name__}:Plain", "keys": ["__dict__"], "children": ["*"]},
        {"kind": "fields", "class": f"{__name__}:Plain", "keys": [], "children": [], "context": [["y"]]},
        {"kind": "fields", "class": f"{__name__}:Items", "keys": [], "children": []},
        {"kind": "row", "class": f"{__name__}:Plain", "children": []},
        {"kind": "row", "class": "torch:Size", "children": []},
    ],
)
def test_a_structure_that_fits_no_class_is_refused(said: Any) -> None:
    with pytest.raises(HalfError, match="is no container of kind"):
        Classes(trusting=True).spec(said)
