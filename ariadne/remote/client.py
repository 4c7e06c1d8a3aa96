"""The client: a suffix in another process, to be called like one that is here."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ariadne.boundary import BoundaryPayload
from ariadne.errors import BoundaryError, BusyError, DeadlineError, HandshakeError, RemoteError, SpecError, StepError
from ariadne.half import Half, load
from ariadne.remote import keys
from ariadne.remote.facts import Facts, device_of, facts_of, hold_together, named_shared, split_of
from ariadne.remote.link import Line
from ariadne.remote.message import (
    PROTOCOL,
    Bodies,
    Header,
    autocast_now,
    generators,
    pack,
    raised,
    read,
    set_generators,
    unpack,
    written,
)

Path_ = str | os.PathLike[str]
Gradients = dict[str, torch.Tensor | None]
MOST_REPLY = 1 << 32  # bytes
FIRST = 10.0  # seconds for a connection, where no timeout says otherwise


class Pending:
    """The result of a boundary that was sent: `result()` waits for it, `done()` asks whether it is there."""

    def __init__(self, remote: Remote, header: Header, bodies: Bodies, until: float) -> None:
        self._remote, self._header, self._bodies, self._until = remote, header, bodies, until
        self._reply: tuple[Header, Bodies] | BaseException | None = None
        self._sent = False

    def done(self) -> bool:
        """Whether its result, or error, has come."""
        if self._reply is None:
            self._remote._pump(0.0)
        return self._reply is not None

    def result(self, timeout: float | None = None) -> Any:
        """The output of the suffix; `DeadlineError` where it has not come within so many seconds, or what the server raised."""
        _, bodies = self._remote._wait(self, None if timeout is None else time.monotonic() + timeout)
        return unpack(bodies[0], max_bytes=MOST_REPLY)

    def cancel(self) -> None:
        """Forget it: the server does not run it if it still waits there, and no result comes."""
        self._remote._cancel(self)


class Remote:
    """A suffix that another process serves. Made by `ariadne.connect`; to be closed, or used in a `with`.

    `run_suffix` and `train_suffix` mean what they do on a half; `submit` sends a boundary and does not wait. `facts` says what
    the server holds. Each request is sent again where the connection broke, until its time has passed; requests that change the
    server are done once, however often they come. It may be used from several threads.

    >>> remote = ariadne.connect("127.0.0.1:7077")
    >>> remote.run_suffix(edge.run_prefix(torch.randn(8, 3, 224, 224))).shape
    torch.Size([8, 1000])
    """

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
        self.run, self.at = "", 0  # the training run, and how many of its requests were answered
        self._asked: tuple[Any, Header, Bodies] | None = None  # the request after these, until it is answered
        self._open: BoundaryPayload | None = None  # whose shared gradients the server awaits
        try:
            self._connect(time.monotonic() + (FIRST if timeout is None else timeout))
        except BaseException:
            self._hang_up()
            raise
        if half is not None and self.trains:
            half.adds_shares = True  # `backward_prefix` takes the other side's share in, and sends the sum back

    # --- inference --------------------------------------------------------------------------------------------------

    def run_suffix(self, boundary: BoundaryPayload, *, timeout: float | None = None) -> Any:
        """As `Half.run_suffix`, over there.

        Raises `BoundaryError` for a boundary that the server's suffix can't take, before it is sent; `DeadlineError`
        after `timeout` seconds; and what the suffix raises.
        """
        split = self._fits(boundary)
        until = self._until(timeout)
        header: Header = {"op": "run", "split": _key(boundary)}
        bodies: Bodies = (boundary.to_bytes(),)
        with self._lock:
            if split["draws"]:
                if self._pending:
                    raise StepError(
                        "this suffix draws random numbers, and other boundaries are in flight: which numbers are "
                        "whose would not be "
                        "as in one process. Wait for them first"
                    )
                bodies = (*bodies, pack(generators(self._devices())))
            if split["writes"]:
                self._begin_if_none()
                found = self._numbered(boundary, header, bodies, until)
            else:
                found = self._ask(header, bodies, until)
            if split["draws"]:
                set_generators(unpack(found[1][1], max_bytes=MOST_REPLY))
        return unpack(found[1][0], max_bytes=MOST_REPLY)

    def submit(self, boundary: BoundaryPayload, *, timeout: float | None = None) -> Pending:
        """Send a boundary and go on; `.result()` of what is returned waits for its output.

        Where as many are in flight as the server takes of one client, it waits for one of them first. Raises what `run_suffix`
        raises before it sends, and `StepError` for a suffix that draws random numbers or changes its state.
        """
        split = self._fits(boundary)
        if split["draws"] or split["writes"]:
            what = "draws random numbers" if split["draws"] else "changes its state when it runs"
            raise StepError(f"this suffix {what}, so boundaries must go one after the other: use run_suffix")
        until = self._until(timeout)
        pending = self._make({"op": "run", "split": _key(boundary)}, (boundary.to_bytes(),), until)
        self._send(pending)
        return pending

    def ping(self, nbytes: int = 0, *, timeout: float | None = None) -> float:
        """Send so many bytes there and back; returns the seconds that it took."""
        body = bytes(nbytes)
        start = time.perf_counter()
        self._ask({"op": "ping"}, (body,) if nbytes else (), self._until(timeout))
        return time.perf_counter() - start

    # --- training ---------------------------------------------------------------------------------------------------

    def train_suffix(
        self, boundary: BoundaryPayload, targets: Any = None, *, accumulate: bool = False, timeout: float | None = None
    ) -> tuple[torch.Tensor, Gradients]:
        """As `Half.train_suffix`, with the loss and the optimizer of the server: returns the loss and the boundary's gradients.

        The states of the random generators go with the boundary and come back, so that draws are those of one process. `targets`: a
        tree of tensors and plain values. With `accumulate` gradients add up there, and `step()` uses them. Where both sides share
        parameters, `remote.backward_prefix` has to follow, not the half's own.

        After an error of the line, call it again with the same boundary: the step is done once, and its answer is the same.
        """
        with self._lock:
            if self._asked is None:
                self._fits(boundary)
                boundary.refuse_if_taken("train_suffix")
                self._begin_if_none()
                self._refuse_open()
            extra = {"targets": targets, "generators": generators(self._devices())}
            header: Header = {
                "op": "train",
                "split": _key(boundary),
                "autocast": autocast_now(),
                "clear": not self._accumulated,
                "step": not accumulate,
            }
            _, bodies = self._numbered(boundary, header, (boundary.to_bytes(), pack(extra)), self._until(timeout))
            found = unpack(bodies[0], max_bytes=MOST_REPLY)
            boundary.consume("train_suffix")
            set_generators(found["generators"])
            if found["shares"]:
                boundary._shared = self._shares(found["shares"])
                self._open = None if accumulate else boundary
            self._accumulated = accumulate
            device = self.device
            gradients = {n: g if g is None else g.to(device) for n, g in found["gradients"].items()}
            return found["loss"], gradients

    def backward_prefix(
        self, boundary: BoundaryPayload, gradients: Mapping[str, torch.Tensor | None], *,
        optimizer: torch.optim.Optimizer | None = None, timeout: float | None = None,
    ) -> None:  # fmt: skip
        """As `Half.backward_prefix` of this client's half; the whole gradients of shared parameters are then sent to the server.

        So both copies of a tied weight step by one sum, made in the order of the whole model.
        """
        half = self._own_half("backward_prefix")
        half.backward_prefix(boundary, gradients, optimizer=optimizer)
        with self._lock:
            if self._open is boundary:
                self._finish(boundary, timeout)

    def step(self, *, timeout: float | None = None) -> None:
        """Step the server's optimizer by the gradients that were added up with `accumulate`."""
        with self._lock:
            self._refuse_open()
            if not self._accumulated:
                raise StepError(
                    "no gradients were added up since the last step: call train_suffix(..., accumulate=True) first"
                )
            self._finish(None, timeout)
            self._accumulated = False

    _accumulated = False

    def train_step(
        self, *inputs: Any, targets: Any = None, optimizer: torch.optim.Optimizer | None = None, **keywords: Any
    ) -> torch.Tensor:
        """One training step of both halves, of which the prefix is this client's: returns the loss.

        `inputs` and `keywords` are those of the model, `optimizer` that of the prefix's parameters. It equals, bit for bit, a step
        of the whole model with one optimizer.

        >>> remote = ariadne.connect("127.0.0.1:7077", edge)
        >>> loss = remote.train_step(x, targets=y, optimizer=torch.optim.SGD(edge.parameters(), lr=0.1))
        """
        boundary = self._own_half("train_step").run_training_prefix(*inputs, **keywords)
        loss, gradients = self.train_suffix(boundary, targets)
        self.backward_prefix(boundary, gradients, optimizer=optimizer)
        return loss

    def begin(self, run: str = "", at: int = 0, *, timeout: float | None = None) -> None:
        """Begin a training run, or go on with one from step `at`, of which the server has a checkpoint.

        Raises `StepError` where it has none, `BusyError` where it trains another client's run.
        """
        with self._lock:
            self._warn_of_threads()
            run = run or uuid.uuid4().hex
            origin = "" if self.half is None else self.half.origin
            self._ask({"op": "begin", "run": run, "at": at, "origin": origin}, (), self._until(timeout))
            self.run, self.at, self._asked, self._open, self._accumulated = run, at, None, None, False

    def save(self, *, timeout: float | None = None) -> None:
        """Have the server write a checkpoint of the step that the run is at; `CheckpointError` where it can't."""
        with self._lock:
            self._ask({"op": "save", "run": self.run, "at": self.at}, (), self._until(timeout))

    def _warn_of_threads(self) -> None:
        here, there = torch.get_num_threads(), self.facts["threads"]
        if here != there and self.device == self.facts["device"] == "cpu":
            warnings.warn(
                f"torch has {here} thread(s) here and {there} at {self.address}: sums are rounded by their number, so "
                "no one process "
                f"gives these bits. For those of one process use ariadne serve --threads {here}, or torch.set_num_threads({there})",
                stacklevel=4,
            )

    def _begin_if_none(self) -> None:
        if not self.run:
            self.begin()

    def _refuse_open(self) -> None:
        if self._open is not None:
            raise StepError(
                "the server awaits the gradients of shared parameters of the step before: call remote.backward_prefix"
            )

    def _finish(self, boundary: BoundaryPayload | None, timeout: float | None) -> None:
        half = self.half
        sums = {} if half is None else {n: p.grad for n, p in named_shared(half).items()}
        self._numbered(boundary, {"op": "step"}, (pack(sums),), self._until(timeout))
        self._open = None

    def _shares(self, shares: Mapping[str, torch.Tensor | None]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        named = named_shared(self._own_half("a step with shared parameters"))
        return [(named[n], g.to(named[n].device)) for n, g in shares.items() if g is not None]

    def _own_half(self, what: str) -> Half:
        if self.half is None:
            raise SpecError(f"{what} needs the prefix: pass it, ariadne.connect(address, half)")
        return self.half

    def _numbered(self, what: Any, header: Header, bodies: Bodies, until: float) -> tuple[Header, Bodies]:
        """Ask for the next request of the run; or again for the one that has no answer yet, as it was sent."""
        if self._asked is not None:
            of, header, bodies = self._asked
            if of is not what:
                raise StepError(
                    f"step {self.at + 1} has no answer yet, and another one was asked for. Call again with its "
                    "boundary, or restore "
                    "both sides from a checkpoint"
                )
        header = {**header, "run": self.run, "number": self.at + 1}
        self._asked = what, header, bodies
        try:
            found = self._ask(header, bodies, until)
        except DeadlineError:
            raise
        except _Told as told:
            self._asked = None
            if told.done:
                self.at += 1
            raise told.error from None
        self._asked = None
        self.at += 1
        return found

    # --- the line ---------------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """Where this client's half is; the CPU where it has none."""
        return "cpu" if self.half is None else device_of(self.half)

    def _devices(self) -> list[str]:
        return [self.device.partition(":")[0]]

    def _fits(self, boundary: BoundaryPayload) -> Facts:
        if not isinstance(boundary, BoundaryPayload):
            raise BoundaryError(
                f"a boundary is what run_prefix or run_training_prefix returns; found {type(boundary).__name__}"
            )
        return split_of(boundary, self.facts, self.address)

    def _until(self, timeout: float | None) -> float:
        seconds = self.timeout if timeout is None else timeout
        return float("inf") if seconds is None else time.monotonic() + seconds

    def _make(self, header: Header, bodies: Bodies, until: float) -> Pending:
        nbytes = sum(map(len, bodies))
        if nbytes > self.limits["bytes"]:
            raise BusyError(
                f"this message has {nbytes} bytes; the server at {self.address} takes {self.limits['bytes']} at once. "
                "Start it with "
                "a higher --max-bytes, or send smaller batches"
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
            f"no answer came from {self.address} in the time given ({pending._header['op']}). It may be busy, or "
            "gone: `ariadne ping "
            f"{self.address}`; a training step may be asked for again"
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
            if self._line is None or self._line.broken:
                if self._pending:
                    self._again(min(p._until for p in self._pending.values()))
                return
            frames = self._line.receive(wait)
            while frames is not None:
                self._take(frames)
                frames = self._line.receive(0) if self._line is not None else None

    def _take(self, frames: Sequence[Any]) -> None:
        header, bodies = read(frames)
        pending = self._pending.pop(header.get("id"), None)  # type: ignore[arg-type]
        if pending is None:
            return
        if header.get("ok") is True:
            pending._reply = header, bodies
        else:
            pending._reply = _Told(raised(header), header.get("done") is True)
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
                keyed = " (with keys, a wrong server_key= looks like this too)" if self._pair else ""
                raise DeadlineError(
                    f"nobody answered at {self.address} in the time given{keyed}. Start `ariadne serve FILE --listen HOST:PORT` "
                    "there, and look at the port"
                )
        header, _ = read(frames)
        if header.get("protocol") != PROTOCOL:
            raise HandshakeError(
                f"the server at {self.address} speaks protocol {header.get('protocol')}, this client {PROTOCOL}: use "
                "one version of "
                "Ariadne on both sides"
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

    def close(self) -> None:
        """End: the training run, if there is one, is let go of."""
        with self._lock:
            if self._line is not None and not self._dead and self.run and not self._line.broken:
                with contextlib.suppress(RemoteError):  # it lets go by itself when the lease has passed
                    self._ask({"op": "end", "run": self.run}, (), time.monotonic() + 1)
            self._hang_up()
            self._dead = True

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Remote({self.address}, {', '.join(self.facts['splits'])})"


class _Told(Exception):
    """An error that the server told of a request of the run, and whether the request counts as done."""

    def __init__(self, error: Exception, done: bool) -> None:
        super().__init__(str(error))
        self.error, self.done = error, done


def _key(boundary: BoundaryPayload) -> str:
    return f"{boundary.split_id} of plan {boundary.plan_signature}"


def connect(
    address: str,
    half: Half | Path_ | None = None,
    *,
    timeout: float | None = None,
    key: Path_ | None = None,
    server_key: Path_ | None = None,
) -> Remote:
    """The suffix that is served at `address`, host:port, to be run and trained from here.

    `half`: the prefix, or its file, which is then held against the server's suffix at once; `train_step` needs it. `timeout`: the
    seconds that each call may take, where it does not say otherwise; None waits for ever, but ten seconds for the connection.
    `key`: the file of this client's key, `server_key` that of the server's public one.

    Raises `DeadlineError` where nobody answers, `HandshakeError` where the two are not of one split.

    >>> remote = ariadne.connect("127.0.0.1:7077", "edge.safetensors")
    """
    from_file = half if half is None or isinstance(half, Half) else load(half)
    return Remote(address, from_file, timeout, key, server_key)
