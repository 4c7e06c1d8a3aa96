"""Requests that change the server, each with a number; and the step that uses what was added up, on both sides at once."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ariadne.errors import AriadneError, DeadlineError, SpecError, StepError
from ariadne.half import Half
from ariadne.remote.calls import MOST_REPLY, Calls, Path_, Pending, Told
from ariadne.remote.message import Bodies, Header, pack, unpack
from ariadne.remote.together import (
    clip,
    norms_of,
    read_norms,
    refuse_fused,
    refuse_other_optimizer,
    refuse_overlap,
    refuse_unplaced,
    total_norm,
    unscaled,
)
from ariadne.remote.together import step as step_by


@dataclass
class Asked:
    """A request of the run that has no answer yet: what it is of, and what was sent."""

    of: Any
    header: Header
    bodies: Bodies
    pending: Pending | None = None  # None where its time had passed, until it is sent again


class Steps(Calls):
    """A line to a server, with the training run on it. `run` is its name, `at` how many of its requests were answered."""

    def __init__(
        self, address: str, half: Half | None, timeout: float | None, key: Path_ | None, server_key: Path_ | None
    ) -> None:
        super().__init__(address, half, timeout, key, server_key)
        self.run, self.at = "", 0
        self.norm: torch.Tensor | None = None  # of all gradients, at the last step that clipped
        self._clear_run()

    def _clear_run(self) -> None:
        self._asked: dict[int, Asked] = {}  # by number, the requests after `at`
        self._open: Any = None  # the boundary whose shared gradients the server awaits
        self._scheduled = False  # whether the step that it waits with moves the rate
        self._accumulated = False
        self._told: Any = None  # what the server's optimizer steps shared parameters by, told since the last step
        self._behind: list[Any] = []  # training boundaries in flight, until they are walked back from
        self._ready: tuple[Any, Any, Bodies] | None = None  # a step that was measured: both sides clip and step by this

    # --- requests with numbers --------------------------------------------------------------------------------------

    def _number(self, what: Any, header: Header, bodies: Bodies, until: float, *, behind: bool = False) -> int:
        """Send the next request of the run, `behind` others that have no answer perhaps; or again the one that is of `what`."""
        for number, asked in self._asked.items():
            if asked.of is what:
                if asked.pending is None:
                    self._send_asked(asked, until)
                return number
        if self._asked and not behind:
            raise StepError(
                f"step {self.at + 1} has no answer yet, and another one was asked for. Call again with its boundary, or "
                "restore both sides from a checkpoint"
            )
        number = max(self._asked, default=self.at) + 1
        have = min(self._asked, default=number) - 1
        asked = Asked(what, {**header, "run": self.run, "number": number, "have": have}, bodies)
        self._asked[number] = asked
        try:
            self._send_asked(asked, until)
        except DeadlineError:
            raise
        except BaseException:
            del self._asked[number]  # too large to be sent: nothing was
            raise
        return number

    def _send_asked(self, asked: Asked, until: float) -> None:
        pending = self._make(asked.header, asked.bodies, until)
        self._send(pending)
        asked.pending = pending

    def _answer(self, number: int, until: float) -> tuple[Header, Bodies]:
        """Wait for the answer to a request that has this number."""
        asked = self._asked[number]
        if asked.pending is None:
            self._send_asked(asked, until)
        assert asked.pending is not None
        try:
            found = self._wait(asked.pending, until)
        except Told as told:
            del self._asked[number]
            if told.done:
                self.at = max(self.at, number)
            raise told.error from None
        except DeadlineError:
            asked.pending = None
            raise
        del self._asked[number]
        self.at = max(self.at, number)
        return found

    def _numbered(self, what: Any, header: Header, bodies: Bodies, until: float) -> tuple[Header, Bodies]:
        return self._answer(self._number(what, header, bodies, until), until)

    # --- the run ----------------------------------------------------------------------------------------------------

    def begin(self, run: str = "", at: int = 0, *, timeout: float | None = None) -> None:
        """Begin a training run, or go on with one from step `at`, of which the server has a checkpoint.

        Raises `StepError` where it has none, `BusyError` where it trains another client's run.
        """
        with self._lock:
            self._warn_of_threads()
            run = run or uuid.uuid4().hex
            origin = "" if self.half is None else self.half.origin
            self._ask({"op": "begin", "run": run, "at": at, "origin": origin}, (), self._until(timeout))
            self.run, self.at = run, at
            self._clear_run()

    def save(self, *, kept: int | None = None, timeout: float | None = None) -> None:
        """Have the server write a checkpoint of the step that the run is at; `CheckpointError` where it can't.

        `kept`: where the run was at the newest checkpoint that is here, of which the server then keeps its own.
        """
        with self._lock:
            if self._asked:
                raise StepError(f"{len(self._asked)} requests of the run have no answer yet: wait for them first")
            told = {"op": "save", "run": self.run, "at": self.at} | ({} if kept is None else {"kept": kept})
            self._ask(told, (), self._until(timeout))

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

    def _refuse_drift(self, optimizer: torch.optim.Optimizer | None, scheduler: Any = None) -> None:
        """Raise `TrainingError` where both sides would step their copies of one parameter in two ways."""
        if optimizer is not None and (shared := self._shared()):
            refuse_other_optimizer(shared, optimizer, self.trains, scheduler, self._told)

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scaler: Any = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scheduler: Any = None,
        timeout: float | None = None,
    ) -> torch.Tensor | None:
        """Step by the gradients that were added up with `accumulate`: the server's optimizer, and `optimizer`, that of this side.

        `scaler`: the `torch.amp.GradScaler` that `train_suffix` had. Where a gradient of either side is not finite, both skip; its
        scale is updated once. With `max_norm` all gradients of both sides are clipped by one norm, as
        `torch.nn.utils.clip_grad_norm_` does with those of the whole model; it is returned. `scheduler`, that of this side's
        rate, and the server's own step after. Raises `StepError` where no gradients were added up; call it again after
        `DeadlineError`.

        >>> loss, gradients = remote.train_suffix(boundary, y, accumulate=True, scaler=scaler)
        >>> remote.backward_prefix(boundary, gradients)
        >>> remote.step(optimizer, scaler=scaler, max_norm=1.0)
        """
        scaler = enabled(scaler)
        with self._lock:
            self._refuse_open()
            self._refuse_drift(optimizer, scheduler)
            if self._behind:
                raise StepError(
                    f"{len(self._behind)} training boundaries were sent and not walked back from: call remote.backward_prefix for "
                    "each before the step"
                )
            if not self._accumulated:
                raise StepError(
                    "no gradients were added up since the last step: call train_suffix(..., accumulate=True) first"
                )
            how = None if scaler is None else id(scaler), max_norm, norm_type
            if self._ready is None:
                self._ready = how, *self._measured(optimizer, scaler, max_norm, norm_type, self._until(timeout))
            before, (found, total), bodies = self._ready
            if before != how:
                raise StepError(
                    "this step was begun with another scaler or norm, by which gradients were unscaled and clipped: call it again "
                    "with the same"
                )
            header = {"op": "step", "schedule": scheduler is not None}
            try:
                self._numbered(_STEP, header, bodies, self._until(timeout))
            except DeadlineError:
                raise
            except AriadneError:
                if scaler is None and max_norm is None:
                    self._ready = None  # nothing was unscaled or clipped: it may be asked for in another way
                raise
            self._ready, self._accumulated, self._told = None, False, None
            step_by(scaler, optimizer, found)
            if scaler is not None:
                scaler.update()
            if scheduler is not None:
                scheduler.step()
            self.norm = total
            return self.norm

    def schedule(self, scheduler: Any = None, metric: float | None = None, *, timeout: float | None = None) -> None:
        """Step the server's scheduler and `scheduler`, that of this side, as after an epoch; `ReduceLROnPlateau` by a metric."""
        given = () if metric is None else (float(metric),)
        with self._lock:
            self._begin_if_none()
            self._numbered(_SCHEDULE, {"op": "schedule"}, (pack(given),), self._until(timeout))
            if scheduler is not None:
                scheduler.step(*given)

    def _measured(
        self, optimizer: Any, scaler: Any, max_norm: float | None, norm_type: float, until: float
    ) -> tuple[Any, Bodies]:
        """What both sides have to know of each other's gradients; those of this side are unscaled and clipped."""
        halves, found, total = self._here(), None, None
        trained = [p for half in halves for p in half.parameters() if p.requires_grad]
        if scaler is not None and optimizer is None and trained:
            raise SpecError("a scaler unscales the gradients of an optimizer: pass that of this side's parameters too")
        if max_norm is None:
            refuse_fused(scaler, optimizer, self.trains.get("fused") is True)
        if scaler is not None:
            scaler.scale(torch.zeros((), device=self.device))  # which makes its scale a tensor
        if scaler is not None or max_norm is not None:
            for half in halves if max_norm is not None else ():
                refuse_unplaced(half)
            asked = {
                "norm_type": None if max_norm is None else float(norm_type),
                "scale": None if scaler is None else float(scaler.get_scale()),
            }
            _, bodies = self._numbered(_MEASURE, {"op": "measure"}, (pack(asked),), until)
            told = unpack(bodies[0], max_bytes=MOST_REPLY)
            found = None if scaler is None else unscaled(scaler, optimizer) + told["found"]
            if max_norm is not None:
                total = self._clipped(halves, read_norms(told["norms"], self.device), float(max_norm), float(norm_type))
        given = {
            "sums": self._sums(),
            "found": found,
            "norm": total,
            "most": None if max_norm is None else float(max_norm),
        }
        return (found, total), (pack(given),)

    def _clipped(self, halves: list[Half], norms: Any, most: float, norm_type: float) -> torch.Tensor:
        mine: Any = {}
        for half in halves:
            mine |= norms_of(half, norm_type)
        refuse_overlap(mine, norms)
        total = total_norm({**mine, **norms}, norm_type)
        clip([*{id(p): p for half in halves for p in half.parameters()}.values()], most, total)
        return total

    def _sums(self) -> dict[str, torch.Tensor | None]:
        return {n: p.grad for n, p in self._shared().items()}

    def _here(self) -> list[Half]:
        """What of the model is here."""
        return [] if self.half is None else [self.half]

    def _shared(self) -> Mapping[str, torch.nn.Parameter]:
        """The trained parameters that the server has too, with their whole gradients."""
        raise NotImplementedError


def enabled(scaler: Any) -> Any:
    """A scaler, or None for one that is switched off."""
    return scaler if scaler is not None and scaler.is_enabled() else None


_STEP, _MEASURE, _SCHEDULE = object(), object(), object()
