"""The server: takes requests from its clients, does one after the other, and answers.

One thread does it all: between two requests it takes in what has come, so that limits hold and the order is that of arrival.
ZeroMQ's own thread reads and writes meanwhile. Nothing that a client sends is run; what is wrong with it is told to that client.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ariadne.boundary import BoundaryPayload
from ariadne.errors import BusyError, DeadlineError, PayloadError, SpecError, StepError
from ariadne.half import Half, load
from ariadne.remote import keys, plain
from ariadne.remote.counters import Counters, Log, Page
from ariadne.remote.facts import autocast_as, device_of, facts_of, middle_of
from ariadne.remote.link import Listener
from ariadne.remote.merged import Merger
from ariadne.remote.message import (
    PROTOCOL,
    Bodies,
    Header,
    failure,
    generators,
    pack,
    read,
    set_generators,
    told,
    unpack,
    written,
)
from ariadne.remote.together import options_told, rates_told
from ariadne.remote.trained import Answer, Trained, now

Path_ = str | os.PathLike[str]
Scheduler = Callable[[torch.optim.Optimizer], Any]
SLACK = 1 << 20  # bytes of a message beside its boundary
GRACE = 0.5  # seconds after it was told to stop, in which what is on its way is still taken
NUMBERED = ("train", "forward", "back", "measure", "step", "schedule")
OPS = ("hello", "ping", "run", "begin", "end", "save", "cancel", *NUMBERED)


@dataclass(frozen=True)
class Limits:
    """What a server takes: bytes of one message, boundaries in flight of one client, requests that wait, and their bytes in all."""

    bytes: int = 256 << 20
    inflight: int = 8
    waiting: int = 256
    waiting_bytes: int = 1 << 30


@dataclass
class Request:
    """A message that came, and when."""

    who: bytes
    peer: str
    header: Header
    bodies: Bodies
    nbytes: int
    came: float
    until: float = field(default=float("inf"))


class Server:
    """One half, served at an address. `serve` makes one and runs it; the parameters are the same.

    `address` is where it listens, `run()` serves until `stop()`, `counters` counts.

    >>> server = Server(half, listen="127.0.0.1:0")
    >>> threading.Thread(target=server.run).start()
    """

    def __init__(
        self,
        half: Half | Path_,
        *,
        listen: str = "127.0.0.1:7077",
        optimizer: torch.optim.Optimizer | str | None = None,
        scheduler: Scheduler | str | None = None,
        loss_fn: plain.Loss | str | None = None,
        labels: Callable[[Any], Any] | None = None,
        checkpoints: Path_ | None = None,
        key: Path_ | None = None,
        clients: Iterable[Path_] = (),
        limits: Limits | None = None,
        batch: int = 1,
        log: str | None = "text",
        metrics: str | None = None,
        lease: float = 60.0,
    ) -> None:
        half = half if isinstance(half, Half) else load(half, plain=True)
        if half.part != "suffix":
            raise SpecError(f"a server runs a suffix; this file is a {half.part}. It runs where the inputs are")
        self._part = middle_of(half)
        optimizer = plain.optimizer(optimizer, half.parameters()) if isinstance(optimizer, str) else optimizer
        if isinstance(scheduler, str):
            rates = plain.scheduler(scheduler, optimizer)
        else:
            rates = None if scheduler is None or optimizer is None else scheduler(optimizer)
        loss_fn = plain.loss(loss_fn) if isinstance(loss_fn, str) else loss_fn
        self.half, self.limits, self.batch = half, limits or Limits(), batch
        self.counters, self._log = Counters(), Log(log)
        self._facts = facts_of(half)
        self._device = device_of(half)
        self._instance = uuid.uuid4().hex
        folder = None if checkpoints is None else Path(checkpoints)
        window = self.limits.inflight + 2
        self._run = Trained(half, self._part, optimizer, rates, loss_fn, labels, folder, lease, window)
        self._merger = Merger(half, batch)
        self._queue: deque[Request] = deque()
        self._queued: Counter[bytes] = Counter()
        self._queued_bytes = 0
        self._stopping = 0.0  # when it was told to
        self._idle = False  # whether nothing was there when it looked last
        pair = None if key is None else keys.secret(key)
        who = keys.allowed(clients)
        most = self.limits.bytes + SLACK
        self._page = None if metrics is None else Page(metrics, self.counters)
        try:
            self._link = Listener(listen, most, self.limits.inflight + 2, pair and (pair.public, pair.secret), who)
        except BaseException:
            if self._page is not None:
                self._page.close()
            raise
        self.address = self._link.address

    @property
    def served(self) -> int:
        """How many requests were answered."""
        return self.counters.total("ariadne_requests_total")

    def announce(self) -> None:
        """Say in the log where it listens."""
        shown = "" if self._page is None else f"http://{self._page.address}/metrics"
        self._log(op="listen", address=self.address, half=repr(self.half), metrics=shown)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop` is called; what waits then is still done."""
        try:
            while True:
                told = self._stopping
                in_vain = self._take_in()
                if self._queue:
                    self._serve(self._next())
                elif told and (in_vain or now() > told + GRACE):
                    break
        finally:
            self._link.close()
            if self._page is not None:
                self._page.close()

    def stop(self) -> None:
        """End, once what waits is done; may be called from a signal's handler."""
        self._stopping = now()

    def _take_in(self) -> bool:
        """Queue what has come, up to the limits: what is beyond them stays with its senders. True where it waited in vain."""
        waits = self._idle
        for _ in range(self.limits.waiting):
            if len(self._queue) >= self.limits.waiting or self._queued_bytes >= self.limits.waiting_bytes:
                break
            came = self._link.receive(waits)
            if came is None:
                self._idle = not self._queue
                return waits
            request = self._request(*came)
            if request is not None:
                self._queue.append(request)
                self._queued[request.who] += 1
                self._queued_bytes += request.nbytes
                if waits and self.batch == 1:  # what woke it is done at once; what came behind it is looked at after
                    self._idle = False
                    return False
            waits = False
        return False

    def _next(self) -> Request:
        request = self._queue.popleft()
        self._queued[request.who] -= 1
        if not self._queued[request.who]:
            del self._queued[request.who]
        self._queued_bytes -= request.nbytes
        return request

    def _request(self, who: bytes, peer: str, frames: list[Any]) -> Request | None:
        """What came, if it is to be queued; what is malformed, too much or too late is answered at once."""
        nbytes = sum(map(len, frames))
        moment = now()
        header: Header = {}
        try:
            header, bodies = read(frames)
            op = told(header, "op", str)
            if op not in OPS:
                raise PayloadError(f"there is no op {op[:20]!r}; this server speaks protocol {PROTOCOL}")
            request = Request(who, peer, header, bodies, nbytes, moment)
            seconds = header.get("seconds")
            if seconds is not None:
                if type(seconds) not in (int, float) or not 0 <= seconds < 1e9:
                    raise PayloadError("the seconds of a message are no time; refuse the sender")
                request.until = moment + seconds
            if op == "cancel":
                self.counters.add("ariadne_received_bytes_total", nbytes)
                self._cancel(request)
                return None
            if self._queued[who] >= self.limits.inflight + 2:
                raise BusyError(
                    f"this client has {self._queued[who]} requests waiting; the server takes {self.limits.inflight} of one client. "
                    "Wait for results before more is sent"
                )
            if self._stopping and moment > self._stopping + GRACE:
                raise BusyError("the server is ending and takes nothing more; connect to another, or ask again later")
        except Exception as error:  # whatever a stranger's message provokes is told to the stranger
            self._reply(Request(who, peer, header, (), nbytes, moment), (failure(error), []), moment)
            return None
        return request

    def _cancel(self, request: Request) -> None:
        """Forget what waits of a client, by its number."""
        number = request.header.get("of")
        for waiting in [*self._queue]:
            if waiting.who == request.who and waiting.header.get("id") == number and waiting.header["op"] == "run":
                self._queue.remove(waiting)
                self._queued[waiting.who] -= 1
                self._queued_bytes -= waiting.nbytes

    def _serve(self, request: Request) -> None:
        start = now()
        if self._may_merge(request):
            together = self._merger.gather(request, self._queue, start)
            for other in together[1:]:
                self._queued[other.who] -= 1
                self._queued_bytes -= other.nbytes
            if len(together) > 1:
                for each, answer in zip(together, self._merger.run(together, self.limits.bytes), strict=True):
                    self._reply(each, answer, start)
                return
        try:
            if start > request.until:
                raise DeadlineError(
                    "the time given had passed before the server came to this request; nothing was done"
                )
            answer = self._answer(request)
        except Exception as error:
            answer = failure(error), []
        self._reply(request, answer, start)

    def _reply(self, request: Request, answer: Answer, start: float) -> None:
        header, bodies = answer
        op = request.header.get("op")
        op = op if op in OPS else "unknown"
        said = {"ok": True, **header, "id": request.header.get("id"), "instance": self._instance, "protocol": PROTOCOL}
        if type(said["id"]) is not int:
            said["id"] = -1
        frames = [written(said), *bodies]
        sent, end = self._link.send(request.who, frames), now()
        nbytes = sum(map(len, frames))
        outcome = "ok" if said["ok"] else str(said.get("error"))
        self.counters.served(op, outcome, request.nbytes, nbytes, end - start, max(0.0, start - request.came), not sent)
        self.counters.put("ariadne_waiting", len(self._queue))
        self.counters.put("ariadne_training_step", self._run.at)
        if self._log.form is None:
            return
        self._log(
            peer=request.peer,
            op=op,
            outcome=outcome if sent else f"{outcome}, and the client is gone",
            received=request.nbytes,
            sent=nbytes,
            waited_ms=round(1000 * (start - request.came), 2),
            took_ms=round(1000 * (end - start), 2),
            words="" if said["ok"] else str(said.get("words"))[:200],
        )

    # --- what is asked ----------------------------------------------------------------------------------------------

    def _answer(self, request: Request) -> Answer:
        header, bodies = request.header, request.bodies
        op = header["op"]
        if op in ("run", "train", "forward"):
            self.half._empty()  # of what forward appended in the call before
        self._run.touch(header.get("session"), request.came)
        if op == "hello":
            return self._hello(), []
        if op == "ping":
            return {"bytes": request.nbytes}, [bytes(b) for b in bodies]
        if op in NUMBERED or (op == "run" and "number" in header):
            with autocast_as(header.get("autocast", [])):
                return self._run.numbered(header, lambda: self._numbered(op, header, bodies))
        if op == "run":
            return self._forward(header, bodies)
        if op == "begin":
            self._run.begin(header, now())
        elif op == "end":
            self._run.end(header)
        elif op == "save":
            self._run.save(header)
        return {"at": self._run.at}, []

    def _numbered(self, op: str, header: Header, bodies: Bodies) -> Answer:
        if op in ("train", "forward", "back"):
            do = {"train": self._run.train, "forward": self._run.forward, "back": self._run.back}[op]
            return do(header, bodies, self._device, self.limits.bytes)
        if op == "step":
            return self._run.step(header, bodies, self.limits.bytes)
        if op in ("measure", "schedule"):
            return {"measure": self._run.measure, "schedule": self._run.schedule}[op](bodies, self.limits.bytes)
        return self._run.run_once(header, bodies, self._forward)

    def _hello(self) -> Header:
        facts = {**self._facts, "digest": self.half.digest}
        limits = {"bytes": self.limits.bytes, "inflight": self.limits.inflight}
        optimizer = self._run.optimizer
        trains = {
            "optimizer": None if optimizer is None else type(optimizer).__name__,
            "options": None if optimizer is None else options_told(optimizer, self._run.shared),
            "scheduler": None if self._run.scheduler is None else type(self._run.scheduler).__name__,
            "rates": {} if self._run.scheduler is None else rates_told(self._run.scheduler),
            "fused": bool(getattr(optimizer, "_step_supports_amp_scaling", False)),
            "loss": self._run.loss_fn is not None,
            "run": self._run.run,
            "at": self._run.at,
        }
        return {"facts": facts, "limits": limits, "trains": trains, "batch": self.batch, "pid": os.getpid()}

    def _may_merge(self, request: Request) -> bool:
        if self._merger.most == 1:
            return False
        plain = self._part is None and not any(s["writes"] or s["draws"] for s in self._facts["splits"].values())
        return request.header["op"] == "run" and "number" not in request.header and plain

    def _forward(self, header: Header, bodies: Bodies) -> Answer:
        if not 1 <= len(bodies) <= 2:
            raise PayloadError(f"a boundary comes with 1 or 2 bodies; found {len(bodies)}")
        boundary = BoundaryPayload.from_bytes(bodies[0], device=self._device, max_bytes=self.limits.bytes)
        split = self._facts["splits"].get(f"{boundary.split_id} of plan {boundary.plan_signature}", {})
        if split.get("writes") and "number" not in header:
            raise StepError(
                "this suffix changes its state when it runs, as BatchNorm does in training mode: begin a run first"
            )
        states = unpack(bodies[1], max_bytes=SLACK) if len(bodies) > 1 else None
        if split.get("draws") and states is None:
            raise PayloadError("this suffix draws random numbers; send the states of the generators with its boundary")
        if states is not None:
            set_generators(states)
        told_of = header.get("autocast")
        with autocast_as(told_of) if told_of else nullcontext():
            found = [pack(self.half.run_suffix(boundary)) if self._part is None else self._part(boundary).to_bytes()]
        if states is not None:
            found.append(pack(generators([*states])))
        return {}, found


def serve(half: Half | Path_, **options: Any) -> None:
    """Serve a suffix to clients that have its prefix, until SIGTERM or SIGINT; what waits then is still done.

    `half`: a suffix, or its file. The options are those of `Server`: `listen`, host and port; without keys, loopback alone.
    `optimizer` and `loss_fn`, for training: objects, or text as "sgd:lr=0.1,momentum=0.9" and "cross_entropy". `scheduler`: a
    function that makes one of the optimizer, or text as "steplr:step_size=30". `labels`: a
    function from what clients send as targets to the targets, where labels stay here. `checkpoints`: a folder for those of
    training runs. `key`: the file of this server's key, `clients`: the public keys of its clients, files or a folder.
    `limits`: a `Limits`. `batch`: how many waiting boundaries are merged into one run, which rounds otherwise than each
    alone. `log`: "text", "json" or None; `metrics`: where counters are shown for Prometheus; `lease`: after how many seconds
    of silence another run may begin.

    >>> ariadne.serve("suffix.safetensors", listen="127.0.0.1:7077")
    """
    server = Server(half, **options)
    server.announce()
    until_told(server)


def until_told(server: Server) -> None:
    """Run a server until a signal, where this is the main thread."""
    if threading.current_thread() is threading.main_thread():
        before = {s: signal.signal(s, lambda *_: server.stop()) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            server.run()
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)
    else:
        server.run()
