"""Switches: settings of torch that Python can ask for, so that forward may go another way after one is changed.

Ops follow most of them by themselves, since a plan's ops are torch's own. What a plan can't follow is an answer that Python got:
`if torch.is_inference_mode_enabled()`. Which were asked for is seen where a forward is recorded; three are always held: the default
dtype and the default device decide what torch makes of Python's numbers, and a `TorchFunctionMode` what its functions do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
import torch.backends.mha
import torch.backends.opt_einsum
from torch import distributed
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack

TORCH = ("torch.autograd", "torch.utils", "torch._", "torch.amp", "torch.fx", "ariadne")  # parts that no result follows
_CPU = torch.device("cpu")
_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)


def default_device() -> torch.device:
    """Where torch makes tensors if nobody says where; fast where no `torch.set_default_device` is at work."""
    return torch.get_default_device() if _modes() else _CPU


def function_modes() -> str:
    """The classes of the modes over torch's functions that the caller has entered; fast where there is none.

    Torch's own, such as `torch.device` as a block, and Ariadne's change no op, or are held apart.
    """
    if not _modes():
        return ""
    kinds = map(type, _get_current_function_mode_stack())
    return ", ".join(k.__qualname__ for k in kinds if k.__module__.partition(".")[0] not in ("torch", "ariadne"))


def caches_parametrizations() -> bool:
    """Whether `torch.nn.utils.parametrize.cached()` is at work, which keeps parametrized weights from one read to the next."""
    return bool(parametrize._cache_enabled)


@contextmanager
def no_weights_cached() -> Iterator[None]:
    """Within the block `torch.nn.utils.parametrize.cached()` begins with nothing kept; after it, what was kept before is back.

    A weight that a run without gradients kept would have none in the next, and a graph can be walked back through once.
    """
    kept = dict(parametrize._cache)
    parametrize._cache.clear()  # in place: forwards that stop follow the dict
    try:
        yield
    finally:
        parametrize._cache.clear()
        parametrize._cache.update(kept)


def raising_filters() -> str:
    """The filters that make errors of warnings: most often none."""
    return "; ".join([repr(one) for one in warnings.filters if one[0] == "error"])


def all_filters() -> str:
    """All filters for warnings, in order."""
    global _shown
    if _shown[0] != warnings.filters:  # to have them show themselves takes more than all other switches together
        _shown = [*warnings.filters], repr(warnings.filters)
    return _shown[1]


_shown: tuple[Any, str] = None, ""  # the filters that were shown last, and how


# By C's own functions, since all that Python offers asks these in the end; whichever of them this torch has.
_OF_C = {
    "torch.is_inference_mode_enabled()": "is_inference_mode_enabled",
    "torch.is_anomaly_enabled()": "is_anomaly_enabled",
    "torch.is_autocast_cache_enabled()": "is_autocast_cache_enabled",
    "torch.get_num_threads()": "get_num_threads",
    "torch.get_num_interop_threads()": "get_num_interop_threads",
    "torch.are_deterministic_algorithms_enabled()": "_get_deterministic_algorithms",
    "torch.is_deterministic_algorithms_warn_only_enabled()": "_get_deterministic_algorithms_warn_only",
    "torch.is_warn_always_enabled()": "_get_warnAlways",
    "torch.utils.deterministic.fill_uninitialized_memory": "_get_deterministic_fill_uninitialized_memory",
    "torch.get_float32_matmul_precision()": "_get_float32_matmul_precision",
    "torch.backends.cuda.matmul.allow_tf32": "_get_cublas_allow_tf32",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": "_get_cublas_allow_fp16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": "_get_cublas_allow_bf16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_fp16_accumulation": "_get_cublas_allow_fp16_accumulation",
    "torch.backends.cuda.flash_sdp_enabled()": "_get_flash_sdp_enabled",
    "torch.backends.cuda.mem_efficient_sdp_enabled()": "_get_mem_efficient_sdp_enabled",
    "torch.backends.cuda.math_sdp_enabled()": "_get_math_sdp_enabled",
    "torch.backends.cuda.cudnn_sdp_enabled()": "_get_cudnn_sdp_enabled",
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()": "_get_math_sdp_allow_fp16_bf16_reduction",
    "torch.backends.cuda.preferred_linalg_library()": "_get_linalg_preferred_backend",
    "torch.backends.cuda.preferred_blas_library()": "_get_blas_preferred_backend",
    "torch.backends.cudnn.enabled": "_get_cudnn_enabled",
    "torch.backends.cudnn.benchmark": "_get_cudnn_benchmark",
    "torch.backends.cudnn.deterministic": "_get_cudnn_deterministic",
    "torch.backends.cudnn.allow_tf32": "_get_cudnn_allow_tf32",
    "torch.backends.mkldnn.enabled": "_get_mkldnn_enabled",
    "torch.backends.mkldnn.deterministic": "_get_mkldnn_deterministic",
    "torch.backends.mkldnn.allow_tf32": "_get_onednn_allow_tf32",
    "torch.backends.nnpack": "_get_nnpack_enabled",
    "torch.backends.quantized.engine": "_get_qengine",
}


def _in_group(ask: Callable[[], int]) -> Callable[[], int | None]:
    """The same of the process group, and None where there is none."""
    return lambda: ask() if distributed.is_initialized() else None


_GROUPS: dict[str, Callable[[], Any]] = (
    {f"torch.distributed.{ask.__name__}()": ask for ask in (distributed.get_world_size, distributed.get_rank)}
    if distributed.is_available()
    else {}
)
_CACHED = "torch.nn.utils.parametrize.cached()"
_FILLED = "torch.utils.deterministic.fill_uninitialized_memory"
_OF_PYTHON: dict[str, Callable[[], Any] | None] = {
    _CACHED: caches_parametrizations,
    "torch.backends.mha.get_fastpath_enabled()": torch.backends.mha.get_fastpath_enabled,
    "torch.backends.opt_einsum.enabled": getattr(torch.backends.opt_einsum, "_get_enabled", None),
    "torch.backends.opt_einsum.strategy": getattr(torch.backends.opt_einsum, "_get_strategy", None),
    **{
        f"torch.__future__.{name}()": getattr(torch.__future__, name, None)
        for name in ("get_swap_module_params_on_conversion", "get_overwrite_module_params_on_conversion")
    },
    "torch.autograd._profiler_enabled()": getattr(torch._C._autograd, "_profiler_enabled", None),
    "torch.distributed.is_initialized()": distributed.is_initialized if _GROUPS else None,
}
_BY_VARIABLE = {"_cache_enabled": _CACHED, "fill_uninitialized_memory": _FILLED}  # of modules of torch's
_RAISING, _FILTERS = "which warnings are errors", "warnings.filters"
ALWAYS: dict[str, Callable[[], Any]] = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_default_device()": default_device,
    "the TorchFunctionModes entered": function_modes,
}
SWITCHES: dict[str, Callable[[], Any]] = {
    **{name: getattr(torch._C, own) for name, own in _OF_C.items() if hasattr(torch._C, own)},
    **{name: ask for name, ask in _OF_PYTHON.items() if ask is not None},
    **{name: _in_group(ask) for name, ask in _GROUPS.items()},
    _RAISING: raising_filters,
    _FILTERS: all_filters,
    **ALWAYS,
}
_SET_OTHERWISE = {
    "_get_flash_sdp_enabled": "_set_sdp_use_flash",
    "_get_mem_efficient_sdp_enabled": "_set_sdp_use_mem_efficient",
    "_get_math_sdp_enabled": "_set_sdp_use_math",
    "_get_cudnn_sdp_enabled": "_set_sdp_use_cudnn",
}
_DETERMINISTIC = "torch.are_deterministic_algorithms_enabled()"
# How those are set that decide which kernels run, or what they make, so that an op can run again under what forward set.
SETTERS: dict[str, Callable[[Any], Any]] = {
    **{
        name: getattr(torch._C, setter)
        for name, own in _OF_C.items()
        if own.startswith("_get_") and name not in (_DETERMINISTIC, "torch.is_deterministic_algorithms_warn_only_enabled()")
        and "reduc" not in name  # which take more than one value
        and own != "_get_warnAlways"  # no kernel does
        and hasattr(torch._C, own)
        and hasattr(torch._C, setter := _SET_OTHERWISE.get(own, own.replace("_get_", "_set_")))
    },
    _DETERMINISTIC: lambda value: torch.use_deterministic_algorithms(
        value, warn_only=torch.is_deterministic_algorithms_warn_only_enabled()
    ),
    "torch.backends.mha.get_fastpath_enabled()": torch.backends.mha.set_fastpath_enabled,
    "torch.get_default_dtype()": torch.set_default_dtype,
}  # fmt: skip
_SETTLED = [(name, SWITCHES[name]) for name in SETTERS]
_BY_FUNCTION = {id(ask): name for name, ask in SWITCHES.items() if not hasattr(ask, "__code__")}
_BY_CODE = {ask.__code__: name for name, ask in SWITCHES.items() if hasattr(ask, "__code__") and name not in _GROUPS}
_BY_CODE |= {getattr(ask, "__wrapped__", ask).__code__: name for name, ask in _GROUPS.items()}
# What reads a parametrized weight asks for its cache by the name of a global variable.
_BY_CODE |= {
    code: _CACHED
    for code in parametrize._inject_property.__code__.co_consts
    if isinstance(code, CodeType) and code.co_name == "get_parametrized"
}
for _ask in (warnings.warn, warnings.warn_explicit):  # of C's, or Python's own
    if hasattr(_ask, "__code__"):
        _BY_CODE[_ask.__code__] = _RAISING
    else:
        _BY_FUNCTION[id(_ask)] = _RAISING
_BY_CODE[warnings.catch_warnings.__enter__.__code__] = _FILTERS

State = tuple[tuple[str, Any], ...]


def asked(function: Any) -> str | None:
    """The name of the switch that a function of C's tells."""
    return _BY_FUNCTION.get(id(function))


def named(names: Collection[str]) -> set[str]:
    """The switches that code with these names reads from variables of Python's own."""
    found = {switch for name, switch in _BY_VARIABLE.items() if name in names}
    return found | {_FILTERS} if "warnings" in names and "filters" in names else found


def asked_by(code: CodeType) -> str | None:
    """The name of the switch that a Python function of torch's own tells, by its code."""
    return _BY_CODE.get(code)


def is_torchs_business(module: Any) -> bool:
    """Whether a switch was asked for in a part of torch that no result follows, or by Ariadne itself."""
    return str(module).startswith(TORCH)


def state_of(names: Iterable[str]) -> State:
    """How these switches stand now, and those that always count."""
    return tuple((name, SWITCHES[name]()) for name in sorted({*names, *ALWAYS}))


def changed(then: State) -> str | None:
    """The first switch that stands otherwise now, in words; None where none does."""
    for name, was in then:
        now = SWITCHES[name]()
        if now != was:
            return f"{name} was {was!r} at capture, now it is {now!r}"
    return None


def settings() -> tuple[Any, ...]:
    """How the switches stand that can be set again, in the order of `SETTERS`."""
    return tuple([ask() for _, ask in _SETTLED])


def between(then: tuple[Any, ...], now: tuple[Any, ...]) -> State:
    """The switches of two `settings` that stand otherwise now, and how."""
    return tuple((name, b) for (name, _), a, b in zip(_SETTLED, then, now, strict=True) if a != b)


def put_back(then: tuple[Any, ...]) -> None:
    """Let all of them stand as they did."""
    for name, value in between(settings(), then):
        SETTERS[name](value)


class Switched:
    """A block in which switches stand as given; after it, as before."""

    def __init__(self, *state: tuple[str, Any]) -> None:
        self.state = state
        self.before: list[tuple[str, Any]] = []

    def __enter__(self) -> None:
        self.before = [(name, SWITCHES[name]()) for name, _ in self.state]
        for name, value in self.state:
            SETTERS[name](value)

    def __exit__(self, *exception: object) -> None:
        for name, value in self.before:
            SETTERS[name](value)


def readers(then: Mapping[str, Any] | State) -> list[tuple[Callable[[], Any], Any]]:
    """What to ask, and what it must tell."""
    return [(SWITCHES[name], was) for name, was in dict(then).items()]
