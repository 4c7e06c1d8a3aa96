"""The server's side of a training run: each numbered request is done once, in order, and its answer kept to be given again.

A run belongs to one client at a time. Its state is the half, its optimizer and `at`, the number of requests that were done.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ariadne import tree
from ariadne.boundary import BoundaryPayload
from ariadne.errors import BusyError, CheckpointError, PayloadError, SpecError, StepError
from ariadne.half import Half
from ariadne.remote import checkpoint
from ariadne.remote.facts import named_shared
from ariadne.remote.message import Bodies, Header, failure, generators, pack, set_generators, told, unpack
from ariadne.remote.plain import Loss

KEPT = 2  # checkpoints of a run: the last, and the one before, until the client has its own of the last
_RUN = re.compile(r"[0-9a-f]{32}")
Answer = tuple[Header, list[Any]]


class Trained:
    """The run that a server has in hand: which, how far it is, and the answer to its last request."""

    def __init__(
        self,
        half: Half,
        optimizer: torch.optim.Optimizer | None,
        loss_fn: Loss | None,
        labels: Callable[[Any], Any] | None,
        folder: Path | None,
        lease: float,
    ) -> None:
        self.half, self.optimizer, self.loss_fn, self.labels = half, optimizer, loss_fn, labels
        self.folder, self.lease = folder, lease
        self.shared = named_shared(half)
        half.adds_shares = True  # the client sends the sum back before a step
        self.run, self.session, self.at, self.seen = "", "", 0, 0.0
        self.answer: Answer | None = None  # to the request `at`
        self.awaits = False  # the sums of shared parameters
        self.open = False  # whether gradients were added up that no step has used
        self.pristine = True  # whether the half is as it was loaded
        if optimizer is not None:
            self._refuse_strangers(optimizer)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.swept(folder)

    def _refuse_strangers(self, optimizer: torch.optim.Optimizer) -> None:
        mine = {id(p) for p in self.half.parameters()}
        if any(id(p) not in mine for group in optimizer.param_groups for p in group["params"]):
            raise SpecError("the optimizer owns parameters that are not this half's: make it of half.parameters()")

    # --- whose run it is --------------------------------------------------------------------------------------------

    def begin(self, header: Header, now: float) -> None:
        """Take up a run where a client has it: a new one, or one that goes on from a checkpoint of both sides."""
        run, at, session = told(header, "run", str), told(header, "at", int), told(header, "session", str)
        if not _RUN.fullmatch(run) or at < 0:
            raise PayloadError("the name of a run is 32 hexadecimal digits; refuse the sender")
        self._refuse_while_busy(run, now)
        origin = told(header, "origin", str, "")
        if at == 0 and origin and self.half.origin and origin != self.half.origin:
            raise StepError(
                f"the run begins with a prefix of a model with digest {origin}, the suffix here is of {self.half.origin}. Save "
                "both halves of one model"
            )
        if (self.run, self.at) != (run, at) or self.awaits or self.open:
            self._go_back(run, at)
        self.run, self.session, self.at, self.seen = run, session, at, now
        self.answer, self.awaits, self.open = None, False, False
        if self.folder is not None and at == 0:
            self._save(at)

    def _refuse_while_busy(self, run: str, now: float) -> None:
        left = self.seen + self.lease - now
        if self.run and self.run != run and self.session and left > 0:
            raise BusyError(
                f"this server trains another client's run ({self.run[:8]}, step {self.at}); yours is {run[:8]}. One run at a time: "
                f"its statistics and optimizer are its own. Ask again when it has ended, or in {left:.0f} s if it is silent"
            )

    def _go_back(self, run: str, at: int) -> None:
        if at == 0 and self.pristine:
            return
        path = self._path(run, at) if self.folder is not None else None
        if path is None or not path.exists():
            path = self._start() if at == 0 else None
        found = None if path is None else checkpoint.about(path)
        if path is None or found is None or found["origin"] != self.half.origin:
            raise StepError(
                f"the client is at step {at} of run {run[:8]}; this server is at step {self.at} of {self.run[:8] or 'no run'} "
                "and has no checkpoint of that step. Begin anew with a server that has just been started (with checkpoints=, "
                "it can go back), or restore a step that both have"
            )
        self.answer, self.run = None, ""
        checkpoint.restore(path, self.half, self.optimizer)
        self.pristine = at == 0

    def end(self, header: Header) -> None:
        """Let go of a run, so that another may begin."""
        if told(header, "session", str) == self.session:
            self.session = ""

    def touch(self, session: Any, now: float) -> None:
        """Note that the owner of the run is there."""
        if session == self.session:
            self.seen = now

    # --- its requests -----------------------------------------------------------------------------------------------

    def numbered(self, header: Header, do: Callable[[], Answer]) -> Answer:
        """Do a request of the run, or give the answer that it had; `StepError` where it is neither the last one nor the next.

        What goes wrong once it has begun is its answer, too: a half may have moved by then.
        """
        run, number, session = told(header, "run", str), told(header, "number", int), told(header, "session", str)
        if run != self.run or session != self.session:
            raise StepError(
                f"the client is at step {number} of run {run[:8]!r}; this server has "
                + (f"run {self.run[:8]} of another session" if self.run else "no run")
                + ": it was started anew, or another client came. Restore both sides from a checkpoint of one step"
            )
        if number == self.at and self.answer is not None:
            return self.answer
        if number != self.at + 1:
            raise StepError(
                f"the client asks for step {number}, this server has done {self.at}. Restore both sides from a "
                "checkpoint of one step"
            )
        try:
            header, bodies = do()
            found: Answer = {**header, "ok": True}, bodies
        except _NotBegun as error:
            raise error.cause from None
        except Exception as error:
            found = {**failure(error), "done": True}, []
        self.at, self.answer, self.pristine = number, found, False
        return found

    def train(self, header: Header, bodies: Bodies, device: str, max_bytes: int) -> Answer:
        """Run the suffix, its loss and its backward pass, and step: one request of the run."""
        with _before():
            if len(bodies) != 2:
                raise PayloadError(f"a training step comes with 2 bodies; found {len(bodies)}")
            boundary = BoundaryPayload.from_bytes(bodies[0], device=device, max_bytes=max_bytes)
            clear, step = told(header, "clear", bool), told(header, "step", bool)
            given = unpack(bodies[1], max_bytes=max_bytes)
            if type(given) is not dict or given.keys() != {"targets", "generators"}:
                raise PayloadError("a training step has targets and the states of generators; refuse the sender")
            if self.loss_fn is None:
                raise SpecError(
                    "this server was started without a loss: ariadne serve --loss cross_entropy, or serve(loss_fn=…)"
                )
            trained = [p for p in self.half.parameters() if p.requires_grad]
            if self.optimizer is None and trained:
                raise SpecError(
                    f"this server was started without an optimizer, and its half has {len(trained)} parameter(s) to train: "
                    "ariadne serve --optimizer sgd:lr=0.1, or serve(optimizer=…)"
                )
            if self.awaits:
                raise StepError(
                    f"step {self.at} awaits the sums of shared parameters: call remote.backward_prefix(boundary, …)"
                )
            targets = given["targets"] if self.labels is None else self.labels(given["targets"])
            targets = _moved(targets, self.half)
            set_generators(given["generators"])
        if clear:
            self._clear()
        for p in self.shared.values():
            p.grad = None
        loss, gradients = self.half.train_suffix(boundary, targets, loss_fn=self.loss_fn)
        shares = {name: p.grad for name, p in self.shared.items()}
        for p in self.shared.values():
            p.grad = None
        self.awaits, self.open = bool(self.shared) and step, not step
        if step and not self.awaits:
            self._step()
        states = generators([*given["generators"]])
        found = {"loss": loss, "gradients": gradients, "shares": shares, "generators": states}
        return {"awaits": self.awaits}, [pack(found)]

    def run_once(self, header: Header, bodies: Bodies, run: Callable[[Header, Bodies], Answer]) -> Answer:
        """Run a suffix that changes state, as a request of the run."""
        with _before():
            if self.awaits or self.open:
                raise StepError(f"a training step is open at {self.at}: end it before anything else is run")
        return run(header, bodies)

    def step(self, bodies: Bodies, max_bytes: int) -> Answer:
        """Take the whole gradients of shared parameters, and step."""
        with _before():
            if len(bodies) != 1:
                raise PayloadError(f"the sums of shared parameters come as 1 body; found {len(bodies)}")
            given = unpack(bodies[0], max_bytes=max_bytes)
            if type(given) is not dict or given.keys() != self.shared.keys():
                raise PayloadError("the sums are not those of the parameters that both sides share; refuse the sender")
            for name, p in self.shared.items():
                t = given[name]
                if t is not None and not (isinstance(t, torch.Tensor) and (t.dtype, t.shape) == (p.dtype, p.shape)):
                    raise PayloadError(f"the sum of {name!r} is no gradient of it; refuse the sender")
        for name, p in self.shared.items():
            p.grad = None if given[name] is None else given[name].to(p.device)
        self._step()
        return {}, []

    def _clear(self) -> None:
        for p in self.half.parameters():
            p.grad = None

    def _step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
        self.awaits, self.open = False, False

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, header: Header) -> None:
        """Write a checkpoint of the step that the client is at."""
        run, at, session = told(header, "run", str), told(header, "at", int), told(header, "session", str)
        if (run, session, at) != (self.run, self.session, self.at) or self.awaits or self.open:
            raise StepError(
                f"a checkpoint of step {at} of run {run[:8]!r} was asked for; this server is at step {self.at} of "
                f"{self.run[:8] or 'no run'}"
                + (", and has gradients that no step has used" if self.awaits or self.open else "")
            )
        if self.folder is None:
            raise CheckpointError(
                "this server was started without a folder for checkpoints: ariadne serve --checkpoints DIR"
            )
        self._save(at)
        self._sweep(at)

    def _save(self, at: int) -> None:
        path = self._start() if at == 0 else self._path(self.run, at)
        assert path is not None
        about = {"run": self.run, "at": at, "side": "suffix", "origin": self.half.origin}
        checkpoint.write(path, self.half, self.optimizer, about, {})

    def _sweep(self, at: int) -> None:
        """Keep this checkpoint and the one before, and the start."""
        mine = sorted(self._folder.glob(f"{self.run}-*.safetensors"))
        before = [p for p in mine if p < self._path(self.run, at)]
        keep = {self._path(self.run, at), *before[-(KEPT - 1) :]}
        for path in mine:
            if path not in keep:
                path.unlink()

    @property
    def _folder(self) -> Path:
        assert self.folder is not None
        return self.folder

    def _path(self, run: str, at: int) -> Path:
        return self._folder / f"{run}-{at:012d}.safetensors"

    def _start(self) -> Path | None:
        return None if self.folder is None else self.folder / "start.safetensors"


class _NotBegun(Exception):
    """Something was wrong before a request of the run had begun: it may come again, mended."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextmanager
def _before() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _NotBegun(error) from error


def _moved(targets: Any, half: Half) -> Any:
    """Targets where the half is."""
    device = next((t.device for t in half.parameters()), torch.device("cpu"))
    return tree.map_leaves(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, targets)


def now() -> float:
    """Seconds, by a clock that never jumps."""
    return time.monotonic()
