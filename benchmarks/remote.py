"""What a wire adds: the split over loopback beside the split in one process, and transports beside each other.

`python -m benchmarks.remote` prints medians; `--transports` measures sockets, pyzmq and grpcio alone, `--merged` four clients,
`--models` models whose halves compute something, `--codec` the bytes alone.
Servers are processes of their own. For transports so many bytes go there and as many come back; the suffix of the split gives few.
"""

from __future__ import annotations

import argparse
import json
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn

import ariadne
from ariadne.boundary import BoundaryPayload, decode, encode

SIZES = {"1 kB": 1 << 10, "256 kB": 1 << 18, "16 MB": 1 << 24, "256 MB": 1 << 28}


class Pass(nn.Module):
    """Sends as many bytes as it gets, and computes next to nothing between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.relu(x)[:, :2])


def timed(work: Callable[[], object], seconds: float = 1.5, least: int = 5) -> float:
    """The median time of a call, after two that don't count."""
    for _ in range(2):
        work()
    found, end = [], time.perf_counter() + seconds
    while len(found) < least or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return median(found)


def interleaved(ways: dict[str, Callable[[], object]], seconds: float, least: int = 7) -> dict[str, float]:
    """The median time of each way, one after the other in each round, so that what else the machine does meets all of them."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds * len(ways)
    while min(map(len, found.values())) < least or time.perf_counter() < end:
        for name, work in ways.items():
            work()  # which puts into the caches what this way needs
            start = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - start)
    return {name: median(times) for name, times in found.items()}


def server(code: str, *given: str) -> tuple[subprocess.Popen[str], str]:
    """A process that runs some code and says where it listens."""
    process = subprocess.Popen([sys.executable, "-c", code, *given], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


# --- transports -----------------------------------------------------------------------------------------------------

SOCKETS = """
import socket, struct
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
line, _ = listening.accept()
line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def take(n):
    data = bytearray(n); view = memoryview(data); at = 0
    while at < n:
        got = line.recv_into(view[at:])
        if not got: raise SystemExit
        at += got
    return data
while True:
    (n,) = struct.unpack("<Q", take(8))
    data = take(n)
    line.sendall(struct.pack("<Q", n)); line.sendall(data)
"""
ZMQ = """
import zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind("tcp://127.0.0.1:*")
print(socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\\0").rpartition(":")[2], flush=True)
while True:
    who, data = socket.recv_multipart(copy=False)
    socket.send(who, zmq.SNDMORE); socket.send(data, copy=False)
"""
GRPC = """
import grpc
from concurrent.futures import ThreadPoolExecutor
LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda data, _: data)
server = grpc.server(ThreadPoolExecutor(1), options=LIMITS)
server.add_generic_rpc_handlers((Handler(),))
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start(); server.wait_for_termination()
"""


def take(line: socket.socket, n: int) -> bytearray:
    data, at = bytearray(n), 0
    view = memoryview(data)
    while at < n:
        at += line.recv_into(view[at:])
    return data


def by_sockets(port: int) -> Callable[[bytes], object]:
    line = socket.create_connection(("127.0.0.1", port))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(data: bytes) -> object:
        line.sendall(struct.pack("<Q", len(data)))
        line.sendall(data)
        return take(line, struct.unpack("<Q", take(line, 8))[0])

    return call


def by_zmq(port: int) -> Callable[[bytes], object]:
    import zmq  # noqa: PLC0415 - an extra, which the rest does without

    line = zmq.Context.instance().socket(zmq.DEALER)
    line.connect(f"tcp://127.0.0.1:{port}")

    def call(data: bytes) -> object:
        line.send(data, copy=len(data) < 1 << 16)
        return line.recv(copy=False)

    return call


def by_grpc(port: int) -> Callable[[bytes], object]:
    import grpc  # noqa: PLC0415 - measured, and not depended on

    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    return grpc.insecure_channel(f"127.0.0.1:{port}", options=limits).unary_unary("/a/b")


TRANSPORTS = {"sockets": (SOCKETS, by_sockets), "pyzmq": (ZMQ, by_zmq), "grpcio": (GRPC, by_grpc)}


def transports(seconds: float) -> list[dict[str, object]]:
    """Request and reply of so many bytes each way, for each transport."""
    rows = []
    for name, (code, client) in TRANSPORTS.items():
        process, port = server(code)
        try:
            call = client(int(port))
            for size, nbytes in SIZES.items():
                took = timed(partial(call, bytes(nbytes)), seconds, 3)
                rows.append({"transport": name, "size": size, "us": 1e6 * took})
        finally:
            process.kill()
    return rows


# --- the split ------------------------------------------------------------------------------------------------------


SERVE = """
import sys
from ariadne.remote import Server, until_told
server = Server(sys.argv[1], listen="127.0.0.1:0", log=None, batch=int(sys.argv[2]))
print(server.address, *server._merger.why.values(), flush=True)
until_told(server)
"""


def split(seconds: float) -> list[dict[str, object]]:
    """The suffix here, over a line, and over a plain socket that carries the same bytes; and the plain ping of these."""
    echoes = {name: server(code) for name, (code, _) in TRANSPORTS.items() if name != "grpcio"}
    try:
        plain = {name: TRANSPORTS[name][1](int(port)) for name, (_, port) in echoes.items()}
        rows: list[dict[str, object]] = []
        for size, nbytes in SIZES.items():
            if nbytes <= 1 << 24:
                x = torch.randn(4, nbytes // 16)
                rows.append({"size": size, **_split(Pass().eval(), x, "cut:1", plain, seconds)})
        return rows
    finally:
        for process, _ in echoes.values():
            process.kill()


# Models of timm's whose halves compute something, each with a cut where some 256 kB cross.
MODELS = {
    "resnet18": "after:layer3",
    "vit_small_patch16_224": "after:blocks.5",
    "vit_tiny_patch16_224": "after:blocks.5",
    "efficientnet_b0": "after:blocks.1",
    "mobilenetv3_large_100": "after:blocks.1",
    "mobilenetv3_small_100": "after:blocks.0",
}


def models(seconds: float) -> Iterator[dict[str, object]]:
    """The same for models, each at its cut."""
    import timm  # noqa: PLC0415 - of the zoo, for this alone

    echoes = {name: server(code) for name, (code, _) in TRANSPORTS.items() if name != "grpcio"}
    try:
        plain = {name: TRANSPORTS[name][1](int(port)) for name, (_, port) in echoes.items()}
        for name, cut in MODELS.items():
            model = timm.create_model(name, pretrained=False).eval()
            found = _split(model, torch.randn(1, 3, 224, 224), cut, plain, seconds)
            yield {"model": name, "cut": cut, **found}
    finally:
        for process, _ in echoes.values():
            process.kill()


def _split(
    model: nn.Module, x: torch.Tensor, cut: str, plain: dict[str, Callable[[bytes], object]], seconds: float
) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runtime = ariadne.prepare_split(model, (x,), split=cut)
        for side in ("prefix", "suffix"):
            runtime.save(folder / side, side=side)
        edge, suffix = (ariadne.load(folder / side) for side in ("prefix", "suffix"))
        data = edge.run_prefix(x).to_bytes()
        process, address = server(SERVE, str(folder / "suffix"), "1")

        def by_socket() -> object:
            arrived = BoundaryPayload.from_bytes(plain["sockets"](edge.run_prefix(x).to_bytes()))  # type: ignore[arg-type]
            return decode(encode({}, {"y": suffix.run_suffix(arrived)}, None))

        def codec() -> object:
            arrived = BoundaryPayload.from_bytes(edge.run_prefix(x).to_bytes())
            return decode(encode({}, {"y": suffix.run_suffix(arrived)}, None))

        try:
            with ariadne.connect(address, edge) as remote:
                ways: dict[str, Callable[[], object]] = {
                    "one process": lambda: suffix.run_suffix(edge.run_prefix(x)),
                    "remote": lambda: remote.run_suffix(edge.run_prefix(x)),
                    "one process with codec": codec,
                    "socket and codec": by_socket,
                    "our ping": lambda: remote.ping(len(data)),
                    "pyzmq ping": lambda: plain["pyzmq"](data),
                    "socket ping": lambda: plain["sockets"](data),
                }
                found = interleaved(ways, seconds)
        finally:
            process.kill()
    return {
        **{f"{way} us": 1e6 * took for way, took in found.items()},
        "added us": 1e6 * (found["remote"] - found["one process"]),
        "times one process": found["remote"] / found["one process"],
        "added, in pyzmq pings": (found["remote"] - found["one process"]) / found["pyzmq ping"],
        "of socket and codec": found["socket and codec"] / found["remote"],
    }


def codec(seconds: float) -> dict[str, float]:
    """GB/s of encode and decode of 64 MB, beside a copy of as much memory."""
    x = torch.randn(1 << 24)
    data = encode({}, {"x": x}, None)
    ways: dict[str, Callable[[], object]] = {
        "encode GB/s": lambda: encode({}, {"x": x}, None),
        "decode GB/s": lambda: decode(data),
        "clone GB/s": x.clone,
    }
    return {name: x.nbytes / took / 1e9 for name, took in interleaved(ways, seconds).items()}


def merged(seconds: float) -> list[dict[str, object]]:
    """Samples a second of four clients, with boundaries run one at a time and up to eight at once."""
    rows: list[dict[str, object]] = []
    import timm  # noqa: PLC0415 - of the zoo, for this alone

    model = timm.create_model("vit_tiny_patch16_224", pretrained=False).eval()
    with tempfile.TemporaryDirectory() as name:
        folder, x = Path(name), torch.randn(1, 3, 224, 224)
        runtime = ariadne.prepare_split(model, (torch.randn(2, 3, 224, 224),), split="after:blocks.0")
        for side in ("prefix", "suffix"):
            runtime.save(folder / side, side=side)
        boundary = ariadne.load(folder / "prefix").run_prefix(x)
        servers = {batch: server(SERVE, str(folder / "suffix"), str(batch)) for batch in (1, 8)}
        rates: dict[int, list[float]] = {batch: [] for batch in servers}
        try:
            for _ in range(ROUNDS):  # one after the other, so that what else the machine does meets both
                for batch, (_, said) in servers.items():
                    rates[batch].append(_asked(said.partition(" ")[0], boundary, seconds))
            rows += [
                {"batch": batch, "samples a second": median(found), "why not": servers[batch][1].partition(" ")[2]}
                for batch, found in rates.items()
            ]
        finally:
            for process, _ in servers.values():
                process.kill()
    return rows


ROUNDS = 6


def _asked(address: str, boundary: BoundaryPayload, seconds: float) -> float:
    """How many boundaries of four clients are answered in a second; the last ones count, and the time that they take."""
    done, start = [0] * 4, time.perf_counter()
    end = start + seconds

    def client(i: int) -> None:
        with ariadne.connect(address) as remote:
            waiting = [remote.submit(boundary) for _ in range(4)]
            while time.perf_counter() < end:
                waiting.pop(0).result()
                done[i] += 1
                waiting.append(remote.submit(boundary))
            for pending in waiting:
                pending.result()
                done[i] += 1

    threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", action="store_true")
    parser.add_argument("--merged", action="store_true")
    parser.add_argument("--models", action="store_true")
    parser.add_argument("--codec", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.5)
    options = parser.parse_args()
    if options.transports:
        found: object = transports(options.seconds)
    elif options.merged:
        found = merged(options.seconds)
    elif options.models:
        found = models(options.seconds)
    elif options.codec:
        found = [codec(options.seconds)]
    else:
        found = [*split(options.seconds), codec(options.seconds)]
    for row in found:  # type: ignore[attr-defined]
        print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()
