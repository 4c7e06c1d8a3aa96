"""What an edge with a half's file needs: seconds to the first result, memory, and the size of the file.

`python -m benchmarks.halves` prints a line of JSON for each half; `--half NAME` takes some of them, `--times N` so many
processes of each kind. Each figure is of processes of their own, the kinds in turn, and the median of them. Seconds begin
when torch is imported, and end with the first result. Memory is what is resident after it, less what a process of torch alone
has, which maps the same weights and runs the same ops, and has no Ariadne; the weights are added again, for torch alone must
hold them too. `unread` is a file that was put out of the operating system's memory before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import ariadne
import model_zoo
from ariadne.segment import emit

TABLE = (
    "half", "file bytes", "weights bytes", "file over weights", "seconds", "cpu seconds", "unread seconds",
    "MB beyond torch", "weights MB", "of the weights", "peak MB beyond torch", "MB of it in files", "MB of it Python's",
)  # fmt: skip
COMMON = """
import json, os, sys, time
import torch
torch.set_num_threads(1)
def told(start, cpu):
    status = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
    kb = {k: int(status[k].split()[0]) for k in ("VmRSS", "VmHWM", "RssAnon", "RssFile")}
    print(json.dumps({"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu, **kb}))
given = json.loads(open(sys.argv[1]).read())
inputs = torch.load(given["inputs"])
"""
EDGE = """
start, cpu = time.perf_counter(), time.process_time()
import ariadne
half = ariadne.load(given["half"])
half.run_prefix(*inputs)
told(start, cpu)
"""
ALONE = """
start, cpu = time.perf_counter(), time.process_time()
storage = torch.UntypedStorage.from_file(given["half"], False, os.path.getsize(given["half"]))
def tensor(at, dtype, shape):
    dtype = getattr(torch, dtype)
    flat = torch.empty(0, dtype=dtype).set_(storage, at // dtype.itemsize, torch.Size(shape))
    return flat if at % 64 == 0 else flat.clone()
names = {name: eval(how, {"torch": torch}) for name, how in given["functions"].items()}
for name, tensors in given["tables"].items():
    names[name] = {key: tensor(*where) for key, where in tensors.items()}
exec(given["text"], names)
with torch.no_grad():
    names["prefix"](len(inputs[0]), *inputs)
told(start, cpu)
"""


def large() -> tuple[nn.Module, tuple[torch.Tensor, ...], str]:
    """A model whose first half has 1 GB of weights: sixteen layers of 64 MB, drawn from a seed."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(16)), nn.Linear(4096, 10))
    model = model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.03, 0.03)
    return model, (torch.randn(2, 4096),), "after:15"


def of_zoo(name: str) -> Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...], str]]:
    """A model of the zoo, cut in its middle."""

    def made() -> tuple[nn.Module, tuple[torch.Tensor, ...], str]:
        torch.manual_seed(0)
        entry = model_zoo.entry(name)
        args, kwargs = entry.inputs(2, seed=0)
        assert not kwargs
        return entry.build().eval(), args, "50%"

    return made


HALVES = {
    "resnet18": of_zoo("torchvision/resnet18"),
    "vit_b_16": of_zoo("torchvision/vit_b_16"),
    "1 GB": large,
}


def write(name: str, folder: Path) -> int:
    """Write the half of a model, and what a process of torch alone needs to do the same; returns the bytes of its weights."""
    model, args, cut = HALVES[name]()
    runtime = ariadne.prepare_split(model, args, split=cut)
    path = folder / "half"
    runtime.save(path, side="prefix")
    torch.save(args, folder / "inputs")
    half = ariadne.load(path)
    variant = half._exportable()
    source = emit(variant.plan, variant.parts["prefix"], half._root)
    told: dict[str, Any] = {"half": str(path), "inputs": str(folder / "inputs"), "text": source.text}
    tensors = {id(t): n for n, t in half.state_dict(keep_vars=True).items()}
    places = {n: [at, dtype, shape] for n, at, dtype, shape in header(path)}
    used = {word for word in source.namespace if word in source.text}
    tables = {n: v for n, v in source.namespace.items() if n in used and type(v) is dict and v}
    told["tables"] = {
        n: {k: places[tensors[id(t)]] for k, t in v.items() if id(t) in tensors} for n, v in tables.items()
    }
    told["functions"] = {n: named(f) for n, f in source.namespace.items() if n in used - tables.keys() and callable(f)}
    (folder / "told").write_text(json.dumps(told))
    return sum(t.nbytes for t in {id(t): t for t in (*half.parameters(), *half.buffers())}.values())


def header(path: Path) -> Iterator[tuple[str, int, str, list[int]]]:
    """The tensors of a safetensors file: name, where it begins, dtype, shape."""
    data = path.read_bytes() if path.stat().st_size < 1 << 20 else path.open("rb").read(1 << 20)
    size = int.from_bytes(data[:8], "little")
    for name, about in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            dtype = {"F32": "float32", "I64": "int64", "BF16": "bfloat16", "F16": "float16"}[about["dtype"]]
            yield name, 8 + size + about["data_offsets"][0], dtype, about["shape"]


def named(function: Any) -> str:
    """Where torch has a function."""
    for where in ("torch", "torch.nn.functional", "torch._C._nn", "torch._VF"):
        module = eval(where)
        for name in {getattr(function, key, "") for key in ("__name__", "__qualname__")} - {""}:
            if getattr(module, name, None) is function:
                return f"{where}.{name}"
    return "None"  # it is not called here, or the process of torch alone ends with an error


def asked(code: str, folder: Path) -> dict[str, float]:
    """What a process says of itself."""
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code, str(folder / "told")], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def forget(path: Path) -> None:
    """Put a file out of the operating system's memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(name: str, times: int) -> dict[str, Any]:
    """One half's row."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        weights = write(name, folder)
        size = (folder / "half").stat().st_size
        rounds: list[tuple[dict[str, float], dict[str, float], dict[str, float]]] = []
        for _ in range(times + 1):  # the first brings files into memory, and does not count
            forget(folder / "half")
            rounds.append((asked(EDGE, folder), asked(EDGE, folder), asked(ALONE, folder)))
    cold, edge, alone = (
        {k: median(each[i][k] for each in rounds[1:]) for k in rounds[0][i]} for i in range(3)
    )  # fmt: skip
    beyond = edge["VmRSS"] * 1024 - alone["VmRSS"] * 1024 + weights
    peak = edge["VmHWM"] * 1024 - alone["VmRSS"] * 1024 + weights
    parts = {k: (edge[k] - alone[k]) * 1024 / 1e6 for k in ("RssFile", "RssAnon")}
    row = (
        name, size, weights, round(size / weights, 4), round(edge["seconds"], 3), round(edge["cpu"], 3),
        round(cold["seconds"], 3), round(beyond / 1e6, 1), round(weights / 1e6, 1), round(beyond / weights, 3),
        round(peak / 1e6, 1), round(parts["RssFile"], 1), round(parts["RssAnon"], 1),
    )  # fmt: skip
    return dict(zip(TABLE, row, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", action="append", choices=[*HALVES])
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    for name in options.half or HALVES:
        print(json.dumps(measure(name, options.times)), flush=True)


if __name__ == "__main__":
    main()
