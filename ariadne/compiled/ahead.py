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
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ariadne.compiled.builds import Build, Start, put_off, starting
from ariadne.compiled.exported import admitted, draws, linear, symbols
from ariadne.compiled.kept import Broken, Kept
from ariadne.compiled.lift import Lifted
from ariadne.compiled.modes import modes
from ariadne.compiled.named import names, processor, sources
from ariadne.compiled.package import Layout, Package, lies
from ariadne.cut import CompileOptions
from ariadne.errors import CompileError, SpecError
from ariadne.plan import Batches, Expr, TracePlan
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
        self.begun: _Lowered | None = None
        self.other: Callable[..., Any] | None = None

    def __call__(self, batch: int, *tensors: Any) -> Any:
        """Run a package that serves this batch, these tensors and the modes of the caller."""
        inputs, state = tensors[: self.split], tensors[self.split :]
        package, ambient = self.latest, modes()
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
                run = self._instead()
                return run(*tensors) if self.lifted.batch else run(batch, *tensors)
            self.latest = package
        return package(inputs, state)

    def _instead(self) -> Callable[..., Any]:
        """What runs where there is no package: what took its place, or the kernel as Python while one is begun.

        So does a side that goes to torch.compile, for what torch.compile waits for can't be put off: the other side begins first.
        """
        start = starting()
        if self.other is None or (start is not None and self.instead is not None and not start.sides):
            return self._plain()
        return self.other

    def _plain(self) -> Callable[..., Any]:
        return load(self.lifted.python(), f"{self.label}, kernel")

    def _find(self, batch: int, inputs: Sequence[Any], state: Sequence[Any], ambient: Any) -> Package | None:
        start = starting()
        with self.lock:
            if self.begun is not None and start is None:
                self._settle(inputs)
            if self.other is not None or self.begun is not None:
                return None
            for package in self.packages:
                if ambient == package.ambient and package.fits(batch, inputs) and package.follows(state):
                    return package
            return self._attempt(functools.partial(self._make, batch, inputs, state, ambient, start))

    def _attempt(self, make: Callable[[], Package | None]) -> Package | None:
        """What `make` gives, among the packages; None where it begins one, or where something else runs in its place."""
        try:
            package = make()
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
            self.other = self._plain()
            return None
        finally:
            if self.begun is None:
                self.report.reach("")
        if package is not None:
            self.report.ways[False] = "ahead of time"
            self.packages.append(package)
            self.report.batches = (*self.report.batches, str(package.batches))
        return package

    def _make(
        self, batch: int, inputs: Sequence[Any], state: Sequence[Any], ambient: Any, start: Start | None
    ) -> Package | None:
        """A package, loaded or compiled; or one is begun, with the other side of the split."""
        if len(self.packages) == MOST_PACKAGES:
            raise self.refused(f"{MOST_PACKAGES} packages were made for it, and none serves these tensors")
        if start is None:
            with tempfile.TemporaryDirectory() as scratch:
                found = self._lowered(batch, inputs, state, ambient, Path(scratch), apart=False)
                return found if isinstance(found, Package) else self._finished(found)
        found = self._lowered(batch, inputs, state, ambient, start.folder(), apart=True)
        if isinstance(found, Package) or found.build is None:
            return found if isinstance(found, Package) else self._finished(found)
        start.sides.append(self)  # first, so that an interruption from here on ends it
        self.begun = replace(found, again=functools.partial(self._make, batch, inputs, state, ambient, None))
        self.report.reach("C++")
        found.build.start(lambda: self.report.reach("built"))
        return None

    def settle(self) -> None:
        """Wait for the package that was begun, if there is one; raises what making it raises."""
        with self.lock:
            if self.begun is not None:
                self._settle(None)

    def _settle(self, inputs: Sequence[Any] | None) -> None:
        begun = self.begun
        assert begun is not None
        assert begun.build is not None
        try:
            # The other side's kernel stood in as Python. Where native code lays out otherwise what it gives, a package for what
            # Python gave is not the one that is made without it: each call would copy, and the next process would not find it.
            mine = inputs is not None and threading.get_ident() == begun.thread
            if not mine or all(map(Layout.equals, begun.layouts, inputs or ())):
                self._attempt(functools.partial(self._built, begun))
        finally:
            self.drop()

    def _built(self, begun: _Lowered) -> Package | None:
        """The package that was begun; or, where its build fails, one made as torch does it, which may fail in torch's own words."""
        try:
            return self._finished(begun)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            assert begun.again is not None
            package = begun.again()
            self._note_retry(error)
            return package

    def _note_retry(self, why: Exception) -> None:
        self.report.notes.append(f"built again, on its own: {type(why).__name__}: {' '.join(str(why).split())}"[:300])

    def drop(self) -> None:
        """End what was begun, if there is something."""
        if self.begun is not None and self.begun.build is not None:
            self.begun.build.stop()
        self.begun = None
        self.report.reach("")

    def _lowered(self, batch: int, inputs: Sequence[Any], state: Sequence[Any], ambient: Any, scratch: Path, *,
                 apart: bool) -> Package | _Lowered:  # fmt: skip
        """A package that was kept, or the kernel as torch lowers it; `apart` from its build, where that can be put off."""
        began = time.perf_counter()
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
        self.report.reach("loading")
        name = self._name(layouts, inputs, state, ambient, served)
        device = self._device((*inputs, *state))
        made = functools.partial(Package, symbol=self.lifted.symbol, inputs=layouts, state=state, ambient=ambient)
        kept = None if self.plan.objects else self.kept  # the code of Python objects is in no digest
        found = None if kept is None else self._kept(kept, name, batch, device)
        if found is not None:
            self.report.loaded += 1
            self.report.state = "loaded"
            self.report.began_loaded |= not self.packages
            self.report.seconds += time.perf_counter() - began
            return made(*found)
        self.report.reach("lowering")
        keep = None if kept is None else functools.partial(self._keep, kept, name, hint)
        path = str(scratch / "kernel.pt2")
        admitted, build = self._lower(
            layouts, inputs, state, served, hint, path, scratch if apart and device < 0 else None
        )
        if batch not in admitted:
            raise self.refused(f"what was compiled does not serve batch {batch}, but {admitted}")
        seconds = time.perf_counter() - began
        return _Lowered(path, admitted, made, layouts, device, keep, build, seconds, threading.get_ident())

    def _finished(self, lowered: _Lowered) -> Package:
        """The package of what was lowered: built by now, kept, and loaded."""
        built = 0.0 if lowered.build is None else lowered.build.finish()
        began = time.perf_counter()
        self.report.reach("loading")
        if lowered.device >= 0 and (died := _killed(lowered.path, lowered.device)):
            raise self.refused(
                f"what was compiled ends the process that loads it, as a try in another process showed: {died}. "
                "compile_options={'backend': 'inductor'} compiles for CUDA"
            )
        run = _loaded(lowered.path, lowered.device)
        if lowered.keep is not None:
            lowered.keep(lowered.path, lowered.admitted)
        self.report.compiled[False] += 1
        self.report.state = "compiled"
        self.report.seconds += lowered.seconds + built + time.perf_counter() - began
        return lowered.made(run, lowered.admitted)

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

    def _lower(self, layouts: Sequence[Layout], inputs: Sequence[Any], state: Sequence[Any], served: Batches, hint: int,
               path: str, apart: Path | None) -> tuple[Batches, Build | None]:  # fmt: skip
        """Write the package to `path`, and tell which batches it serves; what is left to build it where that is done `apart`."""
        (lo, hi) = served.ranges[0]
        examples = [*self._examples(layouts, inputs, hint), *(t.detach() for t in state)]
        dim = torch.export.Dim(self.lifted.symbol, min=lo, max=hi) if lo < hi else None
        dims = [self._dims(layout, dim, served) for layout in layouts] + [None] * len(state)
        with self.setting(), torch.no_grad():
            kernel = _Kernel(load(self.lifted.kernel(marked=False, checked=True), f"{self.label}, kernel"))
            program = torch.export.export(kernel, tuple(examples), dynamic_shapes={"args": tuple(dims)}, strict=False)
            self._examine(program)
            sizes = [self.lifted.sizes[n] for n in self.lifted.inputs]
            stand_for, free, env = symbols(program, sizes, self.lifted.symbol, served)
            build = self._packaged(program, path, apart)
            if dim is None:
                return Batches.of([hint]), build
            return admitted(env, stand_for, self.lifted.symbol, served, free), build

    def _packaged(self, program: Any, path: str, apart: Path | None) -> Build | None:
        """Write the package of a program; or, apart, do so up to its C++, which is left."""
        inner = dict(self.options.given.get("options") or {})
        why: Exception | None = None
        if apart is not None:
            try:
                with put_off(apart) as build:
                    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs={**inner})
                return build if build.whole() else None
            except MemoryError:
                raise
            except Exception as error:  # as torch does it, it may go well, or fail in its own words
                why = error
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=inner)
        if why is not None:
            self._note_retry(why)
        return None

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
                found[i] = linear(size, self.lifted.symbol, dim, served)
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
            if draws(node):
                raise self.refused(f"it draws random numbers ({node.target})")

    def _name(
        self, layouts: Sequence[Layout], inputs: Sequence[Any], state: Sequence[Any], ambient: Any, served: Batches
    ) -> str:
        """What a package depends on, as a digest."""
        cuda = sorted({torch.cuda.get_device_name(t.device) for t in (*inputs, *state) if t.is_cuda})
        told = {
            "sources": sources(),
            "kernel": self.lifted.kernel(marked=False, checked=True).text,
            "plan": self.plan.signature,
            "split": self.report.split_id,
            "side": self.lifted.name,
            "options": sorted((k, repr(v)) for k, v in (self.options.given.get("options") or {}).items()),
            "torch": [torch.__version__, torch.version.git_version, torch.version.cuda],
            "machine": [platform.system(), *processor(), torch.backends.cpu.get_cpu_capability(), *cuda],
            "threads": torch.get_num_threads(),
            "settings": _inductor_settings(),
            "names": names(self.lifted),
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


@dataclass(frozen=True)
class _Lowered:
    """A kernel that torch has lowered, for the package at `path`; `build` is what is left of that, None where it is there.

    `thread` called, for `layouts` of inputs, and waited for `seconds`; `again` makes the package on its own.
    """

    path: str
    admitted: Batches
    made: Callable[..., Package]
    layouts: tuple[Layout, ...]
    device: int
    keep: Callable[[str, Batches], None] | None
    build: Build | None
    seconds: float
    thread: int
    again: Callable[[], Package | None] | None = None


def _inductor_settings() -> str:
    """A digest of inductor's settings, but for what torch 2.11 writes into them itself as it compiles a package."""
    with torch._inductor.config.patch({"aot_inductor.metadata": {}}):
        return torch._inductor.config.get_hash().hex()


class _Kernel(nn.Module):
    """A kernel as a module, which is what `torch.export` takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        """Run the kernel."""
        return self.function(*args)


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
