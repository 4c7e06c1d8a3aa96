"""Servers in processes of their own, for tests: each is told a half's file and options, and says where it listens."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ariadne.remote import Limits, Server, until_told
from conformance.unit.forked_kit import forked

ROOT = Path(__file__).resolve().parents[2]
ABSENT = {"torchvision", "timm", "transformers", "ultralytics", "rfdetr", "model_zoo", "conformance"}


def _serve(told: Connection, given: dict[str, Any]) -> None:
    """What a server's process runs, where no model's code can be imported."""
    for name in (*sys.modules, *ABSENT):
        if name.partition(".")[0] in ABSENT:
            sys.modules[name] = None  # type: ignore[assignment]
    torch.set_num_threads(1)
    if "limits" in given:
        given["limits"] = Limits(**given["limits"])
    server = Server(given.pop("half"), log=None, **given)
    told.send(server.address)
    until_told(server)


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
        address, told = forked().Pipe(duplex=False)
        given = {"half": str(half), "listen": listen, **options}
        self.process = forked().Process(target=_serve, args=(told, given), daemon=True)
        self.process.start()
        told.close()
        with address:
            self.address: str = address.recv()  # EOFError where the process ended before

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def stop(self) -> int | None:
        """Tell it to stop; its exit status."""
        self.process.terminate()
        return self.end()

    def end(self) -> int | None:
        self.process.join(60)
        return self.process.exitcode


@contextmanager
def served(half: Path, **options: Any) -> Iterator[Served]:
    server = Served(half, **options)
    try:
        yield server
    finally:
        if server.process.is_alive():
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
