"""The client: a suffix in another process, to be called like one that is here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch

from ariadne.boundary import BoundaryPayload, autocast_now, no_boundary
from ariadne.errors import AriadneError, DeadlineError, RemoteError, SpecError, StepError
from ariadne.half import Half, load
from ariadne.remote.calls import MOST_REPLY, Path_, Pending
from ariadne.remote.facts import Facts, differ, facts_of, named_shared, split_of
from ariadne.remote.message import PROTOCOL, Bodies, Header, generators, pack, set_generators, unpack
from ariadne.remote.steps import Steps, enabled

Gradients = dict[str, torch.Tensor | None]


class PendingTraining:
    """Loss and gradients of a training boundary that was sent: `result()` waits for them, once."""

    def __init__(self, remote: Remote, boundary: BoundaryPayload, number: int, draws: str) -> None:
        self._remote, self._boundary, self._number, self._draws = remote, boundary, number, draws

    def result(self, timeout: float | None = None) -> tuple[torch.Tensor, Gradients]:
        """The loss and the boundary's gradients; `DeadlineError` where they have not come, and then it may be called again."""
        remote = self._remote
        with remote._lock:
            try:
                return remote._trained(self._boundary, self._number, True, False, remote._until(timeout), self._draws)
            except DeadlineError:
                raise
            except AriadneError:  # it has no gradients to walk back with
                remote._behind = [b for b in remote._behind if b is not self._boundary]
                raise


class Remote(Steps):
    """A suffix that another process serves. Made by `ariadne.connect`; to be closed, or used in a `with`.

    `run_suffix` and `train_suffix` mean what they do on a half; `submit` and `submit_training` send a boundary and do not wait.
    `facts` says what the server holds. Each request is sent again where the connection broke, until its time has passed; requests
    that change the server are done once, however often they come. It may be used from several threads.

    >>> remote = ariadne.connect("127.0.0.1:7077")
    >>> remote.run_suffix(edge.run_prefix(torch.randn(8, 3, 224, 224))).shape
    torch.Size([8, 1000])
    """

    _stood: dict[str, torch.Tensor]
    _drawn: int

    def __init__(
        self, address: str, half: Half | None, timeout: float | None, key: Path_ | None, server_key: Path_ | None
    ) -> None:
        super().__init__(address, half, timeout, key, server_key)
        if half is not None and self.trains:
            half.adds_shares = True  # `backward_prefix` takes the other side's share in, and sends the sum back

    # --- inference --------------------------------------------------------------------------------------------------

    def run_suffix(self, boundary: BoundaryPayload, *, timeout: float | None = None) -> Any:
        """As `Half.run_suffix`, over there.

        Raises `BoundaryError` for a boundary that the server's suffix can't take, before it is sent; `DeadlineError`
        after `timeout` seconds; and what the suffix raises.
        """
        if self.facts["gives"]:
            raise SpecError(
                f"{self.address} has a part between two cuts, which gives no output: use ariadne.remote.Edge"
            )
        return unpack(self._run(boundary, timeout), max_bytes=MOST_REPLY)

    def run_middle(self, boundary: BoundaryPayload, *, timeout: float | None = None) -> BoundaryPayload:
        """Where a part between two cuts is served: what it gives for a boundary, which the part behind it takes."""
        if not self.facts["gives"]:
            raise SpecError(f"{self.address} has the last part of a model, which gives no boundary: use run_suffix")
        return BoundaryPayload.from_bytes(self._run(boundary, timeout), device=self.device, max_bytes=MOST_REPLY)

    def _run(self, boundary: BoundaryPayload, timeout: float | None) -> Any:
        split = self._fits(boundary)
        until = self._until(timeout)
        header = _to_run(boundary)
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
        return found[1][0]

    def submit(self, boundary: BoundaryPayload, *, timeout: float | None = None) -> Pending:
        """Send a boundary and go on; `.result()` of what is returned waits for its output.

        Where as many are in flight as the server takes of one client, it waits for one of them first. Raises what `run_suffix`
        raises before it sends, and `StepError` for a suffix that draws random numbers or changes its state.
        """
        split = self._fits(boundary)
        if self.facts["gives"]:
            raise SpecError(
                f"{self.address} has a part between two cuts, which gives no output: use ariadne.remote.Edge"
            )
        if split["draws"] or split["writes"]:
            what = "draws random numbers" if split["draws"] else "changes its state when it runs"
            raise StepError(f"this suffix {what}, so boundaries must go one after the other: use run_suffix")
        until = self._until(timeout)
        pending = self._make(_to_run(boundary), (boundary.to_bytes(),), until)
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
        self, boundary: BoundaryPayload, targets: Any = None, *, accumulate: bool = False, scaler: Any = None,
        timeout: float | None = None,
    ) -> tuple[torch.Tensor, Gradients]:  # fmt: skip
        """As `Half.train_suffix`, with the loss and the optimizer of the server: returns the loss and the boundary's gradients.

        The states of the random generators go with the boundary and come back, so that draws are those of one process. `targets`: a
        tree of tensors and plain values. With `accumulate` gradients add up there, and `step()` uses them; `scaler`, a
        `torch.amp.GradScaler`, needs it, and scales the loss by its scale. Where both sides share parameters,
        `remote.backward_prefix` has to follow, not the half's own.

        After an error of the line, call it again with the same boundary: the step is done once, and its answer is the same.
        """
        return self._train(boundary, targets, accumulate, scaler, False, timeout)

    def _train(
        self,
        boundary: BoundaryPayload,
        targets: Any,
        accumulate: bool,
        scaler: Any,
        schedule: bool,
        timeout: float | None,
    ) -> tuple[torch.Tensor, Gradients]:
        with self._lock:
            until = self._until(timeout)
            if not self._asked:
                self._ready_for(boundary)
            states = generators(self._devices())
            number = self._send_training(boundary, targets, states, (accumulate, scaler, schedule), until, behind=False)
            return self._trained(boundary, number, accumulate, schedule, until, "ours")

    def submit_training(
        self, boundary: BoundaryPayload, targets: Any = None, *, scaler: Any = None, timeout: float | None = None
    ) -> PendingTraining:
        """Send a boundary whose gradients add up, and go on; `.result()` of what is returned waits for loss and gradients.

        The prefix may run on the next micro-batch meanwhile. As with `train_suffix(..., accumulate=True)`,
        weights stay as they are until `step()`. Walk back by `remote.backward_prefix` in the order in which boundaries were
        sent, as one process would. Raises `StepError` where both sides draw random numbers: these go one after the other.

        >>> waiting = [
        ...     (b, remote.submit_training(b, y)) for b, y in ((edge.run_training_prefix(x), y) for x, y in parts)
        ... ]
        >>> for boundary, pending in waiting:
        ...     loss, gradients = pending.result()
        ...     remote.backward_prefix(boundary, gradients)
        >>> remote.step(optimizer)
        """
        with self._lock:
            until = self._until(timeout)
            self._ready_for(boundary)
            key = _key(boundary)
            there = self.facts["splits"][key]["draws"]
            if there and self._own_split(key)["draws"]:
                raise StepError(
                    "both sides draw random numbers, and the draws of one follow those of the other: send these boundaries one "
                    "after the other, by train_suffix"
                )
            now = generators(self._devices())
            states: Any = now
            if there and self._asked:
                if any(not torch.equal(states[k], t) for k, t in self._stood.items()):
                    raise StepError(
                        "random numbers were drawn here while boundaries were in flight whose suffix draws: in one process they "
                        "would follow its draws. Wait for the results first, or draw from a generator of your own"
                    )
                states = None  # the server goes on where the boundary before this one leaves it
            else:
                self._stood = now
            number = self._send_training(boundary, targets, states, (True, scaler, False), until, behind=True)
            self._accumulated = True
            self._behind.append(boundary)
            return PendingTraining(self, boundary, number, "theirs" if there else "nobody's")

    def _clear_run(self) -> None:
        super()._clear_run()
        # The generators here, while boundaries are in flight whose suffix draws.
        self._stood = {}
        self._drawn = 0  # the last request whose draws were taken in

    def _own_split(self, key: str) -> Facts:
        half = self._own_half("submit_training")
        if self._splits is None or self._splits[0] is not half:
            self._splits = half, facts_of(half)["splits"]
        found: Facts = self._splits[1].get(key, {"draws": True})
        return found

    _splits: tuple[Half, Facts] | None = None

    def _ready_for(self, boundary: BoundaryPayload) -> None:
        self._fits(boundary)
        boundary.refuse_if_taken("train_suffix")
        self._begin_if_none()
        self._refuse_open()

    def _send_training(
        self,
        boundary: BoundaryPayload,
        targets: Any,
        states: Any,
        how: tuple[bool, Any, bool],
        until: float,
        *,
        behind: bool,
    ) -> int:
        accumulate, scaler, schedule = how
        scale = None if scaler is None or not scaler.is_enabled() else float(scaler.get_scale())
        if scale is not None and not accumulate:
            raise SpecError(
                "whether a scaled step is skipped hangs on both sides: train_suffix(..., accumulate=True, scaler=scaler), then "
                "remote.step(optimizer, scaler=scaler); or remote.train_step(..., scaler=scaler)"
            )
        header: Header = {
            "op": "train",
            "split": _key(boundary),
            "autocast": autocast_now(),
            "clear": not self._accumulated,
            "step": not accumulate,
            "schedule": schedule,
        }
        extra = {"targets": targets, "generators": states, "scale": scale}
        return self._number(boundary, header, (boundary.to_bytes(), pack(extra)), until, behind=behind)

    def _trained(
        self, boundary: BoundaryPayload, number: int, accumulate: bool, schedule: bool, until: float, draws: str
    ) -> tuple[torch.Tensor, Gradients]:
        """Take in what a training request gave. `draws`: whose draws go on from the server's state."""
        header, bodies = self._answer(number, until)
        found = unpack(bodies[0], max_bytes=MOST_REPLY)
        self._told = header.get("options")
        boundary.consume("train_suffix")
        if draws == "nobody's" and found["drew"]:
            raise StepError(
                "the loss on the server draws random numbers, and other boundaries were in flight: these draws are not those of "
                "one process. Restore both sides from a checkpoint, and send boundaries one after the other"
            )
        if draws != "nobody's" and number > self._drawn:
            set_generators(found["generators"])
            self._drawn = number
            self._stood = generators(self._devices())
        if found["shares"]:
            boundary._shared = self._shares(found["shares"])
            self._open, self._scheduled = (None if accumulate else boundary), schedule
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
        with self._lock:
            if self._behind and self._behind[0] is not boundary and any(b is boundary for b in self._behind):
                raise StepError(
                    "an earlier boundary has not been walked back from yet, and gradients add up in the order of one process: take "
                    "the boundaries in the order in which they were sent"
                )
            self._refuse_drift(optimizer)
            half.backward_prefix(boundary, gradients, optimizer=optimizer)
            self._behind = [b for b in self._behind if b is not boundary]
            if self._open is boundary:
                given = {"sums": self._sums(), "found": None, "norm": None, "most": None}
                header: Header = {"op": "step", "schedule": self._scheduled}
                self._numbered(boundary, header, (pack(given),), self._until(timeout))
                self._open = self._told = None

    def train_step(
        self, *inputs: Any, targets: Any = None, optimizer: torch.optim.Optimizer | None = None, scaler: Any = None,
        max_norm: float | None = None, norm_type: float = 2.0, scheduler: Any = None, **keywords: Any,
    ) -> torch.Tensor:  # fmt: skip
        """One training step of both halves, of which the prefix is this client's: returns the loss.

        `inputs` and `keywords` are those of the model, `optimizer` that of the prefix's parameters; `scaler`, `max_norm`,
        `norm_type` and `scheduler` mean what they do for `step`. It equals, bit for bit, a step of the whole model with one
        optimizer, one scaler and one scheduler.

        >>> remote = ariadne.connect("127.0.0.1:7077", edge)
        >>> loss = remote.train_step(x, targets=y, optimizer=torch.optim.SGD(edge.parameters(), lr=0.1))
        """
        half = self._own_half("train_step")
        self._refuse_drift(optimizer, scheduler)
        scaler = enabled(scaler)
        together = scaler is not None or max_norm is not None
        boundary = half.run_training_prefix(*inputs, **keywords)
        loss, gradients = self._train(boundary, targets, together, scaler, scheduler is not None and not together, None)
        if not together:
            self.backward_prefix(boundary, gradients, optimizer=optimizer)
            if scheduler is not None:
                scheduler.step()
            return loss
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        self.backward_prefix(boundary, gradients)
        self.step(optimizer, scaler=scaler, max_norm=max_norm, norm_type=norm_type, scheduler=scheduler)
        return loss

    # --- a part between two cuts --------------------------------------------------------------------------------------

    def bind(self, halves: list[Half], tied: Mapping[str, torch.nn.Parameter]) -> None:
        """Take the parts that an `Edge` has here, of which the first is this client's half, and what the server has of theirs."""
        self.half, self._halves, self._tied = halves[0], halves, tied

    _halves: list[Half] | None = None
    _tied: Mapping[str, torch.nn.Parameter] | None = None

    def forward_middle(self, boundary: BoundaryPayload, *, timeout: float | None = None) -> tuple[int, BoundaryPayload]:
        """Run the part between two cuts with its graph, which waits there for gradients; the request's number, and what it gave."""
        with self._lock:
            self._fits(boundary)
            self._begin_if_none()
            self._refuse_open()
            header: Header = {"op": "forward", "split": _key(boundary), "autocast": autocast_now()}
            extra = pack({"generators": generators(self._devices())})
            number = self._number(boundary, header, (boundary.to_bytes(), extra), self._until(timeout))
            _, bodies = self._answer(number, self._until(timeout))
            set_generators(unpack(bodies[1], max_bytes=MOST_REPLY))
            return number, BoundaryPayload.from_bytes(bodies[0], device=self.device, max_bytes=MOST_REPLY)

    def backward_middle(
        self, number: int, gradients: Gradients, shares: Mapping[str, torch.Tensor], *, timeout: float | None = None
    ) -> tuple[Gradients, dict[str, torch.Tensor]]:
        """Walk back through the part between two cuts; the gradients of what it took, and the shares of tied parameters."""
        with self._lock:
            header: Header = {
                "op": "back",
                "of": number,
                "clear": not self._accumulated,
                "step": False,
                "schedule": False,
            }
            given = pack({"gradients": dict(gradients), "shares": dict(shares)})
            told, bodies = self._numbered(gradients, header, (given,), self._until(timeout))
            found = unpack(bodies[0], max_bytes=MOST_REPLY)
            self._accumulated, self._told = True, told.get("options")
            return tuple(  # type: ignore[return-value]
                {n: g if g is None else g.to(self.device) for n, g in found[key].items()}
                for key in ("gradients", "shares")
            )

    def _here(self) -> list[Half]:
        return super()._here() if self._halves is None else self._halves

    def _shared(self) -> Mapping[str, torch.nn.Parameter]:
        if self._tied is not None:
            return self._tied
        return {} if self.half is None else named_shared(self.half)

    def _shares(self, shares: Mapping[str, torch.Tensor | None]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        named = named_shared(self._own_half("a step with shared parameters"))
        return [(named[n], g.to(named[n].device)) for n, g in shares.items() if g is not None]

    def _own_half(self, what: str) -> Half:
        if self.half is None:
            raise SpecError(f"{what} needs the prefix: pass it, ariadne.connect(address, half)")
        return self.half

    def _devices(self) -> list[str]:
        return [self.device.partition(":")[0]]

    def _fits(self, boundary: BoundaryPayload) -> Facts:
        if not isinstance(boundary, BoundaryPayload):
            raise no_boundary(boundary)
        if differ(
            boundary.weights, self.facts["digest"]
        ):  # the server's half may have been trained, or given others, since
            header, _ = self._ask({"op": "hello", "protocol": PROTOCOL}, (), self._until(None))
            self.facts = header["facts"]
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


def _to_run(boundary: BoundaryPayload) -> Header:
    header: Header = {"op": "run", "split": _key(boundary)}
    autocast = autocast_now()
    return {**header, "autocast": autocast} if autocast else header


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
