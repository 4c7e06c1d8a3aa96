"""Bindings: for an op with its arguments, the fastest callable that means exactly that op.

Calling an `OpOverload` costs several times what torch's own C binding costs. Whether a binding takes a call, and ends in
the very same overload with the very same arguments, is not looked up but tried: the call is made on meta tensors and
caught at the dispatcher before anything runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import TorchDispatchMode

from ariadne.plan import Expr, Ref, TraceNode, TracePlan, bind, substitute


@dataclass(frozen=True, slots=True)
class Binding:
    """How to call an op: `style` is function, method or index; `name` is what the source calls it."""

    style: str
    name: str
    function: Callable[..., Any] | None = None


class _Caught(Exception):
    pass


class _Catcher(ProxyTorchDispatchMode):
    """Catches the first op that reaches the dispatcher, and stops there."""

    def __init__(self) -> None:
        # Not the tracer's own `__init__`, which imports torch's compilers: 10 s, for a setting that nothing here asks for.
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self.pre_dispatch, self.enter_stack = True, []
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.seen: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles what is caught here, and to be skipped brings in the compiler

    def __sym_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **(kwargs or {}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") == "prim":
            return func(*args, **(kwargs or {}))
        self.seen = (func, args, kwargs or {})
        raise _Caught


def resolve(target: str) -> OpOverload:
    """The overload that a plan's target such as `aten.conv2d.default` names."""
    namespace, name, overload = target.split(".", 2)
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return found


class Binder:
    """Finds the bindings of one plan's ops; what it learns about a kind of call is kept for all plans."""

    known: ClassVar[dict[tuple[Any, ...], Binding]] = {}

    def __init__(self, plan: TracePlan) -> None:
        self.plan = plan
        self.dummies: dict[str, Any] = {}
        self.env = plan.traced

    def find(self, node: TraceNode) -> Binding:
        """The binding to call `node` by; the overload itself where torch has none that means the same."""
        op = resolve(node.target)
        index = node.target in ("aten.slice.Tensor", "aten.select.int", "aten.index.Tensor")
        key: tuple[Any, ...] = (
            node.target,
            _kinds(node.args),
            _kinds(tuple(v for _, v in node.kwargs)),
            tuple(k for k, _ in node.kwargs),
        )
        if index:
            key = (*key, self._shape(node.args[0]), node.args[1:])
        if key not in self.known:
            self.known[key] = self._search(node, op)
        return self.known[key]

    def _search(self, node: TraceNode, op: OpOverload) -> Binding:
        if any(str(told.real_type) == "ScalarType" for told in op._schema.returns):
            return self._overload(op)  # which gives a number, as was recorded, and torch's function a dtype
        try:
            args = substitute(node.args, self._dummy)
            kwargs = {k: substitute(v, self._dummy) for k, v in node.kwargs}
        except (KeyError, RuntimeError, ValueError, TypeError, ArithmeticError):
            return self._overload(op)
        for binding in _candidates(op, node):
            if self._same(binding, op, args, kwargs):
                return binding
        return self._overload(op)

    @staticmethod
    def _overload(op: OpOverload) -> Binding:
        return Binding("function", f"{op._schema.name.split('::')[1]}_{op._overloadname}", op)

    @staticmethod
    def _same(binding: Binding, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call by `binding` reaches the dispatcher as `op` with these arguments."""
        catcher = _Catcher()
        try:
            with enable_python_dispatcher(), catcher:
                if binding.style == "method":
                    getattr(args[0], binding.name)(*args[1:], **kwargs)
                elif binding.style == "index":
                    operator.getitem(args[0], index_of(binding.name, args))
                else:
                    assert binding.function is not None
                    binding.function(*args, **kwargs)
        except _Caught:
            assert catcher.seen is not None
            func, seen_args, seen_kwargs = catcher.seen
            return func is op and _equal(bind(op, seen_args, seen_kwargs), bind(op, args, kwargs))
        except Exception:  # whatever it is, this binding does not take the call
            return False
        return False

    def _shape(self, atom: Any) -> Any:
        return self.plan.values[atom.name].shape if isinstance(atom, Ref) and atom.name in self.plan.values else None

    def _dummy(self, atom: Ref | Expr) -> Any:
        if isinstance(atom, Expr):
            return atom.evaluate({**self.env, **{n: 2 for n in atom.names if n not in self.env}})
        value = self.plan.values[atom.name]
        if value.kind == "scalar":
            return 2
        if value.dtype is None:
            raise KeyError(atom.name)
        if atom.name not in self.dummies:
            shape = [d if isinstance(d, int) else self._dummy(d) for d in value.shape]
            self.dummies[atom.name] = torch.empty(shape, dtype=value.dtype, device="meta")
        return self.dummies[atom.name]


def index_of(kind: str, args: tuple[Any, ...]) -> Any:
    """The subscript that means `slice` or `select` with these arguments."""
    if kind == "select":
        dim, at = args[1], args[2]
        return (*(slice(None),) * dim, at)
    dim = args[1] if len(args) > 1 else 0
    bounds = [args[i] if len(args) > i else None for i in (2, 3, 4)]
    return (*(slice(None),) * dim, slice(*bounds))


def _candidates(op: OpOverload, node: TraceNode) -> Iterator[Binding]:
    name = op._schema.name.split("::")[1]
    # A dim that follows a size has no place in a subscript, which is written for one dim.
    if node.target == "aten.slice.Tensor" and all(type(dim) is int for dim in node.args[1:2]):
        yield Binding("index", "slice")
    if op.namespace == "aten":
        places: tuple[Any, ...] = (torch._C._VariableFunctions, torch._C._nn)
        for prefix in ("linalg", "fft", "special", "sparse", "nested"):
            if name.startswith(f"{prefix}_"):
                places = (*places, getattr(torch._C, f"_{prefix}"))
        for place in places:
            if hasattr(place, name):
                yield Binding("function", name, getattr(place, name))
        if callable(getattr(torch._C.TensorBase, name, None)):  # not so `mH`, which is a property
            yield Binding("method", name)


def _kinds(atoms: Any) -> Any:
    """What decides how a binding parses arguments: their types, and which are there."""
    if isinstance(atoms, Ref):
        return "tensor"
    if isinstance(atoms, Expr):
        return "int"
    if type(atoms) is tuple:
        return tuple(_kinds(a) for a in atoms)
    return type(atoms).__name__


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) and (type(a) is type(b) or {type(a), type(b)} <= {int, float})
