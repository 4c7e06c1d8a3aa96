"""The server's side of a training run: each numbered request is done once, in order, and its answer kept to be given again.

A run belongs to one client at a time. Its state is the half, its optimizer and `at`, the number of requests that were done.
"""

from __future__ import annotations

import math
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
from ariadne.pipeline import Flight, LoadedPart, back
from ariadne.remote import checkpoint
from ariadne.remote.facts import device_of, named_shared
from ariadne.remote.message import Bodies, Header, failure, generators, pack, set_generators, told, unpack
from ariadne.remote.plain import Loss
from ariadne.remote.together import clip, norms_of, refuse_unplaced, told_now, unscaled
from ariadne.remote.together import step as step_by

KEPT = 2  # checkpoints of a run: the last, and the one before, or that which the client says is its newest
_RUN = re.compile(r"[0-9a-f]{32}")
Answer = tuple[Header, list[Any]]


class Trained:
    """The run that a server has in hand: which, how far it is, and the answer to its last request."""

    def __init__(
        self,
        half: Half,
        part: LoadedPart | None,
        optimizer: torch.optim.Optimizer | None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        loss_fn: Loss | None,
        labels: Callable[[Any], Any] | None,
        folder: Path | None,
        lease: float,
        window: int,
    ) -> None:
        self.half, self.part, self.optimizer, self.scheduler = half, part, optimizer, scheduler
        self.loss_fn, self.labels = loss_fn, labels
        self.folder, self.lease, self.window = folder, lease, window
        tied = {} if part is None else {n: p for n, p in sorted(part.tied.items()) if p.requires_grad}
        self.shared = named_shared(half) if part is None else tied
        half.adds_shares = True  # the client sends the sum back before a step
        self.run, self.session, self.at, self.seen = "", "", 0, 0.0
        self.answers: dict[int, Answer] = {}  # to the last requests, until the client has them
        self.pristine = True  # whether the half is as it was loaded
        self._reset()
        if optimizer is not None:
            self._refuse_strangers(optimizer)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.swept(folder)

    def _reset(self) -> None:
        """Nothing is begun."""
        self.awaits = False  # the sums of shared parameters
        self.open = False  # whether gradients were added up that no step has used
        self.scaler: Any = None  # of these gradients, until a step; its scale is the client's
        self.measured = False  # whether these were unscaled, and their norms told
        self.flights: dict[int, Flight] = {}  # of a part between two cuts: what waits for its gradients

    @property
    def beside(self) -> dict[str, Any]:
        """What has a state in checkpoints beside the optimizer."""
        return {} if self.scheduler is None else {"scheduler": self.scheduler}

    @property
    def begun(self) -> bool:
        """Whether a step was begun and has not ended."""
        return self.awaits or self.open or bool(self.flights)

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
        if (self.run, self.at) != (run, at) or self.begun:
            self._go_back(run, at)
        self.run, self.session, self.at, self.seen = run, session, at, now
        self.answers.clear()
        self._reset()
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
        self.answers.clear()
        self.run = ""
        checkpoint.restore(path, self.half, self.optimizer, self.beside)
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

    def numbered(self, said: Header, do: Callable[[], Answer]) -> Answer:
        """Do a request of the run, or give the answer that it had; `StepError` where that is gone, or the request is not the next.

        What goes wrong once it has begun is its answer, too: a half may have moved by then. `have` in the header: up to where the
        client has all answers.
        """
        run, number, session = told(said, "run", str), told(said, "number", int), told(said, "session", str)
        if run != self.run or session != self.session:
            raise StepError(
                f"the client is at step {number} of run {run[:8]!r}; this server has "
                + (f"run {self.run[:8]} of another session" if self.run else "no run")
                + ": it was started anew, or another client came. Restore both sides from a checkpoint of one step"
            )
        if number in self.answers:
            return self.answers[number]
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
        have = max(told(said, "have", int, number - 1), number - self.window)
        self.answers = {n: a for n, a in self.answers.items() if n > have} | {number: found}
        self.at, self.pristine = number, False
        return found

    def train(self, header: Header, bodies: Bodies, device: str, max_bytes: int) -> Answer:
        """Run the suffix, its loss and its backward pass, and step if that was asked for: one request of the run."""
        with _before():
            boundary, given = self._arrived(bodies, {"targets", "generators", "scale"}, device, max_bytes)
            clear, step, schedule = (told(header, key, bool) for key in ("clear", "step", "schedule"))
            if self.part is not None:
                raise SpecError(
                    "this server has a part between two cuts: the loss is taken at the edge, by ariadne.remote.Edge"
                )
            if self.loss_fn is None:
                raise SpecError(
                    "this server was started without a loss: ariadne serve --loss cross_entropy, or serve(loss_fn=…)"
                )
            self._refuse_unready(schedule)
            scaler = self._scaling(given["scale"], clear, step)
            targets = given["targets"] if self.labels is None else self.labels(given["targets"])
            targets = _moved(targets, self.half)
            before = self._set(given["generators"])
        if clear:
            self._clear()
        self.scaler = scaler
        with self._apart() as shares:
            loss, gradients = self.half.train_suffix(boundary, targets, loss_fn=self.loss_fn, scaler=scaler)
        self._after(step, schedule)
        states = generators([*before])
        found = {
            "loss": loss,
            "gradients": gradients,
            "shares": shares,
            "generators": states,
            "drew": any(not torch.equal(states[k], t) for k, t in before.items()),
        }
        return {"awaits": self.awaits, **told_now(self.optimizer, self.shared)}, [pack(found)]

    def forward(self, header: Header, bodies: Bodies, device: str, max_bytes: int) -> Answer:
        """Run a part between two cuts with its graph, which waits for the gradients: one request of the run."""
        with _before():
            part = self._between()
            boundary, given = self._arrived(bodies, {"generators"}, device, max_bytes)
            self._refuse_unready(False)
            before = self._set(given["generators"])
        flight = part.fly((boundary,), {}, True)
        assert flight.gives is not None
        self.flights[told(header, "number", int)] = flight
        return {}, [flight.gives.to_bytes(), pack(generators([*before]))]

    def back(self, header: Header, bodies: Bodies, device: str, max_bytes: int) -> Answer:
        """Walk back through a part between two cuts, from the gradients of what it gave: one request of the run."""
        with _before():
            part = self._between()
            if len(bodies) != 1:
                raise PayloadError(f"gradients come as 1 body; found {len(bodies)}")
            of, clear, step, schedule = (
                told(header, "of", int),
                *(told(header, key, bool) for key in ("clear", "step", "schedule")),
            )
            given = unpack(bodies[0], max_bytes=max_bytes)
            if type(given) is not dict or given.keys() != {"gradients", "shares"} or of not in self.flights:
                raise PayloadError("these are no gradients of a boundary that waits for them; refuse the sender")
            self._refuse_unready(schedule)
            gradients, shares = (_moved(given[key], self.half) for key in ("gradients", "shares"))
            if not all(_is_gradients(each) for each in (gradients, shares)):
                raise PayloadError("these are no gradients by name; refuse the sender")
        if clear:
            self._clear()
        found, onward = back(
            self.flights.pop(of), None, gradients, shares, part.tied, part.owned, [*part.parameters()], part.foreign()
        )
        self._after(step, schedule)
        told_of = told_now(self.optimizer, self.shared)
        return {**told_of, "awaits": self.awaits}, [pack({"gradients": found, "shares": onward})]

    def _arrived(
        self, bodies: Bodies, keys: set[str], device: str, max_bytes: int
    ) -> tuple[BoundaryPayload, dict[str, Any]]:
        if len(bodies) != 2:
            raise PayloadError(f"a training step comes with 2 bodies; found {len(bodies)}")
        boundary = BoundaryPayload.from_bytes(bodies[0], device=device, max_bytes=max_bytes)
        given = unpack(bodies[1], max_bytes=max_bytes)
        if type(given) is not dict or given.keys() != keys:
            raise PayloadError(f"a training step has {', '.join(sorted(keys))} beside its boundary; refuse the sender")
        return boundary, given

    def _between(self) -> LoadedPart:
        if self.part is None:
            raise SpecError("this server has the last part of a model: its loss is here, call train_suffix")
        return self.part

    def _set(self, states: Any) -> dict[str, torch.Tensor]:
        """Put the generators where the client has them; None leaves them where the request before left them."""
        if states is not None:
            set_generators(states)
        return generators([device_of(self.half)] if states is None else [*states])

    def _refuse_unready(self, schedule: bool) -> None:
        trained = [p for p in self.half.parameters() if p.requires_grad]
        if self.optimizer is None and trained:
            raise SpecError(
                f"this server was started without an optimizer, and its half has {len(trained)} parameter(s) to train: "
                "ariadne serve --optimizer sgd:lr=0.1, or serve(optimizer=…)"
            )
        if schedule:
            self._refuse_unscheduled()
        if self.awaits:
            raise StepError(
                f"step {self.at} awaits the sums of shared parameters: call remote.backward_prefix(boundary, …)"
            )
        if self.measured:
            raise StepError("the gradients of this step were unscaled: end it with remote.step before others are added")

    def _scaling(self, scale: Any, clear: bool, step: bool) -> Any:
        """A scaler with the client's scale, for all gradients of one step."""
        if scale is None:
            if self.scaler is not None and not clear:
                raise StepError(
                    "gradients that were scaled, and some that were not, would be added up: scale all of a step"
                )
            return None
        if type(scale) is not float or not math.isfinite(scale) or scale <= 0:
            raise PayloadError("the scale of a loss is no number; refuse the sender")
        if step:
            raise PayloadError(
                "a scaled step comes in two: whether it is skipped hangs on both sides; refuse the sender"
            )
        if self.scaler is None or clear:
            return torch.amp.GradScaler(device_of(self.half).partition(":")[0], init_scale=scale)
        if self.scaler.get_scale() != scale:
            raise StepError(
                f"the scale was {self.scaler.get_scale()} and is {scale} now, within one step: call scaler.update() only after it"
            )
        return self.scaler

    @contextmanager
    def _apart(self) -> Iterator[dict[str, torch.Tensor | None]]:
        """What a walk back gives shared parameters, which goes to the client, and nothing of it is left here."""
        shares: dict[str, torch.Tensor | None] = {}
        for p in self.shared.values():
            p.grad = None
        yield shares
        shares |= {name: p.grad for name, p in self.shared.items()}
        for p in self.shared.values():
            p.grad = None

    def _after(self, step: bool, schedule: bool) -> None:
        self.awaits, self.open = bool(self.shared) and step, not step
        if step and not self.awaits:
            self._step(None, schedule)

    def run_once(self, header: Header, bodies: Bodies, run: Callable[[Header, Bodies], Answer]) -> Answer:
        """Run a suffix that changes state, as a request of the run."""
        with _before():
            if self.begun:
                raise StepError(f"a training step is open at {self.at}: end it before anything else is run")
        return run(header, bodies)

    def measure(self, bodies: Bodies, max_bytes: int) -> Answer:
        """Unscale the gradients that were added up; tells whether all are finite, and the norm of each."""
        with _before():
            given = unpack(bodies[0], max_bytes=max_bytes) if len(bodies) == 1 else None
            if type(given) is not dict or given.keys() != {"norm_type", "scale"}:
                raise PayloadError("a step is measured by the type of a norm, and the scale; refuse the sender")
            if type(given["norm_type"]) not in (float, type(None)):
                raise PayloadError("the type of a norm is no number; refuse the sender")
            if not self.open or self.measured or self.flights:
                raise StepError("no gradients wait to be measured: train_suffix(..., accumulate=True) adds some up")
            scaler = self._scaling(given["scale"], False, False)
            if given["norm_type"] is not None:
                refuse_unplaced(self.half)
            if scaler is not None:
                scaler.scale(torch.zeros((), device=device_of(self.half)))
        self.scaler, self.measured = scaler, True
        found = unscaled(self.scaler, self.optimizer)
        norms = {} if given["norm_type"] is None else norms_of(self.half, given["norm_type"])
        return {}, [pack({"found": found, "norms": norms})]

    def step(self, header: Header, bodies: Bodies, max_bytes: int) -> Answer:
        """Take the whole gradients of shared parameters, clip by the norm of all if there is one, and step."""
        with _before():
            if len(bodies) != 1:
                raise PayloadError(f"the sums of shared parameters come as 1 body; found {len(bodies)}")
            schedule = told(header, "schedule", bool)
            given = unpack(bodies[0], max_bytes=max_bytes)
            if type(given) is not dict or given.keys() != {"sums", "found", "norm", "most"}:
                raise PayloadError("what a step is taken by is malformed; refuse the sender")
            sums, found, norm, most = (given[key] for key in ("sums", "found", "norm", "most"))
            if type(sums) is not dict or sums.keys() != self.shared.keys():
                raise PayloadError("the sums are not those of the parameters that both sides share; refuse the sender")
            for name, p in self.shared.items():
                t = sums[name]
                if t is not None and not (isinstance(t, torch.Tensor) and (t.dtype, t.shape) == (p.dtype, p.shape)):
                    raise PayloadError(f"the sum of {name!r} is no gradient of it; refuse the sender")
            scalars = [t for t in (found, norm) if t is not None]
            if not all(isinstance(t, torch.Tensor) and t.dim() == 0 for t in scalars) or (norm is None) != (
                most is None
            ):
                raise PayloadError("what a step is taken by is malformed; refuse the sender")
            if type(most) not in (float, type(None)):
                raise PayloadError("the most of a norm is no number; refuse the sender")
            if self.flights:
                raise StepError(f"{len(self.flights)} boundaries wait for their gradients: walk back from them first")
            if self.scaler is not None and not self.measured:
                raise StepError("these gradients are scaled: pass scaler= to remote.step, as to train_suffix")
            if schedule:
                self._refuse_unscheduled()
        if norm is not None:
            clip([*self.half.parameters()], most, norm.to(device_of(self.half)))
        for name, p in self.shared.items():
            p.grad = None if sums[name] is None else sums[name].to(p.device)
        self._step(found, schedule)
        return {}, []

    def schedule(self, bodies: Bodies, max_bytes: int) -> Answer:
        """Step the scheduler, by a metric perhaps."""
        with _before():
            metric = unpack(bodies[0], max_bytes=max_bytes) if len(bodies) == 1 else ()
            if type(metric) is not tuple or len(metric) > 1 or not all(type(m) in (int, float) for m in metric):
                raise PayloadError("a scheduler steps by a number, or by nothing; refuse the sender")
            self._refuse_unscheduled()
            if self.begun:
                raise StepError("a training step is open: end it before the rate changes")
        if self.scheduler is not None:
            self.scheduler.step(*metric)
        return {}, []

    def _refuse_unscheduled(self) -> None:
        if self.scheduler is None and self.optimizer is not None:
            raise SpecError(
                "this server was started without a scheduler, and its optimizer would keep its rate: ariadne serve "
                "--scheduler steplr:step_size=30, or serve(scheduler=…)"
            )

    def _clear(self) -> None:
        for p in self.half.parameters():
            p.grad = None

    def _step(self, found: torch.Tensor | None, schedule: bool) -> None:
        step_by(self.scaler, self.optimizer, found)
        if schedule and self.scheduler is not None:
            self.scheduler.step()
        self._reset()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, header: Header) -> None:
        """Write a checkpoint of the step that the client is at."""
        run, at, session = told(header, "run", str), told(header, "at", int), told(header, "session", str)
        kept = told(header, "kept", int, -1)
        if (run, session, at) != (self.run, self.session, self.at) or self.begun:
            raise StepError(
                f"a checkpoint of step {at} of run {run[:8]!r} was asked for; this server is at step {self.at} of "
                f"{self.run[:8] or 'no run'}" + (", and has gradients that no step has used" if self.begun else "")
            )
        if self.folder is None:
            raise CheckpointError(
                "this server was started without a folder for checkpoints: ariadne serve --checkpoints DIR"
            )
        self._save(at)
        self._sweep(at, kept)

    def _save(self, at: int) -> None:
        path = self._start() if at == 0 else self._path(self.run, at)
        assert path is not None
        about = {"run": self.run, "at": at, "side": "suffix", "origin": self.half.origin}
        checkpoint.write(path, self.half, self.optimizer, about, {}, self.beside)

    def _sweep(self, at: int, kept: int) -> None:
        """Keep this checkpoint, that of the client's newest, or where it says none the one before, and the start."""
        mine = sorted(self._folder.glob(f"{self.run}-*.safetensors"))
        before = [p for p in mine if p < self._path(self.run, at)]
        theirs = [self._path(self.run, kept)] if 0 <= kept < 10**12 else before[-(KEPT - 1) :]
        keep = {self._path(self.run, at), *theirs}
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


def _is_gradients(found: Any) -> bool:
    """Whether it is a dict from names to tensors, or None."""
    return type(found) is dict and all(
        type(name) is str and (t is None or isinstance(t, torch.Tensor)) for name, t in found.items()
    )


def now() -> float:
    """Seconds, by a clock that never jumps."""
    return time.monotonic()
