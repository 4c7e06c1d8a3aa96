"""A slow, lossy line between two processes, without rights over the network: bytes are held back as such a line would.

    python -m conformance.suite.slow_line

measures replay and training through it: 20 ms each way, 50 Mbit/s, and one segment of a hundred lost. A lost segment comes again
after a round trip, and what is behind it waits, as TCP has it. It stands in for `tc netem`, which kernels of containers often lack.
"""

from __future__ import annotations

import json
import random
import socket
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ariadne
from ariadne.remote import Training
from conformance.unit.remote_kit import served, whole_losses

SEGMENT, WINDOW = 1448, 1 << 20  # bytes: of one that is lost or not, and that are on their way in one direction


class SlowLine:
    """Listens, and carries each connection on to an address; `lost` counts segments that came again."""

    def __init__(
        self, to: str, *, delay: float = 0.02, loss: float = 0.01, rate: float = 50e6 / 8, seed: int = 0
    ) -> None:
        host, _, port = to.rpartition(":")
        self._to, self.delay, self.loss, self.rate = (host, int(port)), delay, loss, rate
        self._draw, self.lost = random.Random(seed), 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listening.accept()
                there = socket.create_connection(self._to)
            except OSError:
                return
            for end in (here, there):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for one, other in ((here, there), (there, here)):
                way: deque[tuple[float, bytes]] = deque()
                changed = threading.Condition()
                for work in (self._take, self._give):
                    threading.Thread(target=work, args=(one, other, way, changed), daemon=True).start()

    def _take(self, one: socket.socket, _: socket.socket, way: Any, changed: threading.Condition) -> None:
        """Note of each segment when it is there."""
        free = arrives = 0.0
        data = b" "
        while data:
            try:
                data = one.recv(SEGMENT)
            except OSError:
                data = b""
            free = max(free, time.monotonic()) + len(data) / self.rate
            lost = self._draw.random() < self.loss
            self.lost += lost
            arrives = max(arrives, free + self.delay * (3 if lost else 1))
            with changed:
                changed.wait_for(lambda: len(way) * SEGMENT < WINDOW)
                way.append((arrives, data))
                changed.notify_all()

    def _give(self, _: socket.socket, other: socket.socket, way: Any, changed: threading.Condition) -> None:
        data = b" "
        while data:
            with changed:
                changed.wait_for(lambda: bool(way))
                arrives, data = way.popleft()
                changed.notify_all()
            time.sleep(max(0.0, arrives - time.monotonic()))
            with suppress(OSError):
                other.sendall(data) if data else other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Take no more connections."""
        self._listening.close()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64), nn.Dropout(0.2), nn.Linear(64, 10)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(8, 64, generator=drawn), torch.randint(0, 10, (8,), generator=drawn)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def saved(folder: Path, model: nn.Module) -> nn.Module:
    runtime = ariadne.prepare_split(model, (batch(0)[0],), split="after:2")
    for side in ("prefix", "suffix"):
        runtime.save(folder / side, side=side)
    return model


def replay(folder: Path, calls: int) -> dict[str, Any]:
    """Calls with one in flight, and as many with eight: all equal to the model's, and how many a second of each."""
    model = saved(folder, net().eval())
    edge, found = ariadne.load(folder / "prefix"), dict[str, Any]()
    with served(folder / "suffix") as server:
        line = SlowLine(server.address)
        with ariadne.connect(line.address, edge, timeout=60) as remote, torch.no_grad():
            inputs = [batch(i)[0] for i in range(calls)]
            expected = [model(x) for x in inputs]
            boundaries = [edge.run_prefix(x) for x in inputs]
            start = time.perf_counter()
            outputs = [remote.run_suffix(b) for b in boundaries]
            one = time.perf_counter() - start
            waiting, start = deque[Any](), time.perf_counter()
            for b in boundaries:
                waiting.append(remote.submit(b))  # which waits where eight are in flight
            outputs += [pending.result() for pending in waiting]
            eight = time.perf_counter() - start
        line.close()
    found["equal"] = all(map(torch.equal, outputs, expected * 2))
    return {
        **found,
        "a second": round(calls / one, 1),
        "with 8 in flight": round(calls / eight, 1),
        "ratio": round(one / eight, 2),
    }


def train(folder: Path, steps: int) -> dict[str, Any]:
    """Training steps through the line, held against the whole model's in one process."""
    model = saved(folder, net().train())
    edge = ariadne.load(folder / "prefix")
    with served(folder / "suffix", optimizer="sgd:lr=0.1,momentum=0.9", loss_fn="cross_entropy") as server:
        line = SlowLine(server.address)
        with ariadne.connect(line.address, edge, timeout=60) as remote:
            torch.manual_seed(1)
            start = time.perf_counter()
            losses = [loss for _, loss in Training(edge, remote, sgd(edge)).run(steps, batch)]
            took = time.perf_counter() - start
        line.close()
    torch.manual_seed(1)
    equal = all(map(torch.equal, losses, whole_losses(model, sgd(model), batch, steps)))
    equal &= all(torch.equal(t, model.state_dict()[n]) for n, t in edge.state_dict().items())
    return {"equal": equal, "steps": len(losses), "ms a step": round(1e3 * took / steps, 1), "lost segments": line.lost}


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as where:
        found = {"replay": replay(Path(where), 200), "training": train(Path(where), 100)}
    print(json.dumps(found))
    return 0 if all(row["equal"] for row in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
