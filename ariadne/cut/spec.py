"""What the user asks for: the strings that they type, parsed once, at the door."""

from __future__ import annotations

import builtins
import keyword
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ariadne.errors import SpecError
from ariadne.plan import FUNCTIONS, HELPERS, MOST

ExecutionMode = Literal["debug_interpreter", "generated_eager", "compiled"]
TraceBatchMode = Literal["batch_1", "batch_gt1"]
COMPILE_OPTIONS = ("backend", "mode", "dynamic", "fullgraph", "options", "disable")  # those of torch.compile
OUR_COMPILE_OPTIONS = ("on_compile_error", "cache_dir", "batch_buckets", "progress")
AHEAD_OPTIONS = ("backend", "options", "on_compile_error", "cache_dir", "progress")
MODES = ("debug_interpreter", "generated_eager", "compiled")
TRACE_BATCH_MODES = ("batch_1", "batch_gt1")
Objective = Mapping[str, float] | Callable[[Any], float]
BatchDim = Mapping[str, int | None] | Literal["none"]


@dataclass(frozen=True)
class SplitSpec:
    """Where to cut a model, and for which batches.

    `boundary`: "after:<module>", "after:<module>#<call>", "percent:50", "50%", "at:50%", "auto" or "cut:<k>" (after the
    k-th op). `dynamic_batch`: the smallest and largest batch to serve, both included, from 0; None means 1 to 64. `trainable`:
    the suffix must hold parameters to train. `trace_batch_mode`: "batch_1" wants example inputs of batch 1 and a range
    that includes 1; "batch_gt1" wants a larger example batch. None (the default) takes the example as it comes.
    `batch_symbol` is how the batch is written in plans and sources. `dynamic`: the sizes beside the batch that may change, as
    {input: {dim: symbol}}, inputs by the names that forward has for them; dims of one symbol have one size. `sizes`: how far each
    symbol goes, as (smallest, largest) or (smallest, largest, step), both included; any size where it says nothing.
    `batch_dim`: the dim that is the batch, for inputs where it is not dim 0, and None for those that have no batch, such as a
    table that all calls share: {"x": 1, "table": None}; "none" where no input has one, and `dynamic_batch` says nothing.
    `max_paths`: where Python branches on what it reads out of tensors, the number of paths that get a plan each for inputs of
    one kind; past it, and with 1 at once, another path raises `WitnessError`.

    Raises `SpecError` for anything else.

    >>> SplitSpec(boundary="after:layer3", dynamic_batch=(2, 64), trainable=True, trace_batch_mode="batch_gt1")
    """

    boundary: str
    batch_symbol: str = "B"
    dynamic_batch: tuple[int, int] | None = (1, 64)
    trainable: bool = False
    trace_batch_mode: TraceBatchMode | None = None
    dynamic: Mapping[str, Mapping[int, str]] | None = None
    sizes: Mapping[str, tuple[int, ...]] | None = None
    max_paths: int = 16
    batch_dim: BatchDim | None = None

    def __post_init__(self) -> None:
        parse_boundary(self.boundary)
        if not _is_symbol(self.batch_symbol):
            raise SpecError(f"batch_symbol must be a Python identifier such as 'B'; found {self.batch_symbol!r}")
        object.__setattr__(self, "dynamic", _dynamic(self.dynamic, self.batch_symbol))
        object.__setattr__(self, "sizes", None if self.sizes is None else dict(self.sizes))
        _ = self.ranges
        object.__setattr__(self, "batch_dim", _batch_dim(self.batch_dim))
        if self.trace_batch_mode is not None and self.trace_batch_mode not in TRACE_BATCH_MODES:
            raise SpecError(
                f"trace_batch_mode must be one of {', '.join(map(repr, TRACE_BATCH_MODES))}; found {self.trace_batch_mode!r}"
            )
        if type(self.max_paths) is not int or self.max_paths < 1:
            raise SpecError(f"max_paths is a number of paths, 1 or more; found {self.max_paths!r}")
        lo, hi = self.batch_range
        if self.trace_batch_mode == "batch_1" and lo > 1:
            raise SpecError(f"trace_batch_mode 'batch_1' needs a dynamic_batch that includes 1; found {(lo, hi)}")

    @property
    def batch_range(self) -> tuple[int, int]:
        """The smallest and the largest batch."""
        if self.dynamic_batch is None:
            return (1, 64)
        pair = self.dynamic_batch
        if not (
            isinstance(pair, (tuple, list))
            and len(pair) == 2
            and all(isinstance(b, int) and not isinstance(b, bool) for b in pair)
            and 0 <= pair[0] <= pair[1] != 0
        ):
            raise SpecError(
                f"dynamic_batch must be (smallest, largest) with 0 <= smallest <= largest and 1 <= largest; found {pair!r}"
            )
        return (pair[0], pair[1])

    @property
    def ranges(self) -> dict[str, range]:
        """The sizes that each symbol of `dynamic` may have.

        >>> SplitSpec("50%", dynamic={"x": {2: "H"}}, sizes={"H": (64, 512, 32)}).ranges
        {'H': range(64, 513, 32)}
        """
        symbols = list(dict.fromkeys(symbol for dims in (self.dynamic or {}).values() for symbol in dims.values()))
        unknown = next((symbol for symbol in self.sizes or {} if symbol not in symbols), None)
        if unknown is not None:
            raise SpecError(
                f"sizes has a range for {unknown!r}, which no dim in dynamic is called: there are {', '.join(symbols) or 'none'}"
            )
        return {symbol: _range(symbol, (self.sizes or {}).get(symbol, (1, MOST - 1))) for symbol in symbols}


def _is_symbol(text: Any) -> bool:
    taken = {*FUNCTIONS, *HELPERS, *dir(builtins), *keyword.kwlist}
    return isinstance(text, str) and text.isidentifier() and text not in taken


def _dynamic(given: Any, batch_symbol: str) -> dict[str, dict[int, str]] | None:
    if given is None:
        return None
    found = f"dynamic says which sizes may change as {{input: {{dim: symbol}}}}, such as {{'x': {{2: 'H'}}}}; found {given!r}"
    if not isinstance(given, Mapping) or not all(isinstance(dims, Mapping) for dims in given.values()):
        raise SpecError(found)
    for name, dims in given.items():
        if not isinstance(name, str) or not all(type(d) is int and d >= 0 for d in dims):
            raise SpecError(found)
        for symbol in dims.values():
            if not _is_symbol(symbol) or symbol == batch_symbol:
                raise SpecError(
                    f"dynamic calls a size by a Python identifier such as 'H', other than batch_symbol {batch_symbol!r}; found "
                    f"{symbol!r}"
                )
    return {name: dict(dims) for name, dims in given.items()}


def _batch_dim(given: Any) -> BatchDim | None:
    if given is None or given == "none":
        return given  # type: ignore[no-any-return]
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str) and (dim is None or (type(dim) is int and dim >= 0)) for name, dim in given.items()
    ):
        raise SpecError(
            "batch_dim says which dim of an input is the batch as {input: dim}, counted from 0, or None where it has no batch, "
            f"such as {{'x': 1, 'table': None}}; or 'none' where no input has one; found {given!r}"
        )
    return dict(given)


def _range(symbol: str, given: Any) -> range:
    low, high, step = [*given, 1][:3] if isinstance(given, (tuple, list)) and len(given) in (2, 3) else (0, 0, 0)
    if not (all(type(n) is int for n in (low, high, step)) and 1 <= low <= high < MOST and step >= 1):
        raise SpecError(
            f"sizes[{symbol!r}] must be (smallest, largest) or (smallest, largest, step), with 1 <= smallest <= largest; found "
            f"{given!r}"
        )
    return range(low, high + 1, step)


@dataclass(frozen=True)
class CompileOptions:
    """How segments are compiled.

    `given` are the options for the compiler: torch.compile's, or where `ahead` is true (backend "aot_inductor") AOTInductor's
    configuration in "options". `cache_dir`: where packages compiled ahead of time are kept; native code is loaded from there, so it
    must be as trusted as the program. `on_error`: raise, or eager to run a segment eagerly that can't be compiled. `buckets`: the
    batches that are run; a smaller one is padded to the next of them where each sample is shown to be computed by itself.
    `chosen`: nothing is said of a compiler, so what is known to serve best is taken, for each task and device. `progress`: whether
    a warm-up says on stderr what it compiles, None for where that is a terminal.
    """

    given: Mapping[str, Any]
    ahead: bool = False
    cache_dir: str | None = None
    on_error: str = "raise"
    buckets: tuple[int, ...] = ()
    chosen: bool = False
    progress: bool | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> CompileOptions:
        """The meaning of `compile_options`; `SpecError` for a name or a value that has none.

        >>> CompileOptions.parse({"backend": "aot_inductor", "cache_dir": "packages"}).ahead
        True
        """
        given = dict(options or {})
        ahead = given.get("backend") == "aot_inductor"
        chosen = not given.keys() - {"on_compile_error", "cache_dir", "progress"}
        known = AHEAD_OPTIONS if ahead else (*COMPILE_OPTIONS, *OUR_COMPILE_OPTIONS)
        unknown = next((name for name in given if name not in known), None)
        if unknown in (*COMPILE_OPTIONS, "batch_buckets"):
            raise SpecError(
                f"compile_options: {unknown!r} is for torch.compile; backend 'aot_inductor' takes {', '.join(map(repr, known))}"
            )
        if unknown is not None:
            raise SpecError(f"compile_options has no {unknown!r}; there are {', '.join(map(repr, known))}")
        on_error, cache_dir = given.pop("on_compile_error", "raise"), given.pop("cache_dir", None)
        if on_error not in ("raise", "eager"):
            raise SpecError(f"on_compile_error must be 'raise' or 'eager'; found {on_error!r}")
        if cache_dir is not None and not isinstance(cache_dir, (str, os.PathLike)):
            raise SpecError(f"cache_dir is the path of a directory; found {type(cache_dir).__name__}")
        if cache_dir is not None and not (ahead or chosen):
            raise SpecError(
                "cache_dir goes with backend 'aot_inductor', or without a backend; torch.compile keeps caches of its own"
            )
        progress = given.pop("progress", None)
        if progress not in (None, True, False):
            raise SpecError(f"progress is True, False, or None to show it on a terminal alone; found {progress!r}")
        buckets = given.pop("batch_buckets", ())
        if not (
            isinstance(buckets, (list, tuple))
            and all(type(b) is int and b > 0 for b in buckets)
            and sorted({*buckets}) == [*buckets]
        ):
            raise SpecError(f"batch_buckets are batches, ascending, such as (1, 4, 16); found {buckets!r}")
        if ahead and not isinstance(given.get("options") or {}, Mapping):
            raise SpecError(f"options is a mapping of inductor's settings; found {type(given['options']).__name__}")
        folder = None if cache_dir is None else os.fspath(cache_dir)
        return cls(given, ahead, folder, on_error, tuple(buckets), chosen, progress)


@dataclass(frozen=True, slots=True)
class Boundary:
    """A boundary string, parsed: `kind` is after, percent, auto or cut."""

    kind: str
    module: str = ""
    call: int | None = None
    percent: float = 0.0
    cut: int = 0


_NUMBER = re.compile(r"[0-9]{1,18}")
_MODULE = re.compile(r"[^\W\d]\w*(?:\.\w+)*(?:#\d+)?")
_PERCENT = re.compile(r"(?:(?:percent:|at:)\s*)?(?P<number>[-+]?\d+(?:\.\d*)?)\s*(?P<sign>%?)")


def parse_boundary(text: str) -> Boundary:
    """The meaning of a boundary string; `SpecError` lists the forms where it has none.

    >>> parse_boundary("after:layer3#2")
    Boundary(kind='after', module='layer3', call=2, percent=0.0, cut=0)
    """
    if not isinstance(text, str):
        raise SpecError(f"a boundary is a string such as 'after:layer3', '50%' or 'auto'; found {type(text).__name__}")
    asked = text.strip()
    if asked == "auto":
        return Boundary("auto")
    if asked.startswith("after:"):
        name, mark, call = asked.removeprefix("after:").partition("#")
        if name and not mark:
            return Boundary("after", module=name)
        if name and _NUMBER.fullmatch(call) and int(call) > 0:
            return Boundary("after", module=name, call=int(call))
    elif asked.startswith("cut:") and _NUMBER.fullmatch(asked.removeprefix("cut:")):
        return Boundary("cut", cut=int(asked.removeprefix("cut:")))
    elif (found := _PERCENT.fullmatch(asked)) and (found["sign"] or asked.startswith("percent:")):
        percent = float(found["number"])
        if not 0 < percent < 100:
            raise SpecError(f"a percentage must lie between 0 and 100, both excluded; found {asked!r}")
        return Boundary("percent", percent=percent)
    named = f"; after the module of that name: 'after:{asked}'" if _MODULE.fullmatch(asked) else ""
    raise SpecError(
        f"no boundary reads {text!r}; write 'after:<module>', 'after:<module>#<call>', 'percent:50', '50%', 'at:50%', "
        f"'auto' or 'cut:<k>'{named}"
    )
