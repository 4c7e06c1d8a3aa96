"""Applied: functions of autograd become one op each, by whatever name forward calls their `apply`.

`Foo.apply` is seen where it is looked up. `f = Foo.apply`, taken before the capture, is torch's own C function, which looks up
`_backward_cls` of its class before anything else, and then calls `forward` (and `setup_context`): there it is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ariadne import tree
from ariadne.capture.followed import Real, Size
from ariadne.capture.recorder import Recorder, Within
from ariadne.capture.refusals import Patches
from ariadne.capture.wanted import tell
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
        tell(recorder, args)
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
        self.recorder, self.patches = recorder, patches
        self.begun: tuple[Any, Region] | None = None
        self.within = Within()  # what its ops read
        self.seen: set[tuple[Any, str]] = set()  # the classes whose own `forward` or `setup_context` is watched
        meta: Any = type(_FUNCTION)
        find = meta.__getattribute__

        def found(cls: Any, name: str) -> Any:
            if name == "_backward_cls" and recorder.is_mine():
                self._watch(cls)
                self.begun = cls, recorder.region()
            return find(cls, name)

        patches.set(meta, "__getattribute__", found)

    def _watch(self, cls: Any) -> None:
        """See the `forward` and `setup_context` of a class, which torch is about to call."""
        for name, wrapped in (("forward", self._forward), ("setup_context", self._setup_context)):
            owner = next(c for c in cls.__mro__ if name in c.__dict__)
            held: Any = owner.__dict__[name]
            if owner in _FUNCTION.__mro__ or not _is_plain(held):
                if name == "forward":
                    raise UnsupportedError(
                        f"forward calls {cls.__name__}.apply in {self.recorder.where()} by a reference, and its forward is no "
                        "static method; write @staticmethod before it"
                    )
            elif (owner, name) not in self.seen:
                self.seen.add((owner, name))
                call = wrapped(owner, held.__func__ if isinstance(held, staticmethod) else held)
                self.patches.set(owner, name, staticmethod(call) if isinstance(held, staticmethod) else call)

    def _forward(self, owner: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            begun = self._begun_within(owner)
            if begun is None:
                return run(*args, **kwargs)
            cls, region = begun
            by_ctx = bool(args) and isinstance(args[0], _CTX)
            _lose_numbers(self.recorder, cls, args)
            tell(self.recorder, args, region)
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
            begun = self._begun_within(owner)
            if begun is None:
                return run(*args, **kwargs)
            cls, region = begun
            with self.recorder.aside():
                run(*args, **kwargs)
            ctx, inputs, out = args
            self._note(cls, region, ctx, inputs, out)
            return None

        return _for(setup_context, run)

    def _begun_within(self, owner: Any) -> tuple[Any, Region] | None:
        """The class whose `apply` runs; None where none does, and forward calls a part of it as a function like any other."""
        if not self.recorder.is_mine() or self.begun is None or torch._C._is_fwd_grad_enabled():
            return None
        return self.begun if issubclass(self.begun[0], owner) else None

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


def _is_plain(held: Any) -> bool:
    return isinstance(held, staticmethod) or type(held) is type(_is_plain)
