"""What traps 15 to 28 are held against: a model built twice, once run whole and once split."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ariadne import SplitRuntime, SplitSpec, tree
from ariadne.compare import difference
from conformance.suite.state import seed_torch
from conformance.unit.refusing import prepare_split


def seeded(shape: Sequence[int], seed: int = 1) -> torch.Tensor:
    """The same numbers at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def square_loss(output: Any, targets: Any = None) -> torch.Tensor:
    """A loss that every floating tensor of the output has a part in."""
    found = [t for t in tree.leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return torch.stack([((t.float() - 0.1) ** 2).mean() for t in found]).sum()


def state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Everything that a training step may move."""
    return {
        "parameters": {n: p.detach() for n, p in model.named_parameters()},
        "gradients": {n: p.grad for n, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "optimizer": optimizer.state_dict()["state"] if optimizer else None,
        "rng": torch.get_rng_state(),
    }


def same(whole: Any, split: Any) -> None:
    """Equal, bit for bit."""
    assert difference(whole, split) is None, difference(whole, split)


class Twins:
    """One model built twice from one seed: the first runs whole, the second split; both always do the same."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        *example: Any,
        batches: tuple[int, int] = (1, 8),
        train: bool = False,
        prepare: Callable[..., SplitRuntime] = prepare_split,
        mode: str = "generated_eager",
    ) -> None:
        seed_torch(0)
        self.whole = build().train(train)
        seed_torch(0)
        self.split = build().train(train)
        self.runtime = prepare(self.split, example, split=SplitSpec("50%", dynamic_batch=batches), mode=mode)
        self.step_whole = torch.optim.SGD(self.whole.parameters(), lr=0.002, momentum=0.9)
        self.step_split = torch.optim.SGD(self.split.parameters(), lr=0.002, momentum=0.9)

    def cuts(self) -> list[SplitRuntime]:
        """A runtime for every safe cut."""
        found = [self.runtime.resplit(c) for c in self.runtime.candidates if c.safe]
        assert found, "no cut is safe"
        return found

    def replay(self, *inputs: torch.Tensor, cuts: list[SplitRuntime] | None = None) -> None:
        """The outputs and all that moves, at every safe cut."""
        for runtime in cuts or self.cuts():
            seed_torch(5)
            with torch.no_grad():
                want = self.whole(*[t.clone() for t in inputs])
            after = state(self.whole)
            seed_torch(5)
            same(want, runtime.run_suffix(runtime.run_prefix(*[t.clone() for t in inputs])))
            same(after, state(self.split))

    def train(self, *inputs: torch.Tensor, steps: int = 2, cuts: list[SplitRuntime] | None = None) -> None:
        """The loss, and everything that a step moves, at every safe cut, over some steps."""
        for runtime in cuts or self.cuts():
            for step in range(steps):
                seed_torch(step)
                self.step_whole.zero_grad()
                loss = square_loss(self.whole(*[t.clone() for t in inputs]))
                loss.backward()
                assert torch.isfinite(loss), "training ran away, so equality means little"
                self.step_whole.step()
                after = state(self.whole, self.step_whole)
                seed_torch(step)
                self.step_split.zero_grad()
                boundary = runtime.run_training_prefix(*[t.clone() for t in inputs])
                found, gradients = runtime.train_suffix(boundary, loss_fn=square_loss)
                runtime.backward_prefix(boundary, gradients)
                self.step_split.step()
                same(loss.detach(), found)
                same(after, state(self.split, self.step_split))

    def sync(self) -> None:
        """Set the second model to the state of the first."""
        self.split.load_state_dict(self.whole.state_dict())
        self.step_split.load_state_dict(copy.deepcopy(self.step_whole.state_dict()))
        self.whole.zero_grad()
        self.split.zero_grad()

    def hold(self, *dims: int, batches: Sequence[int] = (1, 2, 3, 5)) -> Twins:
        """Replay at these batches and train at two of them."""
        for b in batches:
            self.replay(seeded((b, *dims), b))
        for b in batches[-2:]:
            self.train(seeded((b, *dims), b))
        return self


def either(act: Callable[[], None], error: type[Exception] | tuple[type[Exception], ...], *words: str) -> str:
    """`act` does as the model does, or raises this error, or one of these, with these words in it; which of the two."""
    try:
        act()
    except error as raised:
        text = str(raised)
        assert all(w in text for w in words), text
        return "refused"
    return "followed"
