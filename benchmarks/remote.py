"""What a wire adds: the split over loopback beside the split in one process, and transports beside each other.

`python -m benchmarks.remote` prints medians; `--transports` measures sockets, pyzmq and grpcio alone, `--merged` four clients.
Servers are processes of their own; bytes go there and the same number comes back, as the boundary of a suffix that changes no size does.
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
from collections.abc import Callable
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
                data = bytes(nbytes)
                rows.append({"transport": name, "size": size, "us": 1e6 * timed(lambda d=data: call(d), seconds, 3)})  # type: ignore[misc]
        finally:
            process.kill()
    return rows


# --- the split ------------------------------------------------------------------------------------------------------


def split(seconds: float) -> list[dict[str, object]]:
    """The suffix here, from bytes here, over a line, and over a plain socket that carries the same bytes."""
    rows: list[dict[str, object]] = []
    echo, port = server(SOCKETS)
    plain = by_sockets(int(port))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size, nbytes in SIZES.items():
            if nbytes > 1 << 24:
                continue
            x = torch.randn(4, nbytes // 16)
            runtime = ariadne.prepare_split(Pass().eval(), (x,), split="cut:1")
            for side in ("prefix", "suffix"):
                runtime.save(folder / side, side=side)
            edge, suffix = (ariadne.load(folder / side) for side in ("prefix", "suffix"))
            code = "import sys; from ariadne.remote import *\ns = Server(sys.argv[1], listen='127.0.0.1:0', log=None)\nprint(s.address, flush=True)\nuntil_told(s)"
            process, address = server(code, str(folder / "suffix"))
            try:
                with ariadne.connect(address, edge) as remote:

                    def by_socket() -> object:
                        arrived = BoundaryPayload.from_bytes(plain(edge.run_prefix(x).to_bytes()))
                        return decode(encode({}, {"y": suffix.run_suffix(arrived)}, None))

                    rows.append(
                        {
                            "size": size,
                            "one process us": 1e6 * timed(lambda: suffix.run_suffix(edge.run_prefix(x)), seconds),
                            "remote us": 1e6 * timed(lambda: remote.run_suffix(edge.run_prefix(x)), seconds),
                            "socket and codec us": 1e6 * timed(by_socket, seconds),
                            "line alone us": 1e6 * timed(lambda: remote.ping(nbytes), seconds),
                        }
                    )
            finally:
                process.kill()
    echo.kill()
    return rows


def codec(seconds: float) -> dict[str, float]:
    """GB/s of encode and decode of 64 MB."""
    x = torch.randn(1 << 24)
    data = encode({}, {"x": x}, None)
    return {
        "encode GB/s": x.nbytes / timed(lambda: encode({}, {"x": x}, None), seconds) / 1e9,
        "decode GB/s": x.nbytes / timed(lambda: decode(data), seconds) / 1e9,
    }


def merged(seconds: float) -> list[dict[str, object]]:
    """Samples a second of four clients, with boundaries run one at a time and up to eight at once."""
    rows: list[dict[str, object]] = []
    block = nn.TransformerEncoderLayer(192, 3, 768, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Linear(192, 192), nn.TransformerEncoder(block, 6, enable_nested_tensor=False), nn.Linear(192, 100)).eval()
    with tempfile.TemporaryDirectory() as name:
        folder, x = Path(name), torch.randn(1, 197, 192)
        runtime = ariadne.prepare_split(model, (torch.randn(2, 197, 192),), split="after:0")
        for side in ("prefix", "suffix"):
            runtime.save(folder / side, side=side)
        edge = ariadne.load(folder / "prefix")
        for batch in (1, 8):
            code = (
                "import sys; from ariadne.remote import *\n"
                f"s = Server(sys.argv[1], listen='127.0.0.1:0', log=None, batch={batch})\n"
                "print(s.address, *s._merger.why.values(), flush=True)\nuntil_told(s)"
            )
            process, said = server(code, str(folder / "suffix"))
            address, _, why = said.partition(" ")
            try:
                boundary, done, end = edge.run_prefix(x), [0] * 4, time.perf_counter() + 4 * seconds

                def client(i: int, address: str = address, end: float = end, done: list[int] = done) -> None:
                    with ariadne.connect(address) as remote:
                        waiting = [remote.submit(boundary) for _ in range(4)]
                        while time.perf_counter() < end:
                            waiting.pop(0).result()
                            done[i] += 1
                            waiting.append(remote.submit(boundary))

                threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                rows.append({"batch": batch, "samples a second": sum(done) / (4 * seconds), "why not": why})
            finally:
                process.kill()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", action="store_true")
    parser.add_argument("--merged", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.5)
    options = parser.parse_args()
    if options.transports:
        found: object = transports(options.seconds)
    elif options.merged:
        found = merged(options.seconds)
    else:
        found = [*split(options.seconds), codec(options.seconds)]
    for row in found:  # type: ignore[attr-defined]
        print(json.dumps({k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}))


if __name__ == "__main__":
    main()
