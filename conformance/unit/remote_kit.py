"""Servers in processes of their own, for tests: each is told a half's file and options, and says where it listens."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import json, sys, torch
sys.path.insert(0, {root!r})
sys.modules.update(dict.fromkeys(("torchvision", "timm", "transformers", "ultralytics", "rfdetr", "model_zoo", "conformance")))
from ariadne.remote import Limits, Server, until_told

given = json.loads(sys.argv[1])
if "limits" in given:
    given["limits"] = Limits(**given["limits"])
server = Server(given.pop("half"), **given)
print(server.address, flush=True)
until_told(server)
"""
CE = torch.nn.functional.cross_entropy


def whole_losses(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any, steps: int
) -> list[torch.Tensor]:
    """The losses of the whole model in one process."""
    losses = []
    for i in range(steps):
        x, y = batch(i)
        optimizer.zero_grad()
        loss = CE(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


class Served:
    """A server's process."""

    def __init__(self, half: Path, listen: str = "127.0.0.1:0", **options: Any) -> None:
        given = json.dumps({"half": str(half), "listen": listen, "log": None, **options})
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", CODE.format(root=str(ROOT)), given]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        if not self.address:
            raise RuntimeError(self.process.communicate()[1])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.end()

    def stop(self) -> int:
        """Tell it to stop; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def end(self) -> int:
        self.process.communicate(timeout=60)
        return self.process.returncode


@contextmanager
def served(half: Path, **options: Any) -> Iterator[Served]:
    server = Served(half, **options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


@contextmanager
def beside(server: Any) -> Iterator[Any]:
    """A server in a thread of this process, for what draws no random numbers."""
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


class Proxy:
    """Stands between client and server; `cut()` breaks what goes through it, new connections pass."""

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to = host, int(port)
        self._ends: list[socket.socket] = []
        self._made: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listening.accept()
            except OSError:
                return
            self._made.append(here)
            try:
                there = socket.create_connection(self._to)
            except OSError:
                return
            self._made.append(there)
            self._ends += [here, there]
            for pair in ((here, there), (there, here)):
                self._threads.append(threading.Thread(target=self._forward, args=pair, daemon=True))
                self._threads[-1].start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                other.sendall(data)
        except OSError:
            pass  # cut
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # which wakes who waits for connections
        self._threads[0].join(30)
        self.cut()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        for end in (self._listening, *self._made):
            end.close()


@contextmanager
def cut_after(server: Any, proxy: Proxy, ops: tuple[str, ...], times: int) -> Iterator[list[str]]:
    """The connection breaks after some requests were done, before they are answered."""
    reply, cut = server._reply, list[str]()

    def lost(request: Any, answer: Any, start: float) -> None:
        if request.header.get("op") in ops and len(cut) < times:
            cut.append(request.header["op"])
            proxy.cut()
            time.sleep(0.05)
        reply(request, answer, start)

    server._reply = lost  # type: ignore[method-assign]
    yield cut
