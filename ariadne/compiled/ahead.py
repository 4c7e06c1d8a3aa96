"""Segments compiled ahead of time: AOTInductor packages for inference, each with the batches that it was shown to serve.

A package takes the model's tensors as inputs, so it follows an optimizer step or `load_state_dict`. Its native code checks
nothing; what it relies on (types, sizes, layouts, the batch) is checked in `package`, before it is called.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ariadne.compiled.kept import Broken, Kept
from ariadne.compiled.lift import Lifted
from ariadne.compiled.package import Layout, Package, lies
from ariadne.cut import CompileOptions
from ariadne.errors import CompileError, SpecError
from ariadne.plan import Batches, Expr, TracePlan, bind
from ariadne.segment import load

MOST_BATCHES = 4096  # one package serves a range of at most so many batches
MOST_PACKAGES = 16  # for one kernel: what would take more follows something that changes from call to call


class Ahead:
    """A kernel compiled ahead of time, on first need, or loaded from where packages are kept."""

    def __init__(self, lifted: Lifted, plan: TracePlan, label: str, options: CompileOptions, report: Any,
                 setting: Callable[[], Any], refused: Callable[[str], CompileError], lock: threading.RLock,
                 instead: Callable[..., Any] | None = None) -> None:  # fmt: skip
        self.lifted, self.plan, self.label, self.options, self.report = lifted, plan, label, options, report
        self.setting, self.refused, self.lock, self.instead = setting, refused, lock, instead
        self.kept = None if options.cache_dir is None else Kept(options.cache_dir)
        if options.chosen and self.kept is None:
            self.kept = Kept.of_user()
        if self.kept is not None:
            try:
                self.kept.trusted()
            except SpecError as error:
                if options.cache_dir is not None or os.environ.get("ARIADNE_CACHE_DIR"):
                    raise
                self.kept = None  # a folder that nobody named
                report.notes.append(f"packages are not kept for the next process: {error}")
        self.split = len(lifted.inputs)
        self.packages: list[Package] = []
        self.latest: Package | None = None
        self.other: Callable[..., Any] | None = None

    def __call__(self, batch: int, *tensors: Any) -> Any:
        """Run a package that serves this batch, these tensors and the modes of the caller."""
        inputs, state = tensors[: self.split], tensors[self.split :]
        package, ambient = self.latest, _ambient()
        if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
            raise CompileError(
                "backend 'aot_inductor' serves inference, and here gradients are wanted. To train, prepare another runtime with "
                "compile_options={'backend': 'inductor'} or mode='generated_eager'; they work on the same model"
            )
        if package is None or ambient != package.ambient or not (
            package.unchanged(*state) and package.fits(batch, inputs)
        ):  # fmt: skip
            package = self._find(batch, inputs, state, ambient) if self.other is None else None
            if package is None:
                assert self.other is not None
                return self.other(*tensors) if self.lifted.batch else self.other(batch, *tensors)
            self.latest = package
        return package(inputs, state)

    def _find(self, batch: int, inputs: Sequence[Any], state: Sequence[Any], ambient: Any) -> Package | None:
        with self.lock:
            for package in self.packages:
                if ambient == package.ambient and package.fits(batch, inputs) and package.follows(state):
                    return package
            start = time.perf_counter()
            try:
                if len(self.packages) == MOST_PACKAGES:
                    raise self.refused(f"{MOST_PACKAGES} packages were made for it, and none serves these tensors")
                package = self._make(batch, inputs, state, ambient)
            except (MemoryError, torch.OutOfMemoryError, SpecError):
                raise
            except Exception as error:  # exporters and compilers raise whatever they please
                failure = error if isinstance(error, CompileError) else self.refused(f"{type(error).__name__}: {error}")
                if self.instead is not None:
                    self.report.notes.append(f"torch.compile in its place: {' '.join(str(failure).split())[:300]}")
                    self.other = self.instead()
                    return None
                if self.options.on_error != "eager":
                    raise failure from error
                self.report.state = "eager"
                self.report.notes.append(" ".join(str(failure).split())[:300])
                self.other = load(self.lifted.kernel(marked=False, checked=False), f"{self.label}, kernel")
                return None
            self.report.seconds += time.perf_counter() - start
            self.report.ways[False] = "ahead of time"
            self.packages.append(package)
            self.report.batches = (*self.report.batches, str(package.batches))
            return package

    def _make(self, batch: int, inputs: Sequence[Any], state: Sequence[Any], ambient: Any) -> Package:
        if self.instead is not None and any(isinstance(t, torch.Tensor) and t.is_cuda for t in (*inputs, *state)):
            raise CompileError("its tensors are on CUDA, where packages were not measured")
        if self.lifted.batch is None:
            raise self.refused("no tensor that it takes has the batch as a size, or a multiple of it")
        if self.lifted.has_witness:
            raise self.refused("it reads a number out of a tensor, and goes on from there in Python")
        odd = next(
            (n for n, t in zip(self.lifted.inputs, inputs, strict=True) if not isinstance(t, torch.Tensor)), None
        )
        if odd is not None:
            raise self.refused(f"{odd!r}, which crosses the cut, is no tensor")
        served = self._range(batch)
        hint = batch if batch > 1 else min((b for b in served if b > 1), default=1)
        layouts = tuple(
            self._layout(n, t, batch, len(served) > 1) for n, t in zip(self.lifted.inputs, inputs, strict=True)
        )
        name = self._name(layouts, inputs, state, ambient, served)
        device = self._device((*inputs, *state))
        kept = None if self.plan.objects else self.kept  # the code of Python objects is in no digest
        found = None if kept is None else self._kept(kept, name, batch, device)
        if found is not None:
            self.report.loaded += 1
            self.report.state = "loaded"
            self.report.began_loaded |= not self.packages
            run, admitted = found
        else:
            keep = None if kept is None else functools.partial(self._keep, kept, name, hint)
            run, admitted = self._compile(layouts, inputs, state, served, hint, keep, device)
            if batch not in admitted:
                raise self.refused(f"what was compiled does not serve batch {batch}, but {admitted}")
            self.report.compiled[False] += 1
            self.report.state = "compiled"
        return Package(run, admitted, self.lifted.symbol, layouts, state, ambient)

    def _layout(self, name: str, t: torch.Tensor, batch: int, many: bool) -> Layout:
        """What a package for `many` batches, or for this one, is to rely on for an input."""
        sizes: list[int | Expr | None] = []
        for dim, (size, found) in enumerate(zip(self.lifted.sizes[name], t.shape, strict=True)):
            if isinstance(size, Expr) and not size.names <= {self.lifted.symbol}:
                sizes.append(None if many and found >= 2 else found)
                continue
            expected = size.evaluate({self.lifted.symbol: batch}) if isinstance(size, Expr) else size
            if found != expected:
                raise self.refused(
                    f"{name!r} has size {found} in dim {dim}, where capture saw {size} (here {expected}): its size follows data, "
                    "or it is no boundary of this plan. Native code reads as many as it was compiled for"
                )
            sizes.append(size)
        return Layout.of(t, sizes)

    def _range(self, batch: int) -> Batches:
        """The batches that one package is to serve: a range of the plan's that holds `batch`."""
        lo, hi = next((lo, hi) for lo, hi in self.plan.batches.ranges if lo <= batch <= hi)
        if hi - lo >= MOST_BATCHES:
            lo = max(lo, min(batch - MOST_BATCHES // 2, hi - MOST_BATCHES + 1))
            hi = lo + MOST_BATCHES - 1
        return Batches(((lo, hi),))

    def _device(self, tensors: Sequence[torch.Tensor]) -> int:
        """The number of the GPU that a package is for, whichever the thread has selected; -1 on the CPU."""
        found = sorted({t.device.index for t in tensors if t.is_cuda})
        if len(found) > 1:
            raise self.refused(f"its tensors lie on several GPUs, {', '.join(map(str, found))}; a package runs on one")
        return found[0] if found else -1

    def _compile(self, layouts: Sequence[Layout], inputs: Sequence[Any], state: Sequence[Any], served: Batches, hint: int,
                 keep: Callable[[str, Batches], None] | None, device: int) -> tuple[Callable[..., Any], Batches]:  # fmt: skip
        (lo, hi) = served.ranges[0]
        examples = [*self._examples(layouts, inputs, hint), *(t.detach() for t in state)]
        dim = torch.export.Dim(self.lifted.symbol, min=lo, max=hi) if lo < hi else None
        dims = [self._dims(layout, dim, served) for layout in layouts] + [None] * len(state)
        with self.setting(), torch.no_grad(), tempfile.TemporaryDirectory() as scratch:
            kernel = _Kernel(load(self.lifted.kernel(marked=False, checked=True), f"{self.label}, kernel"))
            program = torch.export.export(kernel, tuple(examples), dynamic_shapes={"args": tuple(dims)}, strict=False)
            self._examine(program)
            sizes = [self.lifted.sizes[n] for n in self.lifted.inputs]
            symbols, free, env = _symbols(program, sizes, self.lifted.symbol, served)
            path = str(Path(scratch, "kernel.pt2"))
            inner = dict(self.options.given.get("options") or {})
            torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=inner)
            admitted = (
                _admitted(env, symbols, self.lifted.symbol, served, free) if dim is not None else Batches.of([hint])
            )
            if device >= 0 and (died := _killed(path, device)):
                raise self.refused(
                    f"what was compiled ends the process that loads it, as a try in another process showed: {died}. "
                    "compile_options={'backend': 'inductor'} compiles for CUDA"
                )
            run = _loaded(path, device)
            if keep is not None:
                keep(path, admitted)
            return run, admitted

    def _keep(self, kept: Kept, name: str, hint: int, made: str, admitted: Batches) -> None:
        """Keep a package for the next process; what is compiled serves all the same where that can't be."""
        try:
            why: object = kept.keep(name, made, admitted, hint, f"{self.lifted.name} of {self.label}")
        except OSError as error:
            why = error
        if why:
            self.report.notes.append(f"not kept for the next process: {why}")

    def _examples(self, layouts: Sequence[Layout], inputs: Sequence[Any], hint: int) -> Iterator[torch.Tensor]:
        """Tensors of the inputs' types for the batch `hint`."""
        for layout, t in zip(layouts, inputs, strict=True):
            known = layout.at({self.lifted.symbol: hint})
            sizes = [found if n is None else n for n, found in zip(known, t.shape, strict=True)]
            yield torch.empty_strided(sizes, layout.strides(sizes), dtype=t.dtype, device=t.device)

    def _dims(self, layout: Layout, dim: Any, served: Batches) -> dict[int, Any] | None:
        found = {}
        for i, size in enumerate(layout.sizes):
            if size is None:
                found[i] = torch.export.Dim.DYNAMIC  # or refused, where export would take it for a constant
            elif dim is not None and isinstance(size, Expr):
                found[i] = _linear(size, self.lifted.symbol, dim, served)
        return found or None

    def _examine(self, program: Any) -> None:
        """Refuse what native code can't do as the model does it: writes on the model, random numbers, other results."""
        plain = program.run_decompositions({})
        outputs = plain.graph_signature.output_specs
        written = next((s for s in outputs if "MUTATION" in s.kind.name), None)
        if written is not None:
            names = dict(
                zip((n.name for n in plain.graph.nodes if n.op == "placeholder"), self.lifted.arguments, strict=False)
            )
            target = names.get(written.target, written.target)
            raise self.refused(
                f"it writes into {target!r}; ahead of time only what leaves model and inputs alone is compiled"
            )
        if any(type(s.arg).__name__ != "TensorArgument" for s in outputs) or len(outputs) != len(self.lifted.results):
            raise self.refused("it returns something other than tensors")
        for node in plain.graph.nodes:
            if _draws(node):
                raise self.refused(f"it draws random numbers ({node.target})")

    def _name(
        self, layouts: Sequence[Layout], inputs: Sequence[Any], state: Sequence[Any], ambient: Any, served: Batches
    ) -> str:
        """What a package depends on, as a digest."""
        cuda = sorted({torch.cuda.get_device_name(t.device) for t in (*inputs, *state) if t.is_cuda})
        told = {
            "sources": _sources(),
            "kernel": self.lifted.kernel(marked=False, checked=True).text,
            "plan": self.plan.signature,
            "split": self.report.split_id,
            "side": self.lifted.name,
            "options": sorted((k, repr(v)) for k, v in (self.options.given.get("options") or {}).items()),
            "torch": [torch.__version__, torch.version.git_version, torch.version.cuda],
            "machine": [platform.system(), *_processor(), torch.backends.cpu.get_cpu_capability(), *cuda],
            "threads": torch.get_num_threads(),
            "settings": _inductor_settings(),
            "names": _names(self.lifted),
            "inputs": [layout.to_json() for layout in layouts],
            "state": [[str(part) for part in lies(t)] for t in state],
            "ambient": repr(ambient),
            "batches": list(served.ranges[0]),
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def _kept(self, kept: Kept, name: str, batch: int, device: int) -> tuple[Callable[..., Any], Batches] | None:
        """A package kept earlier that serves this batch, if there is one; one that is not what was written is thrown away."""
        for found in kept.trusted().named(name):
            try:
                if isinstance(found, Broken):
                    raise found.why
                if batch in found.batches:
                    run = _loaded(kept.checked(found), device)
                    found.touch()
                    return run, found.batches
            except torch.OutOfMemoryError:
                raise
            except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
                self.report.notes.append(f"{found.path} was refused, and made anew: {error}")
                if isinstance(error, (ValueError, KeyError, TypeError)):  # damage, and no want of memory or files
                    kept.drop(found)
        return None


@functools.cache
def _sources() -> str:
    """A digest of this package's code, since a package holds what it makes of a kernel."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


@functools.cache
def _processor() -> tuple[str, ...]:
    """The CPU, with every feature that it says it has: native code is compiled for just this one."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().partition("\n\n")[0].splitlines() if told.exists() else []
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return platform.machine(), platform.processor(), *(line for line in lines if line.startswith(wanted))


def _names(lifted: Lifted) -> list[list[str]]:
    """What the names in a kernel's source stand for: a plan from a file says by itself what its signature is."""
    used = set(re.findall(r"[^\W\d]\w*", "\n".join(lifted.body)))
    return [[name, _told(thing)] for name, thing in sorted(lifted.source.namespace.items()) if name in used]


def _told(thing: Any) -> str:
    """A function by where it is from, a plain value by how it is written, anything else by its type."""
    if isinstance(
        thing, (torch.dtype, torch.device, torch.layout, torch.memory_format, int, float, complex, str, bytes)
    ):
        return repr(thing)
    if isinstance(thing, torch._ops.OpOverload):
        return str(thing)
    owner = getattr(thing, "__self__", None)
    name = getattr(thing, "__qualname__", None)
    if name is None or isinstance(thing, type(None)):
        return type(thing).__qualname__
    return f"{getattr(thing, '__module__', None) or type(owner).__module__}.{name}"


def _inductor_settings() -> str:
    """A digest of inductor's settings, but for what torch 2.11 writes into them itself as it compiles a package."""
    with torch._inductor.config.patch({"aot_inductor.metadata": {}}):
        return torch._inductor.config.get_hash().hex()


def _precision() -> tuple[str, ...]:
    """How precisely float32 is multiplied, as torch's `fp32_precision` says it of each backend."""
    ask = torch._C._get_fp32_precision_getter
    return ask("cuda", "matmul"), ask("cuda", "conv"), ask("mkldnn", "matmul"), ask("mkldnn", "conv")


class _Kernel(nn.Module):
    """A kernel as a module, which is what `torch.export` takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        """Run the kernel."""
        return self.function(*args)


def _draws(node: torch.fx.Node) -> bool:
    """Whether an op of an exported program draws random numbers: one that drops out, only at a rate and while it trains."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    bound = bind(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    given = dict(zip((a.name for a in arguments), bound, strict=True))
    never = any(given.get(rate) == 0 for rate in ("dropout", "dropout_p"))
    return not never and not any(given.get(flag) is False for flag in ("train", "training"))


def _ambient() -> Any:
    """What of torch's modes decides how code is compiled: autocast, the default dtype, determinism, precision."""
    autocast = None
    if torch._C._is_any_autocast_enabled():
        autocast = tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))
    return autocast, torch.get_default_dtype(), torch._C._get_deterministic_algorithms(), _precision()


def _linear(size: Expr, symbol: str, dim: Any, served: Batches) -> Any:
    """`size` in terms of an export dim where it is `a*B + b` at every batch that is served; else a dim of its own."""
    one, two = (size.evaluate({symbol: b}) for b in (1, 2))
    a, b = two - one, 2 * one - two
    if a <= 0 or any(size.evaluate({symbol: n}) != a * n + b for n in served):
        return torch.export.Dim.AUTO
    scaled = dim if a == 1 else a * dim
    return scaled if b == 0 else scaled + b


def _symbols(
    program: Any, sizes: Sequence[Sequence[int | Expr]], batch: str, served: Batches
) -> tuple[dict[Any, Expr], list[Any], Any]:
    """What each symbol of an exported program stands for, in terms of the batch; what each size stands for that follows data; and
    the program's shape environment.

    An input has a symbol of its own for each dim that grows with the batch, or one for the batch in all of them.
    """
    found: dict[Any, Expr] = {}
    free: list[Any] = []
    env = None
    fakes = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"]
    for fake, given in zip(fakes, sizes, strict=False):
        for there, size in zip(fake.shape, given, strict=True):
            if not isinstance(there, torch.SymInt) or not isinstance(size, Expr):
                continue
            expression, env = there.node.expr, fake.fake_mode.shape_env
            if size.names != {batch}:
                free.append(expression)
                continue
            (symbol,) = expression.free_symbols if len(expression.free_symbols) == 1 else (None,)
            if expression == symbol:
                found.setdefault(symbol, size)
            elif symbol is not None and all(expression.subs(symbol, b) == size.evaluate({batch: b}) for b in served):
                found.setdefault(symbol, Expr(batch))
    return found, free, env


def _admitted(env: Any, symbols: Mapping[Any, Expr], batch: str, served: Batches, free: Sequence[Any] = ()) -> Batches:
    """The batches for which everything holds that export and inductor took for granted; `free` are sizes that follow data.

    None where they took such a size for a number, for the batch, or for another such size.
    """
    # Symbols that were found to be the same are written as one in the program, and not in the guard that says so. What one that
    # stands for a size was found to be is a condition itself: a number, where the compiler took the example's size for all.
    replaced = env.replacements if env is not None else {}
    if len({*free, *symbols}) < len(free) + len(symbols) or any(not s.is_Symbol or s in replaced for s in free):
        return Batches(())
    others = {symbol: found for symbol, found in replaced.items() if symbol not in symbols}
    conditions = [guard.expr.subs(others) for guard in env.guards] if env is not None else []
    apart = [symbol - replaced[symbol].subs(others) for symbol in symbols if symbol in replaced]
    if not symbols or any(c.free_symbols - set(symbols) for c in (*conditions, *apart)):
        return Batches(())

    def holds(b: int) -> bool:
        values = {s: size.evaluate({batch: b}) for s, size in symbols.items()}
        within = all(v <= env.var_to_range[s].upper for s, v in values.items() if s in env.var_to_range)
        return within and all(d.subs(values) == 0 for d in apart) and all(bool(c.subs(values)) for c in conditions)

    return Batches.of(b for b in served if holds(b))


_TRY = "import sys, torch; torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], 'model', False, 1, int(sys.argv[2]))"


def _killed(path: str, device: int) -> str | None:
    """How a process that loads this package dies of it, or None; an error that is raised comes up again where it is loaded.

    On the one CUDA machine where it was tried (torch 2.11, an H100), every package ended its process with a segmentation fault.
    """
    done = subprocess.run([sys.executable, "-c", _TRY, path, str(device)], capture_output=True, check=False)
    return None if done.returncode >= 0 else f"signal {-done.returncode}"


def _loaded(path: str, device: int) -> Callable[..., Any]:
    """The native code of a package, by what `torch._inductor.aoti_load_package` calls in the end.

    That imports the exporter, and runs programs to find the CPU's features, for a warning; a package's name tells them already.
    """
    loader: Any = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, device)
    run: Callable[..., Any] = loader.boxed_run
    return run
