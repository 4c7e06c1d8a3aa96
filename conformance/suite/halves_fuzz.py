"""Mutated files of halves: each is a valid safetensors container again, with lies in what it says of the half.

    python -m conformance.suite.halves_fuzz 10000 --seed 3

mutates the halves of three small nets so often, and holds what `ariadne.load` promises: it refuses with `HalfError`,
or gives a half, and
meanwhile imports nothing, opens nothing else, runs no source but what it wrote itself, and asks for no more memory
than a small file can need.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import resource
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ariadne
from ariadne.errors import AriadneError, HalfError
from ariadne.halves.weights import KEY

LIES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**62, 2**63, 2**64, 10**19, "", "x", "__import__", "exec", "import os", "a\nb", "a#b", "\u202e",
    "aten.from_file.default", "aten.set_.source_Tensor", "aten.add.out", "aten._print.default", "python.os.system", "os:system",
    "builtins:eval", "B**B**B", "9**9**9**9", "__import__('os').getpid()", "open('/etc/passwd')", "().__class__",
    "((((((((((B))))))))))",
    "math.factorial(10**9)", "torch", "cuda:99", "meta", "torch.float4", [], {}, [[]], {"ref": ["x", None]}, {"expr": "B"},
    {"float": "nan"}, {"float": "0x1p99999"}, {"device": "cpu:7"}, {"slice": [None, None, None]}, {"dict": [[1, 2]]},
)  # fmt: skip
_ALLOWED_OPEN = ("/proc/", "/sys/", "/dev/")


class Net(nn.Module):
    """Convolution, statistics, a reshape by the batch, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(self.conv(x)).relu().flatten(2)
        x = x[:, :, 1:5].reshape(x.shape[0], -1)
        return {"logits": self.head(x) * torch.tensor([1.0, 2, 3, 4, 5]), "mean": x.mean(1)}


class Tied(nn.Module):
    """One tensor under two names, a loop over the batch's size, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("turned", torch.randn(6, 6).t())

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.dropout(self.embed(ids), 0.1, self.training) @ self.turned
        return self.out(h.softmax(-1)), h.sum(1)


class Quantized(nn.Module):
    """A layer whose weights torch keeps packed, and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that another package goes on with it
            found = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear}, torch.qint8)
        self.enter, self.leave = found[0], nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.leave(self.enter(x).tanh())
        return found


def seeds(folder: Path) -> list[bytes]:
    """The files that are mutated."""
    found = []
    torch.manual_seed(0)
    nets: list[tuple[nn.Module, torch.Tensor]] = [
        (Net(), torch.randn(2, 3, 8, 8)),
        (Tied(), torch.randint(0, 11, (2, 7))),
        (Quantized(), torch.randn(2, 8)),
    ]
    for net, x in nets:
        runtime = ariadne.prepare_split(net.train(), (x,), split="50%")
        for side in ("prefix", "suffix"):
            runtime.save(folder / "seed", side=side)
            found.append((folder / "seed").read_bytes())
    return found


def opened(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """A file's header, the half in it, and its numbers."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    return header, json.loads(header["__metadata__"][KEY]), data[8 + size :]


def closed(header: dict[str, Any], half: Any, body: bytes) -> bytes:
    """A container that is valid again, whatever it says of the half."""
    text = half if isinstance(half, str) else json.dumps(half)
    raw = json.dumps({**header, "__metadata__": {KEY: text}}).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + body


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield at
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from places(child, (*at, key))


@cache
def _known(data: bytes) -> tuple[tuple[Any, ...], ...]:
    """Every place in the half of a file, but its root."""
    return tuple(places(opened(data)[1]))[1:]


def _reach(node: Any, at: tuple[Any, ...]) -> Any:
    for key in at:
        node = node[key]
    return node


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The file with one to four lies: values replaced, moved, repeated, dropped or nested; now and then in the container itself."""
    header, half, body = opened(data)
    known = _known(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.choice(known)
        try:
            (holder, key), other = (_reach(half, at[:-1]), at[-1]), _reach(half, draw.choice(known))
            was = holder[key]
        except (LookupError, TypeError):  # a lie before this one took the place away
            continue
        if isinstance(holder, str):
            continue
        what = draw.randrange(8)
        if what < 3:
            holder[key] = copy.deepcopy(draw.choice(LIES))
        elif what == 3:
            holder[key] = copy.deepcopy(other)
        elif what == 4:
            del holder[key]
        elif what == 5 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(draw.choice((was, *LIES))))
        elif what == 6 and type(was) is int:
            holder[key] += draw.choice((-1, 1, 2, 64, -64, 2**40))
        elif isinstance(was, str) and was:
            i = draw.randrange(len(was))
            holder[key] = was[:i] + draw.choice("\n\0'\"\\#;()[]{} .:*_é\u2028") + was[i + draw.randrange(2) :]
        else:
            for _ in range(draw.choice((1, 70, 3000))):
                holder[key] = [holder[key]]
            break  # what is so deep is no more walked
    try:
        text = json.dumps(half)
    except RecursionError:
        text = "[" * 100_000
    kind = draw.randrange(40)
    if kind == 0:
        text = text[: draw.randrange(len(text))]
    elif kind == 1:
        text = text.replace(str(draw.randrange(10)), draw.choice(("1e999", "NaN", "9" * 5000, "-0.5")), 1)
    made = bytearray(closed(header, text, body))
    if kind == 2:  # the container itself
        made[draw.randrange(min(len(made), 4000))] ^= 1 << draw.randrange(8)
    elif kind == 3:
        del made[draw.randrange(len(made)) :]
    return bytes(made)


class Watch:
    """What may not happen while a file is read: imports, other files, processes, sockets, code that was not written here."""

    def __init__(self) -> None:
        self.path, self.on, self.seen = "", False, ""
        sys.addaudithook(self._event)

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "import" and args[0] not in sys.modules:
            self.seen = self.seen or f"imports {args[0]}"
        elif event == "open" and not str(args[0]).startswith((self.path, *_ALLOWED_OPEN)) and args[0] != -1:
            self.seen = self.seen or f"opens {args[0]}"
        elif event.startswith(
            ("subprocess", "socket", "os.system", "os.exec", "os.spawn", "os.fork", "shutil", "ctypes.dlopen")
        ):
            self.seen = self.seen or event
        elif event == "compile" and not (args[1] is None or str(args[1]).startswith("<")):
            self.seen = self.seen or f"compiles {args[1]}"


def run(count: int, seed: int, load: Callable[..., Any] = ariadne.load) -> dict[str, int]:
    """Load so many mutated files; `AssertionError` names the first that did what it may not, and where it lies."""
    found = {"refused": 0, "loaded": 0}
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "half"
        bases = seeds(Path(folder))
        for data in bases:  # once as they are, so that what loading itself imports is there
            path.write_bytes(data)
            load(path)
        watch = Watch()
        watch.path = folder
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for i in range(count):
            draw = random.Random(f"{seed} {i}")
            data = mutated(draw.choice(bases), draw)
            path.unlink()  # to write over what is mapped takes longer than to load it
            path.write_bytes(data)
            watch.seen, watch.on, wrong = "", True, ""
            try:
                load(path)
                found["loaded"] += 1
            except HalfError:
                found["refused"] += 1
            except AriadneError as error:
                wrong = f"raises {type(error).__name__}: {error}"
            except Exception as error:
                wrong = f"raises {type(error).__name__}: {error}"
            finally:
                watch.on = False
            wrong = wrong or watch.seen
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > most + 300_000:
                wrong = wrong or "takes more than 300 MB"
            if wrong:
                kept = Path(os.environ.get("ARIADNE_FUZZ_KEEP", tempfile.gettempdir())) / f"half_{seed}_{i}.safetensors"
                kept.write_bytes(data)
                raise AssertionError(f"file {i} of seed {seed} {wrong}; it is kept in {kept}")
    return found


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("count", type=int)
    asked.add_argument("--seed", type=int, default=0)
    options = asked.parse_args()
    print(json.dumps(run(options.count, options.seed)))
