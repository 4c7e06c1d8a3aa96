"""The client: a suffix in another process, to be called like one that is here."""

from __future__ import annotations

import contextlib
import time
import uuid
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ariadne.boundary import BoundaryPayload
from ariadne.errors import BoundaryError, RemoteError, SpecError, StepError
from ariadne.half import Half, load
from ariadne.remote.calls import MOST_REPLY, Calls, Path_, Pending, Told
from ariadne.remote.facts import Facts, named_shared, split_of
from ariadne.remote.message import Bodies, Header, autocast_now, generators, pack, set_generators, unpack

Gradients = dict[str, torch.Tensor | None]


class Remote(Calls):
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
        super().__init__(address, half, timeout, key, server_key)
        self.run, self.at = "", 0  # the training run, and how many of its requests were answered
        self._asked: tuple[Any, Header, Bodies] | None = None  # the request after these, until it is answered
        self._open: BoundaryPayload | None = None  # whose shared gradients the server awaits
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
                        "this suffix draws random numbers, and other boundaries are in flight: which numbers are whose would "
                        "not be as in one process. Wait for them first"
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
                    f"step {self.at + 1} has no answer yet, and another one was asked for. Call again with its boundary, or "
                    "restore both sides from a checkpoint"
                )
        header = {**header, "run": self.run, "number": self.at + 1}
        self._asked = what, header, bodies
        try:
            found = self._ask(header, bodies, until)
        except Told as told:
            self._asked = None
            if told.done:
                self.at += 1
            raise told.error from None
        self._asked = None
        self.at += 1
        return found

    def _devices(self) -> list[str]:
        return [self.device.partition(":")[0]]

    def _fits(self, boundary: BoundaryPayload) -> Facts:
        if not isinstance(boundary, BoundaryPayload):
            raise BoundaryError(
                f"a boundary is what run_prefix or run_training_prefix returns; found {type(boundary).__name__}"
            )
        return split_of(boundary, self.facts, self.address)

    def close(self) -> None:
        """End: the training run, if there is one, is let go of."""
        with self._lock:
            if self._line is not None and not self._dead and self.run and not self._line.broken:
                with contextlib.suppress(RemoteError):  # it lets go by itself when the lease has passed
                    self._ask({"op": "end", "run": self.run}, (), time.monotonic() + 1)
            self._hang_up()
            self._dead = True

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Remote({self.address}, {', '.join(self.facts['splits'])})"


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
