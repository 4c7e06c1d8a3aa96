"""What forward changes of a class that is no global of its module: it stands in a function around, or something holds it."""

from __future__ import annotations

import textwrap
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.guards import roots

HOW = {"appended": "REG.items.append(v)", "bound": "REG.last = v", "put": "REG.table['a'] = v"}


class Place(NamedTuple):
    """Where the class stands: `reg` is how code has it that changes it, by CHANGE in what stands `beside` it or in forward."""

    reg: str
    beside: str = ""
    has: str = "pass"  # at the end of the net's `__init__`
    says: str = "CHANGE"  # in its forward


PLACES = {
    "forward": Place("Reg"),
    "helper": Place("Reg", "def keep(v): CHANGE", says="keep(v)"),
    "default argument": Place("reg", "def keep(v, reg=Reg): CHANGE", says="keep(v)"),
    "argument": Place("reg", "def keep(reg, v): CHANGE", says="keep(Reg, v)"),
    "base class": Place("Sub.__mro__[1]", "class Sub(Reg): pass"),
    "method of a base class": Place("Reg", "class Base(nn.Module):\n def keep(self, v): CHANGE", says="self.keep(v)"),
    "attribute of a class": Place("Outer.inner.inner", "class A: inner = Reg\nclass Outer: inner = A"),
    "containers": Place("box['r'][0]", "box = {'r': [Reg]}"),
    "object": Place("obj.reg", "class Obj: pass\nobj = Obj()\nobj.reg = Reg"),
    "classmethods": Place(
        "cls.reg",
        "class Sub:\n reg = Reg\n @classmethod\n def more(cls, v): CHANGE\n @classmethod\n def keep(cls, v): cls.more(v)",
        says="Sub.keep(v)",
    ),
    "class of an object": Place("type(obj)", "obj = Reg()"),
    "attribute of the model": Place("self.reg", has="self.reg = Reg"),
}
MORE = {
    "helper of a helper": Place("Reg", "def deep(v): CHANGE\ndef keep(v): deep(v)", says="keep(v)"),
    "keyword default": Place("reg", "def keep(v, *, reg=Reg): CHANGE", says="keep(v)"),
    "partial": Place("reg", "def keep(reg, v): CHANGE\nkeep = partial(keep, Reg)", says="keep(v)"),
    "read of a base class": Place("Sub", "class Sub(Reg): pass"),
    "tuple": Place("box[0]", "box = (Reg, 1)"),
    "object in a list": Place("box[0].reg", "class Obj: pass\nbox = [Obj()]\nbox[0].reg = Reg"),
    "namespace": Place("obj.reg", "obj = SimpleNamespace(reg=Reg)"),
    "class of an object in a list": Place("type(box[0])", "box = [Reg()]"),
    "method of an object": Place("Reg", "class Obj:\n def keep(self, v): CHANGE\nobj = Obj()", says="obj.keep(v)"),
    "static method": Place("Reg", "class Sub:\n @staticmethod\n def keep(v): CHANGE", says="Sub.keep(v)"),
    "method of an argument": Place(
        "Reg", "class Sub:\n @staticmethod\n def keep(v): CHANGE\ndef ask(s, v): s.keep(v)", says="ask(Sub, v)"
    ),
    "list of the model": Place("self.regs[0]", has="self.regs = [Reg]"),
    "object of the model": Place("self.held.reg", has="self.held = SimpleNamespace(reg=Reg)"),
    "class of an object of the model": Place("type(self.held)", has="self.held = Reg()"),
    "attribute of the model's class": Place("self.reg", has="Net.reg = Reg"),
    "list of the model's class": Place("self.regs[0]", has="Net.regs = [Reg]"),
    "class of modules": Place("Other.reg", "class Other(nn.Module): reg = Reg"),
    "method of a class of modules": Place(
        "Reg", "class Other(nn.Module):\n @classmethod\n def keep(cls, v): CHANGE", says="Other.keep(v)"
    ),
    "metaclass": Place("W.reg", "class M(type): reg = Reg\nclass W(metaclass=M): pass"),
    "attribute of a function": Place("keep.reg", "def keep(v): pass\nkeep.reg = Reg"),
    "decorator": Place(
        "Reg",
        "def around(f):\n def g(self, v):\n  CHANGE\n  return f(self, v)\n return g",
        has="Net.take = around(Net.take)",
        says="self.take(v)",
    ),
    "hook": Place("Reg", "def keep(m, given, out): v = given[0]; CHANGE", "self.a.register_forward_hook(keep)", "pass"),
    "function that gives it": Place("reg()", "def reg(): return Reg"),
    "another name": Place("reg", says="reg = Reg; CHANGE"),
}
SOURCE = """
class Reg:
    items, table, last = [], {}, None
BESIDE
class Net(BASE):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)
        HAS
    def take(self, v):
        return v
    def forward(self, x):
        h = self.b(self.a(x)).tanh()
        v = h.square().mean()
        SAYS
        return self.c(h)
"""


def made(place: Place, how: str, *, local: bool = True) -> tuple[nn.Module, Any]:
    """A net, and the class that its forward changes: both made in one function, or at the level of a module."""
    change = HOW[how].replace("REG", place.reg)
    base = "Base" if "class Base" in place.beside else "nn.Module"
    source = SOURCE
    for word, text in (("BESIDE", place.beside), ("HAS", place.has), ("SAYS", place.says), ("BASE", base)):
        source = source.replace(word, text)
    source = source.replace("CHANGE", change)
    if local:
        source = f"def build():\n{textwrap.indent(source, '    ')}\n    return Net, Reg\nNet, Reg = build()"
    space: dict[str, Any] = {"__name__": "made_for_a_test"}
    exec("from functools import partial\nfrom types import SimpleNamespace\nfrom torch import nn\n" + source, space)
    return space["Net"]().eval(), space["Reg"]


def stands(reg: Any) -> list[Any]:
    return [*reg.items, *reg.table.items(), reg.last]


def plain(thing: Any) -> Any:
    if isinstance(thing, Tensor):
        return thing.tolist()
    return [plain(inner) for inner in thing] if isinstance(thing, (list, tuple)) else thing


@torch.no_grad()
def after_calls(place: Place, how: str, *, local: bool = True) -> tuple[list[Any], list[Any], list[Any]]:
    """What the class holds after preparing, and after three calls of the whole and of the split; with what these gave."""
    torch.manual_seed(0)
    net, reg = made(place, how, local=local)
    mine = torch.zeros(())
    reg.items.append(mine)
    reg.table["a"] = reg.last = mine
    split = prepare_split(net, (torch.randn(2, 4),), split=SplitSpec("after:b", dynamic_batch=(1, 8)))
    left = [thing is mine or thing == ("a", mine) for thing in stands(reg)]
    calls = [torch.randn(3, 4) for _ in range(3)]
    found = []
    for run in (net, lambda x: split.run_suffix(split.run_prefix(x))):
        reg.items.clear()
        reg.table.clear()
        reg.last = None
        found.append(plain([[run(x) for x in calls], stands(reg)]))
    return left, found[0], found[1]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_put_there_is_left_as_found_and_put_there_at_each_call(place: str, how: str) -> None:
    left, whole, split = after_calls(PLACES[place], how)
    assert left == [True, True, True]
    assert split == whole


@pytest.mark.variants
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("place", [*PLACES, *MORE])
def test_so_it_is_in_other_places_and_at_the_level_of_a_module(place: str, local: bool, how: str) -> None:
    left, whole, split = after_calls({**PLACES, **MORE}[place], how, local=local)
    assert left == [True, True, True]
    assert split == whole


@pytest.mark.planted
@pytest.mark.parametrize("how", HOW)
def test_without_a_look_at_classes_that_are_met_it_is_left_there_and_not_put_there(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roots._Search, "meet_class", lambda *_: None)
    monkeypatch.setattr(roots, "_ATTRIBUTED", ())
    left, whole, split = after_calls(PLACES["attribute of a class"], how)
    assert left != [True, True, True]
    assert split != whole
