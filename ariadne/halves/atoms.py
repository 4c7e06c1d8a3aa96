"""Atoms as data: arguments, sizes, names and nested structures in JSON, and back; nothing of what is read back is run."""

from __future__ import annotations

import ast
import importlib
import keyword
import math
from collections import OrderedDict, UserDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

from ariadne import tree
from ariadne.capture import QUESTIONS
from ariadne.errors import HalfError
from ariadne.plan import FUNCTIONS, HELPERS, Expr, Namespace, Ref

MOST_DEEP = 64  # levels of nested arguments and structures
MOST_TEXT = 4096  # characters of a name, of an expression, of a text
_WORD = 2**63
_OF_RESULTS = ("a container of its inputs or outputs", "the class of a result")
_RESERVED = Namespace(set(HELPERS)).taken
_MATH = frozenset(n for n in dir(math) if not n.startswith("_")) - {"factorial", "comb", "perm"}
_TORCH: dict[str, tuple[type, Callable[[str], Any]]] = {
    name: (kind, {str(v): v for v in vars(torch).values() if isinstance(v, kind)}.__getitem__)
    for name, kind in (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format))
}
DEVICES = frozenset(("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "meta"))
# Containers and questions that need no leave to be loaded: they do nothing but hold, or look.
KNOWN = {
    f"{cls.__module__}:{cls.__qualname__}": cls
    for cls in (
        *(OrderedDict, SimpleNamespace, UserDict),
        torch.Size,
        nn.Parameter,
        torch.nn.utils.rnn.PackedSequence,
        *vars(torch.return_types).values(),
    )
    if isinstance(cls, type)
} | {f"{ask.__module__}:{ask.__qualname__}": ask for ask in QUESTIONS}


def need(true: bool, otherwise: str) -> None:
    """Raise `HalfError` for a file that does not hold what it should."""
    if not true:
        raise HalfError(f"this is not a half as Ariadne writes it: {otherwise}. Save it again, or refuse who sent it")


def _need(true: bool, what: str, value: Any) -> None:
    """`need`, whose words are made only where they are said: a file has thousands of values."""
    if not true:
        need(False, f"{what} is {_show(value)}")


def text(value: Any, what: str) -> str:
    """A printable text of one line: nothing else may come near source code."""
    _need(type(value) is str and len(value) <= MOST_TEXT and value.isprintable(), what, value)
    return str(value)


def name(value: Any, what: str) -> str:
    """A name that generated code may use for a value: an identifier that means nothing else there."""
    found = text(value, what)
    if not (found.isidentifier() and found.isascii() and not found.startswith("__") and found not in _RESERVED):
        need(False, f"{what} is {_show(value)}, which is no name for a value")
    return found


def count(value: Any, what: str, least: int = 0, most: int = _WORD - 1) -> int:
    """An integer within bounds."""
    _need(type(value) is int and least <= value <= most, what, value)
    return int(value)


def items(value: Any, what: str) -> list[Any]:
    """A list."""
    _need(type(value) is list, what, value)
    return list(value)


def table(value: Any, what: str, keys: Collection[str]) -> dict[str, Any]:
    """A dict with exactly these keys."""
    _need(type(value) is dict and value.keys() == set(keys), what, value)
    return dict(value)


def flag(value: Any, what: str) -> bool:
    """True or False."""
    _need(type(value) is bool, what, value)
    return bool(value)


def _show(value: Any) -> str:
    found = repr(value[:60] if isinstance(value, (str, list)) else value)
    return found if len(found) <= 80 else found[:77] + "..."


def told(atom: Any) -> Any:
    """An argument as JSON-able data; `HalfError` for one that a file can't hold."""
    if atom is None or type(atom) in (bool, int, str):
        return atom
    if isinstance(atom, Ref):
        return {"ref": [atom.name, atom.item]}
    if isinstance(atom, Expr):
        return {"expr": atom.source}
    if isinstance(atom, (tuple, list)):
        return {"list": [told(a) for a in atom]} if isinstance(atom, list) else [told(a) for a in atom]
    if isinstance(atom, float):
        return {"float": float(atom).hex()}
    if isinstance(atom, complex):
        return {"complex": [atom.real.hex(), atom.imag.hex()]}
    if isinstance(atom, int):  # of an enumeration
        return int(atom)
    if isinstance(atom, slice):
        return {"slice": [told(a) for a in (atom.start, atom.stop, atom.step)]}
    if isinstance(atom, torch.device):
        return {"device": str(atom)}
    for kind, (cls, _) in _TORCH.items():
        if isinstance(atom, cls):
            return {kind: str(atom)}
    if type(atom) is dict:
        return {"dict": [[told(k), told(v)] for k, v in atom.items()]}
    raise HalfError(
        f"an argument of type {type(atom).__name__} can't be kept in a file: it is a Python object. Keep it out of forward, or run "
        "this half in a process that has the model"
    )


class Reader:
    """Reads atoms back. `symbols` are the names of numbers that sizes may follow."""

    def __init__(self) -> None:
        self.symbols: set[str] = set()
        self.batch = ""

    def atom(self, value: Any, depth: int = 0) -> Any:
        """The argument that `told` wrote."""
        need(depth < MOST_DEEP, f"arguments are nested more than {MOST_DEEP} levels deep")
        if value is None or type(value) is bool:
            return value
        if type(value) is int:
            return count(value, "a number", -_WORD)
        if type(value) is str:
            return text(value, "a text")
        if type(value) is list:
            return tuple(self.atom(v, depth + 1) for v in value)
        need(type(value) is dict and len(value) == 1, f"an argument is {_show(value)}")
        ((kind, inner),) = value.items()
        if kind == "ref":
            label, item = self._pair(inner, "a reference")
            need(label != self.batch, "a reference is to the batch, which is a size and no value")
            return Ref(name(label, "a reference"), None if item is None else count(item, "an item", most=2**31))
        if kind == "expr":
            return self.size(inner)
        if kind == "list":
            return [self.atom(v, depth + 1) for v in items(inner, "a list")]
        if kind == "float":
            return real(inner)
        if kind == "complex":
            return complex(*map(real, self._pair(inner, "a complex number")))
        if kind == "slice":
            parts = items(inner, "a slice")
            need(len(parts) == 3, f"a slice is {_show(parts)}")
            return slice(*(self.atom(p, depth + 1) for p in parts))
        if kind == "device":
            return device(inner)
        if kind == "dict":
            pairs = [self._pair(p, "an item of a dict") for p in items(inner, "a dict")]
            return {self._key(k): self.atom(v, depth + 1) for k, v in pairs}
        need(kind in _TORCH, f"an argument is of kind {_show(kind)}")
        return constant(kind, inner)

    @staticmethod
    def _pair(value: Any, what: str) -> list[Any]:
        found = items(value, what)
        need(len(found) == 2, f"{what} is {_show(value)}")
        return found

    def _key(self, value: Any) -> Any:
        found = self.atom(value)
        need(isinstance(found, (str, int, float, bool, type(None))), f"a key is {_show(value)}")
        return found

    def size(self, value: Any) -> Expr:
        """A size expression over the symbols that are known so far."""
        source = text(value, "a size")
        found = expression(source)
        need(found.names <= self.symbols, f"the size {_show(source)} follows a number that nothing makes before it")
        return found

    @staticmethod
    def dim(value: Any) -> int | Expr:
        """One size of a shape; it may follow a number that another side makes, or none, since nothing is computed from it."""
        if type(value) is int:
            return count(value, "a size", most=2**48)
        found = expression(text(_only(value, "expr"), "a size"))
        for symbol in found.names:
            name(symbol, "a number that a size follows")
        return found


def _only(value: Any, kind: str) -> Any:
    return table(value, f"an argument of kind {kind}", (kind,))[kind]


def real(value: Any) -> float:
    """A float from its hexadecimal form."""
    try:
        return float.fromhex(text(value, "a number"))
    except (ValueError, OverflowError):
        raise HalfError(f"this is not a half as Ariadne writes it: {_show(value)} is no float") from None


def constant(kind: str, value: Any) -> Any:
    """A dtype, a layout or a memory format of torch, by name."""
    try:
        return _TORCH[kind][1](text(value, f"a {kind}"))
    except KeyError:
        raise HalfError(
            f"this file names a {kind} {_show(value)}, which this torch ({torch.__version__}) has not"
        ) from None


def device(value: Any) -> torch.device:
    """A device by its name, if it is of a kind that computes."""
    found = text(value, "a device")
    kind, _, index = found.partition(":")
    need(kind in DEVICES and (not index or (index.isdecimal() and len(index) < 4)), f"a device is {_show(found)}")
    return torch.device(found)


def expression(source: str) -> Expr:
    """A size expression that only computes: no call but of a few functions on numbers, and no number that grows without bound."""
    try:
        parsed = ast.parse(source, mode="eval")
        depth = _depth(parsed)
        found = Expr(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise HalfError(f"this is not a half as Ariadne writes it: {_show(source)} is no size") from None
    need(depth <= MOST_DEEP, "a size is nested too deep")
    need("\n" not in source and "#" not in source and "\\" not in source, f"{_show(source)} is no size")
    for part in ast.walk(parsed):
        if isinstance(part, ast.Call):
            called = part.func
            known = (isinstance(called, ast.Name) and called.id in FUNCTIONS and called.id != "math") or (
                isinstance(called, ast.Attribute) and called.attr in _MATH
            )
            need(known and not part.keywords, f"the size {_show(source)} calls something")
        elif isinstance(part, ast.Attribute):
            need(part.attr in _MATH, f"the size {_show(source)} reads {_show(part.attr)}")
        elif isinstance(part, ast.Constant):
            need(
                type(part.value) in (bool, float) or (type(part.value) is int and abs(part.value) < _WORD),
                f"the size {_show(source)} holds {_show(part.value)}",
            )
        elif isinstance(part, ast.BinOp) and isinstance(part.op, ast.Pow):
            power = part.right.operand if isinstance(part.right, ast.UnaryOp) else part.right
            small = isinstance(power, ast.Constant) and isinstance(power.value, (int, float)) and abs(power.value) <= 8
            need(small and not any(_is_power(p) for p in ast.walk(part.left)), f"the size {_show(source)} has a power")
    return found


def _is_power(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)


def _depth(node: ast.AST) -> int:
    deepest, pending = 0, [(node, 1)]
    while pending:
        at, depth = pending.pop()
        deepest = max(deepest, depth)
        pending += [(child, depth + 1) for child in ast.iter_child_nodes(at)]
    return deepest


# --- nested structures ----------------------------------------------------------------------------------------------


def place(thing: Any) -> str:
    """A class or a function as `module:qualname`; `HalfError` where it can't be found by that."""
    where = f"{getattr(thing, '__module__', None)}:{getattr(thing, '__qualname__', None)}"
    if isinstance(thing, torch.jit.ScriptFunction):  # which has the module and the name of its class
        module, _, name = thing.qualified_name.removeprefix("__torch__.").rpartition(".")
        where = f"{module or '__main__'}:{name}"
    name = where.partition(":")[2]
    try:
        if fetch(where) is thing:
            return where
    except (ImportError, AttributeError, ValueError):
        pass  # told below
    raise HalfError(
        f"{name!r} can't be named in a file: no module has it under its own name. Define it at the top of a module"
    )


def fetch(where: str) -> Any:
    """What stands at `module:qualname`."""
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    for step in path.split("."):
        found = getattr(found, step)
    return found


def told_spec(spec: tree.Spec) -> Any:
    """A structure as JSON-able data."""
    if spec.kind == tree.LEAF:
        return "*"
    found: dict[str, Any] = {"kind": spec.kind, "children": [told_spec(c) for c in spec.children]}
    if spec.kind in ("dict", "fields", "namedtuple", "mapping"):
        found["keys"] = [told(k) for k in spec.keys]
    if spec.kind not in ("list", "tuple", "dict", "size"):
        assert spec.cls is not None
        found["class"] = place(spec.cls)
        more: list[Any] = []
        if spec.kind == "namedtuple":
            more = [*spec.keys[len(getattr(spec.cls, "_fields", ())) :], *(n for n, _ in spec.context or ())]
        if more:
            raise HalfError(
                f"a {spec.cls.__name__} with attributes beside its fields ({', '.join(more)}) can't be kept in a "
                "file; hand these in, or return them, apart"
            )
    if spec.kind == "fields" and spec.context is not None:
        found["context"] = [name for name, _ in spec.context]  # the objects are another process's: its class makes them
    if spec.kind in ("registered", "subclass"):
        assert spec.cls is not None
        try:
            found["context"] = told(spec.context)
        except HalfError:
            raise HalfError(
                f"a {spec.cls.__name__} can't be kept in a file: it also holds a Python object ({spec.context!r:.80}). "
                "Take or return a dict, a list or a tuple in its place, or run this half in a process that has the model"
            ) from None
    return found


def spec_of(spec: tree.Spec, where: str) -> Any:
    """The same, of what stands somewhere: what can't be kept is told with where it is."""
    try:
        return told_spec(spec)
    except HalfError as error:
        raise HalfError(f"in {where}, {error}") from None


@dataclass(frozen=True)
class Handed:
    """What was handed to a half: a module or a method of one, the module, and the training flags of those in it."""

    thing: Any
    holder: nn.Module
    flags: dict[str, bool]

    def below(self) -> list[tuple[str, nn.Module]]:
        """Its modules by their paths."""
        return [*self.holder.named_modules()]


class Classes:
    """What a file may name of Python: what is known to do nothing, and what the caller allows."""

    def __init__(
        self,
        allow: Collection[str] = (),
        plain: bool = False,
        trusting: bool = False,
        handed: Mapping[str, Any] | None = None,
    ) -> None:
        self.allow, self.plain, self.trusting = frozenset(allow), plain, trusting
        self.given = dict(handed or {})
        self.tells_all = True  # whether the file says of a dataclass all that it has
        self.used: dict[str, Handed] = {}

    def handed(self, name: str, flags: dict[str, bool]) -> Any:
        """What the caller handed over under a name that it has in the model; `flags`: of its modules, by their paths in it."""
        if self.trusting:
            return nn.Identity()
        if name not in self.given:
            raise HalfError(
                f"this half calls {name or 'the model itself'!r} of its model, which no file can hold: hand it over, "
                f"load(..., modules={{{name!r}: ...}}), a module or a method of one with the same code. It gets the half's tensors"
            )
        thing = self.given[name]
        holder = thing if isinstance(thing, nn.Module) else getattr(thing, "__self__", None)
        if not callable(thing) or not isinstance(holder, nn.Module):
            raise HalfError(f"modules[{name!r}] must be a module, or a method of one; found {type(thing).__name__}")
        self.used[name] = Handed(thing, holder, flags)
        return thing

    def find(self, where: Any, what: str) -> Any:
        """The object at `module:qualname`, imported only if it is allowed."""
        found = text(where, what)
        if found in KNOWN:
            return KNOWN[found]
        if found not in self.allow and not self.trusting:
            raise HalfError(
                f"this half uses {found!r} ({what}), and would import and call it. If you trust who made the file, load it with "
                f"allow=[{found!r}]"
                + (
                    "; or with plain=True, which gives dicts, tuples and torch's own tensors"
                    if what in _OF_RESULTS
                    else ""
                )
            )
        try:
            return fetch(found)
        except (ImportError, AttributeError, ValueError) as error:
            raise HalfError(
                f"this half uses {found!r}, which can't be found here: {error}. Install what has it"
            ) from error

    def refuse_setting(self, setting: str) -> None:
        """Raise `HalfError` for a setting of torch that a half changes while it runs, unless that is allowed."""
        if setting not in self.allow and not self.trusting:
            raise HalfError(
                f"this half sets {setting} around some of its ops, for the whole process, and back after them. If no other thread "
                f"minds that, load it with allow=[{setting!r}]"
            )

    def spec(self, value: Any, depth: int = 0) -> tree.Spec:
        """The structure that `told_spec` wrote."""
        need(depth < MOST_DEEP, f"structures are nested more than {MOST_DEEP} levels deep")
        if value == "*":
            return tree.Spec(tree.LEAF)
        need(
            type(value) is dict and value.keys() <= {"kind", "children", "keys", "class", "context"},
            "a structure is malformed",
        )
        kind = text(value.get("kind"), "a structure")
        children = tuple(self.spec(c, depth + 1) for c in items(value.get("children"), "parts of a structure"))
        keys = tuple(Reader()._key(k) for k in items(value.get("keys", []), "keys of a structure"))
        plain = {"list": list, "tuple": tuple, "dict": dict, "size": torch.Size}
        need(len({*keys}) == len(keys), "a key appears twice")
        if kind in ("dict", "fields", "namedtuple", "mapping"):
            need(len(keys) == len(children), "a structure has not as many keys as parts")
        if kind in plain:
            return tree.Spec(kind, plain[kind], keys, children)
        need(
            kind in ("fields", "namedtuple", "mapping", "row", "registered", "subclass"),
            f"a structure is a {_show(kind)}",
        )
        if kind in ("fields", "namedtuple"):
            need(
                all(type(k) is str and k.isidentifier() and not keyword.iskeyword(k) for k in keys),
                "a field is no name",
            )
        where = value.get("class")
        if self.plain and where not in KNOWN and where not in self.allow:
            if kind == "subclass":
                need(len(children) == 1, "a structure is malformed")
                return children[0]
            flat = kind in ("row", "registered", "namedtuple")
            return tree.Spec("tuple", tuple, (), children) if flat else tree.Spec("dict", dict, keys, children)
        cls = self.find(where, _OF_RESULTS[kind == "subclass"])
        need(isinstance(cls, type), f"{_show(where)} is no class")
        context = Reader().atom(value["context"]) if "context" in value else None
        if kind == "fields":
            if not self.tells_all:
                _refuse_older(cls, keys)
            context = tuple((n, tree.ANEW) for n in context) if type(context) is tuple else None
        found = tree.Spec(kind, cls, keys, children, context)
        need(_fits(found), f"{_show(where)} is no container of kind {kind}")
        return found


def _refuse_older(cls: Any, keys: tuple[Any, ...]) -> None:
    """Raise `HalfError` for a dataclass of an older file that is more than it says: its class had to make the rest."""
    lacks = [n for n, f in getattr(cls, "__dataclass_fields__", {}).items() if not f.init and n not in keys]
    if lacks or (hasattr(cls, "__post_init__") and not issubclass(cls, dict)):
        raise HalfError(
            f"this half was saved by an Ariadne that kept no more of a {cls.__name__} than its constructor takes; this one needs "
            "all that it has; save it again"
        )


def _fits(spec: tree.Spec) -> bool:
    """Whether a class is a container of the kind that a file says it is."""
    cls: Any = spec.cls
    return {
        "mapping": cls is OrderedDict,
        "namedtuple": issubclass(cls, tuple) and getattr(cls, "_fields", None) == spec.keys,
        "row": tree.kind_of(cls) == "row",
        "fields": tree.kind_of(cls) == "fields"
        and all(c.kind == "dict" for k, c in zip(spec.keys, spec.children, strict=True) if k == "__dict__")
        and all(type(n) is str for n, _ in spec.context or ()),
        "registered": cls in torch_pytree.SUPPORTED_NODES,
        "subclass": issubclass(cls, torch.Tensor)
        and [c.kind for c in spec.children] == [tree.LEAF]
        and (spec.context is None or type(spec.context) is bool),
    }[spec.kind]


def mapped(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A dict whose keys are texts."""
    need(type(values) is dict, f"{what} is {_show(values)}")
    return {text(k, what): v for k, v in values.items()}
