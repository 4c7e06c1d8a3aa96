"""Refusals: what a forward may not do while it is recorded, because no op shows what it changes."""

from __future__ import annotations

import builtins
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.utils.dlpack
from torch import nn
from torch._ops import HigherOrderOperator
from torch.autograd import forward_ad, graph
from torch.nn.utils.parametrize import is_parametrized

from ariadne.errors import AriadneError, UnsupportedError, named
from ariadne.forks import undone
from ariadne.guards import (
    GLOBAL_HOOKS,
    TORCH,
    Recording,
    caches_parametrizations,
    function_modes,
    global_hooks,
    looked_into,
)
from ariadne.plan import tensors_in

_ELSEWHERE = (
    "which acts on gradients in a way that no op shows; do it outside of the model, or use prepare_split_replay if the "
)
_ELSEWHERE += "split need not train"

_PLAIN = "_ariadne_plain"  # an attribute of what stands for a function: that function


class Patches:
    """Attributes of classes and modules, replaced while recording and put back after."""

    def __init__(self) -> None:
        self.undo: list[tuple[Any, str, Any]] = []
        self._end: Callable[[], object] | None = None  # of what is undone where another thread forks the process
        # Those of Python's own functions: the plain one, and what stands for it.
        self.builtins: dict[str, tuple[Any, Any]] = {}

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace one, whether the owner has it itself or inherits it."""
        before = owner.__dict__.get(name, Patches)
        self._end = self._end or undone(self.restore)
        self.undo.append((owner, name, before))
        if owner is builtins:
            self.builtins[name] = before, value
        if type(value) is FunctionType and before is not Patches:
            value.__dict__[_PLAIN] = before
        _put(owner, name, value)

    def lift(self, lifted: bool) -> None:
        """Put Python's own functions back while an op runs, which asks them thousands of times; or replace them again."""
        for name, (plain, patched) in self.builtins.items():
            setattr(builtins, name, plain if lifted else patched)

    def restore(self) -> None:
        """Put all of them back."""
        for owner, name, value in reversed(self.undo):
            _put(owner, name, value)
        if self._end is not None:
            self._end()


def _put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a class or a module; `Patches` as value takes it away.

    What a special method of a class is, Python notes for each class below when one is set: 1,500 of them where a zoo of modules is
    loaded, 3 ms. Where a function takes a function's place that note stays as it is: both are called by their name. So it is for
    `__getattribute__` of a class that has a `__getattr__`: each read asks for both by name (CPython's `slot_tp_getattr_hook`).
    """
    own = owner.__dict__
    if name[:2] == name[-2:] == "__" and issubclass(type(owner), type):
        functions = type(own.get(name)) is FunctionType and type(value) is FunctionType
        if functions or (name == "__getattribute__" and type(own.get("__getattr__")) is FunctionType):
            table = gc.get_referents(own)[0]
            if value is Patches:
                table.pop(name, None)
            else:
                table[name] = value
            forget_lookups(owner)
            return
    if value is not Patches:
        setattr(owner, name, value)
    elif name in own:  # a fork may have come before it was set
        delattr(owner, name)


def forget_lookups(cls: Any) -> None:
    """Have Python look attributes of a class up anew, as it does when one is set."""
    cls._ariadne = None
    del cls._ariadne


def unpatched(value: Any) -> Any:
    """A callable that forward made of a method while it stood replaced, as it is when it is put back."""
    if type(value) is MethodType:
        plain = getattr(value.__func__, "__dict__", {}).get(_PLAIN)
        return value if plain is None else MethodType(plain, value.__self__)
    if type(value) is partial:
        plain = unpatched(value.func)
        return value if plain is value.func else partial(plain, *value.args, **value.keywords)
    return value


def called_by_torch(frames: int = 2) -> bool:
    """Whether the function that calls the caller of this one belongs to torch, so that no user's Python looks."""
    return bool(sys._getframe(frames).f_globals.get("__name__", "").startswith(TORCH))


def is_wrapped(t: torch.Tensor) -> bool:
    """Whether a tensor is of a transform of `torch.func`, which is refused by itself."""
    return torch._C._functorch.is_functorch_wrapped_tensor(t)


def minds_its_own() -> bool:
    """Whether it is `functools.cached_property` that looks into a dict, for its own name; or torch, or what records."""
    name = sys._getframe(2).f_globals.get("__name__")
    if name not in _MINDING:
        _MINDING[name] = str(name).partition(".")[0] in ("functools", "ariadne", "torch")
    return _MINDING[name]


_MINDING: dict[Any, bool] = {}  # by the name of a module
_STATES = (
    ("torch", "torch", ("get_rng_state", "initial_seed")),
    ("torch.random", "torch.random", ("get_rng_state", "initial_seed")),
    ("random", "random", ("getstate",)),
    ("numpy.random", "numpy.random", ("get_state",)),
)


@dataclass(frozen=True)
class Run:
    """A run of forward that is recorded, in the thread and at the depth that is `mine`.

    `where` names the module that runs; what runs under `walked` is a backward pass of forward's own; `patches` are put back after.
    """

    model: nn.Module
    mine: Callable[[], bool]
    where: Callable[[], str]
    walked: Callable[[], AbstractContextManager[None]]
    patches: Patches


@contextmanager
def refusing(run: Run, found: Recording) -> Iterator[None]:
    """While in the block, all that a recorded forward must not do raises `UnsupportedError`; so does the end of the block, with the
    first of these, where forward caught it: no call but a recorded one is refused, so what it did from there on no call does.
    """
    told: list[UnsupportedError] = []
    thread = threading.get_ident()

    def note(self: UnsupportedError, *args: Any) -> None:
        super(UnsupportedError, self).__init__(*args)
        if threading.get_ident() == thread:
            told.append(self)

    run.patches.set(UnsupportedError, "__init__", note)
    _refuse(run, found)
    try:
        yield
    except AriadneError:
        raise
    except Exception as error:
        if told:
            raise told[0] from error
        raise
    if told and not found.read_size:  # of which a symbolic run tells by itself
        raise told[0]


def _compiled(model: nn.Module) -> str:
    """What to do where a part of a model is under `torch.compile`, whose own calls are refused; nothing where none is."""
    for path, module in model.named_modules():
        if module._compiled_call_impl is not None:
            return (
                f"{named(path)} was compiled in place (Module.compile), and what the compiler does can't be recorded; prepare "
                "before that, or undo it: module._compiled_call_impl = None"
            )
        if type(module).__name__ == "OptimizedModule":
            return (
                f"{named(path)} is what torch.compile made of a module, or torch.compiler.disable, and what the compiler does "
                "can't be recorded; put the "
                "module inside of it in its place, ._orig_mod"
            )
    return ""


def _refuse(run: Run, found: Recording) -> None:

    def refused(
        owner: Any, name: str, shown: str, why: str, only_with_grad: bool = False, by_torch: bool = False
    ) -> None:
        original = getattr(owner, name)  # which, where `by_torch`, torch's own code may call

        def call(*args: Any, **kwargs: Any) -> Any:
            asked = run.mine() and (torch._C.is_grad_enabled() or not only_with_grad)
            if asked and not (
                by_torch and sys._getframe(1).f_globals.get("__name__", "").startswith(("torch.", "ariadne."))
            ):
                compiled = _compiled(run.model) if by_torch else ""
                raise UnsupportedError(compiled or f"forward calls {shown} in {run.where()}, {why}")
            return original(*args, **kwargs)

        run.patches.set(owner, name, call)

    for name in ("register_hook", "register_post_accumulate_grad_hook", "retain_grad"):
        why = "whose effect on gradients a plan can't hold; register it outside"
        refused(torch.Tensor, name, f"Tensor.{name}", why)
    why = "which takes data out of sight of a plan; use clone() or torch's own ops"
    for name in ("__dlpack__", "__deepcopy__"):
        refused(torch.Tensor, name, f"Tensor.{name}", why)
    why = "which takes data out of sight of a plan; use torch's own ops and views, or item() and tolist() for numbers"
    refused(torch.Tensor, "data_ptr", "Tensor.data_ptr", why, by_torch=True)
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        for name in ("__getitem__", "__setitem__", "tolist", "data_ptr", "clone", "copy_", "fill_", "nbytes", "size",
                     "__len__"):  # fmt: skip
            refused(storage, name, f"{storage.__name__}.{name}", why, by_torch=True)
    refused(torch.utils.dlpack, "to_dlpack", "torch.utils.dlpack.to_dlpack", why)
    refused(torch.Tensor, "__reduce_ex__", "Tensor.__reduce_ex__ (by pickle, torch.save or copy.copy)", why)
    for name in ("manual_seed", "set_rng_state", "seed"):
        refused(torch, name, f"torch.{name}", "which a plan can't hold; seed before the call instead")
    for owner, shown, names in _STATES:
        module = sys.modules.get(owner)
        for name in names if module is not None else ():
            why = "which says where a random generator stands, and a plan would go on with what it was at capture; pass it in"
            refused(module, name, f"{shown}.{name}", why, by_torch=True)
    why = "whose tensors carry tangents that a plan can't hold; use torch.autograd.grad, or compute them outside"
    refused(forward_ad, "enter_dual_level", "torch.autograd.forward_ad", why)
    why = "whose Python and tables can't be followed; put the module that it was scripted or traced from in its place"
    refused(torch._C.ScriptMethod, "__call__", "a TorchScript module", why)
    refused(graph, "get_gradient_edge", "torch.autograd.graph.get_gradient_edge", _ELSEWHERE)
    _refuse_compiled(run)
    _follow_cond(run)
    _refuse_saved_tensor_hooks(run)
    _refuse_node_hooks(run, found)
    _watch_backward(run)


def refuse_transforms(where: str) -> None:
    """Raise `UnsupportedError` inside a transform of torch.func, whose tensors are not those that the ops run on."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is not None:
        kind = str(interpreter.key()).rpartition(".")[2].lower()
        raise UnsupportedError(
            f"forward runs ops under torch.func ({kind}) in {where}, which a plan can't hold; write it with batched ops, or with "
            "torch.autograd.grad; or keep the part that calls it whole, ariadne.opaque(module)"
        )


def refuse_scripted(model: nn.Module) -> None:
    """Raise `UnsupportedError` if a module is TorchScript, which keeps its Python and its tables to itself."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{named(path)} is a TorchScript module ({type(module).__name__}), whose forward can't be followed; put "
                "the module that it was scripted or traced from in its place"
            )


def refuse_hooks(model: nn.Module) -> None:
    """Raise `UnsupportedError` if a module has backward hooks, which act through the autograd graph of its own call.

    Or if there is a hook for all modules, which would have to run at other calls than the model's.
    """
    hook = next((hook for hooks in GLOBAL_HOOKS for hook in hooks.values()), None)
    if hook is not None:
        counter = hook not in global_hooks()
        todo = (
            "capture outside of FlopCounterMode, and count calls of the split alone" if counter else "remove it first"
        )
        raise UnsupportedError(
            f"a global module hook is registered ({hook!r}, by torch.nn.modules.module.register_module_...), which would run while "
            f"the model is captured, and a captured plan does not run; {todo}"
        )
    for path, module in looked_into(model):
        if module._backward_hooks or module._backward_pre_hooks:
            raise UnsupportedError(
                f"{named(path)} has a backward hook, which a captured plan can't run; remove it, or register a hook on a "
                "parameter or on an output of the split instead"
            )


def refuse_function_modes() -> None:
    """Raise `UnsupportedError` if the caller has entered a mode over torch's functions, which a plan would be made under."""
    if found := function_modes():
        raise UnsupportedError(
            f"a TorchFunctionMode is entered ({found}), whose Python decides what torch's functions do in forward; a captured plan "
            "does not run it. Leave it for the call, as for prepare_split, or enter it in forward"
        )


def refuse_cached_weights(model: nn.Module) -> None:
    """Raise `UnsupportedError` if parametrized weights are kept from before the call, which then has no op that makes them."""
    if not caches_parametrizations():
        return
    path = next((path for path, module in looked_into(model) if is_parametrized(module)), None)
    if path is not None:
        raise UnsupportedError(
            f"{named(path)} has a parametrized weight, and torch.nn.utils.parametrize.cached() keeps it from one call to the next, "
            "gradients and all, which no plan does; call outside of it, or enter it in forward"
        )


def _refuse_compiled(run: Run) -> None:
    """Refuse a call of what torch.compile made of a module, though it runs eagerly: past Dynamo's limit, or if told to."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return
    plain: Any = dynamo.OptimizedModule.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = plain(
            self, *args, **kwargs
        )  # first: what Dynamo compiles stays as it would be without a recorder's refusal
        if run.mine() and (why := _compiled(run.model)):
            raise UnsupportedError(why)
        return out

    run.patches.set(dynamo.OptimizedModule, "__call__", call)


def _follow_cond(run: Run) -> None:
    """Let `torch.cond` run as the `if` that it is, so that its ops are seen; the other higher-order ops are refused.

    Called in eager code, they compile their functions by Dynamo, which can't trace what stands here in the place of torch's own.
    """
    compiled: Any = torch.compile
    plain: Any = HigherOrderOperator.__call__
    at_recorder = torch._C.DispatchKeySet(torch._C.DispatchKey.PreDispatch)

    def as_it_is(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return (
            model if run.mine() and caller.startswith("torch._higher_order_ops") else compiled(model, *args, **kwargs)
        )

    def call(self: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
        if not run.mine():
            with torch._C._ExcludeDispatchKeyGuard(
                at_recorder
            ):  # a part kept whole runs it, and no rule of it is for a recorder
                return plain(self, *args, **kwargs)
        if self.name() != "cond":
            raise UnsupportedError(
                f"forward calls the higher-order op {self.name()!r} in {run.where()}, which a plan can't hold; write it as plain "
                "ops, with Python's own if, for and while; or keep the part that calls it whole, ariadne.opaque(module)"
            )
        asked, if_true, if_false, operands = args
        return (if_true if asked else if_false)(*operands)

    run.patches.set(torch, "compile", as_it_is)
    run.patches.set(HigherOrderOperator, "__call__", call)


def _refuse_saved_tensor_hooks(run: Run) -> None:
    enter: Any = graph.saved_tensors_hooks.__enter__

    def enter_hooks(self: graph.saved_tensors_hooks) -> None:
        harmless = type(self) is not graph.saved_tensors_hooks and type(self).__module__.startswith("torch.")
        if (
            run.mine() and torch._C.is_grad_enabled() and not harmless
        ):  # checkpoint and save_on_cpu give back what they took
            raise UnsupportedError(
                f"forward enters torch.autograd.graph.saved_tensors_hooks in {run.where()}, {_ELSEWHERE}"
            )
        enter(self)

    run.patches.set(graph.saved_tensors_hooks, "__enter__", enter_hooks)


def refuse_history(t: torch.Tensor, name: str, found: Recording, where: str) -> None:
    """Raise `UnsupportedError` where a tensor is none that this forward made."""
    if not any(t is made for e in found.events for made in tensors_in(e.out)):
        raise UnsupportedError(
            f"forward asks {name!r} of an input, or of a tensor of the model, in {where}: the answer follows what was done with "
            "the tensor before, which no guard sees. Ask before the call, and pass the answer as an argument"
        )


def _refuse_node_hooks(run: Run, found: Recording) -> None:
    read: Any = vars(torch._C.TensorBase)["grad_fn"].__get__

    def grad_fn(self: torch.Tensor) -> Any:
        node = read(self)
        if (
            not run.mine() or called_by_torch() or isinstance(self, torch.nn.Parameter)
        ):  # which torch asks as it is registered
            return node
        refuse_history(self, "grad_fn", found, run.where())
        found.looked.add("requires_grad")  # where nothing before it does, there is none
        return node if node is None else _Node(node, run.where())

    run.patches.set(torch.Tensor, "grad_fn", property(grad_fn))


class _Node:
    """Stands for a node of the autograd graph while forward is recorded, and lets no hook be put on it."""

    def __init__(self, node: Any, where: str) -> None:
        self._node, self._where = node, where

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("register_", "next_functions", "_register", "_input_metadata")):
            raise UnsupportedError(f"forward calls grad_fn.{name} in {self._where}, {_ELSEWHERE}")
        return getattr(self._node, name)


def _watch_backward(run: Run) -> None:
    original: Any = vars(torch.autograd)["_engine_run_backward"]

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if not run.mine():
            return original(*args, **kwargs)
        base: Any = torch._C.TensorBase
        put = base.grad.__set__  # past what hears of forward's own
        held = [(p, p.grad) for p in run.model.parameters()]
        try:
            for p, _ in held:
                put(p, None)
            with run.walked():
                found = original(*args, **kwargs)
            moved = [n for n, p in run.model.named_parameters() if p.grad is not None]
        finally:
            for p, gradient in held:
                put(p, gradient)
        if moved:
            raise UnsupportedError(
                f"forward calls backward() in {run.where()}, which leaves a gradient on {moved[0]!r}, and a plan can't; use "
                "torch.autograd.grad for what forward needs, or call backward outside"
            )
        return found

    run.patches.set(torch.autograd, "_engine_run_backward", run_backward)


def calls_class(error: Exception) -> bool:
    """Whether torch raised since forward called a class of tensors, such as `Marked(x)`, while a mode looked on."""
    return isinstance(error, RuntimeError) and "Creating a new Tensor subclass" in str(error)


def refuse_called_class(error: Exception) -> None:
    """Raise `UnsupportedError` where torch raised for that."""
    if calls_class(error):
        name = str(error).partition("Creating a new Tensor subclass ")[2].partition(" ")[0]
        raise UnsupportedError(
            f"forward calls a class of tensors on a tensor, {name}(x), which torch takes only where nothing looks on; write "
            f"x.as_subclass({name}), which does the same"
        ) from error
