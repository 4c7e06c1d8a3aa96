"""The loss on the edge: the first and the last part of a model here, the part between them on a server.

Neither inputs nor labels leave this side: what crosses are the values at two cuts, and their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ariadne.compare import same_bits
from ariadne.errors import HandshakeError, SpecError, TrainingError
from ariadne.pipeline import LoadedPart, back, load_part
from ariadne.remote.calls import Path_
from ariadne.remote.client import Remote
from ariadne.remote.facts import facts_of, hold_together
from ariadne.remote.steps import enabled


class Edge:
    """A model in three parts: `first` and `last` here, or their files, and the part between them at a `Remote`.

    The parts are those of a pipeline with two cuts, as `pipeline.save_part` writes them. Called, it gives what the model
    gives, without gradients. `train_step` equals a step of the whole model, bit for bit. Raises `HandshakeError` where the three
    are not of one model, `SpecError` for other parts than these.

    >>> edge = Edge("part0.safetensors", ariadne.connect("127.0.0.1:7077"), "part2.safetensors")
    >>> edge(torch.randn(8, 3, 224, 224)).shape
    torch.Size([8, 1000])
    """

    def __init__(self, first: LoadedPart | Path_, remote: Remote, last: LoadedPart | Path_) -> None:
        self.first, self.last = (p if isinstance(p, LoadedPart) else load_part(p) for p in (first, last))
        self.remote = remote
        found = [(self.first.index, self.first.count), (self.last.index, self.last.count)]
        if found != [(0, 3), (2, 3)]:
            raise SpecError(
                f"an edge has the parts 0 and 2 of 3; found {found[0][0]} of {found[0][1]} and {found[1][0]} of {found[1][1]}. Cut "
                "at two places: prepare_pipeline(model, inputs, boundaries=[one, two])"
            )
        self._hold()
        self._tie()
        halves = [p.side for p in (self.first, self.last)]
        there = {n: p for n, p in sorted(self.first.tied.items()) if 1 in self.first.shared[n] and p.requires_grad}
        remote.bind(halves, there)
        self._scaler: Any = None  # of the gradients that were added up

    def _hold(self) -> None:
        """Hold the three parts against each other."""
        mine, theirs, remote = facts_of(self.first.side), self.remote.facts, self.remote
        hold_together(mine, theirs, remote.address)
        behind = facts_of(self.last.side)["splits"]
        gives = [f"{split} of plan {signature}" for signature, (split, _) in theirs["gives"].items()]
        if not all(g in behind for g in gives):
            raise HandshakeError(
                f"the part at {remote.address} gives {', '.join(gives)}; the last part here takes {', '.join(behind)}. Save all "
                "parts of one pipeline"
            )
        if self.last.side.digest != mine["digest"]:
            raise HandshakeError(
                f"the digest of the weights differs: {mine['digest']} of the first part, {self.last.side.digest} of the last. "
                "Save all parts of one model"
            )
        apart = [n for n, users in self.first.shared.items() if users == (1, 2)]
        if apart:
            raise SpecError(
                f"{apart[0]!r} is used by the part on the server and by the last one, and not by the first, in whose process "
                "gradients are added up. Cut so that the last two uses lie in one part"
            )

    def _tie(self) -> None:
        """Parameters of the first part that the last one uses too become one tensor again."""
        ours = self.first.tied
        for name, p in self.last.tied.items():
            if name not in ours:
                continue
            if not same_bits(p, ours[name]):
                raise HandshakeError(
                    f"{name!r} is one parameter of both parts here, and has two values: save them again"
                )
            for module in self.last.side.modules():
                for key, held in module._parameters.items():
                    if held is p:
                        module._parameters[key] = ours[name]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this side, each once: for its optimizer."""
        yield from {id(p): p for part in (self.first, self.last) for p in part.parameters()}.values()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this side, each once, by its part and its name there: for checkpoints."""
        yield from {id(p): (n, p) for n, p in self._named("named_parameters")}.values()

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of this side, by their part and their name there."""
        yield from self._named("named_buffers")

    def _named(self, what: str) -> Iterator[tuple[str, Any]]:
        for name, part in (("first", self.first), ("last", self.last)):
            yield from ((f"{name}.{n}", t) for n, t in getattr(part.side, what)())

    @property
    def origin(self) -> str:
        """The digest of the weights that its parts were saved with."""
        return self.first.side.origin

    def forget(self) -> None:
        """Forget gradients that no step has used: the run goes back to a checkpoint."""
        self._scaler = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors of this side, by the model's names."""
        return {**self.first.state_dict(), **self.last.state_dict()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all three parts without gradients."""
        return self.last(self.remote.run_middle(self.first(*args, **kwargs)))

    def accumulate(
        self,
        *inputs: Any,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        targets: Any = None,
        scaler: Any = None,
        **keywords: Any,
    ) -> torch.Tensor:
        """Run forward, take `loss_fn(output, targets)` here, and walk back: gradients add up on both sides. Returns the loss.

        `step` uses them. Clear this side's with `optimizer.zero_grad()` first, as in one process. Raises `TrainingError` for a loss
        that does not depend on the output.

        >>> loss = edge.accumulate(x, targets=y, loss_fn=F.cross_entropy)
        >>> edge.step(optimizer)
        """
        scaler, remote = enabled(scaler), self.remote
        first = self.first.fly(inputs, keywords, True)
        assert first.gives is not None
        number, arrived = remote.forward_middle(first.gives)
        last = self.last.fly((arrived,), {}, True)
        with torch.enable_grad():
            loss = loss_fn(last.output, targets)
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
            raise TrainingError(
                "loss_fn must return a tensor with one element that depends on the output. Reduce it, by sum() or mean()"
            )
        root = loss if scaler is None else scaler.scale(loss)
        gradients, shares = self._back(self.last, last, root, {}, {})
        gradients, shares = remote.backward_middle(number, gradients, shares)
        self._back(self.first, first, None, gradients, shares)
        self._scaler = scaler
        return loss.detach()

    @staticmethod
    def _back(part: LoadedPart, flight: Any, loss: Any, gradients: Any, shares: Any) -> tuple[Any, Any]:
        return back(flight, loss, gradients, shares, part.tied, part.owned, [*part.parameters()], part.foreign())

    def step(self, optimizer: torch.optim.Optimizer | None = None, **how: Any) -> torch.Tensor | None:
        """Step both sides by the gradients that were added up, as `Remote.step`; the options are its own."""
        if enabled(how.get("scaler")) is not self._scaler:
            raise SpecError("step takes the scaler that accumulate had: the gradients are scaled by it")
        found = self.remote.step(optimizer, **how)
        self._scaler = None
        return found

    def train_step(
        self, *inputs: Any, loss_fn: Callable[[Any, Any], torch.Tensor], targets: Any = None,
        optimizer: torch.optim.Optimizer | None = None, scaler: Any = None, max_norm: float | None = None,
        norm_type: float = 2.0, scheduler: Any = None, **keywords: Any,
    ) -> torch.Tensor:  # fmt: skip
        """One training step of all three parts: returns the loss. It equals a step of the whole model with one optimizer.

        `optimizer` is that of `edge.parameters()`; `scaler`, `max_norm`, `norm_type` and `scheduler` are those of `Remote.step`.

        >>> loss = edge.train_step(x, targets=y, loss_fn=F.cross_entropy, optimizer=optimizer)
        """
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        loss = self.accumulate(*inputs, loss_fn=loss_fn, targets=targets, scaler=scaler, **keywords)
        self.step(optimizer, scaler=scaler, max_norm=max_norm, norm_type=norm_type, scheduler=scheduler)
        return loss

    def __repr__(self) -> str:
        return f"Edge({self.first!r}, {self.remote!r}, {self.last!r})"
