"""Applied: functions of autograd become one op each, by whatever name forward calls their `apply`.

`Foo.apply` is seen where it is looked up. `f = Foo.apply`, taken before the capture, is torch's own C function, which looks up
`_backward_cls` of its class before anything else, and then calls `forward` (and `setup_context`): there it is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ariadne import tree
from ariadne.capture.followed import Real, Size
from ariadne.capture.recorder import Recorder, Within
from ariadne.capture.refusals import Patches
from ariadne.errors import UnsupportedError
from ariadne.plan import Region

_FUNCTION: Any = torch.autograd.Function
_CTX: Any = torch._C._FunctionBase


def patch(recorder: Recorder, patches: Patches) -> None:
    """Let the recorder note each autograd function as one op; raises `UnsupportedError` where one runs unseen."""
    owner = next(c for c in _FUNCTION.__mro__ if "apply" in c.__dict__)
    original = owner.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = original.__get__(None, cls)
        if not recorder.is_mine():
            return run(*args, **kwargs)
        _lose_numbers(recorder, cls, (args, kwargs))
        try:
            with recorder.whole() as within:
                out = run(*args, **kwargs)
        except Exception as error:
            recorder.note_failure(f"{cls.__name__}.apply", error)
            raise
        if kwargs:
            raise UnsupportedError(
                f"forward calls {cls.__name__}.apply with keywords in {recorder.where()}; pass all of its arguments by position"
            )
        recorder.add(cls, args, out, within=within)
        return out

    patches.set(_FUNCTION, "apply", classmethod(apply))
    _Referred(recorder, patches)


class _Referred:
    """Sees the calls of `apply` by a reference; `begun` is the class of one, with the modes around it."""

    def __init__(self, recorder: Recorder, patches: Patches) -> None:
        self.recorder = recorder
        self.begun: tuple[Any, Region] | None = None
        self.within = Within()  # what its ops read
        self.seen: set[Any] = set()  # the classes whose own `forward` is watched
        meta: Any = type(_FUNCTION)
        find = meta.__getattribute__

        def found(cls: Any, name: str) -> Any:
            if name == "_backward_cls" and recorder.is_mine():
                if next((c for c in cls.__mro__ if "forward" in c.__dict__), None) not in self.seen:
                    raise UnsupportedError(
                        f"forward calls {find(cls, '__name__')}.apply in {recorder.where()} by a reference, and its forward is no "
                        "static method; write @staticmethod before it"
                    )
                self.begun = cls, recorder.region()
            return find(cls, name)

        patches.set(meta, "__getattribute__", found)
        for owner, name in dict.fromkeys(_owners()):
            wrapped: Any = self._forward if name == "forward" else self._setup_context
            held = owner.__dict__[name]
            if name == "forward":
                self.seen.add(owner)
            call = wrapped(owner, held.__func__ if isinstance(held, staticmethod) else held)
            patches.set(owner, name, staticmethod(call) if isinstance(held, staticmethod) else call)

    def _forward(self, owner: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.recorder.is_mine():
                return run(*args, **kwargs)
            cls, region = self._within(owner)
            by_ctx = bool(args) and isinstance(args[0], _CTX)
            _lose_numbers(self.recorder, cls, args)
            try:
                with self.recorder.whole() as self.within:
                    out = run(*args, **kwargs)
            except Exception as error:
                self.recorder.note_failure(f"{cls.__name__}.apply", error)
                raise
            if by_ctx:
                self._note(cls, region, args[0], args[1:], out)
            return out

        return _for(forward, run)

    def _setup_context(self, owner: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        def setup_context(*args: Any, **kwargs: Any) -> Any:
            if not self.recorder.is_mine():
                return run(*args, **kwargs)
            cls, region = self._within(owner)
            with self.recorder.aside():
                run(*args, **kwargs)
            ctx, inputs, out = args
            self._note(cls, region, ctx, inputs, out)
            return None

        return _for(setup_context, run)

    def _within(self, owner: Any) -> tuple[Any, Region]:
        """The class whose `apply` runs; raises `UnsupportedError` where none does, and forward calls a part of it itself."""
        begun = self.begun
        if begun is None or torch._C._is_fwd_grad_enabled() or not issubclass(begun[0], owner):
            raise UnsupportedError(
                f"forward runs the forward of {owner.__name__} in {self.recorder.where()}, and not by its apply, which hides its "
                f"backward; write {owner.__name__}.apply(...) where it is called"
            )
        return begun

    def _note(self, cls: Any, region: Region, ctx: Any, args: tuple[Any, ...], out: Any) -> None:
        self.begun = None
        made = [t for t in tree.leaves(out) if isinstance(t, torch.Tensor)]
        dirty = list(getattr(ctx, "dirty_tensors", None) or ())
        given = [t for t in tree.leaves(args) if isinstance(t, torch.Tensor)]
        again = [t for t in made if any(t is g for g in given) and not any(t is d for d in dirty)]
        if again:  # autograd makes another tensor of it, which nobody sees
            raise UnsupportedError(
                f"forward calls {cls.__name__}.apply in {self.recorder.where()} by a reference taken before the capture, and it "
                f"returns one of its inputs as it is; write {cls.__name__}.apply(...) where it is called"
            )
        self.recorder.add(cls, args, out, region=region, within=self.within)


def _for(stand_in: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for a function of a class; torch reads the defaults of that one. `functools.wraps` would copy more."""
    stand_in.__dict__["__wrapped__"] = run
    return stand_in


def _lose_numbers(recorder: Recorder, cls: Any, given: Any) -> None:
    if recorder.watch is not None and any(isinstance(a, (Size, Real)) for a in tree.leaves(given)):
        recorder.watch.lose(f"{cls.__name__} takes the number")


def _owners() -> Iterator[tuple[Any, str]]:
    """The classes that say what a function's `forward` or `setup_context` is, by Python's own lookup."""
    for cls in _functions(_FUNCTION):
        for name in ("forward", "setup_context"):
            owner = next((c for c in cls.__mro__ if name in c.__dict__), None)
            if owner is not None and owner not in _FUNCTION.__mro__ and _is_plain(owner.__dict__[name]):
                yield owner, name


def _is_plain(held: Any) -> bool:
    return isinstance(held, staticmethod) or type(held) is type(_is_plain)


def _functions(base: Any) -> Iterator[Any]:
    for cls in base.__subclasses__():
        yield cls
        yield from _functions(cls)
