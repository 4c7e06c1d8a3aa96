"""Calls of a server: each request is sent, again where the connection broke, until its reply is there or its time is up."""

from __future__ import annotations

import itertools
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from ariadne.errors import BusyError, DeadlineError, HandshakeError, RemoteError
from ariadne.half import Half
from ariadne.remote import keys
from ariadne.remote.facts import Facts, device_of, facts_of, hold_together
from ariadne.remote.link import Line
from ariadne.remote.message import PROTOCOL, Bodies, Header, raised, read, unpack, written

Path_ = str | os.PathLike[str]
MOST_REPLY = 1 << 32  # bytes
FIRST = 10.0  # seconds for a connection, where no timeout says otherwise


class Pending:
    """The result of a boundary that was sent: `result()` waits for it, `done()` asks whether it is there."""

    def __init__(self, calls: Calls, header: Header, bodies: Bodies, until: float) -> None:
        self._calls, self._header, self._bodies, self._until = calls, header, bodies, until
        self._reply: tuple[Header, Bodies] | BaseException | None = None
        self._sent = False

    def done(self) -> bool:
        """Whether its result, or error, has come."""
        if self._reply is None:
            self._calls._pump(0.0)
        return self._reply is not None

    def result(self, timeout: float | None = None) -> Any:
        """The output of the suffix; `DeadlineError` where it has not come within so many seconds, or what the server raised."""
        _, bodies = self._calls._wait(self, None if timeout is None else time.monotonic() + timeout)
        return unpack(bodies[0], max_bytes=MOST_REPLY)

    def cancel(self) -> None:
        """Forget it: the server does not run it if it still waits there, and no result comes."""
        self._calls._cancel(self)


class Told(Exception):
    """An error that the server told of a request of the run, and whether the request counts as done."""

    def __init__(self, error: Exception, done: bool) -> None:
        super().__init__(str(error))
        self.error, self.done = error, done


class Calls:
    """A line to a server, and the requests on it that have no reply yet. `facts` says what the server holds."""

    def __init__(
        self, address: str, half: Half | None, timeout: float | None, key: Path_ | None, server_key: Path_ | None
    ) -> None:
        pair = None if key is None else keys.secret(key)
        self._pair = pair and (pair.public, pair.secret)
        self._server_key = "" if server_key is None else keys.read(server_key).public
        self.address, self.half, self.timeout = address, half, timeout
        self._session, self._ids = uuid.uuid4().hex, itertools.count(1)
        self._lock = threading.RLock()
        self._pending: dict[int, Pending] = {}
        self._line: Line | None = None
        self._dead = False
        self.facts: Facts = {}
        self.limits: dict[str, int] = {"bytes": 1 << 20, "inflight": 1}
        self.trains: Facts = {}
        try:
            self._connect(time.monotonic() + (FIRST if timeout is None else timeout))
        except BaseException:
            self._hang_up()
            raise

    @property
    def device(self) -> str:
        """Where this client's half is; the CPU where it has none."""
        return "cpu" if self.half is None else device_of(self.half)

    def _until(self, timeout: float | None) -> float:
        seconds = self.timeout if timeout is None else timeout
        return float("inf") if seconds is None else time.monotonic() + seconds

    def _make(self, header: Header, bodies: Bodies, until: float) -> Pending:
        nbytes = sum(map(len, bodies))
        if nbytes > self.limits["bytes"]:
            raise BusyError(
                f"this message has {nbytes} bytes; the server at {self.address} takes {self.limits['bytes']} at once. Start it "
                "with a higher --max-bytes, or send smaller batches"
            )
        header = {**header, "id": next(self._ids), "session": self._session}
        return Pending(self, header, bodies, until)

    def _ask(self, header: Header, bodies: Bodies, until: float) -> tuple[Header, Bodies]:
        pending = self._make(header, bodies, until)
        self._send(pending)
        return self._wait(pending, None)

    def _send(self, pending: Pending) -> None:
        """Send a request, once there is room for it in flight."""
        with self._lock:
            if self._dead:
                raise RemoteError("this remote is closed; connect anew")
            while len(self._pending) >= self.limits["inflight"]:
                self._refuse_late(pending)
                self._pump(0.05)
            self._pending[pending._header["id"]] = pending
            if self._line is None:
                self._again(pending._until)
            else:
                self._put(pending)

    def _put(self, pending: Pending) -> None:
        left = pending._until - time.monotonic()
        header = pending._header if left == float("inf") else {**pending._header, "seconds": max(0.0, left)}
        assert self._line is not None
        pending._sent = self._line.send([written(header), *pending._bodies], pending._until)

    def _wait(self, pending: Pending, until: float | None) -> tuple[Header, Bodies]:
        until = pending._until if until is None else min(until, pending._until)
        while pending._reply is None:
            self._refuse_late(pending, until)
            self._pump(min(0.1, until - time.monotonic()))
        if isinstance(pending._reply, BaseException):
            raise pending._reply
        return pending._reply

    def _refuse_late(self, pending: Pending, until: float | None = None) -> None:
        if time.monotonic() < (pending._until if until is None else until):
            return
        self._cancel(pending)
        raise DeadlineError(
            f"no answer came from {self.address} in the time given ({pending._header['op']}). It may be busy, or gone: "
            f"`ariadne ping {self.address}`; a training step may be asked for again"
        )

    def _cancel(self, pending: Pending) -> None:
        with self._lock:
            if self._pending.pop(pending._header["id"], None) is not None and self._line is not None:
                if pending._header["op"] == "run":
                    said = {"op": "cancel", "of": pending._header["id"], "session": self._session, "id": 0}
                    self._line.send([written(said)], time.monotonic())
                pending._reply = RemoteError("this request was cancelled")

    def _pump(self, wait: float) -> None:
        """Take in what has come, for so many seconds at the most; connect again where the line broke."""
        with self._lock:
            line, broken = self._line, self._line is None or self._line.broken
            frames = None if line is None else line.receive(0.0 if broken else wait)
            while line is not None and frames is not None:  # where it broke, too: what came before is an answer
                self._take(frames)
                frames = line.receive(0.0) if self._pending else None
            if broken and self._pending:
                self._again(min(p._until for p in self._pending.values()))

    def _take(self, frames: Sequence[Any]) -> None:
        header, bodies = read(frames)
        pending = self._pending.pop(header.get("id"), None)  # type: ignore[arg-type]
        if pending is None:
            return
        if header.get("ok") is True:
            pending._reply = header, bodies
        else:
            pending._reply = Told(raised(header), header.get("done") is True)
            if "number" not in pending._header:
                pending._reply = pending._reply.error

    def _again(self, until: float) -> None:
        """A new connection; what had no answer is sent again, in order."""
        self._connect(until)
        for pending in [*self._pending.values()]:
            self._put(pending)

    def _connect(self, until: float) -> None:
        """Connect, and hold what both sides are against each other."""
        while True:
            self._hang_up()
            self._line = line = Line(self.address, MOST_REPLY, self._pair, self._server_key)
            said = {"op": "hello", "protocol": PROTOCOL, "id": 0, "session": self._session}
            frames = None
            if line.send([written(said)], until):
                while frames is None and not line.broken and time.monotonic() < until:
                    frames = line.receive(min(0.2, max(0.0, until - time.monotonic())))
            if frames is not None:
                break
            if time.monotonic() >= until:
                self._hang_up()
                looks = (
                    "with keys, a wrong server_key="
                    if self._pair
                    else "a server that asks for keys, where none is given,"
                )
                raise DeadlineError(
                    f"nobody answered at {self.address} in the time given ({looks} looks like this too). Start "
                    "`ariadne serve FILE --listen HOST:PORT` there, and look at the port"
                )
        header, _ = read(frames)
        if header.get("protocol") != PROTOCOL:
            raise HandshakeError(
                f"the server at {self.address} speaks protocol {header.get('protocol')}, this client {PROTOCOL}: use one "
                "version of Ariadne on both sides"
            )
        if header.get("ok") is not True:
            raise raised(header)
        facts: Facts = header["facts"]
        if self.half is not None:
            hold_together(facts_of(self.half), facts, self.address)
        if self.facts and (self.facts["splits"], self.facts["origin"]) != (facts["splits"], facts["origin"]):
            raise HandshakeError(
                f"the server at {self.address} came back with another half: {[*facts['splits']]} with weights "
                f"{facts['origin']}, where it "
                f"had {[*self.facts['splits']]} with {self.facts['origin']}. Serve the same file again, or connect anew"
            )
        self.facts, self.limits, self.trains = facts, header["limits"], header["trains"]

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
