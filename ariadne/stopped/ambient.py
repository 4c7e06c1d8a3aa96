"""What a thread has of its own: modes and switches that a forward must find as its caller has them, wherever it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _push_mode
from torch.utils import checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _len_torch_dispatch_stack  # type: ignore[attr-defined]

from ariadne.errors import UnsupportedError
from ariadne.guards import SWITCHES
from ariadne.stopped.unseen import Unseen

_DEVICES = ("cpu", "cuda")
top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_WORDS = {
    "inference": "torch.inference_mode()",
    "autocast": "autocast",
    "modes": "the default device",
    "hooks": "hooks on saved tensors",
    "replay": "the replay of views",
    "threads": "multithreaded backward passes",
    "cuda": "the current CUDA device or stream",
    "forward_ad": "forward-mode gradients",
    "unhooked": "why hooks on saved tensors are off",
    "keys": "which keys of torch's dispatcher are in use or left out",
}


@dataclass(frozen=True)
class Saving:
    """What a part under `torch.utils.checkpoint` has saved so far for the backward pass, which runs it again from its beginning.

    `holders` stand for the tensors that it saves, `before` is how many there were at the cut. Where torch keeps them
    elsewhere, there are none, and it is taken that both sides save some.
    """

    holders: list[Any] | None
    before: int

    @classmethod
    def now(cls) -> Saving | None:
        """That of this thread, as far as forward has come; None where it is in no such part."""
        hooks = top_hooks(True)
        pack = hooks[0] if hooks is not None else None
        if getattr(pack, "__module__", "") != checkpoint.__name__:
            return None
        try:
            held = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
            holders = held["frame"].cell_contents.weak_holders
        except (KeyError, AttributeError):
            return cls(None, 1)
        return cls(holders, len(holders))

    @property
    def goes_on(self) -> bool:
        """Whether it has saved more since: for the suffix."""
        return self.holders is None or len(self.holders) > self.before

    @property
    def is_split(self) -> bool:
        """Whether both sides of the cut will have it run again, which the whole model does once."""
        return self.before > 0 and self.goes_on


def within_function(since: CodeType) -> str:
    """The name of the `autograd.Function` whose forward this thread is in, begun since a function of this code; empty for none."""
    if torch._C._is_fwd_grad_enabled():  # which torch has off within each, also where forward has gradients on again
        return ""
    known = _forwards(torch.autograd.Function)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not since and frame.f_code not in known:
        frame = frame.f_back
    return "" if frame is None else known.get(frame.f_code, "")


def _forwards(cls: type) -> dict[CodeType, str]:
    """The code of `forward` in each class made of this one, with the class's name."""
    found: dict[CodeType, str] = {}
    made: Any
    for made in cls.__subclasses__():
        forward = vars(made).get("forward")
        code = getattr(getattr(forward, "__func__", forward), "__code__", None)
        found |= ({code: made.__qualname__} if code is not None else {}) | _forwards(made)
    return found


@dataclass(frozen=True)
class Ambient:
    """The modes of one thread, and the switches of the process, at one moment.

    `autocast`: device, whether it is on, and its dtype, of each; `cache`: whether casts are kept, until the outermost of
    `nesting` blocks ends. `modes`: default devices.
    `hooks`: those on tensors that are saved for a backward pass, and `unhooked` why there may be none. `keys`: of torch's
    dispatcher, which are included and excluded. `switches` are the process's, in the order of `SWITCHES`.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    nesting: int
    modes: tuple[Any, ...]
    hooks: Any
    replay: bool
    threads: bool
    cuda: Any
    forward_ad: bool
    unhooked: str | None
    keys: tuple[int, int]
    switches: tuple[Any, ...]

    @classmethod
    def now(cls, grad: bool) -> Ambient:
        """Those of this thread, but for the grad mode; raises `UnsupportedError` for what can't be taken to another thread."""
        modes = tuple(_get_current_function_mode_stack())
        other = next((m for m in modes if not isinstance(m, DeviceContext)), None)
        if isinstance(other, Unseen):
            raise UnsupportedError(
                "a Python split was called within another call of one: within loss_fn, or in the model's own forward, which "
                "runs under what follows it. Call it before train_suffix, and give its result to loss_fn by targets or a "
                "variable; or call the model itself there"
            )
        if other is not None or _len_torch_dispatch_stack():
            found = type(other).__name__ if other is not None else "a TorchDispatchMode"
            raise UnsupportedError(
                f"a Python split runs forward in a thread of its own, and {found} is at work in this one alone; call it outside of "
                "that mode, or run the model itself there"
            )
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UnsupportedError(
                "a Python split runs forward in a thread of its own, where a transform of torch.func does not reach; call it "
                "outside of the transform, or transform the model itself"
            )
        if not torch._C._is_torch_function_enabled():
            raise UnsupportedError(
                "a Python split runs forward in a thread of its own, and torch functions are disabled in this one alone "
                "(DisableTorchFunctionSubclass or DisableTorchFunction); call it outside of that block"
            )
        autocast = tuple([(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES])
        return cls(
            grad,
            torch.is_inference_mode_enabled(),
            autocast,
            torch.is_autocast_cache_enabled(),
            _nesting(),
            modes,
            top_hooks(False),
            torch._C._is_view_replay_enabled(),
            torch._C._is_multithreading_enabled(),
            (torch.cuda.current_device(), torch.cuda.current_stream()) if torch.cuda.is_initialized() else None,
            torch._C._is_fwd_grad_enabled(),
            torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
            _keys(),
            switches(),
        )

    def changed(self, now: Ambient) -> str | None:
        """What differs in another moment, in words, the grad mode left out; None where nothing does."""
        if _compared(self) == _compared(now):
            return None
        pairs = zip(_WORDS.values(), _compared(self), _compared(now), strict=False)
        found = next(
            (f"{word} was {was!r}, and is {is_now!r} now" for word, was, is_now in pairs if was != is_now), None
        )
        return found or switched(self.switches, now.switches)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have these modes in this thread, which is new and has none."""
        with ExitStack() as stack:
            if self.cuda is not None:
                torch.cuda.set_device(self.cuda[0])
                torch.cuda.set_stream(self.cuda[1])
            torch._C._set_view_replay_enabled(self.replay)
            torch._C._set_multithreading_enabled(self.threads)
            for mode in self.modes:
                _push_mode(mode)
            if self.hooks is not None:
                _push_hooks(*self.hooks)
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for device, on, dtype in self.autocast:
                if torch.get_autocast_dtype(device) != dtype:
                    torch.set_autocast_dtype(device, dtype)
                if on:  # no block, whose end would forget casts that the whole model goes on with in your block
                    torch.set_autocast_enabled(device, True)
            for _ in range(self.nesting):  # nor is one that forward opens the outermost
                torch.autocast_increment_nesting()
            torch.set_autocast_cache_enabled(self.cache)
            torch._C._set_fwd_grad_enabled(self.forward_ad)
            if self.unhooked is not None:
                torch._C._autograd._saved_tensors_hooks_disable(self.unhooked)
            torch._C._set_grad_enabled(self.grad)
            if self.keys != _keys():
                raise UnsupportedError(
                    "a Python split runs forward in a thread of its own, and in yours torch's dispatcher leaves out other keys, "
                    "as it does within _AutoDispatchBelowAutograd or under autocast of another device than the CPU and CUDA; call "
                    "it outside of that block"
                )
            yield


_compared = attrgetter(*_WORDS, "switches")


def _nesting() -> int:
    """How many blocks of autocast this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _keys() -> tuple[int, int]:
    """The keys of torch's dispatcher that this thread has included and excluded."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return included.raw_repr(), excluded.raw_repr()


def switches() -> tuple[Any, ...]:
    """How the switches of the process stand."""
    return tuple([ask() for ask in SWITCHES.values()])


def switched(was: tuple[Any, ...], now: tuple[Any, ...]) -> str | None:
    """The first switch that stands otherwise, in words; None where none does."""
    if was == now:
        return None
    return next(f"{name} was {a!r}, and is {b!r} now" for name, a, b in zip(SWITCHES, was, now, strict=True) if a != b)
