"""The variants by name: which tasks and devices each is for, and what it costs at the start.

Imports neither torch nor ariadne: the runner needs the names only. The builders are found where they are run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EAGER, NOISE, REFERENCE = "model", "model again", "reference"
COMPILE, AHEAD, DEFAULT = "torch.compile", "ahead of time", "compiled by default"
HANDED = "compiled reduce-overhead fixed, no copies"


@dataclass(frozen=True)
class Variant:
    """A way to run a model: `builder` is "module:function", called with the subject, the batch and the options.

    `start`: its first calls cost something, so that break-even is asked for; `caches`: and less with a kept cache.
    `each_batch`: it is built anew for each batch. `imports`: what it has to import, in order.
    """

    name: str
    about: str
    builder: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] = ("inference", "training")
    start: bool = False
    caches: bool = False
    cuda: bool = False
    each_batch: bool = False
    imports: tuple[str, ...] = ("torch",)

    def refusal(self, task: str, device: str) -> str | None:
        """Why it is not measured for this task on this device, or None."""
        if task not in self.tasks:
            return f"{self.name} is not for {task}"
        if self.cuda and not device.startswith("cuda"):
            return f"{self.name} is for CUDA; the device is {device}"
        if self.caches and not has_compiler():
            return f"{self.name} takes a C++ compiler; there is no {_compiler()}"
        return None


def has_compiler() -> bool:
    """Whether there is a C++ compiler where torch's inductor looks for one."""
    return shutil.which(_compiler()) is not None


def _compiler() -> str:
    """The command that torch's inductor compiles C++ with."""
    given = shlex.split(os.environ.get("CXX", ""))
    return given[0] if given else "clang++" if sys.platform == "darwin" else "g++"


OURS = ("torch", "ariadne")
ALL = (
    Variant(EAGER, "model(x)", "benchmarks.competitors:eager", start=True),
    Variant(
        COMPILE,
        "torch.compile(model)",
        "benchmarks.competitors:compiled_model",
        start=True,
        caches=True,
    ),
    Variant(
        "torch.compile reduce-overhead",
        'torch.compile(model, mode="reduce-overhead")',
        "benchmarks.competitors:compiled_model",
        {"mode": "reduce-overhead"},
        cuda=True,
        start=True,
        caches=True,
    ),
    Variant("torch.export", "torch.export, .module()", "benchmarks.competitors:exported", tasks=("inference",)),
    Variant("fx split_module", "FX symbolic_trace and split_module", "benchmarks.competitors:halves_of_fx"),
    Variant(
        "pipelining",
        "torch.distributed.pipelining, two stages in one process",
        "benchmarks.competitors:pipelined",
        tasks=("inference",),
        each_batch=True,
    ),
    Variant(
        REFERENCE,
        "ariadne-split from PyPI, generated_eager",
        "benchmarks.splits:split",
        tasks=("inference",),
        start=True,
        imports=OURS,
    ),
    Variant("debug", "the split, debug_interpreter", "benchmarks.splits:split", {"mode": "debug_interpreter"}, imports=OURS),
    Variant("generated", "the split, generated_eager", "benchmarks.splits:split", start=True, imports=OURS),
    Variant(
        "compiled",
        "the split, compiled",
        "benchmarks.splits:split",
        {"mode": "compiled", "compile_options": {"backend": "inductor"}},
        start=True,
        caches=True,
        imports=OURS,
    ),
    Variant(
        DEFAULT,
        'the split, mode="compiled" without options',
        "benchmarks.splits:split",
        {"mode": "compiled"},
        start=True,
        caches=True,
        imports=OURS,
    ),
    Variant(
        "compiled reduce-overhead",
        "the split, compiled with CUDA graphs",
        "benchmarks.splits:split",
        {"mode": "compiled", "compile_options": {"mode": "reduce-overhead"}},
        start=True,
        caches=True,
        cuda=True,
        imports=OURS,
    ),
    Variant(
        "compiled fixed",
        "the split, compiled anew for each batch",
        "benchmarks.splits:split",
        {"mode": "compiled", "compile_options": {"dynamic": False}},
        start=True,
        caches=True,
        cuda=True,
        imports=OURS,
    ),
    Variant(
        "compiled reduce-overhead fixed",
        "the split, compiled anew for each batch, with CUDA graphs",
        "benchmarks.splits:split",
        {"mode": "compiled", "compile_options": {"mode": "reduce-overhead", "dynamic": False}},
        start=True,
        caches=True,
        cuda=True,
        imports=OURS,
    ),
    Variant(
        "CUDA graphs",
        "the split, CUDA graphs of eager code",
        "benchmarks.splits:split",
        {"mode": "compiled", "compile_options": {"backend": "cudagraphs"}},
        tasks=("inference",),
        start=True,
        cuda=True,
        imports=OURS,
    ),
    Variant(
        HANDED,
        "the same, with boundary and output left where the graphs wrote them",
        "benchmarks.splits:handed_over",
        {"compile_options": {"mode": "reduce-overhead", "dynamic": False}},
        tasks=("inference",),
        cuda=True,
        imports=OURS,
    ),
    Variant(
        AHEAD,
        "the split, compiled by AOTInductor",
        "benchmarks.splits:ahead_of_time",
        tasks=("inference",),
        start=True,
        caches=True,
        imports=OURS,
    ),
)  # fmt: skip
BY_NAME = {v.name: v for v in ALL}
SHORT = {
    "model": EAGER,
    "compile": COMPILE,
    "reduce-overhead": "torch.compile reduce-overhead",
    "export": "torch.export",
    "split_module": "fx split_module",
    "pipelining": "pipelining",
    "reference": REFERENCE,
    "debug": "debug",
    "generated": "generated",
    "compiled": "compiled",
    "default": DEFAULT,
    "compiled-reduce-overhead": "compiled reduce-overhead",
    "fixed": "compiled fixed",
    "reduce-overhead-fixed": "compiled reduce-overhead fixed",
    "graphs": "CUDA graphs",
    "no-copies": HANDED,
    "aot": AHEAD,
}


def find(name: str) -> Variant:
    """The variant of this name, or of its short form ("compile", "aot"); ValueError lists the names."""
    full = SHORT.get(name, name)
    if full not in BY_NAME:
        raise ValueError(f"no variant named {name!r}; there are {', '.join(SHORT)}")
    return BY_NAME[full]
