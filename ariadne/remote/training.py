"""A training run over both processes that survives either: it goes on from checkpoints that belong to one step."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ariadne.errors import SpecError, StepError
from ariadne.half import Half
from ariadne.remote import checkpoint
from ariadne.remote.client import Remote
from ariadne.remote.edge import Edge
from ariadne.remote.message import generators, set_generators

Batch = Callable[[int], tuple[Any, Any]]


class Training:
    """A training run of what is here and the part of a `Remote`, with checkpoints of both at one step.

    `side`: the prefix; or an `Edge`, with its `loss_fn`: then the first and the last part are kept here, the middle one there.
    `optimizer`: that of this side, or None where it has nothing to train. `checkpoints`: a folder; `every`: after how many steps
    one is written, on the server first and then here. Made again over the same folder, in another process perhaps, it goes
    on from the last one that both have, to the same bits: if `batch` gives the same for the same step, and torch alone draws.
    The server needs a folder of its own. Without, a run is not resumed. `scaler`, `scheduler`, `max_norm` and `norm_type` are
    those of `Remote.step`, for each step.

    >>> training = ariadne.remote.Training(edge, remote, torch.optim.SGD(edge.parameters(), lr=0.1), checkpoints="run")
    >>> losses = dict(training.run(1000, lambda step: (images[step], labels[step])))
    """

    def __init__(
        self,
        side: Half | Edge,
        remote: Remote,
        optimizer: torch.optim.Optimizer | None,
        *,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        checkpoints: str | os.PathLike[str] | None = None,
        every: int = 100,
        scaler: Any = None,
        scheduler: Any = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> None:
        self._train: Callable[..., torch.Tensor] = remote.train_step
        if isinstance(side, Edge):
            if side.remote is not remote or loss_fn is None:
                raise SpecError("the loss of an Edge is taken here: Training(edge, edge.remote, optimizer, loss_fn=…)")
            self._train = partial(side.train_step, loss_fn=loss_fn)
        elif loss_fn is not None:
            raise SpecError("with a prefix here the loss is the server's: ariadne serve --loss cross_entropy")
        else:
            remote.half = side
        self._how: dict[str, Any] = {
            "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler, "max_norm": max_norm, "norm_type": norm_type,
        }  # fmt: skip
        self._beside = {n: self._how[n] for n in ("scaler", "scheduler") if self._how[n] is not None}
        self.side, self.remote, self.optimizer, self.every = side, remote, optimizer, every
        self.step = 0  # how many steps were done
        self._kept = 0  # where the run was at the newest checkpoint that is here
        self._folder = None if checkpoints is None else Path(checkpoints)
        self._begun = self._clean = False
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            checkpoint.swept(self._folder)

    def run(self, steps: int, batch: Batch) -> Iterator[tuple[int, torch.Tensor]]:
        """Train until so many steps were done in all; gives the number of each step and its loss.

        `batch(step)` gives the inputs, a tensor or a tuple, and the targets. Where the server was started anew, steps after the
        last checkpoint are done again, and come again with the same losses. Raises `DeadlineError` where the server stays away
        longer than the remote's timeout, and `CheckpointError` where a disk is full: call `run` again to go on.
        """
        if not self._begun or not self._clean:
            self._take_up()
        while self.step < steps:
            inputs, targets = batch(self.step)
            self._clean = False
            try:
                args = inputs if isinstance(inputs, tuple) else (inputs,)
                loss = self._train(*args, targets=targets, **self._how)
            except StepError:
                self._take_up()
                continue
            self._clean = True
            self.step += 1
            if self._folder is not None and (self.step % self.every == 0 or self.step == steps):
                try:
                    self.save()
                except StepError:
                    self._take_up()
                    continue
            yield self.step - 1, loss

    def save(self) -> None:
        """Write a checkpoint of this step: on the server, then here; the one before goes when this one is there."""
        folder = self._folder
        assert folder is not None, "a checkpoint needs a folder"
        self.remote.save(kept=self._kept)
        self._write(folder, self.remote.run, self.remote.at)
        for path in sorted(folder.glob("*.safetensors"))[:-1]:
            path.unlink()

    def _write(self, folder: Path, run: str, at: int) -> None:
        about = {"run": run, "at": at, "step": self.step, "side": "prefix", "origin": self.side.origin}
        states = generators([self.remote.device])
        checkpoint.write(
            folder / f"{self.step:012d}.safetensors", self.side, self.optimizer, about, states, self._beside
        )
        self._kept = at

    def _take_up(self) -> None:
        """Go to the last checkpoint, on both sides; or begin."""
        self._begun = False
        if isinstance(self.side, Edge):
            self.side.forget()
        found = sorted(self._folder.glob("*.safetensors")) if self._folder is not None else []
        if found:
            about, states = checkpoint.restore(found[-1], self.side, self.optimizer, self._beside)
            if "scaler" in self._beside:
                self._beside["scaler"]._per_optimizer_states.clear()  # of a step that was begun
            self.step, self._kept = int(about["step"]), int(about["at"])
            self.remote.begin(about["run"], about["at"])
            set_generators(states)
        elif self.step or not self._folder:
            if self.step or self.remote.run:
                raise StepError(
                    "the server was started anew, and this run has no checkpoints: pass checkpoints= on both sides"
                )
            self.remote.begin()
        else:
            run = uuid.uuid4().hex
            self._write(self._folder, run, 0)
            self.remote.begin(run)
        self._begun = self._clean = True
