"""Mutated messages against running servers, with silent and slow peers beside: they go on serving, and take no more memory.

    python -m conformance.suite.remote_fuzz 1000000 --seed 3

sends so many to three servers in processes of their own: of a suffix for inference, of one that is trained, and of a part between
two cuts. Messages are those of real clients with one to four lies: bytes flipped, cut off or repeated, values of headers
replaced, frames dropped, doubled or swapped; checksums are made good again for half of them. Each gets a reply, or none
where it asked for none; each reply is plain data; and between them a true client gets the whole model's bits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zmq
from torch import nn

import ariadne
from ariadne import errors
from ariadne.remote import Edge, Server, calls, link, until_told
from conformance.suite.remote_faults import fork, free_port

LIES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 2**31, 2**63, 2**64, 1.5, -0.0, 1e308, "", "x", "run", "hello", "../x", "0" * 32, "\0",
    "\ud800", [], {}, [[]], [1], {"a": 1}, [["cpu", "bfloat16", True]], [["cpu", "float99", True]], "9" * 400,
)  # fmt: skip
EVERY, WINDOW, STRANGERS, CLIENTS = 2000, 8, 40, 200
MOST = 200 << 10  # kB by which a server may grow
SILENT = ("cancel",)  # ops without a reply
PATIENCE = 60.0
Frames = list[bytes]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def prepare(folder: Path) -> None:
    """The files of all sides; in a process of its own, since autograd's threads don't go through a fork."""
    x = torch.randn(3, 6)
    for name, model in (("eval", net().eval()), ("train", net().train())):
        runtime = ariadne.prepare_split(model, (x,), split="after:1")
        for side in ("prefix", "suffix"):
            runtime.save(folder / f"{name} {side}", side=side)
    pipeline = ariadne.prepare_pipeline(net().train(), (x,), boundaries=["after:1", "after:3"])
    for i in range(3):
        pipeline.save_part(i, folder / f"part{i}")


def serve(half: Path, port: int, options: dict[str, Any]) -> None:
    """One server."""
    until_told(Server(half, listen=f"127.0.0.1:{port}", log=None, **options))


def record(folder: Path, addresses: list[str], out: Path) -> None:
    """What real clients send to the servers, as frames."""
    sent: list[list[list[str]]] = [[], [], []]
    send, which = link.Line.send, 0

    def noted(self: link.Line, frames: Any, until: float) -> bool:
        sent[which].append([bytes(f).hex() for f in frames])
        return send(self, frames, until)

    link.Line.send = noted  # type: ignore[method-assign]
    x, y = torch.randn(3, 6), torch.randint(0, 4, (3,))
    edge = ariadne.load(folder / "eval prefix")
    with ariadne.connect(addresses[0], edge, timeout=PATIENCE) as remote:
        remote.run_suffix(edge.run_prefix(x))
        remote.submit(edge.run_prefix(x)).cancel()
        remote.ping(100)
    which, edge = 1, ariadne.load(folder / "train prefix")
    optimizer, scaler = torch.optim.SGD(edge.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    with ariadne.connect(addresses[1], edge, timeout=PATIENCE) as remote:
        remote.train_step(x, targets=y, optimizer=optimizer)
        remote.train_step(x, targets=y, optimizer=optimizer, scaler=scaler, max_norm=1.0)
        remote.schedule()
        remote.save()
    which = 2
    with ariadne.connect(addresses[2], timeout=PATIENCE) as remote:
        three = Edge(folder / "part0", remote, folder / "part2")
        three.train_step(
            x, targets=y, loss_fn=nn.functional.cross_entropy, optimizer=torch.optim.SGD(three.parameters())
        )
        remote.save()
    out.write_text(json.dumps(sent))


def sealed(body: bytes) -> bytes:
    """A payload whose length and checksum are right again."""
    if len(body) < 24:
        return body
    return body[:12] + struct.pack("<IQ", zlib.crc32(body[24:]), len(body) - 24) + body[24:]


def lied(header: bytes, draw: random.Random) -> bytes:
    """A header with a value replaced, dropped or added."""
    try:
        told = json.loads(header)
        key = draw.choice([*told])
    except (ValueError, IndexError, TypeError):
        return header
    if draw.random() < 0.2:
        del told[key]
    else:
        told[draw.choice((key, key, key, "seconds", "have", "autocast"))] = draw.choice(LIES)
    return json.dumps(told).encode()


def mutated(frames: Frames, draw: random.Random) -> Frames:
    """A message with one to four lies."""
    found = [*frames]
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(found))
        kind = draw.randrange(8)
        if kind < 3:
            found[0] = lied(found[0], draw)
        elif kind < 6:
            data = bytearray(found[at])
            for _ in range(draw.randint(1, 3)):
                if data:
                    data[draw.randrange(len(data))] = draw.choice((0, 1, 255, draw.randrange(256)))
            found[at] = sealed(bytes(data)) if at and draw.random() < 0.7 else bytes(data)
        elif kind == 6:
            found[at] = found[at][: draw.randrange(len(found[at]) + 1)]
            found[at] = sealed(found[at]) if draw.random() < 0.5 else found[at]
        else:
            found = draw.choice(([*found, found[at]], found[:at] + found[at + 1 :] or found, found[::-1], found * 3))
    return found


class Peer:
    """One connection that sends mutated messages, a few of them without a reply yet."""

    def __init__(self, address: str, seeds: list[Frames]) -> None:
        self.address, self.seeds, self.waiting, self.number = address, seeds, 0, 1
        self.line: Any = zmq.Context.instance().socket(zmq.DEALER)
        self.line.setsockopt(zmq.LINGER, 0)
        self.line.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE))
        self.line.connect(f"tcp://{address}")

    def send(self, draw: random.Random, told: Counter[str]) -> None:
        """Send a message, once there is room for its reply."""
        frames = self.seeds[draw.randrange(len(self.seeds))]
        if (
            b'"number"' in frames[0] and draw.random() < 0.8
        ):  # the next of the run, so that more than its number is looked at
            header = json.loads(frames[0])
            frames = [json.dumps({**header, "number": self.number, "have": self.number - 1}).encode(), *frames[1:]]
        if draw.random() < 0.9:
            frames = mutated(frames, draw)
        silent = is_silent(frames)
        self.drain(told, 0 if silent else WINDOW - 1)  # what waits may be cancelled, and then has no reply
        self.line.send_multipart(frames)
        self.waiting += not silent

    def drain(self, told: Counter[str], most: int) -> None:
        """Take replies until no more than so many are awaited."""
        while self.waiting > most:
            self.take(told)
            self.waiting -= 1

    def take(self, told: Counter[str]) -> None:
        """Take a reply, and look whether it is one."""
        try:
            header = json.loads(self.line.recv_multipart()[0])
        except zmq.Again:
            raise AssertionError(f"the server at {self.address} has gone silent") from None
        known = getattr(errors, str(header.get("error")), None) if header["ok"] is False else errors.AriadneError
        assert isinstance(known, type), header
        assert issubclass(known, errors.AriadneError), header
        at = header.get("at", header.get("trains", {}).get("at"))
        if at is not None:
            self.number = at + 1
        elif header.get("done") or (header["ok"] and "bytes" not in header):
            self.number += 1
        what = "answered" if header["ok"] else header["error"]
        if str(header.get("words", "")).startswith("on the server: "):
            what = header["words"].removeprefix("on the server: ")[:60]
        told[what] += 1


def is_silent(frames: Frames) -> bool:
    """Whether a server gives no reply to it: a well-formed cancellation."""
    try:
        told = json.loads(frames[0].decode()) if 1 <= len(frames) <= 4 and len(frames[0]) <= 1 << 16 else None
    except (ValueError, RecursionError):
        return False
    seconds = told.get("seconds") if type(told) is dict else None
    timely = seconds is None or (type(seconds) in (int, float) and 0 <= seconds < 1e9)
    return type(told) is dict and told.get("op") in SILENT and timely


def memory(pid: int) -> int:
    """kB of a process."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0])


class Strangers:
    """Connections that say nothing, or a byte now and then."""

    def __init__(self, ports: list[int], draw: random.Random) -> None:
        self.ports, self.draw, self.lines = ports, draw, list[socket.socket]()

    def turn(self) -> None:
        """Some hang up, others come, some babble."""
        while len(self.lines) < STRANGERS:
            self.lines.append(socket.create_connection(("127.0.0.1", self.draw.choice(self.ports)), timeout=PATIENCE))
        for line in self.draw.sample(self.lines, STRANGERS // 4):
            try:
                line.sendall(self.draw.randbytes(self.draw.choice((1, 1, 10, 3000))))
            except OSError:  # it was hung up on
                line.close()
                self.lines.remove(line)
        for line in self.draw.sample(self.lines, 3):
            line.close()
            self.lines.remove(line)

    def close(self) -> None:
        for line in self.lines:
            line.close()


def run(count: int, seed: int, server: Callable[..., None] = serve) -> dict[str, Any]:
    """Send so many; `AssertionError` says what a server did that it may not."""
    calls.FIRST = PATIENCE
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        assert not os.waitpid(fork(prepare, folder), 0)[1]
        trains = {"optimizer": "sgd:lr=0.001", "scheduler": "steplr:step_size=5"}
        plans: list[tuple[str, dict[str, Any]]] = [
            ("eval suffix", {}),
            ("train suffix", {**trains, "loss_fn": "cross_entropy", "checkpoints": folder / "runs 1"}),
            ("part1", {**trains, "checkpoints": folder / "runs 2"}),
        ]
        ports = [free_port() for _ in plans]
        pids = [fork(server, folder / name, port, how) for (name, how), port in zip(plans, ports, strict=True)]
        try:
            addresses = [f"127.0.0.1:{port}" for port in ports]
            assert not os.waitpid(fork(record, folder, addresses, folder / "sent"), 0)[1]
            seeds = [
                [[bytes.fromhex(f) for f in frames] for frames in sent]
                for sent in json.loads((folder / "sent").read_text())
            ]
            return _run(count, random.Random(seed), folder, addresses, pids, seeds)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _run(
    count: int, draw: random.Random, folder: Path, addresses: list[str], pids: list[int], seeds: list[list[Frames]]
) -> dict[str, Any]:
    told, start, done, before = Counter[str](), time.monotonic(), 0, list[int]()
    strangers = Strangers([int(a.rpartition(":")[2]) for a in addresses], draw)
    edge, model, x = ariadne.load(folder / "eval prefix"), net().eval(), torch.randn(3, 6)
    with torch.no_grad(), ariadne.connect(addresses[0], edge, timeout=PATIENCE) as remote:
        expected = model(x)
        while done < count:
            peers = [Peer(address, seeds[i]) for i, address in enumerate(addresses)]
            strangers.turn()
            for _ in range(min(EVERY, count - done)):
                peers[draw.choice((0, 0, 1, 2))].send(draw, told)
                done += 1
            for peer in peers:
                peer.drain(told, 0)
                peer.line.close()
            assert torch.equal(remote.run_suffix(edge.run_prefix(x)), expected), "another result than the model's"
            before = before or [memory(pid) for pid in pids]
        lines = [Peer(addresses[0], seeds[0]) for _ in range(CLIENTS)]
        good = next(frames for frames in seeds[0] if b'"run"' in frames[0])
        for _ in range(3):
            for line in lines:
                line.line.send_multipart(good)
        for line in lines:
            for _ in range(3):
                line.take(told)
            line.line.close()
        assert torch.equal(remote.run_suffix(edge.run_prefix(x)), expected), "another result than the model's"
    grown = [memory(pid) - kb for pid, kb in zip(pids, before, strict=True)]
    assert max(grown) < MOST, f"servers grew by {grown} kB"
    strangers.close()
    rate = done / (time.monotonic() - start)
    return {
        "messages": done,
        "clients": CLIENTS,
        "a second": round(rate),
        "grown kB": grown,
        **dict(told.most_common()),
    }


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("count", type=int)
    asked.add_argument("--seed", type=int, default=0)
    options = asked.parse_args()
    print(json.dumps(run(options.count, options.seed)))
    sys.exit(0)
